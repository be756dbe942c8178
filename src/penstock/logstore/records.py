# SPDX-License-Identifier: Apache-2.0
"""The 128-byte records of both indexes: little endian, each with the CRC32 of its first 124 bytes.

L2 (`BLOCK_DTYPE`) has a record for each closed block of a segment, L1 (`SEGMENT_DTYPE`) one for each segment
of the log. Both files start with a header record. A record with a wrong CRC32 is never used: the index is
rebuilt from the data.
"""

import dataclasses
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

RECORD_BYTES = 128
BLOCKS_MAGIC = b"PSTKL2\x00\x01"
SEGMENTS_MAGIC = b"PSTKL1\x00\x01"

# Flags of a block.
BEGINS_AT_BOUNDARY = 1
ENDS_AT_BOUNDARY = 2
GTIDS_IN_SEQUENCE = 8
# Version 0.1 wrote records without this flag. In such a record, the tables omit XA transactions that commit
# in the block.
COVERS_XA_COMMITS = 32

# The states of a segment, and the names of the states.
OPEN, CLOSED, COLD, TIERED = range(4)
STATES = ("open", "closed", "cold", "tiered")

_CRC_AT = 124
_CRC = struct.Struct("<I")
# The fields of a block record that hold the block's source end and its file number.
_BLOCK_END = struct.Struct("<8xQI")
# The fields of an index header: magic, size of a record, epoch, base, file number.
_HEADER = struct.Struct("<8sIIQI")

BLOCK_DTYPE = np.dtype(
    [
        ("source_start", "<u8"),
        ("source_end", "<u8"),
        ("file_number", "<u4"),
        ("server_id", "<u4"),
        ("time_us", "<i8"),
        ("time_max_us", "<i8"),
        ("gtid_source", "V16"),
        ("gtid_number", "<u8"),
        ("event_index", "<u4"),
        ("transactions", "<u4"),
        ("changes", "<u4"),
        ("events", "<u4"),
        ("tables", "<u8"),
        ("flags", "<u4"),
        ("epoch", "<u4"),
        ("last_boundary", "<u8"),
        ("transaction_start", "<u8"),
        ("sequence_start", "<u8"),
        ("_zero_2", "V4"),
        ("crc", "<u4"),
    ]
)

SEGMENT_DTYPE = np.dtype(
    [
        ("version", "<i8"),
        ("epoch", "<u4"),
        ("file_number", "<u4"),
        ("base", "<u8"),
        ("source_end", "<u8"),
        ("head_bytes", "<u4"),
        ("state", "<u4"),
        ("time_first_us", "<i8"),
        ("time_max_us", "<i8"),
        ("transactions", "<u8"),
        ("changes", "<u8"),
        ("hour", "<u4"),
        ("server_id", "<u4"),
        ("stored_bytes", "<u8"),
        ("_zero", "V36"),
        ("crc", "<u4"),
    ]
)

assert BLOCK_DTYPE.itemsize == SEGMENT_DTYPE.itemsize == RECORD_BYTES

Records = npt.NDArray[Any]


def seal(record: bytes) -> bytes:
    """Return a record's first 124 bytes followed by their CRC32."""
    plain = record[:_CRC_AT].ljust(_CRC_AT, b"\x00")
    return plain + _CRC.pack(zlib.crc32(plain))


def is_sound(record: bytes | memoryview) -> bool:
    """Return whether 128 bytes are a record with a correct CRC32."""
    return len(record) == RECORD_BYTES and _CRC.unpack_from(record, _CRC_AT)[0] == zlib.crc32(
        record[:_CRC_AT]
    )


def sound_records(content: bytes | memoryview) -> int:
    """Return how many leading records are complete and sound; `content` has no header."""
    view = memoryview(content)
    count = len(view) // RECORD_BYTES
    for index in range(count):
        if not is_sound(view[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]):
            return index
    return count


def block_records(content: bytes | memoryview) -> Records:
    """Return L2 records, without the header, as an array of BLOCK_DTYPE that shares the bytes."""
    return np.frombuffer(content, BLOCK_DTYPE, len(content) // RECORD_BYTES)


def block_end(records: bytes, start: int) -> tuple[int, int]:
    """Return the source end and the file number in the L2 record at an offset, which is cheaper than creating
    an array.
    """
    source_end, file_number = _BLOCK_END.unpack_from(records, start)
    return source_end, file_number


def segment_records(content: bytes | memoryview) -> Records:
    """Return L1 records, without the header, as an array of SEGMENT_DTYPE that shares the bytes."""
    return np.frombuffer(content, SEGMENT_DTYPE, len(content) // RECORD_BYTES)


@dataclass(frozen=True)
class IndexHeader:
    """The first record of an index. In L1 all fields except the magic are zero."""

    magic: bytes
    epoch: int = 0
    base: int = 0
    file_number: int = 0

    def encode(self) -> bytes:
        """Return the 128 bytes of the record."""
        return seal(_HEADER.pack(self.magic, RECORD_BYTES, self.epoch, self.base, self.file_number))

    @classmethod
    def decode(cls, record: bytes | memoryview) -> Self | None:
        """Read a header. Returns None if it is damaged or not a header."""
        if not is_sound(record):
            return None
        magic, record_bytes, epoch, base, number = _HEADER.unpack_from(record)
        return cls(magic, epoch, base, number) if record_bytes == RECORD_BYTES else None


@dataclass(frozen=True)
class BlockRecord:
    """One block of a segment.

    Offsets refer to the source file. Times are in microseconds since 1970, UTC. `time_us` is the commit time
    of the transaction that contains the first event. `time_max_us` is the latest commit time of the log up to
    the block's end. `last_boundary` is the offset after the last transaction that ends in the block, 0 if
    none does. `transaction_start` is where the transaction of the first event starts, or the block's start if
    no transaction is open there. From `sequence_start` to the block's end, all GTIDs have consecutive numbers
    of one source. It is 0 if unknown.
    """

    source_start: int
    source_end: int
    file_number: int
    server_id: int
    time_us: int
    time_max_us: int
    gtid_source: bytes
    gtid_number: int
    event_index: int
    transactions: int
    changes: int
    events: int
    tables: int
    flags: int
    epoch: int
    last_boundary: int
    transaction_start: int = 0
    sequence_start: int = 0

    @classmethod
    def of(cls, record: Any) -> Self:
        """Convert one element of a BLOCK_DTYPE array to plain values."""
        values: dict[str, Any] = {field.name: record[field.name] for field in dataclasses.fields(cls)}
        for name, value in values.items():
            values[name] = bytes(value) if name == "gtid_source" else int(value)
        return cls(**values)

    @classmethod
    def decode(cls, record: bytes | memoryview) -> Self | None:
        """Read 128 bytes. Returns None if the CRC32 is wrong."""
        return cls.of(block_records(record)[0]) if is_sound(record) else None

    @property
    def begins_at_boundary(self) -> bool:
        """Whether no transaction is open at the start of the block."""
        return bool(self.flags & BEGINS_AT_BOUNDARY)

    @property
    def ends_at_boundary(self) -> bool:
        """Whether no transaction is open at the end of the block."""
        return bool(self.flags & ENDS_AT_BOUNDARY)


@dataclass(frozen=True)
class SegmentRecord:
    """One segment of a log: bytes [base, source_end) of a source file. Segments are ordered by `version`.

    `source_end` is 0 while the segment is open. `stored_bytes` is the segment's size in the folder or in the
    tier. Times are in microseconds since 1970, UTC, and 0 if the segment contains no transaction.
    `time_max_us` is the latest commit time of the log up to the segment's end.
    """

    version: int
    epoch: int
    file_number: int
    base: int
    source_end: int
    head_bytes: int
    state: int
    time_first_us: int
    time_max_us: int
    transactions: int
    changes: int
    hour: int
    server_id: int
    stored_bytes: int

    @classmethod
    def of(cls, record: Any) -> Self:
        """Convert one element of a SEGMENT_DTYPE array to plain values."""
        return cls(**{field.name: int(record[field.name]) for field in dataclasses.fields(cls)})

    @classmethod
    def decode(cls, record: bytes | memoryview) -> Self | None:
        """Read 128 bytes. Returns None if the CRC32 is wrong."""
        return cls.of(segment_records(record)[0]) if is_sound(record) else None

    def encode(self) -> bytes:
        """Return the 128 bytes of the record."""
        record = np.zeros(1, SEGMENT_DTYPE)
        for field in dataclasses.fields(self):
            record[field.name] = getattr(self, field.name)
        return seal(record.tobytes())
