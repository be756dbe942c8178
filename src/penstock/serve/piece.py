# SPDX-License-Identifier: Apache-2.0
"""One piece of a log in one view, and the decoder that makes one after the other."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Self

import pyarrow

from penstock._native import GtidSet
from penstock.errors import LimitExceeded, SequenceGap, StreamError
from penstock.limits import PIECE_BYTES, PIECE_BYTES_MAX, PIECE_PART_BYTES
from penstock.model import Position, TablePatterns
from penstock.serve.own_log import OwnSource
from penstock.source.bounds import Bounds
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import Batch, RangeFollower, Selection
from penstock.source.source import ByteRange

# Rows of each table in its own types; every other shape is a dialect of messages.
TYPED = "typed"

# So much is decoded before it is looked whether anybody still waits for it.
_SLICE_BYTES = 256 * 1024


@dataclass(frozen=True)
class View:
    """What of the log is wanted, and in which shape: `typed`, or a dialect.

    `columns` and `changes` are those of `Selection`. `shard_columns` are (table pattern, columns) that tell a
    row's shard, the primary key where no pattern fits; with `with_keys` they are decoded even where `columns`
    leaves them out. Transactions of `gtid_after` are left out. With `with_gtid_set` messages that have a
    place for it carry the set of transactions executed up to theirs.
    """

    shape: str
    tables: TablePatterns = field(default_factory=TablePatterns)
    columns: tuple[str, ...] | None = None
    changes: tuple[str, ...] | None = None
    shard_columns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    message_per_row: bool = False
    with_keys: bool = False
    gtid_after: str = ""
    server_zone_seconds: int = 0
    with_gtid_set: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # It is looked up by several times for each piece.
        told = (getattr(self, one.name) for one in fields(self) if one.compare)
        object.__setattr__(self, "_hash", hash(tuple(told)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_typed(self) -> bool:
        """Whether it shows rows of each table in its own types; else it is of messages."""
        return self.shape == TYPED


@dataclass(frozen=True, eq=False)
class Piece:
    """The changes of whole transactions in [start, end) of the log, in one view.

    `rows` and `bytes` are those of the batches, `gtid_set` every transaction before `end`, `time_us` when the
    last one of the piece was committed, microseconds UTC since 1970, 0 where it has none. Where `is_whole` is
    false it is a part of a piece, `part` counted from 0, which ends only with the last one: `end` is `start`.
    `derived` keeps what was made of it once for all who get it.
    """

    start: Position
    end: Position
    batches: tuple[Batch, ...]
    rows: int
    bytes: int
    gtid_set: str
    time_us: int
    part: int = 0
    is_whole: bool = True
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    def arrow(self) -> tuple[pyarrow.RecordBatch, ...]:
        """Return the batches as Arrow's, made once."""
        found: tuple[pyarrow.RecordBatch, ...] | None = self.derived.get("arrow")
        if found is None:
            found = self.derived["arrow"] = tuple(batch.to_arrow() for batch in self.batches)
        return found


class Follower:
    """A decoder at the end of a piece, ready to go on in the same file. For one thread at a time."""

    def __init__(self, source: OwnSource, view: View, byte_range: ByteRange, run_end: int) -> None:
        self.source = source
        self.position = byte_range.position
        self.part = 0
        self._run_end = run_end
        # How far the bytes were taken: behind the position where a part of a piece was made.
        self._at = self.position.offset
        # What was decoded for a later part, and whether that is all of the piece.
        self._pending: list[Batch] = []
        self._decoded = False
        # How many of them were full: what was closed before it was would hold more had the log grown.
        self._full = 0
        before = source.gtid_set(self.position)
        options: dict[str, Any] = {"emit": TYPED}
        if not view.is_typed:
            options = {
                "emit": "messages",
                "dialect": view.shape,
                "message_per_row": view.message_per_row,
                "server_zone_seconds": view.server_zone_seconds,
                "executed": before if view.with_gtid_set else None,
            }
        self._before = GtidSet.parse(before)
        self._range = RangeFollower(
            source,
            byte_range,
            Selection(
                view.tables,
                view.columns,
                view.changes,
                Bounds(gtid_after=view.gtid_after or None),
                shard_columns=view.shard_columns,
                with_keys=view.with_keys,
            ),
            LoggedTables(source),
            held_bytes_max=PIECE_PART_BYTES // 2,
            **options,
        )

    @classmethod
    def open(cls, source: OwnSource, view: View, start: Position) -> Self | None:
        """Return a decoder for what follows a position, None where nothing does yet."""
        found = source.range_from(start)
        return None if found is None else cls(source, view, *found)

    @property
    def boundary(self) -> Position:
        """The end of the last whole transaction decoded."""
        return self._range.position

    def piece(
        self,
        start: Position,
        end: Position | None,
        stopping: threading.Event,
        *,
        least: bool = False,
        in_parts: bool = False,
    ) -> tuple[Piece, Self | None] | None:
        """Decode the piece that began at `start`; with this decoder, if it can go on behind it.

        With `least` it is one transaction; with `in_parts` the next part of it. None where nothing whole is
        there, or nobody waits for it any more. Raises LimitExceeded for more rows than a piece may hold.
        """
        begun, stop = self.position, self._stop(end)
        if self._at >= stop and not self._pending:
            return None
        goal = begun.offset + 1 if least else min((begun.offset // PIECE_BYTES + 1) * PIECE_BYTES, stop)
        views = () if self._decoded else self.source.log.read(begun.epoch, begun.file, self._at, stop)
        for batch in self._decode(views, goal, stopping, PIECE_PART_BYTES if in_parts else None):
            self._pending.append(batch)
            if not in_parts and sum(one.bytes for one in self._pending) > PIECE_BYTES_MAX:
                raise LimitExceeded(
                    f"one transaction decodes to more than {PIECE_BYTES_MAX} bytes",
                    position=str(begun),
                    hint="Read past it with penstock://, which takes it in parts: `read_binlog`, or Spark",
                )
        if stopping.is_set():
            return None
        if in_parts and (batches := self._next_part()):
            part, self.part = self.part, self.part + 1
            return self._made(start, start, batches, part, is_whole=False), self
        if self.boundary <= begun:
            return None
        ready, batches = self._range.at_boundary, self._pending
        part, self.part, self._pending, self._decoded = self.part, 0, [], False
        self.position, self._at = self.boundary, self.boundary.offset
        return self._made(start, self.position, batches, part), self if ready else None

    def _next_part(self) -> list[Batch]:
        """Take the batches of a part that is not the last one; none where what is pending is the last.

        Parts are cut by what is in them alone: they are the same however the bytes come, and though the log
        grows meanwhile.
        """
        size = 0
        full = self._full if self._decoded else len(self._pending)
        for count, batch in enumerate(self._pending[:full], 1):
            size += batch.bytes
            if size >= PIECE_PART_BYTES and not (self._decoded and count == len(self._pending)):
                taken, self._pending = self._pending[:count], self._pending[count:]
                self._full = full - count
                return taken
        return []

    def _stop(self, end: Position | None) -> int:
        """Return how far the file can be read now, and is to be."""
        here, visible = self.position, self.source.log.visible
        assert visible is not None, "something was visible, or there would be no decoder"
        in_file = (visible.epoch, visible.file) == (here.epoch, here.file)
        # Behind the run's end the log may go on in the same file, or have a hole, which reading tells.
        stop = visible.offset if in_file and self._at >= self._run_end else self._run_end
        if end is not None and (end.epoch, end.file) == (here.epoch, here.file):
            stop = min(stop, end.offset)
        return stop

    def _made(
        self, start: Position, end: Position, batches: list[Batch], part: int, *, is_whole: bool = True
    ) -> Piece:
        seen = self._range.gtid_set
        return Piece(
            start,
            end,
            tuple(batches),
            sum(batch.rows for batch in batches),
            sum(batch.bytes for batch in batches),
            str(self._before.union(GtidSet.parse(seen))) if self._before else seen,
            self._range.commit_time_us,
            part,
            is_whole,
        )

    def _decode(
        self, views: Iterable[memoryview], goal: int, stopping: threading.Event, part_bytes: int | None
    ) -> Iterator[Batch]:
        """Decode up to the first transaction boundary at or behind an offset, or as far as the bytes go.

        With `part_bytes` it ends inside a transaction too, where so much of it was handed out.
        """
        size = sum(batch.bytes for batch in self._pending)
        if self._decoded or (part_bytes is not None and size >= part_bytes):
            return
        for view in views:
            while view.nbytes:
                if stopping.is_set():
                    return
                take = goal - self._at if self._at < goal else self._range.bytes_to_event_end(view)
                piece = view[: min(take, _SLICE_BYTES)]
                for batch in self._range.feed(piece):
                    size += batch.bytes
                    yield batch
                self._at += piece.nbytes
                view = view[piece.nbytes :]
                if self._range.at_boundary:
                    if self._at >= goal:
                        self._full = len(self._pending)
                        yield from self._range.close_batches()
                        self._decoded = True
                        return
                elif part_bytes is not None and size >= part_bytes:
                    return
        self._full = len(self._pending)
        yield from self._range.close_batches()
        self._decoded = True


def make_piece(
    source: OwnSource,
    view: View,
    start: Position,
    end: Position | None,
    follower: Follower | None,
    stopping: threading.Event,
    part: int | None = None,
) -> tuple[Piece, Follower | None] | None:
    """Make the piece that begins at a position, with a decoder that stands there if there is one.

    With `part` it may be one of several parts of the piece, counted from 0; without, it is whole. Returns the
    decoder that can go on behind it, if one can; None where nothing is visible yet. What is whole before an
    error makes a piece of its own, and the error comes where the next one would begin.
    """
    fresh = least = False
    while True:
        if follower is None:
            follower, fresh = Follower.open(source, view, start), True
            if follower is None:
                return None
        begun = follower.position
        try:
            made = follower.piece(start, end, stopping, least=least, in_parts=part is not None)
        except LimitExceeded:
            if least or part is not None:
                raise
            # What is too large may have transactions before it that are not.
            least = True
        except StreamError as problem:
            if follower.boundary > begun and not part:
                end = follower.boundary
            elif fresh or not isinstance(problem, SequenceGap):
                raise
            # Where bytes are left out nothing need be missing: opening at the place tells.
        else:
            if made is not None and part is not None and made[0].part < part and not made[0].is_whole:
                # It was taken before; the decoder that had made it is gone.
                continue
            if made is not None or fresh or stopping.is_set():
                return made
            # Its file ended here, and the log goes on in the next one.
        follower = None
