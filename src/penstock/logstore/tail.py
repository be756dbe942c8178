# SPDX-License-Identifier: Apache-2.0
"""The end of a log at which it grows: the source file that is appended, and the segment that is open.

One thread at a time. Nothing here is known to readers before the log says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from penstock._native import segment_head
from penstock.errors import LogFull, PositionInvalid, SequenceGap
from penstock.logstore.disk import Disk
from penstock.logstore.index import Scan, scan
from penstock.logstore.layout import Layout, StoredSegment, hour_of
from penstock.logstore.records import CLOSED, RECORD_BYTES, SegmentRecord, block_records
from penstock.logstore.recovery import sound_blocks
from penstock.logstore.segment import SegmentHead, SegmentReader, SegmentWriter
from penstock.model import Position
from penstock.settings import LogSettings

_log = structlog.get_logger(__name__)


@dataclass
class OpenFile:
    """The source file that bytes are appended to: what the next segment of it needs for its head.

    `end` is the offset behind what was appended, `boundary` the last end of a whole transaction, and
    `gtid_set` what came before that.
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
        """Return a place in the file."""
        return Position(self.epoch, self.file, offset)

    @property
    def unfinished(self) -> bool:
        """Whether a transaction is open at the end."""
        return self.end > self.boundary


class Tail:
    """The open file and the open segment of one log; either may be None.

    `time_max_us` is the latest commit time of the log so far.
    """

    def __init__(self, disk: Disk, layout: Layout, settings: LogSettings, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self.file: OpenFile | None = None
        self.writer: SegmentWriter | None = None
        self.time_max_us = 0

    def resume(self, writer: SegmentWriter | None, gtid_set: str, time_max_us: int) -> None:
        """Go on with what recovery found: a segment that ends at a transaction boundary."""
        self.writer, self.time_max_us = writer, time_max_us
        if writer is not None:
            head, end = writer.head, writer.end
            self.file = OpenFile(
                head.epoch, head.file, head.format_description, 0, head.flavor, end, end, gtid_set
            )

    # --- What may be added ------------------------------------------------------------------

    def check_place(self, place: Position) -> None:
        """Raise SequenceGap where a place leaves bytes out that are inside a transaction."""
        now = self.file
        if now is None or (place.epoch, place.file) != (now.epoch, now.file):
            return
        if now.boundary < now.end < place.offset:
            raise SequenceGap(
                f"bytes inside the transaction at offset {now.boundary} are left out",
                position=str(place),
                hint="Go on at the last whole transaction",
            )

    def goes_on_at(self, place: Position) -> bool:
        """Tell whether a place is where the file ends, so that its segment may go on."""
        return self.file is not None and place == self.file.position(self.file.boundary)

    def following(self, start: int, end: int, size: int, retried: tuple[int, int] | None) -> OpenFile:
        """Return the file that bytes [start, end) are to be added to. Raises SequenceGap where they do not
        follow.

        Those of an append that failed half way may be given again.
        """
        now = self.file
        if now is None:
            raise PositionInvalid("no file was begun", hint="Begin the file first")
        follows = start == now.end or ((start, end) == retried and start <= now.end <= end)
        if not follows or end - start != size:
            raise SequenceGap(
                f"{size} bytes for {start} to {end} do not follow what the log has",
                position=str(now.position(now.end)),
                hint="Begin the file again where the log ends",
            )
        return now

    def cut_at(self, boundary: int) -> int | None:
        """Return the transaction boundary at which the next segment begins, None while this one goes on.

        `boundary` is the last one of what is about to be added.
        """
        now, writer = self.file, self.writer
        if now is None or writer is None:
            return None
        if (
            writer.stored_bytes < self._settings.segment_bytes
            and hour_of(self._clock()) == writer.segment.hour
        ):
            return None
        if not now.unfinished:
            return now.end
        return boundary if boundary > now.end else None

    # --- Segments ---------------------------------------------------------------------------

    def begin_segment(self) -> SegmentWriter:
        """Begin a segment where the file ends, which is a boundary. Raises LogFull, DiskFailed."""
        now = self.file
        assert now is not None, "a file was begun"
        assert not now.unfinished, "a segment begins at a transaction boundary"
        time_s = self._clock()
        hour = hour_of(time_s)
        raw = segment_head(
            now.format_description,
            now.file,
            now.end,
            now.gtid_set,
            now.flavor,
            now.server_id,
            int(time_s),
        )
        begun = now.position(now.end)
        version = begun.commit_version
        path = self._layout.segment(hour, version)
        segment = StoredSegment(version, hour, path, False, begun.epoch, begun.file_number)
        head = SegmentHead.parse(raw, now.epoch)
        self.writer = SegmentWriter.begin(self._disk, segment, head, self.time_max_us)
        return self.writer

    def write(self, piece: memoryview, records: bytes) -> None:
        """Add events to the open segment, and the records of blocks closed since. Raises LogFull,
        DiskFailed."""
        now, writer = self.file, self.writer
        assert now is not None, "a file was begun"
        assert writer is not None, "a segment is open"
        records = _behind(records, writer)
        if records and int(block_records(records)["source_start"][0]) < writer.indexed_end:
            self._write_over_cut(writer, piece, records)
        else:
            writer.append(piece, records)
        now.end += piece.nbytes

    def end_segment(self) -> SegmentRecord | None:
        """Make the open segment whole and durable, and let go of it; return its L1 record.

        None where nothing was in it: then it is gone. Raises LogFull, DiskFailed, StreamError.
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
        """Cut off the transaction that was not finished: its bytes come again, or never were."""
        now, writer = self.file, self.writer
        assert now is not None, "a file was begun"
        assert writer is not None, "a transaction is open in a segment"
        writer.cut(now.boundary)
        now.end = now.boundary
        if writer.end > writer.head.base:
            self._complete_index(writer)

    def abandon(self) -> None:
        """Let go of the open segment as it is."""
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None

    # --- The index --------------------------------------------------------------------------

    def _write_over_cut(self, writer: SegmentWriter, piece: memoryview, records: bytes) -> None:
        """Write events whose first block began in the segment before: the part of it here becomes a block."""
        writer.append(piece, b"")
        first = int(block_records(records)["source_end"][0])
        made = self._scan(writer, writer.indexed_end, min(first, writer.end), writer.time_max_us).records
        try:
            writer.append(b"", made + records[RECORD_BYTES:])
        except LogFull as problem:
            # The events are kept, and the index is made from them when the segment is closed.
            writer.index_whole = False
            _log.warning("a block is not indexed yet", segment=str(writer.segment.path), reason=str(problem))

    def _complete_index(self, writer: SegmentWriter) -> None:
        """Give the L2 index what it lacks up to the end of the segment, which is a transaction boundary."""
        if writer.index_whole and writer.indexed_end == writer.end:
            return
        with SegmentReader.open(self._disk, writer.segment, writer.head) as reader:
            kept = sound_blocks(self._disk, reader, writer.end)
        start = int(block_records(kept)["source_end"][-1]) if kept else writer.head.base
        before = int(block_records(kept)["time_max_us"][-1]) if kept else writer.time_before_us
        found = self._scan(writer, start, writer.end, before)
        if found.problem is not None:
            raise found.problem
        writer.take_index(kept + found.records)

    def _scan(self, writer: SegmentWriter, start: int, stop: int, time_max_us: int) -> Scan:
        with SegmentReader.open(self._disk, writer.segment, writer.head) as reader:
            return scan(reader, start, stop, block_bytes=self._settings.block_bytes, time_max_us=time_max_us)


def until(records: bytes, stop: int) -> bytes:
    """Return the records of blocks that end at or before an offset."""
    ends = block_records(records)["source_end"]
    return records[: int((ends <= stop).sum()) * RECORD_BYTES]


def _behind(records: bytes, writer: SegmentWriter) -> bytes:
    """Return the records of blocks that reach behind what the index has; others came too late for theirs."""
    blocks = block_records(records)
    number = writer.position.file_number
    late = (blocks["source_end"] <= writer.indexed_end) | (blocks["file_number"] != number)
    return records[int(late.sum()) * RECORD_BYTES :]
