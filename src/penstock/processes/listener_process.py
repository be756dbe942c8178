# SPDX-License-Identifier: Apache-2.0
"""A listener process: it serves followers and readers of logs that other processes write.

    python -m penstock.processes.listener_process STREAM DATAGRAMS CONNECTIONS

All arguments are descriptors of sockets; see `listener_channel`. The daemon accepts the connections and
counts them, writes the holds of consumers, and answers everything else that clients ask. The end of the
process, also after a defect, ends its connections only: clients go on at their positions, and the daemon
starts another process.
"""

import asyncio
import gc
import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import structlog
from starlette.types import Scope

from penstock.errors import ServerBusy
from penstock.listeners import make_served
from penstock.processes.channel import Answer, Calls, Channel, receive_reports
from penstock.processes.instance import ProcessInstance
from penstock.processes.listener_channel import (
    Ended,
    Greeted,
    ListenerReport,
    ListenerStart,
    Published,
    pass_connection,
    take_connection,
)
from penstock.processes.program import begin
from penstock.serve.accepting import AcceptedSocket, Admission
from penstock.serve.access import Access
from penstock.serve.arrivals import Arrivals
from penstock.serve.connections import Connections
from penstock.serve.consumers import ForwardedConsumers
from penstock.serve.forwarding import Divided, Forward
from penstock.serve.guard import Measured
from penstock.serve.listener import HttpListener, guarded, make_readers_app
from penstock.serve.usage import SharedUsages

REPORT_SECONDS = 0.5
_CALL_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class _ReportingAdmission(Admission):
    """Reports the end of handshakes and connections to the daemon, which counts them."""

    def __init__(self, send: Callable[[object], None]) -> None:
        super().__init__()
        self._send = send
        self._numbers: dict[int, int] = {}

    def taken(self, descriptor: int, number: int) -> None:
        """Note the number of a connection."""
        self._numbers[descriptor] = number

    def number_of(self, descriptor: int) -> int:
        """Return the daemon's number of a connection, 0 for none of its connections."""
        return self._numbers.get(descriptor, 0)

    def greeted(self, descriptor: int) -> None:
        """Report the end of a connection's handshake."""
        if descriptor in self._numbers:
            self._send(Greeted(self._numbers[descriptor]))

    def closed(self, descriptor: int, peer: str) -> None:
        """Report the end of a connection."""
        number = self._numbers.pop(descriptor, None)
        if number is not None:
            self._send(Ended(number))


class ListenerProcess(HttpListener):
    """The listeners of this process. `run` belongs to the main thread."""

    def __init__(
        self, stream: socket.socket, datagrams: socket.socket, handed: socket.socket, start: ListenerStart
    ) -> None:
        settings = start.settings
        self._channel = Channel(stream)
        self._stream, self._datagrams, self._handed = stream, datagrams, handed
        handed.setblocking(False)
        self._over_tls = settings.listen.tls is not None
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._calls_of_daemon = Calls()
        self._arrivals = Arrivals()
        self._instances: dict[str, ProcessInstance] = {}
        for name, instance in settings.instances.items():
            self._instances[name] = ProcessInstance(name, instance, settings.log_of(name))
            self._instances[name].call = self._call_daemon
        # Those whose logs the daemon has, and which are on disk.
        self._published: frozenset[str] = frozenset()
        self._served = make_served(settings, self._instances, self._arrivals, self._is_here)
        self._served.consumers = ForwardedConsumers(
            lambda name: self._instances[name].log(), self._outgoing.put
        )
        usages = SharedUsages(len(settings.access), start.processes, os.fdopen(start.usages, "r+b", 0))
        access = Access.of_settings(
            settings.listen, settings.access, lambda account: usages.usage(account, start.number)
        )
        self._connections = Connections()
        self._connections.admission = self._admission = _ReportingAdmission(self._outgoing.put)
        app = make_readers_app(self._served)
        traffic = self._connections.traffic
        here = guarded("http", app, access, settings.listen, traffic)
        divided = Divided(here, Forward(self._connect_daemon), self._is_here)
        super().__init__(
            "http", Measured(divided, "http", traffic), settings.listen, self._connections, self._handed
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None

    def serve_until_stopped(self) -> None:
        """Serve until the daemon ends, or lets this process end.

        Raises what stopped the reports to the daemon, without waiting for requests in progress.
        """
        threading.Thread(target=self._send_messages, name="sending", daemon=True).start()
        # As in the daemon: what is loaded by now lives until the end.
        gc.collect()
        gc.freeze()
        self.run(sockets=[])
        if self._defect is not None:
            raise self._defect

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections from the daemon."""
        await super().startup([])
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive_messages, args=(loop,), name="receiving", daemon=True).start()
        loop.add_reader(self._handed, self._take_connections)
        reporting = asyncio.create_task(self._report_until_cancelled())
        self._tasks.add(reporting)
        reporting.add_done_callback(self._end_without_reports)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the requests in progress."""
        asyncio.get_running_loop().remove_reader(self._handed)
        self._arrivals.close()
        await super().shutdown([])

    def _is_here(self, name: str) -> bool:
        return name in self._published

    # --- Connections ------------------------------------------------------------------------

    def _take_connections(self) -> None:
        try:
            while (passed := take_connection(self._handed)) is not None:
                self._take(*passed)
        except EOFError:
            # The daemon has ended, which the receiving thread sees too.
            asyncio.get_running_loop().remove_reader(self._handed)

    def _take(self, number: int, raw: socket.socket | None) -> None:
        if raw is None:
            self._connections.tell("no descriptor for a connection", "http", "?")
            self._outgoing.put(Ended(number))
            return
        accepted = AcceptedSocket(fileno=raw.detach())
        accepted.setblocking(False)
        accepted.admission = self._admission
        self._admission.taken(accepted.fileno(), number)
        task = asyncio.create_task(self._serve_connection(accepted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_connection(self, accepted: socket.socket) -> None:
        try:
            await self.serve_accepted(accepted, over_tls=self._over_tls)
        except OSError as problem:
            # Most are handshakes that failed, as at a listener that accepts its connections itself.
            _log.debug("a connection ended in its handshake", why=str(problem))

    def _connect_daemon(self, scope: Scope) -> socket.socket:
        """Return a connection to the daemon's own application, for a request. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pass_connection(self._handed, theirs, scope["state"]["connection"].number)
            except OSError:
                ours.close()
                raise
        return ours

    # --- Messages ---------------------------------------------------------------------------

    def _send_messages(self) -> None:
        """Send what is to be sent, in its order. The event loop never waits for the daemon."""
        while True:
            try:
                self._channel.send(self._outgoing.get())
            except OSError:
                # The daemon has ended, which the receiving thread sees too.
                return

    def _receive_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        poll = select.poll()
        for descriptor in (self._stream, self._datagrams):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if self._datagrams.fileno() in ready:
                    for name, report in receive_reports(self._datagrams).items():
                        self._instances[name].report(report)
                        self._arrivals.arrived(name)
                if self._stream.fileno() in ready:
                    self._handle(self._channel.receive())
        except EOFError:
            self._calls_of_daemon.end()
            self.should_exit = True
            # The loop may be gone by now.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._arrivals.close)

    def _handle(self, message: Published | Answer) -> None:
        if isinstance(message, Answer):
            self._calls_of_daemon.answered(message)
            return
        for name, status in message.statuses.items():
            instance = self._instances[name]
            if name in message.logs:
                instance.report(message.logs[name])
            instance.update(status, message.refusals.get(name), ())
            self._arrivals.arrived(name)
        self._published = frozenset(message.statuses)

    def _end_without_reports(self, reporting: asyncio.Task[None]) -> None:
        """End the process: the daemon would count and show what is not true any more."""
        if reporting.cancelled() or (problem := reporting.exception()) is None:
            return
        _log.error("the reports to the daemon failed", error=type(problem).__name__, why=str(problem))
        self._defect = problem
        self.should_exit = self.force_exit = True

    async def _report_until_cancelled(self) -> None:
        while True:
            subscribers = self._served.subscribers.here()
            self._outgoing.put(ListenerReport(subscribers, self._connections.traffic.take()))
            await asyncio.sleep(REPORT_SECONDS)

    def _call_daemon(self, call: str, *arguments: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Call a function of the daemon; see `CallProcess`."""
        try:
            return self._calls_of_daemon.call(self._channel, call, *arguments, seconds=seconds)
        except OSError as problem:
            raise ServerBusy("the daemon does not answer its listener process") from problem


def main() -> None:
    """Run the process."""
    stream, datagrams, handed = begin()
    try:
        start = Channel(stream).receive()
    except EOFError:
        return
    ListenerProcess(stream, datagrams, handed, start).serve_until_stopped()


if __name__ == "__main__":
    main()
