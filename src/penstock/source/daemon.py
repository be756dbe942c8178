# SPDX-License-Identifier: Apache-2.0
"""A daemon's log over its HTTP interface, as a source: `penstock://host:7070,host:7070/instance`.

Several daemons capture one instance each by itself, so their logs begin at different places and may number
epochs differently; bytes of one server's file are the same in all of them. Where a daemon does not answer,
the next one is asked for the same bytes, under the number that it gives the same server's epoch.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

import structlog

from penstock.commit_versions import shifted_epoch
from penstock.errors import PenstockError, PositionPurged, ServerBusy, TransientError
from penstock.gtid_sets import LoggedSet
from penstock.limits import (
    MIB,
    RECONNECT_PAUSE_SECONDS_FIRST,
    RECONNECT_PAUSE_SECONDS_MAX,
    SILENCE_SECONDS_MAX,
)
from penstock.logstore.holds import reader_name
from penstock.model import Position, TableName, TablePatterns
from penstock.source.asking import ask_again
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.kept import EpochKey, KeptRun, KeptSource, epoch_shift
from penstock.source.source import SourceOptions

# What is fetched at a time behind a range's stop, where its last transaction may go on; it doubles.
_BEHIND_BYTES_FIRST = MIB
_BEHIND_BYTES_MAX = 64 * MIB

_Answer = TypeVar("_Answer")
_log = structlog.get_logger(__name__)


class DaemonSource(KeptSource):
    """One instance of one or several daemons; see `penstock.source.source.Source`."""

    def __init__(self, options: SourceOptions) -> None:
        assert options.daemon is not None, "a daemon source has an address"
        self._daemon_log = DaemonLog(options.daemon, options.reconnect_tries)
        super().__init__(options, self._daemon_log)

    def tables(self) -> TablePatterns:
        """Return the tables that the instance shows to readers who name none."""
        return self._daemon_log.tables()

    def give_definition(self, name: TableName, position: Position, definition: dict[str, Any]) -> None:
        """Give every daemon a table's definition, from a position on. Raises what a daemon raises."""
        self._daemon_log.give_definition(name, self._there(position), definition)

    def hold(self, reader: Sequence[str], position: Position, seconds: int) -> None:
        """Have the log keep what comes after a position, for a reader whose name has these parts.

        Raises what the daemon raises.
        """
        self._daemon_log.hold(".".join(map(reader_name, reader)), self._there(position), seconds)

    def behind(self, what: str, position: Position) -> PenstockError:
        """Return the error for a place that the daemon has not reached: another one had, so it will."""
        return ServerBusy(what, position=str(position), hint="It is behind another daemon: penstock status")

    def __str__(self) -> str:
        return str(self.options.daemon)


class DaemonLog:
    """The log that the first daemon to answer keeps; see `penstock.source.kept.KeptLog`.

    Epochs have the numbers that this first daemon gave them, whoever answers later.
    """

    def __init__(self, address: DaemonAddress, reconnect_tries: int) -> None:
        self.address = address
        self._reconnect_tries = reconnect_tries
        self._clients = [DaemonClient(address, url) for url in address.base_urls]
        self._current = 0
        self._numbered: list[EpochKey] | None = None
        self._shifts: dict[int, tuple[list[EpochKey], int]] = {}

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    # --- Questions ----------------------------------------------------------------------------

    def prepared(self, xid: str) -> None:
        """Return None: of a daemon's log the bytes are searched."""

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key, as the daemon that answers now has them."""

        def ask(client: DaemonClient, shift: int) -> list[EpochKey]:
            found = _epochs_of(client)
            self._shifts[self._current] = found, shift
            return _renumbered(found, shift)

        return self._ask(ask)

    def tables(self) -> TablePatterns:
        """Return the tables that the instance's settings show to readers who name none."""

        def ask(client: DaemonClient, shift: int) -> TablePatterns:
            found = client.ask("status")
            return TablePatterns(found["tables"], found["exclude_tables"])

        return self._ask(ask)

    def runs(self) -> list[KeptRun]:
        """Return what the daemon's log holds, in order."""
        return self._ask(
            lambda client, shift: [
                KeptRun(one["epoch"], one["file"], one["start"], one["end"]).shifted(shift)
                for one in client.ask("extents")["extents"]
            ]
        )

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction before a position, "" where the source has none."""
        return self._ask(
            lambda client, shift: LoggedSet(
                client.ask("gtid_set", position=_text(position, shift))["gtid_set"]
            )
        )

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a position with nothing but the set before it. Raises PositionPurged."""
        return self._ask(
            lambda client, shift: _position(client.ask("locate", gtid_set=gtid_set)["position"], shift)
        )

    def locate_time(self, time_us: int) -> Position:
        """Return a position before which nothing was committed at or after the time."""
        return self._ask(
            lambda client, shift: _position(client.ask("locate", time_us=time_us)["position"], shift)
        )

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description."""
        return self._ask(
            lambda client, shift: client.content("head_bytes", epoch=shifted_epoch(epoch, -shift), file=file)
        )

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the definitions in force at a position, as JSON."""

        def ask(client: DaemonClient, shift: int) -> dict[str, Any]:
            table = None if name is None else str(name)
            found: dict[str, Any] = client.ask(
                "schema", position=_text(position, shift), table=table, again="1" if again else None
            )
            schema: dict[str, Any] = found["schema"]
            return schema

        return self._ask(ask)

    def boundary_before(self, position: Position) -> int:
        """Return the last transaction boundary at or before a position that the daemon's index has.

        Of a daemon that does not tell, it is where its bytes of the file begin.
        """

        def ask(client: DaemonClient, shift: int) -> int:
            boundary = client.ask("locate", position=_text(position, shift)).get("boundary")
            if boundary is not None:
                return _position(boundary, shift).offset
            runs = client.ask("extents")["extents"]
            here = shifted_epoch(position.epoch, -shift), position.file
            starts = [run["start"] for run in runs if (run["epoch"], run["file"]) == here]
            before = [start for start in starts if start <= position.offset]
            if not before:
                raise PositionPurged(f"{client.url} does not have these bytes", position=str(position))
            return int(max(before))

        return self._ask(ask)

    def give_definition(self, name: TableName, position: Position, definition: dict[str, Any]) -> None:
        """Give every daemon a table's definition, for each keeps its own."""
        for index in range(len(self._clients)):
            self._current = index
            client, shift = self._client()
            query = urlencode({"table": str(name), "position": _text(position, shift)})
            answer = client.post(f"schema?{query}", definition, SILENCE_SECONDS_MAX)
            answer.drain_conn()
            answer.release_conn()

    def hold(self, reader: str, position: Position, seconds: int) -> None:
        """Have the daemon that answers keep what comes after a position."""
        self._ask(lambda client, shift: client.hold(reader, _text(position, shift), seconds))

    # --- Bytes --------------------------------------------------------------------------------

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on, past `stop` as far as the caller asks and the log goes.

        After a lost connection they begin again where `resume_at` says, from the next daemon if need be, with
        a pause that doubles; `reconnect_tries` without progress raise the last failure.
        """
        offset, tries = start.offset, 0
        behind = _BEHIND_BYTES_FIRST
        while True:
            wanted = stop if offset < stop else offset + behind
            behind = behind if offset < stop else min(behind * 2, _BEHIND_BYTES_MAX)
            begun = offset
            try:
                client, shift = self._client()
                for piece in client.stream(shifted_epoch(start.epoch, -shift), start.file, offset, wanted):
                    offset += len(piece)
                    tries = 0
                    yield memoryview(piece)
                if offset < stop:
                    raise ServerBusy(
                        f"{client.url} has {start.file} up to {offset} only, {stop} was planned",
                        position=str(Position(start.epoch, start.file, offset)),
                        hint="It is behind another daemon: penstock status",
                    )
            except TransientError as problem:
                if resume_at is None:
                    raise
                self._turn(problem, tries)
                tries += 1
                offset = resume_at().offset
                continue
            if offset < wanted and offset >= stop:
                # The log's part of this file ends here, behind a whole transaction.
                return
            assert offset > begun, "an answer that is whole has what was asked for"

    def _turn(self, problem: TransientError, tries: int) -> None:
        """Make ready for the next daemon. Raises the problem where it was tried often enough."""
        if tries >= self._reconnect_tries * len(self._clients):
            raise problem
        self._next()
        pause = 0.0
        if (tries + 1) % len(self._clients) == 0:
            # All of them were asked once more.
            rounds = tries // len(self._clients)
            pause = min(RECONNECT_PAUSE_SECONDS_FIRST * 2**rounds, RECONNECT_PAUSE_SECONDS_MAX)
        _log.warning(
            "asking again", why=str(problem), next=str(self._clients[self._current].url), after_seconds=pause
        )
        time.sleep(pause)

    # --- Daemons ------------------------------------------------------------------------------

    def _ask(self, question: Callable[[DaemonClient, int], _Answer]) -> _Answer:
        """Ask the current daemon, else the next ones, a few rounds. Raises the last daemon's failure."""

        def ask_each() -> _Answer:
            for left in reversed(range(len(self._clients))):
                try:
                    return question(*self._client())
                except TransientError:
                    self._next()
                    if not left:
                        raise
            raise AssertionError("there is at least one daemon")

        return ask_again(ask_each, hang_up=lambda: None)

    def _client(self) -> tuple[DaemonClient, int]:
        """Return the current daemon and what to add to its numbers of epochs. Raises ServerChanged.

        A daemon is asked for its epochs when it is turned to: it may have begun another one, or be another.
        """
        client = self._clients[self._current]
        if self._current not in self._shifts:
            found = _epochs_of(client)
            if self._numbered is None:
                self._numbered = found
            shift = epoch_shift(self._numbered, found, client.url)
            self._numbered = sorted({*self._numbered, *_renumbered(found, shift)})
            self._shifts[self._current] = found, shift
        return client, self._shifts[self._current][1]

    def _next(self) -> None:
        """Turn to the next daemon."""
        self._clients[self._current].close()
        self._shifts.pop(self._current, None)
        self._current = (self._current + 1) % len(self._clients)


def _epochs_of(client: DaemonClient) -> list[EpochKey]:
    return [(one["epoch"], one["server_key"]) for one in client.ask("epochs")["epochs"]]


def _text(position: Position, shift: int) -> str:
    return str(position.shifted(-shift))


def _position(text: str, shift: int) -> Position:
    return Position.parse(text).shifted(shift)


def _renumbered(epochs: list[EpochKey], shift: int) -> list[EpochKey]:
    return [(shifted_epoch(epoch, shift), key) for epoch, key in epochs]
