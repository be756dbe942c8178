# SPDX-License-Identifier: Apache-2.0
"""The port for Canal clients, in the shared event loop: each connection has its own session."""

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
    """Accepts connections and runs `session` for each. An error in one session does not affect the others."""

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
        """Start accepting connections."""
        self._server = await asyncio.start_server(
            self._serve,
            sock=self._port,
            ssl=self._tls,
            ssl_handshake_timeout=GREETING_SECONDS_MAX if self._tls else None,
        )

    async def stop_serving(self) -> None:
        """Stop accepting, cancel waiting sessions, and give the others a limited time to finish."""
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
            # A normal close would wait for data that the peer does not read.
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
            # A bug ends only its own session, and is logged with its traceback.
            _log.error("a session failed", listener="canal", exc_info=bug)
