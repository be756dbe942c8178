# SPDX-License-Identifier: Apache-2.0
"""Coordination in a ZooKeeper ensemble, shared by many hosts.

A record is a node whose content is the value, a line feed, and a nonce of 16 hexadecimal digits. A writer
whose response was lost reads the nonce to find out whether its own write took effect. Nodes that exist only
as parents are empty. A session has its own connection. The session becomes uncertain as soon as the
connection is lost. It counts as lost once the ensemble reports its end, or once the ensemble could not be
reached for the session time, whichever comes first.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from penstock.coordinate.ending_session import EndingSession
from penstock.coordinate.ensemble_address import EnsembleAddress
from penstock.coordinate.one_time_watches import OneTimeWatches, PersistentWatch, WatchCallback
from penstock.coordinate.store import (
    ABSENT,
    SESSION_SECONDS,
    OneProcess,
    Record,
    below_of,
    checked_path,
)
from penstock.coordinate.zookeeper_nodes import ReadMany, expected_version, read_below, record_of, sealed
from penstock.errors import (
    AuthenticationFailed,
    CoordinationLost,
    DependencyMissing,
    LimitExceeded,
    PenstockError,
    VersionConflict,
)
from penstock.limits import COORDINATION_RECORD_BYTES_MAX

try:
    from kazoo import exceptions as refusals
    from kazoo.client import KazooClient, KazooState
    from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
    from kazoo.protocol.serialization import Connect
    from kazoo.retry import KazooRetry
    from kazoo.security import make_digest_acl
except ImportError as problem:
    raise DependencyMissing(
        "coordination by ZooKeeper needs the package kazoo", hint="Run: pip install 'penstock[zookeeper]'"
    ) from problem

# The connection for records. Its session holds only watches, so a short timeout detects a dead server early.
_CONNECTION_SECONDS = 6.0

# No network wait takes more than this part of a session's time, so that the next try still finds the session
# alive.
_WAIT_PART = 1 / 3

_RECONNECT_SECONDS_FIRST = 0.05
_RECONNECT_SECONDS_MAX = 1.0
_PAUSE_SECONDS = 0.05

# The number of heartbeats per session time.
_SIGNS_OF_LIFE = 4

# The ensemble may or may not have executed the request.
_ANSWER_LOST = (
    refusals.ConnectionLoss,
    refusals.SessionExpiredError,
    refusals.OperationTimeoutError,
    refusals.SessionMovedError,
)
_NOT_ALLOWED = (refusals.NoAuthError, refusals.AuthFailedError, refusals.InvalidACLError)

_log = structlog.get_logger(__name__)

# Hide kazoo's messages about reconnecting: Penstock logs the consequences itself.
logging.getLogger("kazoo").addHandler(logging.NullHandler())


class _BoundedWaits(SequentialThreadingHandler):  # type: ignore[misc]
    """Kazoo's threads and sockets with bounded waits.

    Without bounds, an attempt to connect would last as long as the session. The session could then be lost
    because of a single server that accepts connections but does not answer, such as a hung server or one that
    has just started.
    """

    def __init__(self, seconds_max: float) -> None:
        super().__init__()
        self._seconds_max = seconds_max

    def select(self, reading: Any, writing: Any, failing: Any, timeout: float) -> Any:
        return super().select(reading, writing, failing, min(timeout, self._seconds_max))

    def create_connection(self, *, timeout: float, **options: Any) -> Any:
        return super().create_connection(timeout=min(timeout, self._seconds_max), **options)


class _Client(KazooClient):  # type: ignore[misc]
    """Kazoo's client, which also exposes how long the ensemble keeps its session."""

    # The ensemble may shorten the session time. Kazoo sets the attribute before the client counts as
    # connected, but has no public name for it.
    session_seconds = float("inf")

    def __init__(self, hosts: str, **options: Any) -> None:
        super().__init__(hosts, **options)
        self._invoke = self._connection._invoke
        self._connection._invoke = self._invoke_noting_session
        self._read_response = self._connection._read_response
        self._connection._read_response = self._read_response_in_order

    def _invoke_noting_session(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        answer = self._invoke(timeout, request, xid)
        if isinstance(request, Connect) and answer[0].time_out > 0:
            self.session_seconds = answer[0].time_out / 1000
        return answer

    def _read_response_in_order(self, header: Any, buffer: bytes, offset: int) -> Any:
        if self._pending and self._pending[0][2] != header.xid:
            # A server that has lost its leader may skip a request. Kazoo's thread would then end for good.
            raise refusals.ConnectionDropped("a request was not answered in its turn")
        return self._read_response(header, buffer, offset)

    def ask(self, request: Any, _: str) -> Any:
        """Send a request that kazoo does not know."""
        answer = self.handler.async_result()
        self._call(request, answer)
        return answer


def _client(address: EnsembleAddress, session_seconds: float, **options: Any) -> _Client:
    """Create a client that is not connected yet."""
    account: dict[str, Any] = {}
    if address.account is not None:
        account["auth_data"] = [("digest", ":".join(address.account))]
        account["default_acl"] = [make_digest_acl(*address.account, all=True)]
    return _Client(
        address.hosts,
        timeout=session_seconds,
        handler=_BoundedWaits(session_seconds * _WAIT_PART),
        connection_retry=KazooRetry(-1, _RECONNECT_SECONDS_FIRST, max_delay=_RECONNECT_SECONDS_MAX),
        **account,
        **options,
    )


def open_url(url: str, seconds: float) -> "ZooKeeperStore":
    """Open a store below a node of an ensemble.

    Raises OptionInvalid, AuthenticationFailed, CoordinationLost.
    """
    return ZooKeeperStore(EnsembleAddress.parse(url), seconds)


def end_session(url: str, key: str, seconds: float) -> None:
    """End the session with a key. Raises any error from `open_url`."""
    number, _, password = key.partition(":")
    session = int(number), bytes.fromhex(password)
    # If the session has ended, the ensemble creates a new session, which is closed instead.
    _Connection(EnsembleAddress.parse(url), seconds, seconds, client_id=session).close()


class _AnswerLost(Exception):
    """A response was lost, so the change may or may not have happened."""


class _Connection:
    """A client with a timeout for every operation."""

    def __init__(
        self, address: EnsembleAddress, session_seconds: float, seconds: float, **options: Any
    ) -> None:
        self._address = address
        self._seconds = seconds
        self._process = OneProcess()
        self._state = threading.Condition()
        self._closed = False
        # The last request that was not answered in time.
        self._owed: Any = None
        self.client = _client(address, session_seconds, **options)
        self.client.add_listener(self._on_state)
        self.client.start_async()
        try:
            self.wait_connected(time.monotonic() + seconds, None)
        except PenstockError:
            self.close()
            raise

    def _on_state(self, state: str) -> None:
        with self._state:
            self._state.notify_all()

    def wait_connected(self, deadline: float, path: str | None) -> None:
        """Wait until the client is connected.

        A request that fails before that is never sent, so it cannot take effect later. Raises
        CoordinationLost.
        """
        self._process.check(self._address.url)
        with self._state:
            self._state.wait_for(lambda: self._closed or self.client.connected, deadline - time.monotonic())
        if self._closed:
            raise CoordinationLost(f"the connection to {self._address.url} has ended", position=path)
        if not self.client.connected:
            raise self._silent(path)

    def ask(self, path: str, begin: Callable[[str], Any], deadline: float) -> Any:
        """Return the result of one operation.

        Raises _AnswerLost, and ZooKeeper's own errors for rejected operations.
        """
        self._wait_free(deadline, path)
        answer = begin(self._address.root + path or "/")
        try:
            return answer.get(timeout=max(0.0, deadline - time.monotonic()))
        except _ANSWER_LOST as problem:
            time.sleep(_PAUSE_SECONDS)
            raise _AnswerLost from problem
        except KazooTimeoutError as problem:
            self._owed = answer
            raise self._silent(path) from problem
        except _NOT_ALLOWED as problem:
            raise AuthenticationFailed(
                f"{self._address.url} does not let us at the node {self._address.root + path}",
                hint="Name the account that made it: zookeeper://user:password@hosts/root",
            ) from problem

    def _wait_free(self, deadline: float, path: str) -> None:
        """Wait until the connection is up and has no outstanding response.

        Each request postpones the next ping, but a dead connection is detected only by an unanswered ping.
        """
        owed = self._owed
        if owed is not None:
            owed.wait(max(0.0, deadline - time.monotonic()))
            if not owed.ready():
                raise self._silent(path)
            self._owed = None
        self.wait_connected(deadline, path)

    def _silent(self, path: str | None) -> CoordinationLost:
        return CoordinationLost(
            f"{self._address.url} did not answer within {self._seconds:g} s",
            position=path,
            hint="Look whether the ensemble runs and has a majority",
        )

    def read(self, path: str, begin: Callable[[str], Any], deadline: float) -> Any:
        """Run an operation that is safe to repeat, and return its result."""
        while True:
            try:
                return self.ask(path, begin, deadline)
            except _AnswerLost:
                continue

    def fetch(self, path: str, deadline: float) -> tuple[bytes, Any] | None:
        """Return a node's content and stat; None if the node is missing."""
        try:
            node: tuple[bytes, Any] = self.read(path, self.client.get_async, deadline)
        except refusals.NoNodeError:
            return None
        return node

    def make_way(self, path: str, deadline: float) -> None:
        """Create the empty parent nodes of a path."""
        names = (self._address.root + path).strip("/").split("/")[:-1]
        for count in range(1, len(names) + 1):
            node = "/" + "/".join(names[:count])
            try:
                self.read(path, partial(self._create_empty, node), deadline)
            except refusals.NodeExistsError:
                continue

    def _create_empty(self, node: str, _: str) -> Any:
        return self.client.create_async(node, b"")

    def close(self) -> None:
        """Close the connection, and its session if the ensemble is reachable. Does not wait for the close."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        try:
            self.client.stop()
            self.client.close()
        except refusals.WriterNotClosedException as problem:
            _log.warning("a connection does not end", store=self._address.url, error=str(problem))


class ZooKeeperStore:
    """A coordination store below one node of a ZooKeeper ensemble."""

    def __init__(self, address: EnsembleAddress, seconds: float) -> None:
        self._address = address
        self._seconds = seconds
        self._lock = threading.Lock()
        self._closed = False
        self._sessions: list[ZooKeeperSession] = []
        self._connection = _Connection(address, _CONNECTION_SECONDS, seconds)
        self._watches = OneTimeWatches(self._set_once)
        self._connection.client.add_listener(self._on_state)

    @property
    def url(self) -> str:
        """The store's URL, without a password."""
        return self._address.url

    def get(self, path: str, *, latest: bool = False) -> Record | None:
        """Return the record at a path as the connected server has it; with `latest`, as the leader has it."""
        deadline = self._deadline(checked_path(path))
        if latest:
            # A follower that is cut off from its leader answers reads with stale data, but it does not answer
            # a sync.
            self._connection.read(path, self._connection.client.sync_async, deadline)
        node = self._connection.fetch(path, deadline)
        return None if node is None else record_of(*node)

    def put(self, path: str, value: bytes, version: int | None = None) -> int:
        """Write a record and return its version."""
        if len(value) > COORDINATION_RECORD_BYTES_MAX:
            raise LimitExceeded(f"a record of {len(value)} bytes is too large", position=path)
        deadline = self._deadline(checked_path(path))
        content, nonce = sealed(value)
        asked = False
        while True:
            expected = version
            if asked or version is None or version == ABSENT:
                node = self._connection.fetch(path, deadline)
                if asked and node is not None and node[0].endswith(nonce):
                    return int(node[1].version)
                expected = expected_version(path, node, version)
            assert expected is not None
            try:
                return self._write(path, content, expected, deadline)
            except _AnswerLost:
                asked = True
            except (refusals.BadVersionError, refusals.NoNodeError, refusals.NodeExistsError) as problem:
                if version is not None and not asked:
                    raise VersionConflict("the record was changed concurrently", position=path) from problem
                # This client's own write may have arrived late, and a write without an expected version
                # overwrites concurrent changes. Read the record again to find out.
                asked = True

    def delete(self, path: str, version: int | None = None) -> None:
        """Delete a record, and the empty nodes that were only its parents."""
        deadline = self._deadline(checked_path(path))
        asked = False
        while True:
            node = self._connection.fetch(path, deadline)
            record = None if node is None else record_of(*node)
            if record is None or node is None:
                if version is not None and not asked:
                    raise VersionConflict("there is no record", position=path)
                break
            if version is not None and record.version != version:
                raise VersionConflict(
                    f"the record has version {record.version}, not {version}", position=path
                )
            try:
                self._remove(path, record.version, deadline)
                break
            except _AnswerLost:
                asked = True
            except (refusals.BadVersionError, refusals.NoNodeError):
                continue
        self._prune(path, deadline)

    def list(self, path: str) -> Sequence[str]:
        """Return the names below a path."""
        deadline = self._deadline(below_of(path))
        top = path.rstrip("/")
        try:
            names = self._connection.read(top, self._connection.client.get_children_async, deadline)
        except refusals.NoNodeError:
            return ()
        # The root of an ensemble always exists.
        return tuple(sorted(name for name in names if top or self._address.root or name != "zookeeper"))

    def read_below(self, path: str, wanted: Callable[[str], bool]) -> Mapping[str, Record | None]:
        """Return the records below a path; each request reads many of them."""
        deadline = self._deadline(below_of(path))
        client, root = self._connection.client, self._address.root

        def ask(paths: Sequence[str], *, children: bool) -> list[Any]:
            request = ReadMany([root + path for path in paths], children=children)
            try:
                answers: list[Any] = self._connection.read(paths[0], partial(client.ask, request), deadline)
            except refusals.UnimplementedError:
                # ZooKeeper before 3.6 cannot read many nodes in one request.
                answers = [None] * len(paths)
            return answers

        first = [f"{path.rstrip('/')}/{name}" for name in self.list(path)]
        return read_below(first, wanted, ask, partial(self._connection.fetch, deadline=deadline), self.list)

    def watch(self, path: str, changed: Callable[[], None]) -> PersistentWatch:
        """Call `changed` after every change at a path or below it."""
        self._deadline(below_of(path))
        return self._watches.add(path.rstrip("/"), changed)

    def session(self, seconds: float = SESSION_SECONDS) -> "ZooKeeperSession":
        """Start a session on its own connection; the ensemble may adjust `seconds`."""
        self._deadline("/")
        session = ZooKeeperSession(self._address, seconds, self._seconds)
        with self._lock:
            self._sessions.append(session)
        return session

    def close(self) -> None:
        """End every session and watch of this store object."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        for session in self._sessions:
            session.close()
        self._watches.close(self._seconds)
        self._connection.close()

    # --- Inside -----------------------------------------------------------------------------

    def _on_state(self, state: str) -> None:
        """Set watches again after a lost connection, which removes all watches."""
        if state == KazooState.CONNECTED:
            self._watches.all_gone()

    def _set_once(self, path: str, absent: bool, fired: Callable[[str], None]) -> Sequence[str] | None:
        """Set ZooKeeper's watches of a node and return the names below it; see OneTimeWatches."""
        client = self._connection.client
        deadline = time.monotonic() + self._seconds
        callback = WatchCallback(self._address.root, fired)
        look = client.exists_async if absent else client.get_async
        try:
            if self._connection.read(path, partial(look, watch=callback), deadline) is None:
                return None
            names: Sequence[str] = self._connection.read(
                path, partial(client.get_children_async, watch=callback), deadline
            )
        except refusals.NoNodeError:
            return None
        return names

    def _deadline(self, path: str) -> float:
        if self._closed:
            raise CoordinationLost(f"the store {self.url} is closed", position=path)
        return time.monotonic() + self._seconds

    def _write(self, path: str, content: bytes, version: int, deadline: float) -> int:
        client = self._connection.client
        if version != ABSENT:
            stat = self._connection.ask(
                path, partial(client.set_async, value=content, version=version), deadline
            )
            return int(stat.version)
        try:
            self._connection.ask(path, partial(client.create_async, value=content), deadline)
        except refusals.NoNodeError:
            self._connection.make_way(path, deadline)
            return self._write(path, content, version, deadline)
        return 0

    def _remove(self, path: str, version: int, deadline: float) -> None:
        client = self._connection.client
        try:
            self._connection.ask(path, partial(client.delete_async, version=version), deadline)
        except refusals.NotEmptyError:
            # The node still has children, so keep it as their parent with an empty value.
            self._connection.ask(path, partial(client.set_async, value=b"", version=version), deadline)

    def _prune(self, path: str, deadline: float) -> None:
        """Delete the empty nodes above a path; they are recreated when needed."""
        client = self._connection.client
        above = path.rpartition("/")[0]
        while above:
            node = self._connection.fetch(above, deadline)
            if node is None or node[0] or node[1].numChildren:
                return
            version = node[1].version
            try:
                self._connection.read(above, partial(client.delete_async, version=version), deadline)
            except (refusals.NotEmptyError, refusals.BadVersionError, refusals.NoNodeError):
                return
            above = above.rpartition("/")[0]


class ZooKeeperSession(EndingSession):
    """A session of the ensemble, on its own connection."""

    def __init__(self, address: EnsembleAddress, seconds: float, operation_seconds: float) -> None:
        super().__init__(seconds)
        self._address = address
        self._operation_seconds = operation_seconds
        begun = time.monotonic()
        self._connection = _Connection(address, seconds, operation_seconds)
        client = self._connection.client
        # The ensemble may grant a longer timeout than requested. Use the shorter of the two.
        self._seconds = min(seconds, client.session_seconds)
        # Count the time from before the request, so that it ends no later than the ensemble's own session
        # timeout.
        self._certain_until = begun + self._seconds
        client.add_listener(self._on_state)
        number = client.client_id
        if number is None:
            self._connection.close()
            raise CoordinationLost(f"{address.url} was lost as soon as it was reached")
        self._number: int = number[0]
        self._password: bytes = number[1]
        threading.Thread(target=self._run, name=f"session-{self._number:x}", daemon=True).start()

    @property
    def key(self) -> str:
        """The session's number and password."""
        return f"{self._number}:{self._password.hex()}"

    @property
    def certain_until(self) -> float:
        """When the last confirmation expires; -inf while the connection is down."""
        return self._certain_until if self.alive and self._connection.client.connected else float("-inf")

    def put_ephemeral(self, path: str, value: bytes, *, plain: bool = False) -> int:
        """Create an ephemeral record."""
        deadline = time.monotonic() + self._operation_seconds
        client = self._connection.client
        content = value if plain else sealed(value)[0]
        checked_path(path)
        while True:
            self._refuse_ended(path)
            try:
                _, stat = self._connection.ask(
                    path,
                    partial(client.create_async, value=content, ephemeral=True, include_data=True),
                    deadline,
                )
                return int(stat.czxid)
            except _AnswerLost:
                continue
            except refusals.NoNodeError:
                self._connection.make_way(path, deadline)
            except refusals.NodeExistsError as problem:
                node = self._connection.fetch(path, deadline)
                if node is not None and node[1].ephemeralOwner == self._number:
                    return int(node[1].czxid)
                if node is not None:
                    raise VersionConflict("another process's record exists there", position=path) from problem

    def remove(self, path: str) -> None:
        """Delete the session's own record at a path."""
        deadline = time.monotonic() + self._operation_seconds
        client = self._connection.client
        checked_path(path)
        while True:
            self._refuse_ended(path)
            node = self._connection.fetch(path, deadline)
            if node is None or node[1].ephemeralOwner != self._number:
                return
            version = node[1].version
            try:
                self._connection.ask(path, partial(client.delete_async, version=version), deadline)
                return
            except (_AnswerLost, refusals.NoNodeError, refusals.BadVersionError):
                continue

    def close(self) -> None:
        """End the session."""
        if self.end(lost=False):
            self._connection.close()

    # --- Inside -----------------------------------------------------------------------------

    def _refuse_ended(self, path: str) -> None:
        if not self.alive:
            raise CoordinationLost("the session has ended", position=path)

    def _run(self) -> None:
        """Send heartbeats; end the session if no heartbeat is answered for the session time."""
        client = self._connection.client
        pause = self._seconds / _SIGNS_OF_LIFE
        while not self._ended.wait(pause):
            begun = time.monotonic()
            try:
                self._connection.ask("", client.exists_async, begun + pause)
                self._certain_until = begun + self._seconds
            except (_AnswerLost, PenstockError):
                if begun > self._certain_until:
                    self._lose()

    def _on_state(self, state: str) -> None:
        """Track the connection. Runs in the client's thread, which must not wait for itself."""
        if self.alive:
            _log.info("the connection of a session", store=self._address.url, state=state.lower())
        if state == KazooState.LOST:
            self._lose()

    def _lose(self) -> None:
        if self.end(lost=True):
            _log.warning("a session was lost", store=self._address.url)
            threading.Thread(target=self._connection.close, name="end-session", daemon=True).start()
