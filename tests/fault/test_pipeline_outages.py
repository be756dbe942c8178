# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose server and coordination store go down and return."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.errors import OptionInvalid, PositionPurged
from tests.support.capture.captured_log import purge
from tests.support.capture.replicas import gtids_executed, replica_of
from tests.support.pipeline.running import (
    opened,
    pipeline_of,
    run_to_end,
    running,
    wait_for_batches,
    wait_until_loaded,
)
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import wait_until
from tools.servers import Server
from tools.servers.proxy import Proxy


@pytest.mark.deep(
    guard="tests/unit/test_run_outages.py::test_outage_of_server_or_store_anywhere_is_retried_and_reported_at_once"
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
        reports: list[dict[str, Any]] = []

        def is_retrying(error: str) -> Callable[[], bool]:
            seen = len(reports)
            return lambda: any(
                (report["state"], report.get("error")) == ("retrying", error) for report in reports[seen:]
            )

        away = is_retrying("ConnectionLost")
        proxy.refuse()
        with running(spark, settings, lambda shown: reports.append(dict(shown))), opened(settings) as state:
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
    guard="tests/unit/test_run_outages.py::test_unavailable_server_is_replaced_by_the_next_reachable_one"
)
@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_lagging_pipeline_follows_a_failover(
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
    # A batch has only a few transactions, so that the pipeline lags while a server is killed.
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
    # The old primary is back, but receives no writes.
    primary.restart()
    with running(spark, settings):
        follower.sql("INSERT INTO behind.t VALUES (1000, 1)")
        wait_until(lambda: mariadb_server.sql(query) == follower.sql(query))
    mariadb_server.sql("DROP DATABASE behind")


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_restarts.py::test_first_load_deletes_rows_missing_from_the_source_if_an_earlier_run_wrote_them"
)
@pytest.mark.parametrize("how", ["lost", "reset"])
def test_rows_deleted_while_the_state_was_unavailable_are_deleted_from_the_target(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    how: str,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, n INT)", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)", database=database)
    settings = pipeline_of(mysql_server, database, {"mysql": {"url": mariadb_server.url("root")}}, tmp_path)
    run_to_end(spark, settings)
    mysql_server.sql("DELETE FROM t WHERE id = 2; UPDATE t SET n = 30 WHERE id = 3", database=database)
    if how == "lost":
        for path in tmp_path.glob("penstock-pipelines.db*"):
            path.unlink()
        with pytest.raises(OptionInvalid, match="its state knows of none"):
            run_to_end(spark, settings)
    with opened(settings) as state:
        state.reset()
    run_to_end(spark, settings)
    with opened(settings) as state:
        progress = state.checkpoint()
        assert progress is not None
        # Commit versions continue to increase, whichever server the run starts with.
        assert progress.offsets["shop"]["epoch"] == (1 if how == "reset" else 0)
    mysql_server.sql("INSERT INTO t VALUES (4, 4)", database=database)
    run_to_end(spark, settings)
    assert mariadb_server.sql("SELECT * FROM t ORDER BY id", database=database) == [(1, 1), (3, 30), (4, 4)]
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_restarts.py::test_tables_are_reloaded_in_their_current_state_if_the_log_is_lost"
)
@pytest.mark.parametrize("on_lost", ["resnapshot", "repair"])
def test_purged_changes_stop_the_run_or_reload_every_table(
    on_lost: str,
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    mariadb_server: Server,
    tmp_path: Path,
) -> None:
    source_server = start_server("mysql")
    source_server.sql("CREATE DATABASE purged; CREATE TABLE purged.t (id INT PRIMARY KEY, n INT)")
    source_server.sql("INSERT INTO purged.t VALUES (1, 1), (2, 2), (3, 3)")
    mariadb_server.sql("DROP DATABASE IF EXISTS purged")
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    source = {"url": source_server.url("root"), "name": "shop", "tables": "purged.*"}
    settings = pipeline_of(source_server, "purged", sink, tmp_path, source=source)
    run_to_end(spark, settings)
    source_server.sql("DELETE FROM purged.t WHERE id = 2; UPDATE purged.t SET n = 10 WHERE id = 1")
    source_server.sql("ALTER TABLE purged.t ADD m INT DEFAULT 5; INSERT INTO purged.t VALUES (4, 4, 4)")
    source_server.sql("FLUSH BINARY LOGS")
    purge(source_server)
    source_server.sql("INSERT INTO purged.t VALUES (5, 5, 5)")
    with pytest.raises(PositionPurged):
        run_to_end(spark, settings)
    again = pipeline_of(source_server, "purged", sink, tmp_path, source={**source, "on_lost": on_lost})
    run_to_end(spark, again)
    source_server.sql("DELETE FROM purged.t WHERE id = 3")
    run_to_end(spark, again)
    query = "SELECT * FROM purged.t ORDER BY id"
    assert mariadb_server.sql(query) == source_server.sql(query) == [(1, 10, 5), (4, 4, 4), (5, 5, 5)]
    with opened(again) as state:
        narrowed = [wish.what for wish in state.requests() if wish.what]
    assert len(narrowed) == (1 if on_lost == "repair" else 0)
    mariadb_server.sql("DROP DATABASE purged")
