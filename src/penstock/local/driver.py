# SPDX-License-Identifier: Apache-2.0
"""A pipeline's tasks as threads of this process, without Spark and Java.

The kernel, Arrow, DuckDB and waiting for servers release the interpreter lock, so threads use all cores and
share rows without copying them.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Self

import pyarrow
import structlog

from penstock.engine.decode_task import decode_works
from penstock.engine.task_plan import TaskPlan
from penstock.engine.write_task import write_parts
from penstock.errors import ConnectionLost
from penstock.local.shuffle import Shuffle
from penstock.pipeline.verify.comparison import Spreading, in_this_process

# The rows of a batch that are buffered between its stages; the rest is spilled to disk.
BUFFERED_BYTES_MAX = 256 << 20
# How long a cancelled task may take to finish its current call.
_CANCEL_SECONDS_MAX = 5.0
_POLL_SECONDS = 0.5

_log = structlog.get_logger(__name__)


class LocalDriver:
    """Runs tasks in threads: as many at once as this process has cores.

    Every task has its own steps and its own sink. Several threads call the function of a `python` step.
    """

    def __init__(self, cores: int | None = None, buffered_bytes_max: int = BUFFERED_BYTES_MAX) -> None:
        self.cores = cores or _available_cores()
        self.spreading: Spreading = in_this_process
        self._buffered_bytes_max = buffered_bytes_max
        self._cancelled = threading.Event()

    def run(self, plan: TaskPlan) -> Iterable[pyarrow.RecordBatch]:
        """Run a plan's tasks to their end; see `Driver.run`. Raises ConnectionLost where they were cancelled,
        DiskFailed where rows cannot be spilled."""
        shuffle = Shuffle(self._buffered_bytes_max)
        words: list[pyarrow.RecordBatch] = []
        try:
            self._run_threads(lambda work: self._decode(plan, work, shuffle, words), plan.record.works)
            parts = shuffle.parts()
            if plan.in_driver:
                rows = chain.from_iterable(map(shuffle.rows_of, parts))
                return list(write_parts(plan, self._until_cancelled(rows)))
            self._run_threads(lambda index: self._write(plan, parts[index], shuffle, words), parts)
            return words
        finally:
            shuffle.close()

    def _decode(self, plan: TaskPlan, work: int, shuffle: Shuffle, words: list[pyarrow.RecordBatch]) -> None:
        rows = self._until_cancelled(decode_works(plan, [work]))
        if plan.in_one_stage and not plan.in_driver:
            words.extend(rows)
            return
        output = shuffle.output_of(work)
        for row in rows:
            output.append(row)

    def _write(self, plan: TaskPlan, part: int, shuffle: Shuffle, words: list[pyarrow.RecordBatch]) -> None:
        words.extend(write_parts(plan, self._until_cancelled(shuffle.rows_of(part))))

    def _run_threads(self, task: Callable[[int], None], tasks: Sequence[object]) -> None:
        """Run a task for the index of each of `tasks`, several at once. Raises the first error of a task."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(tasks)):
            waiting.put(index)
        first_error = _FirstError()

        def run_tasks() -> None:
            with first_error:
                while first_error.error is None and not self._cancelled.is_set():
                    try:
                        index = waiting.get_nowait()
                    except queue.Empty:
                        return
                    task(index)

        # Daemon threads: the end of the process must not wait for a call that hangs.
        threads = [
            threading.Thread(target=run_tasks, name=f"task-{number}", daemon=True)
            for number in range(min(self.cores, len(tasks)))
        ]
        for thread in threads:
            thread.start()
        self._join(threads)
        if self._cancelled.is_set():
            raise _cancelled_error()
        if first_error.error is not None:
            raise first_error.error

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for threads; once they are cancelled, for no more than _CANCEL_SECONDS_MAX."""
        deadline: float | None = None
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                if self._cancelled.is_set():
                    deadline = deadline or time.monotonic() + _CANCEL_SECONDS_MAX
                    if time.monotonic() >= deadline:
                        _log.warning("a cancelled task has not ended", task=thread.name)
                        break

    def _until_cancelled(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            if self._cancelled.is_set():
                raise _cancelled_error()
            yield batch

    @contextmanager
    def cancelling(self, stop: threading.Event, seconds: float) -> Iterator[None]:
        """Cancel tasks of the block that are still running `seconds` after `stop`."""
        ended = threading.Event()

        def cancel() -> None:
            while not ended.wait(_POLL_SECONDS):
                if stop.is_set() and not ended.wait(seconds):
                    _log.warning("the batch is cancelled, the next run replays it", after_seconds=seconds)
                    self._cancelled.set()
                    return

        thread = threading.Thread(target=cancel, name="cancel-on-stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._cancelled.clear()


class _FirstError:
    """Keeps the first error that any of several threads raises inside the block."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = self.error or error
        return True


def _cancelled_error() -> ConnectionLost:
    return ConnectionLost("the batch was cancelled because the run was stopped", hint="Start the run again")


def _available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
