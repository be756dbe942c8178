# SPDX-License-Identifier: Apache-2.0
"""Events and sessions: the stored log lines, the accounts that may see them, and the content of the pages."""

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from penstock.serve.access import Account
from penstock.serve.http import audit
from penstock.telemetry import recent_events
from penstock.telemetry.recent_events import RecentEvents
from tests.support.daemon.console import console_of, recorded_events
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "boss", "token": "boss-token", "admin": True},
    {"name": "local", "token": "local-token", "admin": True, "tables": ["fuzzed.u"]},
    {"name": "reader", "token": "reader-token"},
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[ServedLog]:
    with captured_log() as log, serving(log, {"token": "a-token"}, ACCOUNTS) as daemon:
        yield daemon


@pytest.fixture
def recorded() -> Iterator[None]:
    """Record the log lines of this test."""
    with recorded_events():
        yield


def test_flood_of_lines_keeps_the_audit_and_bounds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_events, "_VALUE_CHARS_MAX", 10)
    recent = RecentEvents()
    recent.record(None, "info", {"event": "audit", "action": "login", "account": "boss"})
    for number in range(2000):
        recent.record(None, "warning", {"event": "a request is refused", "why": "x" * 5000, "n": number})
    recent.record(None, "debug", {"event": "not an event"})
    assert [event["fields"] for event in recent.newest(10, audit=True)] == [
        {"action": "login", "account": "boss"}
    ]
    others = recent.newest(10_000, audit=False)
    assert len(others) == 500
    assert others[0]["fields"] == {"why": "x" * 10, "n": "1999"}
    assert len(recent.newest(10_000)) == 501


def test_lines_of_a_traceback_are_not_kept() -> None:
    recent = RecentEvents()
    try:
        raise ValueError("secret")
    except ValueError as problem:
        recent.record(None, "error", {"event": "failed", "exc_info": problem, "error": "ValueError"})
    (event,) = recent.newest(1)
    assert event["fields"] == {"error": "ValueError"}


@pytest.mark.parametrize("call", ["events", "connections"])
def test_only_full_administrators_see_the_whole_daemon(daemon: ServedLog, call: str) -> None:
    assert daemon.ask("GET", f"/v1/{call}", token="boss-token").status == 200
    for token in ("reader-token", "local-token"):
        assert daemon.ask("GET", f"/v1/{call}", token=token).status == 403


@pytest.mark.usefixtures("recorded")
def test_events_page_shows_who_did_what_as_text(daemon: ServedLog) -> None:
    audit.record_action(Account("boss"), "set definition", table=HOSTILE)
    structlog.get_logger("test").warning("a server does not answer", instance=HOSTILE)
    answer = daemon.ask("GET", "/v1/events?kind=audit").json["events"]
    assert answer[0]["fields"] == {"action": "set definition", "account": "boss", "table": HOSTILE}
    assert daemon.ask("GET", "/v1/events?kind=nothing").status == 400
    with console_of(daemon) as browser:
        browser.post("/login", {"token": "boss-token"})
        page = browser.get("/events")
        assert "set definition boss" in page.words
        assert "a server does not answer" in page.words
        assert HOSTILE in page.words
        assert "<script>alert" not in page.text
        assert "login boss" in page.words, "the console's own audit is there too"
        audit_alone = browser.get("/events", kind="audit")
        assert "a server does not answer" not in audit_alone.words
        csrf = page.field("csrf")
        browser.post("/logout", {"csrf": csrf})
        browser.post("/login", {"token": "reader-token"})
        assert browser.get("/events").status == 403
        assert "Events" not in browser.get("/").words


def test_sessions_page_shows_listeners_readers_and_connections(daemon: ServedLog) -> None:
    def begin() -> Any:
        following = daemon.served.subscribers.following("http", INSTANCE, HOSTILE, account="reader")
        subscriber = following.__enter__()
        subscriber.sent(4096, 7, daemon.log.visible)
        return following

    following = daemon.in_loop(begin)
    try:
        with console_of(daemon) as browser:
            browser.post("/login", {"token": "boss-token"})
            page = browser.get("/sessions")
            browser.post("/logout", {"csrf": page.field("csrf")})
            browser.post("/login", {"token": "reader-token"})
            limited = browser.get("/sessions")
    finally:
        daemon.in_loop(lambda: following.__exit__(None, None, None))
    for shown in (page, limited):
        assert (shown.status, HOSTILE in shown.words) == (200, True)
        assert "<script>alert" not in shown.text
        assert str(daemon.log.visible) in shown.words
        assert f"127.0.0.1:{daemon.port()}" in shown.words
    assert "200: " in page.words, "requests by their status"
    assert "127.0.0.1:" in page.words.rpartition("Connections")[2]
    assert "<h2>Connections" not in limited.text
