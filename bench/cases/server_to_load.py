# SPDX-License-Identifier: Apache-2.0
"""Read a whole table from a live server into Arrow batches, as a full load does, compared with a client's
cursor.

Readers run in separate processes on the same cores as the server, whose rate is the upper limit. The server's
own client, which does not decode, shows approximately where that limit is.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from bench.corpora.corpus import SERVER_OPTIONS, workload
from bench.corpora.workload import DATABASE, Workload
from bench.result import CaseResult, Line, Options, Target
from tools.servers import Server

TITLE = "A table of a live server, read whole (by the clock; server and readers on all cores)"

#: Rows of each table, by size.
_ROWS = {"tiny": 20_000, "small": 200_000, "100MB": 800_000, "1GB": 4_000_000}
_TABLES = ("purchases", "wide")
_RATE = 500_000.0
_CONNECTIONS = 2

_PENSTOCK = """
import json, sys, time
from multiprocessing import get_context
from penstock.model import ServerAddress, TablePatterns
from penstock.pipeline.load.chunks import plan_chunks
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import take_watermark
def counted(work):
    address, target, mark, chunks = work
    count = size = 0
    for chunk in chunks:
        for one in read_chunk(address, target, chunk, instance="b", watermark=mark):
            count += len(one)
            size += one.rows.nbytes
    return count, size
if __name__ == "__main__":
    url, table, connections = sys.argv[1], sys.argv[2], int(sys.argv[3])
    address = ServerAddress.parse(url)
    with get_context("fork").Pool(connections) as pool:
        pool.map(len, [()] * connections)
        started = time.monotonic()
        (target,) = targets_of(address, TablePatterns(table))
        chunks = plan_chunks(address, target)
        mark = take_watermark(address)
        planned = time.monotonic() - started
        works = [(address, target, mark, [chunk]) for chunk in chunks]
        found = list(pool.imap_unordered(counted, works))
        seconds = time.monotonic() - started
    print(json.dumps({"rows": sum(rows for rows, _ in found), "seconds": seconds, "planned": planned,
                      "chunks": len(chunks)}))
"""

_CURSOR = """
import json, sys, time
import pymysql, pymysql.cursors
port, table = int(sys.argv[1]), sys.argv[2]
started = time.monotonic()
count = 0
with pymysql.connect(host="127.0.0.1", port=port, user="root") as connection:
    with connection.cursor(pymysql.cursors.SSCursor) as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        while rows := cursor.fetchmany(10_000):
            count += len(rows)
print(json.dumps({"rows": count, "seconds": time.monotonic() - started}))
"""


@dataclass(frozen=True)
class _Ran:
    rows: int
    seconds: float


def run(options: Options) -> CaseResult:
    """Read each table with every reader. Ratios are by the clock, because the server limits the rate too."""
    rows = _ROWS[options.size]
    lines: list[Line] = []
    with Server("mysql", SERVER_OPTIONS) as server:
        version = str(server.sql("SELECT VERSION()")[0][0])
        server.sql(f"CREATE DATABASE {DATABASE}")
        for name in _TABLES:
            table = _fill(server, workload(name), rows)
            lines += _lines(server, table, rows, options.repeat)
    versions = {"PyMySQL": metadata.version("pymysql"), "MySQL": version}
    return CaseResult("server_to_load", TITLE, lines, versions)


def _fill(server: Server, chosen: Workload, rows: int) -> str:
    """Write a table with this many rows; return its name."""
    pool = f"{DATABASE}.{chosen.name}_pool"
    table = f"{DATABASE}.{chosen.name}"
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_log_bin = 0, cte_max_recursion_depth = 1000000")
        for statement in chosen.seed:
            if (pool in statement and "PROCEDURE" not in statement) or statement in chosen.definitions:
                cursor.execute(statement)
        cursor.execute(
            "SELECT GROUP_CONCAT(CONCAT('`', COLUMN_NAME, '`')) FROM information_schema.COLUMNS"
            " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND EXTRA NOT LIKE '%%auto_increment%%'",
            (DATABASE, chosen.name),
        )
        columns = cursor.fetchone()[0]
        cursor.execute(f"SELECT COUNT(*) FROM {pool}")
        times = -(-rows // int(cursor.fetchone()[0]))
        for _ in range(times):
            cursor.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {pool}")
        cursor.execute(f"DELETE FROM {table} ORDER BY id DESC LIMIT {_count(cursor, table) - rows}")
        cursor.execute(f"ANALYZE TABLE {table}")
        cursor.fetchall()
    return table


def _count(cursor: object, table: str) -> int:
    cursor.execute(f"SELECT COUNT(*) FROM {table}")  # type: ignore[attr-defined]
    return int(cursor.fetchone()[0])  # type: ignore[attr-defined]


def _lines(server: Server, table: str, rows: int, repeat: int) -> list[Line]:
    readers: dict[str, Callable[[], _Ran]] = {
        "Penstock, one connection": lambda: _penstock(server, table, 1),
        f"Penstock, {_CONNECTIONS} connections": lambda: _penstock(server, table, _CONNECTIONS),
        "PyMySQL's SSCursor": lambda: _python(_CURSOR, str(server.port), table),
        "mysql --quick, not decoded": lambda: _client(server, table),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    # Alternate between the readers, so that other load affects all readers equally. The first reads warm up
    # the server.
    for _ in range(repeat):
        for name, read in readers.items():
            ran = read()
            assert ran.rows == rows, f"{name} read {ran.rows} rows of {rows}"
            seconds[name].append(ran.seconds)
    rates = {name: rows / statistics.median(durations) for name, durations in seconds.items()}
    penstock_rate = next(iter(rates.values()))
    # With many wide columns, the server itself produces few rows per second for any reader.
    targets = {
        "PyMySQL's SSCursor": Target(5, aim=table.endswith(".wide")),
        "mysql --quick, not decoded": Target(1, aim=True),
    }
    return [
        Line(
            table.rpartition(".")[2],
            name,
            {"rows/s": rate},
            penstock_rate / rate
            if name in targets
            else rate / _RATE
            if name.startswith("Penstock")
            else None,
            targets.get(name, Target(1, aim=True)),
            "ratio: of 500,000 rows/s" if name.startswith("Penstock") else "",
        )
        for name, rate in rates.items()
    ]


def _penstock(server: Server, table: str, connections: int) -> _Ran:
    return _python(_PENSTOCK, server.url(), table, str(connections))


def _python(program: str, *words: str) -> _Ran:
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    return _Ran(report["rows"], report["seconds"])


def _client(server: Server, table: str) -> _Ran:
    """The server's own client prints every row; the lines are counted."""
    command = [*server.program("mysql"), "--no-defaults", "--host=127.0.0.1", f"--port={server.port}"]
    command += [
        "--user=root",
        "--quick",
        "--batch",
        "--skip-column-names",
        "--execute",
        f"SELECT * FROM {table}",
    ]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        counted = subprocess.run(["wc", "-l"], stdin=client.stdout, capture_output=True, check=True)
    return _Ran(int(counted.stdout), time.monotonic() - started)
