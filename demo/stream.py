# SPDX-License-Identifier: Apache-2.0
"""The way from the server to the Delta tables: one Spark stream with the changes of all tables.

This is the part to take away: `readStream.format("penstock")`, `foreachBatch`, and envelopes made typed.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow
from pyarrow import compute
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from demo.mirror import Mirror
from penstock import Column, TableName
from penstock.spark.decode import decode_batches
from penstock.spark.schema import TableShape

JVM_END_SECONDS_MAX = 120

# Called after each batch with its number and the changes of each table in it.
BatchDone = Callable[[int, Mapping[str, pyarrow.Table]], None]


def start_stream(
    session: SparkSession,
    options: Mapping[str, str],
    database: str,
    mirrors: Sequence[Mirror],
    checkpoint: Path,
    done: BatchDone,
) -> StreamingQuery:
    """Stream all tables of a database from the beginning of the server's log into their mirrors."""
    changes = (
        session.readStream.format("penstock")
        .options(**options)
        .option("tables", f"{database}.*")
        .option("startingOffsets", "earliest")
        .load()
    )

    def write_batch(frame: DataFrame, batch: int) -> None:
        tables = dict(typed_tables(frame.toArrow()))
        for mirror in mirrors:
            if mirror.name in tables:
                mirror.apply(tables[mirror.name], batch)
        done(batch, tables)

    query: StreamingQuery = (
        changes.writeStream.foreachBatch(write_batch).option("checkpointLocation", str(checkpoint)).start()
    )
    return query


def typed_tables(envelopes: pyarrow.Table) -> Iterator[tuple[str, pyarrow.Table]]:
    """Yield the changes of each table of an envelope batch, with the columns of its newest definition there.

    Every row carries the definition it was written under; in rows from before an ADD COLUMN the new column is
    null. `penstock.spark.decode_table` does the same on executors, where batches are larger than a driver.
    """
    names = compute.struct_field(envelopes["_metadata"], "table")
    for name in names.unique().to_pylist():
        rows = envelopes.filter(compute.equal(names, name))
        newest = compute.sort_indices(rows, [("_commit_version", "descending")])[0].as_py()
        definition = json.loads(rows["definition"][newest].as_py())
        columns = tuple(Column(one["name"], one["type"], one["charset"]) for one in definition["columns"])
        shape = TableShape(TableName(definition["database"], name), columns, definition["mariadb"])
        yield name, pyarrow.Table.from_batches(decode_batches(shape, rows.to_batches()))


@contextmanager
def spark_session(directory: Path) -> Iterator[SparkSession]:
    """Give a Spark session on two cores of this machine; its JVM has ended when the block is left.

    What the JVM prints goes to `spark.log` in the directory.
    """
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory),
        # Ready in half the time; right for a session of a minute.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        # Spares the checkpoint a dozen helper processes a batch; right for a local disk only.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
        "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
    }
    interrupt = signal.getsignal(signal.SIGINT)
    with _errors_into(directory / "spark.log"):
        session = (
            SparkSession.builder.master("local[2]")
            .appName("penstock-demo")
            .config(map=settings)
            .getOrCreate()
        )
    # Spark's own handler asks the JVM to cancel its jobs, which an interrupted call cannot.
    signal.signal(signal.SIGINT, interrupt)
    try:
        session.sparkContext.setLogLevel("ERROR")
        yield session
    finally:
        gateway = SparkContext._gateway
        session.stop()
        # A session that is stopped leaves its JVM running until its standard input is closed.
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(JVM_END_SECONDS_MAX)


@contextmanager
def _errors_into(path: Path) -> Iterator[None]:
    """Give processes started in the block a file for standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(path, "ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
