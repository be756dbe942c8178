# SPDX-License-Identifier: Apache-2.0
"""Removes a log's oldest segments on an operator's command; see `retention` for how removal works."""

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
    """The segments to remove, oldest first, and, by name, the holds that protect any of them.

    `first_kept` is the oldest remaining segment, None in an empty log.
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
    """Return the segments entirely before a position, or committed entirely before a time.

    The time is in microseconds UTC since 1970. The newest segment always stays.
    """
    removed: list[SegmentRecord] = []
    for segment in list(segments)[:-1]:
        if before is not None:
            is_before = _end_of(segment) <= (before.epoch, before.file_number, before.offset)
        else:
            is_before = before_time_us is not None and segment.time_max_us < before_time_us
        if not is_before:
            break
        removed.append(segment)
    held_by = [hold for hold in holds if removed and _order_key(hold.position) < _end_of(removed[-1])]
    first_kept = segments[len(removed)] if len(removed) < len(segments) else None
    return TrimPlan(removed, sorted(held_by, key=lambda hold: hold.name), first_kept)


def check_holds(plan: TrimPlan, forced: Collection[str]) -> None:
    """Raise OptionInvalid if a hold protects a segment in the plan and is not in `forced`."""
    objecting = [hold for hold in plan.held_by if hold.name not in forced]
    if objecting:
        first = min(objecting, key=lambda hold: hold.position)
        names = " ".join(f"--force {hold.name}" for hold in objecting)
        raise OptionInvalid(
            f"{', '.join(hold.name for hold in objecting)} still need segments that would be removed",
            position=str(first.position),
            hint=f"Trim --before {first.position}, or remove them anyway: {names}",
        )


def trim(catalog: SegmentCatalog, retention: Retention, plan: TrimPlan) -> int:
    """Remove a plan's segments: first hide them, then delete them. Returns the bytes freed on this host.

    The caller holds the log's lock. After a crash in between, the daemon's next pass finishes the removal.
    Raises DiskFailed, LogFull, ConnectionLost for an unreachable tier.
    """
    retention.expire(
        catalog, RetentionPlan([Departure(segment, Reason.BY_HAND) for segment in plan.segments])
    )
    return retention.sweep()


def _end_of(segment: SegmentRecord) -> tuple[int, int, int]:
    return segment.epoch, segment.file_number, segment.source_end


def _order_key(position: Position) -> tuple[int, int, int]:
    return position.epoch, position.file_number, position.offset
