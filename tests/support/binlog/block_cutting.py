# SPDX-License-Identifier: Apache-2.0
"""Cut whole byte strings into blocks, and unpack the block records."""

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock._native import BlockCutter
from tests.conftest import ROOT

SMALL_LOGS = sorted((ROOT / "native/kernel/tests/logs").glob("*.binlog"))

RECORD = struct.Struct("<QQIIqq16sQIIIIQIB3xQQQ4xI")
BEGINS, ENDS, STATEMENT, CONSECUTIVE, UNCOUNTED = 1, 2, 4, 8, 16
FULL_PACKET_BYTES = 0xFFFFFF


@dataclass(frozen=True)
class Record:
    """One block record of an index."""

    start: int
    end: int
    file_number: int
    server_id: int
    time_us: int
    time_max_us: int
    source: bytes
    number: int
    event_index: int
    transactions: int
    changes: int
    events: int
    tables: int
    flags: int
    epoch: int
    last_boundary: int
    transaction_start: int
    sequence_start: int

    def concerns(self, table: str) -> bool:
        """Whether the block may hold changes of a table, written `database.table`."""
        return bool(self.tables >> (zlib.crc32(table.encode()) & 63) & 1)


def records_of(packed: bytes) -> list[Record]:
    """Return the records after verifying their checksums."""
    unpacked = []
    for at in range(0, len(packed), RECORD.size):
        record_bytes = packed[at : at + RECORD.size]
        *values, checksum = RECORD.unpack(record_bytes)
        assert checksum == zlib.crc32(record_bytes[:-4])
        assert record_bytes[93:96] == bytes(3)
        assert record_bytes[120:124] == bytes(4)
        unpacked.append(Record(**dict(zip((field.name for field in fields(Record)), values, strict=True))))
    return unpacked


@dataclass
class Part:
    """The blocks cut from one source file, from the start position to the end."""

    file: str
    offset: int
    format_description: bytes
    gtid_set: str
    content: bytearray = field(default_factory=bytearray)
    packed: bytearray = field(default_factory=bytearray)
    statements: list[tuple[str, str, int, int]] = field(default_factory=list)
    end: int = 0
    boundary: int = 0

    @property
    def records(self) -> list[Record]:
        """The records of the blocks."""
        return records_of(bytes(self.packed))


class Cutting:
    """Feeds one cutter and collects its output by source file."""

    def __init__(self, **options: Any) -> None:
        given: dict[str, Any] = {
            "epoch": 0,
            "file": "binlog.000001",
            "offset": 0,
            "live": False,
            "flavor": "mysql",
        }
        self.cutter = BlockCutter(**(given | options))
        self.parts: list[Part] = []
        self.holes: list[tuple[int, int]] = []
        self.left = b""
        if not options.get("live") and options.get("offset"):
            self._begin()

    def packets(self, received: Iterable[bytes | memoryview]) -> "Cutting":
        """Feed the packets of a dump, split as they arrive."""
        return self._feed(self.cutter.feed_packets, received)

    def events(self, pieces: Iterable[bytes | memoryview]) -> "Cutting":
        """Feed event bytes, split as they arrive."""
        return self._feed(self.cutter.feed, pieces)

    def close(self) -> "Cutting":
        """Close the last block."""
        self.cutter.close_block()
        self._take()
        return self

    def _feed(
        self, feed: Callable[[bytes | memoryview], int], pieces: Iterable[bytes | memoryview]
    ) -> "Cutting":
        held = b""
        for piece in pieces:
            held += piece
            used = feed(held)
            self._take()
            while self.cutter.state != "input":
                if self.cutter.state == "file":
                    self.cutter.take_file()
                    self._begin()
                else:
                    before = self.cutter.data_end
                    self.cutter.take_hole()
                    self.holes.append((before, self.cutter.offset))
                used += feed(memoryview(held)[used:])
                self._take()
            held = held[used:]
        self.left = held
        return self

    def _begin(self) -> None:
        cutter = self.cutter
        self.parts.append(Part(cutter.file, cutter.offset, cutter.format_description, cutter.gtid_set))

    def _take(self) -> None:
        cutter = self.cutter
        if not cutter.untaken:
            return
        part = self.parts[-1]
        start, end, boundary = cutter.data_start, cutter.data_end, cutter.boundary
        assert cutter.data_file == part.file
        statements = cutter.take_statements()
        chunk = cutter.take_data()
        assert len(chunk) == end - start
        part.content += chunk
        part.packed += cutter.take_records()
        part.statements += statements
        part.end, part.boundary = end, boundary


def cut(content: bytes | memoryview, pieces: int = 1 << 20, **options: Any) -> Cutting:
    """Cut the bytes of one file, offered in pieces, and close the last block."""
    view = memoryview(content)
    return Cutting(**options).events(view[at : at + pieces] for at in range(0, len(view), pieces)).close()


def framed(events: Iterable[bytes], mark: bytes = b"", sequence: int = 1) -> Iterator[bytes]:
    """Yield the packets in which a server sends events; `mark` is the semi-synchronous replication header."""
    for event in events:
        rest = b"\x00" + mark + event
        while True:
            part, rest = rest[:FULL_PACKET_BYTES], rest[FULL_PACKET_BYTES:]
            yield len(part).to_bytes(3, "little") + bytes([sequence & 0xFF]) + part
            sequence += 1
            if len(part) < FULL_PACKET_BYTES:
                break


def flavor_of(path: Path) -> str:
    """Return the flavor of the server that wrote one of the small logs."""
    return "mariadb" if path.name.startswith("mariadb") else "mysql"
