# SPDX-License-Identifier: Apache-2.0
"""Serves the calls of gRPC clients in an event loop. The kernel reads and writes HTTP/2 (`GrpcConnection`).

    socket ─▶ GrpcPeer ─▶ GrpcService: all calls that arrived together
    socket ◀─ GrpcPeer ◀─ answers, many calls at once

Everything happens in the loop's thread.
"""

import asyncio
import socket
import zlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc

from penstock._native import Chunk, GrpcConnection
from penstock.errors import EventMalformed
from penstock.limits import TIDB_CALLS_PER_CONNECTION_MAX, TIDB_MESSAGE_BYTES_MAX

_GZIP_BITS = zlib.MAX_WBITS | 16


class CallRefused(Exception):
    """A call that ends with a status other than OK."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class GrpcCall:
    """A call that has arrived completely. Its peer answers or refuses it."""

    __slots__ = (
        "_content",
        "_is_compressed",
        "_peer",
        "_sent",
        "accepts_gzip",
        "method",
        "on_cancel",
        "stream",
    )

    def __init__(
        self,
        peer: "GrpcPeer",
        stream: int,
        method: str,
        content: Chunk,
        is_compressed: bool,
        accepts_gzip: bool,
    ) -> None:
        self.stream = stream
        self.method = method
        self.accepts_gzip = accepts_gzip
        # Called if the client gives up before the answer.
        self.on_cancel: Callable[[], object] | None = None
        self._peer = peer
        self._content = content
        self._is_compressed = is_compressed
        self._sent: asyncio.Future[None] | None = None

    @property
    def peer(self) -> "GrpcPeer":
        """The connection of the call."""
        return self._peer

    def message(self) -> bytes | Chunk:
        """Return the message. Raises EventMalformed if it cannot be decompressed."""
        return _decompress(self._content) if self._is_compressed else self._content

    def refuse(self, code: grpc.StatusCode, text: str) -> None:
        """End the call with a status, after the messages that were sent."""
        self._peer.finish(self, code, text)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a coroutine answer the call. It is cancelled if the client gives up."""
        # `on_cancel` also keeps the task alive: without a strong reference, the task could be garbage
        # collected.
        self.on_cancel = asyncio.get_running_loop().create_task(self._run(work)).cancel

    async def send(self, messages: list[bytes], *, gzip: bool = False) -> None:
        """Add messages to the answer, and wait until the client has room for more. Clears `messages`.

        With `gzip`, all messages of the answer are compressed.
        """
        sent = self._sent = asyncio.get_running_loop().create_future()
        self._peer.send(self, messages, gzip)
        # Free the messages: a message may be large, and the connection has its own copy.
        messages.clear()
        await sent

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except CallRefused as refusal:
            self.refuse(refusal.code, str(refusal))
        except Exception as defect:
            self.refuse(grpc.StatusCode.UNKNOWN, repr(defect))
            raise

    def wake(self) -> None:
        """Continue `send`."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)


class GrpcService(Protocol):
    """Handles the calls of gRPC clients."""

    def receive(self, calls: Sequence[GrpcCall]) -> None:
        """Begin to answer calls that arrived together."""


class GrpcPeer:
    """The connection of a client over a transport."""

    def __init__(self, service: GrpcService, transport: asyncio.Transport) -> None:
        self._service = service
        self._transport = transport
        self._connection = GrpcConnection(
            calls_max=TIDB_CALLS_PER_CONNECTION_MAX,
            message_bytes_max=TIDB_MESSAGE_BYTES_MAX,
            # A client of a Unix socket names the server by the socket's path, which is not a valid host name.
            any_authority=transport.get_extra_info("socket").family == socket.AF_UNIX,
        )
        self._calls: dict[int, GrpcCall] = {}
        self._idle: asyncio.Future[None] | None = None
        self._is_paused = False
        # Calls to be woken once the client reads again.
        self._paused_calls: list[GrpcCall] = []

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of calls that have not arrived completely."""
        return self._connection.unfinished_bytes

    def receive(self, data: bytes) -> None:
        """Read received bytes."""
        self._connection.receive(data)
        self._advance()

    def answer(self, streams: Sequence[int], message: bytes) -> None:
        """Answer calls with the same message, successfully. Cancelled calls are skipped."""
        for stream in streams:
            self._calls.pop(stream, None)
        self._connection.answer(streams, message)
        self._advance()

    def send(self, call: GrpcCall, messages: Sequence[bytes], gzip: bool) -> None:
        """Add messages to the answer of a call, which is woken once the client's window has taken them."""
        self._connection.send(call.stream, messages, gzip)
        self._advance()

    def finish(self, call: GrpcCall, code: grpc.StatusCode, text: str) -> None:
        """End a call with a status."""
        self._calls.pop(call.stream, None)
        self._connection.finish(call.stream, code.value[0], text)
        self._advance()

    def pause(self) -> None:
        """Do not wake any call that is sending: the client does not read, even if its window is large."""
        self._is_paused = True

    def resume(self) -> None:
        """Wake the calls that wait to send."""
        self._is_paused = False
        calls, self._paused_calls = self._paused_calls, []
        for call in calls:
            call.wake()

    async def drain(self) -> None:
        """Make the client send its next calls elsewhere, and wait until its current calls have ended."""
        self._idle = asyncio.get_running_loop().create_future()
        self._connection.end()
        self._advance()
        await self._idle

    def lost(self) -> None:
        """End all calls after the connection was closed."""
        calls, self._calls = self._calls, {}
        self._paused_calls.clear()
        for call in calls.values():
            _cancel(call)
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _advance(self) -> None:
        calls, cancelled, sent, output = self._connection.take()
        if output and not self._transport.is_closing():
            self._transport.write(output)
        for stream in cancelled:
            call = self._calls.pop(stream, None)
            if call is not None:
                _cancel(call)
        for stream in sent:
            call = self._calls.get(stream)
            if call is not None and self._is_paused:
                self._paused_calls.append(call)
            elif call is not None:
                call.wake()
        if calls:
            arrived = [GrpcCall(self, *values) for values in calls]
            self._calls.update((call.stream, call) for call in arrived)
            self._service.receive(arrived)
        if self._connection.closed:
            self._transport.close()
        if self._idle is not None and not self._idle.done() and not self._connection.calls:
            self._idle.set_result(None)


def _cancel(call: GrpcCall) -> None:
    if call.on_cancel is not None:
        call.on_cancel()


def _decompress(content: Chunk) -> bytes:
    inflating = zlib.decompressobj(_GZIP_BITS)
    try:
        message = inflating.decompress(content, TIDB_MESSAGE_BYTES_MAX)
    except zlib.error as problem:
        raise EventMalformed(f"a compressed message of gRPC is damaged: {problem}") from problem
    if not inflating.eof:
        raise EventMalformed(f"a message of gRPC is damaged, or larger than {TIDB_MESSAGE_BYTES_MAX} bytes")
    return message
