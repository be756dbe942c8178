# SPDX-License-Identifier: Apache-2.0
"""The seam of the sinks: whoever drives one (Spark's tasks, a relay, a repair) knows no more than this.

A kind of sink is a folder beside this file, found by the `sink.py` in it, which has

    class Settings(Section)              what the settings file may say of it
    def make(settings: Settings) -> Sink
    EXTRA: str                           what `pip install penstock[EXTRA]` is called, "" for none

A sink pickles and holds nothing open: `check`, `prepare`, `begin`, `commit` and `read` are called where the
pipeline is driven, `open` where rows are, maybe on another host. All of them may be called again with the
same arguments after a failure at any moment, and then have the same effect as once.
"""

import difflib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pyarrow

from penstock import sinks
from penstock.changes import Changes, Target
from penstock.errors import DependencyMissing, OptionInvalid, ValueMalformed
from penstock.model import TableName
from penstock.settings.values import Section

# What helps where a target's table, which a pipeline had made, is not there any more.
HINT_GONE = (
    "Set errors.table: skip_table, then run penstock resnapshot for it: it is made and loaded again; or begin"
    " anew with all tables: penstock pipelines reset"
)


class Delivery(StrEnum):
    """How often a change shows in the target, whatever fails."""

    # Once: the batch's number is stored in the same commit as its rows.
    EXACTLY_ONCE = "exactly once"
    # Maybe written more than once, with the same outcome as once.
    IDEMPOTENT = "at least once, idempotent"
    # Maybe there more than once.
    AT_LEAST_ONCE = "at least once"


class Spread(StrEnum):
    """Which rows of a batch one writer gets. In every case in commit order."""

    # Those of a byte range, or of a chunk of a table: any writer may write any row at any time.
    RANGES = "ranges"
    # All that share a value of a key of their table, old or new, with one another.
    KEYS = "keys"
    # All of a table.
    TABLES = "tables"
    # All there are, of all tables in log order.
    WHOLE = "whole"


class Evolution(StrEnum):
    """What happens to a target table when its source's columns change."""

    EVOLVE = "evolve"
    ADD_ONLY = "add_only"
    IGNORE = "ignore"
    STOP = "stop"


@dataclass(frozen=True)
class BatchMark:
    """Which batch of which pipeline is written. `number` rises by one, and a failed batch keeps its own.

    `generation` is another one after the pipeline was reset, and numbers begin again: together with
    `pipeline` it is the name under which a sink stores the number. `loads` tells that all of the batch are
    rows of the pipeline's own full load: over all such batches of a table no key comes twice. `shared` is
    what `Sink.begin` returned.
    """

    pipeline: str
    generation: str
    number: int
    loads: bool = False
    shared: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def application(self) -> str:
        """The name under which a target remembers the number."""
        return f"{applications_of(self.pipeline)}{self.generation}"


def applications_of(pipeline: str) -> str:
    """Return how the names begin under which a target remembers a pipeline's numbers, of any generation."""
    return f"penstock/{pipeline}/"


@dataclass(frozen=True)
class Finding:
    """What `check` found. `fatal` ones keep a pipeline from starting; `mend` is the statement that helps."""

    subject: str
    what: str
    fatal: bool = True
    mend: str = ""


@dataclass(frozen=True)
class Receipt:
    """What one writer did: counts for the progress, and what `Sink.commit` needs. Plain JSON in `staged`."""

    rows: int = 0
    bytes: int = 0
    tables: Mapping[str, int] = field(default_factory=dict)
    staged: tuple[Any, ...] = ()
    # Values that the target's types cannot hold, and that were written as null, by "table.column".
    unrepresentable: Mapping[str, int] = field(default_factory=dict)
    # Rows that were not written, as the target has a later version of them.
    outdated: int = 0


class Writer(ABC):
    """Writes what one task has of one batch. Used by one thread, and for one batch."""

    # The target that an error raised now is of; None where it is not known.
    at: TableName | None = None

    @contextmanager
    def working_on(self, name: TableName | None) -> Iterator[None]:
        """Name the one target that the block works on, None for none: an error that leaves it is of that one.

        `at` is again what it was before only where the block ends without an error.
        """
        before, self.at = self.at, name
        yield
        self.at = before

    @abstractmethod
    def write(self, changes: Changes) -> None:
        """Take changes of one table, which follow those of the same table taken before.

        Called several times for a table where there is much; memory is bounded by what one call brings, and
        by the sink's own settings. Raises the errors of `penstock.errors`.
        """

    def empty(self, target: Target, version: int) -> None:
        """Take that the source table was emptied (TRUNCATE) at a commit version, behind all taken before.

        Where a sink keeps a feed of changes, nothing happens.
        """

    @abstractmethod
    def finish(self) -> Receipt:
        """Make what was taken durable, or staged for `Sink.commit`. Without it nothing may be visible for
        good, unless the sink's writes are idempotent."""

    def abort(self) -> None:
        """Let go of everything; the batch will come again. Must not raise for a connection that is gone."""


class Sink(ABC):
    """A target of changes. Pickles."""

    # The kind's name: its folder's.
    kind: str
    # The pipeline that writes, "" where nobody said: tables that another one made are not altered.
    pipeline: str = ""
    delivery: Delivery
    spread: Spread
    # How rows of a full load may be spread, where that is wider; None for `spread`.
    load_spread: Spread | None = None
    # Whether the last image of each key is enough: then those before it may be left out on the way.
    keeps_state: bool = True
    # Whether a row that is read again ends the period of the row that the target has under its key.
    keeps_history: bool = False
    # Whether all rows of a target have the columns that it was prepared with; messages have their own.
    shares_columns: bool = True
    # What of `_metadata` it looks at in rows that are state, so that the rest need not come; None for all.
    metadata_read: tuple[str, ...] | None = None
    # Whether writers have to be in the process that drives the pipeline, whose own output they write.
    in_driver: bool = False
    # Whether what it remembers is of these very tables, and not of all that a server has.
    remembers_alone: bool = False
    # Whether `read` between bounds costs what is between them, and not the whole table.
    reads_ranges: bool = True
    # Whether what is stored in a column is of its type. Else a value may be of the one that it had before,
    # until the table has been read again.
    keeps_types: bool = True
    # Whether values that Arrow's types cannot hold are written as the source's text. Then rows that `read`
    # yields have `_metadata` behind their columns, where those texts stand.
    keeps_texts: bool = False

    @abstractmethod
    def check(self) -> Sequence[Finding]:
        """Connect, and return what keeps it from working: rights, versions, settings. Changes nothing."""

    @abstractmethod
    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        """Return the statements, or descriptions, of what `prepare` would do now. Changes nothing."""

    @abstractmethod
    def prepare(self, target: Target, evolution: Evolution) -> None:
        """Make the target table, or change it to the columns it has to have now; nothing where it fits.

        Called before the first rows of a target are written, and before those with other columns. Columns
        that the target has and these rows do not are filled with null. Raises SchemaChanged where `evolution`
        does not allow it, and where the change would lose values (then the table is loaded again).
        """

    def begin(self, targets: Iterable[Target]) -> Mapping[str, Any]:
        """Return what the writers of a batch must not each find out by themselves, as plain JSON.

        Called before the writers of a batch open, which find it as `BatchMark.shared`; again where the batch
        comes again. `targets` are all that are prepared. A single writer may be opened without it.
        """
        return {}

    def check_together(self, targets: Sequence[Target]) -> None:
        """Raise OptionInvalid where targets cannot stand beside one another. Connects to nothing."""

    @abstractmethod
    def open(self, mark: BatchMark, part: int) -> Writer:
        """Return a writer for one task's part of a batch. Parts are numbered from 0, the same when a batch
        comes again."""

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        """Make visible what the writers of a batch staged, in one commit for each table.

        Called once all of them finished, with their receipts in the order of parts.
        """

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Settle a batch of a feed that was interrupted and cannot be replayed, such as a load of a table
        without a key.

        Return the highest `_commit_version` in the targets if they have the batch. Otherwise remove what they
        have of it and return None. A sink that stores no batch numbers returns None, so its feed may get the
        rows of such a load again: at least once.
        """
        return None

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows that the target table has now, in the types of `target.arrow()`, without the system
        columns; with bounds those whose key is >= `low` and < `high` (by the columns of the primary key in
        their order, as the source compares them).

        Raises OptionInvalid where a sink keeps no table that can be read back.
        """
        raise OptionInvalid(
            f"a {self.kind} sink keeps no table that can be compared",
            hint="Compare mirrors: delta, iceberg, mysql, postgres, clickhouse, mongodb and elasticsearch",
        )

    def held(self, target: Target, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return rows of `target.arrow()` as the target keeps them: null for what its types cannot hold.

        `read` yields the same for them. Keys are left as they are: a sink refuses those that it cannot hold.
        """
        return rows

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Tell whether tables of targets have rows that a pipeline of this name wrote, of any generation.

        Called before the first batch of a pipeline whose state is empty. False where nothing can tell.
        """
        return False

    def close(self) -> None:
        """Let go of connections that calls have left open. It can be used again."""


def kinds() -> list[str]:
    """Return the kinds of sink there are, sorted."""
    folders = [module.name for module in pkgutil.iter_modules(sinks.__path__) if module.ispkg]
    return sorted(name for name in folders if find_spec(f"{sinks.__name__}.{name}.sink") is not None)


def settings_of(kind: str) -> type[Section]:
    """Return what a kind of sink may be told. Raises OptionInvalid, DependencyMissing."""
    found: type[Section] = _module(kind).Settings
    return found


@contextmanager
def typed(target: Target, column: str) -> Iterator[None]:
    """Raise ValueMalformed where the block meets a stored value that is not of a column's type."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError) as problem:
        declared = target.column(column).type_text
        raise ValueMalformed(
            f"the target has a value in column {column} of {target.name} that is no {declared}: {problem}",
            hint=f"Run penstock resnapshot for {target.name}",
        ) from problem


def make_sink(kind: str, settings: Section) -> Sink:
    """Make a sink. Connects to nothing. Raises OptionInvalid, DependencyMissing."""
    made: Sink = _module(kind).make(settings)
    return made


def keeps_tables(sink: Sink) -> bool:
    """Tell whether a sink's target tables can be read back and compared, as far as its kind tells."""
    return type(sink).read is not Sink.read


def extra_missing(package: str, extra: str) -> DependencyMissing:
    """Return the error for an outside part that a sink needs and that is not installed."""
    return DependencyMissing(f"{package} is not installed", hint=f"Run: pip install 'penstock[{extra}]'")


def _module(kind: str) -> Any:
    if kind not in kinds():
        near = difflib.get_close_matches(kind, kinds(), 1)
        raise OptionInvalid(
            f"there is no sink {kind!r}",
            hint=f"Did you mean {near[0]}?" if near else f"There are {', '.join(kinds())}",
        )
    return import_module(f"{sinks.__name__}.{kind}.sink")
