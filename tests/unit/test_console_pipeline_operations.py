# SPDX-License-Identifier: Apache-2.0
"""Resetting, rewinding and correcting stopped pipelines in the console: each has a preview first and is
recorded.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from penstock.console import pipeline_operations
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.pipeline.state import Checkpoint, PipelineState
from tests.support.binlog.forged_log import write_forged_log
from tests.support.daemon.console import ANYWHERE, Browser, console_of, masked_for_visitors
from tests.support.pipeline.local_runs import run_here
from tests.support.suite.nonempty import each

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ADDRESS: dict[str, Any] = {"store": "0", "name": "notes"}


@dataclass(frozen=True)
class Notes:
    """A pipeline that has run to the end of its log, and the console that shows its file."""

    settings: PipelineSettings
    file: Path
    browser: Browser
    csrf: str

    def checkpoint(self, sink: str = "") -> Checkpoint | None:
        with closing(PipelineState.open(self.settings.state, "notes", sink)) as state:
            return state.checkpoint()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let another process run the pipeline inside the block."""
        with closing(PipelineState.open(self.settings.state, "notes")) as state:
            state.take()
            yield

    def confirm(self, path: str, **values: str) -> int:
        return self.browser.post(f"{path}/confirm", {**ADDRESS, **values, "csrf": self.csrf}).status


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    log = write_forged_log(tmp_path / "log", blob_bytes=1_000)
    values = {
        "name": "notes",
        "state": f"sqlite://{tmp_path}/state.db",
        "source": {"path": str(log), "name": "shop", "tables": "shop.notes"},
        "load": "none",
        "sink": {"files": {"path": str(tmp_path / "feed")}},
        "batch": {"interval": 0},
    }
    file = write(tmp_path / "notes.yaml", values)
    settings = load_pipeline(file)
    run_here(settings)
    with console_of(stores=(settings.state,), pipeline_files=(file,)) as browser:
        csrf = browser.get("/pipelines/pause", **ADDRESS).field("csrf")
        yield Notes(settings, file, browser, csrf)


def write(path: Path, values: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(values)))
    return path


def actions_of(logs: Any) -> list[tuple[str, str]]:
    return [(line["action"], line["outcome"]) for line in logs if line["event"] == "audit"]


def test_pipeline_is_reset_once_it_does_not_run(notes: Notes) -> None:
    assert "/pipelines/reset" in notes.browser.get("/tables", **ADDRESS, sink="").text
    with notes.running():
        busy = notes.browser.get("/pipelines/reset", **ADDRESS)
        assert ("is run by" in busy.words, "/confirm" in busy.text) == (True, False)
    with capture_logs() as logs:
        page = notes.browser.get("/pipelines/reset", **ADDRESS)
        assert "This progress is forgotten: notes" in page.words
        assert notes.checkpoint() is not None
        assert notes.confirm("/pipelines/reset") == 303
    assert notes.checkpoint() is None
    assert "There is nothing to do" in notes.browser.get("/pipelines/reset", **ADDRESS).words
    assert "no state of a sink" in notes.browser.get("/pipelines/reset", **ADDRESS, sink=HOSTILE).words
    assert actions_of(logs) == [("reset pipeline", "done")]


def test_pipeline_is_rewound_to_an_earlier_position(notes: Notes) -> None:
    before = notes.checkpoint()
    assert before is not None
    file = before.offsets["shop"]["file"]
    page = notes.browser.get("/pipelines/rewind", **ADDRESS, to=f"{file}:4")
    assert f"back to {file}:4" in page.words
    assert "receives these changes twice: files" in page.words
    assert notes.checkpoint() == before
    for wrong in (f"{file}:5", f"{file}:99999999", HOSTILE):
        refused = notes.browser.get("/pipelines/rewind", **ADDRESS, to=wrong)
        assert ("/confirm" in refused.text, "<script>alert" in refused.text) == (False, False), wrong
        assert notes.confirm("/pipelines/rewind", to=wrong) >= 400
    with notes.running():
        assert notes.confirm("/pipelines/rewind", to=f"{file}:4") == 409
    with capture_logs() as logs:
        assert notes.confirm("/pipelines/rewind", to=f"{file}:4") == 303
    after = notes.checkpoint()
    assert after is not None
    assert after.offsets["shop"]["offset"] == 4
    assert actions_of(logs) == [("rewind pipeline", "done")]


def test_transaction_ahead_is_skipped(notes: Notes) -> None:
    end = notes.checkpoint()
    assert end is not None
    file = end.offsets["shop"]["file"]
    assert notes.confirm("/pipelines/rewind", to=f"{file}:4") == 303
    position = f"{file}:{end.offsets['shop']['offset'] - 10}"
    page = notes.browser.get("/pipelines/skip", **ADDRESS, position=position)
    assert ("Never applied:" in page.words, "compare and repair" in page.words) == (True, True)
    known = notes.checkpoint()
    assert known is not None
    assert known.skips == {}
    with capture_logs() as logs:
        assert notes.confirm("/pipelines/skip", position=position) == 303
    skipped = notes.checkpoint()
    assert skipped is not None
    ((begin, until),) = skipped.skips["shop"]
    assert begin["offset"] < end.offsets["shop"]["offset"] <= until["offset"]
    assert actions_of(logs) == [("skip transaction", "done")]


def test_progress_is_adopted_by_a_sink_of_the_file(notes: Notes, tmp_path: Path) -> None:
    assert "no sink 'lake'" in notes.browser.get("/pipelines/adopt", **ADDRESS, sink="lake").words
    values = yaml.safe_load(notes.file.read_text())
    values["sinks"] = {"lake": values.pop("sink"), "audit": {"files": {"path": str(tmp_path / "audit")}}}
    write(notes.file, values)
    form = notes.browser.get("/pipelines/adopt", **ADDRESS)
    assert ('value="lake"' in form.text, "/confirm" in form.text) == (True, False)
    page = notes.browser.get("/pipelines/adopt", **ADDRESS, sink="lake")
    assert "lake continues at the position" in page.words
    assert notes.checkpoint("lake") is None
    with capture_logs() as logs:
        assert notes.confirm("/pipelines/adopt", sink="lake") == 303
    assert (notes.checkpoint(), notes.checkpoint("lake") is None) == (None, False)
    assert notes.confirm("/pipelines/adopt", sink="lake") == 400
    assert actions_of(logs) == [("adopt progress", "done")]


def test_operation_that_needs_the_file_of_a_pipeline_says_so(notes: Notes) -> None:
    with console_of(stores=(notes.settings.state,)) as browser:
        browser.get("/")
        for path, value in each({"rewind": "to", "skip": "position", "adopt": "sink"}.items()):
            page = browser.get(f"/pipelines/{path}", **(ADDRESS | {value: "binlog.000001:4"}))
            assert (page.status, "does not know the file" in page.words) == (200, True), path
        assert "is forgotten" in browser.get("/pipelines/reset", **ADDRESS).words


def test_table_is_read_again_without_deleting_rows(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"source": "shop", "table": "shop.notes", "sink": "", "keep": "1"}
    page = notes.browser.get("/tables/resnapshot", **(ADDRESS | table))
    assert "are deleted from the target" in page.words
    form = ADDRESS | table | {"where": HOSTILE, "csrf": notes.csrf}
    opened = notes.browser.get("/tables/resnapshot", **form)
    assert (HOSTILE in opened.words, "is a log" in opened.words) == (False, False), "not from an address"
    assert notes.browser.post("/tables/resnapshot", form | {"csrf": "x"}).status == 403
    no_server = notes.browser.post("/tables/resnapshot", form)
    assert ("is a log: its tables cannot be read" in no_server.words, "/confirm" in no_server.text) == (
        True,
        False,
    )
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pipeline_operations, "prove_condition", lambda *proved: asked.append(proved))
    shown = notes.browser.post("/tables/resnapshot", form)
    assert "no longer has stay in the target" in shown.words
    assert (HOSTILE in shown.words, "<script>alert" in shown.text) == (True, False)
    assert notes.confirm("/tables/resnapshot", **table, where="id > 7") == 303
    assert [str(proved[3]) for proved in asked] == [HOSTILE, "id > 7"]
    with closing(PipelineState.open(notes.settings.state, "notes")) as state:
        (request,) = state.requests()
    assert (request.where, request.remove) == ("id > 7", False)


def test_condition_is_refused_to_an_account_that_does_not_see_every_column(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked_for_visitors(monkeypatch, {"shop.notes": ["note"]})
    form = {"source": "shop", "table": "shop.notes", "sink": "", "csrf": notes.csrf}
    with console_of(ANYWHERE, stores=(notes.settings.state,), pipeline_files=(notes.file,)) as browser:
        csrf = browser.get("/pipelines/pause", **ADDRESS).field("csrf")
        for path in ("/tables/resnapshot", "/tables/resnapshot/confirm"):
            page = browser.post(path, ADDRESS | form | {"where": "note = 'x'", "csrf": csrf})
            assert "a condition may tell values" in page.words, path
    with closing(PipelineState.open(notes.settings.state, "notes")) as state:
        assert state.requests() == []
