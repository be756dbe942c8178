# SPDX-License-Identifier: Apache-2.0
"""One decoded piece of a log, as selected and encoded by one view, and the decoder that produces consecutive
pieces.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import pyarrow
import structlog

from penstock._native import GtidSet
from penstock.errors import AccessDenied, LimitExceeded, SequenceGap, StreamError
from penstock.limits import PIECE_BYTES, PIECE_BYTES_MAX, PIECE_PART_BYTES
from penstock.model import Position, TablePatterns
from penstock.serve.limited import NO_LIMITS, Judge, LimitedMessages, Limits
from penstock.serve.own_log import OwnSource
from penstock.source.bounds import Bounds
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import Batch, RangeFollower, Selection
from penstock.source.source import ByteRange

_log = structlog.get_logger(__name__)

# Rows with the column types of their table. All other shapes are message dialects.
TYPED = "typed"

# After each slice of this size, decoding stops if no consumer waits for the piece any more.
_SLICE_BYTES = 256 * 1024


@dataclass(frozen=True)
class View:
    """Which part of the log is requested, and its shape: `typed`, or a message dialect.

    `columns` and `changes` are those of `Selection`. `shard_columns` contains pairs of a table pattern and
    the columns that determine a row's shard. Tables without a matching pattern use the primary key. With
    `with_keys`, these columns are decoded even if `columns` omits them. Transactions in `gtid_after` are
    skipped. With `with_gtid_set`, messages that have a field for a GTID set contain the set of all
    transactions executed up to and including their own. `limits` are the visible rows and
    columns, in Canal's entries.
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
    limits: Limits = NO_LIMITS
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Views are hashed several times per piece, so the hash is cached.
        values = (getattr(self, view_field.name) for view_field in fields(self) if view_field.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))

    def __hash__(self) -> int:
        return self._hash

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A cached hash is not valid in another process, so leave it out.
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def is_typed(self) -> bool:
        """Whether the view has typed rows; otherwise it has messages."""
        return self.shape == TYPED


@dataclass(frozen=True, eq=False)
class Piece:
    """The changes of whole transactions in [start, end) of the log, in one view.

    `rows` and `bytes` are the totals of the batches. `gtid_set` contains all transactions before `end`.
    `time_us` is the commit time of the last transaction, in microseconds since 1970, UTC, or 0 if there is no
    transaction. If `is_whole` is false, this object is one part of a piece, numbered by `part` from 0, and
    `end` equals `start`: only the last part ends the piece. `within` is a position in the file that contains
    the changes, which is the next file if `start` is the end of a file. `derived` caches, for all consumers,
    what was computed from the piece.
    """

    start: Position
    end: Position
    batches: tuple[Batch, ...]
    rows: int
    bytes: int
    gtid_set: str
    time_us: int
    within: Position
    part: int = 0
    is_whole: bool = True
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    def arrow(self) -> tuple[pyarrow.RecordBatch, ...]:
        """Return the batches as Arrow record batches, converted once."""
        batches: tuple[pyarrow.RecordBatch, ...] | None = self.derived.get("arrow")
        if batches is None:
            batches = self.derived["arrow"] = tuple(batch.to_arrow() for batch in self.batches)
        return batches


class Follower:
    """A decoder at the end of a piece that can continue in the same file. Not thread-safe."""

    def __init__(self, source: OwnSource, view: View, byte_range: ByteRange, run_end: int) -> None:
        self.source = source
        self.position = byte_range.position
        self.part = 0
        self._run_end = run_end
        # The offset up to which bytes were fed. Once a part of a piece was produced, this offset is beyond
        # `position`.
        self._at = self.position.offset
        # Batches decoded for a later part, and whether the piece is decoded completely.
        self._pending: list[Batch] = []
        self._decoded = False
        # The number of full batches among the decoded batches. Later batches were closed early, and would
        # differ if the log grew.
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
        selection = Selection(
            view.tables,
            view.columns,
            view.changes,
            Bounds(gtid_after=view.gtid_after or None),
            shard_columns=view.shard_columns,
            with_keys=view.with_keys,
        )
        options["held_bytes_max"] = PIECE_PART_BYTES // 2
        arguments = (source, byte_range, selection, LoggedTables(source))
        self._range: RangeFollower
        self._judge: Judge | None = None
        # The end of the last whole transaction that was judged before an error.
        self._judged_until: Position | None = None
        if view.limits:
            self._range = limited = LimitedMessages(view.limits, *arguments, **options)
            if view.limits.where:
                self._judge = Judge(
                    source, byte_range, view.limits, view.tables, view.gtid_after, limited.add_outcomes
                )
        else:
            self._range = RangeFollower(*arguments, **options)

    @classmethod
    def open(cls, source: OwnSource, view: View, start: Position) -> Self | None:
        """Return a decoder that starts at a position, None if nothing follows it yet."""
        first_range = source.range_from(start)
        return None if first_range is None else cls(source, view, *first_range)

    @property
    def boundary(self) -> Position:
        """The end of the last whole transaction decoded, or judged if judging failed."""
        return self._range.position if self._judged_until is None else self._judged_until

    def piece(
        self,
        start: Position,
        end: Position | None,
        stopping: threading.Event,
        *,
        least: bool = False,
        in_parts: bool = False,
    ) -> tuple[Piece, Self | None] | None:
        """Decode the piece that starts at `start`; return it with this decoder, if the decoder can continue.

        With `least` the piece is one transaction; with `in_parts` it is the next part. None if no whole
        transaction is available, or no consumer waits any more. Raises LimitExceeded if a piece would be too
        large.
        """
        piece_start, stop = self.position, self._stop(end)
        if self._at >= stop and not self._pending:
            return None
        goal = (
            piece_start.offset + 1
            if least
            else min((piece_start.offset // PIECE_BYTES + 1) * PIECE_BYTES, stop)
        )
        views = (
            () if self._decoded else self.source.log.read(piece_start.epoch, piece_start.file, self._at, stop)
        )
        for batch in self._decode(views, goal, stop, stopping, PIECE_PART_BYTES if in_parts else None):
            self._pending.append(batch)
            if not in_parts and sum(pending.bytes for pending in self._pending) > PIECE_BYTES_MAX:
                raise LimitExceeded(
                    f"one transaction decodes to more than {PIECE_BYTES_MAX} bytes",
                    position=str(piece_start),
                    hint="Read past it with penstock://, which takes it in parts: `read_binlog`, or Spark",
                )
        if stopping.is_set():
            return None
        if in_parts and (batches := self._next_part()):
            part, self.part = self.part, self.part + 1
            return self._build_piece(start, start, batches, part, is_whole=False), self
        if self.boundary <= piece_start:
            return None
        ready, batches = self._range.at_boundary, self._pending
        part, self.part, self._pending, self._decoded = self.part, 0, [], False
        self.position, self._at = self.boundary, self.boundary.offset
        return self._build_piece(start, self.position, batches, part), self if ready else None

    def _next_part(self) -> list[Batch]:
        """Return the batches of the next part, or no batches if the next part is the last.

        Parts are cut by content alone, so they are the same no matter how the bytes arrive, even if the log
        grows.
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
        """Return how far the file can and should be read now."""
        position, visible = self.position, self.source.log.visible
        assert visible is not None, "something was visible, or there would be no decoder"
        in_file = (visible.epoch, visible.file) == (position.epoch, position.file)
        # After the end of the run, the log may continue in the same file or have a gap. Reading the log
        # reports a gap.
        stop = visible.offset if in_file and self._at >= self._run_end else self._run_end
        if end is not None and (end.epoch, end.file) == (position.epoch, position.file):
            stop = min(stop, end.offset)
        return stop

    def _build_piece(
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
            self.position,
            part,
            is_whole,
        )

    def _judge_rows(self, end: int, stop: int, stopping: threading.Event) -> bool:
        """Evaluate the conditions of transactions that begin before the offset `end`, reading up to `stop`.

        Return False once `stopping` is set.
        """
        if self._judge is not None:
            try:
                self._judge.read_past(end, stop, stopping)
            except StreamError:
                self._judged_until = self._judge.boundary
                raise
        return not stopping.is_set()

    def _decode(
        self,
        views: Iterable[memoryview],
        goal: int,
        stop: int,
        stopping: threading.Event,
        part_bytes: int | None,
    ) -> Iterator[Batch]:
        """Decode up to the first transaction boundary at or after an offset, or to the end of the bytes at
        `stop`.

        With `part_bytes` it also stops inside a transaction once that many bytes were returned.
        """
        size = sum(batch.bytes for batch in self._pending)
        if self._decoded or (part_bytes is not None and size >= part_bytes):
            return
        for view in views:
            while view.nbytes:
                take = goal - self._at if self._at < goal else self._range.bytes_to_event_end(view)
                piece = view[: min(take, _SLICE_BYTES)]
                # Evaluating the whole piece at once costs less than evaluating each slice.
                if not self._judge_rows(max(goal, self._at + piece.nbytes), stop, stopping):
                    return
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
    """Decode the piece that starts at a position, using a decoder positioned there if there is one.

    With `part`, the result may be one of several parts of the piece, numbered from 0; without `part`, it is
    the whole piece. Also returns the decoder if it can continue. None if nothing is visible yet. The whole
    transactions before an error form a separate piece, and the error is raised at the start of the next
    piece. Its text is hidden from clients with limits, because it may quote a value.
    """
    try:
        return _make_piece(source, view, start, end, follower, stopping, part)
    except StreamError as problem:
        if not view.limits:
            raise
        _log.warning(
            "a limited destination stops at an error",
            destination=view.limits.destination,
            error=type(problem).__name__,
            why=str(problem),
        )
        raise type(problem)(
            f"{type(problem).__name__}: the text is hidden, because it may quote a hidden value",
            position=problem.position,
            hint="The daemon's own log has the text",
        ) from None


def _make_piece(
    source: OwnSource,
    view: View,
    start: Position,
    end: Position | None,
    follower: Follower | None,
    stopping: threading.Event,
    part: int | None,
) -> tuple[Piece, Follower | None] | None:
    fresh = least = has_failed = False
    until = end
    while True:
        if follower is None:
            follower, fresh = Follower.open(source, view, start), True
            if follower is None:
                return None
        piece_start = follower.position
        try:
            decoded = follower.piece(start, until, stopping, least=least, in_parts=part is not None)
        except (AccessDenied, LimitExceeded):
            if least or (part is not None and not view.limits):
                raise
            # Other transactions may precede the one that is too large or whose rows may not be shown.
            until, least = end, True
        except StreamError as problem:
            if follower.boundary > piece_start and not least:
                # Only parts within one transaction keep their numbers.
                least, has_failed = bool(part) or has_failed, True
                until = end if least else _end_before(problem, follower.boundary)
            elif fresh or not isinstance(problem, SequenceGap):
                raise
            # A gap in the log does not have to mean missing data: opening the log at the position shows
            # whether data is missing.
        else:
            if (
                decoded is not None
                and part is not None
                and decoded[0].part < part
                and not decoded[0].is_whole
            ):
                # The decoder of an earlier part is gone, so decode the piece again up to the requested part.
                continue
            if decoded is not None or stopping.is_set() or (fresh and (least or not has_failed)):
                return decoded
            # Either the file ended at this position, and the log continues in the next file. Or nothing
            # precedes an error, which the transaction at this position raises.
            until, least = end, has_failed
        follower = None


def _end_before(problem: StreamError, boundary: Position) -> Position:
    """Return where to stop reading before an error.

    A decoder that refuses a statement may already have passed the end of its transaction, `boundary`.
    """
    if not problem.position:
        return boundary
    failed = Position.parse(problem.position)
    is_in_file = failed.file == boundary.file
    return replace(boundary, offset=min(boundary.offset, failed.offset)) if is_in_file else boundary
