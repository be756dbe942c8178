# SPDX-License-Identifier: Apache-2.0
"""The indexes of a log:

L2 over the blocks of a segment, L1 over the segments. The segments remain authoritative. A lookup is a binary
search, and reads only the index records that the search visits. If a record is damaged or an index does not
match its data, the index is rebuilt from the data: in memory, and on disk as well if this process writes the
log.
"""

import dataclasses
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import structlog

from penstock._native import BlockCutter
from penstock.errors import LogDamaged, SourceMissing, StreamError
from penstock.limits import READ_BYTES
from penstock.logstore.disk import Disk
from penstock.logstore.records import (
    ENDS_AT_BOUNDARY,
    RECORD_BYTES,
    SEGMENTS_MAGIC,
    BlockRecord,
    IndexHeader,
    Records,
    SegmentRecord,
    block_records,
    segment_records,
    sound_records,
)
from penstock.logstore.segment import HINT_DAMAGED, SegmentReader, index_header

BLOCK_BYTES_DEFAULT = 64 * 1024
PAGE_BYTES = 4096

_log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")


# --- Reading the data -----------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """The result of scanning a range of events, up to the first invalid event.

    `records` contains the block records. The last block ends at `boundary`, which is the offset after the
    last whole transaction, or the start of the range if there is none. `end` is the offset after the last
    valid event, and `problem` is the error in the event at `end`, None if there is no error. `gtid_set` is
    the set passed to `scan` plus all transactions of the range.
    """

    records: bytes
    boundary: int
    end: int
    gtid_set: str
    time_max_us: int
    problem: StreamError | None


def scan(
    reader: SegmentReader,
    start: int,
    stop: int,
    *,
    block_bytes: int = BLOCK_BYTES_DEFAULT,
    gtid_set: str = "",
    time_max_us: int = 0,
) -> Scan:
    """Scan the events of [start, stop) of a segment and check the checksum of each.

    `start` must be a transaction boundary, `gtid_set` the set before it and `time_max_us` the latest commit
    time before it. `stop` may be any offset.
    """
    cutter = BlockCutter(
        epoch=reader.head.epoch,
        file=reader.head.file,
        offset=start,
        gtid_set=gtid_set,
        flavor=reader.head.flavor,
        block_bytes=block_bytes,
        time_max_us=time_max_us,
        live=False,
        head=reader.head.file_head,
        # A scan does not use statements, and collecting them for the whole range would take memory.
        statements=False,
    )
    records, end, problem = bytearray(), start, None
    try:
        for consumed in _feed(cutter, reader, start, stop):
            end = consumed
            records += cutter.take_records()
    except StreamError as error:
        problem = error
    if problem is None and cutter.boundary == end:
        cutter.close_block()
        records += cutter.take_records()
        return Scan(bytes(records), end, end, cutter.gtid_set, cutter.time_max_us, None)
    # Scan again up to the boundary only, so that neither the last block nor the GTID set exceeds it.
    whole = scan(
        reader, start, cutter.boundary, block_bytes=block_bytes, gtid_set=gtid_set, time_max_us=time_max_us
    )
    return dataclasses.replace(whole, end=end, problem=problem)


def _feed(cutter: BlockCutter, reader: SegmentReader, start: int, stop: int) -> Iterator[int]:
    """Feed the bytes of [start, stop) to the cutter; yield the offset after the last whole event each
    time."""
    piece_bytes = READ_BYTES
    while start < stop:
        piece = reader.read_bytes(start, min(start + piece_bytes, stop))
        consumed = cutter.feed(piece)
        # Discard the data that the cutter collected: the segment already contains it.
        cutter.take_data()
        start += consumed
        yield start
        if consumed == 0:
            if len(piece) < piece_bytes:
                return
            # The event is larger than the piece, so read more until the event fits.
            piece_bytes *= 2


def rebuild(reader: SegmentReader, end: int, block_bytes: int, time_max_us: int) -> bytes:
    """Rebuild the records of a whole segment from its data, up to a transaction boundary.

    `time_max_us` is the latest commit time before the segment. If the data is damaged, raises the error with
    its position.
    """
    scanned = scan(reader, reader.head.base, end, block_bytes=block_bytes, time_max_us=time_max_us)
    if scanned.problem is not None:
        raise scanned.problem
    if scanned.boundary != end:
        raise LogDamaged(
            f"{reader.segment.path} ends inside a transaction",
            position=str(dataclasses.replace(reader.head.position, offset=scanned.end)),
            hint=HINT_DAMAGED,
        )
    return scanned.records


# --- L2 -------------------------------------------------------------------------------------


class _Unsound(Exception):
    """A record needed for a lookup is damaged. Caught within this module."""


class BlockIndex:
    """The block records of one segment in ascending offset order. Safe for concurrent lookups.

    `end` is the end of the segment's data. For an open segment, it is the offset up to which the segment may
    be read. `bytes_read` counts the index bytes that lookups have read. A damaged index is rebuilt from the
    data. Then `rebuilt` becomes true, and `keep` is called with the new records.
    """

    def __init__(
        self,
        disk: Disk,
        reader: SegmentReader,
        end: int,
        *,
        closed: bool,
        block_bytes: int = BLOCK_BYTES_DEFAULT,
        time_max_us: int = 0,
        keep: Callable[[bytes], None] | None = None,
    ) -> None:
        self._reader = reader
        self.end = end
        self._block_bytes = block_bytes
        self._time_max_us = time_max_us
        self._keep = keep
        self._lock = threading.Lock()
        self._rebuilt_records: bytes | None = None
        self._pages: set[int] = set()
        self.bytes_read = 0
        self.rebuilt = False
        self._disk = disk
        self._path = reader.segment.index_path
        self._count = self._count_stored(closed)
        if self._count is None:
            self._rebuild()

    def __len__(self) -> int:
        return self._count or 0

    @property
    def pages_read(self) -> int:
        """The number of distinct 4 KiB pages that lookups touched."""
        return len(self._pages)

    @property
    def indexed_end(self) -> int:
        """The offset after the last block. Later data of an open segment has no record yet."""
        return self.record(len(self) - 1).source_end if len(self) else self._reader.head.base

    def record(self, index: int) -> BlockRecord:
        """Return one record. Raises IndexError, or StreamError if both the index and the data are damaged."""
        return self._retry_rebuilt(lambda: self._fetch(index))

    def records(self, first: int = 0, stop: int | None = None) -> Records:
        """Return the records of [first, stop) as an array of BLOCK_DTYPE. Raises any error from `record`."""
        return self._retry_rebuilt(lambda: self._fetch_array(first, len(self) if stop is None else stop))

    def find_offset(self, offset: int) -> int:
        """Return the number of the block that contains an offset of the source file.

        Return -1 for an offset before the first block, and `len` for an offset after the last.
        """

        def search() -> int:
            block = (
                bisect_right(range(len(self)), offset, key=lambda index: self._fetch(index).source_start) - 1
            )
            if block < 0 or offset < self._fetch(block).source_end:
                return block
            if block + 1 < len(self):
                # Blocks are contiguous. If none of them contains the offset, the index is damaged.
                raise _Unsound
            return block + 1

        return self._retry_rebuilt(search)

    def find_time(self, time_us: int) -> int:
        """Return the number of the first block with a latest commit time at or after a time.

        Return `len` if there is none.
        """
        return self._retry_rebuilt(
            lambda: bisect_right(range(len(self)), time_us - 1, key=lambda at: self._fetch(at).time_max_us)
        )

    def boundary_before(self, offset: int) -> int:
        """Return the last indexed transaction boundary at or before an offset."""

        def search() -> int:
            at = bisect_right(range(len(self)), offset, key=lambda index: self._fetch(index).source_end) - 1
            while at >= 0 and not self._fetch(at).flags & ENDS_AT_BOUNDARY:
                at -= 1
            return self._fetch(at).source_end if at >= 0 else self._reader.head.base

        return self._retry_rebuilt(search)

    def _retry_rebuilt(self, lookup: Callable[[], _Answer]) -> _Answer:
        try:
            return lookup()
        except _Unsound:
            self._rebuild()
            return lookup()

    def _fetch(self, index: int) -> BlockRecord:
        if not 0 <= index < len(self):
            raise IndexError(index)
        content = self._content(index, index + 1)
        record = BlockRecord.decode(content)
        if record is None:
            raise _Unsound
        return record

    def _fetch_array(self, first: int, stop: int) -> Records:
        content = self._content(first, max(stop, first))
        blocks = block_records(content)
        starts, ends = blocks["source_start"], blocks["source_end"]
        if sound_records(content) < len(blocks) or not (starts[1:] == ends[:-1]).all():
            raise _Unsound
        return blocks

    def _content(self, first: int, stop: int) -> bytes:
        """Return stored records, and count the bytes and pages read."""
        if self._rebuilt_records is not None:
            return self._rebuilt_records[first * RECORD_BYTES : stop * RECORD_BYTES]
        start, end = (first + 1) * RECORD_BYTES, (stop + 1) * RECORD_BYTES
        content = self._disk.read(self._path, start, end)
        if len(content) < end - start:
            raise _Unsound
        self.bytes_read += len(content)
        self._pages.update(range(start // PAGE_BYTES, -(-end // PAGE_BYTES)))
        return content

    def _count_stored(self, closed: bool) -> int | None:
        """Return the number of stored records for data up to `end`, None if the index file is damaged."""
        try:
            content = self._disk.read(self._path, 0, RECORD_BYTES)
            count = self._disk.size(self._path) // RECORD_BYTES - 1
        except SourceMissing:
            return None
        if len(content) < RECORD_BYTES or IndexHeader.decode(content) != index_header(self._reader.head):
            return None
        whole = self._reader.head.base
        # The last block of an open segment may end after the readable boundary, so skip such blocks.
        while count > 0:
            last = BlockRecord.decode(
                self._disk.read(self._path, count * RECORD_BYTES, (count + 1) * RECORD_BYTES)
            )
            if last is None:
                return None
            if last.source_end <= self.end:
                whole = last.source_end
                break
            if closed:
                return None
            count -= 1
        return None if closed and whole != self.end else count

    def _rebuild(self) -> None:
        """Rebuild the index from the data, once. Raises the error in the data."""
        with self._lock:
            if self._rebuilt_records is None:
                _log.warning("an index is rebuilt from its data", index=str(self._path))
                self._rebuilt_records = rebuild(self._reader, self.end, self._block_bytes, self._time_max_us)
                self._count = len(self._rebuilt_records) // RECORD_BYTES
                self.rebuilt = True
                if self._keep is not None:
                    self._keep(self._rebuilt_records)


# --- L1 -------------------------------------------------------------------------------------


class SegmentIndex:
    """The segments of a log, all held in memory, in ascending order of commit version."""

    def __init__(self, records: list[SegmentRecord]) -> None:
        self._records = sorted(records, key=_version_of)

    @classmethod
    def load(cls, disk: Disk, path: Path) -> Self | None:
        """Read the file. Returns None if it is missing or any record is damaged."""
        try:
            content = disk.read(path)
        except SourceMissing:
            return None
        body = content[RECORD_BYTES:]
        header = IndexHeader.decode(content[:RECORD_BYTES])
        whole = len(body) // RECORD_BYTES
        if header != IndexHeader(SEGMENTS_MAGIC) or len(body) % RECORD_BYTES or sound_records(body) != whole:
            return None
        return cls([SegmentRecord.of(record) for record in segment_records(body)])

    def write(self, disk: Disk, path: Path) -> None:
        """Replace the file atomically. Raises LogFull, DiskFailed."""
        disk.write_atomic(path, self.encode())

    def encode(self) -> bytes:
        """Return the content of the file."""
        records = b"".join(record.encode() for record in self._records)
        return IndexHeader(SEGMENTS_MAGIC).encode() + records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[SegmentRecord]:
        return iter(self._records)

    def __getitem__(self, index: int) -> SegmentRecord:
        return self._records[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SegmentIndex) and self._records == other._records

    __hash__ = None  # type: ignore[assignment]

    def get(self, version: int) -> SegmentRecord | None:
        """Return the segment with a version, None if there is none."""
        at = self.find(version)
        return self._records[at] if at >= 0 and self._records[at].version == version else None

    def find(self, version: int) -> int:
        """Return the number of the last segment that starts at or before a commit version, -1 for none."""
        return bisect_right(self._records, version, key=_version_of) - 1

    def find_time(self, time_us: int) -> int:
        """Return the number of the first segment whose latest commit time is at or after the given time, or
        `len` if there is no such segment.

        The latest time of an open segment is unknown, so an open segment always matches.
        """
        closed = len(self) - 1 if len(self) and self._records[-1].source_end == 0 else len(self)
        return bisect_right(self._records, time_us - 1, hi=closed, key=lambda record: record.time_max_us)

    def put(self, record: SegmentRecord) -> Self:
        """Return an index with a record added. The record replaces a record with the same version."""
        return type(self)(
            [*(segment for segment in self._records if segment.version != record.version), record]
        )

    def drop(self, version: int) -> Self:
        """Return an index without a version."""
        return type(self)([segment for segment in self._records if segment.version != version])


def _version_of(record: SegmentRecord) -> int:
    return record.version
