# SPDX-License-Identifier: Apache-2.0
import random
import threading
import time
from statistics import median

import pytest

from penstock.errors import LimitExceeded, OptionInvalid, PositionInvalid, PositionPurged
from penstock.logstore.memory import CHUNK_OVERHEAD_BYTES, MemoryTier
from penstock.model import Position
from tests.support.suite.patience import WAIT_SECONDS_MAX

FILE = "mysql-bin.000001"
NEXT_FILE = "mysql-bin.000002"
CHUNK = 1000


def content(start: int, end: int) -> bytes:
    """Return bytes that are a function of their offset, so that a wrong slice is detected."""
    return bytes((offset * 131 + offset // 251) & 0xFF for offset in range(start, end))


def put(
    tier: MemoryTier,
    start: int,
    end: int,
    *,
    file: str = FILE,
    boundary: int | None = None,
    timeout: float | None = 0,
) -> bool:
    return tier.put(
        content(start, end),
        epoch=0,
        file=file,
        start=start,
        end=end,
        boundary=end if boundary is None else boundary,
        timeout=timeout,
    )


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
    tier.put(large, epoch=0, file=FILE, start=4, end=200_004, boundary=200_004)
    (view,) = tier.read(0, FILE, 4, 200_004) or []
    assert view.obj is large


def test_small_chunk_that_is_a_whole_buffer_is_kept_without_a_copy() -> None:
    small = bytearray(content(0, 100))
    tier = MemoryTier(1 << 20)
    tier.put(small, epoch=0, file=FILE, start=4, end=104, boundary=104)
    (view,) = tier.read(0, FILE, 4, 104) or []
    assert view.obj is small


def test_small_chunk_does_not_keep_its_parent_buffer_alive() -> None:
    large = bytearray(1 << 20)
    tier = MemoryTier(1 << 20)
    tier.put(memoryview(large)[:100], epoch=0, file=FILE, start=4, end=104, boundary=104)
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


def test_file_mode_keeps_no_bytes_and_still_reports_the_visible_end() -> None:
    tier = MemoryTier(0, "file")
    assert not put(tier, 4, 1004)
    assert tier.bytes_held == 0
    assert tier.read(0, FILE, 4, 1004) is None
    assert tier.wait_visible(at(4), timeout=0) == at(1004)


def test_only_whole_transactions_are_visible() -> None:
    tier = MemoryTier(room_for(9))
    put(tier, 4, 1004, boundary=700)
    assert tier.visible == at(700)
    put(tier, 1004, 2004, boundary=700)
    assert tier.visible == at(700)
    put(tier, 2004, 3004, boundary=2500)
    assert tier.visible == at(2500)


def test_cursor_returns_every_transaction_once_and_in_order() -> None:
    tier = MemoryTier(1 << 20)
    numbers = random.Random(5)
    cursor = tier.register("reader", at(4))
    got = b""
    start = boundary = 4
    for _ in range(300):
        end = start + numbers.randrange(1, 400)
        if numbers.random() < 0.4:
            boundary = numbers.randrange(max(start, boundary), end) + 1
        put(tier, start, end, boundary=boundary)
        start = end
        if numbers.random() < 0.3 and (run := cursor.get(timeout=0, bytes_max=numbers.randrange(1, 2000))):
            assert run.start == at(4 + len(got))
            got += b"".join(run.data)
            assert run.end == at(4 + len(got))
    while run := cursor.get(timeout=0):
        got += b"".join(run.data)
    assert got == content(4, boundary)


def test_cursor_continues_in_the_next_file_and_skips_unfinished_transactions() -> None:
    tier = MemoryTier(room_for(9))
    cursor = tier.register("reader", at(4))
    put(tier, 4, 1004, boundary=600)
    assert cursor.get(timeout=0).end == at(600)  # type: ignore[union-attr]
    put(tier, 126, 1126, file=NEXT_FILE)
    run = cursor.get(timeout=0)
    assert run is not None
    assert (run.start, run.end) == (at(126, NEXT_FILE), at(1126, NEXT_FILE))
    assert cursor.get(timeout=0) is None


def test_rewound_cursor_returns_unacknowledged_transactions_again() -> None:
    tier = MemoryTier(room_for(9))
    cursor = tier.register("reader", at(4))
    for start in (4, 1004, 2004):
        put(tier, start, start + CHUNK)
    assert cursor.get(timeout=0, bytes_max=1).end == at(1004)  # type: ignore[union-attr]
    cursor.acknowledge(at(1004))
    assert cursor.get(timeout=0, bytes_max=1).end == at(2004)  # type: ignore[union-attr]
    cursor.rewind()
    run = cursor.get(timeout=0)
    assert run is not None
    assert (run.start, run.end) == (at(1004), at(3004))


def test_cursor_that_fell_behind_reports_it_and_can_seek() -> None:
    tier = MemoryTier(room_for(2))
    cursor = tier.register("reader", at(4))
    for start in range(4, 5004, CHUNK):
        put(tier, start, start + CHUNK)
    with pytest.raises(PositionPurged) as purged:
        cursor.get(timeout=0)
    assert purged.value.position == f"{FILE}:4"
    cursor.seek(at(3004))
    assert b"".join(cursor.get(timeout=0).data) == content(3004, 5004)  # type: ignore[union-attr]


def test_cursor_at_the_end_misses_no_oversized_chunk() -> None:
    tier = MemoryTier(room_for(2))
    cursor = tier.register("reader", at(4))
    put(tier, 4, 1004)
    assert cursor.get(timeout=0) is not None
    put(tier, 1004, 9004)
    put(tier, 9004, 9504)
    with pytest.raises(PositionPurged):
        cursor.get(timeout=0)


def test_recovery_reports_where_memory_starts() -> None:
    tier = MemoryTier(room_for(9))
    tier.show(at(50_000))
    assert tier.visible == at(50_000)
    with pytest.raises(PositionPurged):
        tier.register("too early", at(49_999))
    cursor = tier.register("from the head", at(50_000))
    put(tier, 126, 1126, file=NEXT_FILE)
    assert cursor.get(timeout=0).start == at(126, NEXT_FILE)  # type: ignore[union-attr]


# --- Alone: the writer is held back -------------------------------------------------------------


def test_writer_is_throttled_until_every_reader_has_acknowledged() -> None:
    tier = MemoryTier(room_for(3), "memory")
    fast, slow = tier.register("fast", at(4)), tier.register("slow", at(4))
    for start in (4, 1004, 2004):
        assert put(tier, start, start + CHUNK)
    assert not put(tier, 3004, 4004)
    fast.acknowledge(at(3004))
    assert not put(tier, 3004, 4004)
    slow.acknowledge(at(1003))
    assert not put(tier, 3004, 4004)
    slow.acknowledge(at(1004))
    assert put(tier, 3004, 4004)
    assert b"".join(slow.get(timeout=0).data) == content(4, 4004)[1000:]  # type: ignore[union-attr]
    assert tier.cursors() == {"fast": at(3004), "slow": at(1004)}


def test_disconnecting_reader_unblocks_the_writer() -> None:
    tier = MemoryTier(room_for(2), "memory")
    with tier.register("reader", at(4)):
        put(tier, 4, 1004)
        put(tier, 1004, 2004)
        assert not put(tier, 2004, 3004)
    assert put(tier, 2004, 3004)


def test_acknowledgement_wakes_the_writer_and_a_chunk_wakes_the_reader() -> None:
    tier = MemoryTier(room_for(2), "memory")
    cursor = tier.register("reader", at(4))
    chunks, got, seconds = 400, [], []

    def write() -> None:
        for number in range(chunks):
            assert put(tier, 4 + number * CHUNK, 4 + (number + 1) * CHUNK, timeout=None)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    while sum(map(len, got)) < chunks * CHUNK:
        started = time.monotonic()
        run = cursor.get(timeout=WAIT_SECONDS_MAX)
        seconds.append(time.monotonic() - started)
        assert run is not None
        got.append(b"".join(run.data))
        cursor.acknowledge(run.end)
    writer.join(WAIT_SECONDS_MAX)
    assert b"".join(got) == content(4, 4 + chunks * CHUNK)
    # With hundreds of handovers in each direction, polling at even 50 ms would exceed the median.
    assert median(seconds) < 0.02


def test_chunk_that_can_never_fit_is_refused_by_name() -> None:
    tier = MemoryTier(room_for(2), "memory")
    cursor = tier.register("reader", at(4))
    with pytest.raises(LimitExceeded) as too_large:
        put(tier, 4, 9004)
    assert too_large.value.position == f"{FILE}:4"
    assert put(tier, 4, 1004, boundary=500)
    assert put(tier, 1004, 2004, boundary=500)
    assert not put(tier, 2004, 3004, boundary=500)
    cursor.acknowledge(at(500))
    with pytest.raises(LimitExceeded):
        put(tier, 2004, 3004, boundary=500)


def test_without_a_reader_the_oldest_chunks_are_evicted_and_a_late_reader_gets_an_error() -> None:
    tier = MemoryTier(room_for(2), "memory")
    for start in range(4, 5004, CHUNK):
        assert put(tier, start, start + CHUNK)
    with pytest.raises(PositionPurged) as purged:
        tier.register("late", at(4))
    assert f"{FILE}:3004" in str(purged.value)
    assert tier.cursors() == {}
    assert b"".join(tier.register("late", at(3004)).get(timeout=0).data) == content(3004, 5004)  # type: ignore[union-attr]


def test_closing_wakes_all_waiters() -> None:
    tier = MemoryTier(room_for(1), "memory")
    cursor = tier.register("reader", at(4))
    put(tier, 4, 1004)
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda: answers.append(put(tier, 1004, 2004, timeout=None)), daemon=True),
        threading.Thread(target=lambda: answers.append(tier.wait_visible(at(1004))), daemon=True),
    ]
    for thread in threads:
        thread.start()
    tier.close()
    for thread in threads:
        thread.join(WAIT_SECONDS_MAX)
    assert len(answers) == 2
    assert cursor.get() is None


def test_acknowledgement_past_the_end_is_refused() -> None:
    tier = MemoryTier(room_for(2))
    cursor = tier.register("reader", at(4))
    put(tier, 4, 1004, boundary=500)
    with pytest.raises(PositionInvalid):
        cursor.acknowledge(at(501))


def test_duplicate_reader_name_is_refused() -> None:
    tier = MemoryTier(room_for(2))
    tier.register("reader", at(4))
    with pytest.raises(OptionInvalid):
        tier.register("reader", at(4))


def test_bound_that_holds_nothing_is_refused() -> None:
    with pytest.raises(OptionInvalid):
        MemoryTier(0, "mixed")
