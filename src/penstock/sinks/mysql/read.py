# SPDX-License-Identifier: Apache-2.0
"""Reads rows of a MySQL or MariaDB target, with the Arrow types that changes have. The kernel decodes the
rows.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow

from penstock._native import ResultSet
from penstock.changes import Target
from penstock.errors import SchemaChanged
from penstock.model import Column, quote_name
from penstock.sinks.mysql.connection import Session
from penstock.sinks.mysql.tables import Layout

# A server prints a FLOAT with six digits, and a DOUBLE with the number of digits in its declaration.
_ROUNDED = re.compile(r"\s*(float|(double|real)\b.*\()", re.IGNORECASE)


def rows_of(
    session: Session,
    target: Target,
    layout: Layout,
    low: Mapping[str, Any] | None,
    high: Mapping[str, Any] | None,
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a table in key order, with an extra column `_metadata`.

    Bounds select keys from `low` (inclusive) to `high` (exclusive). Raises SchemaChanged if the table lacks a
    column of the target.
    """
    if missing := [name for name in target.column_names if name not in layout.columns]:
        raise SchemaChanged(
            f"the target table {target.name} has no column {', '.join(missing)}",
            hint=f"Run penstock resnapshot for {target.name}: it adds the columns and reads the table again",
        )
    expressions = ", ".join(_expression(column) for column in target.columns)
    statement = f"SELECT {expressions} FROM {target.name.sql}"
    conditions = [*_bound(session, low, ">="), *_bound(session, high, "<")]
    if conditions:
        statement += f" WHERE {' AND '.join(conditions)}"
    if target.primary_key:
        statement += f" ORDER BY {', '.join(map(quote_name, target.primary_key))}"
    # Text is returned in the character set of its column.
    session.run("SET SESSION character_set_results = NULL")
    result = ResultSet(
        [
            (
                column.name,
                column.type_text,
                layout.columns[column.name].charset or column.charset,
                column.nullable,
            )
            for column in target.columns
        ],
        mariadb=target.mariadb,
        instance="",
        database=target.name.database,
        table=target.name.table,
        file="mysql-bin.000001",
        offset=0,
        commit_version=0,
        timestamp_us=0,
    )
    for batch in session.batches(statement, result):
        yield pyarrow.record_batch(batch).select([*target.column_names, "_metadata"])


def _expression(column: Column) -> str:
    name = quote_name(column.name)
    return f"{name} * 1e0" if _ROUNDED.match(column.type_text) else name


def _bound(session: Session, key: Mapping[str, Any] | None, comparison: str) -> list[str]:
    if not key:
        return []
    names = ", ".join(map(quote_name, key))
    values = ", ".join(session.literal(value) for value in key.values())
    return [f"({names}) {comparison} ({values})"]
