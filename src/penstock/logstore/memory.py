# SPDX-License-Identifier: Apache-2.0
"""The memory tier: the newest bytes of a log, bounded, with a cursor for each registered reader.

There are three modes. `memory`: there are no files, so a chunk is evicted only after every registered reader
acknowledged it, and until then the writer is subject to backpressure. `mixed`: the oldest chunks are evicted
at the bound, because files hold them. `file`: no chunk is kept, and only the visible position is published.

The tier always holds an unbroken run of chunks up to the newest.
"""

import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum

from penstock.closing import Closing
from penstock.errors import LimitExceeded, OptionInvalid, PositionInvalid, PositionPurged
from penstock.model import Position

# Smaller parts of a buffer are copied: a view would keep the whole buffer alive.
_COPY_BYTES_MAX = 64 * 1024
# The overhead of a chunk, so that a million tiny chunks are bounded too.
CHUNK_OVERHEAD_BYTES = 512
# Evicted chunks are removed from the list in batches of this size, which keeps eviction cheap.
_LEFT_MAX = 1024

# Epoch, file number, offset: the sort key of positions.
_OrderKey = tuple[int, int, int]
_BEFORE_FIRST: _OrderKey = (-1, -1, -1)


class MemoryMode(StrEnum):
    """Where the memory tier's chunks are also stored."""

    MEMORY = "memory"
    FILE = "file"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class MemoryChunk:
    """Whole events of one source file, at the source's offsets [start, end).

    `boundary` is the offset after the last transaction that ends in the chunk, 0 if none does.
    """

    epoch: int
    file: str
    number: int
    start: int
    end: int
    boundary: int
    data: memoryview

    @property
    def start_key(self) -> _OrderKey:
        """The sort key of its start."""
        return self.epoch, self.number, self.start

    @property
    def end_key(self) -> _OrderKey:
        """The sort key of its end."""
        return self.epoch, self.number, self.end

    @property
    def position(self) -> Position:
        """The position of its start."""
        return Position(self.epoch, self.file, self.start)

    @property
    def cost(self) -> int:
        """The bytes that the chunk counts against the bound."""
        return self.data.nbytes + CHUNK_OVERHEAD_BYTES


_LEFT = MemoryChunk(-1, "", -1, -1, -1, 0, memoryview(b""))


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """What a cursor returned: contiguous bytes of one source file from `start` to `end`, whole
    transactions."""

    start: Position
    end: Position
    data: list[memoryview]


class MemoryTier:
    """The newest chunks of one log, at most `bytes_max` bytes. All methods are thread-safe.

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
        # The chunk with number `serial` is at `_chunks[serial - _serial]`. Chunks before `_first` were
        # evicted.
        self._chunks: list[MemoryChunk] = []
        self._serial = 0
        self._first = 0
        self._bytes = 0
        # Everything from this key on is held.
        self._held_from_key: _OrderKey | None = None
        self._visible: Position | None = None
        self._visible_key = _BEFORE_FIRST
        self._cursors: dict[str, MemoryCursor] = {}
        self._closed = False

    # --- State ------------------------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """The bytes held now, including overhead; at most `bytes_max`."""
        return self._bytes

    @property
    def visible(self) -> Position | None:
        """The end of the last whole transaction, None before the first."""
        return self._visible

    @property
    def earliest(self) -> Position | None:
        """The start of the oldest chunk, None if no chunk is held."""
        with self._changed:
            return self._chunks[self._first].position if self._first < len(self._chunks) else None

    def cursors(self) -> dict[str, Position]:
        """Return the acknowledged position of each registered reader."""
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
        """Store a chunk and wake the readers; return whether it was kept.

        `boundary` is the offset after the last whole transaction, `end` if none is open. The buffer must not
        change afterwards. In `memory` mode the call blocks for up to `timeout` seconds until acknowledgements
        free space, and False means that the chunk was not stored: retry it. In the other modes the call never
        blocks, and False means that only the files hold the chunk.

        Raises LimitExceeded in `memory` mode for a chunk or a transaction that exceeds the bound.
        """
        view = memoryview(data).cast("B")
        if view.nbytes < _COPY_BYTES_MAX and view.nbytes < memoryview(view.obj).nbytes:
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
                if self._held_from_key is None:
                    self._held_from_key = chunk.start_key
                self._chunks.append(chunk)
                self._bytes += chunk.cost
            else:
                self._drop_all(chunk.end_key)
            if chunk.boundary:
                self._show(Position(epoch, file, boundary), (epoch, number, boundary))
            return kept

    def show(self, position: Position) -> None:
        """Publish the visible position before the first chunk, as recovery found it in the files."""
        with self._changed:
            if not self._chunks:
                self._held_from_key = _order_key(position)
            self._show(position, _order_key(position))

    def cut(self, position: Position) -> None:
        """Drop all chunks: the bytes after a position are sent again, or never existed."""
        with self._changed:
            self._drop_all(_order_key(position))

    def close(self) -> None:
        """Drop all chunks and wake all waiting threads. Nothing is kept afterwards."""
        with self._changed:
            self._closed = True
            self._drop_all(self._visible_key)
            self._changed.notify_all()

    # --- Readers ----------------------------------------------------------------------------

    def read(self, epoch: int, file: str, start: int, stop: int) -> list[memoryview] | None:
        """Return the held bytes of [start, stop) of a source file, without a break from `start` on.

        The result is shorter if the held bytes end earlier, [] if `start` is the end of the file's held
        bytes, and None if the tier does not hold `start`. The views stay valid after their chunks are
        evicted.
        """
        start_key = _order_key(Position(epoch, file, start))
        with self._changed:
            index = self._index_at(start_key)
            if index < self._first:
                return None
            chunk = self._chunks[index]
            if start_key[:2] != (chunk.epoch, chunk.number) or start > chunk.end:
                return None
            views = []
            while start < stop and start_key[:2] == (chunk.epoch, chunk.number) and chunk.start <= start:
                if start < chunk.end:
                    views.append(chunk.data[start - chunk.start : stop - chunk.start])
                    start = chunk.end
                index += 1
                if index == len(self._chunks):
                    break
                chunk = self._chunks[index]
            return views

    def wait_visible(self, after: Position | None, timeout: float | None = None) -> Position | None:
        """Wait up to `timeout` seconds until a whole transaction ends after `after`; return the visible
        position.

        None for `after` waits for the first transaction. The returned position may be at or before `after` if
        the wait timed out or the tier was closed.
        """
        after_key = _BEFORE_FIRST if after is None else _order_key(after)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._visible_key > after_key, timeout)
            return self._visible

    def register(self, name: str, position: Position) -> "MemoryCursor":
        """Add a reader that has consumed everything before a position. Its name must be free.

        In `memory` mode, nothing after its acknowledged position is evicted. Raises OptionInvalid for a name
        in use, PositionPurged if the tier no longer holds the position.
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

    def _show(self, position: Position, key: _OrderKey) -> None:
        self._visible, self._visible_key = position, key
        self._changed.notify_all()

    def _index_at(self, key: _OrderKey) -> int:
        """Return the index of the last chunk that starts at or before a key, `_first` - 1 if none does."""
        return bisect_right(self._chunks, key, lo=self._first, key=_begin_of) - 1

    def _attach(self, position: Position) -> int:
        """Return the serial number of the chunk to continue from at a position. Raises PositionPurged."""
        key = _order_key(position)
        if self._held_from_key is not None and key < self._held_from_key:
            oldest = self._chunks[self._first].position if self._first < len(self._chunks) else self._visible
            raise PositionPurged(
                f"the memory tier begins with {oldest}",
                position=str(position),
                hint=f"Read the files of the log, or start at {oldest}",
            )
        index = self._index_at(key)
        if index < self._first or key >= self._chunks[index].end_key:
            # The position is at the end of a chunk or between two chunks. Chunks are contiguous, so nothing
            # is skipped.
            index += 1
        return self._serial + index

    def _wait_for_room(self, chunk: MemoryChunk, timeout: float | None) -> bool:
        """Wait until a chunk fits. Raises LimitExceeded if it never can."""
        if chunk.cost > self.bytes_max:
            raise self._too_large(f"a chunk of {chunk.data.nbytes} bytes does not fit", chunk)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            consumed = min(
                (cursor.acknowledged_key for cursor in self._cursors.values()), default=self._visible_key
            )
            consumed = min(consumed, self._visible_key)
            while self._bytes + chunk.cost > self.bytes_max:
                if self._chunks[self._first].end_key > consumed:
                    break
                self._drop_oldest()
            else:
                return True
            if consumed == self._visible_key:
                raise self._too_large("a transaction that is not finished does not fit", chunk)
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            self._changed.wait(remaining)
        return False

    def _too_large(self, what: str, chunk: MemoryChunk) -> LimitExceeded:
        return LimitExceeded(
            f"{what} into a memory tier of {self.bytes_max} bytes that no files stand behind",
            position=str(chunk.position),
            hint="Raise log.memory_bytes, or keep files: log.mode mixed",
        )

    def _drop_oldest(self) -> None:
        oldest = self._chunks[self._first]
        self._held_from_key = oldest.end_key
        self._bytes -= oldest.cost
        self._chunks[self._first] = _LEFT
        self._first += 1
        if self._first > _LEFT_MAX and self._first * 2 > len(self._chunks):
            del self._chunks[: self._first]
            self._serial += self._first
            self._first = 0

    def _drop_all(self, held_from: _OrderKey) -> None:
        # Skip one serial, so that a cursor at the end of the dropped chunks detects the gap.
        self._serial += len(self._chunks) + 1
        self._chunks.clear()
        self._first = self._bytes = 0
        self._held_from_key = held_from


class MemoryCursor(Closing):
    """The state of a registered reader: its next position and its acknowledged position.

    Not thread-safe; a context manager that closes the cursor. Created by `MemoryTier.register`.
    """

    def __init__(self, tier: MemoryTier, name: str, position: Position, serial: int) -> None:
        self._tier = tier
        self.name = name
        self.acknowledged = position
        self.acknowledged_key = _order_key(position)
        self._next = position
        self._next_key = self.acknowledged_key
        self._serial = serial

    def get(self, timeout: float | None = None, bytes_max: int | None = None) -> MemoryRun | None:
        """Return the whole transactions of one source file after the previous result, None if the wait timed
        out.

        The result ends at the first boundary past `bytes_max`. Raises PositionPurged if the tier no longer
        holds them; with files, read those and then call `seek`.
        """
        tier = self._tier
        with tier._changed:
            tier._changed.wait_for(lambda: tier._closed or tier._visible_key > self._next_key, timeout)
            if tier._closed or tier._visible_key <= self._next_key:
                return None
            if self._serial < tier._serial + tier._first:
                # The chunk was evicted. The position decides whether it is still held.
                self._serial = tier._attach(self._next)
            return self._gather(tier._chunks, self._serial - tier._serial, bytes_max)

    def acknowledge(self, position: Position) -> None:
        """Confirm that everything before a position is consumed, and release the writer. Raises
        PositionInvalid.

        Acknowledging an earlier position again has no effect.
        """
        key = _order_key(position)
        with self._tier._changed:
            if key > self._tier._visible_key and key > self.acknowledged_key:
                raise PositionInvalid(
                    f"{self.name} acknowledges more than the log has: it ends at {self._tier.visible}",
                    position=str(position),
                    hint="Acknowledge the end of what was got",
                )
            if key > self.acknowledged_key:
                self.acknowledged_key, self.acknowledged = key, position
                if key > self._next_key:
                    # The reader consumed these bytes from elsewhere, for example from the files.
                    self._serial = self._tier._attach(position)
                    self._next, self._next_key = position, key
                self._tier._changed.notify_all()

    def rewind(self) -> None:
        """Go back to the acknowledged position; later chunks are returned again. Raises PositionPurged."""
        self.seek(self.acknowledged)

    def seek(self, position: Position) -> None:
        """Continue from a position reached by other means, such as the files. Raises PositionPurged."""
        with self._tier._changed:
            self._serial = self._tier._attach(position)
            self._next, self._next_key = position, _order_key(position)

    def close(self) -> None:
        """Unregister: nothing is kept for this reader any more."""
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
                # A file may end inside a transaction that its server never finished. No reader gets that
                # part.
                first, at, size = chunk, index, 0
                same = self._next_key[:2] == (chunk.epoch, chunk.number)
                start = max(chunk.start, self._next_key[2]) if same else chunk.start
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
        self._next, self._next_key = run.end, (first.epoch, first.number, end)
        self._serial = self._tier._serial + last + (end == chunks[last].end)
        return run


def _order_key(position: Position) -> _OrderKey:
    return position.epoch, position.file_number, position.offset


def _begin_of(chunk: MemoryChunk) -> _OrderKey:
    return chunk.start_key
