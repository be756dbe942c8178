# SPDX-License-Identifier: Apache-2.0
"""Reads a storage sink as transactions in commit order, up to the sink's checkpoint.

The rows of one transaction are spread over the files of all tables that the transaction changed. All rows
with a commit timestamp below the checkpoint are in complete files. The files are listed after the checkpoint
is read, and are merged by commit timestamp up to the checkpoint.

TiCDC delivers at least once: after a restart it writes rows again, in later files. Rows at or before the
position are skipped. A transaction changes each key only once, so the second of two rows with the same key in
one transaction is a repetition.

TiCDC deletes the oldest dates first (`file-expiration-days`), and numbers the files of each date starting
from 1. While the file of the last row exists, no later date has been deleted. If that file is gone, unread
dates may have been deleted.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from penstock.ticdc.transactions import SinkTransaction, rows_by_key


class SinkSchemas:
    """The definitions of all versions of a sink's tables."""

    def __init__(self, storage: SinkStorage, settings: TicdcSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._virtual = frozenset(settings.virtual_columns)
        self._schemas: dict[tuple[str, str, int], TableSchema] = {}

    def add(self, file: SchemaFile) -> TableSchema | None:
        """Read a schema file; return its definition, None if it is known. Propagates errors from
        `read_schema`.
        """
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
        """Return the format that reads a file's rows. Raises SchemaUnknown."""
        schema = self.written(file.database, file.table, file.version)
        zone, names = self._settings.zone, (schema.database, schema.table)
        if file.format == "csv":
            return CsvRows(*names, schema.columns, zone, self._settings.csv)
        return CanalJsonRows(*names, schema.columns, zone)


class SinkReader:
    """Reads everything that a sink contains after a commit timestamp. Used by one thread."""

    def __init__(
        self,
        storage: SinkStorage,
        settings: TicdcSettings,
        position: int,
        last_file: str | None = None,
        finished: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`last_file` and `finished` are the attributes of an earlier reader. The last file must still
        exist.
        """
        self.position = position
        # The last file of each sequence that was read to its end, with its size. Earlier files are not read.
        self.finished = dict(finished or {})
        # The file with the last row at or before the position; None if no file has such a row.
        self.last_file = last_file
        # The checkpoint when it was last read.
        self.checkpoint = 0
        self._storage = storage
        self._schemas = SinkSchemas(storage, settings)
        # Statements that are not due yet: by version, database and table.
        self._statements: list[tuple[int, str, str, TableSchema]] = []
        self._readers: dict[str, DataReader] = {}
        self._numbers: dict[str, set[int]] = {}
        self._begun: set[str] = set()
        # Whether the files were listed. They are listed once even without a later checkpoint, because one of
        # them has the last row at or before the position.
        self._has_listed = False
        # Whether rows were read since the files were listed, or by an earlier reader.
        self._has_advanced = True
        self._last_ts = 0 if last_file is None else position
        # Files by the commit timestamp of their next row.
        self._due: list[tuple[int, int, DataReader]] = []
        self._order = count()

    def read(self) -> Iterator[SinkTransaction]:
        """Yield the transactions between the position and the checkpoint, and move the position to the
        checkpoint.

        Propagates errors from the storage, and raises EventMalformed, EventUnsupported, ChecksumMismatch,
        ValueMalformed, SchemaUnknown and SequenceGap for missing files and for files in an unexpected format.
        After an error, create a new reader.
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
        self._finish_files()

    # --- Files ------------------------------------------------------------------------------

    def _discover(self, sizes: Mapping[str, int], checkpoint: int) -> None:
        """Read new schema files, and open new data files and those that have grown."""
        data: list[DataFile] = []
        sequences: set[str] = set()
        for path in sorted(sizes):
            match classify(path):
                case SchemaFile() as file:
                    schema = self._schemas.add(file)
                    if schema is not None and schema.query and schema.version > self.position:
                        names = (schema.database, schema.table)
                        heapq.heappush(self._statements, (schema.version, *names, schema))
                case DataFile() as file:
                    sequences.add(file.sequence)
                    if path in self._readers or not self._is_finished(file, sizes[path]):
                        data.append(file)
                        self._numbers.setdefault(file.sequence, set()).add(file.number)
        # Forget sequences whose files have expired, because they are not listed again.
        self.finished = {name: last for name, last in self.finished.items() if name in sequences}
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

    def _is_finished(self, file: DataFile, size: int) -> bool:
        number, finished_size = self.finished.get(file.sequence, (0, 0))
        return file.number < number or (file.number, size) == (number, finished_size)

    def _finish_files(self) -> None:
        """Record the files that were read to their end, and forget all but the last file of each sequence."""
        sequences: dict[str, list[DataReader]] = {}
        for reader in self._readers.values():
            sequences.setdefault(reader.file.sequence, []).append(reader)
        for sequence, readers in sequences.items():
            readers.sort(key=lambda reader: reader.file.number)
            for reader in readers:
                size = reader.finished_size
                if size is None:
                    break
                self.finished[sequence] = reader.file.number, size
                if reader is not readers[-1]:
                    del self._readers[reader.file.path]
                    self._begun.discard(reader.file.path)
                    self._numbers[sequence].discard(reader.file.number)

    def _refuse_expiry(self, sizes: Mapping[str, int]) -> None:
        """Raise SequenceGap if the file of the last row disappeared before later files were listed."""
        if self._has_advanced and self.last_file is not None and self.last_file not in sizes:
            raise SequenceGap(
                f"{self.last_file}, the last file that was read, is missing, so later ones may be, too",
                hint="It was deleted or not copied: begin a new log, and read the tables again",
            )
        # From here on the last file may be missing: all files of a sink without changes may expire while it
        # is read.
        self._has_advanced = False

    def _record_last(self, commit_ts: int, file: DataFile) -> None:
        if commit_ts >= self._last_ts:
            self._last_ts, self.last_file = commit_ts, file.path

    def _refuse_gap(self, file: DataFile) -> None:
        """Raise SequenceGap if files before a due file are missing, because they would be due too."""
        if file.path in self._begun:
            return
        self._begun.add(file.path)
        finished, _ = self.finished.get(file.sequence, (0, 0))
        missing = set(range(finished + 1, file.number)) - self._numbers[file.sequence]
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
    """Return the rows of one transaction from the files that have some of them, deletes first."""
    if any(column.is_key for column in schema.columns):
        return rows_by_key(schema, (row for part in parts for row in part))
    if len(parts) > 1:
        raise EventUnsupported(
            f"{schema.database}.{schema.table} has no primary key, and rows of one transaction in several"
            " files: they may be repetitions",
            hint="Leave the table out of the changefeed, or give it a primary key",
        )
    return sorted(parts[0], key=lambda row: row.change is not Change.DELETE)
