# SPDX-License-Identifier: Apache-2.0
"""MariaDB 11.8 writes 0 as the end position of events inside transactions, and writes each large commit to a
separate file.
"""

import pytest

from tests.support.binlog.decoding import decode, decode_file, run_logged, select
from tests.support.binlog.events import TABLE_MAP, WRITE_ROWS_V1, events
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server

COMMIT_BYTES_MIN = 10_485_760


@pytest.fixture
def server(module_server_of: StartServer) -> Server:
    """A server that treats commits of ten megabytes as large."""
    return module_server_of("mariadb11", binlog_large_commit_threshold=COMMIT_BYTES_MIN)


def test_positions_are_right_even_if_events_omit_them(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(100))",
        "BEGIN",
        *(f"INSERT INTO t VALUES ({number}, 'v{number}')" for number in range(1, 20)),
        "COMMIT",
        "INSERT INTO t VALUES (100, 'last')",
        database=database,
    )
    data = path.read_bytes()
    log_events = list(events(data))
    silent = [event for event in log_events if event.end_position == 0]
    assert TABLE_MAP in {event.code for event in silent}
    rows = decode_file(path).rows(f"{database}.t")
    offsets = [event.offset for event in log_events if event.code == WRITE_ROWS_V1]
    assert [row["_metadata"]["offset"] for row in rows] == offsets
    assert len({row["_commit_version"] for row in rows}) == 2
    assert decode(data, path.name).position == (path.name, len(data))


def test_commit_written_as_its_own_file_is_read_like_any_other(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, text LONGTEXT)")
    before = len(server.binlog_files())
    with server.connect(database=database) as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        for number in range(1, 13):
            cursor.execute("INSERT INTO t VALUES (%s, REPEAT(%s, 1000000))", (number, str(number)))
        cursor.execute("COMMIT")
    server.sql(f"INSERT INTO {database}.t VALUES (50, 'after')")
    server.sql("FLUSH BINARY LOGS")
    written = server.binlog_files()[before - 1 : -1]
    rows = [row for path in written for row in decode_file(path).values(f"{database}.t")]
    assert [row[1:] for row in rows] == select(server, f"{database}.t")
    assert list(server.data_directory.glob("*.idx")), "GTID index files lie beside the log"
    assert len(written) >= 2
