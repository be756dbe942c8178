# SPDX-License-Identifier: Apache-2.0
"""The duration of a batch in one pipeline that writes 300 tables into Delta mirrors, with changes to every
table.
"""

import shutil
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

from deltalake import DeltaTable

from bench.corpora.corpus import SERVER_OPTIONS, CountsDiffer, cache_directory
from bench.corpora.workload import DATABASE
from bench.pipeline_process import Batch, PipelineProcess, running
from bench.result import CaseResult, Line, Options, Target
from bench.writers import writing
from tools.servers import Server

TITLE = "A live server with many tables into Delta mirrors, local[2] (from one batch's start to its end)"

_TABLES = {"tiny": 30, "small": 100}
_TABLES_DEFAULT = 300
#: In the small sizes, the writers leave processor time for the pipeline.
_TRANSACTIONS_PER_SECOND = {"tiny": 200, "small": 1_000}
_TRANSACTIONS_PER_SECOND_DEFAULT = 2_000
_NAME = f"{DATABASE}.many"
_P99_SECONDS = 3.0
#: The measurement lasts this many times as long as that of a slow peer.
_SECONDS_FACTOR = 6
_SECONDS_MAX = 300.0
#: The first batches include the start of Spark and the load of the existing rows.
_BATCHES_BEFORE = 3


def run(options: Options) -> CaseResult:
    """Follow writers for a while, then compare the contents of every table."""
    tables = _TABLES.get(options.size, _TABLES_DEFAULT)
    folder = Path(tempfile.mkdtemp(prefix="bench-many-", dir=cache_directory()))
    settings = {
        "name": "bench",
        "load": {"mode": "full"},
        "sink": {"delta": {"mode": "mirror", "path": str(folder / "lake")}},
    }
    try:
        with Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "512M"}) as server:
            settings["source"] = {"url": server.url("repl"), "tables": [f"{_NAME}*"]}
            server.sql(f"CREATE DATABASE {DATABASE}")
            for number in range(tables):
                server.sql(
                    f"CREATE TABLE {_NAME}{number} (id BIGINT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(40),"
                    " at DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6))"
                )
            with running(settings, folder) as followed:
                rate = _TRANSACTIONS_PER_SECOND.get(options.size, _TRANSACTIONS_PER_SECOND_DEFAULT)
                with writing(server.port, _NAME, rate, tables):
                    _wait_for(followed, _BATCHES_BEFORE)
                    first, before = time.perf_counter(), len(followed.batches)
                    time.sleep(options.seconds_max * _SECONDS_FACTOR)
                    _wait_for(followed, before + 2)
                    ended = time.perf_counter()
                for number in range(tables):
                    _compare(server, number, folder / "lake" / DATABASE / f"many{number}")
            server.kill()
        batches = [batch for batch in followed.batches if first < batch.ended <= ended]
        lines = _lines(tables, batches, ended - first, followed)
        versions = {name: metadata.version(name) for name in ("pyspark", "deltalake")}
        return CaseResult("many_tables_to_delta", TITLE, lines, versions, ratio_title="the target is")
    finally:
        shutil.rmtree(folder)


def _compare(server: Server, number: int, mirror: Path) -> None:
    """Wait until a mirror has as many rows as its table, which has no writers any more."""
    rows = server.sql(f"SELECT COUNT(*) FROM {_NAME}{number}")[0][0]
    deadline = time.monotonic() + _SECONDS_MAX
    while (held := DeltaTable(mirror).count() if DeltaTable.is_deltatable(str(mirror)) else 0) != rows:
        if time.monotonic() > deadline or held > rows:
            raise CountsDiffer(f"the mirror of {_NAME}{number} has {held} rows, the table {rows}")
        time.sleep(0.1)


def _wait_for(followed: PipelineProcess, count: int) -> None:
    """Wait until this many batches are done."""
    deadline = time.monotonic() + _SECONDS_MAX
    while len(followed.batches) < count:
        assert followed.process.poll() is None, f"the pipeline has ended: {followed.process.returncode}"
        assert time.monotonic() < deadline, "the pipeline does not go on"
        time.sleep(0.1)


def _lines(tables: int, batches: list[Batch], window: float, followed: PipelineProcess) -> list[Line]:
    seconds = sorted(batch.seconds for batch in batches)
    median, late = statistics.median(seconds), seconds[int(len(seconds) * 0.99)]
    rates = {
        "rows/s": sum(batch.rows for batch in batches) / window,
        "batches": float(len(batches)),
        **{f"MB of {kind} at most": size / 1e6 for kind, size in followed.resident.items()},
    }
    return [
        Line(f"{tables} tables", "p50", {"seconds": median}),
        Line(f"{tables} tables", "p99", {"seconds": late, **rates}, _P99_SECONDS / late, Target(1)),
    ]
