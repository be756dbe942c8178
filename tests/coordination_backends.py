# SPDX-License-Identifier: Apache-2.0
"""What befalls each coordination backend in its own way: a URL to open, an expiry, a time without answers."""

import itertools
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, Self

from kazoo.client import KazooClient

from penstock.coordinate.backends.memory import MemorySession, MemoryStore
from penstock.coordinate.backends.zookeeper import ZooKeeperSession
from penstock.coordinate.store import CoordinationStore, Session, open_store
from penstock.errors import CoordinationLost
from tools.servers import Proxy
from tools.zookeeper import ZooKeeper

# As short as the test ensemble allows, which is two of its ticks.
SESSION_SECONDS = 1.0
# Tests that cut a store off do not wait for it longer.
OPERATION_SECONDS = 4.0
WAIT_SECONDS_MAX = 20.0

_numbers = itertools.count(1)


def wait_until(condition: Callable[[], object], seconds: float = WAIT_SECONDS_MAX) -> float:
    """Wait until a condition holds, and return how long that took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + seconds, f"not so within {seconds:g} s"
        time.sleep(0.01)
    return time.monotonic() - begun


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

    def open(self) -> CoordinationStore:
        """Open a store that can be cut off."""
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

    def open(self) -> CoordinationStore:
        """Open a store."""
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
        yield
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

    def open(self) -> CoordinationStore:
        """Open a store."""
        return self._stack.enter_context(_closing(open_store(self.url, OPERATION_SECONDS)))

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """Put the session's end into the past, as a clock does that is set forward."""
        with sqlite3.connect(self._path) as connection:
            connection.execute("UPDATE sessions SET expires = 0")
        connection.close()

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Have every change unanswered, a sign of life as well."""
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=WAIT_SECONDS_MAX)
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
        connection.close()


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

    def open(self) -> CoordinationStore:
        """Open a store through a proxy of its own, the last of `proxies`."""
        proxy = self._stack.enter_context(Proxy(self._ensemble.port))
        self.proxies.append(proxy)
        url = f"zookeeper://127.0.0.1:{proxy.port}{self._root}"
        return self._stack.enter_context(_closing(open_store(url, OPERATION_SECONDS)))

    def expire(self, store: CoordinationStore, session: Session) -> None:
        """Close the session from another connection that has its number."""
        assert isinstance(session, ZooKeeperSession)
        other = KazooClient(self._ensemble.hosts, client_id=session._connection.client.client_id)
        other.start()
        other.stop()
        other.close()

    @contextmanager
    def cut_off(self, store: CoordinationStore) -> Iterator[None]:
        """Have what a store sends and is sent lost, new connections refused."""
        proxy = next(one for one in self.proxies if f":{one.port}/" in store.url)
        proxy.refuse()
        proxy.cut("silence")
        yield
        proxy.refuse(False)
        proxy.resume()


@contextmanager
def _closing(store: CoordinationStore) -> Iterator[CoordinationStore]:
    try:
        yield store
    finally:
        store.close()
