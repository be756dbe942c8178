# SPDX-License-Identifier: Apache-2.0
"""XA transactions of a kept log that are prepared and have no outcome yet: `prepared.json`.

Their rows are needed when they commit, so a hold of the log's own keeps them from leaving. The file says how
far the log was surveyed, and is replaced whole; without it the log is surveyed again. The survey never passes
the oldest hold of a reader: what is prepared there is kept for it, though it may have committed further on.
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
    """An XA transaction without an outcome: its events are [start, end) of a source file.

    `xid` is its id as statements have it, `noted_us` when the survey came to it, microseconds UTC since 1970.
    """

    xid: str
    epoch: int
    file: str
    start: int
    end: int
    noted_us: int

    @property
    def position(self) -> Position:
        """Where it begins."""
        return Position(self.epoch, self.file, self.start)


@dataclass(frozen=True)
class PreparedFile:
    """What is prepared in the log up to a transaction boundary."""

    upto: Position
    transactions: tuple[PreparedTransaction, ...] = ()

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self | None:
        """Read the file; None where there is none, or where it is not as it was written."""
        try:
            values = unseal_json(disk.read(layout.prepared))
        except SourceMissing:
            return None
        match values:
            case {"epoch": int(epoch), "file": str(file), "offset": int(offset), "prepared": list(prepared)}:
                transactions = tuple(PreparedTransaction(**one) for one in prepared)
                return cls(Position(epoch, file, offset), transactions)
        _log.warning("what is prepared was noted, but not as it is read: the log is surveyed again")
        return None

    def write(self, disk: Disk, layout: Layout) -> None:
        """Put the file in place whole, and durable. Raises LogFull, DiskFailed."""
        values: dict[str, Any] = {
            "epoch": self.upto.epoch,
            "file": self.upto.file,
            "offset": self.upto.offset,
            "prepared": [asdict(one) for one in self.transactions],
        }
        disk.write_atomic(layout.prepared, seal_json(values))

    def find(self, xid: str) -> PreparedTransaction | None:
        """Return the transaction of an id, None where it is not prepared."""
        return next((one for one in self.transactions if one.xid == xid), None)

    def old(self, now_us: int) -> list[PreparedTransaction]:
        """Return those that have waited long for an outcome, oldest first."""
        before = now_us - PREPARED_OLD_SECONDS * _SECOND_US
        return [one for one in self.transactions if one.noted_us <= before]


class PreparedSurvey:
    """Follows a log for what is prepared in it, and holds that. For the process that writes the log."""

    def __init__(self, disk: Disk, layout: Layout, clock: Callable[[], int] | None = None) -> None:
        self._disk = disk
        self._layout = layout
        self._holds = Holds(disk, layout)
        self._clock = clock or (lambda: time.time_ns() // 1000)

    def run(self, log: LogReader) -> None:
        """Go on where the last survey ended, for a bounded amount of log, and renew the hold.

        A segment that cannot be read is passed over with a warning: what is prepared in it cannot be read by
        anybody. Raises LogFull, DiskFailed.
        """
        before = PreparedFile.load(self._disk, self._layout)
        after = before
        bytes_left = PREPARED_SURVEY_BYTES
        for segment, start, stop in self._due(log, before):
            after = self._pass(log, segment, start, stop, after)
            bytes_left -= stop - start
            if bytes_left <= 0:
                break
        if after is None:
            return
        if after != before:
            after.write(self._disk, self._layout)
        self._hold(after)

    def _due(self, log: LogReader, before: PreparedFile | None) -> list[tuple[SegmentRecord, int, int]]:
        """Return what was not surveyed of each segment: from and to which offset of its source file."""
        # A broken hold keeps nothing for its reader, so what the others need is surveyed past it.
        passed = {HOLD_NAME, *(one.hold.name for one in log.broken_holds)}
        readers = [one.position for one in self._holds.readable(self._clock()) if one.name not in passed]
        ends = [_place(one) for one in (*readers, log.visible) if one is not None]
        if not ends:
            return []
        end = min(ends)
        if before is not None:
            begin = _place(before.upto)
        else:
            # What was moved away before the first survey is not fetched for it.
            here = (one for one in log.segments if one.state != TIERED)
            begin = min(((one.epoch, one.file_number, one.base) for one in here), default=end)
        due = []
        for segment in log.segments:
            file = segment.epoch, segment.file_number
            start = max(segment.base, begin[2]) if file == begin[:2] else segment.base
            stop = segment.source_end or end[2]
            stop = min(stop, end[2]) if file == end[:2] else stop
            if begin[:2] <= file <= end[:2] and start < stop:
                due.append((segment, start, stop))
        return due

    def _pass(
        self, log: LogReader, segment: SegmentRecord, start: int, stop: int, before: PreparedFile | None
    ) -> PreparedFile:
        """Return what is prepared at the last transaction boundary of a part of a segment."""
        known = before.transactions if before else ()
        file = log.file_of(segment)
        try:
            found, upto = self._prepared_in(log, segment.epoch, file, start, stop, known)
        except (StreamError, OperatorError) as problem:
            _log.warning(
                "what is prepared in a segment cannot be told and is not held",
                segment=segment.version,
                reason=str(problem),
            )
            found, upto = list(known), Position(segment.epoch, file, stop)
        return PreparedFile(upto, tuple(sorted(found, key=lambda one: _place(one.position))))

    def _prepared_in(
        self,
        log: LogReader,
        epoch: int,
        file: str,
        start: int,
        stop: int,
        known: Sequence[PreparedTransaction],
    ) -> tuple[list[PreparedTransaction], Position]:
        """Return what is prepared after a part of a source file, and that part's last boundary."""
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
        by_place = {(one.xid, one.file, one.start): one for one in known}
        for one in known:
            decoder.note_prepared(one.xid, one.file, one.start, one.end)
        carried = bytearray()
        for view in log.read(epoch, file, start, stop):
            carried += view
            del carried[: decoder.feed(carried)]
        now = self._clock()
        found = [
            by_place.get((xid, place, first)) or PreparedTransaction(xid, epoch, place, first, end, now)
            for xid, place, first, end in decoder.prepared_places()
        ]
        return found, Position(epoch, *decoder.position)

    def _hold(self, prepared: PreparedFile) -> None:
        """Keep what the oldest one needs; one that is left without an outcome for too long is given up."""
        lasting_us = PREPARED_HOLD_SECONDS_MAX * _SECOND_US
        now = self._clock()
        held = [one for one in prepared.transactions if one.noted_us + lasting_us > now]
        if not held:
            self._holds.remove(HOLD_NAME)
            return
        hold = Hold(HOLD_NAME, held[0].position, held[0].noted_us + lasting_us)
        if hold not in self._holds.readable(now):
            self._holds.put(hold)


def _place(position: Position) -> tuple[int, int, int]:
    return position.epoch, position.file_number, position.offset


def old_prepared(log: LogReader) -> list[str]:
    """Return the id and the position of each XA transaction that has waited long for an outcome."""
    prepared = PreparedFile.load(log.disk, log.layout)
    old = prepared.old(time.time_ns() // 1000) if prepared is not None else []
    return [f"{one.xid} at {one.position}" for one in old[:PREPARED_SHOWN_MAX]]
