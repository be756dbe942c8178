# SPDX-License-Identifier: Apache-2.0
"""Handles SIGTERM, SIGINT and SIGHUP for commands that run until they are stopped."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import structlog

# How long a command may take to stop: half of the time that Kubernetes waits before it kills a container.
STOP_SECONDS_MAX = 15.0
# How long to wait for a log line to be written: the process that reads standard error may block.
_LOG_SECONDS_MAX = 0.5

_log = structlog.get_logger(__name__)


@contextmanager
def stopped_by_signals(stop: Callable[[], None], reload: Callable[[], None] | None = None) -> Iterator[None]:
    """Call `stop` in a thread at the first SIGTERM or SIGINT; a second signal ends the process.

    The process also ends STOP_SECONDS_MAX after the first signal, if the block does not end by itself.
    Commands that use this function survive a kill in any case: their next run resumes. Each SIGHUP calls
    `reload` in a thread; without `reload`, SIGHUP ends the process as usual.
    """
    ended = threading.Event()
    old_handlers: dict[int, Any] = {}

    def end_late(number: int) -> None:
        if not ended.wait(STOP_SECONDS_MAX):
            logging = threading.Thread(target=log_end, name="log-end", daemon=True)
            logging.start()
            logging.join(_LOG_SECONDS_MAX)
            os._exit(128 + number)

    def log_end() -> None:
        _log.error("ended without an answer: the next run goes on", waited_seconds=STOP_SECONDS_MAX)

    def start_stopping(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, old_handlers[number])
        run_soon(stop)
        run_soon(lambda: end_late(number))

    def run_soon(work: Callable[[], None]) -> None:
        # Call `work` in a thread: inside the signal handler, `stop` could wait forever for a lock that the
        # interrupted code holds.
        threading.Thread(target=work, name="signal", daemon=True).start()

    if reload is not None:
        old_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda _number, _frame: run_soon(reload))
    for ending in (signal.SIGTERM, signal.SIGINT):
        old_handlers[ending] = signal.signal(ending, start_stopping)
    try:
        yield
    finally:
        ended.set()
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
