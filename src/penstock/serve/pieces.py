# SPDX-License-Identifier: Apache-2.0
"""What a log's changes look like to those who follow it, decoded once for all of them.

A piece holds the changes of a stretch of the log in one view. Pieces of a view form chains: where one ends
the next begins. A piece ends at the first transaction boundary behind a line of a fixed grid, or where the
log ends, so whoever joins anywhere is in the same chain soon, and then shares what is decoded.
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
    PIECE_GAP_SECONDS,
    PIECES_BYTES_MAX,
    SHARED_BYTES_ALWAYS,
)
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.arrivals import Arrivals
from penstock.serve.own_log import OwnSource
from penstock.serve.piece import Follower, Piece, View, make_piece
from penstock.serve.threads import Threads, run_in

__all__ = ["Piece", "PieceMemory", "Pieces", "PiecesLog", "View"]

# What a piece costs beside its rows: objects, and buffers that are never smaller than a cache line.
_PIECE_COST = 8 * 1024

_Answer = TypeVar("_Answer")
_Key = tuple[str, View, Position, Position | None, int | None]


class PieceMemory:
    """The pieces made last, of all instances, within a bound of bytes. Belongs to the event loop."""

    def __init__(self, bytes_max: int = PIECES_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._pieces: OrderedDict[_Key, tuple[Piece, int]] = OrderedDict()

    def get(self, key: _Key) -> Piece | None:
        """Return a piece that is still here."""
        found = self._pieces.get(key)
        if found is None:
            return None
        self._pieces.move_to_end(key)
        return found[0]

    def put(self, key: _Key, piece: Piece) -> None:
        """Keep a piece, in place of those asked for longest ago."""
        cost = piece.bytes + _PIECE_COST
        if cost > self.bytes_max // 2:
            # It would push out what all the others share.
            return
        self._pieces[key] = piece, cost
        self.bytes += cost
        self._trim()

    def grew(self, key: _Key, by: int) -> None:
        """Say that a piece keeps so many bytes more that were made of it."""
        found = self._pieces.get(key)
        if found is not None:
            self._pieces[key] = found[0], found[1] + by
            self.bytes += by
            self._trim()

    def _trim(self) -> None:
        while self.bytes > self.bytes_max:
            _, (_, cost) = self._pieces.popitem(last=False)
            self.bytes -= cost

    def __len__(self) -> int:
        return len(self._pieces)


class PiecesLog(Protocol):
    """An instance whose log is decoded."""

    @property
    def name(self) -> str:
        """Its name."""

    def status(self) -> Mapping[str, Any]:
        """Return how it stands; never waits."""

    def log(self) -> Log:
        """Return its log. Raises ServerBusy while it is being opened, and the reason where it cannot be."""


class _Flight:
    """A piece in the making, for whoever waits for it."""

    def __init__(self) -> None:
        self.waiters = 0
        self.is_ahead = False
        self.stopping = threading.Event()
        self.task: asyncio.Task[Piece | None] | None = None


class Pieces:
    """The pieces of one instance. Belongs to the event loop; decodes and searches in threads.

    `decodes` counts the pieces that were decoded, not those found in memory.
    """

    def __init__(
        self, instance: PiecesLog, arrivals: Arrivals, memory: PieceMemory, threads: Threads
    ) -> None:
        self._instance = instance
        self.arrivals = arrivals
        self._memory = memory
        self._threads = threads
        self._source: OwnSource | None = None
        self._followers: OrderedDict[tuple[View, Position, int], Follower] = OrderedDict()
        self._flights: dict[_Key, _Flight] = {}
        # Pieces that were made before they were asked for, and that nobody but who has them made wants.
        self._ahead: OrderedDict[_Key, Piece] = OrderedDict()
        self._cursors: dict[View, weakref.WeakSet[object]] = {}
        self._made_at: dict[View, float] = {}
        self.decodes = 0

    @property
    def name(self) -> str:
        """The instance's name."""
        return self._instance.name

    @property
    def log(self) -> Log:
        """The log. Raises ServerBusy while it is being opened, and the reason where it cannot be."""
        return self._instance.log()

    def lag_seconds(self) -> float | None:
        """Return how far the log may be behind its server, None where that is not known."""
        lag: float | None = self._instance.status().get("lag_seconds")
        return lag

    async def in_thread(self, question: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Decode, or ask what takes as little time, in a thread that followers wait for."""
        return await run_in(self._threads.decoding, question, *arguments)

    async def search(self, question: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Ask what may read much of the log, in a thread that no follower waits for."""
        return await run_in(self._threads.searching, question, *arguments)

    @property
    def source(self) -> OwnSource:
        """The log as a source. Raises what `log` raises."""
        log = self.log
        if self._source is None or self._source.log is not log:
            # It was opened anew: what was found out about the one before is of no use.
            self._source = OwnSource(self.name, log)
            self._followers.clear()
        return self._source

    async def at(
        self, view: View, start: Position, end: Position | None = None, part: int | None = None
    ) -> Piece | None:
        """Return the piece that begins at a position, and ends at the boundary `end` at the latest.

        With `part`, 0 for the first, the piece of a large transaction comes in parts: see `Piece.is_whole`.

        None where nothing is visible behind `start` yet. A piece's end is a valid next start, also in
        another file or epoch. Raises PositionPurged, PositionInvalid, SequenceGap, and what decoding raises,
        after every whole transaction before it.
        """
        source = self.source
        key = self._key(view, start, end, part)
        # Nearly every piece is whole, and then the same for who can take parts and who cannot.
        for one in {self._key(view, start, None, part or None), key}:
            found = self._memory.get(one) or self._ahead.pop(one, None)
            if found is not None and self._fits(found, end):
                return found
        if start in (source.log.visible, end):
            return None
        flight = self._flights.get(key)
        if flight is not None and flight.stopping.is_set():
            # Those who waited for it have left, and it comes to nothing.
            assert flight.task is not None, "a flight has its task from the first moment"
            await asyncio.wait({flight.task})
            return await self.at(view, start, end, part)
        if flight is None:
            gap = self._gap(view)
            if gap <= 0 and not part and (made := self._at_once(view, start, end)) is not None:
                return self._made(key, *made)
            flight = self._begin(key, gap)
        return await _landed(flight)

    def _fits(self, piece: Piece, end: Position | None) -> bool:
        """Tell whether a piece from memory is the one to give.

        To whoever is far behind the log's head, the short ones that were made there would be a long way.
        """
        if end is not None and piece.end > end:
            return False
        visible, start = self.log.visible, piece.start
        if visible is None or (visible.epoch, visible.file) != (start.epoch, start.file):
            return True
        is_short = piece.end.offset // PIECE_BYTES == start.offset // PIECE_BYTES
        return not is_short or visible.offset - start.offset < PIECE_BYTES

    def _gap(self, view: View) -> float:
        """Return the seconds until the next piece of a view may be made, with all that comes meanwhile."""
        return self._made_at.get(view, 0.0) + PIECE_GAP_SECONDS - asyncio.get_running_loop().time()

    def _begin(self, key: _Key, gap: float = 0.0) -> _Flight:
        flight = self._flights[key] = _Flight()
        flight.task = asyncio.create_task(self._make(key, flight, gap))
        return flight

    def prefetch(self, view: View, start: Position, part: int | None = None) -> None:
        """Begin to make a piece that is going to be asked for, where there is much of it already."""
        visible, key = self.log.visible, self._key(view, start, None, part)
        kept = self._key(view, start, None, part or None)
        known = key in self._flights or kept in self._ahead or self._memory.get(kept) is not None
        if visible is None or known:
            return
        in_file = (visible.epoch, visible.file) == (start.epoch, start.file)
        if in_file and visible.offset - start.offset <= PIECE_BYTES_AT_ONCE:
            return
        flight = self._begin(key)
        flight.is_ahead = True
        assert flight.task is not None, "a flight has its task from the first moment"
        # Whoever asks for it gets what it raised; where nobody does, it is nobody's.
        flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def follow(self, view: View, cursor: object) -> None:
        """Say that a cursor follows a view, for as long as it is there."""
        if view not in self._cursors:
            # Views that nobody follows any longer leave nothing behind.
            self._cursors = {one: left for one, left in self._cursors.items() if left}
            self._made_at = {one: at for one, at in self._made_at.items() if one in self._cursors}
            self._cursors[view] = weakref.WeakSet()
        self._cursors[view].add(cursor)

    def is_shared(self, view: View, piece: Piece) -> bool:
        """Tell whether a piece is worth keeping: at the log's head it is, else where others come behind.

        To keep what nobody asks for again takes memory that is new each time, which costs more than decoding.
        """
        if piece.bytes <= SHARED_BYTES_ALWAYS:
            return True
        return len(self._cursors.get(view, ())) > 1

    def keep(self, view: View, piece: Piece, grown: int) -> None:
        """Say that a piece now keeps so many bytes more that were made of it, for others to use."""
        self._memory.grew(self._key(view, piece.start, None, piece.part or None), grown)

    def _key(self, view: View, start: Position, end: Position | None = None, part: int | None = None) -> _Key:
        return self.name, view, start, end, part

    async def _make(self, key: _Key, flight: _Flight, gap: float) -> Piece | None:
        _, view, start, end, part = key
        try:
            if gap > 0 and not part:
                await asyncio.sleep(gap)
                if (made := self._at_once(view, start, end)) is not None:
                    return self._made(key, *made)
            follower = self._followers.pop((view, start, part or 0), None)
            made = await self.in_thread(
                make_piece, self.source, view, start, end, follower, flight.stopping, part
            )
        finally:
            del self._flights[key]
        if made is None:
            return None
        piece = self._made(key, *made)
        kept = self._kept_as(key, piece)
        if flight.is_ahead and not flight.waiters and self._memory.get(kept) is None:
            # It is there before it is asked for, and would otherwise be made a second time.
            self._ahead[kept] = piece
            if len(self._ahead) > FOLLOWERS_MAX:
                self._ahead.popitem(last=False)
        return piece

    def _kept_as(self, key: _Key, piece: Piece) -> _Key:
        """Return the key under which a piece is found by everybody whom it suits."""
        _, view, start, end, _ = key
        return self._key(view, start, end, None if piece.is_whole and not piece.part else piece.part)

    def _made(self, key: _Key, piece: Piece, follower: Follower | None) -> Piece:
        self.decodes += 1
        view = key[1]
        if piece.end.offset - piece.start.offset <= PIECE_BYTES_AT_ONCE and piece.is_whole:
            self._made_at[view] = asyncio.get_running_loop().time()
        if self.is_shared(view, piece):
            self._memory.put(self._kept_as(key, piece), piece)
        if follower is not None and (self._source is None or follower.source is self._source):
            self._followers[view, piece.end, follower.part] = follower
            if len(self._followers) > FOLLOWERS_MAX:
                self._followers.popitem(last=False)
        return piece

    def _at_once(
        self, view: View, start: Position, end: Position | None
    ) -> tuple[Piece, Follower | None] | None:
        """Make a piece here where it is short, in memory, and a decoder stands ready; None where not.

        A thread would cost more than the decoding.
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
        if not views or sum(one.nbytes for one in views) != length:
            return None
        follower = self._followers.pop((view, start, 0))
        return make_piece(self.source, view, start, visible, follower, threading.Event())


async def _landed(flight: _Flight) -> Piece | None:
    """Wait for a piece, beside others. Who goes away does not end it for them; the last one does."""
    assert flight.task is not None, "a flight has its task from the first moment"
    flight.waiters += 1
    try:
        return await asyncio.shield(flight.task)
    finally:
        flight.waiters -= 1
        if not flight.waiters:
            flight.stopping.set()
