# SPDX-License-Identifier: Apache-2.0
"""Latency from commit to a version of a Delta table, at 1,000 transactions per second, without Spark."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from bench.corpora.corpus import SERVER_OPTIONS, CountsDiffer, cache_directory
from bench.corpora.workload import DATABASE
from bench.daemon import INSTANCE, Daemon, serving
from bench.result import CaseResult, Line, Options, Target
from bench.stages import TARGET, arrivals_of, following, percentile, read_marks, stage_lines, statement_line
from bench.writers import writing
from penstock import read_binlog
from tools.servers import Server

TITLE = "Commit to Delta, through a pipeline in one process"

_TRANSACTIONS_PER_SECOND = 1000
_TABLE = f"{DATABASE}.arrivals"
_MODES = ("mirror", "feed")
_P50_MS = 1500.0
#: Samples while the processes connect and the table is created do not represent a steady state.
_SETTLE_SECONDS = 3.0
_SECONDS_MAX = 120.0


def run(options: Options) -> CaseResult:
    """Follow writers for some seconds into a mirror, and then into a feed."""
    folder = Path(tempfile.mkdtemp(prefix="bench-delta-", dir=cache_directory()))
    try:
        with Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "128M"}) as server:
            server.sql(f"CREATE DATABASE {DATABASE}")
            server.sql(f"CREATE TABLE {_TABLE} (id BIGINT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(40))")
            lines = [
                line for mode in _MODES for line in _lines(server, folder / mode, mode, options.seconds_max)
            ]
            # In an orderly shutdown the server would wait for the disconnected replica.
            server.kill()
        versions = {"deltalake": metadata.version("deltalake")}
        return CaseResult("commit_to_delta", TITLE, lines, versions, ratio_title="the target is")
    finally:
        shutil.rmtree(folder)


def _lines(server: Server, folder: Path, mode: str, seconds: float) -> list[Line]:
    server.sql(f"TRUNCATE {_TABLE}")
    lake = folder / "lake" / DATABASE / "arrivals"
    with serving(folder, server.port, start="latest", marks=folder / "daemon.json") as daemon:
        with (
            following(_settings(daemon, folder, mode), folder, folder / "pipeline.json"),
            writing(server.port, _TABLE, _TRANSACTIONS_PER_SECOND) as statements,
        ):
            _wait_for_rows(lake)
            time.sleep(_SETTLE_SECONDS)
            settled = time.time()
            time.sleep(seconds)
            ended = time.time()
            # The last changes of the interval arrive with a later batch.
            _wait_for_rows(lake, DeltaTable(lake).count())
        marks = read_marks(folder / "pipeline.json")
    committed = [change for change in _committed(folder / "log" / INSTANCE) if settled <= change[1] < ended]
    changes = arrivals_of(committed, marks[TARGET])
    if len(changes) < len(committed):
        raise CountsDiffer(f"{len(committed) - len(changes)} changes did not arrive")
    delays = [(change.arrived - change.committed) * 1000 for change in changes]
    median, late = statistics.median(delays), percentile(delays, 0.99)
    rates = {"transactions/s": len(delays) / (ended - settled)}
    marks.pop(TARGET)
    stages = stage_lines(changes, read_marks(folder / "daemon.json") | marks, "the version is committed")
    return [
        Line(mode, "p50", rates | {"ms": median}, _P50_MS / median, Target(1)),
        Line(mode, "p99", rates | {"ms": late}),
        statement_line(statements),
        *stages,
    ]


def _settings(daemon: Daemon, folder: Path, mode: str) -> dict[str, Any]:
    return {
        "name": f"arrivals-{mode}",
        "source": {"url": daemon.url, "tables": [_TABLE]},
        "load": "none",
        "sink": {"delta": {"path": str(folder / "lake"), "mode": mode}},
    }


def _committed(log: Path) -> Iterator[tuple[int, float]]:
    """Yield the commit version and the commit time of each change, in seconds since 1970."""
    for batch in read_binlog(log, tables=[_TABLE]):
        rows = batch.to_arrow().select(["_commit_version", "_commit_timestamp"])
        times = rows.column("_commit_timestamp").cast("int64").to_pylist()
        for version, time_us in zip(rows.column("_commit_version").to_pylist(), times, strict=True):
            yield version, time_us / 1e6


def _wait_for_rows(table: Path, more_than: int = 0) -> None:
    """Wait until a table exists and has more rows than this."""
    deadline = time.monotonic() + _SECONDS_MAX
    while not DeltaTable.is_deltatable(str(table)) or DeltaTable(table).count() <= more_than:
        assert time.monotonic() < deadline, "nothing arrives"
        time.sleep(0.1)
