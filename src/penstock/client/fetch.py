# SPDX-License-Identifier: Apache-2.0
"""One response of a daemon's `changes` call, from bytes to Arrow. Retries are up to the caller.

A response is a sequence of frames: the length of a header (u32, big-endian), the header as JSON, and the
number of bytes that the header states. Bytes that arrived in one chunk are not copied: Arrow reads them in
place.
"""

import json
import select
import socket
import ssl
import struct
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow
import urllib3
from urllib3.exceptions import HTTPError

from penstock.client.rows_stream import read_stream
from penstock.errors import ConnectionLost, PenstockError, StreamError
from penstock.limits import MIB
from penstock.model import Position
from penstock.source.daemon_client import DaemonClient

# A header takes a few hundred bytes. Content is limited to the size of one Arrow batch.
_HEADER_BYTES_MAX = MIB
_CONTENT_BYTES_MAX = (1 << 31) - 1

# The header with the position before which everything is permanently consumed. The daemon keeps the log from
# there on.
CONSUMED_HEADER = "Penstock-Consumed"

# The rows of a batch may be ordered by shard, because they are split by shard anyway. Earlier versions of the
# daemon send them in commit order.
ROW_ORDER_HEADER, ROWS_BY_SHARD = "Penstock-Row-Order", "shard"

# A read returns a chunk as the daemon sent it, up to this size.
_READ_BYTES_MAX = 64 * MIB

# Arrow requires values at addresses that are multiples of their width.
_ALIGNMENT = 8


@dataclass(frozen=True)
class BatchFrame:
    """Rows of one table. `key` lists the primary key columns."""

    table: str
    rows: int
    schema_version: int
    key: tuple[str, ...]
    content: memoryview

    @property
    def bytes(self) -> int:
        """The number of bytes received."""
        return len(self.content)

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the rows, backed by the received bytes.

        Raises StreamError if they are not an Arrow stream.
        """
        buffer = pyarrow.py_buffer(self.content)
        if buffer.address % _ALIGNMENT:
            buffer = pyarrow.py_buffer(bytes(self.content))
        try:
            return read_stream(buffer)
        except (pyarrow.ArrowInvalid, OSError, StopIteration) as problem:
            raise StreamError(f"rows of {self.table} are no Arrow stream: {problem}") from problem


@dataclass(frozen=True)
class RowsFrame:
    """Rows of one table that were decoded in this process; see `BatchFrame`."""

    table: str
    schema_version: int
    key: tuple[str, ...]
    batch: pyarrow.RecordBatch

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.batch.num_rows)

    @property
    def bytes(self) -> int:
        """The memory used by the rows."""
        return int(self.batch.nbytes)

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the rows."""
        return self.batch


@dataclass(frozen=True)
class PositionFrame:
    """Reports that everything before `position` has been sent.

    `behind_bytes` is how many bytes of the log followed the position at that time. `fingerprint` identifies
    the position's file, and is "" if the frame comes from a daemon.
    """

    position: Position
    gtid_set: str
    server_key: str
    time_us: int
    behind_bytes: int
    fingerprint: str = ""


@dataclass(frozen=True)
class EndFrame:
    """The regular end of a response. `why` is credit, time, wait, until or closing."""

    why: str


RowFrame = BatchFrame | RowsFrame
Frame = RowFrame | PositionFrame | EndFrame


class ChangesAnswer:
    """A streaming response.

    One thread reads `frames`; any thread may `cut` the response. Propagates errors that the daemon reports,
    and raises ConnectionLost if the daemon does not answer.
    """

    def __init__(
        self,
        client: DaemonClient,
        body: Mapping[str, Any],
        silence_seconds: float,
        consumed: Position | None = None,
    ) -> None:
        self._client = client
        # These are headers, because earlier versions of the daemon reject unknown fields in the body.
        headers = {ROW_ORDER_HEADER: ROWS_BY_SHARD}
        if consumed is not None:
            headers[CONSUMED_HEADER] = str(consumed)
        self._response: urllib3.BaseHTTPResponse = client.post("changes", body, silence_seconds, headers)
        connection = self._response.connection
        # The socket is None if the daemon, or a proxy, closes the connection after the response.
        self._socket: socket.socket | None = getattr(connection, "sock", None)
        self._cut = False

    def frames(self) -> Generator[Frame, None, None]:
        """Yield the frames up to the end of the response.

        Raises any error that the daemon reports, and ConnectionLost if the response breaks off.
        """
        bytes_of = _Bytes(self._chunks())
        whole = False
        try:
            while not whole:
                frame = self._frame(bytes_of)
                yield frame
                whole = isinstance(frame, EndFrame)
            # Reading to the end of the body returns the connection to the pool.
            bytes_of.rest()
        finally:
            if whole:
                self._response.release_conn()
            else:
                self._response.close()

    def has_more(self) -> bool:
        """Return whether more of the response has arrived, without waiting. For the reading thread.

        False if it is not known.
        """
        if self._socket is None:
            return False
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        waiting = select.poll()
        # The socket may have been closed by `cut`.
        with suppress(OSError, ValueError):
            waiting.register(self._socket, select.POLLIN)
            return bool(waiting.poll(0))
        return False

    def cut(self) -> None:
        """Abort the response, so that its reader gets ConnectionLost."""
        self._cut = True
        # The response may have ended in the meantime.
        with suppress(OSError, ValueError, RuntimeError):
            if self._socket is None:
                self._response.shutdown()
            else:
                # `SSLSocket.shutdown` drops the TLS state, so the reader would treat encrypted bytes as the
                # response.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _chunks(self) -> Iterator[bytes]:
        try:
            yield from self._response.read_chunked(_READ_BYTES_MAX, decode_content=False)
        except (HTTPError, OSError) as problem:
            raise self._client.lost(problem) from problem

    def _frame(self, bytes_of: "_Bytes") -> Frame:
        (header_bytes,) = struct.unpack(">I", self._take(bytes_of, 4))
        if header_bytes > _HEADER_BYTES_MAX:
            raise self._foreign(f"a header of {header_bytes} bytes")
        try:
            header = json.loads(bytes(self._take(bytes_of, header_bytes)))
            content_bytes = int(header["bytes"])
            if not 0 <= content_bytes <= _CONTENT_BYTES_MAX:
                raise self._foreign(f"a frame of {content_bytes} bytes")
            return self._read(header, self._take(bytes_of, content_bytes))
        except (ValueError, KeyError, TypeError) as problem:
            raise self._foreign(f"a header that cannot be read: {problem!r}") from problem

    def _read(self, header: dict[str, Any], content: memoryview) -> Frame:
        match header["kind"]:
            case "batch":
                return BatchFrame(
                    header["table"],
                    header["rows"],
                    header["schema_version"],
                    tuple(header["key"]),
                    content,
                )
            case "position":
                return PositionFrame(
                    Position.parse(header["position"]),
                    header["gtid_set"] or "",
                    header["server_key"] or "",
                    header["time_us"] or 0,
                    header.get("behind_bytes") or 0,
                )
            case "end":
                return EndFrame(header["why"])
            case "problem":
                raise self._client.problem(header)
            case unknown:
                raise self._foreign(f"a frame of kind {unknown!r}")

    def _take(self, bytes_of: "_Bytes", count: int) -> memoryview:
        content = bytes_of.take(count)
        if content is None:
            raise ConnectionLost(
                f"{self._client.url} {'was left' if self._cut else 'broke off'} in the middle of an answer",
                hint="Is the daemon up? penstock status",
            )
        return content

    def _foreign(self, what: str) -> PenstockError:
        return StreamError(
            f"{self._client.url} sends {what}, which this version does not know",
            hint="Are the daemon and this program of one version? penstock --version",
        )


class _Bytes:
    """A sequence of chunks, read in pieces of any size. A piece within one chunk is not copied."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._remaining = memoryview(b"")

    def take(self, count: int) -> memoryview | None:
        """Return the next bytes, None if fewer are left."""
        if len(self._remaining) >= count:
            taken, self._remaining = self._remaining[:count], self._remaining[count:]
            return taken
        gathered: bytearray | None = None
        filled = 0
        while filled < count:
            if not len(self._remaining):
                chunk = next(self._chunks, None)
                if chunk is None:
                    return None
                self._remaining = memoryview(chunk)
                if gathered is None and len(self._remaining) >= count:
                    return self.take(count)
            if gathered is None:
                gathered = bytearray(count)
            step = min(count - filled, len(self._remaining))
            gathered[filled : filled + step] = self._remaining[:step]
            self._remaining = self._remaining[step:]
            filled += step
        return memoryview(gathered or b"").toreadonly()

    def rest(self) -> None:
        """Read to the end."""
        for _ in self._chunks:
            continue
