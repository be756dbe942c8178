# SPDX-License-Identifier: Apache-2.0
"""A member's capture of one instance, from acquiring its lease to releasing it.

The lease's token fences the instance's capture record. Bytes are stored only while the store confirms the
lease, and the lease is released only after the capture has ended.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from penstock.capture.lease import CaptureLease, Handover
from penstock.capture.status import State
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, CoordinationStore
from penstock.errors import (
    LeaseLost,
    LogDamaged,
    LogTorn,
    PenstockError,
    SourceMissing,
    VersionConflict,
)
from penstock.fingerprint import file_fingerprint
from penstock.fleet.records import CaptureRecord, capture_path
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import EpochRecord
from penstock.logstore.followed_log import FollowedLog, ServedLog
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position
from penstock.retry import Backoff, Retry

_BACKOFF = Backoff(longest=1.0)
# Errors that mean that this member's log is damaged. A copy of the log on another member does not have the
# damage.
_DAMAGES = (LogDamaged.__name__, LogTorn.__name__)
# If a capture takes longer than this to end, the delay is logged.
_JOIN_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class FencedRecord:
    """An instance's capture record, written under the token of a lease. Thread-safe."""

    def __init__(self, store: CoordinationStore, instance: str, lease: Lease) -> None:
        """Write the token, so that no earlier holder can write. Raises LeaseLost, CoordinationLost."""
        self._store = store
        self._instance = instance
        self._token = lease.token
        self._path = capture_path(instance)
        self._lock = threading.Lock()
        stored = store.get(self._path, latest=True)
        # The last holder's record, None if there was none.
        self.before = CaptureRecord.of(instance, stored)
        self._record = self.before or CaptureRecord(self._token)
        self._prove_not_fenced(self._record)
        self._version = ABSENT if stored is None else stored.version
        self.write(replace(self._record, token=self._token, member=lease.holder))

    @property
    def record(self) -> CaptureRecord:
        """The record as last read or written."""
        return self._record

    def write(self, record: CaptureRecord, base: CaptureRecord | None = None) -> None:
        """Replace the record. With `base`, write nothing if another thread has already replaced the record
        `base`.

        Raises LeaseLost if a later holder has written, CoordinationLost.
        """
        with self._lock:
            if base is not None and self._record is not base:
                return
            try:
                self._version = self._store.put(self._path, record.encode(), self._version)
            except VersionConflict:
                # Read the record again: either a later holder has written, or the answer to this holder's own
                # write was lost.
                stored = self._store.get(self._path, latest=True)
                present = CaptureRecord.of(self._instance, stored)
                if present is None or present.token != self._token or stored is None:
                    self._prove_not_fenced(present or CaptureRecord(self._token + 1))
                    raise
                self._version = self._store.put(self._path, record.encode(), stored.version)
            self._record = record

    def _prove_not_fenced(self, present: CaptureRecord) -> None:
        if present.token > self._token:
            raise LeaseLost(
                f"another member captures {self._instance}",
                hint="See who: penstock fleet status",
            )


class TenuredCapture(Protocol):
    """The capture of one instance, in this process or in a separate process."""

    @property
    def name(self) -> str:
        """The instance's name."""

    def start(self) -> None:
        """Start capturing."""

    def stop(self) -> None:
        """Ask the capture to end. The capture first stores everything that it has received."""

    def join(self, seconds: float) -> bool:
        """Wait until everything is durable and the capture has ended; return whether it has ended."""

    def status(self) -> Mapping[str, Any]:
        """Return the status as plain JSON values, without waiting."""

    def log(self) -> ServedLog:
        """Return the log. Raises ServerBusy while the log is being opened, or the error that prevents
        opening.
        """


class CaptureTenure(CaptureLease):
    """The capture of an instance under a lease; see `penstock.fleet.group.Tenure`.

    `start` and `leave` must be called from the member's thread. `arrived` is called with the instance's name
    when its capture ends.
    """

    def __init__(
        self, store: CoordinationStore, instance: str, lease: Lease, arrived: Callable[[str], None]
    ) -> None:
        """Fence earlier holders. Raises LeaseLost, CoordinationLost, SchemaInvalid."""
        self.name = instance
        self._arrived = arrived
        self._lease = lease
        self._fenced = FencedRecord(store, instance, lease)
        self._capture: TenuredCapture | None = None
        self._is_fenced_off = False
        before = self._fenced.before
        # The newest holds are in the folder of the member that captured last, which may be this member.
        self._is_own_folder = before is not None and before.member == lease.holder
        # The first log that is opened takes over these holds.
        self._holds_before = None if before is None else before.holds
        self._damage: str | None = None
        self._left = threading.Event()
        self._leaving = False

    @property
    def token(self) -> int:
        """The lease's fencing token."""
        return self._lease.token

    @property
    def capture(self) -> TenuredCapture | None:
        """The capture while it serves readers, None once the tenure has begun to end."""
        return None if self._leaving else self._capture

    @property
    def is_held(self) -> bool:
        """Whether this process is known to hold the lease."""
        return self._lease.held and not self._is_fenced_off

    @property
    def is_lost(self) -> bool:
        """Whether the lease was permanently lost before this member gave it up."""
        return self._lease.lost or self._is_fenced_off

    @property
    def damage(self) -> str | None:
        """Why this member's log cannot be continued, as of the last `record`; None if it can be continued."""
        return self._damage

    @property
    def left(self) -> bool:
        """Whether the capture has ended and the lease has been released."""
        return self._left.is_set()

    def start(self, make_capture: Callable[["CaptureTenure"], TenuredCapture]) -> None:
        """Start capturing."""
        self._capture = make_capture(self)
        self._capture.start()

    # --- For the capture --------------------------------------------------------------------

    def pause_reason(self) -> str | None:
        """Return why the log must not be written at the moment; see `CaptureLease`."""
        if self.is_lost:
            raise LeaseLost(
                f"the lease to capture {self.name} was lost", hint="See who has it: penstock fleet status"
            )
        if self._lease.held:
            return None
        return f"the coordination store does not confirm the lease to capture {self.name}"

    @property
    def permitted_until(self) -> float:
        """The time until which received bytes may be stored; see `penstock.processes.lease.HeldLease`."""
        return float("-inf") if self.is_lost else self._lease.held_until

    def handover(self) -> Handover | None:
        """Return the last recorded position of the capture; see `CaptureLease`."""
        return self._fenced.record.handover

    def begin_epoch(self, beginning: Handover) -> None:
        """Record a new epoch; see `CaptureLease`."""
        current = self.handover()
        number = beginning.position.epoch
        if current is not None and (current.position.epoch, current.server_key) == (
            number,
            beginning.server_key,
        ):
            return
        self._write(replace(self._fenced.record, handover=beginning))

    def log_opened(self, log: Log) -> None:
        """Write the holds of the last host into a log; see `CaptureLease`."""
        if not isinstance(log, MemoryLog):
            self.adopt_holds(log.disk, log.layout, has_epoch=log.epoch is not None)

    def adopt_holds(self, disk: Disk, layout: Layout, *, has_epoch: bool) -> None:
        """Write the holds of the last host into a log on disk, once; `has_epoch` is false for a new log.

        Without this, a reader that is not connected at the time would lose its hold together with the last
        host. Earlier holds in this folder are outdated, because their readers have continued elsewhere.
        """
        recorded, self._holds_before = self._holds_before, None
        if recorded is None or (self._is_own_folder and has_epoch):
            return
        holds = Holds(disk, layout)
        now_us = time.time_ns() // 1000
        with holds.unchanged():
            kept = {hold.name for hold in recorded if not hold.has_expired(now_us)}
            for hold in holds.readable(now_us):
                if hold.name not in kept:
                    holds.remove(hold.name)
            for hold in recorded:
                if hold.name in kept:
                    self._adopt(holds, hold)

    def _adopt(self, holds: Holds, hold: Hold) -> None:
        try:
            holds.put(hold, admin=True)
        except PenstockError as problem:
            _log.error("a hold is not taken over", instance=self.name, hold=hold.name, why=str(problem))

    # --- Recording --------------------------------------------------------------------------

    def record(self) -> None:
        """Record the progress of the capture and where another host would begin, if that has changed.

        Raises LeaseLost, CoordinationLost, or an error from the log.
        """
        if self._capture is not None:
            record = self._fenced.record
            self._record_change(record, self._progress_of(self._capture, record))

    def _progress_of(self, capture: TenuredCapture, record: CaptureRecord) -> CaptureRecord:
        """Return a record with the progress of the capture. Does not wait for the store."""
        status = capture.status()
        changed = replace(record, state=status["state"], why=status["why"])
        failure = status["error"]
        if status["state"] == State.STOPPED and failure is not None and failure["kind"] in _DAMAGES:
            self._damage = failure["message"]
        try:
            log = capture.log()
            if isinstance(log, Log | FollowedLog) and not log.in_place:
                self._damage = f"the folder {log.folder} was removed or replaced while it was in use"
            if log.epoch is not None:
                holds = _holds_of(log)
                changed = replace(changed, holds=holds)
                if _replaces(log, log.epoch, record.handover, is_running=status["state"] == State.RUNNING):
                    handover = _handover_of(log, log.epoch, holds, record.handover)
                    changed = replace(changed, handover=handover)
        except PenstockError as problem:
            # While the log is being opened, the record keeps its previous position.
            _log.debug("a position is not recorded", instance=self.name, why=str(problem))
        return changed

    def _record_change(self, record: CaptureRecord, changed: CaptureRecord) -> None:
        if changed != record and self._lease.held:
            # Replace only the record that was read: another epoch may have been agreed on since.
            self._write(replace(changed, updated_us=time.time_ns() // 1000), base=record)

    def _write(self, record: CaptureRecord, base: CaptureRecord | None = None) -> None:
        try:
            self._fenced.write(record, base)
        except LeaseLost:
            self._is_fenced_off = True
            raise

    # --- Ending -----------------------------------------------------------------------------

    def leave(self, why: str, left: Callable[[], None]) -> None:
        """End the capture, record its end, and release the lease, in a separate thread; then call `left`."""
        assert not self._leaving
        self._leaving = True
        _log.info("a capture is given up", instance=self.name, token=self.token, why=why)
        # Wake the readers that wait for changes, because they must learn that none will arrive here.
        self._arrived(self.name)
        threading.Thread(target=self._end, args=(left,), name=f"leave-{self.name}", daemon=True).start()

    def wait_left(self, seconds: float) -> bool:
        """Wait up to `seconds` for the release of the lease; return whether it has been released."""
        return self._left.wait(seconds)

    def _end(self, left: Callable[[], None]) -> None:
        capture = self._capture
        try:
            if capture is not None:
                record = self._fenced.record
                # Once stopped, the capture closes its log. Bytes that arrive after that are read from the
                # server again.
                try:
                    changed = self._progress_of(capture, record)
                finally:
                    capture.stop()
                # A store that does not answer delays this record, but not the end of the capture.
                self._record_end(record, changed)
        finally:
            self._release(capture)
            self._left.set()
            left()

    def _release(self, capture: TenuredCapture | None) -> None:
        """Release the lease once the capture has ended."""
        while capture is not None and not capture.join(_JOIN_SECONDS):
            _log.warning("a capture is still ending", instance=self.name)
        # While the session is alive, no other process can have the lease, so retry until the session ends.
        retry = Retry("a capture's lease cannot be given back yet", backoff=_BACKOFF)
        while not self._lease.expired:
            try:
                self._lease.release()
                break
            except PenstockError as problem:
                retry.wait(problem, instance=self.name)

    def _record_end(self, record: CaptureRecord, changed: CaptureRecord) -> None:
        """Record where the capture ends. If this fails, an earlier record is still correct."""
        try:
            self._record_change(record, changed)
        except PenstockError as problem:
            _log.info("the end of a capture is not recorded", instance=self.name, why=str(problem))


def _holds_of(log: ServedLog) -> tuple[Hold, ...]:
    if isinstance(log, MemoryLog):
        return ()
    holds = Holds(log.disk, log.layout)
    return tuple(sorted(holds.readable(time.time_ns() // 1000), key=lambda hold: hold.name))


def _replaces(log: ServedLog, epoch: EpochRecord, agreed: Handover | None, *, is_running: bool) -> bool:
    """Return whether a log continues the recorded position. If so, a host without this log could begin at the
    log's position.

    If a member captured before other members did, its log ends before the recorded position. The epoch of a
    log may be older than the agreed epoch, until the server has accepted the log's end and the log begins the
    agreed epoch or a later one.
    """
    if agreed is None or epoch.epoch > agreed.position.epoch:
        return True
    if (epoch.epoch, epoch.server_key) != (agreed.position.epoch, agreed.server_key):
        return False
    return is_running or (log.visible or epoch.position) >= agreed.reached


def _handover_of(
    log: ServedLog, epoch: EpochRecord, holds: Sequence[Hold], before: Handover | None
) -> Handover:
    """Return where a host without this log would begin: at the position of the furthest-behind reader,
    otherwise at the end of the log.
    """
    visible, earliest = log.visible, log.earliest()
    reached = visible if visible is not None and visible.epoch == epoch.epoch else epoch.position
    needed = [hold.position for hold in holds]
    if isinstance(log, MemoryLog) and earliest is not None:
        # A log in memory keeps only data that its readers have not consumed, so its start is still needed.
        needed.append(earliest)
    position = max(min([reached, *needed]), epoch.position)
    if earliest is not None and earliest.epoch == epoch.epoch:
        # Begin no earlier than the log, because data that has left the log must not be read again.
        position = max(position, min(earliest, reached))
    if position not in (reached, epoch.position):
        position = replace(position, offset=log.boundary_before(position))
    if before is not None and before.position == position and before.fingerprint:
        if before.reached == reached:
            return before
        return replace(before, reached=reached, time_us=_time_before(log, position, reached))
    return Handover(
        position,
        epoch.server_key,
        log.gtid_set(position) if position != epoch.position else epoch.gtid_set,
        _time_before(log, position, reached),
        _fingerprint(log, position),
        reached,
    )


def _time_before(log: ServedLog, position: Position, reached: Position) -> int:
    """Return the time of a commit at or before a position, 0 if the log has no such commit."""
    if position == reached:
        return log.time_max_us
    before = [
        segment.time_first_us
        for segment in log.segments
        if (segment.epoch, segment.file_number, segment.base)
        <= (position.epoch, position.file_number, position.offset)
    ]
    return next((time_us for time_us in reversed(before) if time_us), 0)


def _fingerprint(log: ServedLog, position: Position) -> str:
    try:
        return file_fingerprint(log.head_bytes(position.epoch, position.file))
    except SourceMissing:
        # The log has no data from the position's file yet.
        return ""
