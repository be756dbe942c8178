# SPDX-License-Identifier: Apache-2.0
"""The daemons that the console shows, according to the current answers of their control API."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

from penstock.client.fetch import BatchFrame, ChangesAnswer, PositionFrame
from penstock.errors import ConnectionLost, PenstockError, SourceMissing
from penstock.model import Secret
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import SEARCH_SILENCE_SECONDS_MAX, DaemonClient
from penstock.source.silent_daemons import SilentDaemons

# The timeout of a reset, whose position is looked up in the log.
_RESET_SILENCE_SECONDS_MAX = 60.0
# The timeout of a pause: the daemon may query the store of subscriptions again after a concurrent change.
_PAUSE_SILENCE_SECONDS_MAX = 15.0
# Up to this many daemons are queried at the same time, so that a page waits for one timeout only.
_ASKED_AT_ONCE_MAX = 16

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Answers:
    """The answers of the daemons that answered, and for the others the error, both by daemon URL."""

    values: dict[str, Any]
    problems: dict[str, PenstockError]


class Fleet:
    """Queries the console's daemons for one page of one user, with the user's token. Thread-safe. Every
    method waits for the daemons.

    If a daemon does not answer, `ask_all` stops asking it, because every further question would time out.
    `silent` contains the timeouts for daemons that did not answer on earlier pages.
    """

    def __init__(
        self, addresses: Sequence[DaemonAddress], token: Secret | None, silent: SilentDaemons | None = None
    ) -> None:
        self._addresses = {
            url: replace(address, token=token or Secret(""))
            for address in addresses
            for url in address.base_urls
        }
        self._silent = silent
        self._lost: dict[str, ConnectionLost] = {}

    @property
    def urls(self) -> list[str]:
        """The URLs of the daemons."""
        return list(self._addresses)

    def ask_all(self, call: str) -> Answers:
        """Send a call to every daemon: `status`, `alerts`, `subscriptions` or `account`."""

        def ask(url: str) -> dict[str, Any] | PenstockError:
            if url in self._lost:
                return self._lost[url]
            try:
                return self._with_client(url, "all", lambda client: client.ask_daemon(call))
            except PenstockError as problem:
                if isinstance(problem, ConnectionLost):
                    self._lost[url] = problem
                return problem

        if not self._addresses:
            return Answers({}, {})
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE_MAX, len(self._addresses))) as pool:
            answers = dict(zip(self._addresses, pool.map(ask, self._addresses), strict=True))
        problems = {url: value for url, value in answers.items() if isinstance(value, PenstockError)}
        return Answers({url: value for url, value in answers.items() if url not in problems}, problems)

    def ask_instance(self, url: str, instance: str, call: str, **query: str | int | None) -> dict[str, Any]:
        """Send a call about an instance to a daemon, such as `status`, `extents` or `holds`. Raises the
        daemon's errors.
        """
        return self._with_client(url, instance, lambda client: client.ask(call, **query))

    def remove_hold(self, url: str, instance: str, reader: str) -> None:
        """Remove a hold. Raises SourceMissing, AccessDenied."""
        self._with_client(url, instance, lambda client: client.delete(f"holds/{quote(reader, safe='')}"))

    def resume_capture(self, url: str, instance: str) -> None:
        """Start the capture of an instance that was set aside. Raises the daemon's errors."""
        self._with_client(url, instance, lambda client: client.send("resume", {}, _PAUSE_SILENCE_SECONDS_MAX))

    def reset_subscription(
        self, url: str, instance: str, subscription: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Set the checkpoints of a subscription, or return the effect without setting them. Raises the
        daemon's errors.
        """
        call = f"subscriptions/{quote(subscription, safe='')}/reset"
        return self._with_client(
            url, instance, lambda client: client.send(call, body, _RESET_SILENCE_SECONDS_MAX)
        )

    def pause_subscription(self, url: str, instance: str, subscription: str, *, paused: bool) -> None:
        """Pause or resume a subscription. Raises the daemon's errors."""
        call = f"subscriptions/{quote(subscription, safe='')}/{'pause' if paused else 'resume'}"
        self._with_client(url, instance, lambda client: client.send(call, {}, _PAUSE_SILENCE_SECONDS_MAX))

    def change(self, url: str, call: str, body: dict[str, Any], method: str = "POST") -> dict[str, Any]:
        """Send a change to a daemon, or a dry run of the change, and return the daemon's response.

        `call` is the path below /v1. Raises the daemon's errors.
        """
        return self._with_client(
            url, "all", lambda client: client.send_daemon(method, call, body, _RESET_SILENCE_SECONDS_MAX)
        )

    def ask_daemon(self, url: str, call: str) -> dict[str, Any]:
        """Send a call to one daemon, such as `fleet` or `jobs/orders`. Raises the daemon's errors."""
        return self._with_client(url, "all", lambda client: client.ask_daemon(call))

    def as_of(self, url: str, instance: str, table: str, moment: str, limit: int) -> dict[str, Any]:
        """Return the first rows of a table as of a moment. Raises the daemon's errors."""
        body = {"table": table, "at": moment, "limit": limit}
        return self._with_client(
            url, instance, lambda client: client.send("as-of", body, SEARCH_SILENCE_SECONDS_MAX)
        )

    def as_of_file(
        self, url: str, instance: str, table: str, moment: str, file_format: str
    ) -> Iterator[bytes]:
        """Return a file, in pieces, with all rows of a table as of a moment. Raises the daemon's errors."""
        body = {"table": table, "at": moment, "format": file_format}
        client = DaemonClient(replace(self._address(url), instance=instance), url)
        return client.pieces(client.post("as-of", body, SEARCH_SILENCE_SECONDS_MAX))

    def log_file(self, url: str, instance: str, start: str, end: str) -> tuple[int | None, Iterator[bytes]]:
        """Return the size of a range of a log as a binlog file, None if it is not known, and the file in
        pieces. Raises the daemon's errors.
        """
        client = DaemonClient(replace(self._address(url), instance=instance), url)
        return client.download("export", **{"from": start, "to": end})

    def history(self, url: str, instance: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the history of a row as the daemon returns it. Raises the daemon's errors."""
        with closing(DaemonClient(replace(self._address(url), instance=instance), url)) as client:
            yield from client.lines("history", row, SEARCH_SILENCE_SECONDS_MAX)

    def verify(self, url: str, instance: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of a verification of a log by its daemon. Raises the daemon's errors."""
        with closing(DaemonClient(replace(self._address(url), instance=instance), url)) as client:
            yield from client.lines("verify", {}, SEARCH_SILENCE_SECONDS_MAX)

    def changes(
        self, url: str, instance: str, body: dict[str, Any], silence_seconds: float
    ) -> Iterator[BatchFrame | PositionFrame]:
        """Yield the frames of one response of the daemon's `changes` call. Raises the daemon's errors."""
        with closing(DaemonClient(replace(self._address(url), instance=instance), url)) as client:
            for frame in ChangesAnswer(client, body, silence_seconds).frames():
                if isinstance(frame, BatchFrame | PositionFrame):
                    yield frame

    def _with_client(self, url: str, instance: str, work: Callable[[DaemonClient], _Answer]) -> _Answer:
        address = replace(self._address(url), instance=instance)
        with closing(DaemonClient(address, url, silent=self._silent)) as client:
            return work(client)

    def _address(self, url: str) -> DaemonAddress:
        address = self._addresses.get(url)
        if address is None:
            raise SourceMissing(
                f"{url[:200]} is not a daemon of this console", hint="Name it with --daemon when it starts"
            )
        return address
