# SPDX-License-Identifier: Apache-2.0
"""The data of a pipeline: typed changes of one table, with their target table.

Sources, steps and sinks depend on this module and not on each other.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self

import pyarrow

from penstock import _native
from penstock.errors import SchemaInvalid
from penstock.model import Column, TableName

# The columns after a table's own in every batch of changes, as emitted by the kernel.
SYSTEM_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp", "_metadata")

# The change types that add a row, and the change types that remove a row.
PUTS = ("insert", "update_postimage")
TAKES = ("delete", "update_preimage")

# A batch asks for the Arrow types of each of its tables several times, and many tables may have the same
# columns.
_SCHEMAS_KEPT = 4096

# The prefix of a value's exact text if the value has bytes that are invalid in its character set.
BROKEN_TEXT = "0x"


class Origin(StrEnum):
    """Where changes come from."""

    # Rows read from the table. Each row is an insert whose version is the log position before the read.
    LOAD = "load"
    # Changes from the log.
    LOG = "log"


@dataclass(frozen=True)
class Target:
    """The target table of changes. It is initially the source's table, and each step may change it. Can be
    pickled.

    `columns` are the table's columns in order, without the system columns. Their types are SQL types in the
    source's spelling, even for columns that a step added. `primary_key` is () if there is none. `unique_keys`
    are the table's other keys, if known. `mariadb` says whether the type names are MariaDB's.
    """

    name: TableName
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...] = ()
    unique_keys: tuple[tuple[str, ...], ...] = ()
    mariadb: bool = False

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the table's columns, in order."""
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> Column:
        """Return a column. Raises KeyError."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns that identify rows: the primary key, or the first unique key without nulls, or ()."""
        nullable = {column.name for column in self.columns if column.nullable}
        keys = (key for key in self.unique_keys if nullable.isdisjoint(key))
        return self.primary_key or next(keys, ())

    @property
    def keyed(self) -> Self:
        """The same target with its row key as the primary key."""
        return replace(self, primary_key=self.row_key)

    @property
    def declared(self) -> list[tuple[str, str, str | None, bool]]:
        """The columns in the form that the kernel expects."""
        return [(column.name, column.type_text, column.charset, column.nullable) for column in self.columns]

    def arrow(self) -> pyarrow.Schema:
        """Return the Arrow types of the table's columns, as documented in docs/reference/types.md."""
        return _arrow_columns(tuple(self.declared), self.mariadb)

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
        """Parse the result of `to_json`. Raises SchemaInvalid."""
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
                    tuple(Column.from_json(column) for column in columns),
                    tuple(key),
                    tuple(tuple(unique_key) for unique_key in unique),
                    mariadb,
                )
        raise SchemaInvalid("a target needs name, columns, primary_key, unique_keys and mariadb")


@lru_cache(_SCHEMAS_KEPT)
def _arrow_columns(declared: tuple[tuple[str, str, str | None, bool], ...], mariadb: bool) -> pyarrow.Schema:
    whole = pyarrow.schema(_native.arrow_schema(list(declared), mariadb=mariadb))
    # The system columns follow.
    return pyarrow.schema([whole.field(number) for number in range(len(declared))])


@dataclass(frozen=True)
class StatementOrigin:
    """Where and when a statement was logged. `gtid` is "" if there are no GTIDs. Can be pickled."""

    file: str = ""
    offset: int = 0
    gtid: str = ""
    server_id: int = 0
    # The commit time of the transaction, in microseconds since 1970.
    commit_us: int = 0


@dataclass(frozen=True)
class DefiningStatement:
    """A statement that defines, renames, drops or empties tables, with its commit version. Can be pickled.

    `database` is the session's current database, "" for none. `tables` are all tables that the statement
    names. `definitions` describes what the statement does to each table: the kind, the database, the table
    ("" for none), and a statement about this table alone. `emptied` are the targets of the tables that the
    statement empties, if these tables have had rows.
    """

    text: str
    database: str
    tables: tuple[TableName, ...]
    version: int
    instance: str = ""
    origin: StatementOrigin = field(default_factory=StatementOrigin)
    definitions: tuple[tuple[str, str, str, str], ...] = ()
    emptied: tuple[Target, ...] = ()


@dataclass(frozen=True)
class Changes:
    """Changes of one table, in commit order.

    `rows` contains the target's columns, followed by SYSTEM_COLUMNS. Within a commit, `_metadata.row` orders
    the rows. Both images of an update have the same number, and the preimage is first. `source` is the table
    in the log.
    """

    target: Target
    rows: pyarrow.RecordBatch
    source: TableName
    origin: Origin = Origin.LOG

    def with_rows(self, rows: pyarrow.RecordBatch) -> Self:
        """Return changes of the same table with other rows."""
        return replace(self, rows=rows)

    def __len__(self) -> int:
        return int(self.rows.num_rows)


def kinds_text(rows: pyarrow.RecordBatch) -> bytes:
    """Return the change types of rows, joined.

    Searching this text costs a fifth of what one of Arrow's functions costs for a few rows.
    """
    kinds = rows.column("_change_type")
    if kinds.type != pyarrow.string():
        kinds = kinds.cast(pyarrow.string())
    _, offsets_buffer, text = kinds.buffers()
    if text is None or not len(kinds):
        return b""
    offsets = memoryview(offsets_buffer).cast("i")
    return bytes(memoryview(text)[offsets[kinds.offset] : offsets[kinds.offset + len(kinds)]])
