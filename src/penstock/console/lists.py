# SPDX-License-Identifier: Apache-2.0
"""The lists of a page as JSON and CSV, read from the page itself.

An exported file therefore contains what the page shows, with the same permissions and masked values. Its
numbers and times are exact.
"""

import csv
import io
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from starlette.responses import Response

from penstock.errors import OptionInvalid
from penstock.source.csv_formulas import guard_formula

FORMATS = {"json": "application/json", "csv": "text/csv; charset=utf-8"}

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e[-+]?\d+)?")
_UNKNOWN = "–"


@dataclass
class PageList:
    """A list on a page. Each row in `rows` has one value for each of `columns`."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)


def export_lists(page: str, html: str, file_format: str, number: str) -> Response:
    """Return a file: JSON of all lists of a page, or CSV of the list with the given number. Raises
    OptionInvalid.
    """
    lists = read_lists(html)
    if file_format == "json":
        values = [
            {"list": each.title, "rows": [dict(zip(each.columns, row, strict=True)) for row in each.rows]}
            for each in lists
        ]
        content = json.dumps(values, ensure_ascii=False, indent=1)
    elif file_format != "csv":
        raise OptionInvalid(f"there is no format {file_format[:64]!r}", hint=f"Use {', '.join(FORMATS)}")
    elif not (number.isdecimal() and 1 <= int(number) <= len(lists)):
        raise OptionInvalid(f"the page has {len(lists)} lists, and no {number[:64]!r}", hint="Begin with 1")
    else:
        chosen, out = lists[int(number) - 1], io.StringIO()
        csv.writer(out).writerows(
            [[csv_cell(cell) for cell in row] for row in (chosen.columns, *chosen.rows)]
        )
        content = out.getvalue()
    name = f"{page.strip('/').replace('/', '-') or 'overview'}.{file_format}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=FORMATS[file_format], headers=headers)


def read_lists(html: str) -> list[PageList]:
    """Return the lists of a page, in order. Columns without a heading contain buttons, and are left out."""
    parser = _Lists()
    parser.feed(html)
    for each in parser.lists:
        named = [index for index, name in enumerate(each.columns) if name]
        each.rows = [[row[index] if index < len(row) else None for index in named] for row in each.rows]
        each.columns = [each.columns[index] for index in named]
    return parser.lists


def csv_cell(value: Any) -> Any:
    """Return a value as a cell that spreadsheets do not take for a formula."""
    return guard_formula(value) if isinstance(value, str) else value


class _Lists(HTMLParser):
    """Collects a page's sortable tables, each with the heading above it."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[PageList] = []
        self._heading = ""
        self._depth = 0
        self._texts: list[str] | None = None
        self._exact: str | None = None
        self._is_number = False
        self._is_head = False
        self._ignored = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "table" and (self._depth or "data-sortable" in attributes):
            self._depth += 1
            if self._depth == 1:
                self.lists.append(PageList(self._heading))
        elif tag == "svg":
            self._ignored += 1
        elif tag in ("h1", "h2") and not self._depth:
            self._texts = []
        elif self._depth == 1 and tag in ("thead", "tbody"):
            self._is_head = tag == "thead"
        elif self._depth == 1 and tag == "tr" and not self._is_head:
            self.lists[-1].rows.append([])
        elif self._depth == 1 and tag in ("th", "td"):
            self._is_number = "right" in (attributes.get("class") or "").split()
            self._texts, self._exact = [], attributes.get("data-sort") if self._is_number else None
        elif self._texts is not None and tag == "time" and attributes.get("datetime") != _UNKNOWN:
            self._exact = attributes.get("datetime")
        elif self._texts is not None and tag in ("small", "br"):
            self._texts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._depth:
            self._depth -= 1
        elif tag == "svg":
            self._ignored -= 1
        elif tag in ("h1", "h2") and not self._depth and self._texts is not None:
            self._heading, self._texts = _text(self._texts), None
        elif self._depth == 1 and tag in ("th", "td") and self._texts is not None:
            text, self._texts = _text(self._texts), None
            if self._is_head:
                self.lists[-1].columns.append(text)
            else:
                self.lists[-1].rows[-1].append(_value(text, self._exact, is_number=self._is_number))

    def handle_data(self, data: str) -> None:
        if self._texts is not None and not self._ignored:
            self._texts.append(data)


def _text(pieces: list[str]) -> str:
    return " ".join("".join(pieces).split())


def _value(text: str, exact: str | None, *, is_number: bool) -> Any:
    """Return the exact value of a cell as text or a number; None if the value is unknown."""
    if text in ("", _UNKNOWN):
        return None
    shown = exact or (text.replace(",", "") if is_number else text)
    return json.loads(shown) if is_number and _NUMBER.fullmatch(shown) else shown
