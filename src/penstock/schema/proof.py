# SPDX-License-Identifier: Apache-2.0
"""Check table definitions against the log: the table map of an event must match the definition in use."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import SchemaMismatch
from penstock.model import Column, TableSchema

# The log shows MariaDB's types uuid, inet4, inet6 and vector as plain strings. Only a declaration names them.
PLAIN_STRINGS = ("binary(", "varbinary(")
_TYPES_IN_STRINGS = ("uuid", "inet4", "inet6", "vector")


def contradiction_of(request: Any, schema: TableSchema) -> SchemaMismatch | None:
    """Return how a definition contradicts the table map, None if it matches."""
    try:
        visible = [column.visible for column in schema.columns]
        request.prove(columns_of(schema.columns), schema.primary_key, visible)
    except SchemaMismatch as mismatch:
        return mismatch
    return None


def with_types_of(logged: TableSchema, declared: TableSchema) -> TableSchema:
    """Return the logged columns, with plain strings replaced by the declared types of the columns with the
    same names.
    """
    types = {column.name: column.type_text for column in declared.columns}
    columns = tuple(
        replace(column, type_text=types.get(column.name, column.type_text))
        if column.type_text.startswith(PLAIN_STRINGS)
        and types.get(column.name, "").lower().startswith(_TYPES_IN_STRINGS)
        else column
        for column in logged.columns
    )
    return replace(logged, columns=columns)


def columns_of(columns: Sequence[Column]) -> list[tuple[str, str, str | None, bool]]:
    """Return columns in the form that the kernel expects."""
    return [(column.name, column.type_text, column.charset, column.nullable) for column in columns]
