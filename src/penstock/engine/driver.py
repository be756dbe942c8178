# SPDX-License-Identifier: Apache-2.0
"""The seam of the drivers: where a batch's tasks run, and how rows come to the tasks that write them."""

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import pyarrow

from penstock.engine.task_plan import TaskPlan
from penstock.pipeline.verify.comparison import Spreading


class Driver(Protocol):
    """Runs the tasks of plans. It has no rule about tables, loads, retries or changes of a definition."""

    @property
    def cores(self) -> int:
        """How many tasks run at once."""

    @property
    def spreading(self) -> Spreading:
        """Where comparisons of large tables run."""

    def run(self, plan: TaskPlan) -> Iterable[pyarrow.RecordBatch]:
        """Run a plan's tasks to their end; return their words, in the columns of BETWEEN and in any order.

        Each work goes through `decode_works`. Where the plan is in one stage, what that yields are the words;
        else all that it yields for a part comes to one call of `write_parts`, sorted by work and seq. With
        `plan.in_driver` all parts are written in this process, one after the other.

        What tasks raise they return as words. Raises a TransientError where a task itself was lost, and
        another of `penstock.errors` where it would be lost again.
        """

    def cancelling(self, stop: threading.Event, seconds: float) -> AbstractContextManager[None]:
        """Return a block whose tasks end once they have gone on for `seconds` after `stop` was set.

        `run` then raises a TransientError.
        """
