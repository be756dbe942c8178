# SPDX-License-Identifier: Apache-2.0
import asyncio
import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from penstock.errors import AccessDenied, QuotaReached, ServerBusy
from penstock.model import TableName, TablePatterns
from penstock.serve.access import WHOLE, Access, Account, scramble411
from penstock.serve.arrivals import Arrivals
from penstock.serve.http.log import routes
from penstock.serve.served import Served
from penstock.settings.daemon import AccountSettings, ListenSettings

SEED = bytes(range(1, 9))


def access_of(listen: dict[str, Any] | None = None, *accounts: dict[str, Any]) -> Access:
    return Access.of_settings(
        ListenSettings.model_validate(listen or {}),
        [AccountSettings.model_validate(account) for account in accounts],
    )


CACHE = {"name": "cache", "token": "cache-token", "instances": ["shop"], "tables": ["shop.*"]}
SEARCH = {"name": "search", "user": "canal", "password": "canal", "subscriptions": ["canal-*"], "admin": True}


# --- Authentication ------------------------------------------------------------------------------


def test_listener_without_credentials_accepts_every_client() -> None:
    access = access_of()
    assert not access.asks("http")
    assert access.of_canal("", b"", SEED) is WHOLE


def test_token_identifies_exactly_one_account() -> None:
    access = access_of({"token": "whole-token"}, CACHE, SEARCH)
    assert access.asks("http")
    assert access.asks("canal")
    assert access.of_token("whole-token") is WHOLE
    assert (access.of_token("cache-token") or WHOLE).name == "cache"
    for wrong in ("", "whole", "whole-token ", "canal", "Cache-token", "\u00e9"):
        assert access.of_token(wrong) is None


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Bearer cache-token", "cache"),
        ("bearer  cache-token", "cache"),
        ("Basic " + base64.b64encode(b"canal:canal").decode(), "search"),
        ("Basic " + base64.b64encode(b"anyone:whole-token").decode(), "everything"),
        ("Basic " + base64.b64encode(b"other:canal").decode(), None),
        ("Basic " + base64.b64encode(b"canal:").decode(), None),
        ("Basic %%%", None),
        ("Basic /w==", None),
        ("cache-token", None),
        ("Digest cache-token", None),
        ("", None),
    ],
)
def test_authorization_header_identifies_its_account(header: str, name: str | None) -> None:
    account = access_of({"token": "whole-token"}, CACHE, SEARCH).of_authorization(header)
    assert (account and account.name) == name


def test_scramble_equals_that_of_the_mysql_protocol() -> None:
    # The published test vector: the stored hash of this password, and the answer to this seed.
    assert hashlib.sha1(hashlib.sha1(b"canal").digest()).hexdigest() == (
        "e3619321c1a937c46a0d8bd1dac39f93b27d4458"
    )
    assert scramble411(b"canal", SEED).hex() == "7de44690d8e53782cb61804a2455c284a3bbfb06"


def test_canal_password_proof_is_valid_for_one_seed_only() -> None:
    access = access_of({"token": "whole-token"}, CACHE, SEARCH)
    answer = scramble411(b"canal", SEED).hex().encode()
    for proof, user, name in [
        (answer, "canal", "search"),
        (answer.upper(), "canal", "search"),
        (scramble411(b"whole-token", SEED).hex().encode(), "anyone", "everything"),
        (answer, "other", None),
        (scramble411(b"canal", SEED[::-1]).hex().encode(), "canal", None),
        (scramble411(b"", SEED).hex().encode(), "canal", None),
        (b"canal", "canal", None),
        (b"", "canal", None),
        (b"", "", None),
        (b"\xff" * 40, "canal", None),
        (answer[:39], "canal", None),
    ]:
        account = access.of_canal(user, proof, SEED)
        assert (account and account.name) == name, (user, proof)


def test_plain_password_is_accepted_only_if_enabled() -> None:
    access = access_of({"canal_accept_plain": True}, SEARCH)
    for proof in (b"canal", scramble411(b"canal", SEED).hex().encode()):
        assert access.of_canal("canal", proof, SEED) is not None
    assert access.of_canal("canal", b"", SEED) is None
    assert access.of_canal("other", b"canal", SEED) is None


def test_one_listener_may_skip_authentication_while_others_require_it() -> None:
    access = access_of({"insecure": ["canal"], "canal": "127.0.0.1:0", "token": "whole-token"})
    assert not access.asks("canal")
    assert access.of_canal("", b"", SEED) is WHOLE
    assert access.asks("http")


def test_accounts_print_no_secret() -> None:
    access = access_of({"token": "sesame-42"}, {"name": "cache", "user": "a", "password": "sesame-42"})
    assert "sesame-42" not in repr(vars(access))


# --- The tables and columns that an account may read
# -----------------------------------------------------------------------


def account(**settings: Any) -> Account:
    account_of_token = access_of(None, {"name": "cache", "token": "t", **settings}).of_token("t")
    assert account_of_token is not None
    return account_of_token


def test_account_sees_only_its_instances_subscriptions_and_tables() -> None:
    cache = account(instances=["shop*"], subscriptions=["cache-*"], tables=["shop.*", "hr.`staff`"])
    assert cache.may_read("shop2", "cache-1")
    for instance, subscription in [("stock", None), ("shop", "search"), ("Shop", "cache-1")]:
        assert not cache.may_read(instance, subscription)
        with pytest.raises(AccessDenied, match="account cache may not read"):
            cache.readable(instance, subscription)
    tables = cache.readable("shop", "cache-1")
    assert tables.matches("shop", "orders")
    assert tables.matches("hr", "staff")
    assert not tables.matches("hr", "salaries")


def test_forbidden_names_are_refused_and_wildcards_are_narrowed() -> None:
    cache = account(tables=["shop.*"])
    for asked in (["hr.staff"], ["shop.orders", "`hr`.`staff`"]):
        with pytest.raises(AccessDenied, match="account cache may not read"):
            cache.readable("shop", None, TablePatterns(asked))
    tables = cache.readable("shop", None, TablePatterns(["*.orders"], ["shop.old_*"]))
    assert [
        tables.matches(*name.split("."))
        for name in ("shop.orders", "hr.orders", "shop.customers", "shop.old_orders")
    ] == [True, False, False, False]


def test_views_of_accounts_with_different_rights_are_never_equal() -> None:
    asked = TablePatterns(["*.orders"])
    shop, stock = (account(tables=[f"{name}.*"]).readable("shop", None, asked) for name in ("shop", "stock"))
    again = account(tables=["shop.*"]).readable("shop", None, asked)
    assert len({shop, stock, again, asked}) == 3
    assert shop == again
    assert asked != shop
    assert shop != asked
    # An account without restrictions gets the unwrapped object, so that all unrestricted accounts share their
    # pieces.
    assert account().readable("shop", None, asked) is asked


def test_raw_bytes_require_read_access_to_every_table() -> None:
    account().prove_reads_whole_log("shop")
    with pytest.raises(AccessDenied, match="raw bytes"):
        account(tables=["shop.*"]).prove_reads_whole_log("shop")
    with pytest.raises(AccessDenied, match="instance shop"):
        account(instances=["stock"]).prove_reads_whole_log("shop")


def test_odd_table_names_are_compared_exactly() -> None:
    odd = TableName("shop", "or*ders`1")
    account(tables=[odd.sql]).prove_reads_table("shop", odd)
    with pytest.raises(AccessDenied):
        account(tables=["shop.`or*ders`"]).prove_reads_table("shop", odd)


def test_only_admins_administer_and_only_within_their_rights() -> None:
    admin = account(admin=True, instances=["shop"], subscriptions=["cache"])
    admin.prove_administers("shop", "cache")
    prove: Callable[..., None]
    for prove, instance, subscription in [
        (admin.prove_administers, "stock", "cache"),
        (admin.prove_administers, "shop", "search"),
        (account().prove_administers, "shop", "cache"),
    ]:
        with pytest.raises(AccessDenied):
            prove(instance, subscription)
    assert not account().may_administer("shop")


# --- The resources that an account may use
# ------------------------------------------------------------------------


def test_requests_in_progress_are_bounded_and_released() -> None:
    cache = account(requests_max=2)
    with cache.request(), cache.request():
        with pytest.raises(QuotaReached, match="2 requests under way"), cache.request():
            pass
        assert cache.usage.requests == 2
    with pytest.raises(RuntimeError), cache.request():
        raise RuntimeError
    assert cache.usage.requests == 0


def test_bytes_are_spent_at_the_configured_rate() -> None:
    cache = account(bytes_per_second=1000)
    # After an idle period, one second's quota is available; further bytes have to wait.
    assert cache.spend(1000, now=100.0) == 0.0
    assert cache.spend(500, now=100.0) == pytest.approx(0.5)
    assert cache.spend(0, now=100.5) == 0.0
    assert cache.spend(1000, now=1000.0) == 0.0
    # For any chunk sizes, at most the rate plus one burst passes.
    now, sent = 2000.0, 0
    while now < 2010.0:
        sent += 100
        now += cache.spend(100, now)
    assert 10_000 <= sent <= 11_200


def test_account_over_its_quota_gets_a_retry_time() -> None:
    cache = account(bytes_per_second=1000)
    cache.prove_may_be_sent(now=0.0)
    cache.spend(60_000, now=0.0)
    with pytest.raises(QuotaReached):
        cache.prove_may_be_sent(now=1.0)
    seconds = cache.retry_seconds(now=1.0)
    with pytest.raises(QuotaReached):
        cache.prove_may_be_sent(now=float(seconds) - 1.0)
    cache.prove_may_be_sent(now=1.0 + seconds)


def test_account_without_a_quota_never_waits() -> None:
    assert account().spend(1 << 40, now=0.0) == 0.0
    account().prove_may_be_sent(now=0.0)


# --- The status -----------------------------------------------------------------------------


class DoubtfulInstance:
    """An instance with two databases, each of which has one table whose definition is in doubt."""

    name = "shop"

    def status(self) -> dict[str, Any]:
        return {
            "state": "running",
            "tables_in_doubt": [{"table": "shop.orders"}, {"table": "hr.wages"}],
            "process": {"pid": None, "exits": [{"why": "exit status 70", "lines": ["defect in hr.wages"]}]},
        }

    def log(self) -> Any:
        raise ServerBusy("its log is being opened")


@pytest.mark.parametrize(
    ("token", "tables"), [("cache-token", ["shop.orders"]), ("whole-token", ["shop.orders", "hr.wages"])]
)
@pytest.mark.parametrize("path", ["/v1/status", "/v1/instances/{instance}/status"])
def test_status_names_only_undefined_tables_that_the_account_may_read(
    path: str, token: str, tables: list[str]
) -> None:
    served = Served({"shop": DoubtfulInstance()}, Arrivals())
    (route,) = [route for route in routes(served) if route.path == path]
    account = access_of({"token": "whole-token"}, CACHE).of_token(token)
    scope = {"type": "http", "path_params": {"instance": "shop"}, "state": {"account": account}}
    received = iter([{"type": "http.request"}])

    async def receive() -> dict[str, Any]:
        message = next(received, None)
        # The client stays connected.
        return message if message is not None else await asyncio.Future()

    shown = json.loads(asyncio.run(route.endpoint(Request(scope, receive))).body)
    (instance,) = shown.get("instances", [shown])
    assert [doubt["table"] for doubt in instance["tables_in_doubt"]] == tables
    lines = ["defect in hr.wages"] if account.admin else []
    assert instance["process"]["exits"] == [{"why": "exit status 70", "lines": lines}]
