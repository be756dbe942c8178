# SPDX-License-Identifier: Apache-2.0
"""The prepared XA transactions of a log that are neither committed nor rolled back yet: `prepared.json`.

Their rows are needed when they commit, so the daemon places a hold on the segments that contain the rows. The
file also records how far the log has been surveyed, and is replaced atomically. If the file is missing, the
log is surveyed again. The survey never passes the position of a reader's oldest hold. A transaction that is
in the prepared state at that position is kept for the reader, even if it commits later in the log.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import structlog

from penstock._native import Decoder
from penstock.errors import OperatorError, SourceMissing, StreamError
from penstock.limits import (
    PREPARED_HOLD_SECONDS_MAX,
    PREPARED_OLD_SECONDS,
    PREPARED_SHOWN_MAX,
    PREPARED_SURVEY_BYTES,
)
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.holds import OWN_PREFIX, Hold, Holds
from penstock.logstore.layout import Layout
from penstock.logstore.reader import LogReader
from penstock.logstore.records import TIERED, SegmentRecord
from penstock.model import Position

HOLD_NAME = f"{OWN_PREFIX}prepared"

_SECOND_US = 1_000_000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PreparedTransaction:
    """An XA transaction without an outcome. Its events are [start, end) of a source file.

    `xid` is its id as written in SQL statements. `noted_us` is when it was first seen, in microseconds since
    1970, UTC.
    """

    xid: str
    epoch: int
    file: str
    start: int
    end: int
    noted_us: int

    @property
    def position(self) -> Position:
        """The position of the transaction's first event."""
        return Position(self.epoch, self.file, self.start)


@dataclass(frozen=True)
class PreparedFile:
    """The prepared transactions in a log up to a transaction boundary."""

    upto: Position
    transactions: tuple[PreparedTransaction, ...] = ()

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self | None:
        """Read the file. Returns None if it is missing or damaged."""
        try:
            values = unseal_json(disk.read(layout.prepared))
        except SourceMissing:
            return None
        match values:
            case {"epoch": int(epoch), "file": str(file), "offset": int(offset), "prepared": list(prepared)}:
                transactions = tuple(PreparedTransaction(**values) for values in prepared)
                return cls(Position(epoch, file, offset), transactions)
        _log.warning("what is prepared was noted, but not as it is read: the log is surveyed again")
        return None

    def write(self, disk: Disk, layout: Layout) -> None:
        """Replace the file atomically and durably. Raises LogFull, DiskFailed."""
        values: dict[str, Any] = {
            "epoch": self.upto.epoch,
            "file": self.upto.file,
            "offset": self.upto.offset,
            "prepared": [asdict(transaction) for transaction in self.transactions],
        }
        disk.write_atomic(layout.prepared, seal_json(values))

    def find(self, xid: str) -> PreparedTransaction | None:
        """Return the prepared transaction with an id, None if there is none."""
        return next((transaction for transaction in self.transactions if transaction.xid == xid), None)

    def old(self, now_us: int) -> list[PreparedTransaction]:
        """Return the transactions that have waited too long for an outcome, the oldest first."""
        before = now_us - PREPARED_OLD_SECONDS * _SECOND_US
        return [transaction for transaction in self.transactions if transaction.noted_us <= before]


class PreparedSurvey:
    """Searches a log for prepared transactions, and sets a hold that keeps them. Used by the process that
    writes the log.
    """

    def __init__(self, disk: Disk, layout: Layout, clock: Callable[[], int] | None = None) -> None:
        self._disk = disk
        self._layout = layout
        self._holds = Holds(disk, layout)
        self._clock = clock or (lambda: time.time_ns() // 1000)

    def run(self, log: LogReader) -> None:
        """Continue the survey for a bounded part of the log, and renew the hold.

        An unreadable segment is skipped with a warning, because nobody can read its prepared transactions.
        Raises LogFull, DiskFailed.
        """
        before = PreparedFile.load(self._disk, self._layout)
        after = before
        bytes_left = PREPARED_SURVEY_BYTES
        for segment, start, stop in self._unsurveyed_ranges(log, before):
            after = self._survey_segment(log, segment, start, stop, after)
            bytes_left -= stop - start
            if bytes_left <= 0:
                break
        if after is None:
            return
        if after != before:
            after.write(self._disk, self._layout)
        self._hold(after)

    def _unsurveyed_ranges(
        self, log: LogReader, before: PreparedFile | None
    ) -> list[tuple[SegmentRecord, int, int]]:
        """Return the range of each segment that was not surveyed yet, in offsets of its source file."""
        # A broken hold no longer protects the log for its reader. Ignore it, so that it does not delay the
        # survey that other readers need.
        ignored = {HOLD_NAME, *(hold.hold.name for hold in log.broken_holds)}
        readers = [hold.position for hold in self._holds.readable(self._clock()) if hold.name not in ignored]
        ends = [_order_key(position) for position in (*readers, log.visible) if position is not None]
        if not ends:
            return []
        end = min(ends)
        if before is not None:
            begin = _order_key(before.upto)
        else:
            # The first survey does not fetch segments that were moved to the tier.
            local = (record for record in log.segments if record.state != TIERED)
            begin = min(((record.epoch, record.file_number, record.base) for record in local), default=end)
        ranges = []
        for segment in log.segments:
            file = segment.epoch, segment.file_number
            start = max(segment.base, begin[2]) if file == begin[:2] else segment.base
            stop = segment.source_end or end[2]
            stop = min(stop, end[2]) if file == end[:2] else stop
            if begin[:2] <= file <= end[:2] and start < stop:
                ranges.append((segment, start, stop))
        return ranges

    def _survey_segment(
        self, log: LogReader, segment: SegmentRecord, start: int, stop: int, before: PreparedFile | None
    ) -> PreparedFile:
        """Return the prepared transactions at the last transaction boundary of a part of a segment."""
        known = before.transactions if before else ()
        file = log.file_of(segment)
        try:
            prepared, end = self._scan_prepared(log, segment.epoch, file, start, stop, known)
        except (StreamError, OperatorError) as problem:
            _log.warning(
                "the prepared transactions of a segment are unknown and are not held",
                segment=segment.version,
                reason=str(problem),
            )
            prepared, end = list(known), Position(segment.epoch, file, stop)
        return PreparedFile(
            end, tuple(sorted(prepared, key=lambda transaction: _order_key(transaction.position)))
        )

    def _scan_prepared(
        self,
        log: LogReader,
        epoch: int,
        file: str,
        start: int,
        stop: int,
        known: Sequence[PreparedTransaction],
    ) -> tuple[list[PreparedTransaction], Position]:
        """Return the prepared transactions after a part of a source file, and the part's last boundary."""
        decoder = Decoder(
            instance="",
            epoch=epoch,
            file=file,
            offset=start,
            head=log.head_bytes(epoch, file),
            passing=True,
            statements=False,
            verify_checksum=False,
        )
        by_location = {
            (transaction.xid, transaction.file, transaction.start): transaction for transaction in known
        }
        for transaction in known:
            decoder.note_prepared(transaction.xid, transaction.file, transaction.start, transaction.end)
        pending = bytearray()
        for view in log.read(epoch, file, start, stop):
            pending += view
            del pending[: decoder.feed(pending)]
        now = self._clock()
        prepared = [
            by_location.get((xid, file_name, first))
            or PreparedTransaction(xid, epoch, file_name, first, end, now)
            for xid, file_name, first, end in decoder.prepared_places()
        ]
        return prepared, Position(epoch, *decoder.position)

    def _hold(self, prepared: PreparedFile) -> None:
        """Hold the oldest prepared transaction. A transaction that has been without an outcome for too long
        is no longer held.
        """
        lasting_us = PREPARED_HOLD_SECONDS_MAX * _SECOND_US
        now = self._clock()
        held = [
            transaction for transaction in prepared.transactions if transaction.noted_us + lasting_us > now
        ]
        if not held:
            self._holds.remove(HOLD_NAME)
            return
        hold = Hold(HOLD_NAME, held[0].position, held[0].noted_us + lasting_us)
        if hold not in self._holds.readable(now):
            self._holds.put(hold)


def _order_key(position: Position) -> tuple[int, int, int]:
    return position.epoch, position.file_number, position.offset


def old_prepared(log: LogReader) -> list[str]:
    """Return the id and position of each XA transaction that has waited too long for an outcome."""
    prepared = PreparedFile.load(log.disk, log.layout)
    old = prepared.old(time.time_ns() // 1000) if prepared is not None else []
    return [f"{transaction.xid} at {transaction.position}" for transaction in old[:PREPARED_SHOWN_MAX]]
