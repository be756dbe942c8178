# SPDX-License-Identifier: Apache-2.0
"""A question to a server or a daemon, asked again while it is away."""

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from penstock.errors import AnswerTimedOut, TransientError
from penstock.limits import RECONNECT_PAUSE_SECONDS_FIRST, RECONNECT_PAUSE_SECONDS_MAX, RECONNECT_TRIES_MAX

# Somebody waits for the answer, so the pauses are short and few.
PAUSES_WAITED_FOR_SECONDS = (0.1, 0.2, 0.4)
# A stream has time: the pauses double up to the longest.
PAUSES_OF_A_STREAM_SECONDS = tuple(
    min(RECONNECT_PAUSE_SECONDS_FIRST * 2**tries, RECONNECT_PAUSE_SECONDS_MAX)
    for tries in range(RECONNECT_TRIES_MAX)
)

_Answer = TypeVar("_Answer")
_log = structlog.get_logger(__name__)


def ask_again(
    question: Callable[[], _Answer],
    hang_up: Callable[[], None],
    pauses_seconds: Iterable[float] = PAUSES_WAITED_FOR_SECONDS,
) -> _Answer:
    """Return the answer. After a TransientError hang up, pause and ask again, once for each pause.

    Raises the last TransientError after the last pause, and every other error at once. A server that hangs is
    not asked again while somebody waits: each further question would cost another timeout.
    """
    for pause in (*pauses_seconds, None):
        try:
            return question()
        except TransientError as problem:
            hang_up()
            hangs = isinstance(problem, AnswerTimedOut)
            if pause is None or (hangs and pause <= PAUSES_WAITED_FOR_SECONDS[-1]):
                raise
            if pause > PAUSES_WAITED_FOR_SECONDS[-1]:
                # Shorter ones are over before anybody has read of them.
                _log.warning("asking again", why=str(problem), after_seconds=pause)
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")
