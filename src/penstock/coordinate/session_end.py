# SPDX-License-Identifier: Apache-2.0
"""The end of a session, which comes once: by its owner, or by a loss that others are told of."""

import threading
from collections.abc import Callable


class SessionEnd:
    """Whether a session has ended, and who is to be told of its loss. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._was_lost = False
        self._lost: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """True from the end on."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most so long; tell whether it has come."""
        return self._ended.wait(seconds)

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Call this once when the session is lost; at once if it was."""
        with self._lock:
            if not self.ended:
                self._lost.append(lost)
                return
            call_now = self._was_lost
        if call_now:
            lost()

    def end(self, lost: bool) -> bool:
        """End the session; return False where it had ended before.

        Whoever is told of a loss is told in this thread.
        """
        with self._lock:
            if self.ended:
                return False
            self._was_lost = lost
            told = self._lost if lost else []
            self._lost = []
            self._ended.set()
        for callback in told:
            callback()
        return True
