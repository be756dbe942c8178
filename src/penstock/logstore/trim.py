# SPDX-License-Identifier: Apache-2.0
"""Letting a log's oldest segments go by hand; see `retention` for how they go."""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.errors import OptionInvalid
from penstock.logstore.catalog import SegmentCatalog
from penstock.logstore.holds import Hold
from penstock.logstore.index import SegmentIndex
from penstock.logstore.records import SegmentRecord
from penstock.logstore.retention import Departure, Reason, Retention, RetentionPlan
from penstock.model import Position


@dataclass(frozen=True)
class TrimPlan:
    """What would go, oldest first, and the holds that speak against it, by name.

    `first_kept` is the oldest segment that stays, None in an empty log.
    """

    segments: list[SegmentRecord]
    held_by: list[Hold]
    first_kept: SegmentRecord | None


def plan_trim(
    segments: SegmentIndex,
    holds: Collection[Hold],
    *,
    before: Position | None = None,
    before_time_us: int | None = None,
) -> TrimPlan:
    """Return what lies whole before a position, or was committed whole before a time.

    The time is microseconds UTC since 1970. The newest segment always stays.
    """
    going: list[SegmentRecord] = []
    for segment in list(segments)[:-1]:
        if before is not None:
            goes = _end_of(segment) <= (before.epoch, before.file_number, before.offset)
        else:
            goes = before_time_us is not None and segment.time_max_us < before_time_us
        if not goes:
            break
        going.append(segment)
    held_by = [hold for hold in holds if going and _place_of(hold.position) < _end_of(going[-1])]
    first_kept = segments[len(going)] if len(going) < len(segments) else None
    return TrimPlan(going, sorted(held_by, key=lambda hold: hold.name), first_kept)


def check_holds(plan: TrimPlan, forced: Collection[str]) -> None:
    """Raise OptionInvalid where a hold speaks against a plan and is not named."""
    standing = [hold for hold in plan.held_by if hold.name not in forced]
    if standing:
        first = min(standing, key=lambda hold: hold.position)
        names = " ".join(f"--force {hold.name}" for hold in standing)
        raise OptionInvalid(
            f"{', '.join(hold.name for hold in standing)} asked to hold what would go",
            position=str(first.position),
            hint=f"Trim --before {first.position}, or say that it may be lost: {names}",
        )


def trim(catalog: SegmentCatalog, retention: Retention, plan: TrimPlan) -> int:
    """Let a plan's segments go: first out of sight, then for good. Returns the bytes of this host it freed.

    The caller holds the log's lock. After a crash in between, the next pass of the daemon goes on. Raises
    DiskFailed, LogFull, ConnectionLost for a tier that is away.
    """
    retention.expire(catalog, RetentionPlan([Departure(one, Reason.BY_HAND) for one in plan.segments]))
    return retention.sweep()


def _end_of(segment: SegmentRecord) -> tuple[int, int, int]:
    return segment.epoch, segment.file_number, segment.source_end


def _place_of(position: Position) -> tuple[int, int, int]:
    return position.epoch, position.file_number, position.offset
