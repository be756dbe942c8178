# SPDX-License-Identifier: Apache-2.0
"""Coordination within one process, by name: for tests, and for a subscriber that needs no durable
checkpoints.

Stores with the same name share their records. The records are lost when the last of these stores is closed.
`lose` and `away` simulate network faults.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from penstock.coordinate.ending_session import EndingSession
from penstock.coordinate.store import (
    ABSENT,
    SESSION_SECONDS,
    OneProcess,
    Record,
    below_of,
    checked_path,
    is_below,
)
from penstock.errors import CoordinationLost, LimitExceeded, OptionInvalid, VersionConflict
from penstock.limits import COORDINATION_RECORD_BYTES_MAX


@dataclass(eq=False)
class _Space:
    """The state shared by all stores with the same name."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    records: dict[str, tuple[Record, "MemorySession | None"]] = field(default_factory=dict)
    changes: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    watches: list["_MemoryWatch"] = field(default_factory=list)
    stores: int = 0


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


def open_url(url: str, seconds: float) -> "MemoryStore":
    """Open `memory://name`. Raises OptionInvalid."""
    parts = urlsplit(url)
    if not parts.netloc or parts.path.strip("/") or parts.query:
        raise OptionInvalid(f"coordination {url!r} has no name", hint="Write memory://name")
    return MemoryStore(parts.netloc)


class MemoryStore:
    """A coordination store in the memory of this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = OneProcess()
        self._away = False
        self._sessions: list[MemorySession] = []
        self._watches: list[_MemoryWatch] = []
        self._closed = False
        with _spaces_lock:
            self._space = _spaces.setdefault(name, _Space())
            self._space.stores += 1

    @property
    def url(self) -> str:
        """The URL of the store."""
        return f"memory://{self._name}"

    def get(self, path: str, *, latest: bool = False) -> Record | None:
        """Return the record at a path; it is always the latest."""
        with self._space.lock:
            self._check(path)
            entry = self._space.records.get(path)
            return None if entry is None else entry[0]

    def put(self, path: str, value: bytes, version: int | None = None) -> int:
        """Write a record and return its version."""
        if len(value) > COORDINATION_RECORD_BYTES_MAX:
            raise LimitExceeded(f"a record of {len(value)} bytes is too large", position=path)
        with self._space.lock:
            self._check(path)
            entry = self._space.records.get(path)
            present = ABSENT if entry is None else entry[0].version
            if version is not None and version != present:
                raise VersionConflict(f"the record has version {present}, not {version}", position=path)
            change = next(self._space.changes)
            if entry is None:
                self._space.records[path] = (Record(bytes(value), 0, change), None)
            else:
                self._space.records[path] = (
                    replace(entry[0], value=bytes(value), version=present + 1),
                    entry[1],
                )
        self._tell([path])
        return present + 1

    def delete(self, path: str, version: int | None = None) -> None:
        """Delete a record."""
        with self._space.lock:
            self._check(path)
            entry = self._space.records.get(path)
            present = ABSENT if entry is None else entry[0].version
            if version is not None and version != present:
                raise VersionConflict(f"the record has version {present}, not {version}", position=path)
            if entry is None:
                return
            next(self._space.changes)
            del self._space.records[path]
        self._tell([path])

    def list(self, path: str) -> Sequence[str]:
        """Return the names below a path."""
        beginning = below_of(path)
        with self._space.lock:
            self._check()
            below = [
                record_path.removeprefix(beginning)
                for record_path in self._space.records
                if record_path.startswith(beginning)
            ]
            return tuple(sorted({name.partition("/")[0] for name in below}))

    def read_below(self, path: str, wanted: Callable[[str], bool]) -> Mapping[str, Record | None]:
        """Return the records below a path."""
        beginning = below_of(path)
        with self._space.lock:
            self._check()
            return {
                record_path: entry[0] if wanted(record_path) else None
                for record_path, entry in self._space.records.items()
                if record_path.startswith(beginning)
            }

    def watch(self, path: str, changed: Callable[[], None]) -> "_MemoryWatch":
        """Call `changed` after every change at a path or below it."""
        below_of(path)
        with self._space.lock:
            self._check()
            watch = _MemoryWatch(self._space, path, changed)
            self._space.watches.append(watch)
            self._watches.append(watch)
            return watch

    def session(self, seconds: float = SESSION_SECONDS) -> "MemorySession":
        """Start a session, which lasts as long as this process unless `lose` ends it."""
        with self._space.lock:
            self._check()
            session = MemorySession(self, seconds)
            self._sessions.append(session)
            return session

    def close(self) -> None:
        """End every session and watch of this store object."""
        if self._closed:
            return
        for session in self._sessions:
            session.close()
        for watch in self._watches:
            watch.close()
        self._closed = True
        with _spaces_lock:
            self._space.stores -= 1
            if self._space.stores == 0 and _spaces.get(self._name) is self._space:
                del _spaces[self._name]

    # --- Fault injection --------------------------------------------------------------------

    def away(self, away: bool) -> None:
        """Make this store object unavailable while `away` is true; its sessions are uncertain for that
        time.
        """
        self._away = away
        if not away:
            self._tell(["/"])

    def lose(self, session: "MemorySession") -> None:
        """End a session as if it had expired."""
        self.drop(session)
        session.end(lost=True)

    # --- For the sessions of this store -----------------------------------------------------

    def put_of(self, session: "MemorySession", path: str, value: bytes) -> int:
        """Create a record of a session; see Session.put_ephemeral."""
        with self._space.lock:
            self._check(path)
            if not session.alive:
                raise CoordinationLost("the session has ended", position=path)
            entry = self._space.records.get(path)
            if entry is not None:
                if entry[1] is session:
                    return entry[0].created
                raise VersionConflict("another process's record exists there", position=path)
            record = Record(bytes(value), 0, next(self._space.changes), of_session=True)
            self._space.records[path] = (record, session)
        self._tell([path])
        return record.created

    def remove_of(self, session: "MemorySession", path: str) -> None:
        """Delete a record of a session; see Session.remove."""
        with self._space.lock:
            self._check(path)
            entry = self._space.records.get(path)
            if entry is None or entry[1] is not session:
                return
            next(self._space.changes)
            del self._space.records[path]
        self._tell([path])

    def drop(self, session: "MemorySession") -> None:
        """Delete the records of a session."""
        with self._space.lock:
            gone = [path for path, (_, owner) in self._space.records.items() if owner is session]
            for path in gone:
                next(self._space.changes)
                del self._space.records[path]
        self._tell(gone)

    @property
    def answers(self) -> bool:
        """Whether this store object is available and open."""
        return not self._away and not self._closed

    def _check(self, path: str | None = None) -> None:
        self._process.check(self.url)
        if path is not None:
            checked_path(path)
        if not self.answers:
            raise CoordinationLost(f"{self.url} does not answer", position=path)

    def _tell(self, paths: Sequence[str]) -> None:
        with self._space.lock:
            watches = [
                watch
                for watch in self._space.watches
                if any(path == "/" or is_below(path, watch.path) for path in paths)
            ]
        for watch in watches:
            watch.tell()


class MemorySession(EndingSession):
    """A session of a memory store. It does not expire by itself."""

    def __init__(self, store: MemoryStore, seconds: float) -> None:
        super().__init__(seconds)
        self._store = store

    @property
    def key(self) -> str:
        """Always empty: no other process knows the store."""
        return ""

    @property
    def certain_until(self) -> float:
        """One session time from now; -inf if the session has ended or the store is away."""
        return time.monotonic() + self._seconds if self.alive and self._store.answers else float("-inf")

    def put_ephemeral(self, path: str, value: bytes, *, plain: bool = False) -> int:
        """Create an ephemeral record."""
        return self._store.put_of(self, path, value)

    def remove(self, path: str) -> None:
        """Delete the session's own record at a path."""
        self._store.remove_of(self, path)

    def close(self) -> None:
        """End the session."""
        if self.end(lost=False):
            self._store.drop(self)


class _MemoryWatch:
    """A watch that calls back in its own thread, like the watches of the other backends."""

    def __init__(self, space: _Space, path: str, changed: Callable[[], None]) -> None:
        self._space = space
        self.path = path
        self._changed = changed
        self._news = threading.Semaphore(0)
        self._closed = False
        threading.Thread(target=self._run, name=f"watch-memory-{path}", daemon=True).start()

    def tell(self) -> None:
        """Trigger the callback."""
        self._news.release()

    def close(self) -> None:
        """Stop calling the callback."""
        with self._space.lock:
            if self in self._space.watches:
                self._space.watches.remove(self)
        self._closed = True
        self._news.release()

    def _run(self) -> None:
        while True:
            self._news.acquire()
            while self._news.acquire(blocking=False):
                pass
            if self._closed:
                return
            self._changed()
