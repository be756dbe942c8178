# SPDX-License-Identifier: Apache-2.0
"""Read the same log with python-mysql-replication, on the types and settings it supports correctly.

That library is wrong on empty binaries, BIT, zero dates, negative TIME with fractions, JSON as printed by the
server, non-UTF-8 texts, compressed transactions (which it skips), and names without FULL metadata. Other
tests compare these values with the server's own client.
"""

from typing import Any

import pytest
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.row_event import DeleteRowsEvent, UpdateRowsEvent, WriteRowsEvent

import penstock
from penstock.model import Position
from tests.support.binlog.decoding import run_logged
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import FLAVORS, Server

Change = tuple[str, str, int, tuple[Any, ...]]

COLUMNS = {
    "tiny": "TINYINT", "tiny_u": "TINYINT UNSIGNED", "small": "SMALLINT", "small_u": "SMALLINT UNSIGNED",
    "medium": "MEDIUMINT", "medium_u": "MEDIUMINT UNSIGNED", "number": "INT", "number_u": "INT UNSIGNED",
    "big": "BIGINT", "big_u": "BIGINT UNSIGNED", "single": "FLOAT", "wide": "DOUBLE",
    "price": "DECIMAL(20,6)",
    "day": "DATE", "moment": "DATETIME(6)", "old_moment": "DATETIME", "year": "YEAR",
    "name": "VARCHAR(300)", "short": "CHAR(10)", "note": "TEXT", "bytes": "BLOB", "raw": "VARBINARY(20)",
    "kind": "ENUM('a','b','c')",
}  # fmt: skip
ROWS = (
    "1, -128, 255, -32768, 65535, -8388608, 16777215, -2147483648, 4294967295, -9223372036854775808,"
    " 18446744073709551615, 0.5, 1e300, -99999999999999.999999, '1000-01-01', '9999-12-31 23:59:59.999999',"
    " '2026-01-02 03:04:05', 1901, REPEAT('é', 300), 'x', REPEAT('note ', 2000), REPEAT(x'00ff', 5000),"
    " x'0001', 'c'",
    "2, 127, 0, 32767, 0, 8388607, 0, 2147483647, 0, 9223372036854775807, 0, -1.25, -1e-300, 0.000001,"
    " '9999-12-31', '2000-02-29 00:00:00.000001', '1970-01-01 00:00:00', 2155, '', '', '', x'00', x'00', 'a'",
    "3" + ", NULL" * len(COLUMNS),
)


def read_by_peer(server: Server, database: str, start: Position) -> list[Change]:
    """Return the changes from a position to the end of the log according to python-mysql-replication."""
    stream = BinLogStreamReader(
        connection_settings={"host": "127.0.0.1", "port": server.port, "user": "root", "passwd": ""},
        server_id=40_001,
        log_file=start.file,
        log_pos=start.offset,
        resume_stream=True,
        only_events=[WriteRowsEvent, UpdateRowsEvent, DeleteRowsEvent],
        only_schemas=[database],
        is_mariadb=server.family == "mariadb",
        enable_logging=False,
    )
    changes: list[Change] = []
    try:
        for event in stream:
            position = event.packet.log_pos
            for row in event.rows:
                if isinstance(event, UpdateRowsEvent):
                    changes.append(
                        ("update_preimage", event.table, position, tuple(row["before_values"].values()))
                    )
                    changes.append(
                        ("update_postimage", event.table, position, tuple(row["after_values"].values()))
                    )
                else:
                    kind = "insert" if isinstance(event, WriteRowsEvent) else "delete"
                    changes.append((kind, event.table, position, tuple(row["values"].values())))
    finally:
        stream.close()
    return changes


def read_by_us(source: Any, database: str, start: str | None = None) -> list[Change]:
    changes = []
    for batch in penstock.read_binlog(source, f"{database}.*", start=start):
        for row in batch.to_arrow().to_pylist():
            metadata, version = row["_metadata"], row["_commit_version"]
            values = tuple(value for name, value in row.items() if not name.startswith("_"))
            changes.append(((version, metadata["row"]), (row["_change_type"], metadata["table"], values)))
    changes.sort(key=lambda pair: pair[0])
    return [(kind, table, 0, values) for _, (kind, table, values) in changes]


def plain(change: Change) -> tuple[str, str, tuple[Any, ...]]:
    kind, table, _, values = change
    return kind, table, values


@pytest.mark.parametrize("flavor", FLAVORS)
def test_other_readers_return_the_same_changes_in_the_same_order(
    flavor: str, start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server(flavor)
    database = fresh_database(server)
    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    path = run_logged(
        server,
        f"CREATE TABLE wide (id INT PRIMARY KEY, {columns}) CHARACTER SET utf8mb4",
        "CREATE TABLE narrow (id BIGINT AUTO_INCREMENT PRIMARY KEY, name VARCHAR(20)) CHARACTER SET utf8mb4",
        *(f"INSERT INTO wide VALUES ({row})" for row in ROWS),
        "INSERT INTO narrow (name) VALUES ('a'), ('b'), (NULL), ('d')",
        "INSERT INTO narrow (name) SELECT name FROM narrow",
        "UPDATE wide JOIN narrow ON wide.id = narrow.id SET wide.note = narrow.name, narrow.name = 'joined'",
        "BEGIN",
        "UPDATE narrow SET id = id + 100 WHERE id > 4",
        "DELETE FROM narrow WHERE name IS NULL",
        "COMMIT",
        "ALTER TABLE narrow ADD COLUMN more INT FIRST",
        "UPDATE narrow SET more = id",
        "DELETE FROM wide",
        database=database,
    )
    peer_changes = read_by_peer(server, database, Position(0, path.name, 4))
    own_changes = read_by_us([str(path)], database)
    assert len(own_changes) > 40
    for mine, other in zip(map(plain, own_changes), map(plain, peer_changes), strict=True):
        assert mine[:2] == other[:2]
        differing = [pair for pair in zip(mine[2], other[2], strict=True) if pair[0] != pair[1]]
        assert not differing, mine
    assert read_by_us(server.url(), database, f"{path.name}:4") == own_changes
