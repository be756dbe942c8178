# SPDX-License-Identifier: Apache-2.0
"""What is tried next after a failure: which server of a cluster, and after what pause.

Nothing here waits or connects; it counts.
"""

import time

from penstock.errors import (
    AuthenticationFailed,
    DiskFailed,
    DumpReplaced,
    LimitExceeded,
    LogDamaged,
    LogFull,
    LogLocked,
    LogTorn,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    PrivilegeMissing,
    SchemaInvalid,
    ServerBehind,
    ServerUnsupported,
    StreamError,
    TlsFailed,
)
from penstock.limits import (
    FAIL_OVER_REMEMBERED_SECONDS,
    FAIL_OVER_SECONDS_MAX,
    RECONNECT_PAUSE_SECONDS_FIRST,
)
from penstock.retry import RECONNECT

# Bytes that cannot be read may have been spoilt on the way: they are asked for again so often.
STREAM_TRIES_MAX = 3

# Two replicas under one id throw each other out as often as they connect, and each receives a little before:
# that progress forgets no replacement younger than this.
_REPLACED_REMEMBERED_SECONDS = 60.0

# Nothing that the daemon could do again would change these.
_NEVER_HEALS = (OptionInvalid, LogDamaged, LogTorn, SchemaInvalid, LimitExceeded)
# Our own log, which is the same with every server. A restart ends the process that holds it.
_OUR_LOG = (LogFull, LogLocked, DiskFailed)
# Final answers of one server: another one of the cluster may have what is needed.
_REFUSALS = (PositionPurged, PositionInvalid)
# Another server may well do; this one is asked again later.
_NOT_THIS_ONE = (ServerBehind, AuthenticationFailed, PrivilegeMissing, ServerUnsupported, TlsFailed)


class Attempts:
    """Counts failures since the last progress. One thread uses it.

    `chosen` is the index of the server to ask, None before one was chosen.
    """

    def __init__(self, servers: int, fail_over_after: float) -> None:
        self.chosen: int | None = None
        self._servers = servers
        self._fail_over_after = fail_over_after
        self._tries = 0
        self._spoilt = 0
        self._failing_since: float | None = None
        # The server that sent transactions last, and when capture went from one to another.
        self._sending: int | None = None
        self._changes: list[float] = []
        self._refused: dict[int, PenstockError] = {}
        # How often in a row another replica took the stream, and when it did last.
        self._replaced = 0
        self._replaced_at = 0.0

    def progressed(self) -> None:
        """Forget what failed: transactions arrived, or a connection held."""
        if self._sending not in (None, self.chosen):
            self._changes.append(time.monotonic())
        self._sending = self.chosen
        self._tries = self._spoilt = 0
        self._failing_since = None
        self._refused.clear()

    def failed(self, problem: PenstockError) -> PenstockError | None:
        """Count a failure and choose whom to ask next; return what stops the capture, if nothing is left."""
        if isinstance(problem, _NEVER_HEALS):
            return problem
        if isinstance(problem, _OUR_LOG):
            # While the log could take nothing, nothing was found out about the server.
            self._failing_since = None
            return None
        if isinstance(problem, StreamError):
            self._spoilt += 1
            if self._spoilt > STREAM_TRIES_MAX:
                return problem
        now = time.monotonic()
        if isinstance(problem, DumpReplaced):
            if now - self._replaced_at > _REPLACED_REMEMBERED_SECONDS:
                self._replaced = 0
            self._replaced += 1
            self._replaced_at = now
            self._tries = self._replaced
        if self._failing_since is None:
            self._failing_since = now
        if isinstance(problem, _REFUSALS) and self.chosen is not None:
            self._refused[self.chosen] = problem
            if len(self._refused) == self._servers:
                return self._refused[min(self._refused)]
            self._next()
        elif isinstance(problem, _NOT_THIS_ONE):
            self._next()
        elif now - self._failing_since > self._patience(now):
            self._next()
            # The next one may be well, and what was waited for the last one is no reason to wait for it.
            self._tries = 0
        return None

    def pause_seconds(self) -> float:
        """Return how long to wait before the next try, or until another server is due if that is sooner."""
        self._tries += 1
        seconds = RECONNECT.pause(self._tries)
        if self._servers > 1 and self._failing_since is not None:
            now = time.monotonic()
            due = self._failing_since + self._patience(now) - now
            seconds = min(seconds, max(due, RECONNECT_PAUSE_SECONDS_FIRST))
        return seconds

    def _patience(self, now: float) -> float:
        """Return how long a server may be away before another one is asked.

        It doubles with each recent change of servers, so that servers that come and go in turn cost few
        epochs.
        """
        self._changes = [at for at in self._changes if now - at < FAIL_OVER_REMEMBERED_SECONDS]
        patience = self._fail_over_after * (1 << len(self._changes))
        return min(patience, max(self._fail_over_after, FAIL_OVER_SECONDS_MAX))

    def _next(self) -> None:
        if self.chosen is not None and self._servers > 1:
            self.chosen = (self.chosen + 1) % self._servers
            self._failing_since = None
