# SPDX-License-Identifier: Apache-2.0
"""Small tables are planned and read together: their chunks share statements, tasks and records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock.engine.batches as batches_module
from penstock.changes import Target
from penstock.engine.reading import ChunkReads
from penstock.errors import ConnectionLost, OptionInvalid, PenstockError
from penstock.limits import SMALL_TABLE_ROWS
from penstock.local.driver import LocalDriver
from penstock.model import ServerAddress, TableName, TablePatterns
from penstock.pipeline.load import reader
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.load.small_tables import small_chunks
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState
from penstock.sinks.files.sink import FilesSink
from tests.support.pipeline.oracle import parquet_rows
from tests.support.pipeline.running import opened, pipeline_of, run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

pytestmark = pytest.mark.deep_flavors("mariadb")

TABLES, ROWS = 30, 3
LARGE = SMALL_TABLE_ROWS + 1


class Death(BaseException):
    """Simulates the end of the process."""


def create_tables(server: Server, database: str) -> dict[str, list[int]]:
    """Create small tables, an empty one, a large one and one without a key; return the ids of each."""
    ids = {f"t{number}": list(range(ROWS)) for number in range(TABLES)}
    ids |= {"t_empty": [], "t_large": list(range(LARGE)), "t_keyless": [7, 7]}
    for table, values in ids.items():
        key = "" if table == "t_keyless" else " PRIMARY KEY"
        server.sql(f"CREATE TABLE {database}.{table} (id INT{key})")
        if values:
            server.sql(f"INSERT INTO {database}.{table} VALUES {', '.join(f'({value})' for value in values)}")
    return ids


def loaded(folder: Path, database: str, tables: list[str]) -> dict[str, list[int]]:
    """Return the ids in the files of each table, sorted."""
    return {
        table: sorted(row["id"] for row in parquet_rows(f"{folder}/{database}/{table}/[!_]*.parquet"))
        for table in tables
    }


def records_of(patch: pytest.MonkeyPatch) -> list[BatchRecord]:
    """Return a list to which each new batch adds its record."""
    records: list[BatchRecord] = []
    begin = PipelineState.begin

    def noted(self: PipelineState, record: BatchRecord) -> None:
        records.append(record)
        begin(self, record)

    patch.setattr(PipelineState, "begin", noted)
    return records


def files_pipeline(server: Server, database: str, folder: Path, **more: Any) -> PipelineSettings:
    return pipeline_of(server, database, {"files": {"path": str(folder / "feed")}}, folder, **more)


def test_tables_of_few_rows_are_one_chunk(server: Server, fresh_database: FreshDatabase) -> None:
    """Small tables are counted by a shared statement. If one of these tables is gone, the others are counted
    and cut into chunks separately.
    """
    database = fresh_database(server)
    ids = create_tables(server, database)
    address = ServerAddress.parse(server.url("repl"))
    targets = targets_of(address, TablePatterns(f"{database}.*"))
    with open_session(address) as session:
        chunks = {chunk.table.table: chunk for chunk in small_chunks(session, targets, 1_000_000)}
        assert {name: chunk.rows for name, chunk in chunks.items()} == {
            name: len(values) for name, values in ids.items() if name != "t_large"
        }
        assert {(chunk.key, chunk.condition, chunk.order) for chunk in chunks.values()} == {((), "", "")}
        assert {chunk.table.table for chunk in small_chunks(session, targets, 2)} == {"t_empty", "t_keyless"}
        gone = Target(TableName(database, "gone"), targets[0].columns, ("id",))
        assert list(small_chunks(session, [*targets, gone], 1_000)) == []


@pytest.mark.parametrize("step", ["begin", "tasks", "commit"])
def test_crash_of_a_load_of_small_tables_leaves_every_row_once(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path, step: str
) -> None:
    database = fresh_database(server)
    ids = create_tables(server, database)
    settings = files_pipeline(server, database, tmp_path)
    place, name = {
        "begin": (PipelineState, "begin"),
        "tasks": (batches_module, "run_job"),
        "commit": (FilesSink, "commit"),
    }[step]
    with pytest.MonkeyPatch.context() as patch:
        records = records_of(patch)
        work: Callable[..., Any] = getattr(place, name)

        def die(*words: Any, **options: Any) -> None:
            work(*words, **options)
            raise Death

        patch.setattr(place, name, die)
        with pytest.raises(Death):
            run_to_end(LocalDriver(2), settings)
    run_to_end(LocalDriver(2), settings)
    assert max(records[0].groups) > 1
    assert loaded(tmp_path / "feed", database, list(ids)) == ids
    with opened(settings) as state:
        checkpoint = state.checkpoint()
        assert checkpoint is not None
        assert not [
            load.pages for load in checkpoint.loads.values() if state.get_large(load.pages) is not None
        ], "the chunks of finished loads are forgotten"


def test_tables_that_are_refused_stop_alone(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tables that share their task are loaded."""
    database = fresh_database(server)
    ids = create_tables(server, database)
    refused = {"t3", "t4", "t17"}
    feed_schema = FilesSink.feed_schema

    def refusing(self: FilesSink, target: Target) -> Any:
        if target.name.table in refused:
            raise OptionInvalid(f"no rows of {target.name}")
        return feed_schema(self, target)

    monkeypatch.setattr(FilesSink, "feed_schema", refusing)
    settings = files_pipeline(server, database, tmp_path, errors={"table": "skip_table"})
    run_to_end(LocalDriver(2), settings)
    with opened(settings) as state:
        checkpoint = state.checkpoint()
    assert checkpoint is not None
    assert {key.rpartition(".")[2] for key in checkpoint.stopped} == refused
    assert loaded(tmp_path / "feed", database, list(ids)) == {
        table: [] if table in refused else values for table, values in ids.items()
    }


def test_table_dropped_after_its_plan_leaves_the_others_loaded(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = fresh_database(server)
    ids = create_tables(server, database)
    records = records_of(monkeypatch)
    begin = PipelineState.begin

    def dropping(self: PipelineState, record: BatchRecord) -> None:
        if not records:
            server.sql(f"DROP TABLE {database}.t5; ALTER TABLE {database}.t6 ADD v INT")
        begin(self, record)

    monkeypatch.setattr(PipelineState, "begin", dropping)
    run_to_end(LocalDriver(2), files_pipeline(server, database, tmp_path))
    assert max(records[0].groups) > 1
    assert loaded(tmp_path / "feed", database, list(ids)) == ids | {"t5": []}


def test_task_ends_at_its_first_table_while_the_server_does_not_answer(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its other tables would wait for the server as long as the first one."""
    database = fresh_database(server)
    ids = create_tables(server, database)
    records, refused = records_of(monkeypatch), list[int]()
    run_job, changes = batches_module.run_job, ChunkReads.changes
    is_away = iter([True])
    outage: list[bool] = []

    def run(driver: Any, plan: Any) -> Any:
        outage[:] = [next(is_away, False)]
        return run_job(driver, plan)

    def read(self: ChunkReads, number: int, *arguments: Any) -> Any:
        if outage == [True]:
            refused.append(number)
            raise ConnectionLost("the server does not answer")
        return changes(self, number, *arguments)

    monkeypatch.setattr(batches_module, "run_job", run)
    monkeypatch.setattr(ChunkReads, "changes", read)
    run_to_end(LocalDriver(2), files_pipeline(server, database, tmp_path))
    assert max(records[0].groups) > 1
    assert 1 <= len(refused) <= 2, "one table for each core"
    assert loaded(tmp_path / "feed", database, list(ids)) == ids


def test_table_that_a_step_refuses_halfway_does_not_disturb_the_next_read(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of its answer must not be taken for the answer of the next table."""
    monkeypatch.setattr(reader, "LOAD_BATCH_ROWS_MAX", 2)
    database = fresh_database(server)
    ids = create_tables(server, database)
    refused = {table for table in ids if table.startswith("t2")}
    for table in refused:
        server.sql(f"UPDATE {database}.{table} SET id = id + 5000")
    (tmp_path / "refusing.py").write_text(
        "def refuse(rows):\n    assert max(rows.column('id').to_pylist()) < 5000\n    return rows\n"
    )
    problems: list[BaseException] = []
    discard = SessionPool.discard

    def noted(self: SessionPool, session: LoadSession, problem: BaseException) -> None:
        problems.append(problem)
        discard(self, session, problem)

    monkeypatch.setattr(SessionPool, "discard", noted)
    steps = [{"python": {"function": f"{tmp_path}/refusing.py:refuse"}}]
    settings = files_pipeline(server, database, tmp_path, errors={"table": "skip_table"}, steps=steps)
    run_to_end(LocalDriver(1), settings)
    assert problems, "the session of a refused table is closed"
    assert not [problem for problem in problems if isinstance(problem, PenstockError)]
    assert loaded(tmp_path / "feed", database, list(ids)) == ids | {table: [] for table in refused}
