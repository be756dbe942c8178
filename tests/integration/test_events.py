# SPDX-License-Identifier: Apache-2.0
"""Every kind of event that servers write, decoded from the logs of real servers."""

import json
import random
import re
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from penstock.binlog import read_binlog
from penstock.errors import FileTruncated, IncidentLogged, StreamError
from penstock.source.source import SourceOptions, open_source
from tests.support.binlog.decoding import (
    decode,
    decode_file,
    decode_in_pieces,
    replay,
    run_logged,
    select,
)
from tests.support.binlog.events import (
    ANONYMOUS_GTID,
    DELETE_ROWS,
    GTID,
    INCIDENT,
    MAGIC,
    MARIADB_GTID,
    MARIADB_QUERY_COMPRESSED,
    MARIADB_ROWS_COMPRESSED,
    PARTIAL_UPDATE_ROWS,
    PREVIOUS_GTIDS,
    QUERY,
    TABLE_MAP,
    TAGGED_GTID,
    TRANSACTION_PAYLOAD,
    WRITE_ROWS,
    Event,
    assemble,
    codes,
    events,
)
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import FLAVORS, Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


# --- Compression ----------------------------------------------------------------------------


def test_compressed_transaction_equals_a_plain_one(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    statements = (
        "INSERT INTO t VALUES (1, 'one'), (2, NULL), (3, REPEAT('three', 1000))",
        "UPDATE t SET text = CONCAT(COALESCE(text, ''), '+') WHERE id < 3",
        "DELETE FROM t WHERE id = 2",
        "TRUNCATE t",
    )
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, text TEXT)", database=database)
    plain = run_logged(mysql_server, *statements, database=database)
    packed = run_logged(
        mysql_server, "SET SESSION binlog_transaction_compression = ON", *statements, database=database
    )
    assert TRANSACTION_PAYLOAD not in codes(plain.read_bytes())
    assert codes(packed.read_bytes()).count(TRANSACTION_PAYLOAD) == 3
    assert decode_file(packed).values(f"{database}.t") == decode_file(plain).values(f"{database}.t")
    counted = decode_file(packed).counters
    assert counted["transactions"] == 4
    assert counted["changes"] == decode_file(plain).counters["changes"] == 6


def test_payload_of_many_chunks_is_read_to_its_end(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    """Events of 3 MB cross the boundaries of the chunks in which a payload is decompressed."""
    database = fresh_database(mysql_server)
    path = run_logged(
        mysql_server,
        "SET SESSION binlog_transaction_compression = ON",
        "CREATE TABLE t (id INT PRIMARY KEY, text LONGTEXT)",
        "BEGIN",
        *(f"INSERT INTO t VALUES ({number}, REPEAT('{number}', 3000000))" for number in range(1, 8)),
        "INSERT INTO t VALUES (8, 'small'), (9, 'small')",
        "COMMIT",
        database=database,
    )
    data = path.read_bytes()
    assert len(data) < 1 << 20
    decoded = decode(data, path.name, batch_bytes_max=1 << 20, held_bytes_max=1 << 22)
    assert decoded.values(f"{database}.t") == [
        ("insert", *row) for row in select(mysql_server, f"{database}.t")
    ]
    payload = next(event for event in events(data) if event.code == TRANSACTION_PAYLOAD)
    places = {(row["_metadata"]["offset"], row["_commit_version"]) for row in decoded.rows()}
    assert {offset for offset, _ in places} == {payload.offset}
    assert [row["_metadata"]["row"] for row in decoded.rows()] == list(range(9))
    assert len(places) == 1


def test_long_payload_is_streamed_and_verified_before_its_commit(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    # The random bytes are the same in every run and cannot be compressed.
    chance = random.Random(1)
    values = [", ".join(f"('{chance.randbytes(10_000).hex()}')" for _ in range(3)) for _ in range(20)]
    path = run_logged(
        mysql_server,
        "SET SESSION binlog_transaction_compression = ON",
        "CREATE TABLE t (id INT AUTO_INCREMENT PRIMARY KEY, text LONGTEXT)",
        "BEGIN",
        *(f"INSERT INTO t (text) VALUES {three}" for three in values),
        "COMMIT",
        "INSERT INTO t (text) VALUES ('after')",
        database=database,
    )
    data, table = path.read_bytes(), f"{database}.t"
    payload = max(events(data), key=lambda event: event.size)
    assert payload.code == TRANSACTION_PAYLOAD
    assert payload.size > 500_000
    wanted = [("insert", *row) for row in select(mysql_server, table)]
    for buffer_bytes in (1000, 9973, 65_536, 1 << 19, 1 << 21):
        decoded = decode_in_pieces(data, path.name, buffer_bytes)
        assert decoded.values(table) == wanted
        assert decoded.counters["bytes"] == len(data) - len(MAGIC)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[chance.randrange(payload.offset + 100, payload.offset + payload.size)] ^= (
            1 << chance.randrange(8)
        )
        # The damage shows at the checksum at the latest, or earlier in the decoded content.
        with pytest.raises(StreamError) as raised:
            decode_in_pieces(bytes(damaged), path.name, 65_536)
        assert raised.value.position == f"{path.name}:{payload.offset}"
    for end in range(payload.offset + 60, payload.offset + payload.size, 50_021):
        with pytest.raises(FileTruncated):
            decode_in_pieces(data[:end], path.name, 65_536)


def test_mariadb_compressed_events_equal_plain_ones(
    start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server("mariadb")
    database = fresh_database(server)
    statements = (
        "CREATE TABLE t (id INT PRIMARY KEY, text MEDIUMTEXT) COMMENT '" + "long " * 100 + "'",
        "INSERT INTO t VALUES (1, REPEAT('one', 300)), (2, NULL), (3, REPEAT('three', 100000))",
        "UPDATE t SET text = CONCAT(REPEAT('z', 400), id)",
        "DELETE FROM t",
        "DROP TABLE t",
    )
    plain = run_logged(server, *statements, database=database)
    server.sql("SET GLOBAL log_bin_compress = ON, GLOBAL log_bin_compress_min_len = 10")
    packed = run_logged(server, *statements, database=database)
    written = codes(packed.read_bytes())
    assert MARIADB_QUERY_COMPRESSED in written
    assert len(set(written).intersection(MARIADB_ROWS_COMPRESSED)) == 3
    assert not set(codes(plain.read_bytes())).intersection(MARIADB_ROWS_COMPRESSED)
    table = f"{database}.t"
    assert decode_file(packed).values(table) == decode_file(plain).values(table)
    assert [statement.text for statement in decode_file(packed).statements] == [
        statement.text for statement in decode_file(plain).statements
    ]


# --- GTIDs ----------------------------------------------------------------------------------


def test_every_row_carries_the_gtid_of_its_transaction(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    ((uuid,),) = mysql_server.sql("SELECT @@server_uuid")
    before = mysql_server.sql("SELECT @@global.gtid_executed")[0][0].replace("\n", "")
    path = run_logged(
        mysql_server,
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "SET gtid_next = 'AUTOMATIC:blue'",
        "INSERT INTO t VALUES (1)",
        "INSERT INTO t VALUES (2)",
        "SET gtid_next = 'AUTOMATIC:a_tag_of_thirty_two_characters_'",
        "INSERT INTO t VALUES (3)",
        "SET gtid_next = 'AUTOMATIC'",
        "INSERT INTO t VALUES (4)",
        "SET gtid_next = '11111111-2222-3333-4444-555555555555:77'",
        "INSERT INTO t VALUES (5)",
        "SET gtid_next = '11111111-2222-3333-4444-555555555555:red:9223372036854775806'",
        "INSERT INTO t VALUES (6)",
        "SET gtid_next = 'AUTOMATIC'",
        database=database,
    )
    assert codes(path.read_bytes()).count(TAGGED_GTID) == 4
    decoded = decode_file(path)
    actual_rows = [row["_metadata"]["gtid"] for row in decoded.rows()]
    assert actual_rows[0] == f"{uuid}:blue:1"
    assert actual_rows[1] == f"{uuid}:blue:2"
    assert actual_rows[2] == f"{uuid}:a_tag_of_thirty_two_characters_:1"
    assert re.fullmatch(re.escape(uuid) + r":\d+", actual_rows[3])
    assert actual_rows[4] == "11111111-2222-3333-4444-555555555555:77"
    assert actual_rows[5] == "11111111-2222-3333-4444-555555555555:red:9223372036854775806"
    after = mysql_server.sql("SELECT @@global.gtid_executed")[0][0].replace("\n", "")
    # The server has executed exactly the transactions before and in the file.
    assert decoded.gtid_set == after != before


def test_previous_gtids_event_is_read_with_tags(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY)", database=database)
    path = run_logged(
        mysql_server,
        "SET gtid_next = 'AUTOMATIC:green'",
        "INSERT INTO t VALUES (1)",
        "SET gtid_next = '99999999-2222-3333-4444-555555555555:5'",
        "INSERT INTO t VALUES (2)",
        "SET gtid_next = '99999999-2222-3333-4444-555555555555:7'",
        "INSERT INTO t VALUES (3)",
        "SET gtid_next = 'AUTOMATIC'",
        database=database,
    )
    following = mysql_server.binlog_files()[-1]
    assert codes(following.read_bytes())[:2] == [15, PREVIOUS_GTIDS]
    assert decode_file(following, drop_open=True).gtid_set == decode_file(path).gtid_set
    assert ":green:1" in decode_file(following, drop_open=True).gtid_set


def test_anonymous_transactions_have_no_gtid(start_server: StartServer) -> None:
    server = start_server(gtid_mode="OFF", enforce_gtid_consistency="OFF")
    server.sql("CREATE DATABASE d")
    path = run_logged(
        server, "CREATE TABLE d.t (id INT PRIMARY KEY)", "INSERT INTO d.t VALUES (1), (2)", "DROP TABLE d.t"
    )
    assert ANONYMOUS_GTID in codes(path.read_bytes())
    assert GTID not in codes(path.read_bytes())
    decoded = decode_file(path)
    assert [row["_metadata"]["gtid"] for row in decoded.rows()] == [None, None]
    assert len(decoded.statements) == 2
    assert decoded.counters["transactions"] == 3


@pytest.mark.parametrize("flavor", ["mariadb", "mariadb11"])
def test_mariadb_gtids_name_domain_server_and_number(
    flavor: str, server_of: Any, fresh_database: FreshDatabase
) -> None:
    server = server_of(flavor)
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
        "SET SESSION gtid_domain_id = 4294967295",
        "INSERT INTO t VALUES (2)",
        "SET SESSION gtid_domain_id = 0, SESSION server_id = 4000000000",
        "INSERT INTO t VALUES (3)",
        database=database,
    )
    decoded = decode_file(path)
    gtids = [row["_metadata"]["gtid"] for row in decoded.rows()]
    assert re.fullmatch(rf"0-{server.port}-\d+", gtids[0])
    assert re.fullmatch(rf"4294967295-{server.port}-\d+", gtids[1])
    assert re.fullmatch(r"0-4000000000-\d+", gtids[2])
    assert [row["_metadata"]["server_id"] for row in decoded.rows()] == [server.port, server.port, 4000000000]
    assert MARIADB_GTID in codes(path.read_bytes())
    ((state,),) = server.sql("SELECT @@global.gtid_binlog_state")
    assert sorted(decoded.gtid_set.split(",")) == sorted(state.split(","))


def test_rows_name_the_connection_that_wrote_them(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql("CREATE TABLE t (id BIGINT PRIMARY KEY)", database=database)
    path = run_logged(server, "INSERT INTO t VALUES (CONNECTION_ID())", database=database)
    (row,) = decode_file(path).rows()
    # MariaDB 10.11 does not log the thread id in row transactions.
    assert row["_metadata"]["thread_id"] == (None if server.flavor == "mariadb" else row["id"])


# --- Transactions ---------------------------------------------------------------------------


def test_only_committed_changes_are_returned(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(20))",
        "BEGIN",
        "INSERT INTO t VALUES (1, 'kept')",
        "SAVEPOINT one",
        "INSERT INTO t VALUES (2, 'undone')",
        "ROLLBACK TO one",
        "INSERT INTO t VALUES (3, 'kept')",
        "SAVEPOINT two",
        "UPDATE t SET text = 'kept too'",
        "RELEASE SAVEPOINT two",
        "COMMIT",
        "BEGIN",
        "INSERT INTO t VALUES (4, 'undone')",
        "ROLLBACK",
        "DELETE FROM t WHERE id = 1",
        database=database,
    )
    rows = decode_file(path).rows(f"{database}.t")
    assert replay(rows, ["id"]) == select(server, f"{database}.t") == [(3, "kept too")]
    assert "undone" not in {row["text"] for row in rows}
    assert [row["_metadata"]["row"] for row in rows] == [0, 1, 2, 2, 3, 3, 0]


def test_xa_transactions_are_returned_once_when_they_commit(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "XA START 'two', 'branch', 7",
        "INSERT INTO t VALUES (1)",
        "XA END 'two', 'branch', 7",
        "XA PREPARE 'two', 'branch', 7",
        "XA COMMIT 'two', 'branch', 7",
        "XA START 'one'",
        "INSERT INTO t VALUES (2)",
        "XA END 'one'",
        "XA COMMIT 'one' ONE PHASE",
        "XA START 'never'",
        "INSERT INTO t VALUES (3)",
        "XA END 'never'",
        "XA ROLLBACK 'never'",
        "INSERT INTO t VALUES (4)",
        database=database,
    )
    rows = decode_file(path).rows()
    assert replay(rows, ["id"]) == select(server, f"{database}.t") == [(1,), (2,), (4,)]


def test_prepared_xa_transactions_are_returned_in_commit_order(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, note VARCHAR(200))")
    server.sql("FLUSH BINARY LOGS")
    path = server.binlog_files()[-1]
    with ExitStack() as stack:
        sessions = [stack.enter_context(server.connect(database=database)).cursor() for _ in range(3)]
        for id, session in enumerate(sessions, 1):
            if id > 1 and server.family == "mysql":
                session.execute("SET SESSION binlog_transaction_compression = ON")
            session.execute(f"XA START '{id}'")
            session.execute(f"INSERT INTO t VALUES ({id}, REPEAT('x', 200))")
            session.execute(f"XA END '{id}'")
            session.execute(f"XA PREPARE '{id}'")
        server.sql(f"INSERT INTO {database}.t VALUES (4, 'alone')")
        prepared = open_source(SourceOptions.parse(server.url())).head()
        sessions[2].execute("XA COMMIT '3'")
        sessions[1].execute("XA ROLLBACK '2'")
        server.sql(f"INSERT INTO {database}.t VALUES (5, 'alone')")
        sessions[0].execute("XA COMMIT '1'")
    server.sql("FLUSH BINARY LOGS")
    rows = decode_file(path).rows()
    assert [row["id"] for row in rows] == [4, 3, 5, 1]
    assert [row["_commit_version"] for row in rows] == sorted(row["_commit_version"] for row in rows)
    assert sorted((row["id"], row["note"]) for row in rows) == select(server, f"{database}.t")
    # All transactions committed after this position were prepared before it. Their rows are therefore fetched
    # from the server again.
    live = read_binlog(server.url(), tables=[f"{database}.t"], start=str(prepared))
    assert [id for batch in live for id in batch.to_arrow()["id"].to_pylist()] == [3, 5, 1]


def test_statements_are_distinguished_from_rows(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    path = run_logged(
        mysql_server,
        "CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(20), stamp DOUBLE)",
        "SET SESSION binlog_format = STATEMENT",
        "SET @name = 'from a variable'",
        "INSERT INTO t VALUES (1, @name, 0.5)",
        "SET SESSION binlog_format = MIXED",
        "UPDATE t SET stamp = RAND()",
        "SET SESSION binlog_format = ROW",
        "DELETE FROM t",
        "DROP TABLE t",
        database=database,
    )
    decoded = decode_file(path)
    changes = [statement.text for statement in decoded.statements if statement.is_change]
    assert changes == ["INSERT INTO t VALUES (1, @name, 0.5)"]
    assert [row["_change_type"] for row in decoded.rows()] == [
        "update_preimage",
        "update_postimage",
        "delete",
    ]
    definitions = [statement for statement in decoded.statements if not statement.is_change]
    assert [definition.text.split()[0] for definition in definitions] == ["CREATE", "DROP"]
    assert {definition.database for definition in definitions} == {database}


def test_incident_is_refused_by_name(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    path = run_logged(
        mysql_server, "CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)", database=database
    )
    log_events = list(events(path.read_bytes()))
    text = b"lost a part of the log"
    incident = Event(
        log_events[-1].timestamp, INCIDENT, 1, 0, 0, (1).to_bytes(2, "little") + bytes([len(text)]) + text
    )
    with pytest.raises(IncidentLogged, match="lost a part of the log") as raised:
        decode(assemble([*log_events[:-1], incident, log_events[-1]]), path.name)
    assert raised.value.position == f"{path.name}:{log_events[-1].offset}"


# --- Row images -----------------------------------------------------------------------------


@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_columns_absent_from_an_image_are_marked_absent(
    image: str, server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        f"SET SESSION binlog_row_image = {image}",
        "CREATE TABLE t (id INT PRIMARY KEY, number INT, text VARCHAR(20), big BLOB)",
        "INSERT INTO t VALUES (1, 1, 'one', 'blob')",
        "INSERT INTO t (id) VALUES (2)",
        "UPDATE t SET number = NULL WHERE id = 1",
        "DELETE FROM t WHERE id = 1",
        database=database,
    )
    rows = decode_file(path).rows()
    absent_columns = [(row["_change_type"], tuple(row["_metadata"]["absent"] or ())) for row in rows]
    minimal = image == "MINIMAL"
    before = ("number", "text", "big") if minimal else ("big",)
    after = ("id", "text", "big") if minimal else ("big",)
    assert absent_columns[0] == ("insert", ())
    assert absent_columns[1][0] == "insert"
    assert absent_columns[2:] == [
        ("update_preimage", before),
        ("update_postimage", after),
        ("delete", before),
    ]
    for row in rows:
        absent = row["_metadata"]["absent"] or []
        assert all(row[name] is None for name in absent)
    assert rows[3]["number"] is None
    assert "number" not in (rows[3]["_metadata"]["absent"] or [])
    assert rows[2]["id"] == rows[4]["id"] == 1


def test_full_images_without_a_key_are_complete(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (number INT, text VARCHAR(20))",
        "INSERT INTO t VALUES (1, NULL), (NULL, 'x'), (NULL, NULL)",
        "UPDATE t SET text = 'y' WHERE text IS NULL",
        database=database,
    )
    rows = decode_file(path).rows()
    assert len(rows) == 7
    assert all(row["_metadata"]["absent"] is None for row in rows)


# --- Differences of JSON documents ----------------------------------------------------------

DOCUMENT = {
    "name": "Zoë",
    "tags": ["a", "b", "c"],
    "inner": {"deep": {"deeper": [1, 2, {"x": None}]}, "list": []},
    "numbers": [1, -1, 2.5, 1e100, 18446744073709551615],
    "text": "t" * 300,
    'odd "key"': True,
    "dotted.key": 1,
    "": "empty",
}
JSON_UPDATES = [
    "JSON_SET(d, '$.name', 'Ann')",
    "JSON_SET(d, '$.name', REPEAT('n', 1000), '$.text', 'short')",
    "JSON_REPLACE(d, '$.inner.deep.deeper[2].x', 5)",
    "JSON_REPLACE(d, '$.tags[0]', 'z', '$.tags[2]', JSON_OBJECT('k', 1))",
    "JSON_REMOVE(d, '$.tags[1]')",
    "JSON_REMOVE(d, '$.inner.list')",
    "JSON_SET(d, '$.tags[9]', 'appended')",
    "JSON_SET(d, '$.new', CAST('[1, {\"a\": null}]' AS JSON), '$.newer', NULL)",
    'JSON_SET(d, \'$."odd \\\\"key\\\\""\', FALSE)',
    "JSON_SET(d, '$.\"dotted.key\"', 2)",
    "JSON_SET(d, '$.\"\"', 'no longer empty')",
    "JSON_SET(d, '$.numbers[4]', 1, '$.numbers[5]', CAST('2026-01-02 03:04:05.000006' AS DATETIME(6)))",
    "JSON_REPLACE(d, '$', CAST('[1,2,3]' AS JSON))",
    "JSON_SET(d, '$[1]', JSON_ARRAY(1, 2), '$[7]', 'end')",
    "JSON_REMOVE(d, '$[0]')",
]


@pytest.mark.parametrize("image", ["FULL"])
def test_json_diffs_are_applied_to_the_before_document(
    image: str, mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    path = run_logged(
        mysql_server,
        "SET SESSION binlog_row_value_options = PARTIAL_JSON",
        f"SET SESSION binlog_row_image = {image}",
        "CREATE TABLE t (id INT PRIMARY KEY, first JSON, d JSON, number INT, last JSON)",
        "CREATE TABLE log (n INT AUTO_INCREMENT PRIMARY KEY, d TEXT, last TEXT)",
        "INSERT INTO t VALUES (1, '[1]', '"
        + json.dumps(DOCUMENT).replace("\\", "\\\\")
        + "', 1, '{\"a\": [1]}')",
        *(
            statement
            for update in JSON_UPDATES
            for statement in (
                f"UPDATE t SET d = {update}, last = JSON_SET(last, '$.a', number), number = number + 1",
                "INSERT INTO log (d, last) SELECT d, last FROM t",
            )
        ),
        database=database,
    )
    assert codes(path.read_bytes()).count(PARTIAL_UPDATE_ROWS) >= len(JSON_UPDATES) - 2
    decoded = decode_file(path)
    afters = [row for row in decoded.rows(f"{database}.t") if row["_change_type"] == "update_postimage"]
    wanted = mysql_server.sql(f"SELECT d, last FROM {database}.log ORDER BY n")
    assert [(row["d"], row["last"]) for row in afters] == wanted
    ((first, text),) = mysql_server.sql(f"SELECT first, d FROM {database}.t")
    assert (afters[-1]["first"], afters[-1]["d"]) == (first, text)


def test_json_diff_without_the_before_document_is_refused_by_name(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    from penstock.errors import EventUnsupported

    database = fresh_database(mysql_server)
    path = run_logged(
        mysql_server,
        "SET SESSION binlog_row_value_options = PARTIAL_JSON, SESSION binlog_row_image = MINIMAL",
        "CREATE TABLE t (id INT PRIMARY KEY, d JSON)",
        'INSERT INTO t VALUES (1, \'{"a": 1, "b": "' + "b" * 200 + "\"}')",
        "UPDATE t SET d = JSON_SET(d, '$.a', 2)",
        database=database,
    )
    with pytest.raises(EventUnsupported, match="without the document before") as raised:
        decode_file(path)
    assert raised.value.hint is not None
    assert "binlog_row_value_options" in raised.value.hint


# --- Checksums ------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", FLAVORS)
def test_log_without_checksums_reads_the_same(
    flavor: str, start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server(flavor)
    database = fresh_database(server)
    statements = ("INSERT INTO t VALUES (1, 'x')", "UPDATE t SET text = 'y'", "DELETE FROM t")
    server.sql("CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(20))", database=database)
    with_checksums = run_logged(server, *statements, database=database)
    server.sql("SET GLOBAL binlog_checksum = NONE")
    without = run_logged(server, *statements, database=database)
    table = f"{database}.t"
    assert decode_file(without).values(table) == decode_file(with_checksums).values(table)
    log_events = list(events(without.read_bytes(), checksum=False))
    assert all(event.end_position in (0, event.offset + event.size) for event in log_events)
    assert {TABLE_MAP, QUERY if server.family == "mysql" else MARIADB_GTID} <= {
        event.code for event in log_events
    }


def test_rows_events_that_only_end_a_statement_are_skipped(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    """To close a statement, servers wrote a rows event for table number 0xffffff without images."""
    database = fresh_database(mysql_server)
    path = run_logged(
        mysql_server,
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
        "DELETE FROM t",
        database=database,
    )
    log_events = list(events(path.read_bytes()))
    at = next(index for index, event in enumerate(log_events) if event.code == WRITE_ROWS)
    dummy = (0xFFFFFF).to_bytes(6, "little") + b"\x01\x00\x02\x00\x00"
    empty = replace(log_events[at], body=dummy)
    decoded = decode(assemble([*log_events[: at + 1], empty, *log_events[at + 1 :]]), path.name)
    assert [values[0] for values in decoded.values(f"{database}.t")] == ["insert", "delete"]
    assert DELETE_ROWS in codes(path.read_bytes())
