# SPDX-License-Identifier: Apache-2.0
"""Browser sessions: the account that has logged in, the expiry, and the token against forged requests.

A session holds its user's token only in memory. Its cookie is random and carries no information.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import QuotaReached
from penstock.model import Secret

COOKIE = "penstock_console"

_SECONDS_MAX = 12 * 3600.0
_SESSIONS_MAX = 1000
# The maximum number of failed logins from one address, so that nobody can guess tokens. Users at other
# addresses can still log in.
_FAILURES_MAX = 20
_FAILURES_SECONDS = 60.0
# How long the last reported rights of a user apply while no daemon answers, which may mean that the account
# was removed in the meantime.
_UNCONFIRMED_SECONDS_MAX = 300.0


@dataclass
class Session:
    """A browser that has logged in as an account. `confirmed` is when a daemon last accepted its token."""

    account: str
    token: Secret
    began: float
    used: float
    confirmed: float
    # Each daemon's last answer about the account.
    accounts: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Sessions:
    """The sessions of a console. Thread-safe. `clock` is monotonic seconds.

    A session ends after `idle_seconds` without use.
    """

    def __init__(self, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._failures: list[tuple[str, float]] = []
        self._key = secrets.token_bytes(32)

    def new_id(self) -> str:
        """Return an id for a browser that has none."""
        return secrets.token_urlsafe(32)

    def forgery_token(self, identity: str) -> str:
        """Return the secret token for a browser's forms, which other sites cannot know."""
        return hmac.new(self._key, identity.encode(), hashlib.sha256).hexdigest()

    def proves(self, identity: str, token: str) -> bool:
        """Return whether a form comes from a page of this console in this browser."""
        return hmac.compare_digest(self.forgery_token(identity).encode(), token.encode())

    def get(self, identity: str, *, is_use: bool) -> Session | None:
        """Return the session of a browser, None if it has not logged in or was idle for too long.

        A request that a page makes by itself does not count as use.
        """
        with self._lock:
            session, now = self._sessions.get(identity), self._clock()
            if session is None:
                return None
            if now - session.used > self._idle_seconds or now - session.began > _SECONDS_MAX:
                del self._sessions[identity]
                return None
            if is_use:
                session.used = now
            return session

    def is_confirmed(self, session: Session, *, is_accepted: bool) -> bool:
        """Return whether a daemon has accepted the token of a session recently, now if it `is_accepted`."""
        with self._lock:
            now = self._clock()
            if is_accepted:
                session.confirmed = now
            return now - session.confirmed <= _UNCONFIRMED_SECONDS_MAX

    def prove_may_try(self, client: str) -> None:
        """Raise QuotaReached after too many failed logins from the address of a client."""
        with self._lock:
            now = self._clock()
            self._failures = [failure for failure in self._failures if now - failure[1] < _FAILURES_SECONDS]
            if sum(address == client for address, _ in self._failures) >= _FAILURES_MAX:
                raise QuotaReached("too many logins have failed", hint="Try again in a minute")

    def count_failure(self, client: str) -> None:
        """Count a failed login from the address of a client."""
        with self._lock:
            self._failures.append((client, self._clock()))

    def begin(self, account: str, token: Secret) -> str:
        """Begin a session and return its id, which is always new."""
        identity, now = self.new_id(), self._clock()
        with self._lock:
            if len(self._sessions) >= _SESSIONS_MAX:
                oldest = min(self._sessions, key=lambda known: self._sessions[known].used)
                del self._sessions[oldest]
            self._sessions[identity] = Session(account, token, now, now, now)
        return identity

    def end(self, identity: str) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(identity, None)
