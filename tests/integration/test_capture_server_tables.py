# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import ConnectionLost, SchemaUnknown
from penstock.model import Position, ServerAddress, TableName, TablePatterns
from penstock.mysql.connection import Connection, connect
from penstock.schema import server_tables
from penstock.schema.history import SchemaHistory
from penstock.schema.reader import read_table, read_tables
from penstock.schema.server_tables import ServerTables
from penstock.schema.survey import survey
from penstock.schema.table_definition import TableDefinition
from tests.support.capture.captured_log import head_of, purge, rotate
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server


@pytest.fixture
def here(server: Server) -> Callable[[], Position]:
    """Return a function that returns the end of the server's log."""

    def position() -> Position:
        with connect(ServerAddress.parse(server.url())) as connection:
            head = connection.head()
        return Position(0, head.file, head.offset)

    return position


def test_tables_are_reported_as_of_their_position(
    server: Server, fresh_database: FreshDatabase, here: Callable[[], Position]
) -> None:
    database = fresh_database(server)
    tables = ServerTables(ServerAddress.parse(server.url()))

    def columns(table: str, position: Position) -> list[str]:
        definition = tables.read_at(TableName(database, table), position)
        assert definition is not None
        return [column.name for column in definition.schema.columns]

    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b INT)")
    first = here()
    server.sql(f"INSERT INTO {database}.t VALUES (1, 2); ALTER TABLE {database}.t ADD COLUMN c INT FIRST")
    server.sql("FLUSH BINARY LOGS")
    second = here()
    assert columns("t", first) == ["a", "b"]
    server.sql(f"ALTER TABLE {database}.t RENAME COLUMN b TO bb; RENAME TABLE {database}.t TO {database}.u")
    assert columns("t", first) == ["a", "b"]
    assert columns("t", second) == ["c", "a", "b"]
    assert columns("u", here()) == ["c", "a", "bb"]
    with pytest.raises(SchemaUnknown, match="RENAME TABLE"):
        columns("u", second)
    server.sql(f"ALTER TABLE {database}.u DROP COLUMN c")
    with pytest.raises(SchemaUnknown, match="DROP COLUMN"):
        columns("t", first)
    assert tables.read_at(TableName(database, "t"), here()) is None


def test_statement_that_ends_at_the_position_is_not_undone(
    server: Server, fresh_database: FreshDatabase, here: Callable[[], Position]
) -> None:
    database = fresh_database(server)
    tables = ServerTables(ServerAddress.parse(server.url()))
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY)")
    positions = [here()]
    for column in ("b", "c"):
        server.sql(f"ALTER TABLE {database}.t ADD COLUMN {column} INT")
        positions.append(here())
    # The first question reads all statements after its position, among them one that ends at the second.
    definitions = [tables.read_at(TableName(database, "t"), position) for position in positions]
    names = [
        [column.name for column in definition.schema.columns] for definition in definitions if definition
    ]
    assert names == [["a"], ["a", "b"], ["a", "b", "c"]]


def test_history_of_a_position_follows_the_log_from_there(
    server: Server, fresh_database: FreshDatabase, here: Callable[[], Position]
) -> None:
    database = fresh_database(server)
    address = ServerAddress.parse(server.url())
    server.sql(
        f"CREATE TABLE {database}.old (a INT PRIMARY KEY, b INT); CREATE TABLE {database}.lost (a INT);"
        f"CREATE TABLE {database}.still (a INT)"
    )
    start = here()
    statements = [
        f"ALTER TABLE {database}.old ADD COLUMN c INT",
        f"RENAME TABLE {database}.old TO {database}.young",
        f"CREATE TABLE {database}.late (z INT)",
        f"DROP TABLE {database}.lost",
    ]
    for statement in statements:
        server.sql(statement)
    tables = ServerTables(address)
    with connect(address) as connection:
        history = survey(connection, TablePatterns([f"{database}.*"]), position=start, reread=tables)
    known = {table["name"].partition(".")[2] for table in history.to_json()["tables"]}
    assert known == {"old", "still"}
    for number, statement in enumerate(statements, start=1):
        history.apply(statement, database, Position(0, start.file, start.offset + number))
    columns = {}
    for table in ("young", "late"):
        assert not history.needs_reread(TableName(database, table))
        schema = history.schema(database, table)
        assert schema is not None
        columns[table] = [column.name for column in schema.columns]
    assert columns == {"young": ["a", "b", "c"], "late": ["z"]}
    assert history.schema(database, "lost") is None
    with pytest.raises(SchemaUnknown):
        history.reread(TableName(database, "lost"), start)


def test_question_needs_no_log_between_an_earlier_question_and_its_position(
    start_server: StartServer,
) -> None:
    server = start_server("mariadb")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT)")
    tables = ServerTables(ServerAddress.parse(server.url()))
    assert tables.read_at(TableName("d", "t"), head_of(server)) is not None
    server.sql("ALTER TABLE d.t ADD COLUMN b INT")
    first = head_of(server).file
    rotate(server)
    position = head_of(server)
    purge(server)
    assert first not in {path.name for path in server.binlog_files()}
    server.sql("ALTER TABLE d.t RENAME COLUMN b TO c")
    definition = tables.read_at(TableName("d", "t"), position)
    assert definition is not None
    assert [column.name for column in definition.schema.columns] == ["a", "b"]


def test_statements_are_read_with_the_semantics_of_this_server(
    server: Server, fresh_database: FreshDatabase, here: Callable[[], Position]
) -> None:
    database = fresh_database(server)
    server.sql(f"ALTER DATABASE {database} CHARACTER SET latin1")
    history = SchemaHistory(reread=ServerTables(ServerAddress.parse(server.url())))
    text = "CREATE TABLE t (a INT(7), b JSON, c VARCHAR(5))"
    server.client(f"USE {database}; {text}")
    history.apply(text, database, here())
    with connect(ServerAddress.parse(server.url())) as connection:
        definition = read_table(connection, TableName(database, "t"))
    assert definition is not None
    known = history.schema(database, "t")
    assert known is not None
    assert known.columns == definition.schema.columns


def test_statements_about_other_tables_do_not_prolong_a_read(
    server: Server,
    fresh_database: FreshDatabase,
    here: Callable[[], Position],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT)")
    position, readings = here(), list[TableName]()

    def read_while_another_is_made(connection: Connection, name: TableName) -> TableDefinition | None:
        readings.append(name)
        assert len(readings) < 4, "the reading does not end"
        definition = read_table(connection, name)
        server.sql(f"CREATE TABLE {database}.other{len(readings)} (a INT)")
        return definition

    monkeypatch.setattr(server_tables, "read_table", read_while_another_is_made)
    tables = ServerTables(ServerAddress.parse(server.url()))
    definition = tables.read_at(TableName(database, "t"), position)
    assert definition is not None
    assert readings == [TableName(database, "t")]


def test_table_altered_during_its_read_is_read_again(
    server: Server,
    fresh_database: FreshDatabase,
    here: Callable[[], Position],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT)")
    position, readings = here(), list[TableName]()

    def read_while_it_is_altered(connection: Connection, name: TableName) -> TableDefinition | None:
        readings.append(name)
        if len(readings) == 1:
            server.sql(f"ALTER TABLE {database}.t ADD b INT FIRST")
        return read_table(connection, name)

    monkeypatch.setattr(server_tables, "read_table", read_while_it_is_altered)
    tables = ServerTables(ServerAddress.parse(server.url()))
    definition = tables.read_at(TableName(database, "t"), position)
    assert definition is not None
    assert [column.name for column in definition.schema.columns] == ["a"]
    assert len(readings) == 2


def test_lost_connection_while_reading_defaults_is_retried(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def connect_once_in_vain(address: ServerAddress, seconds: float) -> Connection:
        tries.append(address)
        connection = connect(address, seconds)
        if len(tries) == 1:
            connection.close()
            raise ConnectionLost("the server closed the connection")
        return connection

    monkeypatch.setattr(server_tables, "connect", connect_once_in_vain)
    defaults = ServerTables(ServerAddress.parse(server.url())).defaults()
    assert defaults.spelling.mariadb == (server.family == "mariadb")
    assert len(tries) == 2


@pytest.mark.parametrize(
    "statement", ["DROP TABLE {}.t", "ALTER TABLE {}.t DROP PRIMARY KEY, ADD PRIMARY KEY (b)"]
)
def test_table_that_changes_between_its_columns_and_its_key_is_read_again(
    server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b INT NOT NULL)")
    server.sql(f"CREATE TABLE {database}.without_key (c INT NOT NULL UNIQUE)")
    queries = list[str]()
    read = Connection.query

    def query(connection: Connection, sql: str, *arguments: Any) -> list[dict[str, Any]]:
        if "KEY_COLUMN_USAGE" in sql and not any("KEY_COLUMN_USAGE" in earlier for earlier in queries):
            server.sql(statement.format(database))
        queries.append(sql)
        return read(connection, sql, *arguments)

    monkeypatch.setattr(Connection, "query", query)
    with connect(ServerAddress.parse(server.url())) as connection:
        tables = read_tables(connection, TablePatterns([f"{database}.*"]))
    keys = {table.schema.table: table.schema.primary_key for table in tables}
    assert keys == {"without_key": ()} | ({} if "DROP TABLE" in statement else {"t": ("b",)})


def test_unique_key_in_place_of_a_primary_key_is_no_reason_to_read_all_tables_again(
    server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b INT NOT NULL)")
    server.sql(f"CREATE TABLE {database}.without_key (c INT NOT NULL UNIQUE)")
    answers = list[list[dict[str, Any]]]()
    read = Connection.query

    def query(connection: Connection, sql: str, *arguments: Any) -> list[dict[str, Any]]:
        rows = read(connection, sql, *arguments)
        if "COLUMN_TYPE" in sql:
            answers.append([row for row in rows if row["database"] == database])
        return rows

    monkeypatch.setattr(Connection, "query", query)
    with connect(ServerAddress.parse(server.url())) as connection:
        tables = read_tables(connection, TablePatterns([f"{database}.*"]))
    keys = {table.schema.table: table.schema.primary_key for table in tables}
    assert keys == {"t": ("a",), "without_key": ()}
    first, again = answers
    assert [row["name"] for row in first] == ["a", "b", "c"]
    assert [row["name"] for row in again] == ["c"]
