# SPDX-License-Identifier: Apache-2.0
"""The decoded changes of a log, shared by all its followers.

A piece contains the changes in one range of the log, as selected and encoded by one view. The pieces of a
view form chains: each starts where the previous one ends. A piece ends at the first transaction boundary
after a multiple of a fixed size, or at the end of the log. Followers may start anywhere. They soon reach the
same chain, and from then on share the decoded pieces.
"""

import asyncio
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from penstock.limits import (
    FOLLOWERS_MAX,
    PIECE_BYTES,
    PIECE_BYTES_AT_ONCE,
    PIECE_GAP_FOLLOWER_SECONDS,
    PIECE_GAP_SECONDS,
    PIECES_BYTES_MAX,
    SHARED_BYTES_ALWAYS,
)
from penstock.logstore.followed_log import ServedLog
from penstock.model import Position
from penstock.serve.arrivals import Arrivals
from penstock.serve.own_log import OwnSource
from penstock.serve.piece import Follower, Piece, View, make_piece
from penstock.serve.threads import Threads, run_in

__all__ = ["Piece", "PieceMemory", "Pieces", "PiecesLog", "View"]

# The overhead of a piece: objects, and buffers that are never smaller than a cache line.
_PIECE_COST = 8 * 1024
# Nothing cancels a piece that is decoded in the requesting thread.
_NEVER_STOPPING = threading.Event()

_Answer = TypeVar("_Answer")
_Key = tuple[str, View, Position, Position | None, int | None]


class PieceMemory:
    """An LRU cache of the pieces of all instances, limited in bytes. Belongs to the event loop."""

    def __init__(self, bytes_max: int = PIECES_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._pieces: OrderedDict[_Key, tuple[Piece, int]] = OrderedDict()

    def get(self, key: _Key) -> Piece | None:
        """Return a cached piece."""
        cached = self._pieces.get(key)
        if cached is None:
            return None
        self._pieces.move_to_end(key)
        return cached[0]

    def put(self, key: _Key, piece: Piece) -> None:
        """Cache a piece, evicting the least recently used ones."""
        cost = piece.bytes + _PIECE_COST
        if cost > self.bytes_max // 2:
            # The piece would evict every piece that followers share.
            return
        self._pieces[key] = piece, cost
        self.bytes += cost
        self._trim()

    def grew(self, key: _Key, by: int) -> None:
        """Count additional bytes that are cached with a piece."""
        cached = self._pieces.get(key)
        if cached is not None:
            self._pieces[key] = cached[0], cached[1] + by
            self.bytes += by
            self._trim()

    def forget(self, instance: str) -> None:
        """Drop the pieces of an instance, because its positions may refer to other bytes now."""
        for key in [key for key in self._pieces if key[0] == instance]:
            self.bytes -= self._pieces.pop(key)[1]

    def _trim(self) -> None:
        while self.bytes > self.bytes_max:
            _, (_, cost) = self._pieces.popitem(last=False)
            self.bytes -= cost

    def __len__(self) -> int:
        return len(self._pieces)


class PiecesLog(Protocol):
    """An instance whose log can be decoded into pieces."""

    @property
    def name(self) -> str:
        """Its name."""

    def status(self) -> Mapping[str, Any]:
        """Return the instance's status without waiting."""

    def log(self) -> ServedLog:
        """Return the instance's log. Raises ServerBusy while it is being opened, or the error that prevents
        it.
        """


class _Flight:
    """A piece that is being decoded, shared by all that wait for it."""

    def __init__(self) -> None:
        self.waiters = 0
        self.is_ahead = False
        self.stopping = threading.Event()
        self.task: asyncio.Task[Piece | None] | None = None


class Pieces:
    """The pieces of one instance. Belongs to the event loop; decoding and searches run in threads.

    `decodes` counts the pieces that were decoded, not those found in the cache.
    """

    def __init__(
        self, instance: PiecesLog, arrivals: Arrivals, memory: PieceMemory, threads: Threads
    ) -> None:
        self.instance = instance
        self.arrivals = arrivals
        self._memory = memory
        self._threads = threads
        self._source: OwnSource | None = None
        self._followers: OrderedDict[tuple[View, Position, int], Follower] = OrderedDict()
        self._flights: dict[_Key, _Flight] = {}
        # Prefetched pieces that only one follower will request.
        self._prefetched: OrderedDict[_Key, Piece] = OrderedDict()
        self._cursors: dict[View, weakref.WeakSet[object]] = {}
        self._decoded_at: dict[View, float] = {}
        self.decodes = 0

    @property
    def name(self) -> str:
        """The instance's name."""
        return self.instance.name

    @property
    def log(self) -> ServedLog:
        """The log. Raises ServerBusy while it is being opened, or the error that prevents it."""
        return self.instance.log()

    def lag_seconds(self) -> float | None:
        """Return how far the log may lag behind its server, None if unknown."""
        lag: float | None = self.instance.status().get("lag_seconds")
        return lag

    async def in_thread(self, work: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Run a decode or similarly short work in a thread of the decoding pool."""
        return await run_in(self._threads.decoding, work, *arguments)

    async def search(self, work: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Run work that may read much of the log, in a thread that no follower waits for."""
        return await self._threads.search(work, *arguments)

    @property
    def source(self) -> OwnSource:
        """The log as a source. Propagates errors from `log`."""
        log = self.log
        if self._source is None or self._source.log is not log:
            # The log was reopened, so the cached state of the old log is invalid.
            self._source = OwnSource(self.name, log)
            self._followers.clear()
        return self._source

    async def at(
        self, view: View, start: Position, end: Position | None = None, part: int | None = None
    ) -> Piece | None:
        """Return the piece that starts at a position and ends at the boundary `end` at the latest.

        With `part`, a large transaction is returned in several parts, numbered from 0: see `Piece.is_whole`.
        None if nothing is visible after `start` yet. A piece's end is a valid next start, also in another
        file or epoch. Raises PositionPurged, PositionInvalid, SequenceGap, and a decoding error once all
        whole transactions before the error have been returned.
        """
        return await self._at(self._key(view, start, end, part), has_waited=False)

    async def _at(self, key: _Key, *, has_waited: bool) -> Piece | None:
        _, view, start, end, part = key
        source = self.source
        # Nearly every piece is whole. A whole piece is the same with and without `part`.
        for candidate in {self._key(view, start, None, part or None), key}:
            cached = self._memory.get(candidate) or self._prefetched.pop(candidate, None)
            if cached is not None and self._fits(cached, end):
                return cached
        if start in (source.log.visible, end):
            return None
        flight = self._flights.get(key)
        if flight is not None and flight.stopping.is_set():
            # All waiters have left, so this flight was cancelled and returns nothing.
            assert flight.task is not None, "a flight has its task from the first moment"
            await asyncio.wait({flight.task})
            return await self._at(key, has_waited=has_waited)
        if flight is None and not part:
            if not has_waited and (gap := self.gap_seconds(view, start, end)) > 0:
                # Sleep in this task: a shared task would need two more turns of the event loop, and captures
                # may run before each turn.
                await asyncio.sleep(gap)
                return await self._at(key, has_waited=True)
            if (decoded := self._decode_now(view, start, end)) is not None:
                return self._finish(key, *decoded)
        if flight is None:
            flight = self._begin(key)
        return await _wait_for_flight(flight)

    def _fits(self, piece: Piece, end: Position | None) -> bool:
        """Return whether a cached piece should be used.

        For a follower that is far behind the log's head, the short pieces created at the head would be too
        slow.
        """
        if end is not None and piece.end > end:
            return False
        visible, start = self.log.visible, piece.start
        if visible is None or (visible.epoch, visible.file) != (start.epoch, start.file):
            return True
        is_short = piece.end.offset // PIECE_BYTES == start.offset // PIECE_BYTES
        return not is_short or visible.offset - start.offset < PIECE_BYTES

    def gap_seconds(self, view: View, start: Position, end: Position | None = None) -> float:
        """Return the seconds until the next piece of a view may be decoded, so that small changes are
        batched."""
        visible = self.log.visible
        if visible is None or not self._is_near_head(start) or (end is not None and end <= visible):
            # Waiting would not batch small changes: the piece will not grow, or much of the log is still to
            # be decoded.
            return 0.0
        gap = max(PIECE_GAP_SECONDS, PIECE_GAP_FOLLOWER_SECONDS * len(self._cursors.get(view, ())))
        return self._decoded_at.get(view, 0.0) + gap - asyncio.get_running_loop().time()

    def _is_near_head(self, start: Position) -> bool:
        visible = self.log.visible
        if visible is None or (visible.epoch, visible.file) != (start.epoch, start.file):
            return False
        return visible.offset - start.offset <= PIECE_BYTES_AT_ONCE

    def _begin(self, key: _Key) -> _Flight:
        flight = self._flights[key] = _Flight()
        flight.task = asyncio.create_task(self._make(key, flight))
        return flight

    def prefetch(self, view: View, start: Position, part: int | None = None) -> None:
        """Start decoding a piece that will be requested, if it is large."""
        if self.log.visible is None or self._is_near_head(start):
            return
        key = self._key(view, start, None, part)
        cache_key = self._key(view, start, None, part or None)
        if key in self._flights or cache_key in self._prefetched or self._memory.get(cache_key) is not None:
            return
        flight = self._begin(key)
        flight.is_ahead = True
        assert flight.task is not None, "a flight has its task from the first moment"
        # The requester gets the task's error. Without a requester, the error is dropped.
        flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def follow(self, view: View, cursor: object) -> None:
        """Register a cursor as a follower of a view for the lifetime of the cursor."""
        if view not in self._cursors:
            # Remove views without followers.
            self._cursors = {followed: cursors for followed, cursors in self._cursors.items() if cursors}
            self._decoded_at = {
                followed: decoded_at
                for followed, decoded_at in self._decoded_at.items()
                if followed in self._cursors
            }
            self._cursors[view] = weakref.WeakSet()
        self._cursors[view].add(cursor)

    def is_shared(self, view: View, piece: Piece) -> bool:
        """Return whether a piece is worth caching: a small piece always is, and a larger one if several
        cursors follow the view.

        Caching pieces that nobody requests again keeps allocating new memory, which costs more than decoding.
        """
        if piece.bytes <= SHARED_BYTES_ALWAYS:
            return True
        return len(self._cursors.get(view, ())) > 1

    def keep(self, view: View, piece: Piece, grown: int) -> None:
        """Count additional bytes that are cached with a piece, for other consumers."""
        self._memory.grew(self._key(view, piece.start, None, piece.part or None), grown)

    def _key(self, view: View, start: Position, end: Position | None = None, part: int | None = None) -> _Key:
        return self.name, view, start, end, part

    async def _make(self, key: _Key, flight: _Flight) -> Piece | None:
        _, view, start, end, part = key
        try:
            follower = self._followers.pop((view, start, part or 0), None)
            decoded = await self.in_thread(
                make_piece, self.source, view, start, end, follower, flight.stopping, part
            )
        finally:
            del self._flights[key]
        if decoded is None:
            return None
        piece = self._finish(key, *decoded)
        cache_key = self._shared_key(key, piece)
        if flight.is_ahead and not flight.waiters and self._memory.get(cache_key) is None:
            # The piece was decoded before it was requested. Keep it, so that it is not decoded twice.
            self._prefetched[cache_key] = piece
            if len(self._prefetched) > FOLLOWERS_MAX:
                self._prefetched.popitem(last=False)
        return piece

    def _shared_key(self, key: _Key, piece: Piece) -> _Key:
        """Return the cache key of a piece, under which every matching request looks for it."""
        _, view, start, end, _ = key
        return self._key(view, start, end, None if piece.is_whole and not piece.part else piece.part)

    def _finish(self, key: _Key, piece: Piece, follower: Follower | None) -> Piece:
        self.decodes += 1
        view = key[1]
        if piece.end.offset - piece.start.offset <= PIECE_BYTES_AT_ONCE and piece.is_whole:
            self._decoded_at[view] = asyncio.get_running_loop().time()
        if self.is_shared(view, piece):
            self._memory.put(self._shared_key(key, piece), piece)
        if follower is not None and (self._source is None or follower.source is self._source):
            self._followers[view, piece.end, follower.part] = follower
            if len(self._followers) > FOLLOWERS_MAX:
                self._followers.popitem(last=False)
        return piece

    def _decode_now(
        self, view: View, start: Position, end: Position | None
    ) -> tuple[Piece, Follower | None] | None:
        """Decode a short piece in this thread if its bytes are in memory and a decoder is ready, else return
        None.

        Starting a thread would cost more than decoding.
        """
        log = self.log
        visible, memory = log.visible, log.memory
        if end is not None:
            return None
        if visible is None or memory is None or (visible.epoch, visible.file) != (start.epoch, start.file):
            return None
        length = visible.offset - start.offset
        if not 0 < length <= PIECE_BYTES_AT_ONCE or (view, start, 0) not in self._followers:
            return None
        views = memory.read(start.epoch, start.file, start.offset, visible.offset)
        if not views or sum(view_bytes.nbytes for view_bytes in views) != length:
            return None
        follower = self._followers.pop((view, start, 0))
        return make_piece(self.source, view, start, visible, follower, _NEVER_STOPPING)


async def _wait_for_flight(flight: _Flight) -> Piece | None:
    """Wait for a shared piece. Cancelling one waiter does not stop the decoding for others; cancelling the
    last waiter does.
    """
    assert flight.task is not None, "a flight has its task from the first moment"
    flight.waiters += 1
    try:
        return await asyncio.shield(flight.task)
    finally:
        flight.waiters -= 1
        if not flight.waiters:
            flight.stopping.set()
