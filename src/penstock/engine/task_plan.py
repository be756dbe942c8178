# SPDX-License-Identifier: Apache-2.0
"""What the tasks of one batch are told, and what they tell the driver. Pickles; knows no Spark.

A batch is one Spark job. Tasks decode and apply steps; where the sink wants rows gathered by key or table,
they leave as blobs, which Spark brings to the tasks that write. A task that meets what the driver has not
prepared for (a definition, a statement, a new target) writes nothing and says so: it is a surprise. The
surprises of all tasks come before anything is written, so the driver prepares, and runs the same batch again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow

from penstock.changes import Target
from penstock.engine.joints import Ends
from penstock.errors import PenstockError
from penstock.model import TableName
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import LoopSettings, PipelineSource, SinkSettings, StepSettings
from penstock.sinks.sink import BatchMark, Evolution, Spread

# What tasks hand on: what one blob, or one word to the driver, is.
ROWS, EMPTIED, SURPRISE, PROBLEM, COUNTS, RECEIPT = (
    "rows",
    "emptied",
    "surprise",
    "problem",
    "counts",
    "receipt",
)

# Rows between the two stages: to which part they go, and their order in it.
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

# What surprises are about.
OF_DEFINITION, OF_STATEMENT, OF_TARGET, OF_MOVE = "definition", "statement", "target", "move"
# A table whose chunk cannot be read with the columns that the driver knows.
OF_CHUNK = "chunk"


@dataclass(frozen=True)
class KnownTable:
    """A source's table as the driver knows it: each definition met so far, by its number, and that of now.

    `floor` is the commit version before which its changes are in its load already, 0 for none. `gone` tells
    that its source has dropped it; its rows stay in the target.
    """

    definitions: Mapping[int, Target]
    current: Target
    floor: int = 0
    gone: bool = False


@dataclass(frozen=True)
class TaskPlan:
    """One batch, as its tasks see it.

    `tables` are by `table_key`; `targets` are the prepared tables, by name. `statements` are those that the
    driver has dealt with, by `place_key`, and the targets that each of them empties, by the key of the table
    that each is of. Rows of `together` all go to one part. `passed_over` are tables, by key, that the
    pipeline goes on without. `parents` are the columns, by table key, that foreign keys refer to whose
    actions are not logged. `unread` are tables, by key, whose chunks are left out: they are gone, or read
    again later. `histories` are schema histories by number of the work, where logs do not name columns.
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
    # The epoch of each source's positions now.
    epochs: Mapping[str, int] = field(default_factory=dict)

    @property
    def in_one_stage(self) -> bool:
        """Whether tasks write what they decode."""
        return self.spread is Spread.RANGES


@dataclass(frozen=True)
class Surprise:
    """What a task met that the driver must prepare for. `work` and `seq` tell the order; the rest by
    `what`."""

    what: str
    work: int
    seq: int
    source: str
    value: Any


@dataclass(frozen=True)
class Failure:
    """An error of a task. `table` is the key of the table it is of, where that is known."""

    error: PenstockError
    table: str = ""


@dataclass
class Counts:
    """What one work's task has seen. `floors` are by table key."""

    rows: int = 0
    bytes: int = 0
    time_us: int = 0
    rejected: int = 0
    chunk_rows: int = 0
    # Of a table that was read at one place of the log: the commit version before which changes are in it.
    floors: dict[str, int] = field(default_factory=dict)
    # Tables, by key, whose changes may have changed rows of others without a trace in the log.
    cascaded: set[str] = field(default_factory=set)
    # Of a range: where it was opened and where the next one begins, by the number of the work.
    ends: dict[int, Ends] = field(default_factory=dict)


def place_key(source: str, position: Any) -> str:
    """Return how a place in a source's log is named in a plan."""
    return f"{source}/{position}"
