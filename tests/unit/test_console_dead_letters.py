# SPDX-License-Identifier: Apache-2.0
"""The console's pages of rejected rows: their content, masked values, and the effect of a replay."""

from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from structlog.testing import capture_logs

from penstock.pipeline.dead_letter import dead_letters
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.pipeline.state import PipelineState
from penstock.sinks.sink import BatchMark
from tests.support.daemon.console import (
    ANYWHERE,
    Browser,
    Page,
    console_of,
    masked_for_visitors,
    recorded_events,
)
from tests.support.pipeline.changes_made import changes_of, insert, target_of
from tests.support.pipeline.rejected_rows import put_aside

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ORDERS = target_of({"id": "bigint", "status": "varchar(80)", "email": "varchar(80)"})
ADDRESS = {"store": "0", "name": "shop", "sink": ""}


def pipeline(folder: Path, sink: Any, steps: list[Any] | None = None) -> tuple[Path, PipelineSettings]:
    """Return the file of a pipeline whose dead letter has three rows, rejected for two different reasons."""
    file = folder / "shop.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "shop",
                "source": {"url": "mysql://repl@127.0.0.1:1", "name": "test"},
                "steps": steps or [{"map": {"cast": {"status": "int"}}}],
                "sink": sink,
                "errors": {"rows": "dead_letter"},
            }
        )
    )
    settings = load_pipeline(file)
    with_state = PipelineState.open(settings.state, settings.name)
    with_state.write(with_state.take())
    with_state.close()
    rows = (
        insert(1, id=1, status=HOSTILE, email="ann@example.com"),
        insert(2, row=6, id=2, status="two", email="bob@example.com"),
        insert(2, row=7, id=3, status="3", email="eve@example.com"),
    )
    put_aside(settings, changes_of(ORDERS, *rows))
    return file, settings


def replay_fields(page: Page) -> dict[str, str]:
    """Return the form fields from a preview, for a replay of all entries."""
    return {**ADDRESS, **{name: page.field(name) for name in ("csrf", "entry", "count", "until_us")}}


def console(settings: PipelineSettings, *files: Path) -> AbstractContextManager[Browser]:
    """Serve a console of pipelines, without a daemon."""
    return console_of(stores=(settings.state,), pipeline_files=files)


def test_rejected_rows_are_grouped_by_cause_and_shown_as_text(tmp_path: Path) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    with console(settings, file) as browser:
        page = browser.get("/dead-letters", **ADDRESS)
        assert (page.status, "shop.orders map StepFailed 2 2" in page.words) == (200, True), page.words
        letter, _ = dead_letters(settings)
        rows = browser.get("/dead-letters/entry", **ADDRESS, entry=letter.name)
        none = browser.get("/dead-letters", **ADDRESS, table="shop.orders", step="map", error="Other")
        unknown = browser.get("/dead-letters/entry", **ADDRESS, entry=HOSTILE)
    assert HOSTILE in rows.words
    assert "ann@example.com" in rows.words
    assert "eve@example.com" not in rows.words, "the step accepted this row"
    assert letter.message not in none.words
    assert unknown.status == 404
    for shown in (page, rows, none, unknown):
        assert "<script>alert" not in shown.text
        assert "11111103" not in shown.words


def test_entry_page_and_actions_refuse_names_outside_the_dead_letter(tmp_path: Path) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    other = replace(settings, dead_letter=str(Path(settings.dead_letter).with_name("other")))
    put_aside(other, changes_of(ORDERS, insert(9, id=9, status="x", email="secret@example.com")))
    (outside,) = Path(other.dead_letter).iterdir()
    kept = dead_letters(settings)
    with console(settings, file) as browser:
        fields = replay_fields(browser.get("/dead-letters/purge", **ADDRESS, entry=kept[0].name))
        for entry in (f"../other/{outside.name}", str(outside), f"./{kept[0].name}"):
            page = browser.get("/dead-letters/entry", **ADDRESS, entry=entry)
            assert (page.status, "secret@example.com" in page.text) == (404, False), entry
            assert browser.get("/dead-letters/purge", **ADDRESS, entry=entry).status == 404
            assert (
                "secret@example.com" not in browser.get("/dead-letters/replay", **ADDRESS, entry=entry).text
            )
            for action in ("replay", "purge"):
                answer = browser.post(f"/dead-letters/{action}/confirm", fields | {"entry": entry})
                assert answer.status == 400, (action, entry)
    assert (dead_letters(settings), outside.exists()) == (kept, True)


def test_replay_is_announced_and_then_done_for_a_feed(tmp_path: Path) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    file.write_text(file.read_text().replace("cast:\n      status: int", "rename:\n      status: code"))
    with console(settings, file) as browser, capture_logs() as logs:
        page = browser.get("/dead-letters/replay", **ADDRESS)
        assert "2 rows of shop.orders" in page.words
        assert "are written to the target" in page.words
        assert len(dead_letters(settings)) == 2, "a preview changes nothing"
        fields = replay_fields(page)
        assert browser.post("/dead-letters/replay/confirm", fields | {"csrf": "x"}).status == 403
        done = browser.post("/dead-letters/replay/confirm", fields)
        assert "2 rows written, 0 to be read again" in browser.follow(done).words
        assert browser.post("/dead-letters/replay/confirm", fields | {"entry": "none"}).status == 400
    assert dead_letters(settings) == []
    audit = [(entry["action"], entry["written"]) for entry in logs if entry["event"] == "audit"]
    assert audit == [("replay rejected rows", "2")]


def test_replay_takes_the_entries_of_its_preview(tmp_path: Path) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    file.write_text(file.read_text().replace("cast:\n      status: int", "rename:\n      status: code"))
    with console(settings, file) as browser:
        fields = replay_fields(browser.get("/dead-letters/replay", **ADDRESS))
        later = insert(8, id=4, status="four", email="dan@example.com")
        put_aside(settings, changes_of(ORDERS, later), BatchMark("shop", "abc", 8))
        assert len(dead_letters(settings)) == 3
        assert browser.post("/dead-letters/replay/confirm", fields).status == 303
        (left,) = dead_letters(settings)
        assert left.noted_us > int(fields["until_us"])
        gone = browser.post("/dead-letters/replay/confirm", fields)
        nothing = browser.post("/dead-letters/replay/confirm", fields | {"count": "0"})
    assert (gone.status, nothing.status) == (400, 400)
    assert dead_letters(settings) == [left]


def test_replay_that_fails_halfway_is_recorded(tmp_path: Path) -> None:
    file, settings = pipeline(tmp_path, {"mysql": {"url": "mysql://nobody@127.0.0.1:1"}})
    without_key = changes_of(replace(ORDERS, primary_key=()), insert(8, id=4, status="four", email="d"))
    put_aside(settings, without_key, BatchMark("shop", "abc", 8))
    with console(settings, file) as browser, capture_logs() as logs:
        fields = replay_fields(browser.get("/dead-letters/replay", **ADDRESS))
        assert browser.post("/dead-letters/replay/confirm", fields).status == 400
    audit = [(entry["action"], entry["read_again"]) for entry in logs if entry["event"] == "audit"]
    assert audit == [("replay rejected rows", "2")]


def test_purge_deletes_the_entries_of_its_preview_and_is_recorded(tmp_path: Path) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    kept, purged = dead_letters(settings)
    with console(settings, file) as browser, capture_logs() as logs:
        page = browser.get("/dead-letters/purge", **ADDRESS, entry=purged.name)
        assert "1 rows of shop.orders, in 1 entries" in page.words
        assert (len(dead_letters(settings)), HOSTILE in page.words) == (2, False)
        fields = replay_fields(page) | {"why": HOSTILE}
        assert browser.post("/dead-letters/purge/confirm", fields | {"csrf": "x"}).status == 403
        assert dead_letters(settings) == [kept, purged]
        done = browser.post("/dead-letters/purge/confirm", fields)
        assert "Deleted for good: 1 rows" in browser.follow(done).words
        assert browser.post("/dead-letters/purge/confirm", fields).status == 400
        unknown = browser.get("/dead-letters/purge", **ADDRESS, entry=HOSTILE)
    assert dead_letters(settings) == [kept]
    assert (unknown.status, "<script>alert" in unknown.text) == (404, False)
    audit = [(entry["action"], entry["rows"], entry["why"]) for entry in logs if entry["event"] == "audit"]
    assert audit == [("purge rejected rows", "1", HOSTILE)]


def test_replay_into_a_target_with_state_reads_the_rows_again(tmp_path: Path) -> None:
    file, settings = pipeline(tmp_path, {"mysql": {"url": "mysql://nobody@127.0.0.1:1"}})
    with console(settings, file) as browser:
        page = browser.get("/dead-letters/replay", **ADDRESS)
        assert "reads their keys again" in page.words
        browser.post("/dead-letters/replay/confirm", replay_fields(page))
    state = PipelineState.open(settings.state, settings.name)
    conditions = [request.where for request in state.requests()]
    state.close()
    assert conditions == ["(`id`=1)", "(`id`=2)"]


@pytest.mark.parametrize(
    ("steps", "hidden", "shown"),
    [
        (
            [{"mask": {"columns": {"EMAIL": "hash"}}}, {"map": {"cast": {"status": "int"}}}],
            {"ann@example.com"},
            {HOSTILE},
        ),
        (
            [
                {"map": {"rename": {"email": "mail"}, "cast": {"status": "int"}}},
                {"mask": {"columns": {"mail": "redact"}}},
            ],
            {"ann@example.com", HOSTILE},
            set(),
        ),
    ],
    ids=["by-name", "after-a-renaming-step"],
)
def test_values_that_the_pipeline_masks_are_hidden(
    tmp_path: Path, steps: list[Any], hidden: set[str], shown: set[str]
) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}}, steps)
    letter, _ = dead_letters(settings)
    with console(settings, file) as browser:
        pages = [
            browser.get("/dead-letters", **ADDRESS),
            browser.get("/dead-letters/entry", **ADDRESS, entry=letter.name),
        ]
    assert all(value not in page.words for value in hidden for page in pages)
    assert all(value in pages[1].words for value in shown)
    assert all(letter.message not in page.words for page in pages), "it may quote a hidden value"


@pytest.mark.parametrize(
    ("masked", "columns"),
    [
        ({"Shop.Orders": ["EMAIL"]}, {"email"}),
        ({"*.*": ["email", "other"]}, {"email"}),
        ({"shop.orders": ["mail"]}, {"id", "status", "email"}),
        ({"only": {"Shop.*": ["ID", "status", "extra"]}}, {"email"}),
    ],
    ids=["in-another-case", "of-any-table", "of-no-column", "not-in-a-list"],
)
def test_values_that_are_masked_for_the_account_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: dict[str, Any], columns: set[str]
) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    letter, _ = dead_letters(settings)
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        state.show({"error": "StepFailed", "what": "ann@example.com is no number"})
    only = masked.pop("only", {})
    masked_for_visitors(monkeypatch, masked, columns=only)
    with (
        console_of(ANYWHERE, stores=(settings.state,), pipeline_files=(file,)) as browser,
        recorded_events(),
    ):
        structlog.get_logger("test").warning("a row is refused", why="ann@example.com is no number")
        pages = [
            browser.get("/"),
            browser.get("/events"),
            browser.get("/pipelines"),
            browser.get("/tables", **ADDRESS),
            browser.get("/pipelines/pause", **ADDRESS),
            browser.get("/dead-letters", **ADDRESS),
            browser.get("/dead-letters/entry", **ADDRESS, entry=letter.name),
        ]
    for page in pages:
        assert page.status == 200, page.words
        assert "ann@example.com" not in page.text
        assert letter.message not in page.words, "it may quote a hidden value"
    assert pages[-1].text.count('class="hidden"') == len(columns)
    assert (HOSTILE in pages[-1].words) == ("status" not in columns)


def test_masks_that_a_daemon_does_not_name_keep_pipelines_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    masked_for_visitors(monkeypatch, True)
    with console_of(ANYWHERE, stores=(settings.state,), pipeline_files=(file,)) as browser:
        assert browser.get("/dead-letters", **ADDRESS).status == 403


def test_hidden_rows_keep_pipelines_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    masked_for_visitors(monkeypatch, {}, where=["shop.users"])
    with console_of(ANYWHERE, stores=(settings.state,), pipeline_files=(file,)) as browser:
        for path in ("/dead-letters", "/compare", "/tables", "/pipelines", "/pipelines/pause"):
            assert browser.get(path, **ADDRESS).status == 403, path


def test_pipeline_whose_file_is_unknown_says_how_to_name_it(tmp_path: Path) -> None:
    _, settings = pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    with console(settings) as browser:
        page = browser.get("/dead-letters", **ADDRESS)
    assert (page.status, "--pipelines FILE" in page.words) == (404, True)
