# SPDX-License-Identifier: Apache-2.0
"""Waiting for what arrives in a log: threads that capture tell, tasks of the event loop wait."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Arrivals:
    """Wakes those who wait in the event loop when a thread has made something visible.

    `arrived` may be called by any thread, and costs next to nothing while nobody waits.
    """

    def __init__(self) -> None:
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._numbers: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = False

    def arrived(self, instance: str) -> None:
        """Wake everybody who waits for an instance."""
        self._numbers[instance] = self._numbers.get(instance, 0) + 1
        loop = self._loop
        # A loop that has ended has nobody left to wake.
        if loop is not None and self._waiters.get(instance) and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake, instance)

    def number(self, instance: str) -> int:
        """Return what changes whenever something arrives: who has looked for news since need not wait."""
        return self._numbers.get(instance, 0)

    def close(self) -> None:
        """Let nobody wait any longer. Called in the event loop."""
        self.closing = True
        for instance in list(self._waiters):
            self._wake(instance)

    @contextmanager
    def waiting(self, instance: str) -> Iterator[asyncio.Event]:
        """Give an event that is set by whatever arrives from now on: look for news only inside, then wait."""
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._waiters.setdefault(instance, set()).add(event)
        try:
            yield event
        finally:
            self._waiters[instance].discard(event)

    def _wake(self, instance: str) -> None:
        for event in self._waiters.get(instance, ()):
            event.set()
