# SPDX-License-Identifier: Apache-2.0
"""The sources of the changes that a subscriber consumes: daemons, or a database server itself."""

from collections.abc import Generator, Iterable, Mapping
from typing import Any, Protocol

from penstock.client.daemons import Daemons, Start
from penstock.client.fetch import Frame
from penstock.client.flow import Place, Survey
from penstock.model import Position, ServerAddress
from penstock.source.daemon_address import DaemonAddress


class Answer(Protocol):
    """One response to a request for changes. One thread reads `frames`; any thread may `cut` the response."""

    def frames(self) -> Generator[Frame, None, None]:
        """Yield the frames up to the end of the answer."""

    def has_more(self) -> bool:
        """Return whether more of the answer has arrived, without waiting. For the reading thread."""

    def cut(self) -> None:
        """End the answer early."""


class Publishers(Protocol):
    """The servers that publish the changes of one instance, by number: `Daemons` or `ServerLog`.
    Thread-safe.
    """

    def __len__(self) -> int: ...

    def url(self, number: int, /) -> str:
        """Return the URL of a publisher."""

    def close(self) -> None:
        """Close the connections."""

    def survey(self, numbers: Iterable[int], /) -> dict[int, Survey]:
        """Query some publishers for their state. The survey of an unavailable publisher holds the error."""

    def have_something(self) -> bool:
        """Return whether any publisher has data in its log."""

    def changes(
        self,
        number: int,
        body: Mapping[str, Any],
        silence_seconds: float,
        consumed: Position | None = None,
        /,
    ) -> Answer:
        """Start a request for changes. Everything before `consumed` has been consumed."""

    def locate_start(self, start: Start, /) -> Place:
        """Return the position of a start, from the first publisher that answers."""

    def after_gtid_set(self, number: int, gtid_set: str, /) -> Position:
        """Return where the first transaction outside a set starts in a publisher's log."""

    def prove(self, number: int, location: Place, /) -> None:
        """Raise PositionInvalid if a position, in the publisher's epoch numbers, does not belong to the
        publisher's log.
        """


def open_publishers(address: DaemonAddress | ServerAddress, instance: str) -> Publishers:
    """Return the publishers of an address. A MySQL client is loaded only for a server."""
    if isinstance(address, DaemonAddress):
        return Daemons(address)
    from penstock.client.server_log import ServerLog

    return ServerLog(address, instance)
