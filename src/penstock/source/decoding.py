# SPDX-License-Identifier: Apache-2.0
"""One decoder over one byte range: buffers of any cut in, what the decoder asks and offers out.

Only an event that a cut divides is copied; everything else is decoded where it lies.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock._native import Decoder, GtidSet
from penstock.errors import PenstockError, PreparedMissing, ServerBusy
from penstock.model import Position
from penstock.source.source import ByteRange, Source, file_number

# The length of an event is the four bytes before this offset of its header.
_LENGTH_END = 13
# What is added at a time where the length of an event cannot be told from its header.
_BYTES_MORE = 64 * 1024
# The longest that the sync of a commit may take, and the pause before the log is asked for again.
_SYNC_SECONDS_MAX = 60.0
_SYNC_PAUSE_SECONDS = 0.02


class RangeDecoding:
    """A range of a source on its way through a decoder, across lost connections.

    `states` says what is due; the caller asks `decoder` for the table request or statement, and takes
    batches with `take_batch`. After a lost connection there is a new decoder, which drops the changes that
    were handed out before; so `decoder` is never kept by the caller.
    """

    def __init__(self, source: Source, byte_range: ByteRange, **options: Any) -> None:
        self.byte_range = byte_range
        self._source = source
        if byte_range.gtid_after:
            known = [one for one in (options.get("gtid_after"), byte_range.gtid_after) if one]
            options["gtid_after"] = ",".join(known)
        self._options = options
        self._carried = bytearray()
        self._kept: deque[Any] = deque()
        self._passed = GtidSet()
        self._opened = byte_range if byte_range.aligned else source.align(byte_range)
        self._joint = source.joint(byte_range)
        self.decoder = self._make_decoder(self._opened.position, self._opened.aligned)

    def states(self, *, drop_open: bool = False) -> Iterator[str]:
        """Yield "batch", "table" and "statement" as they come, until the range is decoded.

        With `drop_open` a transaction that is not whole where the bytes end is left out; without, it raises
        FileTruncated. Every error, the source's own ones too, comes after every whole transaction before it.
        """
        byte_range, deadline = self._opened, None
        while True:
            yield from self._states_of(byte_range)
            # Of a server's log as much came as was asked for only once the last event has no more to give.
            yield from self.rest_of_payload()
            if self.decoder.state == "done":
                return
            if not self._ends_early():
                break
            deadline = self._wait_for_sync(deadline)
            position = self._resume()
            byte_range = replace(byte_range, file=position.file, start=position.offset)
        yield from self._finished(drop_open or self._is_past_stop())

    def _states_of(self, byte_range: ByteRange) -> Iterator[str]:
        """Decode what the source gives of a range; yield as `states` does."""
        buffers = iter(self._source.open(byte_range, self._resume))
        while True:
            try:
                buffer = next(buffers, None)
            except PenstockError:
                # What was whole before the error comes before it.
                yield from self._kept_states()
                if self.decoder.state == "prepared":
                    self.decoder.abandon()
                yield from self._finished(drop_open=True)
                raise
            yield from self._kept_states()
            if buffer is None:
                return
            yield from self.feed(memoryview(buffer))
            if self.decoder.state == "done":
                return

    def _finished(self, drop_open: bool) -> Iterator[str]:
        """End the input; yield as `states` does what whole transactions have left."""
        while True:
            self.decoder.finish(len(self._carried), drop_open=drop_open)
            if self.decoder.state == "done":
                return
            # A payload that ended the bytes may still hold tables to ask about.
            yield from self._due()

    def rest_of_payload(self) -> Iterator[str]:
        """Decode what the last event holds, where it is a payload of several, or commits an XA transaction.

        Yields as `states` does.
        """
        while self.decoder.state != "done":
            self.decoder.feed(b"")
            if self.decoder.state == "input":
                return
            yield from self._due()

    def bytes_to_event_end(self, rest: memoryview) -> int:
        """Return how much of what comes next ends the event it begins with, or makes its length known."""
        part = self._carried or rest[:_LENGTH_END]
        if len(part) < _LENGTH_END:
            return _LENGTH_END - len(self._carried)
        length = int.from_bytes(part[_LENGTH_END - 4 : _LENGTH_END], "little")
        # What lacks nothing waits for the decoder; a length under a header's is the decoder's to refuse.
        return max(length - len(self._carried), _LENGTH_END)

    @property
    def at_event_end(self) -> bool:
        """Whether no part of an event waits for the rest of it."""
        return not self._carried

    def take_batch(self) -> Any:
        """Return the batch that is due."""
        return self._kept.popleft() if self._kept else self.decoder.take_batch()

    @property
    def gtid_set(self) -> str:
        """The GTIDs seen so far: what the file lists as before it, and those of the transactions."""
        return str(self._passed.union(GtidSet.parse(self.decoder.gtid_set)))

    def _ends_early(self) -> bool:
        """Tell whether a server has sent less than all of the range, though its log has all of it.

        A server counts a transaction into the end of its log before the sync, and sends it only after that.
        """
        stop = self.byte_range.stop
        if stop is None or not self._source.live or self._is_past_stop():
            return False
        head = self._source.head()
        return (file_number(head.file), head.offset) >= (file_number(self.byte_range.file), stop)

    def _wait_for_sync(self, deadline: float | None) -> float:
        """Wait a moment for what the server has yet to send; return the deadline. Raises ServerBusy."""
        clock = time.monotonic()
        if deadline is not None and clock > deadline:
            raise ServerBusy(
                f"{self._source.instance} sends its log up to {self.decoder.next_offset} only, while its end"
                f" lies behind {self.byte_range.stop}",
                position=str(self.byte_range.position),
                hint="SHOW PROCESSLIST tells whether a commit waits for the disk",
            )
        time.sleep(_SYNC_PAUSE_SECONDS)
        return clock + _SYNC_SECONDS_MAX if deadline is None else deadline

    def _is_past_stop(self) -> bool:
        """Tell whether all of the range was read, so that the part of an event behind it is nobody's here."""
        stop, decoder = self.byte_range.stop, self.decoder
        return stop is not None and decoder.next_offset >= stop and decoder.open_transaction() is None

    def _kept_states(self) -> Iterator[str]:
        while self._kept:
            yield "batch"

    def feed(self, rest: memoryview) -> Iterator[str]:
        """Decode one buffer, and keep the part of an event it may end with; yields as `states` does."""
        while rest and self.decoder.state != "done":
            if not self._carried:
                rest = rest[self.decoder.feed(rest) :]
                if self.decoder.state == "input":
                    self._carried += rest
                    return
                yield from self._due()
                continue
            more = _bytes_missing(self._carried)
            self._carried += rest[:more]
            rest = rest[more:]
            while self._carried:
                del self._carried[: self.decoder.feed(self._carried)]
                if self.decoder.state in ("input", "done"):
                    break
                yield from self._due()

    def _due(self) -> Iterator[str]:
        """Yield what the decoder waits for; a prepared transaction that it waits for is read here."""
        if self.decoder.state == "prepared":
            yield from self._read_prepared()
        elif self.decoder.state != "done":
            yield self.decoder.state

    def _read_prepared(self) -> Iterator[str]:
        """Decode the prepared transaction that commits now; raises PreparedMissing after what is whole."""
        decoder = self.decoder
        request = decoder.prepared_request()
        assert request is not None, "the state says that there is one"
        xid, (file, offset), place = request
        commit = Position(self.byte_range.epoch, file, offset)
        carried = bytearray()

        def begin() -> Position:
            carried.clear()
            head = None if self._source.live else self._source.head_bytes(prepared.file, prepared.epoch)
            assert prepared.stop is not None, "a transaction has an end"
            decoder.answer_prepared(prepared.file, prepared.start, prepared.stop, head)
            return prepared.position

        try:
            prepared = self._prepared_range(xid, commit, place)
            begin()
            buffers = iter(self._source.open(prepared, begin))
        except PenstockError:
            yield from self._abandon()
            raise
        while decoder.reads_prepared:
            try:
                buffer = next(buffers, None)
                if buffer is None:
                    raise self._missing(xid, commit)
            except PenstockError:
                yield from self._abandon()
                raise
            yield from self._feed_prepared(memoryview(buffer), carried)

    def _feed_prepared(self, rest: memoryview, carried: bytearray) -> Iterator[str]:
        """Decode one buffer of a prepared transaction, and keep the part of an event it may end with."""
        decoder = self.decoder
        while decoder.reads_prepared:
            if carried:
                del carried[: decoder.feed_prepared(carried)]
            else:
                rest = rest[decoder.feed_prepared(rest) :]
            if not decoder.reads_prepared:
                return
            if decoder.state != "prepared":
                yield decoder.state
                continue
            if not rest:
                return
            more = _bytes_missing(carried) if carried else len(rest)
            carried += rest[:more]
            rest = rest[more:]

    def _abandon(self) -> Iterator[str]:
        """Give the open transaction up; yield as `states` does what whole transactions have left."""
        self.decoder.abandon()
        while self.decoder.state == "batch":
            yield "batch"

    def _prepared_range(self, xid: str, commit: Position, place: tuple[str, int, int] | None) -> ByteRange:
        """Return where a prepared transaction lies. Raises PreparedMissing."""
        if place is not None:
            return ByteRange(commit.epoch, *place, aligned=True)
        found = self._source.find_prepared(xid, commit)
        if found is None:
            raise self._missing(xid, commit)
        return found

    def _missing(self, xid: str, commit: Position) -> PreparedMissing:
        return PreparedMissing(
            f"the XA transaction {xid} is committed here, and its rows, which were logged when it was"
            f" prepared, are not in what can be read of {self._source.instance}",
            position=str(commit),
            hint="Start at or before its XA PREPARE; or read the tables again and start behind this commit",
        )

    def _resume(self) -> Position:
        """Make ready for bytes that begin again after a lost connection; return where they are to begin."""
        before = self.decoder
        self._carried.clear()
        handed_out, aligned = before.handed_out(), before.aligned
        before.abandon()
        while before.state == "batch":
            self._kept.append(before.take_batch())
        self._passed = self._passed.union(GtidSet.parse(before.gtid_set))
        file, offset = before.position
        position = Position(self.byte_range.epoch, file, offset)
        if (executed := self._options.get("executed")) is not None:
            known = [one for one in (executed, before.gtid_set) if one]
            self._options["executed"] = ",".join(known)
        self.decoder = self._make_decoder(position, aligned, *handed_out)
        self.decoder.adopt_prepared(before)
        return position

    def _make_decoder(
        self,
        position: Position,
        aligned: bool,
        resume_rows: int = 0,
        resume_start: tuple[int, int] | None = None,
    ) -> Decoder:
        stop, live = self.byte_range.stop, self._source.live
        number, first = file_number(position.file), file_number(self.byte_range.file)
        return Decoder(
            instance=self._source.instance,
            epoch=position.epoch,
            file=position.file,
            file_number=number,
            offset=position.offset,
            head=None if live else self._source.head_bytes(position.file, position.epoch),
            aligned=aligned,
            live=live,
            start=max((number, position.offset), (first, self.byte_range.start)),
            stop=(first + 1, 0) if stop is None else (first, stop),
            joint=self._joint,
            resume_rows=resume_rows,
            resume_start=resume_start,
            **self._options,
        )


def _bytes_missing(part: bytearray) -> int:
    """Return how much must be added to a part of an event before it is worth offering again."""
    if len(part) < _LENGTH_END:
        return _LENGTH_END - len(part)
    length = int.from_bytes(part[_LENGTH_END - 4 : _LENGTH_END], "little")
    return length - len(part) if length > len(part) else _BYTES_MORE
