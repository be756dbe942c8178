# SPDX-License-Identifier: Apache-2.0
"""The history of a row, and a single transaction, exported as files."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.console.change_files import export_changes
from penstock.errors import OptionInvalid
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import captured_log, serving
from tests.support.suite.nonempty import each

ROW = {"table": "fuzzed.t", "key": "1"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with captured_log() as log, serving(log) as daemon, console_of(daemon) as browser:
        yield browser


def lines_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_history_of_a_row_is_exported_as_the_page_shows_it(browser: Browser) -> None:
    page = browser.get("/history", **ROW)
    assert 'href="?table=fuzzed.t&amp;key=1&amp;export=json"' in page.text
    assert "Searched " in page.words
    assert page.text.rindex("Searched ") < page.text.index('class="end"'), "the style hides it at the end"
    empty = browser.get("/history", **{**ROW, "table": "fuzzed.absent", "columns": "id"}).words
    assert "Searched " in empty
    assert "The kept log has no change of this row" in empty
    parts = json.loads(browser.get("/history", **ROW, export="json").text)
    assert all(part["position"] in page.text for part in each(parts))
    assert "progress" not in {part["kind"] for part in parts}
    file = browser.get("/history", **ROW, export="csv")
    assert file.headers["content-disposition"] == 'attachment; filename="history.csv"'
    lines = lines_of(file.text)
    assert list(dict.fromkeys(line["position"] for line in lines)) == [part["position"] for part in parts]
    newest = next(part for part in parts if part["kind"] == "change")
    columns = [line["column"] for line in lines if line["position"] == newest["position"]]
    assert columns == list(newest["before"] or newest["after"])


def test_transaction_is_exported_and_a_cut_is_reported(browser: Browser) -> None:
    parts = json.loads(browser.get("/history", **ROW, export="json").text)
    position = next(part["position"] for part in parts if part["kind"] == "change")
    page = browser.get("/transaction", place=position, limit="1")
    cut = json.loads(browser.get("/transaction", place=position, limit="1", export="json").text)
    assert ("The transaction has more rows" in page.words) == (cut[-1]["kind"] == "problem")
    whole = json.loads(browser.get("/transaction", place=position, export="json").text)
    assert {part["kind"] for part in whole} <= {"change", "statement"}
    assert all(part["gtid"] for part in each(part for part in whole if part["kind"] == "change"))
    lines = lines_of(browser.get("/transaction", place=position, export="csv").text)
    assert {line["table"] for line in lines if line["column"]} == {
        part["table"] for part in whole if part["kind"] == "change"
    }


def test_file_without_an_instance_or_format_is_refused(browser: Browser) -> None:
    refused = browser.get("/history", **ROW, export="xml")
    assert (refused.status, "there is no format" in refused.problem) == (400, True)
    with pytest.raises(OptionInvalid):
        export_changes("history", (), "xlsx")


def test_file_has_masks_and_problems_and_no_formulas(browser: Browser) -> None:
    parts: list[dict[str, Any]] = [
        {
            **{"kind": "change", "change": "update", "time_us": 1_700_000_000_123_456, "position": "f:4"},
            **{"before": {"id": 1, "note": None}, "after": {"id": 1, "note": "=1+1"}, "masked": ["salary"]},
        },
        {"kind": "unreadable", "start": "f:9", "end": "f:12", "error": "ChecksumMismatch", "why": "torn"},
        {"kind": "problem", "detail": "the daemon has left", "hint": None},
    ]
    lines = lines_of(written(parts, "csv"))
    assert [(line["column"], line["before"], line["after"], line["is_changed"]) for line in lines[:3]] == [
        ("id", "1", "1", "false"),
        ("note", "NULL", "'=1+1", "true"),
        ("salary", "(masked)", "(masked)", "false"),
    ]
    assert lines[0]["time"] == "2023-11-14 22:13:20.123+00:00"
    assert [(line["kind"], line["text"]) for line in lines[3:]] == [
        ("unreadable", "ChecksumMismatch torn"),
        ("problem", "the daemon has left"),
    ]
    assert json.loads(written(parts, "json")) == parts
    assert json.loads(written([], "json")) == []


def written(parts: list[dict[str, Any]], file_format: str) -> str:
    """Return the text of a file as a browser receives it."""
    answer: Any = export_changes("x", parts, file_format)
    pieces: list[str] = []

    async def read() -> None:
        pieces.extend([piece async for piece in answer.body_iterator])

    import asyncio

    asyncio.run(read())
    return "".join(pieces)
