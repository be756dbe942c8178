# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline's tasks in threads of this process, without Spark or Java.

The kernel, Arrow and DuckDB release the interpreter lock, and so does waiting for a server. Threads therefore
use all cores and share rows without copying them.
"""

import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Self

import structlog

from penstock.engine.decode_task import decode_works
from penstock.engine.reading import RangeParts, range_parts
from penstock.engine.shared_ranges import SharedRanges
from penstock.engine.task_plan import PROBLEM, Failure, TaskPlan
from penstock.engine.task_resources import TaskResources
from penstock.engine.task_rows import Row
from penstock.engine.write_task import write_parts
from penstock.errors import ConnectionLost, TransientError
from penstock.local.reused_resources import ReusedResources
from penstock.local.shuffle import Shuffle
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.verify.comparison import Spreading, in_this_process

# How many rows of a batch are buffered between its stages; further rows are spilled to disk.
BUFFERED_BYTES_MAX = 256 << 20
# How long a cancelled task may take to finish its current call.
_CANCEL_SECONDS_MAX = 5.0
_POLL_SECONDS = 0.5

_log = structlog.get_logger(__name__)


class LocalDriver:
    """Runs tasks in threads, as many concurrently as this process has cores.

    Concurrent tasks use separate steps and sinks, which later tasks reuse. The function of a `python` step is
    called from several threads.
    """

    is_in_process = True

    def __init__(
        self,
        cores: int | None = None,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
        parts: RangeParts | None = None,
    ) -> None:
        self.cores = cores or _available_cores()
        self.spreading: Spreading = in_this_process
        self._buffered_bytes_max = buffered_bytes_max
        self._resources = ReusedResources()
        # Runs the only task of a small batch.
        self._thread = TaskThread()
        self._parts = parts or partial(range_parts, resources=self._resources)
        self._cancelled = threading.Event()

    @classmethod
    def of_share(cls, shares: int) -> Self:
        """Return a driver that uses one of several equal shares of this host's cores and memory."""
        return cls(max(1, _available_cores() // shares), BUFFERED_BYTES_MAX // shares)

    def beside(self, runs: int, ranges: SharedRanges) -> "LocalDriver":
        """Return a driver for one of several runs in this process, which share decoded ranges."""
        return LocalDriver(self.cores, self._buffered_bytes_max // runs, ranges.parts)

    def run(self, plan: TaskPlan) -> Iterable[Row]:
        """Run a plan's tasks to their end; see `Driver.run`. Raises ConnectionLost if they were cancelled,
        DiskFailed if rows cannot be spilled."""
        with closing(
            _Job(plan, self.cores, self._buffered_bytes_max, self._parts, self._resources, self._cancelled)
        ) as job:
            if self._thread.is_alive():
                # Its task hung and was given up.
                self._thread = TaskThread()
            return job.run(self._thread)

    @contextmanager
    def cancelling(self, stop: threading.Event, seconds: float) -> Iterator[None]:
        """Cancel tasks started in the block that are still running `seconds` after `stop`."""
        ended, cancelled = threading.Event(), threading.Event()
        self._cancelled = cancelled

        def cancel() -> None:
            while not ended.wait(_POLL_SECONDS):
                if stop.is_set() and not ended.wait(seconds):
                    _log.warning("the batch is cancelled, the next run replays it", after_seconds=seconds)
                    cancelled.set()
                    return

        thread = threading.Thread(target=cancel, name="cancel-on-stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._thread.close()
            self._resources.close()


class TaskThread:
    """A thread that runs one task after another: a small batch is shorter than the start of a thread.

    It is used like a `threading.Thread` that starts again. The thread itself starts with the first task.
    """

    name = "task-0"

    def __init__(self) -> None:
        self.task: Callable[[], None] = lambda: None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_busy = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the task, which must not raise."""
        if self._thread is None:
            # A daemon thread, because the end of the process must not wait for a hung call.
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._is_busy = True
        self._tasks.put(self.task)

    def is_alive(self) -> bool:
        """Return whether the task has not ended yet, as far as `join` knows."""
        return self._is_busy

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the end of the task."""
        if self._is_busy:
            with suppress(queue.Empty):
                self._ends.get(timeout=timeout)
                self._is_busy = False

    def close(self) -> None:
        """End the thread. A task that hangs ends it later."""
        self._tasks.put(None)
        if self._thread is not None and not self._is_busy:
            self._thread.join()
        self._tasks, self._thread = queue.SimpleQueue(), None

    def _run(self) -> None:
        tasks, ends = self._tasks, self._ends
        while (task := tasks.get()) is not None:
            task()
            ends.put(None)


class _Job:
    """The tasks of one plan. After an error, an interrupt or a cancellation, all tasks end at their next
    row.
    """

    def __init__(
        self,
        plan: TaskPlan,
        cores: int,
        buffered_bytes_max: int,
        parts: RangeParts,
        resources: TaskResources,
        cancelled: threading.Event,
    ) -> None:
        self._plan = plan
        self._parts = parts
        self._resources = resources
        self._cores = cores
        self._cancelled = cancelled
        self._shuffle = Shuffle(buffered_bytes_max)
        self._sessions = SessionPool()
        self._messages: list[Row] = []
        self._error: BaseException | None = None
        # Whether a task met an error after which the batch is retried.
        self._is_retried = False

    def run(self, thread: TaskThread) -> list[Row]:
        """Run both stages, a single task in the given thread; return the messages."""
        tasks = range(len(self._plan.record.tasks))
        if len(tasks) == 1 and self._plan.record.parts == 1 and not self._plan.in_driver:
            thread.task = self._decode_and_write
            self._run_to_end([thread])
            return self._messages
        self._run_threads(self._decode, tasks)
        parts = self._shuffle.parts()
        if self._plan.in_driver:
            rows = chain.from_iterable(map(self._shuffle.rows_of, parts))
            return list(write_parts(self._plan, self._until_ended(rows), self._resources))
        self._run_threads(self._write, parts)
        return self._messages

    def close(self) -> None:
        """Release the memory, delete the spilled rows, and end the sessions."""
        self._shuffle.close()
        self._sessions.close()

    def _decode(self, task: int) -> None:
        if self._is_retried:
            return
        works = self._plan.record.tasks[task]
        rows = self._until_ended(
            decode_works(self._plan, works, self._parts, self._resources, self._sessions, is_in_process=True)
        )
        rows = self._noting_outages(rows)
        if self._plan.in_one_stage and not self._plan.in_driver:
            self._messages.extend(rows)
            return
        output = self._shuffle.output_of(works[0])
        for row in rows:
            output.append(row)

    def _noting_outages(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows, and note an error after which the batch is retried. The remaining tasks might each
        wait as long for the same server.
        """
        for row in rows:
            if row.kind == PROBLEM:
                failure: Failure = pickle.loads(row.body)  # type: ignore[arg-type]
                self._is_retried = self._is_retried or isinstance(failure.error, TransientError)
            yield row

    def _decode_and_write(self) -> None:
        with self:
            self._decode(0)
            for part in self._shuffle.parts():
                self._write(part)

    def _write(self, part: int) -> None:
        rows = self._until_ended(self._shuffle.rows_of(part))
        self._messages.extend(write_parts(self._plan, rows, self._resources))

    def _until_ended(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            if self._has_ended:
                raise _cancelled_error()
            yield row

    @property
    def _has_ended(self) -> bool:
        return self._cancelled.is_set() or self._error is not None

    # --- Threads ----------------------------------------------------------------------------

    def _run_threads(self, task: Callable[[int], None], numbers: Sequence[int]) -> None:
        """Run a task for each number, several at once. Raises the first error of a task."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            waiting.put(number)

        def run_tasks() -> None:
            with self:
                while not self._has_ended:
                    try:
                        number = waiting.get_nowait()
                    except queue.Empty:
                        return
                    task(number)

        # Daemon threads, because the end of the process must not wait for a hung call.
        threads = [
            threading.Thread(target=run_tasks, name=f"task-{number}", daemon=True)
            for number in range(min(self._cores, len(numbers)))
        ]
        self._run_to_end(threads)

    def _run_to_end(self, threads: Sequence[threading.Thread | TaskThread]) -> None:
        """Start threads and wait for their ends. Raises the first error of a task."""
        with self:
            for thread in threads:
                thread.start()
            self._join(threads)
        # After an interrupt, the block above ends before the threads do, so wait for them again.
        self._join(threads)
        if self._error is not None:
            raise self._error
        if self._cancelled.is_set():
            raise _cancelled_error()

    def _join(self, threads: Sequence[threading.Thread | TaskThread]) -> None:
        """Wait for threads; after a cancellation or an interrupt, for up to _CANCEL_SECONDS_MAX.

        After a task's error, wait until all threads have ended, because the batch may be replayed next.
        """
        deadline: float | None = None
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                is_interrupted = self._error is not None and not isinstance(self._error, Exception)
                if self._cancelled.is_set() or is_interrupted:
                    deadline = deadline or time.monotonic() + _CANCEL_SECONDS_MAX
                    if time.monotonic() >= deadline:
                        _log.warning("a cancelled task has not ended", task=thread.name)
                        break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Keep the first error of any thread, which the waiting thread raises."""
        self._error = self._error or error
        return True


def _cancelled_error() -> ConnectionLost:
    return ConnectionLost("the batch was cancelled because the run was stopped", hint="Start the run again")


def _available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
