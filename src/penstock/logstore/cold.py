# SPDX-License-Identifier: Apache-2.0
"""Cold segments: the same bytes as seekable zstd, one frame for each block.

`zstd -d` restores the plain segment, which is a valid binlog file. The file ends with a seek table in a
skippable frame, as the zstd seekable format defines it. Reading a range decompresses only its frames:

    frame, frame, ...                           zstd frames, each with its size and its checksum
    0x184D2A5E | table bytes                    skippable frame; all little endian, four bytes each
    compressed bytes | plain bytes              for each frame
    frames | 0x00 | 0x8F92EAB1                  the footer; the byte says that the table has no checksums

Source: zstd_seekable_compression_format.md, version 0.1.0, of the zstd project.
"""

import struct
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
import zstandard

from penstock.closing import Closing
from penstock.errors import ChecksumMismatch, EventMalformed, FileTruncated
from penstock.limits import MIB
from penstock.logstore.catalog import SegmentCatalog
from penstock.logstore.disk import TMP_SUFFIX, Disk
from penstock.logstore.layout import Layout, index_path
from penstock.logstore.records import COLD, RECORD_BYTES, SegmentRecord, block_records, sound_records

_LEVEL = 3
# A block with an event of a gigabyte becomes several frames, so that reading a part of it stays cheap.
FRAME_BYTES_MAX = 8 * MIB
_FRAME_BYTES_DEFAULT = 64 * 1024

_SKIPPABLE = struct.Struct("<II")
_SKIPPABLE_MAGIC = 0x184D2A5E
_FOOTER = struct.Struct("<IBI")
_SEEKABLE_MAGIC = 0x8F92EAB1
_HAS_CHECKSUMS = 0x80
_RESERVED = 0x7C
_ENTRY_BYTES = 8
_Offsets = npt.NDArray[np.int64]
# Readers usually continue within the frame they read last, so the latest frames stay decompressed.
_FRAMES_KEPT = 4

_log = structlog.get_logger(__name__)


class StoredFile(Protocol):
    """A stored file with random access to its bytes. It is plain or compressed, local or remote."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop); fewer at the end of the file."""

    def close(self) -> None:
        """Release the file."""


@dataclass(frozen=True)
class Frame:
    """One zstd frame: its range in the compressed file, and the range of plain bytes that it contains."""

    stored_start: int
    stored_stop: int
    start: int
    stop: int


def compress_segment(disk: Disk, plain: Path, cold: Path, cuts: Sequence[int]) -> int:
    """Write the compressed form of a plain segment next to it and return its size in bytes.

    The plain file is kept. `cuts` are the offsets in the plain file where frames start: the end of the head
    and the end of each block. The compressed file is written under a temporary name, synced, read back and
    compared, and only then renamed. Raises ChecksumMismatch if the data read back differs, LogFull,
    DiskFailed.
    """
    tmp = cold.with_name(cold.name + TMP_SUFFIX)
    with disk.open_read(plain) as source:
        size = source.size
        with closing(disk.append_open(tmp)) as target:
            target.truncate(0)
            table, crc = bytearray(), 0
            # Reusing one compressor keeps its tables allocated. Every call still produces a separate frame.
            compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
            for start, stop in _frame_ranges(size, cuts):
                block = source.read(start, stop)
                if len(block) < stop - start:
                    raise FileTruncated(
                        f"{plain} became shorter while it was compressed",
                        position=f"{plain.name}:{start + len(block)}",
                        hint="Run: penstock log verify",
                    )
                crc = zlib.crc32(block, crc)
                frame = compressor.compress(block)
                target.write([frame])
                table += struct.pack("<II", len(frame), len(block))
            target.write([_seek_table(bytes(table))])
            target.sync()
            stored = target.size
    with SeekableFile(disk.open_read(tmp), str(cold)) as written:
        written_crc = 0
        for piece in written.pieces():
            written_crc = zlib.crc32(piece, written_crc)
        if written_crc != crc or written.size != size:
            raise ChecksumMismatch(
                f"{tmp} does not give back {plain}",
                position=f"{plain.name}:0",
                hint="The disk or the memory of this host loses bits; the plain segment is kept",
            )
    disk.rename(tmp, cold)
    disk.sync_folder(cold.parent)
    return stored


def make_cold(disk: Disk, layout: Layout, catalog: SegmentCatalog, segment: SegmentRecord) -> SegmentRecord:
    """Compress a closed segment, replace the plain file by the result, and return its new L1 record.

    After a crash, the folder has the plain segment or both files; if both, the plain file is valid. Raises
    any error from `compress_segment`.
    """
    plain = layout.segment(segment.hour, segment.version)
    cold = layout.segment(segment.hour, segment.version, cold=True)
    stored_bytes = compress_segment(disk, plain, cold, _block_cuts(disk, plain, segment))
    record = replace(segment, state=COLD, stored_bytes=stored_bytes)
    catalog.replace(record)
    disk.remove(plain)
    disk.sync_folder(plain.parent)
    _log.info(
        "a segment was compressed", segment=plain.name, bytes=segment.stored_bytes, stored_bytes=stored_bytes
    )
    return record


def _block_cuts(disk: Disk, plain: Path, segment: SegmentRecord) -> list[int]:
    """Return where frames start: after the head and after each block, or, if there is no index, at equal
    intervals.
    """
    index = index_path(plain)
    shift = segment.head_bytes - segment.base
    content = disk.read(index, RECORD_BYTES) if disk.exists(index) else b""
    if content and sound_records(content) * RECORD_BYTES == len(content):
        return [segment.head_bytes, *(int(end) + shift for end in block_records(content)["source_end"])]
    return list(range(segment.head_bytes, disk.size(plain), _FRAME_BYTES_DEFAULT))


class SeekableFile(Closing):
    """Presents a compressed segment as its plain bytes. Closing it, or leaving it as a context manager,
    closes the underlying file.

    Safe for concurrent reads. `frames_read` counts the decompressed frames. Raises EventMalformed if the seek
    table is invalid; with `lazy`, only on the first access.
    """

    def __init__(self, stored: StoredFile, name: str, *, lazy: bool = False) -> None:
        self._stored = stored
        self._name = name
        # Frame starts in ascending order, plus the end of the last frame: compressed offsets, plain offsets.
        self._offsets: tuple[_Offsets, _Offsets] | None = None
        if not lazy:
            self._offsets = _read_seek_table(stored, name)
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.frames_read = 0

    @property
    def _stored_at(self) -> _Offsets:
        return self._table()[0]

    @property
    def _plain_at(self) -> _Offsets:
        return self._table()[1]

    def _table(self) -> tuple[_Offsets, _Offsets]:
        if self._offsets is None:
            self._offsets = _read_seek_table(self._stored, self._name)
        return self._offsets

    @property
    def size(self) -> int:
        """The size of the plain segment in bytes."""
        return int(self._plain_at[-1])

    @property
    def frames(self) -> list[Frame]:
        """All frames, in order."""
        ends = zip(pairwise(map(int, self._stored_at)), pairwise(map(int, self._plain_at)), strict=True)
        return [Frame(*stored, *plain) for stored, plain in ends]

    def read(self, start: int, stop: int) -> bytes:
        """Return the plain bytes of [start, stop), fewer at the end of the segment.

        Only the frames that contain the range are decompressed. Raises ChecksumMismatch for a damaged frame
        and FileTruncated for an incomplete one.
        """
        pieces = [bytes(piece) for piece in self.pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """Yield the plain bytes of [start, stop), one frame at a time. Raises any error from `read`."""
        stop = self.size if stop is None else min(stop, self.size)
        if start >= stop:
            return
        for index in range(bisect_right(self._plain_at, start) - 1, len(self._plain_at) - 1):
            begins = int(self._plain_at[index])
            if begins >= stop:
                return
            yield memoryview(self._frame(index))[max(start - begins, 0) : stop - begins]

    def close(self) -> None:
        """Close the underlying file."""
        self._stored.close()

    def _frame(self, index: int) -> bytes:
        with self._lock:
            if index in self._kept:
                self._kept.move_to_end(index)
                return self._kept[index]
        plain = self._decompress(index)
        with self._lock:
            self.frames_read += 1
            self._kept[index] = plain
            while len(self._kept) > _FRAMES_KEPT:
                self._kept.popitem(last=False)
        return plain

    def _decompress(self, index: int) -> bytes:
        start, stop = int(self._stored_at[index]), int(self._stored_at[index + 1])
        size = int(self._plain_at[index + 1] - self._plain_at[index])
        frame = self._stored.read(start, stop)
        frame_position = f"{self._name}:{start}"
        if len(frame) < stop - start:
            raise FileTruncated(
                f"{self._name} ends inside a frame", position=frame_position, hint="Copy the segment again"
            )
        try:
            plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        except zstandard.ZstdError as problem:
            raise ChecksumMismatch(
                f"{self._name}: a frame is damaged ({problem})",
                position=frame_position,
                hint=f"Check it with zstd -t {self._name}, and copy the segment again",
            ) from problem
        if len(plain) != size:
            raise ChecksumMismatch(
                f"{self._name}: a frame gives {len(plain)} bytes, the seek table says {size}",
                position=frame_position,
                hint=f"Check it with zstd -t {self._name}, and copy the segment again",
            )
        return plain


def _frame_ranges(size: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the plain byte range of each frame: split at the cuts and at FRAME_BYTES_MAX."""
    offsets = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    for start, stop in pairwise(offsets):
        for begin in range(start, stop, FRAME_BYTES_MAX):
            yield begin, min(begin + FRAME_BYTES_MAX, stop)


def _seek_table(entries: bytes) -> bytes:
    size = len(entries) + _FOOTER.size
    footer = _FOOTER.pack(len(entries) // _ENTRY_BYTES, 0, _SEEKABLE_MAGIC)
    return _SKIPPABLE.pack(_SKIPPABLE_MAGIC, size) + entries + footer


def _read_seek_table(stored: StoredFile, name: str) -> tuple[_Offsets, _Offsets]:
    """Return the frame starts, compressed and plain, each followed by the end of the last frame.

    Raises EventMalformed.
    """
    size = stored.size
    footer = stored.read(max(size - _FOOTER.size, 0), size)
    if len(footer) < _FOOTER.size:
        raise _malformed(name, "it is too short", size)
    frames, flags, magic = _FOOTER.unpack(footer)
    entry_bytes = _ENTRY_BYTES + (4 if flags & _HAS_CHECKSUMS else 0)
    table_bytes = frames * entry_bytes + _FOOTER.size
    begins = size - table_bytes - _SKIPPABLE.size
    if magic != _SEEKABLE_MAGIC or flags & _RESERVED or begins < 0:
        raise _malformed(name, "it does not end in a seek table", size - _FOOTER.size)
    head = stored.read(begins, begins + _SKIPPABLE.size)
    if _SKIPPABLE.unpack(head) != (_SKIPPABLE_MAGIC, table_bytes):
        raise _malformed(name, "its seek table contradicts itself", begins)
    raw = stored.read(begins + _SKIPPABLE.size, size - _FOOTER.size)
    words = np.frombuffer(raw, "<u4").reshape(frames, entry_bytes // 4).astype(np.int64)
    ends = np.zeros((2, frames + 1), np.int64)
    np.cumsum(words[:, :2].T, axis=1, out=ends[:, 1:])
    if ends[0, -1] != begins:
        raise _malformed(name, "its frames do not reach its seek table", begins)
    return ends[0], ends[1]


def _malformed(name: str, why: str, offset: int) -> EventMalformed:
    return EventMalformed(
        f"{name} cannot be read in parts: {why}",
        position=f"{name}:{offset}",
        hint=f"Check it with zstd -t {name}; decompress it with zstd -d, or copy the segment again",
    )
