# SPDX-License-Identifier: Apache-2.0
"""Find event starts in plain binlog files by following event headers from the first event.

A value may contain bytes that look like an event, so an event is never recognized by its bytes alone. Each
host follows a file only once, no matter how many processes read ranges of it: one process follows it to its
end while the others wait. The result is cached in a folder that only this user can write.
"""

import fcntl
import hashlib
import os
import struct
import tempfile
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR

import structlog

from penstock._native import follow_events
from penstock.errors import SourceMissing, StreamError
from penstock.limits import FILES_FOLLOWED_MAX, FILES_REMEMBERED_MAX, MIB

# One event start is cached for about this many bytes.
_SPACING_BYTES = MIB
# Reads that fit into the processor's cache are followed fastest.
_READ_BYTES = MIB // 4
# A read of this many bytes covers a file's format description, and all or most of the list of GTIDs before
# the file.
_HEAD_BYTES = 512

# A cache entry: a magic with the format number, the CRC32 of the rest, the log file's size, its modification
# time in nanoseconds, and the offset up to which it was followed. Then the starts, 8 bytes each.
_ENTRY = struct.Struct("<8sIqqq")
_ENTRY_MAGIC = b"PNSTART1"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _File:
    """The identity of a file (`name`), and the state of the file."""

    name: str
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path, descriptor: int) -> "_File":
        status = os.fstat(descriptor)
        head = os.pread(descriptor, _HEAD_BYTES, 0)
        identity = f"{path.absolute()}\0{status.st_dev}\0{status.st_ino}\0".encode() + head
        return cls(hashlib.sha256(identity).hexdigest(), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class _Followed:
    """The result of following a file: `starts` are some event starts before `end`, in ascending order."""

    file: _File
    end: int
    starts: tuple[int, ...]

    def holds_for(self, file: _File) -> bool:
        """Return whether the result is still valid: the file is unchanged, or the same file grew."""
        return self.file == file or (self.file.name == file.name and self.file.size < file.size)

    def covers(self, target: int, size: int) -> bool:
        """Return whether the last event at or before an offset is known to start near a cached start.

        `size` is the current size of the file.
        """
        return target < self.end or self.end >= size

    def encode(self) -> bytes:
        body = struct.pack(f"<{len(self.starts)}q", *self.starts)
        state = self.file.size, self.file.modified_ns, self.end
        crc = zlib.crc32(_ENTRY.pack(_ENTRY_MAGIC, 0, *state) + body)
        return _ENTRY.pack(_ENTRY_MAGIC, crc, *state) + body

    @classmethod
    def decode(cls, name: str, content: bytes) -> "_Followed | None":
        if len(content) < _ENTRY.size:
            return None
        magic, crc, *state = _ENTRY.unpack_from(content)
        body = content[_ENTRY.size :]
        if magic != _ENTRY_MAGIC or crc != zlib.crc32(_ENTRY.pack(_ENTRY_MAGIC, 0, *state) + body):
            return None
        size, modified_ns, end = state
        starts = struct.unpack(f"<{len(body) // 8}q", body)
        return cls(_File(name, size, modified_ns), end, starts)


_followed: OrderedDict[str, _Followed] = OrderedDict()
_lock = threading.Lock()


def last_event_start(path: Path, first: int, target: int) -> int:
    """Return the start of the last event that starts at or before an offset of a plain file.

    `first` is the start of the first event. If the file ends before the target, return the last complete
    header. Raises SourceMissing, and EventMalformed for an invalid header.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as problem:
        raise SourceMissing(f"{path} cannot be read: {problem.strerror}") from problem
    try:
        with _lock:
            file = _File.of(path, descriptor)
            followed = _followed.get(file.name)
            if followed is None or not followed.holds_for(file) or not followed.covers(target, file.size):
                followed = _follow_shared(descriptor, file, first)
                _followed[file.name] = followed
            _followed.move_to_end(file.name)
            if len(_followed) > FILES_FOLLOWED_MAX:
                _followed.popitem(last=False)
        return _last_start(descriptor, followed, target)
    except OSError as problem:
        raise SourceMissing(f"{path} cannot be read: {problem.strerror}") from problem
    except StreamError as problem:
        problem.position = problem.position or f"{path.name}:{target}"
        raise
    finally:
        os.close(descriptor)


def _last_start(descriptor: int, followed: _Followed, target: int) -> int:
    """Return the last start at or before the target, following from the nearest cached start."""
    last = followed.starts[max(bisect_right(followed.starts, target) - 1, 0)]
    for start, _ in _headers(descriptor, last, target):
        last = start
    return last


def _follow_shared(descriptor: int, file: _File, first: int) -> _Followed:
    """Return the events of a whole file, from the shared cache if another process followed it already."""
    with _open_cache_entry(file.name) as entry:
        followed = None
        if entry is not None:
            followed = _Followed.decode(file.name, os.pread(entry, os.fstat(entry).st_size, 0))
        if followed is None or not followed.holds_for(file):
            followed = _Followed(file, first, (first,))
        if followed.file != file or not followed.covers(file.size, file.size):
            followed = _follow(descriptor, replace(followed, file=file))
            if entry is not None:
                _save(entry, followed)
        return followed


def _save(entry: int, followed: _Followed) -> None:
    try:
        os.ftruncate(entry, 0)
        os.pwrite(entry, followed.encode(), 0)
    except OSError as problem:
        # If the entry cannot be written, the next process has to read the event headers of the file again. An
        # entry truncated by a full disk fails its checksum.
        _log.warning("what was followed of a file is not remembered", reason=str(problem))


def _follow(descriptor: int, followed: _Followed) -> _Followed:
    """Follow a file from where the last pass ended, up to its end or an invalid header."""
    starts, end = list(followed.starts), followed.end
    try:
        for last, following in _headers(descriptor, followed.starts[-1], followed.file.size):
            end = following
            if last >= starts[-1] + _SPACING_BYTES:
                starts.append(last)
    except StreamError as problem:
        # Only log the error here. A range that starts after the invalid header reports it again.
        _log.warning("a file cannot be followed to its end", reason=str(problem))
    return _Followed(followed.file, end, tuple(starts))


def _headers(descriptor: int, start: int, target: int) -> Iterator[tuple[int, int]]:
    """For each piece that is read up to the target, yield the start of its last event and where the next
    event starts.
    """
    buffer = memoryview(bytearray(_READ_BYTES))
    while start <= target:
        size = os.preadv(descriptor, [buffer], start)
        last, start = follow_events(buffer[:size], start, target)
        if last is None:
            return
        yield last, start


@contextmanager
def _open_cache_entry(name: str) -> Iterator[int | None]:
    """Open and lock a file's cache entry; None if nothing can be cached."""
    try:
        folder = _cache_folder()
        _evict_oldest(folder)
        entry = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        _log.warning("nothing can be remembered of the files that are followed", reason=str(problem))
        yield None
        return
    try:
        try:
            fcntl.flock(entry, fcntl.LOCK_EX)
        except OSError as problem:
            _log.warning("nothing can be remembered of the files that are followed", reason=str(problem))
            yield None
            return
        yield entry
    finally:
        os.close(entry)


def _evict_oldest(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) < FILES_REMEMBERED_MAX:
        return
    for entry in sorted(entries, key=lambda path: path.lstat().st_mtime_ns)[: len(entries) // 2]:
        entry.unlink(missing_ok=True)


def _cache_folder() -> Path:
    """Return the cache folder. Raises OSError if another user could write to it."""
    folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
