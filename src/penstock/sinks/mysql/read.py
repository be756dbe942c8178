# SPDX-License-Identifier: Apache-2.0
"""Rows of a MySQL or MariaDB target's table, in the types that changes have: the kernel reads them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow

from penstock._native import ResultSet
from penstock.changes import Target
from penstock.model import Column, quote_name
from penstock.sinks.mysql.connection import Session
from penstock.sinks.mysql.tables import Layout

# A server shows six digits of a FLOAT, and as many of a DOUBLE as its declaration says.
_ROUNDED = re.compile(r"\s*(float|(double|real)\b.*\()", re.IGNORECASE)


def rows_of(
    session: Session,
    target: Target,
    layout: Layout,
    low: Mapping[str, Any] | None,
    high: Mapping[str, Any] | None,
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a table in the order of its key, with `_metadata` behind their columns; with bounds
    those from `low` to below `high`."""
    wanted = ", ".join(_expression(one) for one in target.columns)
    statement = f"SELECT {wanted} FROM {target.name.sql}"
    conditions = [*_bound(session, low, ">="), *_bound(session, high, "<")]
    if conditions:
        statement += f" WHERE {' AND '.join(conditions)}"
    if target.primary_key:
        statement += f" ORDER BY {', '.join(map(quote_name, target.primary_key))}"
    # Texts come in the bytes of the columns that they stand in.
    session.run("SET SESSION character_set_results = NULL")
    result = ResultSet(
        [
            (one.name, one.type_text, layout.columns[one.name].charset or one.charset, one.nullable)
            for one in target.columns
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
