# SPDX-License-Identifier: Apache-2.0
"""`penstock run` on a Connect server, on a standalone cluster, and inside spark-submit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipeline.oracle import assert_same, mysql_rows, source_rows
from tests.support.pipeline.workload import Workload
from tests.support.spark.cluster import ROOT, SPARK_HOME, connect_server, environment, standalone_cluster
from tests.support.spark.session import session_settings
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

RUN_SECONDS_MAX = 400
PROGRAM = "import sys\nfrom penstock.cli.app import main\nmain()\n"


def write_pipeline(source: Server, target: Server, database: str, folder: Path) -> Path:
    settings = {name: value for name, value in session_settings().items() if ".driver.m" not in name}
    file = folder / "shop.yaml"
    text = {
        "source": {"url": source.url("root"), "name": "shop", "tables": f"{database}.*"},
        "sink": {"mysql": {"url": target.url("root")}},
        "batch": {"interval": 0},
        "spark": settings | {"spark.executor.memory": "500m"},
    }
    file.write_text(json.dumps(text), encoding="utf-8")
    return file


def run_to_end(file: Path, *words: str, start: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """Run a pipeline in a separate process; return its report of each batch."""
    command = start or (str(Path(sys.executable).parent / "penstock"),)
    done = subprocess.run(
        [*command, "run", str(file), "--until", "caught-up", "--json", *words],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        env=environment(),
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_spark.py::test_busy_source_and_its_target_are_equal_in_the_end"
)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pipeline_runs_on_every_kind_of_session(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=21, big_rows=200)
    workload.create()
    file = write_pipeline(mysql_server, mariadb_server, database, tmp_path)
    shown = run_to_end(file, "--master", "local[2]")
    assert shown, "a load is a batch"
    workload.run(40)
    settings = {name: value for name, value in session_settings().items() if ".driver." not in name}
    with connect_server(tmp_path, settings) as address:
        assert run_to_end(file, "--master", address)
    workload.run(40)
    with standalone_cluster(tmp_path, 2, sys.executable) as master:
        assert run_to_end(file, "--master", master)
    workload.run(40)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    submit = (str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]", str(program))
    assert run_to_end(file, start=submit)
    for table in workload.tables:
        wanted = source_rows(mysql_server, database, table)
        assert_same(wanted, mysql_rows(mariadb_server, database, table), key=workload.keys(table))
    mariadb_server.sql(f"DROP DATABASE {database}")
