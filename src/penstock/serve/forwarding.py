# SPDX-License-Identifier: Apache-2.0
"""Requests that a listener process forwards to the daemon's main process, because answering them requires
more than the logs.

Requests of followers (`POST /v1/instances/NAME/changes`) and readers of raw bytes (`GET .../bytes`) are
answered by the process that accepted the connection. The main process answers all other requests, over a
separate connection for each request.
"""

import asyncio
import re
import socket
from collections.abc import Callable
from contextlib import suppress

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import ConnectionLost
from penstock.serve.problems import problem_response

_SERVED_HERE = re.compile(r"/v1/instances/([^/]+)/(?:changes|bytes)")
_READ_BYTES = 256 * 1024
# Headers that belong to a single connection and are not forwarded.
_HOP_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"})


class Divided:
    """Serves the requests of followers and readers in this process, and forwards all others.

    `is_here` returns whether the log of an instance can be read in this process.
    """

    def __init__(self, here: ASGIApp, forwarded: ASGIApp, is_here: Callable[[str], bool]) -> None:
        self._here = here
        self._forwarded = forwarded
        self._is_here = is_here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _SERVED_HERE.fullmatch(scope["path"])
        is_here = match is not None and self._is_here(match[1])
        await (self._here if is_here else self._forwarded)(scope, receive, send)


class Forward:
    """Forwards requests to the daemon.

    `connect` opens a new connection for a request, and raises OSError if it fails.
    """

    def __init__(self, connect: Callable[[Scope], socket.socket]) -> None:
        self._connect = connect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the daemon's response. If a client disconnects, its request ends in the daemon too."""
        has_started = False

        async def send_on(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._exchange(scope, receive, send_on)
        except (OSError, h11.RemoteProtocolError) as problem:
            if has_started:
                # The client must not mistake a truncated response for a complete one.
                raise ConnectionResetError("the daemon ended before its answer") from problem
            lost = ConnectionLost(f"the daemon does not answer: {problem}", hint="Ask again in a moment")
            await problem_response(lost, 1)(scope, receive, send)

    async def _exchange(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader, writer = await asyncio.open_connection(sock=self._connect(scope))
        connection = h11.Connection(h11.CLIENT)
        asking = asyncio.ensure_future(_send_request(connection, scope, receive, writer))
        try:
            await _send_answer(connection, reader, send)
        finally:
            asking.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await asking
            writer.transport.abort()


async def _send_request(
    connection: h11.Connection, scope: Scope, receive: Receive, writer: asyncio.StreamWriter
) -> None:
    """Send a request with its body, and end the connection once the client disconnects."""
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    headers = [(name, value) for name, value in scope["headers"] if name != b"connection"]
    request = h11.Request(
        method=scope["method"], target=target, headers=[*headers, (b"connection", b"close")]
    )
    writer.write(connection.send(request) or b"")
    is_complete = False
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            # The daemon sees the disconnect and cancels the request.
            writer.transport.abort()
            return
        if message.get("body"):
            writer.write(connection.send(h11.Data(message["body"])) or b"")
        if not message.get("more_body") and not is_complete:
            is_complete = True
            writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()


async def _send_answer(connection: h11.Connection, reader: asyncio.StreamReader, send: Send) -> None:
    """Send the daemon's response. Raises RemoteProtocolError if the connection ends before the response is
    complete.
    """
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            headers = [(name, value) for name, value in event.headers if name not in _HOP_HEADERS]
            await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
        elif isinstance(event, h11.Data):
            await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        elif isinstance(event, h11.EndOfMessage):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
