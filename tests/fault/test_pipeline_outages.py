# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose server and whose coordination store go away and come back."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.fixture_types import FreshDatabase
from tests.patience import wait_until
from tests.pipeline_running import opened, pipeline_of, running
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
