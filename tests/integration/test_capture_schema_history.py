# SPDX-License-Identifier: Apache-2.0
"""Every statement runs on a real server and is applied to the history; the result must equal
information_schema.
"""

from pathlib import Path

import pymysql
import pytest

from penstock.model import Position, ServerAddress, TableName, TablePatterns
from penstock.mysql.connection import Connection, connect
from penstock.mysql.replica import DumpStart, open_stream
from penstock.schema.history import SchemaHistory
from penstock.schema.reader import read_table, read_tables
from penstock.schema.survey import survey
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server

STATEMENTS = [
    statement.strip()
    for statement in Path(__file__).with_name("ddl_statements.sql").read_text().split(";\n")
    if statement.strip()
]
# The largest share of comparisons that may be answered by reading the server instead of by following the
# statements.
REREAD_PART_MAX = 0.02


@pytest.mark.deep(keep=("mysql",))
def test_followed_statements_give_the_servers_definitions(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database, other = fresh_database(server), fresh_database(server)
    compared = reread = 0
    with connect(ServerAddress.parse(server.url("root"))) as connection:
        connection.query(f"USE {database}")
        patterns = TablePatterns([f"{database}.*", f"{other}.*"])
        history = survey(connection, patterns, reread=lambda name: read_table(connection, name))
        for number, text in enumerate(STATEMENTS):
            statement = text.replace("OTHER", other)
            try:
                with server.connect(database=database) as session, session.cursor() as cursor:
                    cursor.execute(statement)
            except pymysql.err.MySQLError:
                # MySQL and MariaDB accept different statements; a refused statement is not logged.
                continue
            position = Position(0, "bin.000001", 100 * number)
            history.apply(statement, database, position)
            for definition in read_tables(connection, patterns):
                name = definition.schema.name
                if history.needs_reread(name):
                    reread += 1
                    history.reread(name, position)
                known = history.schema(name.database, name.table)
                assert known is not None, f"{name} after {statement}"
                assert known.columns == definition.schema.columns, f"{name} after {statement}"
                assert known.primary_key == definition.schema.primary_key, f"{name} after {statement}"
                compared += 1
            _nothing_is_left(history, connection, database)
    assert compared > 1000
    assert reread < compared * REREAD_PART_MAX


@pytest.mark.deep(
    guard="tests/unit/test_followed_definitions.py::test_utf8_is_the_charset_that_the_server_means"
)
@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
@pytest.mark.parametrize("old_mode", ["", "UTF8_IS_UTF8MB3"])
def test_utf8_has_the_meaning_of_the_servers_old_mode(
    start_server: StartServer, flavor: str, old_mode: str
) -> None:
    server = start_server(flavor, **({"old_mode": old_mode} if flavor != "mysql" else {}))
    statements = (
        "CREATE DATABASE d CHARACTER SET utf8",
        "CREATE TABLE d.t (a TEXT, b CHAR(2) CHARSET latin1, c NCHAR(2))",
        "ALTER TABLE d.t CONVERT TO CHARACTER SET utf8, ADD e VARCHAR(9) CHARACTER SET latin1",
        "CREATE TABLE d.u (a VARCHAR(9), b ENUM('é') COLLATE utf8_bin) CHARSET=utf8",
    )
    with connect(ServerAddress.parse(server.url("root"))) as connection:
        patterns = TablePatterns(["d.*"])
        history = survey(connection, patterns)
        for number, statement in enumerate(statements):
            server.sql(statement)
            history.apply(statement, "", Position(0, "bin.000001", 100 * (number + 1)))
        definitions = read_tables(connection, patterns)
    assert len(definitions) == 2
    for definition in definitions:
        name = definition.schema.name
        assert not history.needs_reread(name)
        assert history.schema(name.database, name.table).columns == definition.schema.columns


def _nothing_is_left(history: SchemaHistory, connection: Connection, database: str) -> None:
    """Assert that the history has no table that the server lacks."""
    rows = connection.query(
        "SELECT TABLE_NAME AS name FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s", (database,)
    )
    there = {str(row["name"]) for row in rows}
    for table in history.to_json()["tables"]:
        name = TableName.parse(table["name"])
        if name.database == database and name.table not in there:
            assert history.schema(name.database, name.table) is None, f"{name} is gone"


COLUMN_CASES = {
    "virtual and stored": "(a INT PRIMARY KEY, v INT AS (a + 1) VIRTUAL, s INT AS (a + 2) STORED, z INT)",
    "indexed virtual": "(a INT PRIMARY KEY, v INT AS (a + 1) VIRTUAL, KEY (v))",
    "invisible": "(a INT PRIMARY KEY, i INT DEFAULT 3 INVISIBLE)",
    "functional index": "(a INT PRIMARY KEY, z INT, KEY ((a + z)))",
    "multi-valued index": "(a INT PRIMARY KEY, j JSON, KEY ((CAST(j AS UNSIGNED ARRAY))))",
    "system versioned": "(a INT PRIMARY KEY, z INT) WITH SYSTEM VERSIONING",
    "unique hash": "(a INT PRIMARY KEY, b BLOB UNIQUE)",
    "versioned unique hash": "(a INT PRIMARY KEY, b BLOB UNIQUE) WITH SYSTEM VERSIONING",
    "compressed": "(a INT PRIMARY KEY, b TEXT COMPRESSED)",
    "memory hash index": "(a INT, UNIQUE KEY (a) USING HASH) ENGINE = MEMORY",
}
TABLE_MAP = 19


@pytest.mark.parametrize("case", COLUMN_CASES)
def test_row_image_holds_the_columns_that_are_read(
    server: Server, fresh_database: FreshDatabase, case: str
) -> None:
    database = fresh_database(server)
    try:
        server.sql(f"CREATE TABLE {database}.t {COLUMN_CASES[case]}")
    except pymysql.err.MySQLError:
        # This server family lacks the statement, so there is no row image to compare with.
        return
    address = ServerAddress.parse(server.url())
    with connect(address) as connection:
        head = connection.head()
        definition = read_table(connection, TableName(database, "t"))
    server.sql(f"INSERT INTO {database}.t (a) VALUES (5)")
    assert definition is not None
    assert _table_map_columns(address, Position(0, head.file, head.offset)) == len(definition.schema.columns)


def test_generated_invisible_primary_key_is_a_column(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        f"SET sql_generate_invisible_primary_key = ON; CREATE TABLE {database}.t (a INT); SET @done = 1"
    )
    with connect(ServerAddress.parse(mysql_server.url())) as connection:
        definition = read_table(connection, TableName(database, "t"))
    assert definition is not None
    assert [column.name for column in definition.schema.columns] == ["my_row_id", "a"]
    assert definition.schema.primary_key == ("my_row_id",)


def _table_map_columns(address: ServerAddress, position: Position) -> int:
    """Return the number of columns of the first table map after a position."""
    with open_stream(address, DumpStart(position=position), bounded=True) as stream:
        log = b"".join(stream.event_chunks())
    at = 0
    while at < len(log):
        event = log[at : at + int.from_bytes(log[at + 9 : at + 13], "little")]
        if event[4] == TABLE_MAP:
            # Skip the header (19 bytes), table id (6) and flags (2), then two names, each between a length
            # and a zero byte.
            start = 27
            for _ in range(2):
                start += event[start] + 2
            return event[start]
        at += len(event)
    raise AssertionError("no table map after the position")


def test_names_that_differ_in_case_only_are_two_tables(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT); CREATE TABLE {database}.T (b INT)")
    with connect(ServerAddress.parse(server.url())) as connection:
        lower, upper = (read_table(connection, TableName(database, name)) for name in "tT")
        assert read_table(connection, TableName(database, "gone")) is None
    assert lower is not None
    assert upper is not None
    assert (lower.schema.columns[0].name, upper.schema.columns[0].name) == ("a", "b")
