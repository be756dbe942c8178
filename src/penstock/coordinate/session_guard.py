# SPDX-License-Identifier: Apache-2.0
"""A guard: a process that ends the sessions of a daemon that was killed.

    daemon, capture processes ── hold a pipe open ──▶ guard: when it closes, ends the daemon's sessions

The store ends a session once no heartbeat has arrived for the session time. Until then, no other process can
take over from a daemon that was killed. The guard detects the daemon's death earlier, because the operating
system closes the pipe once the last process that holds it has ended. At that point, no process is left that
could act under the daemon's sessions. A frozen daemon keeps the pipe open. Without a guard, as after a crash
of the whole host, sessions expire normally.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from penstock.coordinate.store import Session

_COMMAND = (sys.executable, "-m", "penstock.coordinate.session_guard")

# A guard that has no sessions ends as soon as its pipe is closed.
_END_SECONDS_MAX = 5.0
_OPERATION_SECONDS_MAX = 5.0

# The daemon logs to standard error, so its guard does as well.
_STANDARD_ERROR = 2

_log = structlog.get_logger(__name__)


class SessionGuard:
    """The session guard of this process. `start` and `stop` must be called from one thread.

    A guard that dies is not replaced, because processes that are already running would not hold the pipe of a
    new guard.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # The arguments of `_end`, by the purpose of the session.
        self._sessions: dict[str, tuple[str, str, float]] = {}

    @property
    def pid(self) -> int | None:
        """The guard's process id, None if there is no guard."""
        return None if self._process is None else self._process.pid

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that a child process must inherit if it works under the sessions, so that
        the guard also waits for the child's end.
        """
        pipe = self._pipe
        return () if pipe is None else (pipe.fileno(),)

    def start(self) -> None:
        """Start the guard. If it cannot be started, the error is logged, and sessions expire normally."""
        try:
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=_STANDARD_ERROR, start_new_session=True
            )
        except OSError as problem:
            _log.warning("sessions expire if this process is killed", why=str(problem))
            return
        assert self._process.stdin is not None
        # A guard that does not read its pipe must not block this process.
        os.set_blocking(self._process.stdin.fileno(), False)

    def note(self, use: str, url: str, session: "Session") -> None:
        """Make the guard end a session of the store at `url` when this process ends. Only the last session
        for each purpose counts.
        """
        with self._lock:
            self._sessions[use] = url, session.key, session.seconds
            self._send()

    def stop(self) -> None:
        """End the guard. After this, the process itself is responsible for its sessions."""
        with self._lock:
            self._sessions.clear()
            self._send()
            if self._pipe is not None:
                self._pipe.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS_MAX)

    @property
    def _pipe(self) -> IO[bytes] | None:
        pipe = None if self._process is None else self._process.stdin
        return None if pipe is None or pipe.closed else pipe

    def _send(self) -> None:
        line = json.dumps(list(self._sessions.values())).encode() + b"\n"
        # Longer lines might be written only in part. A guard that is dead or does not read ends no session.
        if self._pipe is not None and len(line) <= select.PIPE_BUF:
            with suppress(OSError):
                os.write(self._pipe.fileno(), line)


def main() -> None:
    """Wait for the end of the daemon, then end its sessions."""
    # Ignore these signals: a service manager sends them to all processes of a service, although the daemon
    # may still be stopping.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: list[tuple[str, str, float]] = []
    for line in sys.stdin.buffer:
        sessions = json.loads(line)
    for url, key, seconds in sessions:
        _end(url, key, seconds)


def _end(url: str, key: str, seconds: float) -> None:
    """End a session. Give up once the session would have expired anyway."""
    # Imported only at this point, because guards spend nearly all of their time waiting.
    from penstock.coordinate.store import end_session, without_password
    from penstock.errors import PenstockError
    from penstock.retry import Retry

    store = without_password(url)
    try:
        retry = Retry("a session of a daemon that has died is not ended yet", seconds=seconds)
        retry.run(partial(end_session, url, key, min(seconds, _OPERATION_SECONDS_MAX)))
    except PenstockError as problem:
        _log.warning("a session of a daemon that has died expires", store=store, why=str(problem))
    else:
        _log.info("a session of a daemon that has died is ended", store=store)


if __name__ == "__main__":
    main()
