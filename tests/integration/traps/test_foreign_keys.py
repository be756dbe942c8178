# SPDX-License-Identifier: Apache-2.0
"""Cascades: MySQL 9.7 logs the rows of the child table, before those of the parent table; MariaDB logs only
the parent's rows.
"""

from tests.support.binlog.decoding import decode_file, replay, run_logged, select
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


def test_cascades_are_returned_in_logged_order(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE parent (id INT PRIMARY KEY)",
        "CREATE TABLE child (id INT PRIMARY KEY, parent INT,"
        " FOREIGN KEY (parent) REFERENCES parent (id) ON DELETE CASCADE ON UPDATE CASCADE)",
        "INSERT INTO parent VALUES (1), (2), (3)",
        "INSERT INTO child VALUES (10, 1), (11, 1), (20, 2), (30, 3)",
        "UPDATE parent SET id = 5 WHERE id = 3",
        "DELETE FROM parent WHERE id = 1",
        database=database,
    )
    decoded = decode_file(path)
    last = max(row["_commit_version"] for row in decoded.rows())
    deleted = [row["_metadata"]["table"] for row in decoded.rows() if row["_commit_version"] == last]
    parents, children = decoded.rows(f"{database}.parent"), decoded.rows(f"{database}.child")
    assert replay(parents, ["id"]) == select(server, f"{database}.parent") == [(2,), (5,)]
    if server.family == "mysql":
        assert deleted == ["child", "child", "parent"]
        assert replay(children, ["id"]) == select(server, f"{database}.child") == [(20, 2), (30, 5)]
    else:
        assert deleted == ["parent"]
        assert replay(children, ["id"]) == [(10, 1), (11, 1), (20, 2), (30, 3)]
        assert select(server, f"{database}.child") == [(20, 2), (30, 5)]
