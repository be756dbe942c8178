# SPDX-License-Identifier: Apache-2.0
"""Runs one batch after another: run its tasks, commit it in the sink, and record it as done."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from penstock.engine.batch_plan import floors_of, mark_of, planned_again, task_plan
from penstock.engine.beginning import purged
from penstock.engine.driver import Driver
from penstock.engine.interrupted_loads import committed_floors, record_written
from penstock.engine.job import Outcome, run_job
from penstock.engine.loading import Loading
from penstock.engine.progress import Progress
from penstock.engine.recording import Recording
from penstock.engine.servers import watched
from penstock.engine.source_log import SourceLog
from penstock.engine.standstill import asks_again, no_progress
from penstock.engine.tables import PipelineTables
from penstock.engine.task_plan import OF_STATEMENT, Surprise
from penstock.engine.tracked_table import Learned
from penstock.errors import (
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    PrivilegeMissing,
    ServerChanged,
    TransientError,
)
from penstock.pipeline.cascades import CascadeWatch
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import Checkpoint, PipelineState, split_key, table_key
from penstock.pipeline.step import Step
from penstock.sinks.sink import Sink, Spread
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)

# Tasks report surprises, and the batch runs again once they are prepared for. A batch that needs more runs
# than this makes no progress.
_ROUNDS_MAX = 50
_PAUSE_SECONDS = 0.5
# Errors that may concern a single table or the whole target, such as a bad path or missing privileges.
_OF_ALL_TABLES = (OptionInvalid, PrivilegeMissing)


@dataclass
class BegunBatch:
    """The batch that a run has begun but not recorded as done. It outlasts the run's attempts."""

    record: BatchRecord | None = None
    # The batch's number, until some of its rows may have been written.
    unwritten: int | None = None
    # The last error of a task that read a source, and the name of that source.
    blamed: tuple[PenstockError, str] | None = None

    def needs(self, sources: Collection[str]) -> bool:
        """Return whether the batch reads one of these sources and may be partly written.

        Such a batch has to be completed, with all of its sources, before any of these sources is set aside.
        """
        record = self.record
        return (
            record is not None and record.number != self.unwritten and not record.sources.isdisjoint(sources)
        )


@dataclass(frozen=True, eq=False)
class Batches:
    """Runs the batches of one attempt of a run, each from writing its record to saving its checkpoint.

    `retried` calls a function again after transient errors, `report` receives errors from servers that are
    being retried, and `succeeded` is called after each batch.
    """

    settings: PipelineSettings
    driver: Driver
    sink: Sink
    steps: Sequence[Step]
    state: PipelineState
    recording: Recording
    logs: Mapping[str, SourceLog]
    loading: Loading
    tables: PipelineTables
    cascades: CascadeWatch
    progress: Progress
    begun: BegunBatch
    stop: threading.Event
    retried: Callable[[Callable[[], Any]], Any]
    report: Callable[[Exception], None]
    succeeded: Callable[[BatchRecord], None]

    def resume(self, checkpoint: Checkpoint, record: BatchRecord) -> Checkpoint:
        """Run a batch again that an earlier attempt or process began, or abandon its number."""
        _log.info("a batch that was begun is run again", batch=record.number)
        if not record.sources <= self.logs.keys():
            return self._give_up(checkpoint, record, None)
        if record.is_exact:
            return self._settle(checkpoint, record)
        self.progress.begin_batch(record)
        return self._complete(checkpoint, record)

    def run(self, checkpoint: Checkpoint, record: BatchRecord) -> Checkpoint:
        """Record a new batch and run it until it is committed and recorded as done."""
        self.begun.record, self.begun.unwritten = record, record.number
        self.progress.begin_batch(record)
        self.retried(partial(self.recording.begin, record, checkpoint))
        return self._complete(checkpoint, record)

    def _complete(self, checkpoint: Checkpoint, record: BatchRecord) -> Checkpoint:
        """Run a recorded batch to its end, through outages and changes of the server."""
        started = time.monotonic()
        tasks = _Tasks(self, checkpoint, record)
        if record.is_exact:
            # After a TransientError the run restarts and settles this batch first.
            outcome = tasks.run()
        else:
            try:
                outcome = self.retried(tasks.run)
            except PositionPurged as problem:
                # The log was purged after the batch was planned. The next plan handles each purged source.
                if all(log.source.on_lost == "stop" for log in self.logs.values()):
                    raise purged(self.settings, self.sink, problem) from problem
                return self._give_up(tasks.checkpoint, tasks.record, problem)
        return self._commit(tasks, outcome, started)

    def _commit(self, tasks: "_Tasks", outcome: Outcome, started: float) -> Checkpoint:
        """Commit the tasks' writes, and record the batch as done."""
        self._reread_children(tasks.record, outcome)
        self.tables.columns.note(outcome.receipts)
        checkpoint = self.retried(partial(self.loading.begin_again, tasks.checkpoint, tasks.learned.again))
        mark = mark_of(self.settings, self.tables, checkpoint, tasks.record)
        record = self.retried(partial(record_written, self.state, tasks.record, outcome.receipts))
        # Query the source before committing, so that no query can fail between the commit and its record.
        read = self._read_to(checkpoint, record)

        def commit() -> None:
            if type(self.sink).commit is not Sink.commit:
                self.state.confirm()
                self.sink.commit(mark, outcome.receipts)

        ran = time.monotonic()
        self.retried(commit)
        committed = time.monotonic()
        floors = {key: floor for counts in outcome.counts for key, floor in counts.floors.items()}
        is_plain = not tasks.has_surprises and not any(counts.rejected for counts in outcome.counts)
        checkpoint, is_recorded = self._record(checkpoint, record, floors, read, is_plain=is_plain)
        for name in self.logs.keys() & checkpoint.offsets.keys() if is_recorded else ():
            self.logs[name].hold(Offset.from_json(checkpoint.offsets[name]))
        self.loading.done(checkpoint, record)
        self.succeeded(record)
        recorded = time.monotonic() - committed
        phases = {**outcome.divided(ran - started), "commit": committed - ran, "record": recorded}
        self.progress.batch(checkpoint, record, outcome, phases, self.state)
        return checkpoint

    def _record(
        self,
        checkpoint: Checkpoint,
        record: BatchRecord,
        floors: Mapping[str, int],
        read: Mapping[str, int],
        *,
        is_plain: bool = False,
    ) -> tuple[Checkpoint, bool]:
        """Record a batch that the sink has committed; see `Recording.end`."""
        self.tables.done()
        checkpoint = replace(checkpoint.after(record), stopped=dict(self.tables.stopped))
        loads = {key: replace(checkpoint.loads[key], floor=floor) for key, floor in floors.items()}
        checkpoint = replace(checkpoint, loads={**checkpoint.loads, **loads}).with_read_versions(read)
        is_recorded = self.retried(partial(self.recording.end, record, checkpoint, is_plain=is_plain))
        self.begun.record = None
        return checkpoint, is_recorded

    def _settle(self, checkpoint: Checkpoint, record: BatchRecord) -> Checkpoint:
        """Settle an interrupted exact load: record the load if the feed already has it, or abandon its batch
        number.
        """
        begin = Offset.from_json(checkpoint.offsets[record.chunks[0].source])
        mark = mark_of(self.settings, self.tables, checkpoint, record)
        work = partial(committed_floors, self.sink, self.tables, self.steps, mark, record, begin)
        floors = None if self.sink.keeps_state else self.retried(work)
        if floors is None:
            return self._give_up(checkpoint, record, None)
        _log.info("a load that was committed is recorded", batch=record.number)
        checkpoint, _ = self._record(checkpoint, record, floors, self._read_to(checkpoint, record))
        self.loading.done(checkpoint, record)
        return checkpoint

    def _give_up(self, checkpoint: Checkpoint, record: BatchRecord, problem: Exception | None) -> Checkpoint:
        """Abandon a batch number: an exact read returns other rows each time, so it needs a new batch."""
        _log.warning("a batch is started again", batch=record.number, why=str(problem)[:500])
        self.stop.wait(_PAUSE_SECONDS)
        checkpoint = self.state.write(replace(checkpoint, number=record.number))
        self.begun.record = None
        return checkpoint

    def _reread_children(self, record: BatchRecord, outcome: Outcome) -> None:
        """Request a reread of the tables whose rows a foreign key may have changed."""
        parents = {key for counts in outcome.counts for key in counts.cascaded}
        for source in {split_key(key)[0] for key in parents}:
            keys = {key for key in parents if split_key(key)[0] == source}
            for table in self.cascades.children(source, keys):
                if table_key(source, table) in self.tables.there():
                    end = Offset.from_json(record.end[source]).position
                    self.loading.reread(source, table, f"a foreign key, {end}", remove=True)

    def _read_to(self, checkpoint: Checkpoint, record: BatchRecord) -> dict[str, int]:
        """Return, for each loaded table, a commit version above every change that its rows include."""
        ends: dict[str, int] = {}  # All chunks have been read, so it is enough to look at each log once.
        for name in {chunk.source for chunk in record.chunks}:
            if not self.logs[name].source.options.is_kept:
                head = self.retried(self.logs[name].target).position
                epoch = Offset.from_json(checkpoint.offsets[name]).position.epoch
                ends[name] = replace(head, epoch=epoch).commit_version
        return {
            key: ends[chunk.source]
            for chunk in record.chunks
            if chunk.source in ends and (key := table_key(chunk.source, chunk.table)) in checkpoint.loads
        }


class _Tasks:
    """Runs the tasks of one batch until they have written it.

    After a switch to another server, `record` contains the same transactions at that server's positions.
    `checkpoint` may then have a new batch number, because the number under which parts were already written
    was abandoned.
    """

    def __init__(self, batches: Batches, checkpoint: Checkpoint, record: BatchRecord) -> None:
        self.checkpoint = checkpoint
        self.record = record
        self.learned = Learned()
        # Whether a task reported a surprise.
        self.has_surprises = False
        self._batches = batches

    def run(self) -> Outcome:
        """Run the tasks to their end. Raises any error that a task reports."""
        try:
            return self._rounds()
        except (ServerChanged, PositionInvalid):
            self._plan_again()
            return self._rounds()

    def _plan_again(self) -> None:
        """Plan the batch again for the current server, whose log has the same transactions at other
        positions.
        """
        batches = self._batches
        record = planned_again(batches.logs, self.record)
        if self._has_ranges_by_part():
            # Parts already written covered other ranges: a duplicate is better than a loss.
            self.checkpoint = batches.state.write(replace(self.checkpoint, number=record.number))
            record = replace(record, number=record.number + 1)
        # No task runs on an unrecorded plan: a later run would use its number for a different plan.
        batches.recording.begin(record, self.checkpoint)
        self.record = record
        self.learned.statements.clear()
        batches.tables.undone()

    def _rounds(self) -> Outcome:
        """Run the batch's job, and run it again each time its tasks report surprises."""
        batches, tables, begun = self._batches, self._batches.tables, self._batches.begun
        rounds, asked = 0, list[Surprise]()
        refused: dict[str, PenstockError] = {}
        while rounds < _ROUNDS_MAX:
            plan = task_plan(
                batches.settings,
                batches.sink,
                tables,
                batches.cascades.parents,
                batches.logs,
                self.checkpoint,
                self.record,
                self.learned,
            )
            batches.recording.confirm()
            unwritten, begun.unwritten = begun.unwritten, None
            with watched(batches.settings.sources, batches.report):
                outcome = run_job(batches.driver, plan)
            if self._wrote_nothing(outcome):
                begun.unwritten = unwritten
            if outcome.failures:
                refused |= {
                    failure.table: failure.error
                    for failure in outcome.failures
                    if isinstance(failure.error, _OF_ALL_TABLES)
                }
                # Each iteration stops at least one more table, so the loop ends.
                if batches.settings.errors.table == "skip_table" and tables.stop(outcome.failures):
                    continue
                # A run that was taken over raises LeaseLost, because the target may have later batches.
                batches.state.confirm()
                raise self._raised(outcome)
            if not outcome.surprises:
                if len(refused) > 1 and not any(receipt.rows for receipt in outcome.receipts):
                    # No row of any table could be written, so the target itself is the problem.
                    raise next(iter(refused.values()))
                return outcome
            if asks_again(outcome.surprises, asked):
                break
            rounds, asked, self.has_surprises = rounds + 1, outcome.surprises, True
            tables.learn(asked, self.learned, floors_of(self.checkpoint))
            for surprise in asked:
                if surprise.what == OF_STATEMENT and "references" in surprise.value.text.lower():
                    batches.cascades.look(str(surprise.value.position))
        raise no_progress(self.record, outcome.surprises[0])

    def _wrote_nothing(self, outcome: Outcome) -> bool:
        """Return whether a job that did not succeed has left the target without any of its rows."""
        is_read_error = bool(outcome.failures) and all(failure.source for failure in outcome.failures)
        is_prepared_for = bool(outcome.surprises) and not outcome.failures
        return (is_read_error or is_prepared_for) and not self._has_ranges_by_part()

    def _has_ranges_by_part(self) -> bool:
        """Return whether the sink commits each range of a log by itself, under the batch number."""
        sink = self._batches.sink
        return sink.spread is Spread.RANGES and type(sink).commit is Sink.commit

    def _raised(self, outcome: Outcome) -> PenstockError:
        # A transient error is retried only if no other error occurred.
        failure = min(outcome.failures, key=lambda failure: isinstance(failure.error, TransientError))
        if failure.source and (isinstance(failure.error, TransientError) or not failure.table):
            self._batches.begun.blamed = failure.error, failure.source
        return failure.error
