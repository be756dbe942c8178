# SPDX-License-Identifier: Apache-2.0
"""Where events begin in plain binlog files, found by following event headers from the first one.

An event's value may hold a copy of anything, so no event is ever recognized by its bytes alone. A file is
followed once on a host, whatever the number of processes that read ranges of it: one follows it to its end
while the others wait, and what it found is remembered in a folder that only this user may write.
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

# One event start is remembered for about so many bytes.
_SPACING_BYTES = MIB
# What fits into a processor's cache is read and followed fastest.
_READ_BYTES = MIB // 4
# A file's format description and the GTIDs before it, or a good part of them.
_HEAD_BYTES = 512

# A remembered file: a magic with the format's number, the CRC32 of what follows, the file's size, the time of
# its last change in nanoseconds, and up to where it was followed. Then the starts, 8 bytes each.
_ENTRY = struct.Struct("<8sIqqq")
_ENTRY_MAGIC = b"PNSTART1"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _File:
    """What tells a file from others (`name`), and one state of it from later ones."""

    name: str
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path, descriptor: int) -> "_File":
        status = os.fstat(descriptor)
        head = os.pread(descriptor, _HEAD_BYTES, 0)
        told = f"{path.absolute()}\0{status.st_dev}\0{status.st_ino}\0".encode() + head
        return cls(hashlib.sha256(told).hexdigest(), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class _Followed:
    """A file as far as it was followed: `starts` are some of the events that begin before `end`, rising."""

    file: _File
    end: int
    starts: tuple[int, ...]

    def holds_for(self, file: _File) -> bool:
        """Tell whether this is still so: the file is as it was, or the same one that grew."""
        return self.file == file or (self.file.name == file.name and self.file.size < file.size)

    def covers(self, target: int, size: int) -> bool:
        """Tell whether the last event at or before an offset is known to begin near a known one.

        `size` is the size that the file has now.
        """
        return target < self.end or self.end >= size

    def encode(self) -> bytes:
        body = struct.pack(f"<{len(self.starts)}q", *self.starts)
        place = self.file.size, self.file.modified_ns, self.end
        crc = zlib.crc32(_ENTRY.pack(_ENTRY_MAGIC, 0, *place) + body)
        return _ENTRY.pack(_ENTRY_MAGIC, crc, *place) + body

    @classmethod
    def decode(cls, name: str, content: bytes) -> "_Followed | None":
        if len(content) < _ENTRY.size:
            return None
        magic, crc, *place = _ENTRY.unpack_from(content)
        body = content[_ENTRY.size :]
        if magic != _ENTRY_MAGIC or crc != zlib.crc32(_ENTRY.pack(_ENTRY_MAGIC, 0, *place) + body):
            return None
        size, modified_ns, end = place
        starts = struct.unpack(f"<{len(body) // 8}q", body)
        return cls(_File(name, size, modified_ns), end, starts)


_followed: OrderedDict[str, _Followed] = OrderedDict()
_lock = threading.Lock()


def last_event_start(path: Path, first: int, target: int) -> int:
    """Return where the last event begins that begins at or before an offset of a plain file.

    `first` is where the first event begins. Where the file ends before the target, it is the last whole
    header. Raises SourceMissing, and EventMalformed for a header that no event has.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as problem:
        raise SourceMissing(f"{path} cannot be read: {problem.strerror}") from problem
    try:
        with _lock:
            file = _File.of(path, descriptor)
            known = _followed.get(file.name)
            if known is None or not known.holds_for(file) or not known.covers(target, file.size):
                known = _follow_shared(descriptor, file, first)
                _followed[file.name] = known
            _followed.move_to_end(file.name)
            if len(_followed) > FILES_FOLLOWED_MAX:
                _followed.popitem(last=False)
        return _last_start(descriptor, known, target)
    except OSError as problem:
        raise SourceMissing(f"{path} cannot be read: {problem.strerror}") from problem
    except StreamError as problem:
        problem.position = problem.position or f"{path.name}:{target}"
        raise
    finally:
        os.close(descriptor)


def _last_start(descriptor: int, known: _Followed, target: int) -> int:
    """Return the last start at or before the target, from the known one nearest to it on."""
    last = known.starts[max(bisect_right(known.starts, target) - 1, 0)]
    for found, _ in _headers(descriptor, last, target):
        last = found
    return last


def _follow_shared(descriptor: int, file: _File, first: int) -> _Followed:
    """Return the events of a whole file: as another process has followed it, else followed here."""
    with _remembered(file.name) as entry:
        known = None
        if entry is not None:
            known = _Followed.decode(file.name, os.pread(entry, os.fstat(entry).st_size, 0))
        if known is None or not known.holds_for(file):
            known = _Followed(file, first, (first,))
        if known.file != file or not known.covers(file.size, file.size):
            known = _follow(descriptor, replace(known, file=file))
            if entry is not None:
                _remember(entry, known)
        return known


def _remember(entry: int, known: _Followed) -> None:
    try:
        os.ftruncate(entry, 0)
        os.pwrite(entry, known.encode(), 0)
    except OSError as problem:
        # The next process follows the file by itself; what a full disk has cut does not hold.
        _log.warning("what was followed of a file is not remembered", reason=str(problem))


def _follow(descriptor: int, known: _Followed) -> _Followed:
    """Follow a file from where it was followed to, up to its end or to a header that no event has."""
    starts, end = list(known.starts), known.end
    try:
        for last, following in _headers(descriptor, known.starts[-1], known.file.size):
            end = following
            if last >= starts[-1] + _SPACING_BYTES:
                starts.append(last)
    except StreamError as problem:
        # A range that begins behind it meets it again.
        _log.warning("a file cannot be followed to its end", reason=str(problem))
    return _Followed(known.file, end, tuple(starts))


def _headers(descriptor: int, start: int, target: int) -> Iterator[tuple[int, int]]:
    """Yield the last start of each piece that is read, up to the target, and where the next event begins."""
    buffer = memoryview(bytearray(_READ_BYTES))
    while start <= target:
        size = os.preadv(descriptor, [buffer], start)
        last, start = follow_events(buffer[:size], start, target)
        if last is None:
            return
        yield last, start


@contextmanager
def _remembered(name: str) -> Iterator[int | None]:
    """Open what is remembered of a file for this process alone; None where nothing can be remembered."""
    try:
        folder = _folder()
        _forget_oldest(folder)
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


def _forget_oldest(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) < FILES_REMEMBERED_MAX:
        return
    for entry in sorted(entries, key=lambda path: path.lstat().st_mtime_ns)[: len(entries) // 2]:
        entry.unlink(missing_ok=True)


def _folder() -> Path:
    """Return the folder of what is remembered. Raises OSError where another user might write into it."""
    folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
