# SPDX-License-Identifier: Apache-2.0
"""Answers that are sent as their client takes them, and end when it has gone."""

import asyncio
from abc import abstractmethod
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class StreamedAnswer(Response):
    """An answer that goes on until it ends by itself, or its client has gone.

    A client that takes nothing for `SEND_SECONDS_MAX` has gone, too: its connection is cut.
    """

    @abstractmethod
    async def stream(self, send: Send) -> None:
        """Send the answer, its start and its end among it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer ends, or the client is gone."""
        streaming = asyncio.ensure_future(self.stream(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((streaming, gone), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            for task in (streaming, gone):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
