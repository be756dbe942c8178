# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends a command in an orderly way."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.cli.shared.signals import stopped_by_signals
from tests.support.suite.patience import WAIT_SECONDS_MAX

STUBBORN = """
import os, signal, threading
from penstock.cli.shared import signals

signals.STOP_SECONDS_MAX = 0.1
with signals.stopped_by_signals(lambda: None):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
"""

# The fleet's thread waits for a store that does not answer.
WAITING_WORKER = """
import os, signal, threading
from pathlib import Path

from penstock.cli import worker
from penstock.cli.shared import signals
from penstock.fleet.member import FleetMember

signals.STOP_SECONDS_MAX = 0.1
FleetMember.start = lambda self, failed: os.kill(os.getpid(), signal.SIGTERM)
FleetMember.stop = lambda self: threading.Event().wait()
worker.run(
    coordination="sqlite:///nowhere/jobs.db", name="w", zone="", weight=1.0, folder=Path("jobs"), session=10.0
)
"""

# The daemon waits for a store that does not answer.
WAITING_DAEMON = """
import os, signal, sys, threading
from pathlib import Path

from penstock import daemon
from penstock.cli import serve
from penstock.cli.shared import signals

class WaitingDaemon:
    def __init__(self, settings, desired):
        pass

    def run(self):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

    def stop(self):
        pass

    def reload(self, *, reads_file):
        pass

signals.STOP_SECONDS_MAX = 0.1
daemon.Daemon = WaitingDaemon
serve.run(Path(sys.argv[1]))
"""


def test_signal_stops_the_block_even_if_the_interrupted_thread_holds_a_lock() -> None:
    lock, stopped = threading.Lock(), threading.Event()

    def stop() -> None:
        with lock:
            stopped.set()

    with stopped_by_signals(stop):
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second one ends the process"
        assert stopped.wait(WAIT_SECONDS_MAX)


def test_sighup_reloads_each_time_even_if_the_interrupted_thread_holds_a_lock() -> None:
    lock, reloads = threading.Lock(), threading.Semaphore(0)

    def reload() -> None:
        with lock:
            reloads.release()

    before = signal.getsignal(signal.SIGHUP)
    with stopped_by_signals(lambda: None, reload):
        for _ in range(2):
            with lock:
                os.kill(os.getpid(), signal.SIGHUP)
            assert reloads.acquire(timeout=WAIT_SECONDS_MAX)
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.parametrize(
    "program",
    [STUBBORN, WAITING_WORKER, WAITING_DAEMON],
    ids=["a block", "penstock worker", "penstock serve"],
)
def test_endless_block_is_ended_by_its_deadline(program: str, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("instances: {shop: {source: mysql://repl@db1}}")
    ended = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        timeout=WAIT_SECONDS_MAX,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert b"ended without an answer" in ended.stderr + ended.stdout


def test_process_ends_even_if_nobody_reads_what_it_logs() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    os.set_blocking(writing, True)
    try:
        words = [sys.executable, "-c", STUBBORN]
        ended = subprocess.run(words, timeout=WAIT_SECONDS_MAX, stdout=writing, stderr=writing, check=False)
    finally:
        os.close(reading)
        os.close(writing)
    assert ended.returncode == 128 + signal.SIGTERM
