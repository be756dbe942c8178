# SPDX-License-Identifier: Apache-2.0
"""Retries requests to a server or daemon that is temporarily unavailable."""

from collections.abc import Callable
from typing import TypeVar

from penstock.errors import AnswerTimedOut, TransientError
from penstock.limits import RECONNECT_TRIES_MAX
from penstock.retry import Retry

# The caller waits for the answer, so the pauses are few and short: about 0.7 seconds in total.
TRIES_WHILE_WAITING = 4
# A stream can wait longer than a caller.
STREAM_TRIES = RECONNECT_TRIES_MAX
# The pauses while a caller waits are too short to be logged.
_QUIET_SECONDS = 1.0

_Answer = TypeVar("_Answer")


def ask_again(
    question: Callable[[], _Answer], hang_up: Callable[[], None], tries: int = TRIES_WHILE_WAITING
) -> _Answer:
    """Call `question` and return its answer. After each TransientError, disconnect, pause and try again, up
    to `tries` times.

    Raises the last TransientError after the last try, and any other error at once. A server that timed out is
    not asked again while a caller waits, because every retry would cost another timeout.
    """
    retry = Retry("asking again", tries=tries, quiet_seconds=_QUIET_SECONDS)
    while True:
        try:
            return question()
        except TransientError as problem:
            hang_up()
            if isinstance(problem, AnswerTimedOut) and retry.failures < TRIES_WHILE_WAITING:
                raise
            retry.wait(problem)
