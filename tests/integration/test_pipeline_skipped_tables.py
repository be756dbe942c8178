# SPDX-License-Identifier: Apache-2.0
"""Tables whose target refuses their rows: a pipeline continues without them until they are reloaded."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.engine.run import PipelineRun
from penstock.engine.tables import PipelineTables
from penstock.engine.task_plan import Failure
from penstock.errors import ConnectionLost, DiskFailed, OptionInvalid, PrivilegeMissing, ValueMalformed
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from penstock.pipeline.preview import preview
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.pipeline.state import PipelineState
from penstock.spark.driver import SparkDriver
from tests.support.pipeline.engines import engine  # noqa: F401
from tests.support.pipeline.oracle import assert_same, delta_rows, mysql_rows, source_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


@contextmanager
def state_of(settings: PipelineSettings) -> Iterator[PipelineState]:
    state = PipelineState.open(settings.state, settings.name)
    try:
        yield state
    finally:
        state.close()


def stopped(settings: PipelineSettings) -> dict[str, str]:
    """Return the skipped tables of a pipeline without their source's name, and the reasons."""
    with state_of(settings) as state:
        progress = state.checkpoint()
    assert progress is not None
    return {key.removeprefix("shop/"): why for key, why in progress.stopped.items()}


def read_again(settings: PipelineSettings, *tables: TableName) -> list[str]:
    with state_of(settings) as state:
        return [state.request_resnapshot("shop", table) for table in tables]


@pytest.mark.deep(keep=("local-mirror",))
@pytest.mark.parametrize("mode", ["mirror", "feed"])
def test_target_table_that_refuses_rows_stops_no_other(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    mode: str,
) -> None:
    """A mirror is written in the second stage, a feed by the tasks that decode rows."""
    database = fresh_database(mysql_server)
    good, refused, dropped = (TableName(database, name) for name in ("good", "refused", "dropped"))
    for table in (good, refused, dropped):
        mysql_server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, a INT); INSERT INTO {table} VALUES (1, 1), (2, 2)"
        )
    file = tmp_path / "shop.yaml"
    written = {
        "source": {"url": mysql_server.url("root"), "name": "shop", "tables": f"{database}.*"},
        "sink": {"mysql": {"url": mariadb_server.url("root"), "mode": mode}},
        "batch": {"interval": 0},
        "errors": {"table": "skip_table"},
    }
    file.write_text(json.dumps(written), encoding="utf-8")
    settings = load_pipeline(file)
    run_to_end(engine, settings)
    mariadb_server.sql(
        f"CREATE TRIGGER {database}.guard BEFORE INSERT ON {refused} FOR EACH ROW"
        " SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not today'"
    )
    mariadb_server.sql(f"DROP TABLE {dropped}")
    # Loaded chunks are refused like rows of the log.
    (number,) = read_again(settings, refused)
    for table in (refused, dropped, good):
        mysql_server.sql(f"INSERT INTO {table} VALUES (3, 3), (4, 4); DELETE FROM {table} WHERE id = 2")
    run_to_end(engine, settings)
    tables = stopped(settings)
    assert sorted(tables) == [str(dropped), str(refused)]
    assert "not today" in tables[str(refused)]
    assert "no table" in tables[str(dropped)]
    assert rows_of(mariadb_server, good, mode) == source_rows(mysql_server, database, "good")
    shown = CliRunner().invoke(make_app(), ["pipelines", "show", str(file)]).stdout
    assert "not today" in shown
    with state_of(settings) as state:
        asked = state.request(number)
    assert asked is not None
    assert asked.state == "failed"
    # Changes and statements logged for the skipped tables have no effect.
    mysql_server.sql(
        f"TRUNCATE {dropped}; INSERT INTO {dropped} VALUES (5, 5); INSERT INTO {good} VALUES (5, 5)"
    )
    run_to_end(engine, settings)
    assert rows_of(mariadb_server, good, mode) == source_rows(mysql_server, database, "good")
    mariadb_server.sql(f"DROP TRIGGER {database}.guard")
    read_again(settings, refused, dropped)
    run_to_end(engine, settings)
    assert stopped(settings) == {}
    for table in (good, refused, dropped):
        mysql_server.sql(f"INSERT INTO {table} VALUES (6, 6)")
    run_to_end(engine, settings)
    assert rows_of(mariadb_server, dropped, mode) == source_rows(mysql_server, database, "dropped")
    if mode == "mirror":
        assert rows_of(mariadb_server, refused, mode) == source_rows(mysql_server, database, "refused")
    mariadb_server.sql(f"DROP DATABASE {database}")


def rows_of(server: Server, table: TableName, mode: str) -> list[dict[str, object]]:
    """Return a target's rows by key; for a feed, the rows that result from its changes."""
    rows = mysql_rows(server, table.database, table.table)
    if mode == "feed":
        rows.sort(key=lambda row: (row["_commit_version"], row["_row"]))
        left = {row["id"]: row for row in rows}
        rows = [row for row in left.values() if row["_change_type"] != "delete"]
    return sorted(({"id": row["id"], "a": row["a"]} for row in rows), key=lambda row: int(row["id"]))


@pytest.mark.deep(keep=("local",))
def test_key_that_a_lake_cannot_hold_stops_only_its_table(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    odd = "SET SESSION sql_mode = 'ALLOW_INVALID_DATES'; INSERT INTO bad VALUES ('2026-02-30', 1)"
    for table in ("bad", "good"):
        mysql_server.sql(
            f"CREATE TABLE {table} (day DATE PRIMARY KEY, a INT);"
            f"INSERT INTO {table} VALUES ('2026-01-01', 1)",
            database=database,
        )
    mysql_server.sql(odd, database=database)
    lake = tmp_path / "lake"
    sink = {"delta": {"path": str(lake)}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, errors={"table": "skip_table"})

    def assert_followed(table: str) -> None:
        assert_same(
            source_rows(mysql_server, database, table), delta_rows(f"{lake}/{database}/{table}"), key=["day"]
        )

    # Loaded rows are refused when they are read, logged rows when the table is committed.
    for origin in ("load", "log"):
        if origin == "log":
            mysql_server.sql(odd, database=database)
        mysql_server.sql("UPDATE good SET a = a + 1", database=database)
        run_to_end(engine, settings)
        assert_followed("good")
        tables = stopped(settings)
        assert list(tables) == [f"{database}.bad"], origin
        assert "2026-02-30" in tables[f"{database}.bad"]
        mysql_server.sql("DELETE FROM bad WHERE a = 1 AND day > '2026-02-01'", database=database)
        read_again(settings, TableName(database, "bad"))
        run_to_end(engine, settings)
        assert stopped(settings) == {}
        assert_followed("bad")


def test_error_of_all_tables_stops_none_of_them(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY); CREATE TABLE u (id INT PRIMARY KEY)", database=database
    )
    settings = pipeline_of(mysql_server, database, {"delta": {"path": str(tmp_path / "lake")}}, tmp_path)
    first, other = f"shop/{database}.t", f"shop/{database}.u"
    with state_of(settings) as state:
        tables = PipelineTables(settings, state, settings.make_sink(), [], lambda *_, **__: None)
        tables.open()
        assert not tables.stop([Failure(DiskFailed("no room"), first), Failure(ValueMalformed("odd"), other)])
        assert not tables.stop([Failure(ConnectionLost("away"), first)])
        assert not tables.stop([Failure(ValueMalformed("odd"))])
        assert not tables.stopped
        # After a transient error, the batch is retried without the table.
        assert tables.stop([Failure(ConnectionLost("away"), first), Failure(PrivilegeMissing("no"), other)])
        assert list(tables.stopped) == [other]
        assert not tables.stop([Failure(PrivilegeMissing("no"), other)]), "it was left out already"


def test_mask_for_no_table_is_refused_before_anything_is_created(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE customers (id INT PRIMARY KEY, email TEXT)", database=database)
    mask = {"mask": {"tables": f"{database}.custmers", "columns": {"email": "hash"}}}
    sink = {"delta": {"path": str(tmp_path / "lake")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, steps=[mask])
    (finding,) = [finding for finding in preview(settings)["findings"] if finding["fatal"]]
    assert finding["mend"] == f"Did you mean {database}.customers?"
    with state_of(settings) as state:
        tables = PipelineTables(
            settings, state, settings.make_sink(), settings.make_steps(), lambda *_, **__: None
        )
        with pytest.raises(OptionInvalid, match=f"no table matches {database}.custmers"):
            tables.open()
    assert not (tmp_path / "lake" / database).exists()


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_skipped_tables.py::test_error_of_all_tables_stops_none_of_them"
)
def test_missing_target_stops_the_pipeline_and_none_of_its_tables(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    for table in ("t", "u"):
        mysql_server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY); INSERT INTO {table} VALUES (1)", database=database
        )
    lake = tmp_path / "lake"
    sink = {"delta": {"path": str(lake)}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, errors={"table": "skip_table"})

    def drop_target(_: Mapping[str, Any]) -> None:
        if (lake / database).exists():
            shutil.rmtree(lake)
            mysql_server.sql("INSERT INTO t VALUES (2); INSERT INTO u VALUES (2)", database=database)

    with pytest.raises(OptionInvalid, match="is gone"):
        PipelineRun(settings, SparkDriver(spark), report=drop_target).run()
    assert stopped(settings) == {}


def test_type_of_rows_within_a_batch_that_a_history_cannot_take_stops_their_table_alone(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    for table in ("t", "u"):
        mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY)", database=database)
    sink = {"delta": {"path": str(tmp_path / "lake"), "mode": "history"}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, errors={"table": "skip_table"})
    run_to_end(LocalDriver(), settings)
    mysql_server.sql("ALTER TABLE t ADD c INT; INSERT INTO t VALUES (1, 1)", database=database)
    run_to_end(LocalDriver(), settings)
    mysql_server.sql(
        "ALTER TABLE t DROP c, ADD c VARBINARY(9); INSERT INTO t VALUES (2, x'01'); ALTER TABLE t DROP c;"
        " INSERT INTO u VALUES (1)",
        database=database,
    )
    run_to_end(LocalDriver(), settings)
    # The last ALTER makes the table fit the target again, so the pipeline has read the table again.
    assert stopped(settings) == {}
    lake = f"{tmp_path}/lake/{database}"
    assert {row["id"] for row in delta_rows(f"{lake}/t")} == {1, 2}
    assert [row["id"] for row in delta_rows(f"{lake}/u")] == [1]
