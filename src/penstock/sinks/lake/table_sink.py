# SPDX-License-Identifier: Apache-2.0
"""The code shared by sinks that create and alter typed tables: mirrors, feeds and histories.

A table stores the batch numbers together with its rows.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Generic, TypeVar

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.errors import OperatorError, OptionInvalid, SchemaChanged, StreamError
from penstock.model import TableName
from penstock.sinks.concurrent_calls import call_for_each
from penstock.sinks.lake.history import history_fields
from penstock.sinks.lake.rows import feed_fields, read_rows, stored_schema
from penstock.sinks.lake.table import StoredTable
from penstock.sinks.lake.types import is_widened
from penstock.sinks.sink import HINT_GONE, BatchMark, Evolution, Sink, applications_of, is_repeated

AnyTable = TypeVar("AnyTable", bound=StoredTable)


class Mode(StrEnum):
    """What a table holds."""

    # The current rows of the source.
    MIRROR = "mirror"
    # Every change, with its system columns.
    FEED = "feed"
    # Every row version, with the times at which it began and ended.
    HISTORY = "history"


class TableSink(Sink, Generic[AnyTable]):
    """Creates, alters and reads tables. Subclasses define how a target opens, creates and writes them."""

    remembers_alone = True
    metadata_read = ("absent", "unrepresentable")
    # The narrowest integer type of the target.
    integer_bits_min = 8

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.keeps_state = mode is Mode.MIRROR
        self.keeps_history = mode is Mode.HISTORY

    @abstractmethod
    def open_table(self, target: Target) -> AnyTable | None:
        """Return a target's table, None if it does not exist."""

    @abstractmethod
    def create_table(self, target: Target, schema: pyarrow.Schema) -> AnyTable:
        """Create a target's table, or return the table that someone has just created."""

    @abstractmethod
    def location(self, target: Target) -> str:
        """Return the location of a target's table, for messages."""

    def translate_errors(self, target: Target) -> AbstractContextManager[None]:
        """Translate the exceptions of the target's client into Penstock errors."""
        return nullcontext()

    # --- The sink's interface ---------------------------------------------------------------

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        self._check_key(target)
        table, schema = self.open_table(target), self.schema_of(target)
        if table is None:
            columns = ", ".join(f"{field.name} {field.type}" for field in schema)
            return [f"create the table {self.location(target)} ({columns})"]
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
        else:
            table.release()

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        missing: dict[TableName, list[str]] = {}

        def compare_columns(table: AnyTable, target: Target) -> None:
            if absent := self.absent_columns(target, table):
                missing[target.name] = absent

        self._read_each(targets, compare_columns)
        return missing

    def _read_each(self, targets: Sequence[Target], read: Callable[[AnyTable, Target], None]) -> None:
        """Open the tables of targets, several at once, and call a function with each."""

        def open_and_read(target: Target) -> None:
            try:
                table = self.open_table(target)
            except (OperatorError, StreamError):
                # Ignore the error here. Writing the table's rows will raise it again, and then `errors.table`
                # decides.
                return
            if table is not None:
                read(table, target)
                table.release()

        call_for_each(open_and_read, targets, self.prepare_threads_max)

    def absent_columns(self, target: Target, table: AnyTable) -> list[str]:
        """Return the columns of a target that its table does not have."""
        existing = set(table.schema.names)
        return [name for name in self.schema_of(target).names if name not in existing]

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for the pipeline's batch numbers in the tables."""
        tables = map(self.open_table, targets)
        return any(
            table is not None and table.number(applications_of(pipeline)) is not None for table in tables
        )

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Raise OptionInvalid if only some of several tables have the batch, because each table has its own
        commit.
        """
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
        numbers: list[int] = []

        def read_number(table: AnyTable, target: Target) -> None:
            if (number := table.number(mark.application)) is not None:
                numbers.append(number)

        self._read_each(targets, read_number)
        return max(numbers, default=None)

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
        with self.translate_errors(target):
            for batch in table.batches(schema.names):
                rows = read_rows(pyarrow.Table.from_batches([batch]), schema)
                rows = within(rows, target, low, high)
                yield from rows.to_batches()

    # --- Columns ----------------------------------------------------------------------------

    def schema_of(self, target: Target) -> pyarrow.Schema:
        """Return the columns of a target's table, as they are stored."""
        further: Sequence[pyarrow.Field] = ()
        if self.mode is Mode.FEED:
            further = feed_fields(self.integer_bits_min)
        elif self.mode is Mode.HISTORY:
            further = history_fields()
        return stored_schema(target, further, self.integer_bits_min)

    def open_prepared(self, target: Target) -> AnyTable:
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
        self, target: Target, table: AnyTable, schema: pyarrow.Schema, evolution: Evolution
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
