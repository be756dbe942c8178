# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends a command in order."""

import os
import signal
import subprocess
import sys
import threading

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


def test_endless_block_is_ended_by_its_deadline() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUBBORN], timeout=WAIT_SECONDS_MAX, capture_output=True, check=False
    )
    assert ended.returncode == 128 + signal.SIGTERM
    assert b"ended without an answer" in ended.stderr + ended.stdout
