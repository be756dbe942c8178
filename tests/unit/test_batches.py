# SPDX-License-Identifier: Apache-2.0
"""Tests that the record of a batch is written before the batch's tasks run, whatever fails."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine import batches as batches_module
from penstock.engine.batches import Batches, BegunBatch
from penstock.engine.job import Outcome
from penstock.errors import CoordinationLost, ServerChanged, TransientError
from penstock.model import Position
from penstock.pipeline.record import BatchRecord, RangeWork
from penstock.pipeline.state import Checkpoint
from penstock.sinks.sink import Sink, Spread
from penstock.source.offsets import Offset
from penstock.source.source import ByteRange

BEGIN = Offset(Position(0, "bin.000001", 4)).to_json()
RANGE = RangeWork("shop", ByteRange(0, "bin.000002", 4, 99, aligned=True))


class Recording:
    """Collects the batches that are recorded before they run. Recording the second batch fails at first."""

    def __init__(self) -> None:
        self.begun: list[BatchRecord] = []
        self._outages = iter([False, True, False])

    def begin(self, record: BatchRecord, checkpoint: Checkpoint) -> None:
        assert record.number == checkpoint.number + 1, "a batch is looked for under this number"
        if next(self._outages):
            raise CoordinationLost("the store is away")
        self.begun.append(record)

    def confirm(self) -> None:
        return

    def end(self, record: BatchRecord, checkpoint: Checkpoint, *, is_plain: bool) -> bool:
        return True


def retried(work: Callable[[], Any]) -> Any:
    while True:
        try:
            return work()
        except TransientError:
            continue


class PartsSink:
    """Commits each range separately, under the number of the batch."""

    spread = Spread.RANGES
    commit = Sink.commit


@pytest.fixture
def tables() -> Any:
    """Return a stand-in for tables and loads, with only the methods that these batches call."""
    return SimpleNamespace(
        stopped={},
        columns=SimpleNamespace(note=lambda _: None),
        undone=lambda: None,
        done=lambda *_: None,
        begin_again=lambda checkpoint, _: checkpoint,
    )


def test_tasks_run_only_on_a_plan_that_is_recorded(monkeypatch: pytest.MonkeyPatch, tables: Any) -> None:
    recording, ran = Recording(), list[BatchRecord]()
    changes = iter([ServerChanged("another server answers"), ServerChanged("another server answers")])

    def run_job(_driver: object, plan: BatchRecord) -> Outcome:
        assert plan == recording.begun[-1], "a crash would give the number of this plan to another one"
        ran.append(plan)
        if (change := next(changes, None)) is not None:
            raise change
        return Outcome()

    monkeypatch.setattr(batches_module, "task_plan", lambda *arguments: arguments[-2])
    monkeypatch.setattr(batches_module, "mark_of", lambda *_: None)
    monkeypatch.setattr(batches_module, "run_job", run_job)
    state: Any = SimpleNamespace(confirm=lambda: None, write=lambda checkpoint: checkpoint)
    unused: Any = SimpleNamespace(sources=(), parents={}, begin_batch=lambda _: None, batch=lambda *_: None)
    log: Any = SimpleNamespace(works=lambda *_: [RANGE], hold=lambda _: None)
    begun = BegunBatch()
    batches = Batches(
        settings=unused,
        driver=unused,
        sink=PartsSink(),  # type: ignore[arg-type]
        steps=(),
        state=state,
        recording=recording,  # type: ignore[arg-type]
        logs={"shop": log},
        loading=tables,
        tables=tables,
        cascades=unused,
        progress=unused,
        begun=begun,
        stop=threading.Event(),
        retried=retried,
        report=lambda _: None,
        succeeded=lambda _: None,
    )
    checkpoint = batches.run(Checkpoint("g", 6), BatchRecord(7, {"shop": BEGIN}, {"shop": BEGIN}, (), (), 1))
    assert [(plan.number, plan.ranges) for plan in ran] == [(7, ()), (7, ()), (8, (RANGE,))]
    assert (checkpoint.number, begun.record) == (8, None)
