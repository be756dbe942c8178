# SPDX-License-Identifier: Apache-2.0
"""Which Pumps are in the merge, according to the registry, and this drainer's own entry there.

A Pump becomes a member when it is registered. It stays a member until it is offline and everything that it
released is durable in the log. Pumps that are paused, that do not answer, or whose entries are gone or
unreadable stay members: they may hold transactions that no other Pump has.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from penstock.errors import PenstockError
from penstock.tidb.known_pumps import KnownPumps
from penstock.tidb.pulling import MergeQueue, PumpReader
from penstock.tidb.registry import Listing, Node, NodeKind, NodeState, Registry

_log = structlog.get_logger(__name__)

HEARTBEAT_SECONDS = 1.0
LISTING_SECONDS = 5.0
# A Pump that sends nothing for this long counts as silent. While it is idle, it sends a fake binlog every
# three seconds.
_SILENT_SECONDS_MAX = 15.0


class PumpMembers:
    """Adds and removes readers of a merge as Pumps join and leave the registry. Thread-safe."""

    def __init__(
        self,
        registry: Registry,
        queue: MergeQueue,
        known: KnownPumps,
        open_reader: Callable[[str, str], PumpReader],
        durable_ts: Callable[[], int],
    ) -> None:
        """`open_reader` returns a reader for a Pump's id and its address.

        `durable_ts` returns the commit timestamp up to which everything is durable in the log.
        """
        self._registry = registry
        self._queue = queue
        self._known = known
        self._open_reader = open_reader
        self._durable_ts = durable_ts
        self._lock = threading.Lock()
        self._readers: dict[str, PumpReader] = {}
        self._listing = Listing({}, {})
        # Pumps registered as offline, with the commit timestamp up to which the log has everything from them.
        self._left: dict[str, int] = {}
        # The merge's position at the time of the last listing.
        self._listed_at: int | None = None
        self._closed = False

    def refresh(self) -> None:
        """List the registry; read new Pumps, and drop those that went offline.

        A Pump requests a refresh before it accepts its first transaction. Raises ConnectionLost,
        AccessDenied, DiskFailed, LogFull.
        """
        with self._lock:
            if self._closed:
                return
            position = self._queue.position()
            listing = self._registry.list(NodeKind.PUMP)
            # A Pump that was not registered at the last listing may have started right after it, so it joins
            # at the position of that listing.
            joined_at = position if self._listed_at is None else self._listed_at
            self._report_changes(listing)
            self._leave_discarded(listing)
            # All new Pumps join before the first of them is read. Otherwise the first Pump would advance the
            # merge past the transactions of the others.
            members = [node for node in listing.nodes.values() if self._is_member(node, joined_at)]
            for pump in {*self._known.pumps, *listing.unreadable} - listing.nodes.keys():
                # A Pump without an address cannot be read, so it holds back the merge.
                self._join(pump, joined_at)
            for node in members:
                self._read(node)
            for pump in self._known.pumps:
                if self._known.is_behind(pump) and (self._queue.reached(pump) or 0) >= position:
                    self._known.put(pump, None)
            self._listing = listing
            self._listed_at = position
            self._queue.forget_before(position)

    def _is_member(self, node: Node, joined_at: int) -> bool:
        """Add a Pump to the merge, or drop it if it is offline. Return whether to read it."""
        pump = node.node_id
        if node.state is NodeState.OFFLINE:
            reached = self._queue.reached(pump)
            if reached is None:
                reached = self._left.get(pump, joined_at)
            if node.max_commit_ts <= reached:
                # Until the Pump's last transactions are durable, a restart has to read them again.
                if reached <= self._durable_ts():
                    self._leave(pump, reached)
                return False
        self._left.pop(pump, None)
        self._join(pump, joined_at)
        return True

    def _read(self, node: Node) -> None:
        """Read a member at its current address."""
        pump = node.node_id
        reader = self._readers.get(pump)
        if reader is not None and reader.address != node.host:
            reader.stop()
            reader = None
        if reader is None:
            after = self._queue.reached(pump)
            _log.info("a pump is read", pump=pump, address=node.host, state=str(node.state), after=after)
            reader = self._readers[pump] = self._open_reader(pump, node.host)
            reader.start()

    def _join(self, pump: str, joined_at: int) -> None:
        """Add a Pump to the merge if it is not in it. Raises DiskFailed, LogFull."""
        if self._queue.reached(pump) is None:
            position = self._queue.position()
            after = self._known.after(pump, position) if pump in self._known.pumps else joined_at
            # After a restart before the Pump has caught up, reading begins at this timestamp again.
            self._known.put(pump, after if after < position else None)
            self._queue.join(pump, after)

    def _leave(self, pump: str, reached: int) -> None:
        if self._queue.reached(pump) is not None:
            _log.info("a pump left", pump=pump, at=reached)
        self._left[pump] = reached
        self._queue.leave(pump)
        self._known.remove(pump)
        reader = self._readers.pop(pump, None)
        if reader is not None:
            reader.stop()

    def _leave_discarded(self, listing: Listing) -> None:
        """Continue without Pumps whose files an operator deleted, unless they may still be in the cluster."""
        for pump in self._known.take_discarded():
            node = listing.nodes.get(pump)
            if pump in listing.unreadable or (node is not None and node.state is not NodeState.OFFLINE):
                self._known.put(pump, None)
                continue
            reached = self._queue.reached(pump) or 0
            _log.warning("an operator gave up what a pump still has", pump=pump, after=reached)
            self._leave(pump, max(reached, node.max_commit_ts if node is not None else 0))

    def _report_changes(self, listing: Listing) -> None:
        """Log the entries that became missing or unreadable since the last listing."""
        before = self._listing
        for pump in listing.unreadable.keys() - before.unreadable.keys():
            _log.error("a registered pump cannot be read", pump=pump, why=listing.unreadable[pump])
        for pump in before.nodes.keys() - listing.nodes.keys() - listing.unreadable.keys():
            if pump in self._known.pumps:
                at = self._queue.reached(pump)
                _log.warning("a pump was deleted from the registry", pump=pump, at=at)

    # --- The status -------------------------------------------------------------------------

    def stalled_by(self) -> list[str]:
        """Return a text for each Pump that the merge waits for."""
        holding_back = self._queue.holding_back()
        texts = []
        for pump, reached in self._queue.positions().items():
            why = self._why_stalled(pump)
            if why is None and pump in holding_back:
                why = "it has sent nothing later"
            if why is not None:
                node = self._listing.nodes.get(pump)
                state = "not registered" if node is None else str(node.state)
                texts.append(f"the Pump {pump} ({state}) at {reached}: {why}")
        return texts

    def are_sending(self) -> bool:
        """Return whether there is at least one Pump, and all Pumps are connected and sending."""
        silences = [
            reader.silent_seconds() if (reader := self._readers.get(pump)) is not None else None
            for pump in self._queue.positions()
        ]
        return bool(silences) and all(
            silence is not None and silence < _SILENT_SECONDS_MAX for silence in silences
        )

    def _why_stalled(self, pump: str) -> str | None:
        """Return why a Pump sends nothing; None if it is sending, or has not connected yet."""
        reader, node = self._readers.get(pump), self._listing.nodes.get(pump)
        silent_seconds = None if reader is None else reader.silent_seconds()
        if silent_seconds is not None and silent_seconds < _SILENT_SECONDS_MAX:
            return None
        problem = None if reader is None else reader.problem
        if silent_seconds is not None:
            problem = f"it has sent nothing for {silent_seconds:.0f} s"
        give_up = f"delete {self._known.path(pump)} to go on without what it still has"
        if pump in self._listing.unreadable:
            return self._listing.unreadable[pump]
        if node is None:
            return f"{problem or 'its entry in the registry is gone'}; start it, or {give_up}"
        if node.state is NodeState.OFFLINE and problem is not None:
            return f"{problem}; it released transactions up to {node.max_commit_ts}: start it, or {give_up}"
        return problem

    def close(self) -> None:
        """Stop all readers and wait for their threads."""
        with self._lock:
            self._closed = True
            readers = list(self._readers.values())
        for reader in readers:
            reader.stop()
        for reader in readers:
            reader.join()


@dataclass(frozen=True)
class DrainerProgress:
    """The drainer's progress as the registry shows it: everything up to `commit_ts` is durable in the log."""

    commit_ts: int
    update_ts: int


class Registration:
    """Updates this drainer's entry in the registry and lists the Pumps, at regular intervals in a thread."""

    def __init__(
        self,
        registry: Registry,
        members: PumpMembers,
        node: Node,
        progress: Callable[[], DrainerProgress],
        fail: Callable[[Exception], None],
    ) -> None:
        """`fail` ends the merge with an unexpected error."""
        self._registry = registry
        self._members = members
        self._node = node
        self._fail = fail
        self._progress = progress
        # Why the registry cannot be used now.
        self.problem: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drainer-registration", daemon=True)

    def start(self) -> None:
        """Register as online, read the Pumps that are registered, and keep the registration and the list of
        Pumps up to date.

        Raises ConnectionLost, AccessDenied, VersionConflict.
        """
        # A Pump that starts after this registration announces itself, and a Pump that started earlier is in
        # the listing.
        self._put(NodeState.ONLINE)
        self._members.refresh()
        self._thread.start()

    def end(self, state: NodeState) -> None:
        """Register a final state, for example paused. If the registry does not answer, nothing is changed."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self._put(state)
        except PenstockError as problem:
            _log.warning("the drainer stays registered as it was", why=problem.message)

    def _put(self, state: NodeState) -> None:
        progress = self._progress()
        node = replace(self._node, max_commit_ts=progress.commit_ts, update_ts=progress.update_ts)
        self._registry.put(NodeKind.DRAINER, node.with_state(state))

    def _run(self) -> None:
        beats = 0
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            beats += 1
            try:
                self._put(NodeState.ONLINE)
                if beats * HEARTBEAT_SECONDS >= LISTING_SECONDS:
                    beats = 0
                    self._members.refresh()
                self.problem = None
            except PenstockError as problem:
                # Pumps are still read. A Pump that joins at this time cannot become online without this
                # drainer.
                _log.warning("the registry cannot be used", why=problem.message)
                self.problem = problem.message
            except Exception as defect:
                # The end of the thread prints the traceback.
                self.problem = repr(defect)
                self._fail(defect)
                raise
