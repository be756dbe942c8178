# SPDX-License-Identifier: Apache-2.0
"""Finding the events of an XA transaction that was prepared before the range in which it commits.

The search goes from the commit back, file by file. Each file is read forward once, without decoding a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock._native import Decoder
from penstock.errors import PositionInvalid, PositionPurged, SequenceGap
from penstock.limits import PREPARED_SEARCH_BYTES_MAX
from penstock.model import Position
from penstock.source.decoding import RangeDecoding
from penstock.source.source import ByteRange, Extent, Source, place_of


@dataclass
class _Passed:
    """What was passed of a file: up to which offset, and a decoder that knows what is prepared there."""

    upto: int
    decoder: Decoder


class PreparedSearch:
    """Looks for prepared XA transactions in a source's files, and remembers what it has passed."""

    def __init__(
        self, source: Source, noted: Callable[[str, Position], ByteRange | None] | None = None
    ) -> None:
        """`noted` answers for what was prepared before the files that are searched."""
        self._source = source
        self._noted = noted
        self._passed: dict[tuple[int, str], _Passed] = {}

    def find(self, xid: str, before: Position) -> ByteRange | None:
        """Return where the transaction of this id was prepared last before a position.

        None where neither a file within PREPARED_SEARCH_BYTES_MAX of log nor `noted` has it, and where what
        was prepared last under this id has ended before the position.
        """
        bytes_left = PREPARED_SEARCH_BYTES_MAX
        files = self._files(before)
        self._forget_purged(files)
        for extent in reversed(files):
            upto = before.offset if extent.holds(before) else None
            passed = self._pass(extent, upto)
            place = passed.prepared_place(xid)
            if place is not None:
                file, start, end = place
                return ByteRange(extent.epoch, file, start, end, aligned=True)
            if passed.has_outcome(xid):
                # What is prepared in earlier files has ended here; what is looked for is not in the log.
                return None
            bytes_left -= (upto or extent.bytes) - extent.start
            if bytes_left <= 0:
                break
        return None if self._noted is None else self._noted(xid, before)

    def _files(self, before: Position) -> list[Extent]:
        """Return the files up to a position; where some are missing before its file, that file alone."""
        try:
            return self._source.extents(None, before)
        except (SequenceGap, PositionPurged, PositionInvalid):
            return [one for one in self._source.extents(before, before) if one.holds(before)]

    def _forget_purged(self, files: Sequence[Extent]) -> None:
        """Drop what was passed of files before the first there is."""
        for epoch, file in [*self._passed] if files else []:
            if place_of(Position(epoch, file, files[0].start)) < place_of(files[0].position):
                del self._passed[epoch, file]

    def _pass(self, extent: Extent, upto: int | None) -> Decoder:
        """Pass over a file's transactions, on from the last time; `upto` None means all of it."""
        key = extent.epoch, extent.file
        # After an error the file is passed again from its start: the decoder has moved on by then.
        passed = self._passed.pop(key, None)
        if passed is not None and upto is not None and passed.upto > upto:
            # A transaction that was prepared later may have the same id.
            passed = None
        start = extent.start if passed is None else passed.upto
        stop = extent.bytes if upto is None and extent.splittable else upto
        if passed is not None and stop is not None and start >= stop:
            self._passed[key] = passed
            return passed.decoder
        byte_range = ByteRange(extent.epoch, extent.file, start, stop, aligned=True)
        decoding = RangeDecoding(
            self._source, byte_range, passing=True, statements=False, verify_checksum=False
        )
        if passed is not None:
            decoding.decoder.adopt_prepared(passed.decoder)
        for state in decoding.states(drop_open=True):
            assert state == "batch", "transactions that are passed over ask for nothing"
            decoding.take_batch()
        decoder = decoding.decoder
        file, offset = decoder.position
        self._passed[key] = _Passed(offset if file == extent.file else extent.bytes, decoder)
        return decoder
