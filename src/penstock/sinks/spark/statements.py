# SPDX-License-Identifier: Apache-2.0
"""The SQL statements of the Spark sink. Every name is quoted, and every string value is written as a
literal.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow

from penstock.errors import OptionInvalid

# The additional column of a mirror's staged rows: whether the row of this key was deleted.
DELETED = "_penstock_deleted"

_TYPES = {
    pyarrow.bool_(): "BOOLEAN",
    pyarrow.int8(): "TINYINT",
    pyarrow.int16(): "SMALLINT",
    pyarrow.int32(): "INT",
    pyarrow.int64(): "BIGINT",
    pyarrow.float32(): "FLOAT",
    pyarrow.float64(): "DOUBLE",
    pyarrow.string(): "STRING",
    pyarrow.binary(): "BINARY",
    pyarrow.date32(): "DATE",
}


def quoted(name: str) -> str:
    """Return a name in backticks."""
    return "`" + name.replace("`", "``") + "`"


def table_name(parts: Sequence[str]) -> str:
    """Return a table's name of several parts: catalog, database, table."""
    return ".".join(quoted(part) for part in parts)


def literal(text: str) -> str:
    """Return a text as a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def type_text(stored: pyarrow.DataType) -> str:
    """Return the SQL type of a stored column. Raises OptionInvalid for a type that Spark does not have."""
    types = pyarrow.types
    if stored in _TYPES:
        return _TYPES[stored]
    if types.is_decimal(stored):
        return f"DECIMAL({stored.precision},{stored.scale})"
    if types.is_timestamp(stored):
        return "TIMESTAMP_NTZ" if stored.tz is None else "TIMESTAMP"
    if types.is_map(stored):
        return f"MAP<{type_text(stored.key_type)},{type_text(stored.item_type)}>"
    if types.is_list(stored):
        return f"ARRAY<{type_text(stored.value_type)}>"
    if types.is_struct(stored):
        fields = (f"{quoted(field.name)}:{type_text(field.type)}" for field in stored)
        return f"STRUCT<{','.join(fields)}>"
    raise OptionInvalid(f"Spark has no type for {stored}", hint="Convert the column with a `map` step")


def column_list(schema: pyarrow.Schema) -> str:
    """Return the columns of a table with their types."""
    return ", ".join(f"{quoted(field.name)} {type_text(field.type)}" for field in schema)


def create_table(
    table: str,
    schema: pyarrow.Schema,
    *,
    using: str,
    partition_by: Sequence[str] = (),
    cluster_by: Sequence[str] = (),
    properties: Mapping[str, str],
) -> str:
    """Return the statement that creates a table. `partition_by` are expressions, such as days(created)."""
    clauses = [f"CREATE TABLE IF NOT EXISTS {table} ({column_list(schema)}) USING {using}"]
    if partition_by:
        clauses.append(f"PARTITIONED BY ({', '.join(partition_by)})")
    if cluster_by:
        clauses.append(f"CLUSTER BY ({', '.join(map(quoted, cluster_by))})")
    pairs = (f"{literal(name)} = {literal(value)}" for name, value in sorted(properties.items()))
    return " ".join([*clauses, f"TBLPROPERTIES ({', '.join(pairs)})"])


def add_columns(table: str, fields: Sequence[pyarrow.Field]) -> str:
    """Return the statement that adds columns."""
    return f"ALTER TABLE {table} ADD COLUMNS ({column_list(pyarrow.schema(fields))})"


def widen_column(table: str, field: pyarrow.Field) -> str:
    """Return the statement that gives a column a wider type."""
    return f"ALTER TABLE {table} ALTER COLUMN {quoted(field.name)} TYPE {type_text(field.type)}"


def append(table: str, schema: pyarrow.Schema, staged: str) -> str:
    """Return the statement that adds all staged rows; `staged` is the name of their view."""
    names = ", ".join(quoted(name) for name in schema.names)
    return f"INSERT INTO {table} ({names}) SELECT {names} FROM {staged}"


def merge(table: str, schema: pyarrow.Schema, key: Sequence[str], staged: str, *, emptied: bool) -> str:
    """Return the statement that applies staged rows, one for each key.

    `emptied` means that the source table was emptied before the staged rows were written, so all other rows
    are deleted.
    """
    names = [quoted(name) for name in schema.names]
    keys = [quoted(name) for name in key]
    clauses = [
        f"MERGE INTO {table} AS t USING {staged} AS s",
        # Keys may be null, because zero dates become null.
        f"ON {' AND '.join(f't.{name} <=> s.{name}' for name in keys)}",
        f"WHEN MATCHED AND s.{DELETED} THEN DELETE",
        f"WHEN MATCHED THEN UPDATE SET {', '.join(f't.{name} = s.{name}' for name in names)}",
        f"WHEN NOT MATCHED AND NOT s.{DELETED} THEN INSERT ({', '.join(names)})"
        f" VALUES ({', '.join(f's.{name}' for name in names)})",
    ]
    if emptied:
        clauses.append("WHEN NOT MATCHED BY SOURCE THEN DELETE")
    return " ".join(clauses)


def is_inexact(field: pyarrow.Field, existing: pyarrow.DataType) -> str:
    """Return the condition that selects a field's values that a column of another type could not hold
    unchanged.
    """
    name = quoted(field.name)
    held = f"try_cast({name} AS {type_text(existing)})"
    return f"NOT (CAST({held} AS {type_text(field.type)}) <=> {name})"


def key_range(
    key: Sequence[pyarrow.Field], low: Mapping[str, Any] | None, high: Mapping[str, Any] | None
) -> str:
    """Return the condition for keys >= `low` and < `high`, compared column by column. Null sorts first."""
    conditions = []
    if low is not None:
        conditions.append(f"NOT ({_before(key, low)})")
    if high is not None:
        conditions.append(f"({_before(key, high)})")
    return " AND ".join(conditions) or "true"


def _before(key: Sequence[pyarrow.Field], bound: Mapping[str, Any]) -> str:
    before = "false"
    for field in reversed([field for field in key if field.name in bound]):
        name, value = quoted(field.name), _value(bound[field.name], field.type)
        less, same = f"coalesce({name} < {value}, true)", f"coalesce({name} = {value}, false)"
        if value is None:
            less, same = "false", f"{name} IS NULL"
        before = f"{less} OR ({same} AND ({before}))"
    return before


def _value(value: Any, stored: pyarrow.DataType) -> str | None:
    """Return the literal of a value, or None for null, which compares to nothing."""
    scalar = pyarrow.scalar(value, stored)
    if not scalar.is_valid:
        return None
    if pyarrow.types.is_binary(stored):
        return f"X'{scalar.as_py().hex()}'"
    return f"CAST({literal(scalar.cast(pyarrow.string()).as_py())} AS {type_text(stored)})"
