# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that cuts its connections, at a byte or on demand.

One thread owns every socket, so that a reset is sent immediately and does not wait for a blocked reader.
Bytes are counted per connection, only in the direction from the server to the client, and starting with the
server's greeting.
"""

import contextlib
import fcntl
import select
import socket
import struct
import termios
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

CHUNK_BYTES = 64 * 1024
PENDING_BYTES_MAX = 256 * 1024
WAIT_SECONDS_MAX = 120
# Interval for checking whether a client has received everything, for which there is no event.
ARRIVAL_MILLISECONDS = 5
PACKET_HEADER_BYTES = 4

Cut = Literal["reset", "close", "silence"]


@dataclass(eq=False)
class _Flow:
    """One direction of a connection: bytes read from one socket and not yet written to the other."""

    source: socket.socket
    sink: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    read_bytes: int = 0
    ended: bool = False
    closed: bool = False


class _Packets:
    """Locates the packets of one direction: a 3-byte length, a sequence number, the payload."""

    def __init__(self) -> None:
        self._offset = 0
        self._header = bytearray()
        self._payload_left = 0

    def middle_from(self, chunk: bytes, begin: int) -> int | None:
        """Continue with a chunk; return the middle of its first packet that begins at `begin` or later."""
        middle: int | None = None
        at = 0
        while at < len(chunk):
            if self._payload_left:
                step = min(self._payload_left, len(chunk) - at)
                self._payload_left -= step
            else:
                step = min(PACKET_HEADER_BYTES - len(self._header), len(chunk) - at)
                self._header += chunk[at : at + step]
            at += step
            if len(self._header) == PACKET_HEADER_BYTES:
                self._payload_left = int.from_bytes(self._header[:3], "little")
                start = self._offset + at - PACKET_HEADER_BYTES
                self._header.clear()
                if middle is None and start >= begin and self._payload_left > 1:
                    middle = start + PACKET_HEADER_BYTES + self._payload_left // 2
        self._offset += len(chunk)
        return middle


@dataclass(frozen=True, eq=False)
class _Plan:
    begin_bytes: int
    how: Cut
    in_packet: bool


@dataclass(eq=False)
class _Connection:
    up: _Flow
    down: _Flow
    packets: _Packets = field(default_factory=_Packets)
    plan: _Plan | None = None
    cut_at: int | None = None
    cut_how: Cut | None = None
    silent: bool = False


class Proxy:
    """Forwards connections from `port` to a server's port. As a context manager, it runs inside the block.

    There are three ways to cut a connection: "reset" ends both sides with a TCP reset, "close" with an
    orderly shutdown, and "silence" leaves both sides open but forwards nothing more, like a lost network
    path. A planned cut happens once the client has received every byte before it. A cut on demand also drops
    bytes in transit.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._connections: list[_Connection] = []
        self._ended: list[socket.socket] = []
        self._orders: deque[Callable[[], None]] = deque()
        self._plans: list[_Plan] = []
        self._refusing = False
        self._swallowing = False
        self._closing = False
        self._progress = threading.Condition()
        self.accepted_count = 0
        self.cut_count = 0
        self.bytes_down = 0
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def through(self, url: str) -> str:
        """Return a server's URL with this proxy's port."""
        parts = urlsplit(url)
        account, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{account}{at}127.0.0.1:{self.port}").geturl()

    def cut(self, how: Cut = "reset") -> int:
        """Cut every live connection now; return their number."""
        counted: list[int] = []

        def order() -> None:
            live = [connection for connection in self._connections if not connection.silent]
            for connection in live:
                self._cut(connection, how)
            counted.append(len(live))

        self._run_in_thread(order)
        return counted[0]

    def cut_after(
        self, bytes_down: int, how: Cut = "reset", *, in_packet: bool = False, times: int = 1
    ) -> None:
        """Cut the next `times` connections that receive this many bytes from the server, at that byte.

        A connection that has already received more is cut at its next byte. With `in_packet`, the connection
        is cut in the middle of the first packet that begins at that byte or later. This does not work with
        TLS, where packets cannot be detected.
        """
        self._run_in_thread(lambda: self._plans.extend([_Plan(bytes_down, how, in_packet)] * times))

    def disarm(self) -> None:
        """Cancel the cuts planned by `cut_after`."""
        self._run_in_thread(self._plans.clear)

    def swallow(self) -> None:
        """Like a lost network path: until `resume`, forward nothing on current and new connections, and end
        none of them.
        """

        def order() -> None:
            self._swallowing = True
            for connection in self._connections:
                connection.silent = True

        self._run_in_thread(order)

    def resume(self) -> None:
        """Resume silenced connections without losing bytes."""

        def order() -> None:
            self._swallowing = False
            for connection in self._connections:
                connection.silent = False

        self._run_in_thread(order)

    def refuse(self, refusing: bool = True) -> None:
        """Reset each new connection at once while `refusing`."""

        def order() -> None:
            self._refusing = refusing

        self._run_in_thread(order)

    def wait_for(self, condition: Callable[[Self], bool], seconds_max: float = WAIT_SECONDS_MAX) -> None:
        """Wait until a condition on this proxy's counts is true. Raises `TimeoutError`."""
        with self._progress:
            if not self._progress.wait_for(lambda: condition(self), seconds_max):
                raise TimeoutError(
                    f"after {seconds_max} s: {self.accepted_count} connections, {self.cut_count} cuts, "
                    f"{self.bytes_down} bytes from the server"
                )

    def close(self) -> None:
        """Close every connection and the port."""
        if self._closing:
            return

        def order() -> None:
            self._closing = True

        if self._thread.is_alive():
            self._run_in_thread(order)
            self._thread.join(WAIT_SECONDS_MAX)
        # Close these last: until here, a thread may use them to wake the proxy.
        self._wake_in.close()
        self._wake_out.close()

    def _run_in_thread(self, order: Callable[[], None]) -> None:
        """Run an order in the thread that owns the sockets, and wait for it."""
        done = threading.Event()

        def run() -> None:
            order()
            done.set()

        self._orders.append(run)
        self._wake_out.send(b"!")
        if not done.wait(WAIT_SECONDS_MAX):
            raise TimeoutError(f"the proxy on port {self.port} does not run: use it as a context manager")

    def _run(self) -> None:
        while not self._closing:
            ready = self._poll()
            if self._wake_in.fileno() in ready:
                self._wake_in.recv(CHUNK_BYTES)
            while self._orders:
                # An order applies to every client that is connected when the order is given.
                self._accept()
                self._orders.popleft()()
            self._accept()
            for connection in list(self._connections):
                self._relay(connection, ready)
            for side in list(self._ended):
                if side.fileno() in ready:
                    self._discard_input(side)
            with self._progress:
                self._progress.notify_all()
        for connection in list(self._connections):
            self._drop(connection, "close")
        for side in self._ended:
            side.close()
        self._listener.close()

    def _poll(self) -> set[int]:
        events_by_descriptor = {self._wake_in.fileno(): select.POLLIN, self._listener.fileno(): select.POLLIN}
        for connection in self._connections:
            for flow in () if connection.silent else (connection.up, connection.down):
                reads = connection.cut_how is None or flow is connection.up
                if not flow.ended and len(flow.pending) < PENDING_BYTES_MAX and reads:
                    events_by_descriptor[flow.source.fileno()] = (
                        events_by_descriptor.get(flow.source.fileno(), 0) | select.POLLIN
                    )
                if flow.pending:
                    events_by_descriptor[flow.sink.fileno()] = (
                        events_by_descriptor.get(flow.sink.fileno(), 0) | select.POLLOUT
                    )
        events_by_descriptor |= {side.fileno(): select.POLLIN for side in self._ended}
        poll = select.poll()
        for number, events in events_by_descriptor.items():
            poll.register(number, events)
        awaited = any(
            connection.cut_how is not None and not connection.down.pending for connection in self._connections
        )
        return {number for number, _ in poll.poll(ARRIVAL_MILLISECONDS if awaited else None)}

    def _accept(self) -> None:
        """Accept every waiting client."""
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            self.accepted_count += 1
            self._forward(client)

    def _forward(self, client: socket.socket) -> None:
        try:
            if self._refusing:
                raise ConnectionRefusedError
            server = socket.create_connection(("127.0.0.1", self.server_port), WAIT_SECONDS_MAX)
        except OSError:
            # A server that is down resets its clients, and so does its proxy.
            _reset(client)
            return
        for side in (client, server):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(_Flow(client, server), _Flow(server, client), silent=self._swallowing)
        self._connections.append(connection)

    def _relay(self, connection: _Connection, ready: set[int]) -> None:
        if connection.silent:
            return
        try:
            for flow in (connection.up, connection.down):
                reads = connection.cut_how is None or flow is connection.up
                if flow.source.fileno() in ready and not flow.ended and reads:
                    self._read(connection, flow)
                if flow.pending:
                    self._write(connection, flow)
                if flow.ended and not flow.pending and not flow.closed:
                    flow.sink.shutdown(socket.SHUT_WR)
                    flow.closed = True
        except OSError:
            # One side disconnected abnormally, so reset the other side too.
            self._drop(connection, "reset")
            return
        if connection.cut_how is not None and _has_arrived(connection.down):
            self._cut(connection, connection.cut_how)
        elif connection.up.ended and (connection.cut_how is not None or connection.down.closed):
            self._drop(connection, "close")

    def _read(self, connection: _Connection, flow: _Flow) -> None:
        try:
            chunk = flow.source.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            flow.ended = True
            return
        if flow is connection.down:
            chunk = self._before_cut(connection, chunk)
        flow.pending += chunk
        flow.read_bytes += len(chunk)

    def _before_cut(self, connection: _Connection, chunk: bytes) -> bytes:
        """Return the part of a chunk before a planned cut. If the chunk reaches the cut, the cut is due."""
        if connection.up.ended:
            # The client has already disconnected, so a cut would have no effect.
            return chunk
        plan = self._plans[0] if self._plans else None
        if plan is not connection.plan:
            # Another connection was cut instead of this one, or the plans were cancelled.
            connection.plan = plan
            connection.cut_at = None if plan is None or plan.in_packet else plan.begin_bytes
        passed = connection.down.read_bytes
        middle = connection.packets.middle_from(chunk, plan.begin_bytes if plan is not None else 0)
        if plan is None:
            return chunk
        if connection.cut_at is None:
            connection.cut_at = middle
        if connection.cut_at is None or connection.cut_at > passed + len(chunk):
            return chunk
        connection.cut_how = plan.how
        self._plans.pop(0)
        return chunk[: max(0, connection.cut_at - passed)]

    def _write(self, connection: _Connection, flow: _Flow) -> None:
        try:
            sent = flow.sink.send(flow.pending)
        except BlockingIOError:
            return
        del flow.pending[:sent]
        if flow is connection.down:
            self.bytes_down += sent

    def _cut(self, connection: _Connection, how: Cut) -> None:
        self.cut_count += 1
        connection.plan = connection.cut_at = connection.cut_how = None
        if how == "silence":
            connection.silent = True
        else:
            self._drop(connection, how)

    def _drop(self, connection: _Connection, how: Literal["reset", "close"]) -> None:
        self._connections.remove(connection)
        if connection.cut_how is not None and connection.plan is not None:
            # The connection ended before its planned cut, so cut the next connection instead.
            self._plans.insert(0, connection.plan)
        client, server = connection.up.source, connection.up.sink
        if how == "reset":
            _reset(client)
            _reset(server)
            return
        server.close()
        # Closing a socket with unread bytes causes a reset, so shut it down first for an orderly end.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        self._ended.append(client)

    def _discard_input(self, side: socket.socket) -> None:
        """Discard bytes that a disconnected client still sends, and close its socket once the client has
        closed it.
        """
        try:
            over = not side.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            over = True
        if over:
            self._ended.remove(side)
            side.close()


def _has_arrived(flow: _Flow) -> bool:
    """Return whether the other side's kernel has acknowledged everything: tcp(7), SIOCOUTQ."""
    if flow.pending:
        return False
    count = fcntl.ioctl(flow.sink, termios.TIOCOUTQ, struct.pack("i", 0))
    return struct.unpack("i", count) == (0,)


def _reset(side: socket.socket) -> None:
    """Close a socket with a TCP reset: socket(7), SO_LINGER with zero time."""
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close()
