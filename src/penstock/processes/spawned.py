# SPDX-License-Identifier: Apache-2.0
"""A process started by the daemon, its output, and why it ended."""

import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import structlog

from penstock.processes.instance import ProcessExit, now_us

# How long a process may take to start: it imports all modules, perhaps on a busy host.
START_SECONDS_MAX = 120.0
# A process that ran this long had started properly, so earlier failures no longer count.
WELL_SECONDS = 60.0
# Errors raised when the system is out of descriptors, processes or threads, or of space for a log line.
SHORTAGES = (OSError, RuntimeError, ValueError)

_LINES_KEPT = 20
_LINE_CHARACTERS_MAX = 500
_LINE_BYTES_MAX = 64 * 1024
# How long the last lines of a process are still read after it has ended.
_OUTPUT_SECONDS_MAX = 2.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Kill:
    """Why the daemon kills a process: a one-word `reason` for metrics, and an explanation."""

    reason: str
    why: str


class SpawnedProcess:
    """A child process that inherits some of the daemon's file descriptors.

    Their numbers are appended to its command. Its standard error is copied to the daemon's. Raises OSError if
    it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], descriptors: Sequence[int], *, inherited: Sequence[int] = ()
    ) -> None:
        """The process inherits `descriptors` and `inherited`. Only `descriptors` are part of its command."""
        self._process = subprocess.Popen(
            [*command, *map(str, descriptors)],
            pass_fds=(*descriptors, *inherited),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # Start a new session: an interrupt at the terminal stops only the daemon, which stops its
            # processes.
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._reading = threading.Thread(
            target=_relay_lines, args=(self._process.stderr, self._lines), name="process-output", daemon=True
        )
        try:
            self._reading.start()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the process to end; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_running

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def exit(self, kill: Kill | None) -> ProcessExit:
        """Return how the process ended, with the last lines of its output; `kill` is why the daemon killed
        it.
        """
        self._reading.join(_OUTPUT_SECONDS_MAX)
        reason = _reason_of(self._process.returncode) if kill is None else (kill.reason, kill.why)
        return ProcessExit(now_us(), *reason, tuple(self._lines))


def watched_exit(run_once: Callable[[], ProcessExit], event: str, **context: Any) -> ProcessExit:
    """Run a process, and return how it ended. `event` is the log event if it could not be started or
    watched.
    """
    try:
        return run_once()
    except SHORTAGES as problem:
        # The system is out of descriptors, processes or threads. Nothing else would start the process again.
        _log.exception(event, **context)
        return ProcessExit(now_us(), "daemon", f"the daemon could not start or watch it: {problem!r}")


def _reason_of(status: int) -> tuple[str, str]:
    """Return the reason for an exit status, as one word and as text."""
    if status >= 0:
        return str(status), f"exit status {status}"
    number = -status
    # Real-time signals have no names.
    name = signal.Signals(number).name if number in set(signal.Signals) else f"SIG{number}"
    remark = ", as the kernel sends it when memory runs out" if status == -signal.SIGKILL else ""
    return name, f"signal {name}{remark}"


def _relay_lines(output: IO[bytes], lines: "deque[str]") -> None:
    """Copy a process's output to standard error, and keep its last lines."""
    with output:
        for line in iter(partial(output.readline, _LINE_BYTES_MAX), b""):
            text = line.decode(errors="replace").rstrip("\n")
            # Ignore the error: nobody may be reading standard error any more, and the process must not wait
            # for a reader.
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
            if text.strip():
                lines.append(text.strip()[:_LINE_CHARACTERS_MAX])
