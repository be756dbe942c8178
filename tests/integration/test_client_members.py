# SPDX-License-Identifier: Apache-2.0
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.client import ChangeBatch, following
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import ROOT, DaemonProcess
from tests.support.daemon.subscribing import Orders, Running
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


@pytest.fixture(scope="module")
def daemon(mariadb_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that follows the shared server from now on."""
    settings = {"instances": {"shop": {"source": mariadb_server.url(), "start": "latest"}}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), settings) as started:
        started.wait_for(lambda status: status["state"] == "running")
        yield started


@pytest.fixture
def orders(
    mariadb_server: Server, fresh_database: FreshDatabase, daemon: DaemonProcess, tmp_path: Path
) -> Orders:
    return Orders(mariadb_server, fresh_database(mariadb_server), daemon, tmp_path)


# --- Members --------------------------------------------------------------------------------


@pytest.mark.timing
def test_members_share_the_shards_evenly_and_take_over_without_a_gap_or_a_duplicate(orders: Orders) -> None:
    with Running(orders.subscriber(shards=5)) as first:
        first.wait_owning(5)
        orders.insert(*range(50))
        first.wait_for(50)
        with Running(orders.subscriber()) as second:
            wait_until(lambda: len(second.subscriber.status().shards) == 2)
            first.wait_owning(3)
            orders.insert(*range(50, 100))
            wait_until(lambda: len(first.rows) + len(second.rows) == 100)
            assert {row[0] for row in first.rows[50:]}.isdisjoint(row[0] for row in second.rows)
        first.wait_owning(5)
        orders.insert(*range(100, 150))
        wait_until(lambda: len(first.rows) + len(second.rows) >= 150)
    assert sorted(key for _, key, _ in [*first.rows, *second.rows]) == list(range(150))


def test_shards_at_different_positions_each_continue_from_their_own(orders: Orders) -> None:
    places = []
    for step in range(3):
        places.append(Checkpoint(str(head_of(orders.server)), server_key=orders.server_key()))
        orders.insert(*range(20 * step, 20 * step + 20), step=step)
    orders.settle()
    store = open_store(orders.coordination)
    try:
        registry = Subscriptions(store)
        registry.create(Subscription("shop", "cache", (orders.table,), shard_count=3))
        for shard, position in enumerate(places):
            registry.reset("shop", "cache", position, shard)
        with Running(orders.subscriber(shards=3)) as running:
            running.wait_owning(3)
            orders.insert(60, 61, 62, step=3)
            wait_until(lambda: {60, 61, 62} <= {key for _, key, _ in running.rows})
    finally:
        store.close()
    for shard in range(3):
        steps = [step for shard_of_row, _, step in running.rows if shard_of_row == shard]
        assert steps == sorted(steps)
        assert steps[0] == shard
    keys = [key for _, key, _ in running.rows]
    assert len(keys) == len(set(keys))


def test_new_subscription_stores_its_start_before_anything_is_delivered(orders: Orders) -> None:
    store = open_store(orders.coordination)
    try:
        registry = Subscriptions(store)
        with Running(orders.subscriber(begin="latest")) as running:
            running.wait_owning(1)
            subscription = registry.reset("shop", "cache", None)
            # Wait for the checkpoint. Without it, the next member would skip changes committed while no
            # member is active.
            wait_until(lambda: subscription.checkpoints(store).read(0) is not None)
        orders.insert(1)
        orders.settle()
        with Running(orders.subscriber(begin="latest")) as running:
            running.wait_for(1)
    finally:
        store.close()


@pytest.mark.timing
def test_running_subscriber_is_resized(orders: Orders) -> None:
    store = open_store(orders.coordination)
    try:
        with Running(orders.subscriber(shards=2)) as running:
            running.wait_owning(2)
            orders.insert(*range(20))
            running.wait_for(20)
            Subscriptions(store).resize("shop", "cache", 5)
            running.wait_owning(5)
            orders.insert(*range(20, 40))
            running.wait_for(40)
    finally:
        store.close()
    assert sorted(key for _, key, _ in running.rows) == list(range(40))
    assert {shard for shard, key, _ in running.rows if key >= 20} == set(range(5))


@pytest.mark.deep(guard="tests/integration/test_client_members.py::test_running_subscriber_is_resized")
@pytest.mark.timing
def test_running_subscriber_gets_other_shard_columns(orders: Orders) -> None:
    with Running(orders.subscriber(shards=3)) as running:
        running.wait_owning(3)
        orders.insert(*range(20))
        running.wait_for(20)
        words = ["subscriptions", "set", "cache", "--shard-columns", f"{orders.table}=customer"]
        done = CliRunner().invoke(make_app(), [*words, "--coordination", orders.coordination])
        assert done.exit_code == 0, done.output
        assert "shard columns: from " in done.stdout
        assert "from its start" not in done.stdout
        running.wait_owning(3)
        before = len(running.rows)
        orders.insert(*range(20, 60))
        running.wait_until(lambda: {key for _, key, _ in running.rows[before:]} >= set(range(20, 60)))
    assert {key for _, key, _ in running.rows} == set(range(60))
    shards_of: dict[int, set[int]] = {}
    for shard, key, _ in running.rows:
        if key >= 20:
            shards_of.setdefault(key % 10, set()).add(shard)
    assert all(len(shards) == 1 for shards in shards_of.values()), shards_of
    assert len(set.union(*shards_of.values())) > 1
    # The program still requests its own columns.
    with Running(orders.subscriber(shards=3)) as running:
        running.wait_owning(3)


@pytest.mark.deep(guard="tests/integration/test_readme.py::test_subscriber_prints_every_change")
@pytest.mark.timing
def test_example_keeps_a_copy_with_several_processes(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("mariadb")
    server.sql("CREATE DATABASE shop")
    server.sql("CREATE TABLE shop.orders (id INT PRIMARY KEY, status VARCHAR(9), total DECIMAL(10,2))")
    settings = {"instances": {"shop": {"source": server.url(), "start": "earliest"}}}
    with DaemonProcess(tmp_path, settings) as daemon, ExitStack() as stack:
        words = [f"penstock://127.0.0.1:{daemon.port}/shop", str(tmp_path / "copy.db")]
        program = [sys.executable, str(ROOT / "examples/orders_copy.py"), *words]
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        processes = [subprocess.Popen(program, env=environment) for _ in range(2)]
        for process in processes:
            stack.callback(process.kill)
        for key in range(50):
            server.sql(f"INSERT INTO shop.orders VALUES ({key}, 'new', 9.50)")
        server.sql("UPDATE shop.orders SET status = 'paid' WHERE id % 3 = 0")
        server.sql("DELETE FROM shop.orders WHERE id % 5 = 0")
        wanted = [(key, status, str(total)) for key, status, total in server.sql("SELECT * FROM shop.orders")]
        with sqlite3.connect(tmp_path / "copy.db", timeout=WAIT_SECONDS_MAX) as copy:
            wait_until(lambda: _rows_of(copy) == sorted(wanted))
        # A single member might process everything while the other member is starting.
        wait_until(lambda: _have_started(tmp_path / "state/penstock/coordination.db", 2))
        for process in processes:
            process.terminate()
        assert [process.wait(WAIT_SECONDS_MAX) for process in processes] == [0, 0]


def _rows_of(copy: sqlite3.Connection) -> list[tuple[int, str, str]]:
    try:
        return sorted(copy.execute("SELECT id, status, total FROM orders").fetchall())
    except sqlite3.OperationalError:
        # The first batch creates the table.
        return []


def _have_started(coordination: Path, count: int) -> bool:
    """Return whether this many members of the example have joined and none is still starting."""
    store = open_store(f"sqlite://{coordination}")
    try:
        registry = Subscriptions(store)
        subscription = registry.get("shop", "orders-copy")
        assert subscription is not None
        starting = store.get(f"{subscription.path}/start")
        return starting is None and len(registry.members(subscription)) == count
    finally:
        store.close()


# --- Daemons --------------------------------------------------------------------------------


@pytest.mark.deep(
    guard="tests/integration/test_client_members.py::test_subscriber_continues_by_gtid_set_on_a_daemon_of_another_server"
)
def test_subscriber_moves_to_another_daemon_and_keeps_its_epoch_numbers(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    source = {"instances": {"shop": {"source": mariadb_server.url(), "start": "latest"}}}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with (
        DaemonProcess(tmp_path / "one", source) as first,
        DaemonProcess(tmp_path / "two", source) as two,
        ExitStack() as stack,
    ):
        for daemon in (first, two):
            daemon.wait_for(lambda status: status["state"] == "running")
        orders = Orders(mariadb_server, database, first, tmp_path)
        head = head_of(mariadb_server)
        two.wait_for_head(head.file, head.offset)
        nobody = stack.enter_context(socket.socket())
        nobody.bind(("127.0.0.1", 0))
        ports = (first.port, two.port, nobody.getsockname()[1])
        orders.url = f"penstock://{','.join(f'127.0.0.1:{port}' for port in ports)}/shop"
        with Running(orders.subscriber(shards=2)) as running:
            running.wait_owning(2)
            orders.insert(*range(10))
            running.wait_for(10)
            read_from = running.subscriber.status().daemon
            (first if str(first.port) in str(read_from) else two).kill()
            orders.insert(*range(10, 20))
            running.wait_for(20)
            assert running.subscriber.status().daemon != read_from
        assert sorted(key for _, key, _ in running.rows) == list(range(20))


def test_subscriber_continues_by_gtid_set_on_a_daemon_of_another_server(
    start_server: StartServer, tmp_path: Path
) -> None:
    primary, replica = start_server("mariadb"), start_server("mariadb", log_slave_updates=True)
    primary.sql("CREATE DATABASE d")
    replica.sql(
        f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port}, MASTER_USER='root', "
        "MASTER_USE_GTID=slave_pos"
    )
    replica.sql("START SLAVE")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    sources = [
        {"instances": {"shop": {"source": server.url(), "start": "earliest"}}}
        for server in (primary, replica)
    ]
    with (
        DaemonProcess(tmp_path / "one", sources[0]) as first,
        DaemonProcess(tmp_path / "two", sources[1]) as two,
    ):
        orders = Orders(primary, "d", first, tmp_path)
        orders.url = f"penstock://127.0.0.1:{first.port},127.0.0.1:{two.port}/shop"
        with Running(orders.subscriber(shards=2, begin=str(head_of(primary)))) as running:
            running.wait_owning(2)
            orders.insert(*range(10))
            running.wait_for(10)
            first.kill()
            orders.insert(*range(10, 20))
            running.wait_for(20)
        assert sorted(key for _, key, _ in running.rows) == list(range(20))
        versions = [
            version
            for batch in running.batches
            for version in batch.to_arrow()["_commit_version"].to_pylist()
        ]
        assert max(versions[:10]) < min(versions[10:])


# --- Selections -----------------------------------------------------------------------------


def test_running_subscription_delivers_another_selection_from_the_reported_positions_on(
    orders: Orders,
) -> None:
    words = ("--coordination", orders.coordination, "--json")
    with Running(orders.subscriber(shards=2)) as running:
        running.wait_owning(2)
        orders.insert(*range(10))
        running.wait_for(10)
        where = penstock("subscriptions", "set", "cache", "--where", "customer = 3", *words).one
        assert [(shard["shard"], shard["done"]) for shard in where["shards"]] == [(0, True), (1, True)]
        # Every change was consumed, so each shard switches to its new selection at the end of the log.
        assert {shard["position"] for shard in where["shards"]} == {str(head_of(orders.server))}
        orders.insert(*range(10, 30))
        running.wait_for(12)
        paused = penstock("subscriptions", "pause", "cache", *words).one
        assert [(shard["owner"], shard["done"]) for shard in paused["shards"]] == [(None, True)] * 2
        running.wait_owning(0)
        orders.insert(33, 34)
        assert penstock("subscriptions", "list", *words).one["paused"]
        assert len(running.rows) == 12
        penstock("subscriptions", "resume", "cache", *words)
        running.wait_for(13)
        penstock("subscriptions", "set", "cache", "--as-members-ask", *words)
        orders.insert(35)
        running.wait_for(14)
    assert sorted(row[1] for row in running.rows) == [*range(10), 13, 23, 33, 35]


def test_member_shows_what_it_has_delivered_and_what_failed(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_STATISTICS_SECONDS", 0.05)
    failures = iter([ValueError("refused")])

    def fail_once(batch: ChangeBatch) -> None:
        for failure in failures:
            raise failure

    words = ("subscriptions", "show", "cache", "--coordination", orders.coordination)

    def statistics() -> dict[str, Any]:
        return penstock(*words, "--json").one["owner_statistics"] or {}

    with Running(orders.subscriber(), fail_once) as running:
        running.wait_owning(1)
        orders.insert(*range(5))
        running.wait_for(5)
        wait_until(lambda: statistics().get("rows") == 5 and statistics()["behind_bytes"] == 0)
        shown = statistics()
        assert [shown[name] for name in ("errors", "retries", "skipped")] == [1, 1, 0]
        assert running.subscriber.options.member in penstock(*words).out
    # The next member removes the statistics of earlier members.
    with Running(orders.subscriber()) as running:
        running.wait_owning(1)
        orders.insert(5)
        wait_until(lambda: statistics().get("rows") == 1)
    with closing(open_store(orders.coordination)) as store:
        assert list(store.list("/subscriptions/shop/cache/statistics")) == [running.subscriber.options.member]


def test_program_that_asks_for_the_tables_that_an_operator_set_is_accepted(orders: Orders) -> None:
    other = f"{orders.table}_2"
    orders.server.sql(f"CREATE TABLE {other} (id INT PRIMARY KEY, customer INT, step INT)")
    words = ("--coordination", orders.coordination, "--json")
    with Running(orders.subscriber()) as running:
        running.wait_owning(1)
        penstock("subscriptions", "set", "cache", "--tables", other, *words)
        orders.insert(1)
        orders.server.sql(f"INSERT INTO {other} VALUES (2, 0, 0)")
        running.wait_for(1)
    for tables in ([orders.table], [other]):
        orders.server.sql(f"UPDATE {other} SET step = step + 1")
        with Running(orders.subscriber(tables=tables)) as running:
            running.wait_until(lambda running=running: len(running.rows) >= 1)
            assert {row[1] for row in running.rows} == {2}
