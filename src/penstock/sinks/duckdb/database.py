# SPDX-License-Identifier: Apache-2.0
"""A DuckDB database file and its tables.

Names are always qualified with the name of the database, because a schema may have the same name as the
database.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow

from penstock.errors import DiskFailed, OptionInvalid, ServerBusy, ValueMalformed
from penstock.model import TableName
from penstock.sinks.sink import HINT_GONE, extra_missing
from penstock.sinks.sql.database_file import DatabaseFile, DatabaseFileTable, quoted

_ROWS_AT_ONCE = 65_536
# Part of DuckDB's message about a file that another program has open. Other errors of this class are about
# the file itself.
_LOCKED = "Could not set lock on file"
# DuckDB's messages for files that a retry would not open either.
_UNUSABLE = (
    "not a valid DuckDB database file",
    "No such file or directory",
    "Not a directory",
    "Is a directory",
    "Permission denied",
)


def library() -> Any:
    """Return the package `duckdb`. Raises DependencyMissing."""
    try:
        import duckdb
    except ImportError as problem:
        raise extra_missing("duckdb", "duckdb") from problem
    return duckdb


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate DuckDB's exceptions into Penstock errors."""
    duckdb = library()
    try:
        yield
    except (duckdb.IOException, duckdb.ConnectionException, duckdb.TransactionException) as problem:
        if any(reason in str(problem) for reason in _UNUSABLE):
            raise OptionInvalid(f"{what}: {problem}", hint="Check path of the duckdb sink") from problem
        raise ServerBusy(
            f"{what}: {problem}",
            hint="End the other program that has the file open for writing, or free space on its disk",
        ) from problem
    except (duckdb.ConversionException, duckdb.OutOfRangeException) as problem:
        raise ValueMalformed(f"{what}: {problem}", hint="Load the table again") from problem
    except duckdb.CatalogException as problem:
        raise OptionInvalid(f"{what}: {problem}", hint=HINT_GONE) from problem
    except duckdb.Error as problem:
        raise OptionInvalid(f"{what}: {problem}", hint="Check path of the duckdb sink") from problem


def _connect(path: str) -> Any:
    duckdb = library()
    try:
        return duckdb.connect(path)
    except duckdb.IOException as problem:
        if _LOCKED in str(problem):
            raise
        raise DiskFailed(f"{path}: {problem}", hint="Check path of the duckdb sink") from problem


class Database(DatabaseFile):
    """An open DuckDB file."""

    def __init__(self, path: str) -> None:
        """Open a file. Raises ServerBusy if another program has it open, DiskFailed if it cannot be used."""
        self.path = path
        with translate_errors(path):
            self._connection = _connect(path)
            self.run("SET TimeZone = 'UTC'")
            [(self._name,)] = self.run("SELECT current_database()")

    def close(self) -> None:
        self._connection.close()

    def run(self, sql: str, values: Sequence[Any] = (), rows: pyarrow.Table | None = None) -> list[Any]:
        """Run a statement, in which `incoming` names the given rows."""
        if rows is not None:
            self._connection.register("incoming", rows)
        answer: list[Any] = self._connection.execute(sql, list(values)).fetchall()
        if rows is not None:
            self._connection.unregister("incoming")
        return answer

    def batches(self, sql: str) -> pyarrow.RecordBatchReader:
        """Return a reader of the rows of a query."""
        return self._connection.sql(sql).to_arrow_reader(_ROWS_AT_ONCE)

    def name_of(self, table: TableName) -> str:
        return ".".join(map(quoted, (self._name, table.database, table.table)))

    def columns_of(self, table: TableName, spellings: Sequence[str] = ()) -> pyarrow.Schema | None:
        matches = self.run(
            "SELECT 1 FROM duckdb_tables() WHERE database_name = ? AND lower(schema_name) = lower(?)"
            " AND lower(table_name) = lower(?)",
            (self._name, table.database, table.table),
        )
        if not matches:
            return None
        spelled = {name.lower(): name for name in spellings}
        schema = self.batches(f"SELECT * FROM {self.name_of(table)} LIMIT 0").schema
        return pyarrow.schema(
            [field.with_name(spelled.get(field.name.lower(), field.name)) for field in schema]
        )

    def delete(self, table: TableName, keys: pyarrow.Table) -> None:
        # A zero date in a key is stored as null.
        columns = map(quoted, keys.schema.names)
        same = " AND ".join(f"t.{column} IS NOT DISTINCT FROM s.{column}" for column in columns)
        self.run(f"DELETE FROM {self.name_of(table)} AS t USING incoming AS s WHERE {same}", rows=keys)

    def insert(self, table: TableName, rows: pyarrow.Table) -> None:
        names = ", ".join(map(quoted, rows.schema.names))
        self.run(f"INSERT INTO {self.name_of(table)} ({names}) SELECT {names} FROM incoming", rows=rows)

    def create_table(self, table: TableName, schema: pyarrow.Schema) -> None:
        self.run(f"CREATE SCHEMA IF NOT EXISTS {quoted(self._name)}.{quoted(table.database)}")
        create = f"CREATE TABLE IF NOT EXISTS {self.name_of(table)} AS SELECT * FROM incoming"
        self.run(create, rows=schema.empty_table())


class DuckdbTable(DatabaseFileTable):
    """A table in a DuckDB file."""

    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        with self._opened() as database:
            self._add_columns(database, columns)

    def widen(self, schema: pyarrow.Schema) -> None:
        with self._opened() as database:
            name = database.name_of(self.name)
            for field in schema:
                if field.name in self.schema.names and self.schema.field(field.name).type != field.type:
                    kind = _type_of(database, field)
                    database.run(f"ALTER TABLE {name} ALTER COLUMN {quoted(field.name)} TYPE {kind}")
            self._add_columns(database, [field for field in schema if field.name not in self.schema.names])

    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        known = [quoted(name) for name in columns if name in self.schema.names]
        # Alias each column, because DuckDB otherwise returns names as the table spells them.
        names = ", ".join(f"{name} AS {name}" for name in known)
        with self._opened() as database:
            yield from database.batches(f"SELECT {names} FROM {database.name_of(self.name)}")

    def _add_columns(self, database: Database, columns: Sequence[pyarrow.Field]) -> None:
        name = database.name_of(self.name)
        for field in columns:
            database.run(f"ALTER TABLE {name} ADD COLUMN {quoted(field.name)} {_type_of(database, field)}")


def _type_of(database: Database, field: pyarrow.Field) -> str:
    """Return the SQL type of an Arrow type."""
    empty = pyarrow.schema([field]).empty_table()
    [(_, kind, *_)] = database.run("DESCRIBE SELECT * FROM incoming", rows=empty)
    return str(kind)
