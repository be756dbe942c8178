# SPDX-License-Identifier: Apache-2.0
"""Write new rows into MySQL and PostgreSQL, compared with LOAD DATA and COPY of the same rows."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psycopg
import pymysql

from bench.corpora.corpus import CountsDiffer, corpus
from bench.result import CaseResult, Line, Options, Target
from bench.written_rows import Cost, costs, decoded_changes, sink_of, write_part
from penstock import _native
from penstock.changes import Changes
from penstock.sinks.sink import Evolution
from tools.postgres import Postgres
from tools.servers import Server

TITLE = "New rows into MySQL and PostgreSQL, decoded before, beside the server's own bulk load"

_WORKLOAD = "purchases"
_TABLE = "bench.purchases"
_CONNECTIONS = (1, 2)
_SHARE_OF_LOAD = Target(0.6)
# Rows that are encoded at once.
_ROWS_AT_ONCE = 16_384


def run(options: Options) -> CaseResult:
    """Measure both servers."""
    changes = decoded_changes(corpus(_WORKLOAD, options.size), _TABLE, ["insert"])
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.txt"
        file.write_bytes(_text(changes))
        lines = [*_mysql(options, changes, file, versions), *_postgres(options, changes, file, versions)]
    return CaseResult("rows_to_databases", TITLE, lines, versions, ratio_title="of the bulk load's rate")


def _mysql(options: Options, changes: Sequence[Changes], file: Path, versions: dict[str, str]) -> list[Line]:
    target = changes[0].target
    with Server("mysql", {"local-infile": True}) as server:
        sinks = {
            f"Penstock, connections: {connections}": sink_of(
                "mysql", url=server.url("root"), connections=connections
            )
            for connections in _CONNECTIONS
        }
        next(iter(sinks.values())).prepare(target, Evolution.EVOLVE)

        def load_data() -> int:
            with server.connect(local_infile=True) as connection, connection.cursor() as cursor:
                cursor.execute("SET SESSION time_zone = '+00:00'")
                columns = ", ".join(target.column_names)
                loaded = cursor.execute(
                    f"LOAD DATA LOCAL INFILE '{file}' INTO TABLE {_TABLE} CHARACTER SET utf8mb4 ({columns})"
                )
                connection.commit()
            return int(loaded)

        writes: dict[str, Callable[[], int]] = {"LOAD DATA": load_data}
        writes |= {title: partial(write_part, sink, changes) for title, sink in sinks.items()}
        assert server.pid is not None
        measured = costs(server.pid, writes, lambda: server.sql(f"TRUNCATE {_TABLE}"), options.repeat)
        versions["MySQL"] = server.version
        versions["PyMySQL"] = pymysql.__version__
    return _lines("mysql", "LOAD DATA", measured)


def _postgres(
    options: Options, changes: Sequence[Changes], file: Path, versions: dict[str, str]
) -> list[Line]:
    target = changes[0].target
    with Postgres() as server:
        sink = sink_of("postgres", url=server.url)
        sink.prepare(target, Evolution.EVOLVE)

        def copy() -> int:
            statement = f"COPY {_TABLE} ({', '.join(target.column_names)}) FROM STDIN"
            with psycopg.connect(server.url, options="-c timezone=UTC") as connection:
                cursor = connection.cursor()
                with cursor.copy(statement.encode()) as copying:
                    copying.write(file.read_bytes())
                return cursor.rowcount

        def clear() -> None:
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute(f"TRUNCATE {_TABLE}".encode())

        writes: dict[str, Callable[[], int]] = {
            "COPY": copy,
            "Penstock": partial(write_part, sink, changes),
        }
        measured = costs(server.pid, writes, clear, options.repeat)
        with psycopg.connect(server.url) as connection:
            versions["PostgreSQL"] = str(connection.info.server_version)
        versions["psycopg"] = psycopg.__version__
    return _lines("postgres", "COPY", measured)


def _lines(server: str, peer: str, measured: dict[str, Cost]) -> list[Line]:
    """Return a line for each writer; all must have written the same number of rows."""
    reference = measured[peer]
    lines = [Line(_WORKLOAD, f"{server}: {peer}", reference.rates, note="text that was encoded before")]
    for title, cost in measured.items():
        if cost.rows != reference.rows:
            raise CountsDiffer(f"{server}: {title} wrote {cost.rows} rows, {peer} {reference.rows}")
        if title != peer:
            ratio = reference.seconds / cost.seconds
            lines.append(Line(_WORKLOAD, f"{server}: {title}", cost.rates, ratio, _SHARE_OF_LOAD))
    return lines


def _text(changes: Sequence[Changes]) -> bytes:
    """Return rows as text of columns that both servers read, with times in UTC."""
    pieces: list[bytes] = []
    for part in changes:
        for first in range(0, len(part), _ROWS_AT_ONCE):
            encoded, _ = _native.copy_text(
                part.rows.slice(first, _ROWS_AT_ONCE), list(part.target.column_names)
            )
            pieces += [bytes(text) for _, text in encoded]
    # LOAD DATA does not read time zone offsets; the time zone of both sessions is UTC.
    return b"".join(pieces).replace(b"+00\t", b"\t")
