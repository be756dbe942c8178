# SPDX-License-Identifier: Apache-2.0
"""How a process that the daemon has started begins."""

import faulthandler
import signal
import socket
import sys
import threading

from penstock.processes.defects import end_after_defect
from penstock.telemetry.log_lines import log_to_stderr


def begin() -> list[socket.socket]:
    """Prepare the process, and return the sockets whose descriptors are its arguments.

    A defect in any thread ends the process from now on, and the daemon starts another: what is left of this
    one may be in any state, and would look alive.
    """
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]]
    log_to_stderr()
    # A service manager sends signals to all processes at once. The daemon decides when this one ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A crash in native code prints where Python was.
    faulthandler.enable()
    threading.excepthook = lambda problem: end_after_defect(problem.exc_value)
    sys.excepthook = lambda kind, problem, trace: end_after_defect(problem)
    return sockets
