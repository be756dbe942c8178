# SPDX-License-Identifier: Apache-2.0
"""The persistent state of a pipeline, and its single writer."""

import json
import sqlite3
import uuid
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.changes import Target
from penstock.coordinate.store import ABSENT
from penstock.engine.tracked_table import TrackedTable, keys_of
from penstock.errors import LeaseLost, OptionInvalid, PositionInvalid
from penstock.model import Column, TableName
from penstock.pipeline import resnapshot_requests
from penstock.pipeline import state as state_module
from penstock.pipeline.record import BatchRecord, ChunkWork, RangeWork
from penstock.pipeline.resnapshot import Resnapshot
from penstock.pipeline.state import PipelineState, TableLoad
from penstock.source.bounds import Bounds
from penstock.source.source import ByteRange

RECORD = BatchRecord(
    1,
    {"shop": {"file": "b.000001", "offset": 4}},
    {"shop": {"file": "b.000001", "offset": 900}},
    (
        RangeWork(
            "shop", ByteRange(2, "b.000001", 4, 900, True), Bounds(gtid_after="x"), 2, "key", ((1, "key"),)
        ),
    ),
    (ChunkWork("shop", TableName("d", "t"), {"table": ["d", "t"]}, "a > 1", remove=True, request="r"),),
    4,
    {"shop/d.t": 1},
    ("r",),
    ("d.t",),
)


@pytest.fixture(autouse=True)
def _long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent leases from expiring or being renewed while a test is paused."""
    monkeypatch.setattr(state_module, "_LEASE_SECONDS", 3600.0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/state.db"


def test_started_batch_is_visible_to_the_next_runner_until_it_completes(url: str) -> None:
    first = PipelineState.open(url, "lake")
    progress = first.take()
    progress = first.write(replace(progress, loads={"shop/d.t": TableLoad(chunks=2)}, planned=True))
    first.begin(RECORD)
    first.close()
    second = PipelineState.open(url, "lake")
    progress = second.take()
    assert second.begun(progress) == RECORD
    done = second.write(progress.after(RECORD))
    assert (done.number, done.offsets, done.loads["shop/d.t"].done) == (1, RECORD.end, 1)
    assert done.loading
    assert second.begun(done) is None
    second.close()


def test_only_the_lease_holder_writes_pipeline_state(url: str) -> None:
    first, other = PipelineState.open(url, "lake"), PipelineState.open(url, "lake")
    progress = first.take()
    with pytest.raises(LeaseLost, match="run by"):
        other.take()
    with pytest.raises(LeaseLost):
        other.reset()
    # The lease expires and another runner takes over while the first runner still believes that it holds the
    # lease.
    assert first._lease is not None
    first.store.delete(first._lease.path)
    other.take()
    with pytest.raises(LeaseLost, match="taken"):
        first.write(progress)
    other.begin(RECORD)
    with pytest.raises(LeaseLost, match="taken"):
        first.begin(replace(RECORD, parts=9))
    other.close()
    first.store.close()


def test_runner_notices_a_takeover_before_it_writes(url: str) -> None:
    first, other = PipelineState.open(url, "lake"), PipelineState.open(url, "lake")
    with pytest.raises(LeaseLost):
        first.confirm()
    progress = first.take()
    first.confirm()
    first.begin(RECORD)
    first.write(replace(progress, number=1))
    first.confirm()
    assert not other.lost
    # The runner was paused until its lease expired.
    assert first._lease is not None
    first.store.delete(first._lease.path)
    other.take()
    other.confirm()
    with pytest.raises(LeaseLost, match="taken"):
        first.confirm()
    assert first.lost
    other.close()
    third = PipelineState.open(url, "lake")
    third.take()
    for name in ("lease", "standing"):
        third.store.delete(f"/pipelines/lake/{name}")
    with pytest.raises(LeaseLost, match="reset"):
        third.confirm()
    third.store.close()
    first.store.close()


def test_paused_runner_continues_unless_another_took_over(url: str) -> None:
    first, other = PipelineState.open(url, "lake"), PipelineState.open(url, "lake")

    def ask(statement: str) -> list[tuple[int]]:
        with closing(sqlite3.connect(url.removeprefix("sqlite://"))) as connection, connection:
            return connection.execute(statement).fetchall()

    progress = first.take()
    # The session sends no heartbeat for twice the duration of its lease.
    ask("UPDATE sessions SET expires = expires - 2 * seconds")
    progress = first.write(replace(progress, number=1))
    first.confirm()
    assert ask("SELECT count(*) FROM records WHERE session IS NOT NULL") == [(1,)], "it holds its lease"
    assert other.take().number == 1
    with pytest.raises(LeaseLost, match="taken"):
        first.write(replace(progress, number=2))
    other.close()
    first.store.close()


def test_value_of_any_size_is_stored_whole(url: str) -> None:
    state = PipelineState.open(url, "lake")
    for size in (10, 200_000, 10):
        value = [f"{number * 7919 % 1000003:x}" for number in range(size)]
        state.put_large("chunks", value)
        assert state.get_large("chunks") == value
    assert not state.store.list("/pipelines/lake/chunks"), "pages of older values are gone"
    state.drop_large("chunks")
    assert state.get_large("chunks") is None
    state.close()


def test_completed_requests_do_not_accumulate(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnapshot_requests, "_ENDED_REQUESTS_KEPT", 3)
    state = PipelineState.open(url, "lake")
    state.take()
    waiting = state.request_resnapshot("shop", TableName("d", "waiting"))
    for number in range(5):
        asked = state.request_resnapshot("shop", TableName("d", f"t{number}"), number=f"{9 - number}")
        (wish,) = (request for request in state.requests() if request.number == asked)
        state.note_request(wish, "done")
    kept = {wish.number: wish.table.table for wish in state.requests()}
    assert kept == {"5": "t4", "6": "t3", "7": "t2", waiting: "waiting"}
    read = []
    monkeypatch.setattr(state, "request", lambda number: read.append(number))
    state.requests()
    assert read == [waiting], "what has ended is not read again"
    state.close()


def test_request_that_has_not_begun_answers_repeated_ones(url: str) -> None:
    state = PipelineState.open(url, "lake")
    state.take()
    orders, items = TableName("d", "orders"), TableName("d", "items")
    ask = partial(state.request_resnapshot, "shop", reuse=True)
    first = ask(orders, "id < 9")
    assert ask(orders, "id < 9") == first
    assert ask(orders, "id < 9", remove=False) == first
    others = {
        ask(orders, "id < 10"),
        ask(items, "id < 9"),
        ask(orders, "id < 9", by_pipeline=True),
        ask(orders, remove=False),
        state.request_resnapshot("shop", orders, "id < 9"),
        state.request_resnapshot("shop", orders, number="0a1b2c"),
    }
    whole = ask(orders)
    assert len({first, whole} | others) == 8
    assert ask(orders, "id = 1") == whole, "the whole table has that row"
    for number in (first, whole):
        request = state.request(number)
        assert request is not None
        # Rows that changed after a request had begun may have been read already.
        state.note_request(request, "running")
    assert ask(orders) not in {first, whole} | others
    state.close()


def test_unreferenced_pages_are_deleted(url: str) -> None:
    state = PipelineState.open(url, "lake")
    state.take()
    value = [uuid.uuid4().hex for _ in range(40_000)]

    def pages(name: str) -> list[str]:
        return list(state.store.list(f"/pipelines/lake/{name}"))

    for name in ("batch", "chunks"):
        # Pages left by writers that died before they wrote the record that names the pages.
        state.store.put(f"/pipelines/lake/{name}/lost", b"")
        state.store.put(f"/pipelines/lake/{name}/lost/0", b"page")
    version = state.put_large("batch", value, ABSENT)
    assert len(pages("batch")) == 1
    assert state.get_large("batch") == value
    state.put_large("batch", 1, version)
    assert pages("batch") == []
    state.put_large("chunks", value)
    state.drop_large("chunks")
    assert pages("chunks") == []
    state.close()


def test_resnapshots_are_requested_once_and_a_reset_forgets_them(url: str) -> None:
    state = PipelineState.open(url, "lake")
    with pytest.raises(OptionInvalid, match="never ran"):
        state.request_resnapshot("shop", TableName("d", "t"))
    generation = state.take().generation
    for _ in range(2):
        state.request_resnapshot("shop", TableName("d", "t"), "a > 1", number="ddl-1")
    (wish,) = state.requests()
    state.note_request(wish, "done")
    assert [(request.where, request.state) for request in state.requests()] == [("a > 1", "done")]
    state.pause("upkeep")
    assert state.paused
    state.close()
    state = PipelineState.open(url, "lake")
    assert PipelineState.names(state.store) == ["lake"]
    state.reset()
    assert state.checkpoint() is None
    assert state.paused, "who paused it did not mean the next run either"
    assert state.take().generation != generation
    state.close()


PLACE = {"file": "b.000001", "offset": 4}
REACHED = {"file": "b.000001", "offset": 900}


def tracked(name: str, *, key: tuple[str, ...]) -> TrackedTable:
    target = Target(TableName("d", name), (Column("id", "int", nullable=False),), key)
    return TrackedTable(target, {1: target}, logged=target.columns, keys=keys_of(target))


def tables_in(state: PipelineState) -> dict[str, TrackedTable]:
    return {key: TrackedTable.from_json(table) for key, table in state.get_large("tables")["tables"].items()}


def test_replayed_statement_requests_its_table_again(url: str) -> None:
    with closing(PipelineState.open(url, "lake")) as state:
        seen = state.write(replace(state.take(), offsets={"shop": REACHED, "other": REACHED}))
        state.put_large(
            "tables",
            {
                "tables": {key: tracked("t", key=("id",)).to_json() for key in ("shop/d.t", "other/d.t")},
                "targets": [],
            },
        )
        table = TableName("d", "t")
        for source in ("shop", "other"):
            for number in ("ended", "waits"):
                state.request_resnapshot(source, table, remove=False, number=f"{source}{number}")
            ended = state.request(f"{source}ended")
            assert ended is not None
            state.note_request(ended, "done")
    with closing(PipelineState.open(url, "lake")) as state:
        state.rewind("shop", PLACE, seen)
        assert state.request("shopended") is None
        assert state.request("shopwaits") is None, "it may be done before its statement comes"
        assert all(wish.by_pipeline for wish in state.requests()), "no user asked to keep deleted rows"
        kept = {(wish.source, wish.state, wish.remove) for wish in state.requests()}
        assert kept == {("shop", "asked", False), ("other", "done", False), ("other", "asked", False)}
        known = tables_in(state)
        assert (known["shop/d.t"].logged, known["shop/d.t"].keys) == (None, None)
        assert known["other/d.t"].logged == known["other/d.t"].current.columns
        assert known["other/d.t"].keys is not None
        progress = state.checkpoint()
        assert progress is not None
        assert progress.offsets == {"shop": PLACE, "other": REACHED}


@pytest.mark.parametrize(("number", "by_pipeline"), [("3fa85f6457", True), ("64a1c-9f8e7d", False)])
def test_request_of_version_0_1_tells_by_its_number_who_made_it(number: str, by_pipeline: bool) -> None:
    record = json.loads(Resnapshot(number, "shop", TableName("d", "t")).encode())
    del record["by_pipeline"]
    assert Resnapshot.decode(json.dumps(record).encode()).by_pipeline is by_pipeline


def test_keyless_tables_are_reloaded_by_a_mirror_that_rewinds(url: str) -> None:
    def refuse(name: TableName) -> None:
        raise OptionInvalid(f"{name} cannot be read")

    with closing(PipelineState.open(url, "lake")) as state:
        seen = state.write(replace(state.take(), offsets={"shop": REACHED}))
        tables = {
            "shop/d.keyed": tracked("keyed", key=("id",)).to_json(),
            "shop/d.keyless": tracked("keyless", key=()).to_json(),
        }
        state.put_large("tables", {"tables": tables, "targets": []})
    with (
        closing(PipelineState.open(url, "lake")) as state,
        pytest.raises(OptionInvalid, match=r"d\.keyless cannot be read"),
    ):
        state.rewind("shop", PLACE, seen, refuse)
    with closing(PipelineState.open(url, "lake")) as state:
        progress = state.checkpoint()
        assert progress is not None
        assert progress.offsets == {"shop": REACHED}
        assert not state.requests()
        state.rewind("shop", PLACE, seen, lambda name: None)
        (wish,) = state.requests()
        assert (wish.table, wish.where, wish.remove) == (TableName("d", "keyless"), None, False)


def test_pipeline_that_advanced_concurrently_does_not_rewind(url: str) -> None:
    with closing(PipelineState.open(url, "lake")) as state:
        seen = state.write(replace(state.take(), offsets={"shop": PLACE}))
        state.write(replace(seen, offsets={"shop": REACHED}))
    with (
        closing(PipelineState.open(url, "lake")) as state,
        pytest.raises(PositionInvalid, match="went on while"),
    ):
        state.rewind("shop", PLACE, seen)


def test_second_reset_keeps_the_highest_versions_and_stays_paused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(PipelineState.open(url, "lake")) as state:
        state.write(replace(state.take(), offsets={"shop": REACHED}))
        state.begin(RECORD)
    with closing(PipelineState.open(url, "lake")) as state:
        state.pause("work on the source")
        # The process dies after it has deleted the first record.
        deleted = state.store.delete

        def delete_and_die(path: str) -> None:
            deleted(path)
            raise KeyboardInterrupt

        with monkeypatch.context() as dying:
            dying.setattr(state.store, "delete", delete_and_die)
            with pytest.raises(KeyboardInterrupt):
                state.reset()
    with closing(PipelineState.open(url, "lake")) as state:
        progress = state.take()
        assert progress.earlier == {"shop": REACHED}
        assert state.begun(progress) is None, "a batch of another generation is not run again"
    with closing(PipelineState.open(url, "lake")) as state:
        state.reset()
        assert state.pause_message() == "the pipeline lake is paused: work on the source"
        assert state.take().earlier == {"shop": REACHED}
