# SPDX-License-Identifier: Apache-2.0
"""Responses that are streamed at the client's pace, and end when the client disconnects."""

import asyncio
from abc import abstractmethod
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class StreamedAnswer(Response):
    """A response that is streamed until it is complete or the client disconnects.

    A client that reads nothing for `SEND_SECONDS_MAX` is treated as disconnected: its connection is closed.
    """

    @abstractmethod
    async def stream(self, send: Send) -> None:
        """Send the response, including its start and end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the response is complete or the client disconnects."""
        streaming = asyncio.ensure_future(self.stream(send))
        disconnected = asyncio.ensure_future(_wait_disconnect(receive))
        try:
            await asyncio.wait((streaming, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            for task in (streaming, disconnected):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _wait_disconnect(receive: Receive) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
