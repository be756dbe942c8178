# SPDX-License-Identifier: Apache-2.0
"""The end of a log where data is appended: the source file being received, and the open segment.

Not thread-safe. Readers see none of these bytes until the log publishes them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from penstock._native import segment_head
from penstock.errors import LogFull, PositionInvalid, SequenceGap
from penstock.logstore.disk import Disk
from penstock.logstore.index import Scan, scan
from penstock.logstore.layout import Layout, StoredSegment, hour_of
from penstock.logstore.records import CLOSED, RECORD_BYTES, SegmentRecord, block_end, block_records
from penstock.logstore.recovery import sound_blocks
from penstock.logstore.segment import SegmentHead, SegmentReader, SegmentWriter
from penstock.model import Position
from penstock.settings.daemon import LogSettings
from penstock.telemetry.counters import Histogram
from penstock.telemetry.definitions import SECONDS_BOUNDS

_log = structlog.get_logger(__name__)


@dataclass
class OpenFile:
    """The source file to which bytes are being appended, with the fields for the head of its next segment.

    `end` is the offset after the appended bytes. `boundary` is the end of the last whole transaction, and
    `gtid_set` contains the transactions before it.
    """

    epoch: int
    file: str
    format_description: bytes
    server_id: int
    flavor: str
    end: int
    boundary: int
    gtid_set: str

    def position(self, offset: int) -> Position:
        """Return a position in the file."""
        return Position(self.epoch, self.file, offset)

    @property
    def unfinished(self) -> bool:
        """Whether a transaction is open at the end."""
        return self.end > self.boundary


class Tail:
    """The open file and the open segment of one log; either may be None.

    `time_max_us` is the latest commit time of the log so far. `sync_seconds` measures how long syncs take.
    """

    def __init__(self, disk: Disk, layout: Layout, settings: LogSettings, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self.file: OpenFile | None = None
        self.writer: SegmentWriter | None = None
        self.time_max_us = 0
        self.sync_seconds = Histogram(SECONDS_BOUNDS)

    def sync(self, writer: SegmentWriter) -> None:
        """Make a segment durable. Raises DiskFailed."""
        began = time.monotonic()
        writer.sync()
        self.sync_seconds.observe(time.monotonic() - began)

    def resume(self, writer: SegmentWriter | None, gtid_set: str, time_max_us: int) -> None:
        """Continue with the recovered segment, which ends at a transaction boundary."""
        self.writer, self.time_max_us = writer, time_max_us
        if writer is not None:
            head, end = writer.head, writer.end
            self.file = OpenFile(
                head.epoch, head.file, head.format_description, 0, head.flavor, end, end, gtid_set
            )

    # --- Checks -----------------------------------------------------------------------------

    def check_position(self, position: Position) -> None:
        """Raise SequenceGap if a position skips bytes inside a transaction."""
        open_file = self.file
        if open_file is None or (position.epoch, position.file) != (open_file.epoch, open_file.file):
            return
        if open_file.boundary < open_file.end < position.offset:
            raise SequenceGap(
                f"bytes inside the transaction at offset {open_file.boundary} are left out",
                position=str(position),
                hint="Go on at the last whole transaction",
            )

    def goes_on_at(self, position: Position) -> bool:
        """Return whether a position is the end of the open file, so that its segment can continue."""
        return self.file is not None and position == self.file.position(self.file.boundary)

    def file_following(self, start: int, end: int, size: int, retried: tuple[int, int] | None) -> OpenFile:
        """Return the file to which the bytes [start, end) are appended. Raises SequenceGap if the bytes do
        not follow.

        The bytes of an append that failed midway may be passed again.
        """
        open_file = self.file
        if open_file is None:
            raise PositionInvalid("no file was begun", hint="Begin the file first")
        follows = start == open_file.end or ((start, end) == retried and start <= open_file.end <= end)
        if not follows or end - start != size:
            raise SequenceGap(
                f"{size} bytes for {start} to {end} do not follow what the log has",
                position=str(open_file.position(open_file.end)),
                hint="Begin the file again where the log ends",
            )
        return open_file

    def cut_at(self, boundary: int) -> int | None:
        """Return the transaction boundary where the next segment starts, None while the open segment
        continues.

        `boundary` is the last boundary of the data about to be appended.
        """
        open_file, writer = self.file, self.writer
        if open_file is None or writer is None:
            return None
        if (
            writer.stored_bytes < self._settings.segment_bytes
            and hour_of(self._clock()) == writer.segment.hour
        ):
            return None
        if not open_file.unfinished:
            return open_file.end
        return boundary if boundary > open_file.end else None

    # --- Segments ---------------------------------------------------------------------------

    def begin_segment(self) -> SegmentWriter:
        """Start a segment at the end of the file, which is a boundary. Raises LogFull, DiskFailed."""
        open_file = self.file
        assert open_file is not None, "a file was begun"
        assert not open_file.unfinished, "a segment begins at a transaction boundary"
        time_s = self._clock()
        hour = hour_of(time_s)
        raw = segment_head(
            open_file.format_description,
            open_file.file,
            open_file.end,
            open_file.gtid_set,
            open_file.flavor,
            open_file.server_id,
            int(time_s),
        )
        start = open_file.position(open_file.end)
        version = start.commit_version
        path = self._layout.segment(hour, version)
        segment = StoredSegment(version, hour, path, False, start.epoch, start.file_number)
        head = SegmentHead.parse(raw, open_file.epoch)
        self.writer = SegmentWriter.begin(self._disk, segment, head, self.time_max_us)
        return self.writer

    def write(self, piece: memoryview, records: bytes) -> None:
        """Append events to the open segment, and the records of the blocks that were closed since the last
        append.

        Raises LogFull, DiskFailed.
        """
        open_file, writer = self.file, self.writer
        assert open_file is not None, "a file was begun"
        assert writer is not None, "a segment is open"
        if records:
            records = unindexed(records, writer.position.file_number, writer.indexed_end)
        if records and int(block_records(records)["source_start"][0]) < writer.indexed_end:
            self._write_over_cut(writer, piece, records)
        else:
            writer.append(piece, records)
        open_file.end += piece.nbytes

    def end_segment(self) -> SegmentRecord | None:
        """Complete the open segment, make it durable and close it; return its L1 record.

        Returns None and removes the segment if it is empty. Raises LogFull, DiskFailed, StreamError.
        """
        writer = self.writer
        assert writer is not None, "a segment is open"
        if writer.end == writer.head.base:
            self.writer = None
            writer.abandon()
            self._disk.remove(writer.segment.index_path)
            self._disk.remove(writer.segment.path)
            self._disk.sync_folder(writer.segment.path.parent)
            return None
        self._complete_index(writer)
        record = writer.close(CLOSED)
        self.writer = None
        return record

    def drop_unfinished(self) -> None:
        """Cut off the unfinished transaction, whose bytes are sent again or no longer exist."""
        open_file, writer = self.file, self.writer
        assert open_file is not None, "a file was begun"
        assert writer is not None, "a transaction is open in a segment"
        writer.cut(open_file.boundary)
        open_file.end = open_file.boundary
        if writer.end > writer.head.base:
            self._complete_index(writer)

    def abandon(self) -> None:
        """Close the open segment without syncing."""
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None

    # --- The index --------------------------------------------------------------------------

    def _write_over_cut(self, writer: SegmentWriter, piece: memoryview, records: bytes) -> None:
        """Append events whose first block began in the previous segment. The part in this segment becomes a
        block.
        """
        writer.append(piece, b"")
        first_end = int(block_records(records)["source_end"][0])
        added = self._scan(writer, writer.indexed_end, min(first_end, writer.end), writer.time_max_us).records
        try:
            writer.append(b"", added + records[RECORD_BYTES:])
        except LogFull as problem:
            # The events are stored. The index is rebuilt from them when the segment is closed.
            writer.index_whole = False
            _log.warning("a block is not indexed yet", segment=str(writer.segment.path), reason=str(problem))

    def _complete_index(self, writer: SegmentWriter) -> None:
        """Complete the L2 index up to the end of the segment, which is a transaction boundary."""
        if writer.index_whole and writer.indexed_end == writer.end:
            return
        with SegmentReader.open(self._disk, writer.segment, writer.head) as reader:
            kept = sound_blocks(self._disk, reader, writer.end)
        start = int(block_records(kept)["source_end"][-1]) if kept else writer.head.base
        before = int(block_records(kept)["time_max_us"][-1]) if kept else writer.time_before_us
        scanned = self._scan(writer, start, writer.end, before)
        if scanned.problem is not None:
            raise scanned.problem
        writer.take_index(kept + scanned.records)

    def _scan(self, writer: SegmentWriter, start: int, stop: int, time_max_us: int) -> Scan:
        with SegmentReader.open(self._disk, writer.segment, writer.head) as reader:
            return scan(reader, start, stop, block_bytes=self._settings.block_bytes, time_max_us=time_max_us)


def until(records: bytes, stop: int) -> bytes:
    """Return the records of the blocks that end at or before an offset."""
    ends = block_records(records)["source_end"]
    return records[: int((ends <= stop).sum()) * RECORD_BYTES]


def unindexed(records: bytes, file_number: int, indexed_end: int) -> bytes:
    """Return the records of a file's blocks past the indexed end. Earlier records are indexed."""
    start = 0
    while start < len(records):
        source_end, number = block_end(records, start)
        if number == file_number and source_end > indexed_end:
            break
        start += RECORD_BYTES
    return records[start:]
