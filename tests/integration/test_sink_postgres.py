# SPDX-License-Identifier: Apache-2.0
"""The PostgreSQL sink beyond the common SQL tests (tests/conformance/test_sinks_sql.py)."""

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from penstock.changes import Target
from penstock.errors import ConnectionLost, PrivilegeMissing
from penstock.sinks.postgres.writer import PostgresWriter
from penstock.sinks.sink import BatchMark, Evolution, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, insert, target_of, update
from tests.support.pipeline.logged_changes import write_batch
from tests.support.sinks.backends import PostgresBackend, running_backend
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

_schemas = itertools.count(1)


@pytest.fixture
def backend(
    pytestconfig: pytest.Config, server_of: Callable[[str], Server], missing_part: MissingPart
) -> PostgresBackend:
    """The shared PostgreSQL server."""
    backend = running_backend("postgres", pytestconfig, server_of, missing_part)
    assert isinstance(backend, PostgresBackend)
    return backend


@pytest.fixture
def schema() -> str:
    """The name of a schema for this test only."""
    return f"hall_{next(_schemas)}"


def test_plan_names_the_privilege_that_the_account_lacks(backend: PostgresBackend, schema: str) -> None:
    seats = target_of({"id": "int", "label": "varchar(20)"}, name=f"{schema}.seats")
    wider = target_of({"id": "int", "label": "varchar(20)", "row": "int"}, name=f"{schema}.seats")
    account = f"usher_{schema}"
    backend.sql(f"CREATE ROLE {account} LOGIN; CREATE SCHEMA {schema}; CREATE SCHEMA {schema}_numbers")
    url = urlsplit(backend.server.url)
    sink = backend.sink(
        url=url._replace(netloc=f"{account}@{url.netloc.rpartition('@')[2]}").geturl(),
        positions=f"{schema}_numbers.positions",
    )

    def refused(target: Target) -> str:
        with pytest.raises(PrivilegeMissing) as raised:
            sink.plan(target, Evolution.EVOLVE)
        return f"{raised.value.message} {raised.value.hint}"

    assert f'GRANT USAGE, CREATE ON SCHEMA "{schema}" TO "{account}"' in refused(seats)
    backend.sql(f"GRANT USAGE ON SCHEMA {schema} TO {account}")
    owner = backend.sink(positions=f"{schema}_numbers.positions")
    owner.prepare(seats, Evolution.EVOLVE)
    backend.sql(f"GRANT SELECT, INSERT ON {schema}.seats TO {account}")
    assert f'no privilege UPDATE, DELETE on "{schema}"."seats"' in refused(seats)
    backend.sql(f"GRANT ALL ON {schema}.seats TO {account}")
    assert f'USAGE ON SCHEMA "{schema}_numbers"' in refused(seats)
    backend.sql(f"GRANT USAGE ON SCHEMA {schema}_numbers TO {account}")
    backend.sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema}_numbers TO {account}")
    assert sink.plan(seats, Evolution.EVOLVE) == []
    assert f'does not own "{schema}"."seats"' in refused(wider)
    assert owner.plan(wider, Evolution.EVOLVE) != []


def test_deadlock_victim_is_retried(backend: PostgresBackend, schema: str) -> None:
    seats = target_of(
        {"id": "int", "seat": "int", "label": "varchar(20)"}, name=f"{schema}.seats", unique=[["seat"]]
    )
    sink = backend.sink()
    sink.prepare(seats, Evolution.EVOLVE)
    write_batch(sink, [changes_of(seats, *(insert(1, row, id=row, seat=row) for row in range(3)))], 1)
    url = backend.server.url
    with psycopg.connect(url) as other, psycopg.connect(url) as third:
        # After this time, a waiting session checks once for a deadlock, and gives up if there is one. The
        # other session never waits that long.
        other.execute("SET deadlock_timeout = '1h'")
        other.execute(f"UPDATE {seats.name} SET label = 'theirs' WHERE id = 2".encode())
        third.execute(f"SELECT FROM {seats.name} WHERE id = 1 FOR UPDATE".encode())
        changed = [
            update(2, {"id": row, "seat": row}, {"id": row, "seat": row, "label": "ours"}, row)
            for row in range(3)
        ]
        with ThreadPoolExecutor(2) as pool:
            written = pool.submit(write_batch, sink, [changes_of(seats, *changed)], 2)
            wait_until(lambda: is_waited_for(backend, third) or written.done())
            other_update = pool.submit(
                other.execute, f"UPDATE {seats.name} SET label = 'theirs' WHERE id = 0".encode()
            )
            wait_until(lambda: is_waiting(backend, other))
            # Now the sink continues and waits for row 2, which is locked by the session that waits for the
            # sink.
            third.rollback()
            other_update.result(WAIT_SECONDS_MAX)
            other.commit()
            written.result(WAIT_SECONDS_MAX)
    assert backend.stored(seats) == [(row, row, "ours") for row in range(3)]


def is_waited_for(backend: PostgresBackend, session: Any) -> bool:
    """Return whether another connection waits for `session`."""
    pid = session.info.backend_pid
    return bool(backend.sql(f"SELECT 1 FROM pg_stat_activity WHERE {pid} = ANY (pg_blocking_pids(pid))"))


def is_waiting(backend: PostgresBackend, session: Any) -> bool:
    """Return whether a session waits for another session."""
    return backend.sql(f"SELECT cardinality(pg_blocking_pids({session.info.backend_pid}))") != [(0,)]


@pytest.mark.parametrize("kept", [True, False])
def test_writer_recovers_from_a_lost_connection_if_it_kept_its_rows(
    backend: PostgresBackend, schema: str, kept: bool
) -> None:
    visits = target_of({"page": "varchar(20)"}, [], name=f"{schema}.visits")
    first = changes_of(visits, *(insert(1, row, page=str(row)) for row in range(100)))
    later = changes_of(visits, *(insert(2, row, page=str(row)) for row in range(100, 110)))
    # With either limit, the first rows are sent at once; a writer buffers up to twice its limit.
    sink = backend.sink(held_bytes=first.rows.nbytes * 3 // 4 if kept else 1024)
    sink.prepare(visits, Evolution.EVOLVE)
    writer = sink.open(BatchMark("test", "1", 1), 0)
    writer.write(first)
    backend.disconnect_sinks()
    if kept:
        writer.write(later)
        writer.finish()
        assert backend.stored(visits) == sorted((str(row),) for row in range(110))
        return
    with pytest.raises(ConnectionLost):
        writer.write(first)
    writer.abort()
    write_batch(sink, [changes_of(visits, insert(1, page="front"))], 1)
    assert backend.stored(visits) == [("front",)]


def test_copied_rows_equal_merged_rows(
    backend: PostgresBackend, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(schema)
    targets = [
        target_of(
            {"id": "int", "seat": "int", "label": "varchar(20)"}, name=f"{schema}.{name}", unique=[["seat"]]
        )
        for name in ("copied", "merged")
    ]
    sinks = [backend.sink(), backend.sink()]
    for sink, target in zip(sinks, targets, strict=True):
        sink.prepare(target, Evolution.EVOLVE)
    copy, copied, refused = PostgresWriter._copy_new, 0, 0

    def counted(writer: PostgresWriter, table: str, rows: Any, columns: Any) -> Any:
        nonlocal copied, refused
        left = copy(writer, table, rows, columns)
        copied, refused = copied + rows.num_rows - left.num_rows, refused + left.num_rows
        return left

    def merged(_writer: PostgresWriter, _table: str, rows: Any, _columns: Any) -> Any:
        return rows

    for number in range(1, 25):
        rows = chance.sample(range(60), 12)
        seats = chance.sample(range(100), 12)
        # An insert of a key that is already in the target stands for a load ahead of the log, or for a retry.
        changes = [
            insert(number, row, id=row, seat=seat, label=f"{number}")
            if chance.random() < 0.7
            else update(number, {"id": row}, {"id": row, "seat": seat, "label": f"{number} again"}, row)
            for row, seat in zip(rows, seats, strict=True)
        ]
        for sink, target, copy_new in zip(sinks, targets, (counted, merged), strict=True):
            monkeypatch.setattr(PostgresWriter, "_copy_new", copy_new)
            write_batch(sink, [changes_of(target, *changes)], number)
    stored = [backend.stored(target) for target in targets]
    assert stored[0] == stored[1] != []
    assert copied > 0
    assert refused > 0


def test_account_under_row_level_security_writes_new_rows(backend: PostgresBackend, schema: str) -> None:
    seats = target_of({"id": "int", "label": "varchar(20)"}, name=f"{schema}.seats")
    positions = f"{schema}.positions"
    backend.sink(positions=positions).prepare(seats, Evolution.EVOLVE)
    account = f"usher_{schema}"
    backend.sql(
        f"CREATE ROLE {account} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {account};"
        f" GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {account};"
        f" ALTER TABLE {seats.name} ENABLE ROW LEVEL SECURITY;"
        f" CREATE POLICY own ON {seats.name} USING (true) WITH CHECK (true)"
    )
    url = urlsplit(backend.server.url)
    own_url = url._replace(netloc=f"{account}@{url.netloc.rpartition('@')[2]}").geturl()
    sink = backend.sink(url=own_url, positions=positions)
    write_batch(sink, [changes_of(seats, insert(1, id=1, label="front"))], 1)
    assert backend.stored(seats) == [(1, "front")]


def test_values_that_postgresql_cannot_hold_are_null_and_counted(
    backend: PostgresBackend, schema: str
) -> None:
    days = target_of({"id": "int", "day": "date", "told": "varchar(20)"}, name=f"{schema}.days")
    sink = backend.sink()
    sink.prepare(days, Evolution.EVOLVE)
    zero = insert(1, 0, id=1, told="a\0b")
    unrepresentable = [replace(zero[0], unrepresentable={"day": "0000-00-00"})]
    receipt = write_batch(sink, [changes_of(days, unrepresentable)])
    assert backend.stored(days) == [(1, None, None)]
    assert receipt.unrepresentable == {f"{days.name}.day": 1, f"{days.name}.told": 1}


def test_refused_account_is_reported(backend: PostgresBackend) -> None:
    url = backend.server.url.replace("postgres@", "nobody_here@")
    # libpq reports no SQLSTATE for this failure. A server with too many sessions causes the same failure, so
    # the connection is retried.
    with pytest.raises(ConnectionLost, match="nobody_here"):
        make_sink("postgres", settings_of("postgres")(url=url)).check()
    assert backend.sink().check() == []
