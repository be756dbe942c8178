# SPDX-License-Identifier: Apache-2.0
"""Query responses with every kind of damage are rejected with a named error or reported as incomplete."""

import random
from collections.abc import Iterator

import pyarrow
import pytest

from penstock._native import ResultSet
from penstock.errors import (
    ConnectionLost,
    EventMalformed,
    PenstockError,
    SchemaChanged,
    SchemaMismatch,
    ValueMalformed,
)


def _answer(packets: list[bytes]) -> bytes:
    return b"".join(
        len(payload).to_bytes(3, "little") + bytes([number % 256]) + payload
        for number, payload in enumerate(packets, start=1)
    )


def _definition(code: int, collation: int = 63) -> bytes:
    rest = collation.to_bytes(2, "little") + bytes(4) + bytes([code]) + bytes(5)
    return b"\x03def" + b"\0" * 5 + bytes([len(rest)]) + rest


ANSWER = [
    b"\x02",
    _definition(3),
    _definition(253, 45),
    b"\xfe\0\0\x02\0",
    b"\x0212\x03abc",
    b"\xfb\xfb",
    b"\xfe\0\0\x02\0",
]


def _result(text: str = "varchar(9)", charset: str = "utf8mb4", rows: int = 65_536) -> ResultSet:
    columns = [("id", "int", None, False), ("v", text, charset, True)]
    return ResultSet(
        columns,
        mariadb=False,
        instance="i",
        database="d",
        table="t",
        file="f.1",
        offset=4,
        commit_version=1,
        timestamp_us=0,
        key=["id"],
        batch_rows_max=rows,
    )


def test_damaged_response_is_refused_by_name_or_reported_as_unfinished() -> None:
    whole = _answer(ANSWER)
    result = _result()
    assert result.feed(whole) == len(whole)
    assert (result.state, result.rows, len(result.take_batch() or ())) == ("batch", 2, 2)
    for damaged in damages(whole):
        result = _result()
        fed = 0
        try:
            while result.state != "done":
                fed += result.feed(damaged[fed:])
                if result.state != "batch":
                    break
                result.take_batch()
        except PenstockError:
            continue
        assert fed <= len(damaged)


def damages(whole: bytes) -> Iterator[bytes]:
    """Yield a text truncated at every byte, and changed at every byte."""
    for at in range(len(whole)):
        yield whole[:at]
        for other in (0, 1, 0x7F, 0xFB, 0xFC, 0xFE, 0xFF):
            yield whole[:at] + bytes([other]) + whole[at + 1 :]
        yield whole[:at] + whole[at + 1 :]
        yield whole[:at] + b"\xff" + whole[at:]


# The type's number and collation in a column definition, and one value of the type.
TYPES: dict[str, tuple[int, int, bytes]] = {
    "tinyint": (1, 63, b"-128"),
    "int": (3, 63, b"2147483647"),
    "bigint": (8, 63, b"-9223372036854775808"),
    "float": (5, 63, b"1.5e-10"),
    "double": (5, 63, b"1.7976931348623157e308"),
    "bit(9)": (16, 63, b"\x01\xff"),
    "year": (13, 63, b"2155"),
    "date": (10, 63, b"2020-02-29"),
    "time(6)": (11, 63, b"-838:59:59.000000"),
    "datetime(6)": (12, 63, b"9999-12-31 23:59:59.999999"),
    "timestamp(6)": (7, 63, b"2038-01-19 03:14:07.000001"),
    "decimal(10,0)": (246, 63, b"-9999999999"),
    "decimal(65,0)": (246, 63, b"9" * 65),
    "varchar(9)": (253, 45, "ü€😀".encode()),
    "varbinary(9)": (253, 63, b"\0\xff"),
    "enum('a')": (254, 45, b"a"),
    "json": (245, 63, b'{"a": 1}'),
    "point": (255, 63, bytes(25)),
    "vector(2)": (242, 63, bytes(8)),
    "uuid": (254, 8, b"01234567-89ab-4def-8123-456789abcd00"),
    "inet4": (254, 8, b"1.2.3.4"),
    "inet6": (254, 8, b"2001:db8::1"),
}


@pytest.mark.parametrize("type_text", TYPES)
def test_any_value_bytes_decode_to_their_type_or_are_malformed(type_text: str) -> None:
    chance = random.Random(type_text)
    code, collation, sample = TYPES[type_text]
    taken = 0
    for number in range(400):
        value = bytearray(sample)
        for _ in range(number % 4):
            at = chance.randrange(len(value) + 1)
            value[at : at + chance.randint(0, 1)] = chance.randbytes(chance.randint(0, 2))
        result = _result(type_text)
        row = b"\x011" + bytes([len(value)]) + value
        try:
            result.feed(_answer([*ANSWER[:2], _definition(code, collation), ANSWER[3], row, ANSWER[-1]]))
        except (ValueMalformed, SchemaMismatch):
            continue
        pyarrow.record_batch(result.take_batch()).validate(full=True)
        taken += 1
    assert taken >= 100


def test_unexpected_response_stops_the_load() -> None:
    cases: list[tuple[type[PenstockError], list[bytes]]] = [
        (EventMalformed, [b"\0\0\0\2\0\0\0"]),
        (EventMalformed, [b"\xfbfile"]),
        (EventMalformed, [b"\x03"]),
        (EventMalformed, [*ANSWER[:4], b"\x011"]),
        (EventMalformed, [*ANSWER[:4], b"\x011\x01a\x01b"]),
        (EventMalformed, [*ANSWER[:4], b"\xfe\0\0\x0a\0"]),
        (SchemaChanged, [ANSWER[0], _definition(8), ANSWER[2]]),
        (SchemaChanged, [ANSWER[0], ANSWER[1], _definition(253, 8)]),
        (ValueMalformed, [*ANSWER[:4], b"\x01x\x01a"]),
    ]
    for error, packets in cases:
        with pytest.raises(error):
            _result().feed(_answer(packets))
    skipped = bytearray(_answer(ANSWER))
    skipped[3] = 7
    with pytest.raises(ConnectionLost):
        _result().feed(skipped)


def test_error_after_rows_keeps_those_of_full_batches() -> None:
    result = _result(rows=1)
    whole = _answer([*ANSWER[:6], ANSWER[4], b"\xff\x25\x05#70100interrupted"])
    fed, batches = 0, 0
    while result.state != "done" or fed < len(whole):
        fed += result.feed(whole[fed:])
        if result.state == "batch":
            assert len(result.take_batch() or ()) == 1
            batches += 1
    assert (batches, result.key_last, result.server_error) == (3, [b"12"], (1317, "interrupted"))


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_row_that_fills_a_packet_continues_in_the_next(more: int) -> None:
    text = b"x" * (0xFFFFFF - 2 - 4 + more)
    row = b"\x011" + b"\xfd" + len(text).to_bytes(3, "little") + text
    pieces = [row[:0xFFFFFF], row[0xFFFFFF:]] if len(row) >= 0xFFFFFF else [row]
    whole = _answer([*ANSWER[:4], *pieces, *ANSWER[5:]])
    result = _result("longtext")
    assert result.feed(whole) == len(whole) - len(_answer(ANSWER[5:]))
    assert pyarrow.record_batch(result.take_batch()).column("v").to_pylist() == [text.decode()]
    assert result.feed(whole[-len(_answer(ANSWER[5:])) :]) == len(_answer(ANSWER[5:]))
    assert (result.state, result.rows) == ("batch", 2)
