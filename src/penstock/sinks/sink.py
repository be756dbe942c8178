# SPDX-License-Identifier: Apache-2.0
"""The interface of sinks. Callers (tasks and repairs) depend only on this interface.

A kind of sink is a folder beside this file, recognised by its module `sink.py`, which has

    class Settings(Section)              its settings in the pipeline file
    make: Callable[[Settings], Sink]     its class
    EXTRA: str                           the extra in `pip install penstock[EXTRA]`, "" for none

A sink can be pickled and keeps nothing open. `check`, `prepare`, `begin`, `commit` and `read` are called in
the process that drives the pipeline, `open` where the rows are, possibly on another host. Every call is
idempotent: after a failure at any moment it may be repeated with the same arguments.
"""

import difflib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pyarrow

from penstock import sinks
from penstock.changes import Changes, DefiningStatement, Target
from penstock.errors import DependencyMissing, OptionInvalid, PenstockError, StateOutdated, ValueMalformed
from penstock.model import TableName
from penstock.settings.values import Section
from penstock.sinks.concurrent_calls import call_for_each

# The hint for a missing target table that a pipeline had created.
HINT_GONE = (
    "Set errors.table: skip_table, then run penstock resnapshot for it: it is made and loaded again; or begin"
    " anew with all tables: penstock pipelines reset"
)


class Delivery(StrEnum):
    """How often a change can appear in the target after failures."""

    # Once: the batch's number is stored in the same commit as its rows.
    EXACTLY_ONCE = "exactly once"
    # Possibly written several times, with the same result as writing once.
    IDEMPOTENT = "at least once, idempotent"
    # Possibly present several times.
    AT_LEAST_ONCE = "at least once"


class Spread(StrEnum):
    """Which rows of a batch one writer receives, always in commit order."""

    # The rows of a byte range, or of a chunk of a table. Any writer may write any row at any time.
    RANGES = "ranges"
    # All rows that share an old or new key value of their table, directly or transitively.
    KEYS = "keys"
    # All rows of a table.
    TABLES = "tables"
    # One writer receives every row of every table, in log order.
    WHOLE = "whole"


class Evolution(StrEnum):
    """How a target table follows changes of its source's columns."""

    EVOLVE = "evolve"
    ADD_ONLY = "add_only"
    IGNORE = "ignore"
    STOP = "stop"


@dataclass(frozen=True)
class BatchMark:
    """Identifies the batch that a pipeline is writing.

    `number` increments; a retry keeps its number. `generation` changes when the pipeline is reset, and
    numbering then restarts. With `pipeline` it forms the name under which a sink stores the number. `loads`
    is true if all rows of the batch come from the pipeline's own full load; no key of a table occurs twice
    across all such batches. `shared` is the value that `Sink.begin` returned. A writer buffers rows up to
    about `buffered_bytes_max`, or less by its sink's settings.
    """

    pipeline: str
    generation: str
    number: int
    loads: bool = False
    shared: Mapping[str, Any] = field(default_factory=dict, compare=False)
    buffered_bytes_max: int = field(default=256 << 20, compare=False)

    @property
    def application(self) -> str:
        """The name under which a target stores the number."""
        return f"{applications_of(self.pipeline)}{self.generation}"


def applications_of(pipeline: str) -> str:
    """Return the prefix that the names of a pipeline's batch numbers share in all generations of the
    pipeline.
    """
    return f"penstock/{pipeline}/"


def is_repeated(mark: BatchMark, stored: int | None) -> bool:
    """Return whether a target already has a batch.

    `number` is the last batch number that the target stores, or None. A pipeline writes its batches one after
    another, so only the last batch is ever repeated. Raises StateOutdated if the target stores a later
    number. The state was then restored from a backup, so its next batches would contain different changes
    than the batches that the target already has under the same numbers.
    """
    if stored is not None and stored > mark.number:
        raise StateOutdated(
            f"the target has batch {stored} of the pipeline {mark.pipeline}, whose state is only at batch"
            f" {mark.number}: the state is older than the target",
            hint="Begin another count of batches: penstock pipelines reset FILE --yes. After the run:"
            " penstock verify FILE",
        )
    return stored == mark.number


@dataclass(frozen=True)
class Finding:
    """A problem that `check` found. A fatal finding keeps a pipeline from starting; `mend` is the fix."""

    subject: str
    what: str
    fatal: bool = True
    mend: str = ""


@dataclass(frozen=True)
class Receipt:
    """The result of one writer: row and byte counts for the progress report, and plain JSON in `staged` for
    `Sink.commit`.
    """

    rows: int = 0
    bytes: int = 0
    tables: Mapping[str, int] = field(default_factory=dict)
    staged: tuple[Any, ...] = ()
    # Values that the target's types cannot represent and that became null, by "table.column".
    unrepresentable: Mapping[str, int] = field(default_factory=dict)
    # Rows that were not written because the target has a later version of them.
    outdated: int = 0
    # By target: columns of the rows that the target table does not have. Their values were left out.
    columns_missing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # The changes that the writer received, by operation. The engine counts them.
    operations: Mapping[str, int] = field(default_factory=dict)
    # The time that the writer took. The engine counts it.
    seconds: float = 0.0


class Writer(ABC):
    """Writes the rows of one task in one batch. Used by one thread."""

    # The target to blame if an error is raised now; None if unknown.
    at: TableName | None = None

    @contextmanager
    def working_on(self, name: TableName | None) -> Iterator[None]:
        """Associate errors that are raised in the block with a target, or with no target.

        If the block raises, `at` stays set to this target. Otherwise `at` gets its previous value back.
        """
        before, self.at = self.at, name
        yield
        self.at = before

    def call_for_targets(
        self, function: Callable[[TableName], object], names: Iterable[TableName], threads_max: int
    ) -> None:
        """Call a function for targets like `call_for_each`, and attribute an error to its target."""
        failed: dict[TableName, PenstockError] = {}

        def call(name: TableName) -> None:
            try:
                function(name)
            except PenstockError as problem:
                failed[name] = problem
                raise

        try:
            call_for_each(call, names, threads_max)
        except PenstockError as problem:
            self.at = next(name for name, error in failed.items() if error is problem)
            raise

    @abstractmethod
    def write(self, changes: Changes) -> None:
        """Write changes of one table, which follow earlier changes of the same table.

        May be called several times per table. Memory is bounded by the size of one call and by the sink's own
        settings. Raises only errors of the module `penstock.errors`.
        """

    def empty(self, target: Target, version: int) -> None:
        """Record that the source table was emptied (TRUNCATE) at a version that is higher than those of all
        rows written before.

        A sink that keeps a feed of changes ignores the call.
        """

    def statement(self, statement: DefiningStatement) -> None:
        """Write a statement that follows all rows written before.

        Called only for sinks that accept statements. Other sinks learn about changed columns from
        `Sink.prepare`.
        """

    @abstractmethod
    def finish(self) -> Receipt:
        """Make the written rows durable, or stage them for `Sink.commit`.

        Without this call no row may remain visible, unless the sink's writes are idempotent.
        """

    def abort(self) -> None:
        """Release everything. The batch will be retried. Must not raise if the connection is lost."""


class Sink(ABC):
    """A target to which changes are written. Can be pickled."""

    # The kind's name, which is also the name of its folder.
    kind: str
    # The pipeline that writes, "" if unknown. Tables that another pipeline created are not altered.
    pipeline: str = ""
    delivery: Delivery
    spread: Spread
    # How rows of a full load may be spread if that differs from `spread`; None if it does not.
    load_spread: Spread | None = None
    # Whether only the last image of each key matters, so that earlier images may be dropped.
    keeps_state: bool = True
    # Whether a row that is read again ends the period of the target's row with the same key.
    keeps_history: bool = False
    # Whether all rows of a target share the columns it was prepared with. Each message has its own columns.
    shares_columns: bool = True
    # The fields of `_metadata` that the sink reads from state rows; None for all. Others may be dropped.
    metadata_read: tuple[str, ...] | None = None
    # Whether the statements that define tables are written as well. Needs `Spread.WHOLE`.
    takes_statements: bool = False
    # Whether writers run in the process that drives the pipeline, because they write to its output.
    in_driver: bool = False
    # Whether `remembers` looks only at the given tables, not at everything on a server.
    remembers_alone: bool = False
    # Whether `remembers` and `last_number` look at the given targets, not at records of the whole pipeline.
    remembers_by_target: bool = True
    # Whether `read` with bounds costs only as much as reading the range, not the whole table.
    reads_ranges: bool = True
    # Whether `read` can run only in the process that drives the pipeline, for example because it needs the
    # Spark session.
    reads_in_driver: bool = False
    # Whether each batch adds files or parts to a target table. Their number determines the cost of reading
    # the table.
    makes_files: bool = False
    # Whether the sink keeps the connections of its writers, and nothing else, for writers of later batches.
    keeps_connections: bool = False
    # How many targets may be prepared at once, each by a thread.
    prepare_threads_max: int = 1
    # Whether changes may be written again from any earlier position, in other batches, with the same result.
    # If so, no batch is recorded before it runs, and the ends of several batches may be recorded together.
    can_rewind: bool = False
    # Whether stored values have their column's type. Otherwise a value may have the column's previous type
    # until the table has been read again.
    keeps_types: bool = True
    # Whether values that Arrow cannot represent are written as the source's text. The rows of `read` then
    # have an extra column `_metadata` with those texts.
    keeps_texts: bool = False

    @abstractmethod
    def check(self) -> Sequence[Finding]:
        """Connect, and return problems with privileges, versions or settings. Changes nothing.

        Raises TransientErrors, which the caller retries.
        """

    @abstractmethod
    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        """Return the statements, or descriptions, of what `prepare` would do now. Changes nothing."""

    @abstractmethod
    def prepare(self, target: Target, evolution: Evolution) -> None:
        """Create the target table, or alter it to the target's columns. Does nothing if the table already
        fits.

        Called before the first rows of a target are written, and again before rows with other columns. Target
        columns that these rows do not have are filled with null. Raises SchemaChanged if `evolution` does not
        allow the change, or if the change would lose values; the table is then loaded again.
        """

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Return a context for calls of `prepare`. When the context ends, the effects of all calls are
        durable. Without a context, the effects of each call are durable when it returns.
        """
        yield

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        """Return, for each prepared target, the columns that are missing from its table.

        Called at the start of a run, and before a table is altered, because a column may have been dropped by
        hand. Tables that do not exist are left out: writing their rows fails. Sinks whose tables have no
        columns return {}.
        """
        return {}

    def begin(self, targets: Iterable[Target]) -> Mapping[str, Any]:
        """Return what all writers of a batch share, as plain JSON.

        Called before the writers of a batch are opened, and again for a retry. Writers receive the result as
        `BatchMark.shared`. `targets` are all prepared targets. A single writer may be opened without this
        call.
        """
        return {}

    def check_together(self, targets: Sequence[Target]) -> None:
        """Raise OptionInvalid if targets are in conflict with one another. Does not connect."""

    @abstractmethod
    def open(self, mark: BatchMark, part: int) -> Writer:
        """Return a writer for one task's part of a batch.

        Parts are numbered from 0 and keep their numbers in a retry.
        """

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        """Make the rows visible that the writers of a batch have staged, in one commit per table.

        Called after all writers have finished, with their receipts in the order of parts.
        """

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Settle a batch of a feed that was interrupted and cannot be replayed, such as a load of a table
        without a key.

        `targets` are the targets that received rows of the batch or, if that is unknown, all targets that may
        have received some. Return the highest `_commit_version` in the targets if they have the batch.
        Otherwise remove what they have of it and return None. A sink that stores no batch numbers returns
        None, so its feed may get the rows of such a load again: at least once.
        """
        return None

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yield the target table's current rows in the types of `target.arrow()`, without system columns.

        Bounds select keys >= `low` and < `high`, by the primary key's columns in order, as the source
        compares them. Raises OptionInvalid if the sink keeps no table that can be read back.
        """
        raise OptionInvalid(
            f"a {self.kind} sink keeps no table that can be compared",
            hint="Only sinks that mirror tables can be compared: see docs/guides/verify.md",
        )

    def held(self, target: Target, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return rows, which have the types of `target.arrow()`, in the form in which the target stores them.

        Values that its types cannot represent are null, as in `read`. Keys are unchanged, because a sink
        refuses keys that it cannot represent.
        """
        return rows

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Return whether the targets' tables have rows written by this pipeline, in any generation.

        Called before the first batch of a pipeline with an empty state. False if it cannot be determined.
        """
        return False

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Return the highest batch number of the mark's application in any of the targets.

        Called at the start of a run. Returns None if the targets have no such batch, or if the number cannot
        be determined.
        """
        return None

    def keep_alive(self) -> None:
        """Perform the sink's periodic work. Never raises Penstock errors.

        Called after every batch, and several times a second while there are no changes, in the process that
        drives the pipeline.
        """

    def close(self) -> None:
        """Close open connections. The sink can be used again."""


def kinds() -> list[str]:
    """Return all kinds of sink, sorted."""
    folders = [module.name for module in pkgutil.iter_modules(sinks.__path__) if module.ispkg]
    return sorted(name for name in folders if find_spec(f"{sinks.__name__}.{name}.sink") is not None)


def settings_of(kind: str) -> type[Section]:
    """Return the settings class of a kind of sink. Raises OptionInvalid, DependencyMissing."""
    section: type[Section] = _module(kind).Settings
    return section


@contextmanager
def typed(target: Target, column: str) -> Iterator[None]:
    """Raise ValueMalformed if a stored value in the block does not have a column's type."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError) as problem:
        declared = target.column(column).type_text
        raise ValueMalformed(
            f"the target has a value in column {column} of {target.name} that is no {declared}: {problem}",
            hint=f"Run penstock resnapshot for {target.name}",
        ) from problem


def make_sink(kind: str, settings: Section) -> Sink:
    """Create a sink without connecting. Raises OptionInvalid, DependencyMissing."""
    sink: Sink = _module(kind).make(settings)
    return sink


def keeps_tables(sink: Sink) -> bool:
    """Return whether a kind of sink has target tables that can be read back and compared."""
    return type(sink).read is not Sink.read


def extra_missing(package: str, extra: str) -> DependencyMissing:
    """Return the error for a missing package that a sink needs."""
    return DependencyMissing(f"{package} is not installed", hint=f"Run: pip install 'penstock[{extra}]'")


def _module(kind: str) -> Any:
    if kind not in kinds():
        near = difflib.get_close_matches(kind, kinds(), 1)
        raise OptionInvalid(
            f"there is no sink {kind!r}",
            hint=f"Did you mean {near[0]}?" if near else f"There are {', '.join(kinds())}",
        )
    return import_module(f"{sinks.__name__}.{kind}.sink")
