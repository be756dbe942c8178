# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a daemon's capture processes: it starts them, watches them, and starts them again.

a process ends ─▶ its reason is noted ─▶ backoff ─▶ started again
                                      ├▶ (several instances, twice in a row) ─▶ a process for each
                                      └▶ (too often at one position) ─▶ set aside until `resume`
"""

import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from penstock.capture.status import State
from penstock.errors import OptionInvalid, PenstockError, ServerBusy, SourceMissing
from penstock.limits import PROCESS_EXITS_MAX, PROCESS_SILENCE_SECONDS_MAX
from penstock.logstore.disk import LocalDisk
from penstock.logstore.holds import share_holds
from penstock.logstore.layout import Layout
from penstock.model import Position
from penstock.processes.channel import (
    DATAGRAMS,
    Answer,
    Calls,
    Channel,
    Permit,
    Report,
    Request,
    Start,
    receive_reports,
)
from penstock.processes.instance import ProcessExit, ProcessInstance
from penstock.processes.lease import HeldLease
from penstock.processes.spawned import (
    SHORTAGES,
    START_SECONDS_MAX,
    WELL_SECONDS,
    Kill,
    SpawnedProcess,
    watched_exit,
)
from penstock.retry import Backoff, Retry
from penstock.settings.daemon import Settings
from penstock.telemetry.alerts import Alert
from penstock.telemetry.readings import Readings

COMMAND = (sys.executable, "-m", "penstock.processes.capture_process")
BACKOFF = Backoff(first=0.5, longest=30.0)

# After this many exits, the instances of a process each get their own process, which shows which instance is
# at fault.
_SHARED_EXITS_MAX = 2
_POLL_SECONDS = 0.5
# How long a process may take to end. It waits for its captures for a shorter time.
_END_SECONDS_MAX = 12.0
_CALL_SECONDS = 2.0

_EXITS_KEPT = 10

_log = structlog.get_logger(__name__)


class SupervisedProcess:
    """One capture process, and the processes that replace it. All methods except `call`, `stop` and `resume`
    run in its thread.
    """

    def __init__(
        self,
        settings: Settings,
        instances: Sequence[ProcessInstance],
        arrived: Callable[[str], None],
        *,
        split: Callable[["SupervisedProcess"], None],
        command: Sequence[str] = COMMAND,
        backoff: Backoff = BACKOFF,
        silence_seconds: float = PROCESS_SILENCE_SECONDS_MAX,
        lease: HeldLease | None = None,
        inherited: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """`split` is called if the process should be replaced by one process for each of its instances.

        A single instance may have a `lease`; then it is captured only under that lease. `inherited` returns
        descriptors that the process keeps open until it ends.
        """
        self.instances = {instance.name: instance for instance in instances}
        self._settings = settings
        self._lease = lease
        self._inherited = inherited
        self._arrived = arrived
        self._split = split
        self._command = tuple(command)
        self._backoff = backoff
        self._silence_seconds = silence_seconds
        for instance in instances:
            instance.call = self.call
        self.stopping = threading.Event()
        # Set to end a pause early.
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._calls = Calls()
        self._alerts: list[Alert] = []
        # The number of exits soon after a start, the number of exits without progress, and the positions at
        # the last exit.
        self._early_exits = self._exits = 0
        self._positions: tuple[Position | None, ...] = ()
        self._thread = threading.Thread(target=self._run, name=f"process-{instances[0].name}", daemon=True)

    def start(self) -> None:
        """Start the process. Raises RuntimeError if no thread can be started."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the process to end: its captures store what they have received first."""
        self.stopping.set()
        self._wake.set()
        with self._lock:
            if self._channel is not None:
                self._channel.end()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process; return whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def resume(self) -> None:
        """Start a process that was set aside."""
        self._wake.set()

    def alerts(self) -> list[Alert]:
        """Return the conditions that the process reports; while it does not answer, the conditions that it
        reported last.
        """
        with suppress(PenstockError):
            self._alerts = self.call("alerts")
        return self._alerts

    def call(self, call: str, *arguments: Any, seconds: float = _CALL_SECONDS) -> Any:
        """Call a function in the process; see `CallProcess`."""
        with self._lock:
            channel = self._channel
        try:
            if channel is None:
                raise ConnectionError("there is no process")
            return self._calls.call(channel, call, *arguments, seconds=seconds)
        except OSError as problem:
            raise ServerBusy(
                f"the capture process of {', '.join(self.instances)} does not answer",
                hint="Ask again in a moment",
            ) from problem

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            # Clear the event before checking for a stop, so that no stop is missed.
            self._wake.clear()
            if self.stopping.is_set():
                break
            started_at = time.monotonic()
            process_exit = watched_exit(
                self._run_once, "a capture process is not watched", instances=sorted(self.instances)
            )
            if self.stopping.is_set():
                break
            try:
                if not self._restarts_after(process_exit, time.monotonic() - started_at):
                    return
            except SHORTAGES:
                _log.exception("the end of a capture process is not noted", instances=sorted(self.instances))
                self._wake.wait(self._backoff.pause(self._early_exits))
        for instance in self.instances.values():
            instance.close()

    def _restarts_after(self, process_exit: ProcessExit, seconds: float) -> bool:
        """Record an exit and wait until the process is due to start again; return whether this thread
        restarts it.
        """
        positions = tuple(instance.position for instance in self.instances.values())
        if seconds >= WELL_SECONDS:
            self._early_exits = 0
        if positions != self._positions or seconds >= WELL_SECONDS:
            self._exits = 0
        self._early_exits += 1
        self._positions, self._exits = positions, self._exits + 1
        names = sorted(self.instances)
        _log.error("a capture process ended", instances=names, why=process_exit.text(), exits=self._exits)
        for instance in self.instances.values():
            instance.ended(process_exit, _EXITS_KEPT)
        # In a process with several instances, an instance that makes progress would hide another that does
        # not.
        if len(names) > 1 and self._early_exits >= _SHARED_EXITS_MAX:
            _log.warning("each instance gets a capture process of its own", instances=names)
            self._split(self)
            return False
        if self._exits < PROCESS_EXITS_MAX:
            self._wake.wait(self._backoff.pause(self._exits))
            return True
        for instance in self.instances.values():
            instance.put_aside(self._exits)
            _log.error("an instance is set aside", instance=instance.name, at=str(instance.position))
            self._arrived(instance.name)
        self._wake.wait()
        self._exits = 0
        return True

    def _run_once(self) -> ProcessExit:
        """Run the process; return how it ended."""
        stream, stream_there = socket.socketpair()
        datagrams, datagrams_there = socket.socketpair(type=DATAGRAMS)
        with stream, datagrams:
            with stream_there, datagrams_there:
                descriptors = [own.fileno() for own in (stream_there, datagrams_there)]
                process = SpawnedProcess(self._command, descriptors, inherited=self._inherited())
            try:
                # Set a timeout, because a process that stops in the middle of a message must not stop this
                # thread.
                stream.settimeout(self._silence_seconds)
                for instance in self.instances.values():
                    instance.began(process.pid)
                kill = self._follow(process, stream, datagrams)
            finally:
                # Kill the process, because two processes must never write the same log.
                process.kill()
                with self._lock:
                    self._channel = None
                self._calls.end()
        return process.exit(kill)

    def _follow(
        self, process: SpawnedProcess, stream: socket.socket, datagrams: socket.socket
    ) -> Kill | None:
        """Read the messages of a process until it has ended; return the reason if it has to be killed."""
        channel = Channel(stream)
        with self._lock:
            self._channel = channel
            if self.stopping.is_set():
                channel.end()
        heard_at, limit = time.monotonic(), START_SECONDS_MAX
        has_reported = False
        ending_since: float | None = None
        kill = Kill("silence", f"it was killed after {self._silence_seconds:g} s without a report")
        poll = select.poll()
        for descriptor in (stream, datagrams):
            poll.register(descriptor, select.POLLIN)
        permitted_until = None if self._lease is None else self._lease.permitted_until
        try:
            channel.send(Start(self._settings, tuple(self.instances), permitted_until))
            while True:
                # Send no messages to a process that is ending, but read all messages that it sent.
                if self._lease is not None and not self.stopping.is_set():
                    before, permitted_until = permitted_until, self._lease.permitted_until
                    if permitted_until != before:
                        channel.send(Permit(permitted_until))
                ready = [descriptor for descriptor, _ in poll.poll(_POLL_SECONDS * 1000)]
                if datagrams.fileno() in ready:
                    for name, report in receive_reports(datagrams).items():
                        self.instances[name].report(report)
                        self._arrived(name)
                if stream.fileno() in ready:
                    self._handle(channel.receive(), channel)
                now = time.monotonic()
                if ready:
                    heard_at, limit, has_reported = now, self._silence_seconds, True
                if self.stopping.is_set():
                    ending_since = ending_since or now
                    # Do not wait for a process that has not reported yet, because it has stored nothing.
                    heard_at, limit = ending_since, _END_SECONDS_MAX if has_reported else 0.0
                if now - heard_at > limit:
                    break
        except (EOFError, ConnectionError):
            if process.wait(_END_SECONDS_MAX):
                return None
        except PenstockError as problem:
            kill = Kill("message", f"it was killed: {problem}")
        except TimeoutError:
            _log.info("a capture process has stopped in the middle of a message", process=process.pid)
        return kill if process.is_running else None

    def _handle(self, message: Report | Answer | Request, channel: Channel) -> None:
        if isinstance(message, Answer):
            self._calls.answered(message)
            return
        if isinstance(message, Request):
            # Answer in a separate thread: the coordination store may answer slowly, and reports have to be
            # read in the meantime.
            answering = threading.Thread(target=self._answer, args=(message, channel), daemon=True)
            answering.start()
            return
        for name, status in message.statuses.items():
            instance = self.instances[name]
            before = instance.position
            if name in message.logs:
                instance.report(message.logs[name])
            instance.update(status, message.refusals.get(name), message.broken_holds.get(name, ()))
            if instance.position != before:
                self._arrived(name)

    def _answer(self, request: Request, channel: Channel) -> None:
        """Answer the process's call to the lease of its only instance."""
        lease = self._lease
        assert lease is not None, "a process without a lease calls nothing"
        calls: dict[str, Callable[..., Any]] = {
            "handover": lease.handover,
            "begin_epoch": lease.begin_epoch,
            "adopt_holds": partial(self._adopt_holds, lease),
        }
        try:
            answer = Answer(request.number, calls[request.call](*request.arguments))
        except PenstockError as problem:
            answer = Answer(request.number, problem=problem)
        # The process may have ended.
        with suppress(OSError):
            channel.send(answer)

    def _adopt_holds(self, lease: HeldLease, has_epoch: bool) -> None:
        (name,) = self.instances
        layout = Layout(self._settings.log_of(name).folder)
        share_holds(layout)
        lease.adopt_holds(LocalDisk(), layout, has_epoch=has_epoch)


class Supervisor:
    """The capture processes of a daemon.

    `groups` lists the instances of each process. `arrived` is called with the name of an instance after new
    data became visible. `options` are the remaining arguments of `SupervisedProcess`.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Sequence[str]],
        arrived: Callable[[str], None],
        **options: Any,
    ) -> None:
        self._settings = settings
        self._arrived = arrived
        self._options = options
        self.instances = {name: self._instance_of(name) for names in groups for name in names}
        # Guards the instances and the list of processes, which a split replaces.
        self._lock = threading.Lock()
        self._processes = [self._process_of([self.instances[name] for name in names]) for names in groups]
        self._is_stopping = False

    def start(self) -> None:
        """Start all processes."""
        for process in self._processes:
            process.start()

    def stop(self) -> None:
        """Ask all processes to end: their captures store what they have received first."""
        with self._lock:
            self._is_stopping = True
            for process in self._processes:
                process.stop()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` until all processes have ended; return whether they have."""
        deadline = time.monotonic() + seconds
        ended = [process.join(max(0.0, deadline - time.monotonic())) for process in self._processes]
        return all(ended)

    def change(self, settings: Settings) -> None:
        """Use these settings for processes that are created from now on."""
        self._settings = settings

    def add(self, name: str, lease: HeldLease | None) -> tuple[ProcessInstance, SupervisedProcess]:
        """Return an instance that is captured in a fleet under a lease, and its process, not started yet.

        Raises SourceMissing for an instance that is being removed.
        """
        instance = self._instance_of(name)
        process = self._process_of([instance], lease)
        with self._lock:
            assert name not in self.instances, "its last process has ended"
            self.instances[name] = instance
            self._processes.append(process)
            if self._is_stopping:
                process.stop()
        return instance, process

    def remove(self, process: SupervisedProcess) -> None:
        """Remove a process that has ended, and its instances."""
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
                for name in process.instances:
                    del self.instances[name]

    def resume(self, name: str) -> None:
        """Start the process of an instance that was set aside. Raises SourceMissing, OptionInvalid."""
        instance = self.instances.get(name)
        if instance is None:
            raise SourceMissing(f"{name!r} has no capture process", hint="See the instances: penstock status")
        if instance.set_aside is None:
            raise OptionInvalid(f"{name} is not set aside", hint="See why it does not run: penstock status")
        with self._lock:
            process = next(process for process in self._processes if name in process.instances)
        process.resume()

    def read(self, readings: Readings) -> None:
        """Add the metrics of all instances, as far as their processes answer."""
        processes, instances = self._current()
        for process in processes:
            with suppress(PenstockError):
                readings.merge(process.call("read"))
        for name, instance in instances.items():
            readings.add_counter(
                "penstock_capture_process_exits_total", instance.exit_counts, penstock_instance=name
            )
            if instance.pid is None:
                state = str(instance.status()["state"])
                states = [state.value for state in State]
                readings.add_states("penstock_capture_state", state, states, penstock_instance=name)
            if instance.memory is not None:
                readings.add(
                    "penstock_memory_buffer_bytes", instance.memory.bytes_held, penstock_instance=name
                )
                readings.add(
                    "penstock_memory_buffer_limit_bytes", instance.memory.bytes_max, penstock_instance=name
                )

    def alerts(self) -> list[Alert]:
        """Return the conditions of all instances that an operator should know about."""
        processes, instances = self._current()
        alerts: list[Alert] = []
        for process in processes:
            alerts += process.alerts()
        for name, instance in instances.items():
            failure = instance.set_aside
            if failure is not None:
                alerts.append(Alert("set aside", name, failure.message, failure.hint))
            elif instance.exits and instance.exits[-1].is_recent:
                summary = f"the capture process ended: {instance.exits[-1].text()}"
                alerts.append(Alert("process ended", name, summary, "Run: penstock status"))
        return alerts

    def _current(self) -> tuple[list[SupervisedProcess], dict[str, ProcessInstance]]:
        with self._lock:
            return list(self._processes), dict(self.instances)

    def _instance_of(self, name: str) -> ProcessInstance:
        settings = self._settings
        if name not in settings.instances:
            raise SourceMissing(
                f"instance {name} is being removed", hint="See the instances: penstock status"
            )
        return ProcessInstance(name, settings.instances[name], settings.log_of(name))

    def _process_of(
        self, instances: Sequence[ProcessInstance], lease: HeldLease | None = None
    ) -> SupervisedProcess:
        return SupervisedProcess(
            self._settings, instances, self._arrived, split=self._split, lease=lease, **self._options
        )

    def _split(self, process: SupervisedProcess) -> None:
        """Replace a process with one process for each of its instances."""
        with self._lock:
            if self._is_stopping:
                return
            single_processes = [self._process_of([instance]) for instance in process.instances.values()]
            self._processes = [
                *(other for other in self._processes if other is not process),
                *single_processes,
            ]
        for single_process in single_processes:
            retry = Retry("a capture process is not started", backoff=BACKOFF, stop=single_process.stopping)
            retry.run(single_process.start, retried=RuntimeError)
