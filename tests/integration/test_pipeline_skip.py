# SPDX-License-Identifier: Apache-2.0
"""A transaction that a pipeline cannot follow is skipped by hand, and its effects are repaired."""

import json
from pathlib import Path

import pytest

from penstock.errors import StatementLogged
from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import load_pipeline
from tests.support.logstore.kept_log import penstock
from tests.support.pipeline.oracle import assert_same, mysql_rows, source_rows
from tests.support.pipeline.running import run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


def test_change_logged_as_a_statement_is_skipped(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE orders (id INT PRIMARY KEY, n INT)", database=database)
    mysql_server.sql("INSERT INTO orders VALUES (1, 1), (2, 2), (3, 3)", database=database)
    file = tmp_path / "test.yaml"
    source = {"url": mysql_server.url(), "name": "shop", "tables": f"{database}.*"}
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    file.write_text(json.dumps({"source": source, "sink": sink, "batch": {"interval": 0}}))
    settings = load_pipeline(file)
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql("UPDATE orders SET n = 20 WHERE id = 2", database=database)
    with mysql_server.connect(database=database) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION binlog_format = STATEMENT")
        cursor.execute("UPDATE orders SET n = 30 WHERE id = 3")
    mysql_server.sql("UPDATE orders SET n = 10 WHERE id = 1", database=database)
    with pytest.raises(StatementLogged) as stopped:
        run_to_end(LocalDriver(2), settings)
    assert stopped.value.position is not None
    assert penstock("pipelines", "skip", file, "mysql-bin.000001:4").code == 2
    told = penstock("pipelines", "skip", file, stopped.value.position)
    assert told.code == 0, told
    assert "passed over" in told.out
    run_to_end(LocalDriver(2), settings)
    # Except for the effect of the skipped statement, the target equals the source.
    found = mariadb_server.sql(f"SELECT id, n FROM {database}.orders ORDER BY id")
    assert found == [(1, 10), (2, 20), (3, 3)]
    assert penstock("verify", file, "--repair").code == 0
    mysql_server.sql("UPDATE orders SET n = n + 1", database=database)
    run_to_end(LocalDriver(2), settings)
    wanted = source_rows(mysql_server, database, "orders")
    assert_same(wanted, mysql_rows(mariadb_server, database, "orders"), key=["id"])


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_skip.py::test_change_logged_as_a_statement_is_skipped"
)
def test_hint_of_a_logged_statement_skips_it(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE orders (id INT PRIMARY KEY, n INT); INSERT INTO orders VALUES (1, 1), (2, 2);"
        "CREATE TABLE outside (id INT PRIMARY KEY);"
        "CREATE TRIGGER stock AFTER INSERT ON outside FOR EACH ROW UPDATE orders SET n = NEW.id WHERE id = 1",
        database=database,
    )
    file = tmp_path / "test.yaml"
    source = {"url": mysql_server.url(), "name": "shop", "tables": f"{database}.orders"}
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    file.write_text(json.dumps({"source": source, "sink": sink, "batch": {"interval": 0}}))
    settings = load_pipeline(file)
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql(
        f"SET SESSION binlog_format = STATEMENT; USE {database}; INSERT INTO outside VALUES (abs(7)), (8);"
        " UPDATE orders SET n = n + 1; SET SESSION binlog_format = ROW; INSERT INTO orders VALUES (3, 3)"
    )
    with pytest.raises(StatementLogged) as stopped:
        run_to_end(LocalDriver(2), settings)
    assert stopped.value.position is not None
    assert "start behind it (at " in str(stopped.value.hint)
    assert penstock("pipelines", "skip", file, stopped.value.position).code == 0
    run_to_end(LocalDriver(2), settings)
    assert penstock("verify", file, "--repair").code == 0
    wanted = source_rows(mysql_server, database, "orders")
    assert_same(wanted, mysql_rows(mariadb_server, database, "orders"), key=["id"])


@pytest.mark.deep(guard="tests/unit/test_rewinding.py::test_pipeline_rewinds_by_gtid_set_and_by_time")
def test_changes_are_replayed_from_an_earlier_position(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY, n INT); INSERT INTO t VALUES (1, 1)", database=database
    )
    file = tmp_path / "test.yaml"
    source = {"url": mysql_server.url(), "name": "shop", "tables": f"{database}.*"}
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    file.write_text(json.dumps({"source": source, "sink": sink, "batch": {"interval": 0}}))
    settings = load_pipeline(file)
    run_to_end(LocalDriver(2), settings)
    executed = str(mysql_server.sql("SELECT @@GLOBAL.gtid_executed")[0][0]).replace("\n", "")
    mysql_server.sql("INSERT INTO t VALUES (2, 2); UPDATE t SET n = 10 WHERE id = 1", database=database)
    run_to_end(LocalDriver(2), settings)
    # Rows that the target has lost in the meantime are written again.
    mariadb_server.sql("DELETE FROM t WHERE id = 2; UPDATE t SET n = 0 WHERE id = 1", database=database)
    mariadb_server.sql("INSERT INTO t VALUES (9, 9)", database=database)
    refused = penstock("pipelines", "reset", file, "--gtid-set", executed)
    assert refused.code == 2
    assert "--yes" in refused.err
    dry = penstock("pipelines", "reset", file, "--gtid-set", executed, "--dry-run")
    assert "bytes of its log are read again" in dry.out
    assert "twice" not in dry.out, "a mirror shows each change once"
    assert penstock("pipelines", "reset", file, "--gtid-set", executed, "--yes").code == 0
    run_to_end(LocalDriver(2), settings)
    rows = mariadb_server.sql("SELECT * FROM t ORDER BY id", database=database)
    assert rows == [(1, 10), (2, 2), (9, 9)], "nothing is deleted from the target"
    mariadb_server.sql(f"DROP DATABASE {database}")
