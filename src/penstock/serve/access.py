# SPDX-License-Identifier: Apache-2.0
"""Access control: accounts, how each protocol authenticates them, their permissions and quotas.

    access = Access.of_settings(settings.listen, settings.access)
    account = access.of_token(text)                      # or of_basic, of_canal; None: unknown
    tables = account.readable("shop", "orders-cache", TablePatterns("shop.*"))      # raises AccessDenied
    with account.request():                              # raises QuotaReached
        await asyncio.sleep(account.spend(len(piece), time.monotonic()))

Without configured credentials, and at a listener that requires none, every client has the account `WHOLE`.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from starlette.requests import Request

from penstock.errors import AccessDenied, QuotaReached
from penstock.model import Secret, TableName, TablePatterns
from penstock.narrowed_patterns import NarrowedPatterns
from penstock.serve.masking import Masking
from penstock.serve.row_conditions import RowConditions
from penstock.serve.usage import Usage
from penstock.settings.daemon import AccountSettings, Listening, ListenSettings

# The burst that an idle account may receive at once, in seconds of its rate.
_BURST_SECONDS = 1.0

# A client that would have to wait longer is told to retry later.
_DEBT_SECONDS_MAX = 5.0

_SCRAMBLED_BYTES = 2 * hashlib.sha1(usedforsecurity=False).digest_size


@dataclass(frozen=True)
class Quota:
    """The limits of an account. None means unlimited."""

    bytes_per_second: int | None = None
    requests_max: int | None = None


@dataclass(eq=False)
class Account:
    """An authenticated client, with its permissions and current usage. Belongs to the event loop."""

    name: str
    instances: tuple[str, ...] = ("*",)
    subscriptions: tuple[str, ...] = ("*",)
    tables: TablePatterns = field(default_factory=TablePatterns)
    admin: bool = False
    quota: Quota = field(default_factory=Quota)
    metrics: bool = False
    masking: Masking = field(default_factory=Masking)
    usage: Usage = field(default_factory=Usage)
    row_conditions: RowConditions = field(default_factory=RowConditions)

    # --- Permissions ------------------------------------------------------------------------

    def may_read(self, instance: str, subscription: str | None = None) -> bool:
        """Return whether the account may read tables of an instance and, if a subscription is named, read as
        this subscription.
        """
        return _matches(instance, self.instances) and (
            subscription is None or _matches(subscription, self.subscriptions)
        )

    def may_read_table(self, database: str, table: str) -> bool:
        """Return whether the account may read a table of a readable instance."""
        return self.tables.matches(database, table)

    def may_administer(self, instance: str) -> bool:
        """Return whether the account may reset, move, resize and delete subscriptions of an instance."""
        return self.admin and self.may_read(instance)

    def readable(
        self, instance: str, subscription: str | None = None, tables: TablePatterns | None = None
    ) -> TablePatterns:
        """Return the requested tables, limited to those the account may read. Raises AccessDenied.

        A table requested by its exact name is refused rather than silently omitted.
        """
        self.prove_reads(instance, subscription)
        requested = tables if tables is not None else TablePatterns()
        if not self.tables.include and not self.tables.exclude:
            return requested
        for pattern in requested.include:
            table = TablePatterns([pattern]).single()
            if table is not None and not self.tables.matches(table.database, table.table):
                raise AccessDenied(
                    f"account {self.name} may not read {table}",
                    hint=f"It may read {', '.join(self.tables.include) or 'others'}: access in penstock.yaml",
                )
        return NarrowedPatterns(requested, self.tables)

    def prove_reads(self, instance: str, subscription: str | None = None) -> None:
        """Raise AccessDenied unless the account may read the instance and, if a subscription is named, read
        as this subscription.
        """
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
        """Raise AccessDenied unless the account may read raw bytes, which contain all tables."""
        self.prove_reads(instance)
        if not self.sees_all_values:
            raise AccessDenied(
                f"account {self.name} may read a part of {instance}, and raw bytes hold all of it",
                hint="Read decoded changes: Subscriber, tail, or POST /v1/instances/INSTANCE/changes",
            )

    def prove_reads_whole_rows(self, what: str) -> None:
        """Raise AccessDenied if columns are masked or rows are hidden. `what` names the requested content,
        which has whole rows.
        """
        self.prove_reads_every_row(what)
        if self.masking:
            raise AccessDenied(
                f"account {self.name} does not see every column, and {what} show whole rows",
                hint="Read typed changes: Subscriber, tail, or POST /v1/instances/INSTANCE/changes",
            )

    def prove_reads_every_row(self, what: str) -> None:
        """Raise AccessDenied if rows are hidden. `what` names the requested content, from which hidden rows
        cannot be removed.

        Every call that shows rows, statements or raw bytes requires this, except typed changes, which
        `row_conditions` filters.
        """
        if self.row_conditions:
            raise AccessDenied(
                f"account {self.name} does not see every row, and {what} may show the others",
                hint="Read typed changes: Subscriber, tail, or POST /v1/instances/INSTANCE/changes",
            )

    def prove_sees_columns(self, columns: Iterable[str], tables: TablePatterns, use: str) -> None:
        """Raise AccessDenied if one of the columns may be masked; `use` describes the intended use.

        Masked columns are also refused in conditions and keys, because the result of a condition reveals the
        value.
        """
        masked = self.masking.masked_among(columns, tables)
        if masked:
            raise AccessDenied(
                f"account {self.name} may not use column {masked[0]} for {use}: it is masked",
                hint="Leave it out, or select only tables where it is not masked: access in penstock.yaml",
            )

    @property
    def sees_whole_rows(self) -> bool:
        """Whether the account sees every row and column of the tables that it may read."""
        return not (self.masking or self.row_conditions)

    @property
    def sees_all_values(self) -> bool:
        """Whether the account sees every table, row and column of the instances that it may read."""
        return self.sees_whole_rows and not (self.tables.include or self.tables.exclude)

    def prove_reads_table(self, instance: str, name: TableName) -> None:
        """Raise AccessDenied unless the account may read a table."""
        self.readable(instance, tables=TablePatterns([name.sql]))

    def prove_administers(self, instance: str, subscription: str | None = None) -> None:
        """Raise AccessDenied unless the account may change subscriptions of an instance."""
        self.prove_reads(instance, subscription)
        if not self.admin:
            raise AccessDenied(
                f"account {self.name} may read {instance}, and change nothing",
                hint="Set admin: true for the account: access in penstock.yaml",
            )

    def prove_defines(self, instance: str) -> None:
        """Raise AccessDenied unless the account may set definitions of an instance's tables."""
        self.prove_administers(instance)
        if not self.sees_whole_rows:
            raise AccessDenied(
                f"account {self.name} does not see every value, and a definition decides which values have"
                " the name of a column",
                hint="Use an admin account without masked, columns and where: access in penstock.yaml",
            )

    def prove_administers_all(self, instances: Iterable[str], what: str) -> None:
        """Raise AccessDenied unless the account may change everything; `what` describes the request."""
        hidden = [name for name in instances if not self.may_administer(name)]
        if hidden or not self.sees_all_values:
            raise AccessDenied(
                f"account {self.name} may not see {what}, which may name any instance and table",
                hint="Set admin: true for the account, without instances, tables, masked, columns and"
                " where: access in penstock.yaml",
            )

    def may_read_metrics(self) -> bool:
        """Return whether the account may read the metrics of all instances, tables and readers."""
        return self.metrics or self.admin

    def prove_reads_metrics(self) -> None:
        """Raise AccessDenied unless the account may read the metrics."""
        if not self.may_read_metrics():
            raise AccessDenied(
                f"account {self.name} may not read the metrics, which name all instances and readers",
                hint="Set metrics: true for the account: access in penstock.yaml",
            )

    def prove_may_take_over(self, subscription: str, owner: str) -> None:
        """Raise AccessDenied if a subscription belongs to another account and the client's account may not
        take it over.

        An admin may take it over, and so may an account with a matching pattern in `subscriptions`, unless
        the pattern is only a wildcard. `owner` is "" if unknown. The caller has already checked that the
        account may read as the subscription.
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
        """Count a request as running inside the block. Raises QuotaReached."""
        allowed = self.quota.requests_max
        if not self.usage.begin_request(allowed):
            raise QuotaReached(
                f"account {self.name} has {allowed} requests under way, which is all it may have",
                hint="Wait for one of them, or raise requests_max: access in penstock.yaml",
            )
        try:
            yield
        finally:
            self.usage.end_request()

    def spend(self, size: int, now: float) -> float:
        """Count `size` sent bytes, and return the seconds to wait before sending more."""
        rate = self.quota.bytes_per_second
        if rate is None:
            return 0.0
        return max(self.usage.spend(size, rate, now) / rate - _BURST_SECONDS, 0.0)

    def prove_may_be_sent(self, now: float) -> None:
        """Raise QuotaReached if earlier sends would delay a new request for too long."""
        wait = self.spend(0, now)
        if wait > _DEBT_SECONDS_MAX:
            raise QuotaReached(
                f"account {self.name} has used {self.quota.bytes_per_second} bytes a second for {wait:.0f} s"
                " ahead",
                hint="Try again later, or raise bytes_per_second: access in penstock.yaml",
            )

    def retry_seconds(self, now: float) -> int:
        """Return the seconds after which a refused request may be retried, at least 1."""
        return max(int(self.spend(0, now) - _DEBT_SECONDS_MAX) + 1, 1)


# The account of clients that present listen.token, and of all clients if no credentials are configured.
WHOLE = Account("everything", admin=True)


@dataclass(frozen=True)
class _Credentials:
    """An account with its credentials."""

    account: Account
    token: Secret | None
    user: str | None
    password: Secret | None


class Access:
    """The accounts of a daemon.

    Every check compares the credentials with those of all accounts, so that it takes the same time whichever
    account matches.
    """

    def __init__(
        self,
        known: Sequence[_Credentials] = (),
        open_listeners: frozenset[Listening] = frozenset(),
        *,
        canal_accept_plain: bool = False,
    ) -> None:
        self._known = tuple(known)
        self._open = open_listeners
        self._canal_accept_plain = canal_accept_plain

    @classmethod
    def of_settings(
        cls,
        listen: ListenSettings,
        accounts: Sequence[AccountSettings],
        usage_of: Callable[[int], Usage] = lambda index: Usage(),
    ) -> "Access":
        """Return the accounts of the settings, reading their secrets. Raises ValueError.

        `usage_of` returns the usage of an account by its index, if other processes use the accounts too.
        """
        known = [
            _Credentials(
                Account(
                    settings.name,
                    settings.instances,
                    settings.subscriptions,
                    TablePatterns(list(settings.tables)),
                    settings.admin,
                    Quota(settings.bytes_per_second, settings.requests_max),
                    settings.metrics,
                    Masking.of_settings(settings.masked, settings.columns),
                    usage_of(index),
                    RowConditions.of_settings(settings.where),
                ),
                settings.token_secret(),
                settings.user,
                settings.password_secret(),
            )
            for index, settings in enumerate(accounts)
        ]
        token = listen.secret()
        if token is not None:
            # Canal clients have no tokens. For Canal clients, the token is a password that works with any
            # user.
            known.append(_Credentials(WHOLE, token, None, token))
        return cls(
            known,
            frozenset(name for name in listen.addresses() if listen.is_open(name)),
            canal_accept_plain=listen.canal_accept_plain,
        )

    def asks(self, listener: Listening) -> bool:
        """Return whether a listener requires authentication. If it does not, every client has the account
        `WHOLE`.
        """
        return bool(self._known) and listener not in self._open

    def of_token(self, text: str) -> Account | None:
        """Return the account with a bearer token."""
        account = None
        for known in self._known:
            if _equal(text.encode(), _bytes_of(known.token)) and known.token is not None:
                account = known.account
        return account

    def of_password(self, user: str, password: str) -> Account | None:
        """Return the account with a user and password."""
        account = None
        for known in self._known:
            proved = _equal(password.encode(), _bytes_of(known.password)) and known.password is not None
            if proved and known.user in (None, user):
                account = known.account
        return account

    def of_authorization(self, header: str) -> Account | None:
        """Return the account proved by an Authorization header, `Bearer TOKEN` or `Basic ...`."""
        scheme, _, credentials = header.partition(" ")
        if scheme.lower() == "bearer":
            return self.of_token(credentials.strip())
        if scheme.lower() == "basic":
            try:
                user, _, password = (
                    base64.b64decode(credentials.strip(), validate=True).decode().partition(":")
                )
            except (binascii.Error, UnicodeDecodeError):
                return None
            return self.of_password(user, password)
        return None

    def of_canal(self, user: str, proof: bytes, seed: bytes) -> Account | None:
        """Return the account whose token matches a client's answer to Canal's handshake. `proof` is the
        client's answer to `seed`, as hex text.

        With listen.canal_accept_plain, the password itself is accepted too, because some clients send the
        password.
        """
        if not self.asks("canal"):
            return WHOLE
        try:
            token = bytes.fromhex(proof.decode("ascii")) if len(proof) == _SCRAMBLED_BYTES else b""
        except ValueError:
            token = b""
        account = None
        for known in self._known:
            proved = _equal(token, scramble411(_bytes_of(known.password), seed))
            if self._canal_accept_plain:
                proved |= _equal(proof, _bytes_of(known.password))
            if proved and known.password is not None and known.user in (None, user):
                account = known.account
        return account


def scramble411(password: bytes, seed: bytes) -> bytes:
    """Return the 20 bytes that prove a password for a seed: SHA1(p) xor SHA1(seed + SHA1(SHA1(p)))."""

    def sha1(content: bytes) -> bytes:
        # The protocol prescribes SHA-1.
        return hashlib.sha1(content, usedforsecurity=False).digest()

    first = sha1(password)
    return bytes(a ^ b for a, b in zip(first, sha1(seed + sha1(first)), strict=True))


def account_of(request: Request) -> Account:
    """Return the account of a request, as set by the guard."""
    account = request.state.account
    assert isinstance(account, Account), "the guard stands before every route"
    return account


def _bytes_of(secret: Secret | None) -> bytes:
    return b"" if secret is None else secret.reveal().encode()


def _equal(received: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(received, expected)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
