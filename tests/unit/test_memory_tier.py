# SPDX-License-Identifier: Apache-2.0

import pytest

from penstock.errors import OptionInvalid
from penstock.logstore.memory import CHUNK_OVERHEAD_BYTES, MemoryTier
from penstock.model import Position

FILE = "mysql-bin.000001"
NEXT_FILE = "mysql-bin.000002"
CHUNK = 1000


def content(start: int, end: int) -> bytes:
    """Return bytes that are a function of their offset, so that a wrong slice is detected."""
    return bytes((offset * 131 + offset // 251) & 0xFF for offset in range(start, end))


def put(tier: MemoryTier, start: int, end: int, *, file: str = FILE) -> bool:
    return tier.put(content(start, end), epoch=0, file=file, start=start, end=end)


def room_for(chunks: int) -> int:
    return chunks * (CHUNK + CHUNK_OVERHEAD_BYTES)


def at(offset: int, file: str = FILE) -> Position:
    return Position(0, file, offset)


def test_range_is_returned_whole_over_several_chunks() -> None:
    tier = MemoryTier(room_for(10))
    for start in range(4, 5004, CHUNK):
        assert put(tier, start, start + CHUNK)
    views = tier.read(0, FILE, 1500, 3700)
    assert views is not None
    assert b"".join(views) == content(1500, 3700)


def test_large_chunk_is_kept_without_a_copy() -> None:
    large = bytearray(content(0, 200_000))
    tier = MemoryTier(1 << 20)
    tier.put(large, epoch=0, file=FILE, start=4, end=200_004)
    (view,) = tier.read(0, FILE, 4, 200_004) or []
    assert view.obj is large


def test_small_chunk_that_is_a_whole_buffer_is_kept_without_a_copy() -> None:
    small = bytearray(content(0, 100))
    tier = MemoryTier(1 << 20)
    tier.put(small, epoch=0, file=FILE, start=4, end=104)
    (view,) = tier.read(0, FILE, 4, 104) or []
    assert view.obj is small


def test_small_chunk_does_not_keep_its_parent_buffer_alive() -> None:
    large = bytearray(1 << 20)
    tier = MemoryTier(1 << 20)
    tier.put(memoryview(large)[:100], epoch=0, file=FILE, start=4, end=104)
    large.extend(b"a view on it would forbid this")


def test_oldest_chunks_are_evicted_and_the_bound_is_never_exceeded() -> None:
    tier = MemoryTier(room_for(3))
    for start in range(4, 10_004, CHUNK):
        put(tier, start, start + CHUNK)
        assert tier.bytes_held <= tier.bytes_max
    assert tier.earliest == at(7004)
    assert tier.read(0, FILE, 6999, 8000) is None
    assert b"".join(tier.read(0, FILE, 7004, 10_004) or []) == content(7004, 10_004)


def test_view_stays_valid_after_its_chunk_is_evicted() -> None:
    tier = MemoryTier(room_for(1))
    put(tier, 4, 1004)
    (view,) = tier.read(0, FILE, 4, 1004) or []
    put(tier, 1004, 2004)
    assert tier.read(0, FILE, 4, 1004) is None
    assert bytes(view) == content(4, 1004)


def test_tiny_chunks_are_bounded_by_their_overhead() -> None:
    tier = MemoryTier(10 * (CHUNK_OVERHEAD_BYTES + 1))
    for offset in range(4, 104):
        put(tier, offset, offset + 1)
    assert tier.earliest == at(94)


def test_oversized_chunk_is_not_kept_and_leaves_a_gap() -> None:
    tier = MemoryTier(room_for(3))
    put(tier, 4, 1004)
    assert not put(tier, 1004, 9004)
    put(tier, 9004, 9504)
    assert tier.read(0, FILE, 4, 1004) is None
    assert tier.read(0, FILE, 1004, 9504) is None
    assert b"".join(tier.read(0, FILE, 9004, 9504) or []) == content(9004, 9504)


def test_read_stops_at_the_end_of_the_file() -> None:
    tier = MemoryTier(room_for(9))
    put(tier, 4, 1004)
    put(tier, 4, 504, file=NEXT_FILE)
    assert b"".join(tier.read(0, FILE, 504, 5000) or []) == content(504, 1004)
    assert tier.read(0, FILE, 1004, 5000) == []
    assert b"".join(tier.read(0, NEXT_FILE, 4, 5000) or []) == content(4, 504)
    assert tier.read(1, FILE, 4, 10) is None


def test_bound_that_holds_nothing_is_refused() -> None:
    with pytest.raises(OptionInvalid):
        MemoryTier(0)


def test_cleared_and_closed_tiers_hold_nothing() -> None:
    tier = MemoryTier(room_for(9))
    put(tier, 4, 1004)
    tier.clear()
    assert (tier.earliest, tier.bytes_held, tier.read(0, FILE, 4, 1004)) == (None, 0, None)
    assert put(tier, 2004, 3004)
    assert tier.earliest == at(2004)
    tier.close()
    assert not put(tier, 3004, 4004)
    assert (tier.earliest, tier.bytes_held) == (None, 0)
