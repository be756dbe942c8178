# SPDX-License-Identifier: Apache-2.0
"""Rows loaded during concurrent writes, plus the log after their watermark, equal the final table."""

import collections
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pymysql
import pytest

import penstock
from penstock.errors import PrivilegeMissing, ServerBusy
from penstock.model import Position, ServerAddress, TablePatterns
from penstock.mysql import committed
from penstock.mysql.connection import connect
from penstock.pipeline.load import exact as exact_module
from penstock.pipeline.load.chunks import Chunk, plan_chunks
from penstock.pipeline.load.exact import open_exact
from penstock.pipeline.load.reader import read_chunk, read_rows
from penstock.pipeline.load.session import open_session
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import Watermark, open_snapshot, take_watermark
from tests.support.capture.waiting_commits import SEMI_SYNC, waiting_commits
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

ROWS = 200
WRITERS = 3
DEADLOCK, LOCK_WAITED = 1213, 1205
LOADS = 60 if os.environ.get("PENSTOCK_LONG") else 3

Row = dict[str, Any]


@contextmanager
def writers(server: Server, database: str, statements: list[str]) -> Iterator[Callable[[int], None]]:
    """Run random statements in several sessions inside the block. Each %d is replaced by a number up to ROWS.

    Yields a function that waits until the writers have changed the given number of further rows.
    """
    stopping = threading.Event()
    failures: list[pymysql.err.Error] = []
    changed = [0] * WRITERS

    def write(seed: int) -> None:
        chance = random.Random(seed)
        try:
            with server.connect(database=database) as connection, connection.cursor() as cursor:
                while not stopping.is_set():
                    statement = chance.choice(statements)
                    text = re.sub("%d", lambda _: str(chance.randint(1, ROWS)), statement)
                    try:
                        changed[seed] += cursor.execute(text)
                    except pymysql.err.OperationalError as problem:
                        # In a deadlock of the writers the server rolls back one statement.
                        if problem.args[0] not in (DEADLOCK, LOCK_WAITED):
                            raise
        except pymysql.err.Error as problem:
            failures.append(problem)

    def wait_for_changes(rows: int) -> None:
        wanted = sum(changed) + rows
        wait_until(lambda: sum(changed) >= wanted or failures)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield wait_for_changes
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def logged(server: Server, table: str, start: Position) -> list[Row]:
    """Return the changes of a table from a position to the log's end."""
    with connect(ServerAddress.parse(server.url())) as connection:
        head = connection.head()
    batches = penstock.read_binlog(server.url(), table, start=start, end=Position(0, head.file, head.offset))
    rows = [row for batch in batches for row in batch.to_arrow().to_pylist()]
    return sorted(rows, key=lambda row: (row["_commit_version"], row["_metadata"]["row"]))


def test_rows_and_the_log_after_their_watermark_make_the_table(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, v INT NOT NULL)")
    server.sql(f"INSERT INTO {database}.t VALUES {', '.join(f'({n}, 0)' for n in range(1, ROWS, 2))}")
    address = ServerAddress.parse(server.url())
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    chunks = plan_chunks(address, target, rows=30)
    assert len(chunks) > 2
    statements = [
        "UPDATE t SET v = v + 1 WHERE id = %d",
        "UPDATE t SET v = v + 1 WHERE id BETWEEN %d AND %d",
        "INSERT IGNORE INTO t VALUES (%d, 1)",
        "DELETE FROM t WHERE id = %d",
        "UPDATE IGNORE t SET id = %d WHERE id = %d",
    ]
    loads: list[tuple[Watermark, list[Row]]] = []
    with writers(server, database, statements) as wait_for_changes:
        for _ in range(LOADS):
            for chunk in chunks:
                wait_for_changes(2 * WRITERS)
                low = take_watermark(address)
                read = read_chunk(address, target, chunk, instance="test", watermark=low)
                loads.append((low, [row for changes in read for row in changes.rows.to_pylist()]))
        wait_for_changes(2 * WRITERS)
    final = dict(server.sql(f"SELECT id, v FROM {database}.t"))
    changes = logged(server, f"{database}.t", loads[0][0].position)
    assert len(changes) > LOADS * len(chunks)
    for start in range(0, len(loads), len(chunks)):
        # Each full load starts at its first watermark; its chunks and the changes are merged by version.
        of_load = loads[start : start + len(chunks)]
        first = of_load[0][0].position.commit_version
        rows = [row for _, read in of_load for row in read]
        news = [row for row in changes if row["_commit_version"] >= first]
        assert held(rows, news) == final


def held(rows: list[Row], news: list[Row]) -> dict[int, int]:
    """Order the images by version, and return the last image of each key."""
    images: dict[int, tuple[int, int, int | None]] = {}
    for at, row in enumerate([*rows, *news]):
        gone = row["_change_type"] in ("delete", "update_preimage")
        order = (row["_commit_version"], at)
        if row["id"] not in images or images[row["id"]][:2] <= order:
            images[row["id"]] = (*order, None if gone else row["v"])
    return {key: value for key, (_, _, value) in images.items() if value is not None}


@pytest.mark.parametrize("locked", [False, True], ids=["quiet", "locked"])
def test_exact_snapshot_of_keyless_rows_joins_the_log_without_a_gap_or_a_duplicate(
    server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    if locked:
        monkeypatch.setattr(exact_module, "_open_without_lock", lambda *_: None)
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (v INT)")
    address = ServerAddress.parse(server.url("root"))
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    statements = [
        "INSERT INTO t VALUES (%d), (%d)",
        "DELETE FROM t WHERE v = %d LIMIT 1",
        "UPDATE t SET v = %d WHERE v = %d",
    ]
    taken = []
    with writers(server, database, statements) as wait_for_changes:
        for _ in range(4):
            wait_for_changes(20)
            with open_exact(address, [target.name]) as snapshot:
                # Rows written from here on are not in the snapshot.
                wait_for_changes(20)
                chunk = Chunk(target.name)
                read = read_rows(snapshot.session, target, chunk, snapshot.watermark, instance="test")
                rows = [row["v"] for changes in read for row in changes.rows.to_pylist()]
                assert snapshot.watermark.exact
                taken.append((snapshot.floor, snapshot.watermark.position, rows))
    final = collections.Counter(v for (v,) in server.sql(f"SELECT v FROM {database}.t"))
    changes = logged(server, f"{database}.t", taken[0][1])
    assert len(changes) > 50
    for floor, _, rows in taken:
        count = collections.Counter(rows)
        for row in changes:
            if row["_commit_version"] >= floor:
                count[row["v"]] += 1 if row["_change_type"] in ("insert", "update_postimage") else -1
        assert +count == final
        assert not -count


def test_nontransactional_table_is_locked_during_its_read(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (v INT) ENGINE=MyISAM")
    server.sql(f"INSERT INTO {database}.t VALUES (1), (2)")
    address = ServerAddress.parse(server.url("root"))
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    with open_exact(address, [target.name]) as snapshot:
        writer = threading.Thread(target=server.sql, args=(f"INSERT INTO {database}.t VALUES (3)",))
        writer.start()
        wait_until(
            lambda: server.sql(
                "SELECT 1 FROM information_schema.PROCESSLIST WHERE STATE LIKE 'Waiting for table%%'"
                " AND INFO LIKE %s",
                f"INSERT INTO {database}.t%",
            )
        )
        read = read_rows(snapshot.session, target, Chunk(target.name), snapshot.watermark, instance="test")
        assert [row["v"] for changes in read for row in changes.rows.to_pylist()] == [1, 2]
    writer.join()
    assert [row["v"] for row in logged(server, f"{database}.t", snapshot.watermark.position)] == [3]


def test_missing_lock_privilege_on_a_busy_table_is_reported(
    mysql_server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_module, "_open_without_lock", lambda *_: None)
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (v INT)")
    mysql_server.sql("DROP USER IF EXISTS lockless; CREATE USER lockless IDENTIFIED BY ''")
    mysql_server.sql("GRANT SELECT, REPLICATION CLIENT ON *.* TO lockless")
    address = ServerAddress.parse(mysql_server.url("lockless"))
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    with pytest.raises(PrivilegeMissing, match="lock") as raised:
        open_exact(address, [target.name])
    assert raised.value.hint is not None
    assert "LOCK TABLES" in raised.value.hint


def test_statement_that_blocks_the_table_is_reported(
    mysql_server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_module, "_open_without_lock", lambda *_: None)
    monkeypatch.setattr(exact_module, "_LOCK_WAIT_SECONDS", 1)
    monkeypatch.setattr(exact_module, "_LOCK_TRIES", 1)
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (v INT)")
    address = ServerAddress.parse(mysql_server.url("root"))
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    with mysql_server.connect(database=database, autocommit=False) as writer, writer.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(ServerBusy):
            open_exact(address, [target.name])
        writer.rollback()


@pytest.mark.parametrize("flavor", SEMI_SYNC)
def test_watermark_covers_commits_logged_but_not_yet_visible(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, flavor: str
) -> None:
    server = start_server(flavor)
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (v INT); INSERT INTO d.t VALUES (0)")
    address = ServerAddress.parse(server.url())
    asked: list[object] = []
    owned = committed._owned
    with (
        connect(address) as connection,
        server.connect() as reader,
        reader.cursor() as cursor,
        ThreadPoolExecutor(2) as pool,
        waiting_commits(server, flavor) as show,
    ):

        def seen() -> int:
            cursor.execute("SELECT v FROM d.t")
            ((value,),) = cursor.fetchall()
            return int(value)

        before = connection.head()
        # The server waits for a missing replica before it makes a logged commit visible.
        writer = pool.submit(server.sql, "UPDATE d.t SET v = 1")
        wait_until(lambda: connection.head().offset != before.offset)
        if flavor == "mysql":
            monkeypatch.setattr(committed, "_COMMIT_SECONDS_MAX", 0.05)
            with pytest.raises(ServerBusy, match="not committed"):
                take_watermark(address)
        monkeypatch.setattr(committed, "_COMMIT_SECONDS_MAX", WAIT_SECONDS_MAX)
        monkeypatch.setattr(committed, "_owned", lambda connection: asked.append(0) or owned(connection))
        taken = pool.submit(take_watermark, address)
        wait_until(lambda: taken.done() or len(asked) > 3)
        # MariaDB reports the position of its visible state; on MySQL the load waits for the commit.
        assert taken.done() == (flavor == "mariadb")
        assert seen() == 0
        show()
        writer.result(WAIT_SECONDS_MAX)
        mark = taken.result(WAIT_SECONDS_MAX)
        assert (mark.position.offset > before.offset) == (flavor == "mysql")
        assert seen() == 1
    assert Watermark.from_json(mark.to_json()) == mark


def test_server_without_gtids_gets_time_to_settle(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed, "_SETTLE_SECONDS", 0.2)
    server = start_server("mysql", gtid_mode="OFF", enforce_gtid_consistency="OFF")
    started = time.monotonic()
    mark = take_watermark(ServerAddress.parse(server.url()), epoch=3)
    assert time.monotonic() - started > 0.2
    assert (mark.position.epoch, mark.exact) == (3, False)


@pytest.mark.deep(
    guard="tests/unit/test_committed_waits.py::test_commits_that_wait_for_a_replica_are_waited_for"
)
def test_watermark_without_gtids_covers_commits_that_wait_for_a_replica(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("mysql", gtid_mode="OFF", enforce_gtid_consistency="OFF")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (v INT); INSERT INTO d.t VALUES (0)")
    address = ServerAddress.parse(server.url())
    with (
        connect(address) as connection,
        ThreadPoolExecutor(2) as pool,
        waiting_commits(server, "mysql") as show,
    ):
        before = connection.head()
        writer = pool.submit(server.sql, "UPDATE d.t SET v = 1")
        wait_until(lambda: connection.head().offset != before.offset)
        monkeypatch.setattr(committed, "_COMMIT_SECONDS_MAX", 0.05)
        with pytest.raises(ServerBusy, match="those of 1 sessions"):
            take_watermark(address)
        monkeypatch.undo()
        asked: list[object] = []
        waiting = committed._waiting_for_replicas
        monkeypatch.setattr(
            committed, "_waiting_for_replicas", lambda connection: asked.append(0) or waiting(connection)
        )
        taken = pool.submit(take_watermark, address)
        wait_until(lambda: len(asked) > 3)
        assert not taken.done()
        show()
        writer.result(WAIT_SECONDS_MAX)
        assert taken.result(WAIT_SECONDS_MAX).position.offset > before.offset
        assert server.sql("SELECT v FROM d.t") == [(1,)]


def test_mariadb_reports_the_position_of_a_snapshot(
    mariadb11_server: Server, mariadb_server: Server, fresh_database: FreshDatabase
) -> None:
    for server in (mariadb_server, mariadb11_server):
        server.sql(f"CREATE TABLE {fresh_database(server)}.t (v INT)")
        with open_session(ServerAddress.parse(server.url())) as session:
            while True:
                before = session.connection.head()
                mark = open_snapshot(session)
                session.query("ROLLBACK")
                # The server writes a checkpoint into a new file by itself a while after its start.
                if session.connection.head() == before:
                    break
            assert mark.exact
            assert (mark.position.file, mark.position.offset) == (before.file, before.offset)
