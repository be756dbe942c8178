# SPDX-License-Identifier: Apache-2.0
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock._native import BlockCutter
from penstock.errors import ChecksumMismatch, ConnectionLost, EventMalformed, LimitExceeded, SequenceGap
from tests.support.binlog.block_cutting import BEGINS, ENDS, SMALL_LOGS, Cutting, cut, flavor_of, framed
from tests.support.binlog.events import (
    ANNOTATE,
    FLAG_ARTIFICIAL,
    FORMAT_DESCRIPTION,
    GTID,
    HEARTBEAT,
    ROTATE,
    TABLE_MAP,
    WRITE_ROWS,
    XID,
    Event,
    events,
    first_event_end,
)
from tests.support.suite.nonempty import each

FILE = "binlog.000001"
HEARTBEAT_V2 = 41
MEBIBYTE = 1 << 20


@pytest.fixture(params=SMALL_LOGS, ids=lambda path: path.stem)
def log(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def log_named(name: str) -> bytes:
    return next(path for path in SMALL_LOGS if path.stem == name).read_bytes()


def made_up(code: int, body: bytes, end_position: int = 0) -> bytes:
    return Event(0, code, 1, end_position, FLAG_ARTIFICIAL, body).encode()


def rotate(file: str, offset: int) -> bytes:
    return made_up(ROTATE, struct.pack("<Q", offset) + file.encode())


def as_sent(content: bytes, file: str = FILE, offset: int = 4) -> list[bytes]:
    """Return the events that a server sends for a file, from an offset on."""
    log_events = list(events(content))
    description = content[4 : first_event_end(content)]
    if offset > 4:
        description = replace(log_events[0], end_position=0).encode()
    rest = [
        content[event.offset : event.offset + event.size]
        for event in log_events[1:]
        if event.offset >= offset
    ]
    return [rotate(file, offset), description, *rest]


def live(**options: Any) -> Cutting:
    return Cutting(**({"live": True, "offset": 4} | options))


def in_pieces(sent: bytes, size: int) -> Iterator[bytes]:
    return (sent[at : at + size] for at in range(0, len(sent), size))


# --- Files -----------------------------------------------------------------------------------


def test_dump_equals_the_file_for_any_packet_sizes(log: Path) -> None:
    content = log.read_bytes()
    expected = cut(content, flavor=flavor_of(log), block_bytes=300).parts
    sent = b"".join(framed(as_sent(content)))
    for size in (1, 5, 23, 1000, MEBIBYTE):
        assert live(block_bytes=300).packets(in_pieces(sent, size)).close().parts == expected, size
    bare = b"".join(as_sent(content))
    for size in (1, 1000):
        assert live(block_bytes=300).events(in_pieces(bare, size)).close().parts == expected


def test_dump_from_the_middle_of_a_file_starts_there() -> None:
    content = log_named("mysql-9.7-2")
    start = [event.offset for event in events(content) if event.code == GTID][3]
    cutting = live(offset=start).packets(framed(as_sent(content, offset=start))).close()
    (part,) = cutting.parts
    assert part.offset == start
    assert part.content == content[start:]
    # The format description is kept as sent: in a dump that starts inside a file, its end position is 0.
    assert part.format_description != content[4 : first_event_end(content)]
    assert len(part.format_description) == first_event_end(content) - 4


def test_next_file_waits_until_the_previous_one_was_consumed() -> None:
    first, second = log_named("mysql-9.7-2"), log_named("mysql-9.7-3")
    cutter = BlockCutter(epoch=7, file=FILE, offset=4, live=True, flavor="mysql")
    sent = b"".join(framed([*as_sent(first), *as_sent(second, "binlog.000002")]))
    used = cutter.feed_packets(sent)
    assert (cutter.state, cutter.file, cutter.data_file) == ("file", FILE, FILE)
    with pytest.raises(AssertionError):
        cutter.take_hole()
    cutter.take_file()
    with pytest.raises(AssertionError):
        cutter.take_file()
    used += cutter.feed_packets(sent[used:])
    assert (cutter.state, cutter.file, cutter.offset) == ("file", "binlog.000002", first_event_end(second))
    assert cutter.format_description == second[4 : first_event_end(second)]
    assert (cutter.data_file, cutter.data_end, cutter.boundary) == (FILE, len(first), len(first))
    assert cutter.feed_packets(sent[used:]) == 0
    with pytest.raises(AssertionError):
        cutter.take_file()
    assert bytes(cutter.take_data()) == first[first_event_end(first) :]
    with pytest.raises(AssertionError):
        cutter.take_file()
    assert len(cutter.take_records()) == 128
    before = cutter.gtid_set
    cutter.take_file()
    assert (cutter.data_file, cutter.data_start, cutter.boundary) == ("binlog.000002", *[cutter.offset] * 2)
    assert cutter.gtid_set == before
    assert cutter.feed_packets(sent[used:]) == len(sent) - used
    assert bytes(cutter.take_data()) == second[first_event_end(second) :]


def test_transaction_left_open_by_a_dead_server_ends_with_its_file() -> None:
    content = log_named("mysql-9.7-2")
    log_events = list(events(content))
    last = max(index for index, event in enumerate(log_events) if event.code == XID)
    torn = as_sent(content)[: last + 1]
    cutting = live().packets(framed([*torn, *as_sent(content, "binlog.000002")])).close()
    first, other = cutting.parts
    start = max(event.offset for event in log_events[:last] if event.code == GTID)
    assert first.boundary == start < first.end == log_events[last].offset
    assert not first.records[-1].flags & ENDS
    assert other.content == content[other.offset :]
    assert [record.file_number for record in first.records + other.records] == [1, 2]


# --- Events that are not in the file ------------------------------------------------------------


def test_heartbeats_are_reported_and_move_no_position(log: Path) -> None:
    content = log.read_bytes()
    sent = as_sent(content)
    wide = bytes([1, len(FILE)]) + FILE.encode() + bytes([2, 9, 254]) + struct.pack("<Q", 5 << 32) + b"\x00"
    beats = [made_up(HEARTBEAT, FILE.encode(), len(content)), made_up(HEARTBEAT_V2, wide)]
    mixed = [*sent[:2], beats[0]]
    for event in sent[2:]:
        mixed += [event, *beats]
    cutting = live().packets(framed(mixed)).close()
    assert cutting.parts == cut(content, flavor=flavor_of(log)).parts
    assert cutting.cutter.heartbeats == 1 + 2 * len(sent[2:])
    assert cutting.cutter.last_heartbeat == (FILE, 5 << 32)
    early = live().packets(framed([*sent, beats[0]]))
    assert early.cutter.last_heartbeat == (FILE, len(content))


def test_events_omitted_by_a_server_leave_a_gap() -> None:
    content = log_named("mariadb-10.11-2")
    sent = as_sent(content)
    log_events = list(events(content))
    left_out = [event for event in log_events if event.code == ANNOTATE]
    assert left_out
    kept = [packet for packet in sent if packet[4] != ANNOTATE]
    options = {"flavor": "mariadb", "block_bytes": 1 << 20}
    for size in (1, 77, MEBIBYTE):
        cutting = live(**options).packets(in_pieces(b"".join(framed(kept)), size)).close()
        assert cutting.holes == [(event.offset, event.offset + event.size) for event in left_out]
        (part,) = cutting.parts
        assert bytes(part.content) == b"".join(kept[2:])
        # No block spans a gap; within a transaction, the next block starts after the gap.
        ends = {start for start, _ in cutting.holes}
        assert ends <= {record.end for record in part.records}
        records = {record.start: record for record in part.records}
        for _, end in cutting.holes:
            assert not records[end].flags & BEGINS
            assert records[end].event_index > 0
        assert part.boundary == len(content)
        assert cutting.cutter.gtid_set == cut(content, flavor="mariadb").cutter.gtid_set


def test_decreasing_positions_stop_the_stream() -> None:
    sent = as_sent(log_named("mysql-9.7-2"))
    with pytest.raises(SequenceGap):
        live().packets(framed([*sent[:8], sent[4], *sent[8:]]))


def test_event_before_the_format_description_stops_the_stream() -> None:
    sent = as_sent(log_named("mysql-9.7-2"))
    for events_sent in ([sent[0], *sent[2:]], sent[2:], [*sent[:5], rotate(FILE, 900), *sent[5:]]):
        with pytest.raises(EventMalformed):
            live().packets(framed(events_sent))


def test_flipped_bit_in_a_packet_is_detected() -> None:
    sent = as_sent(log_named("mysql-9.7-2"))
    for at in each(range(2, len(sent))):
        damaged = bytearray(sent[at])
        damaged[-9] ^= 1
        offset = int.from_bytes(sent[at][13:17], "little") - len(sent[at])
        with pytest.raises(ChecksumMismatch) as raised:
            live().packets(framed([*sent[:at], bytes(damaged)]))
        assert raised.value.position == f"{FILE}:{offset}"


# --- Packets ---------------------------------------------------------------------------------


def with_long_event(content: bytes, sizes: list[int]) -> list[bytes]:
    """Return a dump with statements of these event sizes before the first GTID."""
    log_events = list(events(content))
    first = next(index for index, event in enumerate(log_events) if event.code == GTID)
    sent, end = as_sent(content)[: first + 1], log_events[first].offset
    chance = random.Random(5)
    for size in sizes:
        end += size
        body = chance.randbytes(1000) * (size // 1000 + 1)
        sent.append(Event(9, 29, 1, end, 0, body[: size - 23]).encode())
    for event in log_events[first:]:
        end += event.size
        sent.append(replace(event, end_position=end).encode())
    return sent


def test_events_split_over_several_packets_are_joined() -> None:
    # The first packet of an event starts with a marker: an event of the first size fills it, and an empty
    # packet follows.
    sizes = [0xFFFFFF - 1, 40_000_000, 300_000, 0xFFFFFF, 5000]
    sent = with_long_event(log_named("mysql-9.7-2"), sizes)
    stream = b"".join(framed(sent))
    expected = b"".join(sent[2:])
    for size in (200_000, 4 * MEBIBYTE, len(stream)):
        cutter = BlockCutter(epoch=0, file=FILE, offset=4, live=True, flavor="mysql")
        got, at, filled, held_max = bytearray(), 0, 0, 0
        buffer = bytearray(len(stream) if size == len(stream) else 1 << 20)
        while at < len(stream):
            piece = stream[at : at + min(size, len(buffer) - filled)]
            buffer[filled : filled + len(piece)] = piece
            at, filled = at + len(piece), filled + len(piece)
            used = cutter.feed_packets(memoryview(buffer)[:filled])
            if cutter.state == "file":
                cutter.take_file()
                used += cutter.feed_packets(memoryview(buffer)[used:filled])
            buffer[: filled - used] = buffer[used:filled]
            filled -= used
            held_max = max(held_max, filled)
            got += cutter.take_data()
        assert bytes(got) == expected
        # A long packet is consumed as it arrives, so the receiver needs no buffer for the whole packet.
        assert held_max < 300_000


def test_event_length_unlike_its_packet_stops_the_stream() -> None:
    sent = as_sent(log_named("mysql-9.7-2"))
    for wrong in (sent[2][:-1], sent[2] + b"\x00", sent[2][:10], b"", sent[2] + bytes(1 << 24)):
        with pytest.raises((EventMalformed, ChecksumMismatch)):
            live().packets(framed([*sent[:2], wrong]))


def test_oversized_event_is_refused_before_it_is_buffered() -> None:
    sent = as_sent(log_named("mysql-9.7-2"))
    huge = bytearray(sent[2] + bytes(1 << 25))
    struct.pack_into("<I", huge, 9, (1 << 31) + 5)
    cutting = live()
    with pytest.raises(LimitExceeded):
        cutting.packets(in_pieces(b"".join(framed([*sent[:2], bytes(huge)])), MEBIBYTE))
    assert len(cutting.cutter.take_data()) == 0


def test_semi_sync_server_waits_for_acknowledgements() -> None:
    content = log_named("mysql-9.7-2")
    sent = as_sent(content)
    commits = [at for at, event in enumerate(sent) if event[4] == XID]
    cutter = live(semi_sync=True).cutter
    sequence = 1
    for at, event in enumerate(sent):
        wanted = b"\xef\x01" if at in commits else b"\xef\x00"
        (packet,) = framed([event], wanted, sequence)
        sequence += 1
        assert cutter.feed_packets(packet) == len(packet)
        if cutter.state == "file":
            cutter.take_file()
        position = (FILE, cutter.offset) if at in commits else None
        assert cutter.acknowledge == position
        assert cutter.take_acknowledge() == position
        assert cutter.acknowledge is None
    assert bytes(cutter.take_data()) == content[first_event_end(content) :]
    with pytest.raises(EventMalformed):
        live(semi_sync=True).packets(framed(sent))


def test_end_and_refusal_of_a_server_are_reported() -> None:
    sent = as_sent(log_named("mysql-9.7-2"))
    packets = list(framed(sent))
    end = bytes([5, 0, 0, (len(packets) + 1) & 255, 0xFE, 0, 0, 0, 0])
    cutting = live().packets([*packets, end, b"more"])
    assert cutting.cutter.ended
    assert cutting.left == b"more"
    text = b"\xff" + struct.pack("<H", 1236) + b"#HY000purged"
    refusal = len(text).to_bytes(3, "little") + bytes([(len(packets) + 1) & 255]) + text
    cutting = live().packets([*packets, refusal])
    assert cutting.cutter.server_error == (1236, "purged")
    assert not cutting.cutter.ended
    assert cutting.close().parts == live().packets(packets).close().parts


def test_missing_packet_is_reported_as_a_lost_connection() -> None:
    packets = list(framed(as_sent(log_named("mysql-9.7-2"))))
    with pytest.raises(ConnectionLost):
        live().packets([*packets[:5], *packets[6:]])


def test_dump_positions_continue_past_four_gibibytes() -> None:
    content = log_named("mariadb-11.8-2")
    log_events = list(events(content))
    first = next(index for index, event in enumerate(log_events) if event.code == 162)
    start = (1 << 32) - 700
    shift = start - log_events[first].offset
    head = replace(log_events[0], end_position=0).encode()
    moved = [
        replace(event, end_position=event.end_position and event.end_position + shift).encode()
        for event in log_events[first:]
    ]
    assert any(event.end_position == 0 and event.code == TABLE_MAP for event in log_events)
    options = {"offset": start, "flavor": "mariadb", "block_bytes": 100}
    cutting = live(**options).packets(framed([rotate(FILE, start), head, *moved])).close()
    (part,) = cutting.parts
    assert (part.offset, part.end) == (start, start + len(b"".join(moved)))
    assert part.end > 1 << 32
    assert bytes(part.content) == b"".join(moved)
    assert all(record.end == other.start for record, other in pairwise(part.records))


def test_log_without_checksums_is_accepted() -> None:
    content = log_named("mysql-9.7-2")
    log_events = list(events(content))
    description = bytearray(log_events[0].body)
    description[-1] = 0
    bare = [replace(event, checksum=False) for event in log_events[1:]]
    end = 4 + log_events[0].size
    sent = [rotate(FILE, 4), replace(log_events[0], body=bytes(description)).encode()]
    for event in bare:
        end += event.size
        sent.append(replace(event, end_position=end).encode())
    (part,) = live().packets(framed(sent)).close().parts
    assert bytes(part.content) == b"".join(sent[2:])
    assert part.records[0].transactions == cut(content).parts[0].records[0].transactions
    assert {FORMAT_DESCRIPTION, WRITE_ROWS} <= {event.code for event in log_events}
