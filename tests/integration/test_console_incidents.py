# SPDX-License-Identifier: Apache-2.0
"""How incidents appear on the console pages that have no actions: overview, log, definitions, server check,
settings and alerts.
"""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.integration.test_console_browser import browser, is_listening, save_pictures  # noqa: F401
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.patience import wait_until
from tools.chromium import Chromium
from tools.servers import Server
from tools.servers.ports import free_port

TOKEN = "boss-token"
ORDERS = "shop.orders"


@pytest.fixture
def server(start_server: StartServer) -> Server:
    server = start_server("mysql", binlog_row_image="MINIMAL")
    server.sql("CREATE DATABASE shop")
    return server


@pytest.fixture
def daemon(server: Server, tmp_path: Path) -> Iterator[DaemonProcess]:
    port = free_port()
    settings = {
        "listen": {"token": "all-token"},
        "access": [
            {"name": "boss", "token": TOKEN, "admin": True},
            {"name": "support", "token": "support-token", "masked": {ORDERS: ["email"]}},
        ],
        "alerts": {"webhook": "http://127.0.0.1:9/nobody", "after": "1s", "disk": None},
        "console": {"listen": f"127.0.0.1:{port}"},
        "instances": {"shop": {"source": server.url(), "start": "latest"}},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        daemon.token = TOKEN
        daemon.ports["console"] = port
        daemon.wait_for(lambda status: status["state"] == "running")
        wait_until(lambda: is_listening(port))
        yield daemon


@pytest.mark.deep(guard="tests/unit/test_console.py::test_every_page_is_complete_without_javascript")
def test_an_incident_is_solved_on_each_screen_without_actions_of_its_own(
    server: Server,
    daemon: DaemonProcess,
    browser: Chromium,  # noqa: F811
) -> None:
    console = f"http://127.0.0.1:{daemon.ports['console']}"
    instance = urlencode({"daemon": f"http://127.0.0.1:{daemon.port}", "instance": "shop"})
    browser.open(f"{console}/login")
    browser.run(f"document.querySelector('input[name=token]').value = '{TOKEN}'")
    browser.click("main form button")
    _find_the_statement_that_changed_a_column(browser, f"{console}/definitions?{instance}", server, daemon)
    _find_what_keeps_the_log(browser, f"{console}/log?{instance}", daemon)
    _correct_the_server(browser, f"{console}/check?{instance}", server)
    _find_who_does_not_see_a_column(browser, console)
    _find_the_server_that_is_down(browser, console, server)
    assert browser.errors == []


def _find_the_statement_that_changed_a_column(
    browser: Chromium,  # noqa: F811
    page: str,
    server: Server,
    daemon: DaemonProcess,
) -> None:
    """Find the statement that changed a column's type, because a consumer no longer understands the
    column.
    """
    server.sql(f"CREATE TABLE {ORDERS} (id INT PRIMARY KEY, email VARCHAR(80), total INT, old INT)")
    server.sql(f"ALTER TABLE {ORDERS} MODIFY total DECIMAL(12,2) NOT NULL, DROP old, ADD note TEXT")
    path = "/v1/instances/shop/definitions"
    wait_until(lambda: len(daemon.get(path, table=ORDERS)["versions"]) == 2)
    browser.open(page)
    browser.click("td a")
    newest = browser.run("document.querySelector('article').innerText")
    for text in ("in force", "MODIFY total DECIMAL(12,2)", "changed", "int", "added", "removed"):
        assert text in newest
    save_pictures(browser, "incident-definitions")


def _find_what_keeps_the_log(browser: Chromium, page: str, daemon: DaemonProcess) -> None:  # noqa: F811
    """The disk fills although retention is short: find the reader that holds the log."""

    def readers() -> list[str]:
        return [hold["reader"] for hold in daemon.get("/v1/instances/shop/holds")["holds"]]

    daemon.post("/v1/instances/shop/position", reader="gone", position=daemon.status()["earliest"])
    (reader,) = readers()
    browser.open(page)
    assert reader in browser.text
    assert "full in" in browser.text or "free" in browser.text
    save_pictures(browser, "incident-log")
    browser.click("td a.button")
    browser.click("button.danger")
    assert readers() == []
    browser.open(page)
    assert "Nobody holds this log" in browser.text


def _correct_the_server(browser: Chromium, page: str, server: Server) -> None:  # noqa: F811
    """Correct a server whose updates lack some columns, with the statement that the page shows."""
    browser.open(page)
    row = "[...document.querySelectorAll('tbody tr')].find(row => row.innerText.includes('row_image'))"
    assert "warning" in browser.run(f"{row}.innerText")
    statement = browser.run(f"{row}.querySelector('pre').innerText")
    save_pictures(browser, "incident-check")
    server.sql(statement)
    assert server.sql("SELECT @@GLOBAL.binlog_row_image") == [("FULL",)]
    browser.open(page)
    assert "binlog_row_image is FULL" in browser.run(f"{row}.innerText")


def _find_who_does_not_see_a_column(browser: Chromium, console: str) -> None:  # noqa: F811
    """Find out why support staff do not see a customer's address."""
    browser.open(f"{console}/settings")
    row = "[...document.querySelectorAll('tbody tr')].find(row => row.innerText.includes('support'))"
    assert f"masked in {ORDERS}: email" in browser.run(f"{row}.innerText")
    assert TOKEN not in browser.run("document.documentElement.outerHTML")
    save_pictures(browser, "incident-settings")


def _find_the_server_that_is_down(browser: Chromium, console: str, server: Server) -> None:  # noqa: F811
    """No changes arrive. The overview links to the alert about the server that is down. When the server is up
    again, both pages update by themselves.
    """
    server.stop()
    browser.open(f"{console}/")
    browser.wait_until("document.querySelector('p.notice a[href*=alerts]') !== null")
    browser.wait_until("document.body.innerText.includes('waiting')")
    # The page states the reason once.
    assert browser.text.count("Can't connect") == 1
    save_pictures(browser, "incident-overview")
    browser.click("p.notice a[href*=alerts]")
    assert "not running" in browser.text
    save_pictures(browser, "incident-alerts")
    server.start()
    browser.wait_until("document.body.innerText.includes('No condition of the daemons')")
    browser.open(f"{console}/")
    browser.wait_until("document.querySelector('td .state').innerText === 'running'")
