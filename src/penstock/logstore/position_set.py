# SPDX-License-Identifier: Apache-2.0
"""Sets the position where capture continues, by an operator's command.

A log never goes backward: a new position begins a new epoch of the same server. The bytes after the new
position get higher commit versions than all earlier bytes, even if an older epoch of the log already has the
same bytes. While the newest epoch contains no bytes, capture starts at the beginning of that epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import SourceMissing
from penstock.gtid_sets import LoggedSet
from penstock.logstore.audit import AuditLine
from penstock.logstore.boundaries import prove_boundary
from penstock.logstore.epochs import EpochRecord
from penstock.logstore.extent import Extent
from penstock.logstore.index import scan
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.records import BEGINS_AT_BOUNDARY, Records, block_records
from penstock.logstore.segment import SegmentReader
from penstock.model import Position

# The first event of a binlog file follows the magic.
_FIRST_EVENT_OFFSET = 4


@dataclass(frozen=True)
class Stretch:
    """Totals for a range of a server's log: bytes, transactions and changes, and the first and last commit
    time. None means unknown. Times are in microseconds since 1970, UTC.
    """

    bytes: int | None = 0
    transactions: int | None = 0
    changes: int | None = 0
    time_first_us: int | None = None
    time_last_us: int | None = None

    def __bool__(self) -> bool:
        """Whether the range has any bytes, or may have some because its size is unknown."""
        return self.bytes != 0

    def plus(self, other: "Stretch") -> "Stretch":
        """Return the sum of this range and another."""
        firsts = [time_us for time_us in (self.time_first_us, other.time_first_us) if time_us]
        lasts = [time_us for time_us in (self.time_last_us, other.time_last_us) if time_us]
        return Stretch(
            _sum(self.bytes, other.bytes),
            _sum(self.transactions, other.transactions),
            _sum(self.changes, other.changes),
            min(firsts, default=None),
            max(lasts, default=None),
        )


@dataclass(frozen=True)
class Gap:
    """Bytes [start, end) of a server's file that the log would never receive. `end` is None if unknown."""

    file: str
    start: int
    end: int | None


@dataclass(frozen=True)
class ResumePoint:
    """Where capture continues when it starts: the end of the log, or a position that an operator has set.

    `epoch` is the log's newest epoch. `was_set` is true if the log contains no bytes from this epoch yet.
    """

    position: Position
    gtid_set: LoggedSet
    epoch: EpochRecord
    was_set: bool


@dataclass(frozen=True)
class PositionChange:
    """The effect of setting a position: the bytes in `again` would be received twice, and the bytes in `gaps`
    would never be received.
    """

    old: Position
    new: Position
    gtid_set: LoggedSet
    again: Stretch
    gaps: tuple[Gap, ...]

    @property
    def bytes_lost(self) -> int | None:
        """The bytes of the gaps, None if unknown."""
        total: int | None = 0
        for gap in self.gaps:
            total = _sum(total, None if gap.end is None else gap.end - gap.start)
        return total


def resume_point(reader: LogReader) -> ResumePoint:
    """Return where capture continues. Raises SourceMissing for a log that never captured a server."""
    latest = reader.epochs.latest
    if latest is None:
        raise SourceMissing(
            f"the log in {reader.folder} has not begun",
            hint="Say where it is to begin in the settings: instances.NAME.start",
        )
    visible = reader.visible
    if visible is None or visible.epoch != latest.epoch:
        return ResumePoint(latest.position, latest.gtid_set, latest, was_set=True)
    return ResumePoint(visible, reader.gtid_set(visible), latest, was_set=False)


def held_position(reader: LogReader, position: Position) -> Position | None:
    """Return the newest position in the log that corresponds to a position on the server.

    The log may also end at that position. The epoch of `position` is ignored: the position refers to the
    server that capture follows now. Returns None if the log does not have the bytes. Raises PositionInvalid
    if the position is not a transaction boundary.
    """
    for run in reversed(_held_runs(reader)):
        if run.number == position.file_number and run.start <= position.offset <= run.end:
            log_position = Position(run.extent.epoch, run.extent.file, max(position.offset, run.extent.start))
            prove_boundary(reader, log_position)
            return log_position
    return None


def plan_position(
    reader: LogReader, target: Position, gtid_set: LoggedSet, files: Sequence[tuple[str, int]] | None = None
) -> PositionChange:
    """Return the effect of continuing at a position of the server; nothing is changed.

    `target` is a transaction boundary and `gtid_set` the set before it. `files` are the names and sizes of
    the server's files, None if the server was not queried. Raises LimitExceeded if no epoch number is left,
    SourceMissing.
    """
    current = resume_point(reader)
    next_epoch = reader.next_epoch
    runs = _merge_runs(_held_runs(reader))
    again = Stretch()
    for run in runs:
        first = target.offset if run.number == target.file_number else 0
        if run.number >= target.file_number and first < run.end:
            again = again.plus(_count_extent(reader, run.extent, max(first, run.extent.start), run.end))
    gaps = _gaps(runs, current.position, target, files or ())
    return PositionChange(current.position, replace(target, epoch=next_epoch), gtid_set, again, tuple(gaps))


def set_position(log: Log, change: PositionChange, audit: AuditLine) -> EpochRecord:
    """Make the next start of capture continue at a position, durably. Raises LogFull, DiskFailed.

    The log is open for writing, so no capture is running. The log's data is made durable before the new epoch
    begins, because capture would not request it from the server again.
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
class _HeldRun:
    """Bytes [start, end) of a server's numbered file that one extent of the log holds.

    `start` is the first event of the file if the extent has the whole file: the log stores the file's own
    head separately.
    """

    number: int
    start: int
    end: int
    extent: Extent


def _held_runs(reader: LogReader) -> list[_HeldRun]:
    """Return the runs of all epochs that belong to the server that capture follows now."""
    latest = reader.epochs.latest
    keys = {epoch.epoch: epoch.server_key for epoch in reader.epochs.epochs}
    runs = []
    for extent in reader.extents():
        if latest is None or keys.get(extent.epoch) != latest.server_key:
            continue
        whole = extent.start == len(reader.head_bytes(extent.epoch, extent.file))
        start = _FIRST_EVENT_OFFSET if whole else extent.start
        runs.append(_HeldRun(extent.first.file_number, start, extent.end, extent))
    return runs


def _merge_runs(runs: Sequence[_HeldRun]) -> list[_HeldRun]:
    """Return the runs by file and offset, without the parts that an earlier run already covers."""
    merged: list[_HeldRun] = []
    for run in sorted(runs, key=lambda run: (run.number, run.start)):
        reached = merged[-1].end if merged and merged[-1].number == run.number else run.start
        start = max(run.start, reached)
        if start < run.end:
            extent = replace(run.extent, start=max(start, run.extent.start))
            merged.append(_HeldRun(run.number, start, run.end, extent))
    return merged


def _count_extent(reader: LogReader, extent: Extent, start: int, end: int) -> Stretch:
    """Return the totals of [start, end) of an extent; `start` and `end` are transaction boundaries."""
    totals = Stretch(bytes=end - start)
    for segment in reader.segments:
        if (segment.epoch, segment.file_number) != (extent.epoch, extent.first.file_number):
            continue
        with reader.open_blocks(segment) as (data, blocks):
            first, last = max(start, segment.base), min(end, blocks.end)
            if first < last:
                totals = totals.plus(_count_range(data, blocks.records(), first, last))
    return totals


def _count_range(data: SegmentReader, records: Records, first: int, last: int) -> Stretch:
    """Return the totals of [first, last). Whole blocks are counted by their records, partial blocks by
    scanning events.
    """
    starts = records["source_start"]
    inside = (records["flags"] & BEGINS_AT_BOUNDARY != 0) & (starts >= first) & (starts <= last)
    indexes = inside.nonzero()[0]
    inner = records[indexes[0] : indexes[-1]] if len(indexes) else records[:0]
    inner_start, inner_end = (
        (int(starts[indexes[0]]), int(starts[indexes[-1]])) if len(indexes) else (last, last)
    )
    edges = [scan(data, first, inner_start), scan(data, inner_end, last)]
    blocks = block_records(edges[0].records + inner.tobytes() + edges[1].records)
    times = blocks["time_us"][blocks["time_us"] > 0]
    return Stretch(
        0,
        int(blocks["transactions"].sum(dtype="u8")),
        int(blocks["changes"].sum(dtype="u8")),
        int(times.min()) if len(times) else None,
        max(int(times.max()), *(edge.time_max_us for edge in edges)) if len(times) else None,
    )


def _gaps(
    runs: Sequence[_HeldRun], old: Position, target: Position, files: Sequence[tuple[str, int]]
) -> list[Gap]:
    """Return the ranges between two positions of the server that the log does not hold."""
    names = {Position(0, name, 0).file_number: (name, size) for name, size in files}
    gaps = []
    for number in range(old.file_number, target.file_number + 1):
        name, end = names.get(number, (target.file if number == target.file_number else old.file, None))
        offset = old.offset if number == old.file_number else _FIRST_EVENT_OFFSET
        end = target.offset if number == target.file_number else end or _end_of_completed_file(runs, number)
        for run in runs:
            if run.number != number or run.end <= offset:
                continue
            if offset < run.start and (end is None or offset < end):
                gaps.append(Gap(name, offset, run.start if end is None else min(run.start, end)))
            offset = run.end
        if end is None or offset < end:
            gaps.append(Gap(name, offset, end))
    return gaps


def _end_of_completed_file(runs: Sequence[_HeldRun], number: int) -> int | None:
    """Return the end of a file if the log continues with the next file, else None."""
    completed = {
        run.extent.epoch for run in runs if (run.number, run.start) == (number + 1, _FIRST_EVENT_OFFSET)
    }
    ends = [run.end for run in runs if run.number == number and run.extent.epoch in completed]
    return max(ends, default=None)


def _sum(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right
