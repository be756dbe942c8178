# SPDX-License-Identifier: Apache-2.0
"""Pipelines with shards over a binlog file: the owner of each table, and a change of the number of shards."""

import errno
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.engine.beginning import refuse_undividable
from penstock.engine.sink_runs import run_of
from penstock.errors import LeaseLost, OptionInvalid, PenstockError, StreamError
from penstock.local import shard_runs
from penstock.local.driver import LocalDriver
from penstock.local.shard_runs import ShardRuns
from penstock.model import TableName, TablePatterns
from penstock.pipeline.settings import PipelineSettings, load_pipeline, pipeline_of_values
from penstock.pipeline.shards import Shard, ShardTables
from penstock.pipeline.state import PipelineState
from penstock.retry import Backoff
from tests.support.pipeline.local_runs import run_here
from tests.support.pipeline.sharded import (
    TABLES,
    GrowingLog,
    ShardsInProcess,
    rows_in_feed,
    rows_of_log,
    sharded_values,
    write_sharded,
)
from tests.support.suite.nonempty import each

KAFKA = {"servers": "kafka:9092", "topic": "changes"}


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    grown = GrowingLog(tmp_path / "log")
    grown.grow(40)
    return grown


def settings_of(folder: Path, shards: int, **more: Any) -> PipelineSettings:
    return pipeline_of_values(sharded_values(folder, shards, **more), folder)


def invoke(*words: str) -> str:
    return CliRunner().invoke(make_app(), list(words)).output


# --- The owner of a table -----------------------------------------------------------------------


def test_each_table_belongs_to_one_shard_for_ever() -> None:
    names = [TableName("shop", f"orders_{number}") for number in range(1000)]
    owners = [[shard.number for shard in Shard.all_of(4) if shard.owns(name)] for name in names]
    assert all(len(numbers) == 1 for numbers in owners)
    assert min(owners.count([number]) for number in range(4)) > 200, "the tables are spread evenly"
    # The hash is pinned, because a different hash would assign tables with recorded progress to other shards.
    assert [numbers[0] for numbers in owners[:8]] == [0, 2, 0, 2, 1, 3, 1, 3]
    assert Shard(0, 4).owns(TableName("SHOP", "Orders_0")), "targets may ignore case"


def test_tables_that_are_merged_belong_to_one_shard(tmp_path: Path) -> None:
    route = {"route": {"tables": "shop_*.orders_*", "to": "shop.orders", "shard_column": "origin"}}
    settings = settings_of(tmp_path, 4, steps=[route])
    owners = {
        number
        for number, part in enumerate(settings.each_shard())
        for table in range(50)
        if part.sources[0].tables.matches(f"shop_{table % 3}", f"orders_{table}")
    }
    assert len(owners) == 1


def test_table_with_the_name_of_a_ghost_table_belongs_to_the_shard_of_its_target(tmp_path: Path) -> None:
    names = [TableName("shop", "_orders_old"), TableName("shop", "archive")]
    route = {"route": {"tables": [str(name) for name in names], "to": "shop.everything"}}
    source = {"path": str(tmp_path / "log"), "tables": ["shop._orders_old", "shop.*"]}
    parts = settings_of(tmp_path, 4, source=source, steps=[route]).each_shard()
    owners = [
        [part.shard for part in parts if part.sources[0].tables.matches(name.database, name.table)]
        for name in names
    ]
    owner_of_target = [shard for shard in Shard.all_of(4) if shard.owns(TableName("shop", "everything"))]
    assert owners == [owner_of_target, owner_of_target]


def test_copy_of_a_schema_change_stays_with_its_table() -> None:
    for table in ("orders", "notes", "items", "t1"):
        for shard in each(Shard.all_of(4)):
            tables = ShardTables(shard, (), TablePatterns("shop.*"))
            owned = tables.matches("shop", table)
            assert tables.matches("shop", f"_{table}_gho") == tables.matches("shop", f"_{table}_new") == owned


def test_settings_of_a_shard_can_be_pickled_and_share_its_limits(tmp_path: Path) -> None:
    load = {"mode": "full", "rate": 1000, "parallel": 2}
    part = settings_of(tmp_path, 4, load=load).of_shard(Shard(1, 4))
    assert pickle.loads(pickle.dumps(part)) == part
    assert (part.load.rate, part.load.parallel) == (250, 1)
    assert part != settings_of(tmp_path, 4, load=load).of_shard(Shard(2, 4))
    assert part.sink.name == ""
    with pytest.raises(ValueError, match="is not a shard"):
        Shard.parse("4-of-4")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"sink": "stdout"}, "writes all rows to one output"),
        ({"sink": {"redis": {"url": "redis://db1", "key": "{table}:{id}"}}}, "compares the keys of all"),
        ({"sink": {"kafka": KAFKA | {"format": "drainer"}}}, "kafka sink writes the changes of all tables"),
        ({"sink": {"kafka": KAFKA | {"order": "commit"}}}, "kafka sink writes the changes of all tables"),
        ({"sink": {"mysql": {"url": "mysql://db2", "apply": "serial"}}}, "mysql sink writes the changes of"),
        ({"apply": "serial"}, "transactions of all tables in one order"),
        ({"on_cascade": "reread"}, "parents and children"),
        ({"steps": [{"route": {"to": "shop.{region}"}}]}, "route names targets by the values of rows"),
        ({"sink": None, "sinks": {name: {"files": {"path": name}} for name in "ab"}}, "several sinks"),
        ({"source": {"url": "mysql://db1", "server_id": 7}}, "has a server_id"),
    ],
    ids=[
        "stdout",
        "redis",
        "transactions",
        "commits",
        "serial sink",
        "serial",
        "cascades",
        "route",
        "sinks",
        "server_id",
    ],
)
def test_pipeline_that_cannot_be_divided_is_refused(tmp_path: Path, more: Any, reason: str) -> None:
    with pytest.raises(OptionInvalid, match=reason):
        refuse_undividable(settings_of(tmp_path, 2, **more))


def test_run_outside_of_processes_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match="has 2 shards") as raised:
        run_of(settings_of(tmp_path, 2), LocalDriver(1))
    assert "penstock run --local" in str(raised.value.hint)


# --- Running --------------------------------------------------------------------------------


def test_shards_write_every_row_once(tmp_path: Path, log: GrowingLog) -> None:
    ShardsInProcess(settings_of(tmp_path, 3)).run()
    assert rows_in_feed(tmp_path) == rows_of_log(40)
    log.grow(20)
    ShardsInProcess(settings_of(tmp_path, 3)).run()
    assert rows_in_feed(tmp_path) == rows_of_log(60)


@pytest.mark.parametrize("counts", [(1, 3), (3, 1, 2)], ids=str)
def test_changed_number_of_shards_continues_at_one_position(
    tmp_path: Path, log: GrowingLog, counts: tuple[int, ...]
) -> None:
    for count in counts:
        settings = settings_of(tmp_path, count)
        ShardsInProcess(settings).agree_on_shards()
        first, *others = settings.each_shard()
        # The first shard runs ahead of the others.
        for part in (*others, first):
            run_here(part)
            log.grow(9)
        run_here(first)
    ShardsInProcess(settings_of(tmp_path, counts[-1])).run()
    assert rows_in_feed(tmp_path) == rows_of_log(log.rows)


@pytest.mark.parametrize("writes", [1, 6, 11, 16])
def test_handover_killed_at_any_write_is_finished_by_the_next(
    tmp_path: Path, log: GrowingLog, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    class Death(BaseException):
        """Simulates the death of the process."""

    before = settings_of(tmp_path, 2)
    ShardsInProcess(before).agree_on_shards()
    run_here(before.each_shard()[1])
    log.grow(10)
    run_here(before.each_shard()[0])
    calls = 0

    def die_later(name: str) -> None:
        does = getattr(PipelineState, name)

        def count(*words: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > writes:
                raise Death
            return does(*words)

        monkeypatch.setattr(PipelineState, name, count)

    with monkeypatch.context():
        for name in ("put_large", "write_first", "_delete_below"):
            die_later(name)
        try:
            ShardsInProcess(settings_of(tmp_path, 3)).agree_on_shards()
        except Death:
            pass
        else:
            assert writes > 15, "the handover has fewer writes"
    monkeypatch.undo()
    log.grow(10)
    ShardsInProcess(settings_of(tmp_path, 3)).run()
    assert rows_in_feed(tmp_path) == rows_of_log(60)


def test_progress_of_shards_is_refused_with_another_number(tmp_path: Path, log: GrowingLog) -> None:
    ShardsInProcess(settings_of(tmp_path, 2)).run()
    with pytest.raises(OptionInvalid, match="has progress of 2 shards, not of 1"):
        run_here(settings_of(tmp_path, 1))
    with pytest.raises(OptionInvalid, match="has progress of 2 shards, not of 3"):
        run_here(settings_of(tmp_path, 3).of_shard(Shard(0, 3)))
    assert rows_in_feed(tmp_path) == rows_of_log(40)


def test_shards_do_not_change_while_one_runs_or_has_not_begun(tmp_path: Path, log: GrowingLog) -> None:
    settings = settings_of(tmp_path, 2)
    ShardsInProcess(settings).agree_on_shards()
    run_here(settings.each_shard()[0])
    with pytest.raises(OptionInvalid, match="shard 1-of-2 of the pipeline shop has not begun"):
        ShardsInProcess(settings_of(tmp_path, 3)).run()
    run_here(settings.each_shard()[1])
    with closing(PipelineState.of(settings.each_shard()[1])) as state:
        state.take()
        with pytest.raises(LeaseLost, match="shop/1-of-2 is run by"):
            ShardsInProcess(settings_of(tmp_path, 3)).run()
    ShardsInProcess(settings_of(tmp_path, 3)).run()
    assert rows_in_feed(tmp_path) == rows_of_log(40)


def test_lost_state_is_refused_with_shards(tmp_path: Path, log: GrowingLog) -> None:
    ShardsInProcess(settings_of(tmp_path, 2)).run()
    for file in tmp_path.glob("penstock-pipelines.db*"):
        file.unlink()
    with pytest.raises(OptionInvalid, match="its state knows of none"):
        ShardsInProcess(settings_of(tmp_path, 3)).run()


def test_only_the_process_of_a_shard_ends_at_the_barrier(tmp_path: Path, log: GrowingLog) -> None:
    file = str(write_sharded(tmp_path, 1))
    settings = load_pipeline(file)
    begin = run_here(settings)
    with closing(PipelineState.of(settings)) as state:
        # The state that an interrupted change of the number of shards leaves.
        state.shards.set_barrier(begin.offsets)
    log.grow(20)
    of_shard = ("--local", "--shard", "0-of-1", "--until", "barrier")
    assert "0 rows written" in invoke("run", file, *of_shard)
    assert "20 rows written" in invoke("run", file, "--local", "--until", "caught-up")
    assert rows_in_feed(tmp_path) == rows_of_log(60)
    assert "--until barrier is unknown" in invoke("run", file, "--local", "--until", "barrier")


# --- Processes ------------------------------------------------------------------------------

_WAITS = "import signal; signal.pause()"
_REPORT = '{"pipeline": "shop", "state": "running"}'
_REPORTS = f"print({_REPORT!r})"


def processes_of(folder: Path, first: str, second: str, **more: Any) -> ShardRuns:
    """Return the runs of two shards whose processes execute this Python code."""

    def command(shard: Shard, *, to_barrier: bool = False) -> list[str]:
        return [sys.executable, "-S", "-c", (first, second)[shard.number]]

    return ShardRuns(settings_of(folder, 2), command, **more)


def test_output_of_a_step_is_no_report_of_its_shard(tmp_path: Path) -> None:
    lines = b'42\n{"a": 1}\n\xff\n'
    output = f"import os, sys; os.write(1, {lines!r}); sys.exit(3)"
    reports: list[Mapping[str, Any]] = []
    runs = processes_of(tmp_path, output, _REPORTS, until_caught_up=True, report=reports.append)
    with pytest.raises(StreamError, match="the process of shard 0-of-2 ended with status 3"):
        runs.run()
    assert reports == [json.loads(_REPORT)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_defect_in_the_thread_of_a_shard_ends_all_shards(tmp_path: Path) -> None:
    runs = processes_of(tmp_path, _REPORTS, _WAITS, report=Mock(side_effect=ZeroDivisionError))
    with pytest.raises(PenstockError, match=r"a defect ended the thread of shard 0-of-2: ZeroDivisionError"):
        runs.run()


def test_shard_that_the_system_cannot_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []

    def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        starts.append(command[-1])
        if starts.count(_REPORTS) == 1 and command[-1] == _REPORTS:
            raise OSError(errno.EMFILE, "Too many open files")
        return popen(command, **options)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(shard_runs, "_RESTARTS", Backoff(first=0.01))
    reports: list[Mapping[str, Any]] = []
    processes_of(tmp_path, _REPORTS, _WAITS, report=reports.append).run()
    assert starts.count(_REPORTS) == 2
    assert reports, "the shard runs once the system lets it"


# --- Commands -------------------------------------------------------------------------------


def test_show_lists_the_shards_and_reset_forgets_all(tmp_path: Path, log: GrowingLog) -> None:
    file = str(write_sharded(tmp_path, 2))
    ShardsInProcess(load_pipeline(file)).run()
    shown = json.loads(invoke("pipelines", "show", file, "--json"))
    assert set(shown["shards"]) == {"0-of-2", "1-of-2"}
    assert {status["batches"] for status in shown["shards"].values()} == {1}
    assert shown["sources_keep"].keys() == {"shop"}
    assert "shop/1-of-2" in invoke("pipelines", "list", file)
    assert "shop begins without a load" in invoke("pipelines", "reset", file, "--yes")
    shown = json.loads(invoke("pipelines", "show", file, "--json"))
    assert {status["state"] for status in shown["shards"].values()} == {"never ran"}
    file = str(write_sharded(tmp_path, 3))
    ShardsInProcess(load_pipeline(file)).run()
    twice = sorted([*rows_of_log(40), *rows_of_log(40)])
    assert rows_in_feed(tmp_path) == twice, "a feed gets every row again after a reset"
    assert TABLES[0] in {name for name, _ in twice}
