# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline's tasks on Spark: one job per batch, in a classic or Connect session."""

import functools
import hashlib
import pickle
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow
import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, PythonException
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr

from penstock.engine.allocator import return_unused_memory
from penstock.engine.decode_task import decode_works
from penstock.engine.shared_ranges import SharedRanges
from penstock.engine.task_plan import BETWEEN_SQL, TaskPlan
from penstock.engine.task_rows import Row, rows_in
from penstock.engine.write_task import write_parts
from penstock.errors import ConnectionLost, OptionInvalid
from penstock.local.driver import LocalDriver
from penstock.pipeline.load.session_pool import SessionPool
from penstock.spark.shipping import pickle_for_executors
from penstock.spark.verifying import SparkSpreading

_ROWS_AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"
_TASKS_PER_PART = 8
_POLL_SECONDS = 0.5

_log = structlog.get_logger(__name__)


class SparkDriver:
    """Runs tasks on a session's executors. Spark's shuffle moves rows to their parts."""

    is_in_process = False

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self.cores = _cores_of(session)
        self.spreading = SparkSpreading(session)
        self._lock = threading.Lock()
        self._runs = 0
        self._rows_at_once = ""
        self._hashed: dict[int, list[int]] = {}

    def beside(self, runs: int, ranges: SharedRanges) -> "SparkDriver":
        """Return this driver, because a session can run the jobs of several threads. Each thread decodes for
        its own sink, because executors share no memory.
        """
        return self

    def run(self, plan: TaskPlan) -> Iterable[Row]:
        """Run a plan's tasks to their end; see `Driver.run`.

        Tasks that read the target through this process's session run in this process. Raises ConnectionLost
        if Spark lost a task, OptionInvalid if a task could not start.
        """
        if plan.reads_in_driver:
            return LocalDriver().run(plan)
        try:
            with self._few_rows_at_once():
                return self._run(plan)
        except PythonException as problem:
            # Tasks return their errors. A task that fails nevertheless could not start or has a bug, and
            # would fail again.
            raise OptionInvalid(
                f"a task failed: {str(problem).strip()[-500:]}",
                hint="What a pipeline is made of must be installed where tasks run",
            ) from problem
        except (PySparkException, Py4JError) as problem:
            # Errors raised by Spark itself mean a lost worker or executor.
            raise ConnectionLost(
                f"Spark lost a task: {str(problem)[:500]}", hint="The executors' logs tell why"
            ) from problem

    @contextmanager
    def _few_rows_at_once(self) -> Iterator[None]:
        """Pass few rows to Python at a time: by default Spark sends 10,000 rows, however large the blobs are.

        The jobs of several threads share the setting. The last one to end restores it.
        """
        with self._lock:
            if self._runs == 0:
                self._rows_at_once = self._session.conf.get(_ROWS_AT_ONCE) or "10000"
                self._session.conf.set(_ROWS_AT_ONCE, "8")
            self._runs += 1
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if self._runs == 0:
                    self._session.conf.set(_ROWS_AT_ONCE, self._rows_at_once)

    def _run(self, plan: TaskPlan) -> Iterable[Row]:
        data, tasks, parts = pickle_for_executors(plan, plan.steps), len(plan.record.tasks), plan.record.parts
        # Many tasks share one Spark task, because starting a Spark task costs more than a small task does.
        slices = min(tasks, _TASKS_PER_PART * max(parts, 1))
        frame: Any = self._session.range(0, tasks, 1, slices).mapInArrow(partial(_decode, data), BETWEEN_SQL)
        if plan.in_driver:
            frames = frame.toArrow().sort_by([(name, "ascending") for name in ("part", "work", "seq")])
            return list(write_parts(plan, rows_in(frames.to_batches())))
        if not plan.in_one_stage:
            frame = (
                self._by_part(frame, parts)
                .sortWithinPartitions("work", "seq")
                .mapInArrow(partial(_write, data), BETWEEN_SQL)
            )
        return list(rows_in(frame.toArrow().to_batches()))

    def _by_part(self, frame: Any, parts: int) -> Any:
        """Return a frame with a partition for each part."""
        if hasattr(frame, "repartitionById"):
            return frame.repartitionById(parts, frame["part"])
        # Before Spark 4.1, rows are assigned to partitions by a hash, so use numbers whose hashes equal the
        # numbers of the parts.
        numbers = ", ".join(map(str, self._numbers_by_hash(parts)))
        return frame.repartition(parts, expr(f"element_at(array({numbers}), part + 1)"))

    def _numbers_by_hash(self, parts: int) -> list[int]:
        """Return, for each part, a number that Spark's hash partitioning sends to that partition."""
        if parts not in self._hashed:
            # With this many numbers, the probability that a part gets none is below 1e-10.
            candidates: Any = self._session.range(0, parts * (32 + parts.bit_length()), 1, 1)
            placed = candidates.selectExpr(
                "CAST(id AS INT) AS number", f"pmod(hash(CAST(id AS INT)), {parts}) AS part"
            )
            rows = placed.groupBy("part").agg({"number": "min"}).orderBy("part").collect()
            assert [row[0] for row in rows] == list(range(parts)), "every part has a number"
            self._hashed[parts] = [row[1] for row in rows]
        return self._hashed[parts]

    @contextmanager
    def cancelling(self, stop: threading.Event, seconds: float) -> Iterator[None]:
        """Cancel the jobs that the block runs in this thread if they are still running `seconds` after
        `stop`.
        """
        tag, ended = f"penstock-{uuid.uuid4().hex}", threading.Event()

        def cancel() -> None:
            while not ended.wait(_POLL_SECONDS):
                if not stop.is_set() or ended.wait(seconds):
                    continue
                _log.warning("the batch is given up, the next run does it again", after_seconds=seconds)
                try:
                    self._session.interruptTag(tag)
                except (PySparkException, Py4JError) as problem:
                    _log.warning("the job cannot be cancelled", why=str(problem)[:500])

        thread = threading.Thread(target=cancel, name="cancel-on-stop", daemon=True)
        self._session.addTag(tag)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._session.removeTag(tag)


def _cores_of(session: SparkSession) -> int:
    """Return the number of tasks that a session runs concurrently."""
    try:
        return max(1, int(session.sparkContext.defaultParallelism))
    except (AttributeError, PySparkException):
        # A Connect session has no context. By default, Spark splits a range by the number of cores.
        numbers = session.range(0, 4096).selectExpr("spark_partition_id() AS part").distinct()
        return max(1, numbers.count())


# --- In executors ---------------------------------------------------------------------------


def _decode(data: bytes, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    plan = _unpickle_plan(data)
    with SessionPool() as sessions:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                for row in decode_works(plan, plan.record.tasks[task], sessions=sessions):
                    yield row.to_arrow()
    return_unused_memory()


def _write(data: bytes, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    for row in write_parts(_unpickle_plan(data), rows_in(batches)):
        yield row.to_arrow()
    return_unused_memory()


def _unpickle_plan(data: bytes) -> TaskPlan:
    """Unpickle a plan in a task. Each worker does this once, and its tasks share the plan."""
    return _unpickle_once(hashlib.blake2b(data).digest(), _Hidden(data))


class _Hidden:
    """Bytes that are ignored when arguments are compared."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=2)
def _unpickle_once(_digest: bytes, hidden: _Hidden) -> TaskPlan:
    plan: TaskPlan = pickle.loads(hidden.data)
    return plan
