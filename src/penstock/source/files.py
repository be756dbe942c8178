# SPDX-License-Identifier: Apache-2.0
"""Binlog and relay log files, plain or compressed, as byte ranges.

A file's in-use flag (bit 0 of the format description's flags) is set while a server writes it, and stays
set in a copy taken meanwhile or after a crash. In such a file a transaction that is not finished at the tail
is not there yet, or never was; in every other file it is FileTruncated.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow

from penstock.errors import (
    EventMalformed,
    FileTruncated,
    LogEncrypted,
    MagicInvalid,
    PositionInvalid,
    PositionPurged,
    SourceMissing,
    StreamError,
)
from penstock.fingerprint import file_fingerprint
from penstock.gtid_sets import LoggedSet
from penstock.limits import RANGE_BYTES_DEFAULT, RANGE_BYTES_MIN, READ_BYTES
from penstock.model import Position, TableName
from penstock.source.event_starts import last_event_start
from penstock.source.listing import LocatedFile, check_sequence, list_files
from penstock.source.prepared import PreparedSearch
from penstock.source.search import find_gtid_set, find_time, gtid_set_before
from penstock.source.source import (
    FIRST_EVENT_OFFSET,
    MAGIC,
    MAGIC_ENCRYPTED,
    ByteRange,
    Extent,
    SourceOptions,
    cut,
    file_number,
    place_of,
)
from penstock.source.walk import last_transaction_end, walk

_CODECS = {"gz": "gzip", "zst": "zstd"}

# The event header: timestamp 4, type 1, server id 4, length 4, end position 4, flags 2.
_HEADER_BYTES = 19
_TYPE_AT = 4
_LENGTH_AT = slice(9, 13)
_FLAGS_AT = 17
_IN_USE, _ARTIFICIAL, _RELAY, _IGNORABLE = 0x01, 0x20, 0x40, 0x80
_ROTATE_EVENT, _START_ENCRYPTION = b"\x04", b"\xa4"
# A format description lists one length per event type; the server's are about 120 bytes.
_FORMAT_DESCRIPTION_BYTES_MAX = 4096


@dataclass(frozen=True)
class _FileHead:
    """What a file's first bytes say. `raw` is the magic and the format description.

    The events of a `copied` file (a relay log, a segment of a kept log) keep the positions of the file from
    which they come, so the offsets of its events are not those that they say.
    """

    raw: bytes
    in_use: bool
    copied: bool


class FileSource:
    """Files in order of their numbers; see `penstock.source.source.Source`.

    The folder is listed anew for every plan, so files that appear are found.
    """

    live = False

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._heads: dict[Path, _FileHead] = {}
        self._settled: dict[str, Position] = {}
        self._prepared = PreparedSearch(self)

    @property
    def instance(self) -> str:
        """The name that rows of this source carry."""
        return self.options.instance

    def close(self) -> None:
        """Nothing is held."""

    def earliest(self) -> Position:
        """Return the first position there is. Raises SourceMissing."""
        return self._position(list_files(self.options.paths)[0].file)

    def head(self) -> Position:
        """Return the end of the last whole transaction known now.

        A file that is in use, or compressed, is walked from where the last call ended.
        """
        last = list_files(self.options.paths)[-1]
        if last.compression is None and not self._in_use(last):
            return self._position(last.file, max(last.path.stat().st_size, FIRST_EVENT_OFFSET))
        return self._walk_to_tail(last)

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction before a position, "" where the log has none."""
        return gtid_set_before(self, position)

    def fingerprint(self, file: str) -> str:
        """Return the fingerprint of a file."""
        return file_fingerprint(self.head_bytes(file))

    def find_gtid_set(self, gtid_set: str) -> Position:
        """Return where to read from to get everything after the set. Raises PositionPurged."""
        return find_gtid_set(self, gtid_set)

    def find_time(self, time_us: int) -> Position:
        """Return where to read from to get everything committed at or after the time."""
        return find_time(self, time_us)

    def extents(self, start: Position | None = None, end: Position | None = None) -> list[Extent]:
        """Return the files that [start, end) touches, in order, without reading data."""
        return self._extents_of(self._between(start, end), start)

    def split(
        self,
        start: Position | None = None,
        end: Position | None = None,
        ranges_min: int = 1,
        range_bytes: int = RANGE_BYTES_DEFAULT,
    ) -> list[ByteRange]:
        """Cut [start, end) into ranges; files in use are walked to find their last whole transaction."""
        located = self._between(start, end)
        # Of the same listing: a file that appears meanwhile belongs to the next plan.
        extents = [
            self._whole_if_copied(*pair)
            for pair in zip(self._extents_of(located, start), located, strict=True)
        ]
        first = start or self._position(located[0].file)
        # Files know no epochs, so both ends are of the one that the start names.
        last = end and replace(end, epoch=first.epoch)
        ranges = cut(extents, first, last, ranges_min, range_bytes)
        by_name = {one.file: one for one in located}
        return [one for one in (self._settle(one, by_name[one.file]) for one in ranges) if one is not None]

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        """Yield the file's bytes from the range's start to its end, a buffer of at most READ_BYTES at a time.

        No connection can be lost here, so `resume_at` is not asked.

        Raises SourceMissing, MagicInvalid, LogEncrypted; FileTruncated and EventMalformed for damaged
        compression.
        """
        located = self._located(byte_range.file)
        self._head_of(located)
        with _PlainStream(located) as stream:
            stream.skip(max(byte_range.start, FIRST_EVENT_OFFSET))
            buffer = memoryview(bytearray(READ_BYTES))
            while size := stream.read_into(buffer):
                yield buffer[:size]

    def align(self, byte_range: ByteRange) -> ByteRange:
        """Return a range from an event on that begins at or before its start; see `Source.align`."""
        start = self._event_start(byte_range.file, byte_range.start)
        return replace(byte_range, start=start, aligned=start == FIRST_EVENT_OFFSET)

    def joint(self, byte_range: ByteRange) -> int | None:
        """Return where the next range of the same file is opened, None where there is none."""
        if not byte_range.is_cut or byte_range.stop is None:
            return None
        try:
            return self._event_start(byte_range.file, byte_range.stop)
        except StreamError:
            # The range meets the damage itself, after the rows before it.
            return None

    def head_bytes(self, file: str, epoch: int | None = None) -> bytes:
        """Return the file's magic and format description."""
        return self._head_of(self._located(file)).raw

    def schema_history(
        self, position: Position, name: TableName | None = None, *, again: bool = False
    ) -> None:
        """Return None: files keep no definitions besides what their events say."""

    def find_prepared(self, xid: str, before: Position) -> ByteRange | None:
        """Return where an XA transaction was prepared that commits at a position."""
        return self._prepared.find(xid, before)

    def walk(
        self,
        start: Position,
        end: Position,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> Position:
        """Return the last transaction end within the limits, at least one transaction on."""
        return walk(self, start, end, rows_max, bytes_max)

    def _event_start(self, file: str, offset: int) -> int:
        """Return where the last event begins at or before an offset; the first one of compressed files."""
        located = self._located(file)
        self._head_of(located)
        if located.compression is not None:
            return FIRST_EVENT_OFFSET
        return last_event_start(located.path, FIRST_EVENT_OFFSET, offset)

    def _epoch(self, start: Position | None) -> int:
        return self.options.epoch if start is None else start.epoch

    def _position(self, file: str, offset: int = FIRST_EVENT_OFFSET) -> Position:
        return Position(self.options.epoch, file, offset)

    def _located(self, file: str) -> LocatedFile:
        for one in list_files(self.options.paths):
            if one.file == file:
                return one
        raise SourceMissing(
            f"{file} is not among the files of {', '.join(self.options.paths)}",
            hint="It may have been purged since the start: keep files until they are read",
        )

    def _between(self, start: Position | None, end: Position | None) -> list[LocatedFile]:
        """Return the files of [start, end). Raises SequenceGap, PositionPurged, PositionInvalid."""
        located = list_files(self.options.paths)
        if start is not None:
            number = file_number(start.file)
            if number < located[0].number:
                raise PositionPurged(
                    f"the files begin with {located[0].file}",
                    position=str(start),
                    hint=f"Add {start.file} and what follows it, or start at {located[0].file}:4",
                )
            if number > located[-1].number:
                raise PositionInvalid(f"the files end with {located[-1].file}", position=str(start))
            located = [one for one in located if one.number >= number]
        if end is not None:
            if start is not None and place_of(end) < place_of(start):
                raise PositionInvalid(f"the end lies before the start {start}", position=str(end))
            located = [one for one in located if one.number <= file_number(end.file)]
        check_sequence(located)
        return located

    def _settle(self, byte_range: ByteRange, located: LocatedFile) -> ByteRange | None:
        """Give the range at the tail of a file in use its stop; None where nothing is left."""
        if byte_range.stop is not None or not self._in_use(located):
            return byte_range
        stop = self._walk_to_tail(located).offset
        if stop <= byte_range.start:
            return None
        return replace(byte_range, stop=stop)

    def _walk_to_tail(self, located: LocatedFile) -> Position:
        """Return the end of the last whole transaction; a plain file is read on from the last answer."""
        known = self._settled.get(located.file) if located.compression is None else None
        size = located.path.stat().st_size
        if size == 0:
            return self._position(located.file)
        tail = size if located.compression is None else None
        found = last_transaction_end(self, known or self._position(located.file), tail)
        self._settled[located.file] = found
        return found

    def _extents_of(self, located: list[LocatedFile], start: Position | None) -> list[Extent]:
        epoch = self._epoch(start)
        return [Extent(one.file, one.path.stat().st_size, one.compression is None, epoch) for one in located]

    def _whole_if_copied(self, extent: Extent, located: LocatedFile) -> Extent:
        if extent.bytes < RANGE_BYTES_MIN or not extent.splittable:
            return extent
        return replace(extent, splittable=not self._head_of(located).copied)

    def _in_use(self, located: LocatedFile) -> bool:
        """Tell whether a server may be writing the file. Not remembered: the flag is cleared at the end."""
        if located.path.stat().st_size == 0:
            # The server has made the file and not yet written to it.
            return True
        self._heads.pop(located.path, None)
        return self._head_of(located).in_use

    def _head_of(self, located: LocatedFile) -> _FileHead:
        if located.path not in self._heads:
            self._heads[located.path] = _read_head(located)
        return self._heads[located.path]


def _read_head(located: LocatedFile) -> _FileHead:
    """Return the magic and format description. Raises MagicInvalid, LogEncrypted, FileTruncated."""
    place = f"{located.file}:0"
    with _PlainStream(located) as stream:
        start = stream.read(FIRST_EVENT_OFFSET + _HEADER_BYTES)
        if start[: len(MAGIC)] == MAGIC_ENCRYPTED:
            raise _encrypted(located, 0)
        if not MAGIC.startswith(start[: len(MAGIC)]):
            raise MagicInvalid(
                f"{located.path} is not a binlog file: it begins with 0x{start[: len(MAGIC)].hex()}",
                position=place,
                hint="A binlog begins with 0xfe62696e; name binlog files only",
            )
        header = start[FIRST_EVENT_OFFSET:]
        length = (
            int.from_bytes(header[_LENGTH_AT], "little") if len(header) == _HEADER_BYTES else _HEADER_BYTES
        )
        if not _HEADER_BYTES <= length <= _FORMAT_DESCRIPTION_BYTES_MAX:
            raise EventMalformed(
                f"{located.path}: the format description says it is {length} bytes long",
                position=f"{located.file}:{FIRST_EVENT_OFFSET}",
                hint="Copy the file again from the server",
            )
        raw = start + stream.read(length - len(header))
        following = stream.read(_HEADER_BYTES)
    following_type = following[_TYPE_AT : _TYPE_AT + 1] if len(following) == _HEADER_BYTES else b""
    # A server that decrypts what it sends marks the event as one to pass over, and so a kept log has it.
    if following_type == _START_ENCRYPTION and not following[_FLAGS_AT] & _IGNORABLE:
        raise _encrypted(located, len(raw))
    if len(raw) < FIRST_EVENT_OFFSET + length:
        raise FileTruncated(
            f"{located.path} ends inside its format description",
            position=f"{located.file}:{len(raw)}",
            hint="Copy the file again from the server",
        )
    made_up = following_type == _ROTATE_EVENT and following[_FLAGS_AT] & _ARTIFICIAL
    copied = bool(header[_FLAGS_AT] & _RELAY or made_up)
    return _FileHead(raw, in_use=bool(header[_FLAGS_AT] & _IN_USE), copied=copied)


def _encrypted(located: LocatedFile, offset: int) -> LogEncrypted:
    return LogEncrypted(
        f"{located.path} is encrypted at rest",
        position=f"{located.file}:{offset}",
        hint="Read it from the live server, which decrypts: penstock inspect mysql://user@host",
    )


class _PlainStream:
    """The plain bytes of one file, compressed or not; a context manager that closes."""

    def __init__(self, located: LocatedFile) -> None:
        self._located = located
        self._offset = 0
        try:
            self._file = located.path.open("rb", buffering=0)
        except FileNotFoundError as problem:
            raise SourceMissing(f"there is no file {located.path}") from problem
        except OSError as problem:
            raise SourceMissing(
                f"{located.path} cannot be read: {problem.strerror}", hint=f"Check: ls -l {located.path}"
            ) from problem
        self._inflating: Any = None
        if located.compression is not None:
            self._inflating = pyarrow.CompressedInputStream(self._file, _CODECS[located.compression])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._inflating is not None:
            self._inflating.close()
        self._file.close()

    def read_into(self, buffer: memoryview) -> int:
        """Fill the buffer from the front and return how much came, 0 at the end."""
        size = self._inflate(buffer) if self._inflating is not None else self._file.readinto(buffer) or 0
        self._offset += size
        return size

    def read(self, length: int) -> bytes:
        """Return so many bytes, less at the end."""
        buffer = memoryview(bytearray(length))
        filled = 0
        while filled < length and (size := self.read_into(buffer[filled:])):
            filled += size
        return bytes(buffer[:filled])

    def skip(self, length: int) -> None:
        """Go on by so many bytes; what is compressed must be read for it."""
        if self._inflating is None:
            self._offset = self._file.seek(length, os.SEEK_CUR)
            return
        buffer = memoryview(bytearray(min(length, READ_BYTES)))
        while length > 0 and (size := self.read_into(buffer[:length])):
            length -= size

    def _inflate(self, buffer: memoryview) -> int:
        try:
            return int(self._inflating.readinto(buffer))
        except OSError as problem:
            place = f"{self._located.file}:{self._offset}"
            if self._file.tell() >= self._located.path.stat().st_size:
                raise FileTruncated(
                    f"{self._located.path}: the compressed bytes end too early or are damaged at their end",
                    position=place,
                    hint="Compress or copy the file again",
                ) from problem
            raise EventMalformed(
                f"{self._located.path}: the compressed bytes are damaged ({problem})",
                position=place,
                hint=f"Check it with {'zstd' if self._located.compression == 'zst' else 'gzip'} -t",
            ) from problem
