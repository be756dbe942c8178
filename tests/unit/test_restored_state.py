# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose state was restored from a backup that is older than their target."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from deltalake import DeltaTable

from penstock.errors import StateOutdated
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.local_runs import notes_pipeline, run_here


def ids_in(path: Path) -> list[int]:
    if (path / "_delta_log").exists():
        return sorted(DeltaTable(path).to_pyarrow_table(columns=["id"])["id"].to_pylist())
    table = pyarrow.dataset.dataset(path, format="parquet").to_table(columns=["id"])
    return sorted(table["id"].to_pylist())


def restore_before_last_batch(settings: PipelineSettings, *, is_begun: bool) -> None:
    """Restore the state before the last batch, with or without the record that this batch has begun."""
    with closing(PipelineState.of(settings)) as state:
        checkpoint = state.take()
        assert checkpoint.number == 2
        earlier = replace(checkpoint, number=1)
        last = state.begun(earlier)
        assert last is not None
        state.write(replace(earlier, offsets=last.begin))
        if not is_begun:
            state.store.delete(state._at("batch"))


@pytest.mark.parametrize("sink", [{"files": {}}, {"delta": {"mode": "feed"}}], ids=lambda sink: str(*sink))
def test_state_older_than_its_target_is_refused(tmp_path: Path, sink: Mapping[str, dict[str, Any]]) -> None:
    ((kind, values),) = sink.items()
    settings = notes_pipeline(tmp_path, {kind: {"path": str(tmp_path / "out"), **values}})
    notes = tmp_path / "out/shop/notes"
    run_here(settings)
    before = ids_in(notes)
    assert before

    restore_before_last_batch(settings, is_begun=True)
    assert run_here(settings).number == 2, "a commit that was not recorded is repeated"
    assert ids_in(notes) == before

    restore_before_last_batch(settings, is_begun=False)
    with pytest.raises(StateOutdated, match="the target has batch 2 of the pipeline notes"):
        run_here(settings)
    assert ids_in(notes) == before
