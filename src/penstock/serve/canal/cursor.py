# SPDX-License-Identifier: Apache-2.0
"""The position of a Canal client: what it was sent, what it acknowledged, and what comes next.

A batch is a range between two points of the log; the bytes in the range are not kept. An acknowledgement is
durable up to the last transaction that ended in the batch. A rollback returns to the last acknowledged entry,
which may be within a transaction.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.errors import OptionInvalid, PenstockError
from penstock.model import Position
from penstock.serve.canal.entries import entries_of
from penstock.serve.pieces import Piece, Pieces, View

# The default size of Canal's ring buffer. A client with this many unacknowledged batches receives no more.
OUTSTANDING_MAX = 16_384

# The longest time that a request without entries waits while the log is searched.
_SEARCH_SECONDS = 1.0


@dataclass(frozen=True)
class Place:
    """Identifies an entry by its number in a part of the piece that starts at a position.

    Part 0 and entry 0 mean a point between transactions. Decoding a piece again yields the same pieces, parts
    and numbers, except that a piece may have grown.
    """

    position: Position
    part: int = 0
    entry: int = 0


@dataclass(frozen=True)
class Mark:
    """A point between transactions, in the form in which `Checkpoint` stores it."""

    position: Position
    gtid_set: str
    time_us: int


@dataclass(frozen=True)
class Gathered:
    """Entries ready to be sent, from `begin` to `end`. `mark` is the end of the last whole transaction among
    them.
    """

    begin: Place
    end: Place
    mark: Mark | None
    parts: tuple[memoryview, ...]
    bytes: int
    rows: int


@dataclass(frozen=True)
class Batch:
    """An unacknowledged batch with its id."""

    id: int
    end: Place
    mark: Mark | None


@dataclass(frozen=True)
class CursorState:
    """The state from which a client's next session continues, in this process or another process of the
    daemon.
    """

    view: View
    mark: Mark
    acked: Place
    next_id: int


class Cursor:
    """One client's cursor on one instance. Belongs to the event loop, and to one session.

    `mark` is the end of the permanently consumed part. Batch ids count from 1, and continue in the cursor
    returned by `handed_over`.
    """

    def __init__(self, client: str, pieces: Pieces, view: View, mark: Mark) -> None:
        self.client = client
        self.pieces = pieces
        self.view = view
        self.mark = mark
        self._acked = self._reached = Place(mark.position)
        self._reached_mark: Mark | None = None
        self._outstanding: OrderedDict[int, Batch] = OrderedDict()
        self._next_id = 1
        self._piece: Piece | None = None
        self._prefetch: tuple[Place, asyncio.Task[Piece | None]] | None = None

    def handed_over(self) -> "Cursor":
        """Return the cursor of the next session, which resends everything that is not acknowledged.

        Later calls of the previous session on this cursor have no effect.
        """
        self.close()
        return Cursor.of_state(self.client, self.pieces, self.state)

    @property
    def state(self) -> CursorState:
        """The state from which the next session continues."""
        return CursorState(self.view, self.mark, self._acked, self._next_id)

    @classmethod
    def of_state(cls, client: str, pieces: Pieces, state: CursorState) -> "Cursor":
        """Return the cursor of a session that continues from a state."""
        cursor = cls(client, pieces, state.view, state.mark)
        cursor._acked = cursor._reached = state.acked
        cursor._next_id = state.next_id
        return cursor

    def look_at(self, view: View) -> None:
        """Switch to another view, from the last mark on. Entries are numbered differently in another view."""
        if view != self.view:
            self.view = view
            self.close()
            self._outstanding.clear()
            self._acked = self._reached = Place(self.mark.position)

    def close(self) -> None:
        """Drop the current piece and cancel the prefetch."""
        self._piece = None
        if self._prefetch is not None:
            self._prefetch[1].cancel()
            self._prefetch = None

    # --- Fetching ---------------------------------------------------------------------------

    async def gather(self, limit: int, seconds: float | None) -> Gathered | None:
        """Return entries of at most `limit` bytes (a single entry may be larger), None if there are none.

        Waits up to `seconds` for `limit` bytes, or without a timeout if `seconds` is None. The returned
        entries do not count as sent yet, but the cursor skips parts of the log without entries. A decoding
        error is raised once everything before it has been returned.
        """
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        if len(self._outstanding) >= OUTSTANDING_MAX:
            await asyncio.sleep(_SEARCH_SECONDS if seconds is None else min(seconds, _SEARCH_SECONDS))
            return None
        self.pieces.follow(self.view, self)
        gathering = _Gathering(self._reached, limit)
        while not gathering.full:
            seen = self.pieces.arrivals.number(self.pieces.name)
            piece = await self._piece_at(gathering)
            remaining = None if deadline is None else deadline - loop.time()
            if piece is not None:
                gathering.add(piece)
                if not gathering.parts:
                    self._move_on(gathering)
                    gathering = _Gathering(self._reached, limit)
                if remaining is not None and remaining < -_SEARCH_SECONDS:
                    break
            elif gathering.full or self.pieces.arrivals.closing or (remaining is not None and remaining <= 0):
                break
            else:
                await news(self.pieces, seen, remaining)
        return gathering.result()

    def give(self, gathered: Gathered) -> Batch:
        """Register gathered entries as sent, under a new id."""
        assert gathered.begin == self._reached, "nobody else gives out what was gathered"
        self._reached = gathered.end
        self._reached_mark = gathered.mark or self._reached_mark
        batch = Batch(self._next_id, gathered.end, gathered.mark)
        self._outstanding[batch.id] = batch
        self._next_id += 1
        return batch

    def _move_on(self, gathering: "_Gathering") -> None:
        """Skip a part without entries. The part counts as consumed if everything before it is consumed."""
        self._reached = gathering.at
        self._reached_mark = gathering.mark or self._reached_mark
        if not self._outstanding:
            self._pass(self._reached, self._reached_mark)

    async def _piece_at(self, gathering: "_Gathering") -> Piece | None:
        """Return the piece where gathering continues, and prefetch the piece after it."""
        begin = Place(gathering.at.position, gathering.at.part)
        if self._piece is not None and (self._piece.start, self._piece.part) == (begin.position, begin.part):
            return self._piece
        try:
            piece = await self._take_prefetched(begin) or await self._decode(begin)
        except PenstockError:
            if gathering.parts:
                # Send the entries before the error first. The next request raises the error again.
                gathering.full = True
                return None
            raise
        if piece is None:
            return None
        self._piece = piece
        next_place = _place_after(piece)
        if self._prefetch is None and next_place.position != self.pieces.log.visible:
            task = asyncio.create_task(self._decode(next_place))
            # An error of the prefetch is raised again when the piece is requested.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._prefetch = next_place, task
        return piece

    async def _decode(self, begin: Place) -> Piece | None:
        return await self.pieces.at(self.view, begin.position, part=begin.part)

    async def _take_prefetched(self, begin: Place) -> Piece | None:
        if self._prefetch is None:
            return None
        begins, task = self._prefetch
        if begins != begin:
            task.cancel()
            self._prefetch = None
            return None
        try:
            return await asyncio.shield(task)
        finally:
            if task.done():
                self._prefetch = None

    # --- Acknowledgements -------------------------------------------------------------------

    def acknowledge(self, batch_id: int) -> None:
        """Mark the oldest batch as consumed.

        Raises OptionInvalid with Canal's wording for any other batch.
        """
        self._prove_oldest("ack error ", batch_id)
        batch = self._outstanding.pop(batch_id)
        self._pass(batch.end, batch.mark)
        if not self._outstanding:
            self._pass(self._reached, self._reached_mark)

    def roll_back(self, batch_id: int = 0) -> None:
        """Resend everything that is not acknowledged, under new ids.

        If an id is given, it must be the id of the oldest batch. Later batches are rolled back too, because
        their entries are sent again. Raises OptionInvalid with Canal's wording.
        """
        if batch_id:
            self._prove_oldest("rollback error", batch_id)
        if self._reached != self._acked:
            self.close()
        self._outstanding.clear()
        self._reached = self._acked
        self._reached_mark = None

    def _prove_oldest(self, what: str, batch_id: int) -> None:
        if batch_id not in self._outstanding:
            raise OptionInvalid(
                f"{what}, clientId:{self.client} batchId:{batch_id} is not exist , please check"
            )
        oldest = next(iter(self._outstanding))
        if batch_id != oldest:
            raise OptionInvalid(f"batchId:{batch_id} is not the firstly:{oldest}")

    def _pass(self, place: Place, mark: Mark | None) -> None:
        self._acked = place
        if mark is not None and mark.position != self.mark.position:
            self.mark = Mark(
                mark.position, mark.gtid_set or self.mark.gtid_set, mark.time_us or self.mark.time_us
            )


async def news(pieces: Pieces, seen: int, seconds: float | None) -> None:
    """Wait until data arrives after the arrival number `seen`, or until the timeout expires."""
    arrivals, name = pieces.arrivals, pieces.name
    with arrivals.waiting(name) as arrival:
        if arrivals.number(name) == seen and not arrivals.closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await arrival.wait()


def _place_after(piece: Piece, entry: int = 0) -> Place:
    """Return where to continue after a piece. If the piece has further parts, continue at `entry` of the next
    part.
    """
    return Place(piece.end) if piece.is_whole else Place(piece.start, piece.part + 1, entry)


class _Gathering:
    """Entries collected from consecutive pieces."""

    def __init__(self, begin: Place, limit: int) -> None:
        self.begin = self.at = begin
        self.full = False
        self.parts: list[memoryview] = []
        self._limit = limit
        self._bytes = self._rows = 0
        self.mark: Mark | None = None

    def add(self, piece: Piece) -> None:
        """Add the entries of a piece, or of a part of a piece, that fit."""
        if piece.part < self.at.part:
            # The piece now has fewer parts than at the first attempt, so all of its entries were taken
            # already.
            self.at = Place(piece.end)
            return
        entries = entries_of(piece)
        taken = entries.take(self.at.entry, self._limit - self._bytes, at_least_one=not self.parts)
        self.parts += taken.parts
        self._bytes += taken.bytes
        self._rows += taken.rows
        if taken.end_offset is not None:
            # GTID sets are known at the ends of pieces. Until then, an earlier set is a lower bound.
            position = replace(piece.within, offset=taken.end_offset)
            self.mark = Mark(position, self.mark.gtid_set if self.mark else "", 0)
        if taken.next < entries.count:
            self.at = Place(piece.start, piece.part, taken.next)
            self.full = True
        else:
            self.at = _place_after(piece, taken.next - entries.count)
            if piece.is_whole:
                self.mark = Mark(piece.end, piece.gtid_set, piece.time_us)
        self.full = self.full or self._bytes >= self._limit

    def result(self) -> Gathered | None:
        """Return the gathered entries, None if there are none."""
        if not self.parts:
            return None
        return Gathered(self.begin, self.at, self.mark, tuple(self.parts), self._bytes, self._rows)
