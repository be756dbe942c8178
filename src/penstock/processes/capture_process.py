# SPDX-License-Identifier: Apache-2.0
"""A capture process: captures some instances of a daemon in a separate process.

    python -m penstock.processes.capture_process STREAM DATAGRAMS

Both arguments are descriptors of sockets; see `channel`. The process shuts down properly when the daemon
ends, for whatever reason. A defect or a panic in a capture ends the process at once, and the daemon starts it
again.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from penstock.capture.run import Capture
from penstock.captures import Maintenance, make_capture
from penstock.errors import CoordinationLost, PenstockError, ServerBusy
from penstock.logstore.followed_log import LogReport
from penstock.logstore.holds import share_holds
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.model import Position, TableName
from penstock.processes.channel import (
    Answer,
    Calls,
    Channel,
    Permit,
    Report,
    Request,
    Start,
    send_report,
)
from penstock.processes.lease import PermittedLease
from penstock.processes.program import begin
from penstock.settings.daemon import Settings
from penstock.telemetry.alerts import Alert
from penstock.telemetry.readings import Readings

REPORT_SECONDS = 0.5
_JOIN_SECONDS_MAX = 10.0
# The timeout of a call to the daemon. The daemon's own calls to its coordination store end earlier.
_DAEMON_ANSWER_SECONDS_MAX = 60.0
_REQUEST_THREADS = 4
# Enough threads for all calls that can wait at a time. Threads start on demand; see `Threads.definitions`.
_WAITING_THREADS = 64

_log = structlog.get_logger(__name__)


class CaptureProcess:
    """Runs the captures of this process, and reports on them to the daemon."""

    def __init__(self, channel: Channel, datagrams: socket.socket, start: Start) -> None:
        self._channel = channel
        self._datagrams = datagrams
        settings = _without_memory(start.settings)
        for name in start.instances:
            share_holds(Layout(settings.log_of(name).folder))
        # Set only for a process with a single instance.
        self._lease: PermittedLease | None = None
        if start.permitted_until is not None:
            (name,) = start.instances
            self._lease = PermittedLease(name, start.permitted_until, self._call_daemon)
        self._calls_of_daemon = Calls()
        self._captures: dict[str, Capture] = {
            name: make_capture(name, settings, self._report_arrival, self._lease) for name in start.instances
        }
        self._maintenance = Maintenance(settings, start.instances, lambda: list(self._captures.values()))
        self._stopping, self._ended = threading.Event(), threading.Event()
        # Set once a report has to be sent before it is due.
        self._due = threading.Event()
        self._calls: dict[str, Callable[..., Any]] = {
            "read": self._read,
            "alerts": self._alerts,
            "give_definition": self._give_definition,
        }
        # Calls that may wait several seconds for a server.
        self._waiting_calls: dict[str, Callable[..., Any]] = {"wait_settled": self._wait_settled}
        self._reporting = threading.Thread(target=self._report_until_stopped, name="reports", daemon=True)

    def run(self) -> None:
        """Capture until the daemon ends or stops this process."""
        self._reporting.start()
        for capture in self._captures.values():
            capture.start()
        self._maintenance.start()
        threading.Thread(target=self._answer_requests, name="requests", daemon=True).start()
        self._stopping.wait()
        self._maintenance.stop()
        for capture in self._captures.values():
            capture.stop()
        deadline = time.monotonic() + _JOIN_SECONDS_MAX
        for capture in self._captures.values():
            if not capture.join(max(0.0, deadline - time.monotonic())):
                _log.error("a capture does not end", instance=capture.name)
        self._ended.set()
        self._due.set()
        self._reporting.join(1.0)

    # --- Reports ----------------------------------------------------------------------------

    def _report_arrival(self, name: str) -> None:
        """Report what has become visible. Called by the capturing thread, so it never waits."""
        try:
            report = LogReport.of(self._captures[name].log())
        except PenstockError:
            self._due.set()
            return
        if not send_report(self._datagrams, name, report):
            self._due.set()

    def _report_until_stopped(self) -> None:
        while True:
            is_last = self._ended.is_set()
            try:
                self._channel.send(self._report())
            except OSError:
                # The daemon has ended. The thread that receives requests will notice.
                return
            if is_last:
                return
            self._due.wait(REPORT_SECONDS)
            self._due.clear()

    def _report(self) -> Report:
        logs: dict[str, LogReport] = {}
        refusals: dict[str, PenstockError] = {}
        broken_holds = {}
        for name, capture in self._captures.items():
            try:
                log = capture.log()
            except ServerBusy:
                continue
            except PenstockError as problem:
                refusals[name] = problem
                continue
            logs[name] = LogReport.of(log)
            broken_holds[name] = log.broken_holds
        statuses = {name: capture.status() for name, capture in self._captures.items()}
        return Report(statuses, logs, refusals, broken_holds)

    # --- Requests ---------------------------------------------------------------------------

    def _answer_requests(self) -> None:
        """Answer the daemon's requests until the daemon ends, which ends this process too."""
        with (
            ThreadPoolExecutor(_REQUEST_THREADS, "request") as threads,
            ThreadPoolExecutor(_WAITING_THREADS, "waiting-request") as waiting_threads,
        ):
            try:
                while True:
                    message = self._channel.receive()
                    if isinstance(message, Permit):
                        if self._lease is not None:
                            self._lease.permit(message.until)
                    elif isinstance(message, Answer):
                        self._calls_of_daemon.answered(message)
                    elif message.call in self._waiting_calls:
                        waiting_threads.submit(self._answer, message, self._waiting_calls)
                    else:
                        threads.submit(self._answer, message, self._calls)
            except EOFError:
                self._stopping.set()
                self._calls_of_daemon.end()

    def _answer(self, request: Request, calls: Mapping[str, Callable[..., Any]]) -> None:
        try:
            answer = Answer(request.number, calls[request.call](*request.arguments))
        except PenstockError as problem:
            answer = Answer(request.number, problem=problem)
        except Exception as defect:
            self._send(Answer(request.number, problem=PenstockError(f"a defect: {defect!r}")))
            # Report the defect here, because an executor would swallow it.
            threading.excepthook(
                threading.ExceptHookArgs(
                    (type(defect), defect, defect.__traceback__, threading.current_thread())
                )
            )
            raise
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        try:
            self._channel.send(answer)
        except OSError:
            # The daemon has ended, so this process ends too.
            self._stopping.set()

    def _call_daemon(self, call: str, *arguments: Any) -> Any:
        """Call a function of the daemon's lease; see `PermittedLease`."""
        try:
            return self._calls_of_daemon.call(
                self._channel, call, *arguments, seconds=_DAEMON_ANSWER_SECONDS_MAX
            )
        except OSError as problem:
            raise CoordinationLost("the daemon does not answer its capture process") from problem

    def _read(self) -> Readings:
        readings = Readings()
        self._maintenance.read(readings)
        return readings

    def _alerts(self) -> list[Alert]:
        return self._maintenance.alerts()

    def _log_of(self, name: str) -> Log:
        return self._captures[name].log()

    def _wait_settled(
        self, instance: str, name: TableName, since: Position, seconds: float, again: bool
    ) -> None:
        settler = self._log_of(instance).settler
        if settler is not None:
            settler.wait(name, since, seconds, again=again)

    def _give_definition(
        self, instance: str, name: TableName, since: Position, definition: dict[str, Any]
    ) -> None:
        settler = self._log_of(instance).settler
        if settler is None:
            raise ServerBusy("the capture has not reached its server yet", hint="Give the definition again")
        settler.give(name, since, definition)


def _without_memory(settings: Settings) -> Settings:
    """Return the logs' settings without the memory tier, because the daemon has a memory tier for its
    readers.
    """
    instances = {
        name: instance.model_copy(update={"log": instance.log.model_copy(update={"mode": "file"})})
        for name, instance in settings.instances.items()
    }
    return settings.model_copy(update={"instances": instances})


def main() -> None:
    """Run the process."""
    stream, datagrams = begin()
    channel = Channel(stream)
    try:
        start = channel.receive()
    except EOFError:
        return
    CaptureProcess(channel, datagrams, start).run()


if __name__ == "__main__":
    main()
