# SPDX-License-Identifier: Apache-2.0
"""Pipelines of two binlog files, one of which cannot be read for a while; the other source continues."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as parquet
import pytest

from penstock.changes import Target
from penstock.engine import batches as batches_module
from penstock.engine import pacing, set_aside
from penstock.engine import run as run_module
from penstock.engine.joints import Ends
from penstock.engine.loading import Loading
from penstock.engine.reading import Part, range_parts
from penstock.engine.run import PipelineRun
from penstock.engine.shared_targets import SharedTargets
from penstock.engine.task_plan import TaskPlan
from penstock.engine.tracked_table import TrackedTable
from penstock.errors import ConnectionLost, EventMalformed, PenstockError, SourceMissing
from penstock.local.driver import LocalDriver
from penstock.model import Column, TableName
from penstock.pipeline.record import RangeWork
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import PipelineState, TableLoad, split_key, table_key
from penstock.retry import Backoff
from tests.support.binlog.forged_log import NOTE_IDS, write_forged_log
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

ORDERS, CUSTOMERS = TableName("shop", "orders"), TableName("shop", "customers")
BOTH = {("one", number): 1 for number in NOTE_IDS} | {("two", number): 1 for number in NOTE_IDS}
ONE_ALONE = {("one", number): 1 for number in NOTE_IDS}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "ASIDE_SECONDS", 0.02)
    monkeypatch.setattr(run_module, "_BACKOFF", Backoff(0.001, 0.01))
    for module in (run_module, batches_module):
        monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(pacing, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(set_aside, "_PAUSES", Backoff(0.05, 60.0))


@pytest.fixture
def fleet(tmp_path: Path) -> PipelineSettings:
    sources = [
        {"name": name, "path": str(write_forged_log(tmp_path / name, 50_000)), "tables": "shop.notes"}
        for name in ("one", "two")
    ]
    values = {
        "name": "fleet",
        "sources": sources,
        "load": "none",
        "sink": {"files": {"path": str(tmp_path / "feed")}},
        "batch": {"interval": 0, "rows": 40},
        "errors": {"retry_for": "60s"},
    }
    return pipeline_of_values(values, tmp_path)


def rows_in(folder: Path) -> Counter[tuple[str, int]]:
    """Return how often the feed contains each note of each source."""
    notes: Counter[tuple[str, int]] = Counter()
    for file in (folder / "feed" / "shop" / "notes").glob("[!_]*.parquet"):
        for row in parquet.read_table(file, columns=["id", "_metadata"]).to_pylist():
            notes[row["_metadata"]["instance"], row["id"]] += 1
    return notes


def run(settings: PipelineSettings, driver: LocalDriver | None = None) -> list[Mapping[str, Any]]:
    told: list[Mapping[str, Any]] = []
    PipelineRun(settings, driver or LocalDriver(2), until_caught_up=True, report=told.append).run()
    return told


def failing(fails: Callable[[str], PenstockError | None]) -> LocalDriver:
    """Return a driver whose tasks fail after the first batch of a range if `fails` returns an error."""

    def parts(plan: TaskPlan, work: RangeWork, number: int, ends: Callable[[Ends], None]) -> Iterator[Part]:
        for part in range_parts(plan, work, number, ends):
            yield part
            if (problem := fails(work.source)) is not None:
                raise problem

    return LocalDriver(2, parts=parts)


def test_missing_source_is_named_while_the_other_is_read_to_its_end(
    fleet: PipelineSettings, tmp_path: Path
) -> None:
    file = next((tmp_path / "two").iterdir())
    file.rename(tmp_path / "away")
    with pytest.raises(SourceMissing, match="source two: "):
        run(fleet)
    assert rows_in(tmp_path) == ONE_ALONE
    with closing(PipelineState.open(fleet.state, fleet.name)) as state:
        assert list(state.shown()["sources_aside"]) == ["two"]
        checkpoint = state.checkpoint()
        assert checkpoint is not None
        assert list(checkpoint.offsets) == ["one"]
    (tmp_path / "away").rename(file)
    run(fleet)
    assert rows_in(tmp_path) == BOTH


def test_source_is_set_aside_between_batches_and_taken_back(fleet: PipelineSettings, tmp_path: Path) -> None:
    """Both sources are read first, so their batches are done when one of them becomes unavailable."""
    is_aside = threading.Event()

    def note(report: Mapping[str, Any]) -> None:
        if list(report.get("sources_aside", ())) == ["two"]:
            is_aside.set()

    pipeline = PipelineRun(fleet, LocalDriver(2), report=note)
    thread = threading.Thread(target=pipeline.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: rows_in(tmp_path) == BOTH)
        file = next((tmp_path / "two").iterdir())
        file.rename(tmp_path / "away")
        assert is_aside.wait(WAIT_SECONDS_MAX)
        (tmp_path / "away").rename(file)
        with closing(PipelineState.open(fleet.state, fleet.name)) as state:
            wait_until(lambda: "sources_aside" not in state.shown() and state.runner() is not None)
        assert thread.is_alive()
    finally:
        pipeline.stop()
        thread.join(WAIT_SECONDS_MAX)
    assert rows_in(tmp_path) == BOTH


@pytest.mark.parametrize("error", [ConnectionLost("it is away"), EventMalformed("an event is damaged")])
def test_source_that_fails_within_a_batch_does_not_hold_the_batch(
    fleet: PipelineSettings, tmp_path: Path, error: PenstockError
) -> None:
    with pytest.raises(type(error), match="source two: "):
        run(fleet, failing(lambda source: error if source == "two" else None))
    assert rows_in(tmp_path) == ONE_ALONE
    run(fleet)
    assert rows_in(tmp_path) == BOTH


def test_batch_that_may_be_written_in_part_waits_for_all_of_its_sources(
    fleet: PipelineSettings, tmp_path: Path
) -> None:
    """If the batch were planned again without the source, under another number, it would write rows twice
    into a feed.
    """

    class Death(BaseException):
        """Simulates the death of the process."""

    def die(*_: object) -> None:
        raise Death

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "run_job", die)
        with pytest.raises(Death):
            run(fleet)
    file = next((tmp_path / "two").iterdir())
    file.rename(tmp_path / "away")
    with pytest.raises(SourceMissing):
        run(fleet)
    assert not rows_in(tmp_path)
    (tmp_path / "away").rename(file)
    run(fleet)
    assert rows_in(tmp_path) == BOTH


def test_all_sources_failing_end_the_run(fleet: PipelineSettings, tmp_path: Path) -> None:
    for name in ("one", "two"):
        next((tmp_path / name).iterdir()).unlink()
    with pytest.raises(SourceMissing):
        run(fleet)


@pytest.mark.parametrize("seed", range(2))
def test_random_outages_of_both_sources_lose_and_repeat_nothing(
    fleet: PipelineSettings, tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    outages = 12

    def fails(source: str) -> PenstockError | None:
        nonlocal outages
        if outages and choose.random() < (0.9 if source == "two" else 0.4):
            outages -= 1
            return ConnectionLost(f"{source} is away")
        return None

    driver = failing(fails)
    for _ in range(40):
        try:
            run(fleet, driver)
        except ConnectionLost:
            continue
        break
    run(fleet)
    assert rows_in(tmp_path) == BOTH


# --- Loads ----------------------------------------------------------------------------------

OWN, OTHER, SHARED = table_key("two", ORDERS), table_key("one", CUSTOMERS), table_key("one", ORDERS)


@pytest.mark.parametrize(
    ("loads", "waiting"),
    [
        ({SHARED: TableLoad(3, pages="p")}, False),
        ({SHARED: TableLoad(3, pages="p", remove=True)}, True),
        ({OTHER: TableLoad(3, pages="p", remove=True)}, False),
        ({OWN: TableLoad(3, pages="p")}, True),
    ],
    ids=["added rows", "removed rows of a shared target", "removed rows of its own target", "of the source"],
)
def test_loads_that_need_a_source_that_is_aside_wait(
    tmp_path: Path, loads: dict[str, TableLoad], waiting: bool
) -> None:
    settings = pipeline_of_values(
        {"name": "fleet", **two_servers(), "sink": "stdout", "load": "none"}, tmp_path
    )
    active = replace(settings, sources=settings.sources[:1])
    known = {key: TrackedTable(target_of(split_key(key)[1]), {}) for key in (OWN, OTHER, SHARED)}
    tables: Any = SimpleNamespace(
        shared=SharedTargets(active, [], known),
        known_targets=lambda: {key: table.current for key, table in known.items()},
        there=lambda: list(known),
        stopped={},
        is_keyless=lambda key: False,
        check_columns=lambda: None,
    )
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        checkpoint = state.take()
        for load in loads.values():
            state.put_large(load.pages, [{"rows": 1, "key": ["id"]}] * load.chunks)
        loading = Loading(active, state, settings.make_sink(), 2)
        checkpoint = loading.planned(replace(checkpoint, loads=loads, planned=True), tables)
        works, _, _ = loading.next(checkpoint)
        assert (len(works), loading.is_loading(checkpoint)) == ((0, False) if waiting else (3, True))
        assert loading.is_first_load(checkpoint) is not waiting, "changes of other sources go on"
        everything = Loading(settings, state, settings.make_sink(), 2)
        checkpoint = everything.planned(checkpoint, tables)
        assert len(everything.next(checkpoint)[0]) == 3, "it continues when the source is back"


def two_servers() -> dict[str, Any]:
    return {
        "sink": "stdout",
        "load": "none",
        "sources": [{"name": name, "url": "mysql://nobody@127.0.0.1:1"} for name in ("one", "two")],
    }


def target_of(name: TableName) -> Target:
    return Target(name, (Column("id", "int", None, False),), ("id",))
