# SPDX-License-Identifier: Apache-2.0
"""Which Pumps are in the merge, according to the registry, and this drainer's own entry there.

A Pump is a member from when it is registered until it is offline and everything that it released was read. A
paused Pump, or one that does not answer, stays a member: it may hold transactions that nobody else has.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from penstock.errors import PenstockError
from penstock.tidb.pulling import MergeQueue, PumpReader
from penstock.tidb.registry import Node, NodeKind, NodeState, Registry

_log = structlog.get_logger(__name__)

HEARTBEAT_SECONDS = 1.0
LISTING_SECONDS = 5.0


class PumpMembers:
    """Keeps the readers of a merge in line with the registry. Thread-safe."""

    def __init__(
        self,
        registry: Registry,
        queue: MergeQueue,
        open_reader: Callable[[str, str], PumpReader],
    ) -> None:
        """`open_reader` returns a reader for a Pump's id and its address."""
        self._registry = registry
        self._queue = queue
        self._open_reader = open_reader
        self._lock = threading.Lock()
        self._readers: dict[str, PumpReader] = {}
        self._nodes: Mapping[str, Node] = {}
        # Pumps that went offline, with the commit timestamp up to which everything of them was read.
        self._left: dict[str, int] = {}
        # The merge's position when the registry was listed last.
        self._listed_at: int | None = None
        self._closed = False

    def refresh(self) -> None:
        """List the registry; read new Pumps, and leave those that went offline.

        A Pump calls for this before it accepts its first transaction. Raises ConnectionLost, AccessDenied.
        """
        with self._lock:
            if self._closed:
                return
            position = self._queue.position()
            nodes = self._registry.nodes(NodeKind.PUMP)
            # A Pump that was not registered at the last listing may have begun right after it.
            joined_at = position if self._listed_at is None else self._listed_at
            for node in nodes.values():
                self._update(node, joined_at)
            for pump in self._readers.keys() - nodes.keys():
                _log.warning("a pump was deleted from the registry", pump=pump, at=self._queue.reached(pump))
                self._leave(pump)
            self._nodes = nodes
            self._listed_at = position
            self._queue.forget_before(position)

    def _update(self, node: Node, joined_at: int) -> None:
        reader = self._readers.get(node.node_id)
        if node.state is NodeState.OFFLINE:
            reached = self._queue.reached(node.node_id)
            if reached is None:
                reached = self._left.get(node.node_id, joined_at)
            if node.max_commit_ts <= reached:
                if reader is not None:
                    _log.info("a pump left", pump=node.node_id, at=reached)
                    self._left[node.node_id] = reached
                    self._leave(node.node_id)
                return
        if reader is not None and reader.address != node.host:
            reader.stop()
            reader = None
        if reader is None:
            after = self._queue.join(node.node_id, joined_at)
            _log.info(
                "a pump joins", pump=node.node_id, address=node.host, state=str(node.state), after=after
            )
            reader = self._readers[node.node_id] = self._open_reader(node.node_id, node.host)
            reader.start()

    def _leave(self, pump: str) -> None:
        self._queue.leave(pump)
        self._readers.pop(pump).stop()

    def stalled_by(self) -> list[str]:
        """Return a text for each Pump that transactions of others wait for now."""
        texts = []
        for pump in self._queue.holding_back():
            reader, node = self._readers.get(pump), self._nodes.get(pump)
            why = "it has sent nothing later"
            if reader is not None and reader.problem is not None:
                why = reader.problem
            state = "unknown" if node is None else str(node.state)
            texts.append(f"the Pump {pump} ({state}) at {self._queue.reached(pump)}: {why}")
        return texts

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
    """What the registry shows of this drainer: everything up to `commit_ts` is durable in the log."""

    commit_ts: int
    update_ts: int


class Registration:
    """This drainer's entry in the registry, and the listing of Pumps, at regular intervals in a thread."""

    def __init__(
        self,
        registry: Registry,
        members: PumpMembers,
        node: Node,
        progress: Callable[[], DrainerProgress],
    ) -> None:
        self._registry = registry
        self._members = members
        self._node = node
        self._progress = progress
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drainer-registration", daemon=True)

    def start(self) -> None:
        """Register as online, read the Pumps that are registered, and keep both up to date.

        Raises ConnectionLost, AccessDenied, VersionConflict.
        """
        # A Pump that starts after this announces itself, and one that started before is in the listing.
        self._put(NodeState.ONLINE)
        self._members.refresh()
        self._thread.start()

    def end(self, state: NodeState) -> None:
        """Register a last state, for example paused. A registry that does not answer is left as it is."""
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
            except PenstockError as problem:
                # Pumps are read on. One that joins meanwhile cannot become online without this drainer.
                _log.warning("the registry cannot be reached", why=problem.message)
