# SPDX-License-Identifier: Apache-2.0
"""How long a test waits for what must come at last.

A machine that runs many servers at once may stand still for seconds. A bound on waiting is there to end a run
in which something never comes, not to measure: what a test says of time it says by counts and by order.
"""

import time
from collections.abc import Callable

WAIT_SECONDS_MAX = 120.0
PAUSE_SECONDS = 0.01


def wait_until(condition: Callable[[], object], seconds: float = WAIT_SECONDS_MAX) -> float:
    """Wait until a condition holds, and return how many seconds that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds, f"not so within {seconds:g} s"
        time.sleep(PAUSE_SECONDS)
    return time.monotonic() - started


def wait_for_next_second() -> None:
    """Wait until the clock shows another second: commit times and names of files may be whole seconds."""
    second = int(time.time())
    wait_until(lambda: int(time.time()) > second)
