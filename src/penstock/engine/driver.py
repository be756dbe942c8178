# SPDX-License-Identifier: Apache-2.0
"""The interface of drivers, which determine where the tasks of a batch run and how rows reach the writing
tasks.
"""

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
        """How many tasks run at the same time."""

    @property
    def is_in_process(self) -> bool:
        """Whether tasks run in this process, so that a small batch takes milliseconds."""

    @property
    def spreading(self) -> Spreading:
        """Where comparisons of large tables run."""

    def run(self, plan: TaskPlan) -> Iterable[Row]:
        """Run the tasks of a plan to their end. Return their messages, unordered.

        Call `decode_works` for each work. If the plan has one stage, these calls yield the messages.
        Otherwise pass all rows of a part to one call of `write_parts`, sorted by work and seq. With
        `plan.in_driver` write all parts in this process, one after another.

        Tasks return their errors as messages. Raises a TransientError if a task was lost, or another Penstock
        error if the task would be lost again.
        """

    def cancelling(self, stop: threading.Event, seconds: float) -> AbstractContextManager[None]:
        """Return a context manager that cancels the tasks that are still running `seconds` after `stop` was
        set.

        `run` then raises a TransientError.
        """

    def beside(self, runs: int, ranges: SharedRanges) -> "Driver":
        """Return a driver for one of several runs that share this driver's cores and memory.

        Tasks in this process read log ranges from `ranges`.
        """
