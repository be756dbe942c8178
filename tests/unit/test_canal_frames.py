# SPDX-License-Identifier: Apache-2.0
import random
import struct
import time

import pytest

from penstock.errors import LimitExceeded, OptionInvalid
from penstock.limits import CANAL_FRAME_BYTES_MAX
from penstock.model import TablePatterns
from penstock.protobuf import varint
from penstock.serve.access import scramble411
from penstock.serve.canal import frames
from penstock.serve.canal.tables import CanalTables, split_filter
from penstock.settings.daemon import ListenSettings
from tests.support.canal.client import PROTO

SEED = bytes(range(1, 9))


def golden(text: str) -> bytes:
    return bytes.fromhex(text)


def content(frame: bytes) -> bytes:
    """Return a frame's content after checking its length."""
    assert struct.unpack(">I", frame[:4])[0] == len(frame) - 4
    return frame[4:]


# --- Golden frames --------------------------------------------------------------------------


def test_sent_frames_equal_canals_byte_for_byte() -> None:
    assert frames.handshake(SEED) == golden("00000010 1001 1801 2a0a 1208 0102030405060708")
    assert frames.ack() == golden("00000004 1001 1803")
    assert frames.ack_error(400, "x") == golden("0000000c 1001 1803 2a06 089003 120178")
    assert frames.no_messages() == golden("00000011 1001 1807 2a0b 08ffffffffffffffffff01")
    # The entries already have field number 2 of Messages. A frame with entries has no version.
    assert frames.messages_head(5, 4) + golden("1202aabb") == golden("0000000a 1807 2a06 0805 1202aabb")


def test_frames_of_the_official_client_are_parsed() -> None:
    token = scramble411(b"canal", SEED)
    assert token == golden("7de44690d8e53782cb61804a2455c284a3bbfb06")
    packet = frames.read_packet(
        content(
            golden("0000003f 1802 2a3b 0a0563616e616c 1228")
            + token.hex().encode()
            + golden("1880dddb01 2080dddb01")
        )
    )
    assert packet.type == frames.PacketType.CLIENTAUTHENTICATION
    credentials = frames.read_client_auth(packet.body)
    assert (credentials.username, credentials.password) == ("canal", token.hex().encode())
    assert (credentials.read_timeout_ms, credentials.write_timeout_ms) == (3_600_000, 3_600_000)
    assert (credentials.destination, credentials.client_id, credentials.filter) == ("", "", "")

    packet = frames.read_packet(
        content(
            golden(
                "00000025 1806 2a21 0a076578616d706c65 12043130303118e807 20ffffffffffffffffff01 2802 3000"
            )
        )
    )
    assert packet.type_name == "GET"
    asked = frames.read_get(packet.body)
    assert asked == frames.Request("example", "1001", fetch_size=1000, timeout=-1, unit=2)

    packet = frames.read_packet(content(golden("00000015 1808 2a11 0a076578616d706c65 120431303031 1801")))
    assert packet.type_name == "CLIENTACK"
    assert frames.read_batch_request(packet.body) == frames.Request("example", "1001", batch_id=1)

    packet = frames.read_packet(content(golden("00000013 180c 2a0f 0a076578616d706c65 120431303031")))
    assert packet.type_name == "CLIENTROLLBACK"
    assert frames.read_batch_request(packet.body) == frames.Request("example", "1001", batch_id=0)


def test_messages_equal_those_of_the_protobuf_library() -> None:
    sub = PROTO["Sub"](destination="d", client_id="7", filter="é\\..*").SerializeToString()
    packet = PROTO["Packet"](magic_number=17, version=1, type=4, compression=1, body=sub)
    read = frames.read_packet(packet.SerializeToString())
    assert (read.type_name, read.compression) == ("SUBSCRIPTION", 1)
    assert frames.read_subscription(read.body) == frames.Request("d", "7", filter="é\\..*")
    get = PROTO["Get"](destination="d", client_id="7", fetch_size=0, timeout=0, unit=-1)
    asked = frames.read_get(get.SerializeToString())
    assert (asked.fetch_size, asked.timeout, asked.unit) == (0, 0, -1)
    unset = frames.read_get(PROTO["Get"](destination="d").SerializeToString())
    assert (unset.timeout, unset.unit, unset.client_id) == (None, None, "")
    # Unknown fields of a later version are skipped: numbers, fixed numbers, bytes.
    strange = golden("f80105 f901 0102030405060708 fa01 0161 fd01 01020304")
    assert frames.read_packet(strange + packet.SerializeToString()) == read
    assert frames.Packet(99, b"").type_name == "99"


@pytest.mark.parametrize("batch_id", [1, 127, 128, 1 << 31, (1 << 63) - 1])
@pytest.mark.parametrize("entries", [[b""], [b"x" * 127], [b"x" * 128, b"y"], [b"x" * 70_000]])
def test_protobuf_library_reads_a_batch(batch_id: int, entries: list[bytes]) -> None:
    body = b"".join(b"\x12" + varint(len(entry)) + entry for entry in entries)
    packet = PROTO["Packet"].FromString(content(frames.messages_head(batch_id, len(body)) + body))
    assert (packet.type, packet.HasField("version")) == (frames.PacketType.MESSAGES, False)
    batch = PROTO["Messages"].FromString(packet.body)
    assert (batch.batch_id, list(batch.messages)) == (batch_id, entries)


# --- Invalid frames -----------------------------------------------------------------------


def test_oversized_length_is_refused_before_any_byte_is_read() -> None:
    assert frames.frame_length(struct.pack(">I", CANAL_FRAME_BYTES_MAX)) == CANAL_FRAME_BYTES_MAX
    for length in (CANAL_FRAME_BYTES_MAX + 1, 0xFFFF_FFFF):
        with pytest.raises(LimitExceeded):
            frames.frame_length(struct.pack(">I", length))
    with pytest.raises(LimitExceeded):
        frames.frame_length(struct.pack(">I", 101), 100)


@pytest.mark.parametrize(
    "bad",
    [
        golden("18"),
        golden("2aff01 00"),
        golden("18ffffffffffffffffffff01"),
        golden("00"),
        golden("0b 0c"),
        golden("2f"),
        golden("2a05 0102"),
        golden("2d 01"),
        golden("1a03 010203"),
        golden("2805"),
    ],
)
def test_malformed_packet_is_reported(bad: bytes) -> None:
    with pytest.raises(OptionInvalid, match="no Canal packet"):
        frames.read_packet(bad)


def test_garbage_is_either_parsed_or_refused_cleanly() -> None:
    chance = random.Random(7)
    whole = PROTO["Get"](destination="shop", client_id="1001", fetch_size=9, timeout=1).SerializeToString()
    read = 0
    for _ in range(5_000):
        garbage = bytearray(chance.randbytes(chance.randrange(40)) if chance.random() < 0.5 else whole)
        for _ in range(chance.randrange(4)):
            if garbage:
                garbage[chance.randrange(len(garbage))] = chance.randrange(256)
        for reader in (frames.read_packet, frames.read_get, frames.read_client_auth):
            try:
                reader(bytes(garbage))
                read += 1
            except OptionInvalid:
                continue
    assert read > 1_000


# --- Filters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted", "unwanted"),
    [
        ("", ["a.b", "A.B"], []),
        (".*\\..*", ["a.b", "shop.orders"], []),
        (".*", ["a.b"], []),
        ("shop\\..*", ["shop.orders", "SHOP.Orders", "shop."], ["shopx.orders", "ashop.orders"]),
        ("shop.orders,shop\\.items", ["shop.orders", "shop.items"], ["shop.orders2", "shop.item"]),
        ("Shop\\.Orders", ["shop.orders"], []),
        ("s\\.(a|b),t\\.x{1,2}", ["s.a", "s.b", "t.x", "t.xx"], ["s.c", "t.xxx", "t"]),
        ("s\\.[a,b]+ , t\\.y", ["s.a", "s.b,a", "t.y"], ["s.c"]),
        ("s\\.(?!tmp_).*", ["s.orders"], ["s.tmp_orders", "S.TMP_x"]),
        ("s\\.\\Qa.b\\E", ["s.a.b"], ["s.axb"]),
        ("s\\.a\\,b", ["s.a,b"], ["s.a"]),
    ],
)
def test_filter_selects_the_same_tables_as_canal(text: str, wanted: list[str], unwanted: list[str]) -> None:
    tables = CanalTables(text, TablePatterns())

    def chosen(name: str) -> bool:
        database, _, table = name.partition(".")
        return tables.matches(database, table)

    assert [name for name in [*wanted, *unwanted] if chosen(name)] == wanted


def test_filter_selects_no_table_that_the_account_may_not_read() -> None:
    tables = CanalTables("shop\\..*", TablePatterns("shop.orders"))
    assert tables.matches("shop", "orders")
    assert not tables.matches("shop", "payments")
    assert tables == CanalTables("shop\\..*", TablePatterns("shop.orders"))
    assert tables != CanalTables("shop\\..*", TablePatterns())
    assert len({tables, CanalTables("shop\\..*", TablePatterns("shop.orders"))}) == 1


def test_filter_is_split_at_commas_outside_brackets() -> None:
    assert split_filter("a\\..*,b{1,2},[x,y],(p,(q,r)),\\(,z") == [
        "a\\..*",
        "b{1,2}",
        "[x,y]",
        "(p,(q,r))",
        "\\(",
        "z",
    ]
    assert split_filter(" , ,") == []


@pytest.mark.parametrize(
    "text", ["(", "a\\..*,[", "*", "x" * 20_000, "(?=(a+)+b).*", "(?!x).*.*.*.*", "a(?<=(?!b)"]
)
def test_invalid_or_slow_filter_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid):
        CanalTables(text, TablePatterns())


@pytest.mark.parametrize("text", ["((a+)+)+b", "(.*)*x", "(?!x)a*a*a*b", "(a|aa)+$b"])
def test_filter_is_tried_in_bounded_time(text: str) -> None:
    tables = CanalTables(text, TablePatterns())
    # Matching is measured in the CPU time of this thread, which excludes pauses of the machine. Without the
    # time limit, a match would take years.
    started = time.thread_time()
    assert not tables.matches("a" * 64, "a" * 64)
    assert time.thread_time() - started < 1.0


def test_zone_setting_is_an_offset_in_seconds_east_of_utc() -> None:
    zones = {"+00:00": 0, "+08:00": 28_800, "-03:30": -12_600, "+05:45": 20_700}
    assert {text: ListenSettings(canal_zone=text).canal_zone_seconds for text in zones} == zones
    for text in ("Asia/Shanghai", "8", "+8:00", "+15:00", "+08:60", ""):
        with pytest.raises(ValueError, match="no offset from UTC"):
            ListenSettings(canal_zone=text)
