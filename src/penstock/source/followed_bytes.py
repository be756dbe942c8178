# SPDX-License-Identifier: Apache-2.0
"""The newest bytes of a daemon's log, which the daemon sends as they arrive.

Under load, a request for each batch takes longer than processing its few transactions. A stream has them in
the socket when the previous batch ends. It is only a shortcut: whenever it ends, breaks off or is silent, the
next request tells what is new.
"""

import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import structlog

from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.limits import MIB
from penstock.model import Position

# The media type of a stream of frames: the length of a header (u32, big-endian), the header as JSON (`end`,
# `gtid_set` and `bytes`), and so many bytes of whole transactions.
FOLLOWED_TYPE = "application/vnd.penstock.followed-bytes"

# The header with the key of the server that the bytes come from. Version 0.1 does not send this header.
SERVER_HEADER = "Penstock-Server"

# The next batch waits while a stream is opened. A daemon answers at once. A proxy that gathers responses does
# not answer before the stream ends.
_OPEN_SECONDS_MAX = 0.5
# How long a daemon may send for one request.
_FOLLOW_SECONDS = 30
# When a stream is requested again after it ended, and after it could not be opened or nothing arrived.
_PAUSE_SECONDS, _REFUSED_SECONDS = 1.0, 60.0

_LENGTH_BYTES = 4
_HEADER_BYTES_MAX = 64 * 1024
_RECEIVED_BYTES_MAX = MIB
# Under load, the next frame arrives sooner than this. A pipeline that has nothing to do records its position,
# which takes as long.
_FRAME_SECONDS = 0.002
# An idle daemon sends a frame more often than this. Else it hangs, or a proxy delays the stream.
_SILENT_SECONDS_MAX = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ArrivedBytes:
    """Whole transactions of a file that end at an offset. `content` is b"" if there are none. `head` is the
    end of the log.
    """

    content: bytes
    end: int
    head: Position
    gtid_set: LoggedSet


class FollowedBytes:
    """An open stream, from one position of a file on. For one thread at a time.

    `server_key` is the key of the server that the bytes come from, None if the daemon does not name it.
    """

    def __init__(self, stream: socket.socket, url: str, position: Position) -> None:
        self.url = url
        self.position = position
        self.server_key: str | None = None
        self._stream = stream
        self._received = bytearray()
        self._heard_at = time.monotonic()
        self._has_ended = False

    @classmethod
    def open(
        cls,
        url: str,
        path: str,
        position: Position,
        tls: ssl.SSLContext | None,
        headers: Mapping[str, str],
        seconds: float,
    ) -> Self | None:
        """Request a stream that begins at a position; None if the daemon answers with anything else. Raises
        OSError.
        """
        address = urlsplit(url)
        assert address.hostname is not None, "a base URL names a host"
        stream = socket.create_connection((address.hostname, address.port or 80), timeout=seconds)
        followed = None
        try:
            if tls is not None:
                stream = tls.wrap_socket(stream, server_hostname=address.hostname)
            # A response to HTTP/1.0 is not chunked, so the frames are read without another layer.
            lines = [f"GET {path} HTTP/1.0", f"Host: {address.netloc}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            stream.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            response = http.client.HTTPResponse(stream, method="GET")
            response.begin()
            is_followed = response.getheader("content-type") == FOLLOWED_TYPE
            if response.status == http.client.OK and is_followed and response.length is None:
                followed = cls(stream, url, position)
                followed.server_key = response.getheader(SERVER_HEADER)
                stream.settimeout(0.0)
                # The reader of the head may have received the first frames.
                with suppress(ssl.SSLWantReadError):
                    followed._received += response.fp.read1(_RECEIVED_BYTES_MAX) or b""
        except http.client.HTTPException:
            return None
        finally:
            if followed is None:
                stream.close()
        return followed

    def take(self, seconds: float, bytes_max: int) -> ArrivedBytes | None:
        """Wait up to `seconds` for transactions, and return those that have arrived, up to `bytes_max`.

        Return None if the stream can no longer tell what is new. Raises OSError if it broke off, and
        ValueError, KeyError or TypeError if its content is wrong.
        """
        deadline = time.monotonic() + max(seconds, _FRAME_SECONDS)
        self._receive(0.0, bytes_max)
        arrived = self._next(bytes_max)
        while arrived is None and (remaining := deadline - time.monotonic()) > 0 and not self._has_ended:
            self._receive(remaining, bytes_max)
            arrived = self._next(bytes_max)
        if arrived is not None:
            return arrived
        if self._has_ended or self.is_silent or self._is_too_large(bytes_max):
            return None
        return ArrivedBytes(b"", self.position.offset, self.position, NO_GTIDS)

    @property
    def is_silent(self) -> bool:
        """Whether nothing has arrived for so long that the stream is no longer useful."""
        return not self._has_ended and time.monotonic() - self._heard_at > _SILENT_SECONDS_MAX

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _receive(self, seconds: float, bytes_max: int) -> None:
        """Receive what has arrived, or wait up to `seconds` for more.

        More than `take` can return stays in the socket, so that the daemon notices when it falls behind.
        """
        if self._has_ended or len(self._received) >= bytes_max + _HEADER_BYTES_MAX:
            return
        self._stream.settimeout(seconds)
        try:
            received = self._stream.recv(_RECEIVED_BYTES_MAX)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return
        self._received += received
        self._heard_at = time.monotonic()
        self._has_ended = not received

    def _next(self, bytes_max: int) -> ArrivedBytes | None:
        """Return the complete frames, joined, up to `bytes_max`; None if there is none."""
        content = bytearray()
        gtid_set = NO_GTIDS
        while (sizes := self._sizes()) is not None:
            header_end, end, header = sizes
            if len(self._received) < end or len(content) + end - header_end > bytes_max:
                break
            content += self._received[header_end:end]
            del self._received[:end]
            offset = self.position.offset + end - header_end
            if offset != header["end"]:
                raise ValueError(f"bytes ended at {offset}, they were to end at {header['end']}")
            self.position = replace(self.position, offset=offset)
            gtid_set = LoggedSet(header["gtid_set"])
        if not content:
            return None
        return ArrivedBytes(bytes(content), self.position.offset, self.position, gtid_set)

    def _is_too_large(self, bytes_max: int) -> bool:
        sizes = self._sizes()
        return sizes is not None and sizes[1] - sizes[0] > bytes_max

    def _sizes(self) -> tuple[int, int, dict[str, Any]] | None:
        """Return where the header and the bytes of the first frame end, and the header.

        None if the header has not arrived.
        """
        received = self._received
        header_end = _LENGTH_BYTES + int.from_bytes(received[:_LENGTH_BYTES], "big")
        if header_end > _HEADER_BYTES_MAX:
            raise ValueError(f"a header of {header_end} bytes")
        if len(received) < _LENGTH_BYTES or len(received) < header_end:
            return None
        header = json.loads(received[_LENGTH_BYTES:header_end])
        return header_end, header_end + int(header["bytes"]), header


class ByteStreams:
    """The stream of one client, which is opened again when it has ended. Safe for threads."""

    def __init__(self, tls: ssl.SSLContext | None, headers: Mapping[str, str]) -> None:
        self._tls = tls
        self._headers = headers
        # At most one stream. Only one of several threads can remove it.
        self._idle: list[FollowedBytes] = []
        # When a stream may be opened again.
        self._open_at = 0.0

    def take(self, url: str, position: Position, seconds: float, bytes_max: int) -> ArrivedBytes | None:
        """Return what a daemon has sent after a position, None if it must be requested."""
        followed = self._remove()
        if followed is None:
            return None
        arrived = None
        try:
            if (followed.url, followed.position) == (url, position):
                arrived = followed.take(seconds, bytes_max)
                if arrived is None and followed.is_silent:
                    self._open_at = time.monotonic() + _REFUSED_SECONDS
        except (OSError, ValueError, KeyError, TypeError) as problem:
            # The next request reports what is wrong.
            _log.debug("a stream of a daemon broke off", url=url, why=str(problem))
        if arrived is None:
            followed.close()
        else:
            self._keep(followed)
        return arrived

    def open(self, url: str, instance_path: str, position: Position, server_key: str) -> None:
        """Let a daemon send the transactions after a position as they arrive, if it can."""
        now = time.monotonic()
        if now < self._open_at:
            return
        self._open_at = now + _PAUSE_SECONDS
        query = {"epoch": position.epoch, "file": position.file, "start": position.offset}
        path = f"{instance_path}/bytes?{urlencode(query | {'follow': _FOLLOW_SECONDS})}"
        try:
            followed = FollowedBytes.open(url, path, position, self._tls, self._headers, _OPEN_SECONDS_MAX)
        except OSError as problem:
            _log.debug("a daemon opens no stream", url=url, why=str(problem))
            followed = None
        if followed is None or (server_key and followed.server_key != server_key):
            # A proxy, an earlier daemon, or a log without its newest bytes in memory.
            self._open_at = time.monotonic() + _REFUSED_SECONDS
            if followed is not None:
                followed.close()
            return
        self._keep(followed)

    def close(self) -> None:
        """Close the stream."""
        followed = self._remove()
        if followed is not None:
            followed.close()

    def _remove(self) -> FollowedBytes | None:
        with suppress(IndexError):
            return self._idle.pop()
        return None

    def _keep(self, followed: FollowedBytes) -> None:
        self.close()
        self._idle.append(followed)
