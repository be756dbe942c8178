# SPDX-License-Identifier: Apache-2.0
"""Generates a workload's binlog file, counts its rows with the server's own tool, and caches the file.

A corpus is `<cache>/<workload>-<size>-<fingerprint>/binlog.000001` with `manifest.json` beside it. The cache
is `$PENSTOCK_BENCH_CACHE`, by default `~/.cache/penstock/bench`. The counts in the manifest come from
`mysqlbinlog`, never from Penstock, so they can reveal errors in Penstock.

The random values of a session follow from `$PENSTOCK_BENCH_SEED` (`python -m bench --seed`), which is then
part of the folder's name. Without a seed, the server chooses them.
"""

import json
import os
import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pymysql

from tools.servers import Server

from .workload import DATABASE, Workload

SIZES = {"tiny": 8_000_000, "small": 20_000_000, "100MB": 100_000_000, "1GB": 1_000_000_000}
#: The default workloads of cases; `bulk` is for cases with subscribers, `purchases` for pipelines.
NAMES = ("narrow", "wide", "tpcc")
ALL_NAMES = (*NAMES, "bulk", "purchases")
FILE_NAME = "binlog.000001"

#: Settings for fast writes. The log has the same content as with the safe settings.
SERVER_OPTIONS: dict[str, str | int | bool | None] = {
    "log-bin": "binlog",
    "gtid-mode": "ON",
    "enforce-gtid-consistency": "ON",
    "binlog-checksum": "CRC32",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
    "max-binlog-size": 1 << 30,
    "sync-binlog": 0,
    "innodb-flush-log-at-trx-commit": 0,
    "innodb-doublewrite": False,
    "innodb-buffer-pool-size": "1G",
    "innodb-redo-log-capacity": "2G",
    "performance-schema": False,
}

_ROW_LINES = {b"\n### INSERT INTO `": "insert", b"\n### UPDATE `": "update", b"\n### DELETE FROM `": "delete"}


@dataclass(frozen=True)
class Corpus:
    """One binlog file and its contents. `rows_by_kind` counts changes, so an update counts as one row."""

    name: str
    size: str
    path: Path
    bytes: int
    events: int
    transactions: int
    rows: int
    rows_by_kind: dict[str, int]
    rows_by_table: dict[str, int]
    server_version: str

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the qualified names of the tables with rows in the file."""
        return tuple(sorted(self.rows_by_table))

    @property
    def images(self) -> int:
        """Return the number of typed rows in a change feed: an update has two, before and after."""
        return self.rows + self.rows_by_kind["update"]


class CountsDiffer(RuntimeError):
    """A reader counted a different number of rows in a corpus than the server's own tool."""


def check_rows(reader: str, seen: object, right: object, binlog: Corpus) -> None:
    """Raise `CountsDiffer` unless `reader` saw the expected count."""
    if seen != right:
        raise CountsDiffer(f"{reader} saw {seen} changes in {binlog.path}, which has {right}")


def workload(name: str) -> Workload:
    """Return the workload module called `name`."""
    module_workload: Workload = import_module(f"{__package__}.{name}").WORKLOAD
    return module_workload


def cache_directory() -> Path:
    """Return the cache directory of corpora."""
    return Path(os.environ.get("PENSTOCK_BENCH_CACHE") or Path.home() / ".cache" / "penstock" / "bench")


def memory_directory() -> Path:
    """Return a folder in memory, so that receivers are measured without the influence of the disk.

    If the machine has no such folder, return the cache folder on disk.
    """
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else cache_directory()


def random_seed() -> int | None:
    """Return the seed of the random values in corpora, None if the server chooses them."""
    text = os.environ.get("PENSTOCK_BENCH_SEED")
    return int(text) if text else None


def folder_name(chosen: Workload, size: str) -> str:
    """Return the name of a corpus's folder in the cache."""
    number = random_seed()
    return f"{chosen.name}-{size}-{chosen.fingerprint}" + ("" if number is None else f"-seed{number}")


def set_random_seed(connection: pymysql.Connection, session: int) -> None:
    """Seed RAND() of a session, if there is a seed. Sessions with different numbers get different values."""
    number = random_seed()
    if number is not None:
        values = random.Random(f"{number} {session}")
        with connection.cursor() as cursor:
            # The first values after small seeds would be close to zero.
            halves = (values.getrandbits(30), values.getrandbits(30))
            cursor.execute("SET rand_seed1 = %s, rand_seed2 = %s", halves)


def corpus(name: str, size: str) -> Corpus:
    """Return the corpus; generate it first if the cache has none for this version of its workload."""
    chosen = workload(name)
    directory = cache_directory() / folder_name(chosen, size)
    if not (directory / "manifest.json").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-{size}-", dir=directory.parent))
        try:
            _generate(chosen, size, unfinished)
            shutil.rmtree(directory, ignore_errors=True)
            unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    fields = json.loads((directory / "manifest.json").read_text())
    return Corpus(path=directory / FILE_NAME, **fields)


def _generate(chosen: Workload, size: str, directory: Path) -> None:
    """Run the workload on a private server until its binlog has `size` bytes.

    Leaves file and manifest in `directory`.
    """
    with Server("mysql", SERVER_OPTIONS, directory=directory / "server") as server:
        with server.connect() as connection:
            set_random_seed(connection, len(chosen.sessions))
            seed(connection, chosen)
            version = _ask(connection, "SELECT VERSION()")[0]
        _fill(server.connect, chosen, SIZES[size])
        server.sql("FLUSH BINARY LOGS")
        os.link(server.data_directory / FILE_NAME, directory / FILE_NAME)
        mysqlbinlog = server.program("mysqlbinlog")
    shutil.rmtree(directory / "server")
    counts = count_with_mysqlbinlog(mysqlbinlog, directory / FILE_NAME)
    fields = {"name": chosen.name, "size": size, "server_version": version, **counts}
    (directory / "manifest.json").write_text(json.dumps(fields, indent=2) + "\n")


def _ask(connection: pymysql.Connection, statement: str) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone() or ()


def seed(connection: pymysql.Connection, chosen: Workload) -> None:
    """Create tables, initial rows and procedures outside the binlog, then start an empty binlog."""
    with connection.cursor() as cursor:
        for statement in (
            "SET SESSION sql_log_bin = 0",
            "SET SESSION cte_max_recursion_depth = 1000000",
            f"CREATE DATABASE {DATABASE}",
            *chosen.seed,
            "RESET BINARY LOGS AND GTIDS",
        ):
            cursor.execute(statement)


def _fill(connect: Callable[[], pymysql.Connection], chosen: Workload, bytes_wanted: int) -> None:
    """Call the workload's procedures on all sessions until the binlog has `bytes_wanted` bytes."""

    def session(number: int) -> None:
        with connect() as connection, connection.cursor() as cursor:
            set_random_seed(connection, number)
            for statement in chosen.sessions[number]:
                cursor.execute(statement)
            while _ask(connection, "SHOW BINARY LOG STATUS")[1] < bytes_wanted:
                cursor.execute(f"CALL {DATABASE}.{chosen.fill[number]}({chosen.step})")

    with ThreadPoolExecutor(len(chosen.sessions)) as threads:
        # Errors of the sessions are raised only when every result is fetched.
        list(threads.map(session, range(len(chosen.sessions))))


def count_with_mysqlbinlog(command: list[str], path: Path) -> dict[str, object]:
    """Count the events, transactions and changes of a binlog file in the text that `mysqlbinlog` prints.

    `command` is the program with its launcher. The workloads' values contain no line breaks, so every line
    that looks like a change is one.
    """
    events = transactions = 0
    changes: Counter[tuple[str, str]] = Counter()
    argv = [*command, "-vv", "--base64-output=decode-rows", str(path)]
    for chunk in _line_chunks(argv):
        events += chunk.count(b"\n# at ")
        transactions += chunk.count(b"\tXid = ")
        for line, kind in _ROW_LINES.items():
            for table in _tables_after(chunk, line):
                changes[table, kind] += chunk.count(line + table.replace(".", "`.`").encode() + b"`")
    by_kind = {kind: sum(n for (_, k), n in changes.items() if k == kind) for kind in _ROW_LINES.values()}
    tables = {table for table, _ in changes}
    return {
        "bytes": path.stat().st_size,
        "events": events,
        "transactions": transactions,
        "rows": sum(by_kind.values()),
        "rows_by_kind": by_kind,
        "rows_by_table": {
            t: sum(n for (table, _), n in changes.items() if table == t) for t in sorted(tables)
        },
    }


def _line_chunks(argv: list[str]) -> Iterator[bytes]:
    """Yield a program's output in large chunks that end at a line end, each with a line break in front."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        rest = b"\n"
        while piece := process.stdout.read(1 << 24):
            complete_lines, _, rest_next = (rest + piece).rpartition(b"\n")
            yield complete_lines + b"\n"
            rest = b"\n" + rest_next
        yield rest
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)


def _tables_after(chunk: bytes, line: bytes) -> list[str]:
    """Return the workloads' tables whose names follow `line` in `chunk`."""
    names = [f"{DATABASE}.{table}" for name in ALL_NAMES for table in workload(name).tables]
    return [name for name in names if line + name.replace(".", "`.`").encode() + b"`" in chunk]
