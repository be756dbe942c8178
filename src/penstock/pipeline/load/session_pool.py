# SPDX-License-Identifier: Apache-2.0
"""Sessions that the chunks of a batch use one after another.

A session costs several round trips, among them those of TLS and of the login: more than a small table.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.closing import Closing
from penstock.errors import PenstockError
from penstock.model import ServerAddress
from penstock.pipeline.load.session import LoadSession, open_session


class SessionPool(Closing):
    """Keeps a session for the next chunk of the same server. Safe for threads; closes idle sessions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[LoadSession] = []
        self._is_closed = False

    @contextmanager
    def session(self, address: ServerAddress) -> Iterator[LoadSession]:
        """Return a context manager with a session that has no transaction. An error in it ends the session.

        Raises what `open_session` raises.
        """
        session = self._take(address) or open_session(address)
        try:
            yield session
        except BaseException:
            session.close()
            raise
        self._give_back(session)

    def close(self) -> None:
        """End the idle sessions, and those in use once they are given back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def _take(self, address: ServerAddress) -> LoadSession | None:
        with self._lock:
            for number, session in enumerate(self._idle):
                if session.connection.address == address:
                    return self._idle.pop(number)
        return None

    def _give_back(self, session: LoadSession) -> None:
        # A session of TiDB stays at the time that it reads as of.
        is_kept = not session.tidb
        if is_kept:
            try:
                # The transaction holds the definition of the chunk's table.
                session.query("ROLLBACK")
            except PenstockError:
                # The chunk has been read, so this error concerns nobody.
                is_kept = False
        with self._lock:
            is_kept = is_kept and not self._is_closed
            if is_kept:
                self._idle.append(session)
        if not is_kept:
            session.close()
