# SPDX-License-Identifier: Apache-2.0
"""One small Spark session for a test process, and helpers of Spark tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock import open_source
from penstock.source.source import SourceOptions
from tests.support.spark.cluster import JVM_OPTIONS, run_query
from tests.support.spark.worker_daemon import write_python
from tools.servers import Server

# Settings that make queries over a few rows cheaper. Sessions of separate processes have Spark's defaults.
_FEW_ROWS = {
    # One partition is sorted without an additional job that samples the rows.
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
}
SYSTEM_COLUMNS = ["_change_type", "_commit_version", "_commit_timestamp", "_metadata"]


def session_settings() -> dict[str, str]:
    """Return the settings of a session that fits a test machine."""
    return {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "700m",
        # The JVM of a test lives for a minute or two, too short to repay the optimizing compiler.
        "spark.driver.extraJavaOptions": JVM_OPTIONS,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.log.level": "ERROR",
    }


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of this test process, local[2]."""
    python = write_python(tmp_path_factory.mktemp("spark-python"))
    os.environ |= {"PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}
    builder = SparkSession.builder.master("local[2]").appName("penstock-tests")
    session = builder.config(map=session_settings() | _FEW_ROWS).getOrCreate()
    yield session
    session.stop()


def head_of(server: Server) -> str:
    """Return the end of a server's log in the format of startingOffsets."""
    source = open_source(SourceOptions.parse(server.url()))
    try:
        return str(source.head())
    finally:
        source.close()


def rows_of(frame: DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Return a frame's rows in commit order: the selected columns, or all except the system columns."""
    # Each partition is in commit order, and the sort is stable within a transaction.
    ordered = frame.orderBy("_commit_version", "_metadata.row", frame["_change_type"].desc())
    names = columns or [name for name in frame.columns if name not in SYSTEM_COLUMNS]
    return [tuple(row) for row in ordered.select(*names).collect()]


class Collected:
    """Collects the batches of a stream by batch id. If a batch is replayed, the replay replaces the earlier
    run.
    """

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self.batches: dict[int, list[tuple[Any, ...]]] = {}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        ordered = frame.orderBy("_commit_version", "_metadata.row", frame["_change_type"].desc())
        self.batches[batch] = [tuple(row) for row in ordered.select(*self._columns).collect()]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """All rows, in the order of the batches."""
        return [row for batch in sorted(self.batches) for row in self.batches[batch]]


def stream_of(session: SparkSession, server: Server, table: str, **options: object) -> DataFrame:
    """Return a stream of one table of a server."""
    all_options = {"source": server.url(), "tables": table} | options
    return session.readStream.format("penstock").options(**all_options).load()


def process_all(query: StreamingQuery) -> None:
    """Wait until a running stream has processed all earlier commits, and raise the stream's error.

    Spark waits until a trigger finds no new data. The first such trigger may have read the end of the log
    before the last commit. The second one has read it after the last commit.
    """
    query.processAllAvailable()
    query.processAllAvailable()


def run_to_head(frame: DataFrame, into: Callable[[DataFrame, int], None], checkpoint: Path) -> None:
    """Run a stream until all current changes are read; raise its error."""
    writer = frame.writeStream.foreachBatch(into).option("checkpointLocation", str(checkpoint))
    run_query(writer.trigger(availableNow=True).start)
