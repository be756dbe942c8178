# SPDX-License-Identifier: Apache-2.0
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from penstock._native import Decoder, read_segment_head, segment_head
from penstock.errors import (
    ChecksumMismatch,
    EventMalformed,
    FileTruncated,
    MagicInvalid,
    OptionInvalid,
    PositionInvalid,
    StreamError,
)
from penstock.source.source import SourceOptions, open_source
from tests.support.binlog.block_cutting import SMALL_LOGS, cut, flavor_of
from tests.support.binlog.decoding import Row, decode
from tests.support.binlog.events import (
    FLAG_ARTIFICIAL,
    MARIADB_GTID_LIST,
    PREVIOUS_GTIDS,
    ROTATE,
    assemble,
    events,
    first_event_end,
)
from tests.support.suite.nonempty import each

FILE = "mysql-bin.000007"
ROWS_QUERY = 29
UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
SETS = {
    "mysql": ["", f"{UUID}:1-5:8", f"{UUID}:1:blue:2-3,80beb49b-e55d-11f1-9e5b-02fc00000001:7"],
    "mariadb": ["", "0-1-5", "0-1-5,7-4294967295-18446744073709551615"],
}


@pytest.fixture(params=SMALL_LOGS, ids=lambda path: path.stem)
def log(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def description_of(content: bytes) -> bytes:
    return content[4 : first_event_end(content)]


def test_head_round_trips_its_fields(log: Path) -> None:
    content, flavor = log.read_bytes(), flavor_of(log)
    description = description_of(content)
    for gtid_set in SETS[flavor]:
        head = segment_head(description, FILE, 9 << 32, gtid_set, flavor, 77, 1_700_000_000)
        assert read_segment_head(head) == (len(head), FILE, 9 << 32, gtid_set, description)
        assert read_segment_head(head + content[500:])[0] == len(head)
        assert head[4 : 4 + len(description)] == description
        listed = PREVIOUS_GTIDS if flavor == "mysql" else MARIADB_GTID_LIST
        made_up = list(events(head))[1:]
        assert [event.code for event in made_up] == [ROTATE, listed]
        for event in made_up:
            assert (event.timestamp, event.server_id, event.end_position) == (1_700_000_000, 77, 0)
            assert event.flags == FLAG_ARTIFICIAL
            assert event.encode() == head[event.offset : event.offset + event.size]


def test_head_of_a_log_without_checksums_has_no_checksum() -> None:
    log_events = next(events(SMALL_LOGS[-1].read_bytes()))
    description = replace(log_events, body=log_events.body[:-1] + b"\x00").encode()
    head = segment_head(description, FILE, 4, "", "mysql", 1, 2)
    assert read_segment_head(head)[:4] == (len(head), FILE, 4, "")
    assert len(head) == 4 + len(description) + (19 + 8 + len(FILE)) + (19 + 8)


def rows_of(content: bytes) -> list[Row]:
    rows = decode(content, "binlog.000001").rows()
    for row in rows:
        # Offsets refer to the original file.
        del row["_commit_version"], row["_metadata"]
    return rows


def is_prepared(content: bytes) -> bool:
    """Return whether these bytes contain an XA PREPARE but not the end of its transaction. The rows precede
    the bytes.
    """
    decoder = Decoder(instance="test", file=FILE, statements=False, time_from_us=1 << 62)
    decoder.feed(content)
    return decoder.prepared_place("X'78',X'',1") is not None


def test_decoder_reads_a_segment_as_a_file(log: Path) -> None:
    content, flavor = log.read_bytes(), flavor_of(log)
    part = cut(content, flavor=flavor, block_bytes=100).parts[0]
    whole = rows_of(content)
    for record in part.records:
        if record.event_index or is_prepared(content[: record.start]):
            continue
        before = cut(content[: record.start], flavor=flavor).cutter.gtid_set
        base = record.start
        head = segment_head(part.format_description, FILE, base, before, flavor, 1, 2)
        rows = rows_of(head + content[base:])
        assert rows == whole[len(whole) - len(rows) :]
        assert decode(head + content[base:], FILE).gtid_set == cut(content, flavor=flavor).cutter.gtid_set
    assert rows_of(
        segment_head(part.format_description, FILE, part.offset, "", flavor, 1, 2) + part.content
    ) == (whole)


def test_segment_is_not_split_because_no_event_can_be_located_from_its_middle(tmp_path: Path) -> None:
    content = SMALL_LOGS[-1].read_bytes()
    part = cut(content).parts[0]
    log_events = list(events(content))
    long = replace(log_events[1], code=ROWS_QUERY, body=bytes(20 << 20))
    head = segment_head(part.format_description, FILE, part.offset, "", "mysql", 1, 2)
    for name, start, splits in (("plain-bin.000001", content[: part.offset], True), (FILE, head, False)):
        path = tmp_path / name
        path.write_bytes(start + assemble([long, *log_events[1:]], part.offset))
        source = open_source(SourceOptions.parse(path))
        assert (len(source.split(ranges_min=2)) > 1) == splits
        # A source below the minimum size is not checked.
        assert source.extents()[0].splittable


def test_rotation_elsewhere_in_a_file_allows_no_gaps() -> None:
    content = SMALL_LOGS[-1].read_bytes()
    part = cut(content).parts[0]
    head = segment_head(part.format_description, FILE, part.offset, "", "mysql", 1, 2)
    made_up = head[first_event_end(content) :]
    first = next(event for event in events(content) if event.offset > first_event_end(content))
    moved = content[: first.offset] + made_up + content[first.offset :]
    with pytest.raises(StreamError):
        decode(moved, FILE)


def test_short_head_is_truncated() -> None:
    head = segment_head(description_of(SMALL_LOGS[-1].read_bytes()), FILE, 4, SETS["mysql"][2], "mysql", 1, 2)
    for length in each(range(len(head))):
        with pytest.raises(FileTruncated):
            read_segment_head(head[:length])


def test_damaged_head_is_detected() -> None:
    head = segment_head(description_of(SMALL_LOGS[-1].read_bytes()), FILE, 4, SETS["mysql"][1], "mysql", 1, 2)
    for at in range(4, len(head)):
        if at == 4 + 17:
            # The first flag is set while the file is in use. The checksum does not cover it.
            continue
        damaged = bytearray(head)
        damaged[at] ^= 0x10
        with pytest.raises(StreamError):
            read_segment_head(damaged)
    with pytest.raises(ChecksumMismatch):
        read_segment_head(head[:-1] + bytes([head[-1] ^ 1]))
    with pytest.raises(MagicInvalid):
        read_segment_head(b"\x00" + head[1:])


def test_binlog_file_is_not_a_segment(log: Path) -> None:
    with pytest.raises(EventMalformed, match="no segment"):
        read_segment_head(log.read_bytes())


def test_head_that_does_not_fit_the_flavor_is_refused() -> None:
    mysql = description_of(SMALL_LOGS[-1].read_bytes())
    mariadb = description_of(SMALL_LOGS[0].read_bytes())
    for description, gtid_set, flavor, kind in (
        (mysql, "0-1-5", "mysql", PositionInvalid),
        (mariadb, f"{UUID}:1", "mariadb", PositionInvalid),
        (mysql, "", "mariadb", EventMalformed),
        (mysql + b"\x00", "", "mysql", EventMalformed),
        (mysql[:-1], "", "mysql", FileTruncated),
        (b"", "", "mysql", FileTruncated),
        (mysql, "", "oracle", OptionInvalid),
        (mysql, "nonsense", "mysql", OptionInvalid),
    ):
        with pytest.raises(kind):
            segment_head(description, FILE, 4, gtid_set, flavor, 1, 2)


def test_format_description_marked_as_in_use_is_accepted_unchanged() -> None:
    description = bytearray(description_of(SMALL_LOGS[-1].read_bytes()))
    description[17] ^= 1
    head = segment_head(description, FILE, 4, "", "mysql", 1, 2)
    assert read_segment_head(head)[4] == description
    assert struct.unpack_from("<I", description, len(description) - 4)[0] == zlib.crc32(
        bytes(description[:17]) + bytes([description[17] & 0xFE]) + bytes(description[18:-4])
    )
