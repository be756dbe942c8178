# SPDX-License-Identifier: Apache-2.0
"""A pipeline's run survives temporary failures of its store, its lease and its servers."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest

from penstock.coordinate.backends import sqlite
from penstock.engine import batches as batches_module
from penstock.engine import beginning, servers, source_log
from penstock.engine import run as run_module
from penstock.engine.beginning import at_their_servers, refuse_lost_state, refuse_outdated_state
from penstock.engine.progress import Progress
from penstock.engine.run import PipelineRun
from penstock.engine.servers import SourceServers
from penstock.engine.source_log import SourceLog
from penstock.engine.stretches import Stretches
from penstock.engine.task_plan import TaskPlan
from penstock.errors import (
    ConnectionLost,
    CoordinationLost,
    LeaseLost,
    OptionInvalid,
    PenstockError,
    PositionPurged,
    ServerBehind,
    StateOutdated,
)
from penstock.model import Position, TableName
from penstock.pipeline import state as state_module
from penstock.pipeline.cascades import CascadeWatch
from penstock.pipeline.record import BatchRecord, ChunkWork
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.retry import Backoff
from penstock.sinks.sink import BatchMark, Evolution
from penstock.source.offsets import Offset
from penstock.source.read_settings import ReadSettings
from tests.support.pipeline.changes_made import changes_of, insert, target_of

Loop = Callable[[PipelineState, Checkpoint], Checkpoint]


class NoTasks:
    """A driver that runs nothing."""

    cores = 2
    is_in_process = False

    def run(self, plan: TaskPlan) -> list[pyarrow.RecordBatch]:
        """Fail: this test makes no plans."""
        raise AssertionError(plan)

    def cancelling(self, stop: threading.Event, seconds: float) -> AbstractContextManager[None]:
        """Do nothing: there are no tasks to cancel."""
        return nullcontext()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_BACKOFF", Backoff(0.001, 0.01))
    for module in (run_module, batches_module):
        monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    return settings_with(tmp_path)


def settings_with(folder: Path, **errors: Any) -> PipelineSettings:
    source = {"url": "mysql://nobody@127.0.0.1:1", "name": "shop", "tables": "d.*"}
    sink = {"files": {"path": str(folder / "feed")}}
    return pipeline_of_values({"name": "test", "source": source, "sink": sink, "errors": errors}, folder)


@pytest.fixture
def state(settings: PipelineSettings) -> Iterator[PipelineState]:
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        yield state


def run_of(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch, *loops: Loop, standby: bool = False
) -> tuple[PipelineRun, list[dict[str, Any]]]:
    """Return a run whose loop performs each of these actions in turn, and the messages that it logs."""
    turns = iter(loops)
    told: list[dict[str, Any]] = []
    # The server of these settings does not exist, so it cannot be queried for foreign keys.
    monkeypatch.setattr(CascadeWatch, "look", lambda self: None)
    monkeypatch.setattr(PipelineRun, "_loop", lambda self, state, checkpoint: next(turns)(state, checkpoint))
    return PipelineRun(
        settings, NoTasks(), report=lambda shown: told.append(dict(shown)), standby=standby
    ), told


def ends(state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def raising(problem: PenstockError) -> Loop:
    def loop(state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        raise problem

    return loop


def test_outage_of_server_or_store_anywhere_is_retried_and_reported_at_once(
    settings: PipelineSettings, state: PipelineState, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []

    def look(state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        shown.append(state.shown())
        return checkpoint

    run, told = run_of(
        settings,
        monkeypatch,
        raising(ConnectionLost("the server is away")),
        raising(CoordinationLost("the store is away")),
        look,
    )
    assert run.run().token
    assert [(one["state"], one["error"]) for one in told] == [
        ("retrying", "ConnectionLost"),
        ("retrying", "CoordinationLost"),
    ]
    # Nothing is written into a store that does not respond.
    assert [(one["state"], one["what"]) for one in shown] == [("retrying", "the server is away")]


@pytest.mark.parametrize("kind", ["mysql", "postgres"])
def test_unavailable_target_at_the_start_is_retried(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"url": "mysql://nobody@127.0.0.1:1", "name": "shop"}
    values = {"name": "test", "source": source, "sink": {kind: {"url": f"{kind}://nobody@127.0.0.1:1"}}}
    run, told = run_of(pipeline_of_values(values, tmp_path), monkeypatch, ends)
    sink, checks = run._sink, itertools.count()
    check = type(sink).check
    monkeypatch.setattr(sink, "check", lambda: check(sink) if next(checks) == 0 else ())
    assert run.run().token
    assert [(one["state"], one["error"]) for one in told] == [("retrying", "ConnectionLost")]


def test_unavailable_store_at_the_start_is_retried(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = PipelineState.of
    tries = []

    def open_late(settings: PipelineSettings) -> PipelineState:
        tries.append(settings.state)
        if len(tries) < 3:
            raise CoordinationLost("the store is away")
        return opened(settings)

    monkeypatch.setattr(PipelineState, "of", open_late)
    run, told = run_of(settings, monkeypatch, ends)
    run.run()
    assert [one["error"] for one in told] == ["CoordinationLost"] * 2


def test_outage_that_outlasts_the_settings_ends_the_run_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_with(tmp_path, retry_for="50ms")
    run, told = run_of(settings, monkeypatch, *[raising(ConnectionLost("the server is away"))] * 100)
    with pytest.raises(ConnectionLost, match="away"):
        run.run()
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        assert state.shown()["state"] == "failed"
    assert [one["state"] for one in told][-2:] == ["retrying", "failed"]


def test_keyless_table_is_not_waited_for_beyond_the_configured_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_with(tmp_path, retry_for="50ms")
    chunk = ChunkWork("shop", TableName("d", "keyless"), {"key": []}, exact=True)
    numbers: list[int] = []

    def complete(state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        offsets = {"shop": Offset(Position(0, "bin.000001", 4)).to_json()}
        checkpoint = replace(checkpoint, offsets=offsets)
        batches = run._batches(state)
        if (begun := state.begun(checkpoint)) is not None:
            checkpoint = batches.resume(checkpoint, begun)
        numbers.append(checkpoint.number + 1)
        return batches.run(checkpoint, BatchRecord(numbers[-1], {}, {}, (), (chunk,), 1))

    def lose(*_: object) -> None:
        raise ConnectionLost("the server is away")

    monkeypatch.setattr(batches_module, "task_plan", lose)
    # The target contains no rows of the batch.
    monkeypatch.setattr(batches_module, "committed_floors", lambda *_: None)
    run, told = run_of(settings, monkeypatch, *[complete] * 100)
    no_tables: Any = SimpleNamespace()
    run._tables = run._loading = no_tables
    with pytest.raises(ConnectionLost, match="away"):
        run.run()
    assert [shown["state"] for shown in told][-2:] == ["retrying", "failed"]
    assert numbers == list(range(1, len(numbers) + 1)), "no number is used for two reads"


def test_lost_lease_is_acquired_again_if_it_is_still_free(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        assert state._lease is not None
        assert state._session is not None
        state._session.close()
        return state.write(checkpoint)

    run, told = run_of(settings, monkeypatch, lose, ends)
    assert run.run().token
    assert [one["error"] for one in told] == ["LeaseLost"]


@pytest.mark.parametrize("what", ["taken", "reset"])
def test_pipeline_taken_over_or_reset_by_another_process_is_left_to_it(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def lose(state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        assert state._session is not None
        state._session.close()
        with closing(PipelineState.open(settings.state, settings.name)) as other:
            if what == "taken":
                other.take()
            else:
                other.reset()
        return state.write(checkpoint)

    run, _ = run_of(settings, monkeypatch, lose, ends)
    with pytest.raises(LeaseLost, match="taken"):
        run.run()


def test_standby_that_was_taken_over_during_an_outage_takes_over_again(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = itertools.count(1)
    take = PipelineState.take

    def counted_take(self: PipelineState, token_before: int | None = None) -> Checkpoint:
        assert next(attempts) < 9, "the standby asks for the lease without end"
        return take(self, token_before)

    def lose(state: PipelineState, checkpoint: Checkpoint) -> Checkpoint:
        state.close()
        with closing(PipelineState.open(settings.state, settings.name)) as other:
            other.take()
        raise CoordinationLost("the store is away")

    run, _ = run_of(settings, monkeypatch, lose, ends, standby=True)
    monkeypatch.setattr(PipelineState, "take", counted_take)
    assert run.run().token > 2


def test_lease_of_a_killed_runner_is_waited_for(
    settings: PipelineSettings, state: PipelineState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_SIGNS_OF_LIFE", 0.001)
    monkeypatch.setattr(state_module, "_LEASE_SECONDS", 0.3)
    token = state.take().token
    run, told = run_of(settings, monkeypatch, ends)
    assert run.run().token > token
    assert told[0]["state"] == "retrying"
    assert told[0]["error"] == "LeaseLost"


def test_refused_second_runner_leaves_the_status_of_the_first(
    settings: PipelineSettings, state: PipelineState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_LEASE_MARGIN_SECONDS", -9.9)
    state.take()
    state.show({"state": "running"})
    run, _ = run_of(settings, monkeypatch)
    with pytest.raises(LeaseLost, match="is run by"):
        run.run()
    assert state.shown() == {"state": "running"}


def test_run_stopped_during_a_retry_ends_without_an_error(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 60.0)
    retried = threading.Event()
    run, _ = run_of(settings, monkeypatch, raising(ConnectionLost("the server is away")))
    run._progress._report = lambda shown: retried.set()
    thread = threading.Thread(target=run.run)
    thread.start()
    assert retried.wait(60)
    run.stop()
    thread.join(60)
    assert not thread.is_alive()


# --- State ----------------------------------------------------------------------------------


def test_feed_with_missing_state_is_not_written_twice(
    settings: PipelineSettings, state: PipelineState, tmp_path: Path
) -> None:
    sink = settings.make_sink()
    fresh = Checkpoint.new()
    # No server is asked for its tables, because the feed has one record for all of them.
    refuse_lost_state(settings, sink, fresh)
    (tmp_path / "feed/_penstock/penstock/test/0123456789ab").mkdir(parents=True)
    with pytest.raises(OptionInvalid, match="its state knows of none") as caught:
        refuse_lost_state(settings, sink, fresh)
    assert "penstock pipelines reset" in str(caught.value.hint)
    # Resetting the pipeline means accepting the loss.
    state.take()
    state.close()
    with closing(PipelineState.open(settings.state, settings.name)) as after:
        after.reset()
        after.reset()
        again = after.take()
        assert again.earlier == {}
        refuse_lost_state(settings, sink, again)
    with closing(PipelineState.open(settings.state, settings.name)) as later:
        assert later.take().earlier == {}
        assert later.get_large("reset") is None


def test_mirror_with_missing_state_is_left_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows may belong to another pipeline of the same name."""
    table = target_of({"id": "int"}, name="shop.orders")
    monkeypatch.setattr(beginning, "targets_of", lambda *_: [table])
    values = {
        "name": "test",
        "source": {"url": "mysql://root@127.0.0.1:1", "name": "shop"},
        "steps": [{"route": {"to": "all.{table}"}}],
        "sink": {"delta": {"path": str(tmp_path / "lake")}},
    }
    settings = pipeline_of_values(values, tmp_path)
    sink, target = settings.make_sink(), target_of({"id": "int"}, name="all.orders")
    refuse_lost_state(settings, sink, Checkpoint.new())
    sink.prepare(target, Evolution.EVOLVE)
    refuse_lost_state(settings, sink, Checkpoint.new())
    writer = sink.open(mark := BatchMark("test", "before", 1), 0)
    writer.write(changes_of(target, insert(1, id=1)))
    sink.commit(mark, [writer.finish()])
    with pytest.raises(OptionInvalid, match="wrote, and its state knows of none"):
        refuse_lost_state(settings, sink, Checkpoint.new())
    refuse_lost_state(settings, sink, Checkpoint.new(earlier={}))
    other = pipeline_of_values(values | {"name": "other"}, tmp_path)
    refuse_lost_state(other, sink, Checkpoint.new())


def test_state_from_before_a_table_was_created_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = target_of({"id": "int"}, name="shop.orders")
    monkeypatch.setattr(beginning, "targets_of", lambda *_: [table])
    source = {"url": "mysql://root@127.0.0.1:1", "name": "shop"}
    sink_settings = {"delta": {"path": str(tmp_path / "lake")}}
    settings = pipeline_of_values({"name": "test", "source": source, "sink": sink_settings}, tmp_path)
    sink = settings.make_sink()
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        checkpoint = state.write(replace(state.take(), number=5))
        refuse_outdated_state(settings, sink, state, checkpoint)
        sink.prepare(table, Evolution.EVOLVE)
        for number in (5, 6):
            writer = sink.open(mark := BatchMark("test", checkpoint.generation, number), 0)
            writer.write(changes_of(table, insert(number, id=number)))
            sink.commit(mark, [writer.finish()])
            if number == 5:
                refuse_outdated_state(settings, sink, state, checkpoint)
        with pytest.raises(StateOutdated, match="the target has batch 6"):
            refuse_outdated_state(settings, sink, state, checkpoint)


@pytest.mark.parametrize("on_lost", ["resnapshot", "repair"])
def test_feed_is_never_written_again_after_a_loss(
    on_lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"url": "mysql://nobody@127.0.0.1:1", "name": "shop", "on_lost": on_lost}
    sink = {"files": {"path": str(tmp_path / "feed")}}
    settings = pipeline_of_values({"name": "test", "source": source, "sink": sink}, tmp_path)
    run, _ = run_of(settings, monkeypatch, ends)
    with pytest.raises(OptionInvalid, match=f"on_lost: {on_lost} would write every row again"):
        run.run()
    files = {"name": "test", "source": {"path": "/logs", "on_lost": on_lost}, "sink": sink}
    with pytest.raises(OptionInvalid, match="name the server of the log"):
        pipeline_of_values(files, tmp_path)


@pytest.mark.parametrize(
    ("kind", "remedy"), [("files", "fail_on_data_loss: false"), ("delta", "on_lost: repair")]
)
def test_run_whose_log_was_purged_names_what_helps_this_pipeline(
    kind: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"url": "mysql://nobody@127.0.0.1:1", "name": "shop"}
    sink = {kind: {"path": str(tmp_path / "out")}}
    settings = pipeline_of_values({"name": "test", "source": source, "sink": sink}, tmp_path)
    run = PipelineRun(settings, NoTasks())
    lost = PositionPurged("the server has purged bin.000001", position="bin.000001:4", hint="a new snapshot")
    with closing(PipelineState.of(settings)) as state, pytest.raises(PositionPurged) as caught:
        run._after_loss(state, state.take(), lost)
    assert (caught.value.message, caught.value.position) == (lost.message, lost.position)
    hint = str(caught.value.hint)
    assert remedy in hint
    assert "penstock pipelines reset test --yes" in hint


# --- Servers --------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SourceServers, dict[int, str]]:
    """The servers of a source, and the identity of each server that responds, by port."""
    answering = {1: "mysql:a", 2: "mysql:b"}
    monkeypatch.setattr(servers, "key_of_server", lambda address: answering.get(address.port))
    monkeypatch.setattr(servers, "_FAIL_OVER_SECONDS", 0.0)
    source = {"url": "mysql://nobody@127.0.0.1:1", "name": "shop", "servers": ["127.0.0.1:2"]}
    sink = {"files": {"path": str(tmp_path / "feed")}}
    return SourceServers(
        pipeline_of_values({"name": "test", "source": source, "sink": sink}, tmp_path)
    ), answering


def port_in_use(servers: SourceServers) -> int:
    (source,) = servers.settings().sources
    assert source.options.address == source.server
    assert source.server is not None
    assert source.name == "shop"
    return source.server.port


def test_unavailable_server_is_replaced_by_the_next_reachable_one(
    cluster: tuple[SourceServers, dict[int, str]],
) -> None:
    chosen, answering = cluster
    assert not chosen.turn(ConnectionLost("the sink is away"))
    assert port_in_use(chosen) == 1
    del answering[1]
    assert chosen.turn(ConnectionLost("the server is away"))
    assert port_in_use(chosen) == 2
    answering[1] = "mysql:a"
    assert not chosen.turn(ConnectionLost("the sink is away")), "it stays where it is"


def test_server_is_kept_for_a_while_before_another_is_read(
    cluster: tuple[SourceServers, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, answering = cluster
    monkeypatch.setattr(servers, "_FAIL_OVER_SECONDS", 3600.0)
    del answering[1]
    assert not chosen.turn(ConnectionLost("the server is away"))
    assert port_in_use(chosen) == 1


def test_time_that_a_hanging_server_keeps_the_run_waiting_counts_as_its_absence(
    cluster: tuple[SourceServers, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, answering = cluster
    clock = itertools.count()
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(servers, "_FAIL_OVER_SECONDS", 1.0)
    del answering[1]
    assert chosen.turn(ConnectionLost("the server hangs")), "a second passed while it was asked"
    assert port_in_use(chosen) == 2


def test_planning_leaves_it_to_the_run_to_wait_for_a_server(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_with: list[ReadSettings] = []

    def log_of(read_settings: ReadSettings, pauses_seconds: object) -> None:
        planned_with.append(read_settings)

    monkeypatch.setattr(source_log, "StreamLog", log_of)
    SourceLog(settings.sources[0], settings, 1)
    assert planned_with[0].source.reconnect_tries <= 1, "each try would wait, and each question has several"


def test_server_missing_transactions_is_left_even_if_it_answers(
    cluster: tuple[SourceServers, dict[int, str]],
) -> None:
    chosen, _ = cluster
    assert chosen.turn(ServerBehind("the server lacks transactions"))
    assert port_in_use(chosen) == 2


def test_run_starts_at_the_server_of_its_positions(
    cluster: tuple[SourceServers, dict[int, str]],
) -> None:
    chosen, _ = cluster
    chosen.prefer("shop", "mysql:b")
    assert port_in_use(chosen) == 2
    chosen.prefer("shop", "mysql:of-nobody")
    assert port_in_use(chosen) == 2


def test_further_servers_without_a_first_server_are_refused(tmp_path: Path) -> None:
    source = {"path": "/logs", "servers": ["127.0.0.1:2"]}
    with pytest.raises(OptionInvalid, match="neither url nor server names one"):
        pipeline_of_values({"name": "test", "source": source, "sink": "stdout"}, tmp_path)


def test_unresponsive_server_is_reported_while_its_tasks_retry(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_WATCH_SECONDS", 0.01)
    reported = threading.Event()
    problems: list[PenstockError] = []

    def report(problem: PenstockError) -> None:
        problems.append(problem)
        reported.set()

    with servers.watched(settings.sources, report):
        assert reported.wait(60)
    assert isinstance(problems[0], ConnectionLost)


class LogAtAnotherServer:
    """A source's log that is read from a different server, or whose next part is purged."""

    def __init__(self, here: Offset | None) -> None:
        self.here = here

    def resume(self, begin: Offset) -> Offset:
        if self.here is None:
            raise PositionPurged("gone")
        return self.here


def test_run_uses_the_epoch_of_the_answering_server() -> None:
    before = Offset(Position(0, "bin.000500", 4), server_key="mysql:a")
    after = Offset(Position(1, "bin.000003", 900), server_key="mysql:b")
    moved = replace(before, position=Position(0, "bin.000501", 4))
    logs: Any = {
        "shop": LogAtAnotherServer(after),
        "stock": LogAtAnotherServer(None),
        "same": LogAtAnotherServer(moved),
    }
    checkpoint = replace(Checkpoint.new(), offsets=dict.fromkeys(logs, before.to_json()))
    offsets = at_their_servers(logs, checkpoint, lambda work: work()).offsets
    assert Offset.from_json(offsets["shop"]) == after
    assert offsets["stock"] == offsets["same"] == before.to_json()


class LogOfTwoServers:
    """A source's log, read from the last server in the list. Records the permitted ends of each batch."""

    def __init__(self) -> None:
        self.ends: list[Offset | None] = []
        self.key = "mysql:a"

    def listed(self, begin: Offset) -> AbstractContextManager[None]:
        return nullcontext()

    def resume(self, begin: Offset) -> Offset:
        return replace(begin, server_key=self.key)

    def target(self) -> Offset:
        return Offset(Position(0, "bin.000007", 900), server_key=self.key)

    def has(self, target: Offset, here: Offset) -> bool:
        return target.server_key == here.server_key

    def next(self, here: Offset, until: Offset | None) -> None:
        self.ends.append(until)


def test_run_until_caught_up_settles_its_end_again_at_another_server(settings: PipelineSettings) -> None:
    log: Any = LogOfTwoServers()
    nothing_asked: Any = SimpleNamespace(
        is_asked=lambda checkpoint: False, is_loading=lambda checkpoint: False
    )
    stretches = Stretches(Progress(settings, None), until_caught_up=True, to_barrier=False)
    no_shards: Any = SimpleNamespace(barrier=lambda: None)
    stretches.open({"shop": log}, nothing_asked, no_shards)
    begin = Offset(Position(0, "bin.000001", 4), server_key="mysql:a")
    checkpoint = replace(Checkpoint.new(), planned=True, offsets={"shop": begin.to_json()})
    for server in ("mysql:a", "mysql:a", "mysql:b", "mysql:b"):
        log.key = server
        stretches.next(checkpoint, "shop")
    assert [end.server_key for end in log.ends] == ["mysql:a", "mysql:a", "mysql:b", "mysql:b"]
