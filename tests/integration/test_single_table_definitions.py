# SPDX-License-Identifier: Apache-2.0
"""The definition of a single table is read without those of the other tables, and is the same."""

import random
from typing import Any

import pytest

from penstock.model import ServerAddress, TableName, TablePatterns
from penstock.mysql.connection import Connection
from penstock.pipeline.load.targets import targets_of
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# MariaDB has queries of its own, for hidden columns and system versioning.
NAMES = ["plain", "Mixed", "with.dot", "with`tick", "percent%", "under_score", "underXscore", "käse"]


def test_single_table_has_the_definition_that_all_tables_show(
    server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, database = random.Random(11), fresh_database(server)
    for name in NAMES:
        table = TableName(database, name).sql
        columns = [f"c{number} {chance.choice(['INT', 'VARCHAR(20)', 'DATE'])}" for number in range(3)]
        keys = chance.choice(["", ", PRIMARY KEY (id)", ", PRIMARY KEY (id), UNIQUE (c0, c1), UNIQUE (c2)"])
        server.sql(f"CREATE TABLE {table} (id INT NOT NULL, {', '.join(columns)}{keys})")
    address = ServerAddress.parse(server.url("repl"))
    expected = {target.name: [target] for target in targets_of(address, TablePatterns(f"{database}.*"))}
    assert {name.table for name in expected} == set(NAMES)
    rows_read: list[int] = []
    query = Connection.query

    def counted(self: Connection, sql: str, *words: Any) -> list[dict[str, Any]]:
        rows = query(self, sql, *words)
        if "information_schema" in sql:
            rows_read.append(len(rows))
        return rows

    monkeypatch.setattr(Connection, "query", counted)
    for name, targets in expected.items():
        assert targets_of(address, TablePatterns([name.sql])) == targets
    assert max(rows_read) <= 4, "only the rows of the table are read"
    assert targets_of(address, TablePatterns([TableName(database, "missing").sql])) == []
