# SPDX-License-Identifier: Apache-2.0
"""What befalls each coordination backend in its own way: a URL to open, an expiry, a time without answers."""

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

# For what must not run out while the machine stands still, and for what must run out: that is as short as the
# test ensemble allows, which is two of its ticks.
SESSION_SECONDS = 60.0
SESSION_SECONDS_SHORT = 1.0
# A session learns of its end with its next sign of life, of which it gives four in its time.
SESSION_SECONDS_ENDED = 12.0
# Tests that cut a store off do not wait for it longer.
OPERATION_SECONDS_SHORT = 4.0

_numbers = itertools.count(1)

_Answer = TypeVar("_Answer")


def until_answered(ask: Callable[[], _Answer]) -> _Answer:
    """Return what a store answers, asked again as long as it does not: its time may be a short one."""
    answers: list[_Answer] = []
    wait_until(lambda: not is_lost(lambda: answers.append(ask())))
    return answers[0]


def is_lost(ask: Callable[[], object]) -> bool:
    """Tell whether a store does not answer."""
    try:
        ask()
    except CoordinationLost:
        return True
    return False


class Backend(Protocol):
    """A backend under test; as a context manager it is there inside the block."""

    url: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def open(self, seconds: float = WAIT_SECONDS_MAX) -> CoordinationStore:
        """Open a store that can be cut off; an operation is tried for so long."""
        ...

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """End a session as its expiry does."""
        ...

    def cut_off(self, store: CoordinationStore) -> AbstractContextManager[None]:
        """Have a store's changes unanswered inside the block."""
        ...


class MemoryBackend:
    """Records of this process."""

    def __init__(self) -> None:
        self.url = f"memory://test-{next(_numbers)}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # Records go with the last store, so one stays.
        self._stack.callback(open_store(self.url).close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, seconds: float = WAIT_SECONDS_MAX) -> CoordinationStore:
        """Open a store, which always answers at once."""
        return self._stack.enter_context(_closing(open_store(self.url)))

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """End a session as its expiry does."""
        assert isinstance(store, MemoryStore)
        assert isinstance(session, MemorySession)
        store.lose(session)

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Have a store unanswered; what expires after its time is done by hand."""
        assert isinstance(store, MemoryStore)
        store.away(True)
        try:
            yield
        finally:
            store.away(False)


class SqliteBackend:
    """One file; a process that keeps its write lock cuts everybody off."""

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
        """Put the session's end into the past, as a clock does that is set forward, until others notice."""
        assert isinstance(session, SqliteSession)
        connection = self._connect()
        another = open_store(self.url, WAIT_SECONDS_MAX)
        assert isinstance(another, SqliteStore)

        def is_gone() -> bool:
            # A sign of life that comes between the two moves the end on.
            connection.execute("UPDATE sessions SET expires = 0 WHERE id = ?", (session.number,))
            another.sweep()
            return not connection.execute("SELECT 1 FROM sessions WHERE id = ?", (session.number,)).fetchall()

        wait_until(is_gone)
        another.close()
        connection.close()

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Have every change unanswered, a sign of life as well."""
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
    """A node of a real ensemble, reached through a proxy that can go silent."""

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
        """Open a store through a proxy of its own, the last of `proxies`."""
        proxy = self._stack.enter_context(Proxy(self._ensemble.port))
        self.proxies.append(proxy)
        url = f"zookeeper://127.0.0.1:{proxy.port}{self._root}"
        return self._stack.enter_context(_closing(until_answered(lambda: open_store(url, seconds))))

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """Close the session from another connection that has its number, until that is noticed."""
        assert isinstance(session, ZooKeeperSession)
        number = session._connection.client.client_id

        def is_gone() -> bool:
            # The session's own connection, which ours puts out, may come back before we have closed.
            other = KazooClient(self._ensemble.hosts, client_id=number, timeout=SESSION_SECONDS)
            other.start(WAIT_SECONDS_MAX)
            other.stop()
            other.close()
            return not session.alive

        wait_until(is_gone)

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Have what a store sends and is sent lost, new connections refused."""
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
