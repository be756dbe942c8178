# SPDX-License-Identifier: Apache-2.0
"""An SQLite database file and its tables.

SQLite has no schemas, so a table's name consists of the source's database and table names, as in
"shop.orders".
"""

import sqlite3
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow

from penstock.errors import DiskFailed, OptionInvalid, ServerBusy, ValueMalformed
from penstock.model import TableName
from penstock.sinks.sink import HINT_GONE
from penstock.sinks.sql.database_file import DatabaseFile, DatabaseFileTable, quoted
from penstock.sinks.sqlite.types import arrow_type, bound_values, declared_type, stored_values, widened

# How long a statement waits for another program's transaction before the batch is retried.
_LOCK_SECONDS_MAX = 5.0
_ROWS_AT_ONCE = 16_384
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

# https://sqlite.org/rescode.html
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM)
_UNUSABLE = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
_REFUSED_VALUE = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG)


def fold(name: str) -> str:
    """Return a name in lower case as SQLite compares it: only the letters of ASCII have a case."""
    return name.translate(_LOWER)


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate SQLite's exceptions into Penstock errors."""
    try:
        yield
    except sqlite3.Error as problem:
        # An extended code has the primary code in its lowest byte.
        code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _BUSY:
            hint = "End the other program's transaction on this file"
            raise ServerBusy(f"{what}: {problem}", hint=hint) from problem
        if code == sqlite3.SQLITE_FULL:
            raise ServerBusy(f"{what}: {problem}", hint="Free space on the disk of the file") from problem
        if code in _UNUSABLE:
            raise DiskFailed(f"{what}: {problem}", hint="Check path of the sqlite sink") from problem
        if code in _REFUSED_VALUE or isinstance(problem, sqlite3.DataError):
            hint = "Remove the constraint or trigger if someone added one; otherwise load the table again"
            raise ValueMalformed(f"{what}: {problem}", hint=hint) from problem
        raise OptionInvalid(f"{what}: {problem}", hint=HINT_GONE) from problem
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as problem:
        raise ValueMalformed(f"{what}: {problem}", hint="Load the table again") from problem


class Database(DatabaseFile):
    """An open SQLite file."""

    def __init__(self, path: str) -> None:
        """Open a file. Raises ServerBusy if another program locks it, DiskFailed if it cannot be used."""
        self.path = path
        with translate_errors(path):
            self._connection = sqlite3.connect(path, timeout=_LOCK_SECONDS_MAX, isolation_level=None)
            try:
                # Readers see the last commit while a batch is written.
                self._connection.execute("PRAGMA journal_mode = WAL")
                # A commit is on the disk when it returns.
                self._connection.execute("PRAGMA synchronous = FULL")
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        self._connection.close()

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def begin(self) -> None:
        # Take the write lock first: SQLite does not let a transaction that has already read wait for the
        # lock.
        self.run("BEGIN IMMEDIATE")

    def name_of(self, table: TableName) -> str:
        return quoted(str(table))

    def columns_of(self, table: TableName, spellings: Sequence[str] = ()) -> pyarrow.Schema | None:
        columns = self.run("SELECT name, type FROM pragma_table_info(?)", (str(table),))
        if not columns:
            return None
        spelled = {fold(name): name for name in spellings}
        fields = []
        for name, declared in columns:
            kind = arrow_type(declared)
            if kind is None:
                raise OptionInvalid(
                    f"{self.path}: column {name} of the table {table} has the type {declared or '(none)'},"
                    " which no table of Penstock has",
                    hint="Drop the table, or give the source's table another name with a route step",
                )
            fields.append(pyarrow.field(spelled.get(fold(name), name), kind))
        return pyarrow.schema(fields)

    def delete(self, table: TableName, keys: pyarrow.Table) -> None:
        # A zero date in a key is stored as null. The `IS` operator compares null like any other value.
        same = " AND ".join(f"t.{quoted(name)} IS ?" for name in keys.schema.names)
        self._run_for_rows(f"DELETE FROM {self.name_of(table)} AS t WHERE {same}", keys)

    def insert(self, table: TableName, rows: pyarrow.Table) -> None:
        names = ", ".join(map(quoted, rows.schema.names))
        marks = ", ".join("?" * rows.num_columns)
        self._run_for_rows(f"INSERT INTO {self.name_of(table)} ({names}) VALUES ({marks})", rows)

    def create_table(self, table: TableName, schema: pyarrow.Schema) -> None:
        columns = ", ".join(map(_definition, schema))
        self.run(f"CREATE TABLE IF NOT EXISTS {self.name_of(table)} ({columns})")

    def batches(self, table: TableName, fields: Sequence[pyarrow.Field]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of a table with some of its columns, in their types."""
        # SQLite treats a quoted name that matches no column as text, unless the name is qualified.
        names = ", ".join(f"t.{quoted(field.name)}" for field in fields)
        cursor = self._connection.execute(f"SELECT {names} FROM {self.name_of(table)} AS t")
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            columns = [
                stored_values(list(values), field.type)
                for values, field in zip(zip(*rows, strict=True), fields, strict=True)
            ]
            yield pyarrow.RecordBatch.from_arrays(columns, schema=pyarrow.schema(fields))

    def _run_for_rows(self, sql: str, rows: pyarrow.Table) -> None:
        for batch in rows.to_batches(max_chunksize=_ROWS_AT_ONCE):
            columns = (bound_values(column) for column in batch.columns)
            self._connection.executemany(sql, zip(*columns, strict=True))


class SqliteTable(DatabaseFileTable):
    """A table in an SQLite file."""

    def index(self, key: Sequence[str]) -> None:
        """Create the index that is used to look up rows by key, unless it exists.

        The index is not unique, because it must not reject rows after the table's key was changed.
        """
        columns = ", ".join(map(quoted, key))
        with self._opened() as database:
            name = quoted(f"{self.name} ({columns})")
            database.run(f"CREATE INDEX IF NOT EXISTS {name} ON {database.name_of(self.name)} ({columns})")

    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        with self._opened() as database:
            database.begin()
            for field in columns:
                database.run(f"ALTER TABLE {database.name_of(self.name)} ADD COLUMN {_definition(field)}")
            database.run("COMMIT")

    def widen(self, schema: pyarrow.Schema) -> None:
        # SQLite cannot change a column's type: https://sqlite.org/lang_altertable.html, section 7.
        name, wider = quoted(str(self.name)), quoted(f"{self.name} (wider)")
        values = [
            widened(quoted(field.name), self.schema.field(field.name).type, field.type)
            if field.name in self.schema.names
            else "NULL"
            for field in schema
        ]
        with self._opened() as database:
            # Views that name the table are not checked while it is replaced.
            database.run("PRAGMA legacy_alter_table = ON")
            database.begin()
            attached = database.run(
                "SELECT sql FROM sqlite_master WHERE type IN ('index', 'trigger') AND tbl_name = ?"
                " COLLATE NOCASE AND sql IS NOT NULL",
                (str(self.name),),
            )
            database.run(f"CREATE TABLE {wider} ({', '.join(map(_definition, schema))})")
            database.run(f"INSERT INTO {wider} SELECT {', '.join(values)} FROM {name}")
            database.run(f"DROP TABLE {name}")
            database.run(f"ALTER TABLE {wider} RENAME TO {name}")
            for (statement,) in attached:
                database.run(statement)
            database.run("COMMIT")

    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        fields = [self.schema.field(name) for name in columns if name in self.schema.names]
        with self._opened() as database:
            yield from database.batches(self.name, fields)


def _definition(field: pyarrow.Field) -> str:
    return f"{quoted(field.name)} {declared_type(field.type)}"
