# SPDX-License-Identifier: Apache-2.0
"""Determines when a run plans its next batch."""

import threading
import time
from collections.abc import Collection

import structlog

from penstock.engine.driver import Driver
from penstock.engine.source_log import SourceLog
from penstock.errors import PenstockError
from penstock.pipeline.settings import PipelineSettings
from penstock.retry import Backoff
from penstock.sinks.sink import Sink

# How often a run looks for changes and requests, and checks whether the pipeline is paused.
_POLL_SECONDS = 0.2
# The interval between batches whose overhead is much larger than the cost of their rows.
_INTERVAL_SECONDS = 1.0
# Pauses after consecutive batches without rows. The log may be growing only by changes to other tables, and
# recording each batch costs a write to the state store.
_EMPTY_PAUSES = Backoff(first=0.05, longest=0.5)

_log = structlog.get_logger(__name__)


class Pacing:
    """The interval between batches, and the wait for new transactions.

    If no interval is set, it depends on what a batch costs. Batches that take milliseconds follow one another
    without a pause. This is the case if the driver runs tasks in this process, the logs come from daemons,
    and the sink does not create a file per batch. Under load, such batches become larger.
    """

    def __init__(self, settings: PipelineSettings, sink: Sink, driver: Driver, stop: threading.Event) -> None:
        self._stop = stop
        self._sink = sink
        self._arrived = threading.Event()
        # The sources for which a waiting thread is running.
        self._waiting: set[str] = set()
        self._lock = threading.Lock()
        self._is_continuous = False
        self._empty_batches = 0
        if settings.batch.interval is not None:
            self._interval = settings.batch.interval
            return
        are_daemons = all(source.options.daemon is not None for source in settings.sources)
        self._is_continuous = driver.is_in_process and are_daemons and not sink.makes_files
        self._interval = 0.0 if self._is_continuous else _INTERVAL_SECONDS

    def wait_after_batch(self, started: float, rows: int) -> None:
        """Wait until the next batch may begin. `started` is when the last batch began, by
        `time.monotonic`.
        """
        self._sink.keep_alive()
        pause = self._interval - (time.monotonic() - started)
        self._empty_batches = 0 if rows else self._empty_batches + 1
        if self._is_continuous and self._empty_batches:
            pause = _EMPTY_PAUSES.bound(self._empty_batches)
        if pause > 0:
            self._stop.wait(pause)

    def wait_for_changes(self, logs: Collection[SourceLog]) -> None:
        """Wait until a log has grown, or until it is time to check. Only daemons report growth."""
        self._sink.keep_alive()
        reporting = [log for log in logs if log.reports_arrivals]
        if len(reporting) == len(logs) == 1:
            self._wait_for(reporting[0])
            return
        self._arrived.clear()
        for log in reporting:
            self._start_waiting(log)
        self._arrived.wait(_POLL_SECONDS) if reporting else self._stop.wait(_POLL_SECONDS)

    def _start_waiting(self, log: SourceLog) -> None:
        name = log.source.name

        def wait() -> None:
            try:
                self._wait_for(log)
            finally:
                with self._lock:
                    self._waiting.remove(name)
                self._arrived.set()

        with self._lock:
            if name in self._waiting:
                return
            self._waiting.add(name)
        # A hung daemon must not keep the process from ending.
        threading.Thread(target=wait, name=f"wait-{name}", daemon=True).start()

    def _wait_for(self, log: SourceLog) -> None:
        try:
            if not log.wait(_POLL_SECONDS):
                self._stop.wait(_POLL_SECONDS)
        except PenstockError as problem:
            # The next plan asks the same daemon, and reports its error.
            _log.debug("a daemon does not report arrivals", source=log.source.name, why=str(problem))
            self._stop.wait(_POLL_SECONDS)
