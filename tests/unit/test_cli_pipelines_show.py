# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines show`: the state of a pipeline, and what it is due to."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.pipeline.settings import load_pipeline
from tests.support.binlog.forged_log import write_forged_log
from tests.support.logstore.kept_log import penstock
from tests.support.pipeline.local_runs import run_here


@pytest.fixture
def file(tmp_path: Path) -> Path:
    log = write_forged_log(tmp_path / "log", blob_bytes=50_000)
    file = tmp_path / "notes.yaml"
    source = {"path": str(log), "name": "shop", "tables": "shop.notes"}
    sink = {"files": {"path": str(tmp_path / "feed")}}
    file.write_text(json.dumps({"name": "notes", "source": source, "load": "none", "sink": sink}))
    return file


def shown(file: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(penstock("pipelines", "show", file, "--json").out)
    return summary


def test_paused_and_failed_pipelines_say_why(file: Path, tmp_path: Path) -> None:
    penstock("pipelines", "pause", file, "--why", "the target is moved")
    assert "the target is moved" in shown(file)["why"]
    penstock("pipelines", "resume", file)
    (tmp_path / "feed").write_text("a file where the feed's folder has to be")
    with pytest.raises(PenstockError):
        run_here(load_pipeline(file))
    assert shown(file)["state"] == "failed"
    assert str(tmp_path / "feed") in shown(file)["why"]
    (tmp_path / "feed").unlink()
    run_here(load_pipeline(file))
    assert (shown(file)["state"], shown(file)["why"]) == ("stopped", None)


def test_text_has_no_labels_without_values(file: Path) -> None:
    run_here(load_pipeline(file))
    lines = penstock("pipelines", "show", file).out.splitlines()
    assert any(line.startswith("positions:") for line in lines)
    followed = zip(lines, [*lines[1:], ""], strict=True)
    assert [line for line, after in followed if line.endswith(":") and not after.startswith(" ")] == []
