# SPDX-License-Identifier: Apache-2.0
"""The capture of a TiDB cluster: the drainer, which merges all Pumps into the instance's log.

    registry ─▶ readers of the Pumps ─▶ merge by commit timestamp ─▶ events ─▶ the log

The drainer resumes after the last transaction of its log, and asks every Pump for later transactions. Its
entry in the registry shows what it has stored durably, and Pumps wait for that before they go offline.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from penstock._native import TidbTranscoder
from penstock.capture.generated_log import SERVER_ID
from penstock.capture.status import CaptureStatus, State
from penstock.errors import OptionInvalid, PenstockError, PositionPurged, TransactionLate
from penstock.limits import CAPTURE_CHUNK_BYTES
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.log import Log
from penstock.logstore.merge_position import MergePosition
from penstock.settings.daemon import InstanceSettings
from penstock.settings.listen import split_host_port
from penstock.settings.tidb import TidbSettings, pd_addresses
from penstock.tidb.channels import ClusterTls
from penstock.tidb.cluster import Cluster
from penstock.tidb.definition_log import DefinitionLog
from penstock.tidb.drainer_service import DrainerService, answers_of
from penstock.tidb.job_sources import JobSource, SqlJobs, StatusJobs, TikvJobs
from penstock.tidb.known_pumps import KnownPumps
from penstock.tidb.membership import DrainerProgress, PumpMembers, Registration
from penstock.tidb.merged_capture import MergedCapture
from penstock.tidb.merged_log import end_of_merged_log, server_key_of
from penstock.tidb.messages import physical_us
from penstock.tidb.node_port import NodePort, PortTls, bind_port
from penstock.tidb.pulling import MergeQueue, PumpReader
from penstock.tidb.registry import Node, NodeState, Registry
from penstock.tidb.transcription import Transcription, TranscriptionParts

_log = structlog.get_logger(__name__)

LATE_FILE = "tidb-late.json"

_TAKE_SECONDS = 0.5
_DURABLE_SECONDS = 1.0
# If the merge waits for a Pump for longer than this, the status names the Pump.
_STALL_SECONDS = 10.0
# A merge that is further behind the cluster than this does not count as caught up. Idle Pumps advance every 3
# seconds.
_RECENT_SECONDS = 15.0
# An idle cluster's position is saved at this interval. After a restart, later transactions are pulled again.
_SAVED_SECONDS = 10.0


class TidbCapture(MergedCapture):
    """Captures a TiDB cluster into the log of an instance. Implements the interface that all captures
    share.
    """

    _drainer: "Drainer | None" = None
    _cluster_id: int | None = None
    _stalled_since: float | None = None
    # A transaction that arrived too late, until it is recorded in the log's folder.
    _late: TransactionLate | None = None

    @property
    def _tidb(self) -> TidbSettings:
        return self._settings.tidb

    def stop(self) -> None:
        """Ask the thread to end. The thread first stores the transactions that it has merged."""
        super().stop()
        drainer = self._drainer
        if drainer is not None:
            drainer.interrupt()

    def snapshot(self) -> CaptureStatus:
        """Return the state of the capture. Never waits."""
        version = None if self._cluster_id is None else f"cluster {self._cluster_id}"
        drainer = self._drainer
        return replace(
            super().snapshot(),
            server_version=version,
            commit_ts=None if drainer is None else drainer.durable_ts(),
        )

    # --- The thread -------------------------------------------------------------------------

    def _attempt(self) -> None:
        """Open the log if necessary, find where to resume, and merge until something fails."""
        log = self._connecting_log()
        self._refuse_late(log)
        cluster = Cluster(pd_addresses(self._settings.source), cluster_tls(self._tidb))
        jobs = job_source(self._settings, cluster)
        try:
            self._cluster_id = cluster.cluster_id

            def record_start() -> None:
                self._refuse_future_start(cluster)
                MergePosition(self._start_ts(cluster.timestamp), None).write(log.disk, log.folder)

            self._begin_log(log, server_key_of(cluster.cluster_id), record_start)
            self._merge(log, cluster, jobs)
        finally:
            jobs.close()
            cluster.close()

    def _is_final(self, problem: PenstockError) -> bool:
        """Record a failure; return whether it is final. It is final if a Pump has purged transactions,
        because purged transactions never return.
        """
        is_final = super()._is_final(problem)
        return is_final or (isinstance(problem, PositionPurged) and self._stop_with(problem))

    def _refuse_future_start(self, cluster: Cluster) -> None:
        """Raise OptionInvalid if the start is a commit timestamp that the cluster has not reached."""
        start_ts = self._start_at.commit_ts
        if start_ts is not None and start_ts > (now := cluster.timestamp()):
            raise OptionInvalid(
                f"start: commit_ts:{start_ts} is later than {now}, the cluster's timestamp now",
                hint="Use a commit timestamp of this cluster, such as that of its Drainer's checkpoint",
            )

    def _merge(self, log: Log, cluster: Cluster, jobs: JobSource) -> None:
        """Take part in the cluster, and store what its Pumps send, until stopped or something fails."""
        kept = DefinitionLog(log.disk, log.folder)
        drainer = Drainer(log, cluster, self._tidb, resume_ts(log), self._heard)
        self._drainer = drainer
        if self._stopping.is_set():
            drainer.interrupt()
        try:
            drainer.start()
            merged = self._merged_log(log)
            transcoder = TidbTranscoder(cluster_id=cluster.cluster_id, server_id=SERVER_ID)
            parts = TranscriptionParts(kept, jobs, transcoder, self._stopping, self._report_wait)
            transcription = Transcription(merged, parts)
            self._begin_running()
            while not self._stopping.is_set() and drainer.wanted_state is None:
                drainer.step(transcription)
                self._report_progress(drainer)
            drainer.make_durable()
        finally:
            drainer.end()
            kept.close()
            self._late = self._late or drainer.late
            self._refuse_late(log)
        if drainer.wanted_state is not None:
            why = f"binlogctl asked for the state {drainer.wanted_state}; start the daemon again to go on"
            self._set_state(State.STOPPED, why)
            self._stopping.wait()

    def _refuse_late(self, log: Log) -> None:
        """Raise TransactionLate if this run or an earlier one met a late transaction, and record the
        transaction. Also raises LogFull, DiskFailed.

        No Pump sends the transaction again, so only the record keeps a restart from skipping it.
        """
        if self._late is not None:
            write_late(log, self._late)
            self._late = None
        check_late(log)

    def _report_progress(self, drainer: "Drainer") -> None:
        """Show in the status whether everything was merged, and what the merge waits for."""
        stalled_by = drainer.stalled_by()
        self._progress.caught_up = not stalled_by and drainer.is_caught_up()
        now = time.monotonic()
        if not stalled_by:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        why = None
        if self._stalled_since is not None and now - self._stalled_since > _STALL_SECONDS:
            why = f"the merge waits: {'; '.join(stalled_by)}"
        if why != self._why:
            if why is not None and self._why is None:
                _log.warning("the merge waits", instance=self.name, why=stalled_by)
            self._set_state(State.RUNNING, why)

    def _heard(self) -> None:
        self._progress.heard_at = time.time()

    def _report_wait(self, why: str | None) -> None:
        self._set_state(State.RUNNING, why)


class Drainer:
    """One run over an open log, which begins by registering the drainer and ends with the next failure."""

    def __init__(
        self, log: Log, cluster: Cluster, settings: TidbSettings, position: int, heard: Callable[[], None]
    ) -> None:
        """`position` is the commit timestamp up to which the log has everything.

        Raises OptionInvalid if the port is taken, TlsFailed, LogDamaged.
        """
        self._log = log
        self._cluster = cluster
        self._queue = MergeQueue(position, settings.drainer.buffer_bytes, partial(write_late, log))
        self._stored_ts = self._durable_ts = position
        # A timestamp of the cluster, and the local time when it was requested.
        self._cluster_ts, self._cluster_ts_at = 0, time.monotonic()
        self._durable_at = self._saved_at = time.monotonic()
        # Whether the last step found nothing.
        self.is_idle = False
        self.wanted_state: NodeState | None = None
        tls, cluster_id = cluster_tls(settings), cluster.cluster_id
        compress = settings.drainer.compress

        def open_reader(pump: str, address: str) -> PumpReader:
            return PumpReader(pump, address, self._queue, cluster_id, tls, compress=compress, heard=heard)

        registry = Registry(cluster)
        known = KnownPumps(log.disk, log.folder)
        self.members = PumpMembers(registry, self._queue, known, open_reader, self.durable_ts)
        bound = bind_port(*split_host_port(settings.drainer.listen))
        host, port = bound.getsockname()[:2]
        address = settings.drainer.advertise or f"{f'[{host}]' if ':' in host else host}:{port}"
        self._node = Node(settings.drainer.node_id or address, address, NodeState.ONLINE)
        self._registration = Registration(
            registry, self.members, self._node, self._registered_progress, self._queue.fail
        )
        port_tls = None
        if tls is not None and settings.tls is not None:
            port_tls = PortTls(tls, settings.tls.allowed_names)
        make_service = partial(DrainerService, self)
        self._port = NodePort("drainer", bound, make_service, answers_of(self), port_tls)

    # --- The draining thread ----------------------------------------------------------------

    def start(self) -> None:
        """Open the port, register, and read the registered Pumps.

        Raises ConnectionLost, AccessDenied, VersionConflict.
        """
        self._port.start()
        self._registration.start()

    def step(self, transcription: Transcription) -> None:
        """Store the transactions that are due, or wait a moment for the next."""
        taken, position = self._queue.take(CAPTURE_CHUNK_BYTES, _TAKE_SECONDS)
        transcription.write(taken)
        self.is_idle = not taken
        self._stored_ts = position
        now = time.monotonic()
        if now - self._durable_at >= _DURABLE_SECONDS:
            self._durable_at = now
            self._log.sync()
            self._durable_ts = position
            if now - self._saved_at >= _SAVED_SECONDS:
                self._saved_at = now
                self._save()

    def stalled_by(self) -> list[str]:
        """Return what the merge waits for: silent Pumps, or the registry."""
        texts = self.members.stalled_by()
        if self._registration.problem is not None:
            texts.append(f"the registry cannot be used: {self._registration.problem}")
        return texts

    def is_caught_up(self) -> bool:
        """Return whether all Pumps are sending, and everything up to now was stored."""
        if not self.is_idle or not self.members.are_sending():
            return False
        behind_us = physical_us(self._cluster_ts) - physical_us(self._stored_ts)
        return behind_us / 1e6 + time.monotonic() - self._cluster_ts_at < _RECENT_SECONDS

    @property
    def late(self) -> TransactionLate | None:
        """The first transaction that a Pump sent too late."""
        return self._queue.late

    def make_durable(self) -> None:
        """Make everything stored durable, and record it. Raises LogFull, DiskFailed."""
        self._log.sync()
        self._durable_ts = self._stored_ts
        self._save()

    def interrupt(self) -> None:
        """Wake the draining thread if it waits. May be called by any thread."""
        self._queue.close()

    def end(self) -> None:
        """Close the port and all readers, and register the last state."""
        self._queue.close()
        self._port.stop()
        self.members.close()
        self._registration.end(self.wanted_state or NodeState.PAUSED)

    def _registered_progress(self) -> DrainerProgress:
        self._cluster_ts, self._cluster_ts_at = self._cluster.timestamp(), time.monotonic()
        return DrainerProgress(self._durable_ts, self._cluster_ts)

    def _save(self) -> None:
        MergePosition(self._durable_ts, self._log.visible).write(self._log.disk, self._log.folder)

    # --- The port ---------------------------------------------------------------------------

    @property
    def node_id(self) -> str:
        """The drainer's name in the registry."""
        return self._node.node_id

    def refresh_pumps(self) -> None:
        """Read the Pumps that are registered now. Raises ConnectionLost, AccessDenied."""
        self.members.refresh()

    def status_values(self) -> dict[str, Any]:
        """Return the status as the original Drainer shows it."""
        return {
            "PumpPos": self._queue.positions(),
            "Synced": self.is_idle,
            "LastTS": self._durable_ts,
            "TsMap": "",
        }

    def durable_ts(self) -> int:
        """Return the commit timestamp up to which everything is durable."""
        return self._durable_ts

    def request_state(self, state: NodeState) -> None:
        """End the drainer, and leave it registered in this state."""
        self.wanted_state = state
        self.interrupt()


def resume_ts(log: Log) -> int:
    """Return the commit timestamp up to which a log has everything."""
    saved = MergePosition.load(log.disk, log.folder)
    last = end_of_merged_log(log).commit_ts
    # A log that lost its end, for example in a power failure, is behind the saved position.
    has_end = saved is not None and (
        saved.log_end is None or (log.visible is not None and saved.log_end <= log.visible)
    )
    return max(last, saved.commit_ts if saved is not None and has_end else 0)


def write_late(log: Log, late: TransactionLate) -> None:
    """Record durably in a log's folder that a transaction is missing. Raises LogFull, DiskFailed."""
    values = {"message": late.message, "commit_ts": late.position}
    log.disk.write_atomic(log.folder / LATE_FILE, seal_json(values))


def check_late(log: Log) -> None:
    """Raise TransactionLate if a late transaction is recorded for a log, until an operator deletes the
    record.

    Also raises LogFull, DiskFailed, LogDamaged.
    """
    path = log.folder / LATE_FILE
    if log.disk.exists(path):
        # The operator compares the tables before the next run. That run therefore requests no earlier
        # transactions.
        KnownPumps(log.disk, log.folder).settle()
        # Even a damaged record shows that a transaction is missing.
        values = unseal_json(log.disk.read(path))
        raise TransactionLate(
            values.get("message", "a Pump sent a transaction after later ones had been merged"),
            position=values.get("commit_ts"),
            hint="It is missing in the log: compare the tables with penstock verify, correct the target,"
            f" then delete {path} and start the daemon again",
        )


def cluster_tls(settings: TidbSettings) -> ClusterTls | None:
    """Return the files for TLS with the cluster; None without TLS."""
    tls = settings.tls
    return None if tls is None else ClusterTls(tls.ca, tls.cert, tls.key)


def job_source(instance: InstanceSettings, cluster: Cluster) -> JobSource:
    """Return the source of DDL jobs: SQL if the instance has a server, otherwise its status port, otherwise
    TiKV.
    """
    addresses = instance.addresses()
    if addresses:
        return SqlJobs(addresses[0])
    if instance.tidb.status is not None:
        return StatusJobs(instance.tidb.status, cluster_tls(instance.tidb))
    return TikvJobs(cluster)
