# SPDX-License-Identifier: Apache-2.0
"""What `penstock pipelines show` reads: the last batch of an earlier run, and the phases of a batch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.coordinate.backends.memory import MemoryStore
from penstock.engine.job import Outcome
from penstock.engine.progress import Progress
from penstock.engine.task_plan import Counts
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import PipelineState
from penstock.sinks.sink import Receipt
from tests.support.pipeline.local_runs import notes_pipeline, run_here

BATCH = {"batch": 7, "rejected": 3, "batch_rejected": 1, "positions": {"shop": "binlog.000001:4"}}


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    values = {
        "name": "notes",
        "source": {"path": "binlog.*"},
        "load": "none",
        "sink": {"files": {"path": "feed"}},
    }
    return pipeline_of_values(values, tmp_path)


@pytest.fixture
def state(request: pytest.FixtureRequest) -> Iterator[PipelineState]:
    state = PipelineState(MemoryStore(request.node.name), "notes")
    state.take()
    yield state
    state.close()


def test_run_without_a_batch_keeps_the_last_batch_of_the_run_before(
    settings: PipelineSettings, state: PipelineState
) -> None:
    failure = {"state": "failed", "error": "DiskFailed", "what": "no space", "running_batch": 8}
    state.show({**BATCH, **failure, "lag_seconds": 1.5, "ended": False})
    progress = Progress(settings, None)
    progress.begin(state)
    shown = state.shown()
    assert {name: shown[name] for name in BATCH} == BATCH
    assert (shown["state"], shown["ended"]) == ("starting", False)
    assert not shown.keys() & {"error", "what", "running_batch", "lag_seconds"}
    progress.end(state)
    shown = state.shown()
    assert {name: shown[name] for name in BATCH} == BATCH
    assert shown["ended"]


def test_progress_that_cannot_be_read_is_replaced_with_a_warning(
    settings: PipelineSettings, state: PipelineState
) -> None:
    state.store.put("/pipelines/notes/progress", b"written by another version")
    with capture_logs() as logs:
        Progress(settings, None).begin(state)
    assert state.shown()["state"] == "starting"
    (warning,) = [line for line in logs if line["event"] == "the progress of an earlier run is replaced"]
    assert "cannot be read" in warning["why"]


def test_phases_of_a_batch_are_separate_and_add_up_to_its_duration(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef change(batch):\n    time.sleep(0.05)\n    return batch\n"
    )
    step = {"python": {"function": f"{tmp_path}/slow.py:change"}}
    reports: list[Mapping[str, Any]] = []
    run_here(
        notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}}, steps=[step]),
        report=reports.append,
    )
    batches = [report for report in reports if report.get("batch")]
    assert batches
    for report in batches:
        phases = report["phases"]
        assert list(phases) == ["read", "steps", "write", "commit", "record"]
        assert sum(phases.values()) == pytest.approx(report["seconds"], abs=0.005)
    assert max(report["phases"]["steps"] for report in batches) >= 0.03


def test_duration_of_parallel_tasks_is_divided_in_proportion() -> None:
    counts = [Counts(seconds={"read": 3.0, "steps": 1.0}), Counts(seconds={"read": 1.0})]
    outcome = Outcome(receipts=[Receipt(seconds=3.0)], counts=counts)
    assert outcome.divided(2.0) == {"read": 1.0, "steps": 0.25, "write": 0.75}
    assert Outcome().divided(2.0) == {"read": 2.0, "steps": 0.0, "write": 0.0}
