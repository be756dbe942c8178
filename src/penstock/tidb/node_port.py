# SPDX-License-Identifier: Apache-2.0
"""The single port of a Pump or Drainer: gRPC for the cluster, and HTTP for binlogctl and operators.

Both are registered under one address, so they are told apart by the first bytes of a connection: HTTP/2, and
therefore gRPC, begins with a fixed preface. The port terminates TLS, and rejects clients whose certificates
have none of the allowed common names.
"""

import asyncio
import json
import os
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import h11
import structlog

from penstock.errors import OptionInvalid, PenstockError, TlsFailed
from penstock.limits import (
    CONNECTIONS_PER_PEER_MAX,
    DRAIN_SECONDS_MAX,
    REQUEST_HEAD_BYTES_MAX,
    REQUEST_SECONDS_MAX,
    SEND_SECONDS_MAX,
    TIDB_UNFINISHED_BYTES_MAX,
)
from penstock.tidb.channels import ClusterTls
from penstock.tidb.grpc_server import GrpcPeer, GrpcService

_log = structlog.get_logger(__name__)

# The first bytes that a client sends over HTTP/2 (RFC 9113, section 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# The mode of the socket's file admits the group, because TiDB often runs as another user of the same group.
_UNIX_MODE = 0o660

# How long clients have to read the last answers, and to end TLS.
_CLOSE_SECONDS_MAX = 1.0

# None on systems without this option.
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)

# Answers an HTTP request, by its method and path, with a JSON object; None for an unknown path.
HttpHandler = Callable[[str, str], Awaitable[Any]]


@dataclass(frozen=True)
class PortTls:
    """The certificate of a port, and the common names that its clients may have. An empty list allows any
    name.
    """

    files: ClusterTls
    allowed_names: tuple[str, ...] = ()

    def context(self) -> ssl.SSLContext:
        """Return a context that requires a certificate of the cluster's authority. Raises TlsFailed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.files.cert, self.files.key)
            context.load_verify_locations(self.files.ca)
        except OSError as problem:
            raise TlsFailed(
                f"the certificate {self.files.cert} cannot be used: {problem}", hint="Correct tidb.tls"
            ) from problem
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context


def bind_port(host: str, port: int) -> socket.socket:
    """Return a bound socket, which refuses connections until it is served.

    Raises OptionInvalid if the address is taken or does not belong to this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol. Otherwise asyncio leaves Nagle's algorithm on, and an answer waits 40 ms for an ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these options. They drop a client whose machine is gone, or that does
        # not read.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if _USER_TIMEOUT is not None:
            bound.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(SEND_SECONDS_MAX * 1000))
        bound.bind((host, port))
    except OSError as problem:
        bound.close()
        raise OptionInvalid(
            f"{host}:{port} cannot be listened on: {problem.strerror}", hint="Choose another address"
        ) from problem
    return bound


class NodePort:
    """Serves a bound socket in a separate thread with its own event loop.

    `make_service` is called in the loop. `end_service` is called once no more connections are accepted, and
    must end the calls that would never end on their own. `unix_path` is an additional address for clients on
    this host, without TLS. The mode of its file admits only this process's user and group.
    """

    def __init__(
        self,
        name: str,
        bound: socket.socket,
        make_service: Callable[[asyncio.AbstractEventLoop], GrpcService],
        http: HttpHandler,
        tls: PortTls | None,
        *,
        end_service: Callable[[], None] = lambda: None,
        unix_path: str | None = None,
    ) -> None:
        self._bound = bound
        self._make_service = make_service
        self._http = http
        self._end_service = end_service
        self._unix_path = unix_path
        self.allowed_names = tls.allowed_names if tls is not None else ()
        self._context = tls.context() if tls is not None else None
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._stopping = asyncio.Event()
        self._connections: set[_Connection] = set()
        # The number of bytes of incomplete calls over all connections.
        self._unfinished_bytes = 0
        self._service: GrpcService | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=f"port-{name}", daemon=True)

    def start(self) -> None:
        """Begin to serve, and return once connections are accepted. Raises OptionInvalid."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise OptionInvalid(
                f"the port cannot be served: {self._failure}", hint="Choose another address or socket"
            ) from self._failure

    def stop(self) -> None:
        """Refuse new calls, give running calls a moment to end, and end the thread."""
        if self._thread.ident is None:
            self._bound.close()
            return
        if self._failure is None and self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as problem:
            self._failure = problem
            if self._started.is_set():
                _log.error("the port is no longer served", error=type(problem).__name__, why=str(problem))
        finally:
            self._bound.close()
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._service = self._make_service(self._loop)
        fronts: list[asyncio.Server] = []
        try:
            fronts.append(await self._loop.create_server(self._connect, sock=self._bound, ssl=self._context))
            if self._unix_path is not None:
                local = await self._loop.create_unix_server(
                    self._connect, self._unix_path, start_serving=False
                )
                fronts.append(local)
                # Set the mode regardless of the umask. Every connection is refused until the port serves.
                os.chmod(self._unix_path, _UNIX_MODE)
                await local.start_serving()
            self._started.set()
            await self._stopping.wait()
        finally:
            for front in fronts:
                front.close()
            self._end_service()
            drains = [self._loop.create_task(connection.drain()) for connection in self._connections]
            if drains:
                await asyncio.wait(drains, timeout=DRAIN_SECONDS_MAX)
            await self._close_connections()

    async def _close_connections(self) -> None:
        """Close all connections, and abort those whose clients do not read, or keep TLS open."""
        for connection in list(self._connections):
            connection.close()
        await self._wait_for_no_connection()
        for connection in list(self._connections):
            connection.transport.abort()
        # Wait again, because the loop closes the sockets of the aborted connections later.
        await self._wait_for_no_connection()

    async def _wait_for_no_connection(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS_MAX):
                while self._connections:
                    await asyncio.sleep(0.005)

    def _connect(self) -> "_Connection":
        return _Connection(self)

    # --- Used by connections ----------------------------------------------------------------

    @property
    def service(self) -> GrpcService:
        """The service that answers gRPC calls."""
        assert self._service is not None, "it was made before the first connection"
        return self._service

    def admit(self, connection: "_Connection") -> bool:
        """Count a connection. Returns whether there is room for it."""
        self._connections.add(connection)
        return len(self._connections) <= CONNECTIONS_PER_PEER_MAX

    def release(self, connection: "_Connection") -> None:
        """Forget a closed connection."""
        self._connections.discard(connection)

    def count_unfinished(self, more_bytes: int) -> None:
        """Count the bytes of incomplete calls. Above the limit, the largest connection is closed."""
        self._unfinished_bytes += more_bytes
        if more_bytes > 0 and self._unfinished_bytes > TIDB_UNFINISHED_BYTES_MAX:
            max(self._connections, key=lambda connection: connection.unfinished_bytes).refuse_calls()

    async def answer(self, method: str, path: str) -> tuple[int, Any]:
        """Return the status and the JSON object for an HTTP request."""
        try:
            answer = await self._http(method, path)
        except PenstockError as problem:
            return 200, {"message": str(problem), "code": 3, "data": None}
        return (404, {"message": "not found", "code": 2, "data": None}) if answer is None else (200, answer)


class _Connection(asyncio.Protocol):
    """A client's connection: undecided at first, then gRPC or HTTP."""

    transport: asyncio.Transport

    def __init__(self, port: NodePort) -> None:
        self._port = port
        self._pending = b""
        self._peer: GrpcPeer | None = None
        # The bytes of incomplete calls that the port has counted for this connection.
        self.unfinished_bytes = 0
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX)
        self._request = "", ""
        self._tasks: set[asyncio.Task[Any]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if not self._port.admit(self) or not self._is_allowed():
            self.transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(REQUEST_SECONDS_MAX, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._peer is not None:
            self._receive_grpc(data, self._peer)
            return
        self._pending += data
        if self._pending.startswith(_PREFACE):
            self._deadline.cancel()
            self._peer = GrpcPeer(self._port.service, self.transport)
            pending, self._pending = self._pending, b""
            self._receive_grpc(pending, self._peer)
        elif not _PREFACE.startswith(self._pending):
            self._receive_http()

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.release(self)
        self._count_unfinished(0)
        if hasattr(self, "_deadline"):
            self._deadline.cancel()
        if self._peer is not None:
            self._peer.lost()
            # Drop the reference. With TLS, references to this object form a cycle, which would keep the
            # peer's buffers alive.
            self._peer = None

    def pause_writing(self) -> None:
        # Read no further requests from a client that does not read its answers.
        self.transport.pause_reading()
        if self._peer is not None:
            self._peer.pause()

    def resume_writing(self) -> None:
        if self._peer is not None:
            self._peer.resume()
        self.transport.resume_reading()

    async def drain(self) -> None:
        """Wait for the end of the calls that the client has sent."""
        if self._peer is not None:
            await self._peer.drain()

    def close(self) -> None:
        """Close the connection after sending what is buffered."""
        self.transport.close()

    def _is_allowed(self) -> bool:
        """Return whether the certificate has an allowed common name. A local client needs no certificate."""
        if not self._port.allowed_names or self.transport.get_extra_info("ssl_object") is None:
            return True
        certificate = self.transport.get_extra_info("peercert") or {}
        names = [
            value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"
        ]
        if set(names) & set(self._port.allowed_names):
            return True
        _log.warning("a certificate's common name is not allowed", names=names)
        return False

    # --- gRPC -------------------------------------------------------------------------------

    def _receive_grpc(self, data: bytes, peer: GrpcPeer) -> None:
        peer.receive(data)
        if not self.transport.is_closing():
            self._count_unfinished(peer.unfinished_bytes)

    def _count_unfinished(self, unfinished_bytes: int) -> None:
        before, self.unfinished_bytes = self.unfinished_bytes, unfinished_bytes
        self._port.count_unfinished(unfinished_bytes - before)

    def refuse_calls(self) -> None:
        """Close the connection. Its calls fail like those to a Pump that is stopping, so their senders repeat
        them.
        """
        _log.warning(
            "a connection is closed: calls that have not arrived whole are too large together",
            peer=str(self.transport.get_extra_info("peername")),
            unfinished_bytes=self.unfinished_bytes,
            bytes_max=TIDB_UNFINISHED_BYTES_MAX,
        )
        self._count_unfinished(0)
        self.transport.abort()

    # --- HTTP -------------------------------------------------------------------------------

    def _receive_http(self) -> None:
        self._parser.receive_data(self._pending)
        self._pending = b""
        try:
            while self._parser.their_state in (h11.IDLE, h11.SEND_BODY):
                event = self._parser.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    return
                if isinstance(event, h11.Request):
                    self._request = event.method.decode(), event.target.decode()
                if isinstance(event, h11.EndOfMessage):
                    self._start(self._answer(*self._request))
                    return
        except h11.RemoteProtocolError:
            self.transport.abort()

    async def _answer(self, method: str, path: str) -> None:
        status, answer = await self._port.answer(method, path)
        body = json.dumps(answer).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self._parser.send(event) or b"")
        self.transport.close()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
