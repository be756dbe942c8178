# SPDX-License-Identifier: Apache-2.0
"""A BLOB that contains valid transactions is read as a BLOB, wherever the log is cut."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest

from penstock import read_binlog
from penstock._native import follow_events
from penstock.errors import EventMalformed, LogEncrypted, RangesDisagree, SourceMissing
from penstock.limits import MIB, RANGE_BYTES_MIN
from penstock.source import event_starts
from penstock.source.files import FileSource
from penstock.source.reading import read_range
from penstock.source.source import ByteRange, Source, SourceOptions, open_source
from penstock.source.walk import TransactionWalk
from tests.support.binlog.decoding import decode
from tests.support.binlog.events import (
    FLAG_IN_USE,
    HEADER,
    START_ENCRYPTION,
    Event,
    assemble,
    events,
    first_event_end,
)
from tests.support.binlog.forged_log import (
    ACCOUNTS,
    NAME,
    NOTE_IDS,
    NOTES,
    forged_log,
    insert,
    keep_forged_log,
    write_forged_log,
)
from tests.support.suite.nonempty import each

# The distance between cuts is a prime, so that cuts fall on every part of an event.
CUT_STEP_BYTES = 13
LARGE_BYTES = 3 * RANGE_BYTES_MIN
# Number of pieces between two remembered starts.
NEARBY_READS = 6


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_forged_log(tmp_path_factory.mktemp("files"), LARGE_BYTES, spacing=MIB // 2)


@pytest.fixture(scope="module")
def large_kept(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    keep_forged_log(folder, large.read_bytes())
    return folder


def rows_of(source: Source, ranges: Sequence[ByteRange]) -> list[tuple[str, int]]:
    batches = [batch for byte_range in ranges for batch in read_range(source, byte_range)]
    return [
        (batch.table, number)
        for batch in batches
        for number in pyarrow.record_batch(batch).column("id").to_pylist()
    ]


GENUINE = [(NOTES, number) for number in NOTE_IDS]


def source_of(path: Path) -> Source:
    return open_source(SourceOptions.parse(str(path)))


@pytest.mark.parametrize("spacing", [0, 500])
def test_forged_copies_are_valid_at_their_positions(spacing: int) -> None:
    content = forged_log(4000, spacing)
    blob = next(event for event in events(content) if event.size > 4000)
    # Only the preceding events show that a copy is not a transaction. If reading begins at a copy's start,
    # the bytes are valid changes of accounts.
    start = content.index(insert(999, ACCOUNTS, 1, b"forged")[0].body) - HEADER.size
    assert blob.offset < start < blob.offset + blob.size
    last = content.rindex(insert(999, ACCOUNTS, 1, b"forged")[0].body) - HEADER.size
    options = {"offset": start, "head": content[: first_event_end(content)]}
    actual_rows = decode(content[start:last], NAME, **options).rows(ACCOUNTS)
    assert len(actual_rows) > 5
    assert {(row["id"], row["note"]) for row in actual_rows} == {(1, b"forged")}


def test_any_cut_of_a_file_returns_no_row_from_inside_a_value(tmp_path: Path) -> None:
    path = write_forged_log(tmp_path, 4000)
    size = path.stat().st_size
    source = source_of(path)
    for cut in each(range(5, size, CUT_STEP_BYTES), least=100):
        first = ByteRange(0, NAME, 4, cut, aligned=True, is_cut=True)
        assert rows_of(source, [first, ByteRange(0, NAME, cut, None, aligned=False)]) == GENUINE, cut


def test_any_cut_of_a_kept_log_returns_no_row_from_inside_a_value(tmp_path: Path) -> None:
    content = forged_log(4000)
    keep_forged_log(tmp_path, content)
    source = source_of(tmp_path)
    (extent,) = source.extents()
    for cut in each(range(extent.start + 1, extent.end, CUT_STEP_BYTES), least=100):
        ranges = [
            ByteRange(0, NAME, extent.start, cut, aligned=True),
            ByteRange(0, NAME, cut, extent.end, aligned=False),
        ]
        assert rows_of(source, ranges) == GENUINE, cut


def test_plan_over_a_file_returns_no_row_from_inside_a_value(large: Path) -> None:
    source = source_of(large)
    ranges = source.split(ranges_min=3)
    assert len(ranges) == 3
    assert rows_of(source, ranges) == GENUINE


def test_plan_over_a_kept_log_is_cut_between_transactions(large_kept: Path) -> None:
    source = source_of(large_kept)
    ranges = source.split(ranges_min=3)
    boundaries = set(transaction_ends(source, ranges))
    assert len(ranges) > 1
    assert all(range_.aligned and range_.start in boundaries for range_ in ranges[1:])
    assert [range_.is_cut for range_ in ranges] == [True] * (len(ranges) - 1) + [False]
    assert rows_of(source, ranges) == GENUINE


def transaction_ends(source: Source, ranges: Sequence[ByteRange]) -> list[int]:
    whole = replace(ranges[0], stop=ranges[-1].stop, is_cut=False)
    return [end for batch in TransactionWalk(source, whole) for end in batch["end_offset"].to_pylist()]


@pytest.mark.parametrize("fixture", ["large", "large_kept"])
def test_byte_limit_ends_at_a_transaction_and_never_inside_a_value(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    source = source_of(request.getfixturevalue(fixture))
    start, head = source.earliest(), source.head()
    ends = transaction_ends(source, source.split(ranges_min=1))
    for bytes_max in each(range(100, LARGE_BYTES + 8000, LARGE_BYTES // 20), least=20):
        assert source.walk(start, head, bytes_max=bytes_max).offset in ends, bytes_max


def test_tail_of_a_file_in_use_ends_at_no_transaction_from_inside_a_value(tmp_path: Path) -> None:
    whole = list(events(forged_log(2 * RANGE_BYTES_MIN, spacing=MIB)))
    whole[0] = replace(whole[0], flags=FLAG_IN_USE)
    content = assemble(whole)
    path = tmp_path / NAME
    # The server has written the BLOB except its last bytes.
    end = next(event.offset + event.size for event in events(content) if event.size > MIB)
    path.write_bytes(content[: end - 100])
    start = [event.offset for event in events(content) if event.offset < end][-4:]
    assert source_of(path).head().offset == start[0]
    assert rows_of(source_of(path), source_of(path).split()) == GENUINE[: NOTE_IDS.index(40)]


def test_read_binlog_returns_no_row_from_inside_a_value(large: Path, large_kept: Path) -> None:
    for source in (large, large_kept):
        tables = [batch.table for batch in read_binlog(str(source))]
        assert NOTES in tables
        assert ACCOUNTS not in tables


def test_ranges_that_do_not_meet_at_an_event_are_refused(tmp_path: Path) -> None:
    content = forged_log(4000)
    keep_forged_log(tmp_path, content)
    source = source_of(tmp_path)
    whole = source.split()[0]
    blob = next(event for event in events(content) if event.size > 4000)
    for cut in (blob.offset + 1, blob.offset + blob.size // 2, blob.offset + blob.size - 1):
        with pytest.raises(RangesDisagree, match=f"begins at {cut}, inside the event from {blob.offset}"):
            rows_of(source, [replace(whole, stop=cut, is_cut=True)])
    assert rows_of(source, [replace(whole, stop=blob.offset + blob.size, is_cut=True)])


def test_replaced_file_is_followed_again(tmp_path: Path) -> None:
    path = write_forged_log(tmp_path, 4000)
    first = event_starts.last_event_start(path, 4, 8000)
    assert first in {event.offset for event in events(path.read_bytes())}
    content = forged_log(9000)
    path.write_bytes(content)
    assert event_starts.last_event_start(path, 4, 20_000) in {event.offset for event in events(content)}


def test_damaged_event_size_is_refused_by_name(tmp_path: Path) -> None:
    path = write_forged_log(tmp_path, 4000)
    content = bytearray(path.read_bytes())
    damaged = list(events(bytes(content)))[10].offset
    content[damaged + 9 : damaged + 13] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(EventMalformed, match=f"the event at {damaged} says it is 0 bytes long"):
        event_starts.last_event_start(path, 4, len(content))


def test_cut_range_of_a_damaged_file_returns_whole_transactions_before_the_damage(tmp_path: Path) -> None:
    path = write_forged_log(tmp_path, 400)
    content = bytearray(path.read_bytes())
    damaged = list(events(bytes(content)))[-4].offset
    content[damaged + 9 : damaged + 13] = bytes(4)
    path.write_bytes(content)
    batches: list[list[int]] = []
    for is_cut in (False, True):
        batches.append([])
        byte_range = ByteRange(0, NAME, 4, len(content) - 1, aligned=True, is_cut=is_cut)
        with pytest.raises(EventMalformed):
            batches[-1].extend(
                number
                for batch in read_range(source_of(path), byte_range)
                for number in pyarrow.record_batch(batch).column("id").to_pylist()
            )
    assert batches[0] == batches[1]
    assert batches[1]


def test_every_range_of_an_encrypted_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / NAME
    head = next(events(forged_log(400)))
    begin = Event(0, START_ENCRYPTION, 1, 0, 0, b"\1" + bytes(16))
    path.write_bytes(assemble([head, begin]) + b"\x5a" * 4000)
    for start, stop in each(((4, 2000), (2000, 3000), (3000, None)), least=3):
        byte_range = ByteRange(0, NAME, start, stop, aligned=start == 4, is_cut=stop is not None)
        with pytest.raises(LogEncrypted) as caught:
            list(read_range(source_of(path), byte_range))
        assert caught.value.position == f"{NAME}:{first_event_end(path.read_bytes())}"


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for remembered event starts."""
    monkeypatch.setattr(event_starts.tempfile, "gettempdir", lambda: str(tmp_path))
    event_starts._followed.clear()
    return tmp_path / f"penstock-{os.getuid()}"


def another_process() -> None:
    event_starts._followed.clear()


def reads_of(path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the located start, and how many pieces of the file were read to find it."""
    count = [0]

    def counted(buffer: memoryview, offset: int, target: int) -> tuple[int | None, int]:
        count[0] += 1
        return follow_events(buffer, offset, target)

    monkeypatch.setattr(event_starts, "follow_events", counted)
    return event_starts.last_event_start(path, 4, target), count[0]


def test_file_is_followed_once_on_a_host(
    tmp_path: Path, remembered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = forged_log(400)[4:] * 200
    path = tmp_path / NAME
    path.write_bytes(b"\xfebin" + content)
    pieces = len(content) // (MIB // 4)
    middle, end = len(content) // 2, len(content)
    first, reads = reads_of(path, middle, monkeypatch)
    assert reads >= pieces > 10
    another_process()
    assert reads_of(path, middle, monkeypatch)[0] == first
    assert reads_of(path, middle, monkeypatch)[1] <= NEARBY_READS
    with path.open("ab") as file:
        file.write(content)
    another_process()
    last, reads = reads_of(path, 2 * end, monkeypatch)
    assert pieces <= reads <= pieces + 2 * NEARBY_READS
    for entry in each(list(remembered.iterdir())):
        entry.write_bytes(entry.read_bytes()[:-1] + b"\xff")
    another_process()
    assert reads_of(path, 2 * end, monkeypatch)[0] == last
    another_process()
    assert reads_of(path, 2 * end, monkeypatch)[1] <= NEARBY_READS


def test_grown_file_is_followed_once_more(
    tmp_path: Path, remembered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = forged_log(400)[4:] * 200
    path = tmp_path / NAME
    path.write_bytes(b"\xfebin" + content)
    reads_of(path, len(content), monkeypatch)
    with path.open("ab") as file:
        file.write(content)
    last, _ = reads_of(path, 2 * len(content), monkeypatch)
    assert reads_of(path, 2 * len(content), monkeypatch)[0] == last
    assert reads_of(path, 2 * len(content), monkeypatch)[1] <= NEARBY_READS


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_full_disk_for_the_boundary_cache_stops_nothing(
    tmp_path: Path, remembered: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = write_forged_log(tmp_path, 4000)
    starts = {event.offset for event in events(path.read_bytes())}

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(event_starts.os, call, fail)
        assert event_starts.last_event_start(path, 4, 9000) in starts
    another_process()
    assert event_starts.last_event_start(path, 4, 9000) in starts


def test_unreadable_file_is_named(tmp_path: Path, remembered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_forged_log(tmp_path, 4000)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(event_starts.os, "preadv", fail)
    with pytest.raises(SourceMissing, match="cannot be read"):
        event_starts.last_event_start(path, 4, 9000)


def test_cache_folder_writable_by_other_users_is_not_trusted(tmp_path: Path, remembered: Path) -> None:
    remembered.mkdir(mode=0o777)
    remembered.chmod(0o777)
    path = write_forged_log(tmp_path, 4000)
    starts = {event.offset for event in events(path.read_bytes())}
    assert event_starts.last_event_start(path, 4, 9000) in starts
    assert not list(remembered.iterdir())


def test_headers_are_followed_past_missing_bytes() -> None:
    content = forged_log(4000)
    starts = [event.offset for event in events(content)]
    for here, following in each(list(pairwise(starts))):
        assert follow_events(content[here : here + 19], here, following - 1) == (here, following)


def test_position_of_a_loss_is_an_event(tmp_path: Path) -> None:
    path = write_forged_log(tmp_path, 4000)
    source = FileSource(SourceOptions.parse(str(path)))
    starts = {event.offset for event in events(path.read_bytes())}
    for cut in each(range(5, path.stat().st_size, 97)):
        assert source.align(ByteRange(0, NAME, cut, None, aligned=False)).start in starts
