# SPDX-License-Identifier: Apache-2.0
import pytest

from penstock.logstore import index
from penstock.logstore.index import scan
from penstock.logstore.segment import SegmentReader
from tests.logstore_disk import SimulatedDisk
from tests.logstore_source import BLOCK_BYTES, Captured, open_log
from tests.nonempty import each

# Shorter than any event has room for: most events are read in several attempts.
SHORT_READ_BYTES = 24


@pytest.fixture(scope="module")
def disk() -> SimulatedDisk:
    """A closed log with several segments."""
    disk = SimulatedDisk()
    log = open_log(disk)
    Captured(log).run()
    log.close()
    return disk


def test_event_longer_than_one_read_is_scanned_whole(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for segment in each(open_log(disk.copy()).layout.segments(disk), least=2):
        reader = SegmentReader.open(disk, segment)
        whole = scan(reader, reader.head.base, reader.end, block_bytes=BLOCK_BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(index, "READ_BYTES", SHORT_READ_BYTES)
            pieces = scan(reader, reader.head.base, reader.end, block_bytes=BLOCK_BYTES)
        assert pieces == whole
        assert whole.problem is None
