# SPDX-License-Identifier: Apache-2.0
"""`penstock run --local` on real servers: kill -9, SIGTERM, restart, and the same target contents as with
Spark.
"""

import json
import signal
from pathlib import Path

import pytest

from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.verify.verify import verify
from tests.support.pipeline.commands import lines, penstock, write_pipeline
from tests.support.pipeline.oracle import (
    assert_same,
    delta_rows,
    mysql_rows,
    net_rows,
    parquet_rows,
    source_rows,
)
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.pipeline.workload import Workload
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server

# A mirror and a feed.
SINKS = ("mysql", "files")


@pytest.mark.deep(keep=("mysql",))
@pytest.mark.parametrize("kind", SINKS)
def test_killed_and_restarted_pipeline_ends_equal_to_its_source(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path, kind: str
) -> None:
    database = fresh_database(mysql_server)
    mirrors = kind == "mysql"
    workload = Workload(mysql_server, database, seed=31, truncates=mirrors, big_rows=100)
    workload.create(filled=mirrors)
    url, feed = mariadb_server.url("root"), tmp_path / "feed"
    sink = {"mysql": {"url": url}} if mirrors else {"files": {"path": str(feed)}}
    file = write_pipeline(tmp_path, mysql_server, database, sink, "full" if mirrors else "none")
    words = ("run", "--local", str(file), "--json")
    if not mirrors:
        # A feed starts at the log's current end.
        run_to_end(LocalDriver(2), load_pipeline(file))
    with workload.busy(0.002):
        with penstock(*words) as killed:
            lines(killed, 2)
            killed.send_signal(signal.SIGKILL)
        with penstock(*words) as stopped:
            whole_lines = lines(stopped, 2)
            stopped.send_signal(signal.SIGTERM)
            assert stopped.wait(WAIT_SECONDS_MAX) == 0
    assert whole_lines[-1].keys() >= {"pipeline", "state", "rows", "written", "seconds", "rows_per_second"}
    run_to_end(LocalDriver(2), load_pipeline(file))
    for table in each(workload.tables):
        wanted = source_rows(mysql_server, database, table)
        if mirrors:
            actual_rows = mysql_rows(mariadb_server, database, table)
        else:
            changes = parquet_rows(str(feed / database / table / "[!_]*.parquet"))
            places = [
                (row["_commit_version"], row["_metadata"]["row"], row["_change_type"]) for row in changes
            ]
            assert len(set(places)) == len(places), f"a change of {table} is there twice"
            actual_rows = net_rows(changes, wanted)
        assert_same(wanted, actual_rows, key=workload.keys(table))


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_sinks.py::test_failed_sink_is_named_and_catches_up_while_the_other_stands"
)
def test_killed_pipeline_with_a_fast_and_a_blocked_sink_ends_equal_in_both(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    """Two tables are locked in the mirror, so its writes hang while the feed continues."""
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=33, truncates=False, big_rows=100)
    workload.create(filled=False)
    sinks = {
        "mirror": {"mysql": {"url": mariadb_server.url("root")}},
        "feed": {"files": {"path": str(tmp_path / "feed")}},
    }
    file = tmp_path / "shop.yaml"
    source = {"url": mysql_server.url("root"), "name": "shop", "tables": f"{database}.*"}
    values = {"source": source, "sinks": sinks, "batch": {"interval": 0, "rows": 200}}
    file.write_text(json.dumps(values), encoding="utf-8")
    run_to_end(LocalDriver(2), load_pipeline(file))
    locks = ", ".join(f"`{database}`.`{table}` WRITE" for table in workload.tables)
    words = ("run", "--local", str(file), "--json")
    with workload.busy(0.002):
        with mariadb_server.connect() as blocker, blocker.cursor() as cursor:
            cursor.execute(f"LOCK TABLES {locks}")
            with penstock(*words) as killed:
                ahead = lines(killed, 4)
                killed.send_signal(signal.SIGKILL)
        with penstock(*words) as killed:
            both = lines(killed, 6)
            killed.send_signal(signal.SIGKILL)
    assert {line["sink"] for line in ahead} == {"feed"}, "the mirror is behind"
    assert {line["sink"] for line in both} == {"feed", "mirror"}
    run_to_end(LocalDriver(2), load_pipeline(file))
    for table in each(workload.tables):
        wanted = source_rows(mysql_server, database, table)
        assert_same(wanted, mysql_rows(mariadb_server, database, table), key=workload.keys(table))
        changes = parquet_rows(str(tmp_path / "feed" / database / table / "[!_]*.parquet"))
        places = [(row["_commit_version"], row["_metadata"]["row"], row["_change_type"]) for row in changes]
        assert len(set(places)) == len(places), f"a change of {table} is there twice"
        assert_same(wanted, net_rows(changes, wanted), key=workload.keys(table))
    assert verify(load_pipeline(file).of_sink("mirror")).equal


@pytest.mark.deep(
    guard="tests/integration/test_local_pipelines.py"
    "::test_killed_and_restarted_pipeline_ends_equal_to_its_source"
)
@pytest.mark.parametrize("kind", ["mysql", "delta"])
def test_targets_are_equal_with_spark_and_without(
    request: pytest.FixtureRequest,
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    kind: str,
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=32, ddl=True, keyless=kind == "mysql")
    workload.create()
    # Each driver has its own state and its own tables.
    places = {"spark": request.getfixturevalue("spark"), "local": LocalDriver(2, buffered_bytes_max=0)}
    url = mariadb_server.url("root")
    settings = {}
    for name in places:
        sink = {"mysql": {"url": url}} if kind == "mysql" else {"delta": {"path": str(tmp_path / name)}}
        route = {"steps": [{"route": {"to": f"{database}_{name}.{{table}}"}}]} if kind == "mysql" else {}
        (tmp_path / name).mkdir()
        settings[name] = pipeline_of(mysql_server, database, sink, tmp_path / name, **route)
    for _ in range(3):
        for name, engine in places.items():
            run_to_end(engine, settings[name])
        workload.run(60)
    for name, engine in places.items():
        run_to_end(engine, settings[name])
    for table in each(workload.tables):
        wanted = source_rows(mysql_server, database, table)
        for name in places:
            if kind == "mysql":
                actual_rows = mysql_rows(mariadb_server, f"{database}_{name}", table)
            else:
                actual_rows = delta_rows(str(tmp_path / name / database / table))
            assert_same(wanted, actual_rows, key=workload.keys(table))
