# SPDX-License-Identifier: Apache-2.0
"""Write a binlog file's changes into MySQL and PostgreSQL, compared with multi-row statements over one
connection.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Any

import psycopg
import pymysql

from bench.corpora.corpus import Corpus, corpus
from bench.result import CaseResult, Line, Options, Target
from penstock import read_binlog
from penstock.changes import PUTS, Changes
from penstock.changes import Target as Table
from penstock.model import TableName
from penstock.sinks.sink import BatchMark, Evolution, make_sink, settings_of
from tools.postgres import Postgres
from tools.servers import Server

TITLE = "A binlog file's changes into MySQL and PostgreSQL, decoding and all (by the clock, one writer)"

_WORKLOAD = "purchases"
_TABLE = "bench.purchases"
_CONNECTIONS = (1, 2, 4)
#: The rows per statement of the peer, typical of multi-row appliers.
_ROWS_OF_STATEMENT = 500
#: The peer processes at most this much of a large file.
_PEER_BATCHES_MAX = 4
_BATCH_ROWS = 65_536


def run(options: Options) -> CaseResult:
    """Measure the MySQL sink with several connections, the PostgreSQL sink, and the peer."""
    binlog = corpus(_WORKLOAD, options.size)
    rates: dict[str, float] = {}
    with Server("mysql") as server:
        for connections in _CONNECTIONS:
            settings = {"url": server.url("root"), "connections": connections}
            rates[f"Penstock, mysql, connections: {connections}"] = _median(
                options,
                lambda settings=settings: _penstock("mysql", settings, binlog),
                lambda: _clear(server),
            )
        peer_rate = _median(options, lambda: _one_connection(server, binlog), lambda: _clear(server))
        versions = {"MySQL": server.version, "PyMySQL": pymysql.__version__}
    with Postgres() as postgres:
        rates["Penstock, postgres"] = _median(
            options,
            lambda: _penstock("postgres", {"url": postgres.url}, binlog),
            lambda: _clear_postgres(postgres),
        )
        versions["psycopg"] = psycopg.__version__
    lines = [
        Line(_WORKLOAD, title, {"rows/s": rate}, rate / peer_rate, Target(2, aim=True))
        for title, rate in rates.items()
    ]
    note = "in commit order, runs of rows of one kind; rows were decoded before"
    lines.append(Line(_WORKLOAD, "PyMySQL, one connection, multi-row", {"rows/s": peer_rate}, note=note))
    return CaseResult("changes_to_mysql", TITLE, lines, versions, ratio_title="of one connection's")


def _median(options: Options, write: Callable[[], float], clear: Callable[[], None]) -> float:
    rates = []
    for _ in range(options.repeat):
        clear()
        rates.append(write())
    return statistics.median(rates)


def _changes(binlog: Corpus) -> Iterator[Changes]:
    for batch in read_binlog(str(binlog.path), tables=_TABLE, batch_rows_max=_BATCH_ROWS):
        name = TableName.parse(batch.table)
        yield Changes(Table(name, batch.columns, batch.primary_key), batch.to_arrow(), name)


def _penstock(kind: str, settings: dict[str, Any], binlog: Corpus) -> float:
    sink = make_sink(kind, settings_of(kind)(**settings))
    sink.prepare(next(_changes(binlog)).target, Evolution.EVOLVE)
    started = time.perf_counter()
    rows = 0
    for number, changes in enumerate(_changes(binlog), start=1):
        writer = sink.open(BatchMark("bench", "1", number), 0)
        writer.write(changes)
        rows += writer.finish().rows
    return rows / (time.perf_counter() - started)


def _one_connection(server: Server, binlog: Corpus) -> float:
    """Return the rate of a Python applier that writes runs of rows in commit order."""
    table = next(_changes(binlog)).target
    settings = settings_of("mysql")(url=server.url("root"))
    make_sink("mysql", settings).prepare(table, Evolution.EVOLVE)
    names = ", ".join(table.column_names)
    updates = ", ".join(f"{name}=VALUES({name})" for name in table.column_names)
    marks = f"({', '.join(['%s'] * len(table.columns))})"
    rows, seconds = 0, 0.0
    with server.connect(autocommit=False) as connection, connection.cursor() as cursor:
        for changes in islice(_changes(binlog), _PEER_BATCHES_MAX):
            listed = changes.rows.drop_columns(["_metadata"]).to_pylist()
            started = time.perf_counter()
            events = [change for change in listed if change["_change_type"] != "update_preimage"]
            for put, run_of in groupby(events, lambda change: change["_change_type"] in PUTS):
                while some := list(islice(run_of, _ROWS_OF_STATEMENT)):
                    if put:
                        values = [row[name] for row in some for name in table.column_names]
                        cursor.execute(
                            f"INSERT INTO {table.name.sql} ({names}) VALUES {', '.join([marks] * len(some))}"
                            f" ON DUPLICATE KEY UPDATE {updates}",
                            values,
                        )
                    else:
                        keys = [row["id"] for row in some]
                        placeholders = ", ".join(["%s"] * len(keys))
                        cursor.execute(f"DELETE FROM {table.name.sql} WHERE id IN ({placeholders})", keys)
            connection.commit()
            seconds += time.perf_counter() - started
            rows += len(changes)
    return rows / seconds


def _clear(server: Server) -> None:
    for database in ("bench", "penstock"):
        server.sql(f"DROP DATABASE IF EXISTS {database}")


def _clear_postgres(server: Postgres) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        for schema in ("bench", "penstock"):
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())
