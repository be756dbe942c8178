# SPDX-License-Identifier: Apache-2.0
"""Decides what to try after a failure: which server of a cluster to connect to, and how long to back off
before that.

This module only keeps counts. It neither waits nor connects.
"""

import time

from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
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
    TransactionLate,
)
from penstock.limits import (
    FAIL_OVER_REMEMBERED_SECONDS,
    FAIL_OVER_SECONDS_MAX,
    RECONNECT_PAUSE_SECONDS_FIRST,
)
from penstock.retry import RECONNECT

# Unreadable bytes may have been corrupted in transit, so they are requested again, at most this often.
STREAM_TRIES_MAX = 3

# Two replicas with the same id keep disconnecting each other, and each receives some data before it is
# disconnected. Progress therefore does not reset the count of replacements within this time.
_REPLACEMENT_WINDOW_SECONDS = 60.0

# The daemon cannot recover from these errors by retrying. After a restart, nothing would detect that a
# transaction had arrived too late.
_NEVER_HEALS = (OptionInvalid, LogDamaged, LogTorn, SchemaInvalid, LimitExceeded, TransactionLate)
# Errors of the local log, which do not depend on the server. LogLocked is temporary after a restart: the
# previous process releases the lock when it ends.
_LOG_ERRORS = (LogFull, LogLocked, DiskFailed)
# Permanent failures of one server. Another server of the cluster may still have the required log.
_PERMANENT_ON_SERVER = (PositionPurged, PositionInvalid)
# Failures after which another server is tried. The failed server is tried again later.
_FAIL_OVER_AT_ONCE = (ServerBehind, AuthenticationFailed, PrivilegeMissing, ServerUnsupported, TlsFailed)


class Attempts:
    """Counts failures since the last progress. Not safe for concurrent use.

    `chosen` is the index of the server to connect to, None before the first choice.
    """

    def __init__(self, servers: int, fail_over_after: float) -> None:
        self.chosen: int | None = None
        self._servers = servers
        self._fail_over_after = fail_over_after
        self._tries = 0
        self._corrupt_streams = 0
        self._failing_since: float | None = None
        # The server that sent the last transactions, and the times of recent failovers.
        self._last_sender: int | None = None
        self._failover_times: list[float] = []
        self._refused: dict[int, PenstockError] = {}
        # How many times in a row another replica took over the stream, and when this last happened.
        self._replaced = 0
        self._replaced_at = 0.0

    def progressed(self) -> None:
        """Reset the counters, because transactions arrived or a connection stayed open."""
        if self._last_sender not in (None, self.chosen):
            self._failover_times.append(time.monotonic())
        self._last_sender = self.chosen
        self._tries = self._corrupt_streams = 0
        self._failing_since = None
        self._refused.clear()

    def failed(self, problem: PenstockError) -> PenstockError | None:
        """Count a failure and choose the next server; return the error that stops the capture, if any."""
        if isinstance(problem, _NEVER_HEALS):
            return problem
        if isinstance(problem, _LOG_ERRORS):
            # A full or failing log says nothing about the server.
            self._failing_since = None
            return None
        if isinstance(problem, StreamError):
            self._corrupt_streams += 1
            if self._corrupt_streams > STREAM_TRIES_MAX:
                return problem
        now = time.monotonic()
        if isinstance(problem, DumpReplaced):
            if now - self._replaced_at > _REPLACEMENT_WINDOW_SECONDS:
                self._replaced = 0
            self._replaced += 1
            self._replaced_at = now
            self._tries = self._replaced
        if self._failing_since is None:
            # A silent server has been failing since its silence began, and that time counts towards the
            # failover.
            silent_seconds = problem.silent_seconds if isinstance(problem, ConnectionLost) else 0
            self._failing_since = now - silent_seconds
        if isinstance(problem, _PERMANENT_ON_SERVER) and self.chosen is not None:
            self._refused[self.chosen] = problem
            if len(self._refused) == self._servers:
                return self._refused[min(self._refused)]
            self._choose_next()
        elif isinstance(problem, _FAIL_OVER_AT_ONCE):
            self._choose_next()
        elif self._servers > 1 and now - self._failing_since > self._patience(now):
            self._choose_next()
            # The next server may be healthy, so the first pause before it is short.
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
        """Return how long a server may fail before another server is tried.

        The time doubles with each recent failover, so that servers that fail in turn create few epochs.
        """
        self._failover_times = [at for at in self._failover_times if now - at < FAIL_OVER_REMEMBERED_SECONDS]
        patience = self._fail_over_after * (1 << len(self._failover_times))
        return min(patience, max(self._fail_over_after, FAIL_OVER_SECONDS_MAX))

    def _choose_next(self) -> None:
        if self.chosen is not None and self._servers > 1:
            self.chosen = (self.chosen + 1) % self._servers
            self._failing_since = None
