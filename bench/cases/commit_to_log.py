# SPDX-License-Identifier: Apache-2.0
"""The time from a commit until it is readable in the log, at a steady rate, and the cost of idle
instances.
"""

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.captured import capturing, settings_of, wait_until
from bench.corpora.corpus import SERVER_OPTIONS, cache_directory
from bench.corpora.workload import DATABASE
from bench.result import CaseResult, Line, Options, Target
from penstock import read_binlog
from penstock.logstore.log import Log
from penstock.model import Position
from tools.servers import Server

TITLE = "Commit to readable in the log, and the memory of idle instances"

_TRANSACTIONS_PER_SECOND = 2000
_WRITERS = 2
_TABLE = f"{DATABASE}.arrivals"
_P50_MS, _P99_MS = 2.0, 10.0
_IDLE_INSTANCES, _IDLE_MB = 8, 300.0
#: Transactions that the reader sees at its first look became readable earlier, so they are not measured.
_LOOKS_MIN = 10


def run(options: Options) -> CaseResult:
    """Follow writers for some seconds, then let eight instances idle."""
    folder = Path(tempfile.mkdtemp(prefix="bench-commit-", dir=cache_directory()))
    try:
        with Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "128M"}) as server:
            server.sql(f"CREATE DATABASE {DATABASE}")
            server.sql(f"CREATE TABLE {_TABLE} (id BIGINT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(40))")
            lines = _latency(server, folder / "one", options.seconds_max)
            lines.append(_idle(server, folder / "eight"))
        return CaseResult("commit_to_log", TITLE, lines, ratio_title="the target is")
    finally:
        shutil.rmtree(folder)


def _latency(server: Server, folder: Path, seconds: float) -> list[Line]:
    seen: list[tuple[Position, float]] = []
    with capturing(settings_of(folder, server.port)) as (log,), _watching(log, seen):
        started_at = time.monotonic()
        with _writing(server):
            time.sleep(seconds)
            # Extend the measurement if the machine stalled.
            wait_until(lambda: len(seen) >= _LOOKS_MIN)
        seconds = time.monotonic() - started_at
        head = Position(0, *_head(server))
        wait_until(lambda: seen[-1][0] >= head)
    delays = sorted(_delays(folder / "copy0", seen))
    median, late = statistics.median(delays), delays[int(len(delays) * 0.99)]
    rates = {"transactions/s": len(delays) / seconds}
    return [
        Line("writers", "p50", rates | {"ms": median}, _P50_MS / median, Target(1)),
        Line("writers", "p99", rates | {"ms": late}, _P99_MS / late, Target(1)),
    ]


@contextmanager
def _watching(log: Log, seen: list[tuple[Position, float]]) -> Iterator[None]:
    """Record, as a reader at the head, how far the log was readable and when."""
    stop = threading.Event()

    def watch() -> None:
        at = log.visible
        while not stop.is_set():
            visible = log.wait_visible(at, timeout=0.1)
            now = time.time()
            if visible is not None and visible != at:
                seen.append((visible, now))
                at = visible

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _writing(server: Server) -> Iterator[None]:
    """Commit single rows at a steady rate over a few connections while the block runs."""
    stop = threading.Event()
    pause = _WRITERS / _TRANSACTIONS_PER_SECOND

    def write() -> None:
        with server.connect() as connection, connection.cursor() as cursor:
            due = time.monotonic()
            while not stop.wait(max(0.0, due - time.monotonic())):
                cursor.execute(f"INSERT INTO {_TABLE} (note) VALUES ('arrives')")
                due += pause

    threads = [threading.Thread(target=write) for _ in range(_WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _delays(folder: Path, seen: list[tuple[Position, float]]) -> Iterator[float]:
    """Yield, for each row, the milliseconds from its commit until a reader could read it."""
    ends = iter(seen)
    end, when = next(ends)
    for batch in read_binlog(folder, tables=[_TABLE]):
        table = batch.to_arrow().select(["_commit_timestamp", "_metadata"])
        times = table.column("_commit_timestamp").cast("int64").to_pylist()
        for time_us, metadata in zip(times, table.column("_metadata").to_pylist(), strict=True):
            row_at = Position(0, metadata["file"], metadata["offset"])
            if row_at < seen[0][0]:
                # The row was readable before the reader's first look.
                continue
            while end <= row_at:
                end, when = next(ends)
            yield when * 1000 - time_us / 1000


def _idle(server: Server, folder: Path) -> Line:
    with capturing(settings_of(folder, server.port, _IDLE_INSTANCES)) as logs:
        head = Position(0, *_head(server))
        wait_until(lambda: all(log.visible is not None and log.visible >= head for log in logs))
        megabytes = _resident_megabytes()
    note = "in the process of the benchmark, whose own modules are in the figure"
    rates = {"resident MB": megabytes}
    return Line("idle", f"{_IDLE_INSTANCES} instances", rates, _IDLE_MB / megabytes, Target(1), note)


def _head(server: Server) -> tuple[str, int]:
    row = server.sql("SHOW BINARY LOG STATUS")[0]
    return str(row[0]), int(row[1])


def _resident_megabytes() -> float:
    line = next(
        text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmRSS")
    )
    return int(line.split()[1]) / 1024
