# SPDX-License-Identifier: Apache-2.0
"""A MySQL or MariaDB target has what the source has, whatever that does, and whatever fails on the way."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pymysql
import pytest

from penstock.changes import Target
from penstock.errors import LeaseLost, ServerBusy, ValueMalformed
from penstock.model import Column, Secret
from penstock.sinks import mysql_transaction
from penstock.sinks.sink import BatchMark, Evolution, Sink, make_sink, settings_of
from tests.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.fixture_types import FreshDatabase
from tests.logged_changes import logged_changes, prepare_all, write_batch, write_in_batches
from tests.patience import WAIT_SECONDS_MAX, wait_until
from tests.pipeline_oracle import assert_same, mysql_rows, source_rows
from tests.pipeline_workload import Workload
from tools.servers import Server

TARGETS = ("mysql", "mariadb")
NO_SUCH_THREAD = 1094


@pytest.fixture(scope="module", params=TARGETS)
def target_server(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Server]:
    with Server(request.param) as server:
        yield server


def sink_into(server: Server, **settings: Any) -> Sink:
    return make_sink("mysql", settings_of("mysql")(url=server.url("root"), **settings))


def assert_equal(source: Server, target: Server, database: str, targets: dict[str, Target]) -> None:
    for one in targets.values():
        table = one.name.table
        assert_same(
            source_rows(source, database, table), mysql_rows(target, database, table), key=one.primary_key
        )


@pytest.mark.parametrize("settings", [{"connections": 1}, {"connections": 4}, {"apply": "serial"}])
def test_a_busy_source_is_mirrored(
    settings: dict[str, Any], mysql_server: Server, target_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=11, keyless=True, truncates=False)
    workload.create()
    workload.run(150)
    sink = sink_into(target_server, statement_bytes=4096, **settings)
    targets = prepare_all(sink, mysql_server, database)
    write_in_batches(sink, logged_changes(mysql_server, database, rows_max=400), 6)
    assert_equal(mysql_server, target_server, database, targets)
    target_server.sql(f"DROP DATABASE {database}; DROP DATABASE penstock")


SEATS = target_of({"id": "int", "seat": "int", "label": "varchar(20)"}, name="hall.seats", unique=[["seat"]])


def rows_in(server: Server, target: Target = SEATS) -> list[tuple[Any, ...]]:
    names = ", ".join(f"`{name}`" for name in target.column_names)
    return sorted(server.sql(f"SELECT {names} FROM {target.name.sql}"))


@pytest.fixture
def hall(target_server: Server) -> Server:
    target_server.sql("DROP DATABASE IF EXISTS hall; DROP DATABASE IF EXISTS penstock")
    return target_server


@pytest.mark.parametrize("connections", [1, 3])
def test_tables_with_and_without_a_key_are_emptied_in_one_part(connections: int, hall: Server) -> None:
    keyless = target_of({"seat": "int"}, (), name="hall.sold")
    sink = sink_into(hall, connections=connections)
    for target in (keyless, SEATS):
        sink.prepare(target, Evolution.EVOLVE)
    sold = changes_of(keyless, insert(1, seat=1))
    write_batch(sink, [sold, changes_of(SEATS, insert(1, 1, id=1, seat=1))], 1)
    writer = sink.open(BatchMark("test", "1", 2), 0)
    writer.empty(keyless, 2)
    writer.empty(SEATS, 3)
    writer.write(changes_of(SEATS, insert(4, id=1, seat=2)))
    writer.finish()
    assert rows_in(hall) == [(1, 2, None)]
    assert rows_in(hall, keyless) == []


@pytest.mark.parametrize("connections", [1, 3])
def test_rows_pass_their_unique_values_round(connections: int, hall: Server) -> None:
    sink = sink_into(hall, connections=connections)
    sink.prepare(SEATS, Evolution.EVOLVE)
    count = 2000
    write_batch(sink, [changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(count)))], 1)
    moved = [
        update(2, {"id": row, "seat": row}, {"id": row, "seat": (row + 1) % count}, row)
        for row in range(count)
    ]
    write_batch(sink, [changes_of(SEATS, *moved)], 2)
    assert rows_in(hall) == [(row, (row + 1) % count, None) for row in range(count)]


def test_primary_keys_move_along_a_chain(hall: Server) -> None:
    sink = sink_into(hall)
    sink.prepare(SEATS, Evolution.EVOLVE)
    write_batch(sink, [changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(50)))], 1)
    moved = [
        update(2, {"id": row, "seat": row}, {"id": row + 1, "seat": row}, row) for row in reversed(range(50))
    ]
    write_batch(sink, [changes_of(SEATS, *moved)], 2)
    assert rows_in(hall) == [(row + 1, row, None) for row in range(50)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_key_that_changes_its_case_stays_one_row(order: tuple[int, int], hall: Server) -> None:
    """Both halves of the change may come to different writers, in either order."""
    names = target_of({"name": "varchar(20)", "count": "int"}, ["name"], name="hall.names")
    hall.sql("CREATE DATABASE hall")
    hall.sql("CREATE TABLE hall.names (name VARCHAR(20) PRIMARY KEY, count INT) CHARACTER SET utf8mb4")
    sink = sink_into(hall)
    sink.prepare(names, Evolution.EVOLVE)
    write_batch(sink, [changes_of(names, insert(1, name="a", count=1))], 1)
    gone, there = update(2, {"name": "a", "count": 1}, {"name": "A", "count": 2})
    halves = [changes_of(names, [gone]), changes_of(names, [there])]
    for place in order:
        write_batch(sink, [halves[place]], 2, part=place)
    assert rows_in(hall, names) == [("A", 2)]


def test_keys_that_differ_in_the_source_differ_in_the_target(hall: Server) -> None:
    names = target_of({"name": "varchar(20)"}, ["name"], name="hall.names")
    sink = sink_into(hall)
    sink.prepare(names, Evolution.EVOLVE)
    written = ["a", "A", "á", "a ", "ss", "ß"]
    write_batch(sink, [changes_of(names, *(insert(1, row, name=name) for row, name in enumerate(written)))])
    assert rows_in(hall, names) == sorted((name,) for name in written)


def test_a_deadlock_is_tried_again(hall: Server) -> None:
    sink = sink_into(hall, connections=1, statement_bytes=1024)
    sink.prepare(SEATS, Evolution.EVOLVE)
    rows = range(400)
    write_batch(sink, [changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in rows))], 1)
    with hall.connect(autocommit=False) as other, other.cursor() as cursor:
        # The one with more changes is the one that goes on.
        for label in range(20):
            cursor.execute(f"UPDATE hall.seats SET label = '{label}' WHERE id >= 200")
        changed = [
            update(2, {"id": row, "seat": row}, {"id": row, "seat": row, "label": "ours"}, row)
            for row in rows
        ]
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write_batch, sink, [changes_of(SEATS, *changed)], 2)
            wait_for_lock(hall)
            cursor.execute("UPDATE hall.seats SET label = 'theirs' WHERE id = 3")
            other.commit()
            written.result(WAIT_SECONDS_MAX)
    assert rows_in(hall) == [(row, row, "ours") for row in rows]


def wait_for_lock(server: Server) -> None:
    """Wait until a transaction waits for another one."""

    def is_waited() -> bool:
        # The server makes this table anew only for those who ask less often than ten times a second.
        time.sleep(0.15)
        return bool(server.sql("SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"))

    wait_until(is_waited)


def test_a_lost_connection_is_made_again(hall: Server) -> None:
    sink = sink_into(hall, connections=1)
    visits = target_of({"page": "varchar(20)"}, [], name="hall.visits")
    for target in (SEATS, visits):
        sink.prepare(target, Evolution.EVOLVE)
    writer = sink.open(BatchMark("test", "1", 1), 0)
    writer.write(changes_of(visits, insert(1, page="front")))
    writer.write(changes_of(SEATS, insert(1, id=1, seat=1)))
    kill_connections(hall)
    writer.finish()
    assert rows_in(hall) == [(1, 1, None)]
    assert rows_in(hall, visits) == [("front",)]


def kill_connections(server: Server) -> None:
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND = 'Sleep' AND ID <> CONNECTION_ID()"
        )
        for (number,) in cursor.fetchall():
            try:
                cursor.execute(f"KILL {number}")
            except pymysql.err.MySQLError as problem:
                # One that a test before has closed may be gone by now.
                if problem.args[0] != NO_SUCH_THREAD:
                    raise


def test_who_holds_a_row_for_too_long_is_told(hall: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_transaction, "ATTEMPTS_MAX", 2)
    sink = sink_into(hall, connections=1)
    sink.prepare(SEATS, Evolution.EVOLVE)
    write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1))], 1)
    hall.sql("SET GLOBAL innodb_lock_wait_timeout = 1")
    try:
        with hall.connect(autocommit=False) as other, other.cursor() as cursor:
            cursor.execute("DELETE FROM hall.seats")
            with pytest.raises(ServerBusy):
                write_batch(sink, [changes_of(SEATS, delete(2, id=1, seat=1))], 2)
            other.rollback()
    finally:
        hall.sql("SET GLOBAL innodb_lock_wait_timeout = 50")
    write_batch(sink, [changes_of(SEATS, delete(2, id=1, seat=1))], 2)
    assert rows_in(hall) == []


def test_a_value_that_the_target_cannot_hold_stops(hall: Server) -> None:
    hall.sql(
        "CREATE DATABASE hall; CREATE TABLE hall.seats (id INT PRIMARY KEY, seat TINYINT, label VARCHAR(20))"
    )
    sink = sink_into(hall)
    sink.prepare(SEATS, Evolution.EVOLVE)
    with pytest.raises(ValueMalformed):
        write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1000))])
    assert rows_in(hall) == []


def test_a_table_of_somebody_else_keeps_its_columns(hall: Server) -> None:
    hall.sql("CREATE DATABASE hall")
    hall.sql("CREATE TABLE hall.seats (id BIGINT PRIMARY KEY, seat INT, theirs INT NOT NULL DEFAULT 7)")
    sink = sink_into(hall)
    assert [one.split(" ADD ")[1].split(" ")[1] for one in sink.plan(SEATS, Evolution.EVOLVE)] == ["`label`"]
    sink.prepare(SEATS, Evolution.EVOLVE)
    write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1, label="a"))], 1)
    hall.sql("UPDATE hall.seats SET theirs = 8")
    write_batch(sink, [changes_of(SEATS, *[update(2, {"id": 1, "seat": 1}, {"id": 1, "seat": 2})])], 2)
    assert hall.sql("SELECT id, seat, label, theirs FROM hall.seats") == [(1, 2, None, 8)]


def test_an_emptied_table_has_what_came_after(hall: Server) -> None:
    for number, truncate in enumerate((True, False)):
        hall.sql("DROP DATABASE IF EXISTS hall")
        sink = sink_into(hall, truncate=truncate)
        sink.prepare(SEATS, Evolution.EVOLVE)
        write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1))], 10 * number + 1)
        writer = sink.open(BatchMark("test", "1", 10 * number + 2), 0)
        writer.write(changes_of(SEATS, insert(2, id=2, seat=2)))
        writer.empty(SEATS, 3)
        writer.write(changes_of(SEATS, insert(4, id=3, seat=2)))
        writer.finish()
        assert rows_in(hall) == [(3, 2, None)]


def test_a_feed_has_every_change_once(hall: Server) -> None:
    sink = sink_into(hall, mode="feed")
    sink.prepare(SEATS, Evolution.EVOLVE)
    changes = changes_of(
        SEATS,
        insert(1, id=1, seat=1),
        update(2, {"id": 1, "seat": 1}, {"id": 1, "seat": 2}, 3),
        delete(3, id=1, seat=2),
    )
    for _ in range(2):
        write_batch(sink, [changes], 1)
    found = hall.sql(
        "SELECT id, seat, _change_type, _commit_version, _row FROM hall.seats"
        " ORDER BY _commit_version, _row, _change_type DESC"
    )
    assert found == [
        (1, 1, "insert", 1, 0),
        (1, 1, "update_preimage", 2, 3),
        (1, 2, "update_postimage", 2, 3),
        (1, 2, "delete", 3, 0),
    ]


def test_the_commit_log_has_each_key_that_was_written(hall: Server) -> None:
    sink = sink_into(hall, commit_log="penstock.log")
    sink.prepare(SEATS, Evolution.EVOLVE)
    first = changes_of(SEATS, insert(1, id=1, seat=1), insert(1, 1, id=2, seat=2))
    for number, changes in ((1, first), (1, first), (2, changes_of(SEATS, delete(5, id=2, seat=2)))):
        write_batch(sink, [changes], number)
    found = hall.sql("SELECT number, table_name, row_key, action, version FROM penstock.log ORDER BY id")
    assert found == [
        (1, "hall.seats", '{"id":1}', "put", 1),
        (1, "hall.seats", '{"id":2}', "put", 1),
        (2, "hall.seats", '{"id":2}', "take", 5),
    ]


def test_no_reader_sees_half_of_a_batch_that_is_written_serially(hall: Server) -> None:
    sink = sink_into(hall, apply="serial", held_bytes=1024, statement_bytes=1024)
    sink.prepare(SEATS, Evolution.EVOLVE)
    writer = sink.open(BatchMark("test", "1", 1), 0)
    for first in range(0, 2000, 100):
        writer.write(
            changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(first, first + 100)))
        )
        assert rows_in(hall) == []
    writer.finish()
    assert len(rows_in(hall)) == 2000


def test_the_plan_says_what_prepare_does(hall: Server) -> None:
    sink = sink_into(hall)
    planned = sink.plan(SEATS, Evolution.EVOLVE)
    assert [one.split(" (")[0] for one in planned] == [
        "CREATE DATABASE IF NOT EXISTS `hall`",
        "CREATE TABLE IF NOT EXISTS `hall`.`seats`",
    ]
    assert hall.sql("SHOW DATABASES LIKE 'hall'") == []
    sink.prepare(SEATS, Evolution.EVOLVE)
    assert sink.plan(SEATS, Evolution.EVOLVE) == []


def test_columns_come_go_and_widen(hall: Server) -> None:
    sink = sink_into(hall)
    first = target_of({"id": "int", "kept": "varchar(5)", "gone": "int"}, name="hall.shapes")
    sink.prepare(first, Evolution.EVOLVE)
    write_batch(sink, [changes_of(first, insert(1, id=1, kept="a", gone=5))], 1)
    second = target_of(
        {"new": "datetime(3)", "id": "bigint", "kept": "varchar(50)"}, name="hall.shapes", unique=[["kept"]]
    )
    sink.prepare(second, Evolution.EVOLVE)
    assert sink.plan(second, Evolution.EVOLVE) == []
    write_batch(sink, [changes_of(second, insert(2, id=1 << 40, kept="b" * 50))], 2)
    assert hall.sql("SELECT * FROM hall.shapes ORDER BY id") == [
        (None, 1, "a"),
        (None, 1 << 40, "b" * 50),
    ]


def test_odd_values_of_the_source_are_written_as_they_are(hall: Server) -> None:
    columns = {
        "id": "int",
        "kind": "enum('a','b')",
        "plain": Column("plain", "varchar(20)", "ascii"),
        "text": Column("text", "varchar(20)", "utf8mb4"),
        "day": "date",
    }
    odd = target_of(columns, name="hall.odd")
    sink = sink_into(hall)
    sink.prepare(odd, Evolution.EVOLVE)
    spares = {"plain": "0x41E9", "text": "0xFF41", "day": "2026-00-15"}
    changes = changes_of(
        odd,
        [Made("insert", 1, {"id": 1, "kind": "a"}, 0, spares)],
        insert(1, 1, id=2, kind=""),
        [Made("insert", 1, {"id": 3, "kind": ""}, 2, {"text": "0xFF"})],
    )
    receipt = write_batch(sink, [changes])
    found = hall.sql(
        "SELECT id, kind + 0, HEX(plain), HEX(text), CAST(day AS CHAR) FROM hall.odd ORDER BY id"
    )
    # MySQL takes no byte above 127 into a column of ASCII, MariaDB does.
    kept = found[0][2]
    assert found == [(1, 1, kept, None, "2026-00-15"), (2, 0, None, None, None), (3, 0, None, None, None)]
    assert receipt.unrepresentable.pop("hall.odd.text") == 2
    assert receipt.unrepresentable in ({}, {"hall.odd.plain": 1})
    assert (kept is None) == bool(receipt.unrepresentable)


def test_an_account_with_rights_on_one_database_is_enough(hall: Server) -> None:
    hall.sql("CREATE DATABASE hall")
    hall.sql("CREATE USER IF NOT EXISTS copy@'%' IDENTIFIED BY 'secret'")
    hall.sql("GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX ON hall.* TO copy@'%'")
    told = settings_of("mysql")(
        url=hall.url("root").replace("root@", "copy@"), password="secret", positions="hall.positions"
    )
    sink = make_sink("mysql", told)
    assert sink.check() == []
    sink.prepare(SEATS, Evolution.EVOLVE)
    write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1))])
    assert rows_in(hall) == [(1, 1, None)]
    assert "secret" not in repr(sink)
    wrong = make_sink("mysql", told.model_copy(update={"password": Secret("no")}))
    (finding,) = wrong.check()
    assert finding.fatal
    assert "no" not in finding.what.split()


def test_of_two_writers_that_have_one_part_one_is_undone(hall: Server) -> None:
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


def test_a_writer_that_was_thought_dead_overwrites_nothing_later(hall: Server) -> None:
    sink = sink_into(hall, connections=2)
    sink.prepare(SEATS, Evolution.EVOLVE)
    stale = sink.open(BatchMark("test", "1", 1), 0)
    first = changes_of(SEATS, *(insert(1, row, id=row, seat=row) for row in range(1200)))
    stale.write(first)
    write_batch(sink, [first], 1)
    write_batch(sink, [changes_of(SEATS, *(delete(2, row, id=row, seat=row) for row in range(1200)))], 2)
    with pytest.raises(LeaseLost):
        stale.finish()
    stale.abort()
    assert rows_in(hall) == []


def test_a_table_of_somebody_else_needs_no_key(hall: Server) -> None:
    hall.sql("CREATE DATABASE hall; CREATE TABLE hall.seats (id INT, seat INT, label VARCHAR(20))")
    sink = sink_into(hall)
    sink.prepare(SEATS, Evolution.EVOLVE)
    for number in (1, 2):
        write_batch(sink, [changes_of(SEATS, insert(1, id=1, seat=1), insert(1, 1, id=2, seat=2))], number)
    write_batch(sink, [changes_of(SEATS, update(2, {"id": 1, "seat": 1}, {"id": 1, "seat": 5}))], 3)
    assert rows_in(hall) == [(1, 5, None), (2, 2, None)]
