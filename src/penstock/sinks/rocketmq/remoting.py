# SPDX-License-Identifier: Apache-2.0
"""RocketMQ's remoting protocol: requests to name servers and brokers over a connection.

A frame consists of its length, the length of its header, the header as JSON, and a body. Source: RocketMQ's
classes `RemotingCommand`, `RequestCode`, `ResponseCode`, `MessageDecoder` and `AclUtils`. Brokers of versions
4 and 5 support this protocol. The newer gRPC protocol would need a proxy in addition to the broker.
"""

import base64
import hashlib
import hmac
import json
import re
import select
import socket
import ssl
import struct
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from penstock.errors import (
    AnswerTimedOut,
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
)
from penstock.model import Secret
from penstock.sinks.endpoint import Endpoint, connection_error
from penstock.sinks.sink import HINT_GONE

_CONNECT_SECONDS_MAX = 10.0
_ANSWER_SECONDS_MAX = 60.0
_RECEIVED_MAX = 1 << 16
# Answers are small. A larger one means that the server speaks another protocol.
_FRAME_BYTES_MAX = 16 << 20

_IS_ANSWER = 1
_HEADER_BYTES_MASK = 0xFFFFFF
# The names and values of a message's properties, and the properties themselves, end with these characters.
_NAME_END, _PROPERTY_END = "\x01", "\x02"
# Older servers write maps with numeric keys without quotes around the keys.
_NUMBER_KEY = re.compile(r"([{,])(-?\d+):")


class Request(IntEnum):
    """Request codes of the protocol."""

    CREATE_TOPIC = 17
    ROUTE_OF_TOPIC = 105
    BROKERS = 106
    SEND_BATCH = 320


class Answer(IntEnum):
    """Response codes of the protocol."""

    SUCCESS = 0
    ERROR = 1
    BUSY = 2
    UNKNOWN_REQUEST = 3
    DISK_IS_LATE = 10
    REPLICA_IS_MISSING = 11
    REPLICA_IS_LATE = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17


_TEMPORARY = (
    Answer.BUSY,
    Answer.DISK_IS_LATE,
    Answer.REPLICA_IS_MISSING,
    Answer.REPLICA_IS_LATE,
    Answer.SERVICE_NOT_AVAILABLE,
)
# The broker also answers unexpected failures with ERROR. The text then describes the Java exception: its
# class, its message, and the method that threw it. Source: `RemotingHelper.exceptionSimpleDesc`.
_EXCEPTION = re.compile(r"(?P<kind>[\w.$]+): .*, (?P<method>[\w.$]+)\([^()]*\)", re.DOTALL)
_ACCESS_REFUSED = "org.apache.rocketmq.acl.common.AclException"
# The method that verifies the account. Other methods check the account's rights.
_VERIFY_ACCOUNT = "org.apache.rocketmq.acl.plain.PlainPermissionManager.validate"
# The method of version 5 that checks the sizes of a message.
_CHECK_SIZE = "org.apache.rocketmq.store.MessageExtEncoder.encode"
# The sizes of a message's properties are 16-bit integers.
_PROPERTIES_BYTES_MAX = (1 << 15) - 1
# A connection whose host has disappeared is closed after this time, so that nothing waits for its answers
# forever.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


class Reply(NamedTuple):
    """An answer."""

    code: int
    remark: str
    body: bytes


class Connection:
    """A connection to a name server or broker, with several requests in flight. Used by one thread.

    Raises ConnectionLost, TlsFailed.
    """

    def __init__(self, address: str, endpoint: Endpoint, password: Secret | None, *, tls: bool) -> None:
        self.address = address
        self._account = None if endpoint.user is None or password is None else (endpoint.user, password)
        self._last_request = 0
        self._unanswered = 0
        self._answers: dict[int, Reply] = {}
        self._rest = bytearray()
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            self._stream = socket.create_connection((host, int(port)), _CONNECT_SECONDS_MAX)
        except (OSError, ValueError) as problem:
            raise connection_error(f"RocketMQ at {address}", problem) from problem
        try:
            self._stream.settimeout(_ANSWER_SECONDS_MAX)
            self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if (option := getattr(socket, name, None)) is not None:
                    self._stream.setsockopt(socket.IPPROTO_TCP, option, value)
            if tls:
                context = ssl.create_default_context(cafile=endpoint.ca)
                self._stream = context.wrap_socket(self._stream, server_hostname=host)
        except OSError as problem:
            self.close()
            raise connection_error(f"RocketMQ at {address}", problem) from problem

    def close(self) -> None:
        """Close the connection. Bytes of unanswered requests that are not sent yet are discarded."""
        with suppress(OSError):
            if self._unanswered:
                # Without this option, the system would send the bytes whenever the network recovers.
                self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._stream.close()

    @property
    def is_open(self) -> bool:
        """Whether the connection is still open. Requires that no request is in flight."""
        waiting = select.poll()
        waiting.register(self._stream, select.POLLIN)
        return not waiting.poll(0)

    def send(self, code: Request, fields: Mapping[str, str], body: bytes = b"") -> int:
        """Send a request, and return its number."""
        self._last_request += 1
        self._unanswered += 1
        signed = dict(fields) if self._account is None else sign(fields, body, *self._account)
        header = {
            "code": int(code),
            "language": "PYTHON",
            "version": 0,
            "opaque": self._last_request,
            "flag": 0,
            "extFields": signed,
        }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        frame = struct.pack(">ii", 4 + len(encoded) + len(body), len(encoded))
        try:
            self._stream.sendall(b"".join((frame, encoded, body)))
        except OSError as problem:
            raise ConnectionLost(f"RocketMQ at {self.address} went away: {problem}") from problem
        return self._last_request

    def answer(self, request: int) -> Reply:
        """Wait for the answer to a request."""
        while request not in self._answers:
            self._receive()
        return self._answers.pop(request)

    def call(self, code: Request, fields: Mapping[str, str], body: bytes = b"") -> Reply:
        """Send a request and return its answer. Raises the error that the server answers with."""
        reply = self.answer(self.send(code, fields, body))
        if reply.code != Answer.SUCCESS:
            raise error_of(reply)
        return reply

    def _receive(self) -> None:
        try:
            received = self._stream.recv(_RECEIVED_MAX)
        except TimeoutError as problem:
            raise AnswerTimedOut(
                f"RocketMQ at {self.address} has not answered for {_ANSWER_SECONDS_MAX:g} s"
            ) from problem
        except OSError as problem:
            raise ConnectionLost(f"RocketMQ at {self.address} went away: {problem}") from problem
        if not received:
            raise ConnectionLost(f"RocketMQ at {self.address} closed the connection")
        self._rest += received
        while len(self._rest) >= 8:
            length, header_length = struct.unpack_from(">ii", self._rest)
            header_length &= _HEADER_BYTES_MASK
            if not 4 + header_length <= length <= _FRAME_BYTES_MAX:
                raise self._foreign()
            if len(self._rest) < 4 + length:
                break
            frame = bytes(self._rest[8 : 4 + length])
            del self._rest[: 4 + length]
            try:
                header = json.loads(frame[:header_length])
                # Servers also send requests, which only consumers have to answer.
                if header["flag"] & _IS_ANSWER:
                    reply = Reply(header["code"], header.get("remark") or "", frame[header_length:])
                    self._answers[header["opaque"]] = reply
                    self._unanswered -= 1
            except (ValueError, KeyError, TypeError) as problem:
                raise self._foreign() from problem

    def _foreign(self) -> ServerUnsupported:
        return ServerUnsupported(f"{self.address} does not speak RocketMQ's remoting protocol")


def sign(fields: Mapping[str, str], body: bytes, access_key: str, secret: Secret) -> dict[str, str]:
    """Return the fields of a request with the access key and the signature of its sender."""
    signed = {**fields, "AccessKey": access_key}
    content = "".join(signed[name] for name in sorted(signed)).encode() + body
    digest = hmac.digest(secret.reveal().encode(), content, hashlib.sha1)
    return {**signed, "Signature": base64.b64encode(digest).decode()}


def read_json(body: bytes) -> Any:
    """Return the body of an answer, whose maps may have numbers as keys. Raises ServerUnsupported."""
    try:
        return json.loads(_NUMBER_KEY.sub(r'\1"\2":', body.decode()))
    except ValueError as problem:
        raise ServerUnsupported(f"an answer of RocketMQ is no JSON: {problem}") from problem


def message_of(body: bytes, properties: Mapping[str, str]) -> bytes:
    """Return a message in the format of a batch request. Raises OptionInvalid if its properties are too
    large.
    """
    encoded = "".join(
        f"{name}{_NAME_END}{value}{_PROPERTY_END}" for name, value in properties.items()
    ).encode()
    if len(encoded) > _PROPERTIES_BYTES_MAX:
        raise OptionInvalid(
            f"the properties of a message for RocketMQ have {len(encoded)} bytes: its tag, and its headers",
            hint=f"They may have {_PROPERTIES_BYTES_MAX}: shorten tag of the rocketmq sink",
        )
    # The broker replaces the magic number, and computes the checksum and the flag of the stored message.
    length = 4 * 5 + len(body) + 2 + len(encoded)
    head = struct.pack(">iiiii", length, 0, 0, 0, len(body))
    return b"".join((head, body, struct.pack(">h", len(encoded)), encoded))


def property_text(text: str) -> str:
    """Return a text as the value of a property, without the characters that would end it."""
    return text.replace(_NAME_END, " ").replace(_PROPERTY_END, " ")


def error_of(reply: Reply) -> PenstockError:
    """Return the error for an answer."""
    remark = reply.remark.partition("\n")[0][:500]
    message = f"RocketMQ answers: {remark or 'nothing'} (code {reply.code})"
    if reply.code in _TEMPORARY:
        return ServerBusy(message)
    if reply.code == Answer.TOPIC_NOT_EXIST:
        return SchemaChanged(message, hint=HINT_GONE)
    exception = _EXCEPTION.match(reply.remark) if reply.code == Answer.ERROR else None
    kind, method = exception.group("kind", "method") if exception is not None else ("", "")
    if reply.code == Answer.MESSAGE_ILLEGAL or method == _CHECK_SIZE:
        return OptionInvalid(
            message, hint="Set claim_check for large messages, or raise maxMessageSize of the brokers"
        )
    if method == _VERIFY_ACCOUNT:
        return AuthenticationFailed(message, hint="Check user (the access key) and password of the sink")
    if reply.code == Answer.NO_PERMISSION or kind == _ACCESS_REFUSED:
        return PrivilegeMissing(
            message, hint="Grant the access key what the guide of the rocketmq sink lists"
        )
    if reply.code == Answer.ERROR:
        # Brokers answer with this code while the page cache is busy or replicas are late. Java's producer
        # retries.
        return ServerBusy(message)
    return ServerUnsupported(message)
