# SPDX-License-Identifier: Apache-2.0
"""A pipeline's tasks on Spark: one job for each batch, on a classic session or a Connect one."""

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

from penstock.engine.decode_task import decode_works
from penstock.engine.task_plan import BETWEEN_SQL, TaskPlan
from penstock.engine.write_task import write_parts
from penstock.errors import ConnectionLost, OptionInvalid
from penstock.spark.shipping import shipped
from penstock.spark.verifying import SparkSpreading

_ROWS_AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"
_TASKS_PER_PART = 8
_POLL_SECONDS = 0.5

_log = structlog.get_logger(__name__)


class SparkDriver:
    """Runs tasks on a session's executors; Spark's shuffle brings rows to their parts."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self.cores = _cores_of(session)
        self.spreading = SparkSpreading(session)

    def run(self, plan: TaskPlan) -> Iterable[pyarrow.RecordBatch]:
        """Run a plan's tasks to their end; see `Driver.run`. Raises ConnectionLost where Spark lost a task,
        OptionInvalid where a task could not begin."""
        try:
            before = self._session.conf.get(_ROWS_AT_ONCE) or "10000"
            # Blobs come to Python a few at a time: by default Spark sends 10,000 rows at once, whatever their
            # size.
            self._session.conf.set(_ROWS_AT_ONCE, "8")
            try:
                return self._run(plan)
            finally:
                self._session.conf.set(_ROWS_AT_ONCE, before)
        except PythonException as problem:
            # Tasks return their errors: this one could not begin, or has a bug, and would fail again.
            raise OptionInvalid(
                f"a task failed: {str(problem).strip()[-500:]}",
                hint="What a pipeline is made of must be installed where tasks run",
            ) from problem
        except (PySparkException, Py4JError) as problem:
            # What Spark itself raises is a worker or an executor that is gone.
            raise ConnectionLost(
                f"Spark lost a task: {str(problem)[:500]}", hint="The executors' logs tell why"
            ) from problem

    def _run(self, plan: TaskPlan) -> Iterable[pyarrow.RecordBatch]:
        data, works, parts = shipped(plan, plan.steps), len(plan.record.works), plan.record.parts
        # Many small works share a task: starting one costs more than they do.
        tasks = min(works, _TASKS_PER_PART * max(parts, 1))
        frame: Any = self._session.range(0, works, 1, tasks).mapInArrow(partial(_decode, data), BETWEEN_SQL)
        if plan.in_driver:
            found = frame.toArrow().sort_by([(name, "ascending") for name in ("part", "work", "seq")])
            return list(write_parts(plan, found.to_batches()))
        if not plan.in_one_stage:
            frame = (
                frame.repartitionById(parts, frame["part"])
                .sortWithinPartitions("work", "seq")
                .mapInArrow(partial(_write, data), BETWEEN_SQL)
            )
        words: list[pyarrow.RecordBatch] = frame.toArrow().to_batches()
        return words

    @contextmanager
    def cancelling(self, stop: threading.Event, seconds: float) -> Iterator[None]:
        """Cancel the jobs that the block runs in this thread, once they go on for `seconds` after `stop`."""
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
    """Return how many tasks a session runs at once."""
    try:
        return max(1, int(session.sparkContext.defaultParallelism))
    except (AttributeError, PySparkException):
        # A Connect session shows no context; a range without a count is cut by it.
        numbers = session.range(0, 4096).selectExpr("spark_partition_id() AS part").distinct()
        return max(1, numbers.count())


# --- In executors ---------------------------------------------------------------------------


def _decode(data: bytes, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    plan = _unpacked(data)
    for batch in batches:
        yield from decode_works(plan, batch.column(0).to_pylist())


def _write(data: bytes, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    return write_parts(_unpacked(data), batches)


def _unpacked(data: bytes) -> TaskPlan:
    """Return a plan in a task: unpickled once in a worker, however many tasks it runs."""
    return _unpacked_once(hashlib.blake2b(data).digest(), _Hidden(data))


class _Hidden:
    """Bytes that count for nothing when arguments are compared."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=2)
def _unpacked_once(_digest: bytes, hidden: _Hidden) -> TaskPlan:
    plan: TaskPlan = pickle.loads(hidden.data)
    return plan
