# SPDX-License-Identifier: Apache-2.0
"""Notifications of new data in a log, from capture threads to tasks of the event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Arrivals:
    """Wakes tasks of the event loop when a thread publishes new data.

    Any thread may call `arrived`. The call is cheap while no task is waiting.
    """

    def __init__(self) -> None:
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._numbers: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        # Instances whose waiting tasks the loop will wake in its next turn.
        self._due: set[str] = set()
        self.closing = False

    def arrived(self, instance: str) -> None:
        """Wake all tasks that wait for an instance."""
        self._numbers[instance] = self._numbers.get(instance, 0) + 1
        loop = self._loop
        # A closed loop has no waiting tasks.
        if loop is not None and self._waiters.get(instance) and not loop.is_closed():
            if instance in self._due:
                return
            self._due.add(instance)
            loop.call_soon_threadsafe(self._wake, instance)

    def number(self, instance: str) -> int:
        """Return a number that changes with every arrival, so that a caller can detect new data without
        waiting.
        """
        return self._numbers.get(instance, 0)

    def close(self) -> None:
        """Stop all waiting. Called in the event loop."""
        self.closing = True
        for instance in list(self._waiters):
            self._wake(instance)

    @contextmanager
    def waiting(self, instance: str) -> Iterator[asyncio.Event]:
        """Return an event that the next arrival sets. Check for new data only inside the block, then wait."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._due.clear()
        event = asyncio.Event()
        self._waiters.setdefault(instance, set()).add(event)
        try:
            yield event
        finally:
            self._waiters[instance].discard(event)

    def _wake(self, instance: str) -> None:
        # Discard the instance before its tasks are woken, so that a later arrival schedules another call.
        self._due.discard(instance)
        for event in self._waiters.get(instance, ()):
            event.set()
