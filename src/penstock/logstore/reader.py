# SPDX-License-Identifier: Apache-2.0
"""Reads a log as the source's files, which are assembled from segments. Addresses are the source's file names
and offsets.

Readers only see bytes up to `visible`, the end of the last whole transaction.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.commit_versions import next_epoch
from penstock.errors import (
    DiskFailed,
    LogDamaged,
    OptionInvalid,
    PositionInvalid,
    PositionPurged,
    SequenceGap,
    SourceMissing,
)
from penstock.gtid_sets import LoggedSet, union
from penstock.logstore.disk import Disk, FileRange, LocalDisk
from penstock.logstore.epochs import EpochFile, EpochRecord, stored_segments
from penstock.logstore.extent import Extent
from penstock.logstore.gtids import gtid_set_before
from penstock.logstore.holds import BrokenHold
from penstock.logstore.index import BLOCK_BYTES_DEFAULT, BlockIndex, SegmentIndex, scan
from penstock.logstore.layout import Layout, StoredSegment
from penstock.logstore.locate import Located, Locator
from penstock.logstore.memory import MemoryTier
from penstock.logstore.records import OPEN, TIERED, SegmentRecord, block_records
from penstock.logstore.recovery import heal_segments, sound_blocks
from penstock.logstore.segment import SegmentHead, SegmentReader
from penstock.logstore.tier import with_noted
from penstock.model import Position

if TYPE_CHECKING:
    from penstock.logstore.tier import Tier

_files_versions = itertools.count(1)

_Piece = TypeVar("_Piece")


class LogReader:
    """Reads the log in a folder. Safe for concurrent use.

    A reader created by `open` writes nothing and needs no lock. It sees data that another process has written
    only after `refresh`. The process that writes the log uses the subclass `Log`.
    """

    def __init__(self, disk: Disk, folder: Path, block_bytes: int = BLOCK_BYTES_DEFAULT) -> None:
        self.folder = folder
        self.layout = Layout(folder)
        self.disk = disk
        self.memory: MemoryTier | None = None
        self.tier: Tier | None = None
        self._block_bytes = block_bytes
        # The lock guards the attributes below, including against changes by the writer.
        self._changed = threading.Condition(threading.RLock())
        self._index = SegmentIndex([])
        self._epochs = EpochFile()
        self._visible: Position | None = None
        self._heads: dict[int, SegmentHead] = {}
        self._scanned: tuple[int, int] | None = None
        # The result of the latest retention pass, in the process that writes the log.
        self.broken_holds: Sequence[BrokenHold] = ()

    @classmethod
    def open(cls, folder: Path, disk: Disk | None = None) -> Self:
        """Open a log that another process writes. Raises SourceMissing if it does not exist, LogDamaged."""
        disk = disk or LocalDisk()
        reader = cls(disk, folder)
        if not disk.exists(reader.layout.epochs):
            raise SourceMissing(f"there is no log in {folder}", hint=f"Check: ls {folder}")
        reader.refresh()
        return reader

    def refresh(self) -> Position | None:
        """Load newly written data and return the end of the whole transactions. Raises LogDamaged."""
        loaded = with_noted(self.disk, self.layout, SegmentIndex.load(self.disk, self.layout.segments_index))
        stored = stored_segments(self.disk, self.layout)
        epochs = EpochFile.load(self.disk, self.layout)
        while stored:
            index = heal_segments(self.disk, stored[:-1], loaded, self._block_bytes)
            try:
                tail = self._tail(stored[-1], index)
                break
            except (LogDamaged, SourceMissing):
                if len(stored) == 1:
                    raise
                # The newest segment is being created, or was just removed.
                stored.pop()
        else:
            index, tail = heal_segments(self.disk, [], loaded, self._block_bytes), None
        with self._changed:
            self._index = index if tail is None else index.put(tail[0])
            self._epochs = epochs
            self._visible = tail[1] if tail is not None else None
            return self._visible

    # --- State ------------------------------------------------------------------------------

    @property
    def visible(self) -> Position | None:
        """The end of the last whole transaction, which is the readable end; None in an empty log."""
        return self._visible

    @property
    def epochs(self) -> EpochFile:
        """The server of each epoch."""
        return self._epochs

    @property
    def epoch(self) -> EpochRecord | None:
        """The latest epoch, None in a new log."""
        return self._epochs.latest

    @property
    def next_epoch(self) -> int:
        """The number of the epoch after the newest. Raises LimitExceeded, SourceMissing."""
        latest = self._epochs.latest
        if latest is None:
            raise SourceMissing(f"the log in {self.folder} has not begun", hint="Start the capture")
        visible = self._visible
        has_bytes = visible is not None and visible.epoch == latest.epoch
        return next_epoch(latest.epoch, (visible if visible and has_bytes else latest.position).file_number)

    def earliest(self) -> Position | None:
        """Return the start of the oldest segment, None in an empty log. Raises LogDamaged."""
        with self._changed:
            first = self._index[0] if len(self._index) else None
        return None if first is None else Position(first.epoch, self.file_of(first), first.base)

    def earliest_on_disk(self) -> Position | None:
        """Return the start of the oldest segment on disk. Only the process that writes the log knows it."""
        return self.earliest()

    def head(self) -> Position:
        """Return the end of the last whole transaction. Raises SourceMissing in an empty log."""
        visible = self._visible
        if visible is None:
            raise SourceMissing(
                f"the log in {self.folder} is empty", hint="Start the capture, then ask again"
            )
        return visible

    @property
    def segments(self) -> SegmentIndex:
        """The current L1 records of all segments. The index is immutable: every change creates a new
        index.
        """
        return self._index

    def extents(self) -> list[Extent]:
        """Return the unbroken runs of all source files, in order."""
        with self._changed:
            records, visible = list(self._index), self._visible
        extents: list[Extent] = []
        for record in records:
            end = self._end_of(record, visible)
            if end <= record.base:
                continue
            name = self.file_of(record)
            last = extents[-1] if extents else None
            if last is not None and (last.epoch, last.file, last.end) == (record.epoch, name, record.base):
                extents[-1] = replace(last, end=end)
            else:
                extents.append(Extent(record.epoch, name, record.base, end))
        return extents

    def bytes_behind(self, position: Position) -> int:
        """Return how many bytes of the log follow a position."""
        (behind,) = self.bytes_behind_all([position])
        return behind

    def bytes_behind_all(self, positions: Sequence[Position]) -> list[int]:
        """Return how many bytes of the log follow each position. Reads the extents at most once."""
        visible = self.visible
        extents: list[Extent] | None = None
        bytes_behind = []
        for position in positions:
            if visible is None or visible <= position:
                bytes_behind.append(0)
            elif (visible.epoch, visible.file) == (position.epoch, position.file):
                bytes_behind.append(visible.offset - position.offset)
            else:
                extents = self.extents() if extents is None else extents
                bytes_behind.append(sum(extent.bytes_after(position) for extent in extents))
        return bytes_behind

    # --- Bytes ------------------------------------------------------------------------------

    def read(self, epoch: int, file: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of [start, stop) of a source file, from memory if held there, else from segments.

        Raises PositionPurged before the first segment, SequenceGap for bytes that the log does not have,
        PositionInvalid after `visible`, LogDamaged and ChecksumMismatch for an unreadable segment. Only
        decoding verifies the bytes of the events.
        """
        return self._pieces(Position(epoch, file, start), stop, SegmentReader.read)

    def pieces(self, epoch: int, file: str, start: int, stop: int) -> Iterator[memoryview | FileRange]:
        """Yield the same bytes as `read`.

        The bytes of plain local segments are yielded as file ranges that are not read yet. A range is valid
        until the next piece is requested.
        """
        return self._pieces(Position(epoch, file, start), stop, SegmentReader.pieces)

    def _pieces(
        self,
        position: Position,
        stop: int,
        pieces_of: Callable[[SegmentReader, int, int], Iterator[memoryview | _Piece]],
    ) -> Iterator[memoryview | _Piece]:
        epoch, file = position.epoch, position.file
        self._check_visible(replace(position, offset=stop))
        while position.offset < stop:
            views = self.memory.read(epoch, file, position.offset, stop) if self.memory is not None else None
            if views:
                yield from views
                position = replace(position, offset=position.offset + sum(view.nbytes for view in views))
                continue
            record = self._segment_at(position)
            end = min(self._end_of(record, self._visible), stop)
            with self.open_segment(record) as reader:
                if reader.head.file != file:
                    raise PositionInvalid(
                        f"the log's file of that number is {reader.head.file}", position=str(position)
                    )
                yield from pieces_of(reader, position.offset, end)
            position = replace(position, offset=end)

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description. Raises SourceMissing."""
        number = Position(epoch, file, 0).file_number
        with self._changed:
            records = [
                record for record in self._index if (record.epoch, record.file_number) == (epoch, number)
            ]
        if not records:
            raise SourceMissing(
                f"the log has nothing of {file} in epoch {epoch}", hint="Run: penstock log list"
            )
        return self.segment_head(records[0]).file_head

    @contextmanager
    def open_segment(self, record: SegmentRecord) -> Iterator[SegmentReader]:
        """Open a segment wherever it is stored. Raises PositionPurged if it was removed concurrently."""
        with self._open(record) as reader:
            self._heads[record.version] = reader.head
            yield reader

    @contextmanager
    def open_blocks(self, record: SegmentRecord) -> Iterator[tuple[SegmentReader, BlockIndex]]:
        """Open a segment with its L2 index. For an open segment, the index ends at the readable end."""
        with self.open_segment(record) as reader:
            end = self._end_of(record, self._visible)
            yield reader, self._blocks(record, reader, end)

    def segment_head(self, record: SegmentRecord) -> SegmentHead:
        """Return a segment's head. Raises LogDamaged."""
        head = self._heads.get(record.version)
        if head is None:
            with self.open_segment(record) as reader:
                head = reader.head
        return head

    # --- Lookups ----------------------------------------------------------------------------

    def locate_position(self, position: Position) -> Located:
        """Return the place of a position; see `Locator.position`."""
        return self._locator().position(position)

    def locate_time(self, time_us: int) -> Located:
        """Return a boundary before which no commit is at or after a time; see `Locator.time`."""
        return self._locator().time(time_us)

    def locate_gtid_set(self, gtid_set: str) -> Located:
        """Return a boundary preceded only by transactions of the set; see `Locator.gtid_set`."""
        return self._locator().gtid_set(gtid_set)

    def locate_gtid(self, gtid: str) -> Located:
        """Return a boundary at or before one transaction; see `Locator.gtid`."""
        return self._locator().gtid(gtid)

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return all GTIDs before a transaction boundary, "" if the source has none.

        Raises PositionPurged, PositionInvalid, and StreamError if the bytes before it are invalid.
        """
        epoch = self._epochs.get(position.epoch)
        if epoch is not None and position == epoch.position:
            return epoch.gtid_set
        self._check_visible(position)
        record = self._segment_before(position)
        if record is None or record.epoch != position.epoch:
            raise self._purged(position)
        with self.open_blocks(record) as (reader, blocks):
            if record.file_number != position.file_number or position.offset > blocks.end:
                # The log has nothing between the end of the stored bytes and this position, so the same GTIDs
                # precede both.
                gtids = gtid_set_before(reader, blocks, blocks.end)
            else:
                gtids = gtid_set_before(reader, blocks, max(position.offset, record.base))
        return self._with_epoch(position, gtids)

    def boundary_before(self, position: Position) -> int:
        """Return the last indexed transaction boundary of the same file at or before a position.

        Raises PositionPurged and PositionInvalid for a position that the log does not have.
        """
        self._check_visible(position)
        record = self._segment_before(position)
        file = position.epoch, position.file_number
        if record is None or (record.epoch, record.file_number) != file:
            raise self._purged(position)
        with self.open_blocks(record) as (_, blocks):
            return blocks.boundary_before(position.offset)

    # --- Inside -----------------------------------------------------------------------------

    def _with_epoch(self, position: Position | None, gtid_set: LoggedSet) -> LoggedSet:
        """Add the GTID set that was recorded at the start of the position's epoch, if that set was read from
        the server's log.
        """
        record = None if position is None else self._epochs.get(position.epoch)
        return gtid_set if record is None or not record.is_logged_set else union(record.gtid_set, gtid_set)

    def _tail(self, segment: StoredSegment, before: SegmentIndex) -> tuple[SegmentRecord, Position]:
        """Return the newest segment's record and the end of its last whole transaction."""
        with SegmentReader.open(self.disk, segment) as reader:
            end = reader.end
            scanned = self._scanned
            if scanned is not None and scanned[0] == segment.version and scanned[1] <= end:
                start = scanned[1]
            else:
                blocks = sound_blocks(self.disk, reader, end)
                start = int(block_records(blocks)["source_end"][-1]) if blocks else reader.head.base
            boundary = scan(reader, start, end, block_bytes=self._block_bytes).boundary
            self._scanned = segment.version, boundary
            self._heads[segment.version] = reader.head
            head = reader.head
            record = SegmentRecord(
                version=segment.version,
                epoch=head.epoch,
                file_number=head.position.file_number,
                base=head.base,
                source_end=0,
                head_bytes=len(head.raw),
                state=OPEN,
                time_first_us=0,
                time_max_us=before[-1].time_max_us if len(before) else 0,
                transactions=0,
                changes=0,
                hour=segment.hour,
                server_id=0,
                stored_bytes=len(head.raw) + end - head.base,
            )
            return record, replace(head.position, offset=boundary)

    def _blocks(self, record: SegmentRecord, reader: SegmentReader, end: int) -> BlockIndex:
        with self._changed:
            index = self._index.find(record.version)
            before = self._index[index - 1].time_max_us if index > 0 else 0
        return BlockIndex(
            self.disk,
            reader,
            end,
            closed=record.source_end > 0,
            block_bytes=self._block_bytes,
            time_max_us=before,
            keep=lambda records: self._keep_blocks(reader, records),
        )

    def _keep_blocks(self, reader: SegmentReader, records: bytes) -> None:
        """Keep the records of a rebuilt index in memory. A plain reader does not change the file."""

    def _open_current(self, record: SegmentRecord, refresh: Callable[[], object]) -> SegmentReader:
        """Open a segment that may have been compressed, moved or removed since the index was refreshed."""
        try:
            return LogReader._open(self, record)
        except PositionPurged:
            with suppress(LogDamaged, SourceMissing, DiskFailed):
                refresh()
            current = self._index.get(record.version)
            if current is None or current.state == record.state:
                raise
            return LogReader._open(self, current)

    def _open(self, record: SegmentRecord) -> SegmentReader:
        for cold in (False, True):
            path = self.layout.segment(record.hour, record.version, cold)
            segment = StoredSegment(record.version, record.hour, path, cold, record.epoch, record.file_number)
            try:
                return SegmentReader.open(self.disk, segment, self._heads.get(record.version))
            except SourceMissing:
                # The segment may have been compressed, moved or removed after its record was read.
                continue
        with self._changed:
            current = self._index.get(record.version)
        if current is None or current.state != TIERED:
            # The log's current start is unknown at this point: the removed segment may be the first in the
            # index that this reader has.
            raise PositionPurged(
                "the segment was removed from the log",
                position=str(Position(record.epoch, self._name_of_file(record), record.base)),
                hint="See what the log has: penstock log list",
            )
        if self.tier is None:
            raise OptionInvalid(
                f"segment {record.version:019d} was moved away, and no tier is named",
                hint="Name the URL that it was moved to: log.tier",
            )
        return self.tier.reader(record)

    def _locator(self) -> Locator:
        return Locator(self._index, _Access(self), self._epochs.lost)

    def _end_of(self, record: SegmentRecord, visible: Position | None) -> int:
        """Return the offset up to which a segment may be read."""
        if record.source_end:
            return record.source_end
        if visible is None or (visible.epoch, visible.file_number) != (record.epoch, record.file_number):
            return record.base
        return max(visible.offset, record.base)

    def file_of(self, record: SegmentRecord) -> str:
        """Return a segment's source file. If its head is damaged, derive the name from its epoch."""
        try:
            return self.segment_head(record).file
        except (LogDamaged, PositionPurged):
            return self._name_of_file(record)

    def _name_of_file(self, record: SegmentRecord) -> str:
        epoch = self._epochs.get(record.epoch)
        stem, _, digits = (epoch.file if epoch is not None else "unknown.000000").rpartition(".")
        return f"{stem}.{record.file_number:0{len(digits)}d}"

    def _segment_before(self, position: Position) -> SegmentRecord | None:
        """Return the last segment that starts at or before a position."""
        order_key = (position.epoch, position.file_number, position.offset)
        with self._changed:
            index = self._index.find(position.commit_version)
            # A commit version counts units of 16 bytes, so the match may be a segment that starts slightly
            # later.
            while (
                index >= 0
                and (self._index[index].epoch, self._index[index].file_number, self._index[index].base)
                > order_key
            ):
                index -= 1
            return self._index[index] if index >= 0 else None

    def _segment_at(self, position: Position) -> SegmentRecord:
        """Return the segment that contains the byte at a position. Raises PositionPurged, SequenceGap."""
        record = self._segment_before(position)
        if record is None:
            raise self._purged(position)
        same_file = (record.epoch, record.file_number) == (position.epoch, position.file_number)
        if same_file and position.offset < self._end_of(record, self._visible):
            return record
        raise SequenceGap(
            "the log does not have the bytes here",
            position=str(position),
            hint="penstock log list shows what it has",
        )

    def _check_visible(self, position: Position) -> None:
        visible = self._visible
        if visible is None or position > visible:
            raise PositionInvalid(
                f"the log ends at {visible}" if visible else "the log is empty",
                position=str(position),
                hint="Wait, then ask again",
            )

    def _purged(self, position: Position) -> PositionPurged:
        earliest = self.earliest()
        return PositionPurged(
            f"the log begins with {earliest or 'nothing'}",
            position=str(position),
            hint=f"Start at {earliest}, and copy in full what came before",
        )


def next_files_version() -> int:
    """Return a version number for a log's files that no log of this process has used before."""
    return next(_files_versions)


class _Access:
    """Opens the segments of a log for the locator."""

    def __init__(self, log: LogReader) -> None:
        self._log = log

    def head(self, segment: SegmentRecord) -> SegmentHead:
        """Return the segment's head."""
        return self._log.segment_head(segment)

    @contextmanager
    def blocks(self, segment: SegmentRecord) -> Iterator[BlockIndex]:
        """Return the segment's L2 index."""
        with self._log.open_blocks(segment) as (_, blocks):
            yield blocks
