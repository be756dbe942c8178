# SPDX-License-Identifier: Apache-2.0
"""Limits on connections: how long a request may take to arrive, and how long a response may stay unread.

A peer that is silent, or that sends one byte at a time, occupies a file descriptor until a limit is reached.
`accepting` counts these descriptors.
"""

import asyncio
import socket
import sys
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import DiskFailed
from penstock.limits import REQUEST_SECONDS_MAX, SEND_SECONDS_MAX
from penstock.logstore.disk import FileRange, refuse
from penstock.serve.accepting import Address, Admission, ListeningSocket
from penstock.settings.daemon import LISTENERS, Listening
from penstock.telemetry.counters import Counter, Histogram
from penstock.telemetry.definitions import SECONDS_BOUNDS

_log = structlog.get_logger(__name__)

# Log messages of one kind are limited to one per interval, so that a flood of connections does not flood the
# log.
_LOG_INTERVAL_SECONDS = 1.0


class Connection:
    """One connection to a listener. HTTP routes receive it as `request.state.connection`."""

    def __init__(
        self, listener: Listening, address: Address, close: Callable[[], None], number: int = 0
    ) -> None:
        self.listener = listener
        self.peer, self.port = address
        # See `Admission.number_of`.
        self.number = number
        self.since_us = time.time_ns() // 1000
        self._close = close
        self._when_lost: list[Callable[[], None]] = []
        self.lost = False
        # Sends a range of a file as the next bytes of a response. None if the connection is encrypted.
        self.send_file: Callable[[FileRange], Awaitable[None]] | None = None
        # An event that is set once the client has sent its next request before the response to the current
        # one is complete.
        self.asked_again = asyncio.Event()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call `call` in the event loop when the connection is lost, or immediately if it is already lost."""
        if self.lost:
            call()
        else:
            self._when_lost.append(call)

    def close(self) -> None:
        """Close the connection after sending the buffered data."""
        self._close()

    def end(self) -> None:
        """Notify the waiting callers that the connection is lost."""
        self.lost = True
        waiting, self._when_lost = self._when_lost, []
        for call in waiting:
            call()


class RateLimitedLog:
    """Logs messages about peers at a limited rate: one message of each kind per second, with the number
    suppressed.
    """

    def __init__(self) -> None:
        self._logged_at: dict[tuple[str, ...], float] = {}
        self._unlogged: Tally[tuple[str, ...]] = Tally()

    def tell(self, message: str, listener: Listening, peer: str, **more: Any) -> None:
        """Log a warning, unless a warning of the same kind was just logged. `times` counts the warnings
        suppressed since then.
        """
        kind = message, listener, str(more.get("error", ""))
        self._unlogged[kind] += 1
        now = time.monotonic()
        if now - self._logged_at.get(kind, float("-inf")) >= _LOG_INTERVAL_SECONDS:
            times = self._unlogged.pop(kind)
            _log.warning(
                message, listener=listener, peer=peer, **more, **({"times": times} if times > 1 else {})
            )
            self._logged_at[kind] = now


@dataclass(frozen=True)
class TrafficCounts:
    """The requests and rejected connections that a process has counted since its last report; see
    `Traffic`.
    """

    requests: Mapping[tuple[str, ...], float]
    rejected: Mapping[tuple[str, ...], float]
    seconds: Mapping[Listening, tuple[tuple[int, ...], float]]


class Traffic:
    """Counts the requests and rejected connections of every listener, for metrics."""

    def __init__(self) -> None:
        self.requests = Counter()
        self.rejected = Counter()
        self.seconds = {name: Histogram(SECONDS_BOUNDS) for name in LISTENERS}

    def take(self) -> TrafficCounts:
        """Return all counts and start again from 0."""
        seconds = {name: histogram.take() for name, histogram in self.seconds.items()}
        return TrafficCounts(self.requests.take(), self.rejected.take(), seconds)

    def merge(self, counts: TrafficCounts) -> None:
        """Add what another process has counted."""
        self.requests.merge(counts.requests)
        self.rejected.merge(counts.rejected)
        for name, (buckets, total) in counts.seconds.items():
            self.seconds[name].merge(buckets, total)


class Connections:
    """All connections of a daemon, limited by `limits`. Belongs to the event loop."""

    def __init__(self) -> None:
        self.admission = Admission()
        self._open: set[Connection] = set()
        self._log = RateLimitedLog()
        self.traffic = Traffic()
        # The connections that other processes of the daemon serve, by listener.
        self.served_elsewhere: Tally[Listening] = Tally()

    def listen(self, listener: Listening, bound: socket.socket, *, over_tls: bool) -> ListeningSocket:
        """Replace a bound socket by a socket that counts its connections in this object."""
        port = ListeningSocket(bound, self.admission, with_handshake=over_tls)
        port.refused = lambda why, peer: self.tell(why, listener, peer, open=self.admission.open)
        return port

    def count(self, listener: Listening | None = None) -> int:
        """Return the number of connections, of one listener or in total."""
        here = sum(listener in (None, connection.listener) for connection in self._open)
        elsewhere = self.served_elsewhere
        return here + (elsewhere.total() if listener is None else elsewhere[listener])

    def oldest(self, limit: int) -> "list[Connection]":
        """Return up to `limit` open connections, the oldest first."""
        return sorted(self._open, key=lambda connection: connection.since_us)[:limit]

    def admit(
        self, listener: Listening, transport: asyncio.BaseTransport, client: Address | None = None
    ) -> Connection:
        """Register a connection after its handshake, and return it.

        `client` is the address of the requests' sender, if that is not the transport's peer.
        """
        address = client or transport.get_extra_info("peername") or ("?", 0)
        raw = transport.get_extra_info("socket")
        number = 0
        if raw is not None:
            number = self.admission.number_of(raw.fileno())
            self.admission.greeted(raw.fileno())
        connection = Connection(listener, (str(address[0]), int(address[1])), transport.close, number)
        self._open.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Unregister a lost connection, and notify the callers that wait for its loss."""
        self._open.discard(connection)
        connection.end()

    def tell(self, what: str, listener: Listening, peer: str, **more: Any) -> None:
        """Log a rate-limited warning about a peer; see `RateLimitedLog`."""
        self.traffic.rejected.add(listener, what)
        self._log.tell(what, listener, peer, **more)


class Heads(Protocol):
    """A filter that processes the bytes of one connection before they are parsed as HTTP."""

    def feed(self, data: bytes) -> bytes:
        """Accept received bytes, and return the bytes that can be parsed now."""


class BoundedHttp(H11Protocol):
    """A connection whose requests must arrive, and whose responses must be read, within a time limit."""

    _connections: Connections
    _listener: Listening
    _make_heads: Callable[[], Heads] | None = None

    # The client whose request another process of the daemon forwards over this connection.
    forwarded_for: Address | None = None
    _connection: Connection | None = None
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _heads: Heads | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = self.forwarded_for or self.client
        self._connection = self._connections.admit(self._listener, transport, self.client)
        if sys.platform == "linux" and transport.get_extra_info("sslcontext") is None:
            self._connection.send_file = self._send_file
        # Each request's request.state is copied from this dictionary.
        self.app_state: dict[str, Any] = {**self.app_state, "connection": self._connection}
        self._heads = None if self._make_heads is None else self._make_heads()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._read_again()
        if self._connection is not None:
            self._connections.release(self._connection)
            self._connection = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._heads is not None:
            data = self._heads.feed(data)
            if not data:
                return
        super().data_received(data)
        self._tell_asked_again()
        # The limit covers a request's first to last byte. There is no limit for producing the response.
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._watch()
        else:
            self._unwatch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell_asked_again()

    def _tell_asked_again(self) -> None:
        """Notify the waiting response that the next request has arrived; requests are answered one by one."""
        if self._connection is None:
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.conn.trailing_data[0]:
            self._connection.asked_again.set()
        else:
            self._connection.asked_again.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SEND_SECONDS_MAX, self._give_up_sending)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_again()

    async def _send_file(self, content: FileRange) -> None:
        """Send the range from the page cache. Raises DiskFailed if the file cannot be read or has ended."""
        if self.transport.is_closing():
            return
        self.conn.send_with_data_passthrough(h11.Data(data=content))  # type: ignore[arg-type]
        sent = -1
        try:
            async with asyncio.timeout(SEND_SECONDS_MAX):
                sent = await self.loop.sendfile(
                    self.transport,
                    content,  # type: ignore[arg-type]
                    content.start,
                    len(content),
                    fallback=False,
                )
        except TimeoutError:
            self._give_up_sending()
        except ConnectionError:
            # The client has closed the connection.
            pass
        except OSError as problem:
            refuse(problem, "reading", content.file.path)
        else:
            if sent < len(content):
                raise DiskFailed(f"{content.file.path} ended at {content.start + sent} while it was read")
        finally:
            if sent < len(content):
                # The client expects the rest of the range, and would mistake another response for it.
                self.transport.abort()

    def _read_again(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up_sending(self) -> None:
        self._unread = None
        self._connections.tell("an answer is not read", self._listener, self._peer)
        # A normal close would wait until the peer has read the sent data.
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._connections.tell("what came is no HTTP", self._listener, self._peer)
        super().send_400_response(msg)

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else "?"

    def _watch(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(REQUEST_SECONDS_MAX, self._give_up)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        self._connections.tell("a request does not arrive", self._listener, self._peer)
        self.transport.abort()


def sending_files(app: ASGIApp) -> ASGIApp:
    """Return an application whose response bodies may be ranges of files if the connection has
    `Connection.send_file`.
    """

    async def with_files(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_message(message: Message) -> None:
            body = message.get("body")
            if isinstance(body, FileRange):
                await scope["state"]["connection"].send_file(body)
                if message.get("more_body"):
                    return
                message = {**message, "body": b""}
            await send(message)

        await app(scope, receive, send_message)

    return with_files


def bounded_http(
    connections: Connections, listener: Listening, make_heads: Callable[[], Heads] | None = None
) -> type[asyncio.Protocol]:
    """Return the protocol of a listener's HTTP connections: uvicorn's, with limits.

    `make_heads` creates a filter for each connection's bytes, for clients whose HTTP is not fully conforming.
    """

    class Bound(BoundedHttp):
        _connections = connections
        _listener = listener
        _make_heads = None if make_heads is None else staticmethod(make_heads)

    return Bound
