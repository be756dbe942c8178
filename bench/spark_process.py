# SPDX-License-Identifier: Apache-2.0
"""One Spark session in a separate process, which runs one order and prints its measurements as JSON.

    python -m bench.spark_process '{"verb": "files_to_noop", "master": "local[2]", ...}'

A session's master is fixed for the life of its JVM, so every master and every repetition gets a new process.
Each plans and reads a small file first, because a pipeline is never the first query of its JVM.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyarrow import compute
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from penstock import read_binlog

_UPDATE_PREIMAGES = "update_preimage"
_FIRST_ARRIVAL_SECONDS_MAX = 120.0
_LOOK_SECONDS = 0.2
_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


class SparkFailed(RuntimeError):
    """The Spark process ended with an error; the message ends with its log."""


@dataclass(frozen=True)
class SparkOutcome:
    """One measurement.

    `rows` counts changes (an update is one), and `images` counts the rows that Spark processed (an update is
    two). `seconds_cpu` is the CPU time of this process, its JVM and their Python workers. `latencies_ms`
    contains the p50 and p99 of the time from commit to visibility, if the order requested them. `first`
    contains the seconds and CPU seconds of the session's first read of the same rows, if a later read was
    measured. `scans` contains, for each scan of `scans_to_noop`, the median seconds and the number of rows.
    """

    rows: int
    images: int
    seconds: float
    seconds_cpu: float
    batches: int = 1
    latencies_ms: tuple[float, float] | None = None
    first: tuple[float, float] | None = None
    scans: dict[str, tuple[float, int]] | None = None


def spark(order: dict[str, Any], cores: set[int] | None = None) -> SparkOutcome:
    """Run an order in a new process, confined to `cores` if given."""
    argv = [sys.executable, "-m", "bench.spark_process", json.dumps(order)]
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if cores:
        argv = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores))), *argv]
    root = Path(__file__).parents[1]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=root, env=environment)
    if done.returncode:
        raise SparkFailed(f"{order['verb']} on {order['master']}:\n{_without_frames(done.stderr)[-8000:]}")
    fields = json.loads(done.stdout.splitlines()[-1])
    for name in ("latencies_ms", "first"):
        fields[name] = tuple(fields[name]) if fields[name] else None
    return SparkOutcome(**fields)


def _without_frames(log: str) -> str:
    """Return a log without the JVM's stack frames, so that its messages fit on a page."""
    return "\n".join(line for line in log.splitlines() if not line.startswith(("\tat ", "\t... ")))


def files_to_noop(session: SparkSession, order: dict[str, Any]) -> SparkOutcome:
    """Read one table of a binlog file into the `noop` sink, twice.

    During the first read, the JVM compiles the code that Spark generates for the table. This takes seconds of
    CPU time, however many rows there are. The second read is measured.
    """

    def read(path: str) -> tuple[int, int, float, float]:
        began, cpu_began = time.perf_counter(), _cpu_seconds()
        frame = session.read.format("penstock").options(**order["options"]).load(path)
        seen = Observation()
        frame.observe(seen, *_counts()).write.format("noop").mode("overwrite").save()
        seconds, seconds_cpu = time.perf_counter() - began, _cpu_seconds() - cpu_began
        return seen.get["images"], seen.get["preimages"], seconds, seconds_cpu

    read(order["warm_path"])
    *_, first_seconds, first_cpu = read(order["path"])
    images, preimages, seconds, seconds_cpu = read(order["path"])
    return SparkOutcome(images - preimages, images, seconds, seconds_cpu, first=(first_seconds, first_cpu))


def scans_to_noop(session: SparkSession, order: dict[str, Any]) -> SparkOutcome:
    """Read one table of a binlog file in several ways, in turn, and compare with Spark's own Parquet scan of
    the same rows.

    `reads` contains, by name, the options, selected columns and condition of each scan, and whether
    conditions are pushed down. A scan whose name is in `kernel` is also measured without Spark, on one core,
    as `<name>, kernel alone`. `stream` reads the file as a stream in about `triggers` batches, and `parquet
    stream` reads the Parquet files in as many. The time of a stream is that of its triggers, without the
    start. The first round is not counted.
    """
    path, began, cpu_began = order["path"], time.perf_counter(), _cpu_seconds()
    seconds: dict[str, list[float]] = {}
    rows: dict[str, int] = {}

    def measure(name: str, read: Callable[[], int]) -> None:
        began = time.perf_counter()
        rows[name] = read()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    def measure_stream(name: str, frame: DataFrame) -> None:
        rows[name], took = _stream_to_noop(frame)
        seconds.setdefault(name, []).append(took)

    def load(options: dict[str, str]) -> DataFrame:
        return session.read.format("penstock").options(**order["options"], **options).load(path)

    triggers = order["triggers"]
    with tempfile.TemporaryDirectory() as folder:
        # Two files for each trigger of the stream, so that both cores read.
        load({}).repartition(2 * triggers).write.parquet(f"{folder}/rows")
        for _ in range(order["repeat"] + 1):
            measure("parquet", lambda: _rows_to_noop(session.read.parquet(f"{folder}/rows")))
            for name, scan in order["reads"].items():
                frame = load(scan.get("options", {})).where(scan.get("where", "true"))
                chosen = frame.select(*scan["select"]) if "select" in scan else frame
                session.conf.set(_PUSHDOWN, str(scan.get("pushed", True)).lower())
                measure(name, partial(_rows_to_noop, chosen))
            session.conf.set(_PUSHDOWN, "true")
            bytes_max = -(-Path(path).stat().st_size // triggers)
            stream = session.readStream.format("penstock").options(**order["options"])
            measure_stream("stream", stream.option("maxBytesPerTrigger", str(bytes_max)).load(path))
            files = session.readStream.schema(load({}).schema).option("maxFilesPerTrigger", "2")
            measure_stream("parquet stream", files.parquet(f"{folder}/rows"))
            for name in order["kernel"]:
                columns = order["reads"][name].get("options", {}).get("columns")
                measure(f"{name}, kernel alone", partial(_rows_of_kernel, order, columns))
    scans = {name: (statistics.median_low(runs[1:]), rows[name]) for name, runs in seconds.items()}
    total, images = time.perf_counter() - began, rows["parquet"]
    return SparkOutcome(images, images, total, _cpu_seconds() - cpu_began, scans=scans)


def _rows_to_noop(frame: DataFrame) -> int:
    seen = Observation()
    frame.observe(seen, f.count(f.lit(1)).alias("rows")).write.format("noop").mode("overwrite").save()
    return int(seen.get["rows"])


def _stream_to_noop(frame: DataFrame) -> tuple[int, float]:
    """Run a stream to its end; return its rows and the seconds of its triggers."""
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
    batches = [progress for progress in query.recentProgress if progress.numInputRows]
    milliseconds = sum(progress.durationMs["triggerExecution"] for progress in batches)
    return sum(progress.numInputRows for progress in batches), milliseconds / 1000


def _rows_of_kernel(order: dict[str, Any], columns: str | None) -> int:
    chosen = None if columns is None else columns.split(",")
    batches = read_binlog(order["path"], tables=order["options"]["tables"], columns=chosen)
    return sum(batch.to_arrow().num_rows for batch in batches)


def backlog_to_noop(session: SparkSession, order: dict[str, Any]) -> SparkOutcome:
    """Stream all of a table's rows in a server's log into the `noop` sink, then end."""
    began, cpu_began = time.perf_counter(), _cpu_seconds()
    with tempfile.TemporaryDirectory() as checkpoint:
        frame = _stream(session, order, "earliest").observe("seen", *_counts())
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        seconds, seconds_cpu = time.perf_counter() - began, _cpu_seconds() - cpu_began
        seen = [
            progress.observedMetrics["seen"] for progress in query.recentProgress if progress.observedMetrics
        ]
    images, preimages = (sum(metrics[name] for metrics in seen) for name in ("images", "preimages"))
    return SparkOutcome(images - preimages, images, seconds, seconds_cpu, len(seen))


def commit_to_visible(session: SparkSession, order: dict[str, Any]) -> SparkOutcome:
    """Follow a server while writers commit to it.

    Compare each row's commit time with the time at which the row can be read. A row is visible when its batch
    has reached the driver. The measurement lasts `seconds`. Before it, a warm-up of a fifth of that time
    starts with the first batch. The writer and the reader use the same clock, because the server runs on this
    machine.
    """
    seconds: float = order["seconds"]
    arrivals: list[tuple[float, pa.ChunkedArray]] = []

    def arrived(frame: DataFrame, _batch: int) -> None:
        committed = frame.select(f.unix_micros("_commit_timestamp").alias("at")).toArrow().column("at")
        if len(committed):
            arrivals.append((time.time(), committed))

    deadline = time.monotonic() + _FIRST_ARRIVAL_SECONDS_MAX
    with tempfile.TemporaryDirectory() as checkpoint:
        stream = _stream(session, order, "latest").writeStream.foreachBatch(arrived)
        query = stream.option("checkpointLocation", checkpoint).start()
        while not arrivals and time.monotonic() < deadline:
            _watch(query, _LOOK_SECONDS)
        cpu_began = _cpu_seconds()
        _watch(query, seconds * 1.2)
        # Extend the measurement if the machine stalled.
        deadline = time.monotonic() + _FIRST_ARRIVAL_SECONDS_MAX
        while not _settled(arrivals, seconds) and time.monotonic() < deadline:
            _watch(query, _LOOK_SECONDS)
        seconds_cpu = _cpu_seconds() - cpu_began
        query.stop()
    if not arrivals:
        raise SparkFailed(f"no row arrived in {_FIRST_ARRIVAL_SECONDS_MAX:.0f} seconds")
    measured = _settled(arrivals, seconds)
    if not measured:
        raise SparkFailed(f"one batch took more than {_FIRST_ARRIVAL_SECONDS_MAX:.0f} seconds")
    waits = [compute.subtract(int(now * 1e6), committed) for now, committed in measured]
    quantiles = compute.quantile(pa.concat_arrays([wait.combine_chunks() for wait in waits]), [0.5, 0.99])
    median_us, worst_us = quantiles.to_pylist()
    rows = sum(map(len, waits))
    took = measured[-1][0] - arrivals[0][0] - seconds / 5
    return SparkOutcome(rows, rows, took, seconds_cpu, len(waits), (median_us / 1000, worst_us / 1000))


def _settled(
    arrivals: list[tuple[float, pa.ChunkedArray]], seconds: float
) -> list[tuple[float, pa.ChunkedArray]]:
    """Return the rows that arrived after the warm-up."""
    return [arrival for arrival in arrivals if arrival[0] > arrivals[0][0] + seconds / 5]


def _cpu_seconds() -> float:
    """Return the CPU seconds used by this process and all below it: the JVM and its Python workers."""
    this = psutil.Process()
    # A process's times include those of its ended children. Running children are counted separately.
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        # The process has just ended, so its parent's times include it.
        with contextlib.suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def _watch(query: StreamingQuery, seconds: float) -> None:
    """Let the query run for some seconds; raise its error."""
    time.sleep(seconds)
    failure = query.exception()
    if failure is not None:
        raise failure


def _stream(session: SparkSession, order: dict[str, Any], offsets: str) -> DataFrame:
    stream = session.readStream.format("penstock").option("source", order["source"])
    return stream.option("tables", order["tables"]).option("startingOffsets", offsets).load()


def _counts() -> tuple[Any, Any]:
    """Return the two counts observed for every frame: rows, and the before images among them."""
    preimages = f.count_if(f.col("_change_type") == _UPDATE_PREIMAGES)
    return f.count(f.lit(1)).alias("images"), preimages.alias("preimages")


_VERBS: dict[str, Callable[[SparkSession, dict[str, Any]], SparkOutcome]] = {
    verb.__name__: verb for verb in (files_to_noop, scans_to_noop, backlog_to_noop, commit_to_visible)
}


def _carry_out(order: dict[str, Any]) -> SparkOutcome:
    with tempfile.TemporaryDirectory() as directory:
        builder = SparkSession.builder.master(order["master"]).appName("penstock-bench")
        settings: dict[str, bool | float | int | str | None] = {
            "spark.ui.enabled": "false",
            _PUSHDOWN: "true",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "3g",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.numRecentProgressUpdates": "100000",
            "spark.sql.warehouse.dir": directory,
            "spark.local.dir": directory,
        }
        session = builder.config(map=settings).getOrCreate()
        try:
            return _VERBS[order["verb"]](session, order)
        finally:
            session.stop()


if __name__ == "__main__":
    print(json.dumps(_carry_out(json.loads(sys.argv[1])).__dict__))
