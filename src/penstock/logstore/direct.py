# SPDX-License-Identifier: Apache-2.0
"""Direct writes: large pieces of a file, past the page cache.

A write through the page cache copies the bytes, and later frees the pages again. That takes several times
as much CPU time as a write that the disk reads from the caller's memory. Linux accepts such a write if its
offset and size are whole blocks, and if its memory is aligned like them.
"""

import errno
import os
import time
from pathlib import Path

from penstock.closing import Closing
from penstock.limits import (
    DIRECT_BYTES_MIN,
    DIRECT_BYTES_PER_SECOND_MIN,
    DIRECT_PAUSE_BYTES,
    DISK_BLOCK_BYTES,
)

# 0 where the system has no such flag.
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def whole_blocks(offset: int, size: int) -> tuple[int, int]:
    """Return where the whole blocks of a piece start and stop in the piece, which goes to a file's offset."""
    stop = (offset + size) // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES - offset
    return min(-offset % DISK_BLOCK_BYTES, size), max(stop, 0)


class DirectWriter(Closing):
    """Writes whole blocks of one file directly. Not thread-safe.

    A slow disk would make the caller wait for each write, so it gets none for the next DIRECT_PAUSE_BYTES:
    the page cache absorbs what arrives faster than the disk can write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._is_supported = bool(_O_DIRECT)
        self._paused_until = 0

    def accepts(self, offset: int, size: int) -> bool:
        """Return whether a piece of this size at this offset is worth a direct write."""
        return self._is_supported and size >= DIRECT_BYTES_MIN and offset >= self._paused_until

    def write(self, blocks: memoryview, offset: int) -> int:
        """Write whole blocks and return the number of bytes written.

        Returns 0 if the file system has no direct writes, or if the memory is not aligned. Raises OSError.
        """
        began = time.monotonic()
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | _O_DIRECT)
            written = os.pwrite(self._file, blocks, offset)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            # The open fails with this error if the file system has no direct writes.
            self._is_supported = self._file >= 0
            return 0
        if written < (time.monotonic() - began) * DIRECT_BYTES_PER_SECOND_MIN:
            self._paused_until = offset + DIRECT_PAUSE_BYTES
        return written

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
