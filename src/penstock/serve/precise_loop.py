# SPDX-License-Identifier: Apache-2.0
"""An event loop whose short timers end on time.

epoll counts milliseconds and rounds up, so a pause of a tenth of a millisecond would take a whole one.
Followers at the head of a log make such pauses all the time: see `Pieces`.
"""

import asyncio
import select
import selectors
import sys

# Rounding matters for shorter timeouts only.
_PRECISE_SECONDS_MAX = 0.005
# select(2) accepts no higher descriptors.
_DESCRIPTORS_MAX = 1024

if sys.platform == "linux":

    class _PreciseSelector(selectors.EpollSelector):
        """Waits in `select`, which counts microseconds, for an event of any registered descriptor."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and 0 < timeout < _PRECISE_SECONDS_MAX:
                descriptor = self.fileno()
                if descriptor < _DESCRIPTORS_MAX:
                    ready, _, _ = select.select([descriptor], [], [], timeout)
                    if not ready:
                        return []
                    timeout = 0
            return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop, with precise timers if the system has them."""
    if sys.platform == "linux":
        return asyncio.SelectorEventLoop(_PreciseSelector())
    return asyncio.new_event_loop()
