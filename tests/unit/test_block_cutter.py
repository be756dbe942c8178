# SPDX-License-Identifier: Apache-2.0
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock._native import BlockCutter, Chunk
from penstock.errors import (
    ChecksumMismatch,
    EventMalformed,
    EventUnknown,
    LogEncrypted,
    MagicInvalid,
    OptionInvalid,
    SequenceGap,
    StreamError,
    TableMapMissing,
)
from tests.support.binlog.block_cutting import (
    BEGINS,
    CONSECUTIVE,
    ENDS,
    SMALL_LOGS,
    STATEMENT,
    UNCOUNTED,
    Record,
    cut,
    flavor_of,
)
from tests.support.binlog.decoding import decode
from tests.support.binlog.events import (
    FLAG_IGNORABLE,
    FORMAT_DESCRIPTION,
    GTID,
    PREVIOUS_GTIDS,
    QUERY,
    START_ENCRYPTION,
    TABLE_MAP,
    TRANSACTION_PAYLOAD,
    WRITE_ROWS,
    Event,
    assemble,
    events,
    first_event_end,
    query_body,
)
from tests.support.suite.nonempty import each

FILE = "binlog.000001"
LINE = 1 << 32


@pytest.fixture(params=SMALL_LOGS, ids=lambda path: path.stem)
def log(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def transactions_of(content: bytes) -> list[dict[str, Any]]:
    """Return the decoder's view of a log's transactions."""
    decoded = decode(content, FILE, emit="transactions")
    return [row for batches in decoded.batches.values() for batch in batches for row in batch.to_pylist()]


def log_named(name: str) -> bytes:
    return next(path for path in SMALL_LOGS if path.stem == name).read_bytes()


def with_events(content: bytes, change: Any) -> bytes:
    """Return a log with changed events and valid lengths, positions and checksums."""
    return assemble(change(list(events(content))))


# --- Bytes and transactions ------------------------------------------------------------------


def test_every_byte_after_the_format_description_is_returned_unchanged(log: Path) -> None:
    content = log.read_bytes()
    (part,) = cut(content, flavor=flavor_of(log)).parts
    assert (part.file, part.offset) == (FILE, first_event_end(content))
    assert content == b"\xfebin" + part.format_description + part.content
    assert part.end == part.boundary == len(content)


def test_block_boundaries_do_not_depend_on_the_size_of_reads(log: Path) -> None:
    content = log.read_bytes()
    whole = cut(content, block_bytes=300)
    for pieces in (1, 3, 19, 64, 1000):
        part = cut(content, pieces, block_bytes=300).parts
        assert part == whole.parts, pieces


def test_block_transactions_equal_those_of_the_decoder(log: Path) -> None:
    content = log.read_bytes()
    expected = transactions_of(content)
    cutting = cut(content)
    cutter = cutting.cutter
    assert cutter.transactions == len(expected)
    assert cutter.changes == sum(row["rows"] for row in expected)
    assert cutter.gtid_set == decode(content, FILE, emit="transactions").gtid_set
    assert cutter.last_gtid == expected[-1]["gtid"]
    assert cutter.last_time_us == microseconds(expected[-1])
    assert cutter.time_max_us == max(map(microseconds, expected))


def microseconds(row: dict[str, Any]) -> int:
    return int(row["commit_timestamp"].timestamp() * 1_000_000 + 0.5)


def test_block_of_each_transaction_agrees_with_the_decoder(log: Path) -> None:
    content = log.read_bytes()
    # Blocks are about as large as most events; transactions smaller than sixteen blocks are never cut.
    (part,) = cut(content, block_bytes=1000).parts
    by_start = {row["offset"]: row for row in transactions_of(content)}
    time_max_us = 0
    end = part.offset
    for record in part.records:
        assert record.start == end
        end = record.end
        inside = [row for start, row in by_start.items() if record.start <= start < record.end]
        assert record.transactions == len(inside)
        if not inside:
            # The event that ends the file belongs to no transaction.
            assert (record.events, record.last_boundary, record.number) == (1, 0, 0)
            continue
        first = inside[0]
        assert record.changes == sum(row["rows"] for row in inside)
        assert record.time_us == microseconds(first)
        assert record.server_id == first["server_id"]
        assert gtid_of(record, first["gtid"]) == first["gtid"]
        assert record.last_boundary == inside[-1]["end_offset"]
        time_max_us = max(time_max_us, *map(microseconds, inside))
        assert record.time_max_us == time_max_us
        assert record.flags & (BEGINS | ENDS) == BEGINS | ENDS
        assert (record.epoch, record.file_number, record.event_index) == (0, 1, 0)
        for table in {table for row in inside for table in row["tables"].split(",") if table}:
            assert record.concerns(table)
        has_statement = any(row["statement"] is not None for row in inside)
        assert bool(record.flags & STATEMENT) == has_statement
        assert (record.tables == (1 << 64) - 1) == has_statement
    assert end == len(content)


def gtid_of(record: Record, like: str) -> str:
    """Return a record's GTID in the format of `like`. Tags come from `like`, because records do not store
    them.
    """
    if "-" in like and ":" not in like:
        domain, server = struct.unpack_from("<II", record.source)
        return f"{domain}-{server}-{record.number}"
    source = record.source.hex()
    parts = [source[:8], source[8:12], source[12:16], source[16:20], source[20:], *like.split(":")[1:-1]]
    return "-".join(parts[:5]) + "".join(f":{tag}" for tag in parts[5:]) + f":{record.number}"


def test_consecutive_gtid_numbers_are_marked_and_tagged_gtids_are_not() -> None:
    content = log_named("mysql-9.7-2")
    (plain,) = cut(content).parts[0].records
    numbers = [int(row["gtid"].rpartition(":")[2]) for row in transactions_of(content)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert (plain.number, plain.flags & CONSECUTIVE) == (numbers[0], CONSECUTIVE)
    (tagged,) = cut(log_named("mysql-9.7-6")).parts[0].records
    assert not tagged.flags & CONSECUTIVE
    gap = with_events(content, lambda log_events: without_transaction(log_events, 3))
    (record,) = cut(gap).parts[0].records
    assert not record.flags & CONSECUTIVE


def without_transaction(log_events: list[Event], number: int) -> list[Event]:
    starts = [index for index, event in enumerate(log_events) if event.code == GTID]
    return log_events[: starts[number]] + log_events[starts[number + 1] :]


def test_transaction_is_counted_only_when_it_is_complete() -> None:
    content = log_named("mysql-9.7-2")
    rows = transactions_of(content)
    third = rows[2]
    cutting = cut(content[: third["end_offset"] - 1], gtid_set="")
    cutter = cutting.cutter
    assert cutter.in_transaction
    assert cutter.boundary == third["offset"] < cutter.data_end
    assert not cutter.gtid_set.endswith(third["gtid"].rpartition(":")[2])
    assert cutter.last_gtid == rows[1]["gtid"]
    assert cutting.parts[0].records[-1].flags & ENDS == 0


def test_block_time_never_decreases_and_continues_after_a_restart() -> None:
    content = log_named("mysql-9.7-2")
    later = 4_000_000_000_000_000
    part = cut(content, block_bytes=1, time_max_us=later).parts[0]
    assert {record.time_max_us for record in part.records} == {later}


# --- Blocks ----------------------------------------------------------------------------------


def test_block_ends_at_the_first_boundary_after_its_size_limit() -> None:
    content = log_named("mysql-9.7-2")
    boundaries = [row["end_offset"] for row in transactions_of(content)]
    for size in (300, 700, 1500):
        # Transactions stay below sixteen blocks, so none is cut.
        for record in each(cut(content, block_bytes=size).parts[0].records[:-1]):
            assert record.end == min(end for end in boundaries if end - record.start >= size)


def test_transaction_of_many_blocks_is_cut_between_counted_events() -> None:
    content = log_named("mysql-9.7-1")
    row = max(transactions_of(content), key=lambda row: row["events"])
    size = (row["end_offset"] - row["offset"]) // 40
    records = cut(content, block_bytes=size).parts[0].records
    inside = [record for record in records if row["offset"] < record.start < row["end_offset"]]
    assert inside
    starts = [event.offset for event in events(content) if row["offset"] <= event.offset < row["end_offset"]]
    for record in inside:
        assert record.event_index == starts.index(record.start)
        assert not record.flags & BEGINS
        assert gtid_of(record, row["gtid"]) == row["gtid"]
        assert record.time_us == microseconds(row)
    first = next(record for record in records if record.end == inside[0].start)
    assert not first.flags & ENDS
    assert sum(record.transactions for record in records) == len(transactions_of(content))


def test_open_block_can_be_inspected_and_closed() -> None:
    content = log_named("mysql-9.7-2")
    cutter = BlockCutter(epoch=3, file=FILE, offset=0, live=False, flavor="mysql")
    assert cutter.open_record() is None
    used = cutter.feed(content)
    cutter.take_file()
    cutter.feed(memoryview(content)[used:])
    looked_at = cutter.open_record()
    assert cutter.take_records() == b""
    cutter.close_block()
    assert cutter.take_records() == looked_at
    assert cutter.open_record() is None
    cutter.close_block()
    assert cutter.take_records() == b""


def test_statements_are_returned_with_their_positions(log: Path) -> None:
    content = log.read_bytes()
    part = cut(content).parts[0]
    decoded = decode(content, FILE)
    expected = [
        (
            statement.text,
            statement.database,
            int(statement.position.rpartition(":")[2]),
            int(statement.end_position.rpartition(":")[2]),
            statement.session,
        )
        for statement in decoded.statements
    ]
    assert part.statements == expected
    assert not cut(content, statements=False).parts[0].statements


def test_unknown_statement_kinds_are_returned_and_row_changes_are_not() -> None:
    logged = next(events(next(log for log in SMALL_LOGS if log.stem == "mysql-9.7-1").read_bytes()))
    texts = ("INSERT INTO t VALUES (1)", "EVOLVE TABLE t", "SELECT f(1)", "CREATE TABLE t (id INT)")
    parts = [Event(0, QUERY, 1, 0, 0, query_body(text, "shop")) for text in texts]
    (part,) = cut(assemble([logged, *parts])).parts
    assert [statement[0] for statement in part.statements] == ["EVOLVE TABLE t", "CREATE TABLE t (id INT)"]


def test_rows_of_an_unknown_type_are_kept_and_marked_as_uncounted() -> None:
    def strange(log_events: list[Event]) -> list[Event]:
        at = next(index for index, event in enumerate(log_events) if event.code == TABLE_MAP)
        body = bytearray(log_events[at].body)
        types = 8 + 1 + body[8] + 1
        types += 1 + body[types] + 1 + 1
        body[types] = 99
        log_events[at] = replace(log_events[at], body=bytes(body))
        return log_events

    content = with_events(log_named("mysql-9.7-2"), strange)
    (part,) = cut(content).parts
    (record,) = part.records
    assert part.content == content[part.offset :]
    assert record.flags & UNCOUNTED
    assert record.tables == (1 << 64) - 1
    assert record.transactions == len(transactions_of(log_named("mysql-9.7-2")))


def test_payload_that_does_not_decompress_is_kept_as_the_rest_of_its_transaction() -> None:
    whole = log_named("mysql-9.7-4")

    def spoiled(log_events: list[Event]) -> list[Event]:
        at = next(index for index, event in enumerate(log_events) if event.code == TRANSACTION_PAYLOAD)
        body = log_events[at].body
        log_events[at] = replace(log_events[at], body=body[:-9] + bytes(9))
        return log_events

    content = with_events(whole, spoiled)
    cutting = cut(content)
    (part,) = cutting.parts
    assert part.boundary == len(content)
    assert part.content == content[part.offset :]
    assert part.records[0].flags & UNCOUNTED
    assert cutting.cutter.gtid_set == cut(whole).cutter.gtid_set


# --- Chunks ----------------------------------------------------------------------------------


def chunk_of(content: bytes) -> Chunk:
    cutter = BlockCutter(epoch=0, file=FILE, offset=0, live=False, flavor="mysql")
    used = cutter.feed(content)
    cutter.take_file()
    cutter.feed(memoryview(content)[used:])
    return cutter.take_data()


def test_chunk_is_read_only_and_outlives_its_cutter() -> None:
    content = log_named("mysql-9.7-2")
    chunk = chunk_of(content)
    view = memoryview(chunk)
    assert view.readonly
    assert view.contiguous
    assert view.format == "B"
    assert view == content[first_event_end(content) :]
    assert memoryview(chunk) == view
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(TypeError):
        memoryview(chunk).cast("B")[:1] = b"x"
    with pytest.raises(TypeError, match="read-write"):
        struct.pack_into("<I", chunk, 0, 1)
    with pytest.raises(TypeError):
        Chunk()
    part = view[10:20]
    del chunk, view
    again = [chunk_of(content) for _ in range(3)]
    assert part == content[first_event_end(content) :][10:20]
    assert len({bytes(chunk) for chunk in again}) == 1


def test_empty_read_is_an_empty_chunk() -> None:
    cutter = BlockCutter(epoch=0, file=FILE, offset=4, live=True, flavor="mysql")
    chunk = cutter.take_data()
    assert (len(chunk), bytes(chunk)) == (0, b"")
    assert not chunk


def test_chunks_keep_their_bytes_while_the_cutter_reuses_its_buffers() -> None:
    body = bytes(range(256)) * 4
    head, tail = log_named("mysql-9.7-2"), 4000
    first = [event for event in events(head) if event.code in (FORMAT_DESCRIPTION, PREVIOUS_GTIDS)]
    annotations = [replace(first[-1], code=29, body=bytes([number % 256]) + body) for number in range(tail)]
    content = assemble([*first, *annotations])
    cutter = BlockCutter(epoch=0, file=FILE, offset=0, live=False, flavor="mysql")
    used = cutter.feed(content)
    cutter.take_file()
    kept, position = [], used
    for number in range(200):
        position += cutter.feed(memoryview(content)[position : position + 190_000])
        start = cutter.data_start
        chunk = cutter.take_data()
        # Release every second chunk, so that its memory is reused.
        if number % 2:
            kept.append((start, chunk))
        if position == len(content):
            break
    assert position == len(content)
    for start, chunk in kept:
        assert bytes(chunk) == content[start : start + len(chunk)]


# --- Places ----------------------------------------------------------------------------------


def test_block_positions_continue_past_four_gibibytes() -> None:
    content = log_named("mysql-9.7-2")
    head = content[: first_event_end(content)]
    log_events = list(events(content))
    first = next(index for index, event in enumerate(log_events) if event.code == GTID)
    start = LINE - 1000
    tail = assemble(log_events[first:], start)
    (part,) = cut(tail, 100, offset=start, head=head, block_bytes=200).parts
    assert part.content == tail
    assert (part.offset, part.end, part.boundary) == (start, start + len(tail), start + len(tail))
    assert part.records[0].start == start
    assert all(record.end == other.start for record, other in pairwise(part.records))


def test_body_from_the_middle_of_a_file_needs_its_head() -> None:
    content = log_named("mariadb-10.11-2")
    head = content[: first_event_end(content)]
    rows = transactions_of(content)
    start = rows[3]["offset"]
    options = {"offset": start, "flavor": "mariadb", "block_bytes": 1}
    (part,) = cut(content[start:], head=head, **options).parts
    assert part.content == content[start:]
    whole = cut(content, flavor="mariadb", block_bytes=1).parts[0].records
    assert [record.start for record in part.records] == [
        record.start for record in whole if record.start >= start
    ]
    with pytest.raises(OptionInvalid):
        cut(content[start:], **options)


# --- Damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mysql-9.7-2", "mariadb-10.11-2", "mariadb-11.8-2"])
def test_flipped_bit_is_detected_and_earlier_bytes_are_kept(name: str) -> None:
    content = log_named(name)
    base = first_event_end(content)
    for event in each(event for event in events(content) if event.code != FORMAT_DESCRIPTION):
        for at in (event.offset, event.offset + 4, event.offset + 13, event.offset + event.size - 1):
            damaged = bytearray(content)
            damaged[at] ^= 0x04
            cutter = BlockCutter(epoch=0, file=FILE, offset=0, live=False, flavor=name.split("-")[0])
            used = cutter.feed(damaged)
            cutter.take_file()
            with pytest.raises(ChecksumMismatch) as raised:
                cutter.feed(memoryview(damaged)[used:])
            assert raised.value.position == f"{FILE}:{event.offset}"
            assert bytes(cutter.take_data()) == content[base : event.offset]
            with pytest.raises(ChecksumMismatch):
                cutter.feed(b"")


def failure(content: bytes, **options: Any) -> StreamError:
    with pytest.raises(StreamError) as raised:
        cut(content, **options)
    return raised.value


def test_inconsistent_structure_is_refused_by_name_and_position() -> None:
    content = log_named("mysql-9.7-2")
    log_events = list(events(content))
    gtids = [index for index, event in enumerate(log_events) if event.code == GTID]
    map_at = next(index for index, event in enumerate(log_events) if event.code == TABLE_MAP)
    doubled = assemble([*log_events[: gtids[1]], log_events[gtids[1]], *log_events[gtids[1] :]])
    unannounced = assemble([event for event in log_events if event.code != TABLE_MAP])
    unknown = assemble(
        [*log_events[:map_at], replace(log_events[map_at], code=99), *log_events[map_at + 1 :]]
    )
    short = bytearray(content)
    struct.pack_into("<I", short, log_events[gtids[1]].offset + 9, 5)
    missing = content[: log_events[2].offset] + content[log_events[2].offset + log_events[2].size :]
    rows = next(event for event in log_events if event.code == WRITE_ROWS)
    headless = assemble([log_events[0], rows])
    for damaged, kind, offset in (
        (doubled, EventMalformed, log_events[gtids[1]].offset + log_events[gtids[1]].size),
        (unannounced, TableMapMissing, None),
        (unknown, EventUnknown, log_events[map_at].offset),
        (bytes(short), EventMalformed, log_events[gtids[1]].offset),
        (missing, SequenceGap, log_events[2].offset),
        (headless, EventMalformed, first_event_end(content)),
        (b"\xfexin" + content[4:], MagicInvalid, 0),
        (b"\xfdbin" + content[4:], LogEncrypted, 0),
    ):
        error = failure(damaged)
        assert type(error) is kind
        if offset is not None:
            assert error.position == f"{FILE}:{offset}"


def test_encrypted_rest_of_a_file_stops_the_cutter() -> None:
    content = log_named("mariadb-10.11-2")
    log_events = list(events(content))
    encrypted = assemble([log_events[0], replace(log_events[1], code=START_ENCRYPTION), *log_events[1:]])
    assert type(failure(encrypted, flavor="mariadb")) is LogEncrypted


def test_encryption_mark_sent_by_a_server_is_ignored() -> None:
    content = log_named("mariadb-10.11-2")
    log_events = list(events(content))
    sent = replace(log_events[1], code=START_ENCRYPTION, flags=FLAG_IGNORABLE, body=b"\x01" + bytes(16))
    kept = assemble([log_events[0], sent, *log_events[1:]])
    counted = cut(assemble(log_events), flavor="mariadb").cutter.transactions
    assert counted > 0
    assert cut(kept, flavor="mariadb").cutter.transactions == counted
    ids = [row["id"] for row in decode(assemble(log_events), file=FILE).rows("fuzzed.t")]
    assert ids
    assert [row["id"] for row in decode(kept, file=FILE).rows("fuzzed.t")] == ids


def test_unknown_flavor_or_invalid_offset_is_refused() -> None:
    for options in ({"flavor": "oracle"}, {"offset": 1 << 63}, {"gtid_set": "nonsense"}):
        given: dict[str, Any] = {"epoch": 0, "file": FILE, "offset": 4, "live": True, "flavor": "mysql"}
        with pytest.raises(OptionInvalid):
            BlockCutter(**(given | options))
