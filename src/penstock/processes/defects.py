# SPDX-License-Identifier: Apache-2.0
"""Ends a process of the daemon after a defect: at once, with a message."""

import os
import sys
import traceback

# The exit status after a defect; its traceback is on standard error.
EXIT_DEFECT = 70


def end_after_defect(problem: BaseException | None) -> None:
    """End this process, whose state may be inconsistent, without waiting for its threads.

    The last line on standard error names the error; see `ProcessExit.text`.
    """
    traceback.print_exception(problem)
    sys.stderr.flush()
    os._exit(EXIT_DEFECT)
