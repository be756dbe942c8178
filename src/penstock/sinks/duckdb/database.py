# SPDX-License-Identifier: Apache-2.0
"""A DuckDB database file: its tables, and the numbers of batches, which a table of its own has.

Names are always qualified with the name of the database: a schema may have the same name.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pyarrow

from penstock.changes import Target
from penstock.errors import DiskFailed, OptionInvalid, ServerBusy, ValueMalformed
from penstock.model import TableName
from penstock.sinks.lake.table import StoredTable
from penstock.sinks.sink import HINT_GONE, extra_missing

POSITIONS = TableName("penstock", "positions")
_ROWS_AT_ONCE = 65_536
# In the message about a file that another program has open. Other messages of this kind are about the file.
_LOCKED = "Could not set lock on file"
# Stands for the whole part in the table of numbers.
_PART = ""
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


def quoted(name: str) -> str:
    """Return an identifier."""
    return '"' + name.replace('"', '""') + '"'


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


class Database:
    """An open file. Raises Penstock errors."""

    def __init__(self, path: str) -> None:
        """Open a file. Raises ServerBusy if another program has it open, DiskFailed if it cannot be used."""
        self.path = path
        with translate_errors(path):
            self._connection = _connect(path)
            self.run("SET TimeZone = 'UTC'")
            [(self._name,)] = self.run("SELECT current_database()")

    def close(self) -> None:
        """Close the file. What was not committed is undone."""
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
        """Return the qualified name of a table."""
        return ".".join(map(quoted, (self._name, table.database, table.table)))

    def columns_of(self, table: TableName, spellings: Sequence[str] = ()) -> pyarrow.Schema | None:
        """Return the columns of a table, None if it does not exist.

        A column that differs from one of `spellings` only in case has that name.
        """
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

    def create_schema(self, name: str) -> None:
        """Create a schema unless it exists."""
        self.run(f"CREATE SCHEMA IF NOT EXISTS {quoted(self._name)}.{quoted(name)}")

    # --- Numbers ------------------------------------------------------------------------------

    def number_of_part(self, application: str, part: int) -> int | None:
        """Return the number of the last batch of which the file has a part."""
        return self._number(f"application = ? AND part = ? AND target = '{_PART}'", (application, part))

    def number_of_table(self, application: str, table: TableName) -> int | None:
        """Return the number of the last batch that a table has."""
        return self._number("application = ? AND target = ?", (application, str(table)))

    def _number(self, condition: str, values: Sequence[Any]) -> int | None:
        if self.columns_of(POSITIONS) is None:
            return None
        query = f"SELECT max(number) FROM {self.name_of(POSITIONS)} WHERE {condition}"
        with translate_errors(f"{self.path}: {POSITIONS}"):
            number: int | None = self.run(query, values)[0][0]
        return number

    def store_numbers(self, numbers: Mapping[str, int], part: int, tables: Sequence[TableName]) -> None:
        """Store numbers by application, for a part and for the tables that it wrote."""
        positions = self.name_of(POSITIONS)
        if self.columns_of(POSITIONS) is None:
            self.create_schema(POSITIONS.database)
            self.run(
                f"CREATE TABLE {positions} (application VARCHAR, part INTEGER, target VARCHAR, number BIGINT)"
            )
        for application, number in numbers.items():
            for target in (_PART, *map(str, tables)):
                row = (application, part, target)
                self.run(f"DELETE FROM {positions} WHERE application = ? AND part = ? AND target = ?", row)
                self.run(f"INSERT INTO {positions} VALUES (?, ?, ?, ?)", (*row, number))


class DuckdbTable(StoredTable):
    """A table. The file is closed after each call."""

    def __init__(self, path: str, name: TableName, schema: pyarrow.Schema) -> None:
        self._path = path
        self._name = name
        self.schema = schema

    @classmethod
    def open(cls, database: Database, target: Target) -> Self | None:
        """Return a target's table, None if it does not exist. Closes the file."""
        try:
            schema = database.columns_of(target.name, target.column_names)
        finally:
            database.close()
        return None if schema is None else cls(database.path, target.name, schema)

    @classmethod
    def create(cls, database: Database, target: Target, schema: pyarrow.Schema) -> Self:
        """Create a target's table unless it exists. Closes the file."""
        try:
            database.create_schema(target.name.database)
            name = database.name_of(target.name)
            database.run(
                f"CREATE TABLE IF NOT EXISTS {name} AS SELECT * FROM incoming", rows=schema.empty_table()
            )
            stored = database.columns_of(target.name, target.column_names)
        finally:
            database.close()
        assert stored is not None, "it has just been created"
        return cls(database.path, target.name, stored)

    def number(self, application: str) -> int | None:
        with self._opened() as database:
            return database.number_of_table(application, self._name)

    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        with self._opened() as database:
            self._add_columns(database, columns)

    def widen(self, schema: pyarrow.Schema) -> None:
        with self._opened() as database:
            name = database.name_of(self._name)
            for field in schema:
                if field.name in self.schema.names and self.schema.field(field.name).type != field.type:
                    kind = _type_of(database, field)
                    database.run(f"ALTER TABLE {name} ALTER COLUMN {quoted(field.name)} TYPE {kind}")
            self._add_columns(database, [field for field in schema if field.name not in self.schema.names])

    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        known = [quoted(name) for name in columns if name in self.schema.names]
        # DuckDB answers with the table's own spelling.
        names = ", ".join(f"{name} AS {name}" for name in known)
        with self._opened() as database:
            yield from database.batches(f"SELECT {names} FROM {database.name_of(self._name)}")

    def _add_columns(self, database: Database, columns: Sequence[pyarrow.Field]) -> None:
        name = database.name_of(self._name)
        for field in columns:
            database.run(f"ALTER TABLE {name} ADD COLUMN {quoted(field.name)} {_type_of(database, field)}")

    @contextmanager
    def _opened(self) -> Iterator[Database]:
        database = Database(self._path)
        try:
            with translate_errors(f"{self._path}: {self._name}"):
                yield database
        finally:
            database.close()


def _type_of(database: Database, field: pyarrow.Field) -> str:
    """Return the SQL type of an Arrow type."""
    empty = pyarrow.schema([field]).empty_table()
    [(_, kind, *_)] = database.run("DESCRIBE SELECT * FROM incoming", rows=empty)
    return str(kind)
