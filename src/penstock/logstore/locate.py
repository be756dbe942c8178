# SPDX-License-Identifier: Apache-2.0
"""Locates a position, a GTID, a GTID set or a time in a log by binary searches over L1 and L2.

There are four kinds of lookup, from exact to approximate: by epoch, file and offset; by a GTID set whose
transactions have all been consumed; by a single consumed GTID; and by time, as a last resort when none of the
others is valid any more. GTID lookups also read the heads of segments. Apart from these heads, lookups read
only the indexes.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from penstock._native import GtidSet
from penstock.errors import PositionInvalid, PositionPurged
from penstock.gtid_sets import LostGtids
from penstock.logstore.index import PAGE_BYTES, BlockIndex, SegmentIndex
from penstock.logstore.records import (
    GTIDS_IN_SEQUENCE,
    RECORD_BYTES,
    BlockRecord,
    SegmentRecord,
)
from penstock.logstore.segment import SegmentHead
from penstock.model import Position

_Key = tuple[int, int, int]


@dataclass(frozen=True)
class Located:
    """Where to start reading, and the cost of the lookup.

    No requested transaction precedes `position`; others may follow it, so the reader must still filter.
    `position` is a transaction boundary, unless the caller passed a position. `record` is the block that
    contains it, None after the last block. `pages_read` is the number of distinct 4 KiB pages read from both
    indexes and the segment heads, and `bytes_read` is their size.
    """

    position: Position
    segment: SegmentRecord
    record: BlockRecord | None
    pages_read: int
    bytes_read: int


class SegmentAccess(Protocol):
    """The interface through which the locator opens segments. The log supplies segments that it already has
    open.
    """

    def head(self, segment: SegmentRecord) -> SegmentHead:
        """Return the segment's head."""

    def blocks(self, segment: SegmentRecord) -> AbstractContextManager[BlockIndex]:
        """Return the segment's L2 index as a context manager.

        For an open segment, the index ends at the readable end.
        """


class Locator:
    """Looks up positions in one log. Safe for concurrent use.

    `lost` maps an epoch to the transactions of earlier epochs that are missing from the epoch's server.
    """

    def __init__(
        self, segments: SegmentIndex, access: SegmentAccess, lost: Mapping[int, LostGtids] | None = None
    ) -> None:
        self._segments = segments
        self._access = access
        self._lost = lost or {}

    def position(self, position: Position) -> Located:
        """Locate a position in the segments. A position that falls into a gap between two runs of the log is
        moved to the start of the next run.

        Raises PositionPurged before the first segment, PositionInvalid after the end of a log whose last
        segment is closed.
        """
        search = self._search()
        order_key = (position.epoch, position.file_number, position.offset)
        at = search.last_segment(lambda segment: _begin_of(segment) <= order_key)
        if at < 0:
            return self._before_first(search, position)
        segment = self._segments[at]
        same_file = _begin_of(segment)[:2] == order_key[:2]
        if segment.source_end and (not same_file or position.offset >= segment.source_end):
            if at + 1 < len(self._segments):
                # There is nothing between the two segments: the file ended there, or the server skipped
                # bytes.
                return self._at_begin(search, self._segments[at + 1])
            if not same_file or position.offset > segment.source_end:
                raise self._behind(segment, position)
            return search.result(position, segment, None)
        if not same_file:
            raise self._behind(segment, position)
        with self._access.blocks(segment) as blocks:
            if position.offset > blocks.end:
                raise self._behind(segment, position)
            index = blocks.find_offset(position.offset)
            record = blocks.record(index) if 0 <= index < len(blocks) else None
            search.add(blocks)
        return search.result(position, segment, record)

    def time(self, time_us: int) -> Located:
        """Return a transaction boundary such that every commit before it is earlier than the given time, in
        microseconds UTC since 1970.

        For a time after all commits, the boundary is the end of the indexed log. Raises PositionInvalid for
        an empty log.
        """
        search = self._search()
        # The latest time of an open segment is unknown, so the last segment is always a match.
        last = len(self._segments) - 1
        at = (
            search.last_segment(lambda segment: bool(segment.source_end) and segment.time_max_us < time_us)
            + 1
        )
        segment = self._segments[min(at, last)]
        with self._access.blocks(segment) as blocks:
            located = self._boundary(search, segment, blocks, blocks.find_time(time_us))
        return located

    def gtid_set(self, gtid_set: str) -> Located:
        """Return a boundary preceded only by transactions of the set.

        Raises PositionPurged, OptionInvalid.
        """
        requested = GtidSet.parse(gtid_set)
        return self._after(
            lambda head: requested.contains(GtidSet.parse(head.gtid_set)),
            requested.contains,
            gtid_set,
            LostGtids.has_last_of,
            f"the GTID set {gtid_set!r} lacks transactions that came before it",
        )

    def gtid(self, gtid: str) -> Located:
        """Return a boundary at or before one transaction, so that reading from there includes it.

        Accepts MySQL's `uuid:5` and MariaDB's `0-1-5`. For a transaction that the log does not have yet, the
        boundary is the end of the log. Raises PositionPurged if the transaction precedes the log,
        OptionInvalid for an invalid GTID.
        """
        wanted = GtidSet.parse(gtid)
        return self._after(
            lambda head: not GtidSet.parse(head.gtid_set).contains(wanted),
            lambda before: not before.contains(wanted),
            gtid,
            LostGtids.has,
            f"the transaction {gtid} came before it",
        )

    # --- Inside -----------------------------------------------------------------------------

    def _after(
        self,
        head_fits: Callable[[SegmentHead], bool],
        fits: Callable[[GtidSet], bool],
        gtids: str,
        has: Callable[[LostGtids, str], bool],
        why_not: str,
    ) -> Located:
        """Return the last transaction boundary for which the transactions before it satisfy the condition.

        The boundary is before every epoch whose server is missing the requested transactions, according to
        `has`.
        """
        search = self._search()
        segments = self._segments

        def fits_before(at: int) -> bool:
            epoch = segments[at].epoch
            if any(has(lost, gtids) for since, lost in self._lost.items() if since <= epoch):
                return False
            return head_fits(search.head(self._access, segments[at]))

        at, start = -1, self._first_after_loss(search, gtids)
        while start < len(segments) and fits_before(start):
            # GTID sets grow within an epoch. The next epoch may have an unrelated history.
            stop = search.end_of_epoch(segments[start].epoch)
            at = search.last_segment(
                lambda segment: head_fits(search.head(self._access, segment)), start, stop
            )
            if at < stop - 1 or stop == len(segments) or not fits_before(stop):
                break
            if not self._continues(search, at, stop):
                with self._access.blocks(segments[at]) as blocks:
                    whole = self._run(search, segments[at], blocks).whole(len(blocks) - 1, fits)
                    search.add(blocks)
                if not whole:
                    break
            start = stop
        if at < 0:
            earliest = search.head(self._access, segments[0]).position
            raise PositionPurged(
                f"the log begins with {earliest}, and {why_not}",
                position=str(earliest),
                hint=f"Start at {earliest}, and copy in full what came before",
            )
        segment = segments[at]
        with self._access.blocks(segment) as blocks:
            run = self._run(search, segment, blocks)
            # Block 0 follows the segment's head, so it needs no proof. Blocks without a proof cannot narrow
            # the search.
            index = bisect_left(range(len(blocks)), True, key=lambda at: not run.proves(at, fits)) - 1
            if index == len(blocks) - 1 and run.whole(index, fits):
                index += 1
            return self._boundary(search, segment, blocks, max(index, 0))

    def _first_after_loss(self, search: "_Search", gtids: str) -> int:
        """Return the first segment of the newest epoch that began with a loss of transactions and whose own
        transactions include the end of the given GTIDs; 0 if there is no such epoch.
        """
        for epoch, lost in sorted(self._lost.items(), reverse=True):
            if lost.precede(gtids):
                first = search.end_of_epoch(epoch - 1)
                return first if first < len(self._segments) else 0
        return 0

    def _run(self, search: "_Search", segment: SegmentRecord, blocks: BlockIndex) -> "_Run":
        return _Run(blocks, segment.base, search.head(self._access, segment))

    def _continues(self, search: "_Search", before: int, after: int) -> bool:
        """Return whether the first segment of an epoch includes all GTIDs before the last segment of the
        previous epoch.
        """
        old = search.head(self._access, self._segments[before]).gtid_set
        new = search.head(self._access, self._segments[after]).gtid_set
        return bool(old) and GtidSet.parse(new).contains(GtidSet.parse(old))

    def _boundary(self, search: "_Search", segment: SegmentRecord, blocks: BlockIndex, index: int) -> Located:
        """Return the transaction boundary at or before the start of a block, or at the end of the last
        block."""
        record = blocks.record(index) if index < len(blocks) else None
        if record is not None:
            offset = _transaction_start(record, blocks)
        elif len(blocks):
            last = blocks.record(len(blocks) - 1)
            offset = _last_boundary(last, blocks)
        else:
            offset = segment.base
        name = search.head(self._access, segment).file
        search.add(blocks)
        return search.result(Position(segment.epoch, name, offset), segment, record)

    def _at_begin(self, search: "_Search", segment: SegmentRecord) -> Located:
        begin = search.head(self._access, segment).position
        with self._access.blocks(segment) as blocks:
            record = blocks.record(0) if len(blocks) else None
            search.add(blocks)
        return search.result(begin, segment, record)

    def _before_first(self, search: "_Search", position: Position) -> Located:
        """Accept a position before a file's first transaction if the log has the file from its start."""
        first = self._segments[0]
        head = search.head(self._access, first)
        same_file = (position.epoch, position.file_number) == (first.epoch, first.file_number)
        if same_file and head.base == len(head.file_head):
            return self._at_begin(search, first)
        raise PositionPurged(
            f"the log begins with {head.position}",
            position=str(position),
            hint=f"Start at {head.position}, and copy in full what came before",
        )

    def _behind(self, segment: SegmentRecord, position: Position) -> PositionInvalid:
        end = f" at offset {segment.source_end}" if segment.source_end else ""
        return PositionInvalid(
            f"the log ends in file number {segment.file_number}{end}",
            position=str(position),
            hint="Run: penstock log list",
        )

    def _search(self) -> "_Search":
        if not len(self._segments):
            raise PositionInvalid("the log is empty", hint="Start the capture, then ask again")
        return _Search(self._segments)


class _Search:
    """One lookup, with the pages and bytes that it has read."""

    def __init__(self, segments: SegmentIndex) -> None:
        self._segments = segments
        self._pages: set[int] = set()
        self._heads: dict[int, SegmentHead] = {}
        self._other_pages = 0
        self._bytes = 0

    def last_segment(
        self, holds: Callable[[SegmentRecord], bool], start: int = 0, stop: int | None = None
    ) -> int:
        """Return the last segment of [start, stop) that satisfies a condition, `start` - 1 if none does.

        The condition must be true for all segments up to some point, and false for all segments after that
        point.
        """

        def fails(at: int) -> bool:
            self._pages.add((at + 1) * RECORD_BYTES // PAGE_BYTES)
            self._bytes += RECORD_BYTES
            return not holds(self._segments[at])

        within = range(start, len(self._segments) if stop is None else stop)
        return start + bisect_left(within, True, key=fails) - 1

    def end_of_epoch(self, epoch: int) -> int:
        """Return the number of the first segment after an epoch."""
        return self.last_segment(lambda segment: segment.epoch <= epoch) + 1

    def head(self, access: SegmentAccess, segment: SegmentRecord) -> SegmentHead:
        """Return a segment's head. It is read once per lookup."""
        if segment.version not in self._heads:
            head = self._heads[segment.version] = access.head(segment)
            self._other_pages += -(-len(head.raw) // PAGE_BYTES)
            self._bytes += len(head.raw)
        return self._heads[segment.version]

    def add(self, blocks: BlockIndex) -> None:
        """Add the pages and bytes read from a segment's index."""
        self._other_pages += blocks.pages_read
        self._bytes += blocks.bytes_read

    def result(self, position: Position, segment: SegmentRecord, record: BlockRecord | None) -> Located:
        """Return the located position with its cost."""
        return Located(position, segment, record, len(self._pages) + self._other_pages, self._bytes)


class _Run:
    """The leading blocks of a segment that are proved to have consecutive numbers as GTIDs.

    For such a block, the record alone says which transactions of the segment precede it.
    """

    def __init__(self, blocks: BlockIndex, base: int, head: SegmentHead) -> None:
        self._blocks = blocks
        self._base = base
        self._flavor = head.flavor
        # For MariaDB, the transactions before the run also decide whether the run has passed a GTID position.
        self._before = GtidSet.parse(head.gtid_set if head.flavor != "mysql" else "")
        self._first = blocks.record(0) if len(blocks) else None

    def proves(self, index: int, fits: Callable[[GtidSet], bool]) -> bool:
        """Return whether all GTIDs before a block are known and satisfy the condition."""
        if index == 0:
            return True
        record = self._blocks.record(index)
        return self._is_known(record) and self._fits(record, record.gtid_number - 1, fits)

    def whole(self, index: int, fits: Callable[[GtidSet], bool]) -> bool:
        """Return whether all GTIDs up to the end of a block are known and complete, and satisfy the
        condition.
        """
        if index < 0:
            return False
        record = self._blocks.record(index)
        if not self._is_known(record) or not record.ends_at_boundary:
            return False
        return self._fits(record, record.gtid_number + record.transactions - 1, fits)

    def _is_known(self, record: BlockRecord) -> bool:
        return bool(record.flags & GTIDS_IN_SEQUENCE) and 0 < record.sequence_start <= self._base

    def _fits(self, record: BlockRecord, last: int, fits: Callable[[GtidSet], bool]) -> bool:
        first = self._first
        assert first is not None
        return last < first.gtid_number or fits(
            self._before.union(_gtids(self._flavor, record.gtid_source, first.gtid_number, last))
        )


def _gtids(flavor: str, source: bytes, first: int, last: int) -> GtidSet:
    """Return a range of GTIDs from one source as a set. The source is a MySQL UUID, or a MariaDB domain and
    server.
    """
    if flavor == "mysql":
        return GtidSet.parse(f"{UUID(bytes=source)}:{first}-{last}")
    domain, server = int.from_bytes(source[:4], "little"), int.from_bytes(source[4:8], "little")
    return GtidSet.parse(f"{domain}-{server}-{last}")


def _transaction_start(record: BlockRecord, blocks: BlockIndex) -> int:
    if record.begins_at_boundary:
        return record.source_start
    return record.transaction_start or blocks.boundary_before(record.source_start)


def _last_boundary(last: BlockRecord, blocks: BlockIndex) -> int:
    if last.ends_at_boundary:
        return last.source_end
    return last.last_boundary or _transaction_start(last, blocks)


def _begin_of(segment: SegmentRecord) -> _Key:
    return segment.epoch, segment.file_number, segment.base
