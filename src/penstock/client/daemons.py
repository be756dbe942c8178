# SPDX-License-Identifier: Apache-2.0
"""The daemons of one address: what each says of itself, and where a start lies in the log of one of them."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow

from penstock._native import GtidSet
from penstock.client.fetch import ChangesAnswer
from penstock.client.flow import Place, Survey, hopelessness
from penstock.errors import PenstockError, ServerBehind, TransientError
from penstock.model import Position
from penstock.source.asking import ask_again
from penstock.source.bounds import Bound, parse_bound
from penstock.source.daemon import DaemonSource
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.source import ByteRange, SourceOptions
from penstock.source.walk import TransactionWalk

# Where a subscription may start that is no place of a log.
EARLIEST, LATEST = "earliest", "latest"


@dataclass(frozen=True)
class Start:
    """Where a subscription starts: at one end of the log, or at a bound. Exactly one field is set."""

    end: str | None = None
    bound: Bound | None = None

    @classmethod
    def parse(cls, value: Any) -> "Start":
        """Read earliest, latest, or what `penstock.source.bounds.parse_bound` reads. Raises OptionInvalid."""
        if isinstance(value, str) and value.strip() in (EARLIEST, LATEST):
            return cls(end=value.strip())
        return cls(bound=parse_bound(value))

    def __str__(self) -> str:
        return self.end or str(self.bound)


class Daemons:
    """One client for each daemon, by number as the address names them. Safe for several threads."""

    def __init__(self, address: DaemonAddress) -> None:
        self.address = address
        self._clients = [DaemonClient(address, url) for url in address.base_urls]

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
        """Ask each daemon how it stands. Never raises for one that does not answer: its survey says why."""
        asked = list(daemons)
        if len(asked) == 1:
            return {asked[0]: self._survey(self._clients[asked[0]])}
        # At once: one that is out of reach costs seconds, which nobody else need wait for in turn.
        with ThreadPoolExecutor(len(asked), thread_name_prefix="penstock-survey") as pool:
            surveys = list(pool.map(lambda daemon: self._survey(self._clients[daemon]), asked))
        return dict(zip(asked, surveys, strict=True))

    def have_something(self) -> bool:
        """Tell whether one of them has anything in its log. Raises ConnectionLost where none answers."""

        def ask_each() -> bool:
            surveys = self.survey(range(len(self)))
            if all(one.problem is not None for one in surveys.values()):
                # A daemon that is opening its log is there, and a refusal says why nothing will come.
                raise min((one.problem for one in surveys.values() if one.problem), key=hopelessness)
            return any(one.head is not None for one in surveys.values())

        return ask_again(ask_each, hang_up=self.close)

    def changes(
        self, daemon: int, body: Mapping[str, Any], silence_seconds: float, consumed: Position | None = None
    ) -> ChangesAnswer:
        """Begin an answer of changes; everything before `consumed` is, as that daemon numbers it.

        Raises what the daemon refuses, and ConnectionLost.
        """
        return ChangesAnswer(self._clients[daemon], body, silence_seconds, consumed)

    def after_gtid_set(self, daemon: int, gtid_set: str) -> Position:
        """Return where the first transaction outside a set begins at a daemon. Raises PositionPurged."""
        return self._locate(daemon, Start(bound=Bound(gtid_set=gtid_set)))

    def place(self, start: Start) -> Place:
        """Return where a start lies, as the first daemon to answer has it.

        Raises PositionPurged and PositionInvalid where no daemon has it, ConnectionLost where none answers.
        """

        def ask_each() -> Place:
            failure: PenstockError | None = None
            for daemon in range(len(self)):
                try:
                    return self._place(daemon, start)
                except PenstockError as problem:
                    # The one that may pass is what the caller waits for.
                    if failure is None or isinstance(problem, TransientError):
                        failure = problem
            assert failure is not None, "there is at least one daemon"
            raise failure

        return ask_again(ask_each, hang_up=self.close)

    # --- Asking ---------------------------------------------------------------------------------

    def _place(self, daemon: int, start: Start) -> Place:
        client = self._clients[daemon]
        position = self._locate(daemon, start)
        epochs = {one["epoch"]: one["server_key"] for one in client.ask("epochs")["epochs"]}
        gtid_set = client.ask("gtid_set", position=str(position))["gtid_set"] or ""
        return Place(position, gtid_set, epochs.get(position.epoch, ""))

    def _locate(self, daemon: int, start: Start) -> Position:
        client = self._clients[daemon]
        if start.end is not None:
            found = client.ask("earliest" if start.end == EARLIEST else "head")["position"]
            if found is None:
                # Its first bytes are on their way.
                raise ServerBehind(
                    f"{client.url} has nothing yet to start at", hint="See how far it is: penstock status"
                )
            return Position.parse(found)
        bound = start.bound
        assert bound is not None, "a start has one field"
        if bound.gtid_set is not None:
            known = GtidSet.parse(bound.gtid_set)
            return self._first(
                daemon,
                Position.parse(client.ask("locate", gtid_set=bound.gtid_set)["position"]),
                lambda gtid, _: bool(gtid) and not known.contains(GtidSet.parse(gtid)),
            )
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

    def _first(self, daemon: int, located: Position, wanted: Callable[[str, int], bool]) -> Position:
        """Return where the first wanted transaction from a boundary on begins, else where its file ends.

        A daemon's index points at blocks; this is for an answer to the byte.
        """
        client = self._clients[daemon]
        held = [
            one
            for one in client.ask("extents")["extents"]
            if (one["epoch"], one["file"]) == (located.epoch, located.file)
            and one["start"] <= located.offset <= one["end"]
        ]
        if not held:
            # A file's head, before its first event.
            return located
        end = held[-1]["end"]
        alone = replace(self.address, hosts=self.address.hosts[daemon : daemon + 1])
        source = DaemonSource(SourceOptions(daemon=alone, instance=alone.instance))
        span = ByteRange(located.epoch, located.file, located.offset, end, aligned=True)
        try:
            for batch in TransactionWalk(source, span) if located.offset < end else ():
                times = batch["commit_timestamp"].cast(pyarrow.int64())
                for at in range(len(batch)):
                    if wanted(batch["gtid"][at].as_py() or "", times[at].as_py()):
                        return replace(located, offset=batch["offset"][at].as_py())
        finally:
            source.close()
        return replace(located, offset=end)

    def _survey(self, client: DaemonClient) -> Survey:
        try:
            status = client.ask("status")
            epochs = [(one["epoch"], one["server_key"]) for one in client.ask("epochs")["epochs"]]
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
    found = status.get("subscribers") or 0
    return found if isinstance(found, int) else len(found)
