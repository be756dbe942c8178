# SPDX-License-Identifier: Apache-2.0
"""The code shared by sinks that keep their tables in one database file, such as DuckDB and SQLite.

A single writer writes each batch in one transaction, which also stores the batch number in a table of the
same file. The process that drives the pipeline opens the file for each batch and closes it after the commit.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import pyarrow
import pyarrow.compute as pc
from pydantic import Field, field_validator

from penstock.changes import Changes, Target
from penstock.errors import OperatorError, OptionInvalid
from penstock.model import TableName
from penstock.settings.values import Bytes, Section
from penstock.sinks.images import LastImages, puts, refuse_partial, unrepresentable_counts
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.table import StoredTable
from penstock.sinks.lake.table_sink import Mode, TableSink
from penstock.sinks.sink import (
    HINT_GONE,
    BatchMark,
    Delivery,
    Finding,
    Receipt,
    Spread,
    Writer,
    applications_of,
    is_repeated,
)
from penstock.sinks.sql.row_buffer import RowBuffer
from penstock.sinks.sql.rows import SkippingWriter, WriteCounts

POSITIONS = TableName("penstock", "positions")
_POSITIONS_COLUMNS = pyarrow.schema(
    {
        "application": pyarrow.string(),
        "part": pyarrow.int32(),
        "target": pyarrow.string(),
        "number": pyarrow.int64(),
    }
)
# In the table of batch numbers, the name that stands for all tables of a part.
_PART = ""


def quoted(name: str) -> str:
    """Return an identifier."""
    return '"' + name.replace('"', '""') + '"'


class FileSettings(Section):
    """The database file, and what its tables contain."""

    path: str = Field(min_length=1, description="the file of the database; created if missing")
    mode: Literal["mirror", "feed"] = Field(
        default="mirror", description="mirror: the current rows of the source; feed: every change as a row"
    )
    held_bytes: Bytes = Field(
        default=256 << 20, ge=1024, description="approximate bytes that are buffered before they are written"
    )

    @field_validator("path")
    @classmethod
    def _is_a_file(cls, path: str) -> str:
        if path.startswith(":memory:"):
            raise ValueError("a database in memory is lost when it is closed, after each batch: name a file")
        return path


class DatabaseFile(ABC):
    """An open database file: its tables, and a separate table with the batch numbers."""

    path: str

    @abstractmethod
    def close(self) -> None:
        """Close the file. Uncommitted changes are rolled back."""

    @abstractmethod
    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Run a statement, and return its rows."""

    def begin(self) -> None:
        """Begin a transaction."""
        self.run("BEGIN")

    @abstractmethod
    def name_of(self, table: TableName) -> str:
        """Return the quoted name of a table."""

    @abstractmethod
    def columns_of(self, table: TableName, spellings: Sequence[str] = ()) -> pyarrow.Schema | None:
        """Return the columns of a table, None if it does not exist.

        A column whose name differs from one of `spellings` only in case is returned with that spelling.
        """

    @abstractmethod
    def delete(self, table: TableName, keys: pyarrow.Table) -> None:
        """Delete the rows whose values in the columns of `keys` equal a row of `keys`."""

    @abstractmethod
    def insert(self, table: TableName, rows: pyarrow.Table) -> None:
        """Insert rows. Their columns are all or some of the table's columns."""

    @abstractmethod
    def create_table(self, table: TableName, schema: pyarrow.Schema) -> None:
        """Create a table and its schema, unless they exist."""

    # --- Numbers ------------------------------------------------------------------------------

    def number_of_part(self, application: str, part: int) -> int | None:
        """Return the number of the last batch of which this part was written to the file."""
        return self._number(f"application = ? AND part = ? AND target = '{_PART}'", (application, part))

    def number_of_table(self, application: str, table: TableName) -> int | None:
        """Return the number of the last batch that was written to a table."""
        return self._number("application = ? AND target = ?", (application, str(table)))

    def _number(self, condition: str, values: Sequence[Any]) -> int | None:
        if self.columns_of(POSITIONS) is None:
            return None
        query = f"SELECT max(number) FROM {self.name_of(POSITIONS)} WHERE {condition}"
        number: int | None = self.run(query, values)[0][0]
        return number

    def store_numbers(self, numbers: Mapping[str, int], part: int, tables: Sequence[TableName]) -> None:
        """Store numbers by application, for a part and for the tables that it wrote."""
        positions = self.name_of(POSITIONS)
        if self.columns_of(POSITIONS) is None:
            self.create_table(POSITIONS, _POSITIONS_COLUMNS)
        for application, number in numbers.items():
            for target in (_PART, *map(str, tables)):
                row = (application, part, target)
                self.run(f"DELETE FROM {positions} WHERE application = ? AND part = ? AND target = ?", row)
                self.run(f"INSERT INTO {positions} VALUES (?, ?, ?, ?)", (*row, number))


class DatabaseFileTable(StoredTable):
    """A table of a database file. The file is closed after each call."""

    def __init__(self, sink: "DatabaseFileSink[Any]", target: Target, schema: pyarrow.Schema) -> None:
        self._sink = sink
        self._target = target
        self.name = target.name
        self.schema = schema

    @classmethod
    def open(cls, sink: "DatabaseFileSink[Any]", target: Target) -> Self | None:
        """Return a target's table, None if it does not exist."""
        with _opened(sink, target) as database:
            schema = database.columns_of(target.name, target.column_names)
        return None if schema is None else cls(sink, target, schema)

    @classmethod
    def create(cls, sink: "DatabaseFileSink[Any]", target: Target, schema: pyarrow.Schema) -> Self:
        """Create a target's table unless it exists."""
        with _opened(sink, target) as database:
            database.create_table(target.name, schema)
            stored = database.columns_of(target.name, target.column_names)
        assert stored is not None, "it has just been created"
        return cls(sink, target, stored)

    def number(self, application: str) -> int | None:
        with self._opened() as database:
            number: int | None = database.number_of_table(application, self.name)
        return number

    def _opened(self) -> AbstractContextManager[Any]:
        return _opened(self._sink, self._target)


@contextmanager
def _opened(sink: "DatabaseFileSink[Any]", target: Target) -> Iterator[Any]:
    """Open the file for a target's table, in a block whose errors are translated."""
    database = sink.connect()
    try:
        with sink.translate_errors(target):
            yield database
    finally:
        database.close()


FileTable = TypeVar("FileTable", bound=DatabaseFileTable)


class DatabaseFileSink(TableSink[FileTable], Generic[FileTable]):
    """Writes the tables of a database file."""

    delivery = Delivery.EXACTLY_ONCE
    spread = Spread.WHOLE
    in_driver = True
    # The product, for messages.
    product: ClassVar[str]
    table_type: type[FileTable]

    def __init__(self, settings: FileSettings) -> None:
        super().__init__(Mode(settings.mode))
        self.settings = settings

    @abstractmethod
    def connect(self) -> DatabaseFile:
        """Open the file. Raises Penstock errors."""

    @abstractmethod
    def translating(self, what: str) -> AbstractContextManager[None]:
        """Translate the library's exceptions into Penstock errors that begin with `what`."""

    def translate_errors(self, target: Target) -> AbstractContextManager[None]:
        return self.translating(self.location(target))

    def translate_errors_of_numbers(self) -> AbstractContextManager[None]:
        """Translate the library's exceptions about the table of batch numbers."""
        return self.translating(f"{self.settings.path}: {POSITIONS}")

    def fold(self, name: str) -> str:
        """Return the form of a name that the database compares, such as the name in lower case."""
        return name.lower()

    def rows_of(self, changes: Changes) -> tuple[Target, pyarrow.Table]:
        """Return changes as the table of a feed stores them, before conversion to its types."""
        return changes.target, pyarrow.Table.from_batches([changes.rows])

    def check(self) -> Sequence[Finding]:
        try:
            self.connect().close()
        except OperatorError as problem:
            return [Finding(self.settings.path, problem.message, mend=problem.hint or "")]
        return []

    def check_together(self, targets: Sequence[Target]) -> None:
        own = self.fold(str(POSITIONS))
        spellings: dict[str, TableName] = {}
        for name in (target.name for target in targets):
            if self.fold(str(name)) == own:
                raise OptionInvalid(
                    f"{name} is the table with the numbers of batches",
                    hint="Give the source's table another name with a route step",
                )
            other = spellings.setdefault(self.fold(str(name)), name)
            if other != name:
                raise OptionInvalid(
                    f"{other} and {name} are one table in {self.product}, which ignores the case of names",
                    hint="Give one of them another name with a route step",
                )

    def location(self, target: Target) -> str:
        return f"{self.settings.path}: {target.name}"

    def open_table(self, target: Target) -> FileTable | None:
        return self.table_type.open(self, target)

    def create_table(self, target: Target, schema: pyarrow.Schema) -> FileTable:
        return self.table_type.create(self, target, schema)

    def open(self, mark: BatchMark, part: int) -> Writer:
        if self._has(mark, part):
            return SkippingWriter()
        return DatabaseFileWriter(self, self.connect(), mark, part)

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        # One transaction writes all tables of a batch.
        if self.mode is not Mode.FEED or not self._has(mark, 0):
            return None
        versions = [
            pc.max(batch.column(0)).as_py()
            for target in targets
            for batch in self.open_prepared(target).batches(["_commit_version"])
        ]
        return max((version for version in versions if version is not None), default=None)

    def _has(self, mark: BatchMark, part: int) -> bool:
        """Return whether the file has a part of a batch. Raises StateOutdated."""
        database = self.connect()
        try:
            with self.translate_errors_of_numbers():
                return is_repeated(mark, database.number_of_part(mark.application, part))
        finally:
            database.close()


class DatabaseFileWriter(Writer):
    """Writes one part of one batch in a transaction, with the batch's number.

    To replace rows, it deletes the rows with the batch's keys and inserts the new rows.
    """

    def __init__(
        self, sink: DatabaseFileSink[Any], database: DatabaseFile, mark: BatchMark, part: int
    ) -> None:
        self._sink = sink
        self._database = database
        self._mark = mark
        self._part = part
        self._counted = WriteCounts()
        self._buffered = RowBuffer(sink.settings.held_bytes, self._write_images, feed=False)
        # The columns of each table that was written.
        self._schemas: dict[Target, pyarrow.Schema] = {}
        try:
            with sink.translating(database.path):
                database.begin()
        except BaseException:
            database.close()
            raise

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            self._counted.add(changes)
            if self._sink.mode is Mode.FEED:
                target, rows = self._sink.rows_of(changes)
                self._count_lost(changes.target, rows)
                self._insert(target, rows)
                return
            refuse_partial(changes)
            self._buffered.add(changes)
        if self._buffered.is_full():
            self._write_all()

    def empty(self, target: Target, version: int) -> None:
        if self._sink.mode is Mode.FEED:
            return
        self._buffered.empty(target, version)
        with self.working_on(target.name), self._sink.translate_errors(target):
            self._schema(target)
            self._database.run(f"DELETE FROM {self._database.name_of(target.name)}")

    def finish(self) -> Receipt:
        self._write_all()
        with self._sink.translate_errors_of_numbers():
            numbers = {
                self._mark.application: self._mark.number,
                applications_of(self._mark.pipeline): self._mark.number,
            }
            self._database.store_numbers(numbers, self._part, self._tables())
            self._database.run("COMMIT")
        self._database.close()
        return self._counted.receipt()

    def abort(self) -> None:
        self._buffered.clear()
        self._database.close()

    def _write_all(self) -> None:
        for target, images in self._buffered.take().items():
            with self.working_on(target.name):
                self._write_images(target, images)

    def _write_images(self, target: Target, images: LastImages) -> None:
        rows = images.rows()
        if rows is None or not rows.num_rows:
            return
        check_keys(images.target, rows)
        self._delete(images.target, rows)
        written = rows.filter(puts(rows))
        self._count_lost(target, written)
        self._insert(target, written)

    def _delete(self, target: Target, rows: pyarrow.Table) -> None:
        schema = self._schema(target)
        keys = stored_rows(rows, pyarrow.schema([schema.field(name) for name in target.primary_key]))
        with self._sink.translate_errors(target):
            self._database.delete(target.name, keys)

    def _insert(self, target: Target, rows: pyarrow.Table) -> None:
        if not rows.num_rows:
            return
        stored = stored_rows(rows, self._schema(target))
        with self._sink.translate_errors(target):
            self._database.insert(target.name, stored)

    def _schema(self, target: Target) -> pyarrow.Schema:
        """Return the columns of a target's table."""
        if target not in self._schemas:
            with self._sink.translate_errors(target):
                schema = self._database.columns_of(target.name, target.column_names)
            if schema is None:
                raise OptionInvalid(f"the table {self._sink.location(target)} is gone", hint=HINT_GONE)
            self._schemas[target] = schema
            self._counted.note_columns(target, schema.names)
        return self._schemas[target]

    def _tables(self) -> list[TableName]:
        """Return the tables that were written, each once."""
        return list(dict.fromkeys(target.name for target in self._schemas))

    def _count_lost(self, target: Target, rows: pyarrow.Table) -> None:
        for name, count in unrepresentable_counts(target, rows).items():
            lost = self._counted.unrepresentable
            lost[name] = lost.get(name, 0) + count
