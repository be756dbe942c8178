# SPDX-License-Identifier: Apache-2.0
"""How long a test waits for an event that must happen.

A machine that runs many servers may pause for seconds. A timeout is therefore only meant to end a test whose
event never happens. Tests do not measure durations; they check counts and the order of events.
"""

import time
from collections.abc import Callable

WAIT_SECONDS_MAX = 120.0
# The pause between two checks grows with the time waited, because a condition may query a server.
PAUSE_SECONDS = 0.01
PAUSE_SECONDS_MAX = 0.05


def wait_until(condition: Callable[[], object], seconds: float = WAIT_SECONDS_MAX) -> float:
    """Wait until a condition holds, and return the number of seconds that took."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < seconds, f"not so within {seconds:g} s"
        time.sleep(min(PAUSE_SECONDS_MAX, max(PAUSE_SECONDS, waited / 10)))
    return time.monotonic() - started


def wait_for_next_second() -> None:
    """Wait until the clock shows another second, because commit times and file names may be whole seconds."""
    second = int(time.time())
    wait_until(lambda: int(time.time()) > second)
