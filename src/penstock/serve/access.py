# SPDX-License-Identifier: Apache-2.0
"""Who may do what: accounts, how each protocol proves one, and what an account may read and use.

    access = Access.of_settings(settings.listen, settings.access)
    account = access.of_token(text)                      # or of_basic, of_canal; None: nobody we know
    tables = account.readable("shop", "orders-cache", TablePatterns("shop.*"))      # raises AccessDenied
    with account.request():                              # raises QuotaReached
        await asyncio.sleep(account.spend(len(piece), time.monotonic()))

Where no credentials are set, and at a listener that asks for none, everybody is `WHOLE`.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from starlette.requests import Request

from penstock.errors import AccessDenied, QuotaReached
from penstock.model import Secret, TableName, TablePatterns
from penstock.settings import AccountSettings, Listening, ListenSettings

# What an account may be sent at once after it was quiet, in seconds of its rate.
_BURST_SECONDS = 1.0

# Who waits for longer is told to come again, instead of being kept waiting.
_DEBT_SECONDS_MAX = 5.0

_SCRAMBLED_BYTES = 2 * hashlib.sha1(usedforsecurity=False).digest_size


class PermittedTables(TablePatterns):
    """The tables that are asked for, as far as an account may read them. Hashable, as what it narrows."""

    def __init__(self, asked: TablePatterns, permitted: TablePatterns) -> None:
        super().__init__(list(asked.include), list(asked.exclude))
        self.permitted = permitted

    def matches(self, database: str, table: str) -> bool:
        """Tell whether the table is asked for and permitted."""
        return super().matches(database, table) and self.permitted.matches(database, table)

    @property
    def selects_all(self) -> bool:
        """Whether every table is asked for and permitted."""
        return super().selects_all and self.permitted.selects_all

    def may_match_in(self, database: str) -> bool:
        """Tell whether a table of that database can be asked for and permitted."""
        return super().may_match_in(database) and self.permitted.may_match_in(database)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PermittedTables):
            return False
        return super().__eq__(other) and self.permitted == other.permitted

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.permitted))


@dataclass(frozen=True)
class Quota:
    """What an account may use: None is no bound."""

    bytes_per_second: int | None = None
    requests_max: int | None = None


@dataclass(eq=False)
class Account:
    """Somebody who is let in, what they may do, and what they use now. Belongs to the event loop."""

    name: str
    instances: tuple[str, ...] = ("*",)
    subscriptions: tuple[str, ...] = ("*",)
    tables: TablePatterns = field(default_factory=TablePatterns)
    admin: bool = False
    quota: Quota = field(default_factory=Quota)
    requests: int = 0
    _owed_bytes: float = 0.0
    _owed_at: float = 0.0

    # --- Permissions ------------------------------------------------------------------------

    def may_read(self, instance: str, subscription: str | None = None) -> bool:
        """Tell whether it may read some tables of an instance, as that subscription if one is named."""
        return _matches(instance, self.instances) and (
            subscription is None or _matches(subscription, self.subscriptions)
        )

    def may_read_table(self, database: str, table: str) -> bool:
        """Tell whether it may read a table, of an instance that it may read."""
        return self.tables.matches(database, table)

    def may_administer(self, instance: str, subscription: str | None = None) -> bool:
        """Tell whether it may reset, move, resize and delete subscriptions of an instance."""
        return self.admin and self.may_read(instance, subscription)

    def readable(
        self, instance: str, subscription: str | None = None, tables: TablePatterns | None = None
    ) -> TablePatterns:
        """Return the tables that are asked for, narrowed to what it may read. Raises AccessDenied.

        A table that is asked for by its very name is refused rather than left out in silence.
        """
        self.prove_reads(instance, subscription)
        asked = tables if tables is not None else TablePatterns()
        if not self.tables.include and not self.tables.exclude:
            return asked
        for pattern in asked.include:
            one = TablePatterns([pattern]).single()
            if one is not None and not self.tables.matches(one.database, one.table):
                raise AccessDenied(
                    f"account {self.name} may not read {one}",
                    hint=f"It may read {', '.join(self.tables.include) or 'others'}: access in penstock.yaml",
                )
        return PermittedTables(asked, self.tables)

    def prove_reads(self, instance: str, subscription: str | None = None) -> None:
        """Raise AccessDenied unless it may read the instance, as that subscription if one is named."""
        if not _matches(instance, self.instances):
            raise AccessDenied(
                f"account {self.name} may not read instance {instance}",
                hint="Add it to the account's instances: access in penstock.yaml",
            )
        if subscription is not None and not _matches(subscription, self.subscriptions):
            raise AccessDenied(
                f"account {self.name} may not read as subscription {subscription}",
                hint="Add it to the account's subscriptions: access in penstock.yaml",
            )

    def prove_reads_whole_log(self, instance: str) -> None:
        """Raise AccessDenied unless it may read raw bytes, which hold every table."""
        self.prove_reads(instance)
        if self.tables.include or self.tables.exclude:
            raise AccessDenied(
                f"account {self.name} may read some tables of {instance}, and raw bytes hold all of them",
                hint="Read decoded changes: Subscriber, tail, or POST /v1/instances/INSTANCE/changes",
            )

    def prove_reads_table(self, instance: str, name: TableName) -> None:
        """Raise AccessDenied unless it may read a table."""
        self.readable(instance, tables=TablePatterns([name.sql]))

    def prove_administers(self, instance: str, subscription: str | None = None) -> None:
        """Raise AccessDenied unless it may change subscriptions of an instance."""
        self.prove_reads(instance, subscription)
        if not self.admin:
            raise AccessDenied(
                f"account {self.name} may read {instance}, and change nothing",
                hint="Set admin: true for the account: access in penstock.yaml",
            )

    def prove_may_take_over(self, subscription: str, owner: str) -> None:
        """Raise AccessDenied where a subscription's cursor is another account's, and not this one's to take.

        An admin may take it, and an account whose `subscriptions` name it by more than a wildcard alone.
        `owner` is "" where that is not known. That the account may read as the subscription is proved before.
        """
        is_named = any(
            fnmatchcase(subscription, pattern) for pattern in self.subscriptions if pattern.strip("*")
        )
        if owner not in ("", self.name) and not (self.admin or is_named):
            raise AccessDenied(
                f"subscription {subscription} belongs to account {owner}, not to {self.name}",
                hint="Name it in the account's subscriptions, or set admin: true: access in penstock.yaml",
            )

    # --- Quotas -----------------------------------------------------------------------------

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as under way inside the block. Raises QuotaReached."""
        if self.quota.requests_max is not None and self.requests >= self.quota.requests_max:
            raise QuotaReached(
                f"account {self.name} has {self.requests} requests under way, which is all it may have",
                hint="Wait for one of them, or raise requests_max: access in penstock.yaml",
            )
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def spend(self, size: int, now: float) -> float:
        """Note that `size` bytes are sent, and return the seconds to wait before more may be."""
        rate = self.quota.bytes_per_second
        if rate is None:
            return 0.0
        self._owed_bytes = max(self._owed_bytes - (now - self._owed_at) * rate, 0.0) + size
        self._owed_at = now
        return max(self._owed_bytes / rate - _BURST_SECONDS, 0.0)

    def prove_may_be_sent(self, now: float) -> None:
        """Raise QuotaReached where what was sent before would keep a new request waiting for long."""
        wait = self.spend(0, now)
        if wait > _DEBT_SECONDS_MAX:
            raise QuotaReached(
                f"account {self.name} has used {self.quota.bytes_per_second} bytes a second for {wait:.0f} s"
                " ahead",
                hint="Come again later, or raise bytes_per_second: access in penstock.yaml",
            )

    def retry_seconds(self, now: float) -> int:
        """Return after how many seconds a request that was refused may be tried again, 1 or more."""
        return max(int(self.spend(0, now) - _DEBT_SECONDS_MAX) + 1, 1)


# Who may do everything: who has listen.token, and everybody where no credentials are set.
WHOLE = Account("everything", admin=True)


@dataclass(frozen=True)
class _Known:
    """An account with what proves it."""

    account: Account
    token: Secret | None
    user: str | None
    password: Secret | None


class Access:
    """The accounts of a daemon. Every comparison goes over all of them and takes the same time."""

    def __init__(
        self,
        known: Sequence[_Known] = (),
        open_listeners: frozenset[Listening] = frozenset(),
        *,
        canal_accept_plain: bool = False,
    ) -> None:
        self._known = tuple(known)
        self._open = open_listeners
        self._canal_accept_plain = canal_accept_plain

    @classmethod
    def of_settings(cls, listen: ListenSettings, accounts: Sequence[AccountSettings]) -> "Access":
        """Return the accounts that the settings name, their secrets read now. Raises ValueError."""
        known = [
            _Known(
                Account(
                    one.name,
                    one.instances,
                    one.subscriptions,
                    TablePatterns(list(one.tables)),
                    one.admin,
                    Quota(one.bytes_per_second, one.requests_max),
                ),
                one.token_secret(),
                one.user,
                one.password_secret(),
            )
            for one in accounts
        ]
        token = listen.secret()
        if token is not None:
            # For Canal's clients, who know no tokens, it is a password that goes with any user.
            known.append(_Known(WHOLE, token, None, token))
        return cls(
            known,
            frozenset(name for name in listen.places() if listen.asks_nobody(name)),
            canal_accept_plain=listen.canal_accept_plain,
        )

    def asks(self, listener: Listening) -> bool:
        """Tell whether a listener lets in only who is known; else everybody is `WHOLE` there."""
        return bool(self._known) and listener not in self._open

    def of_token(self, text: str) -> Account | None:
        """Return whose bearer token it is."""
        found = None
        for one in self._known:
            if _equal(text.encode(), _bytes_of(one.token)) and one.token is not None:
                found = one.account
        return found

    def of_password(self, user: str, password: str) -> Account | None:
        """Return whose user and password these are."""
        found = None
        for one in self._known:
            proved = _equal(password.encode(), _bytes_of(one.password)) and one.password is not None
            if proved and one.user in (None, user):
                found = one.account
        return found

    def of_authorization(self, header: str) -> Account | None:
        """Return who an Authorization header proves, `Bearer TOKEN` or `Basic ...`."""
        scheme, _, given = header.partition(" ")
        if scheme.lower() == "bearer":
            return self.of_token(given.strip())
        if scheme.lower() == "basic":
            try:
                user, _, password = base64.b64decode(given.strip(), validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                return None
            return self.of_password(user, password)
        return None

    def of_canal(self, user: str, given: bytes, seed: bytes) -> Account | None:
        """Return who answers Canal's handshake: `given` is the hex text that it sent for `seed`.

        With listen.canal_accept_plain the password itself is taken as well, which some clients send.
        """
        if not self.asks("canal"):
            return WHOLE
        try:
            token = bytes.fromhex(given.decode("ascii")) if len(given) == _SCRAMBLED_BYTES else b""
        except ValueError:
            token = b""
        found = None
        for one in self._known:
            proved = _equal(token, scramble411(_bytes_of(one.password), seed))
            if self._canal_accept_plain:
                proved |= _equal(given, _bytes_of(one.password))
            if proved and one.password is not None and one.user in (None, user):
                found = one.account
        return found


def scramble411(password: bytes, seed: bytes) -> bytes:
    """Return the 20 bytes that prove a password for a seed: SHA1(p) xor SHA1(seed + SHA1(SHA1(p)))."""

    def sha1(content: bytes) -> bytes:
        # The protocol's own choice.
        return hashlib.sha1(content, usedforsecurity=False).digest()

    first = sha1(password)
    return bytes(a ^ b for a, b in zip(first, sha1(seed + sha1(first)), strict=True))


def account_of(request: Request) -> Account:
    """Return who sent a request, as the guard has found."""
    account = request.state.account
    assert isinstance(account, Account), "the guard stands before every route"
    return account


def _bytes_of(secret: Secret | None) -> bytes:
    return b"" if secret is None else secret.reveal().encode()


def _equal(given: bytes, own: bytes) -> bool:
    return hmac.compare_digest(given, own)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
