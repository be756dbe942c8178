# SPDX-License-Identifier: Apache-2.0
"""A daemon's log, read over HTTP, as a source: `penstock://host:7070,host:7070/instance`.

Daemons that capture the same instance do so independently: their logs may begin at different positions and
number epochs differently, but the bytes of one server's file are the same in all of them. If a daemon does
not answer, the same bytes are requested from the next daemon, using the epoch number that this daemon gives
to the same server.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlencode

from penstock.commit_versions import shifted_epoch
from penstock.errors import PenstockError, PositionPurged, ServerBusy, ServerChanged, TransientError
from penstock.gtid_sets import LoggedSet
from penstock.limits import MIB, SILENCE_SECONDS_MAX
from penstock.logstore.extent import Extent
from penstock.logstore.holds import reader_name
from penstock.model import Position, TableName, TablePatterns
from penstock.retry import Retry
from penstock.source.asking import ask_again
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.followed_bytes import ArrivedBytes
from penstock.source.kept import HINT_EMPTY, EpochKey, KeptSource, epoch_shift
from penstock.source.source import SourceOptions, place_of

# The size of the first fetch past a range's stop, where the range's last transaction may continue. The size
# doubles with each fetch.
_PAST_STOP_BYTES_FIRST = MIB
_PAST_STOP_BYTES_MAX = 64 * MIB

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Listing:
    """The log of an instance at one point in time, as the daemon at a URL reports it. `has_grown` is true if
    data arrived after the position at which the caller waited.
    """

    url: str
    answer: dict[str, Any]
    has_grown: bool = False


class DaemonSource(KeptSource):
    """An instance served by one or more daemons; see `penstock.source.source.Source`."""

    def __init__(self, options: SourceOptions) -> None:
        assert options.daemon is not None, "a daemon source has an address"
        self._daemon_log = DaemonLog(options.daemon, options.reconnect_tries)
        super().__init__(options, self._daemon_log)

    def tables(self) -> TablePatterns:
        """Return the tables that the instance shows to readers that select none."""
        return self._daemon_log.tables()

    def give_definition(self, name: TableName, position: Position, definition: dict[str, Any]) -> None:
        """Send every daemon a table's definition, valid from a position on.

        Propagates errors from the daemons.
        """
        self._daemon_log.give_definition(name, self._to_log(position), definition)

    def listed(self, listing: Listing | None = None) -> AbstractContextManager[None]:
        """Return a context manager in which all questions about the log are answered from one listing: the
        listing that `wait_behind` returned, or a new listing.
        """
        return self._daemon_log.listed(listing)

    def renumber(self) -> None:
        """Compare the epochs again, unless the daemon sends the server's key with its bytes."""
        if not self._daemon_log.names_servers:
            super().renumber()

    def wait_behind(self, position: Position, seconds: float) -> Listing:
        """Wait until the log has a complete transaction after a position, for at most `seconds`. Return the
        listing of the log at that time.
        """
        return self._daemon_log.wait_behind(self._to_log(position), seconds)

    def bytes_behind(self, position: Position, seconds: float, bytes_max: int) -> ArrivedBytes | None:
        """Wait for complete transactions after a position of a file, for at most `seconds`.

        Return the transactions, or None if they are larger than `bytes_max` or the daemon cannot tell where
        they end.
        """
        arrived = self._daemon_log.bytes_behind(self._to_log(position), seconds, bytes_max)
        return None if arrived is None else replace(arrived, head=self._from_log(arrived.head))

    @property
    def answering_url(self) -> str:
        """The URL of the daemon that answered last."""
        return self._daemon_log.answering_url

    @property
    def has_one_daemon(self) -> bool:
        """Whether the log can be read from one daemon only."""
        return len(self._daemon_log.address.base_urls) == 1

    def hold(self, reader: Sequence[str], position: Position, seconds: int) -> None:
        """Make the daemon keep everything after a position. Raises the error that the daemon answers with."""
        self._daemon_log.hold(".".join(map(reader_name, reader)), self._to_log(position), seconds)

    def empty(self) -> PenstockError:
        """Return the error for a daemon that has received nothing yet."""
        return ServerBusy(f"{self} is empty so far", hint=HINT_EMPTY)

    def behind(self, what: str, position: Position) -> PenstockError:
        """Return the error for a position that another daemon had reached, but the current daemon has not."""
        return ServerBusy(
            what, position=str(position), hint="This daemon lags behind another one: penstock status"
        )

    def __str__(self) -> str:
        return str(self.options.daemon)


@dataclass(frozen=True)
class _Listed:
    """The state of a daemon's log at one time, in the epoch numbers of `DaemonLog`."""

    epochs: list[EpochKey]
    runs: list[Extent]
    head: Position | None
    gtid_set: LoggedSet


class DaemonLog:
    """The log of an instance, read from the first of its daemons that answers; see
    `penstock.source.kept.KeptLog`.

    Epochs keep the numbers of that daemon, even if a different daemon answers later.
    """

    def __init__(self, address: DaemonAddress, reconnect_tries: int) -> None:
        self.address = address
        self._reconnect_tries = reconnect_tries
        self._clients = [DaemonClient(address, url) for url in address.base_urls]
        self._current = 0
        self._numbered: list[EpochKey] | None = None
        self._shifts: dict[int, tuple[list[EpochKey], int]] = {}
        self._listed: _Listed | None = None

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    @property
    def names_servers(self) -> bool:
        """Whether the current daemon is known to send the server's key with its bytes."""
        return self._clients[self._current].names_servers

    # --- Requests -----------------------------------------------------------------------------

    @contextmanager
    def listed(self, listing: Listing | None = None) -> Iterator[None]:
        """Inside the block, answer questions about epochs, runs and the head from one listing of the log.

        A daemon of version 0.1 returns no listing, so each question is a separate request.
        """

        def list_log(client: DaemonClient, shift: int) -> _Listed | None:
            is_of_client = listing is not None and listing.url == client.url
            return self._read_listing(listing if listing and is_of_client else _list(client), shift)

        # If the daemon now has another server's log, continue without a listing. The caller's next question
        # then raises ServerChanged.
        with suppress(ServerChanged):
            self._listed = self._ask(list_log)
        try:
            yield
        finally:
            self._listed = None

    def _read_listing(self, listing: Listing, shift: int) -> _Listed | None:
        answer = listing.answer
        if "extents" not in answer:
            return None
        self._shifts[self._current] = _epochs_of(answer), shift
        head = answer["position"]
        return _Listed(
            _renumbered(_epochs_of(answer), shift),
            [run.shifted(shift) for run in extents_of(answer)],
            None if head is None else _position(head, shift),
            LoggedSet(answer["gtid_set"]),
        )

    def wait_behind(self, position: Position, seconds: float) -> Listing:
        """Wait until the log has a complete transaction after a position, for at most `seconds`."""

        def wait(client: DaemonClient, shift: int) -> Listing:
            behind = position.shifted(-shift)
            listing = _list(client, after=str(behind), timeout=str(seconds))
            head = listing.answer["position"]
            has_grown = head is not None and place_of(Position.parse(head)) > place_of(behind)
            return replace(listing, has_grown=has_grown)

        return self._ask(wait)

    def bytes_behind(self, position: Position, seconds: float, bytes_max: int) -> ArrivedBytes | None:
        """Wait for transactions after a position of a file, and return them; see `DaemonClient`."""

        def ask(client: DaemonClient, shift: int) -> ArrivedBytes | None:
            start = position.shifted(-shift)
            server_key = dict(self._shifts[self._current][0]).get(start.epoch, "")
            arrived = client.bytes_behind(
                start.epoch, start.file, start.offset, server_key, seconds, bytes_max
            )
            return None if arrived is None else replace(arrived, head=arrived.head.shifted(shift))

        return self._ask(ask)

    @property
    def answering_url(self) -> str:
        """The URL of the daemon that answered last."""
        return self._clients[self._current].url

    def prepared(self, xid: str) -> None:
        """Return None: the bytes of a daemon's log are searched instead."""

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key, as reported by the current daemon."""
        if self._listed is not None:
            return self._listed.epochs

        def ask(client: DaemonClient, shift: int) -> list[EpochKey]:
            epochs = _fetch_epochs(client)
            self._shifts[self._current] = epochs, shift
            return _renumbered(epochs, shift)

        return self._ask(ask)

    def tables(self) -> TablePatterns:
        """Return the tables that the instance's settings show to readers that select none."""

        def ask(client: DaemonClient, shift: int) -> TablePatterns:
            status = client.ask("status")
            return TablePatterns(status["tables"], status["exclude_tables"])

        return self._ask(ask)

    def runs(self) -> list[Extent]:
        """Return the runs in the daemon's log, in order."""
        if self._listed is not None:
            return self._listed.runs
        return self._ask(
            lambda client, shift: [run.shifted(shift) for run in extents_of(client.ask("extents"))]
        )

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a position, "" if the source has none."""
        if self._listed is not None and position == self._listed.head:
            return self._listed.gtid_set
        return self._ask(
            lambda client, shift: LoggedSet(
                client.ask("gtid_set", position=_text(position, shift))["gtid_set"]
            )
        )

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a position preceded only by transactions of the set. Raises PositionPurged."""
        return self._ask(
            lambda client, shift: _position(client.ask("locate", gtid_set=gtid_set)["position"], shift)
        )

    def locate_time(self, time_us: int) -> Position:
        """Return a position before which no commit is at or after the time."""
        return self._ask(
            lambda client, shift: _position(client.ask("locate", time_us=time_us)["position"], shift)
        )

    def merged_ts(self) -> int | None:
        """Return the commit timestamp up to which the log has everything from a TiDB cluster; None for other
        sources.
        """

        def ask(client: DaemonClient, shift: int) -> int | None:
            commit_ts: int | None = client.ask("status").get("commit_ts")
            return commit_ts

        return self._ask(ask)

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description."""
        return self._ask(
            lambda client, shift: client.content("head_bytes", epoch=shifted_epoch(epoch, -shift), file=file)
        )

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the table definitions in force at a position, as JSON."""

        def ask(client: DaemonClient, shift: int) -> dict[str, Any]:
            table = None if name is None else str(name)
            answer: dict[str, Any] = client.ask(
                "schema", position=_text(position, shift), table=table, again="1" if again else None
            )
            schema: dict[str, Any] = answer["schema"]
            return schema

        return self._ask(ask)

    def boundary_before(self, position: Position) -> int:
        """Return the last indexed transaction boundary at or before a position.

        For a daemon that does not report boundaries, return where its copy of the file begins.
        """

        def ask(client: DaemonClient, shift: int) -> int:
            boundary = client.ask("locate", position=_text(position, shift)).get("boundary")
            if boundary is not None:
                return _position(boundary, shift).offset
            runs = client.ask("extents")["extents"]
            file_key = shifted_epoch(position.epoch, -shift), position.file
            starts = [run["start"] for run in runs if (run["epoch"], run["file"]) == file_key]
            before = [start for start in starts if start <= position.offset]
            if not before:
                raise PositionPurged(f"{client.url} does not have these bytes", position=str(position))
            return int(max(before))

        return self._ask(ask)

    def give_definition(self, name: TableName, position: Position, definition: dict[str, Any]) -> None:
        """Send a table's definition to every daemon, because each daemon stores its own."""
        for index in range(len(self._clients)):
            self._current = index
            client, shift = self._client()
            query = urlencode({"table": str(name), "position": _text(position, shift)})
            answer = client.post(f"schema?{query}", definition, SILENCE_SECONDS_MAX)
            answer.drain_conn()
            answer.release_conn()

    def hold(self, reader: str, position: Position, seconds: int) -> None:
        """Make the current daemon keep everything after a position."""
        self._ask(lambda client, shift: client.hold(reader, _text(position, shift), seconds))

    # --- Bytes --------------------------------------------------------------------------------

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on. They continue past `stop` for as long as the caller requests
        more and the log has more.

        After a lost connection, the bytes resume at `resume_at`, from the next daemon if necessary, with
        exponential backoff. After `reconnect_tries` without progress, the last error is raised.
        """
        offset = start.offset
        retry = Retry("asking again", tries=self._reconnect_tries, peers=len(self._clients))
        fetch_bytes = _PAST_STOP_BYTES_FIRST
        while True:
            fetch_end = stop if offset < stop else offset + fetch_bytes
            fetch_bytes = fetch_bytes if offset < stop else min(fetch_bytes * 2, _PAST_STOP_BYTES_MAX)
            fetch_start = offset
            try:
                client, shift = self._client()
                epoch = shifted_epoch(start.epoch, -shift)
                server_key = dict(self._shifts[self._current][0]).get(epoch, "")
                for piece in client.stream(epoch, start.file, offset, fetch_end, server_key):
                    offset += len(piece)
                    retry.succeeded()
                    yield memoryview(piece)
                if offset < stop:
                    raise ServerBusy(
                        f"{client.url} has {start.file} up to {offset} only, {stop} was planned",
                        position=str(Position(start.epoch, start.file, offset)),
                        hint="This daemon lags behind another one: penstock status",
                    )
            except TransientError as problem:
                if resume_at is None:
                    raise
                self._switch_daemon()
                retry.wait(problem, next=str(self._clients[self._current].url))
                offset = resume_at().offset
                continue
            if offset < fetch_end and offset >= stop:
                # The log has this file up to this offset, which is the end of a transaction.
                return
            assert offset > fetch_start, "an answer that is whole has what was asked for"

    # --- Daemons ------------------------------------------------------------------------------

    def _ask(self, request: Callable[[DaemonClient, int], _Answer]) -> _Answer:
        """Ask the current daemon, then each of the other daemons, in a few rounds. Raises the last daemon's
        error.
        """

        def ask_each() -> _Answer:
            for remaining in reversed(range(len(self._clients))):
                try:
                    return request(*self._client())
                except TransientError:
                    self._switch_daemon()
                    if not remaining:
                        raise
            raise AssertionError("there is at least one daemon")

        return ask_again(ask_each, hang_up=lambda: None)

    def _client(self) -> tuple[DaemonClient, int]:
        """Return the current daemon and the shift from its epoch numbers to those of this log. Raises
        ServerChanged.

        A daemon's epochs are fetched when it becomes the current daemon, because the daemon may have begun
        another epoch since.
        """
        client = self._clients[self._current]
        if self._current not in self._shifts:
            epochs = _fetch_epochs(client)
            if self._numbered is None:
                self._numbered = epochs
            shift = epoch_shift(self._numbered, epochs, client.url)
            self._numbered = sorted({*self._numbered, *_renumbered(epochs, shift)})
            self._shifts[self._current] = epochs, shift
        return client, self._shifts[self._current][1]

    def _switch_daemon(self) -> None:
        """Switch to the next daemon."""
        self._listed = None
        self._clients[self._current].close()
        self._shifts.pop(self._current, None)
        self._current = (self._current + 1) % len(self._clients)


def _list(client: DaemonClient, **query: str) -> Listing:
    return Listing(client.url, client.ask("head", listing=1, **query))


def _fetch_epochs(client: DaemonClient) -> list[EpochKey]:
    return _epochs_of(client.ask("epochs"))


def _epochs_of(answer: Mapping[str, Any]) -> list[EpochKey]:
    return [(epoch["epoch"], epoch["server_key"]) for epoch in answer["epochs"]]


def extents_of(answer: Mapping[str, Any]) -> list[Extent]:
    """Return the extents in a daemon's answer."""
    return [
        Extent(extent["epoch"], extent["file"], extent["start"], extent["end"])
        for extent in answer["extents"]
    ]


def _text(position: Position, shift: int) -> str:
    return str(position.shifted(-shift))


def _position(text: str, shift: int) -> Position:
    return Position.parse(text).shifted(shift)


def _renumbered(epochs: list[EpochKey], shift: int) -> list[EpochKey]:
    return [(shifted_epoch(epoch, shift), key) for epoch, key in epochs]
