# SPDX-License-Identifier: Apache-2.0
"""The replica client: asks a server for its log and hands out the bytes as the network gives them.

PyMySQL opens the session; after the session variables are set the socket is ours. Sources: MySQL's
"Replication Protocol" pages and Binlog_sender, MariaDB's "Replication Protocol" pages and sql_repl.cc.
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

from penstock._native import Framer, encode_gtid_set
from penstock.errors import ConnectionLost
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

# COM_BINLOG_DUMP has a 32-bit position; the first event follows the four bytes of magic.
DUMP_OFFSET_MAX = (1 << 32) - 1
FIRST_EVENT_OFFSET = 4

# The kernel doubles and bounds this by net.core.rmem_max; a larger one lets the server run ahead of us.
_RECEIVE_BUFFER_BYTES = 8 << 20

# Random ids keep out of the low numbers people give their servers.
_SERVER_ID_RANDOM_MIN = 1 << 30


@dataclass(frozen=True)
class ReplicaName:
    """How a replica names itself.

    MySQL ends the older of two dumps with one `uuid`, MariaDB that of two with one `server_id`.
    `host` is what SHOW REPLICAS lists, unique, so that we know our own row again.
    """

    server_id: int
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    host: str = field(default_factory=lambda: f"penstock-{uuid.uuid4().hex}")

    @classmethod
    def choose(cls, server_id: int | None) -> Self:
        """Return a fresh name, under a random id unless one is given."""
        return cls(server_id or random.SystemRandom().randrange(_SERVER_ID_RANDOM_MIN, 1 << 32))


@dataclass(frozen=True)
class DumpStart:
    """Where a dump begins: a file position, or after a GTID set. Exactly one is given."""

    position: Position | None = None
    gtid_set: str | None = None

    def __post_init__(self) -> None:
        assert (self.position is None) != (self.gtid_set is None), "a position or a GTID set, not both"

    def __str__(self) -> str:
        return str(self.position) if self.position is not None else f"GTID set {self.gtid_set!r}"


class ReplicaStream:
    """The raw bytes of one dump. A context manager that closes.

    `start` is where the stream begins in truth: a position the protocol cannot express begins at
    the head of its file, and the reader skips. `identity` is the server's. `delivered` tells
    whether any event has been handed out. `semi_sync` tells whether the server marks the events that it wants
    acknowledged.
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
        self._socket: socket.socket | None = stream
        self._read_ahead = read_ahead

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive_into(self, buffer: memoryview) -> int:
        """Put what has arrived into the buffer and return its length, at least 1.

        Waits for bytes at most SILENCE_SECONDS_MAX: the server is asked for a heartbeat every
        HEARTBEAT_SECONDS, so longer silence is a dead connection. Raises ConnectionLost.
        """
        if self._read_ahead:
            size = min(len(buffer), len(self._read_ahead))
            buffer[:size] = self._read_ahead[:size]
            self._read_ahead = self._read_ahead[size:]
            return size
        if self._socket is None:
            raise ConnectionLost(f"{self.address}: the stream is closed")
        try:
            size = self._socket.recv_into(buffer)
        except TimeoutError as problem:
            raise ConnectionLost(
                f"{self.address}: no event and no heartbeat for {SILENCE_SECONDS_MAX:g} seconds"
            ) from problem
        except OSError as problem:
            raise ConnectionLost(f"{self.address}: {problem}") from problem
        if size == 0:
            raise ConnectionLost(f"{self.address}: the server closed the connection")
        return size

    def more_waiting(self) -> bool:
        """Tell whether bytes have arrived that were not received yet, without waiting."""
        stream = self._socket
        if self._read_ahead or stream is None:
            return bool(self._read_ahead)
        if isinstance(stream, ssl.SSLSocket) and stream.pending():
            return True
        poll = select.poll()
        try:
            poll.register(stream, select.POLLIN)
        except ValueError:
            # It was closed meanwhile: whoever receives is told.
            return False
        return bool(poll.poll(0))

    def acknowledge(self, file: str, offset: int) -> None:
        """Tell the server that all up to an offset of a file is durable. Raises ConnectionLost."""
        if self._socket is None:
            raise ConnectionLost(f"{self.address}: the stream is closed")
        try:
            self._socket.sendall(acknowledgement(file, offset))
        except OSError as problem:
            raise ConnectionLost(f"{self.address}: {problem}") from problem

    def event_chunks(self) -> Iterator[memoryview]:
        """Yield event bytes, back to back and without packet headers, until a bounded dump ends.

        A chunk may end inside an event. When the server refuses, the reason is found by asking it
        (see `refusal`), so PositionPurged, DumpReplaced and PrivilegeMissing arrive as themselves.
        """
        framer = Framer(semi_sync=self.semi_sync)
        held, filled = memoryview(bytearray(READ_BYTES)), 0
        while not framer.end:
            if filled == len(held):
                # The packet is longer than the buffer. A packet has at most 16 MiB, so this ends.
                held = memoryview(bytearray(held) + bytes(len(held)))
            filled += self.receive_into(held[filled:])
            consumed = framer.feed(held[:filled])
            held[: filled - consumed] = held[consumed:filled]
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
        """Wake whoever receives, from another thread: it is told that the connection is lost."""
        stream = self._socket
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; the server's dump thread ends at its next write. Twice is harmless."""
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
    """Connect and ask for the log from `start` on.

    A bounded stream ends where the log ends now; the other one waits for more. With `semi_sync` the server is
    told that commits will be acknowledged, where it knows of that. A refusal comes with
    the first bytes, so it is `event_chunks` that raises it. Raises what `connect` raises.
    """
    name = name or ReplicaName.choose(address.server_id)
    with connect(address) as connection:
        identity = connection.identity()
        start = _expressible(start, identity)
        _introduce(connection, identity, name, start)
        marked = semi_sync and ask_for_marks(connection)
        _register(connection, name)
        stream, read_ahead = connection.release_socket()
    try:
        _widen(stream)
        stream.settimeout(SILENCE_SECONDS_MAX)
        opened = ReplicaStream(
            address,
            stream,
            read_ahead,
            start=start,
            identity=identity,
            name=name,
            bounded=bounded,
            semi_sync=marked,
        )
        _send(stream, _dump_command(start, identity, name, bounded))
    except OSError as problem:
        stream.close()
        raise ConnectionLost(f"{address}: {problem}") from problem
    except BaseException:
        stream.close()
        raise
    return opened


def _expressible(start: DumpStart, identity: ServerIdentity) -> DumpStart:
    """Return the start, or the head of its file where its offset does not fit the protocol."""
    position = start.position
    if position is None or position.offset <= DUMP_OFFSET_MAX or _takes_wide_offset(identity):
        return start
    return DumpStart(Position(position.epoch, position.file, FIRST_EVENT_OFFSET))


def _takes_wide_offset(identity: ServerIdentity) -> bool:
    """COM_BINLOG_DUMP_GTID has a 64-bit position, and MySQL takes the command when GTIDs are on."""
    return identity.flavor != MARIADB and identity.gtid_mode.startswith("ON")


def _introduce(connection: Connection, identity: ServerIdentity, name: ReplicaName, start: DumpStart) -> None:
    """Set the session variables that a dump thread reads, under their old and new names."""
    heartbeat_ns = int(HEARTBEAT_SECONDS * 1_000_000_000)
    settings: dict[str, int | str] = {}
    for prefix in ("master", "source"):
        settings[f"{prefix}_heartbeat_period"] = heartbeat_ns
        # We read checksums, so the server sends every event as it is in the file, with or without one.
        settings[f"{prefix}_binlog_checksum"] = "CRC32"
    if identity.flavor == MARIADB:
        # 4 is "knows GTID events": without it they are rewritten into BEGIN statements.
        settings["mariadb_slave_capability"] = 4
        if start.gtid_set is not None:
            settings["slave_connect_state"] = start.gtid_set
            settings["slave_gtid_strict_mode"] = 1
            settings["slave_gtid_ignore_duplicates"] = 0
    else:
        settings["slave_uuid"] = settings["replica_uuid"] = name.uuid
    marks = ", ".join(f"@{variable} = %s" for variable in settings)
    connection.query(f"SET {marks}", list(settings.values()))


def _widen(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    if stream.family != socket.AF_UNIX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _register(connection: Connection, name: ReplicaName) -> None:
    """Show up in SHOW REPLICAS. Neither password nor port is told: nobody may connect to us."""
    host = name.host.encode()
    payload = struct.pack("<IB", name.server_id, len(host)) + host + struct.pack("<BBHII", 0, 0, 0, 0, 0)
    connection.command(COM_REGISTER_REPLICA, payload)


def _dump_command(start: DumpStart, identity: ServerIdentity, name: ReplicaName, bounded: bool) -> bytes:
    """Return the command that starts the dump."""
    flags = FLAG_NON_BLOCKING if bounded else 0
    if identity.flavor == MARIADB:
        flags |= FLAG_MARIADB_ANNOTATE
        # With @slave_connect_state set, the server looks at neither file nor position.
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
    """Send a command as one packet: all of ours are far below 16 MiB."""
    assert len(command) < 0xFFFFFF, "a command is one packet"
    stream.sendall(struct.pack("<I", len(command)) + command)
