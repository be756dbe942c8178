# SPDX-License-Identifier: Apache-2.0
"""Both indexes: L2 over the blocks of a segment, L1 over the segments of a log. Neither is ever the truth.

A lookup reads the few records of a binary search. A record that does not hold, or an index that does not
fit its data, is made again from the data, in memory, and on disk too where the log is ours to write.
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
    """What the events of a stretch say, as far as they hold.

    `records` are those of its blocks, the last one closed at `boundary`: the offset behind the last whole
    transaction, or where the stretch begins. `end` is the offset behind the last event that holds,
    `problem` why the next one does not, None where the stretch just ends. `gtid_set` has what was given,
    and every transaction of the stretch.
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
    """Read the events of [start, stop) of a segment, each proved by its checksum.

    `start` must be a transaction boundary, `gtid_set` what came before it and `time_max_us` the latest
    commit time before it. The stretch may end anywhere.
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
        # Nobody asks a scan for them, and kept they would cost memory for the whole stretch.
        statements=False,
    )
    records, end, problem = bytearray(), start, None
    try:
        for taken in _feed(cutter, reader, start, stop):
            end = taken
            records += cutter.take_records()
    except StreamError as found:
        problem = found
    if problem is None and cutter.boundary == end:
        cutter.close_block()
        records += cutter.take_records()
        return Scan(bytes(records), end, end, cutter.gtid_set, cutter.time_max_us, None)
    # Read up to the boundary alone, so that neither the last block nor the set passes it.
    whole = scan(
        reader, start, cutter.boundary, block_bytes=block_bytes, gtid_set=gtid_set, time_max_us=time_max_us
    )
    return dataclasses.replace(whole, end=end, problem=problem)


def _feed(cutter: BlockCutter, reader: SegmentReader, start: int, stop: int) -> Iterator[int]:
    """Give the bytes of [start, stop) to the cutter; yield the offset behind the last whole event, each
    time."""
    wanted = READ_BYTES
    while start < stop:
        piece = reader.read_bytes(start, min(start + wanted, stop))
        taken = cutter.feed(piece)
        # What it gathered is in the file already.
        cutter.take_data()
        start += taken
        yield start
        if taken == 0:
            if len(piece) < wanted:
                return
            # An event larger than what was read: it is given whole.
            wanted *= 2


def rebuild(reader: SegmentReader, end: int, block_bytes: int, time_max_us: int) -> bytes:
    """Return the records of a whole segment, made from its data up to a transaction boundary.

    `time_max_us` is the latest commit time before the segment. Raises what is wrong with the data, by
    position.
    """
    found = scan(reader, reader.head.base, end, block_bytes=block_bytes, time_max_us=time_max_us)
    if found.problem is not None:
        raise found.problem
    if found.boundary != end:
        raise LogDamaged(
            f"{reader.segment.path} ends inside a transaction",
            position=str(dataclasses.replace(reader.head.position, offset=found.end)),
            hint=HINT_DAMAGED,
        )
    return found.records


# --- L2 -------------------------------------------------------------------------------------


class _Unsound(Exception):
    """A record that was about to be used does not hold; never leaves this module."""


class BlockIndex:
    """The blocks of one segment, rising by offset. Many threads may ask at once.

    `end` is the offset up to which the segment's data stands (the boundary up to which it may be read,
    where it is open). `bytes_read` counts what lookups have read of the index. Where the index is wrong it
    is made from the data: then `rebuilt` is true, and where `keep` is given it is called with the new
    records.
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
        self._made: bytes | None = None
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
        """How many different pages of 4 KiB lookups have touched."""
        return len(self._pages)

    @property
    def indexed_end(self) -> int:
        """The offset behind the last block; what follows in an open segment has no record yet."""
        return self.record(len(self) - 1).source_end if len(self) else self._reader.head.base

    def record(self, index: int) -> BlockRecord:
        """Return one record. Raises IndexError; StreamError where the index is wrong and so is the data."""
        return self._asked(lambda: self._fetch(index))

    def records(self, first: int = 0, stop: int | None = None) -> Records:
        """Return the records of [first, stop) as an array of BLOCK_DTYPE. Raises what `record` raises."""
        return self._asked(lambda: self._fetch_array(first, len(self) if stop is None else stop))

    def find_offset(self, offset: int) -> int:
        """Return the number of the block that holds an offset of the source file.

        -1 for one before the first block, `len` for one behind the last.
        """

        def search() -> int:
            found = bisect_right(range(len(self)), offset, key=lambda at: self._fetch(at).source_start) - 1
            if found < 0 or offset < self._fetch(found).source_end:
                return found
            if found + 1 < len(self):
                # Blocks follow one another without a gap.
                raise _Unsound
            return found + 1

        return self._asked(search)

    def find_time(self, time_us: int) -> int:
        """Return the number of the first block up to whose end something was committed at or after a time.

        `len` where there is none.
        """
        return self._asked(
            lambda: bisect_right(range(len(self)), time_us - 1, key=lambda at: self._fetch(at).time_max_us)
        )

    def boundary_before(self, offset: int) -> int:
        """Return the last transaction boundary at or before an offset that the index knows."""

        def search() -> int:
            at = bisect_right(range(len(self)), offset, key=lambda index: self._fetch(index).source_end) - 1
            while at >= 0 and not self._fetch(at).flags & ENDS_AT_BOUNDARY:
                at -= 1
            return self._fetch(at).source_end if at >= 0 else self._reader.head.base

        return self._asked(search)

    def _asked(self, question: Callable[[], _Answer]) -> _Answer:
        try:
            return question()
        except _Unsound:
            self._rebuild()
            return question()

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
        """Return records as they are stored, and count what that took."""
        if self._made is not None:
            return self._made[first * RECORD_BYTES : stop * RECORD_BYTES]
        start, end = (first + 1) * RECORD_BYTES, (stop + 1) * RECORD_BYTES
        content = self._disk.read(self._path, start, end)
        if len(content) < end - start:
            raise _Unsound
        self.bytes_read += len(content)
        self._pages.update(range(start // PAGE_BYTES, -(-end // PAGE_BYTES)))
        return content

    def _count_stored(self, closed: bool) -> int | None:
        """Return how many records the file has for data up to `end`; None where the file is wrong."""
        try:
            content = self._disk.read(self._path, 0, RECORD_BYTES)
            count = self._disk.size(self._path) // RECORD_BYTES - 1
        except SourceMissing:
            return None
        if len(content) < RECORD_BYTES or IndexHeader.decode(content) != index_header(self._reader.head):
            return None
        whole = self._reader.head.base
        # A block of an open segment may end behind what may be read.
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
        """Make the index from the data, once. Raises what is wrong with the data."""
        with self._lock:
            if self._made is None:
                _log.warning("an index is made again from its data", index=str(self._path))
                self._made = rebuild(self._reader, self.end, self._block_bytes, self._time_max_us)
                self._count = len(self._made) // RECORD_BYTES
                self.rebuilt = True
                if self._keep is not None:
                    self._keep(self._made)


# --- L1 -------------------------------------------------------------------------------------


class SegmentIndex:
    """The segments of a log, rising by commit version. Small: it is held whole."""

    def __init__(self, records: list[SegmentRecord]) -> None:
        self._records = sorted(records, key=_version_of)

    @classmethod
    def load(cls, disk: Disk, path: Path) -> Self | None:
        """Read the file; None where it is missing or any of its records does not hold."""
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
        """Put the file in place whole. Raises LogFull, DiskFailed."""
        disk.write_atomic(path, self.encode())

    def encode(self) -> bytes:
        """Return the file's content."""
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
        """Return the segment of that name, None where there is none."""
        at = self.find(version)
        return self._records[at] if at >= 0 and self._records[at].version == version else None

    def find(self, version: int) -> int:
        """Return the number of the last segment whose first commit version is not above one; -1 for none."""
        return bisect_right(self._records, version, key=_version_of) - 1

    def find_time(self, time_us: int) -> int:
        """Return the number of the first segment up to whose end something was committed at or after a
        time.

        `len` where there is none. An open segment's latest time is not known, so it is the answer at the
        latest.
        """
        closed = len(self) - 1 if len(self) and self._records[-1].source_end == 0 else len(self)
        return bisect_right(self._records, time_us - 1, hi=closed, key=lambda record: record.time_max_us)

    def put(self, record: SegmentRecord) -> Self:
        """Return an index with one more record, or with another of its version."""
        return type(self)([*(one for one in self._records if one.version != record.version), record])

    def drop(self, version: int) -> Self:
        """Return an index without one version."""
        return type(self)([one for one in self._records if one.version != version])


def _version_of(record: SegmentRecord) -> int:
    return record.version
