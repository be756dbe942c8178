# SPDX-License-Identifier: Apache-2.0
"""Coordination backends under test, each with its own URL, session expiry and outage."""

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, Self, TypeVar

from kazoo.client import KazooClient

from penstock.coordinate.backends.memory import MemorySession, MemoryStore
from penstock.coordinate.backends.sqlite import SqliteSession, SqliteStore
from penstock.coordinate.backends.zookeeper import ZooKeeperSession
from penstock.coordinate.store import CoordinationStore, Session, open_store
from penstock.errors import CoordinationLost
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Proxy
from tools.zookeeper import ZooKeeper

# The long timeout must survive a pause of the machine. The short timeout is meant to expire, so it is as
# short as the test ensemble allows: two of the ensemble's ticks.
SESSION_SECONDS = 60.0
SESSION_SECONDS_SHORT = 1.0
# A session notices its end with its next heartbeat; it sends four heartbeats per timeout.
SESSION_SECONDS_ENDED = 12.0
# The timeout of a store's operations in tests that disconnect the store.
OPERATION_SECONDS_SHORT = 4.0

_numbers = itertools.count(1)

_Answer = TypeVar("_Answer")


def until_answered(ask: Callable[[], _Answer]) -> _Answer:
    """Return the store's answer. Retry each time the short operation timeout expires."""
    answers: list[_Answer] = []
    wait_until(lambda: not is_lost(lambda: answers.append(ask())))
    return answers[0]


def is_lost(ask: Callable[[], object]) -> bool:
    """Return whether a store does not answer."""
    try:
        ask()
    except CoordinationLost:
        return True
    return False


class Backend(Protocol):
    """A coordination store under test. As a context manager, it runs inside the block."""

    url: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def open(self, seconds: float = WAIT_SECONDS_MAX) -> CoordinationStore:
        """Open a store that can be disconnected; an operation is tried for this long."""
        ...

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """End a session as its expiry would."""
        ...

    def cut_off(self, store: CoordinationStore) -> AbstractContextManager[None]:
        """Leave a store's changes unanswered inside the block."""
        ...


class MemoryBackend:
    """A store with records in the memory of this process."""

    def __init__(self) -> None:
        self.url = f"memory://test-{next(_numbers)}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # The records are deleted with the last open store, so keep one open.
        self._stack.callback(open_store(self.url).close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, seconds: float = WAIT_SECONDS_MAX) -> CoordinationStore:
        """Open a store, which always answers at once."""
        return self._stack.enter_context(_closing(open_store(self.url)))

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """End a session as its expiry would."""
        assert isinstance(store, MemoryStore)
        assert isinstance(session, MemorySession)
        store.lose(session)

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Leave a store unanswered inside the block; expire its sessions explicitly."""
        assert isinstance(store, MemoryStore)
        store.away(True)
        try:
            yield
        finally:
            store.away(False)


class SqliteBackend:
    """A store in one SQLite file. A process that holds the file's write lock blocks all others."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"coordination {next(_numbers)}.db"
        self.url = f"sqlite://{str(self._path).replace(' ', '%20')}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, seconds: float = WAIT_SECONDS_MAX) -> CoordinationStore:
        """Open a store."""
        return self._stack.enter_context(_closing(until_answered(lambda: open_store(self.url, seconds))))

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """Move the session's end into the past, as a clock change would; repeat until other sessions
        notice.
        """
        assert isinstance(session, SqliteSession)
        connection = self._connect()
        another = open_store(self.url, WAIT_SECONDS_MAX)
        assert isinstance(another, SqliteStore)

        def is_gone() -> bool:
            # A heartbeat between the two statements extends the session again.
            connection.execute("UPDATE sessions SET expires = 0 WHERE id = ?", (session.number,))
            another.sweep()
            return not connection.execute("SELECT 1 FROM sessions WHERE id = ?", (session.number,)).fetchall()

        wait_until(is_gone)
        another.close()
        connection.close()

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Leave every change unanswered, including heartbeats."""
        connection = self._connect()
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None, timeout=WAIT_SECONDS_MAX)


class ZooKeeperBackend:
    """A store below a node of a real ensemble, reached through a proxy that can become unresponsive."""

    def __init__(self, ensemble: ZooKeeper) -> None:
        self._ensemble = ensemble
        self._root = f"/tests/{next(_numbers)}"
        self.url = f"zookeeper://{ensemble.hosts}{self._root}"
        self._stack = ExitStack()
        self.proxies: list[Proxy] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, seconds: float = WAIT_SECONDS_MAX) -> CoordinationStore:
        """Open a store through a proxy of its own, which is appended to `proxies`."""
        proxy = self._stack.enter_context(Proxy(self._ensemble.port))
        self.proxies.append(proxy)
        url = f"zookeeper://127.0.0.1:{proxy.port}{self._root}"
        return self._stack.enter_context(_closing(until_answered(lambda: open_store(url, seconds))))

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """Close the session from another connection with the same session id; repeat until the client
        notices.
        """
        assert isinstance(session, ZooKeeperSession)
        number = session._connection.client.client_id

        def is_gone() -> bool:
            # This connection disconnects the session's own connection, which may reconnect before this
            # connection has closed.
            other = KazooClient(self._ensemble.hosts, client_id=number, timeout=SESSION_SECONDS)
            other.start(WAIT_SECONDS_MAX)
            other.stop()
            other.close()
            return not session.alive

        wait_until(is_gone)

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Drop all traffic of a store, and refuse new connections."""
        proxy = next(proxy for proxy in self.proxies if f":{proxy.port}/" in store.url)
        proxy.refuse()
        proxy.cut("silence")
        try:
            yield
        finally:
            proxy.refuse(False)
            proxy.resume()


@contextmanager
def _closing(store: CoordinationStore) -> Iterator[CoordinationStore]:
    try:
        yield store
    finally:
        store.close()
