# SPDX-License-Identifier: Apache-2.0
"""Setting by hand where capture goes on.

A log never goes back: a position that was set begins a new epoch of the same server there. What follows has
higher commit versions than all before it, also where its bytes are in the log already, under an older epoch.
Capture finds that the newest epoch has no bytes yet, and begins it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import PositionInvalid, SourceMissing
from penstock.gtid_sets import LoggedSet
from penstock.logstore.audit import AuditLine
from penstock.logstore.epochs import EpochRecord
from penstock.logstore.index import scan
from penstock.logstore.log import Log
from penstock.logstore.reader import LogExtent, LogReader
from penstock.logstore.records import BEGINS_AT_BOUNDARY, Records, block_records
from penstock.logstore.segment import SegmentReader
from penstock.model import Position

# Where the first event of a binlog file stands, behind the magic.
_FIRST_EVENT_OFFSET = 4


@dataclass(frozen=True)
class Stretch:
    """Some of a server's log. What is not known is None; times are microseconds UTC since 1970."""

    bytes: int | None = 0
    transactions: int | None = 0
    changes: int | None = 0
    time_first_us: int | None = None
    time_last_us: int | None = None

    def __bool__(self) -> bool:
        """Whether there is anything in it, as far as is known."""
        return self.bytes != 0

    def plus(self, other: "Stretch") -> "Stretch":
        """Return both together."""
        firsts = [one for one in (self.time_first_us, other.time_first_us) if one]
        lasts = [one for one in (self.time_last_us, other.time_last_us) if one]
        return Stretch(
            _sum(self.bytes, other.bytes),
            _sum(self.transactions, other.transactions),
            _sum(self.changes, other.changes),
            min(firsts, default=None),
            max(lasts, default=None),
        )


@dataclass(frozen=True)
class Gap:
    """Bytes [start, end) of a server's file that the log would never have; `end` None where not known."""

    file: str
    start: int
    end: int | None


@dataclass(frozen=True)
class Standing:
    """Where capture goes on when it starts: the end of the log, or what was set since.

    `epoch` is the newest one. `was_set` tells whether the log has no byte of it yet.
    """

    position: Position
    gtid_set: LoggedSet
    epoch: EpochRecord
    was_set: bool


@dataclass(frozen=True)
class PositionChange:
    """What setting a position means: `again` is in the log and would come again, `gaps` never would come."""

    old: Position
    new: Position
    gtid_set: LoggedSet
    again: Stretch
    gaps: tuple[Gap, ...]

    @property
    def bytes_lost(self) -> int | None:
        """The bytes of the gaps, None where they are not known."""
        total: int | None = 0
        for gap in self.gaps:
            total = _sum(total, None if gap.end is None else gap.end - gap.start)
        return total


def standing(reader: LogReader) -> Standing:
    """Return where capture goes on. Raises SourceMissing for a log that has never had a server."""
    latest = reader.epochs.latest
    if latest is None:
        raise SourceMissing(
            f"the log in {reader.folder} has not begun",
            hint="Say where it is to begin in the settings: instances.NAME.start",
        )
    visible = reader.visible
    if visible is None or visible.epoch != latest.epoch:
        return Standing(latest.position, latest.gtid_set, latest, was_set=True)
    return Standing(visible, reader.gtid_set(visible), latest, was_set=False)


def held_position(reader: LogReader, position: Position) -> Position | None:
    """Return the newest place in the log where it has the server's bytes at a position, or ends there.

    The epoch of `position` is not looked at: it is of the server that capture follows now. None where the log
    does not have it. Raises PositionInvalid where it is no transaction boundary.
    """
    for held in reversed(_held(reader)):
        if held.number == position.file_number and held.start <= position.offset <= held.end:
            found = Position(held.extent.epoch, held.extent.file, max(position.offset, held.extent.start))
            _prove_boundary(reader, found)
            return found
    return None


def plan_position(
    reader: LogReader, target: Position, gtid_set: LoggedSet, files: Sequence[tuple[str, int]] | None = None
) -> PositionChange:
    """Return what going on at a position of the server would mean; nothing is changed.

    `target` is a transaction boundary and `gtid_set` what came before it. `files` are the names and sizes of
    the server's files, None where it was not asked. Raises LimitExceeded where no epoch is left,
    SourceMissing.
    """
    now = standing(reader)
    number = reader.next_epoch
    held = _apart(_held(reader))
    again = Stretch()
    for one in held:
        first = target.offset if one.number == target.file_number else 0
        if one.number >= target.file_number and first < one.end:
            again = again.plus(_stretch_of(reader, one.extent, max(first, one.extent.start), one.end))
    gaps = _gaps(held, now.position, target, files or ())
    return PositionChange(now.position, replace(target, epoch=number), gtid_set, again, tuple(gaps))


def set_position(log: Log, change: PositionChange, audit: AuditLine) -> EpochRecord:
    """Make capture go on at a position when it starts next, durably. Raises LogFull, DiskFailed.

    The log is open for writing here, so no capture runs. What it holds is durable before the epoch is, since
    nothing would ask for it again.
    """
    latest = log.epoch
    assert latest is not None, "a log without an epoch has no plan"
    audit.write(log.disk, log.layout)
    return log.begin_epoch(
        epoch=change.new.epoch,
        server_key=latest.server_key,
        server_id=latest.server_id,
        flavor=latest.flavor,
        version=latest.version,
        file=change.new.file,
        offset=change.new.offset,
        gtid_set=change.gtid_set,
    )


# --- Inside ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """Bytes [start, end) of the server's file of a number, which an extent of the log has.

    `start` is that of the file's first event where the extent has all of the file: the log keeps the file's
    own head apart.
    """

    number: int
    start: int
    end: int
    extent: LogExtent


def _held(reader: LogReader) -> list[_Held]:
    """Return what the log has of the server that capture follows now, in all its epochs."""
    latest = reader.epochs.latest
    keys = {one.epoch: one.server_key for one in reader.epochs.epochs}
    held = []
    for one in reader.extents():
        if latest is None or keys.get(one.epoch) != latest.server_key:
            continue
        whole = one.start == len(reader.head_bytes(one.epoch, one.file))
        start = _FIRST_EVENT_OFFSET if whole else one.start
        held.append(_Held(one.first.file_number, start, one.end, one))
    return held


def _apart(held: Sequence[_Held]) -> list[_Held]:
    """Return what is held, by file and offset, and what several epochs have only once."""
    apart: list[_Held] = []
    for one in sorted(held, key=lambda one: (one.number, one.start)):
        reached = apart[-1].end if apart and apart[-1].number == one.number else one.start
        start = max(one.start, reached)
        if start < one.end:
            extent = replace(one.extent, start=max(start, one.extent.start))
            apart.append(_Held(one.number, start, one.end, extent))
    return apart


def _prove_boundary(reader: LogReader, position: Position) -> None:
    """Raise PositionInvalid where a place that the log has lies inside a transaction."""
    located = reader.locate_position(position)
    record, start = located.record, located.segment.base
    if record is not None:
        start = record.source_start if record.begins_at_boundary else record.transaction_start or start
    if located.segment.file_number != position.file_number:
        # The end of a file's last segment, behind which the next one begins.
        return
    with reader.open_segment(located.segment) as data:
        boundary = scan(data, start, min(position.offset, data.end)).boundary
    if boundary != position.offset:
        raise PositionInvalid(
            "no transaction begins or ends here",
            position=str(position),
            hint=f"The one around it begins at {position.file}:{boundary}",
        )


def _stretch_of(reader: LogReader, extent: LogExtent, start: int, end: int) -> Stretch:
    """Return what [start, end) of an extent holds; both are transaction boundaries."""
    found = Stretch(bytes=end - start)
    for segment in reader.segments:
        if (segment.epoch, segment.file_number) != (extent.epoch, extent.first.file_number):
            continue
        with reader.open_blocks(segment) as (data, blocks):
            first, last = max(start, segment.base), min(end, blocks.end)
            if first < last:
                found = found.plus(_counted(data, blocks.records(), first, last))
    return found


def _counted(data: SegmentReader, records: Records, first: int, last: int) -> Stretch:
    """Return the totals of [first, last): of whole blocks by their records, of what is left by its events."""
    starts = records["source_start"]
    inside = (records["flags"] & BEGINS_AT_BOUNDARY != 0) & (starts >= first) & (starts <= last)
    at = inside.nonzero()[0]
    inner = records[at[0] : at[-1]] if len(at) else records[:0]
    inner_start, inner_end = (int(starts[at[0]]), int(starts[at[-1]])) if len(at) else (last, last)
    ends = [scan(data, first, inner_start), scan(data, inner_end, last)]
    counted = block_records(ends[0].records + inner.tobytes() + ends[1].records)
    times = counted["time_us"][counted["time_us"] > 0]
    return Stretch(
        0,
        int(counted["transactions"].sum(dtype="u8")),
        int(counted["changes"].sum(dtype="u8")),
        int(times.min()) if len(times) else None,
        max(int(times.max()), *(one.time_max_us for one in ends)) if len(times) else None,
    )


def _gaps(
    held: Sequence[_Held], old: Position, target: Position, files: Sequence[tuple[str, int]]
) -> list[Gap]:
    """Return what lies between two positions of the server and is not held."""
    names = {Position(0, name, 0).file_number: (name, size) for name, size in files}
    gaps = []
    for number in range(old.file_number, target.file_number + 1):
        name, end = names.get(number, (target.file if number == target.file_number else old.file, None))
        place = old.offset if number == old.file_number else _FIRST_EVENT_OFFSET
        end = target.offset if number == target.file_number else end or _whole_file(held, number)
        for one in held:
            if one.number != number or one.end <= place:
                continue
            if place < one.start and (end is None or place < end):
                gaps.append(Gap(name, place, one.start if end is None else min(one.start, end)))
            place = one.end
        if end is None or place < end:
            gaps.append(Gap(name, place, end))
    return gaps


def _whole_file(held: Sequence[_Held], number: int) -> int | None:
    """Return where a file ends that the log has gone past; None where it has not."""
    went_on = {
        one.extent.epoch for one in held if (one.number, one.start) == (number + 1, _FIRST_EVENT_OFFSET)
    }
    ends = [one.end for one in held if one.number == number and one.extent.epoch in went_on]
    return max(ends, default=None)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
