# SPDX-License-Identifier: Apache-2.0
"""Recovers a log's folder: truncates the log after its last whole transaction and repairs the indexes.

A segment is fully durable before the next one starts, so only the newest segment can have an incomplete end.
In that segment, the bytes before the saved position were synced. The events after the saved position are
scanned, and the segment is truncated at the first invalid event.
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
    """The state of a log's folder after recovery.

    `writer` continues the newest segment, or is None if no segment can grow. `position` is the end of the
    last whole transaction, and `gtid_set` contains the transactions before it. In a log without transactions,
    they are None and "".
    """

    index: SegmentIndex
    writer: SegmentWriter | None
    position: Position | None
    gtid_set: str
    time_max_us: int


@dataclass(frozen=True)
class _KnownState:
    """What is known before the tail is scanned: the saved position, whether its file is damaged, and the
    earlier segments."""

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
        """Return the saved position if it lies in the segment's file at or after the segment's start."""
        noted = self.noted
        if noted is None or (noted.position.epoch, noted.position.file) != (head.epoch, head.file):
            return None
        return noted if noted.position.offset >= head.base else None

    def may_lack(self, segment: StoredSegment) -> bool:
        """Return whether no byte of a segment was ever durable. Such a file may not be a valid segment."""
        if self.accept_loss:
            return True
        if self.noted is None:
            return not self.note_damaged and not len(self.before)
        return self.noted.position.commit_version <= segment.version


def recover(disk: Disk, layout: Layout, block_bytes: int, *, accept_loss: bool = False) -> Recovered:
    """Repair the folder and return its state. The caller holds the log's lock.

    Raises LogTorn if durable bytes are missing and LogDamaged if they are damaged. With `accept_loss`, the
    log is instead truncated before these bytes, and the loss is logged. Raises DiskFailed, LogFull.
    """
    for path in layout.left_overs(disk):
        disk.remove(path)
    noted = CapturePosition.load(disk, layout)
    note_damaged = noted is None and disk.exists(layout.position)
    stored_index = SegmentIndex.load(disk, layout.segments_index)
    loaded = with_noted(disk, layout, stored_index)
    stored = stored_segments(disk, layout)
    recovered: Recovered | None = None
    while stored and recovered is None:
        before = heal_segments(disk, stored[:-1], loaded, block_bytes)
        recovered = _recover_tail(
            disk, stored[-1], _KnownState(noted, note_damaged, before, loaded, block_bytes, accept_loss)
        )
        if recovered is None:
            _remove_segment(disk, stored.pop())
    recovered = recovered or Recovered(_tiered_segments(loaded), None, None, "", 0)
    try:
        if noted is not None and (recovered.position is None or recovered.position < noted.position):
            _report_loss(noted, recovered.position, accept_loss)
        if stored_index != recovered.index:
            _keep_index(disk, layout, recovered.index)
    except BaseException:
        if recovered.writer is not None:
            recovered.writer.abandon()
        raise
    return recovered


def _keep_index(disk: Disk, layout: Layout, index: SegmentIndex) -> None:
    """Write L1 if there is space. If it is missing, the next open rebuilds it from the segments."""
    try:
        index.write(disk, layout.segments_index)
    except LogFull as problem:
        _log.warning("the segment index is not up to date", folder=str(layout.folder), reason=str(problem))


def heal_segments(
    disk: Disk, stored: list[StoredSegment], loaded: SegmentIndex | None, block_bytes: int
) -> SegmentIndex:
    """Return the L1 records of closed segments: the loaded ones if they match, else rebuilt from heads and
    L2.

    Segments in the tier have no local file and keep their records. Raises LogDamaged for a damaged head that
    is needed.
    """
    index = _tiered_segments(loaded)
    time_max_us = 0
    for segment in stored:
        record = loaded.get(segment.version) if loaded is not None else None
        if record is None or not _record_matches(disk, segment, record):
            record = segment_record(disk, segment, block_bytes, time_max_us)
            _log.warning("a segment's index record is rebuilt from its data", segment=str(segment.path))
        time_max_us = max(time_max_us, record.time_max_us)
        index = index.put(record)
    return index


def segment_record(disk: Disk, segment: StoredSegment, block_bytes: int, time_max_us: int) -> SegmentRecord:
    """Return the L1 record of a closed segment, rebuilt from its head and its blocks."""
    with SegmentReader.open(disk, segment) as reader:
        blocks = BlockIndex(
            disk, reader, reader.end, closed=True, block_bytes=block_bytes, time_max_us=time_max_us
        )
        return closed_record(
            segment, reader.head, reader.end, blocks.records().tobytes(), time_max_us, disk.size(segment.path)
        )


def _record_matches(disk: Disk, segment: StoredSegment, record: SegmentRecord) -> bool:
    if record.hour != segment.hour or record.source_end == 0:
        return False
    if segment.cold:
        return record.state == COLD
    stored_bytes = disk.size(segment.path)
    return record.state == CLOSED and record.base + stored_bytes - record.head_bytes == record.source_end


def _tiered_segments(loaded: SegmentIndex | None) -> SegmentIndex:
    return SegmentIndex([record for record in loaded or () if record.state == TIERED])


# --- The newest segment ---------------------------------------------------------------------


def _recover_tail(disk: Disk, segment: StoredSegment, known: _KnownState) -> Recovered | None:
    """Recover the newest segment. Returns None if none of its bytes are valid and it must be removed."""
    try:
        reader = SegmentReader.open(disk, segment)
    except LogDamaged as problem:
        if not known.may_lack(segment):
            raise
        _log.warning("a segment without a head is removed", segment=str(segment.path), reason=problem.message)
        return None
    with reader:
        record = known.loaded.get(segment.version) if known.loaded is not None else None
        closed = record is not None and _record_matches(disk, segment, record)
        if segment.cold:
            return _resume_cold(disk, segment, reader, known)
        kept, scanned = _read_tail(disk, reader, known, closed)
        _check_loss(reader, scanned, known, closed)
        if scanned.boundary == reader.head.base:
            return None
        writer = SegmentWriter.resume(disk, segment, reader.head, known.time_max_us)
        try:
            _cut_back(writer, kept, scanned, closed)
        except BaseException:
            writer.abandon()
            raise
        position = replace(reader.head.position, offset=scanned.boundary)
        index = known.before.put(writer.record(OPEN))
        return Recovered(
            index, writer, position, scanned.gtid_set, max(scanned.time_max_us, known.time_max_us)
        )


def _read_tail(disk: Disk, reader: SegmentReader, known: _KnownState, closed: bool) -> tuple[bytes, Scan]:
    """Return the valid block records, and the scan of the events after them.

    The scan starts at the saved position. After that position, a block may be torn even if later blocks are
    intact. A closed segment is complete.
    """
    head = reader.head
    saved = known.noted_within(head)
    start = head.base
    kept = b""
    if saved is not None or closed:
        known_end = reader.end if closed else min(saved.position.offset if saved else start, reader.end)
        kept = sound_blocks(disk, reader, known_end)
        if kept:
            start = int(block_records(kept)["source_end"][-1])
    at_saved = saved is not None and start <= saved.position.offset <= reader.end
    if not at_saved and start != head.base:
        # The GTIDs before `start` are unknown, so scan the segment from its first event.
        kept, start = b"", head.base
    time_max_us = int(block_records(kept)["time_max_us"][-1]) if kept else known.time_max_us
    gtid_set = saved.gtid_set if saved is not None and at_saved else head.gtid_set
    return kept, scan(
        reader,
        start,
        reader.end,
        block_bytes=known.block_bytes,
        gtid_set=gtid_set,
        time_max_us=time_max_us,
    )


def sound_blocks(disk: Disk, reader: SegmentReader, end: int) -> bytes:
    """Return the leading records of a segment's L2 that are sound and contiguous, up to `end`.

    The last record ends at a transaction boundary.
    """
    try:
        content = disk.read(reader.segment.index_path)
    except SourceMissing:
        return b""
    if IndexHeader.decode(content[:RECORD_BYTES]) != index_header(reader.head):
        return b""
    body = content[RECORD_BYTES:]
    blocks = block_records(body[: sound_records(body) * RECORD_BYTES])
    whole, expected_start = 0, reader.head.base
    for count, (start, stop, flags) in enumerate(
        zip(blocks["source_start"], blocks["source_end"], blocks["flags"], strict=True), 1
    ):
        if start != expected_start or stop > end:
            break
        expected_start = int(stop)
        whole = count if flags & ENDS_AT_BOUNDARY else whole
    return body[: whole * RECORD_BYTES]


def _check_loss(reader: SegmentReader, scanned: Scan, known: _KnownState, closed: bool) -> None:
    """Report the loss of durable bytes: LogDamaged if they are damaged, LogTorn if they are missing."""
    saved = known.noted_within(reader.head)
    cut = replace(reader.head.position, offset=scanned.boundary)
    whole = replace(cut, offset=reader.end)
    was_durable = closed or (saved is not None and cut < saved.position <= whole)
    if was_durable and cut != whole and not known.accept_loss:
        reason = "an event is not whole" if scanned.problem is None else scanned.problem.message
        raise LogDamaged(
            f"{reader.segment.path} is not what was written: {reason}",
            position=str(replace(cut, offset=scanned.end)),
            hint="Restore the file, or open the log once with accept_loss to read those bytes again",
        ) from scanned.problem
    if scanned.problem is not None or scanned.boundary != reader.end:
        _log.warning(
            "a torn tail is cut back to the last whole transaction",
            segment=str(reader.segment.path),
            position=str(cut),
            bytes=reader.end - scanned.boundary,
            reason="" if scanned.problem is None else str(scanned.problem),
        )


def _report_loss(saved: CapturePosition, position: Position | None, accept_loss: bool) -> None:
    _log.error(
        "the log ends before the position that was durable",
        durable=str(saved.position),
        end=None if position is None else str(position),
        accepted=accept_loss,
    )
    if not accept_loss:
        raise LogTorn(
            f"the log was durable up to {saved.position} and ends at {position or 'nothing'}",
            position=str(position or saved.position),
            hint=_HINT_TORN,
        )


def _cut_back(writer: SegmentWriter, kept: bytes, scanned: Scan, closed: bool) -> None:
    """Truncate the segment to the boundary, repair its index, and make both durable."""
    if writer.end != scanned.boundary:
        writer.cut(scanned.boundary)
    if not closed:
        # After an earlier failed sync, the scanned bytes may exist only in the page cache.
        writer.rewrite(int(block_records(kept)["source_end"][-1]) if kept else writer.head.base)
    writer.take_index(kept + scanned.records)
    writer.sync()


def _resume_cold(disk: Disk, segment: StoredSegment, reader: SegmentReader, known: _KnownState) -> Recovered:
    """Return the state of a compressed segment. It is complete and never grows, so a new segment follows."""
    index = heal_segments(disk, [segment], known.loaded, known.block_bytes)
    position = replace(reader.head.position, offset=reader.end)
    if known.noted is not None and known.noted.position == position:
        gtid_set = known.noted.gtid_set
    else:
        gtid_set = scan(reader, reader.head.base, reader.end, gtid_set=reader.head.gtid_set).gtid_set
    record = index.get(segment.version)
    assert record is not None
    return Recovered(known.before.put(record), None, position, gtid_set, record.time_max_us)


def _remove_segment(disk: Disk, segment: StoredSegment) -> None:
    disk.remove(segment.path)
    if disk.exists(segment.index_path):
        disk.remove(segment.index_path)
    disk.sync_folder(segment.path.parent)
