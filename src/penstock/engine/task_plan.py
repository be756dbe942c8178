# SPDX-License-Identifier: Apache-2.0
"""The plan that the tasks of a batch receive, and the messages that they return. All objects here can be
pickled.

A batch is one job of a driver. Tasks decode rows and apply steps. If the sink needs rows grouped by key or
table, they emit them as blobs, which the driver shuffles to the tasks that write. A task that meets a
definition, a statement or a target that is not prepared writes nothing and returns a surprise. All surprises
arrive before anything is written, so the engine prepares for them and runs the same batch again.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow

from penstock.changes import Target
from penstock.engine.joints import Ends
from penstock.errors import PenstockError
from penstock.limits import MIB
from penstock.model import TableName
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import LoopSettings, PipelineSource, SinkSettings, StepSettings
from penstock.sinks.sink import BatchMark, Evolution, Spread

_Part = TypeVar("_Part")

# The phases of a task that `Counts.seconds` has. Its writing is counted by receipts.
READING, STEPS = "read", "steps"

# The kinds of rows that tasks emit: rows for a part, and messages for the engine.
ROWS, EMPTIED, STATEMENT, SURPRISE, PROBLEM, COUNTS, RECEIPT = (
    "rows",
    "emptied",
    "statement",
    "surprise",
    "problem",
    "counts",
    "receipt",
)

# A task never buffers more rows than this, however large a batch is.
BUFFERED_BYTES_MAX = 256 * MIB

# The rows between the two stages: their part, and their order in it.
BETWEEN = pyarrow.schema(
    [
        pyarrow.field("part", pyarrow.int32(), nullable=False),
        pyarrow.field("work", pyarrow.int32(), nullable=False),
        pyarrow.field("seq", pyarrow.int32(), nullable=False),
        pyarrow.field("kind", pyarrow.string(), nullable=False),
        pyarrow.field("body", pyarrow.binary(), nullable=False),
    ]
)
BETWEEN_SQL = (
    "part int not null, work int not null, seq int not null, kind string not null, body binary not null"
)

# What a surprise is about.
OF_DEFINITION, OF_STATEMENT, OF_TARGET, OF_MOVE = "definition", "statement", "target", "move"
# A table whose chunk cannot be read with the columns known to the plan.
OF_CHUNK = "chunk"


@dataclass(frozen=True)
class KnownTable:
    """A source's table: its definitions so far, by number, and the current definition.

    `floor` is the commit version below which changes are already included in the table's load, 0 without a
    load. A table is `gone` after its source has dropped it; its rows stay in the target.
    """

    definitions: Mapping[int, Target]
    current: Target
    floor: int = 0
    gone: bool = False


@dataclass(frozen=True)
class TaskPlan:
    """One batch, as its tasks receive it.

    `tables` maps `table_key` to tables, and `targets` contains the prepared targets by name. `statements`
    maps the `place_key` of each handled statement to the targets that it empties, by the key of their source
    table. All rows of the tables in `together` go to one part. `passed_over` are the keys of tables that the
    pipeline continues without. `parents` contains, by table key, the columns that are referenced by foreign
    keys with unlogged actions. `unread` are the keys of tables whose chunks are skipped, because they are
    gone or read again later. `histories` maps the number of a work to its schema history, for logs that do
    not contain column names.
    """

    mark: BatchMark
    record: BatchRecord
    steps: tuple[StepSettings, ...]
    sink: SinkSettings
    spread: Spread
    keeps_state: bool
    shares_columns: bool
    schema_changes: Evolution
    parents: Mapping[str, frozenset[str]]
    metadata_read: tuple[str, ...] | None
    in_driver: bool
    takes_statements: bool
    sources: Mapping[str, PipelineSource]
    tables: Mapping[str, KnownTable]
    targets: Mapping[TableName, Target]
    statements: Mapping[str, Mapping[str, TableName]] = field(default_factory=dict)
    together: frozenset[TableName] = frozenset()
    passed_over: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    histories: Mapping[int, Any] = field(default_factory=dict)
    loops: LoopSettings = field(default_factory=LoopSettings)
    dead_letter: str = field(default="", repr=False)
    rate_rows: int | None = None
    # The current epoch of each source's positions.
    epochs: Mapping[str, int] = field(default_factory=dict)
    # The approximate memory that a task may use for the rows that it buffers.
    buffered_bytes_max: int = BUFFERED_BYTES_MAX

    @property
    def in_one_stage(self) -> bool:
        """Whether tasks write the rows that they decode."""
        return self.spread is Spread.RANGES

    @property
    def reads_in_driver(self) -> bool:
        """Whether tasks compare keys with a target that only the pipeline's process can read."""
        removes = self.keeps_state and any(chunk.remove for chunk in self.record.chunks)
        return removes and self.sink.make().reads_in_driver


@dataclass(frozen=True)
class Surprise:
    """A finding that the engine must prepare for before a task can continue.

    `work` and `seq` determine its order, and `what` says what kind of object `value` is.
    """

    what: str
    work: int
    seq: int
    source: str
    value: Any


@dataclass(frozen=True)
class Failure:
    """A task's error, with the key of its table if known, and the source if reading the source failed."""

    error: PenstockError
    table: str = ""
    source: str = ""


@dataclass
class Counts:
    """The counts that the task of one work reports. `floors` is by table key."""

    rows: int = 0
    bytes: int = 0
    time_us: int = 0
    rejected: int = 0
    chunk_rows: int = 0
    # Changes that steps removed without rejecting them.
    filtered: int = 0
    # Changes by stage and operation: see `row_counts`.
    by_stage: dict[str, Counter[str]] = field(default_factory=dict)
    # For a table that was read at one log position: the commit version up to which its rows include changes.
    floors: dict[str, int] = field(default_factory=dict)
    # Tables, by key, whose changes may have caused further changes, in other tables, that were not logged.
    cascaded: set[str] = field(default_factory=set)
    # For a range, by work number: where it was opened and where the next range begins.
    ends: dict[int, Ends] = field(default_factory=dict)
    # The time that the task spent, by phase.
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, phase: str, parts: Iterable[_Part]) -> Iterator[_Part]:
        """Yield parts, and count the time that they take to arrive for a phase."""
        iterator = iter(parts)
        while True:
            began = time.perf_counter()
            try:
                part = next(iterator)
            except StopIteration:
                return
            finally:
                spent = time.perf_counter() - began
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
            yield part

    def count(self, stage: str, operations: Counter[str]) -> None:
        """Count changes of a stage."""
        self.by_stage.setdefault(stage, Counter()).update(operations)


def place_key(source: str, position: Any) -> str:
    """Return the key of a log position in a plan."""
    return f"{source}/{position}"
