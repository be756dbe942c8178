# SPDX-License-Identifier: Apache-2.0
"""The web console in a real browser, over a daemon that captures a real server."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml

from penstock.client import Subscriber
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState
from tests.support.daemon.chromium import Chromium
from tests.support.daemon.console import console_of
from tests.support.daemon.process import PENSTOCK, ROOT, DaemonProcess
from tests.support.daemon.served_log import captured_log, serving
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
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


@contextmanager
def running_console(*words: str) -> Iterator[str]:
    """Run `penstock console` inside the block; yield its address."""
    port = free_port()
    command = [*PENSTOCK, "console", "--listen", f"127.0.0.1:{port}", *words]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stderr is not None
            said = iter(process.stderr.readline, "")
            assert any("serving the console" in line for line in said), "it ended"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            assert process.wait(WAIT_SECONDS_MAX) == 0


@dataclass(frozen=True)
class Shop:
    """A captured server whose table has the history of one row, and a pipeline and a subscription of it."""

    daemon: DaemonProcess
    table: str
    coordination: str
    pipeline: Path

    @property
    def url(self) -> str:
        """The daemon's URL."""
        return f"http://127.0.0.1:{self.daemon.port}"

    def subscriber(self) -> Subscriber:
        """Return a member of the subscription."""
        return Subscriber(
            f"penstock://127.0.0.1:{self.daemon.port}/shop",
            name="orders-cache",
            tables=[self.table],
            shards=2,
            coordination=self.coordination,
            begin="earliest",
        )

    def run_pipeline(self) -> None:
        """Run the pipeline to the end of the log."""
        command = [*PENSTOCK, "run", str(self.pipeline), "--local", "--until", "caught-up"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS_MAX)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def shop(mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path) -> Iterator[Shop]:
    table = f"{fresh_database(mysql_server)}.orders"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, status VARCHAR(80), note TEXT)")
    coordination = f"sqlite:///{tmp_path}/subscriptions.db"
    settings = {
        "coordination": coordination,
        "alerts": {"webhook": "http://127.0.0.1:9/nobody", "disk": "900000000GiB"},
        "instances": {"shop": {"source": mysql_server.url(), "start": "latest"}},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        wait_until(lambda: daemon.status()["state"] == "running")
        note = HOSTILE.replace("'", "''")
        mysql_server.sql(
            f"INSERT INTO {table} VALUES (7, 'new', '{note}');"
            f" UPDATE {table} SET status = 'paid' WHERE id = 7; DELETE FROM {table} WHERE id = 7"
        )
        url = f"penstock://127.0.0.1:{daemon.port}/shop"
        pipeline = {
            "name": "orders",
            "source": {"url": url, "tables": table, "start": "earliest"},
            "load": "none",
            "sink": {"files": {"path": str(tmp_path / "feed")}},
        }
        file = tmp_path / "orders.yaml"
        file.write_text(yaml.safe_dump(pipeline))
        yield Shop(daemon, table, coordination, file)


@pytest.mark.deep(guard="tests/unit/test_console.py::test_every_page_is_complete_without_javascript")
def test_operator_answers_each_question_in_a_browser(shop: Shop, browser: Chromium) -> None:
    shop.run_pipeline()
    with (
        shop.subscriber() as subscriber,
        running_console("--daemon", shop.url, "--pipelines", str(shop.pipeline)) as console,
    ):
        assert next(iter(subscriber)).table == shop.table
        _read_overview(browser, console)
        _read_positions(browser, console, shop)
        _read_history(browser, console, shop)
        _read_members_and_alerts(browser, console)
        _pause_pipeline(browser, console, shop)
        browser.open(f"{console}/?lang=zh")
        assert "总览" in browser.text
        browser.save_picture(PICTURES / "overview-zh.png")
    assert browser.errors == []
    assert {re.match(r"(\w+://[^/]*)?", address)[0] for address in browser.requested} == {console}  # type: ignore[index]


def _read_overview(browser: Chromium, console: str) -> None:
    """Which captures and pipelines run?"""
    browser.open(f"{console}/")
    assert "running" in browser.text
    assert "orders" in browser.text
    browser.wait_until("document.querySelector('th button') !== null")
    browser.save_picture(PICTURES / "overview.png")
    # The page refreshes itself, by the script that is part of the package.
    browser.run("document.querySelector('h1').textContent = 'stale'")
    browser.wait_until("document.querySelector('h1').textContent === 'Overview'")
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"


def _read_positions(browser: Chromium, console: str, shop: Shop) -> None:
    """Where is each reader of this log?"""
    browser.open(f"{console}/instance?{urlencode({'daemon': shop.url, 'instance': 'shop'})}")
    assert browser.run("document.querySelectorAll('svg.ruler circle').length") >= 3
    assert "pipeline.orders.shop" in browser.text
    browser.save_picture(PICTURES / "instance.png")
    browser.prefer("dark")
    browser.save_picture(PICTURES / "instance-dark.png")
    browser.prefer("light")


def _read_history(browser: Chromium, console: str, shop: Shop) -> None:
    """What happened to this row?"""
    browser.open(f"{console}/history?{urlencode({'table': shop.table, 'key': '7'})}")
    kinds = browser.run("[...document.querySelectorAll('article h2 .state')].map(e => e.textContent)")
    assert kinds[:3] == ["delete", "update", "insert"]
    assert HOSTILE in browser.text
    assert browser.run("document.title") == "Row history · Penstock"
    browser.save_picture(PICTURES / "history.png")


def _read_members_and_alerts(browser: Chromium, console: str) -> None:
    """Which member has which shard? And what is wrong: the disk has less free than `alerts.disk`."""
    browser.open(f"{console}/subscriptions")
    browser.wait_until("document.body.innerText.includes('orders-cache')")
    browser.save_picture(PICTURES / "subscriptions.png")
    browser.open(f"{console}/alerts")
    browser.wait_until("document.body.innerText.includes('disk')")
    browser.save_picture(PICTURES / "alerts.png")


def _pause_pipeline(browser: Chromium, console: str, shop: Shop) -> None:
    """An action: first what will happen, then its effect where the truth is."""
    location = load_pipeline(shop.pipeline)
    with closing(PipelineState.open(location.state, "orders")) as state:
        browser.open(f"{console}/pipelines")
        browser.click("td a:not(.button)")
        assert "idle" in browser.text, "nothing runs the pipeline"
        browser.save_picture(PICTURES / "tables.png")
        browser.open(f"{console}/pipelines")
        browser.click("td a.button")
        assert "stops after its current batch" in browser.text
        browser.save_picture(PICTURES / "pause.png")
        assert not state.paused
        browser.run("document.querySelector('input[name=why]').value = 'maintenance'")
        browser.click("button.danger")
        assert state.paused
        assert "paused" in browser.text
        browser.save_picture(PICTURES / "pipelines.png")


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
