# SPDX-License-Identifier: Apache-2.0
"""Calls that wait for a disk, an object store or a server, several at once."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Subject = TypeVar("Subject")
_NO_MORE: Any = object()


def call_for_each(
    function: Callable[[Subject], object], subjects: Iterable[Subject], threads_max: int
) -> None:
    """Call a function for each subject, in `threads_max` threads.

    After an error no further call begins. The error is raised once all calls have ended.
    """
    waiting = list(subjects)
    threads = min(threads_max, len(waiting))
    if threads < 2:
        for subject in waiting:
            function(subject)
        return
    following, lock = iter(waiting), threading.Lock()
    has_failed = threading.Event()

    def run_calls() -> None:
        try:
            while not has_failed.is_set():
                with lock:
                    subject = next(following, _NO_MORE)
                if subject is _NO_MORE:
                    return
                function(subject)
        except BaseException:
            has_failed.set()
            raise

    with ThreadPoolExecutor(threads, "calls") as pool:
        runs = [pool.submit(run_calls) for _ in range(threads)]
    for run in runs:
        run.result()
