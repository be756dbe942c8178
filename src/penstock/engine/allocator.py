# SPDX-License-Identifier: Apache-2.0
"""Makes allocators return freed memory to the system."""

import ctypes
import os
from functools import cache

import pyarrow

# The parameter of mallopt(3) in glibc for the size above which buffers are mapped. A mapped buffer is
# unmapped when it is freed.
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES_MIN = 1 << 20


@cache
def return_large_buffers() -> bool:
    """From now on, make this process return large buffers to the system as soon as they are freed. Return
    whether this was possible.

    By default, glibc raises its threshold to the largest buffer that was freed, up to 32 MiB. Later buffers
    come from per-thread heaps. A small allocation that is still in use keeps its heap from shrinking, so a
    process that decodes batches would use twice the memory that its rows need. A threshold set in the
    environment is left unchanged. Other C libraries have no such threshold.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN))
    except (OSError, TypeError, AttributeError):
        return False


def return_unused_memory() -> None:
    """Return to the system what this process has freed but still holds.

    Arrow's allocator and glibc keep freed memory for later use. Each worker of Spark would keep its own,
    although the workers take turns. Takes a few milliseconds.
    """
    pyarrow.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
