# SPDX-License-Identifier: Apache-2.0
"""Spark on logs without column names: each row has the column names that were in force when it was logged."""

from pathlib import Path

from pyspark.sql import SparkSession

from tests.support.spark.session import Collected, head_of, run_to_head, spark, stream_of  # noqa: F401
from tests.support.suite.fixture_types import StartServer


def test_columns_that_swapped_names_in_the_backlog_keep_their_values_apart(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql", binlog_row_metadata="MINIMAL")
    server.sql("CREATE DATABASE shop; CREATE TABLE shop.t (id INT PRIMARY KEY, net INT, gross INT)")
    start = head_of(server)
    server.sql("INSERT INTO shop.t VALUES (1, 100, 119)")
    server.sql("ALTER TABLE shop.t RENAME COLUMN net TO gross, RENAME COLUMN gross TO net")
    server.sql("FLUSH BINARY LOGS; INSERT INTO shop.t (id, net, gross) VALUES (2, 200, 238)")
    collected = Collected("id", "net", "gross")
    run_to_head(stream_of(spark, server, "shop.t", startingOffsets=start), collected, tmp_path)
    assert collected.rows == [(1, 100, 119), (2, 200, 238)]


def test_rows_older_than_a_dropped_column_can_be_read_by_naming_columns(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql")
    server.sql("CREATE DATABASE shop; CREATE TABLE shop.t (id INT PRIMARY KEY, old INT, kept INT)")
    start = head_of(server)
    server.sql("INSERT INTO shop.t VALUES (1, 5, 10); ALTER TABLE shop.t DROP COLUMN old")
    server.sql("INSERT INTO shop.t VALUES (2, 20)")
    collected = Collected("id", "kept")
    frame = stream_of(
        spark,
        server,
        "shop.t",
        startingOffsets=start,
        columns="id,kept,_change_type,_commit_version,_metadata",
    )
    run_to_head(frame, collected, tmp_path)
    assert collected.rows == [(1, 10), (2, 20)]
