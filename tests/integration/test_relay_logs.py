# SPDX-License-Identifier: Apache-2.0
"""A replica's relay logs return the rows of its source's own log."""

from typing import Any

from pymysql.cursors import DictCursor

import penstock
from tests.support.capture.captured_log import head_of
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.patience import wait_until
from tools.servers import REPLICATION_PASSWORD, Server

START = {
    "mysql": "CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={port}, SOURCE_USER='repl',"
    " SOURCE_PASSWORD='{password}', SOURCE_AUTO_POSITION=1, GET_SOURCE_PUBLIC_KEY=1; START REPLICA IO_THREAD",
    "mariadb": "CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port}, MASTER_USER='repl',"
    " MASTER_PASSWORD='{password}', MASTER_USE_GTID=slave_pos; START SLAVE IO_THREAD",
}


def ids_of(source: Any) -> list[int]:
    batches = penstock.read_binlog(source, "shop.orders")
    return [one for batch in batches for one in batch.to_arrow()["id"].to_pylist()]


def has_received(replica: Server, origin: Server) -> bool:
    """Return whether a replica's relay logs contain its source's whole log, so that the files no longer
    change.
    """
    source, statement = ("Master", "SLAVE") if origin.family == "mariadb" else ("Source", "REPLICA")
    with replica.connect(cursorclass=DictCursor) as connection, connection.cursor() as cursor:
        cursor.execute(f"SHOW {statement} STATUS")
        found = cursor.fetchone()
    head = head_of(origin)
    return found is not None and (head.file, head.offset) == (
        found[f"{source}_Log_File"],
        found[f"Read_{source}_Log_Pos"],
    )


def check(flavor: str, start_server: StartServer) -> None:
    origin = start_server(flavor)
    replica: Server = start_server(flavor, relay_log="relay-bin", relay_log_purge=False)
    origin.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY)")
    for number in range(5):
        origin.sql("INSERT INTO shop.orders VALUES (%s)", number)
    origin.sql("FLUSH BINARY LOGS")
    replica.sql(START[origin.family].format(port=origin.port, password=REPLICATION_PASSWORD))
    origin.sql("INSERT INTO shop.orders VALUES (100)")
    relay_logs = str(replica.data_directory / "relay-bin.*")
    wait_until(lambda: has_received(replica, origin))
    assert ids_of(relay_logs) == ids_of(origin.binlog_files()) == [0, 1, 2, 3, 4, 100]


def test_relay_logs_of_a_mysql_replica_are_read(start_server: StartServer) -> None:
    check("mysql", start_server)


def test_relay_logs_of_a_mariadb_replica_are_read(start_server: StartServer) -> None:
    check("mariadb", start_server)
