# SPDX-License-Identifier: Apache-2.0
"""What leaves a log, and when: by age, by bytes, by what the disk has left; never past a hold.

The oldest segments leave, without a gap: what stays is one run up to the newest, which always stays. They go
in two phases. First they leave the indexes and move to `<folder>/expired`, where no reader looks; a reader
that has one open reads on. The next pass removes them for good. A crash anywhere in between leaves a segment
in the log or out of it, and never half of one in it.
"""

import math
import re
import threading
import time
from calendar import timegm
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import structlog

from penstock.errors import (
    AccessDenied,
    LogDamaged,
    LogFull,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    QuotaReached,
)
from penstock.limits import HOLD_BYTES_DEFAULT, HOLDS_PER_ACCOUNT_MAX
from penstock.logstore.catalog import SegmentCatalog
from penstock.logstore.disk import TMP_SUFFIX, Disk
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.index import SegmentIndex
from penstock.logstore.layout import COLD_SUFFIX, INDEX_SUFFIX, SEGMENT_SUFFIX, Layout
from penstock.logstore.records import TIERED, SegmentRecord
from penstock.logstore.tier import TIERED_SUFFIX, Tier, TieredNote
from penstock.model import Position

HOLDS_FOLDER = "holds"
EXPIRED_FOLDER = "expired"
AGE_SECONDS_DEFAULT = 24 * 3600

_HOUR_SECONDS = 3600
_SECOND_US = 1_000_000
_HOLD_SUFFIX = ".json"
_HOLD_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,127}")
# What a segment is made of: its data, or the note that says where that is. Its index moves last: alone it
# means
# nothing, while data without it would have to be read again.
_DATA_SUFFIXES = (SEGMENT_SUFFIX, COLD_SUFFIX, TIERED_SUFFIX)
_SUFFIXES = (*_DATA_SUFFIXES, INDEX_SUFFIX)
# How long a pass goes on with a store in which something could not be removed.
_FAILING_STORE_SECONDS_MAX = 10
# One for each log folder: holds are set by the threads that serve readers, and judged by the one that
# trims.
_HOLD_LOCKS: dict[Path, threading.RLock] = {}

_log = structlog.get_logger(__name__)


# --- Holds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hold:
    """A checkpoint's wish that nothing behind its position leaves. `expires_us` None means until it is
    removed. `account` set it, and no other account moves it; "" where that is not known."""

    name: str
    position: Position
    expires_us: int | None = None
    account: str = ""


class Holds:
    """The holds of one log: a small file for each, so that they outlast the process.

    Many threads may use it, and several of it for one log; the process is the one that writes the log.
    """

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self._disk = disk
        self._folder = layout.folder / HOLDS_FOLDER
        self._lock = _HOLD_LOCKS.setdefault(layout.folder.absolute(), threading.RLock())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Let no other thread of this process set or remove a hold of this log."""
        with self._lock:
            yield

    def put(
        self, hold: Hold, *, prove: Callable[[Position], object] | None = None, admin: bool = False
    ) -> None:
        """Set a hold, in place of the one of that name; it lasts when this returns.

        `prove` raises where the log no longer has a position. It is asked while nothing can leave, so what
        it has found to be there is held. Raises OptionInvalid for a name; AccessDenied for a hold of another
        account, unless an `admin` sets it; QuotaReached for one more than an account may have.
        """
        path = self._path(hold.name)
        with self.unchanged():
            owner = self._owner(hold.name)
            if owner is None:
                prove_may_add((known.account for known in self._in_force()), hold.account)
            else:
                prove_owns(hold.name, owner, hold.account, admin=admin)
            if prove is not None:
                prove(hold.position)
            self._disk.make_folder(self._folder)
            values = {
                "position": str(hold.position),
                "expires_us": hold.expires_us,
                "account": owner or hold.account,
            }
            self._disk.write_atomic(path, seal_json(values))

    def remove(self, name: str) -> None:
        """Give a hold up; one that is not there is no error."""
        path = self._path(name)
        with self.unchanged():
            if self._disk.exists(path):
                self._disk.remove(path)
                self._disk.sync_folder(self._folder)

    def all(self, now_us: int | None = None) -> list[Hold]:
        """Return the holds that have not expired, by name. Raises LogDamaged for one that cannot be read."""
        now = _now_us() if now_us is None else now_us
        return [hold for hold in map(self._load, self._names()) if not _has_expired(hold, now)]

    def readable(self, now_us: int) -> list[Hold]:
        """Return those of `all` that can be read; one that cannot holds nothing, and is named in an error.

        Nobody can say what it was to hold. Were it everything, the disk would fill and the capture stop,
        for a reader that may be gone.
        """
        found = []
        for name in self._names():
            match self._try_load(name):
                case Hold() as hold if not _has_expired(hold, now_us):
                    found.append(hold)
                case PenstockError() as problem:
                    _log.error("a hold cannot be read and holds nothing", hold=name, reason=str(problem))
        return found

    def remove_expired(self, now_us: int) -> None:
        """Remove the holds whose time is over. One that cannot be read stays, for somebody to look at."""
        with self.unchanged():
            for name in self._names():
                hold = self._try_load(name)
                if isinstance(hold, Hold) and _has_expired(hold, now_us):
                    _log.info("a hold expired", hold=name)
                    self.remove(name)

    def _owner(self, name: str) -> str | None:
        """Return whose a hold is, None where there is none in force."""
        if not self._disk.exists(self._path(name)):
            return None
        hold = self._try_load(name)
        return hold.account if isinstance(hold, Hold) and not _has_expired(hold, _now_us()) else None

    def _in_force(self) -> Iterator[Hold]:
        now_us = _now_us()
        for name in self._names():
            hold = self._try_load(name)
            if isinstance(hold, Hold) and not _has_expired(hold, now_us):
                yield hold

    def _names(self) -> list[str]:
        names = self._disk.list(self._folder)
        return [name.removesuffix(_HOLD_SUFFIX) for name in names if name.endswith(_HOLD_SUFFIX)]

    def _try_load(self, name: str) -> Hold | PenstockError:
        """Return a hold, or what is wrong with it."""
        try:
            return self._load(name)
        except (LogDamaged, OptionInvalid, PositionInvalid) as problem:
            return problem

    def _load(self, name: str) -> Hold:
        path = self._path(name)
        match unseal_json(self._disk.read(path)):
            case {"position": str(position), "expires_us": int() | None as expires_us, **others}:
                return Hold(name, Position.parse(position), expires_us, str(others.get("account", "")))
        raise LogDamaged(
            f"the hold {path} is not what was written",
            position=f"{path.name}:0",
            hint=f"Set it again, or remove it: rm {path}",
        )

    def _path(self, name: str) -> Path:
        if not _HOLD_NAME.fullmatch(name):
            raise OptionInvalid(
                f"{name!r} cannot name a hold", hint="Use letters, digits, '.', '_' and '-', at most 128"
            )
        return self._folder / f"{name}{_HOLD_SUFFIX}"


def prove_owns(name: str, owner: str, account: str, *, admin: bool) -> None:
    """Raise AccessDenied where a hold is another account's; "" is nobody in particular."""
    if owner not in ("", account) and not admin:
        raise AccessDenied(
            f"the hold {name} belongs to another account than {account}", hint="Choose another reader=NAME"
        )


def prove_may_add(owners: Iterable[str], account: str) -> None:
    """Raise QuotaReached where an account has as many of all holds as it may have."""
    if list(owners).count(account) >= HOLDS_PER_ACCOUNT_MAX:
        raise QuotaReached(
            f"account {account} has {HOLDS_PER_ACCOUNT_MAX} holds, which is all it may have",
            hint="Use the names of readers again, or wait until a hold expires",
        )


def _has_expired(hold: Hold, now_us: int) -> bool:
    return hold.expires_us is not None and hold.expires_us <= now_us


# --- The plan -------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetentionPolicy:
    """How much is kept, whichever bound is met first; None sets no bound.

    `age_seconds` counts from the end of the hour in which a segment was begun. `bytes_max` is for the
    segments on this host, `free_bytes` is what the disk should have left. A hold behind which this host has
    more than `hold_bytes` holds nothing any longer.
    """

    age_seconds: float | None = AGE_SECONDS_DEFAULT
    bytes_max: int | None = None
    free_bytes: int | None = None
    hold_bytes: int | None = HOLD_BYTES_DEFAULT


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
    """What would leave, oldest first; and what would too, but for a hold."""

    departures: list[Departure]
    held: list[Departure] = field(default_factory=list)
    held_by: Hold | None = None

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
            self.expire(catalog, plan)
        self._sweep_store(notes)
        return plan

    def plan(self, segments: SegmentIndex) -> RetentionPlan:
        """Return what would leave now, and why; nothing is changed."""
        now = self._clock()
        holds = self._counting(self.holds.readable(now), segments)
        # The newest always stays: it may be open, and it is where the log goes on.
        candidates = list(segments)[:-1]
        due = self._due(candidates, sum(map(_local_bytes, segments)), now)
        hold = min(holds, key=lambda hold: hold.position, default=None)
        free = len(due)
        if hold is not None:
            place = (hold.position.epoch, hold.position.file_number, hold.position.offset)
            free = next((at for at, one in enumerate(due) if _end_of(one.segment) > place), len(due))
        return RetentionPlan(due[:free], due[free:], hold if free < len(due) else None)

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

    def _counting(self, holds: list[Hold], segments: SegmentIndex) -> list[Hold]:
        """Return the holds that are within the bytes that one may hold; report the others."""
        bound, behind, newest = self.policy.hold_bytes, 0, len(segments) - 1
        floor: tuple[float, ...] = ()
        for at in range(newest, -1, -1):
            behind += _local_bytes(segments[at])
            if bound is not None and behind > bound:
                floor = _end_of(segments[at]) if at < newest else (math.inf,)
                break
        counting = []
        for hold in holds:
            if (hold.position.epoch, hold.position.file_number, hold.position.offset) >= floor:
                counting.append(hold)
                continue
            _log.error(
                "a hold is past its bound and holds nothing",
                hold=hold.name,
                position=str(hold.position),
                hold_bytes=bound,
            )
        return counting

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


def _end_of(segment: SegmentRecord) -> tuple[int, int, int]:
    return segment.epoch, segment.file_number, segment.source_end


def _local_bytes(segment: SegmentRecord) -> int:
    return 0 if segment.state == TIERED else segment.stored_bytes


def _age_seconds(segment: SegmentRecord, now_us: int) -> float:
    """Return the time since the hour ended in which the segment was begun: nothing in it is younger by
    more."""
    begun = timegm(time.strptime(str(segment.hour), "%Y%m%d%H"))
    return now_us / _SECOND_US - (begun + _HOUR_SECONDS)


def _now_us() -> int:
    return time.time_ns() // 1000
