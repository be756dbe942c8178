# SPDX-License-Identifier: Apache-2.0
"""The receive loop, which moves every byte of a live server from the socket into the log.

Bytes are received in large pieces. The kernel determines the block boundaries, and the bytes are appended to
the log unchanged. Python does the same small amount of work for a piece of four megabytes as for one of a
hundred bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Protocol

from penstock._native import BlockCutter, CutCounts
from penstock.capture.status import Rate
from penstock.errors import ConnectionLost, LeaseLost, LogFull, PenstockError, SourceMissing, StreamError
from penstock.fingerprint import file_fingerprint
from penstock.gtid_sets import LoggedSet
from penstock.limits import MIB, READ_BYTES
from penstock.logstore.disk import Buffer
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position, StatementSession
from penstock.mysql.refusal import refusal_of
from penstock.mysql.replica import ReplicaStream
from penstock.telemetry.counters import Counter, Histogram
from penstock.telemetry.definitions import LAG_BOUNDS, SECONDS_BOUNDS

# While the log is full, check for space at this interval.
_HOLD_SECONDS = 0.1
# While the log is not full, check for space at this interval. A write that fails for lack of space is also
# retried.
_ROOM_SECONDS = 0.1
# Every append to the log has a fixed cost. While a server sends at this rate, wait for more bytes before
# appending, until about so many have arrived. The bytes of a slower server are appended immediately.
_FAST_BYTES_PER_SECOND_MIN = 32 * MIB
_GATHER_BYTES = 2 * MIB
_GATHER_SECONDS_MAX = 0.002
# A read of at least this size means that the server sends faster than the bytes are received. The kernel then
# receives without the interpreter, until a chunk is full or no more bytes are waiting.
_DRAIN_BYTES_MIN = MIB // 16
# A read of at most this size that took everything means that the server sends single transactions.
_SLOW_BYTES_MAX = 4096
# A rate is measured over at least this time, so that no single commit looks like a fast server.
_RATE_SECONDS_MIN = 0.00025


class Schemas(Protocol):
    """Table definitions that are updated by the statements in a log."""

    def apply(self, text: str, database: str, position: Position, session: StatementSession) -> bool:
        """Apply a statement; `position` is the end of its event. Return whether it changed a table
        definition.
        """

    def received(self, position: Position) -> None:
        """Record the position up to which the log has been received and its statements applied."""

    def close(self) -> None:
        """Close open files and threads."""


@dataclass
class Progress:
    """The progress of receiving. Only the receiving thread writes it; any thread may read it.

    `heard_at` is the time of the server's last packet, in seconds since 1970. `caught_up` is true if
    everything sent up to that packet has been stored.
    """

    heard_at: float | None = None
    caught_up: bool = False
    gtid_set: str = ""
    time_us: int = 0
    bytes: int = 0
    counts: CutCounts = field(default_factory=CutCounts)

    def __post_init__(self) -> None:
        self.bytes_rate, self.transactions_rate, self.changes_rate = Rate(), Rate(), Rate()
        self.statements = Counter("applied", "ignored", "failed")
        self.event_lags = Histogram(LAG_BOUNDS)
        self.acknowledgements = Histogram(SECONDS_BOUNDS)


class Receiver:
    """Moves the bytes of one dump into a log until it is stopped or something fails.

    Bytes are flushed once `chunk_bytes` are buffered, or as soon as no more bytes are waiting. For a fast
    server, it waits up to two milliseconds for more bytes. `hold` is called with the reason while the log is
    full, and with None when receiving resumes. `arrived` is called after bytes were appended to the log.
    `begin_epoch` is called once, before the first bytes are appended. Nothing is appended while
    `pause_reason` returns a reason or raises.
    """

    def __init__(
        self,
        log: Log,
        progress: Progress,
        stopping: Event,
        *,
        epoch: int,
        server_id: int,
        flavor: str,
        chunk_bytes: int,
        schemas: Schemas | None,
        hold: Callable[[str | None], None],
        arrived: Callable[[], None],
        begin_epoch: Callable[[], None] | None = None,
        pause_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._log = log
        self._pause_reason = pause_reason
        self._progress = progress
        self._stopping = stopping
        self._epoch = epoch
        self._server_id = server_id
        self._flavor = flavor
        self._chunk_bytes = chunk_bytes
        self._schemas = schemas
        self._report_hold = hold
        self._is_held = False
        self._has_room_until = 0.0
        self._arrived = arrived
        self._begin_epoch = begin_epoch
        # Starts the source file in the log. It is called as soon as the file's epoch has begun.
        self._begin_file: Callable[[], None] | None = None
        self._counted = (0, 0)
        # Statements in bytes that have not been stored yet. `schemas` has not applied these statements.
        self._unapplied: list[tuple[str, str, Position, StatementSession]] = []
        # Whether bytes have been appended since readers were last notified.
        self._has_unannounced = False

    def receive(self, stream: ReplicaStream, cutter: BlockCutter) -> None:
        """Receive until `stopping`. Raises an error if the server, the decoder or the log fails.

        Complete events received before a lost connection or before unreadable bytes are stored, because the
        server may not be able to send them again. Bytes whose statements could not be applied are not stored.
        """
        try:
            self._receive(stream, cutter)
        except (ConnectionLost, StreamError):
            if not self._unapplied:
                self._append(cutter)
            raise
        finally:
            self._notify_readers()
        self._append(cutter)
        self._notify_readers()

    def feed(self, events: Buffer, cutter: BlockCutter) -> int:
        """Store the complete events at the start of a buffer and return their size in bytes.

        The events were generated here or come from another log. Raises an error if the log cannot be written.
        """
        self._wait_for_room()
        consumed = self._cut(cutter, memoryview(events), cutter.feed)
        self._append(cutter)
        self._notify_readers()
        return consumed

    def resume_file(self, cutter: BlockCutter) -> None:
        """Begin or continue a file with the events that `feed` will store."""
        self._begin(cutter)

    def _receive(self, stream: ReplicaStream, cutter: BlockCutter) -> None:
        buffer = memoryview(bytearray(min(READ_BYTES, self._chunk_bytes)))
        filled, waited, began = 0, 0.0, time.monotonic()
        while not self._stopping.is_set():
            self._wait_for_room()
            if filled == len(buffer):
                # The packet is longer than the buffer. A packet has at most 16 MiB, which limits the growth.
                buffer = memoryview(bytearray(buffer) + bytes(len(buffer)))
            received = stream.receive_into(buffer[filled:])
            self._progress.heard_at = time.time()
            filled = self._consume(cutter, buffer, filled + received)
            room = self._chunk_bytes - cutter.gathered
            if received >= _DRAIN_BYTES_MIN and room > 0 and stream.can_drain:
                packets = stream.drain(cutter, buffer[:filled], room)
                if len(packets) > len(buffer):
                    buffer = memoryview(bytearray(len(packets)))
                buffer[: len(packets)] = packets
                filled = self._consume(cutter, buffer, len(packets))
            if cutter.events:
                stream.delivered = True
            # Asking for more costs a system call, and each one lets readers take the interpreter.
            is_slow = stream.has_read_all and received <= _SLOW_BYTES_MAX
            drained = is_slow or not stream.more_waiting()
            # A semi-synchronous server waits for the acknowledgement, so it sends no more.
            if drained and not stream.semi_sync and waited < _GATHER_SECONDS_MAX:
                wait_seconds = gather_seconds(cutter.gathered, time.monotonic() - began)
                if wait_seconds > 0:
                    waited += wait_seconds
                    self._stopping.wait(wait_seconds)
                    drained = not stream.more_waiting()
            if drained or cutter.gathered >= self._chunk_bytes:
                waited, began = 0.0, time.monotonic()
                self._store(stream, cutter)
                self._progress.caught_up = drained
            if cutter.server_error is not None:
                self._append(cutter)
                raise refusal_of(stream, *cutter.server_error)
            if cutter.ended:
                raise ConnectionLost(
                    f"{stream.address}: the server ended the stream, as it does when it shuts down"
                )

    def _consume(self, cutter: BlockCutter, buffer: memoryview, filled: int) -> int:
        """Cut the complete packets in the buffer, and move the incomplete packet after them to its start.

        Return the size of the incomplete packet.
        """
        consumed = self._cut(cutter, buffer[:filled], cutter.feed_packets)
        buffer[: filled - consumed] = buffer[consumed:filled]
        return filled - consumed

    def _cut(self, cutter: BlockCutter, received: memoryview, feed: Callable[[memoryview], int]) -> int:
        """Feed received bytes. Start a new file in the log where a file starts or bytes are omitted."""
        consumed = feed(received)
        while cutter.state != "input":
            self._append(cutter)
            if cutter.state == "file":
                cutter.take_file()
            else:
                cutter.take_hole()
            self._begin(cutter)
            consumed += feed(received[consumed:])
        return consumed

    def _begin(self, cutter: BlockCutter) -> None:
        self._check_file(cutter)
        begin_file = partial(
            self._log.begin_file,
            cutter.file,
            cutter.offset,
            cutter.format_description,
            LoggedSet(cutter.gtid_set),
            epoch=self._epoch,
            server_id=self._server_id,
            flavor=self._flavor,
        )
        if self._begin_epoch is None:
            begin_file()
        else:
            self._begin_file = begin_file
        self._note_received(cutter.file, cutter.offset)

    def _check_file(self, cutter: BlockCutter) -> None:
        """Raise ConnectionLost if the log has a different file of this name: another server is now at this
        address.
        """
        try:
            stored = file_fingerprint(self._log.head_bytes(self._epoch, cutter.file))
        except SourceMissing:
            return
        if stored != file_fingerprint(cutter.format_description):
            raise ConnectionLost(f"another server sends a file named {cutter.file} since it was asked")

    def _begin_with_first_byte(self) -> None:
        """Begin the epoch and its file, if they were deferred to the first byte."""
        if self._begin_epoch is None:
            return
        self._begin_epoch()
        self._begin_epoch = None
        if self._begin_file is not None:
            self._begin_file()

    def _note_received(self, file: str, offset: int) -> None:
        if self._schemas is not None:
            self._schemas.received(Position(self._epoch, file, offset))

    def _store(self, stream: ReplicaStream, cutter: BlockCutter) -> None:
        """Flush the buffered bytes, make them durable if the server requested it, and notify readers."""
        self._append(cutter)
        acknowledgement = cutter.take_acknowledge()
        if acknowledgement is not None:
            self._log.sync()
            # Acknowledge only after the sync: the server then tells its client that the commit is on two
            # machines.
            stream.acknowledge(*acknowledgement)
            received_at = self._progress.heard_at
            if received_at is not None:
                self._progress.acknowledgements.observe(max(time.time() - received_at, 0.0))
        self._notify_readers()

    def _notify_readers(self) -> None:
        """Notify readers of what was stored."""
        if self._has_unannounced:
            self._has_unannounced = False
            self._arrived()

    def _append(self, cutter: BlockCutter) -> None:
        """Append the buffered bytes to the log unchanged."""
        if not cutter.untaken:
            return
        # Beginning an epoch and applying statements also require permission, so wait for it first.
        self._wait_for_permission()
        self._begin_with_first_byte()
        self._has_unannounced = True
        file, start, end = cutter.data_file, cutter.data_start, cutter.data_end
        boundary = cutter.boundary
        progress = self._progress
        if self._schemas is not None:
            # Apply statements before storing their bytes: a definition may be recorded before its statement
            # is stored, but never after.
            self._apply_statements(self._schemas, cutter)
        data, records = cutter.take_data(), cutter.take_records()
        gtid_set = LoggedSet(cutter.gtid_set)
        while True:
            # The wait for space may have outlasted the lease.
            self._wait_for_permission()
            try:
                self._log.append(
                    data,
                    start,
                    end,
                    boundary,
                    records,
                    time_max_us=cutter.time_max_us,
                    gtid_set=gtid_set,
                )
                break
            except LogFull as problem:
                # Keep the received bytes until there is space, and do not read from the socket until then.
                self._hold(problem.message)
                if self._stopping.wait(_HOLD_SECONDS):
                    raise
        self._resume()
        self._note_received(file, end)
        clock = time.monotonic()
        transactions, changes = cutter.transactions, cutter.changes
        progress.bytes_rate.add(end - start, clock)
        progress.transactions_rate.add(transactions - self._counted[0], clock)
        progress.changes_rate.add(changes - self._counted[1], clock)
        self._counted = transactions, changes
        progress.bytes += end - start
        progress.gtid_set, progress.time_us = gtid_set, cutter.last_time_us or progress.time_us
        if progress.time_us:
            progress.event_lags.observe(max(time.time() - progress.time_us / 1e6, 0.0))

    def _apply_statements(self, schemas: Schemas, cutter: BlockCutter) -> None:
        """Apply the statements in the buffered bytes. If a statement fails, it and the statements after it
        stay unapplied.
        """
        self._unapplied += [
            (
                text,
                database,
                Position(self._epoch, cutter.data_file, end),
                StatementSession.of_event(*session),
            )
            for text, database, _, end, session in cutter.take_statements()
        ]
        while self._unapplied:
            try:
                has_changed = schemas.apply(*self._unapplied[0])
            except PenstockError:
                self._progress.statements.add("failed")
                raise
            self._progress.statements.add("applied" if has_changed else "ignored")
            del self._unapplied[0]

    def _wait_for_room(self) -> None:
        """Do not read from the socket while the log is full: TCP backpressure makes the server wait."""
        while (why := self._pause_reason() or self._full_because()) is not None:
            self._hold(why)
            if self._stopping.wait(_HOLD_SECONDS):
                return
        self._resume()

    def _full_because(self) -> str | None:
        """Return why the log is full, None while there is space. The disk is checked only at intervals."""
        now = time.monotonic()
        if now < self._has_room_until:
            return None
        why = self._log.full_because()
        # For a log in memory, call `full_because` every time, because it frees space. Otherwise an append
        # would drop all acknowledged data.
        if why is None and not isinstance(self._log, MemoryLog):
            self._has_room_until = now + _ROOM_SECONDS
        return why

    def _wait_for_permission(self) -> None:
        """Wait until received bytes may be stored. Raises LeaseLost if the capture stops before that."""
        while (why := self._pause_reason()) is not None:
            self._hold(why)
            if self._stopping.wait(_HOLD_SECONDS):
                raise LeaseLost(
                    f"what was received last is not stored: {why}",
                    hint="The host that captures next asks the server for it again",
                )

    def _hold(self, why: str) -> None:
        self._is_held = True
        self._report_hold(why)

    def _resume(self) -> None:
        if self._is_held:
            self._is_held = False
            self._report_hold(None)


def gather_seconds(gathered: int, seconds: float) -> float:
    """Return how long to wait for more bytes of a server that sent the gathered bytes in some seconds."""
    rate = gathered / max(seconds, _RATE_SECONDS_MIN)
    if rate < _FAST_BYTES_PER_SECOND_MIN or gathered >= _GATHER_BYTES:
        return 0.0
    return min((_GATHER_BYTES - gathered) / rate, _GATHER_SECONDS_MAX)
