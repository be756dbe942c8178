# SPDX-License-Identifier: Apache-2.0
"""One batch as one job of a driver: collect the messages of its tasks and check that their ranges meet."""

import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow

from penstock.engine.driver import Driver
from penstock.engine.joints import prove_joints
from penstock.engine.task_plan import (
    COUNTS,
    PROBLEM,
    RECEIPT,
    SURPRISE,
    Counts,
    Failure,
    Surprise,
    TaskPlan,
)
from penstock.sinks.sink import Receipt


@dataclass
class Outcome:
    """The result of a job: receipts in part order, surprises in log order, or failures."""

    receipts: list[Receipt] = field(default_factory=list)
    surprises: list[Surprise] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


def run_job(driver: Driver, plan: TaskPlan) -> Outcome:
    """Run the tasks of a batch to their end. Raises RangesDisagree if their ranges do not meet, and what
    `Driver.run` raises."""
    outcome = _outcome(driver.run(plan))
    seen = {number: ends for counts in outcome.counts for number, ends in counts.ends.items()}
    prove_joints(plan.record.ranges, seen)
    return outcome


def _outcome(messages: Iterable[pyarrow.RecordBatch]) -> Outcome:
    outcome = Outcome()
    receipts = []
    for row in (row for batch in messages for row in batch.to_pylist()):
        body = row["body"]
        if row["kind"] == RECEIPT:
            receipts.append((row["part"], body))
        elif row["kind"] == SURPRISE:
            outcome.surprises.append(pickle.loads(body))
        elif row["kind"] == PROBLEM:
            outcome.failures.append(pickle.loads(body))
        elif row["kind"] == COUNTS:
            outcome.counts.append(pickle.loads(body))
    outcome.receipts = [_receipt(body) for _, body in sorted(receipts)]
    outcome.surprises.sort(key=lambda surprise: (surprise.work, surprise.seq))
    return outcome


def _receipt(body: bytes) -> Receipt:
    value = json.loads(body)
    return Receipt(**{**value, "staged": tuple(value["staged"])})
