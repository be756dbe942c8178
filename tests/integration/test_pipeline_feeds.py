# SPDX-License-Identifier: Apache-2.0
"""If a table is altered within a batch, feeds and histories store each change with the columns with which it
was logged.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow.dataset
import pytest

from penstock.local.driver import LocalDriver
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# For each table: its statements, and the rows that a feed has after its inserts. The first row was loaded.
TABLES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "added": (
        "ALTER TABLE {t} ADD COLUMN n INT NULL; INSERT INTO {t} VALUES (3, 30, 300, 7)",
        [{"v": 10, "x": 100, "n": None}, {"v": 20, "x": 200, "n": None}, {"v": 30, "x": 300, "n": 7}],
    ),
    "dropped": (
        "ALTER TABLE {t} DROP COLUMN x; INSERT INTO {t} VALUES (3, 30)",
        [{"v": 10, "x": 100}, {"v": 20, "x": 200}, {"v": 30, "x": None}],
    ),
    "widened": (
        "ALTER TABLE {t} MODIFY v BIGINT; INSERT INTO {t} VALUES (3, 5000000000, 300)",
        [{"v": 10, "x": 100}, {"v": 20, "x": 200}, {"v": 5000000000, "x": 300}],
    ),
    "narrowed": (
        "ALTER TABLE {t} MODIFY v SMALLINT; INSERT INTO {t} VALUES (3, 30, 300)",
        [{"v": 10, "x": 100}, {"v": 20, "x": 200}, {"v": 30, "x": 300}],
    ),
    "converted": (
        "ALTER TABLE {t} MODIFY v VARCHAR(20); INSERT INTO {t} VALUES (3, 'c', 300)",
        [{"v": "10", "x": 100}, {"v": "20", "x": 200}, {"v": "c", "x": 300}],
    ),
    "renamed": (
        "ALTER TABLE {t} RENAME COLUMN x TO y; INSERT INTO {t} VALUES (3, 30, 300)",
        [{"v": 10, "x": 100, "y": None}, {"v": 20, "x": 200, "y": None}, {"v": 30, "x": None, "y": 300}],
    ),
    "several": (
        "ALTER TABLE {t} ADD COLUMN n INT FIRST, DROP COLUMN x, MODIFY v BIGINT;"
        "INSERT INTO {t} VALUES (7, 3, 30); ALTER TABLE {t} RENAME COLUMN v TO w;"
        "INSERT INTO {t} VALUES (8, 4, 40); ALTER TABLE {t} DROP COLUMN n; INSERT INTO {t} VALUES (5, 50)",
        [
            {"v": 10, "x": 100, "n": None, "w": None},
            {"v": 20, "x": 200, "n": None, "w": None},
            {"v": 30, "x": None, "n": 7, "w": None},
            {"v": None, "x": None, "n": 8, "w": 40},
            {"v": None, "x": None, "n": None, "w": 50},
        ],
    ),
}

Read = Callable[[str], list[dict[str, Any]]]


def _files(folder: Path, database: str, _: Server) -> tuple[dict[str, Any], Read]:
    def read(table: str) -> list[dict[str, Any]]:
        # A reader that merges the columns of all files, like Spark's mergeSchema.
        folder_of_table = folder / "feed" / database / table
        schema = pyarrow.parquet.read_schema(folder_of_table / "_schema.parquet")
        return _rows(pyarrow.dataset.dataset(folder_of_table, format="parquet", schema=schema).to_table())

    return {"files": {"path": str(folder / "feed")}}, read


def _lake_table(folder: Path, database: str, table: str) -> pyarrow.Table:
    return deltalake.DeltaTable(str(folder / "lake" / database / table)).to_pyarrow_table()


def first_periods(rows: pyarrow.Table) -> pyarrow.Table:
    """Return a history's rows as logged, without the periods added when rows are read again."""
    begin = "_valid_from_version"
    if begin not in rows.column_names:
        return rows
    first = rows.group_by("id").aggregate([(begin, "min")]).rename_columns(["id", begin])
    return rows.join(first, ["id", begin], join_type="inner")


def _delta(mode: str) -> Callable[[Path, str, Server], tuple[dict[str, Any], Read]]:
    def sink(folder: Path, database: str, _: Server) -> tuple[dict[str, Any], Read]:
        def read(table: str) -> list[dict[str, Any]]:
            return _rows(first_periods(_lake_table(folder, database, table)))

        return {"delta": {"path": str(folder / "lake"), "mode": mode}}, read

    return sink


def _mysql(_: Path, database: str, server: Server) -> tuple[dict[str, Any], Read]:
    def read(table: str) -> list[dict[str, Any]]:
        folder_of_table = f"{database}_feed.{table}"
        names = [str(row[0]) for row in server.sql(f"SHOW COLUMNS FROM {folder_of_table}")]
        return [
            dict(zip(names, row, strict=True))
            for row in server.sql(f"SELECT * FROM {folder_of_table} ORDER BY id")
        ]

    return {"mysql": {"url": server.url("root"), "mode": "feed"}}, read


def _rows(table: Any) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: int(row["id"]))


SINKS = {
    "files": _files,
    "delta_history": _delta("history"),
    "delta_feed": _delta("feed"),
    "mysql_feed": _mysql,
}


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_evolution.py::"
    "test_feed_target_accepts_rows_of_every_definition_after_the_first_of_each"
)
@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_feeds_and_histories_hold_every_change_of_tables_altered_within_a_batch(
    flavor: str,
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    source, other = mysql_server, mariadb_server
    if flavor == "mariadb":
        source, other = mariadb_server, mysql_server
    database = fresh_database(source)
    for table in TABLES:
        source.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT, x INT);"
            f"INSERT INTO {table} VALUES (1, 10, 100)",
            database=database,
        )
    pipelines = {}
    for name, make in SINKS.items():
        folder = tmp_path / name
        folder.mkdir()
        sink, read = make(folder, database, other)
        steps = [{"route": {"to": f"{database}_feed.{{table}}"}}] if name == "mysql_feed" else []
        settings = pipeline_of(source, database, sink, folder, name=name, steps=steps)
        run_to_end(LocalDriver(2), settings)
        pipelines[name] = settings, read
    for table, (statements, _) in TABLES.items():
        source.sql(
            f"INSERT INTO {table} VALUES (2, 20, 200); {statements.format(t=table)}", database=database
        )
    differences = {}
    for name, (settings, read) in pipelines.items():
        run_to_end(LocalDriver(2), settings)
        for table, (_, expected) in TABLES.items():
            actual_rows = [{key: row.get(key) for key in expected[0]} for row in read(table)]
            if actual_rows != expected:
                differences[name, table] = actual_rows
    assert not differences
    renamed = _lake_table(tmp_path / "delta_history", database, "renamed").to_pylist()
    now = [(row["id"], row["y"]) for row in renamed if row["_valid_to_version"] is None]
    assert sorted(now) == list(source.sql("SELECT id, y FROM renamed ORDER BY id", database=database))
    other.sql(f"DROP DATABASE {database}_feed")
