# SPDX-License-Identifier: Apache-2.0
"""The port for Canal clients, in the shared event loop. Each connection has its own session.

With listener processes, the port belongs to the daemon, and the processes serve the connections that it
accepts.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from penstock.coordinate.store import CoordinationStore
from penstock.errors import PenstockError
from penstock.limits import DRAIN_SECONDS_MAX, GREETING_SECONDS_MAX
from penstock.retry import Backoff, Retry
from penstock.serve.connections import Connections

_log = structlog.get_logger(__name__)

# The retry interval for a store that did not answer.
_STORE_BACKOFF = Backoff(longest=4.0)

Session = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def open_cursor_store(open_store: Callable[[], CoordinationStore]) -> CoordinationStore | None:
    """Open the store of the clients' cursors, waiting until it answers. If it can never answer, log the
    reason and return None.
    """
    retry = Retry("clients of Canal wait for the coordination store", backoff=_STORE_BACKOFF)
    try:
        return await retry.run_async(partial(asyncio.to_thread, open_store))
    except PenstockError as problem:
        _log.error("Canal clients are not served", error=type(problem).__name__, why=str(problem))
        return None


class CanalListener:
    """Accepts connections and runs `session` for each. An error in one session does not affect the others."""

    def __init__(
        self,
        session: Session,
        connections: Connections,
        tls: ssl.SSLContext | None,
        port: socket.socket | None = None,
    ) -> None:
        """Without a port, connections arrive through `serve_accepted` only."""
        self._session = session
        self._connections = connections
        self._tls = tls
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start accepting connections."""
        assert self._port is not None, "connections are accepted elsewhere"
        self._server = await asyncio.start_server(
            self._serve,
            sock=self._port,
            ssl=self._tls,
            ssl_handshake_timeout=GREETING_SECONDS_MAX if self._tls else None,
        )

    async def serve_accepted(self, accepted: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; return after its handshake. Raises OSError."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader, self._serve)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=GREETING_SECONDS_MAX if self._tls else None,
            )
        except BaseException:
            accepted.close()
            raise

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
            # A normal close would wait until the peer has read the sent data.
            writer.transport.abort()
        except PenstockError as problem:
            error = type(problem).__name__
            self._connections.tell(
                "a connection is closed", "canal", connection.peer, error=error, why=str(problem)
            )
        except asyncio.CancelledError:
            # End the task normally: Python 3.11 prints a traceback for a connection's task that counts as
            # cancelled.
            _log.debug("a connection is closed at the end", listener="canal", peer=connection.peer)
        finally:
            self._connections.release(connection)
            writer.close()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            # A bug ends only its own session, and is logged with its traceback.
            _log.error("a session failed", listener="canal", exc_info=bug)
