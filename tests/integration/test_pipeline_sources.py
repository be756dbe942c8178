# SPDX-License-Identifier: Apache-2.0
"""Pipelines with several sources, with files as the source, with a server that does not log column names, and
with many tables.
"""

from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import SparkSession

from penstock.errors import PrivilegeMissing, SchemaChanged
from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.sinks.mysql.sink import MysqlSink
from tests.support.pipeline.engines import engine  # noqa: F401
from tests.support.pipeline.oracle import assert_same, mysql_rows, source_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.pipeline.workload import Workload
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.nonempty import each
from tools.servers import Server


def sink_of(server: Server) -> dict[str, Any]:
    return {"mysql": {"url": server.url("root")}}


@pytest.mark.deep(keep=("local",))
def test_shards_on_two_servers_become_one_table(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    mariadb11_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    shards = {
        "one": (mysql_server, fresh_database(mysql_server)),
        "two": (mariadb_server, fresh_database(mariadb_server)),
    }
    for number, (server, database) in enumerate(shards.values()):
        server.sql(
            f"CREATE TABLE orders_{number} (id INT PRIMARY KEY, n INT);"
            f"INSERT INTO orders_{number} VALUES (1, {number}), (2, {number})",
            database=database,
        )
    settings = pipeline_of_values(
        {
            "name": "fleet",
            "sources": [
                {"name": name, "url": server.url("root"), "tables": f"{database}.*"}
                for name, (server, database) in shards.items()
            ],
            "steps": [
                {"route": {"to": "fleet_all.orders", "shard_column": "shard", "shard_value": "{instance}"}}
            ],
            "sink": sink_of(mariadb11_server),
            "batch": {"interval": 0},
        },
        tmp_path,
    )
    run_to_end(engine, settings)
    (first, first_database), (second, two) = shards.values()
    # The shards are altered one after the other, with writes before, between and after.
    first.sql(
        "INSERT INTO orders_0 VALUES (3, 0); ALTER TABLE orders_0 ADD COLUMN x INT;"
        "INSERT INTO orders_0 VALUES (4, 0, 4)",
        database=first_database,
    )
    second.sql("INSERT INTO orders_1 VALUES (3, 1); DELETE FROM orders_1 WHERE id = 1", database=two)
    run_to_end(engine, settings)
    second.sql("ALTER TABLE orders_1 ADD COLUMN x INT; INSERT INTO orders_1 VALUES (4, 1, 5)", database=two)
    # Truncating one shard leaves the rows of the other shard.
    first.sql("TRUNCATE TABLE orders_0; INSERT INTO orders_0 VALUES (9, 0, 9)", database=first_database)
    run_to_end(engine, settings)
    actual_rows = mariadb11_server.sql("SELECT shard, id, n, x FROM fleet_all.orders ORDER BY shard, id")
    of_two = [row[1:] for row in actual_rows if row[0] == "two"]
    assert of_two == [(2, 1, None), (3, 1, None), (4, 1, 5)]
    assert [row for row in actual_rows if row[0] == "one"] == [("one", 9, 0, 9)]
    mariadb11_server.sql("DROP DATABASE fleet_all")


@pytest.mark.deep(
    guard="tests/integration/test_load_watermark.py::test_exact_snapshot_of_keyless_rows_joins_the_log_without_a_gap_or_a_duplicate"
)
@pytest.mark.parametrize("mode", ["full", "consistent"])
def test_keyless_rows_are_loaded_at_one_position_of_the_log(
    mode: str,
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=8, keyless=True, big_rows=200)
    workload.create()
    settings = pipeline_of(mysql_server, database, sink_of(mariadb_server), tmp_path, load=mode)
    with workload.busy(0.002):
        # A failed load has written rows that are stale when the load is retried.
        with pytest.MonkeyPatch.context() as patch:
            commits = 0

            def commit(*_: object) -> None:
                nonlocal commits
                commits += 1
                if commits == 2:
                    raise PrivilegeMissing("the account was taken away")

            patch.setattr(MysqlSink, "commit", commit)
            with pytest.raises(PrivilegeMissing):
                run_to_end(spark, settings)
        run_to_end(spark, settings)
    run_to_end(spark, settings)
    for table in workload.tables:
        wanted = source_rows(mysql_server, database, table)
        assert_same(wanted, mysql_rows(mariadb_server, database, table), key=workload.keys(table))
    mariadb_server.sql(f"DROP DATABASE {database}")


def files_pipeline(source: Server, target: Server, database: str, folder: Path) -> PipelineSettings:
    return pipeline_of_values(
        {
            "name": "files",
            "source": {
                "path": str(source.directory / "data" / "mysql-bin.*"),
                "tables": f"{database}.*",
                "name": "files",
            },
            "sink": sink_of(target),
            "load": "none",
            "batch": {"interval": 0},
        },
        folder,
    )


@pytest.mark.deep(keep=("local",))
def test_files_alone_provide_the_tables_or_are_refused_by_name(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=3, big_rows=200)
    workload.create()
    workload.run(60)
    settings = files_pipeline(mysql_server, mariadb_server, database, tmp_path)
    run_to_end(engine, settings)
    for table in workload.tables:
        wanted = source_rows(mysql_server, database, table)
        assert_same(wanted, mysql_rows(mariadb_server, database, table), key=workload.keys(table))
    mysql_server.sql("ALTER TABLE accounts ADD COLUMN kind INT NOT NULL DEFAULT 4", database=database)
    with pytest.raises(SchemaChanged, match="values which the log does not show"):
        run_to_end(engine, settings)
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
def test_server_without_column_names_in_its_log_is_followed(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    mariadb_server: Server,
    tmp_path: Path,
) -> None:
    source = start_server("mysql", binlog_row_metadata="MINIMAL")
    source.sql("CREATE DATABASE plain_names")
    workload = Workload(source, "plain_names", seed=4, big_rows=200, ddl=True)
    workload.create()
    settings = pipeline_of(source, "plain_names", sink_of(mariadb_server), tmp_path)
    run_to_end(spark, settings)
    workload.run(80)
    run_to_end(spark, settings)
    for table in each(workload.tables):
        wanted = source_rows(source, "plain_names", table)
        assert_same(wanted, mysql_rows(mariadb_server, "plain_names", table), key=workload.keys(table))
    mariadb_server.sql("DROP DATABASE plain_names")


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_restarts.py::"
    "test_tables_that_share_a_target_without_shards_of_their_own_are_merged_by_key"
)
def test_tables_with_equal_keys_become_one_row_each_in_a_lake(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    for table in ("orders_1", "orders_2"):
        mysql_server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT); INSERT INTO {table} VALUES (1, 1), (2, 2)",
            database=database,
        )
    steps = [{"route": {"to": f"{database}.orders"}}]
    lake = {"delta": {"path": str(tmp_path / "lake")}}
    settings = pipeline_of(mysql_server, database, lake, tmp_path, steps=steps)
    run_to_end(spark, settings)
    mysql_server.sql("UPDATE orders_2 SET v = 5 WHERE id = 2", database=database)
    run_to_end(spark, settings)
    rows = deltalake.DeltaTable(str(tmp_path / "lake" / database / "orders")).to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["v"]) for row in rows) == [(1, 1), (2, 5)]
