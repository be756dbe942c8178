# SPDX-License-Identifier: Apache-2.0
"""Where a client of Canal stands: what it was given, what it has acknowledged, and what comes next.

A batch is a stretch between two places of the log; its bytes are not kept. What is acknowledged is durable up
to the last transaction that ended in it; a rollback goes back to the last acknowledged entry itself.
"""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import OptionInvalid, PenstockError
from penstock.model import Position
from penstock.serve.canal.entries import entries_of
from penstock.serve.pieces import Piece, Pieces, View

# Canal's ring holds so many events by default. Who has that many batches out gets no more
# before one is acknowledged.
OUTSTANDING_MAX = 16_384

# Nobody waits longer for an answer without entries while the log is searched for some.
_SEARCH_SECONDS = 1.0


@dataclass(frozen=True)
class Place:
    """An entry: its number in a part of the piece that begins at a position.

    Part 0 and entry 0 are a place between transactions. Pieces, parts and numbers are the same whenever they
    are decoded again, but that a piece may have grown meanwhile.
    """

    position: Position
    part: int = 0
    entry: int = 0


@dataclass(frozen=True)
class Mark:
    """A place between transactions, as it is kept: what `Checkpoint` has of it."""

    position: Position
    gtid_set: str
    time_us: int


@dataclass(frozen=True)
class Gathered:
    """Entries that may be given out: from `begin` up to `end`. `mark` is the last whole transaction's end."""

    begin: Place
    end: Place
    mark: Mark | None
    parts: tuple[memoryview, ...]
    bytes: int
    rows: int


@dataclass(frozen=True)
class Batch:
    """What was given out under an id and is not acknowledged."""

    id: int
    end: Place
    mark: Mark | None


class Cursor:
    """One client's cursor on one instance. Belongs to the event loop, and to one session.

    `mark` is how far everything was consumed for good. Ids of batches count from 1, and go on in the cursor
    that `handed_over` gives.
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
        self._ahead: tuple[Place, asyncio.Task[Piece | None]] | None = None

    def handed_over(self) -> "Cursor":
        """Return the cursor of the next session: what is not acknowledged comes again there.

        What the session before still does with this one has no effect.
        """
        other = Cursor(self.client, self.pieces, self.view, self.mark)
        other._acked = other._reached = self._acked
        other._next_id = self._next_id
        self.close()
        return other

    def look_at(self, view: View) -> None:
        """Go on with another view, from the last mark: entries are numbered otherwise in it."""
        if view != self.view:
            self.view = view
            self.close()
            self._outstanding.clear()
            self._acked = self._reached = Place(self.mark.position)

    def close(self) -> None:
        """Let go of the pieces at hand and of what is made ahead."""
        self._piece = None
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None

    # --- Giving out -------------------------------------------------------------------------

    async def gather(self, limit: int, seconds: float | None) -> Gathered | None:
        """Return entries of at most `limit` bytes (one may be larger), None where there is none.

        With `seconds`, wait so long for as many as that; None waits for ever. Nothing is given out yet, but
        the cursor moves over what holds no entry. Raises what decoding raises, after everything before it
        was returned.
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
            left = None if deadline is None else deadline - loop.time()
            if piece is not None:
                gathering.add(piece)
                if not gathering.parts:
                    self._move_on(gathering)
                    gathering = _Gathering(self._reached, limit)
                if left is not None and left < -_SEARCH_SECONDS:
                    break
            elif gathering.full or self.pieces.arrivals.closing or (left is not None and left <= 0):
                break
            else:
                await news(self.pieces, seen, left)
        return gathering.found()

    def give(self, gathered: Gathered) -> Batch:
        """Count entries as given out, under an id."""
        assert gathered.begin == self._reached, "nobody else gives out what was gathered"
        self._reached = gathered.end
        self._reached_mark = gathered.mark or self._reached_mark
        batch = Batch(self._next_id, gathered.end, gathered.mark)
        self._outstanding[batch.id] = batch
        self._next_id += 1
        return batch

    def _move_on(self, gathering: "_Gathering") -> None:
        """Go over what holds no entry; it is consumed where everything before it is."""
        self._reached = gathering.at
        self._reached_mark = gathering.mark or self._reached_mark
        if not self._outstanding:
            self._pass(self._reached, self._reached_mark)

    async def _piece_at(self, gathering: "_Gathering") -> Piece | None:
        """Return the piece in which the gathering goes on, and have the one behind it made meanwhile."""
        begin = Place(gathering.at.position, gathering.at.part)
        if self._piece is not None and (self._piece.start, self._piece.part) == (begin.position, begin.part):
            return self._piece
        try:
            piece = await self._made_ahead(begin) or await self._made(begin)
        except PenstockError:
            if gathering.parts:
                # What stands before an error is given out first; it comes again with the next request.
                gathering.full = True
                return None
            raise
        if piece is None:
            return None
        self._piece = piece
        behind = _behind(piece)
        if self._ahead is None and behind.position != self.pieces.log.visible:
            task = asyncio.create_task(self._made(behind))
            # Its error, if any, comes again where the piece is asked for.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._ahead = behind, task
        return piece

    async def _made(self, begin: Place) -> Piece | None:
        return await self.pieces.at(self.view, begin.position, part=begin.part)

    async def _made_ahead(self, begin: Place) -> Piece | None:
        if self._ahead is None:
            return None
        begins, task = self._ahead
        if begins != begin:
            task.cancel()
            self._ahead = None
            return None
        try:
            return await asyncio.shield(task)
        finally:
            if task.done():
                self._ahead = None

    # --- Taking back ------------------------------------------------------------------------

    def acknowledge(self, batch_id: int) -> None:
        """Count the oldest batch as consumed. Raises OptionInvalid, in Canal's own words, for any other."""
        self._prove_oldest("ack error ", batch_id)
        batch = self._outstanding.pop(batch_id)
        self._pass(batch.end, batch.mark)
        if not self._outstanding:
            self._pass(self._reached, self._reached_mark)

    def roll_back(self, batch_id: int = 0) -> None:
        """Give out again everything that is not acknowledged, under new ids.

        With an id it has to be the oldest; younger ones go as well, since their entries come again. Raises
        OptionInvalid, in Canal's own words.
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
    """Wait until more has arrived than `seen` counts, or the time is up."""
    arrivals, name = pieces.arrivals, pieces.name
    with arrivals.waiting(name) as arrival:
        if arrivals.number(name) == seen and not arrivals.closing:
            with suppress(TimeoutError):
                await asyncio.wait_for(arrival.wait(), seconds)


def _behind(piece: Piece, entry: int = 0) -> Place:
    """Return the place behind a piece, or behind a part of one, where `entry` is counted on."""
    return Place(piece.end) if piece.is_whole else Place(piece.start, piece.part + 1, entry)


class _Gathering:
    """Entries that come together from one piece after the other."""

    def __init__(self, begin: Place, limit: int) -> None:
        self.begin = self.at = begin
        self.full = False
        self.parts: list[memoryview] = []
        self._limit = limit
        self._bytes = self._rows = 0
        self.mark: Mark | None = None

    def add(self, piece: Piece) -> None:
        """Take of a piece, or of a part of one, what fits."""
        if piece.part < self.at.part:
            # It has fewer parts than before, so the last of them was taken.
            self.at = Place(piece.end)
            return
        entries = entries_of(piece)
        taken = entries.take(self.at.entry, self._limit - self._bytes, at_least_one=not self.parts)
        self.parts += taken.parts
        self._bytes += taken.bytes
        self._rows += taken.rows
        if taken.end_offset is not None:
            # The set of GTIDs is known at ends of pieces; an earlier one is a lower bound.
            position = Position(piece.start.epoch, piece.start.file, taken.end_offset)
            self.mark = Mark(position, self.mark.gtid_set if self.mark else "", 0)
        if taken.next < entries.count:
            self.at = Place(piece.start, piece.part, taken.next)
            self.full = True
        else:
            self.at = _behind(piece, taken.next - entries.count)
            if piece.is_whole:
                self.mark = Mark(piece.end, piece.gtid_set, piece.time_us)
        self.full = self.full or self._bytes >= self._limit

    def found(self) -> Gathered | None:
        """Return what came together, None where nothing did."""
        if not self.parts:
            return None
        return Gathered(self.begin, self.at, self.mark, tuple(self.parts), self._bytes, self._rows)
