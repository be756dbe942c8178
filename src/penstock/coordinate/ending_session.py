# SPDX-License-Identifier: Apache-2.0
"""Ends a session exactly once: either its owner closes the session, or the session is lost and its callbacks
run.
"""

import threading
from collections.abc import Callable

from penstock.coordinate.store import Session


class EndingSession(Session):
    """A session that records whether it has ended, and runs the registered callbacks if it is lost.
    Thread-safe.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ending = threading.Lock()
        self._ended = threading.Event()
        self._was_lost = False
        self._lost: list[Callable[[], None]] = []

    @property
    def seconds(self) -> float:
        """How long after its last heartbeat the session ends."""
        return self._seconds

    @property
    def alive(self) -> bool:
        """False once the session has ended."""
        return not self._ended.is_set()

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Register a callback for the loss of the session; called at once if it was lost."""
        with self._ending:
            if self.alive:
                self._lost.append(lost)
                return
            call_now = self._was_lost
        if call_now:
            lost()

    def end(self, lost: bool) -> bool:
        """End the session; return False if it had already ended.

        Callbacks for a loss run in this thread.
        """
        with self._ending:
            if not self.alive:
                return False
            self._was_lost = lost
            callbacks = self._lost if lost else []
            self._lost = []
            self._ended.set()
        for callback in callbacks:
            callback()
        return True
