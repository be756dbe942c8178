# SPDX-License-Identifier: Apache-2.0
"""Verification of a whole log folder: event checksums, heads, both indexes, the epochs and the segment order.

Values that can be computed from the data are not trusted: block and segment records are rebuilt and compared.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from penstock._native import BlockCutter, GtidSet
from penstock.errors import LogDamaged, PenstockError, SourceMissing, StreamError
from penstock.limits import READ_BYTES
from penstock.logstore.catalog import stored_segment
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import EpochFile
from penstock.logstore.index import BLOCK_BYTES_DEFAULT, SegmentIndex, rebuild
from penstock.logstore.layout import Layout, StoredSegment
from penstock.logstore.records import (
    COVERS_XA_COMMITS,
    OPEN,
    RECORD_BYTES,
    TIERED,
    IndexHeader,
    Records,
    SegmentRecord,
    block_records,
    sound_records,
)
from penstock.logstore.segment import SegmentHead, SegmentReader, closed_record, index_header
from penstock.logstore.tier import Tier, TieredNote
from penstock.model import Position

# A block size that is never reached: blocks end where the stored index says, not by size.
_NEVER_BY_SIZE = 1 << 40


class FindingKind(StrEnum):
    """The area of a finding."""

    DATA = "data"
    BLOCKS = "blocks"
    SEGMENTS = "segments"
    ORDER = "order"
    EPOCHS = "epochs"
    TIER = "tier"
    TAIL = "tail"


_HINTS = {
    FindingKind.DATA: "Restore the file from a copy, or read it again: penstock position set --position",
    FindingKind.BLOCKS: "Run: penstock log verify --heal",
    FindingKind.SEGMENTS: "Run: penstock log verify --heal",
    FindingKind.ORDER: "Read what is missing again: penstock position set --position",
    FindingKind.EPOCHS: "Restore epochs.json from a copy",
    FindingKind.TIER: "Restore the object from a version that the store kept",
    FindingKind.TAIL: "Nothing: the next start of the daemon cuts it, and the server sends it again",
}


@dataclass(frozen=True)
class Finding:
    """One inconsistency.

    `position` is a source position, or a file name and an offset. `harmless` marks a state that is normal
    after a crash or during a capture. `healed` marks an inconsistency that this run repaired. Only indexes
    are repaired, because they can be rebuilt from the data.
    """

    kind: FindingKind
    name: str
    position: str
    message: str
    harmless: bool = False
    healed: bool = False

    @property
    def hint(self) -> str | None:
        """The remedy, None if the inconsistency is healed."""
        return None if self.healed else _HINTS[self.kind]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "mend": self.hint}


@dataclass
class _Checked:
    """The result of scanning one segment's data."""

    segment: StoredSegment
    head: SegmentHead
    end: int
    records: bytes
    gtid_set: str
    time_before_us: int
    time_max_us: int
    sound: bool
    whole: bool


def verify(
    disk: Disk,
    layout: Layout,
    *,
    heal: bool = False,
    block_bytes: int = BLOCK_BYTES_DEFAULT,
    tier: Tier | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Finding]:
    """Read a whole log and yield its inconsistencies, oldest first.

    `progress` receives the bytes read and their total. With `heal`, indexes that do not match their data are
    rebuilt; no other process may write the log then. With `tier`, segments in the tier are also read. Raises
    LogLocked, DiskFailed, ConnectionLost for an unreachable tier.
    """
    with ExitStack() as stack:
        if heal:
            stack.callback(disk.lock(layout.lock).close)
        yield from _Verification(disk, layout, heal, block_bytes, tier, progress).run()


class _Verification:
    def __init__(
        self,
        disk: Disk,
        layout: Layout,
        heal: bool,
        block_bytes: int,
        tier: Tier | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._disk = disk
        self._layout = layout
        self._heal = heal
        self._block_bytes = block_bytes
        self._tier = tier
        self._progress = progress or (lambda _done, _of: None)
        self._done = self._total = 0
        self._records: list[SegmentRecord] = []
        self._before: _Checked | None = None

    def run(self) -> Iterator[Finding]:
        """Yield the findings of the folder."""
        segments = SegmentIndex.load(self._disk, self._layout.segments_index)
        epoch_file = yield from self._check_epochs()
        epochs = {epoch.epoch for epoch in epoch_file.epochs}
        stored = self._layout.segments(self._disk, lambda: epoch_file.decode_version)
        if segments is None and stored:
            yield self._finding(
                FindingKind.SEGMENTS,
                self._layout.segments_index.name,
                0,
                "the index of segments is missing or damaged",
                healed=self._heal,
            )
        known = segments if segments is not None else SegmentIndex([])
        local = {segment.version: segment for segment in stored}
        remote = [segment for segment in known if segment.state == TIERED and segment.version not in local]
        self._total = sum(self._disk.size(segment.path) for segment in stored)
        self._total += sum(segment.stored_bytes for segment in remote if self._tier is not None)
        versions = sorted({*local, *(segment.version for segment in remote)})
        for version in versions:
            record = known.get(version)
            last = version == versions[-1]
            yield from self._check_segment(local.get(version), record, last)
            if self._before is not None and epochs and self._before.head.epoch not in epochs:
                yield self._finding(
                    FindingKind.EPOCHS,
                    self._before.segment.path.name,
                    self._before.head.position,
                    f"{self._layout.epochs.name} does not know the epoch {self._before.head.epoch}",
                )
        for record in known:
            if record.version not in versions:
                path = stored_segment(self._layout, record).path
                yield self._finding(
                    FindingKind.SEGMENTS, path.name, 0, "the index names a segment that is not there"
                )
        if self._heal and segments != SegmentIndex(self._records):
            SegmentIndex(self._records).write(self._disk, self._layout.segments_index)

    # --- One segment ------------------------------------------------------------------------

    def _check_segment(
        self, stored: StoredSegment | None, record: SegmentRecord | None, last: bool
    ) -> Iterator[Finding]:
        before, self._before = self._before, None
        try:
            if stored is not None:
                reader = SegmentReader.open(self._disk, stored)
            else:
                assert record is not None, "a segment that is not here is in the index"
                self._records.append(record)
                if self._tier is None:
                    return
                self._tier.verify(TieredNote.load(self._disk, self._tier.note_path(record)))
                reader = self._tier.reader(record)
        except (StreamError, SourceMissing) as problem:
            path = stored.path if stored is not None else self._layout.segments_index
            yield self._of_error(FindingKind.DATA if stored else FindingKind.TIER, path.name, problem)
            if stored is not None and record is not None:
                self._records.append(record)
            return
        with reader:
            checked = yield from self._check_data(reader, before, record, last)
            if before is not None:
                yield from self._check_order(before, checked)
            if checked.sound:
                yield from self._check_blocks(reader, checked, last)
        self._before = checked
        if stored is not None:
            yield from self._check_record(checked, record, last)

    def _check_data(
        self, reader: SegmentReader, before: _Checked | None, record: SegmentRecord | None, last: bool
    ) -> Generator[Finding, None, _Checked]:
        """Scan every event of a segment; blocks end where the index says."""
        head, end, name = reader.head, reader.end, reader.segment.path.name
        time_before_us = before.time_max_us if before is not None else self._time_before(reader, record)
        cutter = BlockCutter(
            epoch=head.epoch,
            file=head.file,
            offset=head.base,
            gtid_set=head.gtid_set,
            flavor=head.flavor,
            block_bytes=_NEVER_BY_SIZE,
            time_max_us=time_before_us,
            live=False,
            head=head.file_head,
            statements=False,
        )
        records, offset, sound = bytearray(), head.base, True
        try:
            for stop in self._stops(reader, end):
                offset = self._feed(cutter, reader, offset, stop)
                cutter.close_block()
                records += cutter.take_records()
        except StreamError as problem:
            sound = False
            yield self._of_error(FindingKind.DATA, name, problem)
        if sound and cutter.boundary != end:
            sound = last
            yield self._finding(
                FindingKind.TAIL if last else FindingKind.DATA,
                name,
                dataclasses.replace(head.position, offset=cutter.boundary),
                f"it ends inside a transaction, {end - cutter.boundary} bytes behind the last whole one",
                harmless=last,
            )
        return _Checked(
            reader.segment,
            head,
            cutter.boundary,
            bytes(records),
            cutter.gtid_set,
            time_before_us,
            cutter.time_max_us,
            sound,
            whole=cutter.boundary == end,
        )

    def _time_before(self, reader: SegmentReader, record: SegmentRecord | None) -> int:
        """Return the latest commit time before a segment whose predecessor is gone, as recorded in its
        index.
        """
        blocks = self._stored_blocks(reader)
        if blocks is not None and len(blocks):
            return int(blocks["time_max_us"][0])
        return record.time_max_us if record is not None else 0

    def _feed(self, cutter: BlockCutter, reader: SegmentReader, start: int, stop: int) -> int:
        """Feed [start, stop) to the cutter; return the offset after the last whole event."""
        piece_bytes = READ_BYTES
        while start < stop:
            piece = reader.read_bytes(start, min(start + piece_bytes, stop))
            consumed = cutter.feed(piece)
            cutter.take_data()
            if consumed == 0 and start + len(piece) == stop:
                break
            piece_bytes = READ_BYTES if consumed else 2 * piece_bytes
            start += consumed
            self._done += consumed
            self._progress(min(self._done, self._total), self._total)
        return start

    def _stops(self, reader: SegmentReader, end: int) -> list[int]:
        """Return the block ends of the stored index, and the segment's end."""
        stored = self._stored_blocks(reader)
        ends = [int(end_offset) for end_offset in stored["source_end"]] if stored is not None else []
        rising = all(start < stop for start, stop in zip([reader.head.base, *ends], ends, strict=False))
        return sorted({*(stop for stop in ends if stop < end), end}) if rising else [end]

    def _stored_blocks(self, reader: SegmentReader) -> Records | None:
        try:
            content = self._disk.read(reader.segment.index_path)
        except SourceMissing:
            return None
        body = content[RECORD_BYTES:]
        whole = len(body) // RECORD_BYTES
        header = IndexHeader.decode(content[:RECORD_BYTES])
        if header != index_header(reader.head) or len(body) % RECORD_BYTES or sound_records(body) != whole:
            return None
        return block_records(body)

    # --- Comparisons ------------------------------------------------------------------------

    def _check_blocks(self, reader: SegmentReader, checked: _Checked, last: bool) -> Iterator[Finding]:
        """Compare the stored L2 index with the rebuilt one. The index of an open segment may be shorter."""
        stored, rebuilt = self._stored_blocks(reader), block_records(checked.records)
        mismatch = (
            0
            if stored is None
            else _first_difference(stored, rebuilt, checked.head.base, may_be_shorter=last)
        )
        if mismatch is None:
            return
        offset = int(rebuilt["source_start"][mismatch]) if mismatch < len(rebuilt) else checked.end
        if self._heal:
            checked.records = rebuild(reader, checked.end, self._block_bytes, checked.time_before_us)
            content = index_header(checked.head).encode() + checked.records
            self._disk.write_atomic(reader.segment.index_path, content)
        yield self._finding(
            FindingKind.BLOCKS,
            reader.segment.index_path.name,
            dataclasses.replace(checked.head.position, offset=offset),
            "the index is missing or damaged"
            if stored is None
            else f"record {mismatch} does not fit the data",
            healed=self._heal,
        )

    def _check_record(self, checked: _Checked, record: SegmentRecord | None, last: bool) -> Iterator[Finding]:
        """Compare the segment's L1 record with the rebuilt one. The open segment has no L1 record yet."""
        may_be_open = last and (record.state == OPEN if record is not None else not self._heal)
        if not checked.sound or may_be_open or not checked.whole:
            self._records += [record] if record is not None else []
            return
        stored_bytes = self._disk.size(checked.segment.path)
        rebuilt = closed_record(
            checked.segment, checked.head, checked.end, checked.records, checked.time_before_us, stored_bytes
        )
        self._records.append(rebuilt)
        if rebuilt != record:
            yield self._finding(
                FindingKind.SEGMENTS,
                checked.segment.path.name,
                checked.head.position,
                "the index of segments does not have it" if record is None else _differences(record, rebuilt),
                healed=self._heal,
            )

    def _check_order(self, before: _Checked, now: _Checked) -> Iterator[Finding]:
        """Check that a segment continues where the previous one ended."""
        previous, current = before.head.position, now.head.position
        end = dataclasses.replace(previous, offset=before.end)
        if current < end:
            yield self._order(now, f"it begins before {end}, where the segment before ends")
            return
        if current.epoch != previous.epoch or not before.sound:
            return
        had, has = GtidSet.parse(before.gtid_set), GtidSet.parse(now.head.gtid_set)
        if missing := has.subtract(had):
            yield self._order(now, f"transactions are missing between it and the segment before: {missing}")
        elif lacking := had.subtract(has):
            yield self._order(now, f"its head lacks transactions that the segment before has: {lacking}")
        elif current.file_number > previous.file_number + 1:
            yield self._order(now, f"source files are missing between {previous.file} and {current.file}")
        elif current.file == previous.file and current != end:
            left_out = f"{current.offset - end.offset} bytes of {current.file} are left out before it"
            yield self._order(now, left_out, harmless=bool(has))

    def _order(self, now: _Checked, message: str, harmless: bool = False) -> Finding:
        return self._finding(
            FindingKind.ORDER, now.segment.path.name, now.head.position, message, harmless=harmless
        )

    def _check_epochs(self) -> Generator[Finding, None, EpochFile]:
        """Return the epochs in the file, none if it is damaged."""
        try:
            epochs = EpochFile.load(self._disk, self._layout)
        except LogDamaged as problem:
            yield self._of_error(FindingKind.EPOCHS, self._layout.epochs.name, problem)
            return EpochFile()
        numbers = [record.epoch for record in epochs.epochs]
        if numbers != sorted(set(numbers)):
            yield self._finding(
                FindingKind.EPOCHS, self._layout.epochs.name, 0, f"the epochs do not rise: {numbers}"
            )
        return epochs

    # --- Findings ---------------------------------------------------------------------------

    def _of_error(self, kind: FindingKind, name: str, problem: PenstockError) -> Finding:
        return Finding(kind, name, problem.position or f"{name}:0", problem.message)

    def _finding(
        self,
        kind: FindingKind,
        name: str,
        position_or_offset: Position | int,
        message: str,
        *,
        harmless: bool = False,
        healed: bool = False,
    ) -> Finding:
        position = (
            str(position_or_offset)
            if isinstance(position_or_offset, Position)
            else f"{name}:{position_or_offset}"
        )
        return Finding(kind, name, position, message, harmless, healed)


def _first_difference(stored: Records, rebuilt: Records, base: int, *, may_be_shorter: bool) -> int | None:
    """Return the number of the first block whose record differs from the data; None if all match."""
    count = min(len(stored), len(rebuilt))
    stored_part, rebuilt_part = stored[:count].copy(), rebuilt[:count].copy()
    # A run of consecutive GTIDs may have begun before the segment. If capture started in the middle of a
    # segment, the recorded start of the run is later. That is also correct, but covers fewer GTIDs.
    claims = stored_part["sequence_start"]
    claims_more = (claims != 0) & (
        (rebuilt_part["sequence_start"] == 0) | (np.maximum(claims, base) < rebuilt_part["sequence_start"])
    )
    # Records of version 0.1 leave out the tables of XA transactions that commit in the block.
    of_first_version = (stored_part["flags"] & COVERS_XA_COMMITS) == 0
    leaves_out = of_first_version & ((stored_part["tables"] & ~rebuilt_part["tables"]) == 0)
    stored_part["tables"][leaves_out] = rebuilt_part["tables"][leaves_out]
    stored_part["flags"][of_first_version] |= COVERS_XA_COMMITS
    for records in (stored_part, rebuilt_part):
        records["sequence_start"] = 0
        records["crc"] = 0
    differs = np.flatnonzero((stored_part != rebuilt_part) | claims_more)
    if len(differs):
        return int(differs[0])
    return None if len(stored) == len(rebuilt) or (may_be_shorter and len(stored) < len(rebuilt)) else count


def _differences(record: SegmentRecord, rebuilt: SegmentRecord) -> str:
    wrong = [
        f"{field.name} {getattr(record, field.name)} is {getattr(rebuilt, field.name)}"
        for field in dataclasses.fields(record)
        if getattr(record, field.name) != getattr(rebuilt, field.name)
    ]
    return f"its record does not fit the data: {', '.join(wrong)}"
