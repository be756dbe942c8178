# SPDX-License-Identifier: Apache-2.0
"""From a socket into the log: the loop that every byte of a live server goes through.

Bytes are received in large pieces, cut by the kernel and handed to the log as they are. Python does the same
little work for a piece of four megabytes as for one of a hundred bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Protocol

from penstock._native import BlockCutter
from penstock.capture.status import Rate
from penstock.errors import ConnectionLost, LogFull, SourceMissing, StreamError
from penstock.fingerprint import file_fingerprint
from penstock.gtid_sets import LoggedSet
from penstock.limits import READ_BYTES
from penstock.logstore.log import Log
from penstock.model import Position, StatementSession
from penstock.mysql.refusal import refusal_of
from penstock.mysql.replica import ReplicaStream

# While there is no room the reason is looked at again so often.
_HOLD_SECONDS = 0.1


class Schemas(Protocol):
    """What follows the statements of a log."""

    def apply(self, text: str, database: str, position: Position, session: StatementSession) -> object:
        """Take a statement into account; `position` is where its event ends."""

    def received(self, position: Position) -> None:
        """Note up to where the log was received, and its statements applied."""

    def close(self) -> None:
        """Let go of what is held open."""


@dataclass
class Progress:
    """What was received, written by the receiving thread alone and read by any.

    `heard_at` is when the server last said anything, seconds since 1970; `caught_up` tells whether all that
    it had sent was stored then.
    """

    heard_at: float | None = None
    caught_up: bool = False
    gtid_set: str = ""
    time_us: int = 0
    transactions: int = 0
    changes: int = 0

    def __post_init__(self) -> None:
        self.bytes_rate, self.transactions_rate, self.changes_rate = Rate(), Rate(), Rate()


class Receiver:
    """Moves the bytes of one dump into a log, until it is told to stop or something fails.

    Bytes are handed on when `chunk_bytes` are gathered, or as soon as no more wait. `hold` is told why
    nothing is received while there is no room, and None when it goes on. `arrived` is called after something
    was handed to the log. `begin_epoch` is called once, before the first bytes are handed over.
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
    ) -> None:
        self._log = log
        self._progress = progress
        self._stopping = stopping
        self._epoch = epoch
        self._server_id = server_id
        self._flavor = flavor
        self._chunk_bytes = chunk_bytes
        self._schemas = schemas
        self._said = hold
        self._held = False
        self._arrived = arrived
        self._begin_epoch = begin_epoch
        # The file that the log is told of once its epoch has begun.
        self._begin_file: Callable[[], None] | None = None
        self._counted = (0, 0)
        # Statements of bytes that are yet to be stored, which `schemas` has not taken into account.
        self._unapplied: list[tuple[str, str, Position, StatementSession]] = []
        # Whether something was handed over that readers were not told of.
        self._news = False

    def receive(self, stream: ReplicaStream, cutter: BlockCutter) -> None:
        """Receive until `stopping`. Raises what the server, the bytes or the log raise.

        What was received whole before a connection is lost, or before bytes that cannot be read, is stored:
        nobody may be able to send it again. Bytes whose statements could not be applied are not.
        """
        try:
            self._receive(stream, cutter)
        except (ConnectionLost, StreamError):
            if not self._unapplied:
                self._append(cutter)
            raise
        finally:
            self._tell()
        self._append(cutter)
        self._tell()

    def _receive(self, stream: ReplicaStream, cutter: BlockCutter) -> None:
        buffer = memoryview(bytearray(min(READ_BYTES, self._chunk_bytes)))
        filled = 0
        while not self._stopping.is_set():
            self._wait_for_room()
            if filled == len(buffer):
                # A packet that does not fit. It has at most 16 MiB, so this ends.
                buffer = memoryview(bytearray(buffer) + bytes(len(buffer)))
            filled += stream.receive_into(buffer[filled:])
            self._progress.heard_at = time.time()
            used = self._cut(cutter, buffer[:filled])
            if cutter.events:
                stream.delivered = True
            buffer[: filled - used] = buffer[used:filled]
            filled -= used
            drained = not stream.more_waiting()
            if drained or cutter.gathered >= self._chunk_bytes:
                self._store(stream, cutter)
                self._progress.caught_up = drained
            if cutter.server_error is not None:
                raise refusal_of(stream, *cutter.server_error)
            if cutter.ended:
                raise ConnectionLost(
                    f"{stream.address}: the server ended the stream, as it does when it shuts down"
                )

    def _cut(self, cutter: BlockCutter, received: memoryview) -> int:
        """Feed what was received; where a file begins or bytes are left out, tell the log and feed on."""
        used = cutter.feed_packets(received)
        while cutter.state != "input":
            self._append(cutter)
            if cutter.state == "file":
                cutter.take_file()
            else:
                cutter.take_hole()
            self._begin(cutter)
            used += cutter.feed_packets(received[used:])
        return used

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
        """Raise ConnectionLost where the log has another file of this name: another server answers now."""
        try:
            known = file_fingerprint(self._log.head_bytes(self._epoch, cutter.file))
        except SourceMissing:
            return
        if known != file_fingerprint(cutter.format_description):
            raise ConnectionLost(f"another server sends a file named {cutter.file} since it was asked")

    def _begin_with_first_byte(self) -> None:
        """Begin the epoch, and its file, if that was left to the first byte."""
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
        """Hand over what was gathered, make it durable where that is asked for, and tell the readers."""
        self._append(cutter)
        wanted = cutter.take_acknowledge()
        if wanted is not None:
            self._log.sync()
            # Only now: the server tells its client that the commit is on two machines.
            stream.acknowledge(*wanted)
        self._tell()

    def _tell(self) -> None:
        """Wake who waits for what was stored."""
        if self._news:
            self._news = False
            self._arrived()

    def _append(self, cutter: BlockCutter) -> None:
        """Hand the gathered bytes to the log as they are."""
        if not cutter.untaken:
            return
        self._begin_with_first_byte()
        self._news = True
        file, start, end = cutter.data_file, cutter.data_start, cutter.data_end
        boundary = cutter.boundary
        progress = self._progress
        if self._schemas is not None:
            # Before the bytes: a definition may be known before its statement is kept, never the other way.
            self._apply_statements(self._schemas, cutter)
        data, records = cutter.take_data(), cutter.take_records()
        while True:
            try:
                self._log.append(
                    data,
                    start,
                    end,
                    boundary,
                    records,
                    time_max_us=cutter.time_max_us,
                    gtid_set=LoggedSet(cutter.gtid_set),
                )
                break
            except LogFull as problem:
                # What was received is kept in hand until there is room; meanwhile the socket is left alone.
                self._hold(problem.message)
                if self._stopping.wait(_HOLD_SECONDS):
                    raise
        self._go_on()
        self._note_received(file, end)
        clock = time.monotonic()
        transactions, changes = cutter.transactions, cutter.changes
        progress.bytes_rate.add(end - start, clock)
        progress.transactions_rate.add(transactions - self._counted[0], clock)
        progress.changes_rate.add(changes - self._counted[1], clock)
        self._counted = transactions, changes
        progress.gtid_set, progress.time_us = cutter.gtid_set, cutter.last_time_us or progress.time_us

    def _apply_statements(self, schemas: Schemas, cutter: BlockCutter) -> None:
        """Apply the statements of the gathered bytes; those that fail, and what follows, stay unapplied."""
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
            schemas.apply(*self._unapplied[0])
            del self._unapplied[0]

    def _wait_for_room(self) -> None:
        """Leave the socket alone while the log cannot take more: the server waits, as TCP has it."""
        while (why := self._log.full_because()) is not None:
            self._hold(why)
            if self._stopping.wait(_HOLD_SECONDS):
                return
        self._go_on()

    def _hold(self, why: str) -> None:
        self._held = True
        self._said(why)

    def _go_on(self) -> None:
        if self._held:
            self._held = False
            self._said(None)
