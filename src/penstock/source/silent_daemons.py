# SPDX-License-Identifier: Apache-2.0
"""How long the clients of one address wait for daemons that have been silent."""

import threading
import time
from collections.abc import Callable

# A daemon that runs says quickly what it has, also on a busy machine most of the time.
_SECONDS_MIN = 0.5
# The part of its silence up to now that one more answer is waited for.
_PART = 0.25


class SilentDaemons:
    """Daemons without an answer in time, by URL. Thread-safe; shared by the clients of one address.

    A frozen host accepts connections and answers nothing. A client that waits for it the full time again, be
    it because another member of the fleet still names it, finds out late that another member has taken over.
    The wait grows with the time since the silence began, so that a slow daemon is heard again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}

    def seconds(self, url: str, seconds_max: float) -> float:
        """Return how long to wait for an answer of a daemon, up to `seconds_max`."""
        with self._lock:
            since = self._since.get(url)
        if since is None:
            return seconds_max
        return min(seconds_max, max(_SECONDS_MIN, _PART * (self._clock() - since)))

    def silent(self, url: str) -> None:
        """Note that a daemon did not answer in time."""
        with self._lock:
            self._since.setdefault(url, self._clock())

    def answered(self, url: str) -> None:
        """Note that a daemon has answered."""
        with self._lock:
            self._since.pop(url, None)
