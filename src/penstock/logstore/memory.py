# SPDX-License-Identifier: Apache-2.0
"""The memory tier: the newest bytes of a log, bounded, with a cursor for each registered reader.

Three modes. `memory`: no files stand behind it, so a chunk leaves only after every registered reader has
acknowledged it, and the writer is held back meanwhile. `mixed`: the oldest chunks leave when the bound would
be passed, files have them. `file`: nothing is kept, only what is visible is told on.

What is held is always an unbroken run of what was put, up to the newest.
"""

import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from penstock.errors import LimitExceeded, OptionInvalid, PositionInvalid, PositionPurged
from penstock.model import Position

# A chunk below this is copied: a view would keep the whole receive buffer that it is a small part of.
_COPY_BYTES_MAX = 64 * 1024
# What a chunk costs besides its bytes, so that a million tiny ones are bounded as well.
CHUNK_OVERHEAD_BYTES = 512
# Chunks that have left are cut off the list when there are so many, which keeps leaving cheap.
_LEFT_MAX = 1024

# Epoch, file number, offset: what positions order by.
_Place = tuple[int, int, int]
_BEFORE_ALL: _Place = (-1, -1, -1)


class MemoryMode(StrEnum):
    """What stands behind the memory tier."""

    MEMORY = "memory"
    FILE = "file"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class MemoryChunk:
    """Whole events of one source file, in the source's own offsets [start, end).

    `boundary` is the offset behind the last transaction that ends in it, 0 where none does.
    """

    epoch: int
    file: str
    number: int
    start: int
    end: int
    boundary: int
    data: memoryview

    @property
    def place(self) -> _Place:
        """Where it begins, as positions order."""
        return self.epoch, self.number, self.start

    @property
    def place_end(self) -> _Place:
        """Where it ends, as positions order."""
        return self.epoch, self.number, self.end

    @property
    def position(self) -> Position:
        """Where it begins."""
        return Position(self.epoch, self.file, self.start)

    @property
    def cost(self) -> int:
        """The bytes that it counts against the bound."""
        return self.data.nbytes + CHUNK_OVERHEAD_BYTES


_LEFT = MemoryChunk(-1, "", -1, -1, -1, 0, memoryview(b""))


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """What a cursor got: contiguous bytes of one source file, from `start` to `end`, whole transactions."""

    start: Position
    end: Position
    data: list[memoryview]


class MemoryTier:
    """The newest chunks of one log, never more than `bytes_max` of them. Every method may be called by any
    thread.

    Raises OptionInvalid for a bound below 1 in a mode that keeps chunks.
    """

    def __init__(self, bytes_max: int, mode: MemoryMode | str = MemoryMode.MIXED) -> None:
        self.mode = MemoryMode(mode)
        self.bytes_max = bytes_max
        if bytes_max < 1 and self.mode is not MemoryMode.FILE:
            raise OptionInvalid(
                f"a memory tier of {bytes_max} bytes can hold nothing",
                hint="Raise log.memory_bytes, or set log.mode to file",
            )
        self._changed = threading.Condition()
        # Chunk number `serial` of all that were put stands at `_chunks[serial - _serial]`; those before
        # `_first` have left.
        self._chunks: list[MemoryChunk] = []
        self._serial = 0
        self._first = 0
        self._bytes = 0
        # All that was put at or behind this place is held.
        self._held_from: _Place | None = None
        self._visible: Position | None = None
        self._visible_place = _BEFORE_ALL
        self._cursors: dict[str, MemoryCursor] = {}
        self._closed = False

    # --- What it holds ----------------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """The bytes held now, with the cost of their bookkeeping; never above `bytes_max`."""
        return self._bytes

    @property
    def visible(self) -> Position | None:
        """The end of the last whole transaction that was put, None before the first."""
        return self._visible

    @property
    def earliest(self) -> Position | None:
        """Where the oldest chunk held begins, None while none is held."""
        with self._changed:
            return self._chunks[self._first].position if self._first < len(self._chunks) else None

    def cursors(self) -> dict[str, Position]:
        """Return how far each registered reader has acknowledged."""
        with self._changed:
            return {name: cursor.acknowledged for name, cursor in self._cursors.items()}

    # --- The writer -------------------------------------------------------------------------

    def put(
        self,
        data: bytes | bytearray | memoryview,
        *,
        epoch: int,
        file: str,
        start: int,
        end: int,
        boundary: int,
        timeout: float | None = None,
    ) -> bool:
        """Take a chunk over and wake the readers; return whether it was kept.

        `boundary` is the offset behind the last whole transaction known, `end` where none is open. The buffer
        must not change afterwards. In `memory` mode the call waits for acknowledgements until there is room,
        at most `timeout` seconds, and False means that the chunk was not taken: put it again. In the other
        modes the call never waits, and False means that only the files have it.

        Raises LimitExceeded in `memory` mode for a chunk, or a transaction, that the bound cannot hold.
        """
        view = memoryview(data).cast("B")
        if view.nbytes < _COPY_BYTES_MAX:
            view = memoryview(bytes(view))
        number = Position(epoch, file, start).file_number
        chunk = MemoryChunk(epoch, file, number, start, end, boundary if boundary > start else 0, view)
        with self._changed:
            if self.mode is MemoryMode.MEMORY:
                if not self._wait_for_room(chunk, timeout):
                    return False
                kept = True
            else:
                kept = self.mode is MemoryMode.MIXED and chunk.cost <= self.bytes_max and not self._closed
            if kept:
                while self._bytes + chunk.cost > self.bytes_max:
                    self._drop_oldest()
                if self._held_from is None:
                    self._held_from = chunk.place
                self._chunks.append(chunk)
                self._bytes += chunk.cost
            else:
                self._drop_all(chunk.place_end)
            if chunk.boundary:
                self._show(Position(epoch, file, boundary), (epoch, number, boundary))
            return kept

    def show(self, position: Position) -> None:
        """Make known how far whole transactions go before anything is put: what recovery found in the
        files."""
        with self._changed:
            if not self._chunks:
                self._held_from = _place(position)
            self._show(position, _place(position))

    def cut(self, position: Position) -> None:
        """Forget what is held: what was put behind a position comes again, or never was."""
        with self._changed:
            self._drop_all(_place(position))

    def close(self) -> None:
        """Let go of every chunk and wake everybody who waits. Nothing is kept afterwards."""
        with self._changed:
            self._closed = True
            self._drop_all(self._visible_place)
            self._changed.notify_all()

    # --- Readers ----------------------------------------------------------------------------

    def read(self, epoch: int, file: str, start: int, stop: int) -> list[memoryview] | None:
        """Return the bytes of [start, stop) of a source file that are held without a break from `start` on.

        Fewer than asked for where they end earlier, [] where `start` is where the held bytes of the file end,
        and None where the tier does not have `start`. The views stay good after their chunks have left.
        """
        place = _place(Position(epoch, file, start))
        with self._changed:
            at = self._index_at(place)
            if at < self._first:
                return None
            chunk = self._chunks[at]
            if place[:2] != (chunk.epoch, chunk.number) or start > chunk.end:
                return None
            found = []
            while start < stop and place[:2] == (chunk.epoch, chunk.number) and chunk.start <= start:
                if start < chunk.end:
                    found.append(chunk.data[start - chunk.start : stop - chunk.start])
                    start = chunk.end
                at += 1
                if at == len(self._chunks):
                    break
                chunk = self._chunks[at]
            return found

    def wait_visible(self, after: Position | None, timeout: float | None = None) -> Position | None:
        """Wait until a whole transaction ends behind `after`, at most so many seconds; return what is visible
        then.

        None for `after` waits for the first. The answer may lie at or before `after`: then the time ran out,
        or the tier was closed.
        """
        place = _BEFORE_ALL if after is None else _place(after)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._visible_place > place, timeout)
            return self._visible

    def register(self, name: str, position: Position) -> "MemoryCursor":
        """Add a reader that has consumed all before a position; its name must be free.

        In `memory` mode nothing behind what it acknowledges leaves. Raises OptionInvalid for a name that is
        taken, PositionPurged where the tier no longer has the position.
        """
        with self._changed:
            if name in self._cursors:
                raise OptionInvalid(
                    f"a reader named {name!r} is registered already",
                    hint="Close that reader, or choose another name",
                )
            cursor = self._cursors[name] = MemoryCursor(self, name, position, self._attach(position))
            return cursor

    # --- Inside, with the lock held ---------------------------------------------------------

    def _show(self, position: Position, place: _Place) -> None:
        self._visible, self._visible_place = position, place
        self._changed.notify_all()

    def _index_at(self, place: _Place) -> int:
        """Return the index of the last chunk that begins at or before a place, `_first` - 1 where none
        does."""
        return bisect_right(self._chunks, place, lo=self._first, key=_begin_of) - 1

    def _attach(self, position: Position) -> int:
        """Return the serial of the chunk to read on in from a position. Raises PositionPurged."""
        place = _place(position)
        if self._held_from is not None and place < self._held_from:
            oldest = self._chunks[self._first].position if self._first < len(self._chunks) else self._visible
            raise PositionPurged(
                f"the memory tier begins with {oldest}",
                position=str(position),
                hint=f"Read the files of the log, or start at {oldest}",
            )
        at = self._index_at(place)
        if at < self._first or place >= self._chunks[at].place_end:
            # It lies where a chunk ends or between two: chunks follow one another, so nothing is passed over.
            at += 1
        return self._serial + at

    def _wait_for_room(self, chunk: MemoryChunk, timeout: float | None) -> bool:
        """Wait until a chunk fits beside what readers still need. Raises LimitExceeded where it never
        would."""
        if chunk.cost > self.bytes_max:
            raise self._too_large(f"a chunk of {chunk.data.nbytes} bytes does not fit", chunk)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            consumed = min((cursor.place for cursor in self._cursors.values()), default=self._visible_place)
            consumed = min(consumed, self._visible_place)
            while self._bytes + chunk.cost > self.bytes_max:
                if self._chunks[self._first].place_end > consumed:
                    break
                self._drop_oldest()
            else:
                return True
            if consumed == self._visible_place:
                raise self._too_large("a transaction that is not finished does not fit", chunk)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._changed.wait(left)
        return False

    def _too_large(self, what: str, chunk: MemoryChunk) -> LimitExceeded:
        return LimitExceeded(
            f"{what} into a memory tier of {self.bytes_max} bytes that no files stand behind",
            position=str(chunk.position),
            hint="Raise log.memory_bytes, or keep files: log.mode mixed",
        )

    def _drop_oldest(self) -> None:
        oldest = self._chunks[self._first]
        self._held_from = oldest.place_end
        self._bytes -= oldest.cost
        self._chunks[self._first] = _LEFT
        self._first += 1
        if self._first > _LEFT_MAX and self._first * 2 > len(self._chunks):
            del self._chunks[: self._first]
            self._serial += self._first
            self._first = 0

    def _drop_all(self, held_from: _Place) -> None:
        # One serial is passed over, so that a cursor at the end of what was held sees that something is
        # missing.
        self._serial += len(self._chunks) + 1
        self._chunks.clear()
        self._first = self._bytes = 0
        self._held_from = held_from


class MemoryCursor:
    """A registered reader's place in the tier: how far it has got, and how far it has acknowledged.

    Used by one thread at a time; a context manager that closes. Made by `MemoryTier.register`.
    """

    def __init__(self, tier: MemoryTier, name: str, position: Position, serial: int) -> None:
        self._tier = tier
        self.name = name
        self.acknowledged = position
        self.place = _place(position)
        self._next = position
        self._next_place = self.place
        self._serial = serial

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, timeout: float | None = None, bytes_max: int | None = None) -> MemoryRun | None:
        """Return the whole transactions of one source file behind what was got before, None when none came in
        time.

        It stops at the first boundary known past `bytes_max`. Raises PositionPurged where the tier no longer
        has them, which with files behind it is the sign to read those, and then to `seek`.
        """
        tier = self._tier
        with tier._changed:
            tier._changed.wait_for(lambda: tier._closed or tier._visible_place > self._next_place, timeout)
            if tier._closed or tier._visible_place <= self._next_place:
                return None
            if self._serial < tier._serial + tier._first:
                # It fell behind; whether its place is held all the same is told by the place.
                self._serial = tier._attach(self._next)
            return self._gather(tier._chunks, self._serial - tier._serial, bytes_max)

    def acknowledge(self, position: Position) -> None:
        """Say that all before a position is consumed, and let the writer go on. Raises PositionInvalid.

        What was acknowledged before may be acknowledged again; it changes nothing.
        """
        place = _place(position)
        with self._tier._changed:
            if place > self._tier._visible_place and place > self.place:
                raise PositionInvalid(
                    f"{self.name} acknowledges more than there is: the log goes to {self._tier.visible}",
                    position=str(position),
                    hint="Acknowledge the end of what was got",
                )
            if place > self.place:
                self.place, self.acknowledged = place, position
                if place > self._next_place:
                    # It was consumed by another way of reading.
                    self._serial = self._tier._attach(position)
                    self._next, self._next_place = position, place
                self._tier._changed.notify_all()

    def rewind(self) -> None:
        """Go back to what was acknowledged last: what was got since is given again. Raises PositionPurged."""
        self.seek(self.acknowledged)

    def seek(self, position: Position) -> None:
        """Go on from a position, which another way of reading has reached. Raises PositionPurged."""
        with self._tier._changed:
            self._serial = self._tier._attach(position)
            self._next, self._next_place = position, _place(position)

    def close(self) -> None:
        """Leave the tier: nothing is held for this reader any more."""
        with self._tier._changed:
            if self._tier._cursors.get(self.name) is self:
                del self._tier._cursors[self.name]
            self._tier._changed.notify_all()

    def _gather(self, chunks: list[MemoryChunk], at: int, bytes_max: int | None) -> MemoryRun | None:
        """Collect chunks of one file up to a boundary. With the tier's lock held."""
        first: MemoryChunk | None = None
        last = start = end = size = 0
        for index in range(at, len(chunks)):
            chunk = chunks[index]
            if first is None or (chunk.epoch, chunk.number) != (first.epoch, first.number):
                if end:
                    break
                # A file may end inside a transaction that its server never finished: nobody gets that.
                first, at, size = chunk, index, 0
                same = self._next_place[:2] == (chunk.epoch, chunk.number)
                start = max(chunk.start, self._next_place[2]) if same else chunk.start
            size += chunk.end - chunk.start
            if chunk.boundary > start:
                last, end = index, chunk.boundary
                if bytes_max is not None and size >= bytes_max:
                    break
        if first is None or not end:
            return None
        views = [
            chunk.data[max(start - chunk.start, 0) : end - chunk.start] for chunk in chunks[at : last + 1]
        ]
        run = MemoryRun(
            Position(first.epoch, first.file, start), Position(first.epoch, first.file, end), views
        )
        self._next, self._next_place = run.end, (first.epoch, first.number, end)
        self._serial = self._tier._serial + last + (end == chunks[last].end)
        return run


def _place(position: Position) -> _Place:
    return position.epoch, position.file_number, position.offset


def _begin_of(chunk: MemoryChunk) -> _Place:
    return chunk.place
