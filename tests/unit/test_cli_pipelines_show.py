# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines show` and `tables`: the states of a pipeline and its tables, and their reasons."""

import json
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.changes import Target
from penstock.errors import PenstockError
from penstock.model import TableName
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState, TableLoad
from penstock.pipeline.verification_record import read_verification, record_verification
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
    assert (shown(file)["state"], shown(file)["why"]) == ("finished", None)


def test_text_has_no_labels_without_values(file: Path) -> None:
    run_here(load_pipeline(file))
    lines = penstock("pipelines", "show", file).out.splitlines()
    assert any(line.startswith("positions:") for line in lines)
    followed = zip(lines, [*lines[1:], ""], strict=True)
    assert [line for line, after in followed if line.endswith(":") and not after.startswith(" ")] == []


def test_text_shows_the_times_of_comparisons_in_utc(file: Path) -> None:
    run_here(load_pipeline(file))
    differing = SimpleNamespace(remaining=2, whole=True, results=[])
    with closing(PipelineState.of(load_pipeline(file))) as state:
        record_verification(state, differing)  # type: ignore[arg-type]
        record = read_verification(state)
    assert record is not None
    time = datetime.fromtimestamp(record.time_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = [line.split() for line in penstock("pipelines", "show", file).out.splitlines()]
    assert ["time", time] in lines
    assert ["equal", "never"] in lines


def table_lines(file: Path) -> dict[str, dict[str, Any]]:
    """Return the output of `penstock pipelines tables`, by table."""
    lines = map(json.loads, penstock("pipelines", "tables", file, "--json").out.splitlines())
    return {f"{line['source']}/{line['table']}": line for line in lines}


def test_tables_show_their_state_and_what_it_is_due_to(file: Path) -> None:
    assert "penstock run" in penstock("pipelines", "tables", file).out
    run_here(load_pipeline(file))
    assert table_lines(file)["shop/shop.notes"]["state"] == "idle"
    loads = {"shop/shop.big": TableLoad(7, 3, rows=12_000), "east/shop.far": TableLoad(2, 1)}
    stopped = {"shop/shop.bad": "SchemaChanged: it lost its key"}
    with closing(PipelineState.of(load_pipeline(file))) as state:
        state.write(replace(state.take(), loads=loads, stopped=stopped))
        state.show({"state": "running", "sources_aside": {"east": "ConnectionLost: it does not answer"}})
        state.request_resnapshot("shop", TableName("shop", "notes"))
        lines = table_lines(file)
        text = [line.split() for line in penstock("pipelines", "tables", file).out.splitlines()]
    assert {name: (line["state"], line["why"]) for name, line in lines.items()} == {
        "shop/shop.bad": ("stopped", "SchemaChanged: it lost its key"),
        "east/shop.far": ("set aside", "ConnectionLost: it does not answer"),
        "shop/shop.big": ("loading", ""),
        "shop/shop.notes": ("asked", ""),
    }
    assert text[0] == ["table", "state", "load", "rows", "why"]
    assert text[1] == ["shop/shop.bad", "stopped", "SchemaChanged:", "it", "lost", "its", "key"]
    assert ["shop/shop.big", "loading", "3", "of", "7", "chunks", "12,000"] in text
    assert table_lines(file)["east/shop.far"]["state"] == "loading", "no run is there to set a source aside"


def test_dry_run_of_a_rewind_names_its_effects_and_refuses_what_the_rewind_would(file: Path) -> None:
    run_here(load_pipeline(file))
    before = shown(file)["positions"]
    rewind = ("pipelines", "reset", file, "--time", "2001-01-01")
    assert "files receives their changes twice" in penstock(*rewind, "--dry-run").out
    assert "receives their changes twice" in penstock(*rewind).err, "it needs --yes"
    mirror = json.loads(file.read_text()) | {"sink": {"mysql": {"url": "mysql://root@127.0.0.1:1"}}}
    file.write_text(json.dumps(mirror))
    for key in (("id",), ()):
        with closing(PipelineState.of(load_pipeline(file))) as state:
            known = state.get_large("tables")
            table = Target.from_json(known["tables"]["shop/shop.notes"]["current"])
            known["tables"]["shop/shop.notes"]["current"] = replace(
                table, primary_key=key, unique_keys=()
            ).to_json()
            state.put_large("tables", known)
        if key:
            out = penstock(*rewind, "--dry-run").out
            assert "bytes of its log are read again" in out
            assert "without a key" not in out
        else:
            assert "shop.notes has no key" in penstock(*rewind, "--dry-run").err
    assert shown(file)["positions"] == before
