# SPDX-License-Identifier: Apache-2.0
"""A Canal client that shares no code with the server and uses the protobuf library for its messages."""

import hashlib
import socket
import struct
import time
from types import TracebackType
from typing import Any, Self

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.support.suite.patience import WAIT_SECONDS_MAX

# The daemon returns an empty batch after searching for this long, even before the end of the log.
SEARCH_SECONDS = 1.0

HANDSHAKE, CLIENTAUTHENTICATION, ACK, SUBSCRIPTION, UNSUBSCRIPTION, GET = 1, 2, 3, 4, 5, 6
MESSAGES, CLIENTACK, DUMP, CLIENTROLLBACK = 7, 8, 10, 12
TRANSACTIONBEGIN, ROWDATA, TRANSACTIONEND = 1, 2, 3
EVENTS = (
    "INSERT UPDATE DELETE CREATE ALTER ERASE QUERY TRUNCATE RENAME CINDEX DINDEX GTID XACOMMIT XAROLLBACK"
).split()

# Field numbers and types: i is a 32-bit number, l a 64-bit number, t a bool, s text and b bytes; * means
# repeated; a message type is given by its name. The package name is not part of the encoding. It differs from
# Canal's to avoid a clash.
_PACKAGE = "penstock.tests.canal"
_MESSAGES = {
    "Packet": "1i magic_number 2i version 3i type 4i compression 5b body",
    "Handshake": "1s communication_encoding 2b seeds 3i supported_compressions",
    "ClientAuth": "1s username 2b password 3i net_read_timeout 4i net_write_timeout 5s destination"
    " 6s client_id 7s filter 8l start_timestamp",
    "Ack": "1i error_code 2s error_message",
    "ClientAck": "1s destination 2s client_id 3l batch_id",
    "Sub": "1s destination 2s client_id 7s filter",
    "Get": "1s destination 2s client_id 3i fetch_size 4l timeout 5i unit 6t auto_ack",
    "Messages": "1l batch_id 2b* messages",
    "Entry": "1Header header 2i entryType 3b storeValue",
    "Header": "1i version 2s logfileName 3l logfileOffset 4l serverId 5s serverenCode 6l executeTime"
    " 7i sourceType 8s schemaName 9s tableName 10l eventLength 11i eventType 12Pair* props 13s gtid",
    "Column": "1i index 2i sqlType 3s name 4t isKey 5t updated 6t isNull 7Pair* props 8s value 9i length"
    " 10s mysqlType",
    "RowData": "1Column* beforeColumns 2Column* afterColumns 3Pair* props",
    "RowChange": "1l tableId 2i eventType 10t isDdl 11s sql 12RowData* rowDatas 13Pair* props"
    " 14s ddlSchemaName",
    "TransactionBegin": "1l executeTime 2s transactionId 3Pair* props 4l threadId",
    "TransactionEnd": "1l executeTime 2s transactionId 3Pair* props",
    "Pair": "1s key 2s value",
}


def _protobuf_classes() -> dict[str, Any]:
    """Return the class of each message. Every scalar tracks presence, as Canal does where presence
    matters.
    """
    field_type = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "i": field_type.TYPE_INT32,
        "l": field_type.TYPE_INT64,
        "t": field_type.TYPE_BOOL,
        "s": field_type.TYPE_STRING,
        "b": field_type.TYPE_BYTES,
    }
    file = descriptor_pb2.FileDescriptorProto(name="penstock_canal.proto", package=_PACKAGE, syntax="proto2")
    for name, text in _MESSAGES.items():
        message = file.message_type.add(name=name)
        words = text.split()
        for kind, field_name in zip(words[::2], words[1::2], strict=True):
            number = kind.rstrip("*").rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
            what = kind.rstrip("*").removeprefix(number)
            field = message.field.add(name=field_name, number=int(number))
            field.label = field_type.LABEL_REPEATED if kind.endswith("*") else field_type.LABEL_OPTIONAL
            if what in scalars:
                field.type = scalars[what]
            else:
                field.type, field.type_name = field_type.TYPE_MESSAGE, f".{_PACKAGE}.{what}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


PROTO = _protobuf_classes()


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def scramble(password: str, seed: bytes) -> bytes:
    """Return the password proof that the official client sends."""
    first = hashlib.sha1(password.encode()).digest()
    mask = hashlib.sha1(seed + hashlib.sha1(first).digest()).digest()
    return bytes(a ^ b for a, b in zip(first, mask, strict=True)).hex().encode()


class CanalClient:
    """One connection to a Canal server. As a context manager, it is open inside the block."""

    def __init__(
        self,
        port: int,
        destination: str = "shop",
        client_id: str = "1001",
        over: socket.socket | None = None,
    ) -> None:
        self.destination = destination
        self.client_id = client_id
        self.socket = over or socket.create_connection(("127.0.0.1", port), WAIT_SECONDS_MAX)
        self.socket.settimeout(WAIT_SECONDS_MAX)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb", buffering=1 << 20)
        packet = self.receive()
        assert (packet.version, packet.type) == (1, HANDSHAKE)
        self.seed = self.parse("Handshake", packet.body).seeds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.socket.close()

    # --- Packets ----------------------------------------------------------------------------

    @staticmethod
    def parse(name: str, content: bytes) -> Any:
        """Read a message."""
        return PROTO[name].FromString(content)

    def send_bytes(self, frame: bytes) -> None:
        """Send bytes with their length prefix."""
        self.socket.sendall(struct.pack(">I", len(frame)) + frame)

    def send(self, kind: int, name: str, **fields: Any) -> None:
        """Send a request."""
        body = PROTO[name](**fields).SerializeToString()
        self.send_bytes(PROTO["Packet"](type=kind, body=body).SerializeToString())

    def receive_bytes(self) -> bytes:
        """Return the content of the next frame. Raises EOFError at the end."""
        header = self._file.read(4)
        if len(header) < 4:
            raise EOFError("the server has closed the connection")
        length = struct.unpack(">I", header)[0]
        content = self._file.read(length)
        if len(content) < length:
            raise EOFError("the server has closed the connection inside a frame")
        return content

    def receive(self) -> Any:
        """Return the next packet."""
        return self.parse("Packet", self.receive_bytes())

    def expect_ack(self) -> None:
        """Expect a positive answer to a request. Raises Refused."""
        packet = self.receive()
        assert packet.type == ACK, packet
        self._raise_refusal(packet)

    def _raise_refusal(self, packet: Any) -> None:
        answer = self.parse("Ack", packet.body)
        if answer.error_code:
            raise Refused(answer.error_code, answer.error_message)

    # --- Requests ---------------------------------------------------------------------------

    def log_in(self, user: str = "", password: str | bytes = "", **more: Any) -> Self:
        """Authenticate; a password given as bytes is sent unchanged. Raises Refused."""
        proof = (
            password if isinstance(password, bytes) else scramble(password, self.seed) if password else b""
        )
        self.send(CLIENTAUTHENTICATION, "ClientAuth", username=user, password=proof, **more)
        self.expect_ack()
        return self

    @property
    def _whom(self) -> dict[str, str]:
        return {"destination": self.destination, "client_id": self.client_id}

    def subscribe(self, table_filter: str = "") -> Self:
        """Subscribe. Raises Refused."""
        self.send(SUBSCRIPTION, "Sub", **self._whom, filter=table_filter)
        self.expect_ack()
        return self

    def unsubscribe(self) -> None:
        """Unsubscribe. Raises Refused."""
        self.send(UNSUBSCRIPTION, "Sub", **self._whom)
        self.expect_ack()

    def ask(self, size: int = 1000, timeout: int | None = -1, unit: int | None = 2) -> None:
        """Request entries."""
        fields = {name: value for name, value in (("timeout", timeout), ("unit", unit)) if value is not None}
        self.send(GET, "Get", **self._whom, fetch_size=size, auto_ack=False, **fields)

    def receive_batch(self) -> tuple[int, list[bytes]]:
        """Return the id and the entries of the requested batch. Raises Refused."""
        packet = self.receive()
        if packet.type == ACK:
            self._raise_refusal(packet)
        assert packet.type == MESSAGES, packet
        batch = self.parse("Messages", packet.body)
        return batch.batch_id, list(batch.messages)

    def get(
        self, size: int = 1000, timeout: int | None = -1, unit: int | None = 2
    ) -> tuple[int, list[bytes]]:
        """Return a batch: its id (-1 if it is empty) and its entries as bytes. Raises Refused.

        Without a timeout, -1 must mean that the end of the log is reached. A daemon may stop its search
        earlier than that, so it is asked again.
        """
        waits = timeout is None or timeout >= 0
        while True:
            started = time.monotonic()
            self.ask(size, timeout, unit)
            batch_id, entries = self.receive_batch()
            if batch_id != -1 or waits or time.monotonic() - started < SEARCH_SECONDS:
                return batch_id, entries

    def ack(self, batch_id: int) -> None:
        """Acknowledge a batch; the server does not answer."""
        self.send(CLIENTACK, "ClientAck", **self._whom, batch_id=batch_id)

    def rollback(self, batch_id: int = 0) -> None:
        """Roll back one batch, or all batches; the server does not answer."""
        self.send(CLIENTROLLBACK, "ClientAck", **self._whom, batch_id=batch_id)


# --- Entries --------------------------------------------------------------------------------


def entry_of(content: bytes) -> Any:
    """Read an entry."""
    return PROTO["Entry"].FromString(content)


def row_change_of(entry: Any) -> Any:
    """Read the content of a ROWDATA entry."""
    assert entry.entryType == ROWDATA, entry
    return PROTO["RowChange"].FromString(entry.storeValue)


def event_name(number: int) -> str:
    """Return the name of an event type."""
    return EVENTS[number - 1]


def values_of(columns: Any) -> dict[str, str | None]:
    """Return a row as a mapping from column to text."""
    return {column.name: None if column.isNull else column.value for column in columns}


def describe_entries(entries: list[bytes]) -> list[tuple[Any, ...]]:
    """Return entries as tuples: ("BEGIN",), (event, table, before, after) for each row, ("END",)."""
    lines: list[tuple[Any, ...]] = []
    for content in entries:
        entry = entry_of(content)
        if entry.entryType != ROWDATA:
            lines.append(("BEGIN",) if entry.entryType == TRANSACTIONBEGIN else ("END",))
            continue
        change = row_change_of(entry)
        name = event_name(change.eventType)
        if not change.rowDatas:
            lines.append((name, entry.header.tableName, change.sql))
        lines += [
            (name, entry.header.tableName, values_of(row.beforeColumns), values_of(row.afterColumns))
            for row in change.rowDatas
        ]
    return lines
