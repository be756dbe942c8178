# SPDX-License-Identifier: Apache-2.0
"""Table definitions that do not fit the existing rows of a target, or older rows in the log, for SQL targets
in one process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SchemaChanged
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from tests.support.pipeline.oracle import Row, assert_same, mysql_rows, postgres_rows, source_rows
from tests.support.pipeline.running import opened, pipeline_of, run_to_end
from tests.support.sinks.backends import MongoBackend, PostgresBackend, running_backend
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tools.servers import Server

# By table: the first type and a value of it, then the later type and a value of it.
CHANGES = {
    "moments": ("INT", "20260102", "DATETIME", "'2026-02-03'"),
    "bodies": ("DECIMAL(10,2)", "7.5", "BLOB", "'z'"),
    "notes": ("VARCHAR(20)", "NULL", "VARCHAR(20) NOT NULL", "'x'"),
    "documents": ("VARCHAR(20)", "'{}'", "JSON", "'[1]'"),
}


@dataclass(frozen=True)
class SqlTarget:
    """A target as it is written in a pipeline file, and functions that use the target's own client."""

    sink: dict[str, Any]
    rows: Callable[[str, str], list[Row]]
    run: Callable[[str], object]


@pytest.fixture(params=["mysql", "postgres"])
def target(
    request: pytest.FixtureRequest,
    mariadb_server: Server,
    server_of: Callable[[str], Server],
    missing_part: MissingPart,
) -> SqlTarget:
    if request.param == "mysql":
        sink = {"mysql": {"url": mariadb_server.url("root")}}
        return SqlTarget(sink, lambda *name: mysql_rows(mariadb_server, *name), mariadb_server.sql)
    backend = running_backend("postgres", request.config, server_of, missing_part)
    assert isinstance(backend, PostgresBackend)
    url = backend.server.url
    return SqlTarget(
        {"postgres": {"url": url}},
        lambda database, table: postgres_rows(url, f'"{database}"."{table}"'),
        backend.sql,
    )


@pytest.mark.deep(keep=("mysql",))
def test_column_gets_a_type_that_the_target_cannot_cast_its_values_to(
    target: SqlTarget, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    settings = pipeline_of(mysql_server, database, target.sink, tmp_path)
    for table, (first, value, _, _) in CHANGES.items():
        mysql_server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, v {first}); INSERT INTO {table} VALUES (1, {value})",
            database=database,
        )
    mysql_server.sql("INSERT INTO documents VALUES (2, 'none'), (3, NULL)", database=database)
    run_to_end(LocalDriver(), settings)
    mysql_server.sql("DELETE FROM documents WHERE id = 2", database=database)
    for table, (_, value, then, other) in CHANGES.items():
        mysql_server.sql(
            f"SET sql_mode = ''; INSERT INTO {table} VALUES (4, {value});"
            f"ALTER TABLE {table} MODIFY v {then}; INSERT INTO {table} VALUES (5, {other})",
            database=database,
        )
    run_to_end(LocalDriver(), settings)
    for table in CHANGES:
        wanted = source_rows(mysql_server, database, table)
        assert_same(wanted, target.rows(database, table), key=("id",))


def test_older_rows_that_lack_a_column_of_the_new_key_wait_for_the_reread(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    settings = pipeline_of(mysql_server, database, {"mysql": {"url": mariadb_server.url("root")}}, tmp_path)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, v INT)", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 1), (2, 2)", database=database)
    run_to_end(LocalDriver(), settings)
    mysql_server.sql(
        "INSERT INTO t VALUES (3, 3); DELETE FROM t WHERE id = 1; ALTER TABLE t ADD COLUMN k INT;"
        "UPDATE t SET k = id + 10; ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (id, k);"
        "INSERT INTO t VALUES (3, 4, 5)",
        database=database,
    )
    run_to_end(LocalDriver(), settings)
    assert_same(source_rows(mysql_server, database, "t"), mysql_rows(mariadb_server, database, "t"))


@pytest.mark.deep(keep=("mysql",))
def test_generated_unique_key_of_a_table_without_keys_replaces_its_rows(
    target: SqlTarget, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    settings = pipeline_of(mysql_server, database, target.sink, tmp_path)
    mysql_server.sql("CREATE TABLE t (v INT); INSERT INTO t VALUES (1), (1), (2), (NULL)", database=database)
    run_to_end(LocalDriver(), settings)
    mysql_server.sql(
        "UPDATE t SET v = 3 WHERE v = 2;"
        "ALTER TABLE t ADD COLUMN number INT NOT NULL AUTO_INCREMENT UNIQUE;"
        "INSERT INTO t (v) VALUES (4)",
        database=database,
    )
    run_to_end(LocalDriver(), settings)
    mysql_server.sql("DELETE FROM t WHERE v = 1; UPDATE t SET number = 9 WHERE v = 4", database=database)
    run_to_end(LocalDriver(), settings)
    assert_same(source_rows(mysql_server, database, "t"), target.rows(database, "t"))


@pytest.mark.deep(
    guard="tests/integration/test_local_definitions.py::test_older_rows_that_lack_a_column_of_the_new_key_wait_for_the_reread"
)
def test_rows_that_do_not_fit_a_new_key_stop_the_run_and_the_named_command_ends_that(
    target: SqlTarget, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    settings = pipeline_of(mysql_server, database, target.sink, tmp_path)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, v INT)", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 1), (2, 2)", database=database)
    run_to_end(LocalDriver(), settings)
    mysql_server.sql(
        "INSERT INTO t VALUES (3, 3); ALTER TABLE t ADD COLUMN k INT; UPDATE t SET k = id + 10;"
        "ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (k); INSERT INTO t VALUES (3, 4, 5)",
        database=database,
    )
    with pytest.raises(
        SchemaChanged, match=rf"{database}\.t do not fit its table's definition, whose key is k"
    ) as told:
        run_to_end(LocalDriver(), settings)
    assert told.value.hint == f"Drop the target's table, then run penstock resnapshot for {database}.t"
    target.run(f"DROP TABLE {database}.t")
    with opened(settings) as state:
        state.request_resnapshot("shop", TableName(database, "t"))
    run_to_end(LocalDriver(), settings)
    wanted = source_rows(mysql_server, database, "t")
    assert_same(wanted, target.rows(database, "t"), key=("k",))


def test_table_whose_older_rows_do_not_fit_is_skipped_and_no_other(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, errors={"table": "skip_table"})
    mysql_server.sql(
        "CREATE TABLE a (id VARCHAR(9) PRIMARY KEY); CREATE TABLE b (id INT PRIMARY KEY)", database=database
    )
    run_to_end(LocalDriver(), settings)
    mysql_server.sql(
        "INSERT INTO a VALUES ('x'); INSERT INTO b VALUES (1); DELETE FROM a; ALTER TABLE a MODIFY id INT",
        database=database,
    )
    run_to_end(LocalDriver(), settings)
    with opened(settings) as state:
        checkpoint = state.checkpoint()
    assert checkpoint is not None
    assert [key.rpartition(".")[2].strip("`") for key in checkpoint.stopped] == ["a"]
    assert mysql_rows(mariadb_server, database, "b") == [{"id": 1}]


@pytest.mark.deep(
    guard="tests/integration/test_local_definitions.py::test_older_rows_that_lack_a_column_of_the_new_key_wait_for_the_reread"
)
def test_documents_with_the_names_of_an_earlier_key_stop_the_table(
    mysql_server: Server,
    server_of: Callable[[str], Server],
    fresh_database: FreshDatabase,
    missing_part: MissingPart,
    pytestconfig: pytest.Config,
    tmp_path: Path,
) -> None:
    backend = running_backend("mongodb", pytestconfig, server_of, missing_part)
    assert isinstance(backend, MongoBackend)
    database = fresh_database(mysql_server)
    settings = pipeline_of(mysql_server, database, {"mongodb": {"url": backend.server.url}}, tmp_path)
    mysql_server.sql("CREATE TABLE t (id INT, line INT, PRIMARY KEY (id, line))", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 1), (1, 2)", database=database)
    run_to_end(LocalDriver(), settings)
    mysql_server.sql("ALTER TABLE t RENAME COLUMN line TO position", database=database)
    with pytest.raises(SchemaChanged, match=r"have another key than id, position") as told:
        run_to_end(LocalDriver(), settings)
    assert told.value.hint == f"Drop the collection, then run penstock resnapshot for {database}.t"
