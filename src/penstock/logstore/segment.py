# SPDX-License-Identifier: Apache-2.0
"""One segment: a binlog file with an unbroken run of one source file's bytes.

    magic | format description | rotate: file and base | GTIDs before base | events from `base` on, unchanged

The part before the events is the head. A source offset is `base` + (segment offset - length of the head). All
offsets in the interface of this module are source offsets.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from penstock._native import read_segment_head
from penstock.closing import Closing
from penstock.errors import FileTruncated, LogDamaged, StreamError
from penstock.limits import READ_BYTES
from penstock.logstore.disk import Buffer, Disk, FileRange, LocalReadFile
from penstock.logstore.layout import StoredSegment
from penstock.logstore.records import (
    BLOCKS_MAGIC,
    CLOSED,
    COLD,
    OPEN,
    RECORD_BYTES,
    IndexHeader,
    Records,
    SegmentRecord,
    block_records,
)
from penstock.model import Position

if TYPE_CHECKING:
    from penstock.logstore.cold import StoredFile

_MAGIC_BYTES = 4
# Timestamp 4, type 1, server id 4, length 4: the start of every event.
_EVENT_HEADER = struct.Struct("<4xB4xI")
_MARIADB_GTID_LIST = 163

# The head is about 300 bytes plus the GTID set, and rarely longer than the size of this read.
_HEAD_READ_BYTES = 8 * 1024

HINT_DAMAGED = "Run: penstock log verify. Restore the file, or remove it and read those bytes from the source"


@dataclass(frozen=True)
class SegmentHead:
    """The head of a segment.

    `raw` is the whole head, and `file_head` contains the magic and the format description. `gtid_set`
    contains all transactions before `base`, and is "" if the source has no GTIDs.
    """

    epoch: int
    file: str
    base: int
    gtid_set: str
    file_head: bytes
    raw: bytes

    @property
    def position(self) -> Position:
        """The position of the segment's first event."""
        return Position(self.epoch, self.file, self.base)

    @property
    def flavor(self) -> str:
        """The flavor of the server, "mariadb" or "mysql", judged by the type of the head's last event."""
        at, kind = _MAGIC_BYTES, 0
        while at < len(self.raw):
            kind, size = _EVENT_HEADER.unpack_from(self.raw, at)
            at += max(size, _EVENT_HEADER.size)
        return "mariadb" if kind == _MARIADB_GTID_LIST else "mysql"

    @property
    def format_description(self) -> bytes:
        """The format description event of the source file."""
        return self.file_head[_MAGIC_BYTES:]

    @classmethod
    def parse(cls, raw: bytes, epoch: int) -> Self:
        """Parse a head at the start of the bytes.

        Raises the kernel's StreamError, FileTruncated if it is incomplete.
        """
        head_bytes, file, base, gtid_set, format_description = read_segment_head(raw)
        return cls(epoch, file, base, gtid_set, raw[:_MAGIC_BYTES] + format_description, raw[:head_bytes])


def read_head(stored: "StoredFile", segment: StoredSegment) -> SegmentHead:
    """Read a segment's head, which must match the file name. Raises LogDamaged."""
    read_bytes = _HEAD_READ_BYTES
    while True:
        raw = stored.read(0, read_bytes)
        try:
            head = SegmentHead.parse(raw, segment.epoch)
            break
        except FileTruncated as problem:
            if len(raw) < read_bytes:
                raise _damaged_head(segment, problem.message) from problem
            read_bytes *= 4
        except StreamError as problem:
            raise _damaged_head(segment, problem.message) from problem
    if head.position.file_number != segment.file_number or not segment.begins_at(head.base):
        raise _damaged_head(segment, f"it says that it begins at {head.position}, its name says otherwise")
    return head


def _damaged_head(segment: StoredSegment, why: str) -> LogDamaged:
    return LogDamaged(
        f"the head of {segment.path} cannot be read: {why}",
        position=f"{segment.path.name}:0",
        hint=HINT_DAMAGED,
    )


class SegmentReader(Closing):
    """A plain or compressed segment, open for reading.

    Safe for concurrent use. As a context manager, it closes itself.
    """

    def __init__(self, segment: StoredSegment, stored: "StoredFile", head: SegmentHead | None = None) -> None:
        self.segment = segment
        self._stored = stored
        self.head = head or read_head(stored, segment)

    @classmethod
    def open(cls, disk: Disk, segment: StoredSegment, head: SegmentHead | None = None) -> Self:
        """Open a segment.

        If a head is passed, it is not read again. Raises SourceMissing, LogDamaged, DiskFailed.
        """
        stored: StoredFile = disk.open_read(segment.path)
        try:
            if segment.cold:
                # Imported on demand, so that only readers of compressed segments need the zstd package.
                from penstock.logstore.cold import SeekableFile

                stored = SeekableFile(stored, str(segment.path))
            return cls(segment, stored, head)
        except BaseException:
            stored.close()
            raise

    @property
    def end(self) -> int:
        """The source offset after the last byte stored now."""
        return self.head.base + max(self._stored.size - len(self.head.raw), 0)

    def read_bytes(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop) of the source file. Raises LogDamaged if some are missing."""
        shift = len(self.head.raw) - self.head.base
        content = self._stored.read(start + shift, stop + shift)
        if start < self.head.base or len(content) != stop - start:
            raise LogDamaged(
                f"{self.segment.path} does not have the bytes up to offset {stop}",
                position=str(Position(self.head.epoch, self.head.file, start + len(content))),
                hint=HINT_DAMAGED,
            )
        return content

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of [start, stop) of the source file, in pieces of READ_BYTES. Raises LogDamaged."""
        for begin in range(start, stop, READ_BYTES):
            yield memoryview(self.read_bytes(begin, min(begin + READ_BYTES, stop)))

    def pieces(self, start: int, stop: int) -> Iterator[memoryview | FileRange]:
        """Yield the same bytes as `read`. The bytes of a plain local file are yielded as file ranges that are
        not read yet.
        """
        if not isinstance(self._stored, LocalReadFile) or not self.head.base <= start <= stop <= self.end:
            yield from self.read(start, stop)
            return
        shift = len(self.head.raw) - self.head.base
        for begin in range(start + shift, stop + shift, READ_BYTES):
            yield FileRange(self._stored, begin, min(begin + READ_BYTES, stop + shift))

    def close(self) -> None:
        """Close the file."""
        self._stored.close()


@dataclass
class _Totals:
    """The totals over a segment's records."""

    time_first_us: int = 0
    time_max_us: int = 0
    transactions: int = 0
    changes: int = 0
    server_id: int = 0

    def add(self, blocks: Records) -> None:
        if len(blocks):
            times = blocks["time_us"]
            self.time_first_us = self.time_first_us or int(times[times > 0][0] if (times > 0).any() else 0)
            self.time_max_us = max(self.time_max_us, int(blocks["time_max_us"].max()))
            self.transactions += int(blocks["transactions"].sum(dtype="u8"))
            self.changes += int(blocks["changes"].sum(dtype="u8"))
            self.server_id = int(blocks["server_id"][-1]) or self.server_id


class SegmentWriter:
    """The open segment of a log. Appends to the segment's data and its L2 index together. Not thread-safe.

    `end` is the source offset after the appended data, and `indexed_end` is the end of the last block record.
    `index_whole` becomes false if a record does not start where the previous one ends; the index is then
    rebuilt from the data.
    """

    def __init__(
        self, disk: Disk, segment: StoredSegment, head: SegmentHead, time_max_us: int, created: bool
    ) -> None:
        self._disk = disk
        self.segment = segment
        self.head = head
        self._data = disk.append_open(segment.path)
        try:
            self._index = disk.append_open(segment.index_path)
        except BaseException:
            self._data.close()
            raise
        # The latest commit time of the log before this segment.
        self.time_before_us = time_max_us
        self._totals = _Totals(time_max_us=time_max_us)
        self.indexed_end = head.base
        self.index_whole = True
        # The name of a new file is not durable until the folder is synced.
        self._folder_synced = not created

    @classmethod
    def begin(cls, disk: Disk, segment: StoredSegment, head: SegmentHead, time_max_us: int) -> Self:
        """Create a new segment with its head. Raises LogFull and leaves no files behind, DiskFailed."""
        disk.make_folder(segment.path.parent)
        writer = cls(disk, segment, head, time_max_us, created=True)
        try:
            writer._data.truncate(0)
            writer._index.truncate(0)
            writer._data.write([head.raw])
            writer._index.write([index_header(head).encode()])
        except BaseException:
            writer.abandon()
            disk.remove(segment.index_path)
            disk.remove(segment.path)
            raise
        return writer

    @classmethod
    def resume(cls, disk: Disk, segment: StoredSegment, head: SegmentHead, time_max_us: int) -> Self:
        """Continue an existing segment.

        The caller truncates the segment and supplies its index. The file's name may not be durable.
        """
        return cls(disk, segment, head, time_max_us, created=True)

    @property
    def position(self) -> Position:
        """The position of the segment's first event."""
        return self.head.position

    @property
    def end(self) -> int:
        """The source offset after the appended data."""
        return self.head.base + self._data.size - len(self.head.raw)

    @property
    def stored_bytes(self) -> int:
        """The size of the segment's data file."""
        return self._data.size

    @property
    def time_max_us(self) -> int:
        """The latest commit time of the log up to the last record."""
        return self._totals.time_max_us

    def append(self, piece: Buffer, records: bytes) -> None:
        """Append events, and the records of the blocks that were closed since the last append.

        If this fails, nothing is appended. Raises LogFull, DiskFailed.
        """
        before = self._data.size
        self._data.write([piece])
        if not records:
            return
        blocks = block_records(records)
        if not self._follows(blocks):
            # The data is authoritative: the index is rebuilt from the data when the segment is closed.
            self.index_whole = False
            return
        try:
            self._index.write([records])
        except BaseException:
            self._data.truncate(before)
            raise
        self.indexed_end = int(blocks["source_end"][-1])
        self._totals.add(blocks)

    def cut(self, end: int) -> None:
        """Truncate the data to a source offset. The caller then supplies the remaining index."""
        self._data.truncate(len(self.head.raw) + end - self.head.base)
        self.index_whole = False

    def take_index(self, records: bytes) -> None:
        """Replace the content of the index file by records that were rebuilt from the data.

        Raises LogFull.
        """
        content = index_header(self.head).encode() + records
        if self._index.size != len(content) or self._disk.read(self.segment.index_path) != content:
            self._index.truncate(0)
            self._index.write([content])
        blocks = block_records(records)
        self._totals = _Totals(time_max_us=self.time_before_us)
        self._totals.add(blocks)
        self.indexed_end = int(blocks["source_end"][-1]) if records else self.head.base
        self.index_whole = True

    def rewrite(self, start: int) -> None:
        """Rewrite the data from a source offset on without changing it, so that the next sync covers it."""
        self._data.rewrite(len(self.head.raw) + start - self.head.base if start > self.head.base else 0)

    def records(self) -> bytes:
        """Return the records in the index file."""
        return self._disk.read(self.segment.index_path, RECORD_BYTES)

    def sync(self) -> None:
        """Make the data and the file's name durable. Raises DiskFailed."""
        self._data.sync()
        if not self._folder_synced:
            self._disk.sync_folder(self.segment.path.parent)
            self._folder_synced = True

    def close(self, state: int) -> SegmentRecord:
        """Make data and index durable, close both files, and return the segment's L1 record."""
        self.sync()
        self._index.sync()
        self.abandon()
        return self.record(state)

    def abandon(self) -> None:
        """Close both files without syncing."""
        self._data.close()
        self._index.close()

    def record(self, state: int = OPEN) -> SegmentRecord:
        """Return the segment's current L1 record."""
        source_end = 0 if state == OPEN else self.end
        return _record(self.segment, self.head, source_end, state, self._totals, self._data.size)

    def _follows(self, blocks: Records) -> bool:
        if not self.index_whole:
            return False
        starts, ends = blocks["source_start"], blocks["source_end"]
        return bool(
            starts[0] == self.indexed_end and (starts[1:] == ends[:-1]).all() and ends[-1] <= self.end
        )


def index_header(head: SegmentHead) -> IndexHeader:
    """Return the header that a segment's L2 index must have."""
    return IndexHeader(BLOCKS_MAGIC, head.epoch, head.base, head.position.file_number)


def closed_record(
    segment: StoredSegment,
    head: SegmentHead,
    end: int,
    records: bytes,
    time_max_us: int,
    stored_bytes: int,
) -> SegmentRecord:
    """Return the L1 record of a closed segment, computed from its block records without the header."""
    totals = _Totals(time_max_us=time_max_us)
    totals.add(block_records(records))
    return _record(segment, head, end, COLD if segment.cold else CLOSED, totals, stored_bytes)


def _record(
    segment: StoredSegment, head: SegmentHead, source_end: int, state: int, totals: _Totals, stored_bytes: int
) -> SegmentRecord:
    return SegmentRecord(
        version=segment.version,
        epoch=head.epoch,
        file_number=head.position.file_number,
        base=head.base,
        source_end=source_end,
        head_bytes=len(head.raw),
        state=state,
        time_first_us=totals.time_first_us,
        time_max_us=totals.time_max_us,
        transactions=totals.transactions,
        changes=totals.changes,
        hour=segment.hour,
        server_id=totals.server_id,
        stored_bytes=stored_bytes,
    )
