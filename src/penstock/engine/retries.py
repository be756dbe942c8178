# SPDX-License-Identifier: Apache-2.0
"""How long a run retries what fails, and with what pauses."""

import threading
import time
from collections.abc import Callable

import structlog

from penstock.errors import PenstockError
from penstock.limits import RECONNECT_PAUSE_SECONDS_MAX

_PAUSE_SECONDS_FIRST = 0.5

_log = structlog.get_logger(__name__)


class Retries:
    """Counts the time since something began to fail, up to `seconds`. For one thread.

    Each failure is reported at once: in the log, and to `report`.
    """

    def __init__(
        self, seconds: float, stop: threading.Event, report: Callable[[PenstockError], None]
    ) -> None:
        self._seconds = seconds
        self._stop = stop
        self._report = report
        self._failing_since: float | None = None
        self._pause = _PAUSE_SECONDS_FIRST

    def succeeded(self) -> None:
        """Begin to count anew: what failed works again."""
        self._failing_since = None
        self._pause = _PAUSE_SECONDS_FIRST

    def pause(self, problem: PenstockError) -> None:
        """Wait before the next try, or until the run is stopped; the pause doubles. Raises the problem once
        the time is over."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now + self._pause > self._failing_since + self._seconds:
            raise problem
        _log.warning("trying again", why=str(problem), after_seconds=self._pause)
        self._report(problem)
        self._stop.wait(self._pause)
        self._pause = min(self._pause * 2, RECONNECT_PAUSE_SECONDS_MAX)
