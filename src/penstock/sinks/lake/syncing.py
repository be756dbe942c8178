# SPDX-License-Identifier: Apache-2.0
"""Makes many files and folders of this host durable at once."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

# Concurrent syncs share the flushes of the disk's cache and the commits of the file system's journal.
_THREADS_MAX = 16


def sync_paths(paths: Iterable[str]) -> None:
    """Return once the content of files, and the names in folders, are durable. Raises OSError."""
    waiting = list(paths)
    threads = min(_THREADS_MAX, len(waiting))
    if threads < 2:
        _sync(waiting)
        return
    with ThreadPoolExecutor(threads, "sync") as pool:
        for _ in pool.map(_sync, [waiting[first::threads] for first in range(threads)]):
            continue


def _sync(paths: Iterable[str]) -> None:
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
