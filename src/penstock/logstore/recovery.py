# SPDX-License-Identifier: Apache-2.0
"""Opening a log's folder: the tail read and cut back to its last whole transaction, indexes made to fit.

A segment is durable whole before the next one is begun, so only the newest can be torn. Of it all before
the noted position was synced; what follows is read, event by event, and cut off where it does not hold.
"""

from dataclasses import dataclass, replace

import structlog

from penstock.errors import LogDamaged, LogFull, LogTorn, SourceMissing
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import stored_segments
from penstock.logstore.index import BlockIndex, Scan, SegmentIndex, scan
from penstock.logstore.layout import Layout, StoredSegment
from penstock.logstore.position_file import CapturePosition
from penstock.logstore.records import (
    CLOSED,
    COLD,
    ENDS_AT_BOUNDARY,
    OPEN,
    RECORD_BYTES,
    TIERED,
    IndexHeader,
    SegmentRecord,
    block_records,
    sound_records,
)
from penstock.logstore.segment import (
    SegmentHead,
    SegmentReader,
    SegmentWriter,
    closed_record,
    index_header,
)
from penstock.logstore.tier import with_noted
from penstock.model import Position

_log = structlog.get_logger(__name__)

_HINT_TORN = (
    "The disk lost what it had confirmed. Restore the folder, or open it once with accept_loss to read those"
    " bytes from the server again"
)


@dataclass(frozen=True)
class Recovered:
    """A log's folder as it was found and put right.

    `writer` goes on with the newest segment, None where there is none that can grow. `position` is the end
    of the last whole transaction and `gtid_set` what came before it; None and "" in a log without any.
    """

    index: SegmentIndex
    writer: SegmentWriter | None
    position: Position | None
    gtid_set: str
    time_max_us: int


@dataclass(frozen=True)
class _Ground:
    """What the tail is judged by: the noted position, whether its file told, and the segments before the
    tail."""

    noted: CapturePosition | None
    note_damaged: bool
    before: SegmentIndex
    loaded: SegmentIndex | None
    block_bytes: int
    accept_loss: bool

    @property
    def time_max_us(self) -> int:
        """The latest commit time before the tail."""
        return self.before[-1].time_max_us if len(self.before) else 0

    def noted_within(self, head: SegmentHead) -> CapturePosition | None:
        """Return what was noted where it lies in the segment, or behind it in the same file."""
        noted = self.noted
        if noted is None or (noted.position.epoch, noted.position.file) != (head.epoch, head.file):
            return None
        return noted if noted.position.offset >= head.base else None

    def may_lack(self, segment: StoredSegment) -> bool:
        """Tell whether nothing of a segment was ever said to be durable, so that it may be no segment at
        all."""
        if self.accept_loss:
            return True
        if self.noted is None:
            return not self.note_damaged and not len(self.before)
        return self.noted.position.commit_version <= segment.version


def recover(disk: Disk, layout: Layout, block_bytes: int, *, accept_loss: bool = False) -> Recovered:
    """Put the folder right and return what is there. The caller holds the log's lock.

    Raises LogTorn where durable bytes are gone, LogDamaged where they are not what was written; with
    `accept_loss` the log is cut back before them instead, and the loss is logged. Raises DiskFailed,
    LogFull.
    """
    for path in layout.left_overs(disk):
        disk.remove(path)
    noted = CapturePosition.load(disk, layout)
    note_damaged = noted is None and disk.exists(layout.position)
    stored_index = SegmentIndex.load(disk, layout.segments_index)
    loaded = with_noted(disk, layout, stored_index)
    stored = stored_segments(disk, layout)
    found: Recovered | None = None
    while stored and found is None:
        before = heal_segments(disk, stored[:-1], loaded, block_bytes)
        found = _recover_tail(
            disk, stored[-1], _Ground(noted, note_damaged, before, loaded, block_bytes, accept_loss)
        )
        if found is None:
            _remove_segment(disk, stored.pop())
    found = found or Recovered(_tiered_alone(loaded), None, None, "", 0)
    try:
        if noted is not None and (found.position is None or found.position < noted.position):
            _lose(noted, found.position, accept_loss)
        if stored_index != found.index:
            _keep_index(disk, layout, found.index)
    except BaseException:
        if found.writer is not None:
            found.writer.abandon()
        raise
    return found


def _keep_index(disk: Disk, layout: Layout, index: SegmentIndex) -> None:
    """Write L1, where there is room: without it, it is made again from the segments when the log opens."""
    try:
        index.write(disk, layout.segments_index)
    except LogFull as problem:
        _log.warning("the segment index is not up to date", folder=str(layout.folder), reason=str(problem))


def heal_segments(
    disk: Disk, stored: list[StoredSegment], loaded: SegmentIndex | None, block_bytes: int
) -> SegmentIndex:
    """Return the L1 records of closed segments: those that were loaded where they fit, else made from
    heads and L2.

    Segments that lie elsewhere have no file here and stay. Raises LogDamaged for a head that is needed.
    """
    index = _tiered_alone(loaded)
    time_max_us = 0
    for segment in stored:
        record = loaded.get(segment.version) if loaded is not None else None
        if record is None or not _fits(disk, segment, record):
            record = segment_record(disk, segment, block_bytes, time_max_us)
            _log.warning("a segment's record is made again from its data", segment=str(segment.path))
        time_max_us = max(time_max_us, record.time_max_us)
        index = index.put(record)
    return index


def segment_record(disk: Disk, segment: StoredSegment, block_bytes: int, time_max_us: int) -> SegmentRecord:
    """Return the L1 record of a closed segment, made from its head and its blocks."""
    with SegmentReader.open(disk, segment) as reader:
        blocks = BlockIndex(
            disk, reader, reader.end, closed=True, block_bytes=block_bytes, time_max_us=time_max_us
        )
        return closed_record(
            segment, reader.head, reader.end, blocks.records().tobytes(), time_max_us, disk.size(segment.path)
        )


def _fits(disk: Disk, segment: StoredSegment, record: SegmentRecord) -> bool:
    if record.hour != segment.hour or record.source_end == 0:
        return False
    if segment.cold:
        return record.state == COLD
    stored_bytes = disk.size(segment.path)
    return record.state == CLOSED and record.base + stored_bytes - record.head_bytes == record.source_end


def _tiered_alone(loaded: SegmentIndex | None) -> SegmentIndex:
    return SegmentIndex([record for record in loaded or () if record.state == TIERED])


# --- The newest segment ---------------------------------------------------------------------


def _recover_tail(disk: Disk, segment: StoredSegment, ground: _Ground) -> Recovered | None:
    """Put the newest segment right; None where nothing of it stands, and it is to be removed."""
    try:
        reader = SegmentReader.open(disk, segment)
    except LogDamaged as problem:
        if not ground.may_lack(segment):
            raise
        _log.warning("a segment without a head is removed", segment=str(segment.path), reason=problem.message)
        return None
    with reader:
        record = ground.loaded.get(segment.version) if ground.loaded is not None else None
        closed = record is not None and _fits(disk, segment, record)
        if segment.cold:
            return _resume_cold(disk, segment, reader, ground)
        kept, found = _read_tail(disk, reader, ground, closed)
        _judge(reader, found, ground, closed)
        if found.boundary == reader.head.base:
            return None
        writer = SegmentWriter.resume(disk, segment, reader.head, ground.time_max_us)
        try:
            _cut_back(writer, kept, found, closed)
        except BaseException:
            writer.abandon()
            raise
        position = replace(reader.head.position, offset=found.boundary)
        index = ground.before.put(writer.record(OPEN))
        return Recovered(index, writer, position, found.gtid_set, max(found.time_max_us, ground.time_max_us))


def _read_tail(disk: Disk, reader: SegmentReader, ground: _Ground, closed: bool) -> tuple[bytes, Scan]:
    """Return the records that stand, and what the segment's events say behind them.

    Read from the noted position on: of what follows it, blocks in the middle may be torn while later ones
    are whole. A segment that was closed is whole.
    """
    head = reader.head
    noted = ground.noted_within(head)
    start = head.base
    kept = b""
    if noted is not None or closed:
        known = reader.end if closed else min(noted.position.offset if noted else start, reader.end)
        kept = sound_blocks(disk, reader, known)
        if kept:
            start = int(block_records(kept)["source_end"][-1])
    at_noted = noted is not None and start <= noted.position.offset <= reader.end
    if not at_noted and start != head.base:
        # Nothing says which GTIDs come before `start`.
        kept, start = b"", head.base
    time_max_us = int(block_records(kept)["time_max_us"][-1]) if kept else ground.time_max_us
    gtid_set = noted.gtid_set if noted is not None and at_noted else head.gtid_set
    return kept, scan(
        reader, start, reader.end, block_bytes=ground.block_bytes, gtid_set=gtid_set, time_max_us=time_max_us
    )


def sound_blocks(disk: Disk, reader: SegmentReader, end: int) -> bytes:
    """Return the records from the front of a segment's L2 that hold and follow one another, up to `end`.

    The last one ends at a transaction boundary.
    """
    try:
        content = disk.read(reader.segment.index_path)
    except SourceMissing:
        return b""
    if IndexHeader.decode(content[:RECORD_BYTES]) != index_header(reader.head):
        return b""
    body = content[RECORD_BYTES:]
    blocks = block_records(body[: sound_records(body) * RECORD_BYTES])
    whole, place = 0, reader.head.base
    for count, (start, stop, flags) in enumerate(
        zip(blocks["source_start"], blocks["source_end"], blocks["flags"], strict=True), 1
    ):
        if start != place or stop > end:
            break
        place = int(stop)
        whole = count if flags & ENDS_AT_BOUNDARY else whole
    return body[: whole * RECORD_BYTES]


def _judge(reader: SegmentReader, found: Scan, ground: _Ground, closed: bool) -> None:
    """Name the loss of durable bytes: LogDamaged where they are wrong, LogTorn where they are gone."""
    noted = ground.noted_within(reader.head)
    cut = replace(reader.head.position, offset=found.boundary)
    whole = replace(cut, offset=reader.end)
    was_durable = closed or (noted is not None and cut < noted.position <= whole)
    if was_durable and cut != whole and not ground.accept_loss:
        reason = "an event is not whole" if found.problem is None else found.problem.message
        raise LogDamaged(
            f"{reader.segment.path} is not what was written: {reason}",
            position=str(replace(cut, offset=found.end)),
            hint="Restore the file, or open the log once with accept_loss to read those bytes again",
        ) from found.problem
    if found.problem is not None or found.boundary != reader.end:
        _log.warning(
            "a torn tail is cut back to the last whole transaction",
            segment=str(reader.segment.path),
            position=str(cut),
            bytes=reader.end - found.boundary,
            reason="" if found.problem is None else str(found.problem),
        )


def _lose(noted: CapturePosition, position: Position | None, accept_loss: bool) -> None:
    _log.error(
        "the log ends before the position that was durable",
        durable=str(noted.position),
        end=None if position is None else str(position),
        accepted=accept_loss,
    )
    if not accept_loss:
        raise LogTorn(
            f"the log was durable up to {noted.position} and ends at {position or 'nothing'}",
            position=str(position or noted.position),
            hint=_HINT_TORN,
        )


def _cut_back(writer: SegmentWriter, kept: bytes, found: Scan, closed: bool) -> None:
    """Make the segment end at the boundary, its index fit, and what is left durable."""
    if writer.end != found.boundary:
        writer.cut(found.boundary)
    if not closed:
        # What was read may be held in memory alone, where an earlier sync has failed.
        writer.rewrite(int(block_records(kept)["source_end"][-1]) if kept else writer.head.base)
    writer.take_index(kept + found.records)
    writer.sync()


def _resume_cold(disk: Disk, segment: StoredSegment, reader: SegmentReader, ground: _Ground) -> Recovered:
    """A compressed segment is whole, and does not grow: the next bytes begin another."""
    index = heal_segments(disk, [segment], ground.loaded, ground.block_bytes)
    position = replace(reader.head.position, offset=reader.end)
    if ground.noted is not None and ground.noted.position == position:
        gtid_set = ground.noted.gtid_set
    else:
        gtid_set = scan(reader, reader.head.base, reader.end, gtid_set=reader.head.gtid_set).gtid_set
    record = index.get(segment.version)
    assert record is not None
    return Recovered(ground.before.put(record), None, position, gtid_set, record.time_max_us)


def _remove_segment(disk: Disk, segment: StoredSegment) -> None:
    disk.remove(segment.path)
    if disk.exists(segment.index_path):
        disk.remove(segment.index_path)
    disk.sync_folder(segment.path.parent)
