# SPDX-License-Identifier: Apache-2.0
"""Changes of rows as a file: the history of a row, or a transaction.

JSON contains the parts as the daemon sends them, with the rights and masks of the account. CSV contains a
line for each column of each change. Both formats also report parts of the log that cannot be read, and
searches that ended early.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from starlette.responses import Response

from penstock.console.changed_cells import changed_cells
from penstock.console.lists import FORMATS, csv_cell
from penstock.console.rendering import iso_text
from penstock.console.streams import Stream, StreamResponse
from penstock.errors import OptionInvalid

_COLUMNS = (
    *("time", "kind", "table", "position", "gtid", "server_id", "thread_id", "not_confirmed_by"),
    *("column", "before", "after", "is_changed", "text"),
)


def export_changes(
    name: str, parts: Iterable[Mapping[str, Any]], file_format: str, stream: Stream | None = None
) -> Response:
    """Return a file of changes, sent while the changes are read if they come from a stream.

    Raises OptionInvalid.
    """
    if file_format not in FORMATS:
        raise OptionInvalid(f"there is no format {file_format[:64]!r}", hint=f"Use {', '.join(FORMATS)}")
    return StreamResponse(
        _json_pieces(parts) if file_format == "json" else _csv_pieces(parts),
        stream,
        media_type=FORMATS[file_format],
        headers={"Content-Disposition": f'attachment; filename="{name}.{file_format}"'},
    )


def _json_pieces(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    before = "[\n"
    for part in parts:
        yield before + json.dumps(part, ensure_ascii=False)
        before = ",\n"
    yield "[]\n" if before == "[\n" else "\n]\n"


def _csv_pieces(parts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield _csv_line(_COLUMNS)
    for part in parts:
        for line in _lines_of(part):
            yield _csv_line([csv_cell(line.get(column)) for column in _COLUMNS])


def _lines_of(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a part: one line for each column of a change, and a single line for any other
    part.
    """
    if part["kind"] != "change":
        texts = (part.get(name) for name in ("text", "error", "detail", "why", "hint"))
        yield {
            "kind": part["kind"],
            "position": part.get("position") or part.get("start"),
            "text": " ".join(text for text in texts if text),
        }
        return
    change = {
        **part,
        "kind": part["change"],
        "time": iso_text(part["time_us"]),
        "not_confirmed_by": " ".join(part.get("pending", ())),
    }
    for name, before, after, is_changed in changed_cells(part):
        images = {"before": before, "after": after}
        yield {**change, **images, "column": name, "is_changed": str(is_changed).lower()}


def _csv_line(cells: Iterable[Any]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(cells)
    return out.getvalue()
