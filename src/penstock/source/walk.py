# SPDX-License-Identifier: Apache-2.0
"""Find transaction ends from event headers alone, without decoding values.

If a file can be opened at any byte, only a limited window before the target position is scanned. The source
locates the first event in the window (`Source.align`).
"""

from collections.abc import Iterator

import pyarrow
import pyarrow.compute

from penstock.limits import OFFSET_MAX, RANGE_BYTES_MIN
from penstock.logstore.extent import Extent
from penstock.model import Position
from penstock.source.decoding import RangeDecoding
from penstock.source.source import ByteRange, Source, place_of

# If no transaction ends in a window, the next window is larger by this factor.
_WINDOW_GROWTH = 8


class TransactionWalk:
    """The transactions that start in a range, as batches with one row per transaction: file, offset,
    end_offset, rows, ...

    An incomplete transaction at the end of the bytes is omitted.
    """

    def __init__(self, source: Source, byte_range: ByteRange) -> None:
        self._decoding = RangeDecoding(source, byte_range, emit="transactions")

    @property
    def gtid_set(self) -> str:
        """The GTIDs seen so far: those listed in the file's header, and those of the transactions."""
        return self._decoding.gtid_set

    @property
    def end(self) -> tuple[str, int]:
        """File and offset after the last transaction so far, including transactions outside the range."""
        return self._decoding.decoder.position

    def __iter__(self) -> Iterator[pyarrow.RecordBatch]:
        for state in self._decoding.states(drop_open=True):
            if state == "batch":
                yield pyarrow.record_batch(self._decoding.take_batch())
            else:
                assert state == "statement", "counting asks for no table"
                self._decoding.decoder.take_statement()


def last_transaction_end(source: Source, start: Position, bytes_now: int | None) -> Position:
    """Return the end of the last whole transaction between a transaction boundary and the end of its file.

    `bytes_now` is the file's size, None if the file can only be read from its start.
    """
    to_file_end = ByteRange(start.epoch, start.file, start.offset, None, aligned=True)
    return _last_end_in(source, to_file_end, bytes_now or 0, OFFSET_MAX) or start


def walk(
    source: Source,
    start: Position,
    end: Position,
    rows_max: int | None = None,
    bytes_max: int | None = None,
) -> Position:
    """Return the last transaction boundary up to `end` for which the range from `start` stays within the
    limits.

    The range contains at least one transaction, if there is one: a limit never blocks reading forever. For a
    limit on bytes alone, only a window before the result is read; for a limit on rows, the whole range.
    """
    if rows_max is None:
        if bytes_max is None:
            return end
        extents = source.extents(start, end)
        if source.live or all(extent.splittable for extent in extents):
            extent, target = _after_bytes(extents, start, end, bytes_max)
            if target == end:
                return end
            if not source.live and (walked_to := _last_end_before(source, extent, start, target)) is not None:
                return walked_to
    rows_left = OFFSET_MAX if rows_max is None else rows_max
    bytes_left = OFFSET_MAX if bytes_max is None else bytes_max
    walked_to = start
    for byte_range in source.split(start, end, range_bytes=OFFSET_MAX):
        for batch in TransactionWalk(source, byte_range):
            rows = pyarrow.compute.cumulative_sum(batch["rows"])
            sizes = pyarrow.compute.subtract(batch["end_offset"], batch["offset"])
            sizes = pyarrow.compute.cumulative_sum(sizes)
            within = pyarrow.compute.and_(
                pyarrow.compute.less_equal(rows, rows_left), pyarrow.compute.less_equal(sizes, bytes_left)
            )
            # The sums of rows and bytes only increase, so the transactions within the limits come first.
            fit = within.true_count
            if fit < batch.num_rows:
                if fit == 0 and walked_to == start:
                    fit = 1
                return _end_of(byte_range.epoch, batch, fit - 1) if fit else walked_to
            walked_to = _end_of(byte_range.epoch, batch, fit - 1)
            rows_left -= rows[-1].as_py()
            bytes_left -= sizes[-1].as_py()
    return end


def _after_bytes(
    extents: list[Extent], start: Position, end: Position, bytes_max: int
) -> tuple[Extent, Position]:
    """Return the position `bytes_max` log bytes after `start`, at most `end`, and the file that contains
    it."""
    bytes_left = bytes_max
    for extent in extents:
        first = start.offset if extent.holds(start) else extent.start
        last = end.offset if extent.holds(end) else extent.end
        if bytes_left < last - first:
            return extent, Position(extent.epoch, extent.file, first + bytes_left)
        bytes_left -= last - first
    return extents[-1], end


def _last_end_before(source: Source, extent: Extent, start: Position, target: Position) -> Position | None:
    """Return the last transaction end after `start` and up to `target`, None if there is none."""
    first = start.offset if extent.holds(start) else extent.start
    byte_range = ByteRange(target.epoch, target.file, first, target.offset, aligned=True)
    last_end = _last_end_in(source, byte_range, target.offset, target.offset)
    if last_end is None and place_of(start) < place_of(extent.first):
        return extent.first
    return last_end


def _last_end_in(source: Source, byte_range: ByteRange, tail: int, end_max: int) -> Position | None:
    """Return where the last transaction that starts in an aligned range ends. Only ends up to `end_max`
    count.

    Reads windows that end at `tail` and grow until a window contains the end of a transaction or reaches the
    range's start.
    """
    window = RANGE_BYTES_MIN
    while True:
        first = max(byte_range.start, tail - window)
        aligned = first == byte_range.start
        last_end = None
        for batch in TransactionWalk(
            source, ByteRange(byte_range.epoch, byte_range.file, first, byte_range.stop, aligned)
        ):
            ends = batch.filter(pyarrow.compute.less_equal(batch["end_offset"], end_max))
            if ends.num_rows:
                last_end = _end_of(byte_range.epoch, ends, ends.num_rows - 1)
        if last_end is not None or aligned:
            return last_end
        window *= _WINDOW_GROWTH


def _end_of(epoch: int, batch: pyarrow.RecordBatch, row: int) -> Position:
    return Position(epoch, batch["file"][row].as_py(), batch["end_offset"][row].as_py())
