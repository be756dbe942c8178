# SPDX-License-Identifier: Apache-2.0
"""Retries with exponential backoff, full jitter, limits, and one log line each.

With full jitter, each pause is drawn between zero and a bound that doubles with every retry, so that clients
that lost the same server do not reconnect at the same time. The mean pause is therefore half of the bound.
"""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from penstock.errors import TransientError
from penstock.limits import RECONNECT_PAUSE_SECONDS_FIRST, RECONNECT_PAUSE_SECONDS_MAX

_Answer = TypeVar("_Answer")
_log = structlog.get_logger(__name__)

# A float overflows after about a thousand doublings. The longest pause is always reached after far fewer.
_DOUBLINGS_MAX = 64


@dataclass(frozen=True)
class Backoff:
    """The pauses between tries, in seconds. The upper limit of a pause doubles from `first` to `longest`."""

    first: float = RECONNECT_PAUSE_SECONDS_FIRST
    longest: float = RECONNECT_PAUSE_SECONDS_MAX

    def bound(self, failures: int) -> float:
        """Return the longest pause after a number of failures in a row, 1 or more."""
        return min(self.first * 2.0 ** min(failures - 1, _DOUBLINGS_MAX), self.longest)

    def pause(self, failures: int) -> float:
        """Return a random pause up to the bound."""
        return random.uniform(0.0, self.bound(failures))


RECONNECT = Backoff()


class Retry:
    """Counts the consecutive failures of one operation, and pauses between its tries. Used by one thread or
    task.

    `event` is the message of the log line. A failure is raised after `tries` pauses, or once `seconds` have
    passed since the first failure. Without these limits, failures are never raised. The last pause is
    shortened so that it ends at the time limit. If several `peers` are tried in turn, only a complete round
    of all peers counts as a try and is followed by a pause. Once `stop` is set, pauses end immediately.
    `report` is called with each failure before its pause. A pause of at most `quiet_seconds` is not logged.
    """

    def __init__(
        self,
        event: str,
        *,
        backoff: Backoff = RECONNECT,
        tries: int | None = None,
        seconds: float | None = None,
        peers: int = 1,
        stop: threading.Event | None = None,
        report: Callable[[Exception], None] | None = None,
        quiet_seconds: float = -1.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = 0
        self.tries = tries
        self._event = event
        self._backoff = backoff
        self._seconds = seconds
        self._peers = peers
        self._stop = stop
        self._report = report
        self._quiet_seconds = quiet_seconds
        self._sleep = sleep
        self._clock = clock
        self._since: float | None = None

    def start(self) -> None:
        """Count the time from now on instead of from the first failure."""
        self._since = self._clock()

    def succeeded(self) -> None:
        """Reset the failures after progress."""
        self.failures, self._since = 0, None

    def wait(self, problem: Exception, *, weight: int = 1, at_least: float = 0.0, **fields: object) -> None:
        """Pause before the next try. Raises the problem if no try is left.

        `weight` is the number of failures that this failure counts as. `at_least` is the shortest pause in
        seconds, as requested by the peer. `fields` are added to the log line.
        """
        seconds = self._next_pause(problem, weight, at_least, fields)
        if self._stop is None:
            self._sleep(seconds)
        else:
            self._stop.wait(seconds)

    async def wait_async(self, problem: Exception, **fields: object) -> None:
        """Pause like `wait`, without blocking the event loop."""
        await asyncio.sleep(self._next_pause(problem, 1, 0.0, fields))

    def run(self, attempt: Callable[[], _Answer], retried: type[Exception] = TransientError) -> _Answer:
        """Return the answer of the first try that succeeds, otherwise raise the last error.

        An error that is not `retried` is raised at once, and so is any error after `stop` is set."""
        while True:
            try:
                answer = attempt()
            except retried as problem:
                self.wait(problem)
                if self._stop is not None and self._stop.is_set():
                    raise
            else:
                self.succeeded()
                return answer

    async def run_async(self, attempt: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Return the answer like `run`, without blocking the event loop."""
        while True:
            try:
                answer = await attempt()
            except TransientError as problem:
                await self.wait_async(problem)
            else:
                self.succeeded()
                return answer

    def _next_pause(
        self, problem: Exception, weight: int, at_least: float, fields: dict[str, object]
    ) -> float:
        failures_before = self.failures
        self.failures += weight
        # Raise the problem only after the last round has tried every peer.
        if self.tries is not None and self.failures >= (self.tries + 1) * self._peers:
            raise problem
        pause = at_least
        if self.failures % self._peers == 0:
            pause = max(pause, self._backoff.pause(failures_before // self._peers + 1))
        if self._seconds is not None:
            now = self._clock()
            self._since = now if self._since is None else self._since
            left = self._since + self._seconds - now
            if left <= 0 or at_least > left:
                raise problem
            pause = min(pause, left)
        if pause > self._quiet_seconds:
            _log.warning(self._event, why=str(problem), after_seconds=round(pause, 3), **fields)
        if self._report is not None:
            self._report(problem)
        return pause
