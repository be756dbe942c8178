# SPDX-License-Identifier: Apache-2.0
"""Child processes that cannot outlive this process, however it ends.

Linux sends a child its parent-death signal when the thread that started it ends (prctl(2) PR_SET_PDEATHSIG).
So one thread, which lives as long as the process, starts all children.
"""

import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

_Order = tuple["Future[subprocess.Popen[bytes]]", Sequence[str], Path, int | None]

_lock = threading.Lock()
_orders: "queue.SimpleQueue[_Order] | None" = None
_owner = 0


def spawn(
    argv: Sequence[str], output: Path, stdin: int | None = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a program that is killed when this process ends, and append its output to a file.

    The program leads its own process group, so that Ctrl-C in the terminal does not reach it.
    """
    started: Future[subprocess.Popen[bytes]] = Future()
    _queue().put((started, argv, output, stdin))
    return started.result()


def end(process: subprocess.Popen[bytes], seconds_max: float) -> bool:
    """Stop a child by SIGTERM, and by SIGKILL after a timeout; return whether SIGTERM sufficed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds_max)
        return True
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _queue() -> "queue.SimpleQueue[_Order]":
    global _orders, _owner
    with _lock:
        # A forked process inherits the queue without the thread that serves it.
        if _orders is None or _owner != os.getpid():
            _orders, _owner = queue.SimpleQueue(), os.getpid()
            threading.Thread(target=_serve, args=(_orders,), name="child-starter", daemon=True).start()
        return _orders


def _serve(orders: "queue.SimpleQueue[_Order]") -> None:
    bind = [shutil.which("setpriv") or "setpriv", "--pdeathsig", "KILL", "--"]
    while True:
        started, argv, output, stdin = orders.get()
        try:
            with open(output, "ab") as file:
                started.set_result(
                    subprocess.Popen(
                        [*bind, *argv], stdin=stdin, stdout=file, stderr=file, start_new_session=True
                    )
                )
        except OSError as error:
            started.set_exception(error)
