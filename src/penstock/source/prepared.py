# SPDX-License-Identifier: Apache-2.0
"""Find the events of an XA transaction that was prepared before the range in which it commits.

The search goes back from the commit, one file after another. Within a file it reads forward, once, without
decoding rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock._native import Decoder
from penstock.errors import PositionInvalid, PositionPurged, SequenceGap
from penstock.limits import PREPARED_SEARCH_BYTES_MAX
from penstock.logstore.extent import Extent
from penstock.model import Position
from penstock.source.decoding import RangeDecoding
from penstock.source.source import ByteRange, Source, place_of


@dataclass
class _SearchedPart:
    """The part of a file that was searched: its end, and a decoder that knows the prepared transactions
    there."""

    upto: int
    decoder: Decoder


class PreparedSearch:
    """Searches a source's files for prepared XA transactions, and caches which parts it has searched."""

    def __init__(
        self, source: Source, noted: Callable[[str, Position], ByteRange | None] | None = None
    ) -> None:
        """`noted` looks up transactions that were prepared before the searched files."""
        self._source = source
        self._noted = noted
        self._searched: dict[tuple[int, str], _SearchedPart] = {}

    def find(self, xid: str, before: Position) -> ByteRange | None:
        """Return the range where the transaction with this id was last prepared before a position.

        The last PREPARED_SEARCH_BYTES_MAX of log before the position are searched, and then `noted`. Returns
        None if neither has the transaction, or if the last transaction with this id has already been
        committed or rolled back.
        """
        bytes_left = PREPARED_SEARCH_BYTES_MAX
        files = self._files(before)
        self._forget_purged(files)
        for extent in reversed(files):
            upto = before.offset if extent.holds(before) else None
            decoder = self._search_file(extent, upto)
            location = decoder.prepared_place(xid)
            if location is not None:
                file, start, end = location
                return ByteRange(extent.epoch, file, start, end, aligned=True)
            if decoder.has_outcome(xid):
                # Any transaction that was prepared under this id in an earlier file has ended by now, so the
                # log does not have the requested transaction.
                return None
            bytes_left -= (upto or extent.end) - extent.start
            if bytes_left <= 0:
                break
        return None if self._noted is None else self._noted(xid, before)

    def _files(self, before: Position) -> list[Extent]:
        """Return the files up to a position. If files before the position are missing, return only the file
        that contains the position.
        """
        try:
            return self._source.extents(None, before)
        except (SequenceGap, PositionPurged, PositionInvalid):
            return [extent for extent in self._source.extents(before, before) if extent.holds(before)]

    def _forget_purged(self, files: Sequence[Extent]) -> None:
        """Drop cached parts of files before the first available file."""
        for epoch, file in [*self._searched] if files else []:
            if place_of(Position(epoch, file, files[0].start)) < place_of(files[0].first):
                del self._searched[epoch, file]

    def _search_file(self, extent: Extent, upto: int | None) -> Decoder:
        """Search a file's transactions, continuing after the cached part; `upto` None means the whole
        file."""
        key = extent.epoch, extent.file
        # Cache the part again only after a successful search: after an error, the decoder has already
        # advanced.
        searched = self._searched.pop(key, None)
        if searched is not None and upto is not None and searched.upto > upto:
            # The cached part goes beyond `upto`. A transaction that was prepared after `upto` may have the
            # same id.
            searched = None
        start = extent.start if searched is None else searched.upto
        stop = extent.end if upto is None and extent.splittable else upto
        if searched is not None and stop is not None and start >= stop:
            self._searched[key] = searched
            return searched.decoder
        byte_range = ByteRange(extent.epoch, extent.file, start, stop, aligned=True)
        decoding = RangeDecoding(
            self._source, byte_range, passing=True, statements=False, verify_checksum=False
        )
        if searched is not None:
            decoding.decoder.adopt_prepared(searched.decoder)
        for state in decoding.states(drop_open=True):
            assert state == "batch", "transactions that are passed over ask for nothing"
            decoding.take_batch()
        decoder = decoding.decoder
        file, offset = decoder.position
        self._searched[key] = _SearchedPart(offset if file == extent.file else extent.end, decoder)
        return decoder
