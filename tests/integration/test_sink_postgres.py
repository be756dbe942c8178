# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL target has what the source has, whatever that does, and whatever fails on the way."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from penstock.changes import Target
from penstock.errors import ConnectionLost, ValueMalformed
from penstock.sinks.sink import BatchMark, Evolution, Sink, make_sink, settings_of
from tests.changes_made import changes_of, delete, insert, target_of, update
from tests.fixture_types import FreshDatabase, MissingPart
from tests.logged_changes import logged_changes, prepare_all, write_batch, write_in_batches
from tests.patience import WAIT_SECONDS_MAX, wait_until
from tests.pipeline_oracle import assert_same, postgres_rows, source_rows
from tests.pipeline_workload import Workload
from tests.sink_backends import patient_connections
from tools.postgres import Postgres
from tools.servers import PartMissing, Server

SEATS = target_of({"id": "int", "seat": "int", "label": "varchar(20)"}, name="hall.seats", unique=[["seat"]])


@pytest.fixture(scope="module")
def postgres(missing_part: MissingPart) -> Iterator[Postgres]:
    server = Postgres()
    try:
        server.start()
    except PartMissing as error:
        missing_part("PostgreSQL", str(error))
    patience = patient_connections()
    yield server
    patience.undo()
    server.close()


@pytest.fixture
def hall(postgres: Postgres) -> Postgres:
    sql(postgres, "DROP SCHEMA IF EXISTS hall CASCADE")
    sql(postgres, "DROP SCHEMA IF EXISTS penstock CASCADE")
    return postgres


def sql(server: Postgres, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def sink_into(server: Postgres, **settings: Any) -> Sink:
    return make_sink("postgres", settings_of("postgres")(url=server.url, **settings))


def rows_in(server: Postgres, target: Target = SEATS) -> list[tuple[Any, ...]]:
    names = ", ".join(f'"{name}"' for name in target.column_names)
    return sorted(sql(server, f'SELECT {names} FROM "{target.name.database}"."{target.name.table}"'))


@pytest.mark.parametrize("held_bytes", [64 << 20, 200_000])
def test_a_busy_source_is_mirrored(
    held_bytes: int, mysql_server: Server, hall: Postgres, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=12, keyless=True, truncates=False)
    workload.create()
    workload.run(150)
    sink = sink_into(hall, held_bytes=held_bytes)
    targets = prepare_all(sink, mysql_server, database)
    write_in_batches(sink, logged_changes(mysql_server, database, rows_max=400), 6)
    for one in targets.values():
        table = one.name.table
        assert_same(
            source_rows(mysql_server, database, table),
            postgres_rows(hall.url, f"{database}.{table}"),
            key=one.primary_key,
        )


def test_rows_pass_their_unique_values_round(hall: Postgres) -> None:
    sink = sink_into(hall)
    sink.prepare(SEATS, Evolution.EVOLVE)
    count = 2000
    write_batch(sink, [changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(count)))], 1)
    moved = [
        update(2, {"id": row, "seat": row}, {"id": row, "seat": (row + 1) % count}, row)
        for row in range(count)
    ]
    write_batch(sink, [changes_of(SEATS, *moved)], 2)
    assert rows_in(hall) == [(row, (row + 1) % count, None) for row in range(count)]


def test_primary_keys_move_along_a_chain(hall: Postgres) -> None:
    sink = sink_into(hall)
    sink.prepare(SEATS, Evolution.EVOLVE)
    write_batch(sink, [changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(50)))], 1)
    moved = [
        update(2, {"id": row, "seat": row}, {"id": row + 1, "seat": row}, row) for row in reversed(range(50))
    ]
    write_batch(sink, [changes_of(SEATS, *moved)], 2)
    assert rows_in(hall) == [(row + 1, row, None) for row in range(50)]


def test_a_deadlock_is_tried_again(hall: Postgres) -> None:
    sink = sink_into(hall)
    sink.prepare(SEATS, Evolution.EVOLVE)
    write_batch(sink, [changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(3)))], 1)
    with psycopg.connect(hall.url) as other, psycopg.connect(hall.url) as third:
        # Who waits looks for a deadlock once, a while after it began to, and then gives way if there is one.
        # This one never gets to it.
        other.execute("SET deadlock_timeout = '1h'")
        other.execute("UPDATE hall.seats SET label = 'theirs' WHERE id = 2")
        third.execute("SELECT FROM hall.seats WHERE id = 1 FOR UPDATE")
        changed = [
            update(2, {"id": row, "seat": row}, {"id": row, "seat": row, "label": "ours"}, row)
            for row in range(3)
        ]
        with ThreadPoolExecutor(2) as pool:
            written = pool.submit(write_batch, sink, [changes_of(SEATS, *changed)], 2)
            wait_until(lambda: waiting_for(hall, third) or written.done())
            theirs = pool.submit(other.execute, "UPDATE hall.seats SET label = 'theirs' WHERE id = 0")
            wait_until(lambda: waiting_in(hall, other))
            # Now the sink goes on to a row of the one that waits for it.
            third.rollback()
            theirs.result(WAIT_SECONDS_MAX)
            other.commit()
            written.result(WAIT_SECONDS_MAX)
    assert rows_in(hall) == [(row, row, "ours") for row in range(3)]


def waiting_for(server: Postgres, session: Any) -> bool:
    """Tell whether somebody waits for a session."""
    asked = f"SELECT 1 FROM pg_stat_activity WHERE {session.info.backend_pid} = ANY (pg_blocking_pids(pid))"
    return bool(sql(server, asked))


def waiting_in(server: Postgres, session: Any) -> bool:
    """Tell whether a session waits for another one."""
    return sql(server, f"SELECT cardinality(pg_blocking_pids({session.info.backend_pid}))") != [(0,)]


def test_a_lost_connection_is_made_again(hall: Postgres) -> None:
    sink = sink_into(hall, held_bytes=1024)
    visits = target_of({"page": "varchar(20)"}, [], name="hall.visits")
    sink.prepare(visits, Evolution.EVOLVE)
    writer = sink.open(BatchMark("test", "1", 1), 0)
    writer.write(changes_of(visits, *(insert(1, row, page=str(row)) for row in range(100))))
    sql(hall, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock'")
    with pytest.raises(ConnectionLost):
        # More was written than is kept, so the whole batch has to come again.
        writer.write(changes_of(visits, *(insert(2, row, page=str(row)) for row in range(100))))
    writer.abort()
    write_batch(sink, [changes_of(visits, insert(1, page="front"))], 1)
    assert rows_in(hall, visits) == [("front",)]


def test_what_postgresql_cannot_hold_is_null_and_counted(hall: Postgres) -> None:
    days = target_of({"id": "int", "day": "date", "told": "varchar(20)"}, name="hall.days")
    sink = sink_into(hall)
    sink.prepare(days, Evolution.EVOLVE)
    zero = insert(1, 0, id=1, told="a\0b")
    unheld = [replace(zero[0], unrepresentable={"day": "0000-00-00"})]
    receipt = write_batch(sink, [changes_of(days, unheld)])
    assert rows_in(hall, days) == [(1, None, None)]
    assert receipt.unrepresentable == {"hall.days.day": 1, "hall.days.told": 1}


def test_a_table_of_somebody_else_keeps_its_columns(hall: Postgres) -> None:
    sql(hall, "CREATE SCHEMA hall")
    sql(hall, "CREATE TABLE hall.seats (id bigint PRIMARY KEY, seat int, theirs int NOT NULL DEFAULT 7)")
    sink = sink_into(hall)
    assert sink.plan(SEATS, Evolution.EVOLVE) == ['ALTER TABLE "hall"."seats" ADD COLUMN "label" text']
    sink.prepare(SEATS, Evolution.EVOLVE)
    write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1, label="a"))], 1)
    sql(hall, "UPDATE hall.seats SET theirs = 8")
    write_batch(sink, [changes_of(SEATS, *[update(2, {"id": 1, "seat": 1}, {"id": 1, "seat": 2})])], 2)
    assert sql(hall, "SELECT id, seat, label, theirs FROM hall.seats") == [(1, 2, None, 8)]


def test_columns_and_keys_come_go_and_widen(hall: Postgres) -> None:
    sink = sink_into(hall)
    first = target_of(
        {"id": "int", "kept": "varchar(5)", "gone": "int"}, name="hall.shapes", unique=[["gone"]]
    )
    sink.prepare(first, Evolution.EVOLVE)
    write_batch(sink, [changes_of(first, insert(1, id=1, kept="a", gone=5))], 1)
    second = target_of(
        {"id": "bigint", "kept": "varchar(50)", "new": "datetime(3)"}, name="hall.shapes", unique=[["kept"]]
    )
    sink.prepare(second, Evolution.EVOLVE)
    assert sink.plan(second, Evolution.EVOLVE) == []
    write_batch(sink, [changes_of(second, insert(2, id=1 << 40, kept="b"))], 2)
    assert sql(hall, "SELECT id, kept, new FROM hall.shapes ORDER BY id") == [
        (1, "a", None),
        (1 << 40, "b", None),
    ]


def test_an_emptied_table_has_what_came_after(hall: Postgres) -> None:
    for number, truncate in enumerate((True, False)):
        sql(hall, "DROP SCHEMA IF EXISTS hall CASCADE")
        sink = sink_into(hall, truncate=truncate)
        sink.prepare(SEATS, Evolution.EVOLVE)
        write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1))], 10 * number + 1)
        writer = sink.open(BatchMark("test", "1", 10 * number + 2), 0)
        writer.write(changes_of(SEATS, insert(2, id=2, seat=2)))
        writer.empty(SEATS, 3)
        writer.write(changes_of(SEATS, insert(4, id=3, seat=2)))
        writer.finish()
        assert rows_in(hall) == [(3, 2, None)]


def test_a_feed_has_every_change_once(hall: Postgres) -> None:
    sink = sink_into(hall, mode="feed")
    sink.prepare(SEATS, Evolution.EVOLVE)
    changes = changes_of(
        SEATS,
        insert(1, id=1, seat=1),
        update(2, {"id": 1, "seat": 1}, {"id": 1, "seat": 2}, 3),
        delete(3, id=1),
    )
    for _ in range(2):
        write_batch(sink, [changes], 1)
    found = sql(
        hall, "SELECT id, seat, _change_type, _commit_version, _row FROM hall.seats ORDER BY 4, 3 DESC"
    )
    assert found == [
        (1, 1, "insert", 1, 0),
        (1, 1, "update_preimage", 2, 3),
        (1, 2, "update_postimage", 2, 3),
        (1, None, "delete", 3, 0),
    ]


def test_nothing_shows_before_a_part_is_done(hall: Postgres) -> None:
    sink = sink_into(hall, held_bytes=1024)
    sink.prepare(SEATS, Evolution.EVOLVE)
    writer = sink.open(BatchMark("test", "1", 1), 0)
    for first in range(0, 1000, 100):
        writer.write(
            changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(first, first + 100)))
        )
    assert rows_in(hall) == []
    writer.abort()
    assert rows_in(hall) == []


def test_a_value_that_the_target_cannot_hold_stops(hall: Postgres) -> None:
    sql(hall, "CREATE SCHEMA hall")
    sql(hall, "CREATE TABLE hall.seats (id int PRIMARY KEY, seat smallint UNIQUE, label text)")
    sink = sink_into(hall)
    with pytest.raises(ValueMalformed):
        write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=100_000))])


def test_an_account_that_is_refused_is_told(hall: Postgres) -> None:
    sql(hall, "DROP ROLE IF EXISTS somebody")
    sink = make_sink("postgres", settings_of("postgres")(url=hall.url.replace("postgres@", "somebody@")))
    (finding,) = sink.check()
    assert finding.fatal
    assert sink_into(hall).check() == []


def test_of_two_writers_that_have_one_part_one_is_undone(hall: Postgres) -> None:
    """A process that was thought dead goes on, and so does the one that was given its part."""
    visits = target_of({"page": "varchar(20)"}, [], name="hall.visits")
    sink = sink_into(hall)
    sink.prepare(visits, Evolution.EVOLVE)
    writers = [sink.open(BatchMark("test", "1", 1), 0) for _ in range(2)]
    for writer in writers:
        writer.write(changes_of(visits, insert(1, page="front")))
    for writer in writers:
        assert writer.finish().rows == 1
    assert rows_in(hall, visits) == [("front",)]
    write_batch(sink, [changes_of(visits, insert(2, page="back"))], 2)
    assert rows_in(hall, visits) == [("back",), ("front",)]
