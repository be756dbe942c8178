# SPDX-License-Identifier: Apache-2.0
"""The listeners' thread pools, one per kind of work, so that no kind of work waits for another.

pool            work                                            duration
decoding        the pieces that followers wait for              milliseconds
searching       lookups by time, GTID set or position           seconds in a long or tiered log
reading         raw bytes for `/bytes`                          a read from a disk or a store
definitions     a table's definition, which may be pending      up to DEFINITION_WAIT_SECONDS
compiling       patterns and conditions of a request            milliseconds
reporting       metrics, health, the conditions of alerts       up to the coordination store's timeout
delivering      alerts and metrics sent to other services       as long as the receiver takes
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")

# Decoding mostly releases the GIL, so more threads than cores would not help.
_DECODING_THREADS = 2
# Searches and reads mostly wait for a disk or a store.
_SEARCHING_THREADS = 4
_READING_THREADS = 16
_DEFINITION_THREADS = 16
# Compiling holds the GIL, so more threads would only take turns.
_COMPILING_THREADS = 2
# With two threads, a scrape that waits for the coordination store does not delay the check for alerts.
_REPORTING_THREADS = 2
# One thread delivers alerts, the other pushes metrics.
_DELIVERING_THREADS = 2


# Whether the search that runs in this thread was abandoned; None in a thread that runs no search.
_ABANDONED: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


def _pool(threads: int, name: str) -> Executor:
    return ThreadPoolExecutor(threads, thread_name_prefix=name)


@dataclass(frozen=True)
class Threads:
    """The thread pools, one for each kind of work."""

    decoding: Executor = field(default_factory=lambda: _pool(_DECODING_THREADS, "decode"))
    searching: Executor = field(default_factory=lambda: _pool(_SEARCHING_THREADS, "search"))
    reading: Executor = field(default_factory=lambda: _pool(_READING_THREADS, "read"))
    definitions: Executor = field(default_factory=lambda: _pool(_DEFINITION_THREADS, "definitions"))
    compiling: Executor = field(default_factory=lambda: _pool(_COMPILING_THREADS, "compile"))
    reporting: Executor = field(default_factory=lambda: _pool(_REPORTING_THREADS, "report"))
    delivering: Executor = field(default_factory=lambda: _pool(_DELIVERING_THREADS, "deliver"))

    async def search(self, work: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Run work that may read a large part of a log. The work runs in a thread for which no follower
        waits.

        If the caller is cancelled, the work ends before its next read of the log: see `prove_wanted`.
        """
        abandoned = threading.Event()

        def run() -> _Answer:
            token = _ABANDONED.set(abandoned)
            try:
                return work(*arguments)
            finally:
                _ABANDONED.reset(token)

        try:
            return await run_in(self.searching, run)
        finally:
            abandoned.set()


async def run_in(pool: Executor, work: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """Run blocking work in a thread of a pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)


def prove_wanted() -> None:
    """Raise CancelledError in the thread of a search whose caller no longer waits."""
    abandoned = _ABANDONED.get()
    if abandoned is not None and abandoned.is_set():
        raise CancelledError
