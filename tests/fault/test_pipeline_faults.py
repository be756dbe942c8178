# SPDX-License-Identifier: Apache-2.0
"""If a pipeline is killed at any moment while a writer is busy, its target still converges with its
source.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.pipeline.verify.report import lines
from penstock.pipeline.verify.verify import verify
from tests.support.pipeline.oracle import Row, assert_same, delta_rows, mysql_rows, source_rows
from tests.support.pipeline.running import opened
from tests.support.pipeline.workload import Workload
from tests.support.spark.cluster import ROOT, environment
from tests.support.spark.session import session_settings
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import wait_until
from tests.support.suite.sweep_seed import sweep_random, sweep_seed
from tools.servers import Server
from tools.servers.proxy import Proxy

# A run after many kills has a large backlog, and the machine may be busy.
SECONDS_MAX = 600
KILLS_LONG = 10

PENSTOCK = Path(sys.executable).with_name("penstock")


class Runner:
    """Consecutive processes of `penstock run` for one pipeline file."""

    def __init__(self, folder: Path, source: str, database: str, sink: dict[str, Any], **more: Any) -> None:
        self.file = folder / "pipeline.yaml"
        self._log = folder / "run.log"
        written = {
            "name": "faults",
            "source": {"url": source, "name": "shop", "tables": [f"{database}.*"]},
            "sink": sink,
            "load": {"chunk_rows": 60},
            "batch": {"interval": "50ms"},
            "spark": session_settings(),
        }
        # JSON is valid YAML.
        self.file.write_text(json.dumps(written | more))
        self.settings = load_pipeline(self.file)

    @property
    def output(self) -> str:
        """The output of all runs."""
        return self._log.read_text() if self._log.exists() else ""

    def done(self) -> int:
        """The number of completed batches."""
        with opened(self.settings) as state:
            return done_in(state)

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start a run once the pipeline's lease is free."""
        with opened(self.settings) as state:
            wait_until(lambda: state.runner() is None, SECONDS_MAX)
        argv = [str(PENSTOCK), "run", str(self.file), "--json", "--master", "local[2,4]", *words]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                argv, stdout=log, stderr=log, env=environment(), cwd=ROOT, start_new_session=True
            )

    @contextmanager
    def running(self, batches: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
        """Run the pipeline. The block starts after this many more batches; its end kills the run."""
        process = self.start()
        try:
            with opened(self.settings) as state:
                wanted = done_in(state) + batches
                wait_until(lambda: done_in(state) >= wanted or process.poll() is not None, SECONDS_MAX)
            assert process.poll() is None, f"it ended by itself: {self.output[-4000:]}"
            yield process
        finally:
            kill(process, whole=True)

    def finish(self) -> None:
        """Run until the pipeline has caught up."""
        process = self.start("--until", "caught-up")
        try:
            code = process.wait(SECONDS_MAX)
        finally:
            kill(process, whole=True)
        assert code == 0, self.output[-4000:]


def done_in(state: PipelineState) -> int:
    """Return the number of completed batches of a pipeline."""
    return (state.checkpoint() or Checkpoint.new()).number


def kill(process: "subprocess.Popen[bytes]", *, whole: bool) -> None:
    """Kill a run at once: with its JVM, or only the driver, whose tasks may continue for a moment."""
    if process.poll() is None:
        if whole:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def prove(runner: Runner, workload: Workload, rows_of: Callable[[str], list[Row]]) -> None:
    """Assert, with the oracle and with `verify`, that the target equals the source."""
    for table in workload.tables:
        wanted = source_rows(workload.server, workload.database, table)
        assert_same(wanted, rows_of(table), key=workload.keys(table))
    verification = verify(runner.settings)
    assert verification.equal, [
        line for table_result in verification.results for line in lines(table_result, 5)
    ]


@pytest.mark.deep(
    guard="tests/fault/test_pipeline_kills.py::test_driver_killed_around_any_step_loses_and_repeats_nothing"
)
@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_pipeline_killed_under_a_busy_writer_ends_equal(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=sweep_seed(31), big_rows=600)
    workload.create()
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    runner = Runner(tmp_path, mysql_server.url(), database, sink)
    chosen = sweep_random(31)
    with workload.busy(0.005):
        # Kill only the driver during the load, and all processes afterwards.
        for batches, whole in ((1, False), (2, True)):
            with runner.running(batches) as process:
                # The kill falls anywhere within a batch.
                time.sleep(chosen.uniform(0.0, 1.0))
                kill(process, whole=whole)
        assert runner.done() >= 3
        with runner.running() as process:
            process.terminate()
            assert process.wait(SECONDS_MAX) == 0, "SIGTERM ends a run after its batch, as it should end"
    runner.finish()
    prove(runner, workload, lambda table: mysql_rows(mariadb_server, database, table))
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["mysql", "delta"])
def test_pipeline_killed_repeatedly_ends_equal(kind: str, start_server: StartServer, tmp_path: Path) -> None:
    server, target = start_server("mysql"), start_server("mariadb")
    server.sql("CREATE DATABASE shop")
    workload = Workload(server, "shop", seed=sweep_seed(41), ddl=True, big_rows=3000)
    workload.create()
    lake = tmp_path / "lake"
    sinks: dict[str, Any] = {"mysql": {"url": target.url("root")}, "delta": {"path": str(lake)}}
    readers: dict[str, Callable[[str], list[Row]]] = {
        "mysql": lambda table: mysql_rows(target, "shop", table),
        "delta": lambda table: delta_rows(str(lake / "shop" / table)),
    }
    chosen = sweep_random(41)
    with Proxy(server.port) as proxy:
        runner = Runner(tmp_path, proxy.through(server.url()), "shop", {kind: sinks[kind]})
        with workload.busy(0.02):
            for _ in range(KILLS_LONG):
                with runner.running() as process:
                    if chosen.random() < 0.5:
                        proxy.cut()
                    time.sleep(chosen.uniform(0.0, 5.0))
                    if chosen.random() < 0.3 and kind == "mysql":
                        target.restart()
                        time.sleep(1)
                    kill(process, whole=chosen.random() < 0.5)
        runner.finish()
        prove(runner, workload, readers[kind])
