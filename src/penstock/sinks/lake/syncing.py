# SPDX-License-Identifier: Apache-2.0
"""Makes many files and folders of this host durable at once."""

import os
from collections.abc import Iterable

from penstock.sinks.concurrent_calls import call_for_each

# Concurrent syncs share the flushes of the disk's cache and the commits of the file system's journal.
_THREADS_MAX = 16


def sync_paths(paths: Iterable[str]) -> None:
    """Return once the content of files, and the names in folders, are durable. Raises OSError."""
    call_for_each(_sync, paths, _THREADS_MAX)


def _sync(path: str) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
