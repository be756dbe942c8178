# SPDX-License-Identifier: Apache-2.0
"""One more try for a server of another product that did not answer in time, and a record of it.

A stalled machine can use up any time limit, so a start that timed out is tried again, once. A process that
ended by itself has failed: it is never tried again. Nor is a process of Penstock itself: its late start is
what a test is there to find. `PENSTOCK_LATE_STARTS` names the file that keeps one line
for each late start; a test run lists them as flaky.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tools.servers.errors import ServerFailed

LATE_STARTS_VARIABLE = "PENSTOCK_LATE_STARTS"

Started = TypeVar("Started")


class StartTimedOut(ServerFailed):
    """The process runs and did not answer within its time limit."""


def start_with_one_retry(name: str, start: Callable[[], Started]) -> Started:
    """Call `start`, and once more where it raises StartTimedOut; a second StartTimedOut is raised."""
    try:
        return start()
    except StartTimedOut:
        record_late_start(name)
        return start()


def record_late_start(name: str) -> None:
    """Append a line to the file that `PENSTOCK_LATE_STARTS` names; without the variable, do nothing."""
    if path := os.environ.get(LATE_STARTS_VARIABLE):
        # One short write in append mode, so that several processes share the file.
        with Path(path).open("a") as late:
            late.write(f"{name} did not answer in time: {os.environ.get('PYTEST_CURRENT_TEST', 'no test')}\n")
