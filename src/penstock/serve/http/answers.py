# SPDX-License-Identifier: Apache-2.0
"""Ends a request when its client disconnects, and streams a response at the client's pace."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_Answer = TypeVar("_Answer")
_Handler = Callable[[Request], Awaitable[Response]]

# A status for a response that no client receives. nginx logs the same status for a client that disconnected
# before the response.
_CLIENT_LEFT = Response(status_code=499)


def ending_on_disconnect(handler: _Handler) -> _Handler:
    """Return a handler that is cancelled when its client disconnects.

    Work that is queued for a thread is dropped, so that no client waits for the search of a disconnected
    client. A search that has begun in a thread ends before its next read of the log.
    """

    async def handle(request: Request) -> Response:
        # Any message after the request's body reports that the client has disconnected.
        await request.body()
        return await _until_disconnect(handler(request), request.receive) or _CLIENT_LEFT

    return handle


class StreamedAnswer(Response):
    """A response that is streamed until it is complete or the client disconnects.

    A client that reads nothing for `SEND_SECONDS_MAX` is treated as disconnected, and its connection is
    closed.
    """

    @abstractmethod
    async def stream(self, send: Send) -> None:
        """Send the response, including its start and end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the response is complete or the client disconnects."""
        await _until_disconnect(self.stream(send), receive)


async def _until_disconnect(work: Awaitable[_Answer], receive: Receive) -> _Answer | None:
    """Return the result of the awaited work, None if the client disconnects first. The work is then
    cancelled.
    """
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, disconnected):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _wait_disconnect(receive: Receive) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
