# SPDX-License-Identifier: Apache-2.0
"""One share of a comparison: a target table or a range of its keys, with the matching source rows.

Everything here can be pickled and runs in this process or in a Spark task.
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
from penstock.pipeline.step import Rejected, ShardValue, Slots, Step, run_steps
from penstock.pipeline.steps.soft_delete import Settings as SoftDelete
from penstock.pipeline.verify.hashed import NONE, HashCollector, Hashes, hashes, is_among
from penstock.pipeline.verify.kept_values import TEXTS, expected_values, values_not_held, with_texts
from penstock.pipeline.verify.merges import in_shard
from penstock.pipeline.verify.scope import in_slots
from penstock.pipeline.verify.source_rows import Bound, SourceChunk, SourceTable
from penstock.pipeline.verify.touched import Touched
from penstock.pipeline.verify.unjudged import Unjudged

# Errors limited to one table. Other tables are still compared.
_OF_ONE_TABLE = (OptionInvalid, PrivilegeMissing, SchemaInvalid, ServerUnsupported, StreamError)


@dataclass(frozen=True)
class LeftOut:
    """A source table that is not compared, and the reason.

    `shard` identifies its rows in the target, and is None if they cannot be told apart.
    """

    name: str
    why: str
    shard: ShardValue | None = None


@dataclass(frozen=True)
class ComparedTable:
    """A target table, and every source table whose rows go to it.

    `columns` are the columns to compare, including the key. `left_out` contains the source tables that are
    not compared. `open` is the reason why the target table cannot be compared at all, and "" if it can. Only
    rows in `slots` belong to the pipeline.
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
        """The target with only the columns that a comparison reads; with all columns if it has no key."""
        marks = {step.settings.column for step in self.steps if isinstance(step.settings, SoftDelete)}
        needed = {
            *self.columns,
            *marks,
            *(omitted.shard.column for omitted in self.left_out if omitted.shard is not None),
            *(name for slots in self.slots for name in slots.columns),
        }
        columns = tuple(column for column in self.target.columns if column.name in needed)
        return replace(self.target, columns=columns) if self.target.primary_key else self.target


@dataclass(frozen=True)
class Share:
    """A unit of comparison: a whole table, or a range of its keys.

    For a whole table, `chunks` contains all chunks of its sources. For a range, it contains only the chunk
    with the rows of the range.
    """

    table: ComparedTable
    chunks: tuple[SourceChunk, ...]

    @property
    def bounds(self) -> tuple[Bound, Bound]:
        """The bounds of the key for `Sink.read`, None if unbounded."""
        return (self.chunks[0].low, self.chunks[0].high) if len(self.chunks) == 1 else (None, None)


# The touched rows of each source table, by `SourceTable.key`.
TouchedBySource = dict[tuple[str, str], Touched]


@dataclass
class Suspects:
    """The result of comparing a share: hashes of keys that may differ, and row counts.

    `not_held` counts, by column, values that the target cannot represent. `problem` is the error if one side
    cannot be read.
    """

    keys: Hashes
    source_rows: int = 0
    target_rows: int = 0
    rejected: int = 0
    not_held: Counter[str] = field(default_factory=Counter)
    problem: PenstockError | None = None


@dataclass
class SourceRows:
    """The rows that the target should contain, and which of its rows cannot be judged."""

    rows: list[Changes]
    unjudged: Unjudged


def suspects_of(share: Share, touched: TouchedBySource) -> Suspects:
    """Return the keys whose rows differ between the two sides of a share.

    Errors limited to one table are returned; other errors are raised.
    """
    try:
        return _suspects(share, touched)
    except _OF_ONE_TABLE as problem:
        return Suspects(NONE, problem=problem)


def _suspects(share: Share, touched: TouchedBySource) -> Suspects:
    table, sink = share.table, share.table.sink.make()
    key, columns = table.target.primary_key, table.columns
    if sink.keeps_texts:
        # Texts are part of a row's values, but never of its key.
        key, columns = key or columns, (*columns, TEXTS)
    expected, actual = HashCollector(key, columns), HashCollector(key, columns)
    suspects = Suspects(NONE)
    for changes in expected_rows(share, touched, loaded=True):
        if isinstance(changes, Rejected):
            suspects.rejected += len(changes.changes)
        else:
            expected.add(expected_values(sink, table.target, table.columns, changes.rows))
            suspects.not_held += values_not_held(sink, table.target, table.columns, changes.rows)
    for rows in target_rows(share):
        actual.add(rows)
    suspects.keys = expected.done().differing(actual.done())
    suspects.source_rows, suspects.target_rows = expected.count, actual.count
    return suspects


def source_rows_of(
    share: Share, touched: TouchedBySource, keys: Hashes, *, loaded: bool = False
) -> SourceRows:
    """Return the source rows whose key hashes are in `keys`: all rows, or only those that a full load reads.

    `keys` are ascending.
    """
    source_rows = SourceRows([], Unjudged(share.table.target, share.table.steps))
    for stepped_changes in expected_rows(share, touched, loaded=loaded):
        if isinstance(stepped_changes, Rejected):
            source_rows.unjudged.add(stepped_changes)
        else:
            source_rows.rows += [
                stepped_changes.with_rows(rows)
                for rows in _rows_with_keys(stepped_changes.rows, share.table, keys)
            ]
    return source_rows


def target_rows_of(share: Share, keys: Hashes) -> list[pyarrow.RecordBatch]:
    """Return the target's rows whose key hashes are in `keys`. `keys` are ascending."""
    return [kept for rows in target_rows(share) for kept in _rows_with_keys(rows, share.table, keys)]


def expected_rows(
    share: Share, touched: TouchedBySource, *, loaded: bool = False
) -> Iterator[Changes | Rejected]:
    """Yield the rows that the target should have: the source's earlier rows, after the steps.

    With `loaded`, only rows that a full load would read are included, apart from the rows that later changes
    touched.
    """
    steps = [step_settings.make() for step_settings in share.table.steps]
    try:
        for chunk in share.chunks:
            touched_rows = touched.get(chunk.table.key)
            for changes in chunk.rows(loaded=loaded):
                rows = changes if touched_rows is None else touched_rows.untouched(changes)
                yield from _for_target(steps, rows, share.table.target)
        # Yield touched rows once per table, limited to the range if the share has one chunk.
        for chunk in {chunk.table.key: chunk for chunk in share.chunks}.values():
            touched_rows = touched.get(chunk.table.key)
            for changes in touched_rows.before() if touched_rows is not None else ():
                in_range = changes.with_rows(chunk.rows_in_range(changes.rows))
                yield from _for_target(steps, in_range, share.table.target)
    finally:
        for step in steps:
            step.close()


def apply_steps(table: ComparedTable, changes: Changes) -> Iterator[Changes]:
    """Yield the result of the steps on source rows, for one target table."""
    steps = [step_settings.make() for step_settings in table.steps]
    try:
        for stepped_changes in _for_target(steps, changes, table.target):
            if not isinstance(stepped_changes, Rejected):
                yield stepped_changes
    finally:
        for step in steps:
            step.close()


def target_rows(share: Share) -> Iterator[pyarrow.RecordBatch]:
    """Yield the target's rows, except those of left-out shards and of other pipelines.

    If the sink keeps texts, the column TEXTS comes last.
    """
    table, sink = share.table, share.table.sink.make()
    target = table.read_columns
    marks = [step.settings.column for step in table.steps if isinstance(step.settings, SoftDelete)]
    marks = [name for name in marks if name in target.column_names]
    try:
        for rows in sink.read(target, *share.bounds):
            for name in marks:
                # A row marked as deleted is no longer a row of the source.
                rows = rows.filter(pc.not_equal(pc.cast(rows.column(name), pyarrow.int64()), 1))
            for omitted in table.left_out:
                if omitted.shard is not None:
                    rows = rows.filter(pyarrow.array(~in_shard(rows, omitted.shard)))
            if table.slots:
                rows = rows.filter(pyarrow.array(in_slots(rows, table.slots)))
            values = rows.select(target.column_names)
            yield with_texts(values, rows, table.columns) if sink.keeps_texts else values
    finally:
        sink.close()


def _for_target(steps: list[Step], changes: Changes, target: Target) -> Iterator[Changes | Rejected]:
    for stepped_changes in run_steps(steps, changes):
        if isinstance(stepped_changes, Rejected) or stepped_changes.target.name == target.name:
            yield stepped_changes


def _rows_with_keys(
    rows: pyarrow.RecordBatch, table: ComparedTable, keys: Hashes
) -> list[pyarrow.RecordBatch]:
    hashed = hashes(rows, table.target.primary_key or table.columns)
    kept = rows.filter(pyarrow.array(is_among(hashed, keys)))
    return [kept] if kept.num_rows else []
