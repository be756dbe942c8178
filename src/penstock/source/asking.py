# SPDX-License-Identifier: Apache-2.0
"""Retries of requests to a server or daemon that is temporarily unavailable."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from penstock.errors import AnswerTimedOut, TransientError
from penstock.limits import RECONNECT_PAUSE_SECONDS_FIRST, RECONNECT_PAUSE_SECONDS_MAX, RECONNECT_TRIES_MAX

# The caller is waiting for the answer, so there are few pauses and they are short.
PAUSES_WHILE_WAITING_SECONDS = (0.1, 0.2, 0.4)
# A stream can wait longer: its pauses double up to a maximum.
STREAM_PAUSES_SECONDS = tuple(
    min(RECONNECT_PAUSE_SECONDS_FIRST * 2**tries, RECONNECT_PAUSE_SECONDS_MAX)
    for tries in range(RECONNECT_TRIES_MAX)
)

_Answer = TypeVar("_Answer")
_log = structlog.get_logger(__name__)


def ask_again(
    question: Callable[[], _Answer],
    hang_up: Callable[[], None],
    pauses_seconds: Iterable[float] = PAUSES_WHILE_WAITING_SECONDS,
) -> _Answer:
    """Return the answer. After each TransientError disconnect, pause and retry, once per pause.

    Raises the last TransientError after the last pause, and any other error at once. While a caller waits, a
    server that timed out is not asked again: every retry would cost another timeout.
    """
    for pause in (*pauses_seconds, None):
        try:
            return question()
        except TransientError as problem:
            hang_up()
            hangs = isinstance(problem, AnswerTimedOut)
            if pause is None or (hangs and pause <= PAUSES_WHILE_WAITING_SECONDS[-1]):
                raise
            if pause > PAUSES_WHILE_WAITING_SECONDS[-1]:
                # Shorter pauses end before anybody could read about them.
                _log.warning("asking again", why=str(problem), after_seconds=pause)
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")
