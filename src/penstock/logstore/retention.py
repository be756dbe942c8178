# SPDX-License-Identifier: Apache-2.0
"""Retention: which segments are removed from a log, and when.

The limits are age, bytes and free disk space; holds take precedence over them. The oldest segments are
removed first, so the remaining segments are always consecutive. The newest segment is never removed. Removal
has two phases. First the segments are removed from the indexes and moved to `<folder>/expired`, where no
reader looks. A reader that has a segment open continues to read it. The next pass deletes the files. A crash
in between leaves each segment either fully in the log or fully out of it.
"""

import math
import time
from calendar import timegm
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import structlog

from penstock.errors import (
    LogFull,
    PenstockError,
)
from penstock.limits import HOLD_BYTES_DEFAULT
from penstock.logstore.catalog import SegmentCatalog
from penstock.logstore.disk import TMP_SUFFIX, Disk
from penstock.logstore.holds import BrokenHold, Hold, Holds
from penstock.logstore.index import SegmentIndex
from penstock.logstore.layout import COLD_SUFFIX, INDEX_SUFFIX, SEGMENT_SUFFIX, Layout
from penstock.logstore.records import TIERED, SegmentRecord
from penstock.logstore.tier import TIERED_SUFFIX, Tier, TieredNote

EXPIRED_FOLDER = "expired"
AGE_SECONDS_DEFAULT = 24 * 3600

_HOUR_SECONDS = 3600
_SECOND_US = 1_000_000
# The offset of a source file's first event. The log stores no bytes between this offset and the start of the
# file's first segment.
_FILE_START = 4
# The files of a segment: its data, or the note about its object in the tier. The index moves last: an index
# without data is ignored, while data without its index would need a rebuild.
_DATA_SUFFIXES = (SEGMENT_SUFFIX, COLD_SUFFIX, TIERED_SUFFIX)
_SUFFIXES = (*_DATA_SUFFIXES, INDEX_SUFFIX)
# How long a pass keeps trying to use a store after a removal failed.
_FAILING_STORE_SECONDS_MAX = 10

_log = structlog.get_logger(__name__)


# --- The plan -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetentionPolicy:
    """How much of a log to keep.

    The first limit that is exceeded applies; None means no limit. `age_seconds` counts from the end of the
    hour in which a segment was started. `bytes_max` limits the size of the segments on this host, and
    `free_bytes` is the space to keep free on the disk. A hold is broken once this host stores more than
    `hold_bytes` after the hold's position. While the disk has less than `hold_free_bytes` free, the oldest
    holds are broken, but only those that free some of the missing space.
    """

    age_seconds: float | None = AGE_SECONDS_DEFAULT
    bytes_max: int | None = None
    free_bytes: int | None = None
    hold_bytes: int | None = HOLD_BYTES_DEFAULT
    hold_free_bytes: int | None = None


class Reason(StrEnum):
    """The reason why a segment is removed."""

    AGE = "age"
    BYTES = "bytes"
    FREE_BYTES = "free_bytes"
    BY_HAND = "by_hand"


@dataclass(frozen=True)
class Departure:
    """One segment to remove from the log, and the reason."""

    segment: SegmentRecord
    reason: Reason


@dataclass(frozen=True)
class RetentionPlan:
    """The segments that would be removed, oldest first, the segments kept by a hold, and the broken holds."""

    departures: list[Departure]
    held: list[Departure] = field(default_factory=list)
    held_by: Hold | None = None
    broken: tuple[BrokenHold, ...] = ()

    @property
    def bytes_freed(self) -> int:
        """The bytes freed on this host's disk."""
        return sum(_local_bytes(departure.segment) for departure in self.departures)


class Retention:
    """Removes a log's oldest segments. Run by the process that writes the log, one pass at a time.

    `clock` returns the time in microseconds UTC since 1970.
    """

    def __init__(
        self,
        disk: Disk,
        layout: Layout,
        policy: RetentionPolicy,
        *,
        tier: Tier | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.policy = policy
        self.holds = Holds(disk, layout)
        # The broken holds of the latest pass.
        self.broken: tuple[BrokenHold, ...] = ()
        # The end of the last removed segment.
        self._gone_to: tuple[int, ...] = ()
        self._disk = disk
        self._layout = layout
        self._tier = tier
        self._clock = clock or _now_us

    def run(self, catalog: SegmentCatalog) -> RetentionPlan:
        """Run one pass: delete the files of segments that the previous pass removed, then remove the segments
        that are due now. Returns the plan.

        An unreadable hold is logged as an error and does not retain any data. Raises DiskFailed. Errors from
        the object store are raised only at the very end, so that space on this host is freed even if the
        store fails.
        """
        notes = self._expired_notes()
        self._sweep_local()
        with self.holds.unchanged():
            self.holds.remove_expired(self._clock())
            plan = self.plan(catalog.segments)
            before = {broken.hold.name for broken in self.broken}
            fresh = frozenset(broken.hold.name for broken in plan.broken if broken.hold.name not in before)
            self._report(plan.broken)
            if fresh:
                # Before removing segments after a broken hold, look for prepared transactions in them.
                plan = self.plan(catalog.segments, fresh)
            self.expire(catalog, plan)
        self._sweep_store(notes)
        return plan

    def plan(self, segments: SegmentIndex, counting: frozenset[str] = frozenset()) -> RetentionPlan:
        """Return which segments would be removed now, and why; nothing is changed.

        Holds in `counting` keep their segments even if they are broken.
        """
        now = self._clock()
        holds = self.holds.readable(now)
        # The newest segment always stays: it may be open, and the log continues there.
        candidates = list(segments)[:-1]
        due = self._due(candidates, sum(map(_local_bytes, segments)), now)
        broken = self._broken(holds, segments, due)
        names = {broken_hold.hold.name for broken_hold in broken} - counting
        hold = min((hold for hold in holds if hold.name not in names), key=_hold_key, default=None)
        free = len(due)
        if hold is not None:
            hold_key = _hold_key(hold)
            free = next(
                (index for index, departure in enumerate(due) if _end_of(departure.segment) > hold_key),
                len(due),
            )
        return RetentionPlan(due[:free], due[free:], hold if free < len(due) else None, tuple(broken))

    def expire(self, catalog: SegmentCatalog, plan: RetentionPlan) -> None:
        """Remove the plan's segments from L1 and move them away. The next sweep deletes them."""
        if plan.held_by is not None:
            _log.warning(
                "segments are due but held",
                hold=plan.held_by.name,
                position=str(plan.held_by.position),
                segments=len(plan.held),
                bytes=sum(_local_bytes(departure.segment) for departure in plan.held),
            )
        if not plan.departures:
            return
        versions = {departure.segment.version for departure in plan.departures}
        self._gone_to = _end_of(plan.departures[-1].segment)
        try:
            # Update L1 first, so that no reader is sent to a file that is about to move.
            catalog.drop(versions)
            self._move_all(plan.departures)
        except LogFull:
            # On a full disk there is no space for L1 either. Deleting the segments frees space, and after a
            # crash in between, L1 is rebuilt from the remaining segments.
            _log.warning("the disk is full: what leaves is removed at once", folder=str(self._layout.folder))
            self._move_all(plan.departures)
            self._sweep_local()
            catalog.drop(versions)

    def sweep(self) -> int:
        """Delete the files of segments that an earlier pass removed; return how many bytes this freed on this
        host.

        A segment that cannot be removed from its store, or whose note cannot be read, is kept for the next
        pass, and the others continue. Raises the first such error at the end: LogDamaged, ConnectionLost.
        """
        freed = self._sweep_local()
        return freed + self._sweep_store(self._expired_notes())

    # --- Inside -----------------------------------------------------------------------------

    def _expired_notes(self) -> list[Path]:
        expired = self._layout.folder / EXPIRED_FOLDER
        return [expired / name for name in self._disk.list(expired) if name.endswith(TIERED_SUFFIX)]

    def _sweep_local(self) -> int:
        """Delete the expired files on this host."""
        expired = self._layout.folder / EXPIRED_FOLDER
        self._remove_lone_indexes()
        here = tuple(suffix for suffix in (*_SUFFIXES, TMP_SUFFIX) if suffix != TIERED_SUFFIX)
        removable = [expired / name for name in self._disk.list(expired) if name.endswith(here)]
        return self._remove_expired(removable)

    def _sweep_store(self, notes: list[Path]) -> int:
        """Remove segments from their store according to their notes, and then the notes."""
        first: PenstockError | None = None
        started = time.monotonic()
        removed = []
        for path in notes:
            if first is not None and time.monotonic() - started > _FAILING_STORE_SECONDS_MAX:
                break
            try:
                if self._remove_from_tier(path):
                    removed.append(path)
            except PenstockError as problem:
                _log.warning("an expired segment stays in its store", note=path.name, reason=str(problem))
                first = first or problem
        freed = self._remove_expired(removed)
        if first is not None:
            raise first
        return freed

    def _remove_expired(self, paths: list[Path]) -> int:
        freed = 0
        for path in paths:
            freed += self._disk.size(path)
            self._disk.remove(path)
            _log.info("an expired file was removed", file=path.name)
        if freed:
            self._disk.sync_folder(self._layout.folder / EXPIRED_FOLDER)
        return freed

    def _broken(self, holds: list[Hold], segments: SegmentIndex, due: list[Departure]) -> list[BrokenHold]:
        """Return the holds that exceed a limit and therefore keep nothing."""
        floor = self._hold_bytes_floor(segments)
        # After a restart, only the start of the log shows which segments have been removed.
        gone_to = self._gone_to or (_begin_of(segments[0]) if len(segments) else ())
        broken = []
        within = []
        for hold in holds:
            if _hold_key(hold) < gone_to and _hold_key(hold) != (*gone_to[:2], _FILE_START):
                broken.append(BrokenHold(hold, "what it was to keep has left the log"))
            elif _hold_key(hold) < floor:
                broken.append(BrokenHold(hold, f"more than hold_bytes follow it: {self.policy.hold_bytes}"))
            else:
                within.append(hold)
        floor = self._free_bytes_floor(within, due)
        bound = self.policy.hold_free_bytes
        why = f"the disk has less than hold_free_bytes free: {bound}"
        return broken + [BrokenHold(hold, why) for hold in within if _hold_key(hold) < floor]

    def _hold_bytes_floor(self, segments: SegmentIndex) -> tuple[float, ...]:
        """Return the lower bound for holds, as a sort key: a hold before it would keep more bytes on this
        host than allowed.
        """
        bound, bytes_after, newest = self.policy.hold_bytes, 0, len(segments) - 1
        for index in range(newest, -1, -1):
            bytes_after += _local_bytes(segments[index])
            if bound is not None and bytes_after > bound:
                return _end_of(segments[index]) if index < newest else (math.inf,)
        return ()

    def _free_bytes_floor(self, holds: list[Hold], due: list[Departure]) -> tuple[float, ...]:
        """Return a position as a sort key. Holds before this position are broken to free as much disk space
        as is missing.
        """
        bound = self.policy.hold_free_bytes
        oldest = min(map(_hold_key, holds), default=None)
        if bound is None or oldest is None:
            return ()
        missing = bound - self._disk.free_bytes(self._layout.folder)
        floor: tuple[float, ...] = ()
        for departure in due:
            if missing <= 0:
                break
            # Removing a segment in the tier frees nothing on this host, so no hold is broken for such a
            # segment alone.
            if local := _local_bytes(departure.segment):
                missing -= local
                floor = _end_of(departure.segment)
        return floor

    def _report(self, broken: tuple[BrokenHold, ...]) -> None:
        """Log a hold once when a limit breaks it, and once when the hold is in force again."""
        before = {broken_hold.hold.name for broken_hold in self.broken}
        for broken_hold in broken:
            if broken_hold.hold.name not in before:
                _log.error(
                    "a hold is broken and holds nothing",
                    hold=broken_hold.hold.name,
                    position=str(broken_hold.hold.position),
                    why=broken_hold.why,
                )
        for name in sorted(before - {broken_hold.hold.name for broken_hold in broken}):
            _log.info("a hold is no longer broken", hold=name)
        self.broken = broken

    def _due(self, candidates: list[SegmentRecord], bytes_held: int, now_us: int) -> list[Departure]:
        """Return the segments that the policy alone would remove, oldest first."""
        policy = self.policy
        missing = 0
        if policy.free_bytes is not None:
            missing = policy.free_bytes - self._disk.free_bytes(self._layout.folder)
        due = []
        for segment in candidates:
            if policy.age_seconds is not None and _age_seconds(segment, now_us) >= policy.age_seconds:
                reason = Reason.AGE
            elif policy.bytes_max is not None and bytes_held > policy.bytes_max:
                reason = Reason.BYTES
            elif missing > 0:
                reason = Reason.FREE_BYTES
            else:
                break
            due.append(Departure(segment, reason))
            bytes_held -= _local_bytes(segment)
            missing -= _local_bytes(segment)
        return due

    def _move_all(self, departures: list[Departure]) -> None:
        expired = self._layout.folder / EXPIRED_FOLDER
        self._disk.make_folder(expired)
        for departure in departures:
            self._move(departure.segment, expired)
            _log.info(
                "a segment left the log",
                segment=departure.segment.version,
                hour=departure.segment.hour,
                reason=departure.reason.value,
                bytes=departure.segment.stored_bytes,
                transactions=departure.segment.transactions,
            )

    def _move(self, segment: SegmentRecord, expired: Path) -> None:
        folder = self._layout.hour_folder(segment.hour)
        names = [f"{segment.version:019d}{suffix}" for suffix in _SUFFIXES]
        for name in names:
            if self._disk.exists(folder / name):
                self._disk.rename(folder / name, expired / name)
        self._disk.sync_folder(expired)
        if self._disk.exists(folder):
            self._disk.sync_folder(folder)
            self._disk.remove_folder(folder)
            self._disk.sync_folder(self._layout.folder)

    def _remove_lone_indexes(self) -> None:
        """Remove indexes whose segments moved just before a crash."""
        for hour in self._layout.hours(self._disk):
            folder = self._layout.hour_folder(hour)
            names = self._disk.list(folder)
            segments = {name.split(".", 1)[0] for name in names if name.endswith(_DATA_SUFFIXES)}
            lone = [
                name
                for name in names
                if name.endswith(INDEX_SUFFIX) and name.removesuffix(INDEX_SUFFIX) not in segments
            ]
            for name in lone:
                self._disk.remove(folder / name)
            if lone:
                self._disk.sync_folder(folder)
            if len(lone) == len(names):
                self._disk.remove_folder(folder)

    def _remove_from_tier(self, path: Path) -> bool:
        if self._tier is None:
            _log.warning("an expired segment stays in its store: no tier is named", note=path.name)
            return False
        self._tier.remove(TieredNote.load(self._disk, path))
        return True


def _begin_of(segment: SegmentRecord) -> tuple[int, int, int]:
    return segment.epoch, segment.file_number, segment.base


def _end_of(segment: SegmentRecord) -> tuple[int, int, int]:
    return segment.epoch, segment.file_number, segment.source_end


def _hold_key(hold: Hold) -> tuple[int, int, int]:
    return hold.position.epoch, hold.position.file_number, hold.position.offset


def _local_bytes(segment: SegmentRecord) -> int:
    return 0 if segment.state == TIERED else segment.stored_bytes


def _age_seconds(segment: SegmentRecord, now_us: int) -> float:
    """Return the seconds since the end of the hour in which the segment was started."""
    begun = timegm(time.strptime(str(segment.hour), "%Y%m%d%H"))
    return now_us / _SECOND_US - (begun + _HOUR_SECONDS)


def _now_us() -> int:
    return time.time_ns() // 1000
