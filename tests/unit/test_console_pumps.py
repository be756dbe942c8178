# SPDX-License-Identifier: Apache-2.0
"""Transactions without an outcome, decided over HTTP and in the console."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.logstore.disk import LocalDisk
from penstock.tidb.decisions import Decisions, check_decision
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import ServedLog, captured_log, serving
from tests.support.suite.nonempty import each

START, COMMIT = 470639218043387904, 470639218044174336
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "boss", "token": "boss-token", "admin": True},
    {"name": "reader", "token": "reader-token"},
    {"name": "other", "token": "other-token", "admin": True, "instances": ["shop"]},
]


class StalledPump:
    """A Pump that waits for a transaction, with the decisions of a real one."""

    def __init__(self, folder: Path) -> None:
        self.decisions = Decisions(LocalDisk(), folder)

    def status(self) -> dict[str, Any]:
        stalled = {"start_ts": START, "seconds": 90}
        problem = f"the transaction {START} has no outcome"
        return {"address": "10.0.0.1:8250", "state": "online", "problem": problem, "stalled_by": stalled}

    def decide(self, start_ts: int, commit_ts: int, *, dry_run: bool) -> None:
        check_decision(start_ts, commit_ts)
        if not dry_run:
            self.decisions.put(start_ts, commit_ts)


@pytest.fixture
def pump(tmp_path: Path) -> StalledPump:
    return StalledPump(tmp_path)


@pytest.fixture
def daemon(pump: StalledPump) -> Iterator[ServedLog]:
    with captured_log() as log, serving(log, access=ACCOUNTS, pumps={"tidb": pump}) as daemon:
        yield daemon


@pytest.fixture
def browser(daemon: ServedLog) -> Iterator[Browser]:
    with console_of(daemon) as browser:
        assert browser.post("/login", {"token": "boss-token"}).status == 303
        yield browser


def test_transaction_is_decided_after_a_dry_run(
    daemon: ServedLog, browser: Browser, pump: StalledPump
) -> None:
    page = browser.get("/fleet")
    assert f"the transaction {START} has no outcome" in page.words
    assert "/pump/decide?" in page.text
    where = {"daemon": f"http://127.0.0.1:{daemon.port()}", "instance": "tidb", "start_ts": str(START)}
    for outcome, effect in (
        ({"commit_ts": str(COMMIT)}, f"committed at {COMMIT}"),
        ({"rollback": "1"}, "are dropped"),
    ):
        preview = browser.get("/pump/decide", **where, **outcome)
        assert effect in preview.words
        assert "All later transactions wait for it" in preview.words
        assert "does not wait" in browser.get("/pump/decide", **{**where, "start_ts": "5"}, **outcome).words
    assert list(pump.decisions.waiting()) == []
    with capture_logs() as logs:
        fields = {**where, "commit_ts": str(COMMIT), "csrf": preview.field("csrf")}
        assert browser.post("/pump/decide/confirm", fields).status == 303
    assert list(pump.decisions.waiting()) == [(START, COMMIT)]
    audits = [line for line in logs if line["event"] == "audit"]
    assert [line["action"] for line in audits] == ["decide transaction"] * 2


REFUSED = {
    "neither outcome": ({}, "the decision is not clear"),
    "both outcomes": ({"commit_ts": str(COMMIT), "rollback": "1"}, "the decision is not clear"),
    "a commit before the start": ({"commit_ts": "7"}, "cannot commit at 7"),
    "no number": ({"commit_ts": "<script>"}, "is no timestamp of TiDB"),
    "a long number": ({"commit_ts": "9" * 5000}, "is no timestamp of TiDB"),
}


def test_unclear_decision_is_refused(daemon: ServedLog, browser: Browser, pump: StalledPump) -> None:
    where = {"daemon": f"http://127.0.0.1:{daemon.port()}", "instance": "tidb", "start_ts": str(START)}
    csrf = browser.get("/pump/decide", **where).field("csrf")
    for case, (outcome, problem) in each(REFUSED.items()):
        assert problem in browser.get("/pump/decide", **where, **outcome).problem, case
        done = browser.post("/pump/decide/confirm", {**where, **outcome, "csrf": csrf})
        assert (done.status, "<script>" in done.text) == (400, False), case
    assert list(pump.decisions.waiting()) == []


def test_decisions_are_for_administrators_of_the_instance(daemon: ServedLog, pump: StalledPump) -> None:
    body = {"start_ts": START, "commit_ts": 0, "dry_run": False}
    for token in ("reader-token", "other-token"):
        assert daemon.ask("POST", "/v1/pumps/tidb/decide", body, token=token).status == 403, token
        assert daemon.ask("GET", "/v1/pumps", token=token).json == {"pumps": []}, token
    assert list(pump.decisions.waiting()) == []
    unknown = daemon.ask("POST", "/v1/pumps/shop/decide", body, token="boss-token")
    assert (unknown.status, "has no Pump here" in unknown.json["detail"]) == (404, True)
    (shown,) = daemon.ask("GET", "/v1/pumps", token="boss-token").json["pumps"]
    assert (shown["instance"], shown["stalled_by"]["start_ts"]) == ("tidb", START)
