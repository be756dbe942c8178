# SPDX-License-Identifier: Apache-2.0
"""Access to the web console: daemons that are down or disagree, host names, and proxies."""

import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.console import pages, sessions
from penstock.console.actions import ACTIONS
from penstock.console.fleet import Answers, Fleet
from penstock.console.sessions import Session, Sessions
from penstock.errors import AuthenticationFailed, ConnectionLost, PenstockError
from penstock.source.daemon_address import DaemonAddress
from tests.support.daemon.console import console_of
from tests.support.pipeline.local_runs import notes_pipeline, run_here

FIRST, SECOND = (DaemonAddress.parse(f"penstock://127.0.0.1:{port}/all") for port in (1, 2))
FIRST_URL, SECOND_URL = FIRST.base_urls[0], SECOND.base_urls[0]
ADMIN = {
    "account": "boss",
    "admin": True,
    "instances": ["*"],
    "subscriptions": ["*"],
    "tables": [],
    "exclude_tables": [],
}
OF_PIPELINES = ("/pipelines", "/tables", "/dead-letters", "/compare")
PIPELINE_PAGES = [path for path in pages.PAGES if path.startswith(OF_PIPELINES)]
PIPELINE_ACTIONS = [path for path in ACTIONS if path.startswith(OF_PIPELINES)]
DOWN = ConnectionLost("connection refused")
REFUSED = AuthenticationFailed("the credentials are wrong")


class Daemons:
    """The answers of daemons, by URL, or by URL and token. Records which daemons were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, dict[str, object] | PenstockError] = {}
        self.accepted: dict[str, str] = {}
        self.asked: list[str] = []
        monkeypatch.setattr(Fleet, "ask_all", lambda fleet, call: self._ask_all(fleet))

    def _ask_all(self, fleet: Fleet) -> Answers:
        values: dict[str, object] = {}
        problems: dict[str, PenstockError] = {}
        for url, address in fleet._addresses.items():
            self.asked.append(url)
            answer = self.answers[url]
            if url in self.accepted and not isinstance(answer, PenstockError):
                answer = answer if address.token.reveal() == self.accepted[url] else REFUSED
            if isinstance(answer, PenstockError):
                problems[url] = answer
            else:
                values[url] = answer | {"alerts": []}
        return Answers(values, problems)


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> Daemons:
    return Daemons(monkeypatch)


def test_pipelines_stay_hidden_while_a_daemon_with_accounts_is_down(daemons: Daemons, tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    daemons.answers = {FIRST_URL: DOWN}
    with console_of(FIRST, stores=(settings.state,)) as browser:
        unknown = browser.get("/pipelines")
        assert (unknown.status, f"{FIRST_URL} has not answered yet" in unknown.words) == (403, True)
        assert "notes" not in browser.get("/").words
        daemons.answers[FIRST_URL] = REFUSED
        assert browser.get("/pipelines").status == 303
        daemons.answers[FIRST_URL] = DOWN
        assert browser.get("/pipelines").status == 303
        daemons.answers[FIRST_URL] = ADMIN
        assert "notes" in browser.get("/pipelines").words
        daemons.answers[FIRST_URL] = DOWN
        assert "notes" in browser.get("/pipelines").words, "it asked for no credentials"


@pytest.mark.parametrize(
    "limit",
    [
        {"instances": ["shop"]},
        {"subscriptions": ["orders-*"]},
        {"tables": ["shop.*"]},
        {"exclude_tables": ["*.salaries"]},
    ],
    ids=lambda limit: next(iter(limit)),
)
def test_pipelines_are_closed_to_an_admin_with_limits(
    daemons: Daemons, tmp_path: Path, limit: dict[str, list[str]]
) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    daemons.answers = {FIRST_URL: ADMIN | limit, SECOND_URL: ADMIN}
    daemons.accepted = {FIRST_URL: "boss-token", SECOND_URL: "boss-token"}
    with console_of(FIRST, SECOND, stores=(settings.state,)) as browser:
        browser.post("/login", {"token": "boss-token"})
        assert "notes" not in browser.get("/").words
        refused = browser.get("/pipelines")
        assert (refused.status, "notes" in refused.words) == (403, False)
        for page in PIPELINE_PAGES:
            assert browser.get(page, store="0", name="notes", sink="").status == 403, page
        fields = {
            "csrf": refused.field("csrf"),
            "store": "0",
            "name": "notes",
            "source": "shop",
            "table": "t",
        }
        for action in PIPELINE_ACTIONS:
            assert browser.post(action, fields).status == 403, action
        daemons.answers[FIRST_URL] = ADMIN
        assert "notes" in browser.get("/pipelines").words


def test_admin_reads_pipelines_but_changes_nothing_while_no_daemon_confirms_the_rights(
    daemons: Daemons, tmp_path: Path
) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    daemons.answers = {FIRST_URL: ADMIN, SECOND_URL: ADMIN}
    daemons.accepted = {FIRST_URL: "boss-token", SECOND_URL: "boss-token"}
    with console_of(FIRST, SECOND, stores=(settings.state,)) as browser:
        browser.post("/login", {"token": "boss-token"})
        daemons.answers[FIRST_URL] = DOWN
        assert browser.get("/pipelines").status == 200, "the other daemon confirms them"
        daemons.answers[SECOND_URL] = DOWN
        for page in ("/", "/pipelines", "/tables"):
            shown = browser.get(page, store="0", name="notes", sink="")
            assert (shown.status, "notes" in shown.words) == (200, True), page
            assert FIRST_URL in shown.problem, page
        refused = browser.get("/pipelines/pause", store="0", name="notes")
        assert (refused.status, f"{FIRST_URL} does not answer" in refused.words) == (403, True)
        assert "change nothing" not in refused.words
        for page in ("/", "/fleet", "/sessions"):
            words = browser.get(page).words
            assert "connection refused" in words, page
            assert not re.search("No daemon|No job|Nobody follows", words), page


def test_pipelines_are_hidden_again_once_no_daemon_has_confirmed_the_rights_for_minutes(
    daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    daemons.answers = {FIRST_URL: ADMIN}
    daemons.accepted = {FIRST_URL: "boss-token"}
    with console_of(FIRST, stores=(settings.state,)) as browser:
        browser.post("/login", {"token": "boss-token"})
        assert "notes" in browser.get("/pipelines").words
        daemons.answers[FIRST_URL] = DOWN
        assert "notes" in browser.get("/pipelines").words
        # The account may have been removed in the meantime.
        with monkeypatch.context() as later:
            later.setattr(sessions, "_UNCONFIRMED_SECONDS_MAX", -1.0)
            for page in PIPELINE_PAGES:
                refused = browser.get(page, store="0", name="notes", sink="")
                assert (refused.status, f"{FIRST_URL} does not answer" in refused.words) == (403, True), page
            assert "notes" not in browser.get("/").words
        daemons.answers[FIRST_URL] = ADMIN
        assert "notes" in browser.get("/pipelines").words


def test_page_asks_a_daemon_that_does_not_answer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(fleet: Fleet, url: str, instance: str, work: object) -> dict[str, bool]:
        asked.append(url)
        if url == FIRST_URL:
            raise DOWN
        return {}

    monkeypatch.setattr(Fleet, "_with_client", answer)
    fleet = Fleet([FIRST, SECOND], None)
    for call in ("account", "status"):
        answers = fleet.ask_all(call)
        assert (answers.values, answers.problems) == ({SECOND_URL: {}}, {FIRST_URL: DOWN})
    assert sorted(asked) == sorted([FIRST_URL, SECOND_URL, SECOND_URL])


def test_visitor_without_a_login_asks_no_daemon(daemons: Daemons) -> None:
    daemons.answers = {FIRST_URL: REFUSED}
    with console_of(FIRST, hosts=("console.example.com",)) as browser:
        assert browser.get("/").status == 303
        assert browser.get("/tail", {"Cookie": "penstock_console=of-nobody"}).status == 303
    assert daemons.asked == []


def test_console_with_names_refuses_other_host_names(daemons: Daemons) -> None:
    with console_of(FIRST, hosts=("Console.example.com",)) as browser:
        for host in ("console.example.com", "Console.Example.com:443", "127.0.0.1", "localhost:1"):
            assert browser.get("/login", {"Host": host}).status == 200, host
        for host in ("evil.example", "console.example.com.evil.example", "evil.example:x@", "[", ""):
            refused = browser.get("/login", {"Host": host})
            assert (refused.status, refused.headers["x-frame-options"]) == (403, "DENY"), host


@pytest.mark.parametrize(
    ("hosts", "client"), [((), "127.0.0.1"), (("console.example.com",), "192.0.2.9")], ids=["direct", "proxy"]
)
def test_audit_takes_the_address_of_a_browser_from_a_proxy_only(
    daemons: Daemons, hosts: tuple[str, ...], client: str
) -> None:
    daemons.answers, daemons.accepted = {FIRST_URL: ADMIN}, {FIRST_URL: "boss-token"}
    with console_of(FIRST, hosts=hosts) as browser, capture_logs() as logs:
        answer = browser.post("/login", {"token": "boss-token"}, {"X-Forwarded-For": "192.0.2.9"})
        assert answer.status == 303
    assert [entry["client"] for entry in logs if entry["event"] == "audit"] == [client]


def test_login_names_the_daemon_that_refuses_its_token(daemons: Daemons) -> None:
    daemons.answers = {FIRST_URL: ADMIN, SECOND_URL: ADMIN}
    daemons.accepted = {FIRST_URL: "boss-token", SECOND_URL: "other-token"}
    with console_of(FIRST, SECOND) as browser:
        refused = browser.post("/login", {"token": "boss-token"})
        assert (refused.status, f"{SECOND_URL} refuses the token" in refused.words) == (401, True)
        daemons.answers[SECOND_URL] = DOWN
        assert browser.post("/login", {"token": "boss-token"}).status == 303


def test_refreshes_of_an_open_page_do_not_keep_its_session(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons.answers, daemons.accepted = {FIRST_URL: ADMIN}, {FIRST_URL: "boss-token"}
    uses: list[bool] = []
    find = Sessions.get

    def get(sessions: Sessions, identity: str, *, is_use: bool) -> Session | None:
        uses.append(is_use)
        return find(sessions, identity, is_use=is_use)

    monkeypatch.setattr(Sessions, "get", get)
    with console_of(FIRST) as browser:
        browser.post("/login", {"token": "boss-token"})
        assert browser.get("/pipelines", {"HX-Request": "true"}).status == 200
        assert browser.get("/pipelines").status == 200
    assert uses == [False, True]


def test_refresh_without_a_session_is_refused_and_does_not_lead_to_the_login(daemons: Daemons) -> None:
    daemons.answers = {FIRST_URL: REFUSED}
    with console_of(FIRST) as browser:
        assert browser.get("/", {"HX-Request": "true"}).status == 401
        assert 'id="stale"' in browser.get("/login").text
