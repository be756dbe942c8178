# SPDX-License-Identifier: Apache-2.0
"""The MySQL sink beyond the common SQL tests (tests/conformance/test_sinks_sql.py)."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.changes import Target
from penstock.errors import LeaseLost, SchemaChanged, ServerBusy
from penstock.model import Column, Secret
from penstock.sinks.mysql import sink as mysql
from penstock.sinks.mysql import transaction as mysql_transaction
from penstock.sinks.mysql.connection import Session, connect
from penstock.sinks.sink import BatchMark, Evolution, make_sink, settings_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.support.pipeline.logged_changes import write_batch
from tests.support.sinks.backends import MysqlBackend, running_backend
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

_databases = itertools.count(1)


@pytest.fixture(params=["mysql", "mariadb"])
def backend(
    request: pytest.FixtureRequest, server_of: Callable[[str], Server], missing_part: MissingPart
) -> MysqlBackend:
    """Yield each server that speaks the protocol."""
    backend = running_backend(request.param, request.config, server_of, missing_part)
    assert isinstance(backend, MysqlBackend)
    return backend


@pytest.fixture
def database() -> str:
    """The name of a database for this test only."""
    return f"hall_{next(_databases)}"


@pytest.fixture
def seats(database: str) -> Target:
    """A table with a unique key in the test's database."""
    return target_of(
        {"id": "int", "seat": "int", "label": "varchar(20)"}, name=f"{database}.seats", unique=[["seat"]]
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_key_that_changes_its_case_stays_one_row(
    order: tuple[int, int], backend: MysqlBackend, database: str
) -> None:
    """The two halves of the change may reach different writers, in either order."""
    names = target_of({"name": "varchar(20)", "count": "int"}, ["name"], name=f"{database}.names")
    backend.sql(f"CREATE DATABASE {database}")
    backend.sql(f"CREATE TABLE {names.name} (name VARCHAR(20) PRIMARY KEY, count INT) CHARACTER SET utf8mb4")
    sink = backend.sink()
    sink.prepare(names, Evolution.EVOLVE)
    write_batch(sink, [changes_of(names, insert(1, name="a", count=1))], 1)
    before, after = update(2, {"name": "a", "count": 1}, {"name": "A", "count": 2})
    halves = [changes_of(names, [before]), changes_of(names, [after])]
    for part in order:
        write_batch(sink, [halves[part]], 2, part=part)
    assert backend.stored(names) == [("A", 2)]


def test_deadlock_victim_is_retried(backend: MysqlBackend, seats: Target) -> None:
    sink = backend.sink(connections=1, statement_bytes=1024)
    sink.prepare(seats, Evolution.EVOLVE)
    rows = range(400)
    write_batch(sink, [changes_of(seats, *(insert(1, row, id=row, seat=row) for row in rows))], 1)
    with backend.server.connect(autocommit=False) as other, other.cursor() as cursor:
        # The server resolves the deadlock by rolling back the transaction with fewer changes.
        for label in range(20):
            cursor.execute(f"UPDATE {seats.name} SET label = '{label}' WHERE id >= 200")
        changed = [
            update(2, {"id": row, "seat": row}, {"id": row, "seat": row, "label": "ours"}, row)
            for row in rows
        ]
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(write_batch, sink, [changes_of(seats, *changed)], 2)
            wait_for_lock(backend.server)
            cursor.execute(f"UPDATE {seats.name} SET label = 'theirs' WHERE id = 3")
            other.commit()
            written.result(WAIT_SECONDS_MAX)
    assert backend.stored(seats) == [(row, row, "ours") for row in rows]


def wait_for_lock(server: Server) -> None:
    """Wait until a transaction waits for another transaction."""

    def is_waited() -> bool:
        # The server refreshes this table only if it was not read for a tenth of a second.
        time.sleep(0.15)
        return bool(server.sql("SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"))

    wait_until(is_waited)


def test_writer_recovers_from_a_lost_connection(backend: MysqlBackend, database: str, seats: Target) -> None:
    sink = backend.sink(connections=1)
    visits = target_of({"page": "varchar(20)"}, [], name=f"{database}.visits")
    for target in (seats, visits):
        sink.prepare(target, Evolution.EVOLVE)
    write_batch(sink, [changes_of(visits, insert(1, page="gone"))], 1)
    writer = sink.open(BatchMark("test", "1", 2), 0)
    # This statement runs at once, so after the disconnect the transaction has to be replayed.
    writer.empty(visits, 2)
    writer.write(changes_of(visits, insert(3, page="front")))
    writer.write(changes_of(seats, insert(3, id=1, seat=1)))
    backend.disconnect_sinks()
    writer.finish()
    assert backend.stored(seats) == [(1, 1, None)]
    assert backend.stored(visits) == [("front",)]


def test_row_locked_for_too_long_reports_a_busy_server(
    backend: MysqlBackend, seats: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shortest time that the server accepts.
    seconds = 0 if backend.NAME == "mariadb" else 1

    def connect_impatiently(address: Any, *settings: str) -> Session:
        return connect(address, *settings, f"SET SESSION innodb_lock_wait_timeout = {seconds}")

    sink = backend.sink(connections=1)
    sink.prepare(seats, Evolution.EVOLVE)
    write_batch(sink, [changes_of(seats, insert(1, id=1, seat=1))], 1)
    with monkeypatch.context() as patch, backend.server.connect(autocommit=False) as other:
        patch.setattr(mysql_transaction, "TRIES_MAX", 1)
        patch.setattr(mysql, "connect", connect_impatiently)
        with other.cursor() as cursor:
            cursor.execute(f"DELETE FROM {seats.name}")
        with pytest.raises(ServerBusy):
            write_batch(sink, [changes_of(seats, delete(2, id=1, seat=1))], 2)
        other.rollback()
    write_batch(sink, [changes_of(seats, delete(2, id=1, seat=1))], 2)
    assert backend.stored(seats) == []


def test_commit_log_holds_each_written_key(backend: MysqlBackend, database: str, seats: Target) -> None:
    sink = backend.sink(commit_log=f"{database}.log")
    sink.prepare(seats, Evolution.EVOLVE)
    first = changes_of(seats, insert(1, id=1, seat=1), insert(1, 1, id=2, seat=2))
    for number, changes in ((1, first), (1, first), (2, changes_of(seats, delete(5, id=2, seat=2)))):
        write_batch(sink, [changes], number)
    logged = backend.sql(
        f"SELECT number, table_name, row_key, action, version FROM {database}.log ORDER BY id"
    )
    assert logged == [
        (1, str(seats.name), '{"id":1}', "put", 1),
        (1, str(seats.name), '{"id":2}', "put", 1),
        (2, str(seats.name), '{"id":2}', "take", 5),
    ]


def test_plan_shows_the_statements_of_prepare(backend: MysqlBackend, database: str, seats: Target) -> None:
    sink = backend.sink()
    planned = sink.plan(seats, Evolution.EVOLVE)
    assert [statement.split(" (")[0] for statement in planned] == [
        f"CREATE DATABASE IF NOT EXISTS `{database}`",
        f"CREATE TABLE IF NOT EXISTS `{database}`.`seats`",
    ]
    assert backend.sql(f"SHOW DATABASES LIKE '{database}'") == []


def test_unexpected_source_values_are_written_unchanged(backend: MysqlBackend, database: str) -> None:
    columns = {
        "id": "int",
        "kind": "enum('a','b')",
        "plain": Column("plain", "varchar(20)", "ascii"),
        "text": Column("text", "varchar(20)", "utf8mb4"),
        "day": "date",
    }
    odd = target_of(columns, name=f"{database}.odd")
    sink = backend.sink()
    sink.prepare(odd, Evolution.EVOLVE)
    unrepresentable = {"plain": "0x41E9", "text": "0xFF41", "day": "2026-00-15"}
    changes = changes_of(
        odd,
        [Made("insert", 1, {"id": 1, "kind": "a"}, 0, unrepresentable)],
        insert(1, 1, id=2, kind=""),
        [Made("insert", 1, {"id": 3, "kind": ""}, 2, {"text": "0xFF"})],
    )
    receipt = write_batch(sink, [changes])
    rows = backend.sql(
        f"SELECT id, kind + 0, HEX(plain), HEX(text), CAST(day AS CHAR) FROM {odd.name} ORDER BY id"
    )
    # MySQL accepts no byte above 127 in a column of ASCII; MariaDB does.
    plain = rows[0][2]
    assert rows == [(1, 1, plain, None, "2026-00-15"), (2, 0, None, None, None), (3, 0, None, None, None)]
    lost = dict(receipt.unrepresentable)
    assert lost.pop(f"{odd.name}.text") == 2
    assert lost == ({f"{odd.name}.plain": 1} if plain is None else {})


def test_account_with_rights_on_one_database_is_enough(
    backend: MysqlBackend, database: str, seats: Target
) -> None:
    backend.sql(f"CREATE DATABASE {database}")
    backend.sql("CREATE USER IF NOT EXISTS copy@'%' IDENTIFIED BY 'secret'")
    backend.sql(
        f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX ON {database}.* TO copy@'%'"
    )
    settings = settings_of("mysql")(
        url=backend.server.url("copy"), password="secret", positions=f"{database}.positions"
    )
    sink = make_sink("mysql", settings)
    assert sink.check() == []
    sink.prepare(seats, Evolution.EVOLVE)
    write_batch(sink, [changes_of(seats, insert(1, id=1, seat=1))])
    assert backend.stored(seats) == [(1, 1, None)]
    assert "secret" not in repr(sink)
    refused = make_sink("mysql", settings.model_copy(update={"password": Secret("no")}))
    (finding,) = refused.check()
    assert finding.fatal
    assert "no" not in finding.what.split()


def test_column_that_was_dropped_by_hand_is_named_when_the_table_is_read(
    backend: MysqlBackend, seats: Target
) -> None:
    sink = backend.sink()
    sink.prepare(seats, Evolution.EVOLVE)
    backend.sql(f"ALTER TABLE {seats.name} DROP COLUMN {seats.column_names[-1]}")
    with pytest.raises(SchemaChanged, match=f"has no column {seats.column_names[-1]}"):
        list(sink.read(seats))


def test_stale_writer_overwrites_nothing_of_a_later_batch(backend: MysqlBackend, seats: Target) -> None:
    sink = backend.sink(connections=2)
    sink.prepare(seats, Evolution.EVOLVE)
    stale = sink.open(BatchMark("test", "1", 1), 0)
    first = changes_of(seats, *(insert(1, row, id=row, seat=row) for row in range(1200)))
    stale.write(first)
    write_batch(sink, [first], 1)
    write_batch(sink, [changes_of(seats, *(delete(2, row, id=row, seat=row) for row in range(1200)))], 2)
    with pytest.raises(LeaseLost):
        stale.finish()
    stale.abort()
    assert backend.stored(seats) == []
