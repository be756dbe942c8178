# SPDX-License-Identifier: Apache-2.0
"""A child of the command line ends with its parent, even on systems where the kernel does not send the
signal.
"""

import os
import signal
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
