# SPDX-License-Identifier: Apache-2.0
"""Changes as lines of text: time, position, table, change type, key and changed values."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TextIO

import pyarrow
from rich.console import Console
from rich.text import Text

from penstock.cli.shared.rendering import Field, LineWriter, cell_text
from penstock.model import TableName
from penstock.source.reading import SYSTEM_COLUMNS
from penstock.source.row_history import python_rows
from penstock.source.shown_values import shown_text

_PREIMAGE, _POSTIMAGE = "update_preimage", "update_postimage"

_FIELDS = (
    Field("time", 27),
    Field("position", 27),
    Field("table", 20),
    Field("change", 6),
    Field("key and what changed", 0),
)
_STYLES = {"insert": "green", "update": "yellow", "delete": "red"}


@dataclass(frozen=True)
class ChangeLine:
    """One change, as a line of output. Sort changes by `order` to get them in log order."""

    order: tuple[int, int]
    time: datetime
    position: str
    table: TableName
    kind: str
    values: str


def lines_of(rows: pyarrow.RecordBatch, key: Sequence[str]) -> Iterator[ChangeLine]:
    """Yield the changes in the rows of one table; `key` holds the table's primary key columns.

    The two images of an update form one change. If only one image was requested, the image alone forms a
    change.
    """
    before: dict[str, Any] | None = None
    for row in python_rows(rows):
        if before is not None and row["_change_type"] != _POSTIMAGE:
            yield _line(before, "update", _shown(before, key))
            before = None
        if row["_change_type"] == _PREIMAGE:
            before = row
        elif row["_change_type"] == _POSTIMAGE:
            yield _line(row, "update", _shown(row, key, before))
            before = None
        else:
            yield _line(row, row["_change_type"], _shown(row, key))
    if before is not None:
        yield _line(before, "update", _shown(before, key))


class ChangeWriter:
    """Writes changes as lines under a heading. On a terminal, the lines are colored."""

    def __init__(self, out: TextIO) -> None:
        self._plain = LineWriter(out, _FIELDS)
        self._console = Console(file=out, highlight=False, soft_wrap=True) if out.isatty() else None

    def write(self, lines: Iterable[ChangeLine]) -> None:
        """Write lines."""
        for line in lines:
            cells = (line.time, line.position, line.table, line.kind, line.values)
            if self._console is None:
                self._plain.write(cells)
                continue
            texts = [cell_text(cell).ljust(field.width) for cell, field in zip(cells, _FIELDS, strict=True)]
            styles = ("dim", "dim", "bold", _STYLES.get(line.kind, ""), "")
            parts = [(text + "  ", style) for text, style in zip(texts, styles, strict=True)]
            self._console.print(Text.assemble(*parts))


def _line(row: dict[str, Any], kind: str, values: str) -> ChangeLine:
    metadata = row["_metadata"]
    return ChangeLine(
        (row["_commit_version"], metadata["row"]),
        row["_commit_timestamp"],
        f"{metadata['file']}:{metadata['offset']}",
        TableName(metadata["database"], metadata["table"]),
        kind,
        values,
    )


def _shown(row: dict[str, Any], key: Sequence[str], before: dict[str, Any] | None = None) -> str:
    """Return the key values, then all other values; for an update, only the values that differ."""
    texts = []
    other_names = [name for name in row if name not in key and name not in SYSTEM_COLUMNS]
    for name in (*(name for name in key if name in row), *other_names):
        if before is not None and before[name] != row[name]:
            texts.append(f"{name}={_text(before[name])}→{_text(row[name])}")
        elif before is None or name in key:
            texts.append(f"{name}={_text(row[name])}")
    return ", ".join(texts)


def _text(value: Any) -> str:
    return cell_text(shown_text(value) if value is None or isinstance(value, str) else value)
