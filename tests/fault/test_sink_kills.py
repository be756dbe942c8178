# SPDX-License-Identifier: Apache-2.0
"""A writer that is killed before any of its statements, and comes again, leaves each row once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from penstock.sinks.sink import Evolution, make_sink, settings_of
from tests.client_programs.write_batch import SEATS, VISITS, batch, expected, first_batch
from tests.conftest import ROOT
from tests.fixture_types import MissingPart
from tests.logged_changes import write_batch
from tools.postgres import Postgres
from tools.servers import PartMissing, Server

Sql = Callable[[str], Any]
STATEMENTS_MAX = 200
# Every day some of the places, in the long sweep each of them.
STRIDE = 1 if os.environ.get("PENSTOCK_LONG") else 7


@pytest.fixture(scope="module")
def mysql() -> Iterator[tuple[str, Sql]]:
    with Server("mysql") as server:
        yield server.url("root"), server.sql


@pytest.fixture(scope="module")
def mariadb() -> Iterator[tuple[str, Sql]]:
    with Server("mariadb") as server:
        yield server.url("root"), server.sql


@pytest.fixture(scope="module")
def postgres(missing_part: MissingPart) -> Iterator[tuple[str, Sql]]:
    server = Postgres()
    try:
        server.start()
    except PartMissing as error:
        missing_part("PostgreSQL", str(error))

    def sql(statement: str) -> Any:
        with psycopg.connect(server.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    yield server.url, sql
    server.close()


CASES = [
    ("mysql", "mysql", {"connections": 1, "statement_bytes": 16_384}),
    ("postgres", "postgres", {}),
]
LONG_CASES = [
    ("mysql", "mysql", {"connections": 3, "statement_bytes": 8192}),
    ("mariadb", "mysql", {"apply": "serial", "statement_bytes": 16_384}),
    ("mariadb", "mysql", {"mode": "feed", "statement_bytes": 65_536}),
    ("postgres", "postgres", {"mode": "feed"}),
]


@pytest.mark.parametrize(
    ("server", "kind", "settings"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)],
)
def test_a_writer_that_is_killed_anywhere_and_comes_again_leaves_each_row_once(
    server: str, kind: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    url, sql = request.getfixturevalue(server)
    sink = make_sink(kind, settings_of(kind)(url=url, **settings))
    words = [sys.executable, "-m", "tests.client_programs.write_batch", kind]
    writer = subprocess.Popen(
        [*words, json.dumps({"url": url, **settings})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    with writer:
        for statement in range(2, STATEMENTS_MAX, STRIDE):
            for schema in ("hall", "penstock"):
                sql(f"DROP SCHEMA IF EXISTS {schema}{' CASCADE' if kind == 'postgres' else ''}")
            for target in (SEATS, VISITS):
                sink.prepare(target, Evolution.EVOLVE)
            write_batch(sink, first_batch(), 1)
            print(statement, file=writer.stdin, flush=True)
            told = writer.stdout.readline().strip()
            write_batch(sink, batch(), 2)
            where = f"killed before statement {statement}"
            if settings.get("mode") == "feed":
                before = sum(map(len, first_batch())) + sum(map(len, batch()))
                (counts,) = sql(
                    "SELECT (SELECT count(*) FROM hall.seats) + (SELECT count(*) FROM hall.visits)"
                )
                assert counts[0] == before, where
            else:
                seats, visits = expected()
                assert sorted(sql("SELECT id, seat, label FROM hall.seats")) == seats, where
                assert sorted(sql("SELECT page, count FROM hall.visits")) == visits, where
            if told != "killed":
                break
        writer.stdin.close()
    assert told == "done 0"
    assert statement > 5
