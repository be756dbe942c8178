# SPDX-License-Identifier: Apache-2.0
"""What leaves a log, and when: by age, by bytes, by what the disk has left; never past a hold.

The oldest segments leave, without a gap: what stays is one run up to the newest, which always stays. They go
in two phases. First they leave the indexes and move to `<folder>/expired`, where no reader looks; a reader
that has one open reads on. The next pass removes them for good. A crash anywhere in between leaves a segment
in the log or out of it, and never half of one in it.
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
# The first place in a source file. A log has nothing between it and the file's first segment.
_FILE_START = 4
# What a segment is made of: its data, or the note that says where that is. Its index moves last: alone it
# means
# nothing, while data without it would have to be read again.
_DATA_SUFFIXES = (SEGMENT_SUFFIX, COLD_SUFFIX, TIERED_SUFFIX)
_SUFFIXES = (*_DATA_SUFFIXES, INDEX_SUFFIX)
# How long a pass goes on with a store in which something could not be removed.
_FAILING_STORE_SECONDS_MAX = 10

_log = structlog.get_logger(__name__)


# --- The plan -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetentionPolicy:
    """How much is kept, whichever bound is met first; None sets no bound.

    `age_seconds` counts from the end of the hour in which a segment was begun. `bytes_max` is for the
    segments on this host, `free_bytes` is what the disk should have left. A hold after which this host has
    more than `hold_bytes` holds nothing any longer; while the disk has less than `hold_free_bytes` left,
    those furthest back hold nothing, as far as that frees what is missing.
    """

    age_seconds: float | None = AGE_SECONDS_DEFAULT
    bytes_max: int | None = None
    free_bytes: int | None = None
    hold_bytes: int | None = HOLD_BYTES_DEFAULT
    hold_free_bytes: int | None = None


class Reason(StrEnum):
    """Why a segment leaves."""

    AGE = "age"
    BYTES = "bytes"
    FREE_BYTES = "free_bytes"
    BY_HAND = "by_hand"


@dataclass(frozen=True)
class Departure:
    """One segment that leaves, and why."""

    segment: SegmentRecord
    reason: Reason


@dataclass(frozen=True)
class RetentionPlan:
    """What would leave, oldest first; what would too, but for a hold; and the holds that are broken."""

    departures: list[Departure]
    held: list[Departure] = field(default_factory=list)
    held_by: Hold | None = None
    broken: tuple[BrokenHold, ...] = ()

    @property
    def bytes_freed(self) -> int:
        """The bytes of this host's disk that come free."""
        return sum(_local_bytes(one.segment) for one in self.departures)


class Retention:
    """Lets a log's oldest segments go. One pass at a time; the process that writes the log runs it.

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
        # As the last pass found them.
        self.broken: tuple[BrokenHold, ...] = ()
        # Where the last segment ended that left.
        self._gone_to: tuple[int, ...] = ()
        self._disk = disk
        self._layout = layout
        self._tier = tier
        self._clock = clock or _now_us

    def run(self, catalog: SegmentCatalog) -> RetentionPlan:
        """Do one pass: remove what left in the last one, then let go what is due now. Returns what left.

        A hold that cannot be read is named in an error and holds nothing. Raises DiskFailed, and last of
        all what `sweep` raises for a note: the disk of this host is made free whatever the store does.
        """
        notes = self._expired_notes()
        self._sweep_here()
        with self.holds.unchanged():
            self.holds.remove_expired(self._clock())
            plan = self.plan(catalog.segments)
            before = {one.hold.name for one in self.broken}
            fresh = frozenset(one.hold.name for one in plan.broken if one.hold.name not in before)
            self._report(plan.broken)
            if fresh:
                # What is prepared after them is looked for before anything there leaves.
                plan = self.plan(catalog.segments, fresh)
            self.expire(catalog, plan)
        self._sweep_store(notes)
        return plan

    def plan(self, segments: SegmentIndex, counting: frozenset[str] = frozenset()) -> RetentionPlan:
        """Return what would leave now, and why; nothing is changed. Broken holds of `counting` count."""
        now = self._clock()
        holds = self.holds.readable(now)
        # The newest always stays: it may be open, and it is where the log goes on.
        candidates = list(segments)[:-1]
        due = self._due(candidates, sum(map(_local_bytes, segments)), now)
        broken = self._broken(holds, segments, due)
        names = {one.hold.name for one in broken} - counting
        hold = min((one for one in holds if one.name not in names), key=_place_of, default=None)
        free = len(due)
        if hold is not None:
            place = _place_of(hold)
            free = next((at for at, one in enumerate(due) if _end_of(one.segment) > place), len(due))
        return RetentionPlan(due[:free], due[free:], hold if free < len(due) else None, tuple(broken))

    def expire(self, catalog: SegmentCatalog, plan: RetentionPlan) -> None:
        """Take the plan's segments out of L1 and out of sight; the next sweep removes them."""
        if plan.held_by is not None:
            _log.warning(
                "segments are due but held",
                hold=plan.held_by.name,
                position=str(plan.held_by.position),
                segments=len(plan.held),
                bytes=sum(_local_bytes(one.segment) for one in plan.held),
            )
        if not plan.departures:
            return
        versions = {one.segment.version for one in plan.departures}
        self._gone_to = _end_of(plan.departures[-1].segment)
        try:
            # L1 first: from here on no reader is sent to a file that is about to move.
            catalog.drop(versions)
            self._move_all(plan.departures)
        except LogFull:
            # A full disk has no room for L1 either. What leaves makes room, and after a crash in between
            # L1 is
            # made again from what is left.
            _log.warning("the disk is full: what leaves is removed at once", folder=str(self._layout.folder))
            self._move_all(plan.departures)
            self._sweep_here()
            catalog.drop(versions)

    def sweep(self) -> int:
        """Remove for good what left in an earlier pass; return how many bytes that freed on this host.

        A segment that cannot be removed from its store now, or whose note cannot be read, is kept for the
        next pass, and the others go on. Raises the first such problem when all else is done: LogDamaged,
        ConnectionLost.
        """
        freed = self._sweep_here()
        return freed + self._sweep_store(self._expired_notes())

    # --- Inside -----------------------------------------------------------------------------

    def _expired_notes(self) -> list[Path]:
        expired = self._layout.folder / EXPIRED_FOLDER
        return [expired / name for name in self._disk.list(expired) if name.endswith(TIERED_SUFFIX)]

    def _sweep_here(self) -> int:
        """Remove what left and lies on this host."""
        expired = self._layout.folder / EXPIRED_FOLDER
        self._remove_lone_indexes()
        here = tuple(suffix for suffix in (*_SUFFIXES, TMP_SUFFIX) if suffix != TIERED_SUFFIX)
        gone = [expired / name for name in self._disk.list(expired) if name.endswith(here)]
        return self._remove_expired(gone)

    def _sweep_store(self, notes: list[Path]) -> int:
        """Remove the segments of notes from their store, and the notes."""
        first: PenstockError | None = None
        begun = time.monotonic()
        gone = []
        for path in notes:
            if first is not None and time.monotonic() - begun > _FAILING_STORE_SECONDS_MAX:
                break
            try:
                if self._remove_from_tier(path):
                    gone.append(path)
            except PenstockError as problem:
                _log.warning("an expired segment stays in its store", note=path.name, reason=str(problem))
                first = first or problem
        freed = self._remove_expired(gone)
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
        """Return the holds that are past a bound, and hold nothing."""
        floor = self._floor_of_bytes(segments)
        # After a restart only the log itself tells what has left it.
        gone_to = self._gone_to or (_begin_of(segments[0]) if len(segments) else ())
        broken = []
        within = []
        for hold in holds:
            if _place_of(hold) < gone_to and _place_of(hold) != (*gone_to[:2], _FILE_START):
                broken.append(BrokenHold(hold, "what it was to keep has left the log"))
            elif _place_of(hold) < floor:
                broken.append(BrokenHold(hold, f"more than hold_bytes follow it: {self.policy.hold_bytes}"))
            else:
                within.append(hold)
        floor = self._floor_of_free_bytes(within, due)
        bound = self.policy.hold_free_bytes
        why = f"the disk has less than hold_free_bytes free: {bound}"
        return broken + [BrokenHold(hold, why) for hold in within if _place_of(hold) < floor]

    def _floor_of_bytes(self, segments: SegmentIndex) -> tuple[float, ...]:
        """Return the place before which a hold would keep more bytes of this host than one may."""
        bound, behind, newest = self.policy.hold_bytes, 0, len(segments) - 1
        for at in range(newest, -1, -1):
            behind += _local_bytes(segments[at])
            if bound is not None and behind > bound:
                return _end_of(segments[at]) if at < newest else (math.inf,)
        return ()

    def _floor_of_free_bytes(self, holds: list[Hold], due: list[Departure]) -> tuple[float, ...]:
        """Return the place before which holds give way to the free bytes that the disk is short of."""
        bound = self.policy.hold_free_bytes
        kept = min(map(_place_of, holds), default=None)
        if bound is None or kept is None:
            return ()
        short = bound - self._disk.free_bytes(self._layout.folder)
        floor: tuple[float, ...] = ()
        for one in due:
            if short <= 0:
                break
            # What lies in a store frees nothing here, so a hold is not broken for it alone.
            if local := _local_bytes(one.segment):
                short -= local
                floor = _end_of(one.segment)
        return floor

    def _report(self, broken: tuple[BrokenHold, ...]) -> None:
        """Say once of each hold that a bound broke it, and that it holds again."""
        before = {one.hold.name for one in self.broken}
        for one in broken:
            if one.hold.name not in before:
                _log.error(
                    "a hold is broken and holds nothing",
                    hold=one.hold.name,
                    position=str(one.hold.position),
                    why=one.why,
                )
        for name in sorted(before - {one.hold.name for one in broken}):
            _log.info("a hold is no longer broken", hold=name)
        self.broken = broken

    def _due(self, candidates: list[SegmentRecord], bytes_held: int, now_us: int) -> list[Departure]:
        """Return what the policy alone would let go, oldest first."""
        policy = self.policy
        short = 0
        if policy.free_bytes is not None:
            short = policy.free_bytes - self._disk.free_bytes(self._layout.folder)
        due = []
        for segment in candidates:
            if policy.age_seconds is not None and _age_seconds(segment, now_us) >= policy.age_seconds:
                reason = Reason.AGE
            elif policy.bytes_max is not None and bytes_held > policy.bytes_max:
                reason = Reason.BYTES
            elif short > 0:
                reason = Reason.FREE_BYTES
            else:
                break
            due.append(Departure(segment, reason))
            bytes_held -= _local_bytes(segment)
            short -= _local_bytes(segment)
        return due

    def _move_all(self, departures: list[Departure]) -> None:
        expired = self._layout.folder / EXPIRED_FOLDER
        self._disk.make_folder(expired)
        for one in departures:
            self._move(one.segment, expired)
            _log.info(
                "a segment left the log",
                segment=one.segment.version,
                hour=one.segment.hour,
                reason=one.reason.value,
                bytes=one.segment.stored_bytes,
                transactions=one.segment.transactions,
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
        """Remove the indexes whose segment moved just before a crash."""
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


def _place_of(hold: Hold) -> tuple[int, int, int]:
    return hold.position.epoch, hold.position.file_number, hold.position.offset


def _local_bytes(segment: SegmentRecord) -> int:
    return 0 if segment.state == TIERED else segment.stored_bytes


def _age_seconds(segment: SegmentRecord, now_us: int) -> float:
    """Return the time since the hour ended in which the segment was begun: nothing in it is younger by
    more."""
    begun = timegm(time.strptime(str(segment.hour), "%Y%m%d%H"))
    return now_us / _SECOND_US - (begun + _HOUR_SECONDS)


def _now_us() -> int:
    return time.time_ns() // 1000
