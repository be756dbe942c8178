# SPDX-License-Identifier: Apache-2.0
"""Stream from a live server with Spark: the rate while a backlog is read, and the time from a commit until it
is readable.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from bench.corpora.corpus import SERVER_OPTIONS, check_rows, corpus
from bench.corpora.serve import serve
from bench.corpora.workload import DATABASE
from bench.result import CaseResult, Line, Options
from bench.spark_process import spark
from tools.servers import Server

TITLE = "Live server to Spark (rates by the clock)"

_MASTER = "local[2]"
#: One table of each workload, with the most rows.
_TABLES = {"narrow": "bench.narrow1", "wide": "bench.wide", "tpcc": "bench.order_line"}
_LATENCY_TABLE = f"{DATABASE}.arrivals"
_TRANSACTION_ROWS = 10
_TRANSACTION_SECONDS = 0.01


def run(options: Options) -> CaseResult:
    """Process every workload's backlog, then follow a writer of 1,000 rows/s."""
    lines = [_backlog(workload, options) for workload in options.workloads]
    lines.append(_latency(options))
    return CaseResult("server_to_spark", TITLE, lines, {"pyspark": metadata.version("pyspark")})


def _backlog(workload: str, options: Options) -> Line:
    binlog = corpus(workload, options.size)
    table = _TABLES[workload]
    with serve(binlog) as server:
        order = {"verb": "backlog_to_noop", "master": _MASTER, "tables": table, "source": server.url("repl")}
        outcome = spark(order)
    check_rows(f"Spark streaming {table}", outcome.rows, binlog.rows_by_table[table], binlog)
    rates = {
        "rows/s": outcome.rows / outcome.seconds,
        "MB/s": binlog.bytes / outcome.seconds / 1e6,
        "rows per CPU second": outcome.rows / outcome.seconds_cpu,
        "seconds": outcome.seconds,
    }
    return Line(
        workload, f"backlog of {table}", rates, note=f"{outcome.batches} batches, start of the query included"
    )


def _latency(options: Options) -> Line:
    seconds = 4 * options.seconds_max
    with Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "128M"}) as server:
        server.sql(f"CREATE DATABASE {DATABASE}")
        server.sql(f"CREATE TABLE {_LATENCY_TABLE} (id BIGINT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(40))")
        order = {"verb": "commit_to_visible", "master": _MASTER, "tables": _LATENCY_TABLE}
        with _writer(server):
            outcome = spark(order | {"source": server.url("repl"), "seconds": seconds})
    assert outcome.latencies_ms is not None, "the order asks for latencies"
    median, worst = outcome.latencies_ms
    rates = {
        "rows/s": outcome.rows / outcome.seconds,
        "seconds": outcome.seconds,
        "commit to visible p50 ms": median,
        "p99 ms": worst,
    }
    pace = f"{_TRANSACTION_ROWS / _TRANSACTION_SECONDS:,.0f} rows/s, {_TRANSACTION_ROWS} per transaction"
    return Line("writer", pace, rates)


@contextmanager
def _writer(server: Server) -> Iterator[None]:
    """Insert `_TRANSACTION_ROWS` rows every `_TRANSACTION_SECONDS` in a thread while the block runs."""
    stop = threading.Event()
    values = ", ".join(["(LEFT(SHA2(RAND(), 224), 40))"] * _TRANSACTION_ROWS)

    def write() -> None:
        with server.connect() as connection, connection.cursor() as cursor:
            due = time.monotonic()
            while not stop.wait(max(0.0, due - time.monotonic())):
                cursor.execute(f"INSERT INTO {_LATENCY_TABLE} (note) VALUES {values}")
                due += _TRANSACTION_SECONDS

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
