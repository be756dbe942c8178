# SPDX-License-Identifier: Apache-2.0
"""A writer is killed before one of its statements, whichever it is: when the batch is retried, each row is
stored exactly once.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.changes import Changes, Target
from penstock.sinks.sink import Evolution
from tests.conftest import ROOT
from tests.support.pipeline.logged_changes import write_batch
from tests.support.programs.write_batch import SCALE, SEATS, VISITS, batch, expected, first_batch
from tests.support.sinks.backends import SqlBackend, running_backend
from tests.support.suite.fixture_types import MissingPart
from tools.servers import Server

STATEMENTS_MAX = 200
TABLES = ("hall.seats", "hall.visits", "hall.positions")
# The everyday run covers some of the statements, the long sweep all of them.
STRIDE = 1 if os.environ.get("PENSTOCK_LONG") else 7

FEED_COLUMNS = ("_change_type", "_commit_version", "_row")
CASES = [
    ("mysql", {"connections": 1, "statement_bytes": 16_384 // SCALE}),
    ("postgres", {}),
]
LONG_CASES = [
    ("mysql", {"connections": 3, "statement_bytes": 8192}),
    ("mariadb", {"apply": "serial", "statement_bytes": 16_384}),
    ("mariadb", {"mode": "feed", "statement_bytes": 65_536}),
    ("postgres", {"mode": "feed"}),
]


def feed_of(changes: list[Changes], target: Target) -> list[tuple[Any, ...]]:
    """Return the sorted feed rows of some changes of a target, with FEED_COLUMNS last."""
    return sorted(
        (*(row[name] for name in target.column_names), row["_change_type"], row["_commit_version"], number)
        for table_changes in changes
        if table_changes.target == target
        for row in table_changes.rows.to_pylist()
        for number in (row["_metadata"]["row"],)
    )


@pytest.mark.parametrize(
    ("name", "settings"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)]
)
def test_writer_killed_before_any_statement_leaves_each_row_once_when_its_batch_is_retried(
    name: str,
    settings: dict[str, Any],
    pytestconfig: pytest.Config,
    server_of: Callable[[str], Server],
    missing_part: MissingPart,
) -> None:
    backend = running_backend(name, pytestconfig, server_of, missing_part)
    assert isinstance(backend, SqlBackend)
    sink = backend.sink(positions="hall.positions", **settings)
    writer = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.programs.write_batch",
            sink.kind,
            sink.settings.model_dump_json(),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    backend.sql(f"DROP SCHEMA IF EXISTS hall{' CASCADE' if name == 'postgres' else ''}")
    before, changes = first_batch(), batch()
    with writer:
        for target in (SEATS, VISITS):
            sink.prepare(target, Evolution.EVOLVE)
        for statement in range(2, STATEMENTS_MAX, STRIDE):
            for table in TABLES:
                backend.sql(f"DELETE FROM {table}")
            write_batch(sink, before, 1)
            print(statement, file=writer.stdin, flush=True)
            ending = writer.stdout.readline().strip()
            write_batch(sink, changes, 2)
            where = f"killed before statement {statement}"
            if settings.get("mode") == "feed":
                for target in (SEATS, VISITS):
                    names = (*target.column_names, *FEED_COLUMNS)
                    assert backend.stored(target, *names) == feed_of([*before, *changes], target), where
            else:
                seats, visits = expected()
                assert backend.stored(SEATS) == seats, where
                assert backend.stored(VISITS) == visits, where
            if ending != "killed":
                break
        writer.stdin.close()
    assert ending == "done 0"
    assert statement > 5
