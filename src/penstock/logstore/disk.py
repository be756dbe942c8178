# SPDX-License-Identifier: Apache-2.0
"""All file system access of the log: open, write, sync, rename, remove and list.

The rest of the log uses a `Disk`, so that tests can inject a fault at every step. Errors of the operating
system are translated to LogFull, SourceMissing and DiskFailed.
"""

import errno
import fcntl
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from penstock.closing import Closing
from penstock.errors import DiskFailed, LogFull, LogLocked, SourceMissing
from penstock.limits import LOG_SYNC_BYTES_MAX, READ_BYTES

TMP_SUFFIX = ".tmp"

# Anything with the buffer protocol: bytes, a memoryview, a buffer of the kernel.
Buffer = Any

# Linux rejects a writev with more buffers than this (IOV_MAX).
_BUFFERS_MAX = 1024

# FS_IOC_GETVERSION of linux/fs.h: the inode generation, counted by ext4, xfs and btrfs on inode reuse.
_GET_GENERATION = 0x80087601


class AppendFile(Protocol):
    """An append-only file that can be truncated. Offsets are in bytes."""

    path: Path

    @property
    def size(self) -> int:
        """The current size in bytes, after any truncation."""

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers, all or nothing: a failed write leaves the size unchanged.

        Raises LogFull if there is no space left, DiskFailed.
        """

    def truncate(self, size: int) -> None:
        """Truncate the file to a size in bytes. Raises DiskFailed."""

    def rewrite(self, start: int) -> None:
        """Rewrite the bytes from an offset on without changing them, so that the next sync covers them.

        After a failed sync, the page cache may hold bytes that never reached the disk but are marked clean.
        Raises DiskFailed.
        """

    def sync(self) -> None:
        """Block until all bytes written so far survive a power failure. Raises DiskFailed."""

    def close(self) -> None:
        """Close the file without syncing it."""


class ReadFile(Protocol):
    """A file open for random-access reads by several threads. As a context manager, it closes itself."""

    path: Path

    @property
    def size(self) -> int:
        """The current size in bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer at the end of the file. Raises DiskFailed."""

    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> Self:
        """Return the file itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""


class Held(Protocol):
    """A lock that stays locked until it is closed or the process ends."""

    @property
    def in_place(self) -> bool:
        """Whether the lock's path still refers to the locked file, which may have been removed or
        replaced.
        """
        ...

    def close(self) -> None:
        """Release the lock."""


class Disk(ABC):
    """Files and folders, by absolute path.

    Every method raises SourceMissing if a required file is missing, LogFull if there is no space left, and
    DiskFailed for any other operating system error.
    """

    @abstractmethod
    def append_open(self, path: Path) -> AppendFile:
        """Open a file for appending and create it if it is missing. Nothing is synced."""

    @abstractmethod
    def open_read(self, path: Path) -> ReadFile:
        """Open a file for reading."""

    @abstractmethod
    def rename(self, old: Path, new: Path) -> None:
        """Rename a file, replacing any file with the new name. Durable once the folder is synced."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a file. Durable once the folder is synced."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents. All of them are durable on return."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Remove a folder if it is empty."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Block until the directory entries of a folder survive a power failure."""

    @abstractmethod
    def list(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted. A missing folder has none."""

    @abstractmethod
    def exists(self, path: Path) -> bool:
        """Return whether a file or folder exists."""

    @abstractmethod
    def size(self, path: Path) -> int:
        """Return a file's size in bytes."""

    @abstractmethod
    def free_bytes(self, folder: Path) -> int:
        """Return how many bytes can still be written below a folder."""

    @abstractmethod
    def lock(self, path: Path) -> Held:
        """Acquire the lock file. Raises LogLocked if another process holds it."""

    def folder_identity(self, folder: Path) -> str:
        """Return an identity that no copy of the folder shares and that survives restarts; "" if
        unsupported."""
        return ""

    def read(self, path: Path, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of [start, stop) of a file, by default up to its end."""
        with self.open_read(path) as file:
            return file.read(start, file.size if stop is None else stop)

    def write_atomic(self, path: Path, content: bytes) -> None:
        """Replace a file atomically: after a crash it holds either the old or the new content."""
        tmp = path.with_name(path.name + TMP_SUFFIX)
        with closing(self.append_open(tmp)) as file:
            file.truncate(0)
            file.write([content])
            file.sync()
        self.rename(tmp, path)
        self.sync_folder(path.parent)


def refuse(problem: OSError, doing: str, path: Path) -> NoReturn:
    """Translate an OSError into a Penstock error and raise it."""
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
        """Open a file for appending."""
        with _refusals("opening", path):
            return LocalAppendFile(path)

    def open_read(self, path: Path) -> "LocalReadFile":
        """Open a file for reading."""
        with _refusals("opening", path):
            return LocalReadFile(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file."""
        with _refusals("renaming", old):
            old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        with _refusals("removing", path):
            path.unlink()

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents, and sync the parent of each."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        with _refusals("making", path):
            path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder if it is empty."""
        try:
            path.rmdir()
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                refuse(problem, "removing", path)

    def sync_folder(self, path: Path) -> None:
        """Sync the directory entries of a folder."""
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
        """Return whether a file or folder exists."""
        return path.exists()

    def size(self, path: Path) -> int:
        """Return a file's size."""
        with _refusals("looking at", path):
            return path.stat().st_size

    def free_bytes(self, folder: Path) -> int:
        """Return the bytes that an unprivileged account can still write."""
        with _refusals("looking at", folder):
            stats = os.statvfs(folder)
            return stats.f_bavail * stats.f_frsize

    def folder_identity(self, folder: Path) -> str:
        """Return the folder's inode and its generation, or the file system's id if there is no generation.

        A block-level clone of the file system has the same identity.
        """
        with _refusals("looking at", folder):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                inode = os.fstat(descriptor).st_ino
                generation = bytearray(8)
                try:
                    fcntl.ioctl(descriptor, _GET_GENERATION, generation)
                except OSError:
                    # Not every file system keeps inode generations.
                    return f"{inode}-{os.fstatvfs(descriptor).f_fsid:x}"
                return f"{inode}:{int.from_bytes(generation[:4], sys.byteorder)}"
            finally:
                os.close(descriptor)

    def lock(self, path: Path) -> "LocalLock":
        """Acquire the lock file."""
        with _refusals("locking", path):
            return LocalLock(path)


class _LocalFile(Closing):
    """An open local file."""

    _file: int

    def close(self) -> None:
        """Close the file, which releases its lock. Closing it again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class LocalAppendFile(_LocalFile):
    """A local append-only file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._size = os.lseek(self._file, 0, os.SEEK_END)
        self._synced = self._size

    @property
    def size(self) -> int:
        """The current size in bytes, after any truncation."""
        return self._size

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers, all or nothing."""
        pending = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if view.nbytes]
        offset = self._size
        try:
            while pending:
                written = os.pwritev(self._file, pending[:_BUFFERS_MAX], offset)
                offset += written
                pending = _after(pending, written)
        except OSError as problem:
            # Drop the partial append, because no reader may ever see it.
            self.truncate(self._size)
            refuse(problem, "writing", self.path)
        self._size = offset

    def truncate(self, size: int) -> None:
        """Truncate the file."""
        with _refusals("cutting", self.path):
            os.ftruncate(self._file, size)
        self._size = size
        self._synced = min(self._synced, size)

    def rewrite(self, start: int) -> None:
        """Rewrite the bytes from an offset on without changing them."""
        with _refusals("writing", self.path):
            while start < self._size and (
                piece := os.pread(self._file, min(READ_BYTES, self._size - start), start)
            ):
                start += os.pwrite(self._file, piece, start)

    def sync(self) -> None:
        """Sync content and size. After a large sync, drop the synced pages: see LOG_SYNC_BYTES_MAX."""
        start, end = self._synced, self._size
        try:
            os.fdatasync(self._file)
        except OSError as problem:
            # Report ENOSPC as DiskFailed as well: the written data is lost, and no later sync would report
            # the loss.
            _fail("syncing", self.path, problem)
        with _refusals("syncing", self.path):
            if end - start >= LOG_SYNC_BYTES_MAX // 2:
                os.posix_fadvise(self._file, start, end - start, os.POSIX_FADV_DONTNEED)
        self._synced = end


def _after(views: list[memoryview], written: int) -> list[memoryview]:
    """Return the remainder of the buffers after `written` bytes."""
    for index, view in enumerate(views):
        if written < view.nbytes:
            return [view[written:], *views[index + 1 :]]
        written -= view.nbytes
    return []


@dataclass(frozen=True)
class FileRange:
    """The bytes of [start, stop) of an open local file, which the operating system can send without copying
    them in memory.

    Has the file methods that `asyncio` needs to send it. Valid while the file is open.
    """

    file: "LocalReadFile"
    start: int
    stop: int

    def __len__(self) -> int:
        """Return the size of the range in bytes."""
        return self.stop - self.start

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self.file.descriptor

    def read(self) -> bytes:
        """Return the bytes, fewer at the end of the file. Raises DiskFailed."""
        return self.file.read(self.start, self.stop)

    def load(self) -> None:
        """Wait until the bytes are in the page cache, so that sending them does not wait for the disk.

        Raises DiskFailed.
        """
        with _refusals("reading", self.file.path), open(os.devnull, "wb", buffering=0) as nowhere:
            start = self.start
            # Linux passes the pages to the device without copying them.
            while start < self.stop and (
                loaded := os.sendfile(nowhere.fileno(), self.fileno(), start, self.stop - start)
            ):
                start += loaded


class LocalReadFile(_LocalFile):
    """A local file open for reading. `pread` needs no lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def descriptor(self) -> int:
        """The descriptor of the open file."""
        return self._file

    @property
    def size(self) -> int:
        """The current size in bytes."""
        return os.fstat(self._file).st_size

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer at the end of the file."""
        with _refusals("reading", self.path):
            piece = os.pread(self._file, max(stop - start, 0), start)
            if len(piece) == stop - start or not piece:
                return piece
            # One pread returns at most 2 GiB, and a network file system may return less than requested.
            pieces = [piece]
            start += len(piece)
            while start < stop and (piece := os.pread(self._file, stop - start, start)):
                pieces.append(piece)
                start += len(piece)
            return b"".join(pieces)


class LocalLock(_LocalFile):
    """An flock. The operating system releases it when the process ends, even after a crash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            self._acquire(path)
        except BaseException:
            # Nothing would close a descriptor without an owner, and its lock would keep this process itself
            # out.
            self.close()
            raise

    @property
    def in_place(self) -> bool:
        """Whether the lock's path still refers to the locked file."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return False

    def _acquire(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip()
            raise LogLocked(
                f"process {holder or 'unknown'} writes the log in {path.parent}",
                hint="One process writes a log. Stop the other one, or name another folder",
            ) from problem
        # Ignore errors: the process id only informs other processes, and it cannot be written to a full disk.
        with suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode("ascii"), 0)


class SharedLock:
    """A lock shared by the threads of several processes, reentrant within a thread.

    The operating system releases it when a process ends. Entering it as a context manager waits for the lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = threading.RLock()
        self._depth = 0
        self._file = -1

    def __enter__(self) -> Self:
        self._threads.acquire()
        if self._depth == 0:
            try:
                with _refusals("locking", self._path):
                    self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
                    fcntl.flock(self._file, fcntl.LOCK_EX)
            except BaseException:
                self._threads.release()
                raise
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            os.close(self._file)
        self._threads.release()
