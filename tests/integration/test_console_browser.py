# SPDX-License-Identifier: Apache-2.0
"""The web console in a real browser, over a daemon that captures a real server."""

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml

from penstock.client import Subscriber
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscriptions
from penstock.pipeline.dead_letter import dead_letters
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState
from penstock.source.daemon_address import DaemonAddress
from tests.support.daemon.console import console_of, recorded_events
from tests.support.daemon.process import PENSTOCK, ROOT, DaemonProcess
from tests.support.daemon.served_log import captured_log, serving
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.chromium import Chromium
from tools.servers import PartMissing, Server
from tools.servers.packages import program_on_host
from tools.servers.ports import free_port

HOSTILE = "<script>document.title='owned'</script>"
PICTURES = ROOT / "build/console"


@pytest.fixture
def browser(missing_part: MissingPart, tmp_path: Path) -> Iterator[Chromium]:
    try:
        program = program_on_host("chromium", "chromium")
    except PartMissing as problem:
        missing_part("chromium", str(problem))
    with Chromium(program, tmp_path / "browser") as browser:
        yield browser


def is_listening(port: int) -> bool:
    """Return whether a port of this machine accepts connections."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class Shop:
    """A captured server with one table and the history of one row, and a pipeline and a subscription that
    read the table.

    The daemon runs the console at the address `console`.
    """

    daemon: DaemonProcess
    server: Server
    console: str
    table: str
    coordination: str
    pipeline: Path

    @property
    def url(self) -> str:
        """The daemon's URL."""
        return f"http://127.0.0.1:{self.daemon.port}"

    def subscriber(self) -> Subscriber:
        """Start a member of the subscription and return it."""
        return Subscriber(
            f"penstock://127.0.0.1:{self.daemon.port}/shop",
            name="orders-cache",
            tables=[self.table],
            shards=2,
            coordination=self.coordination,
            begin="earliest",
        )

    def run_pipeline(self, file: Path | None = None) -> None:
        """Run the pipeline, or the pipeline of another file, to the end of the log."""
        command = [*PENSTOCK, "run", str(file or self.pipeline), "--local", "--until", "caught-up"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS_MAX)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def shop(mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path) -> Iterator[Shop]:
    table = f"{fresh_database(mysql_server)}.orders"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, status VARCHAR(80), note TEXT)")
    coordination, port = f"sqlite:///{tmp_path}/subscriptions.db", free_port()
    file = tmp_path / "orders.yaml"
    settings = {
        "coordination": coordination,
        "alerts": {"webhook": "http://127.0.0.1:9/nobody", "disk": "900000000GiB"},
        "console": {"listen": f"127.0.0.1:{port}", "pipelines": [str(file)]},
        "instances": {"shop": {"source": mysql_server.url(), "start": "latest"}},
    }
    daemon = DaemonProcess(tmp_path, settings)
    pipeline = {
        "name": "orders",
        "source": {
            "url": f"penstock://127.0.0.1:{daemon.port}/shop",
            "tables": table,
            "start": "earliest",
        },
        "load": "none",
        "steps": [{"map": {"cast": {"status": "int"}, "on_error": "dead_letter"}}],
        "sink": {"files": {"path": str(tmp_path / "feed")}},
    }
    file.write_text(yaml.safe_dump(pipeline))
    with daemon:
        wait_until(lambda: daemon.status()["state"] == "running")
        note = HOSTILE.replace("'", "''")
        mysql_server.sql(
            f"INSERT INTO {table} VALUES (7, 'new', '{note}');"
            f" UPDATE {table} SET status = 'paid' WHERE id = 7; DELETE FROM {table} WHERE id = 7"
        )
        wait_until(lambda: is_listening(port))
        yield Shop(daemon, mysql_server, f"http://127.0.0.1:{port}", table, coordination, file)


@pytest.mark.deep(guard="tests/unit/test_console.py::test_every_page_is_complete_without_javascript")
def test_operator_answers_each_question_in_a_browser(shop: Shop, browser: Chromium) -> None:
    shop.run_pipeline()
    console = shop.console
    with shop.subscriber() as subscriber:
        assert next(iter(subscriber)).table == shop.table
        _read_overview(browser, console)
        _read_positions(browser, console, shop)
        _read_history(browser, console, shop)
        _read_log(browser, console, shop)
        _read_server_and_settings(browser, console, shop)
        _read_members_and_alerts(browser, console)
        _read_shards(browser, console)
        _reset_subscription(browser, console, shop)
        _replay_rejected_rows(browser, console)
        _pause_pipeline(browser, console, shop)
        browser.open(f"{console}/?lang=zh")
        assert "总览" in browser.text
        save_pictures(browser, "overview-zh")
    assert browser.errors == []
    assert {re.match(r"(\w+://[^/]*)?", address)[0] for address in browser.requested} == {console}  # type: ignore[index]
    shop.daemon.kill()
    port = int(console.rpartition(":")[2])
    wait_until(lambda: not is_listening(port))


def save_pictures(browser: Chromium, name: str) -> None:
    """Save a picture of the page in each color scheme. No page is wider than the window."""
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), name
    for scheme in ("dark", "light"):
        browser.prefer(scheme)
        browser.save_picture(PICTURES / f"{name}-{scheme}.png")
    with browser.narrow(400):
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), f"{name}, narrow"
        browser.save_picture(PICTURES / f"{name}-narrow.png")


def _read_overview(browser: Chromium, console: str) -> None:
    """Read which captures and pipelines run."""
    browser.open(f"{console}/")
    assert "running" in browser.text
    assert "orders" in browser.text
    browser.wait_until("document.querySelector('th button') !== null")
    save_pictures(browser, "overview")
    # The page refreshes itself, by the script that is part of the package.
    browser.run("document.querySelector('h1').textContent = 'stale'")
    browser.wait_until("document.querySelector('h1').textContent === 'Overview'")
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"


def _read_positions(browser: Chromium, console: str, shop: Shop) -> None:
    """Read the position of each reader of the log."""
    browser.open(f"{console}/instance?{urlencode({'daemon': shop.url, 'instance': 'shop'})}")
    assert browser.run("document.querySelectorAll('svg.ruler circle').length") >= 3
    assert "pipeline.orders.shop" in browser.text
    browser.wait_until("document.querySelector('figure.chart polyline') !== null")
    save_pictures(browser, "instance")


def _read_history(browser: Chromium, console: str, shop: Shop) -> None:
    """Read the history of one row."""
    browser.open(f"{console}/history?{urlencode({'table': shop.table, 'key': '7'})}")
    kinds = browser.run("[...document.querySelectorAll('article h2 .state')].map(e => e.textContent)")
    assert kinds[:3] == ["delete", "update", "insert"]
    assert HOSTILE in browser.text
    assert browser.run("document.title") == "Row history · Penstock"
    # The progress of the search gives way to the end of the list.
    progress = browser.run("[...document.querySelectorAll('.progress')].map(e => e.textContent)")
    assert len(progress) >= 2
    searched, whole = re.findall(r"[\d.,]+ \w+", progress[-1])[:2]
    assert searched == whole
    shown = "[...document.querySelectorAll('.progress')].filter(e => e.getClientRects().length).length"
    assert browser.run(shown) == 0
    save_pictures(browser, "history")


def _read_log(browser: Chromium, console: str, shop: Shop) -> None:
    """Read the other changes of a change's transaction, the definition of its table, and what the log
    keeps.
    """
    browser.click("article a")
    assert browser.run("document.querySelectorAll('article.change').length") >= 1
    assert shop.table in browser.text
    assert HOSTILE in browser.text
    save_pictures(browser, "transaction")
    address = {"daemon": shop.url, "instance": "shop"}
    browser.open(f"{console}/definitions?{urlencode({**address, 'table': shop.table})}")
    assert "varchar(80)" in browser.text
    save_pictures(browser, "definitions")
    browser.open(f"{console}/log?{urlencode(address)}")
    assert "pipeline.orders.shop" in browser.text
    save_pictures(browser, "log")


def _read_server_and_settings(browser: Chromium, console: str, shop: Shop) -> None:
    """Read the server's settings that hide changes, and the settings that the daemon runs with."""
    browser.open(f"{console}/check?{urlencode({'daemon': shop.url, 'instance': 'shop'})}")
    assert "binlog_format" in browser.text
    save_pictures(browser, "check")
    browser.open(f"{console}/settings")
    assert "No account is set" in browser.text
    assert '"coordination"' in browser.text
    save_pictures(browser, "settings")


def _read_shards(browser: Chromium, console: str) -> None:
    """Read which member has which shard, from the grid of members and shards."""
    browser.open(f"{console}/subscriptions")
    heads = browser.run("[...document.querySelectorAll('table.grid thead th')].map(e => e.textContent)")
    assert heads == ["Member", "0", "1"]
    cells = browser.run(
        "[...document.querySelectorAll('table.grid tbody tr')].map(row =>"
        " [...row.cells].map(cell => [cell.textContent.trim() !== '', cell.className.includes('shade')]))"
    )
    # The only member has both shards.
    assert cells == [[[True, False], [True, True], [True, True]]]
    assert "nobody" not in browser.run("document.querySelector('table.grid').textContent")
    save_pictures(browser, "shards")


def _reset_subscription(browser: Chromium, console: str, shop: Shop) -> None:
    """Move the position of a subscription: check the preview, then the effect in the store itself."""

    def resets() -> int:
        with closing(open_store(shop.coordination)) as store:
            (subscription,) = Subscriptions(store).list("shop")
            return subscription.resets

    before = resets()
    browser.open(f"{console}/subscriptions")
    browser.click("h2 a.button[href*=reset]")
    browser.run("document.querySelector('select[name=kind]').value = 'earliest'")
    browser.click("form.search button")
    assert "begin again there" in browser.text
    save_pictures(browser, "reset")
    assert resets() == before
    browser.click("button.danger")
    assert resets() == before + 1


def _replay_rejected_rows(browser: Chromium, console: str) -> None:
    """Read the rows that a step rejected, and replay them."""
    browser.open(f"{console}/pipelines")
    browser.click("td.right a")
    assert "StepFailed" in browser.text
    save_pictures(browser, "rejected")
    browser.click("td.actions a")
    assert HOSTILE in browser.text
    save_pictures(browser, "rejected-rows")
    browser.open(f"{console}/dead-letters?store=0&name=orders&sink=")
    browser.click("p a.button")
    assert "are written to the target" in browser.text
    save_pictures(browser, "replay")
    browser.click("button.danger")
    assert "rejected once more" in browser.text
    browser.click("nav.tabs a:last-child")
    assert "changes nothing" in browser.text
    save_pictures(browser, "compare")


def _read_members_and_alerts(browser: Chromium, console: str) -> None:
    """Read which member has which shard, and the alert that the disk has less free space than
    `alerts.disk`.
    """
    browser.open(f"{console}/subscriptions")
    browser.wait_until("document.body.innerText.includes('orders-cache')")
    save_pictures(browser, "subscriptions")
    browser.open(f"{console}/alerts")
    browser.wait_until("document.body.innerText.includes('disk')")
    save_pictures(browser, "alerts")


def _pause_pipeline(browser: Chromium, console: str, shop: Shop) -> None:
    """Pause a pipeline: check the preview, then the effect in the store itself."""
    location = load_pipeline(shop.pipeline)
    with closing(PipelineState.open(location.state, "orders")) as state:
        browser.open(f"{console}/pipelines")
        browser.click("td a:not(.button)")
        assert "idle" in browser.text, "nothing runs the pipeline"
        save_pictures(browser, "tables")
        browser.open(f"{console}/pipelines")
        browser.click("td a.button")
        assert "stops after its current batch" in browser.text
        save_pictures(browser, "pause")
        assert not state.paused
        browser.run("document.querySelector('input[name=why]').value = 'maintenance'")
        browser.click("button.danger")
        assert state.paused
        assert "paused" in browser.text
        save_pictures(browser, "pipelines")


# --- Incidents --------------------------------------------------------------------------------


@pytest.mark.deep(guard="tests/unit/test_console.py::test_every_page_is_complete_without_javascript")
def test_an_incident_is_solved_on_each_screen(shop: Shop, browser: Chromium, tmp_path: Path) -> None:
    """Each incident is solved in the browser alone, and the effect is checked in the affected system."""
    shop.run_pipeline()
    copies = _copied_table(shop, tmp_path)
    state = load_pipeline(shop.pipeline).state
    address = DaemonAddress.parse(f"penstock://127.0.0.1:{shop.daemon.port}/all")
    files = (shop.pipeline, copies)
    with (
        recorded_events(),
        shop.subscriber() as subscriber,
        console_of(address, stores=(state,), pipeline_files=files, command=tuple(PENSTOCK)) as served,
    ):
        assert next(iter(subscriber)).table == shop.table
        console = f"http://127.0.0.1:{served.port}"
        _restore_a_deleted_row(browser, console, shop)
        _see_whether_changes_arrive(browser, console, shop)
        _find_who_reads(browser, console)
        _free_the_log_from_a_lost_reader(browser, console, shop)
        _let_a_paused_subscription_go_on(browser, console, shop)
        shop.run_pipeline(copies)
        _repair_a_target(browser, console, shop)
        _read_a_table_again(browser, console, state)
        _drop_rejected_rows(browser, console, shop)
        _resume_a_pipeline(browser, console, state)
        _find_who_did_it(browser, console)
    assert browser.errors == []


def _copied_table(shop: Shop, folder: Path) -> Path:
    """Copy a table to another database with a pipeline, and return the pipeline's file."""
    database, _, name = shop.table.partition(".")
    shop.server.sql(
        f"CREATE DATABASE {database}_copy; INSERT INTO {shop.table} VALUES (1, '10', 'a'), (2, '20', 'b')"
    )
    settings = {
        "name": "copies",
        "state": load_pipeline(shop.pipeline).state,
        "source": {"url": shop.server.url(), "tables": shop.table},
        "steps": [{"route": {"to": f"{database}_copy.{name}"}}],
        "sink": {"mysql": {"url": shop.server.url("root"), "positions": f"{database}_copy.positions"}},
    }
    file = folder / "copies.yaml"
    file.write_text(yaml.safe_dump(settings))
    shop.run_pipeline(file)
    return file


def _restore_a_deleted_row(browser: Chromium, console: str, shop: Shop) -> None:
    """Find the values of a row that was deleted by mistake."""
    browser.open(f"{console}/history?{urlencode({'table': shop.table, 'key': '7'})}")
    browser.click("article a")
    place = browser.run("new URLSearchParams(location.search).get('place')")
    browser.open(f"{console}/as-of?{urlencode({'table': shop.table, 'at': place})}")
    # The change is inside a transaction. The page says where the transaction begins.
    (begin,) = re.findall(r"begins at (\S+)", browser.text)
    browser.run(f"document.querySelector('input[name=at]').value = '{begin}'")
    browser.click("form.search button")
    assert "paid" in browser.text
    assert HOSTILE in browser.text
    save_pictures(browser, "time-machine")
    export = "document.querySelector('dl.facts a[href*=\"format=csv\"]').href"
    content = browser.run(f"fetch({export}).then(response => response.text())")
    assert content.startswith("id,status,note,_position,_time,_missing\r\n7,paid,")


def _see_whether_changes_arrive(browser: Chromium, console: str, shop: Shop) -> None:
    """A user reports that nothing arrives: check whether changes arrive."""
    browser.begin_to_open(f"{console}/tail?{urlencode({'follow': '1', 'tables': shop.table})}")
    # A change before the page's first position would never be shown.
    browser.wait_until("document.getElementById('begin') !== null")
    shop.server.sql(f"UPDATE {shop.table} SET note = 'arrived' WHERE id = 2")
    browser.wait_until("document.body.innerText.includes('arrived')")
    save_pictures(browser, "tail")


def _find_who_reads(browser: Chromium, console: str) -> None:
    """Find the readers of the daemon."""
    browser.open(f"{console}/sessions")
    assert "orders-cache" in browser.text
    assert "127.0.0.1" in browser.text
    save_pictures(browser, "sessions")


def _free_the_log_from_a_lost_reader(browser: Chromium, console: str, shop: Shop) -> None:
    """Free the log from a reader that no longer exists: see what the reader's hold keeps, and remove the
    hold.
    """

    def readers() -> set[str]:
        return {hold["reader"] for hold in shop.daemon.get("/v1/instances/shop/holds")["holds"]}

    position = shop.daemon.status()["earliest"]
    shop.daemon.post("/v1/instances/shop/position", reader="gone", position=position)
    held_as = next(reader for reader in readers() if reader.endswith("gone"))
    browser.open(f"{console}/instance?{urlencode({'daemon': shop.url, 'instance': 'shop'})}")
    browser.click(f"a[href*='reader={held_as}']")
    assert "may lose its position" in browser.text
    save_pictures(browser, "hold")
    assert held_as in readers()
    browser.click("button.danger")
    assert held_as not in readers()


def _let_a_paused_subscription_go_on(browser: Chromium, console: str, shop: Shop) -> None:
    """Resume a subscription that was paused and whose users are waiting."""

    def paused() -> bool:
        with closing(open_store(shop.coordination)) as store:
            return Subscriptions(store).list("shop")[0].paused

    with closing(open_store(shop.coordination)) as store:
        Subscriptions(store).pause("shop", "orders-cache", paused=True)
    browser.open(f"{console}/subscriptions")
    assert "paused" in browser.text
    browser.click("h2 a.button[href*=pause]")
    assert paused()
    browser.click("form button")
    assert not paused()


def _repair_a_target(browser: Chromium, console: str, shop: Shop) -> None:
    """Repair a target that was changed by hand: the page lists the rows and repairs them, and the alert
    ends.
    """

    def alerts() -> list[tuple[str, str]]:
        return [(alert["instance"], alert["name"]) for alert in shop.daemon.get("/v1/alerts")["alerts"]]

    wait_until(lambda: ("orders", "rows rejected") in alerts())
    database, _, name = shop.table.partition(".")
    copy = f"{database}_copy.{name}"
    shop.server.sql(f"UPDATE {copy} SET note = 'wrong' WHERE id = 1; DELETE FROM {copy} WHERE id = 2")
    browser.open(f"{console}/compare?store=0&name=copies&sink=")
    browser.click("main form button")
    browser.wait_until("document.querySelector('a.button[href*=repair]') !== null")
    assert "wrong" in browser.text
    save_pictures(browser, "comparison")
    files = {
        name: browser.run(
            f"fetch(document.querySelector('.exports a[href*=\"format={name}\"]').href)"
            ".then(response => response.text())"
        )
        for name in ("json", "csv")
    }
    differences = {difference["key"]["id"]: difference for difference in json.loads(files["json"])}
    assert sorted(differences) == [1, 2]
    assert (differences[1]["source"]["note"], differences[1]["target"]["note"]) == ("a", "wrong")
    assert differences[2]["target"] is None
    assert "wrong" in files["csv"]
    wait_until(lambda: ("copies", "target differs") in alerts())
    browser.open(f"{console}/alerts")
    assert "the last comparison found 2 rows that differ" in browser.text
    save_pictures(browser, "alerts-of-pipelines")
    browser.open(f"{console}/compare?store=0&name=copies&sink=")
    browser.click("a.button[href*=repair]")
    assert "deleted from it" in browser.text
    assert shop.server.sql(f"SELECT note FROM {copy}") == [("wrong",)]
    browser.click("button.danger")
    browser.wait_until("document.body.innerText.includes('rows were corrected')")
    assert shop.server.sql(f"SELECT note FROM {copy} ORDER BY id") == [("a",), ("arrived",)]
    wait_until(lambda: ("copies", "target differs") not in alerts())


def _read_a_table_again(browser: Chromium, console: str, state: str) -> None:
    """Read a table again whose rows are in doubt."""

    def requested() -> int:
        with closing(PipelineState.open(state, "copies")) as copies:
            return len(copies.requests())

    before = requested()
    browser.open(f"{console}/tables?store=0&name=copies&sink=")
    browser.click("td a.button[href*=resnapshot]")
    assert "chunk by chunk" in browser.text
    save_pictures(browser, "resnapshot")
    assert requested() == before
    browser.click("button.danger")
    assert requested() == before + 1


def _drop_rejected_rows(browser: Chromium, console: str, shop: Shop) -> None:
    """Delete rejected rows for good, because they were corrected elsewhere."""
    settings = load_pipeline(shop.pipeline)
    assert dead_letters(settings)
    browser.open(f"{console}/dead-letters?store=0&name=orders&sink=")
    browser.click("p a.button[href*=purge]")
    assert "for good" in browser.text
    save_pictures(browser, "purge")
    assert dead_letters(settings)
    browser.click("button.danger")
    assert dead_letters(settings) == []


def _resume_a_pipeline(browser: Chromium, console: str, state: str) -> None:
    """Resume a pipeline that was paused for maintenance."""
    with closing(PipelineState.open(state, "orders")) as orders:
        orders.pause("maintenance")
        browser.open(f"{console}/pipelines")
        browser.click("td a.button[href*='name=orders']")
        browser.click("form[action*=resume] button")
        assert not orders.paused


def _find_who_did_it(browser: Chromium, console: str) -> None:
    """Find the accounts that made all these changes."""
    browser.open(f"{console}/events?kind=audit")
    for action in ("remove hold", "repair target", "purge rejected rows", "resume subscription"):
        assert action in browser.text
    save_pictures(browser, "events")


@pytest.mark.deep(
    guard="tests/unit/test_console_access.py::"
    "test_refresh_without_a_session_is_refused_and_does_not_lead_to_the_login"
)
def test_page_says_that_it_cannot_be_refreshed_and_leads_to_the_login(browser: Chromium) -> None:
    with captured_log() as log, serving(log, {"token": "a-token"}) as daemon:
        with console_of(daemon) as console:
            browser.open(f"http://127.0.0.1:{console.port}/")
            _log_in(browser, "a-token")
            form = "new URLSearchParams({csrf: document.querySelector('[name=csrf]').value})"
            browser.run(f"fetch('/logout', {{method: 'POST', body: {form}}}).then(() => 0)")
            browser.wait_until("location.pathname === '/login' && document.readyState === 'complete'")
            _log_in(browser, "a-token")
            assert browser.run("document.getElementById('stale').hidden")
        browser.wait_until("!document.getElementById('stale').hidden")
        assert browser.run("document.querySelector('#stale time').textContent") != ""


def _log_in(browser: Chromium, token: str) -> None:
    browser.run(f"document.querySelector('input[name=token]').value = '{token}'")
    browser.click("main form button")
    assert browser.run("document.querySelector('h1').textContent") == "Overview"
