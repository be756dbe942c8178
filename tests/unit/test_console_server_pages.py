# SPDX-License-Identifier: Apache-2.0
"""The server check and the settings in force: over HTTP and as pages, for administrators, without secrets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.check.servers import check_servers
from penstock.model import Secret, ServerAddress, TablePatterns
from penstock.settings.daemon import load_settings
from penstock.settings.shown import HIDDEN, _without_credentials, shown_settings
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
SECRET = "s3cr3t-v4lue"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "boss", "token": f"{SECRET}-boss", "admin": True},
    {"name": "local", "token": f"{SECRET}-local", "admin": True, "instances": ["other"]},
    {"name": "part", "token": f"{SECRET}-part", "admin": True, "tables": ["fuzzed.u"]},
    {"name": "masked", "token": f"{SECRET}-masked", "admin": True, "masked": {"fuzzed.t": ["id"]}},
    {"name": HOSTILE, "token": f"{SECRET}-guest", "tables": ["fuzzed.u"]},
]
FINDINGS: list[dict[str, Any]] = [
    {
        "server": "repl@db1:3306",
        "findings": [
            {
                "check": "binlog_format",
                "severity": "error",
                "what": HOSTILE,
                "statement": "SET PERSIST binlog_format = 'ROW'",
            },
            {"check": "gtid_mode", "severity": "ok", "what": "gtid_mode is ON", "statement": None},
        ],
        "problem": None,
        "hint": None,
    },
    {"server": "repl@db2:3306", "findings": [], "problem": "db2 refuses the connection", "hint": "Start it"},
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[ServedLog]:
    with (
        captured_log() as log,
        serving(log, {"token": SECRET}, ACCOUNTS, check=lambda name: FINDINGS) as daemon,
    ):
        yield daemon


def logged_in(browser: Browser, token: str) -> Browser:
    assert browser.post("/login", {"token": token}).status == 303
    return browser


def test_check_is_for_administrators_of_the_instance(daemon: ServedLog) -> None:
    path = f"/v1/instances/{INSTANCE}/check"
    assert daemon.ask("GET", path, token=f"{SECRET}-boss").json == {"servers": FINDINGS}
    for name in ("guest", "local"):
        assert daemon.ask("GET", path, token=f"{SECRET}-{name}").status == 403
    for name in ("part", "masked"):
        answer = daemon.ask("GET", path, token=f"{SECRET}-{name}")
        assert answer.status == 403
        assert "findings may name all of it" in str(answer.json)
    assert daemon.ask("GET", "/v1/instances/nothing/check", token=f"{SECRET}-boss").status == 404


def test_settings_are_for_administrators_of_all_instances(daemon: ServedLog) -> None:
    assert daemon.ask("GET", "/v1/settings", token=f"{SECRET}-boss").status == 200
    for name in ("guest", "local"):
        assert daemon.ask("GET", "/v1/settings", token=f"{SECRET}-{name}").status == 403


def test_check_page_shows_each_finding_with_its_statement(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        logged_in(browser, SECRET)
        url = f"http://127.0.0.1:{daemon.port()}"
        page = browser.get("/check", daemon=url, instance=INSTANCE)
        elsewhere = browser.get("/check", daemon=url, instance=HOSTILE)
    assert "SET PERSIST binlog_format = 'ROW'" in page.words
    assert "db2 refuses the connection" in page.words
    for shown in (page, elsewhere):
        assert "<script>alert" not in shown.text
        assert "11111103" not in shown.words


def test_settings_page_shows_accounts_and_no_secret(daemon: ServedLog) -> None:
    with console_of(daemon) as browser:
        logged_in(browser, f"{SECRET}-boss")
        page = browser.get("/settings")
        assert '"listen"' in page.words
        assert HOSTILE in page.words
        assert "<script>alert" not in page.text
        assert SECRET not in page.text
        assert "/settings" in browser.get("/").text
    with console_of(daemon) as browser:
        logged_in(browser, f"{SECRET}-guest")
        assert browser.get("/settings").status == 403
        assert browser.get("/check", instance=INSTANCE).status == 403
        assert "/settings" not in browser.get("/").text


def test_no_secret_of_a_file_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        f"""
listen: {{token: {SECRET}}}
access: [{{name: a, token: {SECRET}1}}, {{name: b, user: u, password: {SECRET}2}}]
log: {{tier: "s3://key:{SECRET}@bucket/logs?endpoint={SECRET}"}}
coordination: "zookeeper://u:p@{SECRET}@zk:2181/penstock"
telemetry: {{otlp: "http://u:{SECRET}@collector:4318/v1/metrics?key={SECRET}"}}
alerts: {{webhook: "https://hooks.example.com/{SECRET}", body: '{{"text": {{text}}, "token": "{SECRET}"}}'}}
console: {{pipelines: ["zookeeper://u:{SECRET}@zk/p"], daemons: ["penstock://db2:7070/?token={SECRET}"]}}
instances:
  shop:
    source: "mysql://repl:{SECRET}@db1:3306"
    servers: ["mysql://repl:{SECRET}@db2:3306"]
  tidb:
    source: "tidb://pd1:2379"
    tidb: {{sql: "mysql://root:{SECRET}@tidb:4000"}}
  dropped:
    source: "mysql://repl@db3"
    password: {SECRET}
"""
    )
    settings = shown_settings(load_settings(file))
    text = json.dumps(settings)
    assert SECRET not in text
    assert settings["instances"]["shop"]["source"] == f"mysql://repl:{HIDDEN}@db1:3306"
    assert settings["instances"]["dropped"]["password"] == HIDDEN
    assert settings["access"][0]["token"] == HIDDEN
    assert settings["access"][1]["user"] == "u"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("mysql://u:p@h:3306", f"mysql://u:{HIDDEN}@h:3306"),
        ("mysql://u:p@ss@h/x", f"mysql://u:{HIDDEN}@h/x"),
        ("mysql://u:p/q@h/x", f"mysql://u:{HIDDEN}@h/x"),
        ("mysql://u@h", "mysql://u@h"),
        ("u:p@h:3306", f"u:{HIDDEN}@h:3306"),
        ("s3://bucket/p?secret=x&region=y", f"s3://bucket/p?secret={HIDDEN}&region={HIDDEN}"),
        ("/a/path?x=1", "/a/path?x=1"),
        ("sqlite:///a/b.db", "sqlite:///a/b.db"),
        ("https://token@h/hook", f"https://{HIDDEN}@h/hook"),
        ("http://h/p?key=a#token", f"http://h/p?key={HIDDEN}#{HIDDEN}"),
    ],
)
def test_credentials_of_addresses_are_hidden(text: str, shown: str) -> None:
    assert _without_credentials(text) == shown


def test_server_that_cannot_be_asked_does_not_hide_the_others() -> None:
    addresses = [ServerAddress.parse("mysql://nobody@127.0.0.1:1", password=Secret("x"))] * 2
    answers = check_servers(addresses, TablePatterns())
    assert len(answers) == 2
    for answer in each(answers):
        assert answer["findings"] == []
        assert "127.0.0.1:1" in answer["problem"]
