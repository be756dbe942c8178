# SPDX-License-Identifier: Apache-2.0
"""Statements in the session's character set, and transactions with an unusual order of events."""

import pytest

from tests.support.binlog.decoding import decode_file, replay, run_logged, select
from tests.support.binlog.events import TABLE_MAP, UPDATE_ROWS, UPDATE_ROWS_V1, codes
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


@pytest.mark.parametrize(
    ("charset", "name"),
    [("gbk", "订单表"), ("latin1", "größe€"), ("big5", "訂單"), ("sjis", "注文表"), ("utf8mb4", "Größe订単")],
)
def test_definitions_from_sessions_of_any_charset_name_their_tables(
    charset: str, name: str, server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        f"CREATE TABLE `{name}` (id INT PRIMARY KEY, `{name}` VARCHAR(20) CHARACTER SET utf8mb4)",
        f"INSERT INTO `{name}` VALUES (1, '{name}')",
        f"ALTER TABLE `{name}` COMMENT '{name}'",
        database=database,
        charset=charset,
    )
    decoded = decode_file(path)
    (row,) = decoded.rows(f"{database}.{name}")
    assert row[name] == name
    assert len(decoded.statements) == 2
    assert all(f"`{name}`" in statement.text for statement in decoded.statements)
    assert decoded.statements[1].text.endswith(f"COMMENT '{name}'")


def test_create_table_as_select_is_defined_before_its_rows(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE source (id INT PRIMARY KEY, text VARCHAR(20))",
        "INSERT INTO source VALUES (1, 'one'), (2, 'two')",
        "CREATE TABLE copy (PRIMARY KEY (id)) SELECT id, text, id * 10 AS ten FROM source",
        "INSERT INTO copy VALUES (3, 'three', 30)",
        database=database,
    )
    decoded = decode_file(path)
    copied = decoded.rows(f"{database}.copy")
    assert replay(copied, ["id"]) == select(server, f"{database}.copy")
    assert [row["id"] for row in copied] == [1, 2, 3]
    assert copied[0]["_commit_version"] == copied[1]["_commit_version"] < copied[2]["_commit_version"]
    assert len({row["_metadata"]["gtid"] for row in copied}) == 2
    created = decoded.statements[1]
    assert created.text.upper().startswith("CREATE TABLE `COPY`")
    assert not created.is_change
    assert decoded.counters["transactions"] == 4


def test_tables_of_one_statement_are_announced_before_any_of_their_rows(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE a (id INT PRIMARY KEY, n INT)",
        "CREATE TABLE b (id INT PRIMARY KEY, n INT)",
        "CREATE TABLE log (id INT AUTO_INCREMENT PRIMARY KEY, what VARCHAR(20))",
        "CREATE TRIGGER a_changed AFTER UPDATE ON a FOR EACH ROW"
        " INSERT INTO log (what) VALUES (CONCAT('a ', OLD.n, ' ', NEW.n))",
        "INSERT INTO a VALUES (1, 1), (2, 2)",
        "INSERT INTO b VALUES (1, 1), (2, 2)",
        "UPDATE a JOIN b ON a.id = b.id SET a.n = a.n + 10, b.n = b.n + 20",
        database=database,
    )
    written = codes(path.read_bytes())
    update = UPDATE_ROWS if server.family == "mysql" else UPDATE_ROWS_V1
    first = written.index(update)
    assert written[first - 3 : first] == [TABLE_MAP] * 3
    decoded = decode_file(path)
    for table in ("a", "b", "log"):
        actual_rows = replay(decoded.rows(f"{database}.{table}"), ["id"])
        assert actual_rows == select(server, f"{database}.{table}")
    last = max(row["_commit_version"] for row in decoded.rows())
    ordinals = [row["_metadata"]["row"] for row in decoded.rows() if row["_commit_version"] == last]
    assert sorted(set(ordinals)) == list(range(6))
