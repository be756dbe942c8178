# SPDX-License-Identifier: Apache-2.0
"""A disk in memory with a size limit.

Its content is lost when the process ends, and syncs have no effect.
"""

import threading
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from penstock.closing import Closing
from penstock.errors import LogFull, LogLocked, SourceMissing
from penstock.logstore.disk import Buffer, Disk

# Smaller buffers are copied: a view would keep the whole received chunk alive.
_COPY_BYTES_MAX = 64 * 1024
# The overhead of a buffer.
_OVERHEAD_BYTES = 512


class _Content:
    """One file: its buffers, and the offset where each of them starts."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.starts: list[int] = []
        self.size = 0

    @property
    def cost(self) -> int:
        return self.size + _OVERHEAD_BYTES * (len(self.buffers) + 1)


class MemoryDisk(Disk):
    """Files in memory that use at most `room` bytes, including overhead. Safe for concurrent use."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._lock = threading.RLock()
        self._files: dict[Path, _Content] = {}
        self._folders: set[Path] = {Path("/")}
        self._locked: set[Path] = set()
        self._used = 0

    def append_open(self, path: Path) -> "MemoryAppendFile":
        """Open a file for appending."""
        with self._lock:
            if path.parent not in self._folders:
                raise SourceMissing(f"there is no {path.parent}")
            if path not in self._files:
                self._charge(_OVERHEAD_BYTES, path)
                self._files[path] = _Content()
            return MemoryAppendFile(self, path, self._files[path])

    def open_read(self, path: Path) -> "MemoryReadFile":
        """Open a file for reading. It stays readable after it is removed."""
        with self._lock:
            return MemoryReadFile(self, path, self._existing(path))

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file."""
        with self._lock:
            content = self._existing(old)
            replaced = self._files.get(new)
            del self._files[old]
            self._files[new] = content
            self._used -= replaced.cost if replaced is not None else 0

    def remove(self, path: Path) -> None:
        """Remove a file."""
        with self._lock:
            self._used -= self._existing(path).cost
            del self._files[path]

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        with self._lock:
            self._folders.update((path, *path.parents))

    def remove_folder(self, path: Path) -> None:
        """Remove a folder if it is empty."""
        with self._lock:
            if not any(file.parent == path for file in self._files):
                self._folders.discard(path)

    def sync_folder(self, path: Path) -> None:
        """Do nothing: memory does not survive a power failure."""

    def list(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted."""
        with self._lock:
            names = {path.name for path in (*self._files, *self._folders) if path.parent == folder != path}
        return sorted(names)

    def exists(self, path: Path) -> bool:
        """Return whether a file or folder exists."""
        with self._lock:
            return path in self._files or path in self._folders

    def size(self, path: Path) -> int:
        """Return a file's size."""
        with self._lock:
            return self._existing(path).size

    def free_bytes(self, folder: Path) -> int:
        """Return the bytes that can still be written."""
        return self.room - self._used

    def lock(self, path: Path) -> "MemoryLock":
        """Acquire a lock. Only this process can hold it."""
        with self._lock:
            if path in self._locked:
                raise LogLocked(
                    f"this process writes the log in {path.parent} already",
                    hint="Close that log, or name another folder",
                )
            self._locked.add(path)
            return MemoryLock(self, path)

    # --- Inside -----------------------------------------------------------------------------

    def _existing(self, path: Path) -> _Content:
        content = self._files.get(path)
        if content is None:
            raise SourceMissing(f"there is no {path}")
        return content

    def _charge(self, cost: int, path: Path) -> None:
        if self._used + cost > self.room:
            raise LogFull(
                f"memory for {self.room} bytes of the log has no room left for {path.name}",
                hint="Let readers go on, raise log.memory_bytes, or keep files: log.mode mixed",
            )
        self._used += cost

    def _append(self, path: Path, content: _Content, buffers: Sequence[Buffer]) -> None:
        views = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
        with self._lock:
            cost = sum(view.nbytes + _OVERHEAD_BYTES for view in views)
            if self._files.get(path) is content:
                self._charge(cost, path)
            for view in views:
                small = view.nbytes < _COPY_BYTES_MAX
                content.starts.append(content.size)
                content.buffers.append(memoryview(bytes(view)) if small else view)
                content.size += view.nbytes

    def _truncate(self, path: Path, content: _Content, size: int) -> None:
        with self._lock:
            before = content.cost
            kept = bisect_right(content.starts, size - 1)
            del content.buffers[kept:], content.starts[kept:]
            if kept:
                content.buffers[-1] = content.buffers[-1][: size - content.starts[-1]]
            content.size = size
            if self._files.get(path) is content:
                self._used -= before - content.cost

    def _read(self, content: _Content, start: int, stop: int) -> bytes:
        with self._lock:
            pieces = []
            index = max(bisect_right(content.starts, start) - 1, 0)
            while start < min(stop, content.size):
                begins = content.starts[index]
                piece = content.buffers[index][start - begins : stop - begins]
                pieces.append(piece)
                start += piece.nbytes
                index += 1
        return b"".join(pieces)

    def _unlock(self, path: Path) -> None:
        with self._lock:
            self._locked.discard(path)


class MemoryAppendFile:
    """An append-only file in memory."""

    def __init__(self, disk: MemoryDisk, path: Path, content: _Content) -> None:
        self.path = path
        self._disk = disk
        self._content = content

    @property
    def size(self) -> int:
        """The current size in bytes, after any truncation."""
        return self._content.size

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers, all or nothing.

        Large buffers are kept without a copy, so they must not change.
        """
        self._disk._append(self.path, self._content, buffers)

    def truncate(self, size: int) -> None:
        """Truncate the file."""
        self._disk._truncate(self.path, self._content, size)

    def rewrite(self, start: int) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class MemoryReadFile(Closing):
    """A file in memory open for reading."""

    def __init__(self, disk: MemoryDisk, path: Path, content: _Content) -> None:
        self.path = path
        self._disk = disk
        self._content = content

    @property
    def size(self) -> int:
        """The current size in bytes."""
        return self._content.size

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer at the end of the file."""
        return self._disk._read(self._content, start, stop)

    def close(self) -> None:
        """Do nothing."""


class MemoryLock:
    """A lock within this process."""

    def __init__(self, disk: MemoryDisk, path: Path) -> None:
        self._disk = disk
        self._path = path

    @property
    def in_place(self) -> bool:
        """Always True: no other process can remove files in memory."""
        return True

    def close(self) -> None:
        """Release the lock."""
        self._disk._unlock(self._path)
