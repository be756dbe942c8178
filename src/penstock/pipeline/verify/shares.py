# SPDX-License-Identifier: Apache-2.0
"""One share of a comparison: a table of the target or a range of its keys, and the source's rows for it.

Everything here pickles and runs where it is told to: in this process, or in a task of Spark.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Target
from penstock.errors import (
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaInvalid,
    ServerUnsupported,
    StreamError,
)
from penstock.pipeline.settings import SinkSettings, StepSettings
from penstock.pipeline.step import Rejected, ShardValue, Slots, Step, through
from penstock.pipeline.steps.soft_delete import Settings as SoftDelete
from penstock.pipeline.verify.hashed import NONE, Gathered, Hashes, hashes, is_among
from penstock.pipeline.verify.kept_values import TEXTS, expected_values, values_not_held, with_texts
from penstock.pipeline.verify.merges import in_shard
from penstock.pipeline.verify.scope import in_slots
from penstock.pipeline.verify.source_rows import Bound, SourceChunk, SourceTable
from penstock.pipeline.verify.touched import Touched
from penstock.pipeline.verify.unjudged import Unjudged

# Errors that concern one table alone: the others are compared.
_OF_ONE_TABLE = (OptionInvalid, PrivilegeMissing, SchemaInvalid, ServerUnsupported, StreamError)


@dataclass(frozen=True)
class LeftOut:
    """A source's table that is not compared, and why. `shard` tells which rows of the target are its
    own, None where nothing does."""

    name: str
    why: str
    shard: ShardValue | None = None


@dataclass(frozen=True)
class ComparedTable:
    """A table of the target, and every table of a source whose rows come into it.

    `columns` are those that are compared, the key's among them. `left_out` are further tables whose rows come
    into it and are not compared; `open` says why nothing of the table can be, "" where it can. Only rows in
    `slots` are the pipeline's.
    """

    target: Target
    sources: tuple[SourceTable, ...]
    steps: tuple[StepSettings, ...]
    sink: SinkSettings
    columns: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    open: str = ""
    slots: tuple[Slots, ...] = ()

    @property
    def read_columns(self) -> Target:
        """The target with only those of its columns that a comparison reads; all where rows have no key."""
        marks = {one.settings.column for one in self.steps if isinstance(one.settings, SoftDelete)}
        wanted = {
            *self.columns,
            *marks,
            *(one.shard.column for one in self.left_out if one.shard is not None),
            *(name for one in self.slots for name in one.columns),
        }
        columns = tuple(one for one in self.target.columns if one.name in wanted)
        return replace(self.target, columns=columns) if self.target.primary_key else self.target


@dataclass(frozen=True)
class Share:
    """What is compared at once: all of a table and all chunks of its sources, or a range of its keys and the
    one chunk with the rows of that range."""

    table: ComparedTable
    chunks: tuple[SourceChunk, ...]

    @property
    def bounds(self) -> tuple[Bound, Bound]:
        """The bounds of the key as `Sink.read` takes them, None where there is none."""
        return (self.chunks[0].low, self.chunks[0].high) if len(self.chunks) == 1 else (None, None)


# The touched rows of each source table, by `SourceTable.key`.
TouchedBySource = dict[tuple[str, str], Touched]


@dataclass
class Suspects:
    """What comparing a share found: the hashes of keys that may differ, and how many rows were looked at.

    `not_held` counts, by column, values that the target cannot hold; `problem` is why a side cannot be read.
    """

    keys: Hashes
    source_rows: int = 0
    target_rows: int = 0
    rejected: int = 0
    not_held: Counter[str] = field(default_factory=Counter)
    problem: PenstockError | None = None


@dataclass
class SourceRows:
    """The rows that the target has to have, and the rows of the target that cannot be judged."""

    rows: list[Changes]
    unjudged: Unjudged


def suspects_of(share: Share, touched: TouchedBySource) -> Suspects:
    """Return the keys of which the two sides of a share do not have the same rows.

    An error of this one table is returned; others are raised.
    """
    try:
        return _suspects(share, touched)
    except _OF_ONE_TABLE as problem:
        return Suspects(NONE, problem=problem)


def _suspects(share: Share, touched: TouchedBySource) -> Suspects:
    table, sink = share.table, share.table.sink.make()
    key, columns = table.target.primary_key, table.columns
    if sink.keeps_texts:
        # Texts count in a row's values, never in its key.
        key, columns = key or columns, (*columns, TEXTS)
    expected, found = Gathered(key, columns), Gathered(key, columns)
    made = Suspects(NONE)
    for one in expected_rows(share, touched, loaded=True):
        if isinstance(one, Rejected):
            made.rejected += len(one.changes)
        else:
            expected.add(expected_values(sink, table.target, table.columns, one.rows))
            made.not_held += values_not_held(sink, table.target, table.columns, one.rows)
    for rows in target_rows(share):
        found.add(rows)
    made.keys = expected.done().differing(found.done())
    made.source_rows, made.target_rows = expected.count, found.count
    return made


def source_rows_of(
    share: Share, touched: TouchedBySource, keys: Hashes, *, loaded: bool = False
) -> SourceRows:
    """Return the rows of the source's side whose key has one of some hashes, which ascend: all of them, or
    those that a full load takes."""
    found = SourceRows([], Unjudged(share.table.target, share.table.steps))
    for made in expected_rows(share, touched, loaded=loaded):
        if isinstance(made, Rejected):
            found.unjudged.add(made)
        else:
            found.rows += [made.with_rows(rows) for rows in _among(made.rows, share.table, keys)]
    return found


def target_rows_of(share: Share, keys: Hashes) -> list[pyarrow.RecordBatch]:
    """Return the rows that the target has whose key has one of some hashes, which ascend."""
    return [kept for rows in target_rows(share) for kept in _among(rows, share.table, keys)]


def expected_rows(
    share: Share, touched: TouchedBySource, *, loaded: bool = False
) -> Iterator[Changes | Rejected]:
    """Yield the rows that the target has to have: the source's as they were, through the steps.

    With `loaded` untouched rows are only those that a full load takes.
    """
    steps = [one.make() for one in share.table.steps]
    try:
        for chunk in share.chunks:
            known = touched.get(chunk.table.key)
            for changes in chunk.rows(loaded=loaded):
                rows = changes if known is None else known.untouched(changes)
                yield from _for_target(steps, rows, share.table.target)
        # Touched rows come once for a table: all of them, or those of its one chunk here.
        for chunk in {chunk.table.key: chunk for chunk in share.chunks}.values():
            known = touched.get(chunk.table.key)
            for changes in known.before() if known is not None else ():
                held = changes.with_rows(chunk.held(changes.rows))
                yield from _for_target(steps, held, share.table.target)
    finally:
        for step in steps:
            step.close()


def stepped(table: ComparedTable, changes: Changes) -> Iterator[Changes]:
    """Yield what steps make of rows of a source for one table of the target."""
    steps = [one.make() for one in table.steps]
    try:
        for made in _for_target(steps, changes, table.target):
            if not isinstance(made, Rejected):
                yield made
    finally:
        for step in steps:
            step.close()


def target_rows(share: Share) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows that the target has, but those of shards that are left out or of
    other pipelines. With a sink that keeps texts
    the column TEXTS stands behind the others."""
    table, sink = share.table, share.table.sink.make()
    target = table.read_columns
    marks = [one.settings.column for one in table.steps if isinstance(one.settings, SoftDelete)]
    marks = [name for name in marks if name in target.column_names]
    try:
        for rows in sink.read(target, *share.bounds):
            for name in marks:
                # What is marked as deleted is no row of the source any more.
                rows = rows.filter(pc.not_equal(pc.cast(rows.column(name), pyarrow.int64()), 1))
            for one in table.left_out:
                if one.shard is not None:
                    rows = rows.filter(pyarrow.array(~in_shard(rows, one.shard)))
            if table.slots:
                rows = rows.filter(pyarrow.array(in_slots(rows, table.slots)))
            values = rows.select(target.column_names)
            yield with_texts(values, rows, table.columns) if sink.keeps_texts else values
    finally:
        sink.close()


def _for_target(steps: list[Step], changes: Changes, target: Target) -> Iterator[Changes | Rejected]:
    for made in through(steps, changes):
        if isinstance(made, Rejected) or made.target.name == target.name:
            yield made


def _among(rows: pyarrow.RecordBatch, table: ComparedTable, keys: Hashes) -> list[pyarrow.RecordBatch]:
    hashed = hashes(rows, table.target.primary_key or table.columns)
    kept = rows.filter(pyarrow.array(is_among(hashed, keys)))
    return [kept] if kept.num_rows else []
