# SPDX-License-Identifier: Apache-2.0
"""After a pipeline's driver, worker or target dies, the target equals the source, without duplicates."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock.engine.batches as batches_module
from penstock.engine.progress import Progress
from penstock.pipeline.state import PipelineState
from penstock.sinks.mysql.sink import MysqlSink
from tests.support.pipeline.oracle import assert_same, mysql_rows, net_rows, source_rows
from tests.support.pipeline.running import (
    pipeline_of,
    run_to_end,
    running,
    wait_for_batches,
    wait_until_loaded,
)
from tests.support.pipeline.workload import Workload
from tests.support.spark import worker_daemon
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tests.support.suite.sweep_seed import sweep_seed
from tools.servers import Server

SINKS: dict[str, dict[str, Any]] = {"mirror": {"mode": "mirror"}, "feed": {"mode": "feed"}}


class Death(BaseException):
    """Signals that the driver has died: none of its code runs any more."""


# The steps of a batch, as the functions that perform them.
STEPS: dict[str, tuple[Any, str]] = {
    "write the batch down": (PipelineState, "begin"),
    "run its tasks": (batches_module, "run_job"),
    "commit it": (MysqlSink, "commit"),
    "note it as done": (PipelineState, "write"),
}


def dying(step: str, when: str, calls: int, patch: pytest.MonkeyPatch) -> None:
    """Kill the driver before or after the n-th run of a step."""
    owner, name = STEPS[step]
    does: Callable[..., Any] = getattr(owner, name)
    seen = 0

    def die(*args: Any, **options: Any) -> Any:
        nonlocal seen
        if when == "before" and seen == calls - 1:
            raise Death
        # A step that fails by itself (a lost Spark task, a lost connection) is retried and not counted.
        returned = does(*args, **options)
        seen += 1
        if seen == calls:
            raise Death
        return returned

    patch.setattr(owner, name, die)


def assert_followed(source: Server, target: Server, database: str, workload: Workload, mode: str) -> None:
    """Assert that the target has the rows of the source; the changes of a feed must add up to those rows."""
    for table in workload.tables:
        wanted = source_rows(source, database, table)
        if mode == "mirror":
            assert_same(wanted, mysql_rows(target, database, table), key=workload.keys(table))
            continue
        rows = mysql_rows(target, database, table)
        changes = [(row["_commit_version"], row["_row"], row["_change_type"]) for row in rows]
        assert len(set(changes)) == len(changes), f"a change of {table} is there twice"
        assert_same(wanted, net_rows(rows, wanted), key=workload.keys(table))


@pytest.mark.deep(keep=("feed",))
@pytest.mark.parametrize("mode", SINKS)
def test_driver_killed_around_any_step_loses_and_repeats_nothing(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    mode: str,
) -> None:
    database = fresh_database(mysql_server)
    # A truncated table leaves no trace in a feed.
    workload = Workload(mysql_server, database, seed=sweep_seed(5), truncates=mode == "mirror", big_rows=300)
    workload.create(filled=mode == "mirror")
    sink = {"mysql": {"url": mariadb_server.url("root"), **SINKS[mode]}}
    settings = pipeline_of(
        mysql_server,
        database,
        sink,
        tmp_path,
        load="full" if mode == "mirror" else "none",
        batch={"interval": 0},
    )
    run_to_end(spark, settings)
    for step in STEPS:
        for when in ("before", "after"):
            workload.run(12)
            with pytest.MonkeyPatch.context() as patch:
                # Acquiring the lease also writes the state once.
                dying(step, when, 2 if step == "note it as done" else 1, patch)
                with pytest.raises(Death):
                    run_to_end(spark, settings)
            workload.run(6)
    run_to_end(spark, settings)
    assert_followed(mysql_server, mariadb_server, database, workload, mode)
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/fault/test_pipeline_kills.py::test_driver_killed_around_any_step_loses_and_repeats_nothing"
)
@pytest.mark.timing
def test_killed_worker_and_unavailable_target_lose_nothing(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    start_server: StartServer,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = start_server("mariadb")
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=sweep_seed(6), big_rows=300)
    workload.create()
    settings = pipeline_of(mysql_server, database, {"mysql": {"url": target.url("root")}}, tmp_path)
    run_to_end(spark, settings)
    waited = threading.Event()
    monkeypatch.setattr(Progress, "retrying", lambda *_: waited.set())
    with workload.busy(0.005), running(spark, settings):
        done = wait_until_loaded(settings)
        for _ in range(3):
            done = wait_for_batches(settings, done + 1)
            wait_until(kill_a_worker)
        done = wait_for_batches(settings, done + 2)
        waited.clear()
        target.stop()
        assert waited.wait(WAIT_SECONDS_MAX), "the pipeline misses its target"
        target.start()
        wait_for_batches(settings, done + 3)
    run_to_end(spark, settings)
    assert_followed(mysql_server, target, database, workload, "mirror")


def kill_a_worker() -> bool:
    """Kill one Python worker of this process's Spark; return whether one was running."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    below = {str(os.getpid())}
    for _ in range(6):
        below |= {pid for pid, parent, _ in rows if parent in below}
    daemons = {pid for pid, _, words in rows if pid in below and worker_daemon.__name__ in words}
    for worker in [pid for pid, parent, words in rows if parent in daemons and "<defunct>" not in words]:
        # The process may already have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(worker), signal.SIGKILL)
            return True
    return False
