# SPDX-License-Identifier: Apache-2.0
"""A Pump of a TiDB cluster: its port, its store, its place in the registry, and its states.

    paused ─▶ (every online Drainer knows it) ─▶ online ─▶ pausing ─▶ paused
                                                 └─▶ closing ─▶ (every Drainer has everything) ─▶ offline

Only an online Pump accepts prewrites; outcomes are always accepted. The state is changed by binlogctl, over
HTTP or in the registry. When the process ends, the Pump is paused.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import structlog

from penstock.errors import (
    ConnectionLost,
    LogLocked,
    OptionInvalid,
    PenstockError,
    PositionPurged,
    ServerBusy,
    TransientError,
)
from penstock.limits import PUMP_STOP_SECONDS_MAX, PUMP_SWITCH_SECONDS_MAX
from penstock.logstore.disk import LocalDisk
from penstock.logstore.holds import OWN_PREFIX, Hold, Holds
from penstock.logstore.layout import Layout
from penstock.logstore.upkeep import Upkeep
from penstock.retry import Retry
from penstock.settings.daemon import LogSettings
from penstock.settings.listen import split_host_port
from penstock.settings.tidb_pump import PumpSettings
from penstock.tidb.channels import ClusterTls, call, open_channel
from penstock.tidb.cluster import Cluster
from penstock.tidb.deciding import Deciding
from penstock.tidb.decisions import Decisions
from penstock.tidb.group_commit import GroupCommit, resolved
from penstock.tidb.messages import NOTIFY
from penstock.tidb.node_port import NodePort, PortTls, bind_port
from penstock.tidb.pump_service import PumpService
from penstock.tidb.pump_store import PumpStore, StoreCounts
from penstock.tidb.registry import Node, NodeKind, NodeState, Registry
from penstock.tidb.release_index import Location
from penstock.tidb.resolver import Resolver

_log = structlog.get_logger(__name__)

_TICK_SECONDS = 0.5
_HEARTBEAT_SECONDS = 2.0
# A Pump that stores nothing for this long adds a timestamp of the cluster, so that Drainers can advance.
_FAKE_SECONDS = 3.0
_HOLD_SECONDS = 10.0
_NOTIFY_SECONDS = 10.0
_NOTIFY_TRIES = 3
_STORE_CALL_SECONDS = 30.0

_HOLD = f"{OWN_PREFIX}pump"

# The backlog and the writes per second that count as full load in the score.
_FULL_BACKLOG = 10_000
_FULL_RATE = 10_000


class Pump:
    """One Pump. `start` returns at once; everything else happens in threads until `stop` and `join`."""

    def __init__(
        self,
        instance: str,
        members: Sequence[str],
        settings: PumpSettings,
        log_settings: LogSettings,
        tls: ClusterTls | None = None,
        allowed_names: tuple[str, ...] = (),
    ) -> None:
        """Bind the port, so that a conflict is reported at once. Raises OptionInvalid, TlsFailed.

        `log_settings.folder` is the Pump's own folder.
        """
        if log_settings.mode == "memory":
            raise OptionInvalid(
                "a Pump acknowledges what is on the disk, so its log cannot be in memory",
                hint="Set log.mode to mixed or file",
            )
        self.instance = instance
        self._members = members
        self._settings = settings
        self._log_settings = log_settings
        self._tls = tls
        self._counts = StoreCounts()
        bound = bind_port(*split_host_port(settings.listen))
        host, port = bound.getsockname()[:2]
        self.address = settings.advertise or f"{f'[{host}]' if ':' in host else host}:{port}"
        self.node_id = settings.node_id or self.address
        port_tls = PortTls(tls, allowed_names) if tls is not None else None
        self._service: PumpService | None = None
        self._port = NodePort(
            f"pump-{instance}",
            bound,
            self._make_service,
            self._answer,
            port_tls,
            end_service=self._end_service,
            unix_path=settings.socket,
        )
        self._cluster = Cluster(members, tls)
        # This connection is separate, because looking up transactions may wait for TiKV and must not delay
        # the heartbeat.
        self._resolving_cluster = Cluster(members, tls)
        self._registry = Registry(self._cluster)
        self._decisions = Decisions(LocalDisk(), log_settings.folder)
        self._upkeep = Upkeep(LocalDisk(), Layout(log_settings.folder), log_settings)
        self._cluster_id = 0
        self._commit: GroupCommit | None = None
        self._deciding: Deciding | None = None
        self._state = self._registered_state = NodeState.PAUSED
        # The state that was requested over HTTP, in the registry, or by the end of the process.
        self._wanted: NodeState | None = None
        # Used while the Pump closes: the timestamp that every Drainer has to reach (None while transactions
        # are open), and a description of what the Pump is waiting for.
        self._last_ts: int | None = None
        self._closing: str | None = None
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._problem: str | None = None
        self._rate = 0.0
        self._thread = threading.Thread(target=self._run, name=f"pump-{instance}", daemon=True)

    # --- Called by other threads ------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve. The status and the log show what the Pump waits for."""
        sys.setswitchinterval(min(sys.getswitchinterval(), PUMP_SWITCH_SECONDS_MAX))
        self._thread.start()

    def stop(self) -> None:
        """Pause the Pump and end it. `join` waits for the end."""
        self._stopping.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait for the Pump to end; return whether it ended in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def state(self) -> NodeState:
        """The state, as registered."""
        return self._state

    def run_upkeep(self) -> None:
        """Trim, compress and tier the log, in one small step. Propagates errors from `Upkeep.run`."""
        store = self._open_store()
        if store is not None:
            self._upkeep.run(store.log.log)
            store.index.trim(store.log.earliest)

    def status(self) -> dict[str, Any]:
        """Return the Pump's state as a JSON object."""
        counts = self._counts
        values: dict[str, Any] = {
            "node_id": self.node_id,
            "address": self.address,
            "state": str(self._state),
            "problem": self._problem,
            "cluster_id": self._cluster_id,
            "stored": counts.stored,
            "stored_bytes": counts.bytes,
            "repeated": counts.repeated,
            "released": counts.released,
            "refused": dict(counts.refused),
            "writes_per_second": round(self._rate, 1),
        }
        store, deciding = self._open_store(), self._deciding
        if store is not None and deciding is not None:
            values |= {
                "released_ts": store.released_ts,
                "open": store.matching.open_count,
                "waiting": store.matching.waiting_count,
                "late": store.matching.late,
                "decisions": {str(start_ts): why for start_ts, why in deciding.decision_states.items()},
            }
            stalled = deciding.resolver.stalled_by()
            if stalled is not None:
                values["stalled_by"] = {"start_ts": stalled[0], "seconds": round(stalled[1])}
                values["problem"] = values["problem"] or f"the transaction {stalled[0]} has no outcome"
        return values

    def decide(self, start_ts: int, commit_ts: int, *, dry_run: bool) -> None:
        """Decide a transaction as `penstock pump decide` does, or only check the decision.

        Raises OptionInvalid, DiskFailed, LogFull.
        """
        self._decisions.check(start_ts, commit_ts)
        if not dry_run:
            self._decisions.put(start_ts, commit_ts)

    # --- The life of a Pump -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._cluster_id = self._retry("the cluster does not answer", lambda: self._cluster.cluster_id)
            self._begin()
            self._join_cluster()
            while not self._stopping.is_set() and self._state is not NodeState.OFFLINE:
                self._tick()
                self._wake.wait(_TICK_SECONDS)
                self._wake.clear()
            if self._state is not NodeState.OFFLINE:
                self._pause()
        except _Stopped:
            pass
        except PenstockError as problem:
            self._problem = str(problem)
            _log.error(
                "the Pump ends", instance=self.instance, error=type(problem).__name__, why=str(problem)
            )
        except Exception as defect:
            # The end of the thread prints the traceback.
            self._problem = f"a defect ended the Pump: {defect!r}"
            raise
        finally:
            self._end()

    def _begin(self) -> None:
        """Open the store and serve the port. Prewrites are refused until the Pump is online."""
        open_store = partial(
            PumpStore, self._log_settings.folder, self._log_settings, self._cluster_id, counts=self._counts
        )

        def open_refusing() -> PumpStore:
            store = open_store()
            store.refuses_prewrites = None if self._state is NodeState.ONLINE else str(self._state)
            return store

        self._commit = GroupCommit(self.instance, open_refusing, self._finished, self._released)
        self._retry("the Pump's log cannot be opened", self._start_commit)
        resolver = Resolver(
            self._resolving_cluster,
            lambda prewrite: self._store.prewrite_key(prewrite),
            self._decisions.hint,
            self._settings.decide_after,
        )
        self._deciding = Deciding(self.instance, resolver, self._decisions, self._store_call, self._note)
        self._port.start()
        self._deciding.start()
        self._beat_at = self._fake_at = self._held_at = time.monotonic()
        self._stored_before = self._counts.stored, self._beat_at
        self._fake_seen = self._counts.stored

    def _start_commit(self) -> None:
        assert self._commit is not None, "it was created"
        try:
            self._commit.start()
        except LogLocked as problem:
            # Try again, because the previous daemon may still be ending.
            raise ServerBusy(problem.message, hint=problem.hint) from problem

    def _join_cluster(self) -> None:
        """Register as paused, announce the Pump to every Drainer that may not know it, and go online."""
        known, _ = self._retry(
            "the registry does not answer", lambda: self._registry.node(NodeKind.PUMP, self.node_id)
        )
        self._retry("the registry does not answer", lambda: self._register(NodeState.PAUSED))
        if known is None or known.state is NodeState.OFFLINE:
            retry = Retry("a Drainer does not know this Pump yet", stop=self._stopping, report=self._note)
            self._run_retry(retry, self._notify_drainers)
        self._retry("the registry does not answer", lambda: self._set_state(NodeState.ONLINE))
        self._problem = None
        _log.info("the Pump is online", instance=self.instance, node_id=self.node_id, address=self.address)

    def _notify_drainers(self) -> None:
        """Make every online Drainer look for new Pumps. Raises ConnectionLost, which names Drainers that do
        not answer.
        """
        listing = self._registry.list(NodeKind.DRAINER)
        # An unreadable entry may belong to an online Drainer, so it counts as a Drainer that does not answer.
        silent = [f"{node_id} ({why})" for node_id, why in listing.unreadable.items()]
        for drainer in listing.nodes.values():
            if drainer.state is not NodeState.ONLINE:
                continue
            channel = open_channel(drainer.host, self._tls)
            retry = Retry("a Drainer is notified again", tries=_NOTIFY_TRIES - 1, stop=self._stopping)
            try:
                retry.run(partial(call, channel, drainer.host, NOTIFY, b"", _NOTIFY_SECONDS), PenstockError)
            except PenstockError as problem:
                silent.append(f"{drainer.node_id} ({problem})")
            finally:
                channel.close()
        if silent:
            raise ConnectionLost(
                "these registered Drainers were not told of this Pump, and would miss its binlogs:"
                f" {', '.join(silent)}",
                hint="Start them, or retire a dead one:"
                " binlogctl -pd-urls URL -cmd update-drainer -node-id ID -state offline",
            )

    # --- Ticks ------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        try:
            if now - self._beat_at >= _HEARTBEAT_SECONDS:
                self._beat_at = now
                self._beat(now)
                if self._wanted is None and self._state is NodeState.CLOSING:
                    self._leave_if_drained()
            if self._wanted is not None:
                wanted, self._wanted = self._wanted, None
                self._change_state(wanted)
            if now - self._fake_at >= _FAKE_SECONDS:
                self._fake_at = now
                self._fake_if_idle()
            if now - self._held_at >= _HOLD_SECONDS:
                self._held_at = now
                self._hold_log()
            self._problem = self._closing if self._state is NodeState.CLOSING else None
        except TransientError as problem:
            self._note(problem)
        except PenstockError as problem:
            # Only note the problem: an online Pump keeps storing binlogs, even if its registration fails.
            self._note(problem)

    def _beat(self, now: float) -> None:
        """Write the node to the registry. If someone else has written another state, adopt that state, as
        `binlogctl -cmd update-pump` does.
        """
        stored, before = self._counts.stored, self._stored_before
        self._rate = (stored - before[0]) / max(now - before[1], 1e-3)
        self._stored_before = stored, now
        registered, revision = self._registry.node(NodeKind.PUMP, self.node_id)
        if registered is None or registered.state is self._registered_state:
            # If the node was changed since it was read, the next beat follows the change.
            self._registry.replace(NodeKind.PUMP, self._node(self._state), revision)
            return
        _log.warning(
            "the Pump's state was changed in the registry",
            instance=self.instance,
            before=str(self._registered_state),
            now=str(registered.state),
        )
        self._wanted = self._registered_state = registered.state

    def _change_state(self, wanted: NodeState) -> None:
        if wanted in (NodeState.PAUSING, NodeState.PAUSED):
            self._pause()
        elif wanted is NodeState.CLOSING:
            self._close()
        elif wanted is NodeState.OFFLINE:
            self._refuse_prewrites("offline")
            self._set_state(NodeState.OFFLINE)
        elif self._state is not NodeState.ONLINE:
            self._set_state(NodeState.ONLINE)

    def _pause(self) -> None:
        self._refuse_prewrites(str(NodeState.PAUSING))
        try:
            self._set_state(NodeState.PAUSING)
            self._set_state(NodeState.PAUSED)
        except PenstockError as problem:
            # Only note the problem: the process ends even if the registry cannot be reached.
            self._note(problem)

    def _close(self) -> None:
        """Refuse prewrites. Fake binlogs continue until Drainers have everything, or the state is revoked."""
        self._last_ts = None
        self._refuse_prewrites(str(NodeState.CLOSING))
        self._set_state(NodeState.CLOSING)

    def _leave_if_drained(self) -> None:
        """Leave the cluster once every Drainer has everything that a closing Pump accepted."""
        # Drainers advance past a timestamp only when every Pump, including this one, has sent a later
        # timestamp.
        self._add_fake(self._cluster.timestamp())
        if self._last_ts is None:
            self._last_ts = self._store_call(_final_ts)
        behind = self._behind(self._last_ts)
        self._closing = None if behind is None else f"closing: {behind}"
        if behind is None:
            self._set_state(NodeState.OFFLINE)
            _log.info("the Pump has left the cluster", instance=self.instance, node_id=self.node_id)

    def _behind(self, last_ts: int | None) -> str | None:
        """Return what a closing Pump waits for; None if it waits for nothing."""
        if last_ts is None:
            oldest = self._store_call(lambda store: store.matching.oldest_open())
            return f"the transaction {oldest.start_ts} has no outcome" if oldest else "binlogs are released"
        listing = self._registry.list(NodeKind.DRAINER)
        for node_id, why in listing.unreadable.items():
            return f"the Drainer {node_id} may still need binlogs: {why}"
        for drainer in listing.nodes.values():
            if drainer.state is not NodeState.OFFLINE and drainer.max_commit_ts < last_ts:
                return f"the Drainer {drainer.node_id} has everything up to {drainer.max_commit_ts} only"
        return None

    def _fake_if_idle(self) -> None:
        stored, self._fake_seen = self._fake_seen, self._counts.stored
        if self._fake_seen == stored:
            self._add_fake(self._cluster.timestamp())

    def _add_fake(self, timestamp: int) -> None:
        self._store_call(lambda store: store.add_fake(timestamp))

    def _hold_log(self) -> None:
        """Keep retention from removing data that is not released or not drained."""
        store = self._store
        start: Location = self._store_call(lambda store: store.replay_start)
        drainers = self._registry.list(NodeKind.DRAINER)
        if drainers.unreadable:
            # It is unknown what the Drainers with unreadable entries have stored, so the hold stays where it
            # is.
            return
        drained = [
            each.max_commit_ts for each in drainers.nodes.values() if each.state is not NodeState.OFFLINE
        ]
        if drained:
            try:
                for entry in store.index.after(min(drained), 1):
                    start = min(start, entry.location or entry.replay_start, entry.replay_start)
            except PositionPurged as problem:
                _log.error(
                    "a Drainer needs binlogs that were removed", instance=self.instance, why=str(problem)
                )
        start = max(start, store.log.earliest)
        holds = Holds(store.log.log.disk, store.log.log.layout)
        holds.put(Hold(_HOLD, store.log.position_of(start)))

    # --- The registry -----------------------------------------------------------------------

    def _set_state(self, state: NodeState) -> None:
        """Register a state. The state online takes effect after the registry has it; other states take effect
        before.
        """
        if state is not NodeState.ONLINE:
            self._state = state
        self._register(state)
        if state is NodeState.ONLINE:
            self._state, self._last_ts = state, None
            self._refuse_prewrites(None)

    def _register(self, state: NodeState) -> None:
        self._registry.put(NodeKind.PUMP, self._node(state))
        self._registered_state = state

    def _node(self, state: NodeState) -> Node:
        store = self._store
        backlog = store.matching.open_count + store.matching.waiting_count
        free_bytes = store.log.log.disk.free_bytes(self._log_settings.folder)
        return Node(
            self.node_id,
            self.address,
            state,
            # No Drainer needs the fakes that a closing Pump released after its last transaction.
            max_commit_ts=self._last_ts
            if state is NodeState.OFFLINE and self._last_ts
            else store.released_ts,
            update_ts=self._cluster.timestamp(),
            score=_score(backlog, self._rate, free_bytes, self._log_settings.free_bytes_min),
            labels={
                "backlog": str(backlog),
                "writes_per_second": str(round(self._rate)),
                "free_bytes": str(free_bytes),
            },
        )

    # --- HTTP -------------------------------------------------------------------------------

    async def _answer(self, method: str, path: str) -> Any:
        parts = [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]
        if method == "GET" and parts == ["status"]:
            return self._status_answer()
        if method == "PUT" and len(parts) == 3 and parts[0] == "state":
            return self._state_answer(parts[1], parts[2])
        return None

    def _status_answer(self) -> dict[str, Any]:
        store = self._open_store()
        released_ts = store.released_ts if store is not None else 0
        node = Node(self.node_id, self.address, self._state, max_commit_ts=released_ts)
        return {
            "status": {self.node_id: node.to_values()},
            "CommitTS": released_ts,
            "Checkpoint": {},
            "ErrMsg": self._problem or "",
            "penstock": self.status(),
        }

    def _state_answer(self, node_id: str, action: str) -> dict[str, Any]:
        """Answer binlogctl; codes: 1 for a wrong parameter, 2 for another node, 3 for another state."""
        wanted = {"pause": NodeState.PAUSING, "close": NodeState.CLOSING}.get(action)
        if node_id != self.node_id:
            return {"message": f"this Pump is {self.node_id}, not {node_id}", "code": 2, "data": None}
        if wanted is None:
            return {"message": f"{action} is neither pause nor close", "code": 1, "data": None}
        if self._state is not NodeState.ONLINE:
            return {"message": f"this Pump is {self._state}, not online", "code": 3, "data": None}
        self._wanted = wanted
        self._wake.set()
        return {"message": f"{action} of {node_id} has begun", "code": 200, "data": None}

    # --- Internals --------------------------------------------------------------------------

    @property
    def _store(self) -> PumpStore:
        assert self._commit is not None, "the store was opened"
        return self._commit.store

    def _open_store(self) -> PumpStore | None:
        """Return the store; None before it is opened, after it is closed, and while it is being reopened."""
        try:
            return None if self._commit is None else self._commit.store
        except ServerBusy:
            return None

    def _store_call(self, change: Callable[[PumpStore], Any]) -> Any:
        assert self._commit is not None, "the store was opened"
        return resolved(self._commit.call(change), _STORE_CALL_SECONDS)

    def _refuse_prewrites(self, state: str | None) -> None:
        def refuse(store: PumpStore) -> None:
            store.refuses_prewrites = state

        self._store_call(refuse)

    def _make_service(self, loop: Any) -> PumpService:
        assert self._commit is not None, "the store was opened"
        self._service = PumpService(
            self._cluster_id, self._counts, loop, self._commit, compress=self._settings.compress
        )
        return self._service

    def _end_service(self) -> None:
        if self._service is not None:
            self._service.end()

    def _finished(self, writes: Any) -> None:
        if self._service is not None:
            self._service.finish(writes)

    def _released(self) -> None:
        if self._service is not None:
            self._service.released()

    def _note(self, problem: Exception) -> None:
        if str(problem) != self._problem:
            _log.warning("the Pump waits", instance=self.instance, why=str(problem))
        self._problem = str(problem)

    def _retry(self, event: str, attempt: Callable[[], Any]) -> Any:
        return self._run_retry(Retry(event, stop=self._stopping, report=self._note), attempt)

    def _run_retry(self, retry: Retry, attempt: Callable[[], Any]) -> Any:
        """Return the answer of the first attempt that succeeds. Raises _Stopped once the Pump has to end."""
        try:
            return retry.run(attempt)
        except TransientError as problem:
            if self._stopping.is_set():
                raise _Stopped from problem
            raise

    def _end(self) -> None:
        self._stopping.set()
        if self._deciding is not None:
            self._deciding.stop(PUMP_STOP_SECONDS_MAX)
        self._port.stop()
        if self._commit is not None:
            try:
                self._commit.stop()
            except PenstockError as problem:
                _log.error("the Pump's log was not closed", instance=self.instance, why=str(problem))
        self._cluster.close()
        self._resolving_cluster.close()


class _Stopped(Exception):
    """The Pump was stopped while it waited."""


def _final_ts(store: PumpStore) -> int | None:
    """Return the timestamp after which a closing Pump releases only fakes; None while transactions are
    open.
    """
    if store.matching.open_count or store.matching.waiting_count or store.has_unindexed:
        return None
    return store.released_ts


def _score(backlog: int, rate: float, free_bytes: int, free_bytes_min: int) -> int:
    """Return the remaining capacity of a Pump, from 0 to 100: that of its scarcest resource."""
    disk = free_bytes / max(free_bytes_min * 10, 1)
    room = min(1.0 - backlog / _FULL_BACKLOG, 1.0 - rate / _FULL_RATE, disk, 1.0)
    return max(0, round(room * 100))
