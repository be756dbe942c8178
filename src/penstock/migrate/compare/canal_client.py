# SPDX-License-Identifier: Apache-2.0
"""A client of a Canal server: authentication, subscription, and batches of entries.

`penstock.serve.canal.protocol` describes the protocol.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit

from penstock.errors import AccessDenied, AuthenticationFailed, ConnectionLost, EventMalformed, OptionInvalid
from penstock.limits import CANAL_BATCH_BYTES_MAX
from penstock.model import Secret
from penstock.protobuf import Message, Value, encode
from penstock.serve.access import scramble411
from penstock.serve.canal.frames import LENGTH_BYTES, NO_BATCH, PacketType, frame_length, read_packet

PORT_DEFAULT = 11_111
CLIENT_ID_DEFAULT = "1001"

_HINT = "Write canal://user@host:11111/destination"
_ANSWER_SECONDS_MAX = 30.0
_FETCH_SIZE = 1000
# A unit of Java's TimeUnit, by ordinal.
_MILLISECONDS = 2
# A single entry may be larger than a batch: an event has up to 1 GiB.
_FRAME_BYTES_MAX = (1 << 30) + CANAL_BATCH_BYTES_MAX


@dataclass(frozen=True)
class CanalAddress:
    """A destination of a Canal server, and the account to log in with. If `user` is empty, the client does
    not log in.
    """

    host: str
    port: int
    destination: str
    user: str = ""
    password: Secret = field(default_factory=lambda: Secret(""))

    @classmethod
    def parse(cls, url: str, password: Secret) -> Self:
        """Parse `canal://[user[:password]@]host[:port]/destination`.

        A password in the URL takes precedence over the argument. Raises OptionInvalid if there is no
        password.
        """
        parts = urlsplit(url.strip())
        destination = unquote(parts.path.strip("/"))
        try:
            port = parts.port or PORT_DEFAULT
        except ValueError:
            port = 0
        if parts.scheme != "canal" or not parts.hostname or not port or not destination or "/" in destination:
            raise OptionInvalid(f"{parts.hostname or 'the URL'} is no destination of Canal", hint=_HINT)
        if parts.password is not None:
            password = Secret(unquote(parts.password))
        return cls(parts.hostname, port, destination, unquote(parts.username or ""), password)

    def __str__(self) -> str:
        return f"canal://{self.host}:{self.port}/{self.destination}"


class CanalClient:
    """One connection that consumes a destination under a client id. Used by one thread."""

    def __init__(self, address: CanalAddress, client_id: str = CLIENT_ID_DEFAULT) -> None:
        """Connect, authenticate and subscribe to all tables.

        Raises ConnectionLost, AuthenticationFailed, AccessDenied, EventMalformed.
        """
        self._address = address
        self._identity: tuple[tuple[int, Value | str], ...] = ((1, address.destination), (2, client_id))
        with self._translated():
            self._socket = socket.create_connection((address.host, address.port), _ANSWER_SECONDS_MAX)
        try:
            self._log_in()
            self._send(PacketType.SUBSCRIPTION, encode(*self._identity, (7, "")))
            self._expect_ack(AccessDenied)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def fetch(self, wait_seconds: float = 1.0) -> list[memoryview]:
        """Wait for the next batch for up to `wait_seconds`, acknowledge it, and return its entries.

        Raises ConnectionLost, AccessDenied, EventMalformed.
        """
        wait_milliseconds = max(1, round(wait_seconds * 1000))
        wanted = ((3, _FETCH_SIZE), (4, wait_milliseconds), (5, _MILLISECONDS), (6, False))
        self._send(PacketType.GET, encode(*self._identity, *wanted))
        kind, body = self._receive()
        if kind == PacketType.ACK:
            self._raise_refusal(body, AccessDenied)
        batch = Message(body)
        batch_id = batch.signed(1)
        if kind != PacketType.MESSAGES:
            raise EventMalformed(f"{self._address} answers a request with a packet of type {kind}")
        if batch_id == NO_BATCH:
            return []
        self._send(PacketType.CLIENTACK, encode(*self._identity, (3, batch_id)))
        return batch.views(2)

    def _log_in(self) -> None:
        kind, body = self._receive()
        if kind != PacketType.HANDSHAKE:
            raise EventMalformed(f"{self._address} does not begin as a Canal server does")
        address, seed = self._address, Message(body).content(2)
        proof = b""
        if address.user:
            proof = scramble411(address.password.reveal().encode(), seed).hex().encode()
        self._send(PacketType.CLIENTAUTHENTICATION, encode((1, address.user), (2, proof)))
        self._expect_ack(AuthenticationFailed)

    def _expect_ack(self, refusal: type[AccessDenied | AuthenticationFailed]) -> None:
        kind, body = self._receive()
        if kind != PacketType.ACK:
            raise EventMalformed(f"{self._address} answers with a packet of type {kind} instead of an ACK")
        self._raise_refusal(body, refusal)

    def _raise_refusal(self, body: bytes, refusal: type[AccessDenied | AuthenticationFailed]) -> None:
        answer = Message(body)
        if answer.unsigned(1):
            raise refusal(
                f"{self._address} refuses: {answer.text(2)[:500]}",
                hint="Check the destination, the user and the password",
            )

    def _send(self, kind: PacketType, body: bytes) -> None:
        packet = encode((3, int(kind)), (5, body))
        with self._translated():
            self._socket.sendall(struct.pack(">I", len(packet)) + packet)

    def _receive(self) -> tuple[int, bytes]:
        packet = read_packet(self._read(frame_length(self._read(LENGTH_BYTES), _FRAME_BYTES_MAX)))
        if packet.compression > 1:
            raise EventMalformed(f"{self._address} compresses its packets, which clients did not agree to")
        return packet.type, packet.body

    def _read(self, size: int) -> bytes:
        content = bytearray()
        with self._translated():
            while len(content) < size:
                part = self._socket.recv(min(size - len(content), 1 << 20))
                if not part:
                    raise ConnectionLost(f"{self._address} has closed the connection")
                content += part
        return bytes(content)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise ConnectionLost(
                f"{self._address}: {problem}", hint="Check the address; the comparison can be started again"
            ) from problem
