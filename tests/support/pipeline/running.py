# SPDX-License-Identifier: Apache-2.0
"""Run pipelines in tests: to the end of the log, or in a thread beside a busy writer.

They run on a Spark session, or without Spark on `LocalDriver()`.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.engine.driver import Driver
from penstock.engine.run import PipelineRun
from penstock.engine.sink_runs import run_of
from penstock.local.driver import LocalDriver
from penstock.pipeline import state as state_module
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import Checkpoint, PipelineState
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A batch may be retried several times on a busy machine, because Spark gives a worker ten seconds to start.
BATCH_SECONDS_MAX = 2 * WAIT_SECONDS_MAX


def pipeline_of(
    server: Server, database: str, sink: Mapping[str, Any], folder: Path, **more: Any
) -> PipelineSettings:
    """Return a pipeline from a server's database into a sink; its state is in a folder."""
    source = {"url": server.url("root"), "name": "shop", "tables": f"{database}.*"}
    values = {"name": "test", "source": source, "sink": dict(sink), "batch": {"interval": 0}}
    return pipeline_of_values(values | more, folder)


def driver_of(engine: "SparkSession | LocalDriver") -> Driver:
    """Return the driver of a Spark session, or the driver that was passed."""
    if isinstance(engine, LocalDriver):
        return engine
    from penstock.spark.driver import SparkDriver

    return SparkDriver(engine)


def run_to_end(engine: "SparkSession | LocalDriver", settings: PipelineSettings) -> list[dict[str, Any]]:
    """Run until all current changes are in the target; return the reports of each batch."""
    shown: list[dict[str, Any]] = []

    def note(report: Mapping[str, Any]) -> None:
        if report["state"] != "long batch":
            shown.append(dict(report))

    run = run_of(settings, driver_of(engine), until_caught_up=True, report=note)
    with patient_leases():
        run.run()
    return shown


@contextmanager
def running(
    engine: "SparkSession | LocalDriver",
    settings: PipelineSettings,
    report: Callable[[Mapping[str, Any]], None] | None = None,
) -> Iterator[PipelineRun]:
    """Run a pipeline in a thread inside the block. The block starts once the pipeline has its lease.

    Raises the error that ended the pipeline.
    """
    run = PipelineRun(settings, driver_of(engine), report=report)
    failed: list[BaseException] = []

    def go() -> None:
        try:
            run.run()
        # An error of any type is raised again at the end of the block.
        except BaseException as problem:  # noqa: BLE001
            failed.append(problem)

    thread = threading.Thread(target=go, name="pipeline", daemon=True)
    with patient_leases():
        thread.start()
        try:
            with opened(settings) as state:
                wait_until(lambda: state.runner() is not None or failed)
            yield run
        finally:
            run.stop()
            thread.join(BATCH_SECONDS_MAX)
            if failed:
                raise failed[0]
    assert not thread.is_alive(), "a stopped pipeline ends after its batch"


@contextmanager
def patient_leases() -> Iterator[None]:
    """Let runners of this process keep their leases over any pause of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "_LEASE_SECONDS", WAIT_SECONDS_MAX)
        yield


def wait_until_loaded(settings: PipelineSettings) -> int:
    """Wait until a running pipeline has loaded its tables; return the number of completed batches."""
    return _wait(settings, lambda progress: not progress.loading)


def wait_for_batches(settings: PipelineSettings, number: int) -> int:
    """Wait until a running pipeline has completed this many batches; return the completed number."""
    return _wait(settings, lambda progress: progress.number >= number)


def _wait(settings: PipelineSettings, reached: Callable[[Checkpoint], bool]) -> int:
    with opened(settings) as state:

        def progress() -> Checkpoint:
            return state.checkpoint() or Checkpoint.new()

        wait_until(lambda: reached(progress()) or state.runner() is None, BATCH_SECONDS_MAX)
        assert state.runner() is not None, "the pipeline runs"
        return progress().number


@contextmanager
def opened(settings: PipelineSettings) -> Iterator[PipelineState]:
    """Open the persistent state of a pipeline."""
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        yield state
