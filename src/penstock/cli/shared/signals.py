# SPDX-License-Identifier: Apache-2.0
"""How SIGTERM and SIGINT end a command that runs until it is told to end."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import structlog

# Half of what Kubernetes waits before it kills.
STOP_SECONDS_MAX = 15.0

_log = structlog.get_logger(__name__)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGTERM or SIGINT, in a thread of its own; a second one ends the process.

    STOP_SECONDS_MAX after the first one the process ends as well: what the block waits for does not answer.
    Whatever runs here has to survive a kill in any case, and its next run goes on where it was.
    """
    ended = threading.Event()
    before: dict[int, Any] = {}

    def end_late(number: int) -> None:
        if not ended.wait(STOP_SECONDS_MAX):
            _log.error("ended without an answer: the next run goes on", waited_seconds=STOP_SECONDS_MAX)
            os._exit(128 + number)

    def begin_to_end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        # In the handler itself a lock that the interrupted code holds would never be free.
        for work in (stop, lambda: end_late(number)):
            threading.Thread(target=work, name="stop-on-signal", daemon=True).start()

    for ending in (signal.SIGTERM, signal.SIGINT):
        before[ending] = signal.signal(ending, begin_to_end)
    try:
        yield
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
