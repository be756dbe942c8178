# SPDX-License-Identifier: Apache-2.0
"""Canal's frames: a 32-bit length, then a protobuf `Packet`, in both directions.

The messages are few and small, so they are parsed and written here by hand, with limits. The entries of a
batch are large. The kernel produces them as encoded fields of `Messages`, and they are passed through.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from penstock.errors import EventMalformed, LimitExceeded, OptionInvalid
from penstock.limits import CANAL_FRAME_BYTES_MAX
from penstock.protobuf import encode, fields_of, length_head

LENGTH_BYTES = 4

# The `Messages.batch_id` of an empty batch.
NO_BATCH = -1


class PacketType(IntEnum):
    """The type of a packet's body."""

    UNSET = 0
    HANDSHAKE = 1
    CLIENTAUTHENTICATION = 2
    ACK = 3
    SUBSCRIPTION = 4
    UNSUBSCRIPTION = 5
    GET = 6
    MESSAGES = 7
    CLIENTACK = 8
    SHUTDOWN = 9
    DUMP = 10
    HEARTBEAT = 11
    CLIENTROLLBACK = 12


_TYPES = frozenset(int(packet_type) for packet_type in PacketType)


@dataclass(frozen=True)
class Packet:
    """The content of one frame. `compression` values 0 and 1 mean none. `version` and the magic number are
    ignored.
    """

    type: int
    body: bytes
    compression: int = 0

    @property
    def type_name(self) -> str:
        """The name of the packet's type, or the number of an unknown type."""
        return PacketType(self.type).name if self.type in _TYPES else str(self.type)


@dataclass(frozen=True)
class ClientAuth:
    """A client's credentials. Timeouts are in milliseconds, 0 if not set."""

    username: str
    password: bytes
    read_timeout_ms: int
    write_timeout_ms: int
    destination: str
    client_id: str
    filter: str

    def __repr__(self) -> str:
        return f"ClientAuth(username={self.username!r}, destination={self.destination!r})"


@dataclass(frozen=True)
class Request:
    """The fields of a request: those that every request after authentication has, and those that only some
    have.

    `timeout` and `unit` are None if the client did not set them, which differs from 0.
    """

    destination: str
    client_id: str
    filter: str = ""
    batch_id: int = 0
    fetch_size: int = 0
    timeout: int | None = None
    unit: int | None = None


# --- Reading --------------------------------------------------------------------------------


def frame_length(header: bytes, limit: int = CANAL_FRAME_BYTES_MAX) -> int:
    """Return the length of a frame in bytes, not counting its first four bytes. Raises LimitExceeded."""
    (length,) = struct.unpack(">I", header)
    if length > limit:
        raise LimitExceeded(f"a frame announces {length} bytes; at most {limit} are taken")
    return int(length)


def read_packet(frame: bytes) -> Packet:
    """Parse a frame's content. Raises OptionInvalid if it is not a packet."""
    kind, body, compression = 0, b"", 0
    for number, value in _fields(frame):
        if number == 3:
            kind = _number(value)
        elif number == 4:
            compression = _number(value)
        elif number == 5:
            body = _bytes(value)
    return Packet(kind, body, compression)


def read_client_auth(body: bytes) -> ClientAuth:
    """Parse the body of a CLIENTAUTHENTICATION. Raises OptionInvalid."""
    fields = dict(_fields(body))
    return ClientAuth(
        username=_text(fields.get(1, b"")),
        password=_bytes(fields.get(2, b"")),
        read_timeout_ms=_number(fields.get(3, 0)),
        write_timeout_ms=_number(fields.get(4, 0)),
        destination=_text(fields.get(5, b"")),
        client_id=_text(fields.get(6, b"")),
        filter=_text(fields.get(7, b"")),
    )


def read_subscription(body: bytes) -> Request:
    """Parse the body of a SUBSCRIPTION or UNSUBSCRIPTION. Raises OptionInvalid."""
    fields = dict(_fields(body))
    return Request(
        _text(fields.get(1, b"")), _text(fields.get(2, b"")), filter=_text(fields.get(7, b"")).strip()
    )


def read_get(body: bytes) -> Request:
    """Parse the body of a GET; `auto_ack` is ignored, as in Canal. Raises OptionInvalid."""
    fields = dict(_fields(body))
    return Request(
        _text(fields.get(1, b"")),
        _text(fields.get(2, b"")),
        fetch_size=_number(fields.get(3, 0)),
        timeout=_number(fields[4]) if 4 in fields else None,
        unit=_number(fields[5]) if 5 in fields else None,
    )


def read_batch_request(body: bytes) -> Request:
    """Parse the body of a CLIENTACK or CLIENTROLLBACK. Raises OptionInvalid."""
    fields = dict(_fields(body))
    return Request(_text(fields.get(1, b"")), _text(fields.get(2, b"")), batch_id=_number(fields.get(3, 0)))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field. Raises OptionInvalid at the first malformed field."""
    try:
        for number, value in fields_of(message):
            yield number, value if isinstance(value, int) else bytes(value)
    except EventMalformed as problem:
        raise _malformed(problem.message) from problem


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise _malformed("bytes where a number belongs")
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise _malformed("a number where bytes belong")
    return value


def _text(value: int | bytes) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as problem:
        raise _malformed("text that is not UTF-8") from problem


def _malformed(what: str) -> OptionInvalid:
    return OptionInvalid(f"a frame is no Canal packet: {what}")


# --- Writing --------------------------------------------------------------------------------


def handshake(seed: bytes) -> bytes:
    """Return the frame that opens a connection."""
    return _versioned(PacketType.HANDSHAKE, encode((2, seed)))


def ack() -> bytes:
    """Return the frame that reports success."""
    return _versioned(PacketType.ACK, b"")


def ack_error(code: int, text: str) -> bytes:
    """Return the frame that reports an error."""
    return _versioned(PacketType.ACK, encode((1, code), (2, text)))


def no_messages() -> bytes:
    """Return the frame of an empty batch."""
    return _versioned(PacketType.MESSAGES, encode((1, NO_BATCH)))


def messages_head(batch_id: int, entries_bytes: int) -> bytes:
    """Return the start of a batch's frame, followed by `entries_bytes` of `Messages.messages` fields.

    The frame has no version field. Canal omits this field too when it sends entries that are already encoded.
    """
    identity = encode((1, batch_id))
    body_bytes = len(identity) + entries_bytes
    packet = encode((3, PacketType.MESSAGES)) + length_head(5, body_bytes) + identity
    return struct.pack(">I", len(packet) + entries_bytes) + packet


def _versioned(kind: PacketType, body: bytes) -> bytes:
    packet = encode((2, 1), (3, kind), *([(5, body)] if body else []))
    return struct.pack(">I", len(packet)) + packet
