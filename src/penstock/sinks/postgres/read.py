# SPDX-License-Identifier: Apache-2.0
"""Reads rows of a PostgreSQL table, with the Arrow types that changes have."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.sinks.postgres.connection import Session
from penstock.sinks.postgres.tables import quoted, table_sql


def rows_of(
    session: Session, target: Target, low: Mapping[str, Any] | None, high: Mapping[str, Any] | None
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a table, within bounds from `low` (inclusive) to `high` (exclusive)."""
    schema = target.arrow()
    expressions = ", ".join(_expression(field) for field in schema)
    query = f"SELECT {expressions} FROM {table_sql(target.name)}"
    conditions = [*_bound(low, ">=", schema), *_bound(high, "<", schema)]
    if conditions:
        query += f" WHERE {' AND '.join(conditions)}"
    types = {field.name: _read_as(field.type) for field in schema}
    for batch in session.copy_out(query, types):
        arrays = [_in_type(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
        yield pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def without_zero_bytes(rows: pyarrow.RecordBatch, left: Collection[str]) -> pyarrow.RecordBatch:
    """Replace texts that contain a zero byte with null, because PostgreSQL cannot store them.

    Columns in `left` are not changed.
    """
    for index, field in enumerate(rows.schema):
        if field.name in left or not pyarrow.types.is_string(field.type):
            continue
        zero = pc.fill_null(pc.match_substring(rows.column(index), "\0"), False)
        if pc.any(zero).as_py():
            kept = pc.if_else(zero, pyarrow.scalar(None, field.type), rows.column(index))
            rows = rows.set_column(index, field.with_nullable(True), kept)
    return rows


def _expression(field: pyarrow.Field) -> str:
    """Return the expression that selects a column's exact value."""
    name, kind = quoted(field.name), field.type
    if pyarrow.types.is_date(kind):
        return f"{name} - DATE '1970-01-01'"
    if pyarrow.types.is_timestamp(kind) or pyarrow.types.is_duration(kind):
        return f"(EXTRACT(EPOCH FROM {name}) * 1000000)::bigint"
    if pyarrow.types.is_binary(kind):
        return f"encode({name}, 'hex')"
    if pyarrow.types.is_list(kind):
        return f"array_to_json({name})"
    return name


def _read_as(kind: pyarrow.DataType) -> pyarrow.DataType:
    if pyarrow.types.is_date(kind):
        return pyarrow.int32()
    if pyarrow.types.is_timestamp(kind) or pyarrow.types.is_duration(kind):
        return pyarrow.int64()
    if pyarrow.types.is_binary(kind) or pyarrow.types.is_list(kind):
        return pyarrow.string()
    return kind


def _in_type(column: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    if pyarrow.types.is_binary(kind):
        texts = column.to_pylist()
        return pyarrow.array([None if text is None else bytes.fromhex(text) for text in texts], kind)
    if pyarrow.types.is_list(kind):
        return pyarrow.array(
            [None if text is None else json.loads(text) for text in column.to_pylist()], kind
        )
    return pc.cast(column, kind)


def _bound(key: Mapping[str, Any] | None, comparison: str, schema: pyarrow.Schema) -> list[str]:
    if not key:
        return []
    names = ", ".join(_compared(name, schema) for name in key)
    return [f"({names}) {comparison} ({', '.join(map(_literal, key.values()))})"]


def _compared(name: str, schema: pyarrow.Schema) -> str:
    # Compare text by its bytes.
    kind = schema.field(name).type
    return quoted(name) + (' COLLATE "C"' if pyarrow.types.is_string(kind) else "")


def _literal(value: Any) -> str:
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'::bytea"
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value).replace("'", "''")
        return f"'{text}'"
    return str(value)
