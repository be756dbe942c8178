# SPDX-License-Identifier: Apache-2.0
"""The command line as a child that ends with its parent.

    python -m penstock.cli.shared.child PARENT VERB ...

The child receives SIGTERM when its parent ends, for whatever reason. On Linux the kernel sends the signal
when the thread that started the child ends (prctl(2)). On other systems a thread of the child checks whether
its parent process has changed.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def child_command() -> list[str]:
    """Return the start of a child's command line, up to the verb."""
    return [sys.executable, "-m", __spec__.name, str(os.getpid())]


def main() -> None:
    """Run the command line; its first argument is the process id of the parent."""
    parent = int(sys.argv.pop(1))
    _end_with(parent)
    from penstock.cli.app import main as run_command_line

    run_command_line()


def _end_with(parent: int) -> None:
    """Request SIGTERM for this process when its parent ends. Exit if the parent has already ended."""
    if sys.platform == "linux":
        signal.signal(signal.SIGUSR1, _end_once)
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        # The parent ended before the signal was requested, so no signal will arrive.
        sys.exit(128 + signal.SIGTERM)
    if sys.platform != "linux":
        threading.Thread(target=_watch, args=(parent,), name="watch-parent", daemon=True).start()


def _end_once(_number: int, _frame: FrameType | None) -> None:
    """Send SIGTERM to this process, and ignore further parent-death signals.

    When a parent with several threads is killed, the kernel gives the child to the remaining threads in turn,
    and signals the end of each. A second SIGTERM would end this process at once, without releasing its lease.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def _watch(parent: int) -> None:
    """Send SIGTERM to this process once it has another parent, because its original parent has then ended."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
