# SPDX-License-Identifier: Apache-2.0
"""Pipelines with several sinks over a binlog file: positions, failed sinks and slow sinks."""

import json
import random
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.engine import sink_runs as sink_runs_module
from penstock.engine.sink_runs import SinkRuns
from penstock.errors import CoordinationLost, LeaseLost, OptionInvalid, PenstockError
from penstock.local.driver import LocalDriver
from penstock.pipeline.handover import adopt
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.pipeline.sink_positions import smallest_offsets
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.retry import Backoff
from penstock.sinks.files.sink import FilesSink
from penstock.sinks.sink import BatchMark, Receipt
from tests.support.binlog.forged_log import NOTE_IDS
from tests.support.pipeline.local_runs import notes_pipeline, run_here, run_sinks_here
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until


def feed_of(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"files": {"path": str(folder / name)}, **more}


@pytest.fixture
def two_feeds(tmp_path: Path) -> PipelineSettings:
    return notes_pipeline(tmp_path, sinks={name: feed_of(tmp_path, name) for name in ("lake", "audit")})


def ids_in(folder: Path, name: str) -> list[int]:
    files = sorted((folder / name / "shop" / "notes").glob("[!_]*.parquet"))
    return sorted(number for file in files for number in parquet.read_table(file)["id"].to_pylist())


def state_of(settings: PipelineSettings, sink: str = "") -> PipelineState:
    return PipelineState.open(settings.state, settings.name, sink)


def block_file(folder: Path, name: str) -> Path:
    """Put a file at the path of a feed's folder."""
    file = folder / name
    file.write_text("")
    return file


def test_each_sink_receives_each_change_once(two_feeds: PipelineSettings, tmp_path: Path) -> None:
    told: list[Mapping[str, Any]] = []
    progress = run_sinks_here(two_feeds, told.append)
    assert {name: checkpoint.number for name, checkpoint in progress.items()} == {"lake": 2, "audit": 2}
    assert ids_in(tmp_path, "lake") == ids_in(tmp_path, "audit") == list(NOTE_IDS)
    assert {report["sink"] for report in told} == {"lake", "audit"}
    run_sinks_here(two_feeds)
    assert ids_in(tmp_path, "lake") == ids_in(tmp_path, "audit") == list(NOTE_IDS), "there is nothing more"


def test_sink_receives_the_rows_of_its_tables_alone(tmp_path: Path) -> None:
    sinks = {"lake": feed_of(tmp_path, "lake"), "audit": feed_of(tmp_path, "audit", tables="shop.others")}
    settings = notes_pipeline(tmp_path, sinks=sinks)
    progress = run_sinks_here(settings)
    assert (ids_in(tmp_path, "lake"), ids_in(tmp_path, "audit")) == (list(NOTE_IDS), [])
    # A sink without rows advances with the log, so it does not prevent the source from purging files.
    assert progress["lake"].offsets == progress["audit"].offsets


def test_failed_sink_is_named_and_catches_up_while_the_other_stands(
    two_feeds: PipelineSettings, tmp_path: Path
) -> None:
    blocking = block_file(tmp_path, "audit")
    with pytest.raises(PenstockError, match="sink audit: "):
        run_sinks_here(two_feeds)
    assert ids_in(tmp_path, "lake") == list(NOTE_IDS)
    with closing(state_of(two_feeds, "lake")) as lake, closing(state_of(two_feeds, "audit")) as audit:
        assert (lake.shown()["state"], audit.shown()["state"]) == ("running", "failed")
        ahead, behind = lake.checkpoint(), audit.checkpoint()
        assert ahead is not None
        assert behind is not None
        assert smallest_offsets([ahead, behind]) == (behind.offsets or ahead.offsets)
        blocking.unlink()
        run_sinks_here(two_feeds)
        assert lake.checkpoint() == replace(ahead, token=lake.checkpoint().token), "it has nothing to do"
    assert ids_in(tmp_path, "lake") == ids_in(tmp_path, "audit") == list(NOTE_IDS)


def test_failed_sink_is_started_again_while_the_other_runs(
    two_feeds: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_runs_module, "_RESTARTS", Backoff(0.05, 0.05))
    blocking = block_file(tmp_path, "audit")
    failed, caught_up = threading.Event(), threading.Event()

    def note(report: Mapping[str, Any]) -> None:
        if (report["sink"], report["state"]) == ("audit", "failed"):
            failed.set()
        if (report["sink"], report.get("batch")) == ("audit", 2) and report["state"] == "running":
            caught_up.set()

    runs = SinkRuns(two_feeds, LocalDriver(2), report=note)
    thread = threading.Thread(target=runs.run, daemon=True)
    thread.start()
    assert failed.wait(WAIT_SECONDS_MAX)
    wait_until(lambda: ids_in(tmp_path, "lake") == list(NOTE_IDS))
    blocking.unlink()
    assert caught_up.wait(WAIT_SECONDS_MAX)
    runs.stop()
    thread.join(WAIT_SECONDS_MAX)
    assert not thread.is_alive()
    assert ids_in(tmp_path, "audit") == list(NOTE_IDS)


@pytest.mark.parametrize("error", [OptionInvalid("no such path"), ValueError("of a client library")])
def test_sink_that_cannot_be_created_or_fails_unexpectedly_falls_behind_alone(
    two_feeds: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(settings: PipelineSettings) -> Any:
        if settings.sink.name == "audit":
            raise error
        return settings.sink.make()

    with monkeypatch.context() as patched:
        patched.setattr(PipelineSettings, "make_sink", refuse)
        with pytest.raises(PenstockError, match=f"sink audit: .*{error.args[0]}"):
            run_sinks_here(two_feeds)
    assert ids_in(tmp_path, "lake") == list(NOTE_IDS)
    run_sinks_here(two_feeds)
    assert ids_in(tmp_path, "audit") == list(NOTE_IDS)


def test_run_ends_with_the_error_once_all_sinks_have_failed(
    two_feeds: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_runs_module, "_RESTARTS", Backoff(3600.0, 3600.0))
    for name in ("lake", "audit"):
        block_file(tmp_path, name)
    with pytest.raises(PenstockError, match="sink lake: "):
        SinkRuns(two_feeds, LocalDriver(2)).run()


def test_slow_sink_does_not_delay_the_other(
    two_feeds: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, others_done = FilesSink.commit, threading.Event()

    def commit_slowly(sink: FilesSink, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        if str(sink.settings.path).endswith("audit"):
            assert others_done.wait(WAIT_SECONDS_MAX), "the other sink reads to the end of the log"
        commit(sink, mark, receipts)

    def note(report: Mapping[str, Any]) -> None:
        if (report["sink"], report.get("batch")) == ("lake", 2):
            others_done.set()

    monkeypatch.setattr(FilesSink, "commit", commit_slowly)
    run_sinks_here(two_feeds, note)
    assert ids_in(tmp_path, "lake") == ids_in(tmp_path, "audit") == list(NOTE_IDS)


def test_pause_ends_the_runs_of_all_sinks_and_of_one_that_waits_to_be_started_again(
    two_feeds: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_runs_module, "_RESTARTS", Backoff(3600.0, 3600.0))
    block_file(tmp_path, "audit")
    states: dict[Any, Any] = {}
    steady = threading.Event()

    def note(report: Mapping[str, Any]) -> None:
        states[report["sink"]] = report["state"]
        if states == {"lake": "running", "audit": "failed"}:
            steady.set()

    runs = SinkRuns(two_feeds, LocalDriver(2), report=note)
    thread = threading.Thread(target=runs.run, daemon=True)
    thread.start()
    try:
        assert steady.wait(WAIT_SECONDS_MAX)
        with closing(state_of(two_feeds)) as state:
            state.pause("maintenance")
        thread.join(WAIT_SECONDS_MAX)
        assert not thread.is_alive(), "a supervisor starts all sinks again"
    finally:
        runs.stop()


def test_second_process_is_refused_while_one_sink_runs(
    two_feeds: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_runs_module, "_LEASE_MARGIN_SECONDS", -10.0)
    with closing(state_of(two_feeds, "audit")) as running:
        running.take()
        with pytest.raises(LeaseLost, match="notes/audit is run by"):
            run_sinks_here(two_feeds)


def test_run_waits_for_a_coordination_store_that_does_not_answer_at_its_start(
    two_feeds: PipelineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True, False])
    runner = PipelineState.runner

    def lose(state: PipelineState) -> Any:
        if not next(answers, True):
            raise CoordinationLost("the store does not answer")
        return runner(state)

    monkeypatch.setattr(sink_runs_module, "_BACKOFF", Backoff(0.001, 0.001))
    monkeypatch.setattr(PipelineState, "runner", lose)
    run_sinks_here(two_feeds)
    assert ids_in(tmp_path, "lake") == ids_in(tmp_path, "audit") == list(NOTE_IDS)


# --- Positions ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_smallest_offset_is_at_or_before_every_sink_and_belongs_to_one(seed: int) -> None:
    """A busy, an idle and a failed sink: the position that the source keeps never passes any of them."""
    choose = random.Random(seed)
    sinks = {name: Checkpoint.new() for name in ("lake", "cache", "audit")}
    log = {
        source: [(epoch, file, offset) for epoch in (0, 1) for file in (9, 10) for offset in (4, 900)]
        for source in ("db1", "db2")
    }
    kept = dict.fromkeys(log, (-1, 0, 0))
    at = {(name, source): 0 for name in sinks for source in log}
    for _ in range(60):
        name, source = choose.choice(list(at))
        at[name, source] = min(at[name, source] + choose.randint(0, 2), len(log[source]) - 1)
        epoch, file, offset = log[source][at[name, source]]
        value = {"epoch": epoch, "file": f"bin.{file}", "offset": offset}
        sinks[name] = replace(sinks[name], offsets={**sinks[name].offsets, source: value})
        smallest = smallest_offsets(sinks.values())
        for source_name, place in each(smallest.items()):
            reached = [
                (known["epoch"], int(known["file"].removeprefix("bin.")), known["offset"])
                for sink in sinks.values()
                if (known := sink.offsets.get(source_name)) is not None
            ]
            position = (place["epoch"], int(place["file"].removeprefix("bin.")), place["offset"])
            assert position == min(reached)
            if len(reached) == len(sinks):
                assert position >= kept[source_name], "the log is never needed from an earlier position again"
                kept[source_name] = position


# --- Commands -------------------------------------------------------------------------------


def write_file(folder: Path, **values: Any) -> Path:
    notes_pipeline(folder, {"stdout": None})
    source = {"path": str(folder / "log" / "binlog.000001"), "name": "shop", "tables": "shop.notes"}
    file = folder / "notes.yaml"
    batch = {"interval": 0, "rows": 40}
    file.write_text(json.dumps({"source": source, "load": "none", "batch": batch, **values}))
    return file


def invoke(*words: object) -> str:
    """Run a command and return its output, even if the command fails."""
    outcome = CliRunner().invoke(make_app(), [str(word) for word in words])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome.output


def test_progress_of_a_single_sink_is_adopted_by_one_of_several(tmp_path: Path) -> None:
    file = write_file(tmp_path, sink=feed_of(tmp_path, "lake"))
    before = run_here(load_pipeline(file))
    assert not isinstance(before, dict)
    sinks = {"lake": feed_of(tmp_path, "lake"), "audit": feed_of(tmp_path, "audit")}
    write_file(tmp_path, sinks=sinks)
    settings = load_pipeline(file)
    with pytest.raises(OptionInvalid, match="was recorded with `sink`") as refused:
        run_sinks_here(settings)
    assert "penstock pipelines adopt FILE --sink lake" in str(refused.value)
    invoke("pipelines", "adopt", file, "--sink", "lake")
    progress = run_sinks_here(settings)
    assert (progress["lake"].generation, progress["lake"].number) == (before.generation, before.number)
    assert ids_in(tmp_path, "lake") == ids_in(tmp_path, "audit") == list(NOTE_IDS)
    again = invoke("pipelines", "adopt", file, "--sink", "lake")
    assert "no progress that was recorded with `sink`" in again
    write_file(tmp_path, sink=feed_of(tmp_path, "lake"))
    with pytest.raises(OptionInvalid, match="is recorded for the sinks audit, lake"):
        run_here(load_pipeline(file))
    write_file(tmp_path, sink=feed_of(tmp_path, "single"))
    invoke("pipelines", "reset", file, "--yes")
    run_here(load_pipeline(file))
    assert ids_in(tmp_path, "single") == list(NOTE_IDS), "the command that the error names helps"


@pytest.mark.parametrize("deletions", [0, 3, 6])
def test_adoption_killed_at_any_write_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletions: int
) -> None:
    class Death(BaseException):
        """Simulates the death of the process."""

    settings = notes_pipeline(tmp_path, feed_of(tmp_path, "lake"))
    run_here(settings)
    calls = 0

    def die(name: str) -> None:
        does = getattr(PipelineState, name)

        def count(*words: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > deletions:
                raise Death
            return does(*words)

        monkeypatch.setattr(PipelineState, name, count)

    with closing(state_of(settings)) as state:
        before = state.checkpoint()
        with monkeypatch.context():
            die("_delete_below")
            die("_copy_below")
            with pytest.raises(Death):
                adopt(state, "lake")
        monkeypatch.undo()
        if state.checkpoint() is not None:
            adopt(state, "lake")
    with closing(state_of(settings, "lake")) as adopted:
        assert adopted.checkpoint() == before
        assert adopted.get_large("tables") is not None


def test_show_lists_the_sinks_and_reset_forgets_one(tmp_path: Path) -> None:
    sinks = {"lake": feed_of(tmp_path, "lake"), "audit": feed_of(tmp_path, "audit")}
    file = write_file(tmp_path, sinks=sinks)
    progress = run_sinks_here(load_pipeline(file))
    shown = json.loads(invoke("pipelines", "show", file, "--json"))
    assert {name: sink["batches"] for name, sink in shown["sinks"].items()} == {"lake": 2, "audit": 2}
    end = progress["lake"].offsets["shop"]
    assert shown["sources_keep"] == {"shop": f"{end['file']}:{end['offset']}"}
    assert "audit" in invoke("pipelines", "show", file)
    invoke("pipelines", "reset", file, "--sink", "audit", "--yes")
    with closing(state_of(load_pipeline(file), "audit")) as audit:
        assert audit.checkpoint() is None
    with closing(state_of(load_pipeline(file), "lake")) as lake:
        assert lake.checkpoint() is not None
    assert "no state of a sink 'cache'" in invoke("pipelines", "reset", file, "--sink", "cache", "--yes")
    invoke("pipelines", "reset", file, "--yes")
    with closing(state_of(load_pipeline(file), "lake")) as lake:
        assert lake.checkpoint() is None


def test_no_sink_is_rewound_if_one_has_not_reached_the_position(tmp_path: Path) -> None:
    sinks = {"audit": feed_of(tmp_path, "audit"), "lake": feed_of(tmp_path, "lake")}
    file = write_file(tmp_path, sinks=sinks)
    end = run_sinks_here(load_pipeline(file))["lake"].offsets["shop"]
    with closing(state_of(load_pipeline(file), "lake")) as lake:
        checkpoint = lake.take()
        begun = lake.begun(replace(checkpoint, number=checkpoint.number - 1))
        assert begun is not None
        lake.write(replace(checkpoint, offsets=begun.begin))
    with closing(state_of(load_pipeline(file), "audit")) as audit:
        reached = audit.checkpoint()
    position = f"{end['file']}:{end['offset']}"
    refused = invoke("pipelines", "reset", file, "--position", position, "--yes")
    assert f"the pipeline has not reached {position}" in refused
    with closing(state_of(load_pipeline(file), "audit")) as audit:
        assert audit.checkpoint() == reached, "it reached the position, and is left alone nevertheless"
    both = invoke("pipelines", "reset", file, "--time", "2001-01-01")
    assert "audit, shop: from" in both
    assert "lake, shop: from" in both
    invoke("pipelines", "reset", file, "--time", "2001-01-01", "--yes")
    for name in sinks:
        with closing(state_of(load_pipeline(file), name)) as state:
            rewound = state.checkpoint()
            assert rewound is not None
            assert rewound.offsets["shop"]["offset"] < begun.begin["shop"]["offset"]


def test_comparison_needs_the_name_of_one_of_several_sinks(tmp_path: Path) -> None:
    file = write_file(tmp_path, sinks={name: feed_of(tmp_path, name) for name in ("lake", "audit")})
    refused = invoke("verify", file)
    assert "choose one with --sink" in refused
    assert "--sink lake or audit" in refused
    assert "a files sink keeps no table" in invoke("verify", file, "--sink", "audit")
    assert "no sink 'cache'" in invoke("verify", file, "--sink", "cache")


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ({}, "write sinks by name"),
        ({"lake": {}}, "write one name and what belongs to it"),
        ({"a b": "stdout"}, "'a b' is not a valid name"),
        ({"lake": {"stdout": None, "tabels": "shop.*"}}, "write one name and what belongs to it"),
        ({"lake": {"stdout": None, "tables": 7}}, "tables"),
        ({"a": "stdout", "b": "stdout"}, "it may write to a target of a"),
    ],
)
def test_mistakes_in_sinks_are_refused_by_name(tmp_path: Path, sinks: Any, message: str) -> None:
    with pytest.raises(OptionInvalid, match=message):
        notes_pipeline(tmp_path, sinks=sinks)


MYSQL = "mysql://reports:3306"
KAFKA = "broker-1:9092,broker-2:9092"


@pytest.mark.parametrize(
    ("kind", "first", "second", "is_refused"),
    [
        ("mysql", {"url": MYSQL}, {"url": "mysql://cdc:pw@reports:3306/", "apply": "serial"}, True),
        ("mysql", {"url": MYSQL}, {"url": "mysql://archive:3306"}, False),
        ("delta", {"path": "/lake"}, {"path": "/lake/shop", "table": "{table}"}, True),
        ("delta", {"path": "/lake"}, {"path": "/lakes"}, False),
        ("delta", {"path": "s3://lake/a"}, {"path": "s3://lake/a/", "mode": "feed"}, True),
        ("kafka", {"servers": KAFKA}, {"servers": "broker-2:9092"}, True),
        ("kafka", {"servers": KAFKA, "topic": "a"}, {"servers": KAFKA, "topic": "ab"}, False),
        ("kafka", {"servers": KAFKA, "topic": "a.{table}"}, {"servers": KAFKA, "topic": "a.b"}, True),
        ("redis", {"key": "product:{id}"}, {"key": "order:{id}"}, False),
        ("redis", {"key": "product:{id}"}, {}, True),
        ("clickhouse", {"database": "a"}, {"database": "b"}, False),
        ("clickhouse", {"database": "a"}, {}, True),
    ],
)
def test_sinks_that_may_write_one_target_are_refused_also_with_different_tables(
    tmp_path: Path, kind: str, first: dict[str, Any], second: dict[str, Any], is_refused: bool
) -> None:
    sinks = {"a": {kind: first, "tables": "shop.a"}, "b": {kind: second, "tables": "shop.b"}}
    if is_refused:
        with pytest.raises(OptionInvalid, match="it may write to a target of a"):
            notes_pipeline(tmp_path, sinks=sinks)
    else:
        assert len(notes_pipeline(tmp_path, sinks=sinks).sinks) == 2


def test_sink_and_sinks_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match="write either sink or sinks"):
        notes_pipeline(tmp_path, {"stdout": None}, sinks={"lake": "stdout"})


def test_one_named_sink_has_its_tables_and_its_state(tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, sinks={"lake": feed_of(tmp_path, "lake", tables="shop.o*")})
    assert not settings.sources[0].tables.matches("shop", "notes")
    assert settings.dead_letter.endswith("/notes.dead-letter/lake")
    run_here(settings)
    with closing(state_of(settings)) as state:
        assert (state.sinks(), state.checkpoint()) == (["lake"], None)
