# SPDX-License-Identifier: Apache-2.0
"""A log without files: the same log, over a bounded disk that is memory (log.mode memory).

Nothing is lost to a reader that is registered: what it has yet to acknowledge stays, and where that fills the
memory the writer is held back, as by a full disk, until the reader acknowledges or its time is over. What
nobody waits for leaves, the oldest first. It ends with the process, so nothing in it outlasts a crash,
whatever `durable` says: no acknowledgement of another machine may stand on it.
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
from penstock.settings import LogSettings

# What is acknowledged leaves a segment at a time, so there are several of them.
_SEGMENTS_MIN = 8
MEMORY_BYTES_MIN = MIB

_ROOT = Path("/memory")

_log = structlog.get_logger(__name__)


class MemoryLog(Log):
    """The log of one instance in memory. Made by `open_memory`; used as any log is."""

    def __init__(self, settings: LogSettings, instance: str, clock: Callable[[], float]) -> None:
        room = settings.memory_bytes
        if room < MEMORY_BYTES_MIN:
            raise OptionInvalid(
                f"a log in memory of {room} bytes is too small",
                hint=f"Raise log.memory_bytes to {MEMORY_BYTES_MIN} or more",
            )
        changed: dict[str, Any] = {
            # The disk is memory already; a tier of it beside would hold everything twice.
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
        """Make an empty log of at most `memory_bytes`. Raises OptionInvalid for less than a mebibyte."""
        return cls(settings, instance, clock)

    # --- Readers ----------------------------------------------------------------------------

    def hold(self, hold: Hold, *, admin: bool = False) -> None:
        """Register a reader for an account until its time is over, or acknowledge what it has consumed.

        Raises AccessDenied for a reader of another account, unless an `admin` asks; QuotaReached for one
        more than an account may have; what `register` and `acknowledge` raise.
        """
        first = self._located(hold)
        with self._writing, self._readers_lock:
            self._forget_expired()
            known = self._readers.get(hold.name)
            if known is None:
                prove_may_add((one.account for one in self._readers.values()), hold.account)
                self._register(hold, first)
                return
            prove_owns(hold.name, known.account, hold.account, admin=admin)
        self._acknowledge(hold.name, hold.position, hold.expires_us)

    def holds(self) -> list[Hold]:
        """Return the readers that are registered, by name."""
        with self._readers_lock:
            self._forget_expired()
            return sorted(self._readers.values(), key=lambda one: one.name)

    def give_up(self, name: str, account: str, *, admin: bool = False) -> None:
        """Keep nothing for an account's reader any more.

        Raises SourceMissing where there is none, AccessDenied for a reader of another account, unless an
        `admin` asks.
        """
        prove_not_own(name)
        with self._readers_lock:
            known = self._readers.get(name)
            if known is None:
                raise missing_hold(name)
            prove_owns(name, known.account, account, admin=admin)
            del self._readers[name]

    def register(self, name: str, position: Position) -> None:
        """Keep what follows a position for a reader, until it acknowledges it. Its name must be free.

        Raises OptionInvalid for a name that is taken, PositionPurged, PositionInvalid.
        """
        hold = Hold(name, position)
        first = self._located(hold)
        with self._writing, self._readers_lock:
            if name in self._readers:
                raise OptionInvalid(
                    f"a reader named {name!r} is registered already", hint="Choose another name"
                )
            self._register(hold, first)

    def _located(self, hold: Hold) -> Position | None:
        """Look for the place of a new reader while the writer goes on; return where the log begins.

        None for a reader that is known.
        """
        first = self.earliest()
        with self._readers_lock:
            if hold.name in self._readers:
                return None
        if hold.position != self._visible:
            self.locate_position(hold.position)
        return first

    def _register(self, hold: Hold, first: Position | None) -> None:
        # What was found is found again only where something left the log since.
        if self.earliest() != first and hold.position != self._visible:
            self.locate_position(hold.position)
        self._readers[hold.name] = hold

    def _forget_expired(self) -> None:
        now_us = int(self._clock() * 1_000_000)
        for hold in list(self._readers.values()):
            if hold.has_expired(now_us):
                _log.info("a hold expired", hold=hold.name)
                del self._readers[hold.name]

    def acknowledge(self, name: str, position: Position) -> None:
        """Say that a reader has consumed all before a position, and let the writer go on.

        Raises OptionInvalid for a name that is not registered, PositionInvalid for more than there is.
        """
        self._acknowledge(name, position, None)

    def _acknowledge(self, name: str, position: Position, expires_us: int | None) -> None:
        visible = self._visible
        with self._readers_lock:
            known = self._readers.get(name)
            if known is None:
                raise OptionInvalid(f"no reader named {name!r} is registered", hint="Register it first")
            if visible is None or position > visible:
                raise PositionInvalid(
                    f"{name} acknowledges more than there is: the log goes to {visible}",
                    position=str(position),
                    hint="Acknowledge the end of what was read",
                )
            self._readers[name] = replace(
                known, position=max(position, known.position), expires_us=expires_us
            )

    def release(self, name: str) -> None:
        """Keep nothing for a reader any more; one that is not registered is no error."""
        with self._readers_lock:
            self._readers.pop(name, None)

    def acknowledged(self) -> dict[str, Position]:
        """Return how far each registered reader has acknowledged."""
        return {hold.name: hold.position for hold in self.holds()}

    # --- Room -------------------------------------------------------------------------------

    def full_because(self) -> str | None:
        """Return why nothing more should be received now: registered readers are too far behind."""
        self._make_room()
        why, visible = super().full_because(), self._visible
        behind = min(self.acknowledged().items(), key=lambda one: one[1], default=None)
        if why is None or visible is None or behind is None or behind[1] >= visible:
            # What is left is one open segment: it grows, or a transaction in it is too large.
            return None
        return f"memory is full, and {behind[0]} has acknowledged up to {behind[1]}"

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
        """Add whole events; see `Log.append`. What was acknowledged makes room where it is needed.

        Raises LogFull while registered readers are too far behind: append the same again. Raises
        LimitExceeded
        for a transaction that does not fit into the memory.
        """
        with self._writing:
            try:
                super().append(
                    data, start, end, boundary, records, time_max_us=time_max_us, gtid_set=gtid_set
                )
                return
            except LogFull:
                consumed = self._make_room(all_that_can=True)
            try:
                super().append(
                    data, start, end, boundary, records, time_max_us=time_max_us, gtid_set=gtid_set
                )
            except LogFull as problem:
                # What was acknowledged only since makes room for the next try.
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
        """Return how far everybody has acknowledged; without a reader nobody waits for anything."""
        places = self.acknowledged().values()
        return min([*places, self._visible]) if self._visible is not None else None

    def _make_room(self, all_that_can: bool = False) -> Position | None:
        """Let the oldest segments go that everybody has acknowledged, as far as room is needed.

        Returns up to where everybody had.
        """
        with self._writing:
            consumed = self._consumed()
            if consumed is None:
                return None
            place = (consumed.epoch, consumed.file_number, consumed.offset)
            for segment in list(self.segments):
                short = self.disk.free_bytes(self.folder) < 2 * self.settings.free_bytes_min
                ends = (segment.epoch, segment.file_number, segment.source_end)
                if segment.state == OPEN or ends > place or not (short or all_that_can):
                    break
                self._remove(segment)
            return consumed

    def _remove(self, segment: SegmentRecord) -> None:
        path = self.layout.segment(segment.hour, segment.version)
        # L1 in memory first, so that no reader is sent to what goes; the bytes next, for they make room
        # for its file.
        with self._indexing, self._changed:
            self._index = self._index.drop(segment.version)
            self._heads.pop(segment.version, None)
        self.disk.remove(path)
        for left in self.disk.list(path.parent):
            if left.startswith(f"{segment.version:019d}."):
                self.disk.remove(path.parent / left)
        self._change_index(lambda index: index)
