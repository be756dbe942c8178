# SPDX-License-Identifier: Apache-2.0
"""The end of a session, which happens once: closed by its owner, or lost with a notification."""

import threading
from collections.abc import Callable


class SessionEnd:
    """Whether a session has ended, and the callbacks for its loss. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._was_lost = False
        self._lost: list[Callable[[], None]] = []

    @property
    def ended(self) -> bool:
        """Whether the session has ended."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; return whether it has come."""
        return self._ended.wait(seconds)

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Register a callback for the loss of the session; called at once if it was lost."""
        with self._lock:
            if not self.ended:
                self._lost.append(lost)
                return
            call_now = self._was_lost
        if call_now:
            lost()

    def end(self, lost: bool) -> bool:
        """End the session; return False if it had already ended.

        Callbacks for a loss run in this thread.
        """
        with self._lock:
            if self.ended:
                return False
            self._was_lost = lost
            callbacks = self._lost if lost else []
            self._lost = []
            self._ended.set()
        for callback in callbacks:
            callback()
        return True
