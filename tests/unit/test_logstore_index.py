# SPDX-License-Identifier: Apache-2.0
import pytest

from penstock.errors import ChecksumMismatch
from penstock.logstore.epochs import stored_segments
from penstock.logstore.index import PAGE_BYTES, BlockIndex, SegmentIndex, scan
from penstock.logstore.layout import StoredSegment
from penstock.logstore.records import (
    BLOCKS_MAGIC,
    CLOSED,
    RECORD_BYTES,
    BlockRecord,
    IndexHeader,
    SegmentRecord,
    is_sound,
    seal,
    sound_records,
)
from penstock.logstore.segment import SegmentReader
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import BLOCK_BYTES, open_log, recorded_disk


def segment(version: int, *, source_end: int = 500, time_max_us: int = 0) -> SegmentRecord:
    return SegmentRecord(
        version=version,
        epoch=version >> 55,
        file_number=1,
        base=100,
        source_end=source_end,
        head_bytes=200,
        state=CLOSED,
        time_first_us=1,
        time_max_us=time_max_us,
        transactions=3,
        changes=4,
        hour=2026112111,
        server_id=7,
        stored_bytes=600,
    )


@pytest.fixture(scope="module")
def disk() -> SimulatedDisk:
    """A closed log with few segments of many blocks."""
    return recorded_disk()


@pytest.fixture
def stored(disk: SimulatedDisk) -> StoredSegment:
    """The segment with the most blocks."""
    return max(
        stored_segments(disk, open_log(disk.copy()).layout), key=lambda segment: disk.size(segment.index_path)
    )


def index_of(disk: SimulatedDisk, stored: StoredSegment) -> BlockIndex:
    reader = SegmentReader.open(disk, stored)
    return BlockIndex(disk, reader, reader.end, closed=True, block_bytes=BLOCK_BYTES)


# --- Records ----------------------------------------------------------------------------------


def test_record_is_intact_or_rejected() -> None:
    record = segment(5 << 55)
    content = record.encode()
    assert len(content) == RECORD_BYTES
    assert SegmentRecord.decode(content) == record
    for at in range(RECORD_BYTES):
        assert not is_sound(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert not is_sound(content[:-1])


def test_leading_valid_records_are_counted() -> None:
    content = b"".join(seal(bytes([number])) for number in range(5))
    assert sound_records(content) == 5
    assert sound_records(content[:-1]) == 4
    assert sound_records(content[:300] + b"x" + content[301:]) == 2
    assert sound_records(b"") == 0


def test_header_identifies_its_index() -> None:
    header = IndexHeader(BLOCKS_MAGIC, 3, 1 << 35, 8_388_607)
    assert IndexHeader.decode(header.encode()) == header
    assert IndexHeader.decode(segment(1).encode()) != header
    assert IndexHeader.decode(bytes(RECORD_BYTES)) is None


# --- L1 ---------------------------------------------------------------------------------------


def test_segments_are_located_by_version_and_by_time() -> None:
    index = SegmentIndex([segment(number * 10, time_max_us=number * 100) for number in (3, 1, 2)])
    assert [record.version for record in index] == [10, 20, 30]
    assert [index.find(version) for version in (9, 10, 15, 20, 99)] == [-1, 0, 0, 1, 2]
    assert [index.find_time(time_us) for time_us in (0, 100, 101, 300, 301)] == [0, 0, 1, 2, 3]
    # The latest commit time of an open segment is unknown, so a search does not skip it.
    assert index.put(segment(40, source_end=0)).find_time(10_000) == 3
    assert index.get(20) == segment(20, time_max_us=200)
    assert index.get(21) is None
    assert [record.version for record in index.drop(20)] == [10, 30]


def test_invalid_segment_index_is_not_read(disk: SimulatedDisk) -> None:
    layout = open_log(disk.copy()).layout
    content = disk.files()[layout.segments_index]
    assert SegmentIndex.load(disk, layout.segments_index) is not None
    for wrong in (content[:-1], content[1:], content + b"x", b"", content[:-200] + content[-128:]):
        other = disk.copy()
        other.put(layout.segments_index, wrong)
        assert SegmentIndex.load(other, layout.segments_index) is None
    assert SegmentIndex.load(disk, layout.folder / "gone") is None


# --- L2 ---------------------------------------------------------------------------------------


def test_every_offset_and_time_is_located_in_its_block(disk: SimulatedDisk, stored: StoredSegment) -> None:
    blocks = index_of(disk, stored)
    assert len(blocks) > 3
    records = [BlockRecord.of(record) for record in blocks.records()]
    for offset in range(records[0].source_start, records[-1].source_end):
        actual = records[blocks.find_offset(offset)]
        assert actual.source_start <= offset < actual.source_end
    assert blocks.find_offset(records[0].source_start - 1) == -1
    assert blocks.find_offset(records[-1].source_end) == len(records)
    for number, record in enumerate(records):
        actual = blocks.find_time(record.time_max_us)
        assert records[actual].time_max_us == record.time_max_us
        assert actual <= number
    assert blocks.find_time(0) == 0
    assert blocks.find_time(records[-1].time_max_us + 1) == len(records)
    assert blocks.boundary_before(records[2].source_end) == records[2].source_end
    assert blocks.boundary_before(records[2].source_end - 1) == records[1].source_end
    assert blocks.boundary_before(records[0].source_start) == records[0].source_start


def test_lookup_reads_and_reports_a_few_records(disk: SimulatedDisk, stored: StoredSegment) -> None:
    blocks = index_of(disk, stored)
    middle = blocks.record(len(blocks) // 2).source_start
    before = blocks.bytes_read
    assert before == RECORD_BYTES
    blocks.find_offset(middle)
    assert 0 < blocks.bytes_read - before <= RECORD_BYTES * (len(blocks).bit_length() + 1)
    assert blocks.pages_read == -(-disk.size(stored.index_path) // PAGE_BYTES)


def test_index_heals_when_a_lookup_meets_damage(disk: SimulatedDisk, stored: StoredSegment) -> None:
    right = index_of(disk, stored).records().tobytes()
    content = disk.files()[stored.index_path]
    middle = len(content) // 2 // RECORD_BYTES * RECORD_BYTES
    for wrong in (
        b"",
        content[:-RECORD_BYTES],
        content + content[-RECORD_BYTES:],
        content[:middle] + bytes(RECORD_BYTES) + content[middle + RECORD_BYTES :],
        bytes(len(content)),
    ):
        other = disk.copy()
        other.put(stored.index_path, wrong)
        kept: list[bytes] = []
        reader = SegmentReader.open(other, stored)
        blocks = BlockIndex(other, reader, reader.end, closed=True, block_bytes=BLOCK_BYTES, keep=kept.append)
        assert [len(blocks.records()), blocks.find_offset(reader.end - 1)] == [
            len(right) // RECORD_BYTES,
            len(right) // RECORD_BYTES - 1,
        ]
        assert blocks.rebuilt
        assert kept == [blocks.records().tobytes()]


def test_index_is_not_built_from_invalid_data(disk: SimulatedDisk, stored: StoredSegment) -> None:
    other = disk.copy()
    content = bytearray(other.files()[stored.path])
    content[-5] ^= 1
    other.put(stored.path, bytes(content))
    other.remove(stored.index_path)
    with pytest.raises(ChecksumMismatch) as raised:
        index_of(other, stored)
    assert raised.value.position is not None


# --- Reading the data -------------------------------------------------------------------------


def test_scan_ends_at_the_last_whole_transaction(disk: SimulatedDisk, stored: StoredSegment) -> None:
    with SegmentReader.open(disk, stored) as reader:
        whole = scan(reader, reader.head.base, reader.end, block_bytes=BLOCK_BYTES)
        assert (whole.boundary, whole.end, whole.problem) == (reader.end, reader.end, None)
        for stop in range(reader.head.base, reader.end, 7):
            part = scan(reader, reader.head.base, stop, block_bytes=BLOCK_BYTES)
            assert part.problem is None
            assert part.boundary <= part.end <= stop
            records = len(part.records) // RECORD_BYTES
            if records:
                last = BlockRecord.decode(part.records[-RECORD_BYTES:])
                assert last is not None
                assert last.source_end == part.boundary
                assert last.ends_at_boundary
