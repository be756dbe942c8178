# SPDX-License-Identifier: Apache-2.0
"""Table definitions in doubt are read from the server while capture continues; readers wait for them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.binlog import read_binlog
from penstock.capture.kept_schemas import give_definition
from penstock.capture.status import CaptureStatus, State
from penstock.errors import SchemaMismatch, SchemaUnknown
from penstock.model import Column, Position, ServerAddress, TableName, TableSchema
from penstock.mysql import committed
from penstock.mysql.committed import wait_until_defined
from penstock.mysql.connection import connect
from penstock.schema.reader import read_tables
from penstock.schema.statements import tokens
from penstock.schema.table_definition import TableDefinition
from penstock.settings.daemon import Settings
from tests.support.capture.captured_log import (
    capturing,
    head_of,
    settings_of,
    wait_for,
    wait_for_position,
    wait_for_state,
)
from tests.support.capture.waiting_commits import SEMI_SYNC, waiting_commits
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import FreshDatabase, LendServer, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


@pytest.fixture(
    scope="module", params=[("mysql", "MINIMAL"), ("mariadb", "NO_LOG")], ids=["mysql", "mariadb"]
)
def server(request: pytest.FixtureRequest, lend_server: LendServer) -> Iterator[Server]:
    """A server whose log has no column names, the default."""
    family, metadata = request.param
    with lend_server(family, binlog_row_metadata=metadata) as server:
        yield server


def rows_of(settings: Settings, table: str) -> list[dict[str, Any]]:
    """Return the inserted rows of a table, read from the log's folder as any reader does."""
    folder = settings.log_of("shop").folder
    return [
        {name: value for name, value in row.items() if not name.startswith("_")}
        for batch in read_binlog(folder, tables=table)
        for row in batch.to_arrow().to_pylist()
    ]


# The statement has more tokens than the reader accepts, so it is not parsed to its end.
TOKENS_MAX = 60
DOUBTED = f"ADD CHECK (a NOT IN ({', '.join(map(str, range(100, 200)))})), MODIFY b TEXT CHARACTER SET latin1"


@pytest.fixture(autouse=True)
def short_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "STATEMENT_TOKENS_MAX", TOKENS_MAX)


def test_tables_in_doubt_are_read_behind_the_capture(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.old (a INT PRIMARY KEY, b TEXT)")
    settings = settings_of(tmp_path, server.url())
    with capturing(settings) as capture:
        wait_for_state(capture, State.RUNNING)
        server.sql(
            f"INSERT INTO {database}.old VALUES (1, 'é'); ALTER TABLE {database}.old {DOUBTED};"
            f"INSERT INTO {database}.old VALUES (2, 'é'); ALTER TABLE {database}.old ADD c INT FIRST;"
            f"INSERT INTO {database}.old VALUES (7, 3, 'é')"
        )
        wait_for_position(capture, head_of(server))
        assert rows_of(settings, f"{database}.old") == [
            {"a": 1, "b": "é"},
            {"a": 2, "b": "é"},
            {"c": 7, "a": 3, "b": "é"},
        ]
        wait_for(capture, lambda status: not status.tables_in_doubt)


def test_table_that_cannot_be_settled_stops_its_readers_by_name(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(server)
    name = f"{database}.lost"
    server.sql(f"CREATE TABLE {database}.other (a INT PRIMARY KEY); CREATE TABLE {name} (a INT, b TEXT)")
    settings = settings_of(tmp_path, server.url())
    with capturing(settings) as capture:
        wait_for_state(capture, State.RUNNING)
        server.sql(f"INSERT INTO {database}.other VALUES (1)")
        wait_for_position(capture, head_of(server))
        assert rows_of(settings, f"{database}.other") == [{"a": 1}]
    # The capture is stopped, so the table has changed again before it can be read.
    server.sql(
        f"ALTER TABLE {name} {DOUBTED}; INSERT INTO {name} VALUES (3, 'é'); ALTER TABLE {name} DROP COLUMN a;"
        f"INSERT INTO {name} VALUES ('è'); INSERT INTO {database}.other VALUES (2)"
    )
    with capturing(settings) as capture:
        wait_for_position(capture, head_of(server))
        with pytest.raises(SchemaUnknown, match=r"cannot be read: .*ALTER TABLE") as unknown:
            rows_of(settings, name)
        assert rows_of(settings, f"{database}.other") == [{"a": 1}, {"a": 2}]
        status = wait_for(capture, lambda status: _stopped(status, name) is not None)
        stopped = _stopped(status, name)
        assert stopped is not None
        here = f"--log {settings.log_of('shop').folder}"
        command = stopped["command"].replace("--url penstock://HOST:7070/INSTANCE", here)
        assert str(unknown.value.hint).endswith(command)
        definition = TableSchema(database, "lost", (Column("a", "int"), Column("b", "mediumtext", "latin1")))
        definition_json = TableDefinition(definition, "latin1").to_json()
        give_definition(
            capture.log(), TableName(database, "lost"), Position.parse(stopped["since"]), definition_json
        )
        with pytest.raises(SchemaMismatch, match="mediumtext"):
            rows_of(settings, name)
    # Another process now writes the log, and the definition supplied by hand was wrong.
    ddl = tmp_path / "lost.sql"
    ddl.write_text("CREATE TABLE lost (a INT, b TEXT) CHARACTER SET latin1")
    done = penstock(*command.removeprefix("penstock ").replace("FILE", str(ddl)).split())
    assert done.code == 0, done.err
    assert rows_of(settings, name) == [{"a": 3, "b": "é"}, {"b": "è"}]


def _stopped(status: CaptureStatus, name: str) -> dict[str, Any] | None:
    listed = [doubt for doubt in status.tables_in_doubt if doubt["table"] == name]
    return next((doubt for doubt in listed if doubt["state"] == "stopped"), None)


@pytest.mark.deep(guard="tests/unit/test_settling.py::test_table_is_read_once_its_statement_is_committed")
@pytest.mark.parametrize("flavor", SEMI_SYNC)
def test_definitions_follow_every_logged_statement(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, flavor: str
) -> None:
    server = start_server(flavor)
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (v INT)")
    address = ServerAddress.parse(server.url())
    asked: list[object] = []
    owned = committed._owned
    monkeypatch.setattr(committed, "_owned", lambda connection: asked.append(0) or owned(connection))

    def columns() -> list[str]:
        with connect(address) as connection:
            wait_until_defined(connection)
            (definition,) = read_tables(connection)
        return [column.name for column in definition.schema.columns]

    def reader_waits() -> bool:
        """Return whether the reader asked more than once, or waits for the table."""
        waiting = (
            "SELECT 1 FROM information_schema.PROCESSLIST WHERE STATE LIKE 'Waiting for table metadata%'"
        )
        return len(asked) > 3 or bool(server.sql(waiting))

    with (
        connect(address) as connection,
        ThreadPoolExecutor(2) as pool,
        waiting_commits(server, flavor) as show,
    ):
        before = connection.head()
        writer = pool.submit(server.sql, "ALTER TABLE d.t ADD w INT FIRST")
        wait_until(lambda: connection.head().offset != before.offset)
        reader = pool.submit(columns)
        wait_until(lambda: reader.done() or reader_waits())
        assert not reader.done()
        show()
        writer.result(WAIT_SECONDS_MAX)
        assert reader.result(WAIT_SECONDS_MAX) == ["w", "v"]
