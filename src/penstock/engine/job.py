# SPDX-License-Identifier: Apache-2.0
"""Runs one batch as one job of a driver: collects the messages of its tasks and checks that their ranges
leave no gap and do not overlap.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.driver import Driver
from penstock.engine.joints import prove_joints
from penstock.engine.task_plan import (
    COUNTS,
    PROBLEM,
    READING,
    RECEIPT,
    STEPS,
    SURPRISE,
    Counts,
    Failure,
    Surprise,
    TaskPlan,
)
from penstock.engine.task_rows import Row
from penstock.sinks.sink import Receipt

WRITING = "write"


@dataclass
class Outcome:
    """The outcome of a job. `receipts` are in part order, and `surprises` in log order. If the job failed,
    `failures` contains the errors.
    """

    receipts: list[Receipt] = field(default_factory=list)
    surprises: list[Surprise] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)

    def divided(self, seconds: float) -> dict[str, float]:
        """Divide the duration of the job by phase, in proportion to the time that its tasks spent in each.

        Tasks work at the same time, so the sum of their times is not the duration.
        """
        spent = {
            phase: sum(counts.seconds.get(phase, 0.0) for counts in self.counts) for phase in (READING, STEPS)
        }
        spent[WRITING] = sum(receipt.seconds for receipt in self.receipts)
        total = sum(spent.values())
        if not total:
            return {READING: seconds, STEPS: 0.0, WRITING: 0.0}
        return {phase: seconds * share / total for phase, share in spent.items()}


def run_job(driver: Driver, plan: TaskPlan) -> Outcome:
    """Run the tasks of a batch to their end. Raises RangesDisagree if the ranges that the tasks read are not
    contiguous, or any error from `Driver.run`.
    """
    outcome = _outcome(driver.run(plan))
    seen = {number: ends for counts in outcome.counts for number, ends in counts.ends.items()}
    prove_joints(plan.record.ranges, seen)
    return outcome


def _outcome(messages: Iterable[Row]) -> Outcome:
    outcome = Outcome()
    receipts: list[tuple[int, Receipt]] = []
    for row in messages:
        body: Any = row.body
        if row.kind == RECEIPT:
            receipts.append((row.part, row.receipt()))
        elif row.kind == SURPRISE:
            outcome.surprises.append(pickle.loads(body))
        elif row.kind == PROBLEM:
            outcome.failures.append(pickle.loads(body))
        elif row.kind == COUNTS:
            outcome.counts.append(row.counts())
    outcome.receipts = [receipt for _, receipt in sorted(receipts, key=lambda of_part: of_part[0])]
    outcome.surprises.sort(key=lambda surprise: (surprise.work, surprise.seq))
    return outcome
