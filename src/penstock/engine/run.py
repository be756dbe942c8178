# SPDX-License-Identifier: Apache-2.0
"""The main loop of a pipeline run: acquire the lease, plan one batch after another, and continue after
outages.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from penstock.engine.batch_plan import divided_of, groups_for, parts_for
from penstock.engine.batches import Batches, BegunBatch
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
from penstock.engine.loading import Loading
from penstock.engine.pacing import Pacing
from penstock.engine.progress import Progress
from penstock.engine.recording import Recording
from penstock.engine.servers import SourceServers
from penstock.engine.set_aside import ASIDE_SECONDS, SourcesAside, ask_source, failed_sources, named
from penstock.engine.shared_ends import SharedEnds
from penstock.engine.source_log import SourceLog
from penstock.engine.stretches import Stretches
from penstock.engine.tables import PipelineTables
from penstock.errors import (
    LeaseLost,
    PenstockError,
    PositionPurged,
    TransientError,
)
from penstock.pipeline.cascades import CascadeWatch
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.pipeline.verify.narrowing import narrow_rereads
from penstock.retry import Backoff, Retry
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)

_PAUSE_SECONDS = 0.5
_BACKOFF = Backoff(first=0.5)
# A stopped run cancels its batch after this time, and the next run replays the batch.
_STOP_SECONDS_MAX = 8.0
# The store releases the lease of a dead runner shortly after it has expired.
_LEASE_MARGIN_SECONDS = 2.0


class PipelineRun:
    """One run of a pipeline on a driver, from acquiring the lease to releasing it.

    Servers, daemons, stores and executors that do not answer are retried for `errors.retry_for`. If a retry
    in place does not help, the run restarts from the recorded state, as a new process would. With
    `until_caught_up`, the run ends once the target contains everything that was logged before the run
    started, or before its loads finished. With `to_barrier` as well, it ends at the barrier of the pipeline's
    shards. `report` receives the progress of each batch, and each error. The runs of a pipeline's sinks share
    where their batches end, by source. A `standby` waits while another process runs the pipeline.
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
        self._begun = BegunBatch()
        self._cascades = CascadeWatch(settings, self._sink)
        self._progress = Progress(settings, report)
        self._stretches = Stretches(self._progress, until_caught_up=until_caught_up, to_barrier=to_barrier)
        # The state and the checkpoint of the latest attempt; None before the first attempt.
        self._state: PipelineState | None = None
        self._checkpoint: Checkpoint | None = None
        self._exhausted: PenstockError | None = None
        # Whether a batch was completed, or there was nothing to do.
        self.has_progressed = False
        self._restarts = self._new_retries()

    def stop(self) -> None:
        """End the run after its batch, or cancel the batch after 8 seconds. Safe to call from signal
        handlers.
        """
        self._stop.set()

    def run(self) -> Checkpoint:
        """Run until stopped, paused, or caught up, and return the checkpoint.

        Raises LeaseLost if another process runs the pipeline, OptionInvalid if the sink cannot be used, or
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
        """Run from the recorded state. Return None after an outage that may have ended by now."""
        try:
            state = self._state = PipelineState.of(self._settings)
            checkpoint = self._take(state)
            if self._checkpoint is None:
                self._progress.begin(state)
                check_sink(self._settings, self._sink)
                self._prefer_servers(checkpoint)
            self._checkpoint = checkpoint
            self._begun.record = state.begun(checkpoint)
            self._aside.take_back()
            self._settings = self._aside.active(self._servers.settings())
            self._progress.aside = self._aside.problems
            settings, is_here = self._settings, self._driver.is_in_process
            self._logs = {
                source.name: SourceLog(
                    source, settings, self._cores, self._shared_ends.get(source.name), follows_head=is_here
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
            if self._stop.is_set():
                self._progress.end(self._state)
            return None
        finally:
            for log in self._logs.values():
                log.close()
            state_taken, self._state = self._state, None
            if state_taken is not None:
                state_taken.close()

    def _prefer_servers(self, checkpoint: Checkpoint) -> None:
        """Use the servers that the positions belong to, because a server that was replaced may answer
        again.
        """
        for name, offset in checkpoint.offsets.items():
            self._servers.prefer(name, Offset.from_json(offset).server_key)

    def _is_over(self, problem: PenstockError) -> bool:
        """Wait before the next restart. Return whether the run ends with this error instead."""
        if self._set_aside(problem):
            return False
        if not isinstance(problem, TransientError) or problem is self._exhausted:
            return True
        if self._standby and isinstance(problem, LeaseLost):
            # Another process has the pipeline now, so this process waits for the other process to end.
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
        blamed = self._begun.blamed
        if blamed is not None and blamed[0] is problem:
            failed = {blamed[1]: problem}
        else:
            offsets = {} if self._checkpoint is None else self._checkpoint.offsets
            failed = failed_sources(self._logs, offsets, problem)
        if not failed or len(failed) == len(self._logs) or self._begun.needs(failed):
            return False
        for source, error in failed.items():
            self._aside.set_aside(source, error)
        self._progress.aside = self._aside.problems
        self._progress.retrying(problem, self._state)
        return True

    def _take(self, state: PipelineState) -> Checkpoint:
        """Acquire the lease, if necessary after waiting for a dead runner's session to end. Raises
        LeaseLost.
        """
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
                    raise  # Standby that lost the lease: wait again, then use the new checkpoint.
                if is_first:
                    _log.info("waiting for the lease", why=problem.message)
                    self._progress.retrying(problem, state)
                self._stop.wait(_PAUSE_SECONDS)

    def _loop(self, state: PipelineState, checkpoint: Checkpoint) -> Checkpoint | None:
        """Run batches until the end of the run. Return None if a source that was set aside is due to be taken
        back.
        """
        self._loading = Loading(self._settings, state, self._sink, self._cores)
        self._stretches.open(self._logs, self._loading, state.shards)
        self._tables = PipelineTables(self._settings, state, self._sink, self._steps, self._loading.reread)
        self._progress.schema_changes = self._tables.fitting.changes
        self._tables.stopped.update(checkpoint.stopped)
        checkpoint = self._noted(self._begin(state, checkpoint))
        batches = self._batches(state)
        if self._begun.record is not None:
            checkpoint = self._noted(batches.resume(checkpoint, self._begun.record))
        resumed: Checkpoint | None = None
        pacing = Pacing(self._settings, self._sink, self._driver, self._stop)
        while not self._stop.is_set():
            # While the record of plain batches is delayed, do not check the state for pauses and requests.
            is_recorded = not batches.recording.is_behind
            if is_recorded and (paused := state.pause_message()) is not None:
                refuse_paused(self._settings, paused, until_caught_up=self._until_caught_up)
                break
            if self._aside.has_returned:
                return None
            started = time.monotonic()
            if resumed is None:
                resumed = at_their_servers(self._logs, checkpoint, lambda work: self._retried(work, state))
                checkpoint = checkpoint if resumed == checkpoint else self._noted(state.write(resumed))
            if is_recorded:
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
                batches.recording.settle(checkpoint)
                self._progress.idle(checkpoint, state)
                pacing.wait_for_changes(self._logs.values())
                continue
            checkpoint = self._noted(batches.run(checkpoint, record))
            # A run with a fixed end gains nothing by waiting for more changes.
            if not self._loading.is_loading(checkpoint) and not self._until_caught_up:
                pacing.wait_after_batch(started, self._progress.rows_of_batch)
        batches.recording.settle(checkpoint)
        self._progress.end(state)
        return checkpoint

    def _batches(self, state: PipelineState) -> Batches:
        """Return the object that runs the batches of this attempt."""

        def succeed(record: BatchRecord) -> None:
            self._aside.worked(record.sources)
            self._note_progress()

        return Batches(
            settings=self._settings,
            driver=self._driver,
            sink=self._sink,
            steps=self._steps,
            state=state,
            recording=Recording(state, self._sink),
            logs=self._logs,
            loading=self._loading,
            tables=self._tables,
            cascades=self._cascades,
            progress=self._progress,
            begun=self._begun,
            stop=self._stop,
            retried=lambda work: self._retried(work, state),
            report=self._report,
            succeeded=succeed,
        )

    def _note_progress(self) -> None:
        self.has_progressed = True
        self._restarts.succeeded()

    def _noted(self, checkpoint: Checkpoint) -> Checkpoint:
        self._checkpoint = checkpoint
        return checkpoint

    def _begin(self, state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        """Record the start of each source before reading any, then read the table definitions."""
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
        # An exact load is retried as a new batch. If such a batch also read the log, the retry could apply
        # its changes twice.
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
        parts = self._settings.batch.parts or parts_for(ranges, chunks, self._cores)
        divided, groups = divided_of(self._tables.targets.values()), groups_for(chunks, self._cores)
        works = tuple(ranges), tuple(chunks)
        return BatchRecord(number, begin, end, *works, parts, loads, tuple(finished), divided, groups=groups)

    def _after_loss(self, state: PipelineState, checkpoint: Checkpoint, error: PositionPurged) -> Checkpoint:
        """Continue at the end of each purged log and reread its tables. Raises `error` if no source may
        continue.
        """
        offsets = dict(checkpoint.offsets)
        for name, log in self._logs.items():
            if log.source.on_lost == "stop":
                continue
            try:
                self._retried(partial(self._stretches.next, checkpoint, name), state)
            except PositionPurged as lost:
                begin = Offset.from_json(checkpoint.offsets[name])
                # The tables are read after this position, so none of their changes are missed.
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
        # The other sources must not wait longer for a failing source.
        waits_short = self._aside.has_several
        retries: Retry | None = None
        while True:
            try:
                return work()
            except TransientError as problem:
                if state.lost:
                    raise
                retries = retries or self._new_retries(ASIDE_SECONDS if waits_short else math.inf)
                try:
                    retries.wait(problem)
                except PenstockError:
                    self._exhausted = None if waits_short else problem
                    raise
                # Another server has its own positions, so the run restarts.
                if self._stop.is_set() or self._servers.turn(problem):
                    raise
