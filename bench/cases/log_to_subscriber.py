# SPDX-License-Identifier: Apache-2.0
"""Drain the log with the Python client, as Arrow batches: one subscriber that shares the cores."""

import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.corpora.corpus import Corpus, cache_directory, check_rows, corpus
from bench.corpora.serve import serve
from bench.corpora.workload import DATABASE
from bench.daemon import Daemon, serving_corpus
from bench.result import CaseResult, Line, Options, Target
from penstock.client import ChangeBatch, Subscriber

TITLE = "The log to one Python subscriber, Arrow batches (by the clock)"

_WORKLOADS = ("bulk", "narrow", "wide")
#: Rows per second of a bulk load.
_TARGET = 1_000_000.0
_SESSION_SECONDS = 60.0


@dataclass(frozen=True)
class _Drained:
    """The duration, as wall-clock time and as processor time."""

    seconds: float
    client_cpu: float
    daemon_cpu: float


def run(options: Options) -> CaseResult:
    """Drain each file."""
    lines = [_line(corpus(workload, options.size), options) for workload in _WORKLOADS]
    return CaseResult("log_to_subscriber", TITLE, lines, ratio_title="the target is")


def _line(binlog: Corpus, options: Options) -> Line:
    folder = Path(tempfile.mkdtemp(prefix="bench-subscriber-", dir=cache_directory()))
    try:
        with serve(binlog) as server, serving_corpus(folder, server.port, binlog) as daemon:
            runs = [_drain(daemon, binlog, folder, number) for number in range(options.repeat)]
    finally:
        shutil.rmtree(folder)
    middle = statistics.median_low(drained.seconds for drained in runs)
    chosen = next(drained for drained in runs if drained.seconds == middle)
    rate = binlog.rows / chosen.seconds
    rates = {
        "rows/s": rate,
        "binlog MB/s": binlog.bytes / chosen.seconds / 1e6,
        "rows/s of daemon CPU": binlog.rows / max(chosen.daemon_cpu, 1e-2),
        "rows/s of client CPU": binlog.rows / max(chosen.client_cpu, 1e-2),
    }
    # The target applies to the bulk load only. The other lines show the cost of single rows and of thirty
    # columns.
    held = binlog.name == "bulk"
    return Line(
        binlog.name, "subscriber", rates, rate / _TARGET if held else None, Target(1) if held else None
    )


def _drain(daemon: Daemon, binlog: Corpus, folder: Path, number: int) -> _Drained:
    images = 0

    def count(batch: ChangeBatch) -> None:
        nonlocal images
        images += batch.to_arrow().num_rows
        if images >= binlog.images:
            subscriber.stop()

    subscriber = Subscriber(
        daemon.url,
        name=f"drain-{number}",
        tables=[f"{DATABASE}.*"],
        begin="earliest",
        coordination=f"sqlite://{folder / 'drain.db'}",
        # A consumer that lost a shard would receive some of its rows again.
        session_seconds=_SESSION_SECONDS,
    )
    begun = time.perf_counter(), time.process_time(), daemon.cpu_seconds()
    subscriber.run(count)
    ended = time.perf_counter(), time.process_time(), daemon.cpu_seconds()
    check_rows("the subscriber", images, binlog.images, binlog)
    return _Drained(*(end - begin for begin, end in zip(begun, ended, strict=True)))
