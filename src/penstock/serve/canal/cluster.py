# SPDX-License-Identifier: Apache-2.0
"""Canal's own layout in ZooKeeper, by which its cluster clients find the daemon that serves a destination.

    /otter/canal/cluster/<address>                              a daemon
    /otter/canal/destinations/<destination>/cluster/<address>   a daemon that can serve the destination
    /otter/canal/destinations/<destination>/running             the daemon that serves it, as JSON

`CanalConnectors.newClusterConnector(zkServers, destination, ...)` connects to the address of `running` and
follows its changes. All three are ephemeral, so they disappear with the daemon. Penstock reads none of them:
Penstock's own leases decide which daemon captures, and these nodes only publish the result.
"""

import json
import threading
import time
from collections.abc import Callable, Collection

import structlog

from penstock.coordinate.store import CoordinationStore, Session, path_of
from penstock.errors import PenstockError, VersionConflict

_TOP = path_of("otter", "canal")
_LOOK_SECONDS = 0.5
# How long nodes that another client has deleted may be missing.
_SHOW_AGAIN_SECONDS = 30.0

_log = structlog.get_logger(__name__)


def running_path(destination: str) -> str:
    """Return the path of the node that names the daemon of a destination."""
    return _TOP + path_of("destinations", destination, "running")


def running_value(address: str) -> bytes:
    """Return the content of the node that names the daemon of a destination."""
    return json.dumps({"active": True, "address": address}).encode()


class CanalCluster:
    """Publishes this daemon in the layout that Canal clients look up. `start` and `stop` must be called from
    one thread.

    `address` is the host:port of its listener for Canal clients. `is_here` returns whether this daemon
    currently serves a destination. While the ensemble is unavailable, clients keep the addresses that they
    know. `joined` is called with each new session.
    """

    def __init__(
        self,
        open_store: Callable[[], CoordinationStore],
        address: str,
        destinations: Collection[str],
        is_here: Callable[[str], bool],
        session_seconds: float,
        show_again_seconds: float = _SHOW_AGAIN_SECONDS,
        joined: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self._open_store = open_store
        self._address = address
        self._destinations = sorted(destinations)
        self._is_here = is_here
        self._session_seconds = session_seconds
        self._show_again_seconds = show_again_seconds
        self._note_session = joined
        self._shown_at = time.monotonic()
        # A flag that makes the next check show all nodes.
        self._wants_all = False
        # The nodes that list this daemon as able to serve a destination.
        self._member_paths: set[str] = set()
        self._store: CoordinationStore | None = None
        self._session: Session | None = None
        self._shown: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canal-cluster", daemon=True)

    def change(self, destinations: Collection[str]) -> None:
        """Show the given destinations from now on."""
        self._destinations = sorted(destinations)
        self._wants_all = True

    def start(self) -> None:
        """Start to show which destinations this daemon serves."""
        self._thread.start()

    def stop(self) -> None:
        """Remove this daemon from the layout."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._show()
                except PenstockError as problem:
                    _log.warning("Canal's layout in ZooKeeper is not up to date", why=str(problem))
                self._stopping.wait(_LOOK_SECONDS)
        finally:
            if self._session is not None:
                self._session.close()
            if self._store is not None:
                self._store.close()

    def _show(self) -> None:
        """Update the nodes to match the destinations that this daemon serves. Raises CoordinationLost."""
        session = self._joined()
        is_due = self._wants_all or time.monotonic() >= self._shown_at + self._show_again_seconds
        if is_due:
            self._wants_all = False
            # Keep the nodes of the current ZooKeeper session, but recreate nodes that were deleted by hand.
            self._show_member(session)
        for destination in (*self._destinations, *(self._shown - set(self._destinations))):
            path = running_path(destination)
            is_here = self._is_here(destination)
            is_new = destination not in self._shown
            if is_here and (is_new or is_due):
                try:
                    session.put_ephemeral(path, running_value(self._address), plain=True)
                except VersionConflict:
                    # The daemon that served the destination before has not removed its node, or its session
                    # has not ended.
                    continue
                self._shown.add(destination)
                if is_new:
                    _log.info("Canal's cluster clients are sent here", destination=destination)
            elif not is_here and not is_new:
                session.remove(path)
                self._shown.discard(destination)
        if is_due:
            self._shown_at = time.monotonic()

    def _joined(self) -> Session:
        """Return the session, in which this daemon is listed as able to serve. Raises CoordinationLost."""
        if self._session is not None and self._session.alive:
            return self._session
        self._shown.clear()
        self._store = self._store or self._open_store()
        session = self._store.session(self._session_seconds)
        self._note_session(session)
        try:
            self._show_member(session)
        except PenstockError:
            session.close()
            raise
        self._session = session
        return session

    def _show_member(self, session: Session) -> None:
        """List this daemon as able to serve the destinations."""
        tops = (_TOP, *(_TOP + path_of("destinations", name) for name in self._destinations))
        # Clients use the address without decoding it, so it is not encoded.
        paths = {f"{top}/cluster/{self._address}" for top in tops}
        for path in sorted(paths):
            session.put_ephemeral(path, b"", plain=True)
        for path in self._member_paths - paths:
            session.remove(path)
        self._member_paths = paths
