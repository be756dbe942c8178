# SPDX-License-Identifier: Apache-2.0
"""The listener processes of a daemon. The daemon accepts connections, passes each to a process, and restarts
processes that have ended.

port ─▶ accepted and counted here ─▶ the process with the fewest connections ─▶ followers, readers
                                  ◀─ requests that only the daemon can answer
"""

import asyncio
import itertools
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import structlog

from penstock.errors import PenstockError, ServerBusy
from penstock.limits import DRAIN_SECONDS_MAX, PROCESS_SILENCE_SECONDS_MAX
from penstock.logstore.followed_log import LogReport
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position, TableName
from penstock.processes.canal_moves import ClientMoves, ClientReturned, ClientWanted
from penstock.processes.channel import DATAGRAMS, Answer, Channel, Request, send_report
from penstock.processes.instance import ProcessExit
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
from penstock.processes.spawned import START_SECONDS_MAX, WELL_SECONDS, Kill, SpawnedProcess, watched_exit
from penstock.retry import Backoff
from penstock.serve.accepting import AcceptedSocket, Address, ListeningSocket
from penstock.serve.connections import Connections
from penstock.serve.consumers import ConsumerForgotten, ConsumerNote
from penstock.serve.ptubes.session import ClientReport, clients_of
from penstock.serve.served import Served
from penstock.serve.usage import SharedUsages
from penstock.settings.daemon import Listening, Settings
from penstock.telemetry.alerts import Alert
from penstock.telemetry.counters import Counter
from penstock.telemetry.readings import Readings

COMMAND = (sys.executable, "-m", "penstock.processes.listener_process")
BACKOFF = Backoff(first=0.2, longest=10.0)
PUBLISH_SECONDS = 0.5

# How long a process may take to end: it first lets requests in progress finish.
_END_SECONDS_MAX = DRAIN_SECONDS_MAX + 3.0
# Enough threads for all calls that can wait at a time. Threads start on demand; see `Threads.definitions`.
_WAITING_THREADS = 64
_SHORTAGE_SECONDS = 1.0
_KNOWN_REASONS = ("SIGABRT", "SIGKILL", "SIGSEGV", "silence")

_log = structlog.get_logger(__name__)

# Serves a connection over which a process forwards an HTTP request, for the client with this address.
ServeHere = Callable[[socket.socket, Address], Coroutine[Any, Any, None]]


class ListenerProcess:
    """One listener process, and the processes that replace it. Its threads watch the process; connections
    belong to the event loop.
    """

    def __init__(self, listeners: "ListenerProcesses", number: int) -> None:
        self.number = number
        self._listeners = listeners
        self._thread = threading.Thread(target=self._run, name=f"listener-{number}", daemon=True)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._datagrams: socket.socket | None = None
        # Set to publish the state and send queued messages before they are due.
        self._due = threading.Event()
        self._messages: deque[object] = deque()
        self.pid: int | None = None
        self.exits: tuple[ProcessExit, ...] = ()
        # State that is used only in the event loop: the socket for passing connections (while the process
        # accepts connections), the listeners that the process accepts, and the listener and peer of each
        # connection.
        self.handed: socket.socket | None = None
        self.serves: set[Listening] = set()
        self.peers: dict[int, tuple[Listening, Address]] = {}

    def start(self) -> None:
        """Start the process. Raises RuntimeError if no thread can be started."""
        self._thread.start()

    def stop(self) -> None:
        """Let the process finish its requests and end."""
        self._stopping.set()
        with self._lock:
            if self._channel is not None:
                self._channel.end()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def report(self, name: str, report: LogReport) -> None:
        """Announce newly visible data to the process. Never waits."""
        with self._lock:
            if self._datagrams is not None and not send_report(self._datagrams, name, report):
                self._due.set()

    def publish(self) -> None:
        """Publish the instances to the process soon, without waiting for the next interval."""
        self._due.set()

    def send(self, message: object) -> None:
        """Send a message soon, in order. Never waits; messages to a process that has ended are dropped."""
        self._messages.append(message)
        self._due.set()

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        early_exits = 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            process_exit = watched_exit(
                self._run_once, "a listener process is not watched", listener=self.number
            )
            if self._stopping.is_set():
                return
            early_exits = 1 if time.monotonic() - started_at > WELL_SECONDS else early_exits + 1
            self.exits = (*self.exits, process_exit)[-1:]
            self._listeners.exit_counts.add(process_exit.reason)
            _log.error("a listener process ended", listener=self.number, why=process_exit.text())
            self._stopping.wait(self._listeners.backoff.pause(early_exits))

    def _run_once(self) -> ProcessExit:
        """Run the process; return how it ended."""
        stream, stream_there = socket.socketpair()
        datagrams, datagrams_there = socket.socketpair(type=DATAGRAMS)
        handed, handed_there = socket.socketpair(type=DATAGRAMS)
        handed.setblocking(False)
        usages = self._listeners.usages
        # Do not close `handed` here: the event loop closes it, because it may be reading from it.
        with stream, datagrams:
            with stream_there, datagrams_there, handed_there:
                descriptors = [own.fileno() for own in (stream_there, datagrams_there, handed_there)]
                process = SpawnedProcess(
                    self._listeners.command, descriptors, inherited=(usages.file.fileno(),)
                )
            channel = Channel(stream)
            self._messages.clear()
            try:
                stream.settimeout(START_SECONDS_MAX)
                channel.send(self._listeners.start_of(self.number))
                with self._lock:
                    self._channel, self._datagrams, self.pid = channel, datagrams, process.pid
                    if self._stopping.is_set():
                        channel.end()
                publishing = threading.Thread(
                    target=self._publish, args=(channel,), name="publishing", daemon=True
                )
                publishing.start()
                kill = self._watch(process, channel, stream, handed)
            finally:
                process.kill()
                with self._lock:
                    self._channel = self._datagrams = self.pid = None
                self._due.set()
                self._listeners.in_loop(self._listeners.lost, self, handed)
        return process.exit(kill)

    def _watch(
        self, process: SpawnedProcess, channel: Channel, stream: socket.socket, handed: socket.socket
    ) -> Kill | None:
        """Read the messages of a process until it has ended; return the reason if it has to be killed."""
        has_reported = False
        try:
            while True:
                message = channel.receive()
                if not has_reported:
                    has_reported = True
                    stream.settimeout(self._listeners.silence_seconds)
                    self._listeners.in_loop(self._listeners.ready, self, handed)
                self._listeners.handle(message, self, channel)
        except (EOFError, ConnectionError):
            return None if process.wait(_END_SECONDS_MAX) else Kill("silence", "it did not end")
        except TimeoutError:
            return Kill("silence", "it was killed because it reported nothing")
        except PenstockError as problem:
            return Kill("message", f"it was killed: {problem}")

    def _publish(self, channel: Channel) -> None:
        while True:
            with self._lock:
                if self._channel is not channel:
                    return
            try:
                while self._messages:
                    channel.send(self._messages.popleft())
                channel.send(self._listeners.published())
            except TimeoutError:
                # The timeout has ended the channel, so the receiving thread ends the process.
                _log.error("a listener process takes no messages", listener=self.number)
                return
            except OSError:
                # The process has ended. The receiving thread will notice.
                return
            self._due.wait(PUBLISH_SECONDS)
            self._due.clear()


class ListenerProcesses:
    """All listener processes of a daemon; see `penstock.serve.listener.Handover`.

    `command`, `backoff` and `silence_seconds` determine how a process is run.
    """

    def __init__(
        self,
        settings: Settings,
        count: int,
        served: Served,
        connections: Connections,
        usages: SharedUsages,
        *,
        command: Sequence[str] = COMMAND,
        backoff: Backoff = BACKOFF,
        silence_seconds: float = PROCESS_SILENCE_SECONDS_MAX,
    ) -> None:
        self.command = tuple(command)
        self.backoff = backoff
        self.silence_seconds = silence_seconds
        self.usages = usages
        self.exit_counts = Counter(*_KNOWN_REASONS)
        self._settings = settings
        self._served = served
        self._connections = connections
        self._processes = [ListenerProcess(self, number) for number in range(count)]
        self._waiting = ThreadPoolExecutor(_WAITING_THREADS, "waiting-listener")
        # Keys for the connections of processes: negative, so that none equals a file descriptor.
        self._numbers = itertools.count(-1, -1)
        self._moves = ClientMoves(lambda number, message: self._processes[number].send(message))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ports: Mapping[Listening, ListeningSocket] = {}
        self._serve_here: ServeHere | None = None
        self._report_accepting: Callable[[Listening, bool], None] = lambda listener, accepting: None
        self._accepting: set[Listening] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start_of(self, number: int) -> ListenerStart:
        """Return the first message to a process."""
        # The shared usages have an entry for each listener process, and the daemon's own entry is the last.
        return ListenerStart(
            self._settings,
            self.usages.file.fileno(),
            number,
            len(self._processes) + 1,
            self.listeners & self._settings.listen.addresses().keys(),
        )

    @property
    def listeners(self) -> frozenset[Listening]:
        """The listeners whose connections the processes serve.

        An HTTP request for a log in memory is forwarded to the daemon. A client of another protocol may name
        its instance only when the connection can no longer be forwarded.
        """
        logs = map(self._settings.log_of, self._settings.instances)
        has_memory = any(log.mode == "memory" for log in logs)
        return frozenset({"http"} if has_memory else {"http", "canal", "ptubes"})

    # --- In the event loop ------------------------------------------------------------------

    def begin(
        self,
        ports: Mapping[Listening, ListeningSocket],
        serve_here: ServeHere,
        report_accepting: Callable[[Listening, bool], None],
    ) -> None:
        """Start the processes, and hand the connections of the ports over once they are ready."""
        self._loop, self._ports, self._serve_here = asyncio.get_running_loop(), ports, serve_here
        self._report_accepting = report_accepting
        for port in ports.values():
            port.setblocking(False)
        for process in self._processes:
            process.start()

    async def end(self) -> None:
        """Stop accepting connections, and wait until the processes have finished their requests."""
        self._pause(self._ports.keys())
        self._ports = {}
        for process in self._processes:
            process.stop()
        await asyncio.to_thread(self._join)

    def ready(self, process: ListenerProcess, handed: socket.socket) -> None:
        """Pass connections to a process from now on."""
        process.handed = handed
        self._running_loop().add_reader(handed, self._take_forwarded, process, handed)
        self._serves(process, "http")

    def lost(self, process: ListenerProcess, handed: socket.socket) -> None:
        """Subtract the connections and requests of a process that has ended."""
        self._running_loop().remove_reader(handed)
        handed.close()
        process.handed = None
        process.serves.clear()
        for number in list(process.peers):
            self._ended(process, number)
        self._served.subscribers.report(process.number, {})
        self._report_ptubes(process, ())
        self._moves.lost(process.number)
        self.usages.end_process(process.number)
        # Pause the ports that no process serves. New connections wait in their queues.
        self._pause(self._ports.keys() - self._served_by_processes())

    def _serves(self, process: ListenerProcess, listener: Listening) -> None:
        if process.handed is not None:
            process.serves.add(listener)
            self._accept_again()

    def _served_by_processes(self) -> set[Listening]:
        return {listener for process in self._processes for listener in process.serves}

    def _accept_again(self) -> None:
        for listener in (self._ports.keys() & self._served_by_processes()) - self._accepting:
            self._accepting.add(listener)
            self._running_loop().add_reader(self._ports[listener], self._accept, listener)
            self._report_accepting(listener, True)

    def _pause(self, listeners: Collection[Listening]) -> None:
        for listener in self._accepting.intersection(listeners):
            self._accepting.remove(listener)
            self._running_loop().remove_reader(self._ports[listener])
            self._report_accepting(listener, False)

    def _accept(self, listener: Listening) -> None:
        while True:
            try:
                accepted, address = self._ports[listener].accept()
            except ConnectionAbortedError:
                # The connection was refused, because there are too many.
                continue
            except BlockingIOError:
                return
            except OSError as problem:
                # The system is out of descriptors or memory.
                _log.error("connections wait", why=str(problem), after_seconds=_SHORTAGE_SECONDS)
                self._pause(self._ports.keys())
                self._running_loop().call_later(_SHORTAGE_SECONDS, self._accept_again)
                return
            assert isinstance(accepted, AcceptedSocket), "the port counts them"
            self._hand_over(accepted, listener, (str(address[0]), int(address[1])))

    def _hand_over(self, accepted: AcceptedSocket, listener: Listening, address: Address) -> None:
        number = next(self._numbers)
        ready = [process for process in self._processes if listener in process.serves]
        for process in sorted(ready, key=lambda process: len(process.peers)):
            assert process.handed is not None, "it is ready"
            try:
                pass_connection(process.handed, accepted, number, listener)
            except OSError:
                # The process is ending, or too busy to accept more.
                continue
            process.peers[number] = listener, address
            self._connections.served_elsewhere[listener] += 1
            accepted.leave(number)
            return
        self._connections.tell("no listener process takes a connection", listener, address[0])
        accepted.close()

    def _ended(self, process: ListenerProcess, number: int) -> None:
        listener, address = process.peers.pop(number, (None, None))
        if listener is not None and address is not None:
            self._connections.served_elsewhere[listener] -= 1
            self._connections.admission.closed(number, address[0])

    def _take_forwarded(self, process: ListenerProcess, handed: socket.socket) -> None:
        try:
            while (passed := take_connection(handed)) is not None:
                number, _, forwarded = passed
                self._serve_forwarded(process, number, forwarded)
        except EOFError:
            # Only stop reading from the process. The supervising thread waits for its end.
            self._running_loop().remove_reader(handed)

    def _serve_forwarded(
        self, process: ListenerProcess, number: int, forwarded: socket.socket | None
    ) -> None:
        assert self._serve_here is not None, "it has begun"
        if forwarded is None:
            # The process notices that the connection is closed, and refuses the request.
            _log.error("a forwarded request is not served", why="the daemon has no free descriptor")
            return
        # The client's address, recorded when the connection was accepted. It is missing if the client has
        # left; then nobody waits for the answer.
        client = process.peers.get(number)
        if client is None:
            forwarded.close()
            return
        forwarded.setblocking(False)
        self._run(self._serve_here(forwarded, client[1]))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _apply(self, message: object, process: ListenerProcess) -> None:
        match message:
            case ListenerReport(subscribers, traffic, ptubes):
                self._report_ptubes(process, ptubes)
                self._connections.traffic.merge(traffic)
                self._served.subscribers.report(process.number, subscribers)
            case ConsumerNote():
                self._served.consumers.note_forwarded(message)
            case ConsumerForgotten(instance, consumer):
                self._served.consumers.forget(instance, consumer)
            case Serves(listener):
                self._serves(process, listener)
            case ClientWanted():
                self._run(self._moves.move(process.number, message))
            case ClientReturned():
                self._moves.returned(message)
            case Greeted(number):
                self._connections.admission.greeted(number)
            case Ended(number):
                self._ended(process, number)

    def _report_ptubes(self, process: ListenerProcess, clients: Sequence[ClientReport]) -> None:
        ptubes = clients_of(self._served)
        # Replace the mapping as a whole, because other threads read it.
        ptubes.elsewhere = {**ptubes.elsewhere, process.number: clients}

    # --- In other threads -------------------------------------------------------------------

    def in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the event loop, unless the loop has ended."""
        with suppress(RuntimeError):
            self._running_loop().call_soon_threadsafe(call, *arguments)

    def arrived(self, name: str) -> None:
        """Announce newly visible data of an instance to all processes. Never waits for them."""
        report = None
        # If another member of the fleet captures the instance, skip the report: finding that member would
        # cost a read of the store.
        if self._served.is_here(name):
            with suppress(PenstockError):
                log = self._served.instance(name).log()
                if isinstance(log, MemoryLog):
                    return
                report = LogReport.of(log)
        if report is None:
            for process in self._processes:
                process.publish()
            return
        for process in self._processes:
            process.report(name, report)

    def published(self) -> Published:
        """Return the instances in the form that the processes serve."""
        statuses: dict[str, Any] = {}
        logs: dict[str, LogReport] = {}
        refusals: dict[str, PenstockError] = {}
        for name, instance in self._served.instances.items():
            if not self._served.is_here(name):
                continue
            try:
                log = instance.log()
                if isinstance(log, MemoryLog):
                    # Leave out a log in memory: the daemon itself serves its readers.
                    continue
                logs[name] = LogReport.of(log)
            except PenstockError as problem:
                refusals[name] = problem
            statuses[name] = dict(instance.status())
        return Published(statuses, logs, refusals, clients_of(self._served).elsewhere)

    def handle(self, message: object, process: ListenerProcess, channel: Channel) -> None:
        """Handle a message of a process."""
        if isinstance(message, Request):
            self._waiting.submit(self._answer, message, channel)
        else:
            self.in_loop(self._apply, message, process)

    def _answer(self, request: Request, channel: Channel) -> None:
        """Wait for the definition that a process requests, and answer the request."""
        try:
            self._wait_settled(*request.arguments)
            answer = Answer(request.number)
        except PenstockError as problem:
            answer = Answer(request.number, problem=problem)
        # The process may have ended.
        with suppress(OSError):
            channel.send(answer)

    def _wait_settled(
        self, instance: str, name: TableName, since: Position, seconds: float, again: bool
    ) -> None:
        settler = self._served.instance(instance).log().settler
        if settler is not None:
            settler.wait(name, since, seconds, again=again)

    def read(self, readings: Readings) -> None:
        """Add the metrics of the processes."""
        readings.add_counter("penstock_listener_process_exits_total", self.exit_counts)

    def alerts(self) -> list[Alert]:
        """Return the processes that have ended in the last minutes."""
        return [
            Alert("listener ended", f"listener {process.number}", process_exit.why, "See the daemon's log")
            for process in self._processes
            for process_exit in process.exits
            if process_exit.is_recent
        ]

    def _join(self) -> None:
        deadline = time.monotonic() + _END_SECONDS_MAX
        for process in self._processes:
            if not process.join(max(0.0, deadline - time.monotonic())):
                _log.error("a listener process does not end", listener=process.number)
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ServerBusy("the listener processes have not begun")
        return self._loop
