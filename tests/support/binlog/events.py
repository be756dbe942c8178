# SPDX-License-Identifier: Apache-2.0
"""Split binlog files into events and assemble them again with new positions and checksums.

The header of an event: timestamp 4, type 1, server id 4, length 4, end position 4, flags 2, little-endian.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow

MAGIC = b"\xfebin"
HEADER = struct.Struct("<IBIIIH")
CHECKSUM = struct.Struct("<I")

QUERY, STOP, ROTATE, FORMAT_DESCRIPTION, XID = 2, 3, 4, 15, 16
EXECUTE_LOAD_QUERY, ROWS_QUERY = 18, 29
TABLE_MAP, INCIDENT, HEARTBEAT, ANNOTATE = 19, 26, 27, 160
WRITE_ROWS_V1, UPDATE_ROWS_V1, DELETE_ROWS_V1, WRITE_ROWS, UPDATE_ROWS, DELETE_ROWS = 23, 24, 25, 30, 31, 32
GTID, ANONYMOUS_GTID, PREVIOUS_GTIDS, XA_PREPARE = 33, 34, 35, 38
PARTIAL_UPDATE_ROWS, TRANSACTION_PAYLOAD, TAGGED_GTID = 39, 40, 42
MARIADB_GTID, MARIADB_GTID_LIST, START_ENCRYPTION = 162, 163, 164
MARIADB_QUERY_COMPRESSED = 165
MARIADB_ROWS_COMPRESSED = (166, 167, 168, 169, 170, 171)
FLAG_IN_USE, FLAG_ARTIFICIAL, FLAG_IGNORABLE = 0x01, 0x20, 0x80


@dataclass(frozen=True)
class Event:
    """One event; `body` excludes the header and the checksum."""

    timestamp: int
    code: int
    server_id: int
    end_position: int
    flags: int
    body: bytes
    offset: int = 0
    checksum: bool = True

    @property
    def size(self) -> int:
        """The length of the whole event."""
        return HEADER.size + len(self.body) + (CHECKSUM.size if self.checksum else 0)

    def encode(self, checksum: int | None = None) -> bytes:
        """Return the event's bytes with its CRC32, or with `checksum` instead."""
        head = HEADER.pack(
            self.timestamp, self.code, self.server_id, self.size, self.end_position & 0xFFFFFFFF, self.flags
        )
        plain = head + self.body
        if not self.checksum:
            return plain
        return plain + CHECKSUM.pack(zlib.crc32(plain) if checksum is None else checksum)


def events(data: bytes, checksum: bool = True, offset: int = len(MAGIC)) -> Iterator[Event]:
    """Yield the events of a file's bytes. The format description has a checksum in every file."""
    while offset < len(data):
        timestamp, code, server_id, size, end, flags = HEADER.unpack_from(data, offset)
        if not HEADER.size <= size <= len(data) - offset:
            raise ValueError(f"no event at {offset}")
        has_checksum = checksum or code == FORMAT_DESCRIPTION
        tail = CHECKSUM.size if has_checksum else 0
        body = data[offset + HEADER.size : offset + size - tail]
        yield Event(timestamp, code, server_id, end, flags, body, offset, has_checksum)
        offset += size


def assemble(parts: Iterable[Event], offset: int = 0) -> bytes:
    """Concatenate events with matching positions and checksums; prepend the magic if the offset is 0."""
    out = bytearray(MAGIC if offset == 0 else b"")
    start = offset
    for event in parts:
        end = start + len(out) + event.size
        out += replace(event, end_position=end).encode()
    return bytes(out)


def with_table_metadata(data: bytes, fields: Iterable[int]) -> bytes:
    """Return a file whose table maps keep only these optional metadata fields.

    MySQL's MINIMAL metadata is fields 1 to 3 (signs and character sets). With MariaDB's NO_LOG, there are
    none. Table names and column counts must each be below 251.
    """
    changed = []
    for event in events(data):
        if event.code == TABLE_MAP:
            event = replace(event, body=_with_fields(event.body, frozenset(fields)))
        changed.append(event)
    return assemble(changed)


def _with_fields(body: bytes, wanted: frozenset[int]) -> bytes:
    at = 8
    for _ in ("database", "table"):
        at += 1 + body[at] + 1
    columns = body[at]
    at += 1 + columns
    at += 1 + body[at]
    at += (columns + 7) // 8
    kept = body[:at]
    while at < len(body):
        length, begin = body[at + 1], at + 2
        if length == 252:
            length, begin = int.from_bytes(body[begin : begin + 2], "little"), begin + 2
        if body[at] in wanted:
            kept += body[at : begin + length]
        at = begin + length
    return kept


def query_body(
    text: str, database: str = "", accessed: Sequence[str] | None = None, load: bytes = b"", error: int = 0
) -> bytes:
    """Return the body of a query event.

    `accessed` lists the databases in its status variables; () means any database. `load` is the prefix of the
    body of a LOAD DATA statement.
    """
    variables = b""
    if accessed is not None:
        names = b"".join(name.encode() + b"\0" for name in accessed)
        variables = bytes((12, len(accessed) or 254)) + names
    head = struct.pack("<IIBHH", 9, 0, len(database.encode()), error, len(variables))
    return head + load + variables + database.encode() + b"\0" + text.encode()


def first_event_end(data: bytes) -> int:
    """Return the end of the format description."""
    return len(MAGIC) + HEADER.unpack_from(data, len(MAGIC))[3]


def compressed(parts: Sequence[Event]) -> Event:
    """Return a payload event that holds other events, as `binlog_transaction_compression` writes it."""
    plain = b"".join(replace(event, checksum=False, end_position=0).encode() for event in parts)
    packed = pyarrow.Codec("zstd").compress(plain, asbytes=True)
    # Each field has a type, the length of its value, and the value as a length-encoded integer of 8 bytes.
    sizes = ((2, 0), (3, len(plain)), (1, len(packed)))
    fields = b"".join(bytes((field, 9, 254)) + size.to_bytes(8, "little") for field, size in sizes)
    return replace(parts[0], code=TRANSACTION_PAYLOAD, body=fields + b"\0" + packed, flags=0)


def codes(data: bytes, checksum: bool = True) -> list[int]:
    """Return the types of a file's events."""
    return [event.code for event in events(data, checksum)]
