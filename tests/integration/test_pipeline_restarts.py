# SPDX-License-Identifier: Apache-2.0
"""After a restart at any point, the driver restores its knowledge of tables and loads."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession

from penstock.engine import batches as batches_module
from penstock.engine.batches import Batches
from penstock.engine.driver import Driver as JobDriver
from penstock.engine.job import run_job
from penstock.engine.loading import Loading
from penstock.engine.source_log import SourceLog
from penstock.engine.tables import PipelineTables
from penstock.engine.task_plan import OF_STATEMENT, Surprise, TaskPlan, place_key
from penstock.engine.tracked_table import Learned
from penstock.errors import LeaseLost, OptionInvalid, PositionInvalid, PrivilegeMissing
from penstock.local.driver import LocalDriver
from penstock.model import Position, TableName
from penstock.pipeline.record import BatchRecord, RangeWork
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState, split_key, table_key
from penstock.sinks.delta.unwritten_table import open_unwritten
from penstock.sinks.mysql.sink import MysqlSink
from penstock.source.offsets import Offset
from penstock.source.reading import LoggedStatement
from tests.support.pipeline.engines import engine  # noqa: F401
from tests.support.pipeline.oracle import delta_rows, parquet_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


@dataclass
class Driver:
    """The state of a driver, without running its jobs."""

    settings: PipelineSettings
    state: PipelineState
    database: str

    def __post_init__(self) -> None:
        self.checkpoint = self.state.take()
        self.begin()

    def begin(self) -> None:
        """Start like a runner that has only the stored state."""
        sink, steps = self.settings.make_sink(), self.settings.make_steps()
        self.loading = Loading(self.settings, self.state, sink, 2)
        self.tables = PipelineTables(self.settings, self.state, sink, steps, self.loading.reread)
        self.tables.open()

    def meet(self, text: str, offset: int) -> tuple[TableName, ...]:
        """Process a statement about the table; return the targets that it empties."""
        at = Position(0, "binlog.000001", offset)
        names = frozenset({self.table})
        statement = LoggedStatement(text, self.database, at, at, names, frozenset(), frozenset())
        learned = Learned()
        self.tables.learn([Surprise(OF_STATEMENT, 0, 0, "shop", statement)], learned, {})
        return tuple(learned.statements[place_key("shop", at)].values())

    @property
    def table(self) -> TableName:
        return TableName(self.database, "t")

    @property
    def key(self) -> str:
        return table_key("shop", self.table)


@pytest.fixture
def driver(mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path) -> Iterator[Driver]:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1), (2), (3)", database=database
    )
    settings = pipeline_of(mysql_server, database, {"delta": {"path": str(tmp_path / "lake")}}, tmp_path)
    state = PipelineState.open(settings.state, settings.name)
    yield Driver(settings, state, database)
    state.close()


def test_dropped_and_recreated_table_is_empty_after_any_driver_restart(driver: Driver) -> None:
    """The server has recreated the table long before the pipeline reaches that statement."""
    assert driver.meet("DROP TABLE t", 1000) == ()
    driver.tables.done()
    driver.begin()
    assert driver.meet("CREATE TABLE t (id INT PRIMARY KEY)", 2000) == (driver.table,)
    # The runner dies within the batch, and the next runner processes the statement again.
    driver.begin()
    assert driver.meet("CREATE TABLE t (id INT PRIMARY KEY)", 2000) == (driver.table,)
    driver.tables.undone()
    assert driver.meet("CREATE TABLE t (id INT PRIMARY KEY)", 2400) == (driver.table,)
    driver.tables.done()
    assert driver.meet("CREATE TABLE IF NOT EXISTS t (id INT PRIMARY KEY)", 3000) == ()


def test_table_recreated_with_the_same_columns_has_its_new_keys(driver: Driver, mysql_server: Server) -> None:
    """A stale unique key in the target would reject rows that were duplicates only in the old table."""
    keyed = "CREATE TABLE t (id INT PRIMARY KEY, seat INT, UNIQUE (seat))"
    mysql_server.sql(f"DROP TABLE t; {keyed}", database=driver.database)
    driver.meet("DROP TABLE t", 200)
    driver.meet(keyed, 400)
    assert driver.tables.targets[driver.table].unique_keys
    keyless = "CREATE TABLE t (id INT PRIMARY KEY, seat INT)"
    mysql_server.sql(f"DROP TABLE t; {keyless}", database=driver.database)
    driver.meet("DROP TABLE t", 1000)
    assert driver.meet(keyless, 2000) == (driver.table,)
    assert not driver.tables.targets[driver.table].unique_keys


@pytest.mark.parametrize("drop", ["ALTER TABLE t DROP INDEX seat", "DROP INDEX seat ON t"])
@pytest.mark.parametrize(
    "add", ["ALTER TABLE t ADD UNIQUE seat (seat)", "CREATE UNIQUE INDEX seat ON t (seat)"]
)
def test_target_has_a_unique_key_while_the_source_has_it_in_the_log(
    driver: Driver, mysql_server: Server, add: str, drop: str
) -> None:
    """If the target had a unique key that the source lacks, rows with equal values would replace each
    other.
    """

    def unique_keys() -> Any:
        return driver.tables.targets[driver.table].unique_keys

    mysql_server.sql("ALTER TABLE t ADD COLUMN seat INT", database=driver.database)
    driver.begin()
    mysql_server.sql(add, database=driver.database)
    driver.begin()
    assert not unique_keys(), "the log is not there yet"
    driver.meet("ALTER TABLE t ADD COLUMN seat INT", 500)
    assert not unique_keys()
    driver.meet(add, 1000)
    assert unique_keys() == (("seat",),)
    mysql_server.sql(drop, database=driver.database)
    driver.meet(drop, 2000)
    assert not unique_keys()


def test_changes_before_a_reload_are_still_delivered(driver: Driver, mysql_server: Server) -> None:
    """A delete that the pipeline has not reached concerns a row that the target still has."""
    progress = driver.loading.planned(driver.checkpoint, driver.tables)
    first = progress.loads[driver.key]
    assert first.floor, "a first load has what was logged before it"
    done = replace(first, done=first.chunks)
    progress = driver.state.write(replace(progress, loads={driver.key: done}))
    mysql_server.sql("DELETE FROM t WHERE id = 2", database=driver.database)
    driver.loading.reread("shop", driver.table, "a column was added")
    again = driver.loading.planned(progress, driver.tables).loads[driver.key]
    assert (again.done, again.floor) == (0, first.floor)


@pytest.mark.parametrize("earlier", [None, {}])
def test_first_load_deletes_rows_missing_from_the_source_if_an_earlier_run_wrote_them(
    driver: Driver, earlier: dict[str, Any] | None
) -> None:
    progress = driver.loading.planned(replace(driver.checkpoint, earlier=earlier), driver.tables)
    assert progress.loads[driver.key].remove == (earlier is not None)


def test_tables_are_reloaded_in_their_current_state_if_the_log_is_lost(
    driver: Driver, mysql_server: Server
) -> None:
    mysql_server.sql("CREATE TABLE u (id INT PRIMARY KEY)", database=driver.database)
    driver.begin()
    statements = "ALTER TABLE t ADD n INT; DROP TABLE u; CREATE TABLE v (id INT PRIMARY KEY)"
    mysql_server.sql(statements, database=driver.database)
    (source,) = driver.settings.sources
    assert driver.tables.jump(source) == [driver.table]
    names = {split_key(key)[1].table for key in driver.tables.there()}
    assert names == {"t", "v"}
    driver.begin()
    there = driver.tables.source_target(driver.key)
    assert there is not None
    assert list(there.column_names) == ["id", "n"]


def test_request_whose_runner_died_after_its_last_batch_ends(driver: Driver) -> None:
    progress = driver.loading.planned(driver.checkpoint, driver.tables)
    driver.loading.reread("shop", driver.table, "somebody asked")
    progress = driver.loading.planned(progress, driver.tables)
    assert [request.state for request in driver.state.requests()] == ["running"]
    load = progress.loads[driver.key]
    progress = driver.state.write(replace(progress, loads={driver.key: replace(load, done=load.chunks)}))
    driver.begin()
    progress = driver.loading.planned(progress, driver.tables)
    assert not driver.loading.is_asked(progress), "a run until caught up would never end"
    assert [request.state for request in driver.state.requests()] == ["done"]


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_restarts.py::test_changes_before_a_reload_are_still_delivered"
)
def test_restarted_load_duplicates_no_rows_of_other_tables(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE a (n INT); CREATE TABLE b (n INT); INSERT INTO a VALUES (1)", database=database
    )
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, load="consistent")
    run_to_end(spark, settings)
    mysql_server.sql("INSERT INTO b VALUES (2)", database=database)
    state = PipelineState.open(settings.state, settings.name)
    state.request_resnapshot("shop", TableName(database, "a"), remove=False)
    state.close()

    def lose(*_: object) -> None:
        raise PrivilegeMissing("the account was taken away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MysqlSink, "commit", lose)
        with pytest.raises(PrivilegeMissing):
            run_to_end(spark, settings)
    run_to_end(spark, settings)
    assert mariadb_server.sql(f"SELECT n FROM {database}.a") == [(1,)]
    assert mariadb_server.sql(f"SELECT n FROM {database}.b") == [(2,)]
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(keep=("local",))
def test_superseded_runner_commits_nothing(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1)", database=database)
    now, taken = tmp_path / "now", tmp_path / "taken"

    def pass_on(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Take the pipeline over while its runner waits for the job, as if the runner's lease had expired."""
        if now.exists():
            now.rename(taken)
            other = PipelineState.open(f"sqlite://{tmp_path}/penstock-pipelines.db", "test")
            other.store.delete("/pipelines/test/lease")
            other.take()
            other.close()
        return batch

    sink = {"files": {"path": str(tmp_path / "feed")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, steps=[{"python": {"function": pass_on}}])

    def ids() -> list[int]:
        return sorted(row["id"] for row in parquet_rows(f"{tmp_path}/feed/{database}/t/[!_]*.parquet"))

    run_to_end(engine, settings)
    mysql_server.sql("INSERT INTO t VALUES (2)", database=database)
    now.touch()
    with pytest.raises(LeaseLost, match="taken"):
        run_to_end(engine, settings)
    assert taken.exists()
    assert ids() == [1]
    run_to_end(engine, settings)
    assert ids() == [1, 2]


@pytest.mark.deep(keep=("local",))
def test_feed_loses_nothing_if_another_server_cuts_the_log_differently(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY)", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root"), "mode": "feed"}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, load="none")
    run_to_end(engine, settings)
    for number in range(3):
        mysql_server.sql(f"INSERT INTO t VALUES ({number}); FLUSH BINARY LOGS", database=database)
    failed = False
    cut_log = SourceLog.works

    def first_part_alone(driver: JobDriver, plan: TaskPlan) -> Any:
        """Write only the first range, and then switch to another server."""
        nonlocal failed
        if failed:
            return run_job(driver, plan)
        outcome = run_job(driver, replace(plan, record=replace(plan.record, ranges=plan.record.ranges[:1])))
        if outcome.surprises:
            return outcome
        failed = True
        raise PositionInvalid("there is no such place")

    def in_other_parts(log: SourceLog, begin: Offset, end: Offset) -> list[RangeWork]:
        first, second, *more = cut_log(log, begin, end)
        return [second, first, *more] if failed else [first, second, *more]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "run_job", first_part_alone)
        patch.setattr(SourceLog, "works", in_other_parts)
        run_to_end(engine, settings)
    assert failed
    actual_rows = mariadb_server.sql(f"SELECT DISTINCT id FROM {database}.t ORDER BY id")
    assert actual_rows == [(number,) for number in range(3)]
    mariadb_server.sql(f"DROP DATABASE {database}")


def test_recreated_column_has_its_table_reloaded_despite_a_driver_restart(driver: Driver) -> None:
    assert driver.meet("ALTER TABLE t ADD COLUMN v INT", 1000) == ()
    driver.meet("ALTER TABLE t DROP COLUMN v", 2000)
    assert not driver.state.requests(), "a column that is new has null in older rows"
    driver.begin()
    driver.meet("ALTER TABLE t ADD COLUMN v VARCHAR(9)", 3000)
    assert [request.table for request in driver.state.requests()] == [driver.table]


def test_swap_for_a_unique_key_deletes_the_rows_that_the_copy_omitted(
    driver: Driver, mysql_server: Server
) -> None:
    swap = "rename /* gh-ost */ table t to _t_del, _t_gho to t"
    mysql_server.sql("ALTER TABLE t ADD INDEX (id)", database=driver.database)
    driver.meet(swap, 1000)
    assert not driver.state.requests(), "a copy with the same columns and keys has the same rows"
    mysql_server.sql("ALTER TABLE t ADD UNIQUE (id)", database=driver.database)
    # The server has the new key before the pipeline reaches the swap.
    driver.begin()
    driver.meet(swap, 2000)
    assert [request.remove for request in driver.state.requests()] == [True]


def test_keyless_table_is_loaded_exactly_in_a_batch_of_its_own(
    driver: Driver, mysql_server: Server, tmp_path: Path
) -> None:
    mysql_server.sql("CREATE TABLE keyless (n INT)", database=driver.database)
    feed = {"files": {"path": str(tmp_path / "feed")}}
    settings = pipeline_of(mysql_server, driver.database, feed, tmp_path / "feeds", load="full", name="feed")
    state = PipelineState.open(settings.state, settings.name)
    feeding = Driver(settings, state, driver.database)
    progress = feeding.loading.planned(feeding.checkpoint, feeding.tables)
    works, _, _ = feeding.loading.next(progress)
    assert [(work.table.table, work.exact) for work in works] == [("keyless", True)]
    done = {
        key: replace(load, done=load.chunks if "keyless" in key else 0)
        for key, load in progress.loads.items()
    }
    works, _, _ = feeding.loading.next(replace(progress, loads=done))
    assert [(work.table.table, work.exact) for work in works] == [("t", False)]
    state.close()


def test_keyless_table_is_not_loaded_into_a_target_with_foreign_rows(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    """The load empties the target first, because without a key, the pipeline cannot tell its own rows from
    others.
    """
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (n INT); INSERT INTO t VALUES (1)", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}

    def plan(name: str, *steps: dict[str, Any], earlier: dict[str, Any] | None = None) -> list[str]:
        settings = pipeline_of(
            mysql_server, database, sink, tmp_path / name, name=name, load="full", steps=list(steps)
        )
        with closing(PipelineState.open(settings.state, settings.name)) as state:
            driver = Driver(settings, state, database)
            progress = replace(driver.checkpoint, earlier=earlier)
            return list(driver.loading.planned(progress, driver.tables).loads)

    with pytest.raises(OptionInvalid, match="may have rows of others"):
        plan("shards", {"shard": {"of": 2, "keep": 0, "columns": ["n"]}})
    assert plan("first") == [f"shop/{database}.t"]
    mariadb_server.sql("INSERT INTO t VALUES (7)", database=database)
    with pytest.raises(OptionInvalid, match="has rows that this pipeline has not written"):
        plan("second")
    assert plan("reset", earlier={}) == [f"shop/{database}.t"]
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.parametrize(
    ("shard", "meet"),
    [({}, True), ({"shard_value": "{table}"}, False), ({"shard_value": "{instance}"}, True)],
)
def test_tables_that_share_a_target_without_shards_of_their_own_are_merged_by_key(
    driver: Driver, mysql_server: Server, tmp_path: Path, shard: dict[str, str], meet: bool
) -> None:
    """Loaded rows are appended only if no key can occur twice."""
    mysql_server.sql("CREATE TABLE t2 (id INT PRIMARY KEY)", database=driver.database)
    route = {"to": f"{driver.database}.merged"} | (shard and {"shard_column": "shard"} | shard)
    lake = {"delta": {"path": str(tmp_path / "merged")}}
    settings = pipeline_of(
        mysql_server, driver.database, lake, tmp_path / "merges", name="merge", steps=[{"route": route}]
    )
    state = PipelineState.open(settings.state, settings.name)
    merging = Driver(settings, state, driver.database)
    assert merging.tables.shared.may_meet({merging.key}) == meet
    assert not driver.tables.shared.may_meet({driver.key})
    state.close()


def test_condition_without_a_column_is_refused_before_anything_is_read(driver: Driver) -> None:
    progress = driver.loading.planned(driver.checkpoint, driver.tables)
    done = replace(progress.loads[driver.key], done=progress.loads[driver.key].chunks)
    progress = replace(progress, loads={driver.key: done})
    number = driver.state.request_resnapshot("shop", driver.table, "idd < 2")
    progress = driver.loading.planned(progress, driver.tables)
    wish = driver.state.request(number)
    assert wish is not None
    assert (wish.state, progress.loads[driver.key]) == ("failed", done)
    assert "idd" in wish.what
    driver.state.request_resnapshot("shop", driver.table, "id < 2 OR id LIKE '%3'")
    progress = driver.loading.planned(progress, driver.tables)
    assert progress.loads[driver.key].where == "id < 2 OR id LIKE '%3'"


def test_dropped_target_is_recreated_for_its_resnapshot(driver: Driver, tmp_path: Path) -> None:
    progress = driver.loading.planned(driver.checkpoint, driver.tables)
    done = replace(progress.loads[driver.key], done=progress.loads[driver.key].chunks)
    folder = tmp_path / "lake" / driver.database / "t"
    shutil.rmtree(folder)
    driver.state.request_resnapshot("shop", driver.table)
    progress = driver.loading.planned(replace(progress, loads={driver.key: done}), driver.tables)
    assert not progress.loads[driver.key].finished
    assert open_unwritten(str(folder)) is not None


def test_interrupted_load_without_a_key_is_found_though_another_target_got_no_rows(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE x (kind CHAR(1), n INT); INSERT INTO x VALUES ('a', 1), ('b', 2);"
        " CREATE TABLE y (kind CHAR(1), n INT); INSERT INTO y VALUES ('a', 3), ('a', 4)",
        database=database,
    )
    sink = {"delta": {"path": str(tmp_path / "lake"), "mode": "feed"}}
    steps = [{"route": {"to": f"{database}.all_{{kind}}"}}]
    settings = pipeline_of(mysql_server, database, sink, tmp_path, steps=steps)
    record_batch = Batches._record
    interrupted: list[BatchRecord] = []

    def fail_once(batches: Batches, checkpoint: Any, record: BatchRecord, *more: Any, **options: Any) -> Any:
        if not interrupted and [work.table.table for work in record.chunks] == ["y"]:
            interrupted.append(record)
            raise AssertionError("killed before the record")
        return record_batch(batches, checkpoint, record, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "_record", fail_once)
        with pytest.raises(AssertionError, match="killed before the record"):
            run_to_end(LocalDriver(2), settings)
        assert interrupted
        run_to_end(LocalDriver(2), settings)
    rows = {kind: delta_rows(str(tmp_path / "lake" / database / f"all_{kind}")) for kind in "ab"}
    assert {kind: sorted(row["n"] for row in rows[kind]) for kind in rows} == {"a": [1, 3, 4], "b": [2]}
