# SPDX-License-Identifier: Apache-2.0
"""The loop of a pipeline: what to do next, written down, done as one job, committed, and noted as done."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from penstock.engine.beginning import (
    at_their_servers,
    check_sink,
    refuse_keyless,
    refuse_lost_state,
    refuse_paused,
)
from penstock.engine.driver import Driver
from penstock.engine.interrupted_loads import committed_floors
from penstock.engine.job import Outcome, run_job
from penstock.engine.loading import Loading
from penstock.engine.progress import Progress
from penstock.engine.servers import SourceServers, watched
from penstock.engine.source_log import SourceLog, around_skips
from penstock.engine.standstill import asks_again, no_progress
from penstock.engine.tables import PipelineTables
from penstock.engine.task_plan import OF_STATEMENT, Surprise, TaskPlan
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
from penstock.pipeline.record import BatchRecord, RangeWork
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState, Standing, split_key, table_key
from penstock.pipeline.verify.narrowing import narrow_rereads
from penstock.retry import Backoff, Retry
from penstock.sinks.sink import BatchMark, Sink, Spread
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)

# A batch is run again after each surprise; more rounds than this mean that nothing is learned from them.
_ROUNDS_MAX = 50
_POLL_SECONDS = 0.2
_PAUSE_SECONDS = 0.5
_BACKOFF = Backoff(first=0.5)
# A stopped run finishes its batch within this time, or leaves it to the next run.
_STOP_SECONDS_MAX = 8.0
# The store ends the lease of a runner that is gone a little after its time.
_LEASE_MARGIN_SECONDS = 2.0
# What is wrong with one table, or with the target whose tables they all are: its folder, or our account.
_OF_ALL_TABLES = (OptionInvalid, PrivilegeMissing)


class PipelineRun:
    """One run of a pipeline on a driver, from taking the lease to giving it back.

    Servers, daemons, the coordination store and executors that are away are retried for `errors.retry_for`.
    After an outage that a retry in place does not mend, the run begins again from what the state has, as a
    new process would. With `until_caught_up` it ends once all that stood in the logs at its start, or when
    its loads ended, is in the target. `told` is called with the progress after each batch, and with each
    problem.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        driver: Driver,
        *,
        until_caught_up: bool = False,
        stop: threading.Event | None = None,
        told: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._until_caught_up = until_caught_up
        self._stop = stop or threading.Event()
        self._cores = driver.cores
        self._sink = settings.make_sink()
        self._steps = settings.make_steps()
        self._logs: dict[str, SourceLog] = {}
        self._servers = SourceServers(settings)
        self._cascades = CascadeWatch(settings, self._sink)
        self._targets: dict[str, Offset] | None = None
        self._progress = Progress(settings.name, told)
        # What the last attempt of this run had and knew; None before the first.
        self._state: PipelineState | None = None
        self._standing: Standing | None = None
        self._exhausted: PenstockError | None = None
        self._restarts = self._new_retries()

    def stop(self) -> None:
        """End the run after the batch that runs now, or after 8 seconds, when the batch is given up until the
        next run. May be called from any thread, and from a signal."""
        self._stop.set()

    def run(self) -> Standing:
        """Run until stopped, paused, or caught up; return what is done.

        Raises LeaseLost where another runs the pipeline, OptionInvalid where the sink cannot be used, and the
        error that ended the run.
        """
        try:
            with self._driver.cancelling(self._stop, _STOP_SECONDS_MAX):
                standing = self._run_until_lost()
                while standing is None and not self._stop.is_set():
                    standing = self._run_until_lost()
                return standing or self._standing or Standing.new()
        finally:
            self._sink.close()

    def _run_until_lost(self) -> Standing | None:
        """Run from what the state has. Return None after an outage that may be over by now."""
        try:
            state = self._state = PipelineState.open(self._settings.state, self._settings.name)
            standing = self._take(state)
            if self._standing is None:
                check_sink(self._settings, self._sink)
                self._prefer_servers(standing)
            self._standing = standing
            self._settings = self._servers.settings()
            self._logs = {
                source.name: SourceLog(source, self._settings, self._cores)
                for source in self._settings.sources
            }
            self._cascades = CascadeWatch(self._settings, self._sink)
            self._retried(self._cascades.look, state)
            return self._loop(state, standing)
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

    def _prefer_servers(self, standing: Standing) -> None:
        """Go on at the server that the positions belong to: one that was replaced may answer again."""
        for name, offset in standing.offsets.items():
            self._servers.prefer(name, Offset.from_json(offset).server_key)

    def _is_over(self, problem: PenstockError) -> bool:
        """Wait before the run begins again; tell whether that is of no use."""
        if not isinstance(problem, TransientError) or problem is self._exhausted:
            return True
        if self._stop.is_set() or self._servers.turn(problem):
            return False
        try:
            self._restarts.wait(problem)
        except TransientError:
            return True
        return False

    def _take(self, state: PipelineState) -> Standing:
        """Take the lease, once the session of a runner that is gone has ended. Raises LeaseLost where another
        runner has it, or had it since it was ours."""
        deadline: float | None = None
        while True:
            try:
                return state.take(None if self._standing is None else self._standing.token)
            except LeaseLost as problem:
                now = time.monotonic()
                deadline = deadline or now + state.lease_seconds + _LEASE_MARGIN_SECONDS
                if state.lost or now > deadline:
                    self._exhausted = problem
                if self._exhausted or self._stop.is_set():
                    raise
                _log.info("waiting for the lease", why=problem.message)
                self._progress.retrying(problem, state)
                self._stop.wait(_PAUSE_SECONDS)

    def _loop(self, state: PipelineState, standing: Standing) -> Standing:
        self._loading = Loading(self._settings, state, self._sink, self._cores)
        self._tables = PipelineTables(self._settings, state, self._sink, self._steps, self._loading.reread)
        self._tables.stopped.update(standing.stopped)
        standing = self._noted(self._begin(state, standing))
        begun = state.begun(standing)
        if begun is not None:
            _log.info("a batch that was begun is run again", batch=begun.number)
            if begun.is_exact:
                standing = self._noted(self._settle(state, standing, begun))
            else:
                standing = self._noted(self._complete(state, standing, begun, written=True))
        resumed: Standing | None = None
        while not self._stop.is_set():
            if (paused := state.pause_told()) is not None:
                refuse_paused(self._settings, paused, until_caught_up=self._until_caught_up)
                break
            started = time.monotonic()
            if resumed is None:
                resumed = at_their_servers(self._logs, standing, lambda work: self._retried(work, state))
                standing = standing if resumed == standing else self._noted(state.write(resumed))
            standing = self._noted(self._loading.planned(standing, self._tables))
            try:
                record = self._next(state, standing)
            except PositionPurged as problem:
                standing = self._noted(self._after_loss(state, standing, problem))
                continue
            if record is None:
                if self._until_caught_up and self._is_caught_up(standing):
                    break
                self._restarts.succeeded()
                self._progress.idle(standing, state)
                self._stop.wait(_POLL_SECONDS)
                continue
            standing = self._noted(self._complete(state, standing, record))
            # A run with a fixed end gains nothing by waiting for more changes.
            if not standing.loading and not self._until_caught_up:
                self._stop.wait(max(0.0, self._settings.batch.interval - (time.monotonic() - started)))
        return standing

    def _noted(self, standing: Standing) -> Standing:
        self._standing = standing
        return standing

    def _begin(self, state: PipelineState, standing: Standing) -> Standing:
        """Note where each source begins, before anything of it is read, then get to know the tables."""
        if not standing.offsets:
            self._retried(partial(refuse_lost_state, self._settings, self._sink, standing), state)
        new = {
            name: log.first((standing.earlier or {}).get(name)).to_json()
            for name, log in self._logs.items()
            if name not in standing.offsets
        }
        if new:
            standing = state.write(replace(standing, offsets={**standing.offsets, **new}))
        self._retried(self._tables.open, state)
        return standing

    # --- What is next -----------------------------------------------------------------------

    def _next(self, state: PipelineState, standing: Standing) -> BatchRecord | None:
        """Return the next batch: chunks while tables are loaded, then what the logs have that is new."""
        number, parts = standing.number + 1, self._settings.batch.parts or self._cores
        begin, end, ranges = {}, {}, []
        chunks, loads, finished = self._loading.next(standing)
        # A batch that is begun anew, and not run again, must have nothing of a log: it would be there twice.
        if not self._is_first_load(standing) and not any(one.exact for one in chunks):
            for name, log in self._logs.items():
                found = self._retried(partial(self._stretch, standing, name, log), state)
                if found is None:
                    continue
                begin[name], end[name] = found[0].to_json(), found[1].to_json()
                ranges += found[2]
        if not ranges and not chunks:
            return None
        divided = [
            str(name) for name, one in self._tables.targets.items() if one.primary_key and not one.unique_keys
        ]
        return BatchRecord(
            number, begin, end, tuple(ranges), tuple(chunks), parts, loads, tuple(finished), tuple(divided)
        )

    def _after_loss(self, state: PipelineState, standing: Standing, problem: PositionPurged) -> Standing:
        """Go on at the end of each log whose next changes were purged, and ask for its tables to be read
        again. Raises the problem where that is not wanted."""
        offsets = dict(standing.offsets)
        for name, log in self._logs.items():
            if log.source.on_lost == "stop":
                continue
            try:
                self._retried(partial(self._stretch, standing, name, log), state)
            except PositionPurged as lost:
                begin = Offset.from_json(standing.offsets[name])
                # Tables are read after this place, so no change of theirs is missed.
                offsets[name] = self._retried(partial(log.after_loss, begin), state).to_json()
                tables = self._tables.jump(log.source)
                refuse_keyless(self._tables.known_targets(), name, tables, lost)
                _log.error(
                    "changes were purged before they were read: every table is read again",
                    source=name,
                    tables=len(tables),
                    why=str(lost),
                )
                for table in tables:
                    self._loading.reread(name, table, f"purged at {time.time_ns()}", remove=True)
        if offsets == standing.offsets:
            raise problem
        standing = state.write(replace(standing, offsets=offsets))
        narrow_rereads(self._settings, state, self._driver.spreading)
        return standing

    @staticmethod
    def _is_first_load(standing: Standing) -> bool:
        """Tell whether the full load is not done: then changes wait, and are read once it is."""
        return any(
            not load.finished and not load.request and key not in standing.stopped
            for key, load in standing.loads.items()
        )

    def _stretch(
        self, standing: Standing, name: str, log: SourceLog
    ) -> tuple[Offset, Offset, list[RangeWork]] | None:
        skips = standing.skips.get(name, ())
        target = self._until(name, standing)
        begin, until = around_skips(Offset.from_json(standing.offsets[name]), target, skips)
        here = log.resume(begin)
        if target is not None and self._targets is not None and not log.has(target, here):
            # Another server answers. Its positions cannot be compared with the target, so settle a new one.
            target = self._targets[name] = log.target()
            _log.warning("the run now ends at another server's log", source=name, target=str(target))
            _, until = around_skips(begin, target, skips)
        found = log.next(here, until)
        if found is None:
            return None
        end, head = found
        self._progress.seen(name, end, head)
        return here, end, log.works(here, end)

    def _until(self, name: str, standing: Standing) -> Offset | None:
        """Return where a run that ends by itself ends in a source; None while that is not settled."""
        if not self._until_caught_up:
            return None
        if self._targets is None:
            if standing.loading or self._loading.is_asked(standing):
                return None
            # What was read from tables is whole only with the changes made meanwhile.
            self._targets = {one: log.target() for one, log in self._logs.items()}
        return self._targets[name]

    def _is_caught_up(self, standing: Standing) -> bool:
        return self._targets is not None and not standing.loading and not self._loading.is_asked(standing)

    # --- One batch --------------------------------------------------------------------------

    def _complete(
        self, state: PipelineState, standing: Standing, record: BatchRecord, *, written: bool = False
    ) -> Standing:
        """Run a batch until it is done, whatever comes and goes meanwhile."""
        if not written:
            self._retried(partial(state.begin, record), state)
        learned = Learned()
        started = time.monotonic()

        def attempt() -> Outcome:
            nonlocal record, standing
            try:
                return self._rounds(state, standing, record, learned)
            except (ServerChanged, PositionInvalid):
                # The same transactions stand elsewhere in the log of the server that answers now.
                record = self._planned_again(record)
                if self._has_ranges_by_part():
                    # Parts that are written already were other ranges: rather twice than never.
                    standing = state.write(replace(standing, number=record.number))
                    record = replace(record, number=record.number + 1)
                state.begin(record)
                learned.statements.clear()
                self._tables.undone()
                return self._rounds(state, standing, record, learned)

        if record.is_exact:
            # After a TransientError the run begins again and settles this batch first.
            outcome = attempt()
        else:
            try:
                outcome = self._retried(attempt, state)
            except PositionPurged as problem:
                # It was purged since the batch was planned. The next plan finds that out for each source.
                if all(log.source.on_lost == "stop" for log in self._logs.values()):
                    raise
                return self._given_up(state, standing, record, problem)
        self._reread_children(record, outcome)
        mark = self._mark(standing, record)
        # Nothing of a source stands between what the sink keeps and the word that it does.
        read = self._read_to(standing, record, state)

        def commit() -> None:
            state.confirm()
            self._sink.commit(mark, outcome.receipts)

        self._retried(commit, state)
        floors = {key: floor for counts in outcome.counts for key, floor in counts.floors.items()}
        standing = self._record(state, standing, record, floors, read)
        for name, offset in standing.offsets.items():
            if name in self._logs:
                self._logs[name].hold(Offset.from_json(offset))
        self._loading.done(standing, record)
        self._restarts.succeeded()
        self._progress.batch(standing, record, outcome, time.monotonic() - started, state)
        return standing

    def _record(
        self,
        state: PipelineState,
        standing: Standing,
        record: BatchRecord,
        floors: Mapping[str, int],
        read: Mapping[str, int],
    ) -> Standing:
        """Record a batch that the sink has committed."""
        self._tables.done()
        standing = replace(standing.after(record), stopped=dict(self._tables.stopped))
        loads = {key: replace(standing.loads[key], floor=floor) for key, floor in floors.items()}
        standing = replace(standing, loads={**standing.loads, **loads})
        for key, version in read.items():
            standing = standing.having_read(key, version)
        recorded: Standing = self._retried(partial(state.write, standing), state)
        return recorded

    def _settle(self, state: PipelineState, standing: Standing, record: BatchRecord) -> Standing:
        """Record an interrupted exact load that a feed has already, or abandon its batch number."""
        begin = Offset.from_json(standing.offsets[record.chunks[0].source])
        mark = self._mark(standing, record)
        work = partial(committed_floors, self._sink, self._tables, self._steps, mark, record, begin)
        floors = None if self._sink.keeps_state else self._retried(work, state)
        if floors is None:
            return self._given_up(state, standing, record, None)
        _log.info("a load that was committed is recorded", batch=record.number)
        standing = self._record(state, standing, record, floors, self._read_to(standing, record, state))
        self._loading.done(standing, record)
        return standing

    def _reread_children(self, record: BatchRecord, outcome: Outcome) -> None:
        """Ask for tables to be read again whose rows a foreign key may have changed."""
        parents = {key for counts in outcome.counts for key in counts.cascaded}
        for source in {split_key(key)[0] for key in parents}:
            keys = {key for key in parents if split_key(key)[0] == source}
            for table in self._cascades.children(source, keys):
                if table_key(source, table) in self._tables.there():
                    end = Offset.from_json(record.end[source]).position
                    self._loading.reread_later(source, table, f"a foreign key, {end}")

    def _read_to(self, standing: Standing, record: BatchRecord, state: PipelineState) -> dict[str, int]:
        """Return, of tables whose rows were read, the commit version that no change in them has reached."""
        found: dict[str, int] = {}
        for one in record.chunks:
            log, key = self._logs[one.source], table_key(one.source, one.table)
            if key not in standing.loads or key in found or log.source.options.is_kept:
                continue
            head = self._retried(log.target, state).position
            epoch = Offset.from_json(standing.offsets[one.source]).position.epoch
            found[key] = replace(head, epoch=epoch).commit_version
        return found

    def _has_ranges_by_part(self) -> bool:
        """Tell whether the sink keeps each range of a log for itself, under the batch's number."""
        return self._sink.spread is Spread.RANGES and type(self._sink).commit is Sink.commit

    def _given_up(
        self, state: PipelineState, standing: Standing, record: BatchRecord, problem: Exception | None
    ) -> Standing:
        """Give a batch's number up: what it reads is another thing each time, and is begun anew."""
        _log.warning("a batch is started again", batch=record.number, why=str(problem)[:500])
        self._stop.wait(_PAUSE_SECONDS)
        return state.write(replace(standing, number=record.number))

    def _rounds(
        self, state: PipelineState, standing: Standing, record: BatchRecord, learned: Learned
    ) -> Outcome:
        """Run a batch's job, again after each round of surprises. Raises what its tasks raised."""
        rounds = 0
        asked: list[Surprise] = []
        refused: dict[str, PenstockError] = {}
        while rounds < _ROUNDS_MAX:
            plan = self._plan(standing, record, learned)
            state.confirm()
            with watched(self._settings.sources, self._report):
                outcome = run_job(self._driver, plan)
            if outcome.failures:
                refused |= {
                    one.table: one.error for one in outcome.failures if isinstance(one.error, _OF_ALL_TABLES)
                }
                # Each time there is a table fewer that could fail.
                if self._settings.errors.table == "skip_table" and self._tables.stop(outcome.failures):
                    continue
                raise self._raised(outcome)
            if not outcome.surprises:
                if len(refused) > 1 and not any(one.rows for one in outcome.receipts):
                    # Nothing of what came could be written: it is the target, and not its tables.
                    raise next(iter(refused.values()))
                return outcome
            if asks_again(outcome.surprises, asked):
                break
            rounds += 1
            asked = outcome.surprises
            self._tables.learn(asked, learned, self._floors(standing))
            for one in asked:
                if one.what == OF_STATEMENT and "references" in one.value.text.lower():
                    self._cascades.look(str(one.value.position))
        raise no_progress(record, outcome.surprises[0])

    @staticmethod
    def _raised(outcome: Outcome) -> PenstockError:
        # What can be mended by waiting is tried again only where nothing else is wrong.
        errors = [one.error for one in outcome.failures]
        return next((one for one in errors if not isinstance(one, TransientError)), errors[0])

    def _plan(self, standing: Standing, record: BatchRecord, learned: Learned) -> TaskPlan:
        histories: dict[int, Any] = {}
        for name, log in self._logs.items():
            numbers = [at for at, one in enumerate(record.ranges) if one.source == name]
            found = log.histories([record.ranges[at] for at in numbers])
            histories |= {at: one for at, one in zip(numbers, found, strict=True) if one is not None}
        spread = self._sink.spread
        mark = replace(self._mark(standing, record), shared=self._sink.begin(self._tables.targets.values()))
        if mark.loads and self._sink.load_spread is not None:
            spread = self._sink.load_spread
        if self._settings.apply == "serial" and not record.chunks:
            spread = Spread.WHOLE
        return TaskPlan(
            mark=mark,
            record=record,
            steps=self._settings.steps,
            sink=self._settings.sink,
            spread=spread,
            keeps_state=self._sink.keeps_state,
            shares_columns=self._sink.shares_columns,
            schema_changes=self._settings.schema_changes,
            parents=self._cascades.parents,
            metadata_read=self._sink.metadata_read,
            in_driver=self._sink.in_driver,
            sources={one.name: one for one in self._settings.sources},
            tables=self._tables.known(self._floors(standing)),
            targets=self._tables.targets,
            statements=learned.statements,
            together=frozenset(learned.together),
            passed_over=frozenset(self._tables.stopped),
            unread=frozenset(learned.unread),
            histories=histories,
            loops=self._settings.loops,
            dead_letter=self._settings.dead_letter,
            rate_rows=self._settings.load.rate,
            epochs={
                name: Offset.from_json(offset).position.epoch for name, offset in standing.offsets.items()
            },
        )

    def _planned_again(self, record: BatchRecord) -> BatchRecord:
        ranges: list[RangeWork] = []
        for name in record.begin:
            begin, end = Offset.from_json(record.begin[name]), Offset.from_json(record.end[name])
            ranges += self._logs[name].works(begin, end)
        return replace(record, ranges=tuple(ranges))

    def _mark(self, standing: Standing, record: BatchRecord) -> BatchMark:
        loads = not record.ranges and not any(
            chunk.request or chunk.exact or chunk.remove for chunk in record.chunks
        )
        tables = {table_key(one.source, one.table) for one in record.chunks}
        loads = loads and not any(map(self._tables.may_meet, tables))
        return BatchMark(self._settings.name, standing.generation, record.number, loads)

    @staticmethod
    def _floors(standing: Standing) -> dict[str, int]:
        return {key: load.floor for key, load in standing.loads.items() if load.floor}

    def _new_retries(self) -> Retry:
        return Retry(
            "trying again",
            backoff=_BACKOFF,
            seconds=self._settings.errors.retry_for,
            stop=self._stop,
            report=self._report,
        )

    def _report(self, problem: Exception) -> None:
        assert isinstance(problem, PenstockError), "a run retries nothing else"
        self._progress.retrying(problem, self._state)

    def _retried(self, work: Callable[[], Any], state: PipelineState) -> Any:
        """Do something again while what it needs is away, for as long as the settings say, and as long as the
        pipeline is ours by the state."""
        retries = self._new_retries()
        while True:
            try:
                return work()
            except TransientError as problem:
                if state.lost:
                    raise
                try:
                    retries.wait(problem)
                except PenstockError:
                    self._exhausted = problem
                    raise
                # Another server has its own positions: the run begins again.
                if self._stop.is_set() or self._servers.turn(problem):
                    raise
