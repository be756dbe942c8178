# SPDX-License-Identifier: Apache-2.0
"""The web console over a daemon in this process: the content of pages, and refused requests."""

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.console import log_pages, pages, ruler, sessions, tail, words
from penstock.console.app import ConsoleSettings
from penstock.console.fleet import Fleet
from penstock.console.ruler import Mark
from penstock.console.serving import ConsoleServer
from penstock.console.sessions import COOKIE, Sessions
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.lease import Lease
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import OptionInvalid, QuotaReached
from penstock.model import Secret
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.own_log import OwnSource
from penstock.source.daemon_address import DaemonAddress
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import read_range
from penstock.source.row_history import logged_values, plain_value
from penstock.source.source import ByteRange
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.pipeline.local_runs import notes_pipeline, run_here, run_sinks_here
from tests.support.pipeline.rejected_rows import reject_row
from tests.support.suite.nonempty import each

CONSOLE = Path(pages.__file__).parent
TEMPLATES = sorted((CONSOLE / "templates").glob("*.html"))
HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "boss", "token": "boss-token", "admin": True},
    {"name": "guest", "token": "guest-token", "tables": ["fuzzed.u"]},
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[ServedLog]:
    """A daemon that asks for no credentials. No reader holds its log unless a test names one."""
    with captured_log() as log, serving(log) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def guarded() -> Iterator[ServedLog]:
    """A daemon that asks for credentials."""
    with captured_log() as log, serving(log, {"token": "a-token"}, ACCOUNTS) as daemon:
        yield daemon


def daemon_url(daemon: ServedLog) -> str:
    return f"http://127.0.0.1:{daemon.port()}"


def log_in(browser: Browser, token: str) -> None:
    answer = browser.post("/login", {"token": token, "next": "/"})
    assert answer.status == 303, answer.words


def hold(daemon: ServedLog, reader: str, **more: str) -> None:
    position = daemon.log.earliest()
    path = f"/v1/instances/{INSTANCE}/position?reader={reader}&position={position}"
    assert daemon.ask("POST", path, **more).status == 200


# --- Pages ------------------------------------------------------------------------------------


def test_every_page_is_complete_without_javascript(daemon: ServedLog, tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    file = tmp_path / "notes.yaml"
    file.write_text(
        f"name: notes\nstate: {settings.state}\nsource: {{path: {tmp_path}/log, name: shop}}\nsink: stdout\n"
    )
    query = {"daemon": daemon_url(daemon), "instance": INSTANCE, "reader": "x", "store": "0", "name": "notes"}
    query |= {"entry": reject_row(load_pipeline(file))}
    with console_of(daemon, stores=(settings.state,), pipeline_files=(file,)) as browser:
        for path in each(pages.PAGES):
            page = browser.get(path, **query)
            assert page.status == 200, f"{path}: {page.words}"
            assert "<h1>" in page.text
            assert re.findall(r"<script(?![^>]* src=)", page.text) == [], "no script is in a page itself"
            assert " style=" not in page.text
            assert not re.search(r"\son[a-z]+=", page.text), "no handler is in a page itself"


def test_overview_shows_each_instance_and_a_daemon_that_is_down(daemon: ServedLog) -> None:
    with captured_log() as log:
        with serving(log) as other, console_of(daemon, other) as browser:
            assert browser.get("/").words.count(" running ") == 2
            gone = DaemonAddress.parse(f"penstock://127.0.0.1:{other.port()}/all")
        with console_of(daemon, gone) as browser:
            page = browser.get("/")
    assert (page.status, page.words.count(" running ")) == (200, 1)
    assert gone.base_urls[0] in page.words


def test_instance_page_shows_each_reader_and_its_distance(daemon: ServedLog) -> None:
    hold(daemon, "orders-cache")
    with console_of(daemon) as browser:
        page = browser.get("/instance", daemon=daemon_url(daemon), instance=INSTANCE)
    assert page.text.count("orders-cache") >= 3, "in the picture, its table, and the holds"
    assert "<svg" in page.text
    assert str(daemon.log.visible) in page.words
    assert "1.0 TiB free" in page.words


def test_forecast_of_a_full_disk_leaves_the_reserve() -> None:
    disk: dict[str, int | None] = {"free_bytes": 10_000, "reserved_bytes": 4_000}
    assert log_pages.full_in(disk, 100.0) == 60
    assert log_pages.full_in(disk | {"reserved_bytes": 20_000}, 100.0) == 0
    assert log_pages.full_in(disk, 0.2) is None, "it is idle"
    assert log_pages.full_in({"free_bytes": None, "reserved_bytes": None}, 100.0) is None


def test_history_page_shows_changes_and_pending_readers(daemon: ServedLog) -> None:
    hold(daemon, "orders-cache")
    with console_of(daemon) as browser:
        page = browser.get("/history", table="fuzzed.t", key="1")
        assert "insert" in page.words
        assert "Not confirmed by: orders-cache" in page.words
        nothing = browser.get("/history", table="fuzzed.t", key="4711", limit="x")
        assert "insert" not in nothing.words
        wrong = browser.get("/history", table="fuzzed.t", key="x")
        assert "The search ended early" in wrong.words


def test_subscriptions_show_the_owner_and_the_distance_of_each_shard(daemon: ServedLog) -> None:
    store = MemoryStore("subscriptions")
    registry = Subscriptions(store)
    known = registry.create(Subscription(INSTANCE, "orders-cache", shard_count=2))
    registry.create(Subscription("elsewhere", "hidden"))
    session = store.session()
    lease = Lease.acquire(store, session, known.lease_path(1), "h1:42")
    assert lease is not None
    earliest = daemon.log.earliest()
    registry.reset(INSTANCE, "orders-cache", Checkpoint.now(str(earliest)), 0)
    probe = CoordinationProbe("memory", lambda: store, [INSTANCE])
    accounts = [{"name": "other", "token": "other-token", "subscriptions": ["other"]}]
    with serving(daemon.log, {"token": "a-token"}, accounts, coordination=probe) as coordinated:
        answer = coordinated.ask("GET", "/v1/subscriptions").json
        (shown,) = answer["subscriptions"]
        first, second = shown["shards"]
        assert (first["owner"], second["owner"]) == (None, "h1:42")
        assert first["behind_bytes"] == daemon.log.bytes_behind_all([earliest])[0] > 0
        assert second["behind_bytes"] is None, "nothing was consumed yet"
        assert coordinated.ask("GET", "/v1/subscriptions", token="other-token").json["subscriptions"] == []
        rights = coordinated.ask("GET", "/v1/account", token="other-token").json
        assert (rights["account"], rights["admin"], rights["subscriptions"]) == ("other", False, ["other"])
        with console_of(coordinated) as browser:
            log_in(browser, "a-token")
            page = browser.get("/subscriptions")
            assert f"{INSTANCE} / orders-cache" in page.words
            assert "h1:42" in page.words
            assert "nobody" in page.words


def test_subscriptions_page_says_what_is_missing(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        assert "No daemon has a coordination store" in browser.get("/subscriptions").words


def test_pipelines_are_shown_paused_and_resumed(daemon: ServedLog, tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    with console_of(daemon, stores=(settings.state,)) as browser, capture_logs() as logs:
        shown = browser.get("/pipelines")
        assert "notes" in shown.words
        form = browser.get("/pipelines/pause", store="0", name="notes")
        fields = {name: form.field(name) for name in ("csrf", "store", "name")}
        with closing(PipelineState.open(settings.state, settings.name)) as state:
            assert not state.paused, "showing what will happen changes nothing"
            browser.post("/pipelines/pause/confirm", {**fields, "why": HOSTILE})
            assert state.pause_message() is not None
            assert "paused" in browser.get("/pipelines").words
            browser.post("/pipelines/resume/confirm", fields)
            assert not state.paused
        unknown = browser.post("/pipelines/pause/confirm", {**fields, "name": "nothing"})
        assert (unknown.status, "no pipeline 'nothing'" in unknown.words) == (404, True)
    audit = [(entry["action"], entry["pipeline"]) for entry in logs if entry["event"] == "audit"]
    assert audit == [("pause pipeline", "notes"), ("resume pipeline", "notes")]


def test_overview_shows_the_most_urgent_pipelines_and_links_to_the_others(
    daemon: ServedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_PIPELINES_SHOWN_MAX", 1)
    url = f"sqlite:///{tmp_path}/states.db"
    for name in ("another", "broken", "fine"):
        with closing(PipelineState.open(url, name)) as state:
            if name == "broken":
                state.write(state.take())
                state.show({"state": "failed"})
            else:
                state.pause("")
    with console_of(daemon, stores=(url,)) as browser:
        shown = browser.get("/")
    assert "All 3 pipelines" in shown.words
    assert "broken" in shown.words
    assert " fine " not in shown.words


def test_table_is_requested_again_after_a_page_that_says_what_will_happen(
    daemon: ServedLog, tmp_path: Path
) -> None:
    sinks = {name: {"files": {"path": str(tmp_path / name)}} for name in ("lake", "audit")}
    settings = notes_pipeline(tmp_path, sinks=sinks)
    run_sinks_here(settings)
    address = {"store": "0", "name": "notes", "sink": "audit"}
    table = {**address, "source": "shop", "table": "shop.notes"}
    with (
        console_of(daemon, stores=(settings.state,)) as browser,
        capture_logs() as logs,
        closing(PipelineState.open(settings.state, settings.name, "audit")) as audit,
        closing(PipelineState.open(settings.state, settings.name, "lake")) as lake,
    ):
        # No process runs the pipeline, so it is shown as idle.
        shown = browser.get("/tables", **address)
        assert " idle " in shown.words
        assert "The last batch took" in shown.words
        (position,) = audit.checkpoint().offsets.values()  # type: ignore[union-attr]
        assert f"State finished Lag – Position shop {position['file']}:{position['offset']} " in shown.words
        assert shown.text.count('<rect class="phase') == 5
        assert '<a href="/history?table=shop.notes">shop.notes</a>' in shown.text
        assert 'value="shop.notes"' in browser.get("/history", table="shop.notes").text
        page = browser.get("/tables/resnapshot", **table)
        assert "chunk by chunk" in page.words
        assert audit.requests() == []
        fields = {**table, "csrf": page.field("csrf")}
        unknown = browser.post("/tables/resnapshot/confirm", {**fields, "table": "shop.nothing"})
        assert unknown.status == 404
        assert browser.post("/tables/resnapshot/confirm", fields).status == 303
        (request,) = audit.requests()
        assert (str(request.table), request.state, lake.requests()) == ("shop.notes", "asked", [])
        assert request.remove
        assert "asked" in browser.get("/tables", **address).words
        assert browser.get("/tables", **{**address, "sink": "nothing"}).status == 404
        assert browser.get("/tables", **{**address, "store": "7"}).status == 404
    assert [entry["action"] for entry in logs if entry["event"] == "audit"] == ["read table again"]


def test_tail_shows_each_change_once_from_its_first_moment(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tail starts at the head; in this test the head is the start of the log."""
    earliest = str(daemon.log.earliest())
    asked = Fleet.ask_instance

    def from_the_start(fleet: Fleet, url: str, instance: str, call: str) -> dict[str, Any]:
        return {"position": earliest} if call == "head" else asked(fleet, url, instance, call)

    monkeypatch.setattr(Fleet, "ask_instance", from_the_start)
    monkeypatch.setattr(tail, "_WAIT_SECONDS", 0.01)
    address = DaemonAddress.parse(f"penstock://127.0.0.1:{daemon.port()}/all")

    def parts(clock: Callable[[], float], **wanted: Any) -> list[dict[str, Any]]:
        fleet = Fleet([address], None)
        return list(tail.tail_changes(fleet, address.base_urls[0], INSTANCE, wanted, clock))

    ticks = itertools.count(step=2.0)
    calm = parts(lambda: next(ticks))
    rows = [part for part in calm if part["kind"] == "row"]
    assert (calm[0], calm[-1]) == ({"kind": "begin", "position": earliest}, {"kind": "end", "why": "time"})
    expected = history_of_table(daemon, "fuzzed.t")
    shown = [(part["change"], part["before"], part["after"]) for part in rows if part["table"] == "fuzzed.t"]
    assert shown == expected
    # Of the changes at one clock time, the tail shows at most the limit, and counts the rest.
    monkeypatch.setattr(tail, "_ROWS_PER_SECOND_MAX", 2)
    moments = itertools.chain([0.0] * 200, itertools.count(1000.0))
    busy = parts(lambda: next(moments))
    assert sum(part["kind"] == "row" for part in busy) == 2
    assert sum(part["rows"] for part in busy if part["kind"] == "skipped") == len(rows) - 2
    monkeypatch.setattr(tail, "ROWS_MAX", 1)
    assert parts(lambda: 0.0)[-1] == {"kind": "end", "why": "rows"}
    with pytest.raises(OptionInvalid):
        parts(lambda: 0.0, where="no such (")


def history_of_table(daemon: ServedLog, table: str) -> list[tuple[str, Any, Any]]:
    """Return the changes of a table in the order of the log, with their images."""
    changes: list[tuple[str, Any, Any]] = []
    before = None
    source = OwnSource(INSTANCE, daemon.log)
    for extent in daemon.log.extents():
        byte_range = ByteRange(extent.epoch, extent.file, extent.start, extent.end, aligned=True)
        for batch in read_range(source, byte_range, None, LoggedTables(source)):
            for row in batch.to_arrow().to_pylist() if batch.table == table else ():
                image = plain_value(logged_values(row))
                kind = row["_change_type"]
                if kind == "update_preimage":
                    before = image
                elif kind == "update_postimage":
                    changes.append(("update", before, image))
                else:
                    is_insert = kind == "insert"
                    changes.append((kind, None if is_insert else image, image if is_insert else None))
    return changes


def test_tail_page_streams_until_its_end(daemon: ServedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        *({"kind": "begin", "position": begin} for begin in (HOSTILE, None)),
        {"kind": "idle"},
        {
            "kind": "row",
            "table": HOSTILE,
            "change": "update",
            "time": "2026",
            "before": {"a": 1},
            "after": {"a": HOSTILE},
        },
        {"kind": "skipped", "rows": 7},
        {"kind": "end", "why": "time"},
    ]
    monkeypatch.setattr(pages, "tail_changes", lambda *_: iter(parts))
    with console_of(daemon) as browser:
        page, form = browser.get("/tail", follow="1"), browser.get("/tail")
    assert "Follow" in form.words
    for text in (f"Changes after {HOSTILE} appear here", "The log is empty", "7 changes are not shown"):
        assert text in page.words
    assert HOSTILE in page.words
    assert "<script>alert" not in page.text


def test_console_works_below_a_base_path(daemon: ServedLog) -> None:
    with console_of(daemon, base_path="/penstock") as browser:
        page = browser.get("/")
        links = re.findall(r'(?:href|src|action|hx-get)="([^"#]+)"', page.text)
        assert all(link.startswith(("/penstock/", "?")) for link in each(links))
        assert browser.get("/static/console.css").status == 200
        assert Browser(browser.port).get("/").status == 404


# --- Rights -----------------------------------------------------------------------------------


def test_visitor_without_a_login_sees_the_login_alone(guarded: ServedLog) -> None:
    with console_of(guarded) as browser:
        for path in each(pages.PAGES | pages.FILES):
            page = browser.get(path)
            assert (page.status, page.headers["location"].partition("?")[0]) == (303, "/login")
        assert browser.post("/login", {"token": "wrong"}).status == 401
        assert browser.post("/login", {"token": ""}).status == 401
        assert browser.get("/", headers={"HX-Request": "true"}).status == 401


def test_account_sees_and_does_what_the_daemon_permits_it(guarded: ServedLog) -> None:
    hold(guarded, "orders-cache", token="boss-token")
    address = {"daemon": daemon_url(guarded), "instance": INSTANCE}
    with console_of(guarded) as browser, capture_logs() as logs:
        log_in(browser, "guest-token")
        assert "guest · read only" in browser.get("/").words
        assert "orders-cache" not in browser.get("/instance", **address).text
        assert browser.get("/hold", reader="orders-cache", **address).status == 403
        assert "may not read" in browser.get("/history", table="fuzzed.t", key="1").words
        assert browser.get("/pipelines").status == 403
        fields = {"csrf": browser.get("/").field("csrf"), "reader": "orders-cache", **address}
        assert browser.post("/hold/remove", fields).status == 403
        browser.post("/logout", fields)
        assert browser.get("/").status == 303
        log_in(browser, "boss-token")
        form = browser.get("/hold", reader="orders-cache", **address)
        browser.post("/hold/remove", fields | {"csrf": form.field("csrf")})
        assert "Nobody holds this log" in browser.get("/instance", **address).words
    removals = [entry for entry in logs if entry.get("action") == "remove hold"]
    assert [(entry["account"], entry["reader"]) for entry in removals] == [("boss", "orders-cache")]


def test_login_is_refused_where_the_daemon_asks_for_no_credentials(daemon: ServedLog) -> None:
    # A login is refused, because the console would otherwise accept any token from visitors on other hosts.
    with console_of(daemon, hosts=("console.example.com",)) as browser:
        assert browser.get("/").status == 303
        refused = browser.post("/login", {"token": "anything"})
        assert (refused.status, "asks for no credentials" in refused.words) == (403, True)


def test_each_login_has_a_new_session(guarded: ServedLog) -> None:
    with console_of(guarded) as browser:
        browser.cookies[COOKIE] = "fixed-by-somebody-else"
        log_in(browser, "boss-token")
        assert browser.cookies[COOKIE] != "fixed-by-somebody-else"
        cookie = browser.post("/login", {"token": "boss-token"}).headers["set-cookie"].lower()
        assert {"httponly", "samesite=strict"} <= {part.strip() for part in cookie.split(";")}


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
    ids=lambda headers: "-".join(headers),
)
def test_form_of_another_site_is_refused(guarded: ServedLog, headers: dict[str, str]) -> None:
    with console_of(guarded) as browser:
        log_in(browser, "boss-token")
        csrf = browser.get("/").field("csrf")
        assert browser.post("/logout", {"csrf": csrf}, headers).status == 403
        assert browser.post("/login", {"token": "boss-token"}, headers).status == 403
        assert browser.get("/").status == 200


def test_form_without_the_token_of_its_browser_is_refused(guarded: ServedLog) -> None:
    with console_of(guarded) as browser:
        log_in(browser, "boss-token")
        other = Browser(browser.port)
        log_in(other, "boss-token")
        for token in ("", "x", "ü", other.get("/").field("csrf")):
            assert browser.post("/logout", {"csrf": token}).status == 403
        assert browser.get("/").status == 200


def test_foreign_host_name_is_refused_on_a_private_console(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        assert browser.get("/", {"Host": "evil.example"}).status == 403
        assert browser.get("/", {"Host": "localhost:1"}).status == 200


def test_next_page_after_a_login_is_a_page_of_the_console(guarded: ServedLog) -> None:
    with console_of(guarded) as browser:
        for target in ("https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:x"):
            answer = browser.post("/login", {"token": "boss-token", "next": target})
            assert answer.headers["location"] == "/"
        answer = browser.post("/login", {"token": "boss-token", "next": "/history?table=a"})
        assert answer.headers["location"] == "/history?table=a"


def test_hostile_names_are_shown_as_text(daemon: ServedLog) -> None:
    address = {"daemon": HOSTILE, "instance": HOSTILE}
    with console_of(daemon) as browser:
        asked = [
            browser.get("/history", table=HOSTILE, key=HOSTILE, columns=HOSTILE),
            browser.get("/instance", **address),
            browser.get("/hold", reader=HOSTILE, daemon=daemon_url(daemon), instance=INSTANCE),
            browser.get("/pipelines/pause", store=HOSTILE, name=HOSTILE),
            browser.get("/", lang=HOSTILE),
            browser.get("/login", next=HOSTILE),
        ]
    for page in each(asked):
        assert "<script>alert" not in page.text
        assert "11111103" not in page.words
    assert HOSTILE in asked[2].words


def test_headers_of_every_response_forbid_what_pages_do_not_use(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        for path in ("/", "/static/console.js", "/nothing", "/login"):
            headers = browser.get(path).headers
            assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
        assert browser.get("/").headers["cache-control"] == "no-store"


def test_form_that_is_too_large_is_refused(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        assert browser.post("/logout", {"csrf": "x" * 100_000}).status == 413


def test_console_that_nobody_can_log_in_to_is_refused() -> None:
    with pytest.raises(OptionInvalid, match=r"0\.0\.0\.0 can be reached"):
        ConsoleServer(ConsoleSettings((), host="0.0.0.0", port=0))


def test_session_ends_when_idle_and_after_a_day() -> None:
    now = 0.0
    kept = Sessions(1800, lambda: now)
    identity = kept.begin("boss", Secret("t"))
    for _ in range(24):
        now += 1700
        assert kept.get(identity, is_use=True) is not None
    now += 1700
    assert kept.get(identity, is_use=False) is not None
    now += 101
    assert kept.get(identity, is_use=True) is None, "a page that refreshes itself does not use its session"
    identity = kept.begin("boss", Secret("t"))
    while kept.get(identity, is_use=True) is not None:
        now += 1700
    assert now < 1700 * 60, "a session ends, however busy it is"


def test_logins_of_one_address_are_throttled_after_many_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_FAILURES_MAX", 2)
    now = 0.0
    kept = Sessions(1800, lambda: now)
    kept.count_failure("192.0.2.1")
    kept.prove_may_try("192.0.2.1")
    kept.count_failure("192.0.2.1")
    with pytest.raises(QuotaReached):
        kept.prove_may_try("192.0.2.1")
    kept.prove_may_try("192.0.2.2")
    now += 61
    kept.prove_may_try("192.0.2.1")


# --- Words, picture, files --------------------------------------------------------------------


def test_every_text_of_the_templates_has_a_translation() -> None:
    texts = {
        ast.literal_eval(text)
        for template in each(TEMPLATES)
        for text in re.findall(r"""\bt\(("[^"]*"|'[^']*')""", template.read_text())
    }
    assert texts - words.CHINESE.keys() == set()
    fields = re.compile(r"\{[a-z]+\}")
    for text, translated in words.CHINESE.items():
        assert sorted(fields.findall(text)) == sorted(fields.findall(translated)), text


def test_language_is_chosen_by_the_browser_and_by_hand(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        assert "总览" in browser.get("/", {"Accept-Language": "zh-CN,zh;q=0.9"}).words
        assert "Overview" in browser.get("/", {"Accept-Language": "de"}).words
        assert "总览" in browser.get("/", lang="zh").words
        assert "总览" in browser.get("/").words, "the choice is kept"


def test_ruler_orders_marks_by_their_distance() -> None:
    marks = [Mark("reader", "far", "", 1 << 30), Mark("server", "", "", 0), Mark("reader", "near", "", 4096)]
    drawn = ruler.draw_ruler(marks)
    places = {placed.mark.name: placed.x for placed in drawn.marks}
    assert 0 < places["far"] < places["near"] < places[""] <= drawn.width
    assert [size for size, _ in drawn.ticks] == [1 << 10, 1 << 20]
    assert ruler.draw_ruler([]).marks == []
    assert len(ruler.draw_ruler([Mark("server", "", "", 0)]).marks) == 1


def test_daemon_address_of_a_request_is_one_of_the_console(daemon: ServedLog) -> None:
    address = DaemonAddress.parse("penstock://127.0.0.1:1/all")
    with console_of(daemon) as browser:
        page = browser.get("/instance", daemon=address.base_urls[0], instance=INSTANCE)
    assert (page.status, "not a daemon of this console" in page.words) == (404, True)
