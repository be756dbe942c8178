# SPDX-License-Identifier: Apache-2.0
"""The command line as a child that ends with its parent.

    python -m penstock.cli.shared.child PARENT VERB ...

The kernel sends SIGTERM when the parent's thread that started it ends, for whatever reason (Linux, prctl(2)).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def child_command() -> list[str]:
    """Return the words before the verb of a child of this process."""
    return [sys.executable, "-m", __spec__.name, str(os.getpid())]


def main() -> None:
    """Run the command line after the process id of the parent."""
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # It ended before the signal was asked for.
        sys.exit(128 + signal.SIGTERM)
    from penstock.cli.app import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
