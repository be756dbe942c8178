# SPDX-License-Identifier: Apache-2.0
"""The port for Canal's clients, in the event loop of the others: each connection is a session of its own."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

import structlog

from penstock.errors import PenstockError
from penstock.limits import DRAIN_SECONDS_MAX, GREETING_SECONDS_MAX
from penstock.serve.connections import Connections

_log = structlog.get_logger(__name__)

Session = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class CanalListener:
    """Accepts connections and gives each to `session`; whatever ends one ends no other."""

    def __init__(
        self,
        session: Session,
        connections: Connections,
        tls: ssl.SSLContext | None,
        port: socket.socket,
    ) -> None:
        self._session = session
        self._connections = connections
        self._tls = tls
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Accept from now on."""
        self._server = await asyncio.start_server(
            self._serve,
            sock=self._port,
            ssl=self._tls,
            ssl_handshake_timeout=GREETING_SECONDS_MAX if self._tls else None,
        )

    async def stop_serving(self) -> None:
        """Accept nobody any longer, and end the sessions there are: at once where they wait, else in time."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_SECONDS_MAX)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served in a task"
        connection = self._connections.admit("canal", writer.transport)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            await self._session(reader, writer)
        except (ConnectionError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError) as problem:
            _log.info("a connection ended", listener="canal", peer=connection.peer, why=str(problem))
            # A close would wait for what nobody reads.
            writer.transport.abort()
        except PenstockError as problem:
            error = type(problem).__name__
            self._connections.tell(
                "a connection is closed", "canal", connection.peer, error=error, why=str(problem)
            )
        finally:
            self._connections.release(connection)
            writer.close()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            # It ends its own session and no other, and is told with all there is to know.
            _log.error("a session failed", listener="canal", exc_info=bug)
