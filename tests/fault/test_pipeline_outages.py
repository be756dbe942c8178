# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose server and whose coordination store go away and come back."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.fixture_types import FreshDatabase, StartServer
from tests.patience import wait_until
from tests.pipeline_running import opened, pipeline_of, running, wait_for_batches, wait_until_loaded
from tests.replicas import gtids_executed, replica_of
from tests.spark_session import spark  # noqa: F401
from tools.servers import Server
from tools.servers.proxy import Proxy


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_outages.py::test_outage_of_server_or_store_anywhere_is_retried_and_reported_at_once"
)
def test_pipeline_survives_the_loss_of_server_and_store_from_its_first_second(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1), (2)", database=database)

    def rows(server: Server) -> list[tuple[Any, ...]]:
        if not server.sql("SELECT 1 FROM information_schema.tables WHERE table_schema = %s", database):
            return []
        return server.sql("SELECT * FROM t ORDER BY id", database=database)

    def are_equal() -> bool:
        return rows(mariadb_server) == rows(mysql_server)

    with Proxy(mysql_server.port) as proxy:
        source = {"url": proxy.through(mysql_server.url("root")), "name": "shop", "tables": f"{database}.*"}
        sink = {"mysql": {"url": mariadb_server.url("root")}}
        settings = pipeline_of(mysql_server, database, sink, tmp_path, source=source)
        told: list[dict[str, Any]] = []

        def is_retrying(error: str) -> Callable[[], bool]:
            seen = len(told)
            return lambda: any((one["state"], one.get("error")) == ("retrying", error) for one in told[seen:])

        away = is_retrying("ConnectionLost")
        proxy.refuse()
        with running(spark, settings, lambda one: told.append(dict(one))), opened(settings) as state:
            wait_until(away)
            wait_until(lambda: state.shown().get("state") == "retrying")
            proxy.refuse(False)
            wait_until(are_equal)

            away = is_retrying("ConnectionLost")
            proxy.refuse()
            proxy.cut()
            mysql_server.sql(
                "ALTER TABLE t ADD n INT DEFAULT 7; DELETE FROM t WHERE id = 1", database=database
            )
            wait_until(away)
            proxy.refuse(False)
            wait_until(are_equal)

            away = is_retrying("CoordinationLost")
            path = settings.state.removeprefix("sqlite://")
            with closing(sqlite3.connect(path, isolation_level=None)) as locking:
                locking.execute("BEGIN EXCLUSIVE")
                mysql_server.sql("INSERT INTO t VALUES (3, 3)", database=database)
                wait_until(away)
                locking.execute("ROLLBACK")
            wait_until(are_equal)
            wait_until(lambda: state.shown().get("state") == "waiting for changes")
            assert "error" not in state.shown()
    assert rows(mysql_server) == [(2, 7), (3, 3)]
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_outages.py::test_server_that_is_away_is_replaced_by_the_next_that_answers"
)
@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_pipeline_that_is_behind_follows_a_fail_over(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    mariadb_server: Server,
    tmp_path: Path,
    flavor: str,
) -> None:
    primary = start_server(flavor)
    follower = replica_of(primary, start_server)
    primary.sql("CREATE DATABASE behind; CREATE TABLE behind.t (id INT PRIMARY KEY, n INT)")
    primary.sql("INSERT INTO behind.t VALUES (0, 0)")
    mariadb_server.sql("DROP DATABASE IF EXISTS behind")
    source = {
        "url": primary.url("root"),
        "servers": [f"127.0.0.1:{follower.port}"],
        "name": "shop",
        "tables": "behind.*",
    }
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    # A batch is a few transactions, so the run is behind for as long as it takes to kill a server.
    settings = pipeline_of(
        primary, "behind", sink, tmp_path, source=source, batch={"rows": 20, "interval": 0.2}
    )
    query = "SELECT * FROM behind.t ORDER BY id"
    with running(spark, settings):
        loaded = wait_until_loaded(settings)
        update = "UPDATE behind.t SET n = n + 1 WHERE id = 0"
        primary.sql(
            ";".join(f"INSERT INTO behind.t VALUES ({number}, 0); {update}" for number in range(1, 400))
        )
        primary.sql("DELETE FROM behind.t WHERE id % 7 = 3")
        wait_until(lambda: gtids_executed(follower) == gtids_executed(primary))
        wait_for_batches(settings, loaded + 1)
        primary.kill()
        assert mariadb_server.sql("SELECT COUNT(*) FROM behind.t")[0][0] < 200, "it is behind"
        follower.sql("UPDATE behind.t SET n = -1 WHERE id = 299")
        wait_until(lambda: mariadb_server.sql(query) == follower.sql(query))
    # The old primary is back, and nobody writes there any more.
    primary.restart()
    with running(spark, settings):
        follower.sql("INSERT INTO behind.t VALUES (1000, 1)")
        wait_until(lambda: mariadb_server.sql(query) == follower.sql(query))
    mariadb_server.sql("DROP DATABASE behind")
