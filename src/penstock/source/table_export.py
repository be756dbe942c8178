# SPDX-License-Identifier: Apache-2.0
"""The rows of a table as of a moment as a file: JSON lines, CSV or Parquet.

Each row has `_position` and `_time` of the change that shows it, and `_missing`: the columns that the log
does not have. In CSV a NULL is \\N and a missing value is empty. JSON lines leave a missing column out. In
Parquet both are null.
"""

import csv
import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pyarrow
import pyarrow.parquet

from penstock.source.row_history import plain_value
from penstock.source.table_as_of import RowAsOf

FORMATS = {"jsonl": "application/x-ndjson", "csv": "text/csv", "parquet": "application/vnd.apache.parquet"}

_POSITION, _TIME, _MISSING = "_position", "_time", "_missing"


def export_rows(rows: Iterable[RowAsOf], schema: pyarrow.Schema | None, file_format: str) -> bytes:
    """Return a file with the rows. `schema` has the columns of the table, None if nothing is known of it."""
    shown = pyarrow.schema([]) if schema is None else schema
    match file_format:
        case "parquet":
            return _parquet(list(rows), shown)
        case "csv":
            return _csv(rows, shown.names)
        case _:
            return b"".join(json.dumps(row_to_json(row)).encode() + b"\n" for row in rows)


def row_to_json(row: RowAsOf) -> dict[str, Any]:
    """Return a row as plain JSON values: its columns, then where it comes from."""
    return {
        **plain_value(row.values),
        _POSITION: str(row.position),
        _TIME: _time_text(row),
        _MISSING: list(row.missing),
    }


def _csv(rows: Iterable[RowAsOf], names: list[str]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, _POSITION, _TIME, _MISSING])
    for row in rows:
        cells = ["" if name in row.missing else _cell(row.values[name]) for name in names]
        writer.writerow([*cells, str(row.position), _time_text(row), " ".join(row.missing)])
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    return "\\N" if value is None else str(plain_value(value))


def _parquet(rows: list[RowAsOf], schema: pyarrow.Schema) -> bytes:
    columns = {
        column.name: _array([row.values.get(column.name) for row in rows], column.type) for column in schema
    }
    columns[_POSITION] = pyarrow.array([str(row.position) for row in rows], pyarrow.string())
    columns[_TIME] = pyarrow.array([row.time_us for row in rows], pyarrow.timestamp("us", "UTC"))
    columns[_MISSING] = pyarrow.array([list(row.missing) for row in rows], pyarrow.list_(pyarrow.string()))
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), content, compression="zstd")
    return content.getvalue()


def _array(values: list[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    """Return the values of a column, as text if one of them does not have its type.

    Such values are those that Arrow cannot represent, and those from before the type was changed.
    """
    try:
        return pyarrow.array(values, kind)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError, OverflowError):
        texts = [None if value is None else str(plain_value(value)) for value in values]
        return pyarrow.array(texts, pyarrow.string())


def _time_text(row: RowAsOf) -> str:
    seconds, micros = divmod(row.time_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros).isoformat()
