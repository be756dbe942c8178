# SPDX-License-Identifier: Apache-2.0
"""Chooses shorter timeouts for daemons that recently failed to answer. All clients of one address share this
state.
"""

import math
import threading
import time
from collections.abc import Callable

# A running daemon reports its state quickly, even on a busy machine.
_SECONDS_MIN = 0.5
# The timeout for the next answer, as a fraction of the time for which the daemon has been silent.
_PART = 0.25


class SilentDaemons:
    """The daemons that did not answer in time, by URL. Thread-safe; shared by the clients of one address.

    A frozen host accepts connections but never responds. A client may try such a host again, for example
    because another member of the fleet still names it. If the client waited for the full timeout each time,
    it would learn too late that another member has taken over. The timeout grows with the time since the
    silence began, up to `seconds_max`, so that a slow daemon can still answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds_max: float = math.inf) -> None:
        self._clock = clock
        self._seconds_max = seconds_max
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}

    def seconds(self, url: str, seconds_max: float) -> float:
        """Return how long to wait for an answer of a daemon, up to `seconds_max`."""
        with self._lock:
            since = self._since.get(url)
        if since is None:
            return seconds_max
        return min(seconds_max, self._seconds_max, max(_SECONDS_MIN, _PART * (self._clock() - since)))

    def silent(self, url: str) -> None:
        """Record that a daemon did not answer in time."""
        with self._lock:
            self._since.setdefault(url, self._clock())

    def answered(self, url: str) -> None:
        """Record that a daemon has answered."""
        with self._lock:
            self._since.pop(url, None)
