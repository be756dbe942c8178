# SPDX-License-Identifier: Apache-2.0
"""The interface of the drivers: where the tasks of a batch run, and how rows reach the tasks that write."""

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from penstock.engine.shared_ranges import SharedRanges
from penstock.engine.task_plan import TaskPlan
from penstock.engine.task_rows import Row
from penstock.pipeline.verify.comparison import Spreading


class Driver(Protocol):
    """Runs the tasks of plans. A driver contains no rule about tables, loads, retries or schema changes."""

    @property
    def cores(self) -> int:
        """How many tasks run at once."""

    @property
    def is_in_process(self) -> bool:
        """Whether tasks run in this process, so that a small batch takes milliseconds."""

    @property
    def spreading(self) -> Spreading:
        """Where comparisons of large tables run."""

    def run(self, plan: TaskPlan) -> Iterable[Row]:
        """Run the tasks of a plan to their end. Return their messages, unordered.

        Call `decode_works` for each work. If the plan has one stage, that yields the messages. Otherwise pass
        all rows of a part to one call of `write_parts`, sorted by work and seq. With `plan.in_driver` write
        all parts in this process, one after the other.

        Tasks return their errors as messages. Raises a TransientError if a task itself was lost, and another
        error of `penstock.errors` if it would be lost again.
        """

    def cancelling(self, stop: threading.Event, seconds: float) -> AbstractContextManager[None]:
        """Return a context manager that cancels tasks still running `seconds` after `stop` was set.

        `run` then raises a TransientError.
        """

    def beside(self, runs: int, ranges: SharedRanges) -> "Driver":
        """Return a driver for one of several runs that share the cores and the memory of this one.

        Tasks in this process read ranges of logs from `ranges`.
        """
