# SPDX-License-Identifier: Apache-2.0
"""The replica client: requests a server's log and passes on its bytes as the network delivers them.

PyMySQL opens the session. Once the session variables are set, the client takes over the socket. Sources:
MySQL's "Replication Protocol" pages and Binlog_sender, MariaDB's "Replication Protocol" pages and
sql_repl.cc.
"""

import contextlib
import random
import select
import socket
import ssl
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from penstock._native import BlockCutter, Framer, encode_gtid_set
from penstock.closing import Closing
from penstock.errors import ConnectionLost
from penstock.gtid_sets import mariadb_position
from penstock.limits import HEARTBEAT_SECONDS, READ_BYTES, SILENCE_SECONDS_MAX
from penstock.model import Position, ServerAddress
from penstock.mysql.acknowledge import acknowledgement, ask_for_marks
from penstock.mysql.connection import MARIADB, Connection, ServerIdentity, connect
from penstock.mysql.refusal import refusal_of

COM_BINLOG_DUMP = 0x12
COM_REGISTER_REPLICA = 0x15
COM_BINLOG_DUMP_GTID = 0x1E

FLAG_NON_BLOCKING = 1
FLAG_MARIADB_ANNOTATE = 2
FLAG_MYSQL_HEARTBEAT_WITH_WIDE_POSITION = 2

# COM_BINLOG_DUMP has a 32-bit position. The first event follows the four magic bytes.
DUMP_OFFSET_MAX = (1 << 32) - 1
FIRST_EVENT_OFFSET = 4

# The kernel doubles this value and limits it to net.core.rmem_max. A larger buffer lets the server send
# ahead.
_RECEIVE_BUFFER_BYTES = 8 << 20

# Random ids avoid the low numbers that people give their servers.
_SERVER_ID_RANDOM_MIN = 1 << 30


@dataclass(frozen=True)
class ReplicaName:
    """How a replica identifies itself.

    If two dumps have the same `uuid` (MySQL) or the same `server_id` (MariaDB), the server ends the older
    one. `host` is listed by SHOW REPLICAS. It is unique, so that a replica can recognize its own row.
    """

    server_id: int
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    host: str = field(default_factory=lambda: f"penstock-{uuid.uuid4().hex}")

    @classmethod
    def choose(cls, server_id: int | None) -> Self:
        """Return a new name, with a random id by default."""
        return cls(server_id or random.SystemRandom().randrange(_SERVER_ID_RANDOM_MIN, 1 << 32))


@dataclass(frozen=True)
class DumpStart:
    """Where a dump starts: either a file position or the end of a GTID set."""

    position: Position | None = None
    gtid_set: str | None = None

    def __post_init__(self) -> None:
        assert (self.position is None) != (self.gtid_set is None), "a position or a GTID set, not both"

    def __str__(self) -> str:
        return str(self.position) if self.position is not None else f"GTID set {self.gtid_set!r}"


class ReplicaStream(Closing):
    """The raw bytes of one dump. As a context manager, it closes itself.

    `start` is where the stream actually starts. For a position that the protocol cannot express, that is the
    head of the position's file, and the reader skips the bytes before the position. `identity` is the
    identity of the server. `delivered` is true once any event has been passed on. `has_read_all` is true if
    the last read took everything that had arrived, false if that is not known. `semi_sync` is true if the
    server marks the events to acknowledge.
    """

    def __init__(
        self,
        address: ServerAddress,
        stream: socket.socket,
        read_ahead: bytes,
        *,
        start: DumpStart,
        identity: ServerIdentity,
        name: ReplicaName,
        bounded: bool,
        semi_sync: bool = False,
    ) -> None:
        self.address = address
        self.start = start
        self.identity = identity
        self.name = name
        self.bounded = bounded
        self.semi_sync = semi_sync
        self.delivered = False
        self.has_read_all = False
        self._socket: socket.socket | None = stream
        self._read_ahead = read_ahead

    def receive_into(self, buffer: memoryview) -> int:
        """Receive available bytes into the buffer and return their number, at least 1.

        Waits for at most SILENCE_SECONDS_MAX. The server sends a heartbeat every HEARTBEAT_SECONDS, so after
        a longer silence the connection is dead. Raises ConnectionLost.
        """
        if self._read_ahead:
            size = min(len(buffer), len(self._read_ahead))
            buffer[:size] = self._read_ahead[:size]
            self._read_ahead = self._read_ahead[size:]
            self.has_read_all = False
            return size
        if self._socket is None:
            raise ConnectionLost(f"{self.address}: the stream is closed")
        try:
            size = self._socket.recv_into(buffer)
        except (TimeoutError, BlockingIOError) as problem:
            raise ConnectionLost(
                f"{self.address}: no event and no heartbeat for {SILENCE_SECONDS_MAX:g} seconds",
                silent_seconds=SILENCE_SECONDS_MAX,
            ) from problem
        except OSError as problem:
            raise ConnectionLost(f"{self.address}: {problem}") from problem
        if size == 0:
            raise ConnectionLost(f"{self.address}: the server closed the connection")
        self.has_read_all = size < len(buffer) and not isinstance(self._socket, ssl.SSLSocket)
        return size

    def more_waiting(self) -> bool:
        """Return whether bytes have arrived that were not received yet, without waiting."""
        stream = self._socket
        if self._read_ahead or stream is None:
            return bool(self._read_ahead)
        if isinstance(stream, ssl.SSLSocket) and stream.pending():
            return True
        poll = select.poll()
        try:
            poll.register(stream, select.POLLIN)
        except ValueError:
            # The socket was closed in the meantime. The next receive raises the error.
            return False
        return bool(poll.poll(0))

    @property
    def can_drain(self) -> bool:
        """Whether `drain` can read the socket: its bytes are neither encrypted nor read ahead."""
        stream = self._socket
        return stream is not None and not self._read_ahead and not isinstance(stream, ssl.SSLSocket)

    def drain(self, cutter: BlockCutter, packets: memoryview, bytes_max: int) -> bytes:
        """Receive available bytes directly into a cutter; see `BlockCutter.drain`. Raises ConnectionLost."""
        stream = self._socket
        if stream is None:
            raise ConnectionLost(f"{self.address}: the stream is closed")
        try:
            waits_seconds = stream.gettimeout()
            stream.settimeout(0.0)
            try:
                return cutter.drain(stream.fileno(), packets, bytes_max)
            finally:
                stream.settimeout(waits_seconds)
        except OSError as problem:
            raise ConnectionLost(f"{self.address}: {problem}") from problem

    def acknowledge(self, file: str, offset: int) -> None:
        """Report everything up to an offset of a file as durable. Raises ConnectionLost."""
        if self._socket is None:
            raise ConnectionLost(f"{self.address}: the stream is closed")
        try:
            self._socket.sendall(acknowledgement(file, offset))
        except OSError as problem:
            raise ConnectionLost(f"{self.address}: {problem}") from problem

    def event_chunks(self) -> Iterator[memoryview]:
        """Yield event bytes without packet headers until a bounded dump ends.

        A chunk may end inside an event. If the server refuses, it is queried for the cause (see `refusal`),
        so PositionPurged, DumpReplaced and PrivilegeMissing are raised as such.
        """
        framer = Framer(semi_sync=self.semi_sync)
        buffer, filled = memoryview(bytearray(READ_BYTES)), 0
        while not framer.end:
            if filled == len(buffer):
                # The packet is longer than the buffer. A packet has at most 16 MiB, which limits the growth.
                buffer = memoryview(bytearray(buffer) + bytes(len(buffer)))
            filled += self.receive_into(buffer[filled:])
            consumed = framer.feed(buffer[:filled])
            buffer[: filled - consumed] = buffer[consumed:filled]
            filled -= consumed
            events = framer.take()
            if events:
                self.delivered = True
                yield memoryview(events)
            if framer.error is not None:
                raise refusal_of(self, *framer.error)
        if not self.bounded:
            raise ConnectionLost(
                f"{self.address}: the server ended the stream, as it does when it shuts down"
            )

    def interrupt(self) -> None:
        """Wake a thread that is receiving; call this from another thread. The receiving thread gets
        ConnectionLost.
        """
        stream = self._socket
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. The server's dump thread ends at its next write. Idempotent."""
        stream, self._socket = self._socket, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()


def open_stream(
    address: ServerAddress,
    start: DumpStart,
    *,
    bounded: bool = False,
    name: ReplicaName | None = None,
    semi_sync: bool = False,
) -> ReplicaStream:
    """Connect and request the log from `start` on.

    A bounded stream ends at the current end of the log; otherwise it waits for more. With `semi_sync`, the
    client tells a server that supports it that commits will be acknowledged. A refusal arrives with the first
    bytes, so `event_chunks` raises it. Propagates errors from `connect`.
    """
    name = name or ReplicaName.choose(address.server_id)
    with connect(address) as connection:
        identity = connection.identity()
        start = _to_protocol_start(start, identity)
        _set_session_variables(connection, identity, name, start)
        has_marks = semi_sync and ask_for_marks(connection)
        _register(connection, name)
        stream, read_ahead = connection.release_socket()
    try:
        _configure_socket(stream)
        _limit_silence(stream)
        opened = ReplicaStream(
            address,
            stream,
            read_ahead,
            start=start,
            identity=identity,
            name=name,
            bounded=bounded,
            semi_sync=has_marks,
        )
        _send(stream, _dump_command(start, identity, name, bounded))
    except OSError as problem:
        stream.close()
        raise ConnectionLost(f"{address}: {problem}") from problem
    except BaseException:
        stream.close()
        raise
    return opened


def _to_protocol_start(start: DumpStart, identity: ServerIdentity) -> DumpStart:
    """Return the start, or the head of its file if the offset does not fit into the protocol."""
    position = start.position
    if position is None or position.offset <= DUMP_OFFSET_MAX or _takes_wide_offset(identity):
        return start
    return DumpStart(Position(position.epoch, position.file, FIRST_EVENT_OFFSET))


def _takes_wide_offset(identity: ServerIdentity) -> bool:
    """Return whether the server accepts COM_BINLOG_DUMP_GTID, which has a 64-bit position.

    MySQL does if GTIDs are on.
    """
    return identity.flavor != MARIADB and identity.gtid_mode.startswith("ON")


def _set_session_variables(
    connection: Connection, identity: ServerIdentity, name: ReplicaName, start: DumpStart
) -> None:
    """Set the session variables that a dump thread reads, under their old and new names."""
    heartbeat_ns = int(HEARTBEAT_SECONDS * 1_000_000_000)
    settings: dict[str, int | str] = {}
    for prefix in ("master", "source"):
        settings[f"{prefix}_heartbeat_period"] = heartbeat_ns
        # The decoder verifies checksums, so the server can send every event as it is in the file, with or
        # without a checksum.
        settings[f"{prefix}_binlog_checksum"] = "CRC32"
    if identity.flavor == MARIADB:
        # Capability 4 means "supports GTID events". Without it the server rewrites them into BEGIN
        # statements.
        settings["mariadb_slave_capability"] = 4
        if start.gtid_set is not None:
            settings["slave_connect_state"] = mariadb_position(start.gtid_set)
            settings["slave_gtid_strict_mode"] = 1
            settings["slave_gtid_ignore_duplicates"] = 0
    else:
        settings["slave_uuid"] = settings["replica_uuid"] = name.uuid
    marks = ", ".join(f"@{variable} = %s" for variable in settings)
    connection.query(f"SET {marks}", list(settings.values()))


def _configure_socket(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _limit_silence(stream: socket.socket) -> None:
    """Let a read or write fail if the server is silent for too long.

    With the system's timeout, a read takes one system call; with Python's, it takes two.
    """
    if isinstance(stream, ssl.SSLSocket):
        stream.settimeout(SILENCE_SECONDS_MAX)
        return
    stream.settimeout(None)
    seconds, microseconds = divmod(round(SILENCE_SECONDS_MAX * 1e6), 1_000_000)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        stream.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, microseconds))


def _register(connection: Connection, name: ReplicaName) -> None:
    """Register for SHOW REPLICAS, without password and port: nobody connects to this replica."""
    host = name.host.encode()
    payload = struct.pack("<IB", name.server_id, len(host)) + host + struct.pack("<BBHII", 0, 0, 0, 0, 0)
    connection.command(COM_REGISTER_REPLICA, payload)


def _dump_command(start: DumpStart, identity: ServerIdentity, name: ReplicaName, bounded: bool) -> bytes:
    """Return the command that starts the dump."""
    flags = FLAG_NON_BLOCKING if bounded else 0
    if identity.flavor == MARIADB:
        flags |= FLAG_MARIADB_ANNOTATE
        # With @slave_connect_state set, the server ignores file and position.
        file, offset = _file_and_offset(start)
        return struct.pack("<BIHI", COM_BINLOG_DUMP, offset, flags, name.server_id) + file
    flags |= FLAG_MYSQL_HEARTBEAT_WITH_WIDE_POSITION
    file, offset = _file_and_offset(start)
    if start.gtid_set is None and offset <= DUMP_OFFSET_MAX:
        return struct.pack("<BIHI", COM_BINLOG_DUMP, offset, flags, name.server_id) + file
    gtids = encode_gtid_set(start.gtid_set or "")
    head = struct.pack("<BHII", COM_BINLOG_DUMP_GTID, flags, name.server_id, len(file)) + file
    return head + struct.pack("<QI", offset, len(gtids)) + gtids


def _file_and_offset(start: DumpStart) -> tuple[bytes, int]:
    if start.position is None:
        return b"", FIRST_EVENT_OFFSET
    return start.position.file.encode(), start.position.offset


def _send(stream: socket.socket, command: bytes) -> None:
    """Send a command as one packet. All commands are far smaller than 16 MiB."""
    assert len(command) < 0xFFFFFF, "a command is one packet"
    stream.sendall(struct.pack("<I", len(command)) + command)
