# SPDX-License-Identifier: Apache-2.0
"""Surveys the state of the daemons of one address, and looks up a start position in their logs."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow

from penstock.client.fetch import ChangesAnswer
from penstock.client.flow import Place, Survey, hopelessness
from penstock.errors import PenstockError, ServerBehind, TransientError
from penstock.gtid_sets import NO_GTIDS, OutsideSet
from penstock.model import Position
from penstock.source.asking import ask_again
from penstock.source.bounds import Bound, parse_bound
from penstock.source.daemon import DaemonSource
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.silent_daemons import SilentDaemons
from penstock.source.source import ByteRange, SourceOptions
from penstock.source.walk import TransactionWalk

# Starts that are not positions in a log.
EARLIEST, LATEST = "earliest", "latest"


@dataclass(frozen=True)
class Start:
    """Where a subscription starts: an end of the log, or a bound. Exactly one field is set."""

    end: str | None = None
    bound: Bound | None = None

    @classmethod
    def parse(cls, value: Any) -> "Start":
        """Parse earliest, latest, or the input of `penstock.source.bounds.parse_bound`.

        Raises OptionInvalid.
        """
        if isinstance(value, str) and value.strip() in (EARLIEST, LATEST):
            return cls(end=value.strip())
        return cls(bound=parse_bound(value))

    def __str__(self) -> str:
        return self.end or str(self.bound)


class Daemons:
    """The clients of all daemons in an address, numbered in the address's order. Thread-safe."""

    def __init__(self, address: DaemonAddress) -> None:
        self.address = address
        silent = SilentDaemons()
        self._clients = [DaemonClient(address, url, silent=silent) for url in address.base_urls]

    def __len__(self) -> int:
        return len(self._clients)

    def url(self, daemon: int) -> str:
        """Return the URL of a daemon."""
        return self._clients[daemon].url

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    def survey(self, daemons: Iterable[int]) -> dict[int, Survey]:
        """Ask daemons for their state. Never raises for an unavailable daemon: its survey holds the error."""
        daemon_numbers = list(daemons)
        if len(daemon_numbers) == 1:
            return {daemon_numbers[0]: self._survey(self._clients[daemon_numbers[0]])}
        # Ask all daemons at once. An unreachable daemon takes seconds, and its delay must not hold up the
        # others.
        with ThreadPoolExecutor(len(daemon_numbers), thread_name_prefix="penstock-survey") as pool:
            surveys = list(pool.map(lambda daemon: self._survey(self._clients[daemon]), daemon_numbers))
        return dict(zip(daemon_numbers, surveys, strict=True))

    def have_something(self) -> bool:
        """Return whether any daemon has data in its log. Raises ConnectionLost if none answers."""

        def ask_each() -> bool:
            surveys = self.survey(range(len(self)))
            if all(survey.problem is not None for survey in surveys.values()):
                # A daemon that is opening its log counts as available. Its refusal explains why no changes
                # arrive yet.
                raise min((survey.problem for survey in surveys.values() if survey.problem), key=hopelessness)
            return any(survey.head is not None for survey in surveys.values())

        return ask_again(ask_each, hang_up=self.close)

    def changes(
        self, daemon: int, body: Mapping[str, Any], silence_seconds: float, consumed: Position | None = None
    ) -> ChangesAnswer:
        """Start a changes request.

        `consumed` is the position, in that daemon's epoch numbers, before which everything has been consumed.
        Raises the daemon's errors, and ConnectionLost.
        """
        return ChangesAnswer(self._clients[daemon], body, silence_seconds, consumed)

    def after_gtid_set(self, daemon: int, gtid_set: str) -> Position:
        """Return where the first transaction outside a set starts in a daemon's log. Raises
        PositionPurged.
        """
        return self._locate(daemon, Start(bound=Bound(gtid_set=gtid_set)))

    def prove(self, daemon: int, location: Place) -> None:
        """Do nothing: a daemon's log stores the server's files exactly as received."""

    def locate_start(self, start: Start) -> Place:
        """Ask the daemons where to start reading, and return the place that the first daemon with an answer
        reports.

        Raises PositionPurged or PositionInvalid if no daemon has the place, ConnectionLost if none answers.
        """

        def ask_each() -> Place:
            failure: PenstockError | None = None
            for daemon in range(len(self)):
                try:
                    return self._locate_start(daemon, start)
                except PenstockError as problem:
                    # Prefer a transient error, because the caller retries it.
                    if failure is None or isinstance(problem, TransientError):
                        failure = problem
            assert failure is not None, "there is at least one daemon"
            raise failure

        return ask_again(ask_each, hang_up=self.close)

    # --- Requests -------------------------------------------------------------------------------

    def _locate_start(self, daemon: int, start: Start) -> Place:
        client = self._clients[daemon]
        position = self._locate(daemon, start)
        epochs = {epoch["epoch"]: epoch["server_key"] for epoch in client.ask("epochs")["epochs"]}
        gtid_set = client.ask("gtid_set", position=str(position))["gtid_set"] or ""
        return Place(position, gtid_set, epochs.get(position.epoch, ""))

    def _locate(self, daemon: int, start: Start) -> Position:
        client = self._clients[daemon]
        if start.end is not None:
            position = client.ask("earliest" if start.end == EARLIEST else "head")["position"]
            if position is None:
                # The log is still empty: its first bytes have not arrived yet.
                raise ServerBehind(
                    f"{client.url} has nothing yet to start at", hint="See how far it is: penstock status"
                )
            return Position.parse(position)
        bound = start.bound
        assert bound is not None, "a start has one field"
        if bound.gtid_set is not None:
            located = Position.parse(client.ask("locate", gtid_set=bound.gtid_set)["position"])
            before = client.ask("gtid_set", position=str(located))["gtid_set"] or NO_GTIDS
            is_outside = OutsideSet(bound.gtid_set, before)
            return self._first(daemon, located, lambda gtid, _: is_outside(gtid))
        if bound.time_us is not None:
            from_us = bound.time_us
            return self._first(
                daemon,
                Position.parse(client.ask("locate", time_us=from_us)["position"]),
                lambda _, time_us: time_us >= from_us,
            )
        client.ask("locate", position=str(bound.position))
        assert bound.position is not None, "a bound has one field"
        return bound.position

    def _first(self, daemon: int, located: Position, is_wanted: Callable[[str, int], bool]) -> Position:
        """Starting at a transaction boundary, find the first wanted transaction and return its start; if
        there is none, return the end of the file.

        A daemon's index has block granularity; this function finds the exact transaction.
        """
        client = self._clients[daemon]
        extents = [
            extent
            for extent in client.ask("extents")["extents"]
            if (extent["epoch"], extent["file"]) == (located.epoch, located.file)
            and extent["start"] <= located.offset <= extent["end"]
        ]
        if not extents:
            # The position is in the file's head, before the first event.
            return located
        end = extents[-1]["end"]
        alone = replace(self.address, hosts=self.address.hosts[daemon : daemon + 1])
        source = DaemonSource(SourceOptions(daemon=alone, instance=alone.instance))
        span = ByteRange(located.epoch, located.file, located.offset, end, aligned=True)
        try:
            for batch in TransactionWalk(source, span) if located.offset < end else ():
                times = batch["commit_timestamp"].cast(pyarrow.int64())
                for row in range(len(batch)):
                    if is_wanted(batch["gtid"][row].as_py() or "", times[row].as_py()):
                        return replace(located, offset=batch["offset"][row].as_py())
        finally:
            source.close()
        return replace(located, offset=end)

    def _survey(self, client: DaemonClient) -> Survey:
        try:
            status = client.ask("status")
            epochs = [(epoch["epoch"], epoch["server_key"]) for epoch in client.ask("epochs")["epochs"]]
            return Survey(
                load=_load(status),
                epochs=epochs,
                earliest=_position_of(status["earliest"]),
                head=_position_of(status["position"]),
            )
        except PenstockError as problem:
            return Survey(problem=problem)


def _position_of(text: str | None) -> Position | None:
    return None if text is None else Position.parse(text)


def _load(status: Mapping[str, Any]) -> int:
    subscribers = status.get("subscribers") or 0
    return subscribers if isinstance(subscribers, int) else len(subscribers)
