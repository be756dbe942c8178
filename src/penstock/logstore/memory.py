# SPDX-License-Identifier: Apache-2.0
"""The memory tier: the newest bytes of a log that also keeps files.

It holds consecutive chunks up to the newest one. When it reaches its size limit, it evicts the oldest chunk.
A log without files is `penstock.logstore.memory_log`.
"""

import threading
from bisect import bisect_right
from dataclasses import dataclass

from penstock.commit_versions import file_number_of
from penstock.errors import OptionInvalid
from penstock.model import Position

# Smaller parts of a buffer are copied: a view would keep the whole buffer alive.
_COPY_BYTES_MAX = 64 * 1024
# The overhead of a chunk counts against the bound, so that a million tiny chunks are bounded too.
CHUNK_OVERHEAD_BYTES = 512
# Evicted chunks are removed from the list in batches of this size, which keeps eviction cheap.
_LEFT_MAX = 1024

# Epoch, file number, offset: the sort key of positions.
_OrderKey = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MemoryChunk:
    """Whole events of one source file, at the source's offsets [start, end)."""

    epoch: int
    file: str
    number: int
    start: int
    end: int
    data: memoryview

    @property
    def cost(self) -> int:
        """The bytes that the chunk counts against the bound."""
        return self.data.nbytes + CHUNK_OVERHEAD_BYTES


_LEFT = MemoryChunk(-1, "", -1, -1, -1, memoryview(b""))


class MemoryTier:
    """The newest chunks of one log, with a total size of at most `bytes_max`.

    Thread-safe. Raises OptionInvalid if `bytes_max` is below 1.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        if bytes_max < 1:
            raise OptionInvalid(
                f"a memory tier of {bytes_max} bytes can hold nothing",
                hint="Raise log.memory_bytes, or set log.mode to file",
            )
        self._lock = threading.Lock()
        # Chunks before `_first` were evicted.
        self._chunks: list[MemoryChunk] = []
        self._first = 0
        self._bytes = 0
        self._closed = False

    @property
    def bytes_held(self) -> int:
        """The bytes held now, including overhead; at most `bytes_max`."""
        return self._bytes

    @property
    def earliest(self) -> Position | None:
        """The start of the oldest chunk, None if no chunk is held."""
        with self._lock:
            if self._first == len(self._chunks):
                return None
            oldest = self._chunks[self._first]
            return Position(oldest.epoch, oldest.file, oldest.start)

    def put(
        self, data: bytes | bytearray | memoryview, *, epoch: int, file: str, start: int, end: int
    ) -> bool:
        """Store a chunk, and evict the oldest chunks if necessary; return whether the chunk was kept.

        The buffer must not change afterwards. A chunk above the bound is not kept, and all earlier chunks are
        dropped, because there would be a gap.
        """
        view = memoryview(data).cast("B")
        if view.nbytes < _COPY_BYTES_MAX and view.nbytes < memoryview(view.obj).nbytes:
            view = memoryview(bytes(view))
        chunk = MemoryChunk(epoch, file, file_number_of(file), start, end, view)
        with self._lock:
            if self._closed or chunk.cost > self.bytes_max:
                self._drop_all()
                return False
            while self._bytes + chunk.cost > self.bytes_max:
                self._drop_oldest()
            self._chunks.append(chunk)
            self._bytes += chunk.cost
            return True

    def clear(self) -> None:
        """Drop all chunks, because the next chunk does not follow them."""
        with self._lock:
            self._drop_all()

    def close(self) -> None:
        """Drop all chunks. Nothing is kept afterwards."""
        with self._lock:
            self._closed = True
            self._drop_all()

    def read(self, epoch: int, file: str, start: int, stop: int) -> list[memoryview] | None:
        """Return the held bytes of [start, stop) of a source file, without a break from `start` on.

        The result is shorter if the held bytes end earlier, [] if `start` is the end of the file's held
        bytes, and None if the tier does not hold `start`. The views stay valid after their chunks are
        evicted.
        """
        start_key = (epoch, file_number_of(file), start)
        with self._lock:
            # The last chunk that starts at or before `start`.
            index = bisect_right(self._chunks, start_key, lo=self._first, key=_begin_of) - 1
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

    # --- Inside, with the lock held ---------------------------------------------------------

    def _drop_oldest(self) -> None:
        self._bytes -= self._chunks[self._first].cost
        self._chunks[self._first] = _LEFT
        self._first += 1
        if self._first > _LEFT_MAX and self._first * 2 > len(self._chunks):
            del self._chunks[: self._first]
            self._first = 0

    def _drop_all(self) -> None:
        self._chunks.clear()
        self._first = self._bytes = 0


def _begin_of(chunk: MemoryChunk) -> _OrderKey:
    return chunk.epoch, chunk.number, chunk.start
