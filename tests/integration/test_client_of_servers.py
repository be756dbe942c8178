# SPDX-License-Identifier: Apache-2.0
"""Subscribers that read a database server by themselves, without a daemon."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.client import AsyncSubscriber, ChangeBatch, Subscriber
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscriptions
from penstock.errors import OptionInvalid, PositionInvalid, PositionPurged
from penstock.model import ServerAddress
from tests.support.capture.replicas import replica_of
from tests.support.daemon.subscribing import SESSION_SECONDS, Running
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import wait_until
from tools.servers import Server
from tools.servers.proxy import Proxy

_GUARD = (
    "tests/integration/test_client_of_servers.py::test_changes_reach_their_shards_in_order_after_a_restart"
)


@dataclass
class ServerOrders:
    """A table of orders on a server, and subscribers to it that keep their positions in one file."""

    server: Server
    database: str
    state: Path
    table: str = field(init=False)

    def __post_init__(self) -> None:
        self.table = f"{self.database}.orders"
        self.server.sql(f"CREATE TABLE {self.table} (id INT PRIMARY KEY, customer INT, step INT)")

    def insert(self, *ids: int, step: int = 0) -> None:
        values = ", ".join(f"({id_}, {id_ % 10}, {step})" for id_ in ids)
        self.server.sql(f"INSERT INTO {self.table} VALUES {values}")

    def words(self, **options: Any) -> dict[str, Any]:
        known = {"name": "cache", "tables": [self.table], "session_seconds": SESSION_SECONDS}
        return {**known, "state": self.state, **options}

    def subscriber(self, **options: Any) -> Subscriber:
        return Subscriber(self.server.url("root"), **self.words(**options))

    def rows_of(self, count: int, **options: Any) -> list[tuple[int, int, int]]:
        """Return the next rows of a subscriber, and stop it."""
        with Running(self.subscriber(**options)) as running:
            running.wait_for(count)
        return running.rows

    def checkpoint(self) -> Checkpoint:
        """Return the stored position of the first shard."""
        store = open_store(f"sqlite://{self.state}")
        registry = Subscriptions(store)
        subscription = registry.get(ServerAddress.parse(self.server.url("root")).name, "cache")
        assert subscription is not None
        checkpoint = registry.shards(subscription)[0].state.checkpoint
        store.close()
        assert checkpoint is not None
        return checkpoint


@pytest.fixture(params=["mysql", "mariadb"])
def orders(request: pytest.FixtureRequest, fresh_database: FreshDatabase, tmp_path: Path) -> ServerOrders:
    server = request.getfixturevalue(f"{request.param}_server")
    return ServerOrders(server, fresh_database(server), tmp_path / "orders.db")


@pytest.mark.deep_flavors("mariadb")
def test_changes_reach_their_shards_in_order_after_a_restart(orders: ServerOrders) -> None:
    with Running(orders.subscriber(shards=3)) as running:
        running.wait_owning(3)
        orders.insert(*range(12))
        for step in (1, 2):
            orders.server.sql(f"UPDATE {orders.table} SET step = {step} WHERE id % 2 = 0")
        orders.server.sql(f"DELETE FROM {orders.table} WHERE id = 1; FLUSH BINARY LOGS")
        running.wait_for(12 + 2 * 6 + 1)
    steps, shards = defaultdict(list), defaultdict(set)
    for shard, key, step in running.rows:
        steps[key].append(step)
        shards[key].add(shard)
    assert steps[1] == [0, 0]
    assert all(steps[key] == [0, 1, 2] for key in range(0, 12, 2))
    assert all(len(owners) == 1 for owners in shards.values())
    # The next rows have another table definition and are in another file.
    orders.server.sql(f"ALTER TABLE {orders.table} ADD note VARCHAR(9) DEFAULT 'new' AFTER customer")
    orders.server.sql(f"INSERT INTO {orders.table} (id, customer, step) VALUES (100, 0, 7)")
    assert [row[1:] for row in orders.rows_of(1, shards=3)] == [(100, 7)]
    checkpoint = orders.checkpoint()
    assert checkpoint.fingerprint
    assert checkpoint.gtid_set


@pytest.mark.deep(
    guard="tests/integration/test_client_of_servers.py::test_changes_reach_their_shards_in_order_after_a_restart"
)
def test_filters_acks_and_rollbacks_are_those_of_a_daemons_subscriber(orders: ServerOrders) -> None:
    batches: list[ChangeBatch] = []
    options = {"where": "customer = 3", "columns": ["id", "step"], "changes": ["insert", "update"]}
    subscriber = orders.subscriber(begin="latest", ack="manual", **options)
    with Running(subscriber, batches.append) as running:
        running.wait_owning(1)
        orders.insert(3, 4, 13)
        orders.server.sql(f"UPDATE {orders.table} SET step = 1; DELETE FROM {orders.table} WHERE id = 3")
        running.wait_for(4)
        subscriber.rollback()
        running.wait_for(8)
    assert running.rows[4:] == running.rows[:4]
    assert [row[1:] for row in running.rows[:4]] == [(3, 0), (13, 0), (3, 1), (13, 1)]
    assert "customer" not in batches[0].to_arrow().schema.names


@pytest.mark.deep(
    guard="tests/integration/test_client_of_servers.py::test_changes_reach_their_shards_in_order_after_a_restart"
)
def test_loop_of_asyncio_reads_a_server(orders: ServerOrders) -> None:
    orders.insert(1, 2)

    async def consume() -> list[int]:
        words = orders.words(begin="earliest")
        async with AsyncSubscriber(orders.server.url("root"), **words) as subscriber:
            async for batch in subscriber:
                return [row.after["id"] for row in batch.rows() if row.after is not None]
        return []

    assert asyncio.run(consume()) == [1, 2]


def test_token_and_two_stores_are_refused() -> None:
    with pytest.raises(OptionInvalid, match="a token is for a daemon"):
        Subscriber("mysql://root@127.0.0.1:1", name="cache", token="secret")
    with pytest.raises(OptionInvalid, match="name two stores"):
        Subscriber("mysql://root@127.0.0.1:1", name="cache", state="a.db", coordination="sqlite:///b.db")


@pytest.fixture
def own_orders(start_server: StartServer, tmp_path: Path) -> Callable[[str], ServerOrders]:
    """Orders on a server whose log a test may purge or reset."""

    def start(flavor: str) -> ServerOrders:
        server = start_server(flavor)
        server.sql("CREATE DATABASE d")
        return ServerOrders(server, "d", tmp_path / "orders.db")

    return start


@pytest.mark.deep(
    guard="tests/integration/test_client_of_servers.py::test_changes_reach_their_shards_in_order_after_a_restart"
)
@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_purged_and_reset_logs_end_the_subscriber_by_name(
    flavor: str, own_orders: Callable[[str], ServerOrders]
) -> None:
    orders = own_orders(flavor)
    with Running(orders.subscriber()) as running:
        running.wait_owning(1)
        orders.insert(1)
        running.wait_for(1)
    orders.server.sql("FLUSH BINARY LOGS; FLUSH BINARY LOGS")
    newest = orders.server.sql("SHOW BINARY LOGS")[-1][0]

    def is_purged() -> bool:
        # A server keeps files that one of its dump threads has open.
        orders.server.sql(f"PURGE BINARY LOGS TO '{newest}'")
        return len(orders.server.sql("SHOW BINARY LOGS")) == 1

    wait_until(is_purged)
    with pytest.raises(PositionPurged):
        orders.subscriber().run(lambda batch: None)
    with Running(orders.subscriber(start="latest")) as running:
        running.wait_owning(1)
        orders.insert(2)
        running.wait_for(1)
    with Running(orders.subscriber()) as running:
        running.wait_owning(1)
        orders.server.sql("RESET MASTER" if flavor == "mariadb" else "RESET BINARY LOGS AND GTIDS")
        with pytest.raises(PositionInvalid):
            running.wait_until(lambda: False)
        running.failure = None
    with pytest.raises(PositionInvalid):
        orders.subscriber().run(lambda batch: None)


@pytest.mark.deep(
    guard="tests/integration/test_client_of_servers.py::test_changes_reach_their_shards_in_order_after_a_restart"
)
@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_lost_connections_and_a_fail_over_lose_and_reorder_nothing(
    flavor: str, own_orders: Callable[[str], ServerOrders], start_server: StartServer
) -> None:
    orders = own_orders(flavor)
    other = replica_of(orders.server, start_server)
    with Proxy(orders.server.port) as address:
        subscriber = Subscriber(address.through(orders.server.url("root")), **orders.words(shards=2))

        def has_all(step: int) -> bool:
            newest = {key: row_step for _, key, row_step in running.rows}
            return newest == dict.fromkeys(range(20), step)

        with Running(subscriber) as running:
            running.wait_owning(2)
            orders.insert(*range(20))
            for step in range(1, 4):
                address.cut_after(2_000, times=3)
                orders.server.sql(f"UPDATE d.orders SET step = {step}")
                running.wait_until(lambda step=step: has_all(step))
            address.disarm()
            wait_until(lambda: other.sql("SELECT MIN(step) FROM d.orders")[0][0] == 3)
            # From now on, the address belongs to the other server.
            address.server_port = other.port
            address.cut()
            for step in range(4, 6):
                other.sql(f"UPDATE d.orders SET step = {step}")
                running.wait_until(lambda step=step: has_all(step))
    steps = defaultdict(list)
    for _, key, step in running.rows:
        steps[key].append(step)
    assert all(history == sorted(history) and set(history) == set(range(6)) for history in steps.values())
    versions = [
        batch.to_arrow()["_commit_version"].to_pylist() for batch in running.batches if not batch.shard
    ]
    flat = [version for batch in versions for version in batch]
    assert flat == sorted(flat), "commit versions increase across the change of servers"
