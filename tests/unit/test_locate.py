# SPDX-License-Identifier: Apache-2.0
"""A log of a thousand segments with real index files and heads, in which a search reads a few pages."""

import math
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from penstock._native import segment_head
from penstock.commit_versions import commit_version
from penstock.errors import PositionInvalid, PositionPurged
from penstock.logstore.disk import LocalDisk
from penstock.logstore.index import BlockIndex, SegmentIndex
from penstock.logstore.layout import Layout, StoredSegment
from penstock.logstore.locate import Locator
from penstock.logstore.records import (
    BEGINS_AT_BOUNDARY,
    BLOCK_DTYPE,
    BLOCKS_MAGIC,
    CLOSED,
    ENDS_AT_BOUNDARY,
    GTIDS_IN_SEQUENCE,
    OPEN,
    IndexHeader,
    SegmentRecord,
)
from penstock.logstore.segment import SegmentHead, SegmentReader
from penstock.model import Position
from tests.conftest import ROOT
from tests.support.binlog.events import first_event_end
from tests.support.suite.nonempty import each

SEGMENTS = 1000
# A gigabyte in blocks of 64 KiB.
BLOCKS = 16_000
BLOCK_BYTES = 65_536
TRANSACTIONS_OF_A_BLOCK = 10
TRANSACTIONS_OF_A_SEGMENT = BLOCKS * TRANSACTIONS_OF_A_BLOCK
SECOND_US = 1_000_000
# The bytes of an open segment after its last block.
OPEN_BYTES = 100
FIRST_TIME_US = 1_700_000_000 * SECOND_US
SOURCE = UUID("3e11fa47-71ca-11e1-9e33-c80aa9429562")
OTHER_SOURCE = UUID("3e11fa47-71ca-11e1-9e33-c80aa9429563")
FILE_HEAD = (ROOT / "native/kernel/tests/logs/mysql-9.7-1.binlog").read_bytes()
FORMAT_DESCRIPTION = FILE_HEAD[4 : first_event_end(FILE_HEAD)]
BASE = 4 + len(FORMAT_DESCRIPTION)


@dataclass(frozen=True)
class MadeLog:
    """A log folder on disk. `opened` lists the files that the locator has opened."""

    layout: Layout
    segments: SegmentIndex
    opened: list[int]
    # The segments whose L2 index is on disk; an index is written when it is first requested.
    blocks_of: set[int]

    def locator(self) -> Locator:
        return Locator(self.segments, self)

    def stored(self, segment: SegmentRecord) -> StoredSegment:
        path = self.layout.segment(segment.hour, segment.version)
        return StoredSegment(segment.version, segment.hour, path, False, segment.epoch, segment.file_number)

    def head(self, segment: SegmentRecord) -> SegmentHead:
        self.opened.append(segment.file_number)
        with SegmentReader.open(LocalDisk(), self.stored(segment)) as reader:
            return reader.head

    @contextmanager
    def blocks(self, segment: SegmentRecord) -> Iterator[BlockIndex]:
        self.opened.append(segment.file_number)
        if segment.file_number not in self.blocks_of:
            write_blocks(self, segment)
            self.blocks_of.add(segment.file_number)
        with SegmentReader.open(LocalDisk(), self.stored(segment)) as reader:
            end = segment.source_end or BASE + BLOCKS * BLOCK_BYTES + OPEN_BYTES
            blocks = BlockIndex(LocalDisk(), reader, end, closed=segment.source_end > 0)
            yield blocks
            assert not blocks.rebuilt


def name(number: int) -> str:
    return f"mysql-bin.{number:06d}"


def transactions_before(number: int, block: int = 0) -> int:
    return (number - 1) * TRANSACTIONS_OF_A_SEGMENT + block * TRANSACTIONS_OF_A_BLOCK


def time_of(transaction: int) -> int:
    """Return the commit time of a transaction: one per millisecond, counted from 0."""
    return FIRST_TIME_US + transaction * 1000


def block_array(number: int, first_offset: int = BASE, count: int = BLOCKS) -> np.ndarray:
    records = np.zeros(count, BLOCK_DTYPE)
    index = np.arange(count, dtype="u8")
    records["source_start"] = first_offset + index * BLOCK_BYTES
    records["source_end"] = records["source_start"] + BLOCK_BYTES
    records["file_number"] = number
    records["server_id"] = 7
    first = transactions_before(number) + index * TRANSACTIONS_OF_A_BLOCK
    records["time_us"] = FIRST_TIME_US + first * 1000
    records["time_max_us"] = FIRST_TIME_US + (first + TRANSACTIONS_OF_A_BLOCK - 1) * 1000
    records["gtid_source"] = np.void(SOURCE.bytes)
    records["gtid_number"] = first + 1
    records["transactions"] = TRANSACTIONS_OF_A_BLOCK
    records["flags"] = BEGINS_AT_BOUNDARY | ENDS_AT_BOUNDARY | GTIDS_IN_SEQUENCE
    records["last_boundary"] = records["source_end"]
    records["transaction_start"] = records["source_start"]
    records["sequence_start"] = first_offset
    return records


def sealed(records: np.ndarray) -> bytes:
    for index in range(len(records)):
        records[index]["crc"] = zlib.crc32(records[index].tobytes()[:124])
    return records.tobytes()


def write_blocks(log: MadeLog, segment: SegmentRecord, records: np.ndarray | None = None) -> None:
    header = IndexHeader(BLOCKS_MAGIC, segment.epoch, segment.base, segment.file_number)
    content = sealed(block_array(segment.file_number) if records is None else records)
    log.stored(segment).index_path.write_bytes(header.encode() + content)


def record_of(number: int, head_bytes: int) -> SegmentRecord:
    return SegmentRecord(
        version=commit_version(0, number, BASE),
        epoch=0,
        file_number=number,
        base=BASE,
        source_end=BASE + BLOCKS * BLOCK_BYTES,
        head_bytes=head_bytes,
        state=CLOSED,
        time_first_us=time_of(transactions_before(number)),
        time_max_us=time_of(transactions_before(number + 1) - 1),
        transactions=TRANSACTIONS_OF_A_SEGMENT,
        changes=0,
        hour=2026010100,
        server_id=7,
        stored_bytes=head_bytes + BLOCKS * BLOCK_BYTES,
    )


def make_log(folder: Path, numbers: range, sets: dict[int, str] | None = None) -> MadeLog:
    layout = Layout(folder)
    layout.hour_folder(2026010100).mkdir(parents=True, exist_ok=True)
    records = []
    for number in numbers:
        before = transactions_before(number)
        gtid_set = (sets or {}).get(number, f"{SOURCE}:1-{before}" if before else "")
        head = segment_head(FORMAT_DESCRIPTION, name(number), BASE, gtid_set, "mysql", 7, 1_700_000_000)
        record = record_of(number, len(head))
        # Only the head exists, so a lookup that reads data fails.
        layout.segment(record.hour, record.version).write_bytes(head)
        records.append(record)
    index = SegmentIndex(records)
    index.write(LocalDisk(), layout.segments_index)
    loaded = SegmentIndex.load(LocalDisk(), layout.segments_index)
    assert loaded is not None
    return MadeLog(layout, loaded, [], set())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> MadeLog:
    return make_log(tmp_path_factory.mktemp("large"), range(1, SEGMENTS + 1))


@pytest.fixture
def small(tmp_path: Path) -> MadeLog:
    return make_log(tmp_path, range(1, 5))


# A binary search of L1 and L2 touches one page per halving; 32 records share a page, so the last five
# halvings touch no further page.
PAGES_L1 = math.ceil(math.log2(SEGMENTS)) + 1
PAGES_L2 = math.ceil(math.log2(BLOCKS)) + 2
PAGES_OF_A_HEAD = 1


def test_position_is_located_in_a_few_pages(large: MadeLog) -> None:
    for number, block in ((1, 0), (500, 7777), (SEGMENTS, BLOCKS - 1)):
        offset = BASE + block * BLOCK_BYTES + 17
        located = large.locator().position(Position(0, name(number), offset))
        assert located.position == Position(0, name(number), offset)
        assert located.segment.file_number == number
        assert located.record is not None
        assert located.record.source_start == BASE + block * BLOCK_BYTES
        assert located.pages_read <= PAGES_L1 + PAGES_L2
        assert located.bytes_read <= (PAGES_L1 + PAGES_L2 + 20) * 128


def test_time_is_located_in_a_few_pages(large: MadeLog) -> None:
    for number, block in ((1, 0), (500, 7777), (SEGMENTS, BLOCKS - 1)):
        wanted = transactions_before(number, block) + 4
        located = large.locator().time(time_of(wanted))
        assert located.position == Position(0, name(number), BASE + block * BLOCK_BYTES)
        assert located.pages_read <= PAGES_L1 + PAGES_L2 + PAGES_OF_A_HEAD


def test_gtid_set_is_located_in_a_few_pages_and_a_few_heads(large: MadeLog) -> None:
    for number, block in ((1, 3), (500, 7777), (SEGMENTS, BLOCKS - 2)):
        consumed = transactions_before(number, block) + 5
        large.opened.clear()
        located = large.locator().gtid_set(f"{SOURCE}:1-{consumed}")
        assert located.position == Position(0, name(number), BASE + block * BLOCK_BYTES)
        assert located.segment.file_number == number
        assert located.pages_read <= PAGES_L1 * (1 + PAGES_OF_A_HEAD) + PAGES_L2
        assert len(large.opened) <= PAGES_L1 + 2


def test_single_transaction_is_located_in_a_few_pages(large: MadeLog) -> None:
    for number, block in ((1, 0), (500, 7777), (SEGMENTS, BLOCKS - 1)):
        wanted = transactions_before(number, block) + 3
        located = large.locator().gtid(f"{SOURCE}:{wanted}")
        assert located.position == Position(0, name(number), BASE + block * BLOCK_BYTES)
        assert located.pages_read <= PAGES_L1 * (1 + PAGES_OF_A_HEAD) + PAGES_L2


def test_log_ten_times_as_long_costs_a_few_pages_more(tmp_path: Path, large: MadeLog) -> None:
    short = make_log(tmp_path, range(1, SEGMENTS // 10 + 1))
    for question in (
        lambda log: log.locator().time(time_of(transactions_before(50, 7777))),
        lambda log: log.locator().gtid_set(f"{SOURCE}:1-{transactions_before(50, 7777)}"),
        lambda log: log.locator().position(Position(0, name(50), BASE + 7777 * BLOCK_BYTES)),
    ):
        more = question(large).pages_read - question(short).pages_read
        # A search by GTID reads one head per halving.
        assert more <= 3 * math.ceil(math.log2(10))


def test_every_search_agrees_with_a_full_scan(small: MadeLog) -> None:
    """Compare random searches with a full scan.

    No requested transaction may start before the returned position, and only few other transactions may
    follow it.
    """
    numbers = np.random.default_rng(7)
    locator = small.locator()
    starts = [
        (number, BASE + block * BLOCK_BYTES, transactions_before(number, block))
        for number in range(1, 5)
        for block in range(BLOCKS)
    ]
    firsts = [first for _, _, first in starts]
    for wanted in each(map(int, numbers.integers(0, 4 * TRANSACTIONS_OF_A_SEGMENT, 60))):
        number, offset, _ = starts[bisect_right(firsts, wanted) - 1]
        expected = Position(0, name(number), offset)
        assert locator.time(time_of(wanted)).position == expected
        # For one microsecond after the previous transaction, the search returns the same position.
        assert locator.time(time_of(wanted) - 999).position == expected
        assert locator.gtid(f"{SOURCE}:{wanted + 1}").position == expected
        if wanted:
            assert locator.gtid_set(f"{SOURCE}:1-{wanted}").position == expected


# --- The edges ----------------------------------------------------------------------------------


def test_times_outside_the_log_give_its_start_or_end(small: MadeLog) -> None:
    assert small.locator().time(0).position == Position(0, name(1), BASE)
    end = BASE + BLOCKS * BLOCK_BYTES
    assert small.locator().time(time_of(10 * TRANSACTIONS_OF_A_SEGMENT)).position == Position(0, name(4), end)


def test_complete_gtid_set_gives_the_end_of_the_log(small: MadeLog) -> None:
    located = small.locator().gtid_set(f"{SOURCE}:1-{transactions_before(5)}")
    assert located.position == Position(0, name(4), BASE + BLOCKS * BLOCK_BYTES)
    assert located.record is None


def test_gtid_set_missing_transactions_before_the_log_is_refused(tmp_path: Path) -> None:
    log = make_log(tmp_path, range(3, 6))
    with pytest.raises(PositionPurged) as purged:
        log.locator().gtid_set(f"{SOURCE}:1-{transactions_before(3) - 1}")
    assert purged.value.position == f"{name(3)}:{BASE}"
    with pytest.raises(PositionPurged):
        log.locator().gtid(f"{SOURCE}:5")
    with pytest.raises(PositionPurged):
        log.locator().position(Position(0, name(2), 5000))


def test_position_between_two_files_moves_to_the_next_file(small: MadeLog) -> None:
    first = Position(0, name(3), BASE)
    assert small.locator().position(Position(0, name(2), BASE + BLOCKS * BLOCK_BYTES)).position == first
    assert small.locator().position(Position(0, name(3), 4)).position == first
    assert small.locator().position(Position(0, name(1), 4)).position == Position(0, name(1), BASE)


def test_position_after_the_log_is_refused(small: MadeLog) -> None:
    end = BASE + BLOCKS * BLOCK_BYTES
    assert small.locator().position(Position(0, name(4), end)).record is None
    for behind in (Position(0, name(4), end + 1), Position(0, name(5), 4), Position(1, name(1), 4)):
        with pytest.raises(PositionInvalid):
            small.locator().position(behind)


def test_empty_log_is_reported(tmp_path: Path) -> None:
    log = MadeLog(Layout(tmp_path), SegmentIndex([]), [], set())
    for question in (
        lambda: log.locator().time(0),
        lambda: log.locator().gtid_set(""),
        lambda: log.locator().position(Position(0, name(1), 4)),
    ):
        with pytest.raises(PositionInvalid):
            question()


def with_blocks(folder: Path, records: np.ndarray, sets: dict[int, str] | None = None) -> MadeLog:
    """A log of two segments, of which the second has these blocks."""
    log = make_log(folder, range(1, 3), sets)
    write_blocks(log, log.segments[1], records)
    return MadeLog(log.layout, log.segments, [], {2})


def test_position_inside_a_large_transaction_gives_its_start(tmp_path: Path) -> None:
    records = block_array(2)
    begins = BASE + 2000 * BLOCK_BYTES + 777
    # A transaction that commits late extends from the middle of block 2000 to the middle of block 9000.
    for field in ("time_us", "gtid_number"):
        records[field][2001:9001] = records[field][2000] + 3
    records["time_max_us"][2001:9000] = records["time_max_us"][2000]
    records["flags"][2001:9001] -= BEGINS_AT_BOUNDARY
    records["flags"][2000:9000] -= ENDS_AT_BOUNDARY
    records["transaction_start"][2001:9001] = begins
    records["last_boundary"][2001:9000] = 0
    records["last_boundary"][2000] = begins
    log = with_blocks(tmp_path, records)
    located = log.locator().time(int(records["time_max_us"][9000]))
    assert located.record is not None
    assert located.record.source_start == BASE + 9000 * BLOCK_BYTES
    assert located.position == Position(0, name(2), begins)
    assert located.pages_read <= PAGES_L1 + PAGES_L2 + PAGES_OF_A_HEAD


def test_gtid_search_stops_where_the_sequence_is_not_proved(tmp_path: Path) -> None:
    """From block 5000 on, transactions of another server are interleaved, so the numbers prove nothing."""
    records = block_array(2)
    records["flags"][5000:] -= GTIDS_IN_SEQUENCE
    records["sequence_start"][5000:] = 0
    records["flags"][9000:] += GTIDS_IN_SEQUENCE
    records["sequence_start"][9000:] = BASE + 9000 * BLOCK_BYTES
    log = with_blocks(tmp_path, records)
    known = transactions_before(2, 3000)
    everything = f"{SOURCE}:1-{transactions_before(3)}"
    assert log.locator().gtid_set(f"{SOURCE}:1-{known}").position.offset == BASE + 3000 * BLOCK_BYTES
    for asked in (
        everything,
        f"{everything},{OTHER_SOURCE}:1-9",
        f"{SOURCE}:1-{transactions_before(2, 9500)}",
    ):
        assert log.locator().gtid_set(asked).position.offset == BASE + 4999 * BLOCK_BYTES


def test_out_of_order_numbers_are_not_taken_for_a_sequence(tmp_path: Path) -> None:
    """A replica may commit 8, 9, 5, 6, 7, so a number says nothing about earlier blocks."""
    records = block_array(2)
    half = BLOCKS // 2
    records["gtid_number"] = np.roll(records["gtid_number"], half)
    records["sequence_start"][half:] = BASE + half * BLOCK_BYTES
    log = with_blocks(tmp_path, records)
    consumed = f"{SOURCE}:1-{transactions_before(2, 100)}"
    # The segment starts with numbers that are missing from the GTID set, so reading starts with the segment.
    assert log.locator().gtid_set(consumed).position.offset == BASE


def test_segments_of_several_servers_are_located_by_their_heads(tmp_path: Path) -> None:
    sets = {
        1: "",
        2: f"{SOURCE}:1-100,{OTHER_SOURCE}:1-10",
        3: f"{SOURCE}:1-200,{OTHER_SOURCE}:1-10",
        4: f"{SOURCE}:1-200,{OTHER_SOURCE}:1-50",
    }
    log = make_log(tmp_path, range(1, 5), sets)
    for asked, number in (
        (f"{SOURCE}:1-150", 1),
        (f"{SOURCE}:1-150,{OTHER_SOURCE}:1-10", 2),
        (f"{SOURCE}:1-200,{OTHER_SOURCE}:1-49", 3),
        (f"{SOURCE}:1-900,{OTHER_SOURCE}:1-900", 4),
    ):
        assert log.locator().gtid_set(asked).segment.file_number == number


def test_two_segments_of_one_file_share_a_number(tmp_path: Path) -> None:
    log = make_log(tmp_path, range(1, 3))
    middle = BASE + 1000 * BLOCK_BYTES
    first = log.segments[1]
    head = segment_head(FORMAT_DESCRIPTION, name(2), middle, f"{SOURCE}:1-5", "mysql", 7, 0)
    second = SegmentRecord(
        **{**vars(first), "version": commit_version(0, 2, middle), "base": middle, "head_bytes": len(head)}
    )
    front = SegmentRecord(**{**vars(first), "source_end": middle})
    split = MadeLog(log.layout, SegmentIndex([log.segments[0], front, second]), [], {2})
    split.stored(second).path.write_bytes(head)
    write_blocks(split, front, block_array(2, count=1000))
    write_blocks(split, second, block_array(2, first_offset=middle, count=BLOCKS - 1000))
    for offset in (middle - 1, middle, middle + 1):
        located = split.locator().position(Position(0, name(2), offset))
        assert located.position.offset == offset
        assert located.segment.base == (middle if offset >= middle else BASE)


def test_open_segment_ends_at_its_readable_end(tmp_path: Path) -> None:
    log = make_log(tmp_path, range(1, 3))
    opened = SegmentRecord(**{**vars(log.segments[1]), "source_end": 0, "state": OPEN, "time_max_us": 0})
    log = MadeLog(log.layout, SegmentIndex([log.segments[0], opened]), [], set())
    block = BASE + 7000 * BLOCK_BYTES
    assert log.locator().time(time_of(transactions_before(2, 7000))).position.offset == block
    behind = log.locator().time(time_of(transactions_before(9)))
    assert behind.position == Position(0, name(2), BASE + BLOCKS * BLOCK_BYTES)
    last = Position(0, name(2), BASE + BLOCKS * BLOCK_BYTES + OPEN_BYTES)
    assert log.locator().position(last).record is None
    with pytest.raises(PositionInvalid):
        log.locator().position(Position(0, name(2), last.offset + 1))


# --- Epochs -------------------------------------------------------------------------------------


def with_epochs(folder: Path, sets: dict[int, str]) -> MadeLog:
    """Return four segments; the last two belong to another server, with epoch 1 and its own file numbers."""
    log = make_log(folder, range(1, 5), sets)
    moved = [
        SegmentRecord(
            **{**vars(segment), "epoch": 1, "version": commit_version(1, segment.file_number, BASE)}
        )
        for segment in list(log.segments)[2:]
    ]
    split = MadeLog(log.layout, SegmentIndex([*list(log.segments)[:2], *moved]), [], set())
    for this_segment in moved:
        plain = log.layout.segment(this_segment.hour, commit_version(0, this_segment.file_number, BASE))
        split.stored(this_segment).path.write_bytes(plain.read_bytes())
    return split


def test_search_continues_on_a_new_server_of_the_same_history(tmp_path: Path) -> None:
    log = with_epochs(tmp_path, {})
    for number, block in ((1, 5), (2, 900), (3, 0), (3, 77), (4, 15_000)):
        located = log.locator().gtid_set(f"{SOURCE}:1-{transactions_before(number, block)}")
        assert located.position == Position(int(number > 2), name(number), BASE + block * BLOCK_BYTES)


@pytest.mark.parametrize("first_set", ["", f"{OTHER_SOURCE}:1-10"])
def test_unconsumed_transactions_of_the_old_server_are_not_skipped(tmp_path: Path, first_set: str) -> None:
    """The new server does not know the old server's transactions, so its own set does not describe them."""
    log = with_epochs(tmp_path, {3: first_set, 4: f"{OTHER_SOURCE}:1-20"})
    consumed = f"{SOURCE}:1-{transactions_before(2, 900)},{OTHER_SOURCE}:1-10"
    located = log.locator().gtid_set(consumed)
    assert located.position == Position(0, name(2), BASE + 900 * BLOCK_BYTES)
    assert log.locator().gtid(f"{SOURCE}:{transactions_before(2, 900) + 1}").position == located.position


def test_search_with_all_of_the_old_server_continues_on_the_new_one(tmp_path: Path) -> None:
    log = with_epochs(tmp_path, {3: "", 4: f"{OTHER_SOURCE}:1-20"})
    everything = f"{SOURCE}:1-{transactions_before(3)}"
    assert log.locator().gtid_set(everything).segment.epoch == 1
    located = log.locator().gtid_set(f"{everything},{OTHER_SOURCE}:1-20")
    assert located.segment.file_number == 4
