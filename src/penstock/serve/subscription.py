# SPDX-License-Identifier: Apache-2.0
"""Follows an instance over any protocol: where to start, what comes next, where to end.

started = await resolve_start(pieces, Start(edge="latest")) cursor = Cursor(pieces, view, started) while
(piece := await cursor.next(wait_seconds=25)) is not None: ...
"""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow

from penstock._native import GtidSet
from penstock.errors import ServerBusy
from penstock.model import Position
from penstock.serve.own_log import OwnSource
from penstock.serve.pieces import Piece, Pieces, View
from penstock.source.decoding import RangeDecoding
from penstock.source.kept import epoch_shift
from penstock.source.source import ByteRange

Edge = Literal["earliest", "latest"]


@dataclass(frozen=True)
class Start:
    """Where to begin or end. Exactly one field other than `server_key` is set.

    With `server_key`, the epoch of `position` is numbered as in another daemon's log, and the key identifies
    the epoch's server. `time_us` is in microseconds since 1970, UTC.
    """

    position: Position | None = None
    gtid_set: str | None = None
    time_us: int | None = None
    edge: Edge | None = None
    server_key: str | None = None


@dataclass(frozen=True)
class Started:
    """The transaction boundary to begin at. Some transactions in `gtid_after` may follow it."""

    position: Position
    gtid_after: str = ""


async def resolve_start(pieces: Pieces, start: Start) -> Started:
    """Convert a requested start to a position in this log.

    Raises PositionPurged, PositionInvalid, ServerChanged for another server's position, and ServerBusy if the
    log is empty or has not reached the position.
    """
    # Lookups by time or GTID set may scan far. Followers that continue by position must not wait for such a
    # search.
    is_search = start.time_us is not None or start.gtid_set is not None
    ask = pieces.search if is_search else pieces.in_thread
    return await ask(_resolve_start, pieces.source, start)


def _resolve_start(source: OwnSource, start: Start) -> Started:
    visible = source.log.visible
    if visible is None:
        raise ServerBusy(
            f"{source} is empty so far", hint="The first bytes arrive once capture has connected"
        )
    if start.edge == "latest":
        return Started(visible)
    if start.edge == "earliest":
        return Started(source.earliest())
    if start.time_us is not None:
        return Started(_first_from(source, source.find_time(start.time_us), time_from_us=start.time_us))
    if start.gtid_set is not None:
        first_position = _first_from(source, source.find_gtid_set(start.gtid_set), gtid_after=start.gtid_set)
        seen = GtidSet.parse(source.gtid_set(first_position))
        # Transactions of the set that are still to come must not be sent again.
        ahead = not seen.contains(GtidSet.parse(start.gtid_set))
        return Started(first_position, start.gtid_set if ahead else "")
    assert start.position is not None, "a start has one field"
    position = position_here(source, start.position, start.server_key)
    if position > visible:
        raise ServerBusy(
            f"{source} goes to {visible}",
            position=str(position),
            hint="This daemon may lag behind another one: penstock status",
        )
    if position != visible:
        source.range_from(position)
    return Started(position)


def position_here(source: OwnSource, position: Position, server_key: str | None) -> Position:
    """Return a position with its epoch number translated to the numbering of this log. Raises ServerChanged.

    A server may have several epochs: the epoch with the same number wins, else the newest epoch that contains
    the position.
    """
    if server_key is None:
        return position
    known = source.epochs()
    epochs = [epoch for epoch, key in known if key == server_key]
    if not epochs:
        epoch_shift([(position.epoch, server_key)], known, str(source))
    if position.epoch in epochs:
        return position
    holding = [
        extent.epoch
        for extent in source.log.extents()
        if extent.epoch in epochs
        and extent.file == position.file
        and extent.start <= position.offset <= extent.end
    ]
    return replace(position, epoch=max(holding or epochs))


def _first_from(source: OwnSource, begin: Position, **options: object) -> Position:
    """Return the start of the first transaction that passes a decoder's filter, else the end of the log."""
    position = begin
    while (next_range := source.range_from(position)) is not None:
        byte_range, end = next_range
        decoding = RangeDecoding(
            source, replace(byte_range, stop=end), emit="transactions", batch_rows_max=1, **options
        )
        for state in decoding.states(drop_open=True):
            if state == "batch":
                batch = decoding.take_batch()
                offset = _column(batch, "offset")[0]
                return Position(byte_range.epoch, byte_range.file, offset)
            decoding.decoder.take_statement()
        position = Position(byte_range.epoch, byte_range.file, end)
    return position


def _exact_end(source: OwnSource, start: Position, end: Position, until: Start) -> Position:
    """Return the boundary inside a piece at which exactly everything up to `until` has been sent."""
    first_range = source.range_from(start)
    assert first_range is not None, "a piece was made of it"
    byte_range: ByteRange = replace(first_range[0], stop=end.offset)
    options: dict[str, object] = {"time_until_us": until.time_us}
    if until.gtid_set is not None:
        before = GtidSet.parse(source.gtid_set(byte_range.position))
        options = {"gtid_until": str(GtidSet.parse(until.gtid_set).subtract(before))}
    decoding = RangeDecoding(source, byte_range, emit="transactions", batch_rows_max=1, **options)
    last = start
    for state in decoding.states(drop_open=True):
        if state == "batch":
            offset = _column(decoding.take_batch(), "end_offset")[0]
            last = Position(byte_range.epoch, byte_range.file, offset)
        else:
            decoding.decoder.take_statement()
    return last


def _column(batch: object, name: str) -> list[int]:
    values: list[int] = pyarrow.record_batch(batch)[name].to_pylist()
    return values


class Cursor:
    """A position in an instance's changes that advances piece by piece. Belongs to one task.

    `position` is the end of the latest piece. `ended` is true once `until` is reached. With `in_parts`, a
    piece may be returned in parts, unless `until` may lie inside the piece; see `Piece.is_whole`.
    """

    def __init__(
        self,
        pieces: Pieces,
        view: View,
        started: Started,
        until: Start | None = None,
        *,
        in_parts: bool = False,
    ) -> None:
        self.pieces = pieces
        self.position = started.position
        self.ended = False
        self._plain = view
        self.view = replace(view, gtid_after=started.gtid_after) if started.gtid_after else view
        pieces.follow(view, self)
        # If the end is not a position, only a whole piece shows whether it contains the end.
        self._part = 0 if in_parts and (until is None or until.position is not None) else None
        self._until = until
        self._end: Position | None = None
        self._until_set: GtidSet | None = None
        self._begun = False
        # Whether the last wait was over before the next piece might be decoded.
        self._arrives_in_gaps = False
        if until is not None:
            if until.position is not None:
                self._end = position_here(pieces.source, until.position, until.server_key)
            elif until.edge is not None:
                self._end = pieces.log.visible if until.edge == "latest" else self.position
            elif until.gtid_set is not None:
                self._until_set = GtidSet.parse(until.gtid_set)

    async def next(self, wait_seconds: float) -> Piece | None:
        """Return the next piece, None if the wait timed out or the end is reached.

        Propagates errors from `Pieces.at`; a retry starts at the same position.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        arrivals, name = self.pieces.arrivals, self.pieces.name
        while not self.ended:
            seen = arrivals.number(name)
            piece = await self._next_available()
            if piece is not None or self.ended:
                return piece
            remaining = deadline - loop.time()
            if remaining <= 0 or arrivals.closing:
                return None
            if self._arrives_in_gaps and (gap := self._gap_seconds()) > 0:
                # Until the end of the gap, an arrival could not be decoded anyway, so the capture need not
                # wake this task.
                await asyncio.sleep(min(gap, remaining))
                self._arrives_in_gaps = arrivals.number(name) != seen
                continue
            # Waking a waiter costs time in the capture, so register as a waiter only for a real wait.
            with arrivals.waiting(name) as arrival:
                if arrivals.number(name) == seen and not arrivals.closing:
                    try:
                        async with asyncio.timeout(remaining):
                            await arrival.wait()
                    except TimeoutError:
                        return None
            self._arrives_in_gaps = self._gap_seconds() > 0
        return None

    def _gap_seconds(self) -> float:
        return self.pieces.gap_seconds(self.view, self.position, self._end)

    async def _next_available(self) -> Piece | None:
        if self._until_set is not None and not self._begun:
            # If everything requested precedes the start, no later piece would show that the end is reached,
            # so check now.
            before = await self.pieces.search(self.pieces.source.gtid_set, self.position)
            if GtidSet.parse(before).contains(self._until_set):
                self._end = self.position
        self._begun = True
        if self._end is not None and self.position >= self._end:
            self.ended = True
            return None
        piece = await self.pieces.at(self.view, self.position, self._end, self._part)
        if piece is None:
            self.ended = self._is_past_until()
            return None
        if self._passes_until(piece):
            assert self._until is not None, "it is passed"
            self._end = await self.pieces.search(
                _exact_end, self.pieces.source, piece.start, piece.end, self._until
            )
            return await self._next_available()
        self._advance(piece)
        return piece

    def _advance(self, piece: Piece) -> None:
        self.position = piece.end
        if self._part is not None:
            self._part = 0 if piece.is_whole else piece.part + 1
        if not piece.is_whole:
            return
        if self.view.gtid_after and GtidSet.parse(piece.gtid_set).contains(
            GtidSet.parse(self.view.gtid_after)
        ):
            # No transaction of the set can follow, so use the view that other followers share again.
            self.view = self._plain

    def _passes_until(self, piece: Piece) -> bool:
        """Return whether a piece contains the end, if the end is not a known position."""
        if self._until is None or self._end is not None:
            return False
        if self._until_set is not None:
            return GtidSet.parse(piece.gtid_set).contains(self._until_set)
        return self._until.time_us is not None and piece.time_us >= self._until.time_us

    def _is_past_until(self) -> bool:
        """Return whether no transaction before the end can still arrive, judged by the log's lag instead of a
        later transaction.
        """
        if self._until is None or self._until.time_us is None:
            return False
        lag = self.pieces.lag_seconds()
        return lag is not None and time.time() - lag > self._until.time_us / 1e6

    def prefetch(self) -> None:
        """Decode the next piece while this one is being sent."""
        if self._until is None and not self.ended:
            self.pieces.prefetch(self.view, self.position, self._part)

    def behind_bytes(self) -> int:
        """Return how many bytes of the log follow the position."""
        return self.pieces.log.bytes_behind(self.position)
