# SPDX-License-Identifier: Apache-2.0
"""Thousands of small tables in one pipeline without Spark: loading them, and batches that change them.

`write_deltalake` alone writes the same rows into as many tables.
"""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
from deltalake import DeltaTable, write_deltalake

from bench.corpora.corpus import SERVER_OPTIONS, CountsDiffer, cache_directory
from bench.corpora.workload import DATABASE
from bench.pipeline_process import PipelineProcess, run_until_caught_up
from bench.result import CaseResult, Line, Options, Target
from tools.servers import Server

TITLE = "Small tables of a live server into files and Delta mirrors, in one process without Spark"

_TABLES = {"tiny": 20, "small": 200, "100MB": 1_000}
_TABLES_DEFAULT = 5_000
_ROWS = 10
#: Number of tables that a small batch changes.
_CHANGED = 50
_LOADED_PER_SECOND = 500.0
_DELTA_FACTOR = 1.5
_ALL_CHANGED_SECONDS, _SOME_CHANGED_SECONDS = 10.0, 2.0
_OPTIONS = SERVER_OPTIONS | {
    "innodb-buffer-pool-size": "512M",
    "table-open-cache": 8_000,
    "table-definition-cache": 8_000,
}


def run(options: Options) -> CaseResult:
    """Load the tables, change all of them, then some of them; compare the number of rows."""
    tables = _TABLES.get(options.size, _TABLES_DEFAULT)
    lines = []
    with _folder() as folder, Server("mysql", _OPTIONS) as server:
        _create(server, tables)
        used = time.process_time()
        alone = _write_deltalake_alone(folder, tables)
        used = time.process_time() - used
        for kind in ("files", "delta"):
            lines += _lines(kind, server, tables, folder, alone)
        server.kill()
    seconds = {"seconds": alone, "tables/s": tables / alone, "CPU seconds with start": used}
    lines.append(Line(f"load of {tables} tables", "write_deltalake alone", seconds))
    versions = {name: metadata.version(name) for name in ("deltalake", "pyarrow")}
    return CaseResult("many_tables_to_files", TITLE, lines, versions, ratio_title="the target is")


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-many-", dir=cache_directory()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _lines(kind: str, server: Server, tables: int, folder: Path, alone: float) -> list[Line]:
    sink: dict[str, Any] = {"path": str(folder / kind)}
    if kind == "delta":
        sink["mode"] = "mirror"
    settings: dict[str, Any] = {
        "name": f"bench_{kind}",
        "source": {"url": server.url("repl"), "tables": [f"{DATABASE}.*"]},
        "load": {"mode": "full"},
        "sink": {kind: sink},
    }

    def run_and_compare(rows_of_feed: int) -> PipelineProcess:
        done = run_until_caught_up(settings, folder, local=True)
        held = _rows_held(kind, folder / kind)
        wanted = rows_of_feed if kind == "files" else tables * _ROWS
        if held != wanted:
            raise CountsDiffer(f"{kind} has {held} rows, not {wanted}")
        return done

    def line(workload: str, done: PipelineProcess, target: float, seconds: float) -> Line:
        rates = {"seconds": seconds, "seconds with start": done.seconds, "batches": float(len(done.batches))}
        # On a machine with other work, the CPU time says more than the time by the clock.
        rates |= {"CPU seconds with start": done.cpu_seconds}
        rates |= {"MB of driver at most": done.resident["driver"] / 1e6}
        if workload.startswith("load"):
            rates["tables/s"] = tables / seconds
        return Line(workload, f"{kind}, --local", rates, target / seconds, Target(1))

    rows = tables * _ROWS
    load = run_and_compare(rows)
    target = tables / _LOADED_PER_SECOND if kind == "files" else alone * _DELTA_FACTOR
    lines = [line(f"load of {tables} tables", load, target, load.seconds)]
    for changed, seconds_max in ((tables, _ALL_CHANGED_SECONDS), (_CHANGED, _SOME_CHANGED_SECONDS)):
        changed = min(changed, tables)
        _change(server, range(changed))
        # A feed contains both images of an update as rows.
        rows += 2 * changed
        done = run_and_compare(rows)
        lines.append(
            line(
                f"changes of {changed} tables",
                done,
                seconds_max,
                sum(batch.seconds for batch in done.batches),
            )
        )
    return lines


def _create(server: Server, tables: int) -> None:
    server.sql(f"CREATE DATABASE {DATABASE}")
    with server.connect() as connection, connection.cursor() as cursor:
        connection.autocommit(True)
        connection.select_db(DATABASE)
        for number in range(tables):
            cursor.execute(
                f"CREATE TABLE many{number} (id BIGINT PRIMARY KEY, note VARCHAR(40),"
                " at DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6))"
            )
            values = ", ".join(f"({row}, 'row {row} of {number}')" for row in range(_ROWS))
            cursor.execute(f"INSERT INTO many{number} (id, note) VALUES {values}")


def _change(server: Server, numbers: Iterable[int]) -> None:
    with server.connect() as connection, connection.cursor() as cursor:
        connection.autocommit(True)
        connection.select_db(DATABASE)
        for number in numbers:
            cursor.execute(f"UPDATE many{number} SET at = NOW(6) WHERE id = 1")


def _write_deltalake_alone(folder: Path, tables: int) -> float:
    """Return how long the peer takes to write as many tables with the same columns."""
    rows = pyarrow.table(
        {
            "id": range(_ROWS),
            "note": [f"row {row}" for row in range(_ROWS)],
            "at": pyarrow.array([0] * _ROWS, pyarrow.timestamp("us")),
        }
    )
    started = time.perf_counter()
    for number in range(tables):
        write_deltalake(folder / "alone" / f"many{number}", rows)
    return time.perf_counter() - started


def _rows_held(kind: str, path: Path) -> int:
    if kind == "delta":
        return sum(DeltaTable(table).count() for table in (path / DATABASE).iterdir())
    [(count,)] = duckdb.sql(
        f"SELECT COUNT(*) FROM read_parquet('{path}/{DATABASE}/*/[!_]*.parquet')"
    ).fetchall()
    return int(count)
