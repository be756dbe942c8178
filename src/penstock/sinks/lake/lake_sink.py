# SPDX-License-Identifier: Apache-2.0
"""The common part of lake sinks in any format: mirrors, feeds and histories, one commit per batch.

Writers put files into a table's folder that nothing refers to yet. A commit adds them to the table and stores
the batch's number. A retried batch finds its number, and files of a failed batch are never visible.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pydantic import Field

from penstock import _native
from penstock.changes import Changes, Origin, Target
from penstock.errors import OperatorError, OptionInvalid, SchemaChanged, StreamError
from penstock.model import TableName
from penstock.settings.values import Bytes, Section
from penstock.sinks.images import refuse_partial, unrepresentable_counts
from penstock.sinks.lake.history import HistoryTable, history_fields
from penstock.sinks.lake.mirror import MirrorTable
from penstock.sinks.lake.parquet_files import DataFile, PartFiles, translate_file_errors
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
    is_repeated,
)

_FILE_BYTES_DEFAULT = 64 << 20
_MEMORY_BYTES_DEFAULT = 256 << 20
# The suffix under which a table stores its last batch that only added rows of a full load.
_LOADS = "/loads"


class Mode(StrEnum):
    """What a table holds."""

    # The current rows of the source.
    MIRROR = "mirror"
    # Every change, with its system columns.
    FEED = "feed"
    # Every row version, with the times at which it began and ended.
    HISTORY = "history"


class LakeSettings(Section):
    """Where the tables are, and what they contain."""

    # First in the reference. Each format describes its own.
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
        description="memory for one table's rows of a batch; more is spilled to files",
    )
    compression: str = Field(
        default="snappy", description="compression of data files: snappy, zstd, gzip, none"
    )


class LakeSink(Sink):
    """Writes tables of a lake. Subclasses define how a format opens, creates and changes tables."""

    delivery = Delivery.EXACTLY_ONCE
    makes_files = True
    remembers_alone = True
    metadata_read = ("absent", "unrepresentable")
    # The narrowest integer type of the format.
    integer_bits_min = 8

    def __init__(self, settings: LakeSettings) -> None:
        self.settings = settings
        self.mode = mode = settings.mode
        self.spread = Spread.RANGES if mode is Mode.FEED else Spread.TABLES
        self.load_spread = None if mode is Mode.HISTORY else Spread.RANGES
        self.keeps_state = mode is Mode.MIRROR
        self.keeps_history = mode is Mode.HISTORY

    # --- Defined by the format --------------------------------------------------------------

    @abstractmethod
    def open_table(self, target: Target) -> LakeTable | None:
        """Return a target's table, None if it does not exist."""

    @abstractmethod
    def create_table(self, target: Target, schema: pyarrow.Schema) -> LakeTable:
        """Create a target's table, or return the table that someone has just created."""

    @abstractmethod
    def location(self, target: Target) -> str:
        """Return the location of a target's table, for messages."""

    # --- The sink's interface ---------------------------------------------------------------

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        self._check_key(target)
        table, schema = self.open_table(target), self.schema_of(target)
        if table is None:
            columns = ", ".join(f"{field.name} {field.type}" for field in schema)
            return [f"make the table {self.location(target)} ({columns})"]
        added, widened = self._differences(target, table, schema, evolution)
        descriptions = [f"add column {field.name} {field.type} to {self.location(target)}" for field in added]
        if widened:
            descriptions.append(f"write {self.location(target)} again, with wider {', '.join(widened)}")
        return descriptions

    def prepare(self, target: Target, evolution: Evolution) -> None:
        self._check_key(target)
        schema = self.schema_of(target)
        table = self.open_table(target) or self.create_table(target, schema)
        added, widened = self._differences(target, table, schema, evolution)
        if widened:
            types = {
                field.name: schema.field(field.name).type for field in table.schema if field.name in widened
            }
            fields = [field.with_type(types.get(field.name, field.type)) for field in table.schema]
            table.widen(pyarrow.schema([*fields, *added]))
        elif added:
            table.add_columns(added)

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for the pipeline's batch numbers in the tables."""
        tables = map(self.open_table, targets)
        return any(
            table is not None and table.number(applications_of(pipeline)) is not None for table in tables
        )

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Raises OptionInvalid if the batch is in some of several tables: each table has its own commit."""
        if self.mode is not Mode.FEED:
            return None
        committed = [
            target
            for target in targets
            if (table := self.open_table(target)) is not None
            and is_repeated(mark, table.number(mark.application))
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
            for batch in self.open_prepared(target).batches(["_commit_version"])
        ]
        return max((version for version in versions if version is not None), default=None)

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        numbers = []
        for target in targets:
            try:
                table = self.open_table(target)
            except (OperatorError, StreamError):
                # Its rows meet the same error, where `errors.table` decides what follows.
                continue
            if table is not None and (number := table.number(mark.application)) is not None:
                numbers.append(number)
        return max(numbers, default=None)

    def open(self, mark: BatchMark, part: int) -> Writer:
        return LakeWriter(self, mark)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        staged: dict[str, tuple[Target, list[DataFile]]] = {}
        for receipt in receipts:
            for staged_part in receipt.staged:
                target = Target.from_json(staged_part["target"])
                files = staged.setdefault(str(target.name), (target, []))[1]
                files += [DataFile.from_json(file) for file in staged_part["files"]]
        for target, files in staged.values():
            with translate_file_errors(self.location(target)):
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
        with translate_file_errors(self.location(target)):
            for batch in table.batches(schema.names):
                rows = read_rows(pyarrow.Table.from_batches([batch]), schema)
                rows = within(rows, target, low, high)
                yield from rows.to_batches()

    # --- Columns ----------------------------------------------------------------------------

    def schema_of(self, target: Target) -> pyarrow.Schema:
        """Return the columns of a target's table, as they are stored."""
        further: list[pyarrow.Field] = []
        if self.mode is Mode.FEED:
            columns = [
                (column.name, column.type_text, column.charset, column.nullable) for column in target.columns
            ]
            whole = pyarrow.schema(_native.arrow_schema(columns, mariadb=target.mariadb))
            further = feed_fields(whole, self.integer_bits_min)
        elif self.mode is Mode.HISTORY:
            further = history_fields()
        return stored_schema(target, further, self.integer_bits_min)

    def output(self, table: LakeTable) -> PartFiles:
        """Return a writer for new files of a table."""
        return PartFiles(
            table.folder,
            table.schema,
            bytes_max=self.settings.file_bytes,
            compression=self.settings.compression,
            prefix=table.file_prefix,
        )

    def open_prepared(self, target: Target) -> LakeTable:
        """Return a target's table, which must have been prepared."""
        table = self.open_table(target)
        if table is None:
            raise OptionInvalid(f"the table {self.location(target)} is gone", hint=HINT_GONE)
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
        added = [field for field in schema if field.name not in table.schema.names]
        changed = [
            field.name
            for field in schema
            if field.name in table.schema.names
            and not _holds(table.schema.field(field.name).type, field.type)
        ]
        if evolution is Evolution.IGNORE:
            return [], []
        if (added or changed) and evolution is Evolution.STOP:
            raise self._changed(
                target, [*(field.name for field in added), *changed], "its columns are not to change"
            )
        narrow = [
            name for name in changed if not is_widened(table.schema.field(name).type, schema.field(name).type)
        ]
        if narrow or (changed and evolution is Evolution.ADD_ONLY):
            raise self._changed(
                target, narrow or changed, f"{table.schema.field((narrow or changed)[0])} stays"
            )
        return added, changed

    def _changed(self, target: Target, names: Sequence[str], why: str) -> SchemaChanged:
        return SchemaChanged(
            f"the columns of {target.name} do not fit {self.location(target)}: {', '.join(names)}; {why}",
            hint="Set schema_changes, or drop the target table and run: penstock resnapshot",
        )

    # --- Commits ----------------------------------------------------------------------------

    def _commit_staged(self, mark: BatchMark, target: Target, files: Sequence[DataFile]) -> None:
        """Commit staged files: add them if no row can exist already, otherwise merge them."""
        table = self.open_prepared(target)
        last_number = table.number(mark.application)
        if is_repeated(mark, last_number):
            return
        numbers = numbers_of(mark)
        if self.mode is Mode.FEED:
            table.commit([table.describe(file) for file in files], [], numbers)
            return
        loads = table.number(mark.application + _LOADS)
        if loads == last_number and (last_number is not None or not table.files()):
            numbers[mark.application + _LOADS] = mark.number
            table.commit([table.describe(file) for file in files], [], numbers)
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
        table.folder.delete([staged_file.path for staged_file in files])

    def mirror_of(self, target: Target, table: LakeTable) -> MirrorTable:
        """Return the changes of one batch to a mirror."""
        return MirrorTable(
            target,
            table,
            lambda: self.output(table),
            bytes_max=self.settings.file_bytes,
            memory_bytes=self.settings.memory_bytes,
        )


class LakeWriter(Writer):
    """Writes one task's part.

    Commits tables that it receives completely, and stages the files of others.
    """

    def __init__(self, sink: LakeSink, mark: BatchMark) -> None:
        self._sink = sink
        self._mark = mark
        self._rows: Counter[str] = Counter()
        self._bytes = 0
        self._unrepresentable: Counter[str] = Counter()
        # None for a table whose batch is already committed.
        self._whole: dict[TableName, MirrorTable | HistoryTable | None] = {}
        self._staged: dict[TableName, tuple[Target, LakeTable, PartFiles]] = {}

    def write(self, changes: Changes) -> None:
        self._rows[str(changes.target.name)] += len(changes)
        self._bytes += changes.rows.nbytes
        sink = self._sink
        with self.working_on(changes.target.name), translate_file_errors(sink.location(changes.target)):
            if sink.mode is Mode.HISTORY:
                # A partial image does not determine the row's version.
                refuse_partial(changes)
            # A part with only load rows may be one of several parts of its table.
            if sink.mode is Mode.FEED or (sink.mode is Mode.MIRROR and self._is_partial_load(changes)):
                self._stage(changes)
                return
            table = self._open_whole(changes.target)
            if table is not None:
                table.add(changes)

    def empty(self, target: Target, version: int) -> None:
        if self._sink.mode is Mode.FEED:
            return
        with self.working_on(target.name), translate_file_errors(self._sink.location(target)):
            table = self._open_whole(target)
            if table is not None:
                table.empty(version)

    def finish(self) -> Receipt:
        for name, table in self._whole.items():
            if table is not None:
                with self.working_on(name), translate_file_errors(str(name)):
                    table.commit(numbers_of(self._mark))
                self._unrepresentable += table.unrepresentable
                self._whole[name] = None
        staged = []
        for name, (target, _, files) in self._staged.items():
            with self.working_on(name), translate_file_errors(str(name)):
                written = files.finish()
            staged.append({"target": target.to_json(), "files": [file.to_json() for file in written]})
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

    def _is_partial_load(self, changes: Changes) -> bool:
        of_load = changes.origin is Origin.LOAD and self._mark.loads
        return of_load and changes.target.name not in self._whole

    def _stage(self, changes: Changes) -> None:
        name = changes.target.name
        if name not in self._staged:
            table = self._sink.open_prepared(changes.target)
            self._staged[name] = changes.target, table, self._sink.output(table)
        _, table, files = self._staged[name]
        rows = pyarrow.Table.from_batches([changes.rows])
        if self._sink.mode is Mode.MIRROR:
            check_keys(changes.target, rows)
        self._unrepresentable += unrepresentable_counts(changes.target, rows)
        files.write(stored_rows(rows, table.schema))

    def _open_whole(self, target: Target) -> MirrorTable | HistoryTable | None:
        name = target.name
        if name not in self._whole:
            table = self._sink.open_prepared(target)
            if is_repeated(self._mark, table.number(self._mark.application)):
                self._whole[name] = None
            elif self._sink.mode is Mode.HISTORY:
                self._whole[name] = HistoryTable(
                    target, table, lambda: self._sink.output(table), bytes_max=self._sink.settings.file_bytes
                )
            else:
                self._whole[name] = self._sink.mirror_of(target, table)
        return self._whole[name]


def numbers_of(mark: BatchMark) -> dict[str, int]:
    """Return the numbers that a table stores for a batch: the application's, and the pipeline's."""
    return {mark.application: mark.number, applications_of(mark.pipeline): mark.number}


def within(
    rows: pyarrow.Table, target: Target, low: Mapping[str, Any] | None, high: Mapping[str, Any] | None
) -> pyarrow.Table:
    """Return the rows with keys >= `low` and < `high`, compared column by column in key order."""
    if low is not None:
        rows = rows.filter(pc.invert(_before(rows, target, low)))
    if high is not None:
        rows = rows.filter(_before(rows, target, high))
    return rows


def _before(rows: pyarrow.Table, target: Target, bound: Mapping[str, Any]) -> Any:
    """Return a mask of the rows with keys before a bound. Null sorts first."""
    before: Any = pyarrow.scalar(False)
    for name in reversed([key_column for key_column in target.primary_key if key_column in bound]):
        column = rows.column(name)
        value = pyarrow.scalar(bound[name], column.type)
        less = pc.fill_null(pc.less(column, value), True)
        same = pc.fill_null(pc.equal(column, value), False)
        before = pc.or_(less, pc.and_(same, before))
    return before


def _holds(stored: pyarrow.DataType, wanted: pyarrow.DataType) -> bool:
    """Return whether a stored column can represent every value of a wanted type."""
    return bool(stored == wanted or is_widened(wanted, stored) or _same_but_names(stored, wanted))


def _same_but_names(stored: pyarrow.DataType, wanted: pyarrow.DataType) -> bool:
    """Return whether types differ only in the names of nested fields."""
    types = pyarrow.types
    if types.is_list(stored) and types.is_list(wanted):
        return _holds(stored.value_type, wanted.value_type)
    if types.is_map(stored) and types.is_map(wanted):
        return _holds(stored.key_type, wanted.key_type) and _holds(stored.item_type, wanted.item_type)
    if types.is_struct(stored) and types.is_struct(wanted):
        names = [field.name for field in wanted]
        return names == [field.name for field in stored] and all(
            _holds(stored.field(name).type, wanted.field(name).type) for name in names
        )
    return bool(types.is_timestamp(stored) and types.is_timestamp(wanted) and stored.unit == wanted.unit)
