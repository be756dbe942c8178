# SPDX-License-Identifier: Apache-2.0
"""A log without files: a `Log` on a bounded disk in memory (log.mode memory).

The log keeps all data that a registered reader has not acknowledged. If that data fills the memory, the
writer is subject to backpressure until the reader acknowledges or its registration expires. All other data is
removed, oldest first. The log is lost when the process ends, so nothing survives a crash, whatever `durable`
reports. Never acknowledge data to another machine because it is in this log.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import structlog

from penstock.errors import LimitExceeded, LogFull, OptionInvalid, PositionInvalid
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.limits import MIB
from penstock.logstore.disk import Buffer
from penstock.logstore.holds import Hold, missing_hold, prove_may_add, prove_not_own, prove_owns
from penstock.logstore.log import Log
from penstock.logstore.memory_disk import MemoryDisk
from penstock.logstore.records import OPEN, SegmentRecord
from penstock.model import Position
from penstock.settings.daemon import LogSettings

# Acknowledged data is removed in whole segments, so the log must have several segments.
_SEGMENTS_MIN = 8
MEMORY_BYTES_MIN = MIB

_ROOT = Path("/memory")

_log = structlog.get_logger(__name__)


class MemoryLog(Log):
    """The in-memory log of one instance. Create it with `open_memory`, and use it like any other log."""

    def __init__(self, settings: LogSettings, instance: str, clock: Callable[[], float]) -> None:
        room = settings.memory_bytes
        if room < MEMORY_BYTES_MIN:
            raise OptionInvalid(
                f"a log in memory of {room} bytes is too small",
                hint=f"Raise log.memory_bytes to {MEMORY_BYTES_MIN} or more",
            )
        changed: dict[str, Any] = {
            # The disk is already in memory, so a memory tier would store everything twice.
            "mode": "file",
            "fsync": "never",
            "segment_bytes": min(settings.segment_bytes, room // _SEGMENTS_MIN),
            "free_bytes_min": room // _SEGMENTS_MIN,
            "cold_after": None,
            "tier": None,
        }
        self._readers: dict[str, Hold] = {}
        self._readers_lock = threading.Lock()
        kept = settings.model_copy(update=changed)
        super().__init__(_ROOT / instance, kept, MemoryDisk(room), instance, clock, accept_loss=False)

    @classmethod
    def open_memory(
        cls, settings: LogSettings, *, instance: str, clock: Callable[[], float] = time.time
    ) -> Self:
        """Create an empty log of at most `memory_bytes`. Raises OptionInvalid for less than a mebibyte."""
        return cls(settings, instance, clock)

    # --- Readers ----------------------------------------------------------------------------

    def hold(self, hold: Hold, *, admin: bool = False) -> None:
        """Register a reader for an account until its expiry, or acknowledge the data that it has consumed.

        Raises AccessDenied for a reader of another account, unless an `admin` asks; QuotaReached if the
        account has too many readers; PositionPurged for a position that is no longer in the log, and
        PositionInvalid for a position after the end.
        """
        first = self._check_new_reader(hold)
        with self._writing, self._readers_lock:
            self._forget_expired()
            known = self._readers.get(hold.name)
            if known is None:
                prove_may_add((reader.account for reader in self._readers.values()), hold.account)
                self._register(hold, first)
                return
            prove_owns(hold.name, known.account, hold.account, admin=admin)
        self._acknowledge(hold.name, hold.position, hold.expires_us)

    def holds(self) -> list[Hold]:
        """Return the registered readers by name."""
        with self._readers_lock:
            self._forget_expired()
            return sorted(self._readers.values(), key=lambda hold: hold.name)

    def give_up(self, name: str, account: str, *, admin: bool = False) -> None:
        """Release an account's reader.

        Raises SourceMissing if the reader is not registered, AccessDenied for a reader of another account,
        unless an `admin` asks.
        """
        prove_not_own(name)
        with self._readers_lock:
            known = self._readers.get(name)
            if known is None:
                raise missing_hold(name)
            prove_owns(name, known.account, account, admin=admin)
            del self._readers[name]

    def _check_new_reader(self, hold: Hold) -> Position | None:
        """Check a new reader's position without blocking the writer; return where the log begins, None if the
        reader is already registered.
        """
        first = self.earliest()
        with self._readers_lock:
            if hold.name in self._readers:
                return None
        if hold.position != self._visible:
            self.locate_position(hold.position)
        return first

    def _register(self, hold: Hold, first: Position | None) -> None:
        # The position is checked again only if segments have left the log since the first check.
        if self.earliest() != first and hold.position != self._visible:
            self.locate_position(hold.position)
        self._readers[hold.name] = hold

    def _forget_expired(self) -> None:
        now_us = int(self._clock() * 1_000_000)
        for hold in list(self._readers.values()):
            if hold.has_expired(now_us):
                _log.info("a hold expired", hold=hold.name)
                del self._readers[hold.name]

    def _acknowledge(self, name: str, position: Position, expires_us: int | None) -> None:
        visible = self._visible
        with self._readers_lock:
            known = self._readers.get(name)
            if known is None:
                raise OptionInvalid(f"no reader named {name!r} is registered", hint="Register it first")
            if visible is None or position > visible:
                raise PositionInvalid(
                    f"{name} acknowledges more than the log has: it ends at {visible}",
                    position=str(position),
                    hint="Acknowledge the end of what was read",
                )
            self._readers[name] = replace(
                known, position=max(position, known.position), expires_us=expires_us
            )

    def acknowledged(self) -> dict[str, Position]:
        """Return the acknowledged position of each registered reader."""
        return {hold.name: hold.position for hold in self.holds()}

    # --- Room -------------------------------------------------------------------------------

    def full_because(self) -> str | None:
        """Return why capture should pause if registered readers are too far behind."""
        self._make_room()
        why, visible = super().full_because(), self._visible
        slowest = min(self.acknowledged().items(), key=lambda reader: reader[1], default=None)
        if why is None or visible is None or slowest is None or slowest[1] >= visible:
            # Readers have acknowledged everything visible. Only the open segment is left, which keeps growing
            # or has a transaction that is too large.
            return None
        return f"memory is full, and {slowest[0]} has acknowledged up to {slowest[1]}"

    def append(
        self,
        data: Buffer,
        start: int,
        end: int,
        boundary: int,
        records: bytes = b"",
        *,
        time_max_us: int = 0,
        gtid_set: LoggedSet = NO_GTIDS,
    ) -> None:
        """Append whole events; see `Log.append`. Acknowledged segments are removed if space is needed.

        Raises LogFull while registered readers are too far behind: retry the same call. Raises LimitExceeded
        for a transaction that does not fit into the memory.
        """
        with self._writing:
            try:
                super().append(
                    data, start, end, boundary, records, time_max_us=time_max_us, gtid_set=gtid_set
                )
                return
            except LogFull:
                consumed = self._make_room(all_segments=True)
            try:
                super().append(
                    data, start, end, boundary, records, time_max_us=time_max_us, gtid_set=gtid_set
                )
            except LogFull as problem:
                # Readers have acknowledged more data during the call, which frees space for a retry.
                if consumed != self._visible:
                    raise
                raise LimitExceeded(
                    f"a transaction does not fit into a log in memory of {self._disk_room} bytes",
                    position=str(self._visible) if self._visible is not None else None,
                    hint="Raise log.memory_bytes, or keep files: log.mode mixed",
                ) from problem

    @property
    def _disk_room(self) -> int:
        assert isinstance(self.disk, MemoryDisk)
        return self.disk.room

    def _consumed(self) -> Position | None:
        """Return the position up to which all readers have acknowledged; without readers, the visible
        position.
        """
        acknowledged = self.acknowledged().values()
        return min([*acknowledged, self._visible]) if self._visible is not None else None

    def _make_room(self, all_segments: bool = False) -> Position | None:
        """Remove the oldest segments that all readers have acknowledged, until enough space is free.

        Returns the position that all readers have acknowledged.
        """
        with self._writing:
            consumed = self._consumed()
            if consumed is None:
                return None
            consumed_key = (consumed.epoch, consumed.file_number, consumed.offset)
            for segment in list(self.segments):
                short = self.disk.free_bytes(self.folder) < 2 * self.settings.free_bytes_min
                segment_end = (segment.epoch, segment.file_number, segment.source_end)
                if segment.state == OPEN or segment_end > consumed_key or not (short or all_segments):
                    break
                self._remove(segment)
            return consumed

    def _remove(self, segment: SegmentRecord) -> None:
        path = self.layout.segment(segment.hour, segment.version)
        # Update L1 in memory first, so that no reader is sent to the removed segment. Remove the bytes next:
        # they free the space for the L1 file.
        with self._indexing, self._changed:
            self._index = self._index.drop(segment.version)
            self._heads.pop(segment.version, None)
        self.disk.remove(path)
        for name in self.disk.list(path.parent):
            if name.startswith(f"{segment.version:019d}."):
                self.disk.remove(path.parent / name)
        self._change_index(lambda index: index)
