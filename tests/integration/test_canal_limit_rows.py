# SPDX-License-Identifier: Apache-2.0
"""A Canal destination with a condition shows the rows that the server itself selects, and nothing of others.

A generated column holds the server's own answer to the condition, so each hidden row image names itself.
"""

import random

import pytest

from penstock.serve.limited import Limits
from tests.support.binlog.random_log import keep_log
from tests.support.canal.client import describe_entries
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.nonempty import each
from tests.unit.test_canal_limits import entries_in
from tools.servers import Server

OPTIONS = {
    "mysql": {"binlog_row_metadata": "FULL", "binlog_rows_query_log_events": 1},
    "mariadb": {"binlog_row_metadata": "FULL", "log_bin_compress": "ON", "log_bin_compress_min_len": 10},
}
VERSIONS = {"mysql": "9.7.4", "mariadb": "11.8.0-MariaDB"}
CONDITIONS = (
    "u > 9223372036854775808",
    "e IN ('a', 'c')",
    "s LIKE '%y%'",
    "d BETWEEN -1 AND 10.05",
    "dt > '2024-01-15 12:00:00'",
    "dt IS NULL OR n < 0",
    "NOT n = 3",
    "n <=> NULL",
    "b = x'6100'",
    "t < '10:00:00'",
)
VALUES = {
    "u": ["NULL", "0", "9223372036854775808", "9223372036854775809", "18446744073709551615"],
    "e": ["NULL", "'a'", "'b'", "'c'"],
    "s": ["NULL", "''", "'x'", "'x,y'", "'y,z'"],
    "d": ["NULL", "10.05", "10.0501", "-0.5", "99999999.9999"],
    "dt": ["NULL", "'2024-01-15 12:00:00'", "'2024-01-15 12:00:00.001'"],
    "n": ["NULL", "-1", "0", "3"],
    "b": ["NULL", "x'6100'", "x'61'", "''"],
    "t": ["NULL", "'-01:00:00'", "'09:59:59.99'", "'10:00:00'", "'300:00:00'"],
    "j": ["NULL", """'{"a": 1, "b": "xxxxxxxxxxxxxxxx"}'"""],
}
TABLE = """CREATE TABLE shop.t (id INT PRIMARY KEY, u BIGINT UNSIGNED, e ENUM('a', 'b', 'c'),
    s SET('x', 'y', 'z'), d DECIMAL(12, 4), dt DATETIME(3), n INT, b VARBINARY(10), t TIME(2), j JSON,
    mark VARCHAR(9) AS (IF({condition}, 'shown', 'concealed')) STORED) CHARACTER SET utf8mb4"""


def statements(seeded: random.Random, flavor: str) -> list[str]:
    """Return transactions that insert, change, move and delete rows, with definitions in between."""
    last_id = 0
    texts = []
    for number in range(60):
        inner = []
        for kind in seeded.choices(["insert", "update", "partial", "key", "delete"], [5, 4, 2, 1, 1], k=2):
            assigned = {name: seeded.choice(values) for name, values in VALUES.items()}
            if kind == "insert" or last_id < 9:
                rows = ", ".join(
                    f"({last_id + offset}, {', '.join(assigned.values())})" for offset in range(1, 4)
                )
                last_id += 3
                inner.append(f"INSERT INTO shop.t (id, {', '.join(VALUES)}) VALUES {rows}")
            elif kind == "update":
                changes = ", ".join(f"{name} = {assigned[name]}" for name in seeded.sample(list(VALUES), 3))
                inner.append(f"UPDATE shop.t SET {changes} WHERE id % {seeded.choice([2, 3, 5])} = 0")
            elif kind == "partial":
                changes = f"j = JSON_SET(j, '$.a', {number}), n = {assigned['n']}"
                inner.append(f"UPDATE shop.t SET {changes} WHERE id % 2 = 1")
            elif kind == "key":
                last_id += 1
                inner.append(f"UPDATE shop.t SET id = {last_id} WHERE id = {seeded.randrange(1, last_id)}")
            else:
                inner.append(f"DELETE FROM shop.t WHERE id % {seeded.choice([7, 11])} = 0")
        texts.append(f"BEGIN; {'; '.join(inner)}; COMMIT")
        if number % 20 == 10:
            texts.append(f"ALTER TABLE shop.t ADD COLUMN c{number} INT DEFAULT 7")
    if flavor == "mysql":
        compression = seeded.choice(["ON", "OFF"])
        texts.insert(0, f"SET SESSION binlog_transaction_compression = {compression}")
        texts.insert(0, "SET SESSION binlog_row_value_options = PARTIAL_JSON")
    image = seeded.choice(["FULL", "NOBLOB"])
    return [f"SET SESSION binlog_row_image = {image}, time_zone = '+00:00', sql_mode = ''", *texts]


def ids_left(entries: list[bytes]) -> set[int]:
    """Return the ids that a client has after it applied all entries. Each change must fit what it has."""
    ids: set[int] = set()
    for kind, *more in each(describe_entries(entries)):
        if kind in ("DELETE", "UPDATE"):
            ids.remove(int(more[1]["id"]))
        if kind in ("INSERT", "UPDATE"):
            added = int(more[2]["id"])
            assert added not in ids
            ids.add(added)
    return ids


def prove_condition(server: Server, flavor: str, condition: str, seeded: random.Random) -> None:
    server.sql("DROP DATABASE IF EXISTS shop; CREATE DATABASE shop")
    server.sql("FLUSH BINARY LOGS")
    server.sql(TABLE.format(condition=condition))
    server.sql("; ".join(statements(seeded, flavor)))
    path = server.binlog_files()[-1]
    selected = {int(row[0]) for row in server.sql(f"SELECT id FROM shop.t WHERE {condition}")}
    server.sql("FLUSH BINARY LOGS")
    with keep_log(path.read_bytes(), path.name, flavor, VERSIONS[flavor]) as log:
        entries = entries_in(log, Limits.of_settings("shop", {"shop.t": condition}, {}), seeded)
    # The definition of the table has the word in quotes.
    assert not [entry for entry in entries if b"concealed" in entry.replace(b"'concealed'", b"")]
    assert any(b"shown" in entry.replace(b"'shown'", b"") for entry in entries)
    assert ids_left(entries) == selected, condition


@pytest.mark.deep(
    guard="tests/unit/test_canal_limits.py::test_destination_shows_what_a_log_of_its_visible_rows_and_columns_has"
)
@pytest.mark.parametrize("flavor", list(OPTIONS))
def test_rows_are_those_that_the_server_selects(start_server: StartServer, flavor: str) -> None:
    server = start_server(flavor, **OPTIONS[flavor])
    seeded = random.Random(1905)
    for condition in CONDITIONS:
        prove_condition(server, flavor, condition, seeded)
