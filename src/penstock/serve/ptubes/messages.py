# SPDX-License-Identifier: Apache-2.0
"""The messages of Ptubes: JSON requests of its clients, and protobuf responses.

    RdsEnvelope { messageType 2, message 3, error_code 4, error_message 5, totalEventCount 6,
                  latestCheckpoint 8 }
    message = RdsPartitionedMessage { map<shard, RdsMessage { messageCount 1, messageSize 2, messages 3 }> 1 }

The kernel frames each event as field 3 of RdsMessage. The consecutive events of a shard therefore already
form most of the shard's message, without work per event.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import numpy
import pyarrow

from penstock.errors import EventMalformed, OptionInvalid
from penstock.limits import (
    PTUBES_FETCH_BYTES_MAX,
    PTUBES_FETCH_EVENTS_MAX,
    PTUBES_FETCH_SECONDS_MAX,
    PTUBES_TABLES_MAX,
    SHARDS_MAX,
)
from penstock.model import TableName
from penstock.protobuf import Message, encode, length_head

_PARTITIONED_MESSAGE, _ERROR = 1, 3

# The frame of an event is a byte for the tag and a varint for the length. The varint takes 1, 2, 3 or 4 bytes
# if the framed length is below the first, second, third or fourth of these limits.
_FRAMED_LENGTHS = numpy.array([2 + (1 << 7), 3 + (1 << 14), 4 + (1 << 21), 5 + (1 << 28)], numpy.int64)


class CheckpointMode(StrEnum):
    """The start position that a client requests."""

    EARLIEST = "EARLIEST"
    LATEST = "LATEST"
    NORMAL = "NORMAL"


@dataclass(frozen=True)
class PtubesCheckpoint:
    """A position in the source's log, in Ptubes' terms. The event at the position and everything before it
    have been consumed.

    `binlog_file` is the number in the file's name, `binlog_offset` is the start of the event's transaction,
    and `event_index` is the event's index in its transaction. Indexes count from 0; -1 means before the first
    event. `server_id` is an int32, so an id of 2^31 or more is negative. `timestamp` is in milliseconds since
    1970, UTC.
    """

    mode: CheckpointMode = CheckpointMode.NORMAL
    uuid: str = ""
    transaction_id: int = 0
    event_index: int = -1
    server_id: int = 0
    binlog_file: int = 0
    binlog_offset: int = 0
    timestamp: int = 0
    version_ts: int = 0

    @property
    def names_offset(self) -> bool:
        """Return whether the checkpoint has a file and an offset."""
        return self.binlog_file > 0 and self.binlog_offset > 0

    @property
    def names_transaction(self) -> bool:
        """Return whether the checkpoint has a transaction's GTID."""
        return self.transaction_id > 0 and self.uuid.strip("0-") != ""

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Parse MysqlCheckpoint. Raises OptionInvalid."""
        fields = _Fields(value, "buffaloCheckpoint")
        mode = fields.text("checkpointMode")
        if mode not in CheckpointMode.__members__:
            raise OptionInvalid(f"checkpointMode {mode!r} is none of {', '.join(CheckpointMode)}")
        return cls(
            CheckpointMode(mode),
            fields.text("uuid", ""),
            fields.integer("transactionId", 0),
            fields.integer("eventIndex", -1),
            fields.integer("serverId", 0),
            fields.integer("binlogFile", 0),
            fields.integer("binlogOffset", 0),
            fields.integer("timestamp", 0),
            fields.integer("versionTs", 0),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the values shown to monitors."""
        return {
            "serverId": self.server_id,
            "binlogId": self.binlog_file,
            "binlogOffset": self.binlog_offset,
            "uuid": self.uuid,
            "txnId": self.transaction_id,
            "eventIndex": self.event_index,
            "timestamp": self.timestamp,
        }

    def encode(self) -> bytes:
        """Return the protobuf message."""
        numbers = (
            self.transaction_id,
            self.event_index,
            self.server_id,
            self.binlog_file,
            self.binlog_offset,
            self.timestamp,
        )
        fields: list[tuple[int, int | str]] = [(1, self.uuid), *enumerate(numbers, 2), (9, self.version_ts)]
        return encode(*((number, value) for number, value in fields if value))

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Parse the protobuf message. Raises EventMalformed."""
        message = Message(content)
        numbers = [message.signed(number) for number in (2, 3, 4, 5, 6, 7, 9)]
        return cls(CheckpointMode.NORMAL, message.text(1), *numbers)


# --- Requests -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PtubesSubscription:
    """A client's subscription and where it starts.

    `task` is the name that the client gives itself. `tables` are listed individually. `shards` are the
    numbers of the consumed shards, out of `shard_count`.
    """

    instance: str
    task: str
    tables: tuple[TableName, ...]
    shard_count: int
    shards: tuple[int, ...]
    checkpoint: PtubesCheckpoint
    need_end: bool = True
    need_ddl: bool = True
    codec: str = "PROTOCOL_BUFFER"
    token: str = ""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse ReaderConnectionConfig, or a subscribe request. Raises OptionInvalid."""
        whole = _Fields(_json(body), "the request")
        group = _Fields(whole.value("serviceGroupInfo"), "serviceGroupInfo")
        cluster = _Fields(whole.value("partitionClusterInfo"), "partitionClusterInfo")
        shard_count = cluster.integer("partitionTotal")
        shards = cluster.integers("partitionSet")
        if not 0 < shard_count <= SHARDS_MAX:
            raise OptionInvalid(f"partitionTotal {shard_count} is not in 1..{SHARDS_MAX}")
        tables = tuple(_tables(group.value("databaseInfoSet")))
        if not tables:
            raise OptionInvalid("databaseInfoSet names no table")
        if len(tables) > PTUBES_TABLES_MAX:
            raise OptionInvalid(f"databaseInfoSet names {len(tables)} tables: at most {PTUBES_TABLES_MAX}")
        if any(not 0 <= shard < shard_count for shard in shards):
            raise OptionInvalid(f"partitionSet names shards outside of 0..{shard_count - 1}")
        return cls(
            instance=group.text("serviceGroupName"),
            task=group.text("taskName", ""),
            tables=tables,
            shard_count=shard_count,
            shards=tuple(sorted(set(shards))),
            checkpoint=PtubesCheckpoint.from_json(whole.value("buffaloCheckpoint")),
            need_end=whole.truth("needEndTransaction", True),
            need_ddl=whole.truth("needDDL", True),
            codec=whole.text("codec", "PROTOCOL_BUFFER"),
            token=whole.text("token", ""),
        )


@dataclass(frozen=True)
class FetchRequest:
    """The limits of a response: its size, and how long to wait. The response ends at the first limit that is
    reached.
    """

    events_max: int
    bytes_max: int
    seconds_max: float

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a fetchMessages request, limited to the daemon's own bounds. Raises OptionInvalid."""
        fields = _Fields(_json(body), "the request")
        events, size = fields.integer("batchSize"), fields.integer("maxByteSize")
        milliseconds = fields.integer("timeoutMs")
        if events < 1 or size < 1 or milliseconds < 0:
            raise OptionInvalid("batchSize and maxByteSize are at least 1, timeoutMs at least 0")
        return cls(
            min(events, PTUBES_FETCH_EVENTS_MAX),
            min(size, PTUBES_FETCH_BYTES_MAX),
            min(milliseconds / 1000, PTUBES_FETCH_SECONDS_MAX),
        )


class _Fields:
    """The fields of a JSON object by name. Each method raises OptionInvalid."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise OptionInvalid(f"{what} is no JSON object")
        self._values = value
        self._what = what

    def value(self, name: str) -> Any:
        """Return a required value."""
        value = self._values.get(name)
        if value is None:
            raise OptionInvalid(f"{self._what} has no {name}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text, or the default if it is missing."""
        text: str = self._typed(name, str, default)
        return text

    def truth(self, name: str, default: bool) -> bool:
        """Return a boolean, or the default if it is missing."""
        flag: bool = self._typed(name, bool, default)
        return flag

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a 64-bit integer, or the default if it is missing."""
        number: int = self._typed(name, int, default)
        if isinstance(number, bool) or not -(1 << 63) <= number < 1 << 63:
            raise OptionInvalid(f"{name} is no integer of 64 bits")
        return number

    def integers(self, name: str) -> list[int]:
        """Return a list of integers."""
        numbers = self.value(name)
        if isinstance(numbers, list) and all(type(number) is int for number in numbers):
            return numbers
        raise OptionInvalid(f"{name} is no list of integers")

    def _typed(self, name: str, kind: type[Any], default: Any) -> Any:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, kind):
            raise OptionInvalid(
                f"{self._what} has no {name}" if value is None else f"{name} is not {kind.__name__}"
            )
        return value


def _json(body: bytes) -> Any:
    try:
        value = json.loads(body)
        # JSON allows a lone surrogate, but text with one cannot be encoded.
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as problem:
        raise OptionInvalid("the request is no JSON") from problem


def _tables(databases: Any) -> Iterator[TableName]:
    for database_fields in databases if isinstance(databases, list) else [databases]:
        fields = _Fields(database_fields, "databaseInfoSet")
        database, tables = fields.text("databaseName"), fields.value("tableNames")
        if not isinstance(tables, list) or not all(isinstance(table, str) and table for table in tables):
            raise OptionInvalid("tableNames is no list of names")
        if not database:
            raise OptionInvalid("databaseName is empty")
        yield from (TableName(database, table) for table in tables)


# --- Responses ------------------------------------------------------------------------------


class ShardMessages:
    """The events of one shard in one response, with their number and their size without framing."""

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self._framed: list[memoryview] = []

    def add(self, values: pyarrow.LargeBinaryArray) -> None:
        """Add framed events without copying their buffer."""
        lengths, content = _content_of(values)
        self.count += len(lengths)
        self.size += int(payload_bytes(lengths).sum())
        self._framed.append(content)

    def encode(self) -> Iterator[bytes | memoryview]:
        """Yield the parts of the RdsMessage."""
        yield encode((1, self.count), (2, self.size))
        yield from self._framed


def envelope(shards: Sequence[tuple[int, ShardMessages]], latest: bytes | None) -> bytes:
    """Return an RdsEnvelope: the messages of each shard, and `latest`, an encoded Checkpoint.

    Without messages the envelope is empty. totalEventCount counts an event once for each of its shards.
    """
    partitioned: list[bytes | memoryview] = []
    for shard, messages in shards:
        parts = list(messages.encode())
        size = sum(len(part) for part in parts)
        entry = encode((1, shard)) + length_head(2, size)
        partitioned += [length_head(1, len(entry) + size), entry, *parts]
    whole: list[bytes | memoryview] = [encode((2, _PARTITIONED_MESSAGE))]
    if partitioned:
        whole += [length_head(3, sum(len(part) for part in partitioned)), *partitioned]
        whole.append(encode((6, sum(messages.count for _, messages in shards))))
    if latest is not None:
        whole.append(encode((8, latest)))
    return b"".join(whole)


def error_envelope(code: int, message: str) -> bytes:
    """Return an RdsEnvelope that reports why there are no more events; `code` is not 0."""
    return encode((2, _ERROR), (4, code), (5, message))


def payload_bytes(framed: Any) -> Any:
    """Return the lengths of events without framing, from an array of framed lengths."""
    return framed - 2 - numpy.searchsorted(_FRAMED_LENGTHS, framed, side="right")


def framed_bytes(values: pyarrow.LargeBinaryArray) -> Any:
    """Return the lengths of framed events."""
    return _content_of(values)[0]


def checkpoint_in(framed_event: bytes) -> bytes:
    """Return the encoded Checkpoint of one framed event. Raises EventMalformed."""
    return bytes(_field(_field(_field(framed_event, 3), 1), 2))


def defined_in(framed_event: bytes) -> str:
    """Return the subject of a framed definition: `db.table`, or a database. Raises EventMalformed."""
    return bytes(_field(_field(framed_event, 3), 6)).decode(errors="replace")


def _content_of(values: pyarrow.LargeBinaryArray) -> tuple[Any, memoryview]:
    """Return the lengths of contiguous values, and their bytes."""
    if not len(values):
        return numpy.zeros(0, numpy.int64), memoryview(b"")
    _, offsets, content = values.buffers()
    bounds = numpy.frombuffer(offsets, numpy.int64)[values.offset : values.offset + len(values) + 1]
    return numpy.diff(bounds), memoryview(content)[int(bounds[0]) : int(bounds[-1])]


def _field(message: bytes | memoryview, number: int) -> memoryview:
    fields = Message(message)
    if not fields.has(number):
        raise EventMalformed("an event is not what the kernel writes for Ptubes' clients")
    return fields.view(number)
