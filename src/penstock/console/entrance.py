# SPDX-License-Identifier: Apache-2.0
"""Determines which daemons require credentials, even while they do not answer."""

from collections.abc import Sequence

from penstock.console.fleet import Answers, Fleet
from penstock.errors import AuthenticationFailed
from penstock.source.daemon_address import DaemonAddress
from penstock.source.silent_daemons import SilentDaemons


class Entrance:
    """Decides whether visitors may enter without a login.

    Thread-safe. If a daemon does not answer, its last answer is used.
    """

    def __init__(self, daemons: Sequence[DaemonAddress], silent: SilentDaemons) -> None:
        self._daemons = daemons
        self._silent = silent
        self._asks_credentials: dict[str, bool] = {}

    def ask(self) -> Answers:
        """Ask every daemon for the account of a client without credentials."""
        answers = Fleet(self._daemons, None, self._silent).ask_all("account")
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
        return tuple(url for url in Fleet(self._daemons, None).urls if url not in self._asks_credentials)
