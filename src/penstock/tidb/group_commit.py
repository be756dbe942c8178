# SPDX-License-Identifier: Apache-2.0
"""Group commit: one thread stores what many writers sent, with one sync for all waiting writes.

Everything that changes a Pump's state runs in this thread. After a disk error or an unexpected error, all
waiting writes are refused, and the store is opened again.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from penstock.errors import DiskFailed, PenstockError, ServerBusy, TransientError
from penstock.limits import PUMP_BATCH_BYTES_MAX
from penstock.retry import Retry
from penstock.tidb.pump_store import PumpStore, Write

_log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")

# Called with the binlogs of a batch once each has been stored or has a problem. Runs in the storing thread.
Done = Callable[[list[Write]], None]


class GroupCommit:
    """The thread that stores the binlogs of one Pump, and the Pump's store.

    `done` is called with every batch of submitted writes, and `released` after transactions were released.
    """

    def __init__(
        self, name: str, open_store: Callable[[], PumpStore], done: Done, released: Callable[[], None]
    ) -> None:
        self._open_store = open_store
        self._done = done
        self._released = released
        self._lock = threading.Condition()
        self._writes: deque[Write] = deque()
        self._calls: deque[Callable[[PumpStore], None]] = deque()
        self._stopping = threading.Event()
        self._failure: PenstockError | None = None
        self._store: PumpStore | None = None
        self._thread = threading.Thread(target=self._run, name=f"pump-store-{name}", daemon=True)

    def start(self) -> None:
        """Open the store and begin to store. Propagates errors from `PumpStore`."""
        self._store = self._open_store()
        self._thread.start()

    @property
    def store(self) -> PumpStore:
        """The store, for reading. Raises ServerBusy while it is being reopened."""
        store = self._store
        if store is None:
            raise ServerBusy(f"the Pump's log is not open: {self._failure}")
        return store

    def submit(self, writes: Sequence[Write]) -> None:
        """Queue binlogs. `done` receives them later."""
        with self._lock:
            self._writes.extend(writes)
            self._lock.notify()

    def call(self, change: Callable[[PumpStore], _Result]) -> "Future[_Result]":
        """Run a function with the store between two batches; the future has its result or its error."""
        future: Future[_Result] = Future()

        def run(store: PumpStore) -> None:
            try:
                future.set_result(change(store))
            except Exception as problem:
                future.set_exception(problem)
                if isinstance(problem, DiskFailed) or not isinstance(problem, PenstockError):
                    raise

        with self._lock:
            self._calls.append(run)
            self._lock.notify()
        return future

    def stop(self) -> None:
        """Store the waiting writes, then close the store and end the thread. Raises DiskFailed, LogFull."""
        with self._lock:
            self._stopping.set()
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join()
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # --- Internals --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._writes or self._calls or self._stopping.is_set())
                calls, self._calls = self._calls, deque()
                writes = self._take_batch()
                if not calls and not writes:
                    return
            try:
                with unexpected_reported("store"):
                    self._process(calls, writes)
            except PenstockError as problem:
                self._fail(writes, problem)
                if not self._reopen():
                    return

    def _process(self, calls: deque[Callable[[PumpStore], None]], writes: list[Write]) -> None:
        store = self.store
        released_before = store.counts.released
        for call in calls:
            call(store)
        if writes:
            # Leave out abandoned writes: nobody waits for them any more, and they were not acknowledged.
            store.write([write for write in writes if not write.is_abandoned])
            self._done(writes)
        if store.counts.released != released_before:
            self._released()

    def _take_batch(self) -> list[Write]:
        """Take the oldest writes, up to a size, so that memory and the time of a sync are bounded."""
        batch: list[Write] = []
        size = 0
        while self._writes and (not batch or size + len(self._writes[0].payload) <= PUMP_BATCH_BYTES_MAX):
            batch.append(self._writes.popleft())
            size += len(batch[-1].payload)
        return batch

    def _fail(self, writes: list[Write], problem: PenstockError) -> None:
        """Refuse a batch whose state on disk is unknown."""
        _log.error(
            "the Pump's log failed and is opened again", error=type(problem).__name__, why=str(problem)
        )
        self._failure = problem
        for write in writes:
            write.problem = problem
        self._done(writes)

    def _reopen(self) -> bool:
        """Open the store again, and refuse everything until then. Returns False if the Pump stops."""
        store, self._store = self._store, None
        if store is not None:
            store.abandon()

        def refuse_waiting(problem: Exception) -> None:
            with self._lock:
                writes, self._writes = list(self._writes), deque()
            for write in writes:
                write.problem = ServerBusy(f"the Pump's log is not open: {problem}")
            self._done(writes)

        retry = Retry("the Pump's log is opened again", stop=self._stopping, report=refuse_waiting)
        while not self._stopping.is_set():
            try:
                with unexpected_reported("store"):
                    self._store = self._open_store()
            except (TransientError, DiskFailed) as problem:
                retry.wait(problem)
            except PenstockError as problem:
                # This error needs an operator, who may repair it while the Pump refuses everything.
                _log.error("the Pump's log cannot be opened", error=type(problem).__name__, why=str(problem))
                retry.wait(problem)
            else:
                return True
        return False


@contextmanager
def unexpected_reported(doing: str) -> Iterator[None]:
    """Log an unexpected error, and turn it into ServerBusy, so that the failed operation is retried.

    In the storing thread, writers are then sent to another Pump, and the store is opened again, because the
    state in memory is unknown.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as problem:
        _log.error("a thread of the Pump failed", doing=doing, exc_info=problem)
        raise ServerBusy(f"the Pump cannot {doing}: {type(problem).__name__}: {problem}") from problem


def resolved(future: "Future[Any]", seconds: float) -> Any:
    """Return the result of a call. Raises its error, or ServerBusy if the result does not arrive in time."""
    try:
        return future.result(seconds)
    except TimeoutError as problem:
        raise ServerBusy("the Pump's storing thread is busy") from problem
