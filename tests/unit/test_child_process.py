# SPDX-License-Identifier: Apache-2.0
"""A child of the command line ends with its parent, even on systems where the kernel does not send the
signal.
"""

import os
import signal
import subprocess
import sys
import threading

import pytest

from penstock.cli.shared import child

PARENT = 4242


@pytest.fixture
def parents(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the parents that a system without prctl reports, in order; the last parent remains."""
    pids = [PARENT]
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "getppid", lambda: pids.pop(0) if len(pids) > 1 else pids[0])
    monkeypatch.setattr(child, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(child.ctypes, "CDLL", lambda *_, **__: pytest.fail("there is no prctl"))
    return pids


def test_child_receives_sigterm_once_it_has_another_parent(
    parents: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int]] = []
    is_signalled = threading.Event()

    def kill(pid: int, number: int) -> None:
        signals.append((pid, number))
        is_signalled.set()

    monkeypatch.setattr(os, "kill", kill)
    child._end_with(PARENT)
    assert signals == []
    parents[:] = [PARENT, PARENT, 1]
    assert is_signalled.wait(60)
    assert signals == [(os.getpid(), signal.SIGTERM)]


def test_child_exits_if_its_parent_has_ended_before(
    parents: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)
    parents[:] = [1]
    with pytest.raises(SystemExit) as ended:
        child._end_with(PARENT)
    assert ended.value.code == 128 + signal.SIGTERM


PROGRAM = """
import os, sys, threading
from penstock.cli.shared import child
from penstock.cli.shared.signals import stopped_by_signals

child._end_with(os.getppid())
stop = threading.Event()
with stopped_by_signals(stop.set):
    print("running", flush=True)
    stop.wait()
    print("stopping", flush=True)
    sys.stdin.readline()
print("stopped", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_child_stops_in_order_despite_a_signal_from_every_thread_of_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for line in ("running\n", "stopping\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGUSR1)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.readline() == "stopped\n"
    assert process.returncode == 0
