# SPDX-License-Identifier: Apache-2.0
import duckdb
import polars
import pyarrow

import penstock
from tests.support.binlog.decoding import run_logged
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


def test_polars_duckdb_and_pandas_accept_a_batch_unchanged(
    mariadb_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mariadb_server)
    file = run_logged(
        mariadb_server,
        "CREATE TABLE orders (id INT PRIMARY KEY, total DECIMAL(10,2), at DATETIME(6))",
        "INSERT INTO orders VALUES (1, 9.50, '2026-11-21 08:00:00.5'), (2, NULL, NULL)",
        database=database,
    )
    (batch,) = penstock.read_binlog(file, tables=f"{database}.orders")
    expected = batch.to_arrow().select(["id", "total"]).to_pylist()

    assert polars.DataFrame(batch).select("id", "total").to_dicts() == expected
    changes = pyarrow.table(batch)
    assert duckdb.sql("SELECT id, total FROM changes").fetchall() == [tuple(row.values()) for row in expected]
    assert list(changes.to_pandas()["id"]) == [1, 2]
