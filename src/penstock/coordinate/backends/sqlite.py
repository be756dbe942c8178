# SPDX-License-Identifier: Apache-2.0
"""Coordination in one SQLite file, shared by the processes of one host.

Every change is a transaction that takes the write lock at its start and is durable when it returns. Each
change has a number that is never reused. The paths of the newest changes are stored, so that a watcher can
see what changed. A session is a row that contains the session's expiry time by the host's clock. The owning
process extends the expiry time. Any process that finds an expired session deletes that session's records.
Setting the clock forward ends sessions early. Setting it back has the same effect, because an expiry time
that is further ahead than the session time is treated as invalid. A file on a network mount cannot be shared
safely.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import structlog

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
from penstock.errors import (
    CoordinationLost,
    DiskFailed,
    LimitExceeded,
    OptionInvalid,
    PenstockError,
    VersionConflict,
)
from penstock.limits import COORDINATION_RECORD_BYTES_MAX
from penstock.retry import Backoff, Retry

# Processes that open a new file at the same time exclude each other for a moment.
_OPEN_BACKOFF = Backoff(first=0.01, longest=0.1)
# How often a watcher checks whether the file has changed; this reads one page.
POLL_SECONDS = 0.1

# The number of changes that are listed by path. A watcher that is further behind treats everything as
# changed.
_CHANGES_KEPT = 10_000

# The number of heartbeats per session time.
_SIGNS_OF_LIFE = 4

_FORMAT_VERSION = 1
_FORMAT = """
CREATE TABLE records (
    path TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, created INTEGER NOT NULL,
    session INTEGER
) WITHOUT ROWID;
CREATE INDEX records_of_sessions ON records (session) WHERE session IS NOT NULL;
CREATE TABLE sessions (id INTEGER PRIMARY KEY AUTOINCREMENT, seconds REAL NOT NULL, expires REAL NOT NULL);
CREATE TABLE changes (number INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL);
"""

# The query parameter is the current time, in seconds since 1970.
_EXPIRED = "SELECT id FROM sessions WHERE NOT (expires > :now AND expires <= :now + 2 * seconds)"
# Selects the records between two paths that belong to a live session or to no session. `_below` returns the
# parameters.
_BELOW = f"records WHERE path > :first AND path < :last AND (session IS NULL OR session NOT IN ({_EXPIRED}))"

_log = structlog.get_logger(__name__)


def open_url(url: str, seconds: float) -> "SqliteStore":
    """Open `sqlite:///path`, or `sqlite:path` for a relative path.

    Raises OptionInvalid, DiskFailed, CoordinationLost.
    """
    return SqliteStore(_path_of(url), seconds)


def end_session(url: str, key: str, seconds: float) -> None:
    """End the session with a key. Raises any error from `open_url`."""
    if not _path_of(url).exists():
        # The file was removed, and must not be created again.
        return
    with closing(open_url(url, seconds)) as store:
        store.drop(int(key))


def _path_of(url: str) -> Path:
    """Return the path of a store's file. Raises OptionInvalid."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or parts.query or path.endswith("/") or not path:
        raise OptionInvalid(
            f"coordination {url!r} names no file", hint="Write sqlite:///path/to/file.db, with three slashes"
        )
    return Path(path)


class SqliteStore:
    """A coordination store in one SQLite file."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path.absolute()
        self._seconds = seconds
        self._process = OneProcess()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sessions: list[SqliteSession] = []
        self._watches: list[_SqliteWatch] = []
        self._poller: threading.Thread | None = None
        with self._failures():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self.connect(seconds)
            self._make_tables()
            self._file = self._file_there()

    @property
    def url(self) -> str:
        """The URL of the store."""
        return f"sqlite://{self._path}"

    def get(self, path: str, *, latest: bool = False) -> Record | None:
        """Return the record at a path, always the latest."""
        with self._reading(path) as connection:
            row = connection.execute(
                "SELECT value, version, created, session IS NOT NULL FROM records "
                f"WHERE path = :path AND (session IS NULL OR session NOT IN ({_EXPIRED}))",
                {"path": path, "now": time.time()},
            ).fetchone()
        return None if row is None else Record(row[0], row[1], row[2], bool(row[3]))

    def put(self, path: str, value: bytes, version: int | None = None) -> int:
        """Write a record and return its version."""
        if len(value) > COORDINATION_RECORD_BYTES_MAX:
            raise LimitExceeded(f"a record of {len(value)} bytes is too large", position=path)
        with self._changing(path) as connection:
            present = _present_version(connection, path, version)
            change = _note_change(connection, path)
            connection.execute(
                "INSERT INTO records (path, value, version, created) VALUES (:path, :value, 0, :change) "
                "ON CONFLICT (path) DO UPDATE SET value = :value, version = version + 1",
                {"path": path, "value": bytes(value), "change": change},
            )
        return present + 1

    def delete(self, path: str, version: int | None = None) -> None:
        """Delete a record."""
        with self._changing(path) as connection:
            if _present_version(connection, path, version) == ABSENT:
                return
            _note_change(connection, path)
            connection.execute("DELETE FROM records WHERE path = ?", (path,))

    def list(self, path: str) -> Sequence[str]:
        """Return the names below a path."""
        below = below_of(path)
        with self._reading() as connection:
            rows = connection.execute(f"SELECT path FROM {_BELOW}", _below(below)).fetchall()
        return tuple(sorted({record_path.removeprefix(below).partition("/")[0] for (record_path,) in rows}))

    def read_below(self, path: str, wanted: Callable[[str], bool]) -> Mapping[str, Record | None]:
        """Return the records below a path, all as of the same moment."""
        with self._reading() as connection:
            connection.create_function("wanted", 1, wanted)
            rows = connection.execute(
                "SELECT path, CASE WHEN wanted(path) THEN value END, version, created, session IS NOT NULL"
                f" FROM {_BELOW}",
                _below(below_of(path)),
            ).fetchall()
        return {
            record_path: None if value is None else Record(value, version, created, bool(of_session))
            for record_path, value, version, created, of_session in rows
        }

    def watch(self, path: str, changed: Callable[[], None]) -> "_SqliteWatch":
        """Call `changed` after every change at or below a path, within about 100 ms."""
        self._process.check(self.url)
        below_of(path)
        with self._failures(path), self._alone(path):
            watch = _SqliteWatch(path, changed)
            if self._poller is None:
                # Record the poller's position in the list of changes now, so that every later change is
                # reported.
                poll = _Poll(self)
                self._poller = threading.Thread(target=poll.run, name=f"watch-{self._path.name}", daemon=True)
                self._poller.start()
            self._watches.append(watch)
            return watch

    def session(self, seconds: float = SESSION_SECONDS) -> "SqliteSession":
        """Start a session, whose expiry a thread extends."""
        begun = time.monotonic()
        with self._changing() as connection:
            cursor = connection.execute(
                "INSERT INTO sessions (seconds, expires) VALUES (?, ?)", (seconds, time.time() + seconds)
            )
            number = cursor.lastrowid
        assert number is not None
        session = SqliteSession(self, number, seconds, begun + seconds)
        self._sessions.append(session)
        return session

    def close(self) -> None:
        """End every session and watch of this store object."""
        if self._closed.is_set():
            return
        for session in self._sessions:
            session.close()
        for watch in self._watches:
            watch.close()
        self._closed.set()
        if self._poller is not None and self._poller is not threading.current_thread():
            self._poller.join(self._seconds)
        with self._lock:
            self._connection.close()

    # --- For the sessions and the poller of this store --------------------------------------

    @property
    def closed(self) -> threading.Event:
        """An event that is set when this store object is closed."""
        return self._closed

    def connect(self, seconds: float, *, durable: bool = True) -> sqlite3.Connection:
        """Open another connection to the file, which waits for a lock for up to `seconds`.

        With `durable` false, a power failure may lose the changes of the connection.
        """
        connection = sqlite3.connect(
            self._path, timeout=seconds, isolation_level=None, check_same_thread=False
        )
        retry = Retry("opening the store again", backoff=_OPEN_BACKOFF, seconds=seconds, quiet_seconds=1.0)
        while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            # Switching to WAL mode needs exclusive access and does not wait for it, so concurrent openers
            # retry.
            try:
                connection.execute("PRAGMA journal_mode = wal")
            except sqlite3.OperationalError as problem:
                if problem.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                retry.wait(problem)
        connection.execute(f"PRAGMA synchronous = {'full' if durable else 'normal'}")
        return connection

    def refuse_replaced(self) -> None:
        """Raise DiskFailed if the file is no longer the one that was opened, because other processes would
        use a different file.
        """
        if self._file_there() != self._file:
            raise DiskFailed(
                f"the coordination file {self._path} was removed or replaced while it was open",
                hint="Stop every process that uses it before you move it, and start them again",
            )

    def put_of(self, session: "SqliteSession", path: str, value: bytes) -> int:
        """Create a record of a session; see Session.put_ephemeral."""
        with self._changing(path) as connection:
            self._refuse_ended(connection, session, path)
            row = connection.execute(
                "SELECT session, created FROM records WHERE path = ?", (path,)
            ).fetchone()
            if row is not None:
                if row[0] == session.number:
                    return int(row[1])
                raise VersionConflict("another process's record exists there", position=path)
            change = _note_change(connection, path)
            connection.execute(
                "INSERT INTO records (path, value, version, created, session) VALUES (?, ?, 0, ?, ?)",
                (path, bytes(value), change, session.number),
            )
            return change

    def remove_of(self, session: "SqliteSession", path: str) -> None:
        """Delete a record of a session; see Session.remove."""
        with self._changing(path) as connection:
            gone = connection.execute(
                "DELETE FROM records WHERE path = ? AND session = ?", (path, session.number)
            )
            if gone.rowcount:
                _note_change(connection, path)

    def drop(self, number: int) -> None:
        """Delete a session and its records."""
        with self._changing() as connection:
            _remove_sessions(connection, [number])

    def sweep(self) -> None:
        """Remove the sessions that have expired."""
        with self._changing():
            # Every change starts by removing expired sessions.
            pass

    def watches_of(self, paths: "set[str] | None") -> "Sequence[_SqliteWatch]":
        """Return the watches that some paths affect; all watches for None."""
        with self._lock:
            self._watches = [watch for watch in self._watches if not watch.closed]
            return [
                watch
                for watch in self._watches
                if paths is None or any(is_below(path, watch.path) for path in paths)
            ]

    # --- Inside -----------------------------------------------------------------------------

    def _make_tables(self) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in _FORMAT.strip().split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_FORMAT_VERSION}")
        connection.execute("COMMIT")
        if version not in (0, _FORMAT_VERSION):
            connection.close()
            raise OptionInvalid(
                f"the coordination file {self._path} has format {version}, not {_FORMAT_VERSION}",
                hint="Run the Penstock that wrote it, or name another file",
            )

    def _file_there(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _refuse_closed(self, path: str | None) -> None:
        if self._closed.is_set():
            raise CoordinationLost(f"the store {self.url} is closed", position=path)

    def _refuse_ended(self, connection: sqlite3.Connection, session: "SqliteSession", path: str) -> None:
        row = connection.execute("SELECT 1 FROM sessions WHERE id = ?", (session.number,)).fetchone()
        if row is None or not session.alive:
            raise CoordinationLost("the session has ended", position=path)

    @contextmanager
    def _reading(self, path: str | None = None) -> Iterator[sqlite3.Connection]:
        self._process.check(self.url)
        if path is not None:
            checked_path(path)
        with self._failures(path), self._alone(path):
            yield self._connection

    @contextmanager
    def _changing(self, path: str | None = None) -> Iterator[sqlite3.Connection]:
        """Provide the connection in a transaction with the write lock, after removing expired sessions."""
        self._process.check(self.url)
        if path is not None:
            checked_path(path)
        with self._failures(path), self._alone(path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                expired = self._connection.execute(_EXPIRED, {"now": time.time()}).fetchall()
                # After this process was paused, its sessions continue unless another process has ended them.
                own = {session.number for session in self._sessions if session.alive}
                _remove_sessions(self._connection, [number for (number,) in expired if number not in own])
                yield self._connection
            except PenstockError:
                # Commit only the removal of expired sessions; nothing else was changed.
                self._connection.execute("COMMIT")
                raise
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def _alone(self, path: str | None) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._seconds):
            raise CoordinationLost(f"{self.url} did not answer within {self._seconds:g} s", position=path)
        try:
            self._refuse_closed(path)
            self.refuse_replaced()
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _failures(self, path: str | None = None) -> Iterator[None]:
        """Translate SQLite errors into Penstock errors by their codes."""
        try:
            yield
        except sqlite3.DatabaseError as problem:
            raise self._error(problem, path) from problem
        except OSError as problem:
            raise DiskFailed(
                f"the folder of {self._path} cannot be made: {problem.strerror}",
                hint="Name a folder that this account may write",
            ) from problem

    def _error(self, problem: sqlite3.DatabaseError, path: str | None) -> PenstockError:
        code = getattr(problem, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return CoordinationLost(f"{self.url} was locked for {self._seconds:g} s", position=path)
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return CoordinationLost(
                f"{self.url} cannot be written now: {problem}", position=path, hint="Make room on its disk"
            )
        if code in (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_PERM,
            sqlite3.SQLITE_AUTH,
        ):
            return DiskFailed(
                f"{self.url} cannot be opened for writing: {problem}",
                hint="Name a file that this account may write",
            )
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return OptionInvalid(
                f"{self._path} is no coordination file, or is damaged: {problem}",
                hint="Name another file, or restore this one",
            )
        raise AssertionError(f"SQLite refuses a statement of ours: {problem}") from problem


def _below(beginning: str) -> dict[str, str | float]:
    # `0` is the character after `/`, so the paths below `/a` lie between `/a/` and `/a0`.
    return {"first": beginning, "last": beginning[:-1] + "0", "now": time.time()}


def _present_version(connection: sqlite3.Connection, path: str, version: int | None) -> int:
    """Return the version of a record, ABSENT for none.

    Raises VersionConflict if the caller expects a different version.
    """
    row = connection.execute("SELECT version FROM records WHERE path = ?", (path,)).fetchone()
    present = ABSENT if row is None else int(row[0])
    if version is not None and version != present:
        raise VersionConflict(f"the record has version {present}, not {version}", position=path)
    return present


def _note_change(connection: sqlite3.Connection, path: str) -> int:
    """Record a change at a path, and return the number of the change."""
    number = connection.execute("INSERT INTO changes (path) VALUES (?)", (path,)).lastrowid
    assert number is not None
    connection.execute("DELETE FROM changes WHERE number <= ?", (number - _CHANGES_KEPT,))
    return number


def _remove_sessions(connection: sqlite3.Connection, numbers: list[int]) -> None:
    for number in numbers:
        for (path,) in connection.execute("SELECT path FROM records WHERE session = ?", (number,)).fetchall():
            _note_change(connection, path)
        connection.execute("DELETE FROM records WHERE session = ?", (number,))
        connection.execute("DELETE FROM sessions WHERE id = ?", (number,))


class SqliteSession(EndingSession):
    """A session of an SQLite store, stored as a row. A thread keeps extending the row's expiry."""

    def __init__(self, store: SqliteStore, number: int, seconds: float, certain_until: float) -> None:
        super().__init__(seconds)
        self._store = store
        self.number = number
        self._certain_until = certain_until
        self._thread = threading.Thread(target=self._run, name=f"session-{number}", daemon=True)
        self._thread.start()

    @property
    def key(self) -> str:
        """The number of the session."""
        return str(self.number)

    @property
    def certain_until(self) -> float:
        """When the session's last heartbeat expires."""
        return self._certain_until if self.alive else float("-inf")

    def put_ephemeral(self, path: str, value: bytes, *, plain: bool = False) -> int:
        """Create an ephemeral record."""
        return self._store.put_of(self, path, value)

    def remove(self, path: str) -> None:
        """Delete the session's own record at a path."""
        self._store.remove_of(self, path)

    def close(self) -> None:
        """End the session."""
        if not self.end(lost=False):
            return
        try:
            self._store.drop(self.number)
        except PenstockError as error:
            _log.warning("a session is left to expire", store=self._store.url, error=str(error))
        if self._thread is not threading.current_thread():
            self._thread.join(self._seconds)

    def _run(self) -> None:
        """Extend the expiry until the session has ended."""
        pause = self._seconds / _SIGNS_OF_LIFE
        connection: sqlite3.Connection | None = None
        try:
            while not self._ended.wait(pause):
                begun = time.monotonic()
                try:
                    if connection is None:
                        # The heartbeat need not be durable: a power failure that loses it also ends the
                        # session.
                        connection = self._store.connect(pause, durable=False)
                    self._store.refuse_replaced()
                    counted = connection.execute(
                        "UPDATE sessions SET expires = ? WHERE id = ?",
                        (time.time() + self._seconds, self.number),
                    ).rowcount
                except (sqlite3.DatabaseError, DiskFailed) as problem:
                    _log.warning("a sign of life was not written", store=self._store.url, error=str(problem))
                    counted = 1 if time.monotonic() < self._certain_until else 0
                else:
                    # If the file has no row for the session, the session has ended, and must not count as
                    # certain until its end is recorded.
                    if counted:
                        self._certain_until = begun + self._seconds
                if not counted and self.end(lost=True):
                    _log.warning("a session was lost", store=self._store.url, session=self.number)
        finally:
            if connection is not None:
                connection.close()


class _SqliteWatch:
    def __init__(self, path: str, changed: Callable[[], None]) -> None:
        self.path = path
        self.changed = changed
        self.closed = False

    def close(self) -> None:
        """Stop calling."""
        self.closed = True


class _Poll:
    """Checks whether the file has changed, and notifies the affected watches."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._connection = store.connect(POLL_SECONDS)
        self._seen = self._last_change()
        self._file_version = -1

    def run(self) -> None:
        """Poll until the store is closed."""
        try:
            while not self._store.closed.wait(POLL_SECONDS):
                try:
                    paths = self._changed_paths()
                except (sqlite3.DatabaseError, CoordinationLost, DiskFailed) as problem:
                    # It is unknown which changes were missed, so everything counts as changed.
                    _log.warning("a store cannot be watched now", store=self._store.url, error=str(problem))
                    paths = None
                for watch in self._store.watches_of(paths) if paths is None or paths else ():
                    if not watch.closed:
                        watch.changed()
        finally:
            self._connection.close()

    def _changed_paths(self) -> set[str] | None:
        if self._connection.execute(f"{_EXPIRED} LIMIT 1", {"now": time.time()}).fetchone():
            self._store.sweep()
        (file_version,) = self._connection.execute("PRAGMA data_version").fetchone()
        if file_version == self._file_version:
            return set()
        self._file_version = file_version
        rows = self._connection.execute(
            "SELECT number, path FROM changes WHERE number > ? ORDER BY number", (self._seen,)
        ).fetchall()
        if not rows:
            return set()
        first, self._seen = self._seen + 1, rows[-1][0]
        return {path for _, path in rows} if rows[0][0] == first else None

    def _last_change(self) -> int:
        (number,) = self._connection.execute("SELECT coalesce(max(number), 0) FROM changes").fetchone()
        return int(number)
