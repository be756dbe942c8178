# SPDX-License-Identifier: Apache-2.0
"""The record that `penstock pipelines show` reads: a run without a batch keeps the last batch before it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.coordinate.backends.memory import MemoryStore
from penstock.engine.progress import Progress
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import PipelineState

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
