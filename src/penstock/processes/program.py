# SPDX-License-Identifier: Apache-2.0
"""Prepares a process that the daemon has started."""

import faulthandler
import signal
import socket
import sys
import threading

from penstock.processes.defects import end_after_defect
from penstock.telemetry.log_lines import log_to_stderr


def begin() -> list[socket.socket]:
    """Prepare the process, and return the sockets whose descriptors were passed to it as arguments.

    From now on, a defect in any thread ends the process, and the daemon starts another. A process that
    continued after a defect might be in an inconsistent state and still look alive.
    """
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]]
    log_to_stderr()
    # Ignore these signals: a service manager sends them to all processes at once, but the daemon decides when
    # this process ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # After a crash in native code, print the Python stack.
    faulthandler.enable()
    threading.excepthook = lambda problem: end_after_defect(problem.exc_value)
    sys.excepthook = lambda kind, problem, trace: end_after_defect(problem)
    return sockets
