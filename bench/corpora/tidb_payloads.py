# SPDX-License-Identifier: Apache-2.0
"""Payloads as TiDB's pump client writes them, with rows of eight columns."""

import json
from collections.abc import Iterator

TABLE_ID, SCHEMA_VERSION = 100, 43
ROWS_EACH = 1000
_COMMIT_TS = 470_639_217_768_660_992
_UTF8 = {"Charset": "utf8mb4", "Collate": "utf8mb4_bin"}

# Name, type and flags of each column; TiDB numbers columns from 1.
_COLUMNS: list[tuple[str, dict[str, object]]] = [
    ("id", {"Tp": 8, "Flag": 4099}),
    ("customer", {"Tp": 15, "Flag": 0, "Flen": 40, **_UTF8}),
    ("amount", {"Tp": 246, "Flag": 0, "Flen": 12, "Decimal": 2}),
    ("quantity", {"Tp": 3, "Flag": 0}),
    ("created", {"Tp": 12, "Flag": 0, "Decimal": 0}),
    ("note", {"Tp": 15, "Flag": 0, "Flen": 100, **_UTF8}),
    ("status", {"Tp": 247, "Flag": 0, "Elems": ["new", "paid", "sent"], **_UTF8}),
    ("weight", {"Tp": 5, "Flag": 0}),
]


def table_info() -> bytes:
    """Return the table's definition."""
    columns = [
        {"id": number, "name": {"O": name, "L": name}, "offset": number - 1, "state": 5, "type": kind}
        for number, (name, kind) in enumerate(_COLUMNS, 1)
    ]
    info = {"id": TABLE_ID, "name": {"O": "orders", "L": "orders"}, "pk_is_handle": True, "cols": columns}
    return json.dumps(info).encode()


def payloads(bytes_min: int) -> Iterator[bytes]:
    """Yield committed transactions of a thousand inserted rows each, of at least `bytes_min` bytes in all."""
    written = index = 0
    while written < bytes_min:
        rows = b"".join(_field(2, _row(index * ROWS_EACH + number)) for number in range(ROWS_EACH))
        mutation = _number(1, TABLE_ID) + rows + _number(7, 0) * ROWS_EACH
        value = _number(1, SCHEMA_VERSION) + _field(2, mutation)
        commit_ts = _COMMIT_TS + index
        payload = _number(1, 1) + _number(2, commit_ts - 1) + _number(3, commit_ts) + _field(5, value)
        written, index = written + len(payload), index + 1
        yield payload + _number(7, 0) + _number(8, 0)


def _row(key: int) -> bytes:
    # DECIMAL(12,2): ten digits before the point in one and four bytes, two after it in one byte.
    amount = bytes([0x80, *(key % 100_000_000).to_bytes(4, "big"), key % 100])
    values = [
        b"\x02" + _signed(len(name := b"customer %06d" % (key % 1_000_000))) + name,
        b"\x06\x0c\x02" + amount,
        b"\x08" + _signed(key % 1000),
        b"\x09" + _varint(0x19BB_6CB3_C000_0000),
        b"\x00" if key % 4 else b"\x02" + _signed(4) + b"note",
        b"\x09" + _varint(1 + key % 3),
        b"\x05\xbf\xf8\x00\x00\x00\x00\x00\x00",
    ]
    pairs = (b"\x08" + _signed(number) + value for number, value in enumerate(values, 2))
    return b"\x08" + _signed(key) + b"".join(pairs)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _signed(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
