# SPDX-License-Identifier: Apache-2.0
"""Running pipelines in tests: to the end of what there is, or in a thread while a writer is busy."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.spark.pipeline.run import PipelineRun
from tools.servers import Server

RUN_SECONDS_MAX = 120


def pipeline_of(
    server: Server, database: str, sink: Mapping[str, Any], folder: Path, **more: Any
) -> PipelineSettings:
    """Return a pipeline of a server's database into a sink; what it keeps lies in a folder."""
    source = {"url": server.url("root"), "name": "shop", "tables": f"{database}.*"}
    values = {"name": "test", "source": source, "sink": dict(sink), "batch": {"interval": 0}}
    return pipeline_of_values(values | more, folder)


def run_to_end(session: SparkSession, settings: PipelineSettings) -> list[dict[str, Any]]:
    """Run until all there is now is in the target; return what was shown of each batch."""
    shown: list[dict[str, Any]] = []
    PipelineRun(settings, session, until_caught_up=True, told=lambda one: shown.append(dict(one))).run()
    return shown


@contextmanager
def running(session: SparkSession, settings: PipelineSettings) -> Iterator[PipelineRun]:
    """Run a pipeline in a thread while the block runs; raise what ended it."""
    run = PipelineRun(settings, session)
    failed: list[BaseException] = []

    def go() -> None:
        try:
            run.run()
        # Whatever it is, it is raised again where the block ends.
        except BaseException as problem:  # noqa: BLE001
            failed.append(problem)

    thread = threading.Thread(target=go, name="pipeline")
    thread.start()
    try:
        yield run
    finally:
        run.stop()
        thread.join(RUN_SECONDS_MAX)
    assert not thread.is_alive(), "a stopped pipeline ends after its batch"
    if failed:
        raise failed[0]
