# SPDX-License-Identifier: Apache-2.0
"""Failed DDL statements that are logged although they failed, because a part of them took effect."""

import pymysql
import pytest

from penstock.binlog import load_schemas
from penstock.model import TableName, TablePatterns
from penstock.schema.statements.tokens import ServerSpelling
from penstock.source.reading import Batch, LoggedStatement, Selection, read_in_order
from penstock.source.source import ByteRange
from tests.support.binlog.cut_source import CutSource
from tests.support.binlog.events import first_event_end
from tests.support.suite.fixture_types import FreshDatabase, StartServer


def test_table_is_dropped_if_its_replacement_failed(
    start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server("mariadb", binlog_row_metadata="NO_LOG")
    database = fresh_database(server)
    name = TableName(database, "t")
    server.sql("FLUSH BINARY LOGS")
    file = server.binlog_files()[-1]
    with server.connect(database=database) as session, session.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id INT PRIMARY KEY, a VARCHAR(20), b DATE)")
        cursor.execute("INSERT INTO t VALUES (1, 'x', '2020-01-02')")
        with pytest.raises(pymysql.err.MySQLError, match="Multiple primary key"):
            cursor.execute("CREATE OR REPLACE TABLE t (id INT PRIMARY KEY, PRIMARY KEY (id))")
        cursor.execute("CREATE TABLE IF NOT EXISTS t (b DOUBLE, id INT)")
        cursor.execute("INSERT INTO t VALUES (2.5, 7)")
    server.sql("FLUSH BINARY LOGS")
    source = CutSource(file, ())
    whole = ByteRange(0, file.name, first_event_end(file.read_bytes()), None, True)
    selection = Selection(tables=TablePatterns([f"{database}.*"]))
    parts = list(read_in_order(source, whole, selection, load_schemas({}, ServerSpelling(mariadb=True))))
    rows = [row for part in parts if isinstance(part, Batch) for row in part.to_arrow().to_pylist()]
    values = [{name: value for name, value in row.items() if name[0] != "_"} for row in rows]
    assert values[1] == {"b": 2.5, "id": 7}
    statements = [part for part in parts if isinstance(part, LoggedStatement)]
    assert [statement.text for statement in statements if name in statement.emptied] == [
        f"DROP TABLE IF EXISTS `{database}`.`t`"
    ]
