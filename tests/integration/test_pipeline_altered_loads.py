# SPDX-License-Identifier: Apache-2.0
"""Tables that are altered or dropped while a pipeline loads them, and tables that the pipeline then skips."""

from collections.abc import Callable, Iterable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pyarrow
import pytest
from deltalake import DeltaTable

from penstock.coordinate.store import path_of
from penstock.engine.task_plan import TaskPlan
from penstock.errors import ServerUnsupported
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.oracle import assert_same, mysql_rows, source_rows
from tests.support.pipeline.running import opened, pipeline_of, run_to_end, running, wait_for_batches
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_altered_loads.py::test_pipeline_continues_without_a_table_until_it_is_reloaded"
)
def test_table_may_be_altered_during_its_load(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    for table in ("altered", "dropped"):
        mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, a INT, b INT)", database=database)
        rows = ", ".join(f"({number}, {number}, {number})" for number in range(2400))
        mysql_server.sql(f"INSERT INTO {table} VALUES {rows}; ANALYZE TABLE {table}", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, load={"chunk_rows": 80})
    with running(LocalDriver(2), settings):
        done = 0
        for statement in (
            "ADD COLUMN c INT NOT NULL DEFAULT 7",
            "RENAME COLUMN a TO d",
            "DROP COLUMN b",
            "ADD COLUMN e VARCHAR(20) DEFAULT 'e' FIRST",
        ):
            done = wait_for_batches(settings, done + 1)
            mysql_server.sql(f"ALTER TABLE altered {statement}", database=database)
            mysql_server.sql("UPDATE altered SET c = c + 1 WHERE id % 100 = 0", database=database)
        mysql_server.sql("DROP TABLE dropped", database=database)
        wait_for_batches(settings, done + 1)
    run_to_end(LocalDriver(2), settings)
    wanted = source_rows(mysql_server, database, "altered")
    assert list(wanted.types) == ["e", "id", "d", "c"]
    assert_same(wanted, mysql_rows(mariadb_server, database, "altered"), key=["id"])


class AlteringDriver(LocalDriver):
    """Runs statements on the source before some of the driver's jobs. `statements` maps job numbers to
    statements.
    """

    def __init__(self, server: Server, database: str, statements: dict[int, str]) -> None:
        super().__init__(2)
        self._server, self._database, self._statements = server, database, statements
        self.jobs = 0

    def run(self, plan: TaskPlan) -> Iterable[pyarrow.RecordBatch]:
        self.jobs += 1
        if (statement := self._statements.get(self.jobs)) is not None:
            self._server.sql(statement, database=self._database)
        return super().run(plan)


def create_letters(server: Server, database: str) -> None:
    """Create a table whose key has small and capital letters, which collations order differently."""
    server.sql("CREATE TABLE t (id VARCHAR(20) PRIMARY KEY, v INT) CHARSET latin1", database=database)
    rows = ", ".join(
        f"('{letter if number % 2 else letter.upper()}{digit}', {digit})"
        for number, letter in enumerate(ascii_lowercase)
        for digit in range(2)
    )
    server.sql(f"INSERT INTO t VALUES {rows}; ANALYZE TABLE t", database=database)


BINARY = "ALTER TABLE t MODIFY id VARCHAR(20) CHARACTER SET latin1 COLLATE latin1_bin"
LOADED_SLOWLY = {"chunk_rows": 4, "parallel": 1}


def test_load_begins_again_when_its_key_is_ordered_differently(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    create_letters(mysql_server, database)
    sink = {"delta": {"path": str(tmp_path / "lake")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, load=LOADED_SLOWLY)
    altered = f"{BINARY}; DELETE FROM t WHERE id = 'A0'; UPDATE t SET v = 5 WHERE id = 'b0'"
    run_to_end(AlteringDriver(mysql_server, database, {2: altered}), settings)
    rows = DeltaTable(str(tmp_path / "lake" / database / "t")).to_pyarrow_table()
    assert sorted(zip(*rows.select(["id", "v"]).to_pydict().values(), strict=True)) == sorted(
        mysql_server.sql("SELECT id, v FROM t", database=database)
    )
    with opened(settings) as state:
        records = state.store.list(path_of("pipelines", settings.name))
    assert not [name for name in records if name.startswith("loads-")], "no record of chunks is left"


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_altered_loads.py::test_load_begins_again_when_its_key_is_ordered_differently"
)
@pytest.mark.parametrize("remove", [False, True])
def test_resnapshot_begins_again_each_time_its_key_is_ordered_differently(
    server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path, remove: bool
) -> None:
    database = fresh_database(server)
    target_database = fresh_database(mariadb_server)
    create_letters(server, database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    steps = [{"route": {"to": f"{target_database}.t"}}]
    settings = pipeline_of(server, database, sink, tmp_path, load=LOADED_SLOWLY, steps=steps)
    run_to_end(LocalDriver(2), settings)
    mariadb_server.sql("UPDATE t SET v = 100; INSERT INTO t VALUES ('zz', 1)", database=target_database)
    utf8 = "ALTER TABLE t CONVERT TO CHARACTER SET utf8mb4"
    driver = AlteringDriver(
        server,
        database,
        {
            2: f"{BINARY}; DELETE FROM t WHERE id = 'A0'; INSERT INTO t VALUES ('Y9', 9), ('y8', 8)",
            6: f"{utf8}; UPDATE t SET v = 7 WHERE id = 'b1'",
        },
    )
    with opened(settings) as state:
        number = state.request_resnapshot("shop", TableName(database, "t"), remove=remove)
        run_to_end(driver, settings)
        request = state.request(number)
        assert request is not None
        assert request.state == "done", request
    rows = mariadb_server.sql("SELECT id, v FROM t", database=target_database)
    wanted = [*server.sql("SELECT id, v FROM t", database=database), *([] if remove else [("zz", 1)])]
    assert sorted(rows) == sorted(wanted)


def test_pipeline_continues_without_a_table_until_it_is_reloaded(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    for table in ("good", "bad"):
        mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, a INT, b INT)", database=database)
        mysql_server.sql(f"INSERT INTO {table} VALUES (1, 1, 1), (2, 2, 2), (3, 3, 3)", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, errors={"table": "skip_table"})
    run_to_end(LocalDriver(2), settings)
    # An image with only the key and the changed column does not reveal the row's current values.
    mysql_server.sql(
        "SET SESSION binlog_row_image = MINIMAL; UPDATE bad SET a = 7 WHERE id = 1", database=database
    )
    mysql_server.sql("UPDATE good SET a = 8 WHERE id = 1; DELETE FROM bad WHERE id = 2", database=database)
    run_to_end(LocalDriver(2), settings)
    assert_equal(mysql_server, mariadb_server, database, "good")
    assert mariadb_server.sql(f"SELECT COUNT(*) FROM {database}.bad") == [(3,)]
    state = PipelineState.open(settings.state, settings.name)
    try:
        progress = state.checkpoint()
        assert progress is not None
        assert "logged without id, b" in progress.stopped[f"shop/{database}.bad"]
        mysql_server.sql("ALTER TABLE bad ADD COLUMN c INT DEFAULT 5", database=database)
        number = state.request_resnapshot("shop", TableName(database, "bad"))
        run_to_end(LocalDriver(2), settings)
        asked = state.request(number)
        assert asked is not None
        assert asked.state == "done", asked
    finally:
        state.close()
    assert_equal(mysql_server, mariadb_server, database, "bad")
    mysql_server.sql("UPDATE bad SET a = 9", database=database)
    run_to_end(LocalDriver(2), settings)
    assert_equal(mysql_server, mariadb_server, database, "bad")


@pytest.mark.parametrize("is_read", [False, True], ids=["removed", "read-by-python"])
def test_columns_that_the_log_lacks_may_be_removed_unless_a_function_reads_them(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path, is_read: bool
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, a INT, body BLOB)", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 1, 'x'), (2, 2, 'y')", database=database)
    steps: list[dict[str, Any]] = [{"python": {"function": unchanged}}] if is_read else []
    steps.append({"map": {"drop": ["body"]}})
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, steps=steps)
    run_to_end(LocalDriver(2), settings)
    # The image after this update lacks the BLOB, as it lacks generated columns on some versions of MariaDB.
    mysql_server.sql(
        "SET SESSION binlog_row_image = NOBLOB; UPDATE t SET a = 7 WHERE id = 1", database=database
    )
    if is_read:
        with pytest.raises(ServerUnsupported, match="logged without body"):
            run_to_end(LocalDriver(2), settings)
    else:
        run_to_end(LocalDriver(2), settings)
        assert mariadb_server.sql(f"SELECT * FROM {database}.t ORDER BY id") == [(1, 7), (2, 2)]


@pytest.mark.parametrize("flavor", ["mariadb", "mariadb11"])
def test_hidden_hash_of_a_unique_text_is_not_missing_from_a_mirror(
    flavor: str, server_of: Callable[[str], Server], fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    server = server_of(flavor)
    database = fresh_database(server)
    server.sql("CREATE TABLE t (id INT PRIMARY KEY, body TEXT, UNIQUE (body))", database=database)
    server.sql("INSERT INTO t VALUES (1, 'x'), (2, 'y')", database=database)
    sink = {"delta": {"path": str(tmp_path / "lake")}}
    settings = pipeline_of(server, database, sink, tmp_path)
    run_to_end(LocalDriver(2), settings)
    server.sql("UPDATE t SET body = 'z' WHERE id = 1; DELETE FROM t WHERE id = 2", database=database)
    run_to_end(LocalDriver(2), settings)
    rows = DeltaTable(str(tmp_path / "lake" / database / "t")).to_pyarrow_table().to_pylist()
    assert rows == [{"id": 1, "body": "z"}]


def test_removed_row_without_the_key_of_its_target_stops_a_mirror(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, code INT NOT NULL)", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 10), (2, 20)", database=database)
    steps = [{"map": {"drop": ["id"], "key": ["code"]}}]
    settings = pipeline_of(
        mysql_server, database, {"delta": {"path": str(tmp_path / "lake")}}, tmp_path, steps=steps
    )
    run_to_end(LocalDriver(2), settings)
    # This image has only the primary key, which does not identify the row in the target.
    mysql_server.sql("SET SESSION binlog_row_image = MINIMAL; DELETE FROM t WHERE id = 1", database=database)
    with pytest.raises(ServerUnsupported, match="lack code"):
        run_to_end(LocalDriver(2), settings)


def unchanged(rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return rows in the form that a step gets."""
    return rows


@pytest.mark.parametrize(
    ("mode", "requested_by"), [("history", "operator"), ("history", "pipeline"), ("mirror", "pipeline")]
)
def test_reload_finds_the_rows_that_were_deleted_while_the_table_was_set_aside(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path, mode: str, requested_by: str
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, a INT, b INT)", database=database)
    mysql_server.sql("INSERT INTO t VALUES (1, 1, 1), (2, 2, 2), (3, 3, 3)", database=database)
    sink = {"delta": {"path": str(tmp_path / "lake"), "mode": mode}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, errors={"table": "skip_table"})
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql(
        "SET SESSION binlog_row_image = MINIMAL; UPDATE t SET a = 7 WHERE id = 1;"
        "SET SESSION binlog_row_image = FULL; DELETE FROM t WHERE id = 2; INSERT INTO t VALUES (4, 4, 4)",
        database=database,
    )
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql("DELETE FROM t WHERE id = 3", database=database)
    with opened(settings) as state:
        checkpoint = state.checkpoint()
        assert checkpoint is not None
        assert f"shop/{database}.t" in checkpoint.stopped
        by_pipeline = {"remove": False, "number": "a statement"} if requested_by == "pipeline" else {}
        state.request_resnapshot("shop", TableName(database, "t"), **by_pipeline)
    run_to_end(LocalDriver(2), settings)
    rows = DeltaTable(str(tmp_path / "lake" / database / "t")).to_pyarrow_table().to_pylist()
    assert sorted(row["id"] for row in rows if row.get("_valid_to_version") is None) == [1, 4]
    assert sorted(row["id"] for row in rows) == ([1, 1, 2, 3, 4] if mode == "history" else [1, 4])


def assert_equal(source: Server, target: Server, database: str, table: str) -> None:
    """Assert that a table has the same content on both servers."""
    assert_same(source_rows(source, database, table), mysql_rows(target, database, table), key=["id"])
