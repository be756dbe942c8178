# SPDX-License-Identifier: Apache-2.0
"""Build changes by hand in the form that a pipeline uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow

from penstock import _native
from penstock.changes import SYSTEM_COLUMNS, Changes, Origin, Target
from penstock.model import Column, TableName

# Commit times are counted in seconds from this time.
EPOCH = datetime(2026, 3, 1, tzinfo=UTC)


def target_of(
    columns: Mapping[str, str | Column],
    key: Sequence[str] = ("id",),
    *,
    name: str = "shop.orders",
    unique: Sequence[Sequence[str]] = (),
    mariadb: bool = False,
) -> Target:
    """Return a target; columns map names to SQL types, and texts use utf8mb4."""
    columns_of_target = []
    for column, declared in columns.items():
        if isinstance(declared, Column):
            columns_of_target.append(declared)
        else:
            charset = "utf8mb4" if declared.startswith(("char", "varchar", "text", "enum", "set")) else None
            columns_of_target.append(Column(column, declared, charset, column not in key))
    return Target(
        TableName.parse(name), tuple(columns_of_target), tuple(key), tuple(map(tuple, unique)), mariadb
    )


@dataclass(frozen=True)
class Made:
    """One row of changes: its type, its version, and its values by column. Missing columns are null."""

    change: str
    version: int
    values: Mapping[str, Any]
    row: int = 0
    unrepresentable: Mapping[str, str] | None = None
    absent: Sequence[str] | None = None


def insert(version: int, row: int = 0, **values: Any) -> list[Made]:
    """Return an insert."""
    return [Made("insert", version, values, row)]


def delete(version: int, row: int = 0, **values: Any) -> list[Made]:
    """Return a delete."""
    return [Made("delete", version, values, row)]


def update(version: int, before: Mapping[str, Any], after: Mapping[str, Any], row: int = 0) -> list[Made]:
    """Return both images of an update."""
    return [Made("update_preimage", version, before, row), Made("update_postimage", version, after, row)]


def changes_of(target: Target, *groups: Sequence[Made], origin: Origin = Origin.LOG) -> Changes:
    """Return rows as changes, in this order."""
    rows = [change for group in groups for change in group]
    schema = rows_schema(target)
    columns: list[pyarrow.Array] = [
        pyarrow.array([row.values.get(name) for row in rows], schema.field(name).type)
        for name in target.column_names
    ]
    columns += [
        pyarrow.array([row.change for row in rows], pyarrow.string()),
        pyarrow.array([row.version for row in rows], pyarrow.int64()),
        pyarrow.array(
            [EPOCH + timedelta(seconds=row.version) for row in rows], schema.field("_commit_timestamp").type
        ),
        pyarrow.array([_metadata(target, row) for row in rows], schema.field("_metadata").type),
    ]
    return Changes(target, pyarrow.RecordBatch.from_arrays(columns, schema=schema), target.name, origin)


def rows_schema(target: Target) -> pyarrow.Schema:
    """Return the schema of a target's changes, as the kernel emits them."""
    declared = [(column.name, column.type_text, column.charset, column.nullable) for column in target.columns]
    schema = pyarrow.schema(_native.arrow_schema(declared, mariadb=target.mariadb))
    return pyarrow.schema([schema.field(name) for name in (*target.column_names, *SYSTEM_COLUMNS)])


def _metadata(target: Target, segment: Made) -> dict[str, Any]:
    return {
        "instance": "test",
        "database": target.name.database,
        "table": target.name.table,
        "gtid": None,
        "file": "mysql-bin.000001",
        "offset": segment.version * 16,
        "row": segment.row,
        "server_id": 1,
        "thread_id": None,
        "schema_version": 1,
        "absent": list(segment.absent) if segment.absent else None,
        "unrepresentable": list(segment.unrepresentable.items()) if segment.unrepresentable else None,
    }
