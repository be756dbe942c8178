# SPDX-License-Identifier: Apache-2.0
"""The first stage of a batch: decode a byte range, or the chunks of one task, and apply the pipeline's steps
to the rows.

The task either writes the rows itself or passes them on to the second stage, where each part is written by
one task. For a sink that keeps state, the task passes on only the last image of each key.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, DefiningStatement, Origin, Target
from penstock.engine.allocator import return_large_buffers
from penstock.engine.joints import Ends
from penstock.engine.part_writing import PartWriting
from penstock.engine.parts import in_log_order, parts_of, slices, table_part
from penstock.engine.reading import ChunkReads, RangeParts, range_parts, removed_changes
from penstock.engine.row_counts import DEAD, READ, count_changes, count_operations
from penstock.engine.task_plan import (
    COUNTS,
    EMPTIED,
    OF_CHUNK,
    OF_DEFINITION,
    OF_MOVE,
    OF_STATEMENT,
    OF_TARGET,
    PROBLEM,
    READING,
    RECEIPT,
    ROWS,
    STATEMENT,
    STEPS,
    SURPRISE,
    Counts,
    Failure,
    Surprise,
    TaskPlan,
    place_key,
)
from penstock.engine.task_resources import CLOSED_AFTER_USE, TaskResources
from penstock.engine.task_rows import Row, body_of, receipt_body
from penstock.errors import PenstockError, SchemaChanged, TransientError
from penstock.model import Position, TableName
from penstock.pipeline.cascades import may_cascade
from penstock.pipeline.conforming import check_key, columns_reread, conform_changes, key_is_reread
from penstock.pipeline.dead_letter import open_dead_letter
from penstock.pipeline.evolution import accepts_rows
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.load.watermark import Watermark
from penstock.pipeline.loops import drop_own_changes
from penstock.pipeline.record import ChunkWork, RangeWork
from penstock.pipeline.row_metadata import refuse_absent, refuse_partial, without_hashes
from penstock.pipeline.state import table_key
from penstock.pipeline.step import Rejected, run_steps, target_through
from penstock.pipeline.verify.merges import Emptied, emptied_through
from penstock.sinks.images import LastImages, with_metadata
from penstock.sinks.sink import Evolution, Receipt, Spread, keeps_tables
from penstock.source.reading import Batch, LoggedStatement

# Flush the gathered rows at this fraction of the memory for buffered rows.
_GATHERED_FRACTION = 4
# Messages for the engine sort before all rows of a part.
_FIRST = -1


def decode_works(
    plan: TaskPlan,
    numbers: Sequence[int],
    parts: RangeParts = range_parts,
    resources: TaskResources = CLOSED_AFTER_USE,
    sessions: SessionPool | None = None,
    *,
    is_in_process: bool = False,
) -> Iterator[Row]:
    """Run some works of a task, given by their numbers, and yield their rows and messages.

    `parts` opens the ranges. Steps and sinks come from `resources`. Sessions for chunks come from `sessions`,
    which the caller closes, or by default from a pool that exists only for these works. `is_in_process` tells
    whether the rows stay in this process.
    """
    return_large_buffers()
    with nullcontext(sessions) if sessions is not None else SessionPool() as pool:
        yield from _Task(plan, numbers, parts, resources, pool, is_in_process).run()


class _Task:
    """Processes works that share a writer, one after another."""

    def __init__(
        self,
        plan: TaskPlan,
        numbers: Sequence[int],
        parts: RangeParts,
        resources: TaskResources,
        sessions: SessionPool,
        is_in_process: bool,
    ) -> None:
        self.plan = plan
        self.body_of = partial(body_of, is_in_process=is_in_process)
        self.parts = parts
        self.resources = resources
        self.chunks = ChunkReads(plan, numbers, sessions)
        self.part = numbers[0]
        self.writing = PartWriting(plan, resources)
        self.counts = Counts()
        self.divided = frozenset(plan.record.divided)
        self._numbers = numbers

    def run(self) -> Iterator[Row]:
        """Run the works. After an error or a surprise, the remaining works only report their own errors and
        surprises, and nothing is written. An error that a retry may resolve ends the task.
        """
        has_failed = is_refused = False
        try:
            for number in self._numbers:
                work = _Work(self, number)
                yield from work.run()
                has_failed = has_failed or work.has_failed
                if work.is_refused:
                    is_refused = True
                    self.writing.abort()
                    self.writing = PartWriting(self.plan, self.resources)
                if work.is_interrupted:
                    # The batch is retried, and each remaining work might wait as long for the same server.
                    break
            if is_refused:
                self.writing.abort()
            else:
                yield from self._finish()
        except PenstockError as problem:
            has_failed = True
            self.writing.abort()
            for failure in self.writing.failures(problem) if self.writing.refused else [Failure(problem)]:
                yield from _to_all_parts(self.plan, PROBLEM, self.part, pickle.dumps(failure))
        except BaseException:
            # Either the consumer stopped reading, or the exception comes from a bug. The driver raises it.
            self.writing.abort()
            raise
        finally:
            self.chunks.close()
        if not has_failed:
            yield self._message(COUNTS, self.counts)

    def _finish(self) -> Iterator[Row]:
        receipt = self.writing.finish()
        if receipt is not None:
            yield self._message(RECEIPT, receipt_body(receipt))

    def _message(self, kind: str, body: bytes | Counts | Receipt) -> Row:
        part = self.part if self.plan.in_one_stage else 0
        return Row(part, _FIRST if kind == COUNTS else self.part, self.part, kind, body)


class _Work:
    """Processes one work of a batch.

    `is_refused` says whether it met an error or a surprise, `has_failed` whether it met an error, and
    `is_interrupted` whether a retry may resolve the error.
    """

    def __init__(self, task: _Task, number: int) -> None:
        self._task = task
        self._plan = plan = task.plan
        self._number = number
        self._work = plan.record.works[number]
        self._seq = 0
        self._surprised: set[Any] = set()
        self._counts = task.counts
        self._steps = [task.resources.take(step, step.make) for step in plan.steps]
        # Steps refuse partial images of the columns that they read, and the target refuses partial images of
        # the remaining columns.
        self._refuses_partial_input = plan.keeps_state and any(step.reads_any_column for step in self._steps)
        self._aside = open_dead_letter(plan.steps, plan.dead_letter, plan.mark, number)
        self._table = ""
        # The source that is being read, "" once all of it has been read.
        self._source = self._work.source
        self._writing = task.writing
        self.has_failed = self.is_interrupted = False
        self._gathered: dict[Target, LastImages] = {}
        self._gathered_bytes_max = plan.buffered_bytes_max // _GATHERED_FRACTION
        self._sources: dict[Target, TableName] = {}
        self._bytes = 0
        # Commit versions of transactions that a pipeline itself wrote.
        self._marked: frozenset[int] = frozenset()
        self._covered: dict[int, tuple[Target, Target]] = {}

    @property
    def is_refused(self) -> bool:
        return self.has_failed or bool(self._surprised)

    def run(self) -> Iterator[Row]:
        try:
            has_ended = False
            try:
                yield from self._rows()
                has_ended = True
            finally:
                for settings, step in zip(self._plan.steps, self._steps, strict=True):
                    self._task.resources.give_back(settings, step, is_intact=has_ended)
            if not self._surprised:
                yield from self._end()
        except PenstockError as problem:
            self.has_failed, self.is_interrupted = True, isinstance(problem, TransientError)
            failures = [Failure(problem, self._table, self._source)]
            for failure in self._writing.failures(problem) if self._writing.refused else failures:
                yield from self._to_all(PROBLEM, pickle.dumps(failure))

    # --- Input ----------------------------------------------------------------------------

    def _rows(self) -> Iterator[Row]:
        if isinstance(self._work, ChunkWork):
            yield from self._chunk(self._work)
            return
        wave: list[Changes] = []
        wave_position: Position | None = None
        seen: set[tuple[str, int]] = set()
        parts = self._task.parts(self._plan, self._work, self._number, self._note_ends)
        for part in self._counts.timed(READING, parts):
            if isinstance(part, frozenset):
                self._marked = part
                continue
            if isinstance(part, LoggedStatement):
                yield from self._wave(wave)
                wave, seen = [], set()
                yield from self._statement(self._work, part)
                continue
            mark = (part.table, part.schema_version)
            # The batches of a wave contain all changes between two positions of the log.
            if part.position != wave_position or mark in seen:
                yield from self._wave(wave)
                wave, wave_position, seen = [], part.position, set()
            seen.add(mark)
            changes = yield from self._typed(self._work, part)
            if changes is not None:
                wave.append(changes)
            # Errors in the log itself do not belong to any table.
            self._table = ""
        yield from self._wave(wave)

    def _note_ends(self, ends: Ends) -> None:
        self._counts.ends[self._number] = ends

    def _chunk(self, work: ChunkWork) -> Iterator[Row]:
        key = self._table = table_key(work.source, work.table)
        if key in self._plan.unread or key in self._plan.passed_over:
            return

        def note_floor(watermark: Watermark) -> None:
            if work.exact:
                self._counts.floors[key] = watermark.floor

        target = target_through(self._steps, self._plan.tables[key].current)
        if work.exact and self._plan.keeps_state and target is not None:
            # Remove the rows of a previous attempt.
            yield from self._empty(key, self._plan.targets[target.name], 0)
        if work.ends_before and target is not None:
            yield from self._empty(key, self._plan.targets[target.name], work.ends_before - 1)
        try:
            # The read has to end with this table, even after an error: the next table may use its session.
            with closing(self._task.chunks.changes(self._number, note_floor)) as chunk:
                for changes in self._counts.timed(READING, chunk):
                    self._counts.chunk_rows += len(changes)
                    self._counts.bytes += changes.rows.nbytes
                    yield from self._wave([changes])
            # Check the sink again: a batch planned by an earlier version may ask for deletes in a target that
            # cannot be compared.
            if work.remove and self._plan.keeps_state and keeps_tables(self._plan.sink.make()):
                for changes in removed_changes(self._plan, work, self._steps):
                    yield from self._output([changes])
        except SchemaChanged as problem:
            if self._writing.refused:
                raise
            # The table was altered or dropped after its definition was read.
            yield from self._surprise(OF_CHUNK, key, work.source, (work.table, problem, work.chunk))

    def _typed(self, work: RangeWork, batch: Batch) -> Any:
        """Return a batch as changes of its table, None if none of its rows is needed."""
        name = TableName.parse(batch.table)
        key = self._table = table_key(work.source, name)
        if key in self._plan.passed_over:
            return None
        known = self._plan.tables.get(key)
        target = known.definitions.get(batch.schema_version) if known is not None else None
        if target is None:
            value = {
                "table": name,
                "version": batch.schema_version,
                "columns": batch.columns,
                "primary_key": batch.primary_key,
                "position": batch.position,
            }
            yield from self._surprise(OF_DEFINITION, (key, batch.schema_version), work.source, value)
            return None
        assert known is not None, "its definition is known"
        rows = batch.to_arrow()
        self._counts.rows += rows.num_rows
        self._counts.bytes += rows.nbytes
        self._counts.count(READ, count_operations(rows))
        if rows.num_rows:
            last = rows.column("_commit_timestamp")[-1]
            self._counts.time_us = max(self._counts.time_us, last.value or 0)
        rows = drop_own_changes(rows, self._plan.loops, self._marked)
        if known.floor and rows.num_rows:
            versions = rows.column("_commit_version")
            # Most rows follow the load of their table, and filtering few rows costs more than a look at them.
            if pc.min(versions).as_py() < known.floor:
                rows = rows.filter(pc.greater_equal(versions, known.floor))
        rows = without_hashes(rows, target, known.current)
        if self._refuses_partial_input:
            refuse_partial(name, rows)
        referred = self._plan.parents.get(key)
        if referred is not None and may_cascade(rows, referred):
            self._counts.cascaded.add(key)
        return Changes(target, rows, name) if rows.num_rows else None

    def _statement(self, work: RangeWork, statement: LoggedStatement) -> Iterator[Row]:
        # Errors from here on, in the log after this batch, do not belong to any table.
        self._table = ""
        key = place_key(work.source, statement.position)
        emptied = self._plan.statements.get(key)
        if emptied is None:
            yield from self._surprise(OF_STATEMENT, key, work.source, statement)
            return
        for table, name in emptied.items():
            if table not in self._plan.passed_over:
                self._table = table
                yield from self._empty(table, self._plan.targets[name], statement.emptied_to)
        self._table = ""
        if self._is_written(work, statement):
            defining = DefiningStatement(
                statement.text,
                statement.database,
                tuple(sorted(statement.tables)),
                statement.version,
                work.source,
                statement.origin,
                statement.definitions,
                tuple(self._targets_emptied(work, statement)),
            )
            yield self._row(0, STATEMENT, pickle.dumps(defining))

    def _targets_emptied(self, work: RangeWork, statement: LoggedStatement) -> Iterator[Target]:
        """Yield the known targets of the tables that a statement empties."""
        for name in sorted(statement.emptied):
            known = self._plan.tables.get(table_key(work.source, name))
            target = None if known is None else target_through(self._steps, known.current)
            if target is not None:
                yield self._plan.targets.get(target.name, target)

    def _is_written(self, work: RangeWork, statement: LoggedStatement) -> bool:
        """Return whether the sink receives a statement. The sink does not receive the statement if a step
        changed the tables that the statement defines, if a step keeps the rows that the statement removes, or
        if the loads of all its tables already include its effect.
        """
        if self._surprised or not self._plan.takes_statements:
            return False
        if not all(step.keeps_definitions for step in self._steps) or self._keeps_rows_of(work, statement):
            return False
        known = [self._plan.tables.get(table_key(work.source, name)) for name in statement.tables]
        floors = [table.floor for table in known if table is not None]
        return not floors or min(floors) <= statement.version

    def _keeps_rows_of(self, work: RangeWork, statement: LoggedStatement) -> bool:
        """Return whether a target keeps the rows that a statement removes from its source table."""
        removed = statement.emptied | statement.unlogged
        for key, table in self._plan.tables.items():
            name = table.current.name
            is_removed = name in removed or name.database in statement.databases
            if (
                is_removed
                and key == table_key(work.source, name)
                and emptied_through(self._steps, table.current) is Emptied.STAYS
            ):
                return True
        return False

    # --- Output ---------------------------------------------------------------------------

    def _wave(self, wave: list[Changes]) -> Iterator[Row]:
        passed: list[Changes] = []
        for changes in wave:
            self._table = table_key(self._work.source, changes.source)
            left = 0
            for stepped in self._counts.timed(STEPS, run_steps(self._steps, changes)):
                if self._steps:
                    outcome = stepped.changes if isinstance(stepped, Rejected) else stepped
                    left += count_changes(outcome).total()
                if isinstance(stepped, Rejected):
                    self._reject(stepped, changes)
                    continue
                if self._plan.keeps_state:
                    refuse_partial(stepped.source, stepped.rows)
                    # A removed row is located by its target's key, which a step may have chosen.
                    refuse_absent(stepped.rows, stepped.target.primary_key, str(stepped.source))
                passed.append(stepped)
            if self._steps:
                # A step in Python may add rows, so the difference may be negative.
                self._counts.filtered += max(0, count_changes(changes).total() - left)
        if passed:
            yield from self._output(passed)

    def _output(self, changes: list[Changes]) -> Iterator[Row]:
        """Output the changes that the steps returned, in the columns of their prepared targets."""
        conformed = []
        for stepped in changes:
            # Errors from here on belong to this table, not to the last table of the wave.
            self._table = table_key(self._work.source, stepped.source)
            prepared = self._prepared(stepped.target)
            if prepared is None:
                value = (self._table, stepped.target)
                yield from self._surprise(OF_TARGET, stepped.target, self._work.source, value)
            elif not self._surprised and (fitting := self._conformed(stepped, prepared)) is not None:
                conformed.append(fitting)
        if conformed and not self._surprised:
            yield from self._emit(conformed)

    def _conformed(self, changes: Changes, prepared: Target) -> Changes | None:
        """Convert changes to the columns of their prepared target. Return None if the rows lack key columns
        and their table is read again later. Raises SchemaChanged.
        """
        plan = self._plan
        if not plan.shares_columns or changes.target is prepared:
            return changes
        current: Target | None = None
        is_reread = plan.keeps_state and plan.schema_changes is Evolution.EVOLVE
        if is_reread and plan.sources[self._work.source].server is not None:
            known = plan.tables.get(table_key(self._work.source, changes.source))
            current = target_through(self._steps, known.current) if known is not None else None
        if key_is_reread(changes.target, prepared, current):
            return None
        check_key(prepared, changes.target)
        return conform_changes(changes, prepared, columns_reread(changes, prepared, current))

    def _prepared(self, target: Target) -> Target | None:
        """Return the prepared target whose columns fit the rows, None if there is none."""
        known = self._covered.get(id(target))
        if known is not None and known[0] is target:
            return known[1]
        plan = self._plan
        prepared = plan.targets.get(target.name)
        if prepared is None:
            return None
        if not plan.keeps_state and not accepts_rows(prepared, target, plan.schema_changes):
            return None
        self._covered[id(target)] = (target, prepared)
        return prepared

    def _emit(self, conformed: list[Changes]) -> Iterator[Row]:
        plan = self._plan
        if plan.in_one_stage:
            for changes in conformed:
                self._writing.write(self._task.part, self._work.source, changes)
        elif plan.spread is Spread.WHOLE:
            if len(conformed) == 1:
                for piece in slices(conformed[0]):
                    yield self._row(0, ROWS, self._task.body_of([piece]))
            else:
                yield self._row(0, ROWS, self._task.body_of(conformed, in_log_order(conformed)))
        elif plan.keeps_state:
            for changes in conformed:
                yield from self._gather(changes)
        else:
            for changes in conformed:
                yield from self._divide(changes)

    def _gather(self, changes: Changes) -> Iterator[Row]:
        held = self._gathered.get(changes.target)
        if held is None:
            # Rows are flushed by size before compacting them would pay off.
            held = self._gathered[changes.target] = LastImages(changes.target, self._gathered_bytes_max)
        if self._plan.metadata_read is not None:
            changes = changes.with_rows(with_metadata(changes.rows, self._plan.metadata_read))
        self._sources[changes.target] = changes.source
        held.add(changes)
        self._bytes += changes.rows.nbytes
        if self._bytes >= self._gathered_bytes_max:
            yield from self._flush_gathered()

    def _flush_gathered(self) -> Iterator[Row]:
        origin = Origin.LOAD if isinstance(self._work, ChunkWork) else Origin.LOG
        for target, held in self._gathered.items():
            rows = held.rows()
            if rows is not None and rows.num_rows:
                for batch in rows.to_batches():
                    yield from self._divide(Changes(target, batch, self._sources[target], origin))
        self._gathered.clear()
        self._bytes = 0

    def _divide(self, changes: Changes) -> Iterator[Row]:
        """Split changes by part and yield them."""
        plan, target = self._plan, changes.target
        divided = str(target.name) in self._task.divided and target.name not in plan.together
        part = parts_of(target, changes.rows, plan.spread, plan.record.parts, divided)
        if isinstance(part, int):
            for piece in slices(changes):
                yield self._row(part, ROWS, self._task.body_of([piece]))
            return
        if not plan.keeps_state and _moves(changes, part):
            # Both images of an update belong to one part, and so do all changes of either key.
            yield from self._surprise(OF_MOVE, target.name, self._work.source, target.name)
            return
        for number in range(plan.record.parts):
            rows = changes.rows.filter(pyarrow.array(part == number))
            if rows.num_rows:
                for piece in slices(changes.with_rows(rows)):
                    yield self._row(number, ROWS, self._task.body_of([piece]))

    def _empty(self, key: str, target: Target, version: int) -> Iterator[Row]:
        if self._surprised:
            return
        if self._plan.in_one_stage:
            self._writing.empty(self._task.part, key, target, version)
            return
        for held in [gathered for gathered in self._gathered if gathered.name == target.name]:
            del self._gathered[held]
        yield from self._flush_gathered()
        body = pickle.dumps((key, target, version))
        whole = self._plan.spread is Spread.WHOLE
        yield self._row(0 if whole else table_part(target.name, self._plan.record.parts), EMPTIED, body)

    def _end(self) -> Iterator[Row]:
        yield from self._flush_gathered()
        # Errors from the dead-letter writer do not belong to any table or source.
        self._table = self._source = ""
        if self._aside is not None:
            self._aside.finish()

    # --- Messages ------------------------------------------------------------------------------

    def _reject(self, rejected: Rejected, source: Changes) -> None:
        self._counts.rejected += len(rejected.changes)
        self._counts.count(DEAD, count_changes(rejected.changes))
        if self._aside is not None:
            self._aside.add(rejected, source)

    def _surprise(self, what: str, key: Any, source: str, value: Any) -> Iterator[Row]:
        if (what, key) not in self._surprised:
            self._surprised.add((what, key))
            self._seq += 1
            surprise = Surprise(what, self._number, self._seq, source, value)
            yield from self._to_all(SURPRISE, pickle.dumps(surprise))

    def _to_all(self, kind: str, body: bytes) -> Iterator[Row]:
        return _to_all_parts(self._plan, kind, self._number, body)

    def _row(self, part: int, kind: str, body: bytes | tuple[Changes, ...]) -> Row:
        self._seq += 1
        return Row(part, self._number, self._seq, kind, body)


def _to_all_parts(plan: TaskPlan, kind: str, work: int, body: bytes) -> Iterator[Row]:
    for part in range(1 if plan.in_one_stage else plan.record.parts):
        yield Row(part, _FIRST, work, kind, body)


def _moves(changes: Changes, part: Any) -> bool:
    """Return whether an update moves a row from one part to another."""
    kinds = changes.rows.column("_change_type")
    after = pc.equal(kinds, "update_postimage").to_numpy(zero_copy_only=False)
    before = pc.equal(kinds, "update_preimage").to_numpy(zero_copy_only=False)
    pairs = after[1:] & before[:-1]
    return bool((part[1:][pairs] != part[:-1][pairs]).any())
