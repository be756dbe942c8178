# SPDX-License-Identifier: Apache-2.0
"""Files read as the log of a live server: whole, or with connections lost at chosen offsets."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.model import Position
from penstock.source.files import FileSource
from penstock.source.source import ByteRange, SourceOptions
from tests.support.binlog.events import FLAG_ARTIFICIAL, MAGIC, ROTATE, Event, events


class CutSource(FileSource):
    """A file whose connection is lost at each of several offsets. A connection always delivers at least 10
    bytes.
    """

    def __init__(self, path: Path, cuts: Sequence[int], buffer_bytes: int = 97) -> None:
        super().__init__(SourceOptions.parse(str(path)))
        self._data = path.read_bytes()
        self._cuts = cuts
        self._buffer_bytes = buffer_bytes
        self.losses = 0

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        assert resume_at is not None
        start = byte_range.start
        for cut in self._cuts:
            yield from self._buffers(start, min(max(cut, start + 10), len(self._data)))
            start = resume_at().offset
            self.losses += 1
        yield from self._buffers(start, len(self._data))

    def _buffers(self, start: int, stop: int) -> Iterator[memoryview]:
        for first in range(start, stop, self._buffer_bytes):
            yield memoryview(self._data)[first : min(first + self._buffer_bytes, stop)]


class LiveSource(FileSource):
    """A file, sent as a live server sends it. The end of the file is the end of the server's log."""

    live = True

    def __init__(self, path: Path) -> None:
        super().__init__(SourceOptions.parse(str(path)))
        self._name = path.name
        self._data = path.read_bytes()

    def head(self) -> Position:
        return Position(0, self._name, len(self._data))

    def joint(self, byte_range: ByteRange) -> None:
        return None

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        rotate = byte_range.start.to_bytes(8, "little") + self._name.encode()
        yield memoryview(Event(0, ROTATE, 1, 0, FLAG_ARTIFICIAL, rotate).encode())
        if byte_range.start > len(MAGIC):
            yield memoryview(replace(next(events(self._data)), end_position=0).encode())
        yield memoryview(self._data)[byte_range.start :]
