# SPDX-License-Identifier: Apache-2.0
"""A pool of sessions that are reused for the chunks of a batch.

Opening a session costs several round trips, including those of TLS and authentication, and taking a watermark
costs three. Together this takes longer than reading a small table.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from penstock.closing import Closing
from penstock.errors import PenstockError, TransientError
from penstock.model import ServerAddress
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.load.watermark import Watermark, watermark_of

# Servers, and the networks in between, close sessions that are idle for some minutes, often without notice.
_IDLE_SECONDS_MAX = 20.0
# How long reads may use the same watermark. Changes after the watermark are applied again to the rows that
# were read.
_WATERMARK_SECONDS_MAX = 1.0


class SessionPool(Closing):
    """Keeps sessions for later chunks from the same server. Thread-safe. Closes sessions that stay idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Idle sessions, each with the time at which it was returned.
        self._idle: list[tuple[float, LoadSession]] = []
        # Watermarks, each with the time at which it was taken and the epoch of its position.
        self._watermarks: WeakKeyDictionary[LoadSession, tuple[float, int, Watermark]] = WeakKeyDictionary()
        self._is_closed = False

    @contextmanager
    def session(self, address: ServerAddress) -> Iterator[LoadSession]:
        """Return a context manager with a session that has no transaction. An error in the block ends the
        session.

        A temporary error also ends the server's idle sessions, which may be broken too: the next attempt
        opens a new session. Propagates errors from `open_session`.
        """
        session = self.borrow(address)
        try:
            yield session
        except BaseException as problem:
            self.discard(session, problem)
            raise
        self.give_back(session)

    def borrow(self, address: ServerAddress) -> LoadSession:
        """Return a session that has no transaction, for `give_back` or `discard`. Raises the errors of
        `open_session`.
        """
        return self._take(address) or open_session(address)

    def give_back(self, session: LoadSession) -> None:
        """Keep a borrowed session, all of whose answers were read, for the next chunk."""
        # A session of TiDB keeps reading as of one timestamp, so do not reuse it.
        is_kept = not session.tidb
        if is_kept:
            try:
                # End the transaction, because it locks the definition of the chunk's table.
                session.roll_back()
            except PenstockError:
                # The chunk was read completely, so the error only means that the session cannot be reused.
                is_kept = False
        with self._lock:
            is_kept = is_kept and not self._is_closed
            if is_kept:
                self._idle.append((time.monotonic(), session))
        if not is_kept:
            session.close()

    def discard(self, session: LoadSession, problem: BaseException) -> None:
        """Close a borrowed session after an error. A temporary error also ends the server's idle sessions."""
        session.close()
        if isinstance(problem, TransientError):
            self._end(session.connection.address)

    def watermark(self, session: LoadSession, epoch: int, commit_ts: int | None) -> Watermark:
        """Return a watermark like `watermark_of`, possibly that of an earlier read over the same session."""
        if session.tidb:
            return watermark_of(session, epoch, commit_ts)
        now = time.monotonic()
        with self._lock:
            taken_at, of_epoch, watermark = self._watermarks.get(session, (-math.inf, epoch, None))
        if watermark is None or of_epoch != epoch or now - taken_at > _WATERMARK_SECONDS_MAX:
            watermark = watermark_of(session, epoch)
            with self._lock:
                self._watermarks[session] = now, epoch, watermark
        return watermark

    def close(self) -> None:
        """Close the idle sessions now, and those in use once they are returned."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, session in idle:
            session.close()

    def _take(self, address: ServerAddress) -> LoadSession | None:
        """Take the most recently used idle session of a server; None if there is none. Close sessions that
        were idle for too long.
        """
        self._end(address, idle_since=time.monotonic() - _IDLE_SECONDS_MAX)
        with self._lock:
            for number in reversed(range(len(self._idle))):
                if self._idle[number][1].connection.address == address:
                    return self._idle.pop(number)[1]
        return None

    def _end(self, address: ServerAddress, idle_since: float = math.inf) -> None:
        """Close the sessions of a server that have been idle since a given time or earlier."""
        with self._lock:
            ended = [
                session
                for since, session in self._idle
                if since <= idle_since and session.connection.address == address
            ]
            self._idle = [entry for entry in self._idle if entry[1] not in ended]
        for session in ended:
            session.close()
