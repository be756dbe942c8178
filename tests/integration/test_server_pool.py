# SPDX-License-Identifier: Apache-2.0
"""A server that the pool lends to a test is in the same state as a new server: it is cleaned completely, or
replaced.
"""

from collections.abc import Callable, Iterator

import pymysql
import pytest

from tests.support.suite.server_pool import ServerPool, ServerState
from tools.servers import Server

USED = {
    "mysql": [
        "INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'",
        "SET GLOBAL rpl_semi_sync_source_timeout = 3600000, GLOBAL rpl_semi_sync_source_enabled = ON",
        "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = 1, SOURCE_USER = 'repl'",
        "START REPLICA",
    ],
    "mariadb": [
        "CREATE ROLE reader",
        "SET GLOBAL gtid_slave_pos = '7-7-7'",
        "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = 1, MASTER_USER = 'repl'",
        "CHANGE MASTER 'second' TO MASTER_HOST = '127.0.0.1', MASTER_PORT = 2, MASTER_USER = 'repl'",
        "START ALL SLAVES",
        "SET GLOBAL rpl_semi_sync_master_timeout = 3600000, GLOBAL rpl_semi_sync_master_enabled = ON",
    ],
}


@pytest.fixture
def pool() -> Iterator[ServerPool]:
    pool = ServerPool(idle_max=1)
    yield pool
    pool.close()


def state_of(server: Server) -> ServerState:
    with server.connect() as connection, connection.cursor() as cursor:
        return ServerState.read(cursor)


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_server_used_in_every_way_is_lent_again_like_new(
    require_flavor: Callable[[str], None], pool: ServerPool, flavor: str
) -> None:
    require_flavor(flavor)
    options = {"performance_schema": False}
    with pool.lend(flavor, options) as server:
        initial, pid = state_of(server), server.pid
        server.sql(
            "CREATE DATABASE `a``b`; CREATE TABLE `a``b`.t (id INT PRIMARY KEY);"
            "INSERT INTO `a``b`.t VALUES (1);"
            "CREATE USER reader@localhost; GRANT SELECT ON `a``b`.* TO reader@localhost; FLUSH BINARY LOGS;"
            "SET GLOBAL binlog_row_metadata = MINIMAL, GLOBAL max_connections = 77, GLOBAL sql_mode = 'ANSI'"
        )
        for statement in USED[flavor]:
            server.sql(statement)
        client = server.connect(autocommit=False)
        client.cursor().execute("SELECT * FROM `a``b`.t FOR UPDATE")

    with pool.lend(flavor, options) as server:
        assert (pool.counts.started, pool.counts.reused, pool.counts.replaced) == (1, 1, [])
        assert server.pid == pid
        assert not state_of(server).differences(initial)
        assert [path.name for path in server.binlog_files()] == ["mysql-bin.000001"]
        assert {row[2] for row in server.sql("SHOW BINLOG EVENTS")} <= {
            *("Format_desc", "Previous_gtids", "Gtid_list", "Binlog_checkpoint")
        }
        with pytest.raises(pymysql.err.OperationalError):
            client.ping(reconnect=False)


def test_server_is_lent_with_runtime_options_of_each_test(
    require_flavor: Callable[[str], None], pool: ServerPool
) -> None:
    require_flavor("mariadb")

    def shown(server: Server) -> tuple[object, ...]:
        return server.sql("SELECT @@binlog_row_metadata, @@sync_binlog")[0]

    for options, values in (
        ({"binlog_row_metadata": "MINIMAL", "sync_binlog": 1}, ("MINIMAL", 1)),
        ({"sync_binlog": 1}, ("FULL", 1)),
        ({}, ("FULL", 0)),
    ):
        with pool.lend("mariadb", options) as server:
            assert shown(server) == values
            if "binlog_row_metadata" in options:
                server.restart()
                assert shown(server) == values
    assert (pool.counts.started, pool.counts.reused, pool.counts.replaced) == (1, 2, [])


def prepare_transaction(server: Server) -> None:
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY)")
    server.sql("XA START 'x'; INSERT INTO d.t VALUES (1); XA END 'x'; XA PREPARE 'x'")


CHANGES: dict[str, tuple[Callable[[Server], object], str]] = {
    "transaction": (prepare_transaction, "the test left a prepared transaction"),
    "privileges": (lambda server: server.sql("REVOKE SELECT ON *.* FROM repl"), "system_tables: mysql."),
    "killed": (lambda server: server.kill(), "the test stopped it"),
    "options": (lambda server: server.restart(binlog_checksum="NONE"), "with other options"),
}


@pytest.mark.deep(keep=("transaction", "privileges"))
@pytest.mark.parametrize("change", CHANGES)
def test_server_that_cannot_be_cleaned_is_replaced(
    require_flavor: Callable[[str], None], pool: ServerPool, change: str
) -> None:
    require_flavor("mariadb")
    make_change, reason = CHANGES[change]
    with pool.lend("mariadb", {}) as server:
        make_change(server)
    with pool.lend("mariadb", {}) as replacement:
        assert replacement is not server
        assert not server.running
    assert reason in pool.counts.replaced[0]


def test_pool_stops_the_surplus_server_whose_settings_are_rarest(
    require_flavor: Callable[[str], None], pool: ServerPool
) -> None:
    require_flavor("mariadb")
    with pool.lend("mariadb", {}) as often:
        pass
    with pool.lend("mariadb", {}), pool.lend("mariadb", {"server_id": 7}) as rare:
        assert rare.sql("SELECT @@server_id") == [(7,)]
    assert often.running
    assert not rare.running
