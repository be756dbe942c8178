# SPDX-License-Identifier: Apache-2.0
"""Pipelines on Spark: full loads and changes under a busy writer, into targets of several kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.pipeline.oracle import Row, assert_same, delta_rows, mysql_rows, source_rows
from tests.support.pipeline.running import (
    pipeline_of,
    run_to_end,
    running,
    wait_for_batches,
    wait_until_loaded,
)
from tests.support.pipeline.workload import Workload
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

Rows = Callable[[str, str], list[Row]]


def into_mysql(server: Server, folder: Path) -> tuple[dict[str, Any], Rows]:
    return {"mysql": {"url": server.url("root")}}, lambda database, table: mysql_rows(server, database, table)


def into_delta(server: Server, folder: Path) -> tuple[dict[str, Any], Rows]:
    lake = folder / "lake"
    return {"delta": {"path": str(lake)}}, lambda database, table: delta_rows(str(lake / database / table))


@pytest.mark.parametrize("into", [into_mysql, into_delta])
def test_busy_source_and_its_target_are_equal_in_the_end(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    into: Callable[[Server, Path], tuple[dict[str, Any], Rows]],
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=11, ddl=True)
    workload.create()
    sink, rows = into(mariadb_server, tmp_path)
    settings = pipeline_of(mysql_server, database, sink, tmp_path, load={"chunk_rows": 40})
    with workload.busy(0.01):
        with running(spark, settings):
            done = wait_until_loaded(settings)
            done = wait_for_batches(settings, done + 1)
        # A second run continues where the first was stopped.
        with running(spark, settings):
            wait_for_batches(settings, done + 2)
    shown = run_to_end(spark, settings)
    for table in workload.tables:
        wanted = source_rows(mysql_server, database, table)
        assert_same(wanted, rows(database, table), key=workload.keys(table))
    assert run_to_end(spark, settings) == [], f"nothing is left after {shown}"
