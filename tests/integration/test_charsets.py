# SPDX-License-Identifier: Apache-2.0
"""Text of every character set decodes to the text that the server itself shows."""

import re
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock._native import decode_text
from penstock.errors import ValueMalformed
from tests.conftest import ROOT
from tools.charsets import ALL_BYTES, COMPUTED, HIGH_BYTES, ask, cursor_of, names_of, shapes_of
from tools.servers import Server

Shape = tuple[Sequence[int], ...]

MISMATCHES_SHOWN_MAX = 10
MIXED_TEXT = "Plain, naïve, ł, € \\ ~ Привет, Καλημέρα, שלום, سلام, สวัสดี, 資料庫, 数据, テーブル, 데이터, 😀"
# Bytes on both sides of every boundary of the Unicode encodings; testing all codes would take too long.
EDGES = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF)
UTF16_HIGH = (0xD7, 0xD8, 0xDB, 0xDC, 0xDF, 0xE0)
UTF8_SHAPES: list[Shape] = [(ALL_BYTES,), (HIGH_BYTES, ALL_BYTES), (range(0xE0, 0xF0), EDGES, ALL_BYTES)]
UTF8_LONG_SHAPE: Shape = (range(0xEF, 0x100), EDGES, EDGES, EDGES)
UNICODE_SHAPES: dict[str, list[Shape]] = {
    "ascii": [(ALL_BYTES,)],
    "ucs2": [(ALL_BYTES, ALL_BYTES)],
    "utf16": [(ALL_BYTES, ALL_BYTES), (UTF16_HIGH, EDGES, UTF16_HIGH, EDGES)],
    "utf16le": [(ALL_BYTES, ALL_BYTES), (EDGES, UTF16_HIGH, EDGES, UTF16_HIGH)],
    "utf32": [((0,), range(0x12), ALL_BYTES, ALL_BYTES), (EDGES, EDGES, EDGES, EDGES)],
    "utf8mb3": [*UTF8_SHAPES, UTF8_LONG_SHAPE],
    "utf8mb4": [*UTF8_SHAPES, UTF8_LONG_SHAPE],
}
UNIT_BYTES = {"ucs2": 2, "utf16": 2, "utf16le": 2, "utf32": 4}


def _decoded(charset: str, code: bytes) -> str | None:
    try:
        return decode_text(charset, code)
    except ValueMalformed:
        return None


def _question_marks(charset: str, code: bytes) -> int:
    """Return how many question marks the bytes themselves contain. The server's text has one more question
    mark for each character that it replaced.
    """
    unit = UNIT_BYTES.get(charset, 1)
    mark = "?".encode("utf-16-le" if charset == "utf16le" else f"utf-{unit * 8}-be" if unit > 1 else "ascii")
    return sum(code[at : at + unit] == mark for at in range(0, len(code), unit))


def _shown(charset: str, code: bytes, answer: str) -> str | None:
    """Return the server's answer in utf8mb4, or None if it could not convert the text."""
    try:
        text = bytes.fromhex(answer).decode("utf-8")
    except UnicodeDecodeError:
        # MariaDB accepts a surrogate as a character; UTF-8 has none.
        return None
    return text if text and text.count("?") == _question_marks(charset, code) else None


def _mismatches(server: Server, charset: str, shapes: Sequence[Shape]) -> Iterator[str]:
    cursor = cursor_of(server)
    for shape in shapes:
        for code, answer in ask(cursor, charset, shape, "utf8mb4"):
            shown, decoded = _shown(charset, code, answer), _decoded(charset, code)
            if shown != decoded:
                yield f"{charset} {code.hex()}: the server shows {shown!r}, decoded is {decoded!r}"


def _assert_equal(server: Server, shapes_by_charset: dict[str, list[Shape]]) -> None:
    wrong = [
        text for charset, shapes in shapes_by_charset.items() for text in _mismatches(server, charset, shapes)
    ]
    assert not wrong, "\n".join([f"{len(wrong)} codes differ", *wrong[:MISMATCHES_SHOWN_MAX]])


@pytest.mark.deep(
    guard="tests/integration/test_charsets.py::test_stored_text_of_each_charset_is_returned_as_the_client_sees_it"
)
@pytest.mark.slow
def test_every_code_of_every_mapped_charset_decodes_as_on_the_server(server: Server) -> None:
    names = names_of(cursor_of(server)) - set(COMPUTED)

    assert {"latin1", "gbk", "big5", "sjis", "ujis", "euckr"} <= names
    _assert_equal(server, {charset: shapes_of(charset) for charset in sorted(names)})


@pytest.mark.deep(
    guard="tests/integration/test_charsets.py::test_stored_text_of_each_charset_is_returned_as_the_client_sees_it"
)
@pytest.mark.slow
def test_unicode_charsets_decode_and_refuse_as_on_the_server(server: Server) -> None:
    _assert_equal(server, UNICODE_SHAPES)


def test_stored_text_of_each_charset_is_returned_as_the_client_sees_it(
    server: Server, fresh_database: Callable[[Server], str]
) -> None:
    database = fresh_database(server)
    names = sorted(names_of(cursor_of(server)) - {"binary"})
    columns = ", ".join(f"{name} VARCHAR(99) CHARACTER SET {name}" for name in names)
    server.sql(f"CREATE TABLE texts ({columns})", database=database)
    # IGNORE stores a question mark for a character missing from the column's character set.
    values = ", ".join(["%s"] * len(names))
    server.sql(f"INSERT IGNORE INTO texts VALUES ({values})", *[MIXED_TEXT] * len(names), database=database)

    shown = server.sql("SELECT * FROM texts", database=database)[0]
    casts = ", ".join(f"CAST({name} AS BINARY)" for name in names)
    stored = server.sql(f"SELECT {casts} FROM texts", database=database)[0]

    assert [decode_text(*pair) for pair in zip(names, stored, strict=True)] == list(shown)
    assert shown[names.index("utf8mb4")] == MIXED_TEXT


def test_every_collation_id_of_the_server_has_its_charset(server: Server) -> None:
    source = (ROOT / "native" / "kernel" / "src" / "charset" / "collations.rs").read_text()
    known = {
        number: charset.lower()
        for first, last, charset in re.findall(r"\((\d+), (\d+), Charset::(\w+)\)", source)
        for number in range(int(first), int(last) + 1)
    }
    table = "COLLATIONS" if server.family == "mysql" else "COLLATION_CHARACTER_SET_APPLICABILITY"

    rows = server.sql(f"SELECT ID, CHARACTER_SET_NAME FROM information_schema.{table}")

    assert len(rows) > 250
    assert {row for row in rows if known.get(row[0]) != row[1]} == set()


def test_unknown_charset_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="utf9"):
        decode_text("utf9", b"a")
