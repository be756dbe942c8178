# SPDX-License-Identifier: Apache-2.0
"""The code shared by lake sinks in any format: mirrors, feeds and histories, one commit per batch.

Writers put files into a table's folder, where no table metadata refers to them yet. A commit adds the files
to the table and stores the batch number. A retried batch recognizes its number, and files of a failed batch
never become visible.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import pyarrow
from pydantic import Field

from penstock.changes import Changes, Origin, Target
from penstock.model import TableName
from penstock.settings.values import Bytes, Section
from penstock.sinks.concurrent_calls import call_for_each
from penstock.sinks.images import refuse_partial, unrepresentable_counts
from penstock.sinks.lake.buffered_tables import BufferedTables
from penstock.sinks.lake.history import HistoryTable
from penstock.sinks.lake.mirror import MirrorTable
from penstock.sinks.lake.parquet_files import DataFile, PartFiles, translate_file_errors
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.spill_file import SpillFile
from penstock.sinks.lake.syncing import sync_paths
from penstock.sinks.lake.table import LakeTable, sync_tables
from penstock.sinks.lake.table_sink import Mode, TableSink
from penstock.sinks.sink import (
    BatchMark,
    Delivery,
    Receipt,
    Spread,
    Writer,
    applications_of,
    is_repeated,
)

_FILE_BYTES_DEFAULT = 64 << 20
_MEMORY_BYTES_DEFAULT = 256 << 20
# The suffix under which a table stores its last batch that only added rows of a full load.
_LOADS = "/loads"


class LakeSettings(Section):
    """Where the tables are, and what they contain."""

    # Declared first, so that it comes first in the reference. Each format describes it differently.
    path: str | None = None
    mode: Mode = Field(
        default=Mode.MIRROR,
        description="mirror: the current rows of the source; feed: every change; history: every version of"
        " every row with its validity (SCD type 2)",
    )
    file_bytes: Bytes = Field(
        default=_FILE_BYTES_DEFAULT, ge=1 << 16, description="approximate size of a data file"
    )
    memory_bytes: Bytes = Field(
        default=_MEMORY_BYTES_DEFAULT,
        ge=1 << 20,
        description="memory for the rows of a batch that one task buffers, at most twice `batch.bytes`;"
        " more is spilled to files",
    )
    compression: str = Field(
        default="snappy", description="compression of data files: snappy, zstd, gzip, none"
    )


class LakeSink(TableSink[LakeTable]):
    """Writes tables of a lake. Subclasses define how a format opens, creates and changes tables."""

    delivery = Delivery.EXACTLY_ONCE
    makes_files = True
    # How many tables are committed at once.
    commit_threads_max = 1

    def __init__(self, settings: LakeSettings) -> None:
        super().__init__(settings.mode)
        self.settings = settings
        self.spread = Spread.RANGES if self.mode is Mode.FEED else Spread.TABLES
        self.load_spread = None if self.mode is Mode.HISTORY else Spread.RANGES

    def translate_errors(self, target: Target) -> AbstractContextManager[None]:
        return translate_file_errors(self.location(target))

    def open(self, mark: BatchMark, part: int) -> Writer:
        return LakeWriter(self, mark)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        staged: dict[str, tuple[Target, list[DataFile]]] = {}
        for receipt in receipts:
            for staged_part in receipt.staged:
                target = Target.from_json(staged_part["target"])
                files = staged.setdefault(str(target.name), (target, []))[1]
                files += [DataFile.from_json(file) for file in staged_part["files"]]

        def commit_table(name: str) -> None:
            target, files = staged[name]
            with translate_file_errors(self.location(target)):
                committed.append(self._commit_staged(mark, target, files))

        committed: list[LakeTable] = []
        try:
            call_for_each(commit_table, staged, self.commit_threads_max)
        finally:
            with translate_file_errors("the tables' logs"):
                sync_tables(committed)

    def output(self, table: LakeTable, *, with_bounds: bool = True, syncs_later: bool = False) -> PartFiles:
        """Return a writer for new files of a table; see `PartFiles`."""
        return PartFiles(
            table.folder,
            table.schema,
            bytes_max=self.settings.file_bytes,
            compression=self.settings.compression,
            prefix=table.file_prefix,
            with_bounds=with_bounds,
            syncs_later=syncs_later,
        )

    def memory_for(self, mark: BatchMark) -> int:
        """Return the memory for the rows of a batch that one writer buffers."""
        return min(self.settings.memory_bytes, mark.buffered_bytes_max)

    # --- Commits ----------------------------------------------------------------------------

    def _commit_staged(self, mark: BatchMark, target: Target, files: Sequence[DataFile]) -> LakeTable:
        """Commit staged files: add them if none of their rows can exist already, otherwise merge them.

        Returns the table, whose version has to be synced.
        """
        table = self.open_prepared(target)
        last_number = table.number(mark.application)
        if is_repeated(mark, last_number):
            return table
        numbers = numbers_of(mark)
        if self.mode is Mode.FEED:
            table.commit([table.describe(file) for file in files], [], numbers)
            return table
        loads = table.number(mark.application + _LOADS)
        if loads == last_number and (last_number is not None or not table.files()):
            numbers[mark.application + _LOADS] = mark.number
            table.commit([table.describe(file) for file in files], [], numbers)
            return table
        self._merge_staged(table, target, files, numbers)
        return table

    def _merge_staged(
        self, table: LakeTable, target: Target, files: Sequence[DataFile], numbers: Mapping[str, int]
    ) -> None:
        spill_file = SpillFile()
        mirror = self.mirror_of(target, table, self.settings.memory_bytes, spill_file)
        try:
            for file in files:
                with table.folder.open(file.path) as opened:
                    for batch in opened.iter_batches():
                        mirror.add_stored(pyarrow.Table.from_batches([batch]))
            mirror.commit(numbers)
        except BaseException:
            mirror.abort()
            raise
        finally:
            spill_file.close()
        table.folder.delete([staged_file.path for staged_file in files])

    def mirror_of(
        self,
        target: Target,
        table: LakeTable,
        memory_bytes: int,
        spill_file: SpillFile,
        output_of_version: Callable[[], PartFiles] | None = None,
    ) -> MirrorTable:
        """Return the changes of one batch to a mirror; see `MirrorTable`."""
        return MirrorTable(
            target,
            table,
            lambda: self.output(table),
            bytes_max=self.settings.file_bytes,
            memory_bytes=memory_bytes,
            spill_file=spill_file,
            output_of_version=output_of_version,
        )


class LakeWriter(Writer):
    """Writes one task's part.

    Commits tables that it receives completely, and stages the files of all other tables.
    """

    def __init__(self, sink: LakeSink, mark: BatchMark) -> None:
        self._sink = sink
        self._mark = mark
        self._rows: Counter[str] = Counter()
        self._bytes = 0
        self._unrepresentable: Counter[str] = Counter()
        self._columns_missing: dict[str, list[str]] = {}
        # None for a table whose batch is already committed.
        self._whole: dict[TableName, MirrorTable | HistoryTable | None] = {}
        self._staged: dict[TableName, tuple[Target, pyarrow.Schema, PartFiles]] = {}
        self._memory_bytes = sink.memory_for(mark)
        self._buffered = BufferedTables(self._memory_bytes)
        self._spill_file = SpillFile()
        # The tables whose last version, with this batch, may not be durable yet.
        self._committed: list[LakeTable] = []
        # The writers whose files are not durable yet.
        self._outputs: list[PartFiles] = []

    def write(self, changes: Changes) -> None:
        self._rows[str(changes.target.name)] += len(changes)
        self._bytes += changes.rows.nbytes
        sink = self._sink
        with self.working_on(changes.target.name), translate_file_errors(sink.location(changes.target)):
            if sink.mode is Mode.HISTORY:
                # Refuse partial images: the row versions of a history need the values of all columns.
                refuse_partial(changes)
            # A part with only load rows may be one of several parts of its table.
            if sink.mode is Mode.FEED or (sink.mode is Mode.MIRROR and self._is_partial_load(changes)):
                self._stage(changes)
                return
            table = self._open_whole(changes.target)
            if table is not None:
                table.add(changes)
                self._buffered.note(table)

    def empty(self, target: Target, version: int) -> None:
        if self._sink.mode is Mode.FEED:
            return
        with self.working_on(target.name), translate_file_errors(self._sink.location(target)):
            table = self._open_whole(target)
            if table is not None:
                table.empty(version)

    def finish(self) -> Receipt:
        staged, unsynced = [], list[str]()
        for name, whole in self._whole.items():
            if whole is not None:
                with self.working_on(name), translate_file_errors(str(name)):
                    whole.stage()
                self._unrepresentable += whole.unrepresentable
        for output in self._outputs:
            unsynced += output.take_unsynced()
        for name, (target, _, files) in self._staged.items():
            with self.working_on(name), translate_file_errors(str(name)):
                written = files.close()
            unsynced += files.take_unsynced()
            staged.append({"target": target.to_json(), "files": [file.to_json() for file in written]})
        with translate_file_errors("the data files"):
            sync_paths(unsynced)
        self._commit_whole()
        self._spill_file.close()
        return Receipt(
            sum(self._rows.values()),
            self._bytes,
            dict(self._rows),
            tuple(staged),
            dict(self._unrepresentable),
            columns_missing=self._columns_missing,
        )

    def _commit_whole(self) -> None:
        """Commit the tables that were received completely."""
        numbers = numbers_of(self._mark)

        def commit_table(name: TableName) -> None:
            table = self._whole[name]
            if table is not None:
                with translate_file_errors(str(name)):
                    table.commit(numbers)
                self._committed.append(table.table)
                self._whole[name] = None

        try:
            self.call_for_targets(commit_table, list(self._whole), self._sink.commit_threads_max)
        finally:
            with translate_file_errors("the tables' logs"):
                sync_tables(self._committed)

    def _output_of_version(self, table: LakeTable) -> PartFiles:
        """Return a writer for files that `finish` makes durable, together with those of other tables."""
        output = self._sink.output(table, syncs_later=True)
        self._outputs.append(output)
        return output

    def abort(self) -> None:
        for table in self._whole.values():
            if table is not None:
                table.abort()
        for _, _, files in self._staged.values():
            files.abort()
        self._spill_file.close()

    def _is_partial_load(self, changes: Changes) -> bool:
        of_load = changes.origin is Origin.LOAD and self._mark.loads
        return of_load and changes.target.name not in self._whole

    def _stage(self, changes: Changes) -> None:
        name = changes.target.name
        if name not in self._staged:
            table = self._open_table(changes.target)
            # Collect no bounds here, because the commit reads the bounds from the files' footers.
            files = self._sink.output(table, with_bounds=False)
            self._staged[name] = changes.target, table.schema, files
            # The commit of the staged files opens the table next.
            table.release()
        _, schema, files = self._staged[name]
        rows = pyarrow.Table.from_batches([changes.rows])
        if self._sink.mode is Mode.MIRROR:
            check_keys(changes.target, rows)
        self._unrepresentable += unrepresentable_counts(changes.target, rows)
        files.write(stored_rows(rows, schema))
        self._buffered.note(files)

    def _open_table(self, target: Target) -> LakeTable:
        table = self._sink.open_prepared(target)
        if absent := self._sink.absent_columns(target, table):
            self._columns_missing[str(target.name)] = absent
        return table

    def _open_whole(self, target: Target) -> MirrorTable | HistoryTable | None:
        name = target.name
        if name not in self._whole:
            table = self._open_table(target)
            if is_repeated(self._mark, table.number(self._mark.application)):
                self._committed.append(table)
                self._whole[name] = None
            elif self._sink.mode is Mode.HISTORY:
                self._whole[name] = HistoryTable(
                    target,
                    table,
                    partial(self._output_of_version, table),
                    bytes_max=self._sink.settings.file_bytes,
                    memory_bytes=self._memory_bytes,
                    spill_file=self._spill_file,
                )
            else:
                self._whole[name] = self._sink.mirror_of(
                    target,
                    table,
                    self._memory_bytes,
                    self._spill_file,
                    partial(self._output_of_version, table),
                )
        return self._whole[name]


def numbers_of(mark: BatchMark) -> dict[str, int]:
    """Return the numbers that a table stores for a batch: the application's, and the pipeline's."""
    return {mark.application: mark.number, applications_of(mark.pipeline): mark.number}
