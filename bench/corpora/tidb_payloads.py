# SPDX-License-Identifier: Apache-2.0
"""Payloads as TiDB's pump client writes them, with rows of eight columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TABLE_ID, SCHEMA_VERSION = 100, 43
ROWS_EACH = 1000
FIRST_TS = 470_639_217_768_660_992
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


@dataclass(frozen=True)
class Transaction:
    """A transaction with one insert: its timestamps, and the inserted row as TiDB encodes it."""

    start_ts: int
    commit_ts: int
    value: bytes

    @property
    def prewrite(self) -> bytes:
        """The binlog that precedes the commit."""
        key = _field(4, b"t\x80" + self.start_ts.to_bytes(8, "big"))
        return _number(1, 0) + self._timestamps(0) + key + _field(5, self.value) + _TAIL

    @property
    def commit(self) -> bytes:
        """The binlog of the commit alone."""
        return _number(1, 1) + self._timestamps(self.commit_ts) + _TAIL

    @property
    def matched(self) -> bytes:
        """Return the commit with the rows, as a Pump sends it to Drainers."""
        return _number(1, 1) + self._timestamps(self.commit_ts) + _field(5, self.value) + _TAIL

    def _timestamps(self, commit_ts: int) -> bytes:
        return _number(2, self.start_ts) + _number(3, commit_ts)


def table_info() -> dict[str, Any]:
    """Return the table's definition."""
    columns = [
        {"id": number, "name": {"O": name, "L": name}, "offset": number - 1, "state": 5, "type": kind}
        for number, (name, kind) in enumerate(_COLUMNS, 1)
    ]
    return {"id": TABLE_ID, "name": {"O": "orders", "L": "orders"}, "pk_is_handle": True, "cols": columns}


def table_job() -> dict[str, Any]:
    """Return the DDL job that created the table."""
    columns = ", ".join(f"{name} TEXT" for name, _ in _COLUMNS)
    return {
        "id": 1,
        "type": 3,
        "state": 6,
        "schema_id": 1,
        "table_id": TABLE_ID,
        "schema_name": "shop",
        "query": f"CREATE TABLE orders ({columns})",
        "binlog": {"SchemaVersion": SCHEMA_VERSION, "TableInfo": table_info(), "FinishedTS": FIRST_TS},
    }


def transactions(bytes_min: int, rows_each: int = ROWS_EACH) -> Iterator[Transaction]:
    """Yield transactions in commit order, with at least `bytes_min` bytes of rows in all."""
    written = index = 0
    while written < bytes_min:
        rows = b"".join(_field(2, _row(index * rows_each + number)) for number in range(rows_each))
        mutation = _number(1, TABLE_ID) + rows + _number(7, 0) * rows_each
        start_ts = FIRST_TS + 2 * index
        value = _number(1, SCHEMA_VERSION) + _field(2, mutation)
        yield Transaction(start_ts, start_ts + 1, value)
        written, index = written + len(value), index + 1


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


# The DDL job's id and state.
_TAIL = _number(7, 0) + _number(8, 0)
