# SPDX-License-Identifier: Apache-2.0
"""Tests when a run records its batches in the state."""

from typing import Any

import pytest

from penstock.engine import recording
from penstock.engine.recording import Recording
from penstock.errors import LeaseLost
from penstock.pipeline.record import BatchRecord, ChunkWork
from penstock.pipeline.state import Checkpoint


class State:
    """Collects a line for each written record, in order: which batch begins, or which batch was completed
    last.
    """

    def __init__(self) -> None:
        self.records: list[str] = []
        self.checks = 0
        self.is_lost = False

    def confirm(self) -> None:
        self.checks += 1
        if self.is_lost:
            raise LeaseLost("another process took over")

    def begin(self, record: BatchRecord) -> None:
        self.records.append(f"begin {record.number}")

    def write(self, checkpoint: Checkpoint) -> Checkpoint:
        self.records.append(f"done {checkpoint.number}")
        return checkpoint


class CacheSink:
    can_rewind = True


class LakeSink:
    can_rewind = False


def batch(number: int, *chunks: Any) -> BatchRecord:
    return BatchRecord(number, {}, {}, (), chunks, 1)


def recorded_by(sink: Any) -> tuple[State, Recording]:
    state = State()
    return state, Recording(state, sink)  # type: ignore[arg-type]


@pytest.fixture
def chunk() -> ChunkWork:
    return ChunkWork("shop", None, {})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until a test sets it."""
    now = [1000.0]
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    return now


def run(recordings: Recording, record: BatchRecord, *, is_plain: bool = True) -> bool:
    recordings.begin(record, Checkpoint("g", record.number - 1))
    recordings.confirm()
    return recordings.end(record, Checkpoint("g", record.number), is_plain=is_plain)


def test_every_batch_of_a_sink_that_cannot_rewind_is_recorded_before_and_after_it_runs() -> None:
    state, recordings = recorded_by(LakeSink())
    assert all(run(recordings, batch(number)) for number in (1, 2))
    assert state.records == ["begin 1", "done 1", "begin 2", "done 2"]


def test_batches_of_a_sink_that_can_rewind_are_recorded_together(clock: list[float]) -> None:
    state, recordings = recorded_by(CacheSink())
    assert [run(recordings, batch(number)) for number in (1, 2, 3)] == [True, False, False]
    clock[0] += 1.0
    assert run(recordings, batch(4))
    assert not run(recordings, batch(5))
    recordings.settle(Checkpoint("g", 5))
    recordings.settle(Checkpoint("g", 5))
    assert state.records == ["done 1", "done 4", "done 5"]


def test_load_of_a_sink_that_can_rewind_is_recorded_after_all_batches_before_it(chunk: ChunkWork) -> None:
    state, recordings = recorded_by(CacheSink())
    run(recordings, batch(1))
    run(recordings, batch(2))
    assert run(recordings, batch(3, chunk))
    # A restarted run looks for a begun batch under the number after the recorded number.
    assert state.records == ["done 1", "done 2", "begin 3", "done 3"]


def test_batch_with_rejected_rows_or_a_new_table_is_recorded_at_once() -> None:
    state, recordings = recorded_by(CacheSink())
    run(recordings, batch(1))
    assert run(recordings, batch(2), is_plain=False)
    assert state.records == ["done 1", "done 2"]


def test_runner_that_was_suspended_checks_its_lease_before_it_writes(clock: list[float]) -> None:
    state, recordings = recorded_by(CacheSink())
    run(recordings, batch(1))
    state.is_lost = True
    run(recordings, batch(2))
    clock[0] += 10.0
    with pytest.raises(LeaseLost):
        run(recordings, batch(3))


@pytest.mark.parametrize(("sink", "checks"), [(LakeSink(), 5), (CacheSink(), 2)])
def test_lease_is_checked_ten_times_a_second_if_the_sink_can_rewind(
    sink: Any, checks: int, clock: list[float]
) -> None:
    state, recordings = recorded_by(sink)
    for number in range(1, 6):
        run(recordings, batch(number))
        clock[0] += 0.04
    assert state.checks == checks
