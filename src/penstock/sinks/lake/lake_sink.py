# SPDX-License-Identifier: Apache-2.0
"""Tables of a lake as a sink, whichever format they have: mirrors, feeds and histories, one commit a batch.

Writers put files into a table's folder, which nothing refers to yet; a commit names them, and stores the
batch's number. So a batch that comes again finds its number, and files of one that failed are never seen.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes, Origin, Target
from penstock.errors import OptionInvalid, SchemaChanged
from penstock.model import TableName
from penstock.sinks.images import refuse_partial, unrepresentable_counts
from penstock.sinks.lake.history import HistoryTable, history_fields
from penstock.sinks.lake.mirror import MirrorTable
from penstock.sinks.lake.parquet_files import DataFile, PartFiles, files_told
from penstock.sinks.lake.rows import check_keys, feed_fields, read_rows, stored_rows, stored_schema
from penstock.sinks.lake.table import LakeTable
from penstock.sinks.lake.types import is_widened
from penstock.sinks.sink import (
    HINT_GONE,
    BatchMark,
    Delivery,
    Evolution,
    Receipt,
    Sink,
    Spread,
    Writer,
    applications_of,
)

# Under this name a table remembers its last batch that only added rows of a full load.
_LOADS = "/loads"


class Mode(StrEnum):
    """What a table holds."""

    # The source's rows as they are now.
    MIRROR = "mirror"
    # Every change, with its system columns.
    FEED = "feed"
    # Every row that ever was, with the time from which and until which it was the source's.
    HISTORY = "history"


class LakeSink(Sink):
    """Writes tables of a lake. Formats say how a table is opened, made and changed."""

    delivery = Delivery.EXACTLY_ONCE
    remembers_alone = True
    metadata_read = ("absent", "unrepresentable")
    # The narrowest integers that the format has.
    integer_bits_min = 8

    def __init__(self, mode: Mode, *, file_bytes: int, memory_bytes: int, compression: str) -> None:
        self.mode = mode
        self.file_bytes = file_bytes
        self.memory_bytes = memory_bytes
        self.compression = compression
        self.spread = Spread.RANGES if mode is Mode.FEED else Spread.TABLES
        self.load_spread = None if mode is Mode.HISTORY else Spread.RANGES
        self.keeps_state = mode is Mode.MIRROR
        self.keeps_history = mode is Mode.HISTORY

    # --- What a format says -----------------------------------------------------------------

    @abstractmethod
    def open_table(self, target: Target) -> LakeTable | None:
        """Return a target's table, None where there is none."""

    @abstractmethod
    def create_table(self, target: Target, schema: pyarrow.Schema) -> LakeTable:
        """Make a target's table, or return the one that somebody has just made."""

    @abstractmethod
    def place(self, target: Target) -> str:
        """Return where a target's table is, for people."""

    # --- The seam ---------------------------------------------------------------------------

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        self._check_key(target)
        table, schema = self.open_table(target), self.schema_of(target)
        if table is None:
            columns = ", ".join(f"{one.name} {one.type}" for one in schema)
            return [f"make the table {self.place(target)} ({columns})"]
        added, widened = self._differences(target, table, schema, evolution)
        said = [f"add column {one.name} {one.type} to {self.place(target)}" for one in added]
        if widened:
            said.append(f"write {self.place(target)} anew, with wider {', '.join(widened)}")
        return said

    def prepare(self, target: Target, evolution: Evolution) -> None:
        self._check_key(target)
        schema = self.schema_of(target)
        table = self.open_table(target) or self.create_table(target, schema)
        added, widened = self._differences(target, table, schema, evolution)
        if widened:
            types = {one.name: schema.field(one.name).type for one in table.schema if one.name in widened}
            fields = [one.with_type(types.get(one.name, one.type)) for one in table.schema]
            table.widen(pyarrow.schema([*fields, *added]))
        elif added:
            table.add_columns(added)

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for the pipeline's numbers in the tables."""
        tables = map(self.open_table, targets)
        return any(
            table is not None and table.number(applications_of(pipeline)) is not None for table in tables
        )

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Raises OptionInvalid if the batch is in some of several tables: each table has its own commit."""
        if self.mode is not Mode.FEED:
            return None
        numbers = [
            -1 if (table := self.open_table(target)) is None else table.number(mark.application)
            for target in targets
        ]
        committed = [
            target
            for target, number in zip(targets, numbers, strict=True)
            if number is not None and number >= mark.number
        ]
        if committed and len(committed) < len(targets):
            raise OptionInvalid(
                f"a load was interrupted between the commits of its targets: {committed[0].name} has it,"
                f" others of {len(targets)} do not",
                hint="Empty the targets, then start over: penstock pipelines reset FILE --yes",
            )
        versions = [
            pc.max(batch.column(0)).as_py()
            for target in committed
            for batch in self.opened(target).batches(["_commit_version"])
        ]
        return max((version for version in versions if version is not None), default=None)

    def open(self, mark: BatchMark, part: int) -> Writer:
        return LakeWriter(self, mark)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        staged: dict[str, tuple[Target, list[DataFile]]] = {}
        for receipt in receipts:
            for one in receipt.staged:
                target = Target.from_json(one["target"])
                files = staged.setdefault(str(target.name), (target, []))[1]
                files += [DataFile.from_json(file) for file in one["files"]]
        for target, files in staged.values():
            with files_told(self.place(target)):
                self._commit_staged(mark, target, files)

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        if self.mode is not Mode.MIRROR:
            raise OptionInvalid(
                f"a {self.mode} of changes is no table that can be compared", hint="Compare a mirror"
            )
        table = self.open_table(target)
        if table is None:
            return
        schema = target.arrow()
        with files_told(self.place(target)):
            for batch in table.batches(schema.names):
                rows = read_rows(pyarrow.Table.from_batches([batch]), schema)
                rows = within(rows, target, low, high)
                yield from rows.to_batches()

    # --- Columns ----------------------------------------------------------------------------

    def schema_of(self, target: Target) -> pyarrow.Schema:
        """Return the columns of a target's table, as they are stored."""
        further: list[pyarrow.Field] = []
        if self.mode is Mode.FEED:
            columns = [(one.name, one.type_text, one.charset, one.nullable) for one in target.columns]
            whole = pyarrow.schema(_native.arrow_schema(columns, mariadb=target.mariadb))
            further = feed_fields(whole, self.integer_bits_min)
        elif self.mode is Mode.HISTORY:
            further = history_fields()
        return stored_schema(target, further, self.integer_bits_min)

    def output(self, table: LakeTable) -> PartFiles:
        """Return what writes new files of a table."""
        return PartFiles(
            table.folder,
            table.schema,
            bytes_max=self.file_bytes,
            compression=self.compression,
            prefix=table.file_prefix,
        )

    def opened(self, target: Target) -> LakeTable:
        """Return a target's table, which was prepared."""
        table = self.open_table(target)
        if table is None:
            raise OptionInvalid(f"the table {self.place(target)} is gone", hint=HINT_GONE)
        return table

    def _check_key(self, target: Target) -> None:
        if self.mode is not Mode.FEED and not target.primary_key:
            raise OptionInvalid(
                f"{target.name} has no primary key, so its rows cannot be told apart in a {self.mode}",
                hint="Give it one, name one with a map step, leave it out, or use mode: feed",
            )

    def _differences(
        self, target: Target, table: LakeTable, schema: pyarrow.Schema, evolution: Evolution
    ) -> tuple[list[pyarrow.Field], list[str]]:
        """Return the columns to add, and the names of those to widen. Raises SchemaChanged."""
        added = [one for one in schema if one.name not in table.schema.names]
        other = [
            one.name
            for one in schema
            if one.name in table.schema.names and not _holds(table.schema.field(one.name).type, one.type)
        ]
        if evolution is Evolution.IGNORE:
            return [], []
        if (added or other) and evolution is Evolution.STOP:
            raise self._changed(
                target, [*(one.name for one in added), *other], "its columns are not to change"
            )
        narrow = [
            name for name in other if not is_widened(table.schema.field(name).type, schema.field(name).type)
        ]
        if narrow or (other and evolution is Evolution.ADD_ONLY):
            raise self._changed(target, narrow or other, f"{table.schema.field((narrow or other)[0])} stays")
        return added, other

    def _changed(self, target: Target, names: Sequence[str], why: str) -> SchemaChanged:
        return SchemaChanged(
            f"the columns of {target.name} do not fit {self.place(target)}: {', '.join(names)}; {why}",
            hint="Set schema_changes, or drop the target table and run: penstock resnapshot",
        )

    # --- Commits ----------------------------------------------------------------------------

    def _commit_staged(self, mark: BatchMark, target: Target, files: Sequence[DataFile]) -> None:
        """Name files that writers staged: added where nothing can be in their place, else merged."""
        table = self.opened(target)
        done = table.number(mark.application)
        if done is not None and done >= mark.number:
            return
        numbers = numbers_of(mark)
        if self.mode is Mode.FEED:
            table.commit([table.described(one) for one in files], [], numbers)
            return
        loads = table.number(mark.application + _LOADS)
        if loads == done and (done is not None or not table.files()):
            numbers[mark.application + _LOADS] = mark.number
            table.commit([table.described(one) for one in files], [], numbers)
            return
        self._merge_staged(table, target, files, numbers)

    def _merge_staged(
        self, table: LakeTable, target: Target, files: Sequence[DataFile], numbers: Mapping[str, int]
    ) -> None:
        mirror = self.mirror_of(target, table)
        try:
            for file in files:
                with table.folder.open(file.path) as opened:
                    for batch in opened.iter_batches():
                        mirror.add_stored(pyarrow.Table.from_batches([batch]))
            mirror.commit(numbers)
        except BaseException:
            mirror.abort()
            raise
        table.folder.delete([one.path for one in files])

    def mirror_of(self, target: Target, table: LakeTable) -> MirrorTable:
        """Return what one batch makes of a mirror."""
        return MirrorTable(
            target,
            table,
            lambda: self.output(table),
            bytes_max=self.file_bytes,
            memory_bytes=self.memory_bytes,
        )


class LakeWriter(Writer):
    """Writes one task's part. Tables of which it gets everything it commits itself, others it stages."""

    def __init__(self, sink: LakeSink, mark: BatchMark) -> None:
        self._sink = sink
        self._mark = mark
        self._rows: Counter[str] = Counter()
        self._bytes = 0
        self._unrepresentable: Counter[str] = Counter()
        # None for a table whose batch is done already.
        self._whole: dict[TableName, MirrorTable | HistoryTable | None] = {}
        self._staged: dict[TableName, tuple[Target, LakeTable, PartFiles]] = {}

    def write(self, changes: Changes) -> None:
        self._rows[str(changes.target.name)] += len(changes)
        self._bytes += changes.rows.nbytes
        sink = self._sink
        with self.working_on(changes.target.name), files_told(sink.place(changes.target)):
            if sink.mode is Mode.HISTORY:
                # What a row was cannot be told of a part of it.
                refuse_partial(changes)
            # A part that has rows of a load alone may be one of many of its table.
            if sink.mode is Mode.FEED or (sink.mode is Mode.MIRROR and self._is_load_alone(changes)):
                self._stage(changes)
                return
            table = self._of(changes.target)
            if table is not None:
                table.add(changes)

    def empty(self, target: Target, version: int) -> None:
        if self._sink.mode is Mode.FEED:
            return
        with self.working_on(target.name), files_told(self._sink.place(target)):
            table = self._of(target)
            if table is not None:
                table.empty(version)

    def finish(self) -> Receipt:
        for name, table in self._whole.items():
            if table is not None:
                with self.working_on(name), files_told(str(name)):
                    table.commit(numbers_of(self._mark))
                self._unrepresentable += table.unrepresentable
                self._whole[name] = None
        staged = []
        for name, (target, _, files) in self._staged.items():
            with self.working_on(name), files_told(str(name)):
                written = files.finish()
            staged.append({"target": target.to_json(), "files": [one.to_json() for one in written]})
        return Receipt(
            sum(self._rows.values()),
            self._bytes,
            dict(self._rows),
            tuple(staged),
            dict(self._unrepresentable),
        )

    def abort(self) -> None:
        for table in self._whole.values():
            if table is not None:
                table.abort()
        for _, _, files in self._staged.values():
            files.abort()

    def _is_load_alone(self, changes: Changes) -> bool:
        of_load = changes.origin is Origin.LOAD and self._mark.loads
        return of_load and changes.target.name not in self._whole

    def _stage(self, changes: Changes) -> None:
        name = changes.target.name
        if name not in self._staged:
            table = self._sink.opened(changes.target)
            self._staged[name] = changes.target, table, self._sink.output(table)
        _, table, files = self._staged[name]
        rows = pyarrow.Table.from_batches([changes.rows])
        if self._sink.mode is Mode.MIRROR:
            check_keys(changes.target, rows)
        self._unrepresentable += unrepresentable_counts(changes.target, rows)
        files.write(stored_rows(rows, table.schema))

    def _of(self, target: Target) -> MirrorTable | HistoryTable | None:
        name = target.name
        if name not in self._whole:
            table = self._sink.opened(target)
            done = table.number(self._mark.application)
            if done is not None and done >= self._mark.number:
                self._whole[name] = None
            elif self._sink.mode is Mode.HISTORY:
                self._whole[name] = HistoryTable(
                    target, table, lambda: self._sink.output(table), bytes_max=self._sink.file_bytes
                )
            else:
                self._whole[name] = self._sink.mirror_of(target, table)
        return self._whole[name]


def numbers_of(mark: BatchMark) -> dict[str, int]:
    """Return what a table remembers of a batch: its number, and that a pipeline of this name wrote it."""
    return {mark.application: mark.number, applications_of(mark.pipeline): mark.number}


def within(
    rows: pyarrow.Table, target: Target, low: Mapping[str, Any] | None, high: Mapping[str, Any] | None
) -> pyarrow.Table:
    """Return the rows whose key is >= `low` and < `high`, column by column in the key's order."""
    if low is not None:
        rows = rows.filter(pc.invert(_before(rows, target, low)))
    if high is not None:
        rows = rows.filter(_before(rows, target, high))
    return rows


def _before(rows: pyarrow.Table, target: Target, bound: Mapping[str, Any]) -> Any:
    """Tell of each row whether its key is before a bound; null is before all else."""
    before: Any = pyarrow.scalar(False)
    for name in reversed([one for one in target.primary_key if one in bound]):
        column = rows.column(name)
        value = pyarrow.scalar(bound[name], column.type)
        less = pc.fill_null(pc.less(column, value), True)
        same = pc.fill_null(pc.equal(column, value), False)
        before = pc.or_(less, pc.and_(same, before))
    return before


def _holds(stored: pyarrow.DataType, wanted: pyarrow.DataType) -> bool:
    """Tell whether a stored column takes every value of a wanted type as it is."""
    return bool(stored == wanted or is_widened(wanted, stored) or _same_but_names(stored, wanted))


def _same_but_names(stored: pyarrow.DataType, wanted: pyarrow.DataType) -> bool:
    """Tell whether types differ only in what a format calls the parts of lists and maps."""
    types = pyarrow.types
    if types.is_list(stored) and types.is_list(wanted):
        return _holds(stored.value_type, wanted.value_type)
    if types.is_map(stored) and types.is_map(wanted):
        return _holds(stored.key_type, wanted.key_type) and _holds(stored.item_type, wanted.item_type)
    if types.is_struct(stored) and types.is_struct(wanted):
        names = [one.name for one in wanted]
        return names == [one.name for one in stored] and all(
            _holds(stored.field(name).type, wanted.field(name).type) for name in names
        )
    return bool(types.is_timestamp(stored) and types.is_timestamp(wanted) and stored.unit == wanted.unit)
