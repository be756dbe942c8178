# SPDX-License-Identifier: Apache-2.0
"""The supervisor of capture processes: a process that ends is restarted or set aside, and all others
continue.
"""

import errno
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.captures import Maintenance
from penstock.errors import OptionInvalid, ProcessFailed, ServerBusy, SourceMissing
from penstock.processes.capture_process import CaptureProcess
from penstock.processes.channel import DATAGRAMS, Answer, Channel, Request, Start
from penstock.processes.instance import ProcessInstance
from penstock.processes.supervisor import SupervisedProcess, Supervisor
from penstock.retry import Backoff
from penstock.settings.daemon import Settings
from penstock.telemetry.alerts import Alert
from penstock.telemetry.readings import Readings
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

# Programs that run in place of a capture process, with its descriptors as further arguments.
CRASHING = ("sh", "-c", "kill -s SEGV $$")
# A capture process with a defect in a capture.
DEFECTIVE = (
    sys.executable,
    "-c",
    "from penstock.capture.run import Capture; from penstock.processes.capture_process import main;"
    "Capture._attempt = lambda self: 1 / 0; main()",
)

# A process of a version whose messages cannot be read.
FOREIGN = (
    sys.executable,
    "-c",
    "import signal, socket, struct, sys; stream = socket.socket(fileno=int(sys.argv[1]));"
    "stream.sendall(struct.pack('<Q', 3) + b'abc'); signal.pause()",
)

# A process that ends after the last message of the daemon.
SILENT = ("sh", "-c", "exec cat <&$0 >/dev/null")

# A process that reports once, and twice more while it ends.
ENDING = (
    sys.executable,
    "-c",
    """
import pickle, socket, struct, sys
stream = socket.socket(fileno=int(sys.argv[1]))
def report(content):
    message = pickle.dumps(content)
    stream.sendall(struct.pack("<Q", len(message)) + message)
report("running")
while stream.recv(65536):
    pass
report("ending")
report("ended")
""",
)

AT_ONCE = Backoff(first=0.0, longest=0.0)

Supervise = Callable[..., Supervisor]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    """Return a function that supervises captures whose server does not answer."""
    supervisors: list[Supervisor] = []

    def start(*groups: Sequence[str], **options: Any) -> Supervisor:
        settings = Settings.model_validate(
            {
                "log": {"folder": str(tmp_path)},
                "instances": {
                    name: {"source": "mysql://u@127.0.0.1:1"} for names in groups for name in names
                },
            }
        )
        supervisor = Supervisor(settings, groups, lambda name: None, **options)
        supervisors.append(supervisor)
        supervisor.start()
        return supervisor

    yield start
    for supervisor in supervisors:
        supervisor.stop()
        assert supervisor.join(WAIT_SECONDS_MAX)


def status_of(supervisor: Supervisor, name: str = "shop") -> dict[str, Any]:
    """Return the status of an instance."""
    return dict(supervisor.instances[name].status())


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Keep as many files open inside the block as a daemon with many connections has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull, "rb"))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_process_that_crashes_at_one_position_is_set_aside_until_it_is_resumed(supervise: Supervise) -> None:
    with many_descriptors():
        supervisor = supervise(["shop"], command=CRASHING, backoff=AT_ONCE)
        wait_until(lambda: status_of(supervisor)["process"]["exits"])
    wait_until(lambda: status_of(supervisor)["process"]["set_aside"])
    status = status_of(supervisor)
    assert status["state"] == "stopped"
    assert status["error"]["kind"] == "ProcessFailed"
    assert status["error"]["hint"].endswith("penstock resume shop")
    assert "ended 8 times without progress, the last time by signal SIGSEGV" in status["why"]
    assert [process_exit["reason"] for process_exit in status["process"]["exits"]] == ["SIGSEGV"] * 8
    with pytest.raises(ProcessFailed, match="SIGSEGV"):
        supervisor.instances["shop"].log()
    assert [(alert.name, alert.instance) for alert in supervisor.alerts()] == [("set aside", "shop")]
    readings = Readings()
    supervisor.read(readings)
    exits = readings.values("penstock_capture_process_exits_total")
    assert exits[("penstock_instance", "shop"), ("reason", "SIGSEGV")] == 8
    assert sum(exits.values()) == 8
    supervisor.resume("shop")
    wait_until(lambda: status_of(supervisor)["process"]["starts"] > 8)
    with pytest.raises(SourceMissing):
        supervisor.resume("users")


def test_reason_of_a_defect_is_in_the_status_and_the_alert(supervise: Supervise) -> None:
    # The pauses after a process has ended are long.
    supervisor = supervise(["shop"], command=DEFECTIVE, backoff=Backoff(first=600.0, longest=600.0))
    wait_until(lambda: status_of(supervisor)["process"]["exits"])
    status = status_of(supervisor)
    assert (status["state"], status["process"]["pid"]) == ("waiting", None)
    assert status["why"].endswith("its process ended: exit status 70")
    assert any(line.startswith("Traceback") for line in status["process"]["exits"][0]["lines"])
    (alert,) = supervisor.alerts()
    assert (alert.name, "division by zero" in alert.summary) == ("process ended", True)
    with pytest.raises(OptionInvalid, match="not set aside"):
        supervisor.resume("shop")


def test_process_whose_messages_cannot_be_read_is_killed_by_name(supervise: Supervise) -> None:
    supervisor = supervise(["shop"], command=FOREIGN, backoff=Backoff(first=600.0, longest=600.0))
    wait_until(lambda: status_of(supervisor)["process"]["exits"])
    status = status_of(supervisor)
    assert status["process"]["exits"][0]["reason"] == "message"
    assert "restart the daemon" in status["why"]


def test_process_is_started_again_after_the_daemon_had_no_descriptor_for_it(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, is_short = socket.socketpair, iter([True])

    def short_of_descriptors(*arguments: Any, **options: Any) -> tuple[socket.socket, socket.socket]:
        if next(is_short, False):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return pair(*arguments, **options)

    monkeypatch.setattr(socket, "socketpair", short_of_descriptors)
    # A real-time signal, which has no name.
    supervisor = supervise(["shop"], command=("sh", "-c", "kill -s 40 $$"), backoff=AT_ONCE)
    wait_until(lambda: len(supervisor.instances["shop"].exits) > 1)
    shortage, crash = supervisor.instances["shop"].exits[:2]
    assert (shortage.reason, "Too many open files" in shortage.text()) == ("daemon", True)
    assert (crash.reason, crash.text()) == ("SIG40", "signal SIG40")


def test_process_that_cannot_be_watched_is_killed_before_another_is_started(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, pids = ProcessInstance.began, []

    def begin_badly(instance: ProcessInstance, pid: int) -> None:
        pids.append(pid)
        began(instance, pid)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ProcessInstance, "began", begin_badly)
    supervisor = supervise(["shop"], command=("sleep", "600"), backoff=Backoff(first=600.0, longest=600.0))
    wait_until(lambda: supervisor.instances["shop"].exits)
    assert "can't start new thread" in status_of(supervisor)["why"]
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.deep(
    guard="tests/unit/test_capture_processes.py::test_reason_of_a_defect_is_in_the_status_and_the_alert"
)
@pytest.mark.timing
def test_silent_process_is_killed_and_instances_of_a_failing_process_are_separated(
    supervise: Supervise,
) -> None:
    supervisor = supervise(["shop", "users"], ["other"], backoff=AT_ONCE, silence_seconds=5.0)
    names = ("shop", "users", "other")

    def processes() -> list[int | None]:
        return [supervisor.instances[name].pid for name in names]

    def are_running() -> bool:
        return all(status_of(supervisor, name)["state"] in ("connecting", "waiting") for name in names)

    wait_until(are_running)
    shared, users, other = processes()
    assert shared == users != other
    assert shared is not None
    assert other is not None
    # A service manager that stops the daemon signals all processes; the daemon lets them end.
    os.kill(other, signal.SIGTERM)
    os.kill(shared, signal.SIGSTOP)
    wait_until(lambda: supervisor.instances["shop"].exits)
    assert supervisor.instances["shop"].exits[0].reason == "silence"
    wait_until(lambda: None not in processes() and are_running())
    again = processes()[0]
    assert again is not None
    os.kill(again, signal.SIGKILL)
    wait_until(lambda: None not in processes() and len(set(processes())) == 3)
    assert supervisor.instances["users"].exits[-1].reason == "SIGKILL"
    # The process that did not fail continues.
    assert processes()[2] == other
    assert not supervisor.instances["other"].exits


def test_process_is_heard_to_its_end_while_its_lease_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.model_validate(
        {"log": {"folder": str(tmp_path)}, "instances": {"shop": {"source": "mysql://u@127.0.0.1:1"}}}
    )
    renewals = count(1.0)

    class RenewedLease:
        permitted_until = property(lambda self: next(renewals))

    messages: list[object] = []
    monkeypatch.setattr(SupervisedProcess, "_handle", lambda self, message, channel: messages.append(message))
    lease: Any = RenewedLease()
    instance = ProcessInstance("shop", settings.instances["shop"], settings.log_of("shop"))
    process = SupervisedProcess(
        settings, [instance], lambda name: None, split=lambda process: None, command=ENDING, lease=lease
    )
    process.start()
    wait_until(lambda: messages)
    process.stop()
    assert process.join(WAIT_SECONDS_MAX)
    assert messages == ["running", "ending", "ended"]


@contextmanager
def captures_in_this_process(folder: Path) -> Iterator[Channel]:
    """Run what a capture process runs; return the daemon's end of its channel."""
    settings = Settings.model_validate(
        {"log": {"folder": str(folder)}, "instances": {"shop": {"source": "mysql://u@127.0.0.1:1"}}}
    )
    stream, stream_there = socket.socketpair()
    datagrams, datagrams_there = socket.socketpair(type=DATAGRAMS)
    with stream, stream_there, datagrams, datagrams_there:
        captures = CaptureProcess(Channel(stream_there), datagrams_there, Start(settings, ("shop",)))
        running = threading.Thread(target=captures.run)
        running.start()
        channel = Channel(stream)
        yield channel
        channel.end()
        running.join(WAIT_SECONDS_MAX)
        assert not running.is_alive()


def answer_to(channel: Channel, number: int) -> Answer:
    """Return the answer to a request; reports and other answers are dropped."""
    while True:
        message = channel.receive()
        if isinstance(message, Answer) and message.number == number:
            return message


def test_readers_that_wait_for_a_definition_delay_neither_alerts_nor_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = threading.Event()
    monkeypatch.setattr(
        CaptureProcess, "_wait_settled", lambda self, *arguments: settled.wait(WAIT_SECONDS_MAX)
    )
    with captures_in_this_process(tmp_path) as channel:
        for number in range(16):
            channel.send(Request(number, "wait_settled"))
        channel.send(Request(16, "alerts"))
        assert answer_to(channel, 16) == Answer(16, [])
        channel.send(Request(17, "read"))
        assert isinstance(answer_to(channel, 17).result, Readings)
        settled.set()


def test_defect_in_a_request_ends_the_capture_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defects: list[threading.ExceptHookArgs] = []
    # `main` ends the process here.
    monkeypatch.setattr(threading, "excepthook", defects.append)
    monkeypatch.setattr(Maintenance, "alerts", lambda self: 1 / 0)
    with captures_in_this_process(tmp_path) as channel:
        channel.send(Request(1, "alerts"))
        assert "division by zero" in str(answer_to(channel, 1).problem)
        wait_until(lambda: defects)
    assert [defect.exc_type for defect in defects] == [ZeroDivisionError]


def test_alert_of_a_process_that_does_not_answer_is_not_resolved(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = supervise(["shop"], command=SILENT)
    lagging = Alert("lag", "shop", "the log is 90 s behind", "Run: penstock status")
    answers = iter([[lagging]])

    def call(self: SupervisedProcess, call: str, *arguments: Any, **options: Any) -> Any:
        for answer in answers:
            return answer
        raise ServerBusy("the capture process of shop does not answer")

    monkeypatch.setattr(SupervisedProcess, "call", call)
    assert supervisor.alerts() == [lagging]
    assert supervisor.alerts() == [lagging]


def test_processes_of_a_split_start_after_the_daemon_had_no_thread_for_them(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, names = threading.Thread.start, []

    def start_or_refuse(thread: threading.Thread) -> None:
        names.append(thread.name)
        # Refuse the second thread of this name. The first belongs to the process with both instances.
        if names.count("process-shop") == 2:
            names.append("process-shop")
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    supervisor = supervise(["shop", "users"], command=CRASHING, backoff=AT_ONCE)
    for name in ("shop", "users"):
        wait_until(partial(lambda name: status_of(supervisor, name)["process"]["set_aside"], name))
    assert names.count("process-shop") == 4
