# SPDX-License-Identifier: Apache-2.0
"""The loop of a pipeline: plan a batch, record it, run its tasks, commit it, and record it as done."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from penstock.engine.batch_plan import floors_of, mark_of, parts_for, planned_again, task_plan
from penstock.engine.beginning import (
    at_their_servers,
    check_sink,
    first_offsets,
    purged,
    refuse_keyless,
    refuse_mixed,
    refuse_paused,
)
from penstock.engine.driver import Driver
from penstock.engine.interrupted_loads import committed_floors, record_written
from penstock.engine.job import Outcome, run_job
from penstock.engine.loading import Loading
from penstock.engine.pacing import Pacing
from penstock.engine.progress import Progress
from penstock.engine.recording import Recording
from penstock.engine.servers import SourceServers, watched
from penstock.engine.set_aside import ASIDE_SECONDS, SourcesAside, ask_source, failed_sources, named
from penstock.engine.shared_ends import SharedEnds
from penstock.engine.source_log import SourceLog
from penstock.engine.standstill import asks_again, no_progress
from penstock.engine.stretches import Stretches
from penstock.engine.tables import PipelineTables
from penstock.engine.task_plan import OF_STATEMENT, Surprise
from penstock.engine.tracked_table import Learned
from penstock.errors import (
    LeaseLost,
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
from penstock.pipeline.verify.narrowing import narrow_rereads
from penstock.retry import Backoff, Retry
from penstock.sinks.sink import Sink, Spread
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)

# Each round of surprises runs the batch again. More rounds than this mean that it makes no progress.
_ROUNDS_MAX = 50
_PAUSE_SECONDS = 0.5
_BACKOFF = Backoff(first=0.5)
# After this time a stopped run cancels its batch, and the next run replays it.
_STOP_SECONDS_MAX = 8.0
# The store releases the lease of a dead runner shortly after it has expired.
_LEASE_MARGIN_SECONDS = 2.0
# Errors that may concern a single table or the whole target, such as a bad path or missing privileges.
_OF_ALL_TABLES = (OptionInvalid, PrivilegeMissing)


class PipelineRun:
    """One run of a pipeline on a driver, from acquiring the lease to releasing it.

    Servers, daemons, stores and executors that do not answer are retried for `errors.retry_for`. If a retry
    in place does not help, the run restarts from the recorded state, as a new process would. With
    `until_caught_up` the run ends once the target has all that was logged before its start, or before its
    loads ended; with `to_barrier` too, at the barrier of its shards. `report` gets the progress of each batch
    and each error. Runs of several sinks share the ends of batches, by source. A `standby` waits its turn.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        driver: Driver,
        *,
        until_caught_up: bool = False,
        to_barrier: bool = False,
        stop: threading.Event | None = None,
        report: Callable[[Mapping[str, Any]], None] | None = None,
        shared_ends: Mapping[str, SharedEnds] | None = None,
        standby: bool = False,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._until_caught_up = until_caught_up
        self._standby = standby
        self._stop = stop or threading.Event()
        self._cores = driver.cores
        self._shared_ends = shared_ends or {}
        self._sink = settings.make_sink()
        self._steps = settings.make_steps()
        self._logs: dict[str, SourceLog] = {}
        self._servers = SourceServers(settings)
        self._aside = SourcesAside(settings, partial(ask_source, settings))
        # The last error of a task that read a source, and that source.
        self._blamed: tuple[PenstockError, str] | None = None
        # The batch that was begun, and its number while nothing of it can have been written.
        self._begun: BatchRecord | None = None
        self._unwritten: int | None = None
        self._cascades = CascadeWatch(settings, self._sink)
        self._progress = Progress(settings, report)
        self._stretches = Stretches(self._progress, until_caught_up=until_caught_up, to_barrier=to_barrier)
        # The state and the checkpoint of the last attempt; None before the first attempt.
        self._state: PipelineState | None = None
        self._checkpoint: Checkpoint | None = None
        self._exhausted: PenstockError | None = None
        # Whether a batch was completed, or there was nothing to do.
        self.has_progressed = False
        self._restarts = self._new_retries()

    def stop(self) -> None:
        """End the run after its batch, or cancel the batch after 8 seconds. Safe in signal handlers."""
        self._stop.set()

    def run(self) -> Checkpoint:
        """Run until stopped, paused, or caught up, and return the checkpoint.

        Raises LeaseLost if another process runs the pipeline, OptionInvalid if the sink cannot be used, and
        the error that ended the run.
        """
        try:
            watching = self._progress.watching_batches(lambda: self._state)
            with self._driver.cancelling(self._stop, _STOP_SECONDS_MAX), watching:
                checkpoint = self._run_until_lost()
                while checkpoint is None and not self._stop.is_set():
                    checkpoint = self._run_until_lost()
                for source, problem in self._aside.problems.items():
                    if self._until_caught_up and not self._stop.is_set():
                        raise named(source, problem)
                return checkpoint or self._checkpoint or Checkpoint.new()
        finally:
            self._aside.close()
            self._sink.close()

    def _run_until_lost(self) -> Checkpoint | None:
        """Run from the recorded state. Return None after an outage that may be over by now."""
        try:
            settings = self._settings
            state = self._state = PipelineState.of(settings)
            checkpoint = self._take(state)
            if self._checkpoint is None:
                check_sink(self._settings, self._sink)
                self._prefer_servers(checkpoint)
            self._checkpoint = checkpoint
            self._begun = state.begun(checkpoint)
            self._aside.take_back()
            self._settings = self._aside.active(self._servers.settings())
            self._progress.aside = self._aside.problems
            self._logs = {
                source.name: SourceLog(
                    source, self._settings, self._cores, self._shared_ends.get(source.name)
                )
                for source in self._settings.sources
            }
            self._cascades = CascadeWatch(self._settings, self._sink)
            self._retried(self._cascades.look, state)
            return self._loop(state, checkpoint)
        except PenstockError as problem:
            if self._is_over(problem):
                self._progress.failed(problem, self._state)
                raise
            return None
        finally:
            for log in self._logs.values():
                log.close()
            state_taken, self._state = self._state, None
            if state_taken is not None:
                state_taken.close()

    def _prefer_servers(self, checkpoint: Checkpoint) -> None:
        """Continue with the server that the positions belong to: a replaced server may answer again."""
        for name, offset in checkpoint.offsets.items():
            self._servers.prefer(name, Offset.from_json(offset).server_key)

    def _is_over(self, problem: PenstockError) -> bool:
        """Wait before the next restart. Return whether the run ends with this error instead."""
        if self._set_aside(problem):
            return False
        if not isinstance(problem, TransientError) or problem is self._exhausted:
            return True
        if self._standby and isinstance(problem, LeaseLost):
            # Another process has the pipeline now, and this one waits for its end.
            self._checkpoint = None
            self._stop.wait(_PAUSE_SECONDS)
            return False
        if self._stop.is_set() or self._servers.turn(problem):
            return False
        try:
            self._restarts.wait(problem)
        except TransientError:
            return True
        # The last active source failed too, so the run tries all sources again.
        self._aside.take_back(everything=True)
        return False

    def _set_aside(self, problem: PenstockError) -> bool:
        """Set aside the sources that caused an error. Return whether the run continues without them."""
        if self._stop.is_set() or not self._aside.may_set_aside(problem):
            return False
        if self._blamed is not None and self._blamed[0] is problem:
            failed = {self._blamed[1]: problem}
        else:
            offsets = {} if self._checkpoint is None else self._checkpoint.offsets
            failed = failed_sources(self._logs, offsets, problem)
        begun = self._begun
        # Complete a batch that may be written in part first, with all of its sources.
        is_bound = begun is not None and begun.number != self._unwritten and begun.sources & failed.keys()
        if is_bound or not failed or len(failed) == len(self._logs):
            return False
        for source, error in failed.items():
            self._aside.set_aside(source, error)
        self._progress.aside = self._aside.problems
        self._progress.retrying(problem, self._state)
        return True

    def _take(self, state: PipelineState) -> Checkpoint:
        """Acquire the lease, if necessary after a dead runner's session. Raises LeaseLost."""
        deadline: float | None = None
        while True:
            try:
                return state.take(None if self._checkpoint is None else self._checkpoint.token)
            except LeaseLost as problem:
                now = time.monotonic()
                is_first = deadline is None
                deadline = deadline or now + state.lease_seconds + _LEASE_MARGIN_SECONDS
                if not self._standby and (state.lost or now > deadline):
                    self._exhausted = problem
                if self._exhausted or state.lost or self._stop.is_set():
                    raise  # A standby that was taken over waits again, with the new checkpoint.
                if is_first:
                    _log.info("waiting for the lease", why=problem.message)
                    self._progress.retrying(problem, state)
                self._stop.wait(_PAUSE_SECONDS)

    def _loop(self, state: PipelineState, checkpoint: Checkpoint) -> Checkpoint | None:
        """Run batches until the end of the run. Return None to take back a source that was set aside."""
        self._recording = Recording(state, self._sink)
        self._loading = Loading(self._settings, state, self._sink, self._cores)
        self._stretches.open(self._logs, self._loading, state.shards)
        self._tables = PipelineTables(self._settings, state, self._sink, self._steps, self._loading.reread)
        self._tables.stopped.update(checkpoint.stopped)
        checkpoint = self._noted(self._begin(state, checkpoint))
        begun = self._begun
        if begun is not None:
            _log.info("a batch that was begun is run again", batch=begun.number)
            if not begun.sources <= self._logs.keys():
                checkpoint = self._noted(self._given_up(state, checkpoint, begun, None))
            elif begun.is_exact:
                checkpoint = self._noted(self._settle(state, checkpoint, begun))
            else:
                checkpoint = self._noted(self._complete(state, checkpoint, begun, written=True))
        resumed: Checkpoint | None = None
        pacing = Pacing(self._settings, self._sink, self._driver, self._stop)
        while not self._stop.is_set():
            if (paused := state.pause_message()) is not None:
                refuse_paused(self._settings, paused, until_caught_up=self._until_caught_up)
                break
            if self._aside.has_returned:
                return None
            started = time.monotonic()
            if resumed is None:
                resumed = at_their_servers(self._logs, checkpoint, lambda work: self._retried(work, state))
                checkpoint = checkpoint if resumed == checkpoint else self._noted(state.write(resumed))
            checkpoint = self._noted(self._loading.planned(checkpoint, self._tables))
            try:
                record = self._next(state, checkpoint)
            except PositionPurged as problem:
                checkpoint = self._noted(self._after_loss(state, checkpoint, problem))
                continue
            if record is None:
                if self._until_caught_up and self._stretches.is_caught_up(checkpoint):
                    break
                self._note_progress()
                self._recording.settle(checkpoint)
                self._progress.idle(checkpoint, state)
                pacing.wait_for_changes(self._logs.values())
                continue
            checkpoint = self._noted(self._complete(state, checkpoint, record))
            # A run with a fixed end gains nothing by waiting for more changes.
            if not self._loading.is_loading(checkpoint) and not self._until_caught_up:
                pacing.wait_after_batch(started, self._progress.rows_of_batch)
        self._recording.settle(checkpoint)
        self._progress.settle(state)
        return checkpoint

    def _note_progress(self) -> None:
        self.has_progressed = True
        self._restarts.succeeded()

    def _noted(self, checkpoint: Checkpoint) -> Checkpoint:
        self._checkpoint = checkpoint
        return checkpoint

    def _begin(self, state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        """Record the start of each source before reading any of it, then read the tables' definitions."""
        find = partial(first_offsets, self._settings, self._sink, state, self._logs, checkpoint)
        new = self._retried(find, state)
        refuse_mixed({**checkpoint.offsets, **new})
        if new:
            checkpoint = state.write(replace(checkpoint, offsets={**checkpoint.offsets, **new}))
        self._retried(partial(self._tables.open, checks_patterns=not self._aside.problems), state)
        return checkpoint

    # --- What is next -----------------------------------------------------------------------

    def _next(self, state: PipelineState, checkpoint: Checkpoint) -> BatchRecord | None:
        """Return the next batch: chunks while tables are loaded, then new changes of the logs."""
        number = checkpoint.number + 1
        begin, end, ranges = {}, {}, []
        chunks, loads, finished = self._loading.next(checkpoint)
        # An exact load is retried as a new batch, so a change in it could be applied twice.
        if not self._loading.is_first_load(checkpoint) and not any(chunk.exact for chunk in chunks):
            for name in self._logs:
                stretch = self._retried(partial(self._stretches.next, checkpoint, name), state)
                if stretch is None:
                    continue
                first, last, works = stretch
                begin[name], end[name] = first.to_json(), last.to_json()
                ranges += works
        if not ranges and not chunks:
            return None
        divided = [
            str(name)
            for name, target in self._tables.targets.items()
            if target.primary_key and not target.unique_keys
        ]
        parts = self._settings.batch.parts or parts_for(ranges, chunks, self._cores)
        return BatchRecord(
            number, begin, end, tuple(ranges), tuple(chunks), parts, loads, tuple(finished), tuple(divided)
        )

    def _after_loss(self, state: PipelineState, checkpoint: Checkpoint, error: PositionPurged) -> Checkpoint:
        """Continue at the end of each purged log and reread its tables. Raises `error` if none may."""
        offsets = dict(checkpoint.offsets)
        for name, log in self._logs.items():
            if log.source.on_lost == "stop":
                continue
            try:
                self._retried(partial(self._stretches.next, checkpoint, name), state)
            except PositionPurged as lost:
                begin = Offset.from_json(checkpoint.offsets[name])
                # The tables are read after this position, so none of their changes is missed.
                offsets[name] = self._retried(partial(log.after_loss, begin), state).to_json()
                tables = self._tables.jump(log.source)
                refuse_keyless(self._tables.known_targets(), name, tables, lost)
                verb = "compared" if log.source.on_lost == "repair" else "read again"
                what = f"changes were purged before they were read: every table is {verb}"
                _log.error(what, source=name, tables=len(tables), why=str(lost))
                for table in tables:
                    self._loading.reread(name, table, f"purged at {time.time_ns()}", remove=True)
        if offsets == checkpoint.offsets:
            raise purged(self._settings, self._sink, error) from error
        checkpoint = state.write(replace(checkpoint, offsets=offsets))
        narrow_rereads(self._settings, state, self._driver.spreading)
        return checkpoint

    # --- One batch --------------------------------------------------------------------------

    def _complete(
        self, state: PipelineState, checkpoint: Checkpoint, record: BatchRecord, *, written: bool = False
    ) -> Checkpoint:
        """Run a batch until it is committed and recorded, through outages and changes of the server."""
        self._begun = record
        self._progress.begin_batch(record)
        if not written:
            self._unwritten = record.number
            self._retried(partial(self._recording.begin, record, checkpoint), state)
        learned, started = Learned(), time.monotonic()

        def attempt() -> Outcome:
            nonlocal record, checkpoint
            try:
                return self._rounds(state, checkpoint, record, learned)
            except (ServerChanged, PositionInvalid):
                # The log of the current server has the same transactions at other positions.
                record = planned_again(self._logs, record)
                if self._has_ranges_by_part():
                    # Parts already written covered other ranges: a duplicate is better than a loss.
                    checkpoint = state.write(replace(checkpoint, number=record.number))
                    record = replace(record, number=record.number + 1)
                self._recording.begin(record, checkpoint)
                learned.statements.clear()
                self._tables.undone()
                return self._rounds(state, checkpoint, record, learned)

        if record.is_exact:
            # After a TransientError the run restarts and settles this batch first.
            outcome = attempt()
        else:
            try:
                outcome = self._retried(attempt, state)
            except PositionPurged as problem:
                # The log was purged after the batch was planned. The next plan handles it for each source.
                if all(log.source.on_lost == "stop" for log in self._logs.values()):
                    raise purged(self._settings, self._sink, problem) from problem
                return self._given_up(state, checkpoint, record, problem)
        self._reread_children(record, outcome)
        self._tables.columns.note(outcome.receipts)
        checkpoint = self._retried(partial(self._loading.begin_again, checkpoint, learned.again), state)
        mark = mark_of(self._settings, self._tables, checkpoint, record)
        record = self._retried(partial(record_written, state, record, outcome.receipts), state)
        # Ask the source before committing, so that it cannot fail between the commit and its record.
        read = self._read_to(checkpoint, record, state)

        def commit() -> None:
            if type(self._sink).commit is not Sink.commit:
                state.confirm()
                self._sink.commit(mark, outcome.receipts)

        ran = time.monotonic()
        self._retried(commit, state)
        committed = time.monotonic()
        floors = {key: floor for counts in outcome.counts for key, floor in counts.floors.items()}
        checkpoint, is_recorded = self._record(state, checkpoint, record, floors, read, outcome)
        for name in self._logs.keys() & checkpoint.offsets.keys() if is_recorded else ():
            self._logs[name].hold(Offset.from_json(checkpoint.offsets[name]))
        self._loading.done(checkpoint, record)
        self._aside.worked(record.sources)
        self._note_progress()
        phases = {"run": ran - started, "commit": committed - ran, "record": time.monotonic() - committed}
        self._progress.batch(checkpoint, record, outcome, phases, state)
        return checkpoint

    def _record(
        self,
        state: PipelineState,
        checkpoint: Checkpoint,
        record: BatchRecord,
        floors: Mapping[str, int],
        read: Mapping[str, int],
        outcome: Outcome | None = None,
    ) -> tuple[Checkpoint, bool]:
        """Record a batch that the sink has committed; see `Recording.end`."""
        self._tables.done()
        checkpoint = replace(checkpoint.after(record), stopped=dict(self._tables.stopped))
        loads = {key: replace(checkpoint.loads[key], floor=floor) for key, floor in floors.items()}
        checkpoint = replace(checkpoint, loads={**checkpoint.loads, **loads}).with_read_versions(read)
        is_recorded = self._retried(partial(self._recording.end, record, checkpoint, outcome), state)
        self._begun = None
        return checkpoint, is_recorded

    def _settle(self, state: PipelineState, checkpoint: Checkpoint, record: BatchRecord) -> Checkpoint:
        """Record an interrupted exact load that a feed has already, or abandon its batch number."""
        begin = Offset.from_json(checkpoint.offsets[record.chunks[0].source])
        mark = mark_of(self._settings, self._tables, checkpoint, record)
        work = partial(committed_floors, self._sink, self._tables, self._steps, mark, record, begin)
        floors = None if self._sink.keeps_state else self._retried(work, state)
        if floors is None:
            return self._given_up(state, checkpoint, record, None)
        _log.info("a load that was committed is recorded", batch=record.number)
        read = self._read_to(checkpoint, record, state)
        checkpoint, _ = self._record(state, checkpoint, record, floors, read)
        self._loading.done(checkpoint, record)
        return checkpoint

    def _reread_children(self, record: BatchRecord, outcome: Outcome) -> None:
        """Request that tables are read again whose rows a foreign key may have changed."""
        parents = {key for counts in outcome.counts for key in counts.cascaded}
        for source in {split_key(key)[0] for key in parents}:
            keys = {key for key in parents if split_key(key)[0] == source}
            for table in self._cascades.children(source, keys):
                if table_key(source, table) in self._tables.there():
                    end = Offset.from_json(record.end[source]).position
                    self._loading.reread_later(source, table, f"a foreign key, {end}")

    def _read_to(self, checkpoint: Checkpoint, record: BatchRecord, state: PipelineState) -> dict[str, int]:
        """Return a commit version for each loaded table that is above every change included in its rows."""
        ends: dict[str, int] = {}  # All chunks were read, so it is enough to look at each log once.
        for name in {chunk.source for chunk in record.chunks}:
            if not self._logs[name].source.options.is_kept:
                head = self._retried(self._logs[name].target, state).position
                epoch = Offset.from_json(checkpoint.offsets[name]).position.epoch
                ends[name] = replace(head, epoch=epoch).commit_version
        return {
            key: ends[chunk.source]
            for chunk in record.chunks
            if chunk.source in ends and (key := table_key(chunk.source, chunk.table)) in checkpoint.loads
        }

    def _has_ranges_by_part(self) -> bool:
        """Return whether the sink commits each range of a log by itself, under the batch number."""
        return self._sink.spread is Spread.RANGES and type(self._sink).commit is Sink.commit

    def _given_up(
        self, state: PipelineState, checkpoint: Checkpoint, record: BatchRecord, problem: Exception | None
    ) -> Checkpoint:
        """Abandon a batch number: an exact read returns other rows each time, so it needs a new batch."""
        _log.warning("a batch is started again", batch=record.number, why=str(problem)[:500])
        self._stop.wait(_PAUSE_SECONDS)
        checkpoint = state.write(replace(checkpoint, number=record.number))
        self._begun = None
        return checkpoint

    def _rounds(
        self, state: PipelineState, checkpoint: Checkpoint, record: BatchRecord, learned: Learned
    ) -> Outcome:
        """Run the job of a batch, and again after each round of surprises. Raises the errors of its tasks."""
        rounds, asked = 0, list[Surprise]()
        refused: dict[str, PenstockError] = {}
        while rounds < _ROUNDS_MAX:
            plan = task_plan(
                self._settings,
                self._sink,
                self._tables,
                self._cascades.parents,
                self._logs,
                checkpoint,
                record,
                learned,
            )
            state.confirm()
            unwritten, self._unwritten = self._unwritten, None
            with watched(self._settings.sources, self._report):
                outcome = run_job(self._driver, plan)
            if self._wrote_nothing(outcome):
                self._unwritten = unwritten
            if outcome.failures:
                refused |= {
                    failure.table: failure.error
                    for failure in outcome.failures
                    if isinstance(failure.error, _OF_ALL_TABLES)
                }
                # Each iteration stops at least one more table, so the loop ends.
                if self._settings.errors.table == "skip_table" and self._tables.stop(outcome.failures):
                    continue
                # A run that was taken over raises LeaseLost instead: the target may have later batches.
                state.confirm()
                raise self._raised(outcome)
            if not outcome.surprises:
                if len(refused) > 1 and not any(receipt.rows for receipt in outcome.receipts):
                    # No row of any table could be written, so the target itself is the problem.
                    raise next(iter(refused.values()))
                return outcome
            if asks_again(outcome.surprises, asked):
                break
            rounds, asked = rounds + 1, outcome.surprises
            self._tables.learn(asked, learned, floors_of(checkpoint))
            for surprise in asked:
                if surprise.what == OF_STATEMENT and "references" in surprise.value.text.lower():
                    self._cascades.look(str(surprise.value.position))
        raise no_progress(record, outcome.surprises[0])

    def _wrote_nothing(self, outcome: Outcome) -> bool:
        """Return whether no rows of a job that did not succeed are in the target."""
        is_read_error = bool(outcome.failures) and all(failure.source for failure in outcome.failures)
        is_prepared_for = bool(outcome.surprises) and not outcome.failures
        return (is_read_error or is_prepared_for) and not self._has_ranges_by_part()

    def _raised(self, outcome: Outcome) -> PenstockError:
        # A transient error is retried only if no other error occurred.
        failure = min(outcome.failures, key=lambda failure: isinstance(failure.error, TransientError))
        if failure.source and (isinstance(failure.error, TransientError) or not failure.table):
            self._blamed = failure.error, failure.source
        return failure.error

    def _new_retries(self, seconds_max: float = math.inf) -> Retry:
        return Retry(
            "trying again",
            backoff=_BACKOFF,
            seconds=min(self._settings.errors.retry_for, seconds_max),
            stop=self._stop,
            report=self._report,
        )

    def _report(self, problem: Exception) -> None:
        assert isinstance(problem, PenstockError), "a run retries nothing else"
        self._progress.retrying(problem, self._state)

    def _retried(self, work: Callable[[], Any], state: PipelineState) -> Any:
        """Retry work after transient errors, for `errors.retry_for` and while this run has the lease."""
        # The other sources do not wait longer for one that fails.
        waits_short = self._aside.has_several
        retries = self._new_retries(ASIDE_SECONDS if waits_short else math.inf)
        while True:
            try:
                return work()
            except TransientError as problem:
                if state.lost:
                    raise
                try:
                    retries.wait(problem)
                except PenstockError:
                    self._exhausted = None if waits_short else problem
                    raise
                # Another server has its own positions, so the run restarts.
                if self._stop.is_set() or self._servers.turn(problem):
                    raise
