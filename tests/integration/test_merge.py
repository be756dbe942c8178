# SPDX-License-Identifier: Apache-2.0
"""An instance that merges two real servers: every kind of reader receives the changes of both servers, each
change once.
"""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import read_binlog
from penstock._native import EventMover
from penstock.errors import EventUnsupported
from tests.support.binlog.decoding import run_logged
from tests.support.binlog.events import (
    GTID,
    MARIADB_GTID,
    MARIADB_ROWS_COMPRESSED,
    ROTATE,
    TRANSACTION_PAYLOAD,
    codes,
    events,
    first_event_end,
)
from tests.support.canal.client import CanalClient
from tests.support.canal.following import drain, ids_of, until_durable
from tests.support.capture.replicas import gtids_executed, replica_of
from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.kept_log import penstock
from tests.support.ptubes.client import EARLIEST, PtubesClient
from tests.support.ptubes.shop import INSERT, of_kind
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

NAMES = ("db1", "db2")


class Shop:
    """Two servers with half of the orders each, and a daemon that merges them."""

    def __init__(self, servers: list[Server], folder: Path) -> None:
        self.servers = servers
        self._ids = itertools.count(1)
        instances: dict[str, Any] = {
            name: {"source": server.url(), "start": "earliest"}
            for name, server in zip(NAMES, servers, strict=True)
        }
        settings = {
            "listen": {"canal": "127.0.0.1:0", "canal_start": "earliest", "ptubes": "127.0.0.1:0"},
            "instances": {**instances, "shop": {"merge": list(NAMES), "start": "earliest"}},
        }
        self.daemon = DaemonProcess(folder, settings)
        for server in servers:
            server.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(20))")

    def insert(self, number: int, count: int = 1) -> list[int]:
        """Insert orders on one of the servers, each in its own transaction, and return their ids."""
        ids = list(itertools.islice(self._ids, count))
        self.servers[number].sql(";".join(f"INSERT INTO shop.orders VALUES ({id_}, 'new')" for id_ in ids))
        return ids

    def rows(self) -> list[tuple[int, int, int]]:
        """Return the merged rows: commit version, time and id of each order."""
        rows: list[tuple[int, int, int]] = []
        for batch in read_binlog(str(self.daemon.folder / "log" / "shop"), tables="shop.orders"):
            table = batch.to_arrow()
            times = table["_commit_timestamp"].cast("int64").to_pylist()
            rows += zip(table["_commit_version"].to_pylist(), times, table["id"].to_pylist(), strict=True)
        return sorted(rows)

    def ids(self) -> list[int]:
        """Return the ids of the merged orders, in the order of the merged log."""
        return [id_ for _, _, id_ in self.rows()]

    def wait_for(self, count: int) -> None:
        """Wait until the merge has this many orders."""
        self.daemon.wait_for(lambda status: status["position"] is not None)
        wait_until(lambda: len(self.ids()) >= count)


def shop_of(start_server: StartServer, flavor: str, folder: Path) -> Shop:
    servers = [start_server(flavor), start_server(flavor)]
    for number, server in enumerate(servers, 1):
        server.sql("SET GLOBAL binlog_row_metadata = FULL")
        if flavor == "mariadb":
            server.sql(f"SET GLOBAL gtid_domain_id = {number}")
    return Shop(servers, folder)


@pytest.fixture
def shop(start_server: StartServer, tmp_path: Path) -> Iterator[Shop]:
    shop = shop_of(start_server, "mariadb", tmp_path)
    with shop.daemon:
        yield shop


def test_two_databases_are_one_instance(shop: Shop) -> None:
    first, second = shop.insert(0, 3), shop.insert(1, 3)
    last = shop.insert(0)
    shop.wait_for(7)
    ids = shop.ids()
    assert sorted(ids) == first + second + last
    assert [id_ for id_ in ids if id_ in first + last] == first + last
    assert [id_ for id_ in ids if id_ in second] == second
    times = [time for _, time, _ in shop.rows()]
    assert times == sorted(times)
    with CanalClient(shop.daemon.ports["canal"], "shop", "1").log_in() as client:
        client.subscribe("shop.orders")
        assert list(map(int, drain(client))) == ids
    status = shop.daemon.status()
    assert (status["state"], status["server"]) == ("running", "db1, db2")
    daemon = f"127.0.0.1:{shop.daemon.port}"
    words = ("shop", "shop.orders", "--from", "earliest", "--until", "latest", "--format", "maxwell")
    tailed = penstock("tail", *words, "--url", daemon)
    assert [change["data"]["id"] for change in tailed.objects if change["type"] == "insert"] == ids


@pytest.mark.deep(guard="tests/integration/test_merge.py::test_two_databases_are_one_instance")
def test_member_that_is_away_is_named_and_waited_for(shop: Shop) -> None:
    shop.insert(0, 2)
    shop.insert(1, 2)
    shop.wait_for(4)
    shop.servers[1].kill()
    shop.insert(0, 2)
    status = shop.daemon.wait_for(lambda status: status["state"] == "waiting")
    assert "db2 is waiting" in status["why"]
    assert shop.ids()[4:] == []
    shop.servers[1].start()
    later = shop.insert(1)
    shop.wait_for(7)
    assert shop.ids()[-1:] == later or sorted(shop.ids()) == list(range(1, 8))
    shop.daemon.wait_for(lambda status: status["state"] == "running")


@pytest.mark.deep(guard="tests/unit/test_merge_log.py::test_restart_anywhere_loses_and_repeats_nothing")
def test_killed_daemon_loses_and_repeats_nothing(shop: Shop) -> None:
    written: dict[int, list[int]] = {0: [], 1: []}
    ending = threading.Event()

    def write(number: int) -> None:
        while not ending.is_set():
            written[number] += shop.insert(number, 5)

    writers = [threading.Thread(target=write, args=(number,)) for number in written]
    for writer in writers:
        writer.start()
    try:
        shop.wait_for(1)
        for _ in range(5):
            before = len(shop.ids())
            wait_until(lambda before=before: len(shop.ids()) > before)
            shop.daemon.kill()
            shop.daemon.start()
    finally:
        ending.set()
        for writer in writers:
            writer.join(WAIT_SECONDS_MAX)
    count = sum(map(len, written.values()))
    shop.wait_for(count)
    ids = shop.ids()
    assert len(ids) == len(set(ids)) == count
    for own in written.values():
        assert [id_ for id_ in ids if id_ in set(own)] == own


@pytest.mark.deep(guard="tests/integration/test_merge.py::test_two_databases_are_one_instance")
def test_mysql_servers_are_merged_by_the_microsecond(start_server: StartServer, tmp_path: Path) -> None:
    shop = shop_of(start_server, "mysql", tmp_path)
    with shop.daemon:
        committed = [id_ for turn in range(40) for id_ in shop.insert(turn % 2)]
        shop.wait_for(40)
        assert shop.ids() == committed
        # Acknowledged entries are not repeated after a restart of the daemon.
        with CanalClient(shop.daemon.ports["canal"], "shop", "1").log_in() as client:
            client.subscribe("shop.orders")
            batch_id, entries = client.get(30)
            client.ack(batch_id)
            until_durable(shop.daemon, client, entries)
            taken = list(map(int, ids_of(entries)))
        shop.daemon.kill()
        shop.daemon.start()
        more = shop.insert(0)
        shop.wait_for(41)
        with CanalClient(shop.daemon.ports["canal"], "shop", "1").log_in() as client:
            client.subscribe("shop.orders")
            rest = list(map(int, drain(client)))
        assert taken + rest == committed + more
        with PtubesClient(shop.daemon.ports["ptubes"], ["shop.orders"]) as ptubes:
            ptubes.subscribe(EARLIEST)
            ptubes.fetch_until(lambda client: len(of_kind(client.events.get(0, ()), INSERT)) == 41)


@pytest.mark.deep(guard="tests/unit/test_merge_log.py::test_what_logs_cannot_share_is_refused_by_name")
@pytest.mark.parametrize(
    ("flavor", "compression"),
    [
        ("mysql", "SET GLOBAL binlog_transaction_compression = ON"),
        ("mariadb", "SET GLOBAL log_bin_compress = ON, GLOBAL log_bin_compress_min_len = 10"),
    ],
)
def test_xa_transactions_are_refused_in_a_compressed_log(
    start_server: StartServer, fresh_database: FreshDatabase, flavor: str, compression: str
) -> None:
    server = start_server(flavor)
    server.sql(f"SET GLOBAL binlog_row_metadata = FULL; {compression}")
    insert = "INSERT INTO t VALUES ({}, REPEAT('x', 500))"
    prepare = ("XA START 'x'", insert.format(2), "XA END 'x'", "XA PREPARE 'x'")
    statements = ("CREATE TABLE t (id INT PRIMARY KEY, v TEXT)", insert.format(1), *prepare, "XA COMMIT 'x'")
    data = run_logged(server, *statements, insert.format(3), database=fresh_database(server)).read_bytes()
    mover = EventMover(data[: first_event_end(data)])
    assert set(codes(data)) & {TRANSACTION_PAYLOAD, *MARIADB_ROWS_COMPRESSED}
    starts = [event.offset for event in events(data) if event.code in (GTID, MARIADB_GTID)]
    ends = [*starts[1:], next((e.offset for e in events(data) if e.code == ROTATE), len(data))]
    outcomes = []
    for start, end in zip(starts, ends, strict=True):
        try:
            outcomes.append(len(mover.move_events(data[start:end], start)) == end - start)
        except EventUnsupported as refusal:
            outcomes.append("X'78',X'',1 cannot be merged" in refusal.message and "refused")
    assert outcomes == [True, True, "refused", "refused", True]


@pytest.mark.deep(guard="tests/unit/test_merge_settings.py::test_merge_of_what_cannot_be_merged_is_refused")
def test_member_is_added_at_a_stated_position_and_not_removed(
    start_server: StartServer, tmp_path: Path
) -> None:
    shop = shop_of(start_server, "mariadb", tmp_path)
    instances = shop.daemon.settings["instances"]
    third = start_server("mariadb")
    third.sql("SET GLOBAL binlog_row_metadata = FULL; SET GLOBAL gtid_domain_id = 3")
    third.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(20))")
    third.sql("INSERT INTO shop.orders VALUES (1001, 'before')")
    instances["db3"] = {"source": third.url(), "start": "earliest"}
    with shop.daemon:
        shop.insert(0)
        shop.wait_for(1)
        shop.daemon.wait_for(lambda status: status["position"] is not None, "db3")
        shop.daemon.terminate()
        instances["shop"]["merge"].append("db3")
        shop.daemon.start()
        status = shop.daemon.wait_for(lambda status: status["note"] is not None)
        assert "db3 was added to the merge at " in status["note"]
        third.sql("INSERT INTO shop.orders VALUES (1002, 'after')")
        shop.wait_for(2)
        assert shop.ids() == [1, 1002]
        shop.daemon.terminate()
        instances["shop"]["merge"].remove("db1")
        shop.daemon.start()
        status = shop.daemon.wait_for(lambda status: status["state"] == "stopped")
        assert "db1 is missing" in status["why"]


@pytest.mark.deep(
    guard="tests/unit/test_merge_log.py::test_server_that_has_failed_over_and_is_idle_holds_nothing_back"
)
def test_member_that_has_failed_over_and_is_idle_holds_nothing_back(
    start_server: StartServer, tmp_path: Path
) -> None:
    shop = shop_of(start_server, "mariadb", tmp_path)
    replica = replica_of(shop.servers[0], start_server)
    replica.sql("SET GLOBAL binlog_row_metadata = FULL")
    address = replica.url().rpartition("@")[2]
    shop.daemon.settings["instances"]["db1"] |= {"servers": [address], "fail_over_after": 1}
    with shop.daemon:
        shop.insert(0, 2)
        shop.insert(1, 2)
        shop.wait_for(4)
        wait_until(lambda: gtids_executed(replica) == gtids_executed(shop.servers[0]))
        shop.servers[0].kill()
        shop.daemon.wait_for(lambda status: str(status["server"]).endswith(address), "db1")
        shop.insert(1)
        shop.wait_for(5)
        replica.sql("INSERT INTO shop.orders VALUES (100, 'after')")
        shop.wait_for(6)
        assert sorted(shop.ids()) == [1, 2, 3, 4, 5, 100]
