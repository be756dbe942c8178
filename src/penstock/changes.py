# SPDX-License-Identifier: Apache-2.0
"""What moves through a pipeline: changes of one table, typed, with the table they are for.

Source, steps and sinks know this and nothing of each other.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

import pyarrow

from penstock import _native
from penstock.errors import SchemaInvalid
from penstock.model import Column, TableName

# The columns behind a table's own in every batch of changes, as the kernel emits them.
SYSTEM_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp", "_metadata")

# The kinds of change that put a row there, and those that take one away.
PUTS = ("insert", "update_postimage")
TAKES = ("delete", "update_preimage")


class Origin(StrEnum):
    """Whence changes come."""

    # Rows read from the table itself: each an insert, whose version is where the log stood before the read.
    LOAD = "load"
    # Changes from the log.
    LOG = "log"


@dataclass(frozen=True)
class Target:
    """A table that changes are for: at first the source's own, then what steps made of it. Pickles.

    `columns` are its own, in order, without the system columns; their types are SQL types as the source
    declares them, also of columns that a step made. `primary_key` is () where there is none; `unique_keys`
    are the further ones, where they are known. `mariadb` tells whose type names they are.
    """

    name: TableName
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    unique_keys: tuple[tuple[str, ...], ...] = ()
    mariadb: bool = False

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of its columns, in order."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        """Return a column. Raises KeyError."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns that tell rows apart: the primary key, or the first unique key without nulls, or ()."""
        nullable = {column.name for column in self.columns if column.nullable}
        keys = (key for key in self.unique_keys if nullable.isdisjoint(key))
        return self.primary_key or next(keys, ())

    @property
    def keyed(self) -> Self:
        """The same with its row key as the primary key."""
        return replace(self, primary_key=self.row_key)

    @property
    def declared(self) -> list[tuple[str, str, str | None, bool]]:
        """Its columns as the kernel takes them."""
        return [(one.name, one.type_text, one.charset, one.nullable) for one in self.columns]

    def arrow(self) -> pyarrow.Schema:
        """Return the Arrow types of its own columns, as docs/reference/types.md tells them."""
        schema = pyarrow.schema(_native.arrow_schema(self.declared, mariadb=self.mariadb))
        return pyarrow.schema([schema.field(name) for name in self.column_names])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "name": [self.name.database, self.name.table],
            "columns": [column.to_json() for column in self.columns],
            "primary_key": list(self.primary_key),
            "unique_keys": [list(key) for key in self.unique_keys],
            "mariadb": self.mariadb,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` wrote. Raises SchemaInvalid."""
        match value:
            case {
                "name": [str(database), str(table)],
                "columns": list(columns),
                "primary_key": list(key),
                "unique_keys": list(unique),
                "mariadb": bool(mariadb),
            }:
                return cls(
                    TableName(database, table),
                    tuple(Column.from_json(one) for one in columns),
                    tuple(key),
                    tuple(tuple(one) for one in unique),
                    mariadb,
                )
        raise SchemaInvalid("a target has name, columns, primary_key, unique_keys and mariadb")


@dataclass(frozen=True)
class Changes:
    """Changes for one table, in commit order.

    `rows` has the target's columns and then SYSTEM_COLUMNS. Within a commit `_metadata.row` orders them; both
    images of an update have the same number, the preimage stands first. `source` is the table in the log.
    """

    target: Target
    rows: pyarrow.RecordBatch
    source: TableName
    origin: Origin = Origin.LOG

    def with_rows(self, rows: pyarrow.RecordBatch) -> Self:
        """Return other rows of the same table."""
        return replace(self, rows=rows)

    def __len__(self) -> int:
        return int(self.rows.num_rows)
