# SPDX-License-Identifier: Apache-2.0
"""Retries the start of another product's server once if it timed out, and records the retry.

A stalled machine can exceed any time limit, so a start that timed out is retried once. A process that ended
by itself has failed and is never retried. Processes of Penstock are never retried either, because tests must
detect when they start late. `PENSTOCK_LATE_STARTS` names a file with one line for each late start. A test run
lists these starts as flaky.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tools.servers.errors import ServerFailed

LATE_STARTS_VARIABLE = "PENSTOCK_LATE_STARTS"

Started = TypeVar("Started")


class StartTimedOut(ServerFailed):
    """A server's process is running, but did not answer within the time limit."""


def start_with_one_retry(name: str, start: Callable[[], Started]) -> Started:
    """Call `start`; retry once if it raises StartTimedOut."""
    try:
        return start()
    except StartTimedOut:
        record_late_start(name)
        return start()


def record_late_start(name: str) -> None:
    """Append a line to the file named by `PENSTOCK_LATE_STARTS`; do nothing without the variable."""
    if path := os.environ.get(LATE_STARTS_VARIABLE):
        # A short write in append mode is atomic, so several processes can share the file.
        with Path(path).open("a") as late:
            late.write(f"{name} did not answer in time: {os.environ.get('PYTEST_CURRENT_TEST', 'no test')}\n")
