# SPDX-License-Identifier: Apache-2.0
"""The commit-order index of a Pump: an entry of 64 bytes for each released transaction, in commit order.

    <folder>/releases-00000001.idx    a header with the timestamp before the file, then entries

PullBinlogs needs only this index to locate its transactions. The index is derived from the Pump's log: a torn
tail is cut off, and replaying the log from the last entry's `replay_start` appends what is missing.
"""

import re
import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.errors import LogDamaged, PositionPurged
from penstock.limits import MIB
from penstock.logstore.disk import AppendFile, Disk, ReadFile

_FILE_BYTES_MAX = 16 * MIB
_NAME = re.compile(r"releases-(\d{8})\.idx")

# The fields of an entry: commit and start timestamp; offset and size of the prewrite's events; offset of the
# replay's start; the numbers of both files; the kind; the CRC32 of the preceding bytes.
_ENTRY = struct.Struct("<QQQQQIII8x")
_CRC = struct.Struct("<I")
ENTRY_BYTES = _ENTRY.size + _CRC.size
assert ENTRY_BYTES == 64

_TRANSACTION, _FAKE, _HEADER = range(3)


@dataclass(frozen=True, order=True)
class Location:
    """Where a payload is in a Pump's log: the number of the file, the payload's offset, and the size of its
    events in bytes.
    """

    file_number: int
    offset: int
    size: int = 0


@dataclass(frozen=True)
class ReleaseEntry:
    """A released transaction. `location` is None for a fake binlog."""

    commit_ts: int
    start_ts: int
    location: Location | None
    replay_start: Location

    def encode(self) -> bytes:
        """Return the entry's 64 bytes."""
        location = self.location or Location(0, 0)
        kind = _FAKE if self.location is None else _TRANSACTION
        return _pack(self.commit_ts, self.start_ts, location, self.replay_start, kind)

    @classmethod
    def decode(cls, record: bytes) -> Self:
        """Read an entry from 64 bytes with a correct CRC32."""
        commit_ts, start_ts, offset, size, replay_offset, number, replay_number, kind = _ENTRY.unpack_from(
            record
        )
        location = None if kind == _FAKE else Location(number, offset, size)
        return cls(commit_ts, start_ts, location, Location(replay_number, replay_offset))


def _pack(commit_ts: int, start_ts: int, location: Location, replay_start: Location, kind: int) -> bytes:
    plain = _ENTRY.pack(
        commit_ts,
        start_ts,
        location.offset,
        location.size,
        replay_start.offset,
        location.file_number,
        replay_start.file_number,
        kind,
    )
    return plain + _CRC.pack(zlib.crc32(plain))


def _is_sound(record: bytes) -> bool:
    return len(record) == ENTRY_BYTES and _CRC.unpack_from(record, _ENTRY.size)[0] == zlib.crc32(
        record[: _ENTRY.size]
    )


@dataclass
class _File:
    """One file of the index. Its entries have commit timestamps above `floor`, and at or below the next
    file's floor.
    """

    number: int
    path: Path
    floor: int
    count: int
    reader: ReadFile
    # The number of threads that are reading the file, and whether it was removed. The last thread closes a
    # removed file.
    readers: int = 0
    is_removed: bool = False

    def entry(self, index: int) -> ReleaseEntry:
        return self.entries(index, 1)[0]

    def entries(self, first: int, count: int) -> list[ReleaseEntry]:
        """Return entries from an index on, at most `count`. Raises LogDamaged."""
        stop = min(first + count, self.count)
        content = self.reader.read((first + 1) * ENTRY_BYTES, (stop + 1) * ENTRY_BYTES)
        records = [content[at : at + ENTRY_BYTES] for at in range(0, len(content), ENTRY_BYTES)]
        for index, record in enumerate(records, first + 1):
            if not _is_sound(record):
                raise LogDamaged(
                    "an entry of the index of released transactions is corrupt",
                    position=f"{self.path}:{index * ENTRY_BYTES}",
                    hint=f"Check the disk, and run: penstock log verify {self.path.parent.parent}",
                )
        return [ReleaseEntry.decode(record) for record in records]

    def first_after(self, commit_ts: int) -> int:
        """Return the index of the first entry above a commit timestamp."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle).commit_ts > commit_ts:
                high = middle
            else:
                low = middle + 1
        return low


class ReleaseIndex:
    """The index of released transactions, stored in a folder. One thread appends; any thread may read. Raises
    LogFull, DiskFailed.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        """Open the index, create it if it is missing, and cut off a torn tail."""
        self._disk = disk
        self._folder = folder
        self._lock = threading.Lock()
        self._files: list[_File] = []
        self._writer: AppendFile | None = None
        # Values of the last entry, None in an empty index.
        self.last: ReleaseEntry | None = None
        disk.make_folder(folder)
        self._load()

    @property
    def floor(self) -> int:
        """The commit timestamp up to which entries may have been removed; 0 if the index is complete."""
        with self._lock:
            return self._files[0].floor if self._files else 0

    def append(self, entries: Sequence[ReleaseEntry], floor: int = 0) -> None:
        """Append released transactions. `floor` becomes the floor of an index that has no entries yet."""
        if not entries:
            return
        current = self._files[-1] if self._files else None
        if current is None or self._writer is None or self._writer.size >= _FILE_BYTES_MAX:
            current = self._begin_file(self.last.commit_ts if self.last is not None else floor)
        assert self._writer is not None, "the file was begun"
        self._writer.write([b"".join(entry.encode() for entry in entries)])
        with self._lock:
            current.count += len(entries)
            self.last = entries[-1]

    def after(self, commit_ts: int, count: int) -> list[ReleaseEntry]:
        """Return the first entries above a commit timestamp, at most `count`. Raises PositionPurged."""
        with self._reading() as files:
            if not files:
                return []
            at = max(0, bisect_right([file.floor for file in files], commit_ts) - 1)
            if commit_ts < files[at].floor:
                raise PositionPurged(
                    f"the Pump keeps binlogs after {files[at].floor} only",
                    position=str(commit_ts),
                    hint="Load the tables again, and let the Drainer start there; or raise log.retention",
                )
            first = files[at].first_after(commit_ts)
            while first >= files[at].count and at + 1 < len(files):
                at, first = at + 1, 0
            return files[at].entries(first, count) if first < files[at].count else []

    def contains(self, commit_ts: int, start_ts: int) -> bool:
        """Return whether a transaction was released. False for a transaction whose entry was removed."""
        if commit_ts <= self.floor:
            return False
        for entry in self.after(commit_ts - 1, 2):
            if (entry.commit_ts, entry.start_ts) == (commit_ts, start_ts):
                return entry.location is not None
        return False

    def trim(self, earliest: Location) -> None:
        """Remove files whose last transaction is no longer in the log, which begins at `earliest`."""
        while len(self._files) > 1:
            first = self._files[0]
            last = first.entry(first.count - 1)
            if max(last.replay_start, last.location or last.replay_start) >= earliest:
                return
            with self._lock:
                del self._files[0]
            self._retire(first)
            self._disk.remove(first.path)

    def clear(self) -> None:
        """Remove all entries, because the log can no longer replay the entries that are missing after the
        last one.
        """
        self.close()
        for name in self._disk.list(self._folder):
            if _NAME.fullmatch(name):
                self._disk.remove(self._folder / name)
        self.last = None

    def sync(self) -> None:
        """Make the entries durable, so that a restart replays little."""
        if self._writer is not None:
            self._writer.sync()

    def close(self) -> None:
        """Close all files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        with self._lock:
            files, self._files = self._files, []
        for file in files:
            self._retire(file)

    # --- Internals --------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[list[_File]]:
        """Yield the files, which stay open during the block, even if they are removed."""
        with self._lock:
            files = list(self._files)
            for file in files:
                file.readers += 1
        try:
            yield files
        finally:
            with self._lock:
                for file in files:
                    file.readers -= 1
                    if file.is_removed and not file.readers:
                        file.reader.close()

    def _retire(self, file: _File) -> None:
        """Close a file, or let the last thread that reads it close it."""
        with self._lock:
            file.is_removed = True
            if not file.readers:
                file.reader.close()

    def _begin_file(self, floor: int) -> _File:
        number = self._files[-1].number + 1 if self._files else 1
        path = self._folder / f"releases-{number:08d}.idx"
        if self._writer is not None:
            self._writer.sync()
            self._writer.close()
            self._writer = None
        writer = self._disk.append_open(path)
        try:
            writer.truncate(0)
            writer.write([_pack(floor, 0, Location(0, 0), Location(0, 0), _HEADER)])
            writer.sync()
            self._disk.sync_folder(self._folder)
        except BaseException:
            # Close the file. The next append recreates it.
            writer.close()
            raise
        self._writer = writer
        file = _File(number, path, floor, 0, self._disk.open_read(path))
        with self._lock:
            self._files.append(file)
        return file

    def _load(self) -> None:
        numbers = sorted(
            int(match[1]) for name in self._disk.list(self._folder) if (match := _NAME.fullmatch(name))
        )
        torn = False
        for number in numbers:
            path = self._folder / f"releases-{number:08d}.idx"
            content = b"" if torn else self._disk.read(path)
            sound = 0
            while _is_sound(content[sound * ENTRY_BYTES : (sound + 1) * ENTRY_BYTES]):
                sound += 1
            if sound < 1:
                # Remove the file: everything after a damaged entry is derived from the log again.
                self._disk.remove(path)
                torn = True
                continue
            file = _File(number, path, _ENTRY.unpack_from(content)[0], sound - 1, self._disk.open_read(path))
            self._files.append(file)
            if file.count:
                self.last = file.entry(file.count - 1)
            if sound * ENTRY_BYTES < len(content):
                writer = self._disk.append_open(path)
                writer.truncate(sound * ENTRY_BYTES)
                writer.close()
                torn = True
        if self._files:
            self._writer = self._disk.append_open(self._files[-1].path)
