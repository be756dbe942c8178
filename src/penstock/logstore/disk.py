# SPDX-License-Identifier: Apache-2.0
"""The one place of the log that opens, writes, syncs, renames, removes and lists.

Everything else of the log goes through a `Disk`, so that a test can stop at every step of it. What the
operating system refuses comes out as one of our errors: LogFull, SourceMissing, DiskFailed.
"""

import errno
import fcntl
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from penstock.errors import DiskFailed, LogFull, LogLocked, SourceMissing
from penstock.limits import LOG_SYNC_BYTES_MAX, READ_BYTES

TMP_SUFFIX = ".tmp"

# Anything with the buffer protocol: bytes, a memoryview, what the kernel gathered.
Buffer = Any

# More buffers than this in one writev are refused by Linux.
_BUFFERS_MAX = 1024

# FS_IOC_GETVERSION of linux/fs.h: how often an inode was given away, as ext4, xfs and btrfs count it.
_GET_GENERATION = 0x80087601


class AppendFile(Protocol):
    """A file that only grows at its end, or is cut back there. Positions are counted in bytes."""

    path: Path

    @property
    def size(self) -> int:
        """How many bytes were written, and not cut off again."""

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Add the buffers at the end, all or nothing: a write that fails leaves the size as it was.

        Raises LogFull where there is no room, DiskFailed.
        """

    def truncate(self, size: int) -> None:
        """Cut the file back to so many bytes. Raises DiskFailed."""

    def rewrite(self, start: int) -> None:
        """Write the bytes from a place on once more, as they are, so that the next sync answers for them.

        After a sync that failed, the operating system may hold bytes that the disk does not have, and calls
        them clean. Raises DiskFailed.
        """

    def sync(self) -> None:
        """Wait until the bytes written so far outlast a power failure. Raises DiskFailed."""

    def close(self) -> None:
        """Let go of the file, without a sync."""


class ReadFile(Protocol):
    """A file open for reading at any place, by many threads at once. A context manager that closes."""

    path: Path

    @property
    def size(self) -> int:
        """Its size in bytes now."""

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer where the file ends. Raises DiskFailed."""

    def close(self) -> None:
        """Let go of the file."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""


class Held(Protocol):
    """A lock that is held until it is closed, or the process ends."""

    def close(self) -> None:
        """Give the lock up."""


class Disk(ABC):
    """Files and folders, by absolute path.

    Every method raises SourceMissing where a file it needs is not there, LogFull where there is no room,
    and DiskFailed for anything else that the operating system refuses.
    """

    @abstractmethod
    def append_open(self, path: Path) -> AppendFile:
        """Open a file to add to its end, and make it where there is none. Nothing is synced by this."""

    @abstractmethod
    def open_read(self, path: Path) -> ReadFile:
        """Open a file for reading."""

    @abstractmethod
    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of what has it. Lasts once the folder is synced."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a file. Lasts once the folder is synced."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Make a folder, and those above it, where they are not there; each lasts when this returns."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove a folder that is empty; one that is not stays."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder outlast a power failure."""

    @abstractmethod
    def list(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; none where there is no folder."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """Tell whether there is such a file or folder."""

    @abstractmethod
    def size(self, path: Path) -> int:
        """Return a file's size in bytes."""

    @abstractmethod
    def free_bytes(self, folder: Path) -> int:
        """Return how many bytes may still be written below a folder."""

    @abstractmethod
    def lock(self, path: Path) -> Held:
        """Take the lock that a file stands for, or raise LogLocked where another process has it."""

    def folder_identity(self, folder: Path) -> str:
        """Return what tells a folder from every copy of it, and outlasts restarts; "" where nothing does."""
        return ""

    def read(self, path: Path, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of [start, stop) of a file, to its end by default."""
        with self.open_read(path) as file:
            return file.read(start, file.size if stop is None else stop)

    def write_atomic(self, path: Path, content: bytes) -> None:
        """Put a file in place whole: after a crash it holds the old content or the new, never a part."""
        tmp = path.with_name(path.name + TMP_SUFFIX)
        file = self.append_open(tmp)
        try:
            file.truncate(0)
            file.write([content])
            file.sync()
        finally:
            file.close()
        self.rename(tmp, path)
        self.sync_folder(path.parent)


def refuse(problem: OSError, doing: str, path: Path) -> NoReturn:
    """Raise the error of ours that a refusal of the operating system means."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        raise LogFull(
            f"there is no room left for {path}",
            hint="Make room, or keep less: penstock log list shows what is kept",
        ) from problem
    if problem.errno in (errno.ENOENT, errno.ENOTDIR):
        raise SourceMissing(f"there is no {path}") from problem
    _fail(doing, path, problem)


def _fail(doing: str, path: Path, problem: OSError) -> NoReturn:
    raise DiskFailed(
        f"{doing} {path} failed: {problem.strerror or problem}",
        hint=f"Check the disk and who owns it: ls -l {path.parent}; dmesg",
    ) from problem


@contextmanager
def _refusals(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        refuse(problem, doing, path)


class LocalDisk(Disk):
    """The file system of this host."""

    def append_open(self, path: Path) -> "LocalAppendFile":
        """Open a file to add to its end."""
        with _refusals("opening", path):
            return LocalAppendFile(path)

    def open_read(self, path: Path) -> "LocalReadFile":
        """Open a file for reading."""
        with _refusals("opening", path):
            return LocalReadFile(path)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name."""
        with _refusals("renaming", old):
            old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        with _refusals("removing", path):
            path.unlink()

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it, and sync each one's parent."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        with _refusals("making", path):
            path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder that is empty."""
        try:
            path.rmdir()
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                refuse(problem, "removing", path)

    def sync_folder(self, path: Path) -> None:
        """Sync the names in a folder."""
        with _refusals("syncing", path):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def list(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as problem:
            refuse(problem, "listing", folder)

    def exists(self, path: Path) -> bool:
        """Tell whether there is such a file or folder."""
        return path.exists()

    def size(self, path: Path) -> int:
        """Return a file's size."""
        with _refusals("looking at", path):
            return path.stat().st_size

    def free_bytes(self, folder: Path) -> int:
        """Return what an ordinary account may still write."""
        with _refusals("looking at", folder):
            room = os.statvfs(folder)
            return room.f_bavail * room.f_frsize

    def folder_identity(self, folder: Path) -> str:
        """Return the folder's inode with its generation; with the file system's id where it has none.

        A block-level clone of the file system has the same ones.
        """
        with _refusals("looking at", folder):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                inode = os.fstat(descriptor).st_ino
                generation = bytearray(8)
                try:
                    fcntl.ioctl(descriptor, _GET_GENERATION, generation)
                except OSError:
                    # Not every file system counts how often an inode was given away.
                    return f"{inode}-{os.fstatvfs(descriptor).f_fsid:x}"
                return f"{inode}:{int.from_bytes(generation[:4], sys.byteorder)}"
            finally:
                os.close(descriptor)

    def lock(self, path: Path) -> "LocalLock":
        """Take the lock."""
        with _refusals("locking", path):
            return LocalLock(path)


class LocalAppendFile:
    """A local file that grows at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._size = os.lseek(self._file, 0, os.SEEK_END)
        self._synced = self._size

    @property
    def size(self) -> int:
        """How many bytes were written, and not cut off again."""
        return self._size

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Add the buffers at the end, all or nothing."""
        left = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
        place = self._size
        try:
            while left:
                written = os.pwritev(self._file, left[:_BUFFERS_MAX], place)
                place += written
                left = _after(left, written)
        except OSError as problem:
            # What came before the failure is no whole append: nobody may ever read it.
            self.truncate(self._size)
            refuse(problem, "writing", self.path)
        self._size = place

    def truncate(self, size: int) -> None:
        """Cut the file back."""
        with _refusals("cutting", self.path):
            os.ftruncate(self._file, size)
        self._size = size
        self._synced = min(self._synced, size)

    def rewrite(self, start: int) -> None:
        """Write the bytes from a place on once more."""
        with _refusals("writing", self.path):
            while start < self._size and (
                piece := os.pread(self._file, min(READ_BYTES, self._size - start), start)
            ):
                start += os.pwrite(self._file, piece, start)

    def sync(self) -> None:
        """Sync content and size. Of a large piece the page cache keeps nothing: see LOG_SYNC_BYTES_MAX."""
        start, end = self._synced, self._size
        try:
            os.fdatasync(self._file)
        except OSError as problem:
            # Also for want of room: what was written is gone, and no later sync would say so.
            _fail("syncing", self.path, problem)
        with _refusals("syncing", self.path):
            if end - start >= LOG_SYNC_BYTES_MAX // 2:
                os.posix_fadvise(self._file, start, end - start, os.POSIX_FADV_DONTNEED)
        self._synced = end

    def close(self) -> None:
        """Close, once."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _after(views: list[memoryview], written: int) -> list[memoryview]:
    """Return what is left of the buffers behind the bytes already written."""
    for index, view in enumerate(views):
        if written < view.nbytes:
            return [view[written:], *views[index + 1 :]]
        written -= view.nbytes
    return []


class LocalReadFile:
    """A local file open for reading; `pread` needs no lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        """Its size now."""
        return os.fstat(self._file).st_size

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer where the file ends."""
        with _refusals("reading", self.path):
            piece = os.pread(self._file, max(stop - start, 0), start)
            if len(piece) == stop - start or not piece:
                return piece
            # One pread gives at most 2 GiB, and a network file system may give less than was asked for.
            pieces = [piece]
            start += len(piece)
            while start < stop and (piece := os.pread(self._file, stop - start, start)):
                pieces.append(piece)
                start += len(piece)
            return b"".join(pieces)

    def close(self) -> None:
        """Close, once."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalLock:
    """An flock: the operating system gives it up when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            self._take(path)
        except BaseException:
            # What nobody owns would hold the lock against ourselves.
            self.close()
            raise

    def _take(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip()
            raise LogLocked(
                f"process {holder or 'unknown'} writes the log in {path.parent}",
                hint="One process writes a log. Stop the other one, or name another folder",
            ) from problem
        # Without it the lock holds as well: it only tells others who has it, and a full disk has no room.
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode("ascii"), 0)

    def close(self) -> None:
        """Give the lock up, once."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
