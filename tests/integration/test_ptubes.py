# SPDX-License-Identifier: Apache-2.0
"""The Ptubes port on real servers: every change once, in its shard, from any position."""

import http.client
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.capture.captured_log import head_of, rotate
from tests.support.daemon.process import DaemonProcess
from tests.support.ptubes.client import EARLIEST, LATEST, normal
from tests.support.ptubes.packet import shards_of
from tests.support.ptubes.shop import (
    DELETE,
    END,
    HEARTBEAT,
    INSERT,
    QUERY,
    ROWS,
    UPDATE,
    Shop,
    make_shop,
    of_kind,
    start_daemon,
)
from tests.support.suite.patience import wait_for_next_second
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory, server_of: Callable[[str], Server]) -> Iterator[Any]:
    running: dict[str, DaemonProcess] = {}

    def get(flavor: str) -> DaemonProcess:
        if flavor not in running:
            running[flavor] = start_daemon(server_of(flavor), tmp_path_factory.mktemp(flavor))
        return running[flavor]

    yield get
    for daemon in running.values():
        daemon.kill()


@pytest.fixture
def shop_of(
    daemons: Callable[[str], DaemonProcess],
    server_of: Callable[[str], Server],
    fresh_database: Callable[[Server], str],
) -> Callable[[str], Shop]:
    def make(flavor: str) -> Shop:
        server = server_of(flavor)
        daemon = daemons(flavor)
        return make_shop(server, daemon, fresh_database(server))

    return make


@pytest.fixture(params=["mysql", "mariadb"])
def shop(request: pytest.FixtureRequest, shop_of: Callable[[str], Shop]) -> Shop:
    return shop_of(request.param)


@pytest.fixture
def one_shop(shop_of: Callable[[str], Shop]) -> Shop:
    return shop_of("mariadb")


def event_order(event: Any) -> tuple[int, int, int]:
    at = event.header.checkpoint
    return at.binlogFile, at.binlogOffset, at.eventIndex


def values(columns: Any) -> dict[str, str | None]:
    return {name: None if column.isNull else column.value for name, column in columns.items()}


def replay(events: list[Any]) -> dict[str, dict[str, str | None]]:
    """Return the rows of a table after its events, by primary key."""
    rows: dict[str, dict[str, str | None]] = {}
    for event in events:
        before, after = values(event.rowData.beforeColumns), values(event.rowData.afterColumns)
        if event.eventType == INSERT:
            assert not before
            assert after["id"] not in rows
        else:
            assert rows.pop(str(before["id"])) == before
        if event.eventType == DELETE:
            assert not after
        else:
            rows[str(after["id"])] = after
    return rows


def slot(key: int) -> int:
    """Return the slot of a small positive integer, by the rule: 31 * (31 * 1 + 0) + key."""
    return (31 * 31 + key) % 32_767


# --- Every change, once ---------------------------------------------------------------------


def test_all_shards_together_are_the_table(shop: Shop) -> None:
    clients = [shop.client(shards=of, shard_count=5, task=f"t{of[0]}") for of in ((0, 3), (1,), (2, 4))]
    for client in clients:
        assert client.subscribe(LATEST) == "success"
    numbers = ", ".join(f"({at}, 'c{at % 7}', {at})" for at in range(1, 301))
    shop.sql(f"INSERT INTO orders VALUES {numbers}")
    for at in range(1, 100, 10):
        shop.sql(f"UPDATE orders SET amount = amount + 1000 WHERE id BETWEEN {at} AND {at + 4}")
    shop.sql("DELETE FROM orders WHERE id > 250")
    received: list[Any] = []
    for client in clients:
        shop.read_all(client, batch=40)
        client.close()
        for shard, events in client.events.items():
            assert shard in client.config["partitionClusterInfo"]["partitionSet"]
            assert [event_order(event) for event in events] == sorted(event_order(event) for event in events)
            for event in of_kind(events, *ROWS):
                image = event.rowData.afterColumns or event.rowData.beforeColumns
                assert slot(int(image["id"].value)) % 5 == shard
                received.append(event)
        # Every shard receives every commit that is not immediately followed by another commit.
        assert len({len(of_kind(events, END)) for events in client.events.values()}) == 1
    received.sort(key=event_order)
    assert len({event_order(event) for event in received}) == len(received) == 300 + 50 + 50
    rows = shop.server.sql(f"SELECT id, customer, amount FROM {shop.table}")
    assert replay(received) == {
        str(key): {"id": str(key), "customer": customer, "amount": str(amount)}
        for key, customer, amount in rows
    }


def test_event_has_the_fields_of_ptubes(one_shop: Shop) -> None:
    shop = one_shop
    with shop.client() as client:
        client.subscribe(LATEST)
        started = time.time()
        shop.sql("INSERT INTO orders VALUES (7, 'ann', NULL)")
        shop.read_all(client)
    row, end = client.events[0]
    assert (row.eventType, end.eventType) == (INSERT, END)
    assert (row.header.tableName, row.header.primaryKey, row.header.partitionKey) == (shop.table, "id", "id")
    assert row.header.encode == "PROTOCOL_BUFFER"
    columns = row.rowData.afterColumns
    assert {
        name: (column.index, column.mysqlType, column.isKey, column.isNull, column.value)
        for name, column in columns.items()
    } == {
        "id": (0, "BIGINT", True, False, "7"),
        "customer": (1, "VARCHAR", False, False, "ann"),
        "amount": (2, "INT", False, True, ""),
    }
    at = row.header.checkpoint
    (server_id,) = shop.server.sql("SELECT @@server_id")[0]
    assert at.serverId == server_id
    # The server logs whole seconds.
    assert int(started) <= at.timestamp / 1000 <= time.time()
    assert (at.eventIndex, end.header.checkpoint.eventIndex) == (0, 1)
    assert at.binlogOffset == end.header.checkpoint.binlogOffset


def test_times_without_a_zone_are_instants_in_the_configured_zone(one_shop: Shop) -> None:
    shop = one_shop
    shop.sql("CREATE TABLE times (id INT PRIMARY KEY, at DATETIME(3), moment TIMESTAMP(3) NULL)")
    shop.caught_up()
    with shop.client(f"{shop.database}.times") as client:
        client.subscribe(LATEST)
        shop.sql(
            "SET time_zone = '+00:00'; INSERT INTO times VALUES (1, '2000-01-01 08:00:00.250', '2000-01-01')"
        )
        shop.read_all(client)
    columns = client.events[0][0].rowData.afterColumns
    assert columns["at"].value == "946684800250"
    assert columns["moment"].value == "946684800000"
    assert {pair.key: pair.value for pair in columns["at"].props}["nanos"] == "250000000"


def test_shard_columns_can_be_configured(one_shop: Shop) -> None:
    shop = one_shop
    shop.sql("CREATE TABLE by_customer (id INT PRIMARY KEY, customer VARCHAR(20))")
    shop.caught_up()
    with shop.client(f"{shop.database}.by_customer", shards=range(11), shard_count=11) as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO by_customer VALUES (1, 'abc'), (2, 'order-10001'), (3, 'abc')")
        shop.read_all(client)
    ids = {
        shard: [event.rowData.afterColumns["id"].value for event in of_kind(events, INSERT)]
        for shard, events in client.events.items()
    }
    assert {shard: shard_ids for shard, shard_ids in ids.items() if shard_ids} == {0: ["1", "3"], 7: ["2"]}
    assert of_kind(client.events[0], INSERT)[0].header.partitionKey == "customer"


def test_definition_goes_to_all_subscribers_of_its_table(one_shop: Shop) -> None:
    shop = one_shop
    shop.sql("CREATE TABLE other (id INT PRIMARY KEY)")
    shop.caught_up()
    first = shop.client(shards=[0], shard_count=3)
    two = shop.client(shards=[1, 2], shard_count=3)
    none = shop.client(shards=[0], shard_count=3, needDDL=False)
    other = shop.client(f"{shop.database}.other", shards=[0], shard_count=3)
    clients = (first, two, none, other)
    for client in clients:
        client.subscribe(LATEST)
    shop.sql("ALTER TABLE orders ADD COLUMN note TEXT")
    shop.sql("INSERT INTO orders VALUES (1, 'a', 1, 'x'), (2, 'b', 2, 'y'), (3, 'c', 3, 'z')")
    for client in clients:
        shop.read_all(client)
        client.close()
    for client, shard in ((first, 0), (two, 1), (two, 2)):
        (query,) = of_kind(client.events[shard], QUERY)
        assert query.isDdl
        assert query.ddlSchemaName == shop.table
        assert "ALTER TABLE orders ADD COLUMN note TEXT" in query.sql
        assert client.events[shard][0] == query
        (row,) = of_kind(client.events[shard], INSERT)
        assert "note" in row.rowData.afterColumns
    assert not of_kind(none.events[0], QUERY)
    assert not other.events


def test_heartbeats_go_to_all_shards_and_their_commits_to_none(one_shop: Shop) -> None:
    shop = one_shop
    shop.server.sql("CREATE DATABASE IF NOT EXISTS buffalo_heartbeat")
    try:
        table = "buffalo_heartbeat.heartbeat"
        shop.server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, utime TIMESTAMP(3))")
        shop.server.sql(f"INSERT INTO {table} VALUES (1, NOW(3))")
        shop.caught_up()
        with shop.client(shards=[0, 1], shard_count=2) as client:
            client.subscribe(LATEST)
            for _ in range(3):
                shop.server.sql(f"UPDATE {table} SET utime = utime + INTERVAL 1 SECOND")
            shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
            shop.read_all(client)
        for shard in (0, 1):
            kinds = [event.eventType for event in client.events[shard]]
            assert kinds == [HEARTBEAT] * 3 + ([INSERT] if slot(1) % 2 == shard else []) + [END]
            beat = client.events[shard][0]
            assert not beat.rowData.beforeColumns
            assert set(beat.rowData.afterColumns) == {"id", "utime"}
    finally:
        shop.server.sql("DROP DATABASE buffalo_heartbeat")


# --- Starting positions -----------------------------------------------------------------------


def test_client_continues_after_every_event(shop: Shop) -> None:
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql(
            "BEGIN; INSERT INTO orders VALUES (1, 'a', 1), (2, 'b', 2); UPDATE orders SET amount = 5; COMMIT"
        )
        shop.sql("ALTER TABLE orders ADD COLUMN note TEXT")
        shop.sql("DELETE FROM orders WHERE id = 1")
        rotate(shop.server)
        shop.sql("INSERT INTO orders VALUES (3, 'c', 3, 'x')")
        shop.read_all(client)
        events = client.events[0]
    kinds = [INSERT, INSERT, UPDATE, UPDATE, END, QUERY, DELETE, END, INSERT, END]
    assert [event.eventType for event in events] == kinds
    for at, event in enumerate(events):
        with shop.client() as again:
            checkpoint = normal(event.header.checkpoint)
            info = again.server_info(buffaloCheckpoint=checkpoint)
            assert info["serverStatus"] == "AVAILABLE", shop.daemon.said()[-1000:]
            assert again.subscribe(checkpoint) == "success"
            shop.read_all(again)
        assert again.events.get(0, []) == events[at + 1 :], at


def test_idle_client_receives_its_progress(one_shop: Shop) -> None:
    shop = one_shop
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql("CREATE TABLE unwanted (id INT PRIMARY KEY)")
        shop.sql("INSERT INTO unwanted VALUES (1)")
        shop.read_all(client)
        assert not client.events
        behind = normal(client.latest)
        assert behind["timestamp"] > 0
        shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
    with shop.client() as client:
        assert client.subscribe(behind) == "success"
        shop.read_all(client)
    assert [event.eventType for event in client.events[0]] == [INSERT, END]


def test_transaction_counts_if_the_server_is_different(shop_of: Callable[[str], Shop]) -> None:
    shop = shop_of("mysql")
    with shop.client() as client:
        client.subscribe(LATEST)
        for key in range(1, 6):
            shop.sql(f"INSERT INTO orders VALUES ({key}, 'a', 1), ({key + 100}, 'b', 2)")
        shop.read_all(client)
        events = client.events[0]
    foreign = {"serverId": 77, "binlogFile": 900_000, "binlogOffset": 123}
    for at, event in enumerate(events):
        with shop.client() as again:
            assert again.subscribe({**normal(event.header.checkpoint), **foreign}) == "success"
            shop.read_all(again)
        assert again.events.get(0, []) == events[at + 1 :], at
    with shop.client() as again:
        ahead = {**normal(event.header.checkpoint), **foreign, "transactionId": 1 << 40}
        assert again.server_info(buffaloCheckpoint=ahead)["serverStatus"] == "UNAVAILABLE"


def test_time_counts_if_nothing_else_is_known(one_shop: Shop) -> None:
    shop = one_shop
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
        wait_for_next_second()
        shop.sql("INSERT INTO orders VALUES (2, 'a', 1)")
        shop.read_all(client)
        events = client.events[0]
    at = {"checkpointMode": "NORMAL", "timestamp": events[2].header.checkpoint.timestamp, "versionTs": 1}
    with shop.client() as again:
        assert again.subscribe(at) == "success"
        shop.read_all(again)
        assert again.events[0] == events[2:]
    for purged in (1, -1, 0):
        with shop.client() as again:
            assert again.subscribe({**at, "timestamp": purged}) == "fail"
    with shop.client() as later:
        assert later.subscribe({**at, "timestamp": (1 << 63) - 1}) == "success"


@pytest.mark.parametrize("wrong", [{"binlogFile": 9999}, {"binlogOffset": 1 << 40}, {"eventIndex": 0}])
def test_checkpoint_outside_this_log_is_refused(one_shop: Shop, wrong: dict[str, int]) -> None:
    shop = one_shop
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql("CREATE TABLE unwanted (id INT PRIMARY KEY)")
        shop.read_all(client)
    checkpoint = {**normal(client.latest), **wrong}
    with shop.client() as again:
        assert again.server_info(buffaloCheckpoint=checkpoint)["serverStatus"] == "UNAVAILABLE"
    with shop.client() as again:
        assert again.subscribe(checkpoint) == "fail"


def test_earliest_is_the_start_of_the_log(one_shop: Shop) -> None:
    shop = one_shop
    shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
    with shop.client() as client:
        assert client.server_info(buffaloCheckpoint=EARLIEST)["serverStatus"] == "AVAILABLE"
        assert client.subscribe(EARLIEST) == "success"
        shop.read_all(client)
    assert [event.eventType for event in client.events[0] if event.eventType != HEARTBEAT] == [
        QUERY,
        INSERT,
        END,
    ]


def test_repeated_subscription_starts_over(one_shop: Shop) -> None:
    shop = one_shop
    with shop.client(shards=[0], shard_count=2) as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO orders VALUES (1, 'a', 1), (2, 'b', 2)")
        shop.read_all(client)
        first = client.events
        start = normal(first[0][0].header.checkpoint)
        client.events, client.latest = {}, None
        cluster = {"partitionTotal": 2, "partitionSet": [1, 0]}
        assert client.subscribe({**start, "eventIndex": -1}, partitionClusterInfo=cluster) == "success"
        shop.read_all(client)
    assert client.events[0] == first[0]
    assert [event.eventType for event in client.events[1]] == [INSERT, END]


# --- Killed processes ------------------------------------------------------------------------


@pytest.mark.deep(guard="tests/integration/test_ptubes.py::test_client_continues_after_every_event")
def test_killed_daemon_loses_and_duplicates_no_event_of_a_client(
    mariadb_server: Server, fresh_database: Callable[[Server], str], tmp_path: Path
) -> None:
    server, database = mariadb_server, fresh_database(mariadb_server)
    server.sql("CREATE TABLE orders (id INT PRIMARY KEY)", database=database)
    settings = {
        "instances": {"shop": {"source": server.url(), "start": str(head_of(server))}},
        "listen": {"ptubes": "127.0.0.1:0"},
    }
    transactions, rows = 60, 5
    with DaemonProcess(tmp_path, settings) as daemon:
        shop = Shop(daemon, server, daemon.ports["ptubes"], 0, database)
        client, checkpoint = shop.client(), EARLIEST
        written, read = 0, []

        def connect() -> None:
            nonlocal client
            client = shop.client()
            assert client.server_info(buffaloCheckpoint=checkpoint)["serverStatus"] == "AVAILABLE"
            assert client.subscribe(checkpoint) == "success"

        server.sql(f"CREATE TABLE {database}.other (id INT PRIMARY KEY)")
        shop.caught_up()
        connect()
        while len(read) < transactions * rows:
            if written < transactions:
                keys = ", ".join(f"({written * rows + at})" for at in range(rows))
                shop.sql(f"INSERT INTO orders VALUES {keys}")
                written += 1
            if written in (20, 40) and len(read) < written * rows:
                daemon.kill()
                daemon.start()
                # Bytes received but not written before the kill are read from the server again.
                shop.caught_up()
            try:
                envelope = client.fetch(batch=3)
            except (ConnectionError, http.client.HTTPException):
                client.close()
                connect()
                continue
            for events in shards_of(envelope).values():
                read += of_kind(events, INSERT)
                checkpoint = normal(envelope.latestCheckpoint)
        client.close()
    assert [int(event.rowData.afterColumns["id"].value) for event in read] == list(range(transactions * rows))
