# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that cuts the connections it carries, at a place or on demand.

One thread owns every socket, so a reset is sent when it is asked for and not when a blocked reader
lets go. Bytes are counted per connection and only in the direction from the server to the client,
from the server's greeting on.
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
# How often the kernel is asked whether a client has what was written for it, of which no event tells.
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
    """Where the packets of one direction begin: a 3-byte length, a sequence number, the payload."""

    def __init__(self) -> None:
        self._offset = 0
        self._header = bytearray()
        self._rest = 0

    def middle_from(self, chunk: bytes, begin: int) -> int | None:
        """Walk on over a chunk; return the middle of its first packet that begins at `begin` or later."""
        middle: int | None = None
        at = 0
        while at < len(chunk):
            if self._rest:
                step = min(self._rest, len(chunk) - at)
                self._rest -= step
            else:
                step = min(PACKET_HEADER_BYTES - len(self._header), len(chunk) - at)
                self._header += chunk[at : at + step]
            at += step
            if len(self._header) == PACKET_HEADER_BYTES:
                self._rest = int.from_bytes(self._header[:3], "little")
                start = self._offset + at - PACKET_HEADER_BYTES
                self._header.clear()
                if middle is None and start >= begin and self._rest > 1:
                    middle = start + PACKET_HEADER_BYTES + self._rest // 2
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
    """Carries connections from `port` to a server's port; as a context manager it runs inside the block.

    The three cuts: "reset" ends both sides with a TCP reset, "close" with an orderly end, and
    "silence" leaves both sides open and carries nothing more, as a lost network path does. A planned
    cut comes once the client has every byte before it; one on demand takes what is under way with it.
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
        """Return a server's URL with this proxy's port in it."""
        parts = urlsplit(url)
        account, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{account}{at}127.0.0.1:{self.port}").geturl()

    def cut(self, how: Cut = "reset") -> int:
        """Cut every live connection now; return how many that were."""
        counted: list[int] = []

        def order() -> None:
            live = [connection for connection in self._connections if not connection.silent]
            for connection in live:
                self._cut(connection, how)
            counted.append(len(live))

        self._do(order)
        return counted[0]

    def cut_after(
        self, bytes_down: int, how: Cut = "reset", *, in_packet: bool = False, times: int = 1
    ) -> None:
        """Cut the next connections to reach so many bytes from the server, as many as `times`, there.

        A connection that has passed that many already is cut at its next byte. With `in_packet` the
        cut is in the middle of the first packet that begins at that byte or later; over TLS there
        are no packets to see.
        """
        self._do(lambda: self._plans.extend([_Plan(bytes_down, how, in_packet)] * times))

    def disarm(self) -> None:
        """Forget the cuts that `cut_after` has planned."""
        self._do(self._plans.clear)

    def swallow(self) -> None:
        """Carry nothing more, of the connections there are and of new ones, and end none: a hole in the
        network, until `resume`."""

        def order() -> None:
            self._swallowing = True
            for connection in self._connections:
                connection.silent = True

        self._do(order)

    def resume(self) -> None:
        """Carry on with the connections that were silenced; no byte of theirs is lost."""

        def order() -> None:
            self._swallowing = False
            for connection in self._connections:
                connection.silent = False

        self._do(order)

    def refuse(self, refusing: bool = True) -> None:
        """Reset each new connection at once, as long as `refusing`."""

        def order() -> None:
            self._refusing = refusing

        self._do(order)

    def wait_for(self, condition: Callable[[Self], bool], seconds_max: float = WAIT_SECONDS_MAX) -> None:
        """Wait until a condition over this proxy's counts holds; raise `TimeoutError` after a bound."""
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
            self._do(order)
            self._thread.join(WAIT_SECONDS_MAX)
        # Only now is nobody left who wakes the thread up or is woken.
        self._wake_in.close()
        self._wake_out.close()

    def _do(self, order: Callable[[], None]) -> None:
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
                # An order reaches whoever was connected when it was given.
                self._accept()
                self._orders.popleft()()
            self._accept()
            for connection in list(self._connections):
                self._carry(connection, ready)
            for side in list(self._ended):
                if side.fileno() in ready:
                    self._let_go(side)
            with self._progress:
                self._progress.notify_all()
        for connection in list(self._connections):
            self._drop(connection, "close")
        for side in self._ended:
            side.close()
        self._listener.close()

    def _poll(self) -> set[int]:
        wanted = {self._wake_in.fileno(): select.POLLIN, self._listener.fileno(): select.POLLIN}
        for connection in self._connections:
            for flow in () if connection.silent else (connection.up, connection.down):
                reads = connection.cut_how is None or flow is connection.up
                if not flow.ended and len(flow.pending) < PENDING_BYTES_MAX and reads:
                    wanted[flow.source.fileno()] = wanted.get(flow.source.fileno(), 0) | select.POLLIN
                if flow.pending:
                    wanted[flow.sink.fileno()] = wanted.get(flow.sink.fileno(), 0) | select.POLLOUT
        wanted |= {side.fileno(): select.POLLIN for side in self._ended}
        poll = select.poll()
        for number, events in wanted.items():
            poll.register(number, events)
        awaited = any(it.cut_how is not None and not it.down.pending for it in self._connections)
        return {number for number, _ in poll.poll(ARRIVAL_MILLISECONDS if awaited else None)}

    def _accept(self) -> None:
        """Take in every client that is connected by now."""
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            self.accepted_count += 1
            self._carry_on(client)

    def _carry_on(self, client: socket.socket) -> None:
        try:
            if self._refusing:
                raise ConnectionRefusedError
            server = socket.create_connection(("127.0.0.1", self.server_port), WAIT_SECONDS_MAX)
        except OSError:
            # A server that is down answers a client with a reset, and so does its proxy.
            _reset(client)
            return
        for side in (client, server):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(_Flow(client, server), _Flow(server, client), silent=self._swallowing)
        self._connections.append(connection)

    def _carry(self, connection: _Connection, ready: set[int]) -> None:
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
            # One side has gone without an orderly end, so the other is told the same.
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
        """Return the part of a chunk that comes before a planned cut, which is then due."""
        if connection.up.ended:
            # Its client has gone already, so a cut would cost nobody anything.
            return chunk
        plan = self._plans[0] if self._plans else None
        if plan is not connection.plan:
            # Another connection was cut in place of this one, or the plans were forgotten.
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
            # It ended by itself before its cut was due: the next connection is cut in its place.
            self._plans.insert(0, connection.plan)
        client, server = connection.up.source, connection.up.sink
        if how == "reset":
            _reset(client)
            _reset(server)
            return
        server.close()
        # A socket that is closed with bytes unread ends in a reset; this end is to be an orderly one.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        self._ended.append(client)

    def _let_go(self, side: socket.socket) -> None:
        """Pass over what an ended client still sends, and close its socket once it has ended too."""
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
    """Whether the other side's kernel has acknowledged all that was read: tcp(7), SIOCOUTQ."""
    if flow.pending:
        return False
    count = fcntl.ioctl(flow.sink, termios.TIOCOUTQ, struct.pack("i", 0))
    return struct.unpack("i", count) == (0,)


def _reset(side: socket.socket) -> None:
    """Close a socket with a TCP reset: socket(7), SO_LINGER with no time to linger."""
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close()
