# SPDX-License-Identifier: Apache-2.0
"""Latency from commit to a reader of Redis, at 1,000 transactions per second, without Spark."""

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import redis

from bench.captured import wait_until
from bench.corpora.corpus import SERVER_OPTIONS, cache_directory
from bench.corpora.workload import DATABASE
from bench.daemon import cpu_seconds_of, serving
from bench.result import CaseResult, Line, Options, Target
from bench.stages import Change, following, percentile, read_marks, stage_lines, statement_line
from bench.writers import writing
from tools.redis import Redis
from tools.servers import Server

TITLE = "Commit to Redis, through a pipeline in one process"

_TRANSACTIONS_PER_SECOND = 1000
_TABLE = f"{DATABASE}.arrivals"
_P50_MS, _P99_MS = 3.0, 50.0
#: Samples while the processes connect do not represent a steady state.
_SETTLE_SECONDS = 1.5
_START_SECONDS_MAX = 120.0


def run(options: Options) -> CaseResult:
    """Follow writers for some seconds."""
    folder = Path(tempfile.mkdtemp(prefix="bench-pipeline-", dir=cache_directory()))
    try:
        with (
            Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "128M"}) as server,
            Redis("--notify-keyspace-events", "E$") as cache,
        ):
            server.sql(f"CREATE DATABASE {DATABASE}")
            server.sql(f"CREATE TABLE {_TABLE} (id BIGINT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(40))")
            lines = _lines(server, cache, folder, options.seconds_max)
            # In an orderly shutdown the server would wait for the disconnected replica.
            server.kill()
        return CaseResult("commit_to_redis", TITLE, lines, ratio_title="the target is")
    finally:
        shutil.rmtree(folder)


def _lines(server: Server, cache: Redis, folder: Path, seconds: float) -> list[Line]:
    arrived: dict[str, float] = {}
    files = folder / "daemon.json", folder / "pipeline.json"
    with (
        serving(folder, server.port, start="latest", marks=files[0]) as daemon,
        following(_settings(daemon.url, cache.url), folder, files[1]) as pipeline,
        _watching(cache.url, arrived),
        writing(server.port, _TABLE, _TRANSACTIONS_PER_SECOND) as statements,
    ):
        _wait_for_first(arrived)
        time.sleep(_SETTLE_SECONDS)
        settled, before = time.time(), len(arrived)
        used = cpu_seconds_of(pipeline.pid), daemon.cpu_seconds()
        time.sleep(seconds)
        # Extend the measurement if the machine stalled.
        wait_until(lambda: len(arrived) > before)
        ended = time.time()
        used_then = cpu_seconds_of(pipeline.pid), daemon.cpu_seconds()
    keys = [key for key, when in arrived.items() if settled <= when < ended]
    values = redis.Redis.from_url(cache.url, decode_responses=True).mget(keys)
    changes = []
    for key, value in zip(keys, values, strict=True):
        version, _, committed = str(value).partition(" ")
        changes.append(Change(int(version), _moment(committed), arrived[key]))
    delays = [(change.arrived - change.committed) * 1000 for change in changes]
    median, late = statistics.median(delays), percentile(delays, 0.99)
    rates = {"transactions/s": len(delays) / (ended - settled)}
    own, server_side = (
        (then - before) * 1e6 / len(delays) for before, then in zip(used, used_then, strict=True)
    )
    note = f"per transaction: {own:.0f} µs of CPU of the pipeline, {server_side:.0f} of the daemon"
    return [
        Line("writers", "p50", rates | {"ms": median}, _P50_MS / median, Target(1), note),
        Line("writers", "p99", rates | {"ms": late}, _P99_MS / late, Target(1)),
        statement_line(statements),
        *stage_lines(changes, read_marks(files[0]) | read_marks(files[1]), "a reader of Redis sees it"),
    ]


def _moment(text: str) -> float:
    return datetime.fromisoformat(text if text[-1] == "Z" or "+" in text else f"{text}+00:00").timestamp()


def _settings(url: str, cache: str) -> dict[str, Any]:
    """Return a pipeline. The value of each row is its commit version and its commit time."""
    value = "{_commit_version} {_commit_timestamp}"
    return {
        "name": "arrivals",
        "source": {"url": url, "tables": [_TABLE]},
        "load": "none",
        "sink": {"redis": {"url": cache, "key": "arrival:{id}", "value": value}},
    }


@contextmanager
def _watching(url: str, arrived: dict[str, float]) -> Iterator[None]:
    """Record when each key is set, as reported by the server's notifications."""
    watch = redis.Redis.from_url(url, decode_responses=True).pubsub(ignore_subscribe_messages=True)
    watch.subscribe("__keyevent@0__:set")
    done = threading.Event()

    def note() -> None:
        while not done.is_set():
            message = watch.get_message(timeout=0.2)
            if message is not None:
                arrived.setdefault(message["data"], time.time())

    thread = threading.Thread(target=note)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        watch.close()


def _wait_for_first(arrived: dict[str, float]) -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while not arrived:
        assert time.monotonic() < deadline, "nothing arrives"
        time.sleep(0.02)
