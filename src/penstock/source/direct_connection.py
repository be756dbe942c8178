# SPDX-License-Identifier: Apache-2.0
"""A connection for many small requests to one daemon, one after another.

At the head of a log, a batch has a few transactions, and an HTTP library takes longer for one request than
their processing takes. This connection understands only a successful, complete response with a length. For
everything else the caller sends the request again with the HTTP library, which reports what is wrong.
"""

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

_HEAD_BYTES_MAX = 64 * 1024
_RECEIVED_BYTES_MAX = 256 * 1024
_SUCCESS = b"HTTP/1.1 200 "
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class DirectResponse:
    """A successful response: its headers by lower-case name, and its body, None if it was too long."""

    headers: Mapping[str, str]
    content: bytes | None


class DirectConnection:
    """An open connection to the daemon at a URL. For one thread at a time."""

    def __init__(self, stream: socket.socket, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self._stream = stream
        lines = [f"Host: {urlsplit(url).netloc}", *(f"{name}: {value}" for name, value in headers.items())]
        self._request_end = "".join(f"{line}\r\n" for line in lines) + "\r\n"

    @classmethod
    def open(cls, url: str, tls: ssl.SSLContext | None, headers: Mapping[str, str], seconds: float) -> Self:
        """Connect to a daemon's base URL. Raises OSError."""
        address = urlsplit(url)
        assert address.hostname is not None, "a base URL names a host"
        assert address.port is not None, "and a port"
        stream = socket.create_connection((address.hostname, address.port), seconds)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                stream = tls.wrap_socket(stream, server_hostname=address.hostname)
        except BaseException:
            stream.close()
            raise
        return cls(stream, url, headers)

    def get(self, path: str, seconds: float, bytes_max: int) -> DirectResponse | None:
        """Return the response to a GET request, None if it is not successful, complete, and short enough.

        Only after a response can the connection be used again. A daemon that sends nothing for `seconds`
        raises TimeoutError, and a lost connection OSError.
        """
        self._stream.settimeout(seconds)
        self._stream.sendall(f"GET {path} HTTP/1.1\r\n{self._request_end}".encode("latin-1"))
        received = b""
        while (end := received.find(_HEAD_END)) < 0:
            if len(received) > _HEAD_BYTES_MAX:
                return None
            part = self._stream.recv(_RECEIVED_BYTES_MAX)
            if not part:
                raise ConnectionResetError("the daemon closed the connection")
            received += part
        first_line, *lines = received[:end].split(b"\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        length = headers.get("content-length", "")
        is_plain = first_line.startswith(_SUCCESS) and length.isascii() and length.isdecimal()
        if not is_plain or int(length) > bytes_max or "close" in headers.get("connection", "").lower():
            return None
        content = self._read_body(received[end + len(_HEAD_END) :], int(length))
        return None if content is None else DirectResponse(headers, content)

    def _read_body(self, first: bytes, length: int) -> bytes | None:
        """Return a body, None if more follows it."""
        if len(first) >= length:
            return first if len(first) == length else None
        content = bytearray(length)
        content[: len(first)] = first
        filled = len(first)
        while filled < length:
            size = self._stream.recv_into(memoryview(content)[filled:])
            if not size:
                raise ConnectionResetError("the daemon closed the connection")
            filled += size
        return bytes(content)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()
