# SPDX-License-Identifier: Apache-2.0
"""A Canal client belongs to the account that subscribed it first; operators neither pause nor narrow it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.subscription_record import AS_MEMBERS_ASK, Subscription, Subscriptions
from penstock.errors import AccessDenied, OptionInvalid
from penstock.logstore.log import Log
from penstock.serve.access import WHOLE, Account
from tests.support.canal.client import CanalClient, Refused
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving

TOKEN = "a-token"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "owner", "user": "owner", "password": "owner"},
    {"name": "other", "user": "other", "password": "other"},
    {"name": "named", "user": "named", "password": "named", "subscriptions": ["canal-10*"]},
    {"name": "admin", "user": "admin", "password": "admin", "admin": True},
]


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[MemoryStore]:
    store = MemoryStore(request.node.name)
    yield store
    store.close()


@pytest.fixture
def daemon(log: Log, store: MemoryStore) -> Iterator[ServedLog]:
    with serving(log, {"canal": "127.0.0.1:0", "token": TOKEN}, ACCOUNTS, store) as daemon:
        yield daemon


def log_in(daemon: ServedLog, user: str) -> CanalClient:
    return CanalClient(daemon.port("canal"), INSTANCE).log_in(user, TOKEN if user == "token" else user)


def subscription(store: MemoryStore) -> Subscription | None:
    return Subscriptions(store).get(INSTANCE, "canal-1001")


def refused_acknowledgement(client: CanalClient) -> None:
    """Acknowledge, and return the error; a successful acknowledgement has no answer."""
    client.ack(1)
    client.expect_ack()


@pytest.mark.deep(
    guard="tests/unit/test_canal_ownership.py::test_client_of_another_account_can_be_neither_taken_over_nor_deleted",
    keep=("unsubscribe",),
)
@pytest.mark.parametrize(
    "ask", [CanalClient.subscribe, CanalClient.unsubscribe, CanalClient.get, refused_acknowledgement]
)
def test_client_of_another_account_can_be_neither_taken_over_nor_deleted(
    daemon: ServedLog, store: MemoryStore, ask: Callable[[CanalClient], object]
) -> None:
    with log_in(daemon, "owner").subscribe() as client:
        batch_id, acknowledged = client.get()
        with log_in(daemon, "other") as other:
            with pytest.raises(Refused, match="belongs to account owner, not to other"):
                ask(other)
            # The connection stays open for a client that its account owns.
            other.client_id = "1002"
            other.subscribe()
        client.ack(batch_id)
        # The first batch may end before the log does, but none of its entries is delivered again.
        _, following = client.get()
        assert acknowledged
        assert not set(acknowledged) & set(following)
    with log_in(daemon, "other") as other, pytest.raises(Refused, match="belongs to account owner"):
        ask(other)
    assert subscription(store) is not None


@pytest.mark.deep(
    guard="tests/unit/test_canal_ownership.py::test_account_with_rights_takes_over_and_deletes_a_client",
    keep=("named",),
)
@pytest.mark.parametrize("user", ["owner", "named", "admin", "token"])
def test_account_with_rights_takes_over_and_deletes_a_client(
    daemon: ServedLog, store: MemoryStore, user: str
) -> None:
    with log_in(daemon, "owner").subscribe() as client:
        assert client.get()[0] == 1
        with log_in(daemon, user).subscribe() as taking:
            assert taking.get()[0] == 2
            with pytest.raises((EOFError, ConnectionError)):
                client.get()
            # The client still belongs to the account that subscribed it first.
            with log_in(daemon, "other") as other, pytest.raises(Refused, match="belongs to account owner"):
                other.subscribe()
            taking.unsubscribe()
        assert subscription(store) is None
        with log_in(daemon, "other").subscribe() as other:
            other.unsubscribe()


def test_client_without_a_recorded_account_belongs_to_the_first_account_that_connects(
    daemon: ServedLog, store: MemoryStore
) -> None:
    Subscriptions(store).create(Subscription(INSTANCE, "canal-1001"))
    with (
        log_in(daemon, "other").subscribe(),
        log_in(daemon, "owner") as late,
        pytest.raises(Refused, match="belongs to account other"),
    ):
        late.subscribe()


def test_without_accounts_any_connection_may_take_over_a_client(log: Log, store: MemoryStore) -> None:
    with serving(log, {"canal": "127.0.0.1:0"}, store=store) as daemon:
        port = daemon.port("canal")
        with (
            CanalClient(port, INSTANCE).log_in("a").subscribe(),
            CanalClient(port, INSTANCE).log_in("b").subscribe() as other,
        ):
            assert other.get()[0] == 1


def test_canal_client_can_be_neither_paused_nor_narrowed(daemon: ServedLog, store: MemoryStore) -> None:
    registry = Subscriptions(store)
    with log_in(daemon, "owner").subscribe() as client:
        with pytest.raises(OptionInvalid, match="is a Canal client"):
            registry.pause(INSTANCE, "canal-1001", paused=True)
        with pytest.raises(OptionInvalid, match="is a Canal client"):
            registry.select(INSTANCE, "canal-1001", lambda current: replace(current, where="id = 1"))
        assert client.get()[0] == 1
    registry.pause(INSTANCE, "canal-1001", paused=False)
    registry.select(INSTANCE, "canal-1001", lambda current: AS_MEMBERS_ASK)


def test_canal_client_whose_cursor_was_changed_before_it_connects_is_refused(
    daemon: ServedLog, store: MemoryStore
) -> None:
    registry = Subscriptions(store)
    # A cursor that `penstock migrate canal` has carried over.
    registry.create(Subscription(INSTANCE, "canal-1001"))
    registry.pause(INSTANCE, "canal-1001", paused=True)
    registry.select(INSTANCE, "canal-1001", lambda current: replace(current, changes=("insert",)))
    with log_in(daemon, "owner") as client, pytest.raises(Refused, match="is paused"):
        client.subscribe()
    registry.pause(INSTANCE, "canal-1001", paused=False)
    with log_in(daemon, "owner") as client, pytest.raises(Refused, match="has a selection"):
        client.subscribe()
    registry.select(INSTANCE, "canal-1001", lambda current: AS_MEMBERS_ASK)
    with log_in(daemon, "owner").subscribe() as client:
        assert client.get()[0] == 1


@pytest.mark.parametrize("patterns", [("*",), ("**",), ("cache-*",)])
def test_wildcard_alone_does_not_name_a_subscription(patterns: tuple[str, ...]) -> None:
    account = Account("b", subscriptions=patterns)
    with pytest.raises(AccessDenied, match="belongs to account a"):
        account.prove_may_take_over("canal-1001", "a")
    account.prove_may_take_over("canal-1001", "b")
    account.prove_may_take_over("canal-1001", "")
    WHOLE.prove_may_take_over("canal-1001", "a")
    Account("c", subscriptions=("canal-*",)).prove_may_take_over("canal-1001", "a")
