# SPDX-License-Identifier: Apache-2.0
"""Columns of targets that were dropped by hand: an error of their table, which a resnapshot mends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deltalake
import pyarrow
import pytest

from penstock.engine.sink_runs import run_of
from penstock.errors import SchemaChanged
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.oracle import delta_rows, mysql_rows, source_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


def stopped(settings: PipelineSettings) -> dict[str, str]:
    """Return the skipped tables of a pipeline, and the reasons."""
    state = PipelineState.open(settings.state, settings.name)
    progress = state.checkpoint()
    state.close()
    assert progress is not None
    return dict(progress.stopped)


def read_again(settings: PipelineSettings, table: str) -> None:
    """Request that a table is read again."""
    state = PipelineState.open(settings.state, settings.name)
    state.request_resnapshot("shop", TableName.parse(table))
    state.close()


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_dropped_columns.py::test_column_missing_from_a_lake_table_is_refused"
)
def test_column_dropped_by_hand_stops_its_table_until_it_is_read_again(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    for table in ("dropped", "whole"):
        mysql_server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, a INT, b INT); INSERT INTO {table} VALUES (1, 1, 1)",
            database=database,
        )
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    skip: dict[str, Any] = {"errors": {"table": "skip_table"}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, **skip)
    run_to_end(LocalDriver(2), settings)
    mariadb_server.sql(f"ALTER TABLE {database}.dropped DROP COLUMN a")
    for table in ("dropped", "whole"):
        mysql_server.sql(f"INSERT INTO {table} VALUES (2, 2, 2)", database=database)
    with pytest.raises(SchemaChanged, match="no column a") as refused:
        run_to_end(LocalDriver(2), pipeline_of(mysql_server, database, sink, tmp_path))
    assert "penstock resnapshot" in (refused.value.hint or "")
    run_to_end(LocalDriver(2), settings)
    assert list(stopped(settings)) == [f"shop/{database}.dropped"]
    assert mariadb_server.sql(f"SELECT id, b FROM {database}.dropped") == [(1, 1)]
    assert mysql_rows(mariadb_server, database, "whole") == source_rows(mysql_server, database, "whole")
    read_again(settings, f"{database}.dropped")
    run_to_end(LocalDriver(2), settings)
    assert stopped(settings) == {}
    assert mysql_rows(mariadb_server, database, "dropped") == source_rows(mysql_server, database, "dropped")
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_dropped_columns.py::test_column_missing_from_a_lake_table_is_refused"
)
def test_following_another_change_does_not_add_a_dropped_column_again(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY, a INT); INSERT INTO t VALUES (1, 1)", database=database
    )
    settings = pipeline_of(mysql_server, database, {"mysql": {"url": mariadb_server.url("root")}}, tmp_path)
    run_to_end(LocalDriver(2), settings)
    mariadb_server.sql(f"ALTER TABLE {database}.t DROP COLUMN a")
    mysql_server.sql("ALTER TABLE t ADD COLUMN b INT; INSERT INTO t VALUES (2, 2, 2)", database=database)
    with pytest.raises(SchemaChanged, match="no column a"):
        run_to_end(LocalDriver(2), settings)
    mariadb_server.sql(f"DROP TABLE {database}.t")
    read_again(settings, f"{database}.t")
    run_to_end(LocalDriver(2), settings)
    assert mysql_rows(mariadb_server, database, "t") == source_rows(mysql_server, database, "t")
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_dropped_columns.py::test_column_missing_from_a_lake_table_is_refused"
)
def test_column_that_source_and_target_dropped_is_not_missing(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, a INT, b INT)", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, schema_changes="add_only")
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql("ALTER TABLE t DROP COLUMN a", database=database)
    run_to_end(LocalDriver(2), settings)
    mariadb_server.sql(f"ALTER TABLE {database}.t DROP COLUMN a")
    mysql_server.sql("INSERT INTO t VALUES (1, 1)", database=database)
    run_to_end(LocalDriver(2), settings)
    assert mariadb_server.sql(f"SELECT id, b FROM {database}.t") == [(1, 1)]
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_dropped_columns.py::test_column_missing_from_a_lake_table_is_refused"
)
def test_column_dropped_during_a_run_is_refused_after_the_next_batch(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY, a INT); INSERT INTO t VALUES (1, 1)", database=database
    )
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path)
    batches: list[Mapping[str, Any]] = []

    def note(report: Mapping[str, Any]) -> None:
        if report["state"] not in ("loading", "running") or len(batches) == 2:
            return
        batches.append(report)
        if len(batches) == 1:
            mariadb_server.sql(f"ALTER TABLE {database}.t DROP COLUMN a")
        mysql_server.sql(f"INSERT INTO t VALUES ({len(batches) + 1}, 2)", database=database)

    with pytest.raises(SchemaChanged, match="no column a"):
        run_of(settings, LocalDriver(2), until_caught_up=True, report=note).run()
    assert len(batches) == 2
    mariadb_server.sql(f"DROP DATABASE {database}")


def test_column_missing_from_a_lake_table_is_refused(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY, a INT); INSERT INTO t VALUES (1, 1)", database=database
    )
    settings = pipeline_of(mysql_server, database, {"delta": {"path": str(tmp_path / "lake")}}, tmp_path)
    run_to_end(LocalDriver(2), settings)
    folder = tmp_path / "lake" / database / "t"
    deltalake.write_deltalake(
        folder,
        pyarrow.table({"id": pyarrow.array([1], pyarrow.int32())}),
        mode="overwrite",
        schema_mode="overwrite",
    )
    mysql_server.sql("INSERT INTO t VALUES (2, 2)", database=database)
    with pytest.raises(SchemaChanged, match="no column a"):
        run_to_end(LocalDriver(2), settings)
    read_again(settings, f"{database}.t")
    run_to_end(LocalDriver(2), settings)
    assert delta_rows(str(folder)) == source_rows(mysql_server, database, "t")
