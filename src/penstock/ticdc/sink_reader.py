# SPDX-License-Identifier: Apache-2.0
"""Reading a storage sink as transactions in commit order, up to its checkpoint.

Rows of one transaction are in the files of all tables that it changed. All rows with a commit timestamp below
the checkpoint are in complete files, so the files that are listed after reading the checkpoint are merged by
commit timestamp up to it.

TiCDC delivers at least once: after a restart it writes rows again, in later files. Rows up to the position
are skipped. A transaction changes a key once, so a row that comes twice in a table with a key is repeated.

TiCDC deletes the oldest dates first (`file-expiration-days`), and numbers the files of each date from 1 on.
While the file of the last row is there, no later date has gone: without it, unread ones may have.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from penstock.errors import EventUnsupported, SchemaUnknown, SequenceGap
from penstock.settings.ticdc import TicdcSettings
from penstock.ticdc.canal_json import CanalJsonRows
from penstock.ticdc.csv_rows import CsvRows
from penstock.ticdc.data_files import DataReader, RowFormat
from penstock.ticdc.layout import DataFile, SchemaFile, classify
from penstock.ticdc.row_changes import Change, RowChange
from penstock.ticdc.schema_files import TableSchema, read_schema
from penstock.ticdc.storage import SinkStorage, read_checkpoint


@dataclass(frozen=True)
class SinkTransaction:
    """The statements of one commit timestamp, or the rows of one transaction by their tables."""

    commit_ts: int
    statements: Sequence[TableSchema]
    rows: Sequence[tuple[TableSchema, Sequence[RowChange]]]


class SinkSchemas:
    """The definitions of a sink's tables at their versions."""

    def __init__(self, storage: SinkStorage, settings: TicdcSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._virtual = frozenset(settings.virtual_columns)
        self._schemas: dict[tuple[str, str, int], TableSchema] = {}

    def add(self, file: SchemaFile) -> TableSchema | None:
        """Read a schema file; return its definition, None if it is known. Raises as `read_schema`."""
        key = (file.database, file.table, file.version)
        if key in self._schemas:
            return None
        schema = self._schemas[key] = read_schema(file, self._storage.read(file.path))
        return schema

    def newest_tables(self) -> list[TableSchema]:
        """Return the newest definition of every table."""
        newest = {(schema.database, schema.table): schema for _, schema in sorted(self._schemas.items())}
        return [schema for schema in newest.values() if schema.table]

    def written(self, database: str, table: str, version: int) -> TableSchema:
        """Return a definition without the columns that TiCDC does not write. Raises SchemaUnknown."""
        schema = self._schemas.get((database, table, version))
        if schema is None:
            raise SchemaUnknown(
                f"{database}.{table} has no schema file of the version {version}",
                hint="Files of the storage sink are missing: copy the whole folder",
            )
        columns = tuple(
            column for column in schema.columns if f"{database}.{table}.{column.name}" not in self._virtual
        )
        return replace(schema, columns=columns)

    def format_of(self, file: DataFile) -> RowFormat:
        """Return what reads a file's rows. Raises SchemaUnknown."""
        schema = self.written(file.database, file.table, file.version)
        zone, names = self._settings.zone, (schema.database, schema.table)
        if file.format == "csv":
            return CsvRows(*names, schema.columns, zone, self._settings.csv)
        return CanalJsonRows(*names, schema.columns, zone)


class SinkReader:
    """Reads everything after a commit timestamp. One thread uses it."""

    def __init__(
        self, storage: SinkStorage, settings: TicdcSettings, position: int, last_file: str | None = None
    ) -> None:
        """`last_file` is that of an earlier reader, and has to exist still."""
        self.position = position
        # The file with the last row up to the position; None if no file has such a row.
        self.last_file = last_file
        # The checkpoint when it was read last.
        self.checkpoint = 0
        self._storage = storage
        self._schemas = SinkSchemas(storage, settings)
        # Statements that are not due yet: by version, database and table.
        self._statements: list[tuple[int, str, str, TableSchema]] = []
        self._readers: dict[str, DataReader] = {}
        self._numbers: dict[str, set[int]] = {}
        self._begun: set[str] = set()
        # The files are listed once without a later checkpoint, too: one has the last row up to the position.
        self._has_listed = False
        # Whether rows were read since the files were listed, or by an earlier reader.
        self._has_advanced = True
        self._last_ts = 0
        # Files by the commit timestamp of their next row.
        self._due: list[tuple[int, int, DataReader]] = []
        self._order = count()

    def read(self) -> Iterator[SinkTransaction]:
        """Yield the transactions between the position and the checkpoint, and move the position there.

        Raises the errors of the storage, EventMalformed, EventUnsupported, ChecksumMismatch, ValueMalformed,
        SchemaUnknown and SequenceGap for files that are not as TiCDC writes them or that are missing. Make a
        new reader after an error.
        """
        checkpoint = self.checkpoint = read_checkpoint(self._storage)
        if checkpoint - 1 <= self.position and self._has_listed:
            return
        self._has_listed = True
        sizes = self._storage.sizes()
        self._refuse_expiry(sizes)
        self._discover(sizes, checkpoint)
        while (commit_ts := self._next_ts()) is not None and commit_ts < checkpoint:
            yield from self._transactions_at(commit_ts, checkpoint)
            self.position = commit_ts
        self.position = max(self.position, checkpoint - 1)

    # --- Files ------------------------------------------------------------------------------

    def _discover(self, sizes: Mapping[str, int], checkpoint: int) -> None:
        """Read new schema files, and open new data files and those that have grown."""
        data: list[DataFile] = []
        for path in sorted(sizes):
            match classify(path):
                case SchemaFile() as file:
                    schema = self._schemas.add(file)
                    if schema is not None and schema.query and schema.version > self.position:
                        names = (schema.database, schema.table)
                        heapq.heappush(self._statements, (schema.version, *names, schema))
                case DataFile() as file:
                    data.append(file)
                    self._numbers.setdefault(file.sequence, set()).add(file.number)
        for file in data:
            reader = self._readers.get(file.path)
            if reader is None:
                reader = DataReader(self._storage, file, self._schemas.format_of(file), self.position)
                self._readers[file.path] = reader
            was_empty = reader.next_ts is None
            reader.grow(sizes[file.path], checkpoint)
            if was_empty:
                self._enqueue(reader)
            if reader.skipped_ts is not None:
                self._record_last(reader.skipped_ts, file)

    def _refuse_expiry(self, sizes: Mapping[str, int]) -> None:
        """Raise SequenceGap if the file of the last row has gone before later files were listed."""
        if self._has_advanced and self.last_file is not None and self.last_file not in sizes:
            raise SequenceGap(
                f"{self.last_file}, the last file that was read, is missing, so later ones may be, too",
                hint="It was deleted or not copied: begin a new log, and read the tables again",
            )
        # A sink without changes may expire as a whole while it is read.
        self._has_advanced = False

    def _record_last(self, commit_ts: int, file: DataFile) -> None:
        if commit_ts >= self._last_ts:
            self._last_ts, self.last_file = commit_ts, file.path

    def _refuse_gap(self, file: DataFile) -> None:
        """Raise SequenceGap if files are missing before one that is due: they would be due, too."""
        if file.path in self._begun:
            return
        self._begun.add(file.path)
        missing = set(range(1, file.number)) - self._numbers[file.sequence]
        if missing:
            raise SequenceGap(
                f"the files before {file.path} are missing, from number {min(missing)} on",
                hint="They were deleted or not copied: begin a new changefeed and a new log",
            )

    # --- Transactions -----------------------------------------------------------------------

    def _enqueue(self, reader: DataReader) -> None:
        if reader.next_ts is not None:
            heapq.heappush(self._due, (reader.next_ts, next(self._order), reader))

    def _next_ts(self) -> int | None:
        due = [queue[0][0] for queue in (self._statements, self._due) if queue]
        return min(due, default=None)

    def _transactions_at(self, commit_ts: int, checkpoint: int) -> Iterator[SinkTransaction]:
        statements = []
        while self._statements and self._statements[0][0] == commit_ts:
            statements.append(heapq.heappop(self._statements)[-1])
        if statements:
            yield SinkTransaction(commit_ts, statements, ())
        changes: dict[tuple[str, str, int], list[list[RowChange]]] = {}
        while self._due and self._due[0][0] == commit_ts:
            _, _, reader = heapq.heappop(self._due)
            file = reader.file
            self._refuse_gap(file)
            rows = reader.take(commit_ts, checkpoint)
            changes.setdefault((file.database, file.table, file.version), []).append(rows)
            self._enqueue(reader)
            self._record_last(commit_ts, file)
            self._has_advanced = True
        if changes:
            tables = [self._schemas.written(*key) for key in changes]
            merged = [_merged(schema, parts) for schema, parts in zip(tables, changes.values(), strict=True)]
            yield SinkTransaction(commit_ts, (), list(zip(tables, merged, strict=True)))


def _merged(schema: TableSchema, parts: Sequence[Sequence[RowChange]]) -> list[RowChange]:
    """Return the rows of one transaction from the files that have some of them.

    Deleted rows come first: a key that moved to another file is deleted in one and inserted in the other.
    """
    if any(column.is_key for column in schema.columns):
        rows = list(dict.fromkeys(row for part in parts for row in part))
    elif len(parts) == 1:
        rows = list(parts[0])
    else:
        raise EventUnsupported(
            f"{schema.database}.{schema.table} has no primary key, and rows of one transaction in several"
            " files: they may be repetitions",
            hint="Leave the table out of the changefeed, or give it a primary key",
        )
    return sorted(rows, key=lambda row: row.change is not Change.DELETE)
