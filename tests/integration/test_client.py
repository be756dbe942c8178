# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.client import AsyncSubscriber, ChangeBatch
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscriptions, subscription_path
from penstock.errors import LeaseLost, OptionInvalid, PositionPurged
from penstock.model import Position
from tests.support.capture.captured_log import assert_only_checkpoints, head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.daemon.subscribing import Orders, Running
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_for_next_second, wait_until
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")


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


def log_between(server: Server, begin: Position, end: Position) -> bytes:
    """Return the server's log between two positions of one file."""
    assert begin.file == end.file
    (path,) = (path for path in server.binlog_files() if path.name == end.file)
    with path.open("rb") as file:
        file.seek(begin.offset)
        return file.read(end.offset - begin.offset)


# --- Delivery -------------------------------------------------------------------------------


def test_every_change_reaches_the_callback_of_its_shard_in_order(orders: Orders) -> None:
    with Running(orders.subscriber(shards=4)) as running:
        running.wait_owning(4)
        for step in range(5):
            if step == 0:
                orders.insert(*range(40))
            else:
                orders.server.sql(f"UPDATE {orders.table} SET step = {step} WHERE id % 2 = 0")
        orders.server.sql(f"DELETE FROM {orders.table} WHERE id = 1")
        running.wait_for(40 + 4 * 20 + 1)
    steps = defaultdict(list)
    shards = defaultdict(set)
    for shard, key, step in running.rows:
        steps[key].append(step)
        shards[key].add(shard)
    assert steps[1] == [0, 0]
    assert all(steps[key] == [0, 1, 2, 3, 4] for key in range(0, 40, 2))
    assert all(len(shard) == 1 for shard in shards.values())
    assert {shard for shard, _, _ in running.rows} == {0, 1, 2, 3}


def test_requested_rows_are_objects_with_key_images_and_position(orders: Orders) -> None:
    with Running(orders.subscriber()) as running:
        running.wait_owning(1)
        orders.insert(7)
        orders.server.sql(f"UPDATE {orders.table} SET step = 3 WHERE id = 7")
        orders.server.sql(f"DELETE FROM {orders.table} WHERE id = 7")
        running.wait_for(3)
    rows = [row for batch in running.batches for row in batch.rows()]
    assert [(row.change_type, row.key) for row in rows] == [
        ("insert", (7,)),
        ("update", (7,)),
        ("delete", (7,)),
    ]
    assert rows[1].before == {"id": 7, "customer": 7, "step": 0}
    assert rows[1].after == {"id": 7, "customer": 7, "step": 3}
    last = running.batches[-1]
    assert_only_checkpoints(log_between(orders.server, last.position, head_of(orders.server)))
    assert (
        last.gtid_set
        == orders.daemon.get("/v1/instances/shop/gtid_set", position=str(last.position))["gtid_set"]
    )
    assert last.token > 0


def test_restart_continues_after_consumed_batches(orders: Orders) -> None:
    with Running(orders.subscriber(shards=2)) as first:
        first.wait_owning(2)
        orders.insert(*range(10))
        first.wait_for(10)
    orders.insert(*range(10, 20))
    with Running(orders.subscriber()) as second:
        second.wait_for(10)
        orders.insert(20)
        second.wait_for(11)
    assert sorted(key for _, key, _ in second.rows) == list(range(10, 21))


def test_loop_acks_a_batch_when_it_asks_for_the_next(orders: Orders) -> None:
    begin = str(head_of(orders.server))
    orders.insert(0)
    with orders.subscriber(begin=begin) as subscriber:
        got = []
        for batch in subscriber:
            got += batch.to_arrow().column("id").to_pylist()
            orders.insert(got[-1] + 1)
            if got == [0, 1]:
                break
    with orders.subscriber() as subscriber:
        again = []
        for batch in subscriber:
            again += batch.to_arrow().column("id").to_pylist()
            if again[-1] == 2:
                subscriber.stop()
    # Leaving the loop early did not ack the batch. Stopping the subscriber acked its last batch.
    assert again == [1, 2]
    orders.insert(3)
    with orders.subscriber() as subscriber:
        for batch in subscriber:
            assert batch.to_arrow().column("id").to_pylist() == [3]
            break


def test_manual_acks_count_in_order_and_a_rollback_redelivers_the_rest(orders: Orders) -> None:
    # Each order is committed after the previous order was received, so each has its own range of the log.
    begin = str(head_of(orders.server))
    orders.insert(0)
    with orders.subscriber(begin=begin, ack="manual") as subscriber:
        batches: list[ChangeBatch] = []
        for batch in subscriber:
            batches.append(batch)
            if len(batches) < 4:
                orders.insert(len(batches))
            elif len(batches) == 4:
                batches[0].ack()
                batches[2].ack()
                assert subscriber.rollback() == 3
                with pytest.raises(OptionInvalid):
                    batches[3].ack()
            elif len(batches) == 5:
                batch.ack()
                subscriber.stop()
    keys = [batch.to_arrow().column("id").to_pylist() for batch in batches]
    assert keys == [[0], [1], [2], [3], [1]]
    with orders.subscriber() as subscriber:
        for batch in subscriber:
            assert batch.to_arrow().column("id").to_pylist()[0] == 2
            break
    with pytest.raises(LeaseLost):
        batches[2].ack()


def test_oversized_transaction_is_delivered_before_its_end(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.intake.HELD_BYTES_MAX", 200_000)
    with Running(orders.subscriber(shards=2, batch_rows=500)) as running:
        running.wait_owning(2)
        orders.insert(*range(20_000))
        orders.insert(20_000, step=1)
        running.wait_for(20_001)
        wait_until(
            lambda: (
                set(map(str, running.subscriber.status().shards.values())) == {str(head_of(orders.server))}
            )
        )
    for shard in range(2):
        assert [key for shard_of_row, key, _ in running.rows if shard_of_row == shard] == sorted(
            key for shard_of_row, key, _ in running.rows if shard_of_row == shard
        )
    start = running.batches[0].position
    ends = [batch.position for batch in running.batches if batch.shard == running.batches[0].shard]
    # A reader that resumes anywhere before the transaction's end receives the whole transaction again.
    assert ends.count(start) > 3
    assert ends == sorted(ends)


@pytest.mark.parametrize("way", ["run", "loop"])
def test_asyncio_is_supported_as_well(orders: Orders, way: str) -> None:
    async def consume() -> list[int]:
        got: list[int] = []
        async with AsyncSubscriber(orders.url, **orders.words(shards=2, begin=begin)) as subscriber:

            async def keep(batch: ChangeBatch) -> None:
                await asyncio.sleep(0)
                got.extend(batch.to_arrow().column("id").to_pylist())
                if len(got) >= 20:
                    await subscriber.stop()

            if way == "run":
                await subscriber.run(keep)
            else:
                async for batch in subscriber:
                    await keep(batch)
        return got

    begin = str(head_of(orders.server))
    orders.insert(*range(10))
    orders.insert(*range(10, 20))
    orders.settle()
    assert sorted(asyncio.run(asyncio.wait_for(consume(), WAIT_SECONDS_MAX))) == list(range(20))
    orders.insert(20)
    with orders.subscriber() as subscriber:
        for batch in subscriber:
            assert batch.to_arrow().column("id").to_pylist() == [20]
            break


# --- Failures -------------------------------------------------------------------------------


def test_failing_callback_receives_its_batch_again_in_order(orders: Orders) -> None:
    tries: Counter[int] = Counter()

    def fail(batch: ChangeBatch) -> None:
        key = batch.to_arrow().column("id").to_pylist()[0]
        tries[key] += 1
        if key == 1 and tries[1] < 3:
            raise ValueError("no room")

    with Running(orders.subscriber(batch_rows=1), fail) as running:
        running.wait_owning(1)
        orders.insert(0, 1, 2)
        running.wait_for(3)
    assert [key for _, key, _ in running.rows] == [0, 1, 2]
    assert tries == {0: 1, 1: 3, 2: 1}


def test_batch_is_skipped_if_the_program_asks_for_it(orders: Orders) -> None:
    def fail(batch: ChangeBatch) -> None:
        if batch.to_arrow().column("id").to_pylist() == [1]:
            raise ValueError("no room")

    with Running(orders.subscriber(batch_rows=1, on_failure="skip"), fail) as running:
        running.wait_owning(1)
        orders.insert(0, 1, 2)
        running.wait_for(2)
        assert running.subscriber.skipped == 1
    with Running(orders.subscriber()) as again:
        orders.insert(3)
        again.wait_for(1)


def test_subscriber_stops_with_the_callback_error_and_receives_the_batch_again(orders: Orders) -> None:
    def fail(batch: ChangeBatch) -> None:
        raise ValueError("no room")

    with Running(orders.subscriber(on_failure="stop"), fail) as running:
        running.wait_owning(1)
        orders.insert(0)
        with pytest.raises(ValueError, match="no room"):
            running.join()
    with Running(orders.subscriber()) as again:
        again.wait_for(1)


# --- What is consumed -----------------------------------------------------------------------


def test_daemon_sends_only_rows_that_pass_the_filters(orders: Orders) -> None:
    other = orders.table.replace("orders", "others")
    orders.server.sql(f"CREATE TABLE {other} (id INT PRIMARY KEY, step INT)")
    options: dict[str, Any] = {
        "tables": [orders.table.replace("orders", "o*")],
        "exclude": [other],
        "changes": ["update", "delete"],
        "where": "customer < 5",
        "columns": ["id", "step"],
        "shards": 2,
        "shard_columns": {orders.table: ["customer"]},
    }
    with Running(orders.subscriber(**options)) as running:
        running.wait_owning(2)
        orders.insert(*range(10))
        orders.server.sql(f"INSERT INTO {other} VALUES (1, 1)")
        orders.server.sql(f"UPDATE {orders.table} SET step = 1")
        orders.server.sql(f"DELETE FROM {orders.table} WHERE id IN (0, 9)")
        running.wait_for(6)
        # The checkpoint also moves past filtered rows.
        wait_until(
            lambda: (
                set(map(str, running.subscriber.status().shards.values())) == {str(head_of(orders.server))}
            )
        )
    assert sorted((key, step) for _, key, step in running.rows) == [
        (0, 1),
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
    ]
    assert {batch.table for batch in running.batches} == {orders.table}
    assert {row.key for batch in running.batches for row in batch.rows()} == {(key,) for key in range(5)}
    names = {name for batch in running.batches for name in batch.to_arrow().schema.names}
    assert names == {"id", "step", "_change_type", "_commit_version", "_commit_timestamp"}


def test_unusable_condition_ends_the_subscriber_by_name(orders: Orders) -> None:
    subscriber = orders.subscriber(where="customer <")
    with pytest.raises(OptionInvalid):
        subscriber.run(lambda batch: None)


# --- Where it starts ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["position", "gtid_set", "time", "latest", "earliest"])
def test_subscription_starts_at_the_requested_position(orders: Orders, kind: str) -> None:
    orders.insert(0)
    orders.settle()
    wait_for_next_second()
    middle = head_of(orders.server)
    bounds: dict[str, Any] = {
        "position": str(middle),
        "gtid_set": orders.server.sql("SELECT @@gtid_binlog_pos")[0][0],
        # The server's commit times are whole seconds.
        "time": datetime.now(UTC).replace(microsecond=0),
        "latest": "latest",
        "earliest": "earliest",
    }
    expected = {"latest": [2], "earliest": [0, 1, 2]}.get(kind, [1, 2])
    orders.insert(1)
    orders.settle()
    with Running(orders.subscriber(start=bounds[kind])) as running:
        running.wait_owning(1)
        orders.insert(2)
        running.wait_for(len(expected))
    assert [key for _, key, _ in running.rows] == expected
    # A restart of the same program with the same start is accepted while no other member is active.
    if kind == "position":
        with Running(orders.subscriber(start=bounds[kind])) as again:
            again.wait_for(len(expected))


def test_start_outside_the_log_is_refused(orders: Orders) -> None:
    subscriber = orders.subscriber(start="mysql-bin.000001:4")
    with pytest.raises(PositionPurged):
        subscriber.run(lambda batch: None)


@pytest.mark.timing
def test_subscriber_stopped_during_its_start_ends_without_an_error(orders: Orders) -> None:
    store = open_store(orders.coordination)
    starting = f"{subscription_path('shop', 'cache')}/start"
    assert Lease.acquire(store, store.session(), starting, "another") is not None
    running = Running(orders.subscriber())
    with running:
        # The member has joined and waits for another starting member.
        wait_until(lambda: Subscriptions(store).get("shop", "cache") is not None)
    assert not running.subscriber.status().shards
    store.close()


@pytest.mark.parametrize(
    "other", [{"tables": ["shop.others"]}, {"shards": 3}, {"shard_columns": {"*.*": ["customer"]}}]
)
def test_different_subscription_of_the_same_name_is_refused_by_name(
    orders: Orders, other: dict[str, Any]
) -> None:
    with Running(orders.subscriber(shards=2)) as running:
        running.wait_owning(2)
        with pytest.raises(OptionInvalid, match="cache") as refusal:
            orders.subscriber(**{"shards": 2, **other}).run(lambda batch: None)
        (what,) = other
        assert what.removesuffix("s") in str(refusal.value)
