# SPDX-License-Identifier: Apache-2.0
"""The supervisor of capture processes: what ends is started again, or set aside, and the rest goes on."""

import errno
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionInvalid, ProcessFailed, SourceMissing
from penstock.processes.instance import ProcessInstance
from penstock.processes.supervisor import Supervisor
from penstock.retry import Backoff
from penstock.settings.daemon import Settings
from penstock.telemetry.readings import Readings
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

# Programs in place of a capture process; its descriptors follow.
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
    """Have as many open files inside the block as a daemon with many connections."""
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
    # The pauses after it are long.
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
    # The process that did not fail goes on.
    assert processes()[2] == other
    assert not supervisor.instances["other"].exits
