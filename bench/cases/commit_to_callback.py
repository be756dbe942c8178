# SPDX-License-Identifier: Apache-2.0
"""Latency from commit to a subscriber's callback, at 2,000 transactions per second in four shards."""

import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import pyarrow

from bench.captured import wait_until
from bench.corpora.corpus import SERVER_OPTIONS, cache_directory
from bench.corpora.workload import DATABASE
from bench.daemon import serving
from bench.result import CaseResult, Line, Options, Target
from bench.stages import Change, Clock, percentile, read_marks, stage_lines, statement_line
from bench.writers import writing
from penstock.client import ChangeBatch, Subscriber
from tools.servers import Server

TITLE = "Commit to callback, four shards"

_TRANSACTIONS_PER_SECOND = 2000
_SHARDS = 4
_TABLE = f"{DATABASE}.arrivals"
_P50_MS, _P99_MS = 2.5, 10.0
#: Samples while the members connect do not represent a steady state.
_SETTLE_SECONDS = 1.5
_START_SECONDS_MAX = 120.0


def run(options: Options) -> CaseResult:
    """Follow writers for some seconds."""
    folder = Path(tempfile.mkdtemp(prefix="bench-callback-", dir=cache_directory()))
    try:
        with Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "128M"}) as server:
            server.sql(f"CREATE DATABASE {DATABASE}")
            server.sql(f"CREATE TABLE {_TABLE} (id BIGINT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(40))")
            lines = _lines(server, folder, options.seconds_max)
            # In an orderly shutdown the server would wait for the disconnected replica.
            server.kill()
        return CaseResult("commit_to_callback", TITLE, lines, ratio_title="the target is")
    finally:
        shutil.rmtree(folder)


def _lines(server: Server, folder: Path, seconds: float) -> list[Line]:
    arrived: list[tuple[float, pyarrow.RecordBatch]] = []
    clock, marks = Clock(), folder / "marks.json"

    def arrive(batch: ChangeBatch) -> None:
        arrived.append((time.time(), batch.to_arrow()))

    with serving(folder, server.port, start="latest", marks=marks) as daemon, clock.watching_client():
        subscriber = Subscriber(
            daemon.url,
            name="arrivals",
            tables=[_TABLE],
            shards=_SHARDS,
            begin="latest",
            coordination=f"sqlite://{folder / 'arrivals.db'}",
        )
        thread = threading.Thread(target=subscriber.run, args=(arrive,))
        thread.start()
        try:
            with writing(server.port, _TABLE, _TRANSACTIONS_PER_SECOND) as statements:
                _wait_for_first(arrived)
                time.sleep(_SETTLE_SECONDS)
                settled, used = time.time(), (time.process_time(), daemon.cpu_seconds(), daemon.wakes())
                time.sleep(seconds)
                # Extend the measurement if the machine stalled.
                wait_until(lambda: arrived[-1][0] >= settled)
                ended, used_then = time.time(), (time.process_time(), daemon.cpu_seconds(), daemon.wakes())
            time.sleep(0.5)
        finally:
            subscriber.stop()
            thread.join()
    changes = [
        Change(version, time_us / 1e6, when)
        for when, rows in arrived
        if settled <= when < ended
        for version, time_us in zip(
            rows.column("_commit_version").to_pylist(),
            rows.column("_commit_timestamp").cast("int64").to_pylist(),
            strict=True,
        )
    ]
    delays = [(change.arrived - change.committed) * 1000 for change in changes]
    median, late = statistics.median(delays), percentile(delays, 0.99)
    rates = {"transactions/s": len(delays) / (ended - settled)}
    client, server_side, wakes = (
        (then - before) / len(delays) for before, then in zip(used, used_then, strict=True)
    )
    note = (
        f"per transaction: {client * 1e6:.0f} µs of CPU of the subscriber, {server_side * 1e6:.0f} of the"
        f" daemon, whose threads wake {wakes:.1f} times"
    )
    return [
        Line("writers", "p50", rates | {"ms": median}, _P50_MS / median, Target(1), note),
        Line("writers", "p99", rates | {"ms": late}, _P99_MS / late, Target(1)),
        statement_line(statements),
        *stage_lines(changes, read_marks(marks) | clock.marks, "the callback is called"),
    ]


def _wait_for_first(arrived: list[tuple[float, pyarrow.RecordBatch]]) -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while not arrived:
        assert time.monotonic() < deadline, "nothing arrives"
        time.sleep(0.02)
