# SPDX-License-Identifier: Apache-2.0
"""A pipeline running under a busy writer is compared and repaired."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.engine.run import PipelineRun
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.verify import verify
from penstock.spark.driver import SparkDriver
from penstock.spark.verifying import SparkSpreading
from tests.support.logstore.kept_log import penstock
from tests.support.pipeline.engines import engine  # noqa: F401
from tests.support.pipeline.oracle import assert_same, mysql_rows, source_rows
from tests.support.pipeline.running import BATCH_SECONDS_MAX, opened, pipeline_of, run_to_end, running
from tests.support.pipeline.workload import Workload
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import wait_until
from tools.servers import Server


def wait_for_requests(settings: PipelineSettings, numbers: list[str]) -> None:
    """Wait until the requested resnapshots are complete."""
    with opened(settings) as state:

        def states() -> set[str]:
            return {request.state for request in state.requests() if request.number in numbers}

        wait_until(lambda: not states() & {"asked", "running"}, BATCH_SECONDS_MAX)
        assert states() == {"done"}, state.requests()


def spoil(target: Server, database: str) -> None:
    """Create a row of each kind of difference, in a table without writers."""
    target.sql("DELETE FROM quiet WHERE id = 1", database=database)
    target.sql("UPDATE quiet SET note = 'spoilt' WHERE id = 2", database=database)
    target.sql("INSERT INTO quiet VALUES (7, 'besides')", database=database)


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_verify.py::test_repair_corrects_the_target_and_the_stream_continues_from_it"
)
def test_running_pipeline_is_compared_and_repaired(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=21, truncates=False, big_rows=400)
    workload.create()
    mysql_server.sql("CREATE TABLE quiet (id INT PRIMARY KEY, note TEXT)", database=database)
    mysql_server.sql("INSERT INTO quiet VALUES (1, 'kept'), (2, 'kept'), (3, 'kept')", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, batch={"interval": "200ms"})
    run_to_end(spark, settings)
    with running(spark, settings), workload.busy(0.01):
        verification = verify(settings)
        assert verification.running
        assert not any(
            comparison.count(kind)
            for comparison in verification.results
            for kind in Kind
            if kind is not Kind.UNSETTLED
        )
        spoil(mariadb_server, database)
        verification = verify(settings)
        certain = {
            (difference.row["id"], str(difference.kind))
            for each in verification.results
            for difference in each.found
            if difference.kind is not Kind.UNSETTLED
        }
        assert certain == {(1, "missing"), (2, "changed"), (7, "extra")}
        verification = verify(settings, mend=True)
        assert len(verification.requests) == 1
        wait_for_requests(settings, verification.requests)
    run_to_end(spark, settings)
    for table in (*workload.tables, "quiet"):
        assert_same(
            source_rows(mysql_server, database, table),
            mysql_rows(mariadb_server, database, table),
            key=workload.keys(table) if table != "quiet" else ("id",),
        )


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_verify.py::test_large_tables_are_compared_range_by_range"
)
def test_many_shares_are_compared_by_tasks(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE wide (id BIGINT PRIMARY KEY, n INT)", database=database)
    rows = ", ".join(f"({number * 3}, {number})" for number in range(3000))
    mysql_server.sql(f"INSERT INTO wide VALUES {rows}", database=database)
    mysql_server.sql("ANALYZE TABLE wide", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path)
    run_to_end(spark, settings)
    mariadb_server.sql(
        "DELETE FROM wide WHERE id IN (0, 4500); UPDATE wide SET n = 0 WHERE id = 8997;"
        " INSERT INTO wide VALUES (1, 1), (9999, 1)",
        database=database,
    )
    verification = verify(settings, spreading=SparkSpreading(spark), share_rows=200)
    (result,) = verification.results
    assert {(difference.row["id"], str(difference.kind)) for difference in result.found} == {
        (0, "missing"),
        (4500, "missing"),
        (8997, "changed"),
        (1, "extra"),
        (9999, "extra"),
    }
    with opened(settings) as state:
        number = state.request_resnapshot("shop", TableName(database, "wide"))
    run_to_end(spark, settings)
    wait_for_requests(settings, [number])
    assert_same(
        source_rows(mysql_server, database, "wide"), mysql_rows(mariadb_server, database, "wide"), key=["id"]
    )
    assert verify(settings).equal


@pytest.mark.deep(keep=("local",))
def test_some_rows_are_reread_from_the_command_line(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE notes (code VARCHAR(20) PRIMARY KEY, n INT)", database=database)
    rows = ", ".join(f"('code {number}', {number})" for number in range(60))
    mysql_server.sql(f"INSERT INTO notes VALUES {rows}", database=database)
    file = tmp_path / "test.yaml"
    file.write_text(
        json.dumps(
            {
                "source": {"url": mysql_server.url(), "name": "shop", "tables": f"{database}.*"},
                "sink": {"mysql": {"url": mariadb_server.url("root")}},
                "batch": {"interval": 0},
            }
        )
    )
    settings = load_pipeline(file)
    run_to_end(engine, settings)
    mariadb_server.sql(
        "UPDATE notes SET n = -1 WHERE n IN (3, 40); DELETE FROM notes WHERE n = 50;"
        " INSERT INTO notes VALUES ('besides', 99)",
        database=database,
    )
    kept = tmp_path / "differences.jsonl"
    output = penstock("verify", file, "--json", "--output", kept)
    assert output.code == 1
    (counted,) = output.objects
    assert {kind: counted[kind] for kind in ("missing", "extra", "changed")} == {
        "missing": 1,
        "extra": 1,
        "changed": 2,
    }
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert {(line["kind"], json.loads(line["key"])["code"]) for line in lines} == {
        ("changed", "code 3"),
        ("changed", "code 40"),
        ("missing", "code 50"),
        ("extra", "besides"),
    }
    asked = penstock("resnapshot", file, f"{database}.notes", "--where", "n >= 30", "--json").one
    run_to_end(engine, settings)
    wait_for_requests(settings, [asked["request"]])
    output = penstock("verify", file)
    assert "1 changed; 60 rows in the source, 60 in the target" in output.out
    assert "changed: code='code 3': n is -1, not 3" in output.out
    assert penstock("verify", file, "--repair").code == 0
    assert penstock("verify", file).code == 0
    assert penstock("verify", file, "nothing.*").code == 2


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_verify.py::test_repair_corrects_the_target_and_the_stream_continues_from_it"
)
def test_reread_rows_are_ahead_of_a_stopped_stream(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, note TEXT)", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 'first'), (2, 'first')", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(
        mysql_server, database, sink, tmp_path, batch={"bytes": 32768, "interval": "100ms"}
    )
    run_to_end(spark, settings)
    for number in range(60):
        mysql_server.sql(f"UPDATE t SET note = REPEAT('{number % 10}', 900)", database=database)
    with opened(settings) as state:
        number = state.request_resnapshot("shop", TableName(database, "t"))
        run = PipelineRun(
            settings, SparkDriver(spark), report=lambda shown: run.stop() if "chunks" in shown else None
        )
        progress = run.run()
        asked = state.request(number)
    assert asked is not None
    assert asked.state == "done"
    assert progress.loads[f"shop/{database}.t"].read_to > 0
    (result,) = verify(settings).results
    assert "has not come to where its rows were read" in result.open
    assert not result.found
    run_to_end(spark, settings)
    verification = verify(settings)
    assert verification.equal, verification.results
