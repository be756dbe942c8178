# SPDX-License-Identifier: Apache-2.0
"""The chunks of a batch share sessions, and small tables are planned with few statements."""

import random
from contextlib import closing

import pytest

from penstock.errors import SchemaChanged
from penstock.model import ServerAddress, TablePatterns
from penstock.pipeline.load import chunks as chunks_module
from penstock.pipeline.load.chunks import Chunk, plan_over
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.load.targets import targets_of
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import wait_until
from tools.servers import Server

# Other flavors differ only in lower layers.
pytestmark = pytest.mark.deep_flavors("mariadb")

TABLES = 4


def create_tables(server: Server, database: str, rows: int = 3) -> None:
    for number in range(TABLES):
        server.sql(f"CREATE TABLE {database}.t{number} (id INT PRIMARY KEY, v INT)")
        values = ", ".join(f"({row}, {number})" for row in range(rows))
        server.sql(f"INSERT INTO {database}.t{number} VALUES {values}")


def sessions_since(server: Server, first: int) -> set[int]:
    """Return the sessions of readers that began after a given session."""
    rows = server.sql(f"SELECT id FROM information_schema.PROCESSLIST WHERE user = 'repl' AND id > {first}")
    return {int(row[0]) for row in rows}


def test_chunks_share_a_session_that_holds_no_table(server: Server, fresh_database: FreshDatabase) -> None:
    """The next chunk is read even after an error in a chunk, and after the server has ended the session."""
    database = fresh_database(server)
    create_tables(server, database)
    address = ServerAddress.parse(server.url("repl"))
    targets = targets_of(address, TablePatterns(f"{database}.*"))
    opened: set[int] = set()
    with open_session(address) as planning, closing(SessionPool()) as pool:
        planned = [(target, plan_over(planning, target)[0]) for target in targets]
        planning_id = int(planning.query("SELECT CONNECTION_ID() AS id")[0]["id"])

        def read(number: int) -> list[int]:
            target, chunk = planned[number]
            chunks = read_chunk(address, target, chunk, instance="test", sessions=pool)
            values = [value for changes in chunks for value in changes.rows.column("v").to_pylist()]
            opened.update(sessions_since(server, planning_id))
            return values

        assert [read(number) for number in range(TABLES)] == [[number] * 3 for number in range(TABLES)]
        assert len(opened) == 1
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SET SESSION lock_wait_timeout = 1")
            cursor.execute(f"ALTER TABLE {database}.t0 DROP PRIMARY KEY")
        with pytest.raises(SchemaChanged, match="was altered"):
            read(0)
        assert read(1) == [1] * 3
        assert len(opened) == 2, "an error ends the session"
        for session in sessions_since(server, planning_id):
            server.sql(f"KILL {session}")
        assert read(2) == [2] * 3, "a session that the server has ended is replaced"
    wait_until(lambda: not sessions_since(server, planning_id))


class CountedSession(LoadSession):
    """A load session that counts its statements."""

    statements = 0

    def query(self, sql: str, *args: object) -> list[dict[str, object]]:
        self.statements += 1
        return super().query(sql, *args)


def test_small_table_is_one_chunk_after_three_statements(
    server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortcut for small tables changes no plan: tables of any size get the same chunks as without it."""
    database = fresh_database(server)
    create_tables(server, database, rows=120)
    chance = random.Random(17)
    address = ServerAddress.parse(server.url("repl"))
    server.sql(f"DELETE FROM {database}.t1")
    server.sql(f"DELETE FROM {database}.t2 WHERE id > 2")
    server.sql(f"DELETE FROM {database}.t3 WHERE id % 7 > 2")
    for number in range(TABLES):
        # Prevent purges and new statistics from changing the server's estimate for a range.
        server.sql(f"ALTER TABLE {database}.t{number} FORCE, STATS_AUTO_RECALC = 0")
        server.sql(f"ANALYZE TABLE {database}.t{number}")
    targets = targets_of(address, TablePatterns(f"{database}.*"))
    with open_session(address) as opened:
        session = CountedSession(opened.connection)

        def plan(rows: int) -> list[list[Chunk]]:
            return [plan_over(session, target, rows=rows) for target in targets]

        assert [len(chunks) for chunks in plan(1_000)] == [1] * TABLES
        assert session.statements == 3 * TABLES
        for rows in (chance.randrange(15, 40), 300):
            fast = plan(rows)
            with monkeypatch.context() as patched:
                patched.setattr(chunks_module._Planner, "_rows_of_one_chunk", lambda _: None)
                slow = plan(rows)
            for number, (one, other) in enumerate(zip(fast, slow, strict=True)):
                # An empty table has no estimate without the shortcut.
                ignored = {"rows": 0} if number == 1 else {}
                assert [vars(chunk) | ignored for chunk in one] == [vars(chunk) | ignored for chunk in other]
