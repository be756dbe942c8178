# SPDX-License-Identifier: Apache-2.0
"""The runs of a pipeline with several sinks: one run per sink, all in one process."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import structlog

from penstock.engine.driver import Driver
from penstock.engine.run import PipelineRun
from penstock.engine.shared_ends import SharedEnds
from penstock.engine.shared_ranges import SharedRanges
from penstock.errors import CoordinationLost, LeaseLost, OptionInvalid, PenstockError
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.retry import Backoff, Retry

_log = structlog.get_logger(__name__)

# Pauses before a failed sink is started again. The sink has already been retried for `errors.retry_for`.
_RESTARTS = Backoff(first=5.0, longest=300.0)
_POLL_SECONDS = 0.5
_BACKOFF = Backoff(first=0.5)
# The store releases the lease of a dead runner shortly after it has expired.
_LEASE_MARGIN_SECONDS = 2.0


class SinkRuns:
    """The runs of all sinks of a pipeline, each from its own position.

    Sinks at the same position share the ranges decoded in this process: see `shared_ranges`. A sink that
    fails or does not answer falls behind without affecting the others. Its run ends with an error, which is
    logged and shown with the sink's name. The run is restarted from the sink's position, after a pause that
    doubles up to five minutes, until it works. Once all sinks have failed, `run` raises the error. With
    `until_caught_up`, a failed sink is not restarted: `run` raises its error after the other sinks have
    caught up. `report` is called as by `PipelineRun`, by one thread at a time; each report names its `sink`.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        driver: Driver,
        *,
        until_caught_up: bool = False,
        stop: threading.Event | None = None,
        report: Callable[[Mapping[str, Any]], None] | None = None,
        standby: bool = False,
    ) -> None:
        self._name = settings.name
        self._standby = standby
        self._retry_for = settings.errors.retry_for
        self._until_caught_up = until_caught_up
        self._stop = stop or threading.Event()
        self._lock = threading.Lock()
        self._report = report
        self._shared_ends = {source.name: SharedEnds() for source in settings.sources}
        count = len(settings.sinks)
        ranges = SharedRanges({source.name: source.tables for source in settings.sources}, count)
        self._sinks = {
            sink_settings.sink.name: _SinkRun(self, sink_settings, driver.beside(count, ranges))
            for sink_settings in settings.each_sink()
        }
        self._bug: BaseException | None = None

    def stop(self) -> None:
        """End all runs, as `PipelineRun.stop` does."""
        self._stop.set()

    def run(self) -> dict[str, Checkpoint]:
        """Run until stopped, paused, or caught up, and return the checkpoint of each sink.

        Raises LeaseLost if another process runs the pipeline, or a sink's error as described above.
        """
        self._wait_for_leases()
        threads = [
            threading.Thread(target=sink.run, name=f"sink-{name}", daemon=True)
            for name, sink in self._sinks.items()
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                # Join with a timeout, because an unbounded join would block KeyboardInterrupt.
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._bug is not None:
            raise self._bug
        failed = {name: sink.failure for name, sink in self._sinks.items() if sink.failure is not None}
        if failed and (self._until_caught_up or len(failed) == len(self._sinks)):
            raise _named(*next(iter(failed.items())))
        return {name: sink.checkpoint for name, sink in self._sinks.items()}

    def _wait_for_leases(self) -> None:
        """Wait for the sessions of a dead runner to expire. Raises LeaseLost if another process is alive, and
        CoordinationLost if the store does not answer for `errors.retry_for`."""
        retries = Retry(
            "waiting for the coordination store", backoff=_BACKOFF, seconds=self._retry_for, stop=self._stop
        )
        for sink in self._sinks.values():
            retries.run(partial(self._wait_for_lease, sink), CoordinationLost)

    def _wait_for_lease(self, sink: "_SinkRun") -> None:
        deadline: float | None = None
        with closing(sink.open_state()) as state:
            while (runner := state.runner()) is not None and not self._stop.is_set():
                now = time.monotonic()
                deadline = deadline or now + state.lease_seconds + _LEASE_MARGIN_SECONDS
                if now > deadline and not self._standby:
                    raise LeaseLost(
                        f"the pipeline {state.shown_name} is run by {runner.name}",
                        hint=f"penstock pipelines show {self._name}",
                    )
                self._stop.wait(_POLL_SECONDS)

    # --- Called by the threads of the sinks -------------------------------------------------

    def start(self, settings: PipelineSettings, driver: Driver) -> PipelineRun:
        """Return a new run of a sink."""
        return PipelineRun(
            settings,
            driver,
            until_caught_up=self._until_caught_up,
            stop=self._stop,
            report=self._tell,
            shared_ends=self._shared_ends,
            standby=self._standby,
        )

    def wait_after(self, name: str, problem: PenstockError, pause: float) -> bool:
        """Report the failure of a sink and wait. Return whether to start the sink again."""
        others = [sink for other, sink in self._sinks.items() if other != name]
        if self._until_caught_up or self._stop.is_set():
            _log.error("a sink failed", pipeline=self._name, sink=name, why=str(problem))
            return False
        if all(other.has_failed for other in others):
            _log.error("all sinks have failed", pipeline=self._name, sink=name, why=str(problem))
            self._stop.set()
            return False
        _log.error(
            "a sink failed and is started again later, the other sinks continue",
            pipeline=self._name,
            sink=name,
            seconds=pause,
            why=str(problem),
        )
        return not self._stop.wait(pause)

    def end_after(self, name: str) -> None:
        """End all runs after the run of one sink ended because of a pause. If a sink has caught up, only its
        own run ends.
        """
        if not self._until_caught_up and not self._stop.is_set():
            _log.info("the runs of all sinks end with a pause", pipeline=self._name, sink=name)
            self._stop.set()

    def end_with(self, bug: BaseException) -> None:
        """End all runs because of an error that is not a PenstockError."""
        with self._lock:
            self._bug = self._bug or bug
        self._stop.set()

    def _tell(self, report: Mapping[str, Any]) -> None:
        if self._report is not None:
            with self._lock:
                self._report(report)


class _SinkRun:
    """Runs one sink, and keeps its current run and the error of its last failed run."""

    def __init__(self, runs: SinkRuns, settings: PipelineSettings, driver: Driver) -> None:
        self._runs = runs
        self._settings = settings
        self._driver = driver
        self._current: PipelineRun | None = None
        self.failure: PenstockError | None = None
        self.checkpoint = Checkpoint.new()

    @property
    def has_failed(self) -> bool:
        """Whether the last run failed and no later run has worked yet."""
        return self.failure is not None and not (self._current and self._current.has_progressed)

    def open_state(self) -> PipelineState:
        """Open the sink's state."""
        return PipelineState.of(self._settings)

    def run(self) -> None:
        """Run the sink until all runs are stopped. Start it again after each failure."""
        failures = 0
        try:
            while True:
                try:
                    self._current = self._runs.start(self._settings, self._driver)
                    self.checkpoint = self._current.run()
                except Exception as error:
                    if isinstance(error, AssertionError):
                        raise
                    problem = self._failed(error)
                    failures = 1 if self._current and self._current.has_progressed else failures + 1
                    self.failure, self._current = problem, None
                    pause = _RESTARTS.bound(failures)
                    if not self._runs.wait_after(self._settings.sink.name, problem, pause):
                        return
                else:
                    self.failure = None
                    # A pause ends all runs, even those that would not notice the pause before it is lifted.
                    self._runs.end_after(self._settings.sink.name)
                    return
        except BaseException as bug:
            # Report the exception to the other runs, because an exception in a thread does not reach the
            # caller.
            self._runs.end_with(bug)
            raise

    def _failed(self, error: Exception) -> PenstockError:
        """Convert the error that ended a sink into a PenstockError.

        Any other error, such as one from a client library, is logged with its traceback.
        """
        if isinstance(error, PenstockError):
            return error
        _log.error("an unexpected error in a sink", sink=self._settings.sink.name, exc_info=error)
        return PenstockError(f"unexpected {type(error).__name__}: {error}", hint="The log has its traceback")


def _named(sink: str, problem: PenstockError) -> PenstockError:
    """Return a sink's error with the sink's name added."""
    message = f"sink {sink}: {problem.message}"
    return type(problem)(message, position=problem.position, hint=problem.hint)


def run_of(
    settings: PipelineSettings,
    driver: Driver,
    *,
    until_caught_up: bool = False,
    to_barrier: bool = False,
    stop: threading.Event | None = None,
    report: Callable[[Mapping[str, Any]], None] | None = None,
    standby: bool = False,
) -> PipelineRun | SinkRuns:
    """Return the run of a pipeline with one sink or with several.

    Raises OptionInvalid if the pipeline has shards and `settings` do not select one. `to_barrier` requires a
    run of one shard, whose pipeline always has a single sink.
    """
    if settings.shards > 1 and settings.shard is None:
        raise OptionInvalid(
            f"the pipeline {settings.name} has {settings.shards} shards, each of which needs a process",
            hint=f"Run: penstock run --local {settings.path or 'FILE'}; or leave shards out",
        )
    if len(settings.sinks) > 1:
        return SinkRuns(
            settings, driver, until_caught_up=until_caught_up, stop=stop, report=report, standby=standby
        )
    return PipelineRun(
        settings,
        driver,
        until_caught_up=until_caught_up,
        to_barrier=to_barrier,
        stop=stop,
        report=report,
        standby=standby,
    )
