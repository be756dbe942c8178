# SPDX-License-Identifier: Apache-2.0
"""Writes a table's rows as of a point in time to a file: JSON lines, CSV or Parquet.

Each row has three additional columns: `_position` and `_time` of the change from which the row is known, and
`_missing`, which lists the columns that the log does not contain. If the table already has a column with such
a name, the additional column gets another underscore, as in `__time`.

CSV follows RFC 4180: a value with a comma, a quote or a line break is in quotes, and lines end with CRLF.
NULL is \\N and a missing value is empty, both without quotes; the texts \\N and "" are in quotes. A string
that a spreadsheet would interpret as a formula is prefixed with an apostrophe, see `guard_formula`. JSON
lines leave a missing column out. In Parquet NULL and missing values are null.
"""

import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow
import pyarrow.parquet

from penstock.source.csv_formulas import guard_formula
from penstock.source.row_history import plain_value
from penstock.source.table_as_of import RowAsOf

FORMATS = {"jsonl": "application/x-ndjson", "csv": "text/csv", "parquet": "application/vnd.apache.parquet"}

_POSITION, _TIME, _MISSING = "_position", "_time", "_missing"
_NULL = "\\N"
_QUOTED = re.compile(r'[",\r\n]')
# The number of rows in a piece of text, and in a row group of Parquet.
_PIECE_ROWS, _GROUP_ROWS = 1000, 20_000

Rows = Callable[[], Iterator[RowAsOf]]


def export_rows(rows: Rows, schema: pyarrow.Schema | None, file_format: str) -> Iterator[bytes]:
    """Yield the pieces of a file with the rows. `rows` may be called twice.

    `schema` has the columns of the table, None if they are unknown.
    """
    columns = pyarrow.schema([]) if schema is None else schema
    names = _own_names(columns.names)
    match file_format:
        case "parquet":
            return _parquet(rows, columns, names)
        case "csv":
            lines = itertools.chain([_csv_line([*columns.names, *names])], _csv_lines(rows(), columns.names))
            return _pieces(lines)
        case _:
            return _pieces(json.dumps(_json_row(row, names)) + "\n" for row in rows())


def _own_names(columns: Sequence[str]) -> tuple[str, str, str]:
    """Return the names of the additional columns, which differ from the table's columns even ignoring
    case.
    """
    taken = {name.casefold() for name in columns}
    position, time, missing = (
        next(f"{'_' * more}{name}" for more in itertools.count() if f"{'_' * more}{name}" not in taken)
        for name in (_POSITION, _TIME, _MISSING)
    )
    return position, time, missing


def _pieces(lines: Iterable[str]) -> Iterator[bytes]:
    for some in _chunks(lines, _PIECE_ROWS):
        yield "".join(some).encode()


def _chunks(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(values)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _json_row(row: RowAsOf, names: tuple[str, str, str]) -> dict[str, Any]:
    position, time, missing = names
    return {
        **plain_value(row.values),
        position: str(row.position),
        time: _time_text(row),
        missing: list(row.missing),
    }


def _csv_lines(rows: Iterable[RowAsOf], columns: Sequence[str]) -> Iterator[str]:
    for row in rows:
        cells = ["" if name in row.missing else _cell(row.values[name]) for name in columns]
        ours = (str(row.position), _time_text(row), " ".join(row.missing))
        yield ",".join([*cells, *map(_cell, ours)]) + "\r\n"


def _csv_line(texts: Iterable[str]) -> str:
    return ",".join(map(_cell, texts)) + "\r\n"


def _cell(value: Any) -> str:
    if value is None:
        return _NULL
    text = guard_formula(str(plain_value(value)))
    if text in ("", _NULL) or _QUOTED.search(text):
        return '"' + text.replace('"', '""') + '"'
    return text


def _parquet(rows: Rows, schema: pyarrow.Schema, names: tuple[str, str, str]) -> Iterator[bytes]:
    ours = (pyarrow.string(), pyarrow.timestamp("us", "UTC"), pyarrow.list_(pyarrow.string()))
    texts = _texts_among(rows(), schema)
    kinds = [(column.name, pyarrow.string() if column.name in texts else column.type) for column in schema]
    sink = _Pieces()
    with pyarrow.parquet.ParquetWriter(
        sink, pyarrow.schema([*kinds, *zip(names, ours, strict=True)]), compression="zstd"
    ) as writer:
        for some in _chunks(rows(), _GROUP_ROWS):
            columns = [
                _array([row.values.get(name) for row in some], kind, is_text=name in texts)
                for name, kind in kinds
            ]
            columns.append(pyarrow.array([str(row.position) for row in some], ours[0]))
            columns.append(pyarrow.array([row.time_us for row in some], ours[1]))
            columns.append(pyarrow.array([list(row.missing) for row in some], ours[2]))
            writer.write_batch(pyarrow.record_batch(columns, schema=writer.schema))
            yield sink.take()
    yield sink.take()


def _texts_among(rows: Iterable[RowAsOf], schema: pyarrow.Schema) -> set[str]:
    """Return the columns that are written as text, because some of their values do not have the column's
    type.

    Such values are values that Arrow cannot represent, and values from before the column's type was changed.
    """
    texts: set[str] = set()
    for some in _chunks(rows, _GROUP_ROWS):
        for column in schema:
            if column.name in texts:
                continue
            try:
                _array([row.values.get(column.name) for row in some], column.type)
            except (
                pyarrow.ArrowInvalid,
                pyarrow.ArrowTypeError,
                pyarrow.ArrowNotImplementedError,
                OverflowError,
            ):
                texts.add(column.name)
    return texts


def _array(values: list[Any], kind: pyarrow.DataType, *, is_text: bool = False) -> pyarrow.Array:
    if is_text:
        values = [None if value is None else str(plain_value(value)) for value in values]
    return pyarrow.array(values, kind)


class _Pieces(io.RawIOBase):
    """A file in memory whose content is taken while it is being written."""

    def __init__(self) -> None:
        self._content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self._content += piece
        return len(piece)

    def take(self) -> bytes:
        """Return the content that was written since the last call."""
        content = bytes(self._content)
        self._content.clear()
        return content


def _time_text(row: RowAsOf) -> str:
    seconds, micros = divmod(row.time_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros).isoformat()
