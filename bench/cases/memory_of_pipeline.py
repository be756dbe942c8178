# SPDX-License-Identifier: Apache-2.0
"""Memory of a pipeline's processes under large loads.

The loads are one transaction, a long backlog, and the full load of many tables side by side. The server
generates the rows. Sums verify the final contents of the target.
"""

import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable

from bench.corpora import purchases
from bench.corpora.corpus import SERVER_OPTIONS, CountsDiffer, cache_directory
from bench.corpora.workload import DATABASE, NUMBERS
from bench.pipeline_process import PipelineProcess, run_until_caught_up
from bench.result import CaseResult, Line, Options, Target
from tools.servers import Server

TITLE = "Memory of a pipeline's processes, local[2], a live server's log into Delta mirrors"

#: Bytes of the transaction, and changes of the backlog, by size.
_BYTES = {"tiny": 8 << 20, "small": 32 << 20, "100MB": 200 << 20, "1GB": 2 << 30}
_CHANGES = {"tiny": 200_000, "small": 1_000_000, "100MB": 10_000_000, "1GB": 100_000_000}
_ROWS_PER_STATEMENT = 250_000
#: The number of tables loaded side by side, and the rows of each.
_TABLES = 64
_ROWS = {"tiny": 500, "small": 5_000, "100MB": 20_000, "1GB": 100_000}
_BATCH_BYTES = 64 << 20
#: The memory limit of all Python processes together.
_PYTHON_BYTES = 1_200_000_000
_TEXT_BYTES = 1000
_NUMBERS = (
    "WITH RECURSIVE n (i) AS (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i < {last}) SELECT {values}"
    " FROM n"
)


@dataclass(frozen=True)
class _Case:
    """Tables, and the statements that create and fill them. `sums` are queries whose results are compared
    between source and target.

    The pipeline reads the log from its beginning or, if `loads` is set, loads the tables.
    """

    name: str
    tables: tuple[str, ...]
    statements: tuple[str, ...]
    sums: str
    loads: bool = False


def run(options: Options) -> CaseResult:
    """Run a pipeline on each case."""
    lines = []
    settings = SERVER_OPTIONS | {"max-binlog-size": 1 << 30, "max-binlog-cache-size": 8 << 30}
    size = options.size
    for case in (_transaction(_BYTES[size]), _backlog(_CHANGES[size]), _tables(_ROWS[size])):
        with Server("mysql", settings) as server:
            lines.append(_line(case, server))
            server.kill()
    versions = {name: metadata.version(name) for name in ("pyspark", "deltalake", "pyarrow")}
    return CaseResult("memory_of_pipeline", TITLE, lines, versions, ratio_title="the bound is")


def _transaction(size: int) -> _Case:
    """One transaction that inserts rows of about this many bytes in total, and updates every eighth row."""
    rows = size // (_TEXT_BYTES + 20)
    steps = range(0, rows, _ROWS_PER_STATEMENT)
    values = f"i, i % 97, RPAD(SHA2(i, 256), {_TEXT_BYTES}, 'x')"
    statements = [
        f"CREATE TABLE {DATABASE}.large (id BIGINT PRIMARY KEY, v INT, note VARCHAR({_TEXT_BYTES})"
        " CHARACTER SET latin1)",
        "BEGIN",
    ]
    for first in steps:
        last = min(rows, first + _ROWS_PER_STATEMENT) - 1
        statements.append(
            f"INSERT INTO {DATABASE}.large {_NUMBERS.format(first=first, last=last, values=values)}"
        )
    statements += [f"UPDATE {DATABASE}.large SET v = v + 1000 WHERE id % 8 = 0", "COMMIT"]
    return _Case(
        "one transaction", ("large",), tuple(statements), "COUNT(*), SUM(id), SUM(v), SUM(LENGTH(note))"
    )


def _backlog(changes: int) -> _Case:
    """Rows that are inserted, then updated and deleted, in transactions of 250,000 rows."""
    rows = changes // 2
    statements = [f"CREATE TABLE {DATABASE}.backlog (id BIGINT PRIMARY KEY, v INT)"]
    for first in range(0, rows, _ROWS_PER_STATEMENT):
        last = min(rows, first + _ROWS_PER_STATEMENT) - 1
        table = f"{DATABASE}.backlog"
        statements += [
            f"INSERT INTO {table} {_NUMBERS.format(first=first, last=last, values='i, i % 1009')}",
            f"UPDATE {table} SET v = v + 1 WHERE id BETWEEN {first} AND {last} AND id % 4 > 0",
            f"DELETE FROM {table} WHERE id BETWEEN {first} AND {last} AND id % 4 = 0",
        ]
    return _Case("a backlog", ("backlog",), tuple(statements), "COUNT(*), SUM(id), SUM(v)")


def _tables(rows: int) -> _Case:
    """Tables of ten columns."""
    pool, *_ = purchases.WORKLOAD.definitions
    columns = f"{purchases.COLUMNS}) SELECT {purchases.VALUES} FROM {NUMBERS.format(count=rows)}"
    statements = [pool, f"INSERT INTO {DATABASE}.purchases_pool ({columns}"]
    names = [f"purchases_{number}" for number in range(_TABLES)]
    for name in names:
        statements += [
            f"CREATE TABLE {DATABASE}.{name} LIKE {DATABASE}.purchases_pool",
            f"INSERT INTO {DATABASE}.{name} SELECT * FROM {DATABASE}.purchases_pool",
        ]
    return _Case("a full load", tuple(names), tuple(statements), "COUNT(*), SUM(id), SUM(amount)", loads=True)


def _line(case: _Case, server: Server) -> Line:
    folder = Path(tempfile.mkdtemp(prefix="bench-memory-", dir=cache_directory()))
    try:
        server.sql(f"CREATE DATABASE {DATABASE}")
        with server.connect() as connection, connection.cursor() as cursor:
            connection.autocommit(True)
            connection.select_db(DATABASE)
            cursor.execute(f"SET SESSION cte_max_recursion_depth = {_ROWS_PER_STATEMENT + 1}")
            for statement in case.statements:
                cursor.execute(statement)
        size = sum(log_row[1] for log_row in server.sql("SHOW BINARY LOGS"))
        settings: dict[str, Any] = {
            "name": "bench",
            "source": {"url": server.url("repl"), "tables": [f"{DATABASE}.{table}" for table in case.tables]},
            "sink": {"delta": {"mode": "mirror", "path": str(folder / "lake")}},
            "batch": {"bytes": _BATCH_BYTES},
        }
        if not case.loads:
            settings["source"]["start"] = "earliest"
            settings["load"] = {"mode": "none"}
        done = run_until_caught_up(settings, folder)
        for table in case.tables:
            wanted = server.sql(f"SELECT {case.sums} FROM {DATABASE}.{table}")[0]
            files = DeltaTable(folder / "lake" / DATABASE / table).file_uris()
            [held] = duckdb.sql(f"SELECT {case.sums} FROM read_parquet({files})").fetchall()
            if [*map(str, held)] != [*map(str, wanted)]:
                raise CountsDiffer(f"the mirror of {table} has {held}, the table {wanted}")
        return _measured(case, size, done)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(case: _Case, size: int, done: PipelineProcess) -> Line:
    rates = {
        "GB of log": size / 1e9,
        "rows": float(sum(batch.rows for batch in done.batches)),
        "seconds with start": done.seconds,
        **{f"MB of {kind} at most": number / 1e6 for kind, number in done.resident.items()},
    }
    note = f"{len(done.batches)} batches"
    return Line(
        case.name, "delta mirror", rates, _PYTHON_BYTES / done.resident["all Python"], Target(1), note
    )
