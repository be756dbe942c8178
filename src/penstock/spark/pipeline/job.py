# SPDX-License-Identifier: Apache-2.0
"""One batch as one Spark job, on a classic session or a Connect one."""

import pickle
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow
import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.sinks.sink import Receipt
from penstock.spark.pipeline.decode_task import decode_works
from penstock.spark.pipeline.joints import prove_joints
from penstock.spark.pipeline.task_plan import (
    BETWEEN,
    BETWEEN_SQL,
    COUNTS,
    PROBLEM,
    RECEIPT,
    SURPRISE,
    Counts,
    Failure,
    Surprise,
    TaskPlan,
    packed,
)
from penstock.spark.pipeline.write_task import write_parts

_ROWS_AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"
_TASKS_PER_PART = 8
_POLL_SECONDS = 0.5

_log = structlog.get_logger(__name__)


@dataclass
class Outcome:
    """What a job brought: receipts in the order of parts, or surprises in the order of the log, or
    failures."""

    receipts: list[Receipt] = field(default_factory=list)
    surprises: list[Surprise] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


@contextmanager
def cancelled_after(session: SparkSession, stop: threading.Event, seconds: float) -> Iterator[None]:
    """Cancel the jobs that the block runs in this thread, once they go on for `seconds` after `stop`."""
    tag, ended = f"penstock-{uuid.uuid4().hex}", threading.Event()

    def cancel() -> None:
        while not ended.wait(_POLL_SECONDS):
            if not stop.is_set() or ended.wait(seconds):
                continue
            _log.warning("the batch is given up, the next run does it again", after_seconds=seconds)
            try:
                session.interruptTag(tag)
            except (PySparkException, Py4JError) as problem:
                _log.warning("the job cannot be cancelled", why=str(problem)[:500])

    thread = threading.Thread(target=cancel, name="cancel-on-stop", daemon=True)
    session.addTag(tag)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        session.removeTag(tag)


def run_job(session: SparkSession, plan: TaskPlan) -> Outcome:
    """Run a batch's tasks to their end. Raises RangesDisagree where their ranges do not meet, and what Spark
    raises where a task itself was lost."""
    before = session.conf.get(_ROWS_AT_ONCE) or "10000"
    # Blobs come to Python a few at a time: by default Spark sends 10,000 rows at once, whatever their size.
    session.conf.set(_ROWS_AT_ONCE, "8")
    try:
        outcome = _outcome(_run(session, plan))
    finally:
        session.conf.set(_ROWS_AT_ONCE, before)
    seen = {number: ends for counts in outcome.counts for number, ends in counts.ends.items()}
    prove_joints(plan.record.ranges, seen)
    return outcome


def _run(session: SparkSession, plan: TaskPlan) -> pyarrow.Table:
    data, works, parts = packed(plan), len(plan.record.works), plan.record.parts
    # Many small works share a task: starting one costs more than they do.
    tasks = min(works, _TASKS_PER_PART * max(parts, 1))
    frame: Any = session.range(0, works, 1, tasks).mapInArrow(partial(decode_works, data), BETWEEN_SQL)
    if plan.in_driver:
        found = frame.toArrow().sort_by([("part", "ascending"), ("work", "ascending"), ("seq", "ascending")])
        return pyarrow.Table.from_batches(write_parts(data, found.to_batches()), schema=BETWEEN)
    if not plan.in_one_stage:
        frame = (
            frame.repartitionById(parts, frame["part"])
            .sortWithinPartitions("work", "seq")
            .mapInArrow(partial(write_parts, data), BETWEEN_SQL)
        )
    return frame.toArrow()


def _outcome(table: Any) -> Outcome:
    found = Outcome()
    receipts = []
    for row in table.to_pylist():
        body = row["body"]
        if row["kind"] == RECEIPT:
            receipts.append((row["part"], body))
        elif row["kind"] == SURPRISE:
            found.surprises.append(pickle.loads(body))
        elif row["kind"] == PROBLEM:
            found.failures.append(pickle.loads(body))
        elif row["kind"] == COUNTS:
            found.counts.append(pickle.loads(body))
    found.receipts = [_receipt(body) for _, body in sorted(receipts)]
    found.surprises.sort(key=lambda one: (one.work, one.seq))
    return found


def _receipt(body: bytes) -> Receipt:
    import json

    value = json.loads(body)
    return Receipt(**{**value, "staged": tuple(value["staged"])})
