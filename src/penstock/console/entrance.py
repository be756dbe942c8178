# SPDX-License-Identifier: Apache-2.0
"""Determines which daemons require credentials, even while they do not answer."""

from collections.abc import Sequence

from penstock.console.fleet import Answers, Fleet
from penstock.errors import AuthenticationFailed
from penstock.source.daemon_address import DaemonAddress


class Entrance:
    """Decides whether visitors without a login may enter. Thread-safe.

    For a daemon that does not answer, its last answer counts.
    """

    def __init__(self, daemons: Sequence[DaemonAddress]) -> None:
        self._fleet = Fleet(daemons, None)
        self._asks_credentials: dict[str, bool] = {}

    def ask(self) -> Answers:
        """Ask every daemon for the account of a client without credentials."""
        answers = self._fleet.ask_all("account")
        for url in answers.values:
            self._asks_credentials[url] = False
        for url, problem in answers.problems.items():
            if isinstance(problem, AuthenticationFailed):
                self._asks_credentials[url] = True
        return answers

    def prove_open(self) -> None:
        """Raise AuthenticationFailed if a daemon requires credentials."""
        if any(self._asks_credentials.values()):
            raise AuthenticationFailed("log in with the token of an account")

    @property
    def unknown(self) -> tuple[str, ...]:
        """The URLs of the daemons that have not answered yet."""
        return tuple(url for url in self._fleet.urls if url not in self._asks_credentials)
