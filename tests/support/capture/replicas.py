# SPDX-License-Identifier: Apache-2.0
"""Replicas that use the server's own replication."""

from tests.support.suite.fixture_types import StartServer
from tools.servers import REPLICATION_PASSWORD, REPLICATION_USER, Server


def replica_of(primary: Server, start_server: StartServer) -> Server:
    """Start a native replica of a server, and wait until it is connected."""
    follower = start_server(primary.flavor, log_slave_updates=True, relay_log="relay")
    if primary.family == "mysql":
        follower.sql(
            f"CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={primary.port},"
            f" SOURCE_USER='{REPLICATION_USER}', SOURCE_PASSWORD='{REPLICATION_PASSWORD}',"
            " SOURCE_AUTO_POSITION=1, SOURCE_SSL=1; START REPLICA"
        )
    else:
        follower.sql(
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port},"
            f" MASTER_USER='{REPLICATION_USER}', MASTER_PASSWORD='{REPLICATION_PASSWORD}',"
            " MASTER_USE_GTID=slave_pos; START SLAVE"
        )
    return follower


def gtids_executed(server: Server) -> str:
    gtids = "@@global.gtid_binlog_pos" if server.family == "mariadb" else "@@global.gtid_executed"
    return str(server.sql(f"SELECT {gtids}")[0][0]).replace("\n", "")
