# SPDX-License-Identifier: Apache-2.0
"""The web console of a daemon, in a separate process, so that a fault in either process does not end the
other.

The console ends with the daemon, even if the daemon is killed. If the console ends while the daemon runs, it
is restarted.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from penstock.cli.shared.signals import STOP_SECONDS_MAX
from penstock.retry import Backoff

_log = structlog.get_logger(__name__)

# A console that ran for at least this long had started properly, so it is restarted without a long pause.
_WELL_SECONDS = 60.0
_BACKOFF = Backoff(first=2.0, longest=60.0)


def console_command(config: Path) -> Sequence[str]:
    """Return the command that runs the console of a daemon's settings file. The console ends with this
    process.
    """
    child = (sys.executable, "-m", "penstock.cli.shared.child", str(os.getpid()))
    return (*child, "console", "--config", str(config))


@contextmanager
def running_beside(command: Sequence[str]) -> Iterator[None]:
    """Keep a command running inside the block, and stop it at the end."""
    stopping = threading.Event()
    # The kernel ends the child when the thread that started the child ends, so the thread must live as long
    # as the block.
    thread = threading.Thread(target=_keep_running, args=(command, stopping), name="console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(2 * STOP_SECONDS_MAX)


def _keep_running(command: Sequence[str], stopping: threading.Event) -> None:
    failures = 0
    while not stopping.is_set():
        started_at = time.monotonic()
        status = _run_once(command, stopping)
        if stopping.is_set():
            return
        failures = 1 if time.monotonic() - started_at >= _WELL_SECONDS else failures + 1
        pause = _BACKOFF.pause(failures)
        _log.error("the console has ended, and is started again", status=status, in_seconds=round(pause, 1))
        stopping.wait(pause)


def _run_once(command: Sequence[str], stopping: threading.Event) -> int | str:
    """Run the command until it ends or is stopped; return its exit status, or why it did not start."""
    try:
        # Start the child in a new session, because Ctrl-C in a terminal is meant only for the daemon.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as problem:
        return str(problem)
    while process.poll() is None:
        if stopping.wait(0.2):
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return process.returncode
