# SPDX-License-Identifier: Apache-2.0
"""Write a binlog file's changes into Redis, decoding and all, beside redis-py's pipelines fed row by row."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice

import redis

from bench.corpora.corpus import Corpus, corpus
from bench.result import CaseResult, Line, Options, Target
from penstock import read_binlog
from penstock.changes import Changes
from penstock.changes import Target as Table
from penstock.model import TableName
from penstock.sinks.sink import BatchMark, make_sink, settings_of
from tools.redis import Redis

TITLE = "A binlog file's changes into Redis (by the clock, one writer)"

_WORKLOAD = "purchases"
_TABLE = "bench.purchases"
_KEYS_PER_SECOND = 100_000.0
_WRITES = {
    "set": "values, the row as JSON",
    "hash": "hashes, a field for each column",
    "invalidate": "invalidation",
}
_COMMANDS = ("cmdstat_set", "cmdstat_hset", "cmdstat_unlink", "cmdstat_del")
#: What one pipeline of redis-py gathers before it sends.
_ROWS_OF_PIPELINE = 1_000
#: The peer does no more of a large file.
_PEER_BATCHES_MAX = 8


def run(options: Options) -> CaseResult:
    """Measure each way to write, and the peer."""
    made = corpus(_WORKLOAD, options.size)
    lines = []
    with Redis() as server:
        for write, title in _WRITES.items():
            rates = [
                _measure(server, lambda write=write: _penstock(server, made, write))
                for _ in range(options.repeat)
            ]
            rate = statistics.median(rates)
            lines.append(
                Line(_WORKLOAD, f"Penstock, {title}", {"keys/s": rate}, rate / _KEYS_PER_SECOND, Target(1))
            )
        rates = [_measure(server, lambda: _redis_py(server, made)) for _ in range(options.repeat)]
        theirs = statistics.median(rates)
        times = lines[0].rates["keys/s"] / theirs
        note = f"Penstock's values come {times:.1f} times as fast; decoded rows were at hand"
        lines.append(Line(_WORKLOAD, "redis-py, a pipeline of rows as JSON", {"keys/s": theirs}, note=note))
        with redis.Redis.from_url(server.url) as client:
            versions = {"Redis": client.info("server")["redis_version"], "redis-py": redis.__version__}
    return CaseResult("changes_to_redis", TITLE, lines, versions, ratio_title="of 100,000 keys/s")


def _measure(server: Redis, write: Callable[[], float]) -> float:
    """Return the keys that a server took in a second, by its own count."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.config_resetstat()
        seconds = write()
        counted = client.info("commandstats")
    return sum(counted[name]["calls"] for name in _COMMANDS if name in counted) / seconds


def _changes(made: Corpus) -> Iterator[Changes]:
    for batch in read_binlog(str(made.path), tables=[_TABLE]):
        name = TableName.parse(batch.table)
        yield Changes(Table(name, batch.columns, batch.primary_key), batch.to_arrow(), name)


def _penstock(server: Redis, made: Corpus, write: str) -> float:
    sink = make_sink("redis", settings_of("redis")(url=server.url, write=write))
    started = time.perf_counter()
    writer = sink.open(BatchMark("bench", "1", 1), 0)
    for changes in _changes(made):
        writer.write(changes)
    writer.finish()
    return time.perf_counter() - started


def _redis_py(server: Redis, made: Corpus) -> float:
    """Write rows that are decoded already; only what comes after that is measured."""
    batches = [
        (changes.target, changes.rows.to_pylist()) for changes in islice(_changes(made), _PEER_BATCHES_MAX)
    ]
    started = time.perf_counter()
    with redis.Redis.from_url(server.url) as client, client.pipeline(transaction=False) as pipeline:
        for table, rows in batches:
            key = table.primary_key[0]
            for row in rows:
                name = f"{table.name.database}:{table.name.table}:{row[key]}"
                if row["_change_type"] in ("insert", "update_postimage"):
                    pipeline.set(name, json.dumps({one: row[one] for one in table.column_names}, default=str))
                elif row["_change_type"] == "delete":
                    pipeline.delete(name)
                if len(pipeline) >= _ROWS_OF_PIPELINE:
                    pipeline.execute()
        pipeline.execute()
    return time.perf_counter() - started
