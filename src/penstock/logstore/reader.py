# SPDX-License-Identifier: Apache-2.0
"""A log as its readers see it: source files made of segments, in the source's own coordinates.

What is behind `visible`, the end of the last whole transaction, is not there for a reader.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.commit_versions import next_epoch
from penstock.errors import (
    LogDamaged,
    OptionInvalid,
    PositionInvalid,
    PositionPurged,
    SequenceGap,
    SourceMissing,
)
from penstock.gtid_sets import LoggedSet, union
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.epochs import EpochFile, stored_segments
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


@dataclass(frozen=True)
class LogExtent:
    """Unbroken bytes [start, end) of one source file that the log holds, `end` behind a whole transaction."""

    epoch: int
    file: str
    start: int
    end: int

    @property
    def first(self) -> Position:
        """Where its first event begins."""
        return Position(self.epoch, self.file, self.start)

    @property
    def last(self) -> Position:
        """Where its bytes end."""
        return Position(self.epoch, self.file, self.end)

    def bytes_after(self, position: Position) -> int:
        """Return how many of its bytes lie after a position."""
        if self.last <= position:
            return 0
        in_file = (self.epoch, self.file) == (position.epoch, position.file)
        return self.end - (max(position.offset, self.start) if in_file else self.start)


class LogReader:
    """Reads the log in a folder. Many threads may ask at once.

    One that was made by `open` writes nothing, needs no lock, and sees what another process writes after
    `refresh`. The process that writes has a `Log`, which is one too.
    """

    def __init__(self, disk: Disk, folder: Path, block_bytes: int = BLOCK_BYTES_DEFAULT) -> None:
        self.folder = folder
        self.layout = Layout(folder)
        self.disk = disk
        self.memory: MemoryTier | None = None
        self.tier: Tier | None = None
        self._block_bytes = block_bytes
        # Held for what follows, and for the writer's changes of it.
        self._changed = threading.Condition(threading.RLock())
        self._index = SegmentIndex([])
        self._epochs = EpochFile()
        self._visible: Position | None = None
        self._heads: dict[int, SegmentHead] = {}
        self._scanned: tuple[int, int] | None = None
        # As the last pass of upkeep found them, in the process that writes the log.
        self.broken_holds: Sequence[BrokenHold] = ()

    @classmethod
    def open(cls, folder: Path, disk: Disk | None = None) -> Self:
        """Read a log that this process does not write. Raises SourceMissing where there is none,
        LogDamaged."""
        disk = disk or LocalDisk()
        reader = cls(disk, folder)
        if not disk.exists(reader.layout.epochs):
            raise SourceMissing(f"there is no log in {folder}", hint=f"Check: ls {folder}")
        reader.refresh()
        return reader

    def refresh(self) -> Position | None:
        """See what was written since, and return how far whole transactions go. Raises LogDamaged."""
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
                # The newest segment is in the making, or has just gone.
                stored.pop()
        else:
            index, tail = heal_segments(self.disk, [], loaded, self._block_bytes), None
        with self._changed:
            self._index = index if tail is None else index.put(tail[0])
            self._epochs = epochs
            self._visible = tail[1] if tail is not None else None
            return self._visible

    # --- What there is ----------------------------------------------------------------------

    @property
    def visible(self) -> Position | None:
        """The end of the last whole transaction, up to which may be read; None in an empty log."""
        return self._visible

    @property
    def epochs(self) -> EpochFile:
        """Which server each epoch belongs to."""
        return self._epochs

    @property
    def next_epoch(self) -> int:
        """The number of an epoch that follows the newest. Raises LimitExceeded, SourceMissing."""
        latest = self._epochs.latest
        if latest is None:
            raise SourceMissing(f"the log in {self.folder} has not begun", hint="Start the capture")
        visible = self._visible
        begun = visible is not None and visible.epoch == latest.epoch
        return next_epoch(latest.epoch, (visible if visible and begun else latest.position).file_number)

    def earliest(self) -> Position | None:
        """Return where the oldest segment begins, None in an empty log. Raises LogDamaged."""
        with self._changed:
            first = self._index[0] if len(self._index) else None
        return None if first is None else Position(first.epoch, self.file_of(first), first.base)

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
        """Every segment's L1 record as of now; the index never changes, another takes its place."""
        return self._index

    def extents(self) -> list[LogExtent]:
        """Return the unbroken runs of each source file, in order."""
        with self._changed:
            records, visible = list(self._index), self._visible
        extents: list[LogExtent] = []
        for record in records:
            end = self._end_of(record, visible)
            if end <= record.base:
                continue
            name = self.file_of(record)
            last = extents[-1] if extents else None
            if last is not None and (last.epoch, last.file, last.end) == (record.epoch, name, record.base):
                extents[-1] = replace(last, end=end)
            else:
                extents.append(LogExtent(record.epoch, name, record.base, end))
        return extents

    def bytes_behind(self, position: Position) -> int:
        """Return how much of the log lies after a position."""
        (behind,) = self.bytes_behind_all([position])
        return behind

    def bytes_behind_all(self, positions: Sequence[Position]) -> list[int]:
        """Return how much of the log lies after each position; the log's extents are read once at most."""
        visible = self.visible
        extents: list[LogExtent] | None = None
        found = []
        for position in positions:
            if visible is None or visible <= position:
                found.append(0)
            elif (visible.epoch, visible.file) == (position.epoch, position.file):
                found.append(visible.offset - position.offset)
            else:
                extents = self.extents() if extents is None else extents
                found.append(sum(extent.bytes_after(position) for extent in extents))
        return found

    # --- Bytes ------------------------------------------------------------------------------

    def read(self, epoch: int, file: str, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of [start, stop) of a source file: from memory where they are there, else from
        segments.

        Raises PositionPurged before the first segment, SequenceGap for bytes that the log does not have,
        PositionInvalid behind `visible`, LogDamaged and ChecksumMismatch for a segment that cannot be
        read. Bytes are proved by whoever decodes them, event by event.
        """
        place = Position(epoch, file, start)
        self._check_visible(replace(place, offset=stop))
        while place.offset < stop:
            held = self.memory.read(epoch, file, place.offset, stop) if self.memory is not None else None
            if held:
                yield from held
                place = replace(place, offset=place.offset + sum(view.nbytes for view in held))
                continue
            record = self._holding(place)
            end = min(self._end_of(record, self._visible), stop)
            with self.open_segment(record) as reader:
                if reader.head.file != file:
                    raise PositionInvalid(
                        f"the log's file of that number is {reader.head.file}", position=str(place)
                    )
                yield from reader.read(place.offset, end)
            place = replace(place, offset=end)

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description. Raises SourceMissing."""
        number = Position(epoch, file, 0).file_number
        with self._changed:
            found = [one for one in self._index if (one.epoch, one.file_number) == (epoch, number)]
        if not found:
            raise SourceMissing(
                f"the log has nothing of {file} in epoch {epoch}", hint="Run: penstock log list"
            )
        return self.segment_head(found[0]).file_head

    @contextmanager
    def open_segment(self, record: SegmentRecord) -> Iterator[SegmentReader]:
        """Open a segment, wherever it lies now. Raises PositionPurged where it was removed meanwhile."""
        with self._open(record) as reader:
            self._heads[record.version] = reader.head
            yield reader

    @contextmanager
    def open_blocks(self, record: SegmentRecord) -> Iterator[tuple[SegmentReader, BlockIndex]]:
        """Open a segment with its L2 index. Of an open one the index ends where the segment may be read."""
        with self.open_segment(record) as reader:
            end = self._end_of(record, self._visible)
            yield reader, self._blocks(record, reader, end)

    def segment_head(self, record: SegmentRecord) -> SegmentHead:
        """Return what a segment says of itself. Raises LogDamaged."""
        head = self._heads.get(record.version)
        if head is None:
            with self.open_segment(record) as reader:
                head = reader.head
        return head

    # --- Places -----------------------------------------------------------------------------

    def locate_position(self, position: Position) -> Located:
        """Return where a position lies; see `Locator.position`."""
        return self._locator().position(position)

    def locate_time(self, time_us: int) -> Located:
        """Return a boundary before which nothing was committed at or after a time; see `Locator.time`."""
        return self._locator().time(time_us)

    def locate_gtid_set(self, gtid_set: str) -> Located:
        """Return a boundary before which there is nothing but the set; see `Locator.gtid_set`."""
        return self._locator().gtid_set(gtid_set)

    def locate_gtid(self, gtid: str) -> Located:
        """Return a boundary at or before one transaction; see `Locator.gtid`."""
        return self._locator().gtid(gtid)

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return every GTID before a transaction boundary, "" where the source has none.

        Raises PositionPurged, PositionInvalid, and StreamError where the bytes before it do not hold.
        """
        begun = self._epochs.get(position.epoch)
        if begun is not None and position == begun.position:
            return begun.gtid_set
        self._check_visible(position)
        record = self._begun_before(position)
        if record is None or record.epoch != position.epoch:
            raise self._purged(position)
        with self.open_blocks(record) as (reader, blocks):
            if record.file_number != position.file_number or position.offset > blocks.end:
                # Nothing lies between the end of what was kept and here.
                found = gtid_set_before(reader, blocks, blocks.end)
            else:
                found = gtid_set_before(reader, blocks, max(position.offset, record.base))
        return self._with_epoch(position, found)

    def boundary_before(self, position: Position) -> int:
        """Return the last transaction boundary of the same file at or before a position that the index has.

        Raises PositionPurged and PositionInvalid for a position that the log does not have.
        """
        self._check_visible(position)
        record = self._begun_before(position)
        file = position.epoch, position.file_number
        if record is None or (record.epoch, record.file_number) != file:
            raise self._purged(position)
        with self.open_blocks(record) as (_, blocks):
            return blocks.boundary_before(position.offset)

    # --- Inside -----------------------------------------------------------------------------

    def _with_epoch(self, position: Position | None, gtid_set: LoggedSet) -> LoggedSet:
        """Return a set at a position with what came before its epoch, as far as that was completed since."""
        record = None if position is None else self._epochs.get(position.epoch)
        return gtid_set if record is None or not record.is_logged_set else union(gtid_set, record.gtid_set)

    def _tail(self, segment: StoredSegment, before: SegmentIndex) -> tuple[SegmentRecord, Position]:
        """Return the newest segment's record, and where its last whole transaction ends now."""
        with SegmentReader.open(self.disk, segment) as reader:
            end = reader.end
            known = self._scanned
            if known is not None and known[0] == segment.version and known[1] <= end:
                start = known[1]
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
            at = self._index.find(record.version)
            before = self._index[at - 1].time_max_us if at > 0 else 0
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
        """Take note of an index that was made again; who only reads leaves the file as it is."""

    def _open(self, record: SegmentRecord) -> SegmentReader:
        for cold in (False, True):
            path = self.layout.segment(record.hour, record.version, cold)
            segment = StoredSegment(record.version, record.hour, path, cold, record.epoch, record.file_number)
            try:
                return SegmentReader.open(self.disk, segment, self._heads.get(record.version))
            except SourceMissing:
                # It may have been compressed, moved or removed since its record was read.
                continue
        with self._changed:
            now = self._index.get(record.version)
        if now is None or now.state != TIERED:
            raise self._purged(Position(record.epoch, self._name_of_file(record), record.base))
        if self.tier is None:
            raise OptionInvalid(
                f"segment {record.version:019d} was moved away, and no tier is named",
                hint="Name the URL that it was moved to: log.tier",
            )
        return self.tier.reader(record)

    def _locator(self) -> Locator:
        return Locator(self._index, _Access(self))

    def _end_of(self, record: SegmentRecord, visible: Position | None) -> int:
        """Return the offset up to which a segment may be read."""
        if record.source_end:
            return record.source_end
        if visible is None or (visible.epoch, visible.file_number) != (record.epoch, record.file_number):
            return record.base
        return max(visible.offset, record.base)

    def file_of(self, record: SegmentRecord) -> str:
        """Return a segment's source file. Where its head is damaged, by the name that its epoch's files
        have."""
        try:
            return self.segment_head(record).file
        except (LogDamaged, PositionPurged):
            return self._name_of_file(record)

    def _name_of_file(self, record: SegmentRecord) -> str:
        begun = self._epochs.get(record.epoch)
        stem, _, digits = (begun.file if begun is not None else "unknown.000000").rpartition(".")
        return f"{stem}.{record.file_number:0{len(digits)}d}"

    def _begun_before(self, place: Position) -> SegmentRecord | None:
        """Return the last segment that begins at or before a place."""
        wanted = (place.epoch, place.file_number, place.offset)
        with self._changed:
            at = self._index.find(place.commit_version)
            # A commit version counts in units of 16 bytes, so it may be that of a segment a little further
            # on.
            while (
                at >= 0
                and (self._index[at].epoch, self._index[at].file_number, self._index[at].base) > wanted
            ):
                at -= 1
            return self._index[at] if at >= 0 else None

    def _holding(self, place: Position) -> SegmentRecord:
        """Return the segment that holds the byte at a place. Raises PositionPurged, SequenceGap."""
        record = self._begun_before(place)
        if record is None:
            raise self._purged(place)
        same_file = (record.epoch, record.file_number) == (place.epoch, place.file_number)
        if same_file and place.offset < self._end_of(record, self._visible):
            return record
        raise SequenceGap(
            "the log does not have the bytes here",
            position=str(place),
            hint="penstock log list shows what it has",
        )

    def _check_visible(self, position: Position) -> None:
        visible = self._visible
        if visible is None or position > visible:
            raise PositionInvalid(
                f"the log goes to {visible or 'nothing'}", position=str(position), hint="Wait, then ask again"
            )

    def _purged(self, position: Position) -> PositionPurged:
        earliest = self.earliest()
        return PositionPurged(
            f"the log begins with {earliest or 'nothing'}",
            position=str(position),
            hint=f"Start at {earliest}, and copy in full what came before",
        )


class _Access:
    """How the locator opens the segments of a log."""

    def __init__(self, log: LogReader) -> None:
        self._log = log

    def head(self, segment: SegmentRecord) -> SegmentHead:
        """Return what the segment says of itself."""
        return self._log.segment_head(segment)

    @contextmanager
    def blocks(self, segment: SegmentRecord) -> Iterator[BlockIndex]:
        """Return the segment's L2 index."""
        with self._log.open_blocks(segment) as (_, blocks):
            yield blocks
