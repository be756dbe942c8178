# SPDX-License-Identifier: Apache-2.0
"""Decodes one byte range. Accepts buffers cut anywhere, and yields the decoder's requests and its batches.

Only events that are split across buffers are copied.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock._native import Decoder, GtidSet
from penstock.errors import PenstockError, PreparedMissing, ServerBusy
from penstock.gtid_sets import is_mariadb
from penstock.model import Position
from penstock.source.source import FIRST_EVENT_OFFSET, ByteRange, Source, file_number

# An event's length is in the four header bytes before this offset.
_LENGTH_END = 13
# If an event is longer than its header says, this many bytes are added at a time.
_BYTES_MORE = 64 * 1024
# The longest time that a commit's sync may take, and the pause between retries.
_SYNC_SECONDS_MAX = 60.0
_SYNC_PAUSE_SECONDS = 0.02


class RangeDecoding:
    """Decodes a range of a source, and continues after lost connections.

    `states` yields the requests of `decoder` that the caller must handle: it answers table requests and
    statements, and collects batches with `take_batch`. After a lost connection, a new decoder takes over and
    drops the changes that were already returned, so callers must not keep a reference to `decoder`.
    """

    def __init__(self, source: Source, byte_range: ByteRange, **options: Any) -> None:
        self.byte_range = byte_range
        self._source = source
        self._opened = byte_range if byte_range.aligned else source.align(byte_range)
        self._options = options | {"gtid_repeated": byte_range.gtid_after or None}
        self._partial_event = bytearray()
        self._pending_batches: deque[Any] = deque()
        self._passed = GtidSet.parse(self._gtids_before())
        self._joint = source.joint(byte_range)
        self.decoder = self._make_decoder(self._opened.position, self._opened.aligned)

    def _gtids_before(self) -> str:
        """Return the GTIDs before the range, if a filter of the range needs them; else "".

        A MariaDB GTID position covers all transactions that precede it in the log, so the filter must know
        what precedes the range. If the range begins at the start of its file, the decoder reads these GTIDs
        from the GTID list in the file instead.
        """
        filters = (self._options.get("gtid_after"), self._options.get("gtid_until"))
        if not any(is_mariadb(gtid_set or "") for gtid_set in filters):
            return ""
        before = GtidSet.parse(self.byte_range.gtid_before)
        if self._opened.start > FIRST_EVENT_OFFSET:
            before = before.union(GtidSet.parse(self._source.gtid_set(self._opened.position)))
        return str(before)

    def states(self, *, drop_open: bool = False) -> Iterator[str]:
        """Yield "batch", "table" and "statement" as they become due, until the range is decoded.

        With `drop_open`, an unfinished transaction at the end of the bytes is dropped; otherwise it raises
        FileTruncated. An error, including one from the source, is raised only after all whole transactions
        before it have been decoded.
        """
        byte_range, deadline = self._opened, None
        while True:
            yield from self._states_of(byte_range)
            # A server's log has delivered the requested bytes only once its last event is decoded completely.
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
        """Decode the source's bytes of a range; yields like `states`."""
        buffers = iter(self._source.open(byte_range, self._resume))
        while True:
            try:
                buffer = next(buffers, None)
            except PenstockError:
                # Yield the transactions that were complete before the error.
                yield from self._kept_states()
                if self.decoder.state == "prepared":
                    self.decoder.abandon()
                yield from self._finished(drop_open=True)
                raise
            yield from self._kept_states()
            if buffer is None:
                return
            yield from self.feed(memoryview(buffer))
            if self.decoder.state == "done" or self._ends_at_stop():
                return

    def _finished(self, drop_open: bool) -> Iterator[str]:
        """End the input; yields the remaining whole transactions like `states`."""
        while True:
            self.decoder.finish(len(self._partial_event), drop_open=drop_open)
            if self.decoder.state == "done":
                return
            # The decoder may still request table definitions for a payload at the end of the bytes.
            yield from self._due()
            # `finish` looks at every table, so call it again only after its batches were taken.
            while self.decoder.state == "batch":
                yield "batch"

    def rest_of_payload(self) -> Iterator[str]:
        """Decode the rest of the last event, if it is a transaction payload or commits an XA transaction.

        Yields like `states`.
        """
        while self.decoder.state != "done":
            self.decoder.feed(b"")
            if self.decoder.state == "input":
                return
            yield from self._due()

    def bytes_to_event_end(self, rest: memoryview) -> int:
        """Return how many of the next bytes complete the current event, or reveal its length."""
        event_start = self._partial_event or rest[:_LENGTH_END]
        if len(event_start) < _LENGTH_END:
            return _LENGTH_END - len(self._partial_event)
        length = int.from_bytes(event_start[_LENGTH_END - 4 : _LENGTH_END], "little")
        # Complete events are left to the decoder, which also rejects lengths shorter than a header.
        return max(length - len(self._partial_event), _LENGTH_END)

    @property
    def at_event_end(self) -> bool:
        """Whether the input so far ends at the end of an event."""
        return not self._partial_event

    def take_batch(self) -> Any:
        """Return the batch that is due."""
        return self._pending_batches.popleft() if self._pending_batches else self.decoder.take_batch()

    @property
    def gtid_set(self) -> str:
        """The GTIDs seen so far: those listed in the file's header, and those of the transactions."""
        seen = self.decoder.gtid_set
        return str(self._passed.union(GtidSet.parse(seen))) if self._passed else seen

    def _ends_early(self) -> bool:
        """Return whether the server sent less than the range, although its log contains the whole range.

        When a server reports the end of its log, it includes transactions that it will send only after
        syncing them to disk.
        """
        stop = self.byte_range.stop
        if stop is None or not self._source.live or self._is_past_stop():
            return False
        head = self._source.head()
        return (file_number(head.file), head.offset) >= (file_number(self.byte_range.file), stop)

    def _wait_for_sync(self, deadline: float | None) -> float:
        """Wait briefly for bytes that the server has yet to send; return the deadline. Raises ServerBusy."""
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
        """Return whether the whole range was read, so that a partial event after it can be ignored."""
        stop, decoder = self.byte_range.stop, self.decoder
        return stop is not None and decoder.next_offset >= stop and decoder.open_transaction() is None

    def _ends_at_stop(self) -> bool:
        """Return whether the input and the last transaction of the range both end at the range's stop.

        If so, the next event need not be fetched, because it would only show that another range begins there.
        """
        stop = self.byte_range.stop
        if self._source.live or self.decoder.next_offset != stop or self._joint not in (None, stop):
            return False
        return self.at_event_end and self.decoder.state == "input" and self._is_past_stop()

    def _kept_states(self) -> Iterator[str]:
        while self._pending_batches:
            yield "batch"

    def feed(self, rest: memoryview) -> Iterator[str]:
        """Decode one buffer and keep a partial event at its end; yields like `states`."""
        while rest and self.decoder.state != "done":
            if not self._partial_event:
                rest = rest[self.decoder.feed(rest) :]
                if self.decoder.state == "input":
                    self._partial_event += rest
                    return
                yield from self._due()
                continue
            more = _bytes_missing(self._partial_event)
            self._partial_event += rest[:more]
            rest = rest[more:]
            while self._partial_event:
                del self._partial_event[: self.decoder.feed(self._partial_event)]
                if self.decoder.state in ("input", "done"):
                    break
                yield from self._due()

    def _due(self) -> Iterator[str]:
        """Yield the decoder's state. Reads a prepared transaction that the decoder needs."""
        if self.decoder.state == "prepared":
            yield from self._read_prepared()
        elif self.decoder.state != "done":
            yield self.decoder.state

    def _read_prepared(self) -> Iterator[str]:
        """Decode the prepared transaction that commits now.

        Raises PreparedMissing once the whole transactions have been yielded.
        """
        decoder = self.decoder
        request = decoder.prepared_request()
        assert request is not None, "the state says that there is one"
        xid, (file, offset), location = request
        commit = Position(self.byte_range.epoch, file, offset)
        partial_event = bytearray()

        def begin() -> Position:
            partial_event.clear()
            head = None if self._source.live else self._source.head_bytes(prepared.file, prepared.epoch)
            assert prepared.stop is not None, "a transaction has an end"
            decoder.answer_prepared(prepared.file, prepared.start, prepared.stop, head)
            return prepared.position

        try:
            prepared = self._prepared_range(xid, commit, location)
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
            yield from self._feed_prepared(memoryview(buffer), partial_event)

    def _feed_prepared(self, rest: memoryview, partial_event: bytearray) -> Iterator[str]:
        """Decode one buffer of a prepared transaction and keep a partial event at its end."""
        decoder = self.decoder
        while decoder.reads_prepared:
            if partial_event:
                del partial_event[: decoder.feed_prepared(partial_event)]
            else:
                rest = rest[decoder.feed_prepared(rest) :]
            if not decoder.reads_prepared:
                return
            if decoder.state != "prepared":
                yield decoder.state
                continue
            if not rest:
                return
            more = _bytes_missing(partial_event) if partial_event else len(rest)
            partial_event += rest[:more]
            rest = rest[more:]

    def _abandon(self) -> Iterator[str]:
        """Drop the open transaction; yields the remaining whole transactions like `states`."""
        self.decoder.abandon()
        while self.decoder.state == "batch":
            yield "batch"

    def _prepared_range(self, xid: str, commit: Position, location: tuple[str, int, int] | None) -> ByteRange:
        """Return the range of a prepared transaction. Raises PreparedMissing."""
        if location is not None:
            return ByteRange(commit.epoch, *location, aligned=True)
        prepared = self._source.find_prepared(xid, commit)
        if prepared is None:
            raise self._missing(xid, commit)
        return prepared

    def _missing(self, xid: str, commit: Position) -> PreparedMissing:
        return PreparedMissing(
            f"the XA transaction {xid} is committed here, and its rows, which were logged when it was"
            f" prepared, are not in what can be read of {self._source.instance}",
            position=str(commit),
            hint="Start at or before its XA PREPARE; or read the tables again and start after this commit",
        )

    def _resume(self) -> Position:
        """Prepare for bytes that resume after a lost connection; return the position to resume from."""
        before = self.decoder
        self._partial_event.clear()
        handed_out, aligned = before.handed_out(), before.aligned
        before.abandon()
        while before.state == "batch":
            self._pending_batches.append(before.take_batch())
        self._passed = self._passed.union(GtidSet.parse(before.gtid_set))
        file, offset = before.position
        position = Position(self.byte_range.epoch, file, offset)
        if (executed := self._options.get("executed")) is not None:
            gtid_sets = [gtid_set for gtid_set in (executed, before.gtid_set) if gtid_set]
            self._options["executed"] = ",".join(gtid_sets)
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
            gtid_before=str(self._passed),
            resume_rows=resume_rows,
            resume_start=resume_start,
            **self._options,
        )


def _bytes_missing(partial_event: bytearray) -> int:
    """Return how many bytes to add to a partial event before offering it to the decoder again."""
    if len(partial_event) < _LENGTH_END:
        return _LENGTH_END - len(partial_event)
    length = int.from_bytes(partial_event[_LENGTH_END - 4 : _LENGTH_END], "little")
    return length - len(partial_event) if length > len(partial_event) else _BYTES_MORE
