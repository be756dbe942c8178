# SPDX-License-Identifier: Apache-2.0
"""Run pipelines over a binlog file in this process, without a server and without Spark."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.engine.run import PipelineRun
from penstock.engine.sink_runs import SinkRuns
from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import Checkpoint
from tests.support.binlog.forged_log import write_forged_log

# The log has 79 inserts, so this batch size gives two batches.
NOTES_BATCH_ROWS = 40


def notes_pipeline(folder: Path, sink: Mapping[str, Any] | None = None, **more: Any) -> PipelineSettings:
    """Return a pipeline of the notes of a forged log into a sink."""
    path = write_forged_log(folder / "log", blob_bytes=50_000)
    values = {
        "name": "notes",
        "source": {"path": str(path), "name": "shop", "tables": "shop.notes"},
        "load": "none",
        **({} if sink is None else {"sink": dict(sink)}),
        "batch": {"interval": 0, "rows": NOTES_BATCH_ROWS},
    }
    return pipeline_of_values(values | more, folder)


def run_here(
    settings: PipelineSettings,
    driver: LocalDriver | None = None,
    report: Callable[[Mapping[str, Any]], None] | None = None,
    *,
    to_barrier: bool = False,
) -> Checkpoint:
    """Run a pipeline to the end of its log, or to the barrier of its shards."""
    driver = driver or LocalDriver(2)
    return PipelineRun(settings, driver, until_caught_up=True, to_barrier=to_barrier, report=report).run()


def run_sinks_here(
    settings: PipelineSettings, report: Callable[[Mapping[str, Any]], None] | None = None
) -> dict[str, Checkpoint]:
    """Run all sinks of a pipeline to the end of its log."""
    return SinkRuns(settings, LocalDriver(2), until_caught_up=True, report=report).run()
