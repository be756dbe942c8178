# SPDX-License-Identifier: Apache-2.0
"""Connections within bounds: how long a request may take to arrive, how long an answer to be read, who left.

A peer that connects and says nothing, or says it a byte at a time, costs a descriptor for a while; how many
there are is counted in `accepting`.
"""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.limits import REQUEST_SECONDS_MAX, SEND_SECONDS_MAX
from penstock.serve.accepting import Admission, ListeningSocket
from penstock.settings import Listening

_log = structlog.get_logger(__name__)

# A flood is told so often, not once for each of its connections.
_TELL_SECONDS = 1.0


class Connection:
    """One connection to a listener. HTTP routes have it as `request.state.connection`."""

    def __init__(self, listener: Listening, peer: str, port: int, close: Callable[[], None]) -> None:
        self.listener = listener
        self.peer = peer
        self.port = port
        self.since_us = time.time_ns() // 1000
        self._close = close
        self._when_lost: list[Callable[[], None]] = []
        self.lost = False
        # Set while another request of it has come before the one at hand is answered.
        self.asked_again = asyncio.Event()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have `call` run in the event loop once the connection is gone; at once where it is."""
        if self.lost:
            call()
        else:
            self._when_lost.append(call)

    def close(self) -> None:
        """Close it, after what was written has left."""
        self._close()

    def end(self) -> None:
        """Tell who waits for it that the connection is gone."""
        self.lost = True
        waiting, self._when_lost = self._when_lost, []
        for call in waiting:
            call()


class Tellings:
    """Log lines about peers that a flood of them cannot multiply: one a second of each kind, with a count."""

    def __init__(self) -> None:
        self._told_at: dict[tuple[str, ...], float] = {}
        self._untold: Counter[tuple[str, ...]] = Counter()

    def tell(self, what: str, listener: Listening, peer: str, **more: Any) -> None:
        """Warn of what a peer did, unless the same was just told; `times` is how often it was since then."""
        kind = what, listener, str(more.get("error", ""))
        self._untold[kind] += 1
        now = time.monotonic()
        if now - self._told_at.get(kind, float("-inf")) >= _TELL_SECONDS:
            times = self._untold.pop(kind)
            _log.warning(
                what, listener=listener, peer=peer, **more, **({"times": times} if times > 1 else {})
            )
            self._told_at[kind] = now


class Connections:
    """All connections of a daemon, within the bounds of `limits`. Belongs to the event loop."""

    def __init__(self) -> None:
        self.admission = Admission()
        self._open: set[Connection] = set()
        self._tellings = Tellings()

    def listen(self, listener: Listening, bound: socket.socket, *, over_tls: bool) -> ListeningSocket:
        """Return a port whose connections are counted here, in place of a bound one."""
        port = ListeningSocket(bound, self.admission, with_handshake=over_tls)
        port.refused = lambda why, peer: self.tell(why, listener, peer, open=self.admission.open)
        return port

    def count(self, listener: Listening | None = None) -> int:
        """Return how many there are, of one listener or of all."""
        return sum(listener in (None, one.listener) for one in self._open)

    def admit(self, listener: Listening, transport: asyncio.BaseTransport) -> Connection:
        """Return a new connection, whose handshake is over."""
        address = transport.get_extra_info("peername") or ("?", 0)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            self.admission.greeted(raw.fileno())
        connection = Connection(listener, str(address[0]), int(address[1]), transport.close)
        self._open.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Note that a connection is gone, and tell who waits for that."""
        self._open.discard(connection)
        connection.end()

    def tell(self, what: str, listener: Listening, peer: str, **more: Any) -> None:
        """Warn of what a peer did; see `Tellings`."""
        self._tellings.tell(what, listener, peer, **more)


class Heads(Protocol):
    """What goes over the bytes of one connection before they are read as HTTP."""

    def feed(self, data: bytes) -> bytes:
        """Take what came, and return what may be read by now."""


class BoundedHttp(H11Protocol):
    """A connection whose requests have to arrive in time, and whose answers have to be read in time."""

    _connections: Connections
    _listener: Listening
    _make_heads: Callable[[], Heads] | None = None

    _connection: Connection | None = None
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _heads: Heads | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection = self._connections.admit(self._listener, transport)
        # What routes find as request.state is copied from here for each request.
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
        # Its time runs from a request's first byte to its last; an answer may take as long as it likes.
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            self._watch()
        else:
            self._unwatch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell_asked_again()

    def _tell_asked_again(self) -> None:
        """Tell who waits for news that the next request is here; they are answered one by one."""
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

    def _read_again(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up_sending(self) -> None:
        self._unread = None
        self._connections.tell("an answer is not read", self._listener, self._peer)
        # A close would wait for what nobody reads.
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


def bounded_http(
    connections: Connections, listener: Listening, make_heads: Callable[[], Heads] | None = None
) -> type[asyncio.Protocol]:
    """Return the protocol of a listener's HTTP connections: uvicorn's, within bounds.

    `make_heads` makes what goes over each connection's bytes first, for clients whose HTTP is not quite it.
    """

    class Bound(BoundedHttp):
        _connections = connections
        _listener = listener
        _make_heads = None if make_heads is None else staticmethod(make_heads)

    return Bound
