# SPDX-License-Identifier: Apache-2.0
"""Jobs on real workers: an applied pipeline runs, restarts, moves and stops."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from penstock.cli.app import make_app
from tests.support.daemon.process import PENSTOCK, ROOT
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


class Jobs:
    """Workers with separate folders, and the commands of a fleet's user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coordination = f"sqlite://{folder}/coordination.db"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def worker(self, name: str) -> Iterator[None]:
        """Run a worker inside the block."""
        words = ["worker", "--name", name, "--folder", str(self.folder / name), "--session", "2"]
        with (self.folder / f"{name}.output").open("ab") as output:
            process = self.workers[name] = subprocess.Popen(
                [*PENSTOCK, *words, "--coordination", self.coordination],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait(WAIT_SECONDS_MAX)

    def run(self, *words: str) -> str:
        """Run a command about the fleet, and return its output."""
        done = CliRunner().invoke(make_app(), [*words, "--coordination", self.coordination])
        assert done.exit_code == 0, done.output
        return done.stdout

    def show(self, name: str) -> dict[str, Any]:
        """Return the state of a job."""
        shown: dict[str, Any] = json.loads(self.run("jobs", "show", name, "--json"))
        return shown

    def wait_for(self, name: str, **values: Any) -> dict[str, Any]:
        """Wait until the state of a job has some values, and return the state."""
        wait_until(lambda: values.items() <= self.show(name).items())
        return self.show(name)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """The jobs of a fleet without workers."""
    return Jobs(tmp_path)


def pipeline_file(folder: Path, server: Server, database: str) -> Path:
    """Write a pipeline that loads and follows a database into a lake."""
    values = {
        "state": f"sqlite://{folder}/pipelines.db",
        "source": {"url": server.url("root"), "name": "shop", "tables": f"{database}.*"},
        "sink": {"delta": {"path": str(folder / "lake")}},
        "batch": {"interval": 0},
    }
    file = folder / "orders.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


@pytest.mark.deep(
    guard="tests/unit/test_fleet_jobs.py::test_job_is_restarted_after_a_failure_and_moves_with_its_lease"
)
def test_pipeline_survives_its_process_and_its_worker(
    mysql_server: Server, fresh_database: FreshDatabase, jobs: Jobs, tmp_path: Path
) -> None:
    server, database = mysql_server, fresh_database(mysql_server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY)")
    file = pipeline_file(tmp_path, server, database)
    assert jobs.run("apply", str(file), "--local") == "orders: version 1\n"
    assert jobs.run("apply", str(file), "--local") == "orders: version 1, unchanged\n"

    def wait_until_written(number: int) -> None:
        """Insert a row, and wait until the pipeline has written it."""
        server.sql(f"INSERT INTO {database}.t VALUES ({number})")
        table = str(tmp_path / "lake" / database / "t")
        wait_until(lambda: DeltaTable.is_deltatable(table))
        wait_until(lambda: number in DeltaTable(table).to_pyarrow_table()["a"].to_pylist())

    with ExitStack() as stack:
        stack.enter_context(jobs.worker("a"))
        stack.enter_context(jobs.worker("b"))
        first = jobs.wait_for("orders", state="running")
        wait_until_written(1)
        # The job's process crashes, and the same worker starts a new process.
        os.kill(first["process"], signal.SIGKILL)
        wait_until(lambda: jobs.show("orders")["starts"] > first["starts"])
        second = jobs.wait_for("orders", state="running")
        assert second["exits"][-1]["status"] == -signal.SIGKILL
        wait_until_written(2)
        # The job's worker dies, and the other worker takes over. The kernel ends the process of the dead
        # worker.
        other = "b" if second["worker"] == "a" else "a"
        jobs.workers[second["worker"]].kill()
        third = jobs.wait_for("orders", worker=other, state="running")
        wait_until(lambda: not Path(f"/proc/{second['process']}").exists())
        wait_until_written(3)
        jobs.run("jobs", "pause", "orders")
        jobs.wait_for("orders", state="paused")
        wait_until(lambda: not Path(f"/proc/{third['process']}").exists())
        jobs.run("jobs", "resume", "orders")
        jobs.wait_for("orders", state="running")
        jobs.run("jobs", "delete", "orders")
        wait_until(lambda: not jobs.run("jobs", "list"))
