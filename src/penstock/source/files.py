# SPDX-License-Identifier: Apache-2.0
"""Binlog and relay log files, plain or compressed, as byte ranges.

A server sets a file's in-use flag (bit 0 of the format description's flags) while it writes the file. The
flag stays set in a copy that is taken while the server writes the file, and after a crash. In such a file, an
unfinished transaction at the end is ignored; in any other file it raises FileTruncated.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow

from penstock.closing import Closing
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
from penstock.logstore.extent import Extent
from penstock.model import Position, TableName
from penstock.source.event_starts import last_event_start
from penstock.source.listing import LocatedFile, check_sequence, list_files
from penstock.source.opened_source import OpenedSource
from penstock.source.prepared import PreparedSearch
from penstock.source.search import find_gtid_set, find_time, gtid_set_before
from penstock.source.source import (
    FIRST_EVENT_OFFSET,
    MAGIC,
    MAGIC_ENCRYPTED,
    ByteRange,
    SourceOptions,
    cut,
    file_number,
    place_of,
)
from penstock.source.walk import last_transaction_end

_CODECS = {"gz": "gzip", "zst": "zstd"}

# The event header: timestamp 4, type 1, server id 4, length 4, end position 4, flags 2.
_HEADER_BYTES = 19
_TYPE_AT = 4
_LENGTH_AT = slice(9, 13)
_FLAGS_AT = 17
_IN_USE, _ARTIFICIAL, _RELAY, _IGNORABLE = 0x01, 0x20, 0x40, 0x80
_ROTATE_EVENT, _START_ENCRYPTION = b"\x04", b"\xa4"
# A format description lists one length per event type. The format description of a server has about 120
# bytes.
_FORMAT_DESCRIPTION_BYTES_MAX = 4096


@dataclass(frozen=True)
class _FileHead:
    """The properties of a file's first bytes. `raw` is the magic and the format description.

    The events of a `copied` file (a relay log, a segment of a kept log) contain the positions of the original
    file, so they do not match the offsets in this file.
    """

    raw: bytes
    in_use: bool
    copied: bool


class FileSource(OpenedSource):
    """Files in the order of their numbers; see `penstock.source.source.Source`.

    The folder is listed again for every plan, so new files are included.
    """

    live = False

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self._heads: dict[Path, _FileHead] = {}
        self._settled: dict[str, Position] = {}
        self._prepared = PreparedSearch(self)

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def earliest(self) -> Position:
        """Return the first available position. Raises SourceMissing."""
        return self._position(list_files(self.options.paths)[0].file)

    def head(self) -> Position:
        """Return the end of the last whole transaction at this moment.

        A file that is in use or compressed is scanned, starting where the last call ended.
        """
        last = list_files(self.options.paths)[-1]
        if last.compression is None and not self._in_use(last):
            return self._position(last.file, max(last.path.stat().st_size, FIRST_EVENT_OFFSET))
        return self._walk_to_tail(last)

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a position, "" if the log has none."""
        return gtid_set_before(self, position)

    def fingerprint(self, file: str) -> str:
        """Return the fingerprint of a file."""
        return file_fingerprint(self.head_bytes(file))

    def find_gtid_set(self, gtid_set: str) -> Position:
        """Return where to start reading to get everything after the set. Raises PositionPurged."""
        return find_gtid_set(self, gtid_set)

    def find_time(self, time_us: int) -> Position:
        """Return where to start reading to get everything committed at or after the time."""
        return find_time(self, time_us)

    def extents(self, start: Position | None = None, end: Position | None = None) -> list[Extent]:
        """Return the files that overlap [start, end), in order, without reading data."""
        return self._extents_of(self._between(start, end), start)

    def split(
        self,
        start: Position | None = None,
        end: Position | None = None,
        ranges_min: int = 1,
        range_bytes: int = RANGE_BYTES_DEFAULT,
    ) -> list[ByteRange]:
        """Split [start, end) into ranges. Files in use are walked to find their last whole transaction."""
        located = self._between(start, end)
        # Use the same listing for the whole plan: a file that appears later belongs to the next plan.
        extents = [
            self._whole_if_copied(*pair)
            for pair in zip(self._extents_of(located, start), located, strict=True)
        ]
        first = start or self._position(located[0].file)
        # Files have no epochs, so both ends belong to the epoch of the start.
        last = end and replace(end, epoch=first.epoch)
        ranges = cut(extents, first, last, ranges_min, range_bytes)
        located_by_name = {located_file.file: located_file for located_file in located}
        return [
            bounded
            for bounded in (
                self._set_stop(unbounded, located_by_name[unbounded.file]) for unbounded in ranges
            )
            if bounded is not None
        ]

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        """Yield the file's bytes from the range's start to its end, in buffers of at most READ_BYTES.

        `resume_at` is not used, because there is no connection to lose. Raises SourceMissing, MagicInvalid,
        LogEncrypted; FileTruncated and EventMalformed for damaged compression.
        """
        located = self._located(byte_range.file)
        self._head_of(located)
        with _PlainStream(located) as stream:
            stream.skip(max(byte_range.start, FIRST_EVENT_OFFSET))
            buffer = memoryview(bytearray(READ_BYTES))
            while size := stream.read_into(buffer):
                yield buffer[:size]

    def align(self, byte_range: ByteRange) -> ByteRange:
        """Return the range extended back to an event at or before its start; see `Source.align`."""
        start = self._event_start(byte_range.file, byte_range.start)
        return replace(byte_range, start=start, aligned=start == FIRST_EVENT_OFFSET)

    def joint(self, byte_range: ByteRange) -> int | None:
        """Return where the next range of the same file is opened, None if there is none."""
        if not byte_range.is_cut or byte_range.stop is None:
            return None
        try:
            return self._event_start(byte_range.file, byte_range.stop)
        except StreamError:
            # The damage is reported when the range is read, after the rows that precede it.
            return None

    def head_bytes(self, file: str, epoch: int | None = None) -> bytes:
        """Return the file's magic and format description."""
        return self._head_of(self._located(file)).raw

    def schema_history(
        self, position: Position, name: TableName | None = None, *, again: bool = False
    ) -> None:
        """Return None: files keep no definitions other than those in their events."""

    def _event_start(self, file: str, offset: int) -> int:
        """Return the start of the last event at or before an offset; for a compressed file, return the start
        of the first event.
        """
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
        for located in list_files(self.options.paths):
            if located.file == file:
                return located
        raise SourceMissing(
            f"{file} is not among the files of {', '.join(self.options.paths)}",
            hint="It may have been purged since the start: keep files until they are read",
        )

    def _between(self, start: Position | None, end: Position | None) -> list[LocatedFile]:
        """Return the files that overlap [start, end). Raises SequenceGap, PositionPurged, PositionInvalid."""
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
            located = [located_file for located_file in located if located_file.number >= number]
        if end is not None:
            if start is not None and place_of(end) < place_of(start):
                raise PositionInvalid(f"the end is before the start {start}", position=str(end))
            located = [
                located_file for located_file in located if located_file.number <= file_number(end.file)
            ]
        check_sequence(located)
        return located

    def _set_stop(self, byte_range: ByteRange, located: LocatedFile) -> ByteRange | None:
        """Set the stop of the range at the end of a file in use; None if the range is empty."""
        if byte_range.stop is not None or not self._in_use(located):
            return byte_range
        stop = self._walk_to_tail(located).offset
        if stop <= byte_range.start:
            return None
        return replace(byte_range, stop=stop)

    def _walk_to_tail(self, located: LocatedFile) -> Position:
        """Return the end of the last whole transaction. A plain file is read from the previous result on."""
        previous = self._settled.get(located.file) if located.compression is None else None
        size = located.path.stat().st_size
        if size == 0:
            return self._position(located.file)
        tail = size if located.compression is None else None
        end = last_transaction_end(self, previous or self._position(located.file), tail)
        self._settled[located.file] = end
        return end

    def _extents_of(self, located: list[LocatedFile], start: Position | None) -> list[Extent]:
        epoch = self._epoch(start)
        return [
            Extent(
                epoch,
                located_file.file,
                FIRST_EVENT_OFFSET,
                located_file.path.stat().st_size,
                splittable=located_file.compression is None,
            )
            for located_file in located
        ]

    def _whole_if_copied(self, extent: Extent, located: LocatedFile) -> Extent:
        if extent.end < RANGE_BYTES_MIN or not extent.splittable:
            return extent
        return replace(extent, splittable=not self._head_of(located).copied)

    def _in_use(self, located: LocatedFile) -> bool:
        """Return whether a server may be writing the file.

        The result is not cached, because the server clears the in-use flag when it completes the file.
        """
        if located.path.stat().st_size == 0:
            # The server has created the file but not written to it yet.
            return True
        self._heads.pop(located.path, None)
        return self._head_of(located).in_use

    def _head_of(self, located: LocatedFile) -> _FileHead:
        if located.path not in self._heads:
            self._heads[located.path] = _read_head(located)
        return self._heads[located.path]


def _read_head(located: LocatedFile) -> _FileHead:
    """Read the magic and format description. Raises MagicInvalid, LogEncrypted, FileTruncated."""
    file_start = f"{located.file}:0"
    with _PlainStream(located) as stream:
        start = stream.read(FIRST_EVENT_OFFSET + _HEADER_BYTES)
        if start[: len(MAGIC)] == MAGIC_ENCRYPTED:
            raise _encrypted(located, 0)
        if not MAGIC.startswith(start[: len(MAGIC)]):
            raise MagicInvalid(
                f"{located.path} is not a binlog file: it begins with 0x{start[: len(MAGIC)].hex()}",
                position=file_start,
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
    # A server that decrypts its log marks this event as ignorable, and a kept log stores the event with that
    # mark.
    if following_type == _START_ENCRYPTION and not following[_FLAGS_AT] & _IGNORABLE:
        raise _encrypted(located, len(raw))
    if len(raw) < FIRST_EVENT_OFFSET + length:
        raise FileTruncated(
            f"{located.path} ends inside its format description",
            position=f"{located.file}:{len(raw)}",
            hint="Copy the file again from the server",
        )
    is_artificial = following_type == _ROTATE_EVENT and following[_FLAGS_AT] & _ARTIFICIAL
    copied = bool(header[_FLAGS_AT] & _RELAY or is_artificial)
    return _FileHead(raw, in_use=bool(header[_FLAGS_AT] & _IN_USE), copied=copied)


def _encrypted(located: LocatedFile, offset: int) -> LogEncrypted:
    return LogEncrypted(
        f"{located.path} is encrypted at rest",
        position=f"{located.file}:{offset}",
        hint="Read it from the live server, which decrypts: penstock inspect mysql://user@host",
    )


class _PlainStream(Closing):
    """The plain bytes of one file, decompressed if necessary."""

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

    def close(self) -> None:
        """Close the file."""
        if self._inflating is not None:
            self._inflating.close()
        self._file.close()

    def read_into(self, buffer: memoryview) -> int:
        """Fill the buffer from its start and return the number of bytes, 0 at the end."""
        size = self._inflate(buffer) if self._inflating is not None else self._file.readinto(buffer) or 0
        self._offset += size
        return size

    def read(self, length: int) -> bytes:
        """Return `length` bytes, fewer at the end."""
        buffer = memoryview(bytearray(length))
        filled = 0
        while filled < length and (size := self.read_into(buffer[filled:])):
            filled += size
        return bytes(buffer[:filled])

    def skip(self, length: int) -> None:
        """Skip `length` bytes. Compressed bytes have to be read for that."""
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
            position = f"{self._located.file}:{self._offset}"
            if self._file.tell() >= self._located.path.stat().st_size:
                raise FileTruncated(
                    f"{self._located.path}: the compressed bytes end too early or are damaged at their end",
                    position=position,
                    hint="Compress or copy the file again",
                ) from problem
            raise EventMalformed(
                f"{self._located.path}: the compressed bytes are damaged ({problem})",
                position=position,
                hint=f"Check it with {'zstd' if self._located.compression == 'zst' else 'gzip'} -t",
            ) from problem
