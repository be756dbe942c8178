# SPDX-License-Identifier: Apache-2.0
"""Statements of sessions whose SQL mode changes the parsing of text."""

import pytest

from penstock.binlog import load_schemas
from penstock.model import TableName, TablePatterns
from penstock.schema.statements.tokens import ServerSpelling
from penstock.source.reading import Batch, LoggedStatement, Selection, read_in_order
from penstock.source.source import ByteRange
from tests.support.binlog.cut_source import CutSource
from tests.support.binlog.events import first_event_end
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import FLAVORS

# Without the SQL mode, a string or name of these statements would end later and hide a clause.
_STATEMENTS = (
    'CREATE TABLE "t" ("id" INT PRIMARY KEY, a INT, r REAL)',
    "ALTER TABLE t COMMENT 'c:\\', ADD b BIGINT -- '",
    'ALTER TABLE t CHANGE a "a\\" INT, ADD c SMALLINT -- "',
    "INSERT INTO t VALUES (1, 2, 0.5, 3, 4)",
    "CREATE TABLE u (id INT COMMENT '\\')",
    "/* '\\' */ RENAME TABLE u TO \"v\"",
)
_MODES = "REAL_AS_FLOAT,ANSI_QUOTES,NO_BACKSLASH_ESCAPES"


@pytest.mark.parametrize("flavor", FLAVORS)
def test_statements_are_parsed_under_the_sql_mode_of_their_session(
    flavor: str, start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server(flavor, binlog_row_metadata="MINIMAL" if flavor == "mysql" else "NO_LOG")
    database = fresh_database(server)
    server.sql("FLUSH BINARY LOGS")
    file = server.binlog_files()[-1]
    with server.connect(database=database) as session, session.cursor() as cursor:
        cursor.execute(f"SET SESSION sql_mode = '{_MODES}'")
        for statement in _STATEMENTS:
            cursor.execute(statement)
    server.sql("FLUSH BINARY LOGS")
    whole = ByteRange(0, file.name, first_event_end(file.read_bytes()), None, True)
    selection = Selection(tables=TablePatterns([f"{database}.*"]))
    schemas = load_schemas({}, ServerSpelling(mariadb=server.family == "mariadb"))
    parts = list(read_in_order(CutSource(file, ()), whole, selection, schemas))
    rows = [row for part in parts if isinstance(part, Batch) for row in part.to_arrow().to_pylist()]
    values = [{name: value for name, value in row.items() if name[0] != "_"} for row in rows]
    assert values == [{"id": 1, "a\\": 2, "r": 0.5, "b": 3, "c": 4}]
    last = [part for part in parts if isinstance(part, LoggedStatement)][-1]
    assert last.tables == {TableName(database, "u"), TableName(database, "v")}
    assert last.sql_mode == set(_MODES.split(","))
