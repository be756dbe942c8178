# SPDX-License-Identifier: Apache-2.0
"""Messages of transactions, statements and partial rows, on logs of real servers."""

import json
from contextlib import closing
from typing import Any

import pyarrow
import pytest

from penstock._native import Decoder
from penstock.errors import OptionInvalid
from tests.integration.test_messages_canal import (
    BEGIN,
    END,
    HEARTBEAT,
    INSERT,
    STATEMENT,
    UPDATE,
    Entry,
    column_texts,
    entries,
    event_of,
    updated,
)
from tests.integration.test_messages_json import messages_of, read, rows_of
from tests.support.binlog.decoding import run_logged
from tests.support.binlog.events import MAGIC, first_event_end
from tests.support.binlog.type_corpus import definition
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

QUERY = 7
DEFINITIONS = [
    ("CREATE TABLE a (id INT PRIMARY KEY)", "CREATE", "a"),
    ("ALTER TABLE a ADD COLUMN b INT", "ALTER", "a"),
    ("CREATE INDEX i ON a (b)", "CINDEX", "a"),
    ("DROP INDEX i ON a", "DINDEX", "a"),
    ("ALTER TABLE a ADD UNIQUE KEY u (b), ADD COLUMN d INT", "CINDEX", "a"),
    ("ALTER TABLE a DROP KEY u", "DINDEX", "a"),
    ("TRUNCATE TABLE a", "TRUNCATE", "a"),
    # A renamed table is reported by its new name.
    ("RENAME TABLE a TO b", "RENAME", "b"),
    ("ALTER TABLE b RENAME TO c", "RENAME", "c"),
    ("CREATE VIEW v AS SELECT 1", "QUERY", ""),
    ("DROP VIEW v", "QUERY", ""),
    ("DROP TABLE c", "ERASE", "c"),
]


def test_definitions_are_named_by_the_objects_they_define(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    file = run_logged(server, *(text for text, _, _ in DEFINITIONS), database=database)
    messages = entries(file, f"{database}.*", None)
    # A view is not a table, so a filter on tables excludes the statements that define the view.
    wanted = [definition for definition in DEFINITIONS if "VIEW" not in definition[0]]
    assert [(entry.event, entry.header.tableName) for entry in messages] == [
        definition[1:] for definition in wanted
    ]
    everything = [entry for entry in entries(file) if entry.header.schemaName == database]
    assert [(entry.event, entry.header.tableName) for entry in everything] == [
        definition[1:] for definition in DEFINITIONS
    ]
    for entry in messages:
        assert entry.header.schemaName == entry.store.ddlSchemaName == database
        assert entry.store.isDdl
        assert entry.message.kind == STATEMENT
        assert entry.message.slot == -1
        # The statement commits by itself, so its message has an end offset.
        assert entry.message.end_offset == entry.header.logfileOffset + entry.header.eventLength
    assert [entry.store.sql for entry in messages[:2]] == [text for text, _, _ in wanted[:2]]

    flat = [json.loads(message.value) for message in read(file, "canal_flat", f"{database}.*")]
    assert [(message["type"], message["table"]) for message in flat] == [
        definition[1:] for definition in wanted
    ]
    assert all(message["isDdl"] and message["data"] is None and message["old"] is None for message in flat)
    events = [event_of(message.value) for message in read(file, "ptubes", f"{database}.*")]
    # Ptubes reports the statement under the first table name in it.
    before = {"RENAME TABLE a TO b": "a", "ALTER TABLE b RENAME TO c": "b"}
    assert [(event.isDdl, event.eventType, event.ddlSchemaName) for event in events] == [
        (True, 7, f"{database}.{before.get(text, table)}") for text, _, table in wanted
    ]
    assert events[0].sql == f"{{dbTableName={database}.a, sql={wanted[0][0]}}}"


def test_truncate_is_an_envelope_without_rows_for_readers_of_debezium(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    statements = ["CREATE TABLE a (id INT PRIMARY KEY)", "INSERT INTO a VALUES (1)", "TRUNCATE TABLE a"]
    file = run_logged(server, *statements, database=database)
    messages = [message for message in read(file, "debezium", f"{database}.*") if message.value]
    inserted, emptied = (json.loads(message.value) for message in messages[1:])
    assert list(emptied) == list(inserted)
    assert list(emptied["source"]) == list(inserted["source"])
    assert (emptied["op"], emptied["before"], emptied["after"]) == ("t", None, None)
    assert (emptied["source"]["db"], emptied["source"]["table"]) == (database, "a")
    # Every shard gets the statement, which commits by itself.
    assert (messages[-1].kind, messages[-1].slot, messages[-1].rows) == (STATEMENT, -1, 0)
    assert messages[-1].end_offset is not None
    # A message with a schema needs the table's columns, which the log does not have.
    *_, with_schema = read(file, "debezium_schema", f"{database}.*")
    assert json.loads(with_schema.value)["payload"]["ddl"] == "TRUNCATE TABLE a"


def test_each_table_of_a_statement_has_a_message(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    renamed, dropped = f"RENAME TABLE a TO {database}.c, b TO a", "DROP TABLE a, c"
    file = run_logged(
        mysql_server,
        "CREATE TABLE a (id INT)",
        "CREATE TABLE b (id INT)",
        renamed,
        dropped,
        database=database,
    )
    told_by = {
        dialect: [json.loads(message.value) for message in read(file, dialect, f"{database}.*")][2:]
        for dialect in ("maxwell", "debezium")
    }
    assert [(message["type"], message["database"], message["table"]) for message in told_by["maxwell"]] == [
        ("table-alter", database, "a"),
        ("table-alter", database, "b"),
        ("table-drop", database, "a"),
        ("table-drop", database, "c"),
    ]
    assert [
        (message["databaseName"], message["source"]["table"], message["ddl"])
        for message in told_by["debezium"]
    ] == [
        (database, "c", f"RENAME TABLE `{database}`.`a` TO `{database}`.`c`"),
        (database, "a", f"RENAME TABLE `{database}`.`b` TO `{database}`.`a`"),
        (database, "a", f"DROP TABLE `{database}`.`a`"),
        (database, "c", f"DROP TABLE `{database}`.`c`"),
    ]


def test_only_selected_tables_are_reported(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    for table in ("t", "other"):
        mysql_server.sql(f"CREATE TABLE {database}.{table} (id INT PRIMARY KEY, a INT, b INT)")
    schemas = definition(mysql_server, f"{database}.t")
    file = run_logged(
        mysql_server,
        "INSERT INTO other VALUES (1, 1, 1)",
        "ALTER TABLE other ADD COLUMN c INT",
        "BEGIN",
        "INSERT INTO other (id) VALUES (2)",
        "INSERT INTO t VALUES (7, 8, 9)",
        "COMMIT",
        "DELETE FROM other",
        "CREATE USER somebody@localhost IDENTIFIED BY 'secret'",
        "DROP USER somebody@localhost",
        database=database,
    )
    messages = entries(file, f"{database}.t", schemas)
    assert [entry.message.kind for entry in messages] == [4, INSERT, END]


def test_unwanted_columns_are_absent(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, a INT, b INT)")
    file = run_logged(mysql_server, "INSERT INTO t VALUES (7, 8, 9)", "UPDATE t SET a = 1", database=database)
    answer = {"columns": [("id", "int", None, False), ("a", "int", None, True), ("b", "int", None, True)]}
    messages = decoded(file.read_bytes(), {**answer, "wanted": ["b"], "primary_key": ["id"]}, database)
    rows = [Entry(message) for message in rows_of(messages)]
    assert column_texts(rows[0].store.rowDatas[0].afterColumns) == {"b": "9"}
    assert [column.index for column in rows[0].store.rowDatas[0].afterColumns] == [2]
    assert updated(rows[1].store.rowDatas[0].afterColumns) == set()
    # The key still determines the slot.
    assert [entry.message.slot for entry in rows] == [968, 968]


def decoded(
    data: bytes, answer: dict[str, Any], database: str, dialect: str = "canal", **options: Any
) -> list[Any]:
    """Decode a file with one schema for all tables of a database."""
    decoder = Decoder(
        instance="test",
        file="mysql-bin.000001",
        emit="messages",
        dialect=dialect,
        statements=False,
        **options,
    )
    view, messages = memoryview(data), list[Any]()
    while decoder.state != "done":
        view = view[decoder.feed(view) :]
        if decoder.state == "table":
            matches = decoder.table_request().database == database
            decoder.answer_table(**answer) if matches else decoder.answer_table(None)
        elif decoder.state == "batch":
            messages += messages_of(pyarrow.record_batch(decoder.take_batch()))
        else:
            decoder.finish(len(view))
            while decoder.state == "batch":
                messages += messages_of(pyarrow.record_batch(decoder.take_batch()))
            break
    return messages


def test_create_table_as_select_is_one_transaction(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    file = run_logged(
        server,
        "CREATE TABLE t (PRIMARY KEY (id)) AS SELECT 1 AS id UNION SELECT 2",
        "DROP TABLE t",
        database=database,
    )
    messages = [entry for entry in entries(file, f"{database}.*") if entry.header.eventType != QUERY]
    # MySQL logs CREATE TABLE ... SELECT as one transaction; MariaDB logs the CREATE TABLE first and the rows
    # in a transaction after it.
    order = [BEGIN, STATEMENT, INSERT, END] if server.flavor == "mysql" else [STATEMENT, BEGIN, INSERT, END]
    kinds = [entry.message.kind for entry in messages]
    assert kinds in ([*order, STATEMENT], [BEGIN, STATEMENT, INSERT, END, STATEMENT])
    ends = [entry.message.end_offset is not None for entry in messages]
    assert ends == [(kinds[0] == STATEMENT and number == 0) or number > 2 for number in range(5)]


@pytest.mark.parametrize("dialect", ["canal", "canal_flat", "ptubes"])
def test_reconnect_repeats_no_message(
    mysql_server: Server, fresh_database: FreshDatabase, dialect: str
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY)")
    statements = [f"INSERT INTO t VALUES ({number}), ({number + 1})" for number in range(0, 10, 2)]
    file = run_logged(mysql_server, "BEGIN", *statements, "COMMIT", database=database)
    answer: dict[str, Any] = {"columns": [("id", "int", None, False)], "primary_key": ["id"]}
    whole = decoded(file.read_bytes(), answer, database, dialect)
    rows = [number for number, message in enumerate(whole) if message.kind == INSERT]
    for resumed in (2, 4, 8):
        handed_out = rows[resumed if dialect == "ptubes" else resumed // 2]
        rest = decoded(file.read_bytes(), answer, database, dialect, resume_rows=resumed)
        assert rest == whole[handed_out:]


# --- Parts of rows ---------------------------------------------------------------------------


def test_minimal_images_hold_only_their_columns(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, a INT, b VARCHAR(9))")
    schemas = definition(server, f"{database}.t")
    file = run_logged(
        server,
        "SET binlog_row_image = MINIMAL",
        "INSERT INTO t (id, a) VALUES (1, 2)",
        "UPDATE t SET b = 'x' WHERE id = 1",
        "DELETE FROM t",
        database=database,
    )
    inserted, changed, deleted = (
        entry.store.rowDatas[0] for entry in entries(file, f"{database}.t", schemas) if entry.event_rows
    )
    assert column_texts(inserted.afterColumns) == {"id": "1", "a": "2"}
    assert column_texts(changed.beforeColumns) == column_texts(deleted.beforeColumns) == {"id": "1"}
    assert column_texts(changed.afterColumns) == {"b": "x"}
    assert [column.index for column in changed.afterColumns] == [2]
    assert updated(changed.afterColumns) == {"b"}
    flat = [json.loads(row.value) for row in rows_of(read(file, "canal_flat", f"{database}.t", schemas))]
    assert flat[1]["data"] == [{"b": "x"}]
    assert flat[1]["old"] == [{}]
    # The key is in the before image and determines the slot.
    assert {message.slot for message in rows_of(read(file, "ptubes", f"{database}.t", schemas))} == {962}


DOCUMENT = r'{"d": 10000000.0, "e": 1.5e-5, "q": "a\"\\\n\u0001\u0085é", "s": [1, -2, true, null]}'
SHOWN = r'{"d": 1.0E7, "e": 1.5E-5, "q": "a\"\\\n\u0001\u0085é", "s": [1, -2, true, null]}'
MOMENTS = (
    "JSON_OBJECT('a', DATE'2024-02-29', 'b', TIMESTAMP'2024-02-29 01:02:03.5', 'c', TIME'-100:00:01.25',"
    " 'd', CAST(1.50 AS DECIMAL(5,2)))"
)


def test_documents_look_as_in_canal_and_diffs_are_applied(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, j JSON, k JSON)")
    schemas = definition(mysql_server, f"{database}.t")
    with closing(mysql_server.connect()) as connection:
        literal = connection.escape(DOCUMENT)
    file = run_logged(
        mysql_server,
        "SET binlog_row_value_options = PARTIAL_JSON",
        f"INSERT INTO t VALUES (1, {literal}, {MOMENTS})",
        "UPDATE t SET j = JSON_REPLACE(j, '$.s[1]', 2.5), k = JSON_REMOVE(k, '$.a')",
        database=database,
    )
    inserted, changed = (
        entry.store.rowDatas[0] for entry in entries(file, f"{database}.t", schemas) if entry.event_rows
    )
    moments = (
        '{"a": "2024-02-29 00:00:00.000000", "b": "2024-02-29 01:02:03.500000", "c": "-100:00:01.250000",'
        ' "d": 1.50}'
    )
    assert column_texts(inserted.afterColumns) == {"id": "1", "j": SHOWN, "k": moments}
    assert column_texts(changed.beforeColumns) == column_texts(inserted.afterColumns)
    assert column_texts(changed.afterColumns) == {
        "id": "1",
        "j": SHOWN.replace("-2", "2.5"),
        "k": "{" + moments.partition(", ")[2],
    }
    assert updated(changed.afterColumns) == {"j", "k"}


def test_compressed_transaction_is_reported_like_any_other(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY)")
    schemas = definition(mysql_server, f"{database}.t")
    file = run_logged(
        mysql_server,
        "SET binlog_transaction_compression = ON",
        "INSERT INTO t VALUES (1), (2)",
        database=database,
    )
    messages = entries(file, f"{database}.t", schemas)
    assert [entry.message.kind for entry in messages] == [4, INSERT, END]
    # All entries of a payload have the payload's position.
    assert len({(entry.header.logfileOffset, entry.header.eventLength) for entry in messages}) == 1
    assert (
        messages[-1].message.end_offset == messages[0].header.logfileOffset + messages[0].header.eventLength
    )


# --- XA --------------------------------------------------------------------------------------


def test_prepared_transaction_is_reported_when_it_commits(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY)")
    schemas = definition(server, f"{database}.t")
    statements = [
        text
        for name, outcome in (("a", "COMMIT"), ("b", "ROLLBACK"))
        for text in (
            f"XA START '{name}'",
            f"INSERT INTO t VALUES ({ord(name)})",
            f"XA END '{name}'",
            f"XA PREPARE '{name}'",
            f"XA {outcome} '{name}'",
        )
    ]
    file = run_logged(server, *statements, database=database)
    # MariaDB logs the text of statements together with their rows.
    messages = [entry for entry in entries(file, f"{database}.t", schemas) if entry.header.eventType != QUERY]
    assert [entry.message.kind for entry in messages] == [4, INSERT, END, STATEMENT]
    begin, row, end, known = messages
    xid = f"X'{b'a'.hex()}',X'',1"
    for entry, kind in ((begin, "XA START"), (end, "XA END"), (known, "XA COMMIT")):
        assert [(pair.key, pair.value) for pair in entry.store.props] == [
            ("XA_TYPE", kind),
            ("XA_XID", f" {xid}"),
        ]
    assert end.store.transactionId == "0"
    assert known.event == "XACOMMIT"
    assert known.store.sql == f"XA COMMIT {xid}"
    assert [entry.message.end_offset is None for entry in messages] == [True, True, True, False]
    assert {entry.header.logfileOffset for entry in messages} == {row.header.logfileOffset}
    for dialect in ("ptubes", "debezium", "maxwell", "canal_flat"):
        kinds = [message.kind for message in read(file, dialect, f"{database}.t", schemas)]
        assert kinds.count(INSERT) == 1, dialect


# --- Ptubes ----------------------------------------------------------------------------------


def test_events_have_a_position_and_heartbeats_are_distinguished(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, a INT)")
    mysql_server.sql("CREATE DATABASE IF NOT EXISTS ptubes_heartbeat")
    mysql_server.sql(
        "CREATE TABLE IF NOT EXISTS ptubes_heartbeat.heartbeat (id INT PRIMARY KEY, utime BIGINT)"
    )
    mysql_server.sql("REPLACE INTO ptubes_heartbeat.heartbeat VALUES (1, 1)")
    file = run_logged(
        mysql_server,
        "INSERT INTO t VALUES (1, 1), (2, 2)",
        "UPDATE ptubes_heartbeat.heartbeat SET utime = utime + 1",
        "UPDATE t SET a = 9 WHERE id = 1",
        database=database,
    )
    mysql_server.sql("DROP DATABASE ptubes_heartbeat")
    messages = read(file, "ptubes", f"{database}.t,ptubes_heartbeat.heartbeat", None)
    kinds = [message.kind for message in messages]
    assert kinds == [INSERT, INSERT, END, HEARTBEAT, END, UPDATE, END]
    # If a transaction has only heartbeats, its end is not sent.
    assert messages[4].value == b""
    assert messages[4].end_offset is not None
    events = [event_of(message.value) for message in messages if message.value]
    assert [event.eventType for event in events] == [1, 1, 16, 17, 2, 16]
    places = [event.header.checkpoint for event in events]
    assert [position.eventIndex for position in places] == [0, 1, 2, 0, 0, 1]
    assert places[0].binlogOffset == places[2].binlogOffset < places[3].binlogOffset
    assert {position.binlogFile for position in places} == {int(file.name.rpartition(".")[2])}
    assert [position.transactionId for position in places][0:3] == [places[0].transactionId] * 3
    assert places[0].uuid == mysql_server.sql("SELECT @@server_uuid")[0][0]
    head = events[0].header
    assert (head.encode, head.tableName, head.partitionKey, head.primaryKey) == (
        "PROTOCOL_BUFFER",
        f"{database}.t",
        "id",
        "id",
    )
    assert events[3].rowData.afterColumns["utime"].value == "2"
    assert not events[3].rowData.beforeColumns
    assert {name: column.value for name, column in events[4].rowData.beforeColumns.items()} == {
        "id": "1",
        "a": "1",
    }
    assert {name: column.value for name, column in events[4].rowData.afterColumns.items()} == {
        "id": "1",
        "a": "9",
    }


# --- The stream ------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["canal", "canal_flat", "ptubes"])
def test_messages_do_not_depend_on_how_the_log_is_cut_and_closed(
    mysql_server: Server, fresh_database: FreshDatabase, dialect: str
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, a VARCHAR(200))")
    rows = ", ".join(f"({number}, REPEAT('x', {number}))" for number in range(100))
    file = run_logged(
        mysql_server,
        f"INSERT INTO t VALUES {rows}",
        "UPDATE t SET a = CONCAT(a, 'y')",
        "DELETE FROM t WHERE id > 50",
        database=database,
    )
    answer: dict[str, Any] = {"columns": [("id", "int", None, False), ("a", "varchar(200)", "utf8mb4", True)]}
    data = file.read_bytes()
    whole = decoded(data, answer, database, dialect)
    assert len(whole) > 5
    assert decoded(data, answer, database, dialect, batch_rows_max=1) == whole
    assert decoded(data, answer, database, dialect, held_bytes_max=1000) == whole

    decoder = Decoder(
        instance="test", file="mysql-bin.000001", emit="messages", dialect=dialect, statements=False
    )
    messages, taken = list[Any](), 0
    for end in range(len(MAGIC), len(data) + 997, 997):
        view = memoryview(data)[taken : min(end, len(data))]
        while decoder.state != "done":
            used = decoder.feed(view)
            view, taken = view[used:], taken + used
            if decoder.state == "table":
                matches = decoder.table_request().database == database
                decoder.answer_table(**answer) if matches else decoder.answer_table(None)
                continue
            # Batches are closed at arbitrary offsets, even inside a transaction; only whole transactions are
            # returned.
            decoder.close_batches()
            while decoder.state == "batch":
                batch = messages_of(pyarrow.record_batch(decoder.take_batch()))
                messages += batch
                assert messages[-1].end_offset is not None
            break
    assert messages == whole
    # The first event alone produces no message.
    assert first_event_end(data) < taken


def test_unknown_dialect_is_refused() -> None:
    for dialect in (None, "esperanto"):
        with pytest.raises(OptionInvalid):
            Decoder(instance="test", file="mysql-bin.000001", emit="messages", dialect=dialect)
