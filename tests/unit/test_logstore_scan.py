# SPDX-License-Identifier: Apache-2.0
import pytest

from penstock.logstore import index
from penstock.logstore.epochs import stored_segments
from penstock.logstore.index import BlockIndex, scan
from penstock.logstore.records import ENDS_AT_BOUNDARY
from penstock.logstore.segment import SegmentReader
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import BLOCK_BYTES, open_log, recorded_disk
from tests.support.suite.nonempty import each

# A read is shorter than most events, so that they are read in several attempts.
SHORT_READ_BYTES = 24
# A block is shorter than any transaction, so that each transaction has several blocks.
SMALL_BLOCK_BYTES = 10


@pytest.fixture(scope="module")
def disk() -> SimulatedDisk:
    """A closed log with several segments."""
    return recorded_disk()


def test_event_longer_than_one_read_is_scanned_whole(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for segment in each(stored_segments(disk, open_log(disk.copy()).layout), least=2):
        reader = SegmentReader.open(disk, segment)
        whole = scan(reader, reader.head.base, reader.end, block_bytes=BLOCK_BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(index, "READ_BYTES", SHORT_READ_BYTES)
            pieces = scan(reader, reader.head.base, reader.end, block_bytes=BLOCK_BYTES)
        assert pieces == whole
        assert whole.problem is None


def test_last_boundary_before_an_offset_is_the_end_of_the_nearest_block(
    disk: SimulatedDisk,
) -> None:
    steps_back = 0
    disk = disk.copy()
    for segment in each(stored_segments(disk, open_log(disk.copy()).layout), least=2):
        # A missing index is rebuilt, here with a block for almost every event.
        disk.remove(segment.index_path)
        reader = SegmentReader.open(disk, segment)
        blocks = BlockIndex(disk, reader, reader.end, closed=True, block_bytes=SMALL_BLOCK_BYTES)
        records = [blocks.record(number) for number in range(len(blocks))]
        for offset in each(
            {edge for record in records for edge in (record.source_end - 1, record.source_end)}
        ):
            before = [record for record in records if record.source_end <= offset]
            boundaries = [record.source_end for record in before if record.flags & ENDS_AT_BOUNDARY]
            assert blocks.boundary_before(offset) == max(boundaries, default=reader.head.base)
            steps_back += bool(before) and not before[-1].flags & ENDS_AT_BOUNDARY
    assert steps_back, "no transaction of the log spans several blocks"
