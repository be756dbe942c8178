# SPDX-License-Identifier: Apache-2.0
"""Pages that are sent while their values arrive. Each one occupies a thread, so their number is limited."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import PenstockError, QuotaReached
from penstock.serve.problems import problem_body

# The web server has 40 threads, and the other pages need some of them.
STREAMS_MAX = 12


class Streams:
    """The streams of a console. Thread-safe."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(STREAMS_MAX)

    def limited(self, read: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        """Yield the parts that `read` returns. An error becomes the last part, because the page has begun
        already.
        """
        if not self._free.acquire(blocking=False):
            problem = QuotaReached(
                "too many people follow changes or search the log", hint="Close a page, or try again later"
            )
            yield {"kind": "problem", **problem_body(problem)}
            return
        try:
            yield from read()
        except PenstockError as problem:
            yield {"kind": "problem", **problem_body(problem)}
        finally:
            # This also runs if the browser has disconnected and the page is no longer read.
            self._free.release()
