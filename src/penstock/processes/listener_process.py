# SPDX-License-Identifier: Apache-2.0
"""A listener process: it serves followers and readers of logs that other processes write.

    python -m penstock.processes.listener_process STREAM DATAGRAMS CONNECTIONS

All arguments are descriptors of sockets; see `listener_channel`. The daemon accepts the connections and
counts them, writes the holds of consumers, and answers all other requests of clients. When the process ends,
even after a defect, only its connections are lost: clients continue at their positions, and the daemon starts
another process.
"""

import asyncio
import gc
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from starlette.types import Scope

from penstock.errors import CapturedElsewhere, ServerBusy
from penstock.listeners import make_served, open_cursors
from penstock.processes.canal_moves import ClientGranted, ClientRecalled, WantedClients
from penstock.processes.channel import Answer, Calls, Channel, receive_reports
from penstock.processes.instance import ProcessInstance
from penstock.processes.listener_channel import (
    Ended,
    Greeted,
    ListenerReport,
    ListenerStart,
    Published,
    Serves,
    pass_connection,
    take_connection,
)
from penstock.processes.program import begin
from penstock.serve.accepting import AcceptedSocket, Admission
from penstock.serve.access import Access
from penstock.serve.arrivals import Arrivals
from penstock.serve.canal.listener import CanalListener, open_cursor_store
from penstock.serve.canal.protocol import CanalServer
from penstock.serve.connections import Connections
from penstock.serve.consumers import ForwardedConsumers
from penstock.serve.forwarding import Divided, Forward
from penstock.serve.guard import Measured
from penstock.serve.listener import HttpListener, guarded, make_readers_app, ptubes_listener
from penstock.serve.ptubes.session import clients_of
from penstock.serve.usage import SharedUsages
from penstock.settings.daemon import Listening

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
        """Record the number of a connection."""
        self._numbers[descriptor] = number

    def number_of(self, descriptor: int) -> int:
        """Return the daemon's number for a connection, 0 if the connection does not come from the daemon."""
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
    """The listeners of this process. `run` must be called from the main thread."""

    def __init__(
        self, stream: socket.socket, datagrams: socket.socket, handed: socket.socket, start: ListenerStart
    ) -> None:
        self._settings = settings = start.settings
        self._listeners, self._number = start.listeners, start.number
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
        # The instances whose logs the daemon has on disk.
        self._published: frozenset[str] = frozenset()
        self._served = make_served(settings, self._instances, self._arrivals, self._is_here)
        self._served.consumers = ForwardedConsumers(
            lambda name: self._instances[name].log(), self._outgoing.put
        )
        usages = SharedUsages(len(settings.access), start.processes, os.fdopen(start.usages, "r+b", 0))
        self._access = access = Access.of_settings(
            settings.listen, settings.access, lambda account: usages.usage(account, start.number)
        )
        self._connections = Connections()
        self._connections.admission = self._admission = _ReportingAdmission(self._outgoing.put)
        app = make_readers_app(self._served)
        traffic = self._connections.traffic
        here = guarded("http", app, access, settings.listen, traffic)
        divided = Divided(here, Forward(self._connect_daemon), self._is_here)
        super().__init__("http", Measured(divided, "http", traffic), settings.listen, self._connections)
        self._ptubes = ptubes_listener(self._served, access, settings.listen, self._connections)
        self._ptubes_clients = clients_of(self._served)
        self._wanted_clients = WantedClients(self._outgoing.put)
        self._opening: asyncio.Task[None] | None = None
        self._canal: tuple[CanalServer, CanalListener] | None = None
        self._close_store: Callable[[], None] | None = None
        # Set once the daemon has reported which logs it has.
        self._knows_logs = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None

    def serve_until_stopped(self) -> None:
        """Serve until the daemon ends or stops this process.

        If the reports to the daemon fail, raises that error without waiting for requests in progress.
        """
        threading.Thread(target=self._send_messages, name="sending", daemon=True).start()
        # Exclude the objects that exist by now from garbage collection, as in the daemon: they live until the
        # process ends.
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
        self._run_part(self._report_until_cancelled(), "the reports to the daemon failed")
        if "ptubes" in self._listeners:
            self._run_part(self._start_ptubes(), "the listener for Ptubes failed")
        if "canal" in self._listeners:
            self._opening = self._run_part(self._start_canal(), "the listener for Canal failed")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the requests in progress."""
        asyncio.get_running_loop().remove_reader(self._handed)
        self._arrivals.close()
        if self._opening is not None:
            self._opening.cancel()
        ending = [] if self._canal is None else [self._canal[1].stop_serving()]
        await asyncio.gather(super().shutdown([]), self._ptubes.stop_serving(), *ending)
        if self._close_store is not None:
            await asyncio.to_thread(self._close_store)

    async def _start_ptubes(self) -> None:
        """Take connections of Ptubes clients."""
        await self._knows_logs.wait()
        await self._ptubes.start()
        self._outgoing.put(Serves("ptubes"))

    async def _start_canal(self) -> None:
        """Accept connections of Canal clients once the store of their cursors answers."""
        await self._knows_logs.wait()
        store = await open_cursor_store(partial(open_cursors, self._settings))
        if store is None:
            return
        self._close_store = store.close
        server = CanalServer(
            self._served, self._access, store, self._settings.listen, self._wanted_clients.bring
        )
        self._canal = server, CanalListener(server.serve, self._connections, self.config.ssl)
        self._outgoing.put(Serves("canal"))

    def _run(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _is_here(self, name: str) -> bool:
        return name in self._published

    # --- Connections ------------------------------------------------------------------------

    def _take_connections(self) -> None:
        try:
            while (passed := take_connection(self._handed)) is not None:
                self._take(*passed)
        except EOFError:
            # The daemon has ended. The receiving thread will notice.
            asyncio.get_running_loop().remove_reader(self._handed)

    def _take(self, number: int, listener: Listening, raw: socket.socket | None) -> None:
        if raw is None:
            self._connections.tell("no descriptor for a connection", listener, "?")
            self._outgoing.put(Ended(number))
            return
        accepted = AcceptedSocket(fileno=raw.detach())
        accepted.setblocking(False)
        accepted.admission = self._admission
        self._admission.taken(accepted.fileno(), number)
        self._run(self._serve_connection(listener, accepted))

    async def _serve_connection(self, listener: Listening, accepted: socket.socket) -> None:
        try:
            if listener == "canal":
                assert self._canal is not None, "it has told the daemon that it serves them"
                await self._canal[1].serve_accepted(accepted)
            else:
                served_by = self._ptubes if listener == "ptubes" else self
                await served_by.serve_accepted(accepted, over_tls=self._over_tls)
        except OSError as problem:
            # Most of these errors are failed handshakes, so log them only at debug level. A listener that
            # accepts its own connections does the same.
            _log.debug("a connection ended in its handshake", why=str(problem))

    def _connect_daemon(self, scope: Scope) -> socket.socket:
        """Return a connection to the daemon's own application, for a request. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                connection = scope["state"]["connection"]
                pass_connection(self._handed, theirs, connection.number, connection.listener)
            except OSError:
                ours.close()
                raise
        return ours

    # --- Messages ---------------------------------------------------------------------------

    def _send_messages(self) -> None:
        """Send the queued messages in order. The event loop never waits for the daemon."""
        while True:
            try:
                self._channel.send(self._outgoing.get())
            except OSError:
                # The daemon has ended. The receiving thread will notice.
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
                    self._handle(self._channel.receive(), loop)
        except EOFError:
            self._calls_of_daemon.end()
            self.should_exit = True
            # The loop may have ended by now.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._arrivals.close)

    def _handle(
        self, message: Published | Answer | ClientGranted | ClientRecalled, loop: asyncio.AbstractEventLoop
    ) -> None:
        if isinstance(message, Answer):
            self._calls_of_daemon.answered(message)
            return
        if isinstance(message, ClientGranted | ClientRecalled):
            loop.call_soon_threadsafe(self._handle_move, message)
            return
        for name, status in message.statuses.items():
            instance = self._instances[name]
            if name in message.logs:
                instance.report(message.logs[name])
            instance.update(status, message.refusals.get(name), ())
            self._arrivals.arrived(name)
        for name in self._instances.keys() - message.statuses.keys():
            # HTTP requests for instances that are not captured here are rejected by the daemon. Canal and
            # Ptubes clients are rejected here.
            hint = "See who captures what: penstock fleet status"
            why = CapturedElsewhere(f"instance {name} is not captured by this daemon", hint=hint)
            self._instances[name].leave(why)
            if name in self._published:
                self._arrivals.arrived(name)
        self._published = frozenset(message.statuses)
        own = self._number
        self._ptubes_clients.elsewhere = {n: clients for n, clients in message.ptubes.items() if n != own}
        loop.call_soon_threadsafe(self._knows_logs.set)

    def _handle_move(self, message: ClientGranted | ClientRecalled) -> None:
        if isinstance(message, ClientGranted):
            self._wanted_clients.granted(message)
        else:
            clients = None if self._canal is None else self._canal[0].clients
            self._run(self._wanted_clients.recalled(message, clients))

    def _run_part(self, work: Coroutine[Any, Any, None], failed: str) -> "asyncio.Task[None]":
        """Run a part that the process cannot work without. If it fails, the process ends, and the daemon
        starts another.
        """
        task = self._run(work)
        task.add_done_callback(partial(self._end_after_defect, failed))
        return task

    def _end_after_defect(self, failed: str, part: asyncio.Task[None]) -> None:
        if part.cancelled() or (problem := part.exception()) is None:
            return
        _log.error(failed, error=type(problem).__name__, why=str(problem))
        self._defect = problem
        self.should_exit = self.force_exit = True

    async def _report_until_cancelled(self) -> None:
        while True:
            subscribers = self._served.subscribers.here()
            traffic, ptubes = self._connections.traffic.take(), self._ptubes_clients.here()
            self._outgoing.put(ListenerReport(subscribers, traffic, ptubes))
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
