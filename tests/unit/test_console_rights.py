# SPDX-License-Identifier: Apache-2.0
"""No page, action or export of the console shows an account anything that it may not do or see."""

import random
import re
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from penstock.console import pages
from penstock.console.actions import ACTIONS
from penstock.source.table_export import FORMATS
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each
from tests.unit.test_masking import WIDE, account, batches_of, texts_of

READER = [{"name": "guest", "token": "guest-token"}]


@pytest.fixture(scope="module")
def read_only() -> Iterator[Browser]:
    with (
        captured_log() as log,
        serving(log, {"token": "a-token"}, READER) as daemon,
        console_of(daemon) as browser,
    ):
        browser.post("/login", {"token": "guest-token"})
        yield browser


def address(browser: Browser) -> dict[str, str]:
    """Return the fields that pages and actions need in a request."""
    (daemon,) = set(
        re.findall(r"daemon=(http[^&\"]+)", browser.get("/").text.replace("%3A", ":").replace("%2F", "/"))
    )
    fields = {
        "daemon": daemon,
        "instance": INSTANCE,
        "reader": "x",
        "store": "0",
        "name": "notes",
        "sink": "",
    }
    return fields | {
        "table": "fuzzed.t",
        "key": "1",
        "subscription": "s",
        "job": "j",
        "member": "m",
        "shard": "0",
    }


def test_read_only_account_gets_no_page_with_an_action(read_only: Browser) -> None:
    fields = address(read_only)
    shown = []
    for path in each(pages.PAGES):
        page = read_only.get(path, **fields)
        assert page.status in (200, 403), path
        forms = re.findall(r'<form method="post" action="([^"]+)"', page.text)
        assert forms == ["/logout"], path
        assert 'class="danger"' not in page.text, path
        shown += [path] if page.status == 200 else []
    assert {"/", "/instance", "/history", "/transaction", "/tail", "/log", "/as-of"} <= set(shown)
    assert not {
        path for path in shown if path.startswith(("/pipelines", "/tables", "/dead-letters", "/compare"))
    }


def test_read_only_account_is_refused_every_action(read_only: Browser) -> None:
    fields = {**address(read_only), "csrf": read_only.get("/").field("csrf")}
    with capture_logs() as logs:
        for path in each(ACTIONS):
            refused = read_only.post(path, fields)
            assert (refused.status, "may look, and change nothing" in refused.problem) == (403, True), path
    assert [line for line in logs if line["event"] == "audit"] == []


def shown_by(browser: Browser, daemon: ServedLog) -> dict[str, str]:
    """Return every page and export with rows of the wide table, by address."""
    rows = [row for batch in batches_of(daemon, WIDE) for row in batch.to_arrow().to_pylist()]
    places = {f"{row['_metadata']['file']}:{row['_metadata']['offset']}" for row in rows}
    texts = {}
    asked = [
        ("/history", {"table": WIDE, "key": str(key)}) for key in sorted({row["id"] for row in rows})[:2]
    ]
    asked += [("/transaction", {"place": place}) for place in sorted(places)[:3]]
    asked += [("/as-of", {"table": WIDE, "at": str(daemon.log.visible)})]
    for path, query in each(asked):
        for export in ({}, {"export": "json"}, {"export": "csv", "list": "1"}):
            texts[f"{path} {query} {export}"] = browser.get(path, **query, **export).text
    for file_format in FORMATS.keys() - {"parquet"}:
        query = {"table": WIDE, "at": str(daemon.log.visible), "format": file_format}
        texts[f"/as-of/export {file_format}"] = browser.get("/as-of/export", **query).text
    return texts


def test_masked_values_are_on_no_page_and_in_no_export() -> None:
    with captured_log() as log, serving(log, {"token": "a-token"}) as daemon:
        batches = batches_of(daemon, WIDE)
        names = [
            name for name in batches[0].to_arrow().schema.names if not name.startswith("_") and name != "id"
        ]
        rows = [row for batch in batches for row in batch.to_arrow().to_pylist()]
        values = {
            name: {text.decode(errors="replace") for row in rows for text in texts_of(row[name])}
            for name in names
        }
        masked = random.Random(7).sample(names, len(names) // 2)
        seen = set().union(*(values[name] for name in names if name not in masked))
        hidden = set().union(*(values[name] for name in masked))
        hidden = {text for text in hidden if not any(text in other for other in seen)}
        with console_of(daemon) as browser:
            browser.post("/login", {"token": "a-token"})
            everything = "".join(shown_by(browser, daemon).values())
        found = {text for text in hidden if text in everything}
        assert found, "the values are in the log"
        with (
            serving(log, {"token": "b-token"}, [account({WIDE: masked})]) as guarded,
            console_of(guarded) as browser,
        ):
            browser.post("/login", {"token": "support-token"})
            # Text that every page of this kind has, such as names of classes.
            usual = browser.get("/history", table="fuzzed.u", key="1").text
            texts = shown_by(browser, guarded)
        for where, text in each(texts.items()):
            assert [value for value in found if value in text and value not in usual] == [], where
