# SPDX-License-Identifier: Apache-2.0
"""The console's pages about many pipelines: their queries to the store, and the pipelines that they show."""

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.console import pages
from penstock.coordinate.backends.sqlite import SqliteStore
from penstock.coordinate.store import open_store
from penstock.pipeline.state import Checkpoint, PipelineState
from tests.support.daemon.console import console_of
from tests.support.suite.nonempty import each

SHOP = {"shop": {"epoch": 1, "file": "mysql-bin.000001", "offset": 4}}


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The state store of twelve pipelines, of which one has failed."""
    url = f"sqlite:///{tmp_path}/state.db"
    with closing(open_store(url)) as store:
        for number in range(12):
            state = PipelineState(store, f"orders-{number:02}")
            state.write_first(Checkpoint("generation", number, SHOP, planned=True))
            state.show({"state": "failed" if number == 7 else "stopped", "rejected": number})
    return url


def test_pages_of_all_pipelines_ask_the_store_once(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(SqliteStore, name)

        def count(*arguments: Any, **options: Any) -> Any:
            asked[name] += 1
            return method(*arguments, **options)

        return count

    for name in ("get", "list", "read_below"):
        monkeypatch.setattr(SqliteStore, name, counted(name))
    with console_of(stores=(store,)) as browser:
        for path in each(("/", "/pipelines")):
            asked.clear()
            assert browser.get(path).words.count("orders-") == 12
            assert asked == {"read_below": 1}, "however many pipelines there are"


def test_page_shows_the_most_urgent_pipelines_and_finds_the_others(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_PIPELINES_PAGE_MAX", 3)
    monkeypatch.setattr(pages, "_URGENCY", ("failed", "stopped"))
    with console_of(stores=(store,)) as browser:
        first = browser.get("/pipelines").words
        assert [name in first for name in ("orders-07", "orders-00", "orders-01", "orders-02")] == [
            True
        ] * 3 + [False]
        assert "The 3 most urgent of 12 pipelines are shown" in first
        assert "orders-11" in browser.get("/pipelines", find="s-11").words
        failed = browser.get("/pipelines", find="failed")
        assert ("orders-07" in failed.words, "orders-00" in failed.words) == (True, False)
        assert "find=failed" in failed.text, "the page is refreshed with what it shows"
        none = browser.get("/pipelines", find="<script>")
        assert ("No pipeline has this name" in none.words, "<script>" in none.text) == (True, False)


def test_pipeline_of_another_version_is_shown_as_failed_beside_the_others(store: str) -> None:
    with closing(open_store(store)) as opened:
        opened.put("/pipelines/orders-03/standing", b"what is this")
    with console_of(stores=(store,)) as browser:
        for path in each(("/", "/pipelines")):
            page = browser.get(path)
            assert (page.status, page.words.count("orders-")) == (200, 12)
            assert "SchemaInvalid: the state of a pipeline cannot be read" in page.words


def test_pipeline_that_ended_normally_is_shown_neutrally(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    with closing(open_store(url)) as store:
        for name, ended in (("done", True), ("killed", False)):
            state = PipelineState(store, name)
            state.write_first(Checkpoint("generation", 1, SHOP, planned=True))
            state.show({"state": "waiting for changes", "ended": ended, "updated_us": 1_000_000})
    with console_of(stores=(url,)) as browser:
        page = browser.get("/pipelines").text
    assert 'class="state plain">finished<' in page
    assert 'class="state bad">lost<' in page
