# SPDX-License-Identifier: Apache-2.0
"""A member of a merge: the transactions in another instance's log, and how far that instance's server has
progressed.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pyarrow

from penstock._native import EventMover
from penstock.capture.run import Capture
from penstock.errors import OptionInvalid, PenstockError, ServerBusy
from penstock.limits import CAPTURE_CHUNK_BYTES
from penstock.logstore.disk import Buffer
from penstock.logstore.holds import CONSUMER_PREFIX, Hold, Holds
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.mysql.connection import Connection, connect
from penstock.mysql.start import StartAt
from penstock.serve.own_log import OwnSource
from penstock.source.source import ByteRange
from penstock.source.walk import TransactionWalk

# A server that does not answer for this long blocks the merge until the next attempt.
_ANSWER_SECONDS = 2.0
# The minimum interval between queries to a server.
_ASK_SECONDS = 0.1
# A transaction's start and end in the file, its GTID, and its commit time.
_Row = tuple[int, int, str | None, int]

# A transaction gets its commit time before it is written to the log. If it is written more than this time
# later, it misses its place in the order, and is merged when it arrives.
_COMMIT_US = 200_000


@dataclass(frozen=True)
class MemberTransaction:
    """A transaction in [start, end) of a file of a member's log.

    `source` is the server's UUID and tag, or MariaDB's domain, from the transaction's GTID; "" if it has no
    GTID. `events` are the transaction's bytes, None if there are too many to keep in memory.
    """

    epoch: int
    file: str
    start: int
    end: int
    time_us: int
    source: str
    events: Buffer | None = field(repr=False)

    @property
    def end_position(self) -> Position:
        """The position after the transaction in the member's log."""
        return Position(self.epoch, self.file, self.end)


class Member:
    """Reads the log of an instance that this process captures. Used by one thread."""

    def __init__(self, capture: Capture, position: Position) -> None:
        """`position` is a transaction boundary in the instance's log."""
        self.name = capture.name
        # `read` has returned every transaction before this position.
        self.position = position
        # Why the member's server could not be queried for its progress.
        self.problem: str | None = None
        self._capture = capture
        self._source: OwnSource | None = None
        self._mover: tuple[tuple[int, str], EventMover] | None = None
        self._connection: Connection | None = None
        self._asked_at = float("-inf")
        # An end of the server's log that `read` has not reached yet, and the time of the query that returned
        # it.
        self._end: tuple[Position, int] | None = None

    def read(self) -> list[MemberTransaction]:
        """Return the next transactions of the log, [] if there are none now.

        Raises ServerBusy while the log is being opened, PositionPurged, PositionInvalid and SequenceGap if
        the log does not contain the next transactions, and an error for damaged bytes.
        """
        log = self._capture.log()
        visible = log.visible
        if visible is None or visible <= self.position:
            # The server resends data that its log lost in a power failure.
            return []
        source = self._source
        if source is None or source.log is not log:
            source = self._source = OwnSource(self.name, log)
        following = source.range_from(self.position)
        if following is None:
            return []
        byte_range, end = following
        stop = min(end, byte_range.start + CAPTURE_CHUNK_BYTES)
        walk = TransactionWalk(source, replace(byte_range, stop=stop))
        rows = [row for batch in walk for row in _rows(batch)]
        # At the end of a file, there may be an event outside any transaction, or a transaction that its
        # server lost.
        reached = end if stop == end else walk.end[1]
        self.position = Position(byte_range.epoch, byte_range.file, reached)
        return self._transactions(log, byte_range, rows)

    @staticmethod
    def _transactions(log: Log, byte_range: ByteRange, rows: list[_Row]) -> list[MemberTransaction]:
        if not rows:
            return []
        first, last = rows[0][0], rows[-1][1]
        kept = None
        # Do not keep the bytes of a long transaction. They are read again when the transaction is due.
        if last - first <= 2 * CAPTURE_CHUNK_BYTES:
            kept = memoryview(b"".join(log.read(byte_range.epoch, byte_range.file, first, last)))
        return [
            MemberTransaction(
                byte_range.epoch,
                byte_range.file,
                start,
                end,
                time_us,
                _source_of(gtid),
                None if kept is None else kept[start - first : end - first],
            )
            for start, end, gtid, time_us in rows
        ]

    def events(self, transaction: MemberTransaction) -> Iterator[Buffer]:
        """Yield the bytes of a transaction, in pieces of any size. Propagates errors from reading the log."""
        if transaction.events is not None:
            yield transaction.events
            return
        log = self._capture.log()
        yield from log.read(transaction.epoch, transaction.file, transaction.start, transaction.end)

    def mover(self, transaction: MemberTransaction) -> EventMover:
        """Return the object that moves the events of a transaction. Raises EventUnsupported."""
        file = transaction.epoch, transaction.file
        if self._mover is None or self._mover[0] != file:
            self._mover = file, EventMover(self._capture.log().head_bytes(*file))
        return self._mover[1]

    # --- How far the server is --------------------------------------------------------------

    def watermark_us(self) -> int | None:
        """Return a time such that everything that the server committed before it has been read; None if
        unknown.

        The server is queried for the end of its log, so that the watermark of an idle server advances too.
        The watermark is the time of this query by this host's clock; the server's clock does not matter. If
        the server is busy, the watermark is returned once `read` has reached that end.
        """
        reached = self._reached()
        if self._end is None or self._end[0].epoch != reached.epoch:
            self._end = self._ask()
        if self._end is None:
            return None
        end, asked_us = self._end
        if reached < end:
            return None
        self._end = None
        return asked_us - _COMMIT_US

    def _reached(self) -> Position:
        """Return the position up to which the server's log was read, or the start of the server's session if
        everything before it was read.
        """
        start = self._capture.session_start
        is_read = self._capture.log().visible in (None, self.position)
        return start if start is not None and is_read and start.epoch > self.position.epoch else self.position

    def _ask(self) -> tuple[Position, int] | None:
        """Return the end of the server's log and the time of the query; None if it is unknown now."""
        clock = time.monotonic()
        if clock - self._asked_at < _ASK_SECONDS:
            return None
        self._asked_at = clock
        now_us = time.time_ns() // 1000
        try:
            end = self._server_end()
            self.problem = None
        except PenstockError as problem:
            self.close()
            self.problem = problem.message
            return None
        return None if end is None else (end, now_us)

    def _server_end(self) -> Position | None:
        """Return the end of the server's log, None if the server that answers is not the session's."""
        server, start = self._capture.server, self._capture.session_start
        if server is None or start is None:
            return None
        address, identity = server
        if self._connection is None or self._connection.address != address:
            self.close()
            self._connection = connect(address, _ANSWER_SECONDS)
        head = self._connection.head()
        if self._connection.identity().key != identity.key:
            return None
        return Position(start.epoch, head.file, head.offset)

    def why(self) -> str:
        """Return what the member is doing while the merge waits for it."""
        status = self._capture.snapshot()
        why = self.problem or status.why
        return f"{self.name} is {status.state}" + (f" ({why})" if why else "")

    def is_caught_up(self) -> bool:
        """Return whether everything that the server has sent is stored and read."""
        with suppress(ServerBusy):
            return self._capture.progress.caught_up and self._capture.log().visible == self.position
        return False

    def hold(self, merge: str, position: Position, seconds: float) -> None:
        """Hold the log after a position, for `seconds` unless this is called again.

        If data has left the log by then, `read` notices it. Raises QuotaReached, LogFull, DiskFailed.
        """
        log = self._capture.log()
        earliest = log.earliest()
        if earliest is None or log.visible is None or position > log.visible:
            # Nothing was received yet, or the log lost its end in a power failure.
            return
        expires_us = int((time.time() + seconds) * 1e6)
        hold = Hold(f"{CONSUMER_PREFIX}merge.{merge}", max(position, earliest), expires_us)
        Holds(log.disk, log.layout).put(hold, log=log)

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def flavor_of(capture: Capture) -> str:
    """Return the flavor of an instance's servers. Raises ServerBusy before its first session."""
    epoch = capture.log().epoch
    if epoch is None:
        raise _nothing_yet(capture)
    return epoch.flavor


def start_of_member(capture: Capture, start: StartAt) -> Position:
    """Return where a merge begins in an instance's log.

    Raises ServerBusy before the log has begun, OptionInvalid for a start that cannot apply to several logs,
    PositionPurged for a time before the log.
    """
    log = capture.log()
    visible = log.visible
    if visible is None:
        # The epoch and the head of the first file may already exist, but nothing is visible yet.
        raise _nothing_yet(capture)
    if start.earliest:
        return log.earliest() or visible
    if start.time_us is not None:
        return log.locate_time(start.time_us).position
    if start.position is not None or start.gtid_set is not None:
        raise OptionInvalid(
            "start: a position or a GTID set names no place in several logs",
            hint="start: earliest, latest or a time",
        )
    return visible


def _nothing_yet(capture: Capture) -> ServerBusy:
    return ServerBusy(
        f"{capture.name} has nothing in its log yet", hint=f"Run: penstock status {capture.name}"
    )


def _rows(batch: pyarrow.RecordBatch) -> Iterator[_Row]:
    offsets, ends, gtids = (batch[name].to_pylist() for name in ("offset", "end_offset", "gtid"))
    times = batch["commit_timestamp"].cast(pyarrow.int64()).to_pylist()
    return zip(offsets, ends, gtids, times, strict=True)


def _source_of(gtid: str | None) -> str:
    """Return what identifies the server of a GTID: UUID and tag, or MariaDB's domain."""
    if not gtid:
        return ""
    return gtid.rpartition(":")[0] if ":" in gtid else gtid.partition("-")[0]
