# SPDX-License-Identifier: Apache-2.0
"""Write a binlog file's changes into Redis, including decoding, compared with redis-py pipelines fed row by
row.
"""

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
#: The batch size of one redis-py pipeline.
_ROWS_OF_PIPELINE = 1_000
#: The peer processes at most this much of a large file.
_PEER_BATCHES_MAX = 8


def run(options: Options) -> CaseResult:
    """Measure each write mode, and the peer."""
    binlog = corpus(_WORKLOAD, options.size)
    lines = []
    with Redis() as server:
        for write, title in _WRITES.items():
            rates = [
                _measure(server, lambda write=write: _penstock(server, binlog, write))
                for _ in range(options.repeat)
            ]
            rate = statistics.median(rates)
            lines.append(
                Line(_WORKLOAD, f"Penstock, {title}", {"keys/s": rate}, rate / _KEYS_PER_SECOND, Target(1))
            )
        rates = [_measure(server, lambda: _redis_py(server, binlog)) for _ in range(options.repeat)]
        peer_rate = statistics.median(rates)
        times = lines[0].rates["keys/s"] / peer_rate
        note = f"Penstock's values come {times:.1f} times as fast; decoded rows were at hand"
        lines.append(
            Line(_WORKLOAD, "redis-py, a pipeline of rows as JSON", {"keys/s": peer_rate}, note=note)
        )
        with redis.Redis.from_url(server.url) as client:
            versions = {"Redis": client.info("server")["redis_version"], "redis-py": redis.__version__}
    return CaseResult("changes_to_redis", TITLE, lines, versions, ratio_title="of 100,000 keys/s")


def _measure(server: Redis, write: Callable[[], float]) -> float:
    """Return the keys per second written to a server, as the server counts them."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.config_resetstat()
        seconds = write()
        counted = client.info("commandstats")
    return sum(counted[name]["calls"] for name in _COMMANDS if name in counted) / seconds


def _changes(binlog: Corpus) -> Iterator[Changes]:
    for batch in read_binlog(str(binlog.path), tables=[_TABLE]):
        name = TableName.parse(batch.table)
        yield Changes(Table(name, batch.columns, batch.primary_key), batch.to_arrow(), name)


def _penstock(server: Redis, binlog: Corpus, write: str) -> float:
    sink = make_sink("redis", settings_of("redis")(url=server.url, write=write))
    started = time.perf_counter()
    writer = sink.open(BatchMark("bench", "1", 1), 0)
    for changes in _changes(binlog):
        writer.write(changes)
    writer.finish()
    return time.perf_counter() - started


def _redis_py(server: Redis, binlog: Corpus) -> float:
    """Write rows that are already decoded. Only the writing is measured."""
    batches = [
        (changes.target, changes.rows.to_pylist()) for changes in islice(_changes(binlog), _PEER_BATCHES_MAX)
    ]
    started = time.perf_counter()
    with redis.Redis.from_url(server.url) as client, client.pipeline(transaction=False) as pipeline:
        for table, rows in batches:
            key = table.primary_key[0]
            for row in rows:
                name = f"{table.name.database}:{table.name.table}:{row[key]}"
                if row["_change_type"] in ("insert", "update_postimage"):
                    pipeline.set(
                        name, json.dumps({column: row[column] for column in table.column_names}, default=str)
                    )
                elif row["_change_type"] == "delete":
                    pipeline.delete(name)
                if len(pipeline) >= _ROWS_OF_PIPELINE:
                    pipeline.execute()
        pipeline.execute()
    return time.perf_counter() - started
