# SPDX-License-Identifier: Apache-2.0
"""Target columns that were dropped by hand: replication of the table stops with an error, and a resnapshot
repairs the target.
"""

from collections.abc import Iterator, Mapping
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


def make_tables(server: Server, database: str, *tables: str) -> None:
    """Create tables with one row."""
    for table in tables:
        server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, a INT, b INT); INSERT INTO {table} VALUES (1, 1, 1)",
            database=database,
        )


def load_tables(
    server: Server, database: str, sink: dict[str, Any], folder: Path, *tables: str, **options: Any
) -> PipelineSettings:
    """Create tables with one row, and run a pipeline that loads them. Return its settings."""
    make_tables(server, database, *tables)
    settings = pipeline_of(server, database, sink, folder, **options)
    run_to_end(LocalDriver(2), settings)
    return settings


@pytest.fixture
def database(mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase) -> Iterator[str]:
    """A database of the source, which a pipeline may copy to the other server."""
    database = fresh_database(mysql_server)
    yield database
    mariadb_server.sql(f"DROP DATABASE IF EXISTS {database}")


@pytest.fixture
def sink(mariadb_server: Server) -> dict[str, Any]:
    return {"mysql": {"url": mariadb_server.url("root")}}


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
    mysql_server: Server, mariadb_server: Server, database: str, sink: dict[str, Any], tmp_path: Path
) -> None:
    skip: dict[str, Any] = {"errors": {"table": "skip_table"}}
    settings = load_tables(mysql_server, database, sink, tmp_path, "dropped", "whole", **skip)
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


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_dropped_columns.py::test_column_missing_from_a_lake_table_is_refused"
)
def test_following_another_change_does_not_add_a_dropped_column_again(
    mysql_server: Server, mariadb_server: Server, database: str, sink: dict[str, Any], tmp_path: Path
) -> None:
    settings = load_tables(mysql_server, database, sink, tmp_path, "t")
    mariadb_server.sql(f"ALTER TABLE {database}.t DROP COLUMN a")
    mysql_server.sql("ALTER TABLE t ADD COLUMN c INT; INSERT INTO t VALUES (2, 2, 2, 2)", database=database)
    with pytest.raises(SchemaChanged, match="no column a"):
        run_to_end(LocalDriver(2), settings)
    mariadb_server.sql(f"DROP TABLE {database}.t")
    read_again(settings, f"{database}.t")
    run_to_end(LocalDriver(2), settings)
    assert mysql_rows(mariadb_server, database, "t") == source_rows(mysql_server, database, "t")


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_dropped_columns.py::test_column_missing_from_a_lake_table_is_refused"
)
def test_column_that_source_and_target_dropped_is_not_missing(
    mysql_server: Server, mariadb_server: Server, database: str, sink: dict[str, Any], tmp_path: Path
) -> None:
    settings = load_tables(mysql_server, database, sink, tmp_path, "t", schema_changes="add_only")
    mysql_server.sql("ALTER TABLE t DROP COLUMN a", database=database)
    run_to_end(LocalDriver(2), settings)
    mariadb_server.sql(f"ALTER TABLE {database}.t DROP COLUMN a")
    mysql_server.sql("INSERT INTO t VALUES (2, 2)", database=database)
    run_to_end(LocalDriver(2), settings)
    assert mariadb_server.sql(f"SELECT id, b FROM {database}.t ORDER BY id") == [(1, 1), (2, 2)]


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_dropped_columns.py::test_column_missing_from_a_lake_table_is_refused"
)
def test_column_dropped_during_a_run_is_refused_after_the_next_batch(
    mysql_server: Server, mariadb_server: Server, database: str, sink: dict[str, Any], tmp_path: Path
) -> None:
    make_tables(mysql_server, database, "t")
    settings = pipeline_of(mysql_server, database, sink, tmp_path)
    batches: list[Mapping[str, Any]] = []

    def note(report: Mapping[str, Any]) -> None:
        if report["state"] not in ("loading", "running") or len(batches) == 2:
            return
        batches.append(report)
        if len(batches) == 1:
            mariadb_server.sql(f"ALTER TABLE {database}.t DROP COLUMN a")
        mysql_server.sql(f"INSERT INTO t VALUES ({len(batches) + 1}, 2, 2)", database=database)

    with pytest.raises(SchemaChanged, match="no column a"):
        run_of(settings, LocalDriver(2), until_caught_up=True, report=note).run()
    assert len(batches) == 2


def test_column_missing_from_a_lake_table_is_refused(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    lake = {"delta": {"path": str(tmp_path / "lake")}}
    settings = load_tables(mysql_server, database, lake, tmp_path, "t")
    folder = tmp_path / "lake" / database / "t"
    deltalake.write_deltalake(
        folder,
        pyarrow.table({"id": pyarrow.array([1], pyarrow.int32())}),
        mode="overwrite",
        schema_mode="overwrite",
    )
    mysql_server.sql("INSERT INTO t VALUES (2, 2, 2)", database=database)
    with pytest.raises(SchemaChanged, match="no column a"):
        run_to_end(LocalDriver(2), settings)
    read_again(settings, f"{database}.t")
    run_to_end(LocalDriver(2), settings)
    assert delta_rows(str(folder)) == source_rows(mysql_server, database, "t")
