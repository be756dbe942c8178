# SPDX-License-Identifier: Apache-2.0
"""Tests of alerts, table definitions set by hand, and log verification: over HTTP and in the console."""

import json
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from structlog.testing import capture_logs

from penstock.errors import ConnectionLost
from penstock.logstore.export import export
from penstock.logstore.log import Log
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, TableName
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.serve.telemetry import Alerting
from penstock.settings.alerts import AlertSettings
from penstock.telemetry.alerts import Notification
from penstock.telemetry.channel import Channel
from tests.support.binlog.events import MAGIC
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.logstore.disk import SimulatedDisk
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "reader", "token": "reader-token"},
    {"name": "limited", "token": "limited-token", "admin": True, "tables": ["shop.*"]},
]
TOKEN = "a-token"


class KeptChannel(Channel):
    """A channel that collects the messages instead of sending them."""

    def __init__(self) -> None:
        super().__init__(AlertSettings.model_validate({"webhook": "http://alerts.example/secret-path"}))
        self.sent: list[Notification] = []
        self.problem: Exception | None = None

    def send(self, notification: Notification) -> None:
        if self.problem is not None:
            raise self.problem
        self.sent.append(notification)


class Given:
    """Replaces a capture's settler, and records the definitions passed to it."""

    def __init__(self) -> None:
        self.definitions: list[tuple[TableName, Position, dict[str, Any]]] = []

    def give(self, name: TableName, since: Position, definition: dict[str, Any]) -> None:
        self.definitions.append((name, since, definition))


@pytest.fixture
def channel() -> KeptChannel:
    return KeptChannel()


@pytest.fixture
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture
def daemon(log: Log, channel: KeptChannel) -> Iterator[ServedLog]:
    alerting = Alerting(lambda: [], channel)
    with serving(log, {"token": TOKEN}, ACCOUNTS, alerting=alerting) as daemon:
        yield daemon


@pytest.fixture
def browser(daemon: ServedLog) -> Iterator[Browser]:
    with console_of(daemon) as browser:
        assert browser.post("/login", {"token": TOKEN}).status == 303
        yield browser


def address_of(daemon: ServedLog) -> str:
    return f"http://127.0.0.1:{daemon.port()}"


def audited(logs: Any) -> list[tuple[str, str | None]]:
    return [(line["action"], line.get("outcome")) for line in logs if line["event"] == "audit"]


# --- Alerts -----------------------------------------------------------------------------------


def test_alerts_are_tested_after_a_dry_run(daemon: ServedLog, browser: Browser, channel: KeptChannel) -> None:
    where: dict[str, Any] = {"daemon": address_of(daemon)}
    assert "/alerts/test?daemon=" in browser.get("/alerts").text
    page = browser.get("/alerts/test", **where)
    assert "sent to alerts.example" in page.words
    assert ("secret-path" in page.text, channel.sent) == (False, [])
    with capture_logs() as logs:
        done = browser.post("/alerts/test/confirm", {**where, "csrf": page.field("csrf")})
    assert done.status == 303
    assert [(sent.alert.name, sent.resolved) for sent in channel.sent] == [("test", False), ("test", True)]
    assert sorted(audited(logs), key=str) == [("test alerts", "done"), ("test alerts", None)]


def test_test_of_alerts_is_for_full_administrators(daemon: ServedLog, channel: KeptChannel) -> None:
    for token in ("reader-token", "limited-token", "wrong"):
        assert daemon.ask("POST", "/v1/alerts/test", {"dry_run": False}, token=token).status in (401, 403)
    assert channel.sent == []
    channel.problem = ConnectionLost("the webhook at alerts.example does not answer")
    answer = daemon.ask("POST", "/v1/alerts/test", {"dry_run": False}, token=TOKEN)
    assert (answer.status, "does not answer" in answer.json["detail"]) == (503, True)


def test_daemon_without_a_channel_says_so(log: Log) -> None:
    with serving(log) as daemon:
        answer = daemon.ask("POST", "/v1/alerts/test", {})
    assert (answer.status, "sends no alerts" in answer.json["detail"]) == (400, True)


# --- Definitions ------------------------------------------------------------------------------


def seed(log: Log) -> Position:
    """Give the log a definition of shop.t, and return the end of the log."""
    end = log.visible
    assert end is not None
    schemas = SchemaLog(log.folder, SchemaHistory.from_json, log.disk)
    schemas.seed(SchemaHistory(ServerDefaults(ServerSpelling(), "utf8mb4", {}, False)), end)
    schemas.close()
    return end


def test_definition_is_set_after_a_dry_run(log: Log, daemon: ServedLog, browser: Browser) -> None:
    end, given = seed(log), Given()
    log.settler = given  # type: ignore[assignment]
    where: dict[str, Any] = {
        "daemon": address_of(daemon),
        "instance": INSTANCE,
        "table": "shop.t",
        "position": str(end),
    }
    assert "/definitions/set?" in browser.get("/definitions", **where).text
    csrf = browser.get("/definitions/set", **where).field("csrf")
    text = "CREATE TABLE t (id INT PRIMARY KEY, note VARCHAR(9)) CHARACTER SET latin1"
    page = browser.post("/definitions/set", {**where, "create_table": text, "csrf": csrf})
    assert "id int, note varchar(9) latin1" in page.words
    assert "no definition of it there" in page.words
    assert given.definitions == []
    for wrong, why in (
        (HOSTILE, "a quote or a comment is open at its end"),
        ("CREATE TABLE other (id INT)", "does not define shop.t"),
        ("CREATE TABLE t (id INT", "a statement about shop.t is not understood"),
    ):
        refused = browser.post("/definitions/set", {**where, "create_table": wrong, "csrf": csrf})
        assert why in refused.problem
        assert "<script>alert" not in refused.text
    with capture_logs() as logs:
        done = browser.post("/definitions/set/confirm", {**where, "create_table": text, "csrf": csrf})
    assert done.status == 303
    ((name, since, definition),) = given.definitions
    assert (str(name), since) == ("shop.t", end)
    assert [column[0] for column in definition["schema"]["columns"]] == ["id", "note"]
    assert sorted(audited(logs), key=str) == [("set definition", "done"), ("set definition", None)]


def test_definition_is_refused_without_the_right_or_past_the_end(log: Log, daemon: ServedLog) -> None:
    end = seed(log)
    body = {"table": "fuzzed.t", "position": str(end), "create_table": "CREATE TABLE t (id INT)"}
    call = f"/v1/instances/{INSTANCE}/definitions"
    assert daemon.ask("POST", call, body, token="reader-token").status == 403
    assert daemon.ask("POST", call, body, token="limited-token").status == 403
    # No capture has reached its server, so the definition cannot be stored.
    assert daemon.ask("POST", call, {**body, "dry_run": False}, token=TOKEN).status == 503
    beyond = str(replace(end, offset=end.offset + 1))
    assert daemon.ask("POST", call, {**body, "position": beyond}, token=TOKEN).status == 416


# --- Verification -----------------------------------------------------------------------------


def lines_of(daemon: ServedLog, token: str = TOKEN) -> list[dict[str, Any]]:
    answer = daemon.ask("POST", f"/v1/instances/{INSTANCE}/verify", {}, token=token)
    assert answer.status == 200
    return [json.loads(line) for line in answer.body.splitlines()]


def test_range_of_a_log_is_exported_as_a_binlog_file(
    log: Log, daemon: ServedLog, browser: Browser, tmp_path: Path
) -> None:
    path = f"/v1/instances/{INSTANCE}/export"
    files = daemon.ask("GET", f"{path}?dry_run=1").json["files"]
    written = export(log, tmp_path)
    assert [(file["name"], file["from"], file["to"]) for file in files] == [
        (file.path.name, str(file.start), str(file.end)) for file in written
    ]
    several = daemon.ask("GET", path)
    assert (several.status, f"{len(files)} files" in several.json["detail"]) == (400, True)
    backward = daemon.ask("GET", f"{path}?from={files[1]['from']}&to={files[0]['from']}")
    assert (backward.status, "Swap from and to" in backward.json["hint"]) == (400, True)
    empty = daemon.ask("GET", f"{path}?from={files[1]['from']}&to={files[1]['from']}")
    assert (empty.status, "the log has nothing between" in empty.json["detail"]) == (416, True)

    daemon_url = f"http://127.0.0.1:{daemon.port()}"
    query = {"daemon": daemon_url, "instance": INSTANCE, "start": files[1]["from"], "end": files[1]["to"]}
    assert "/log/export" in browser.get("/log", daemon=daemon_url, instance=INSTANCE).text
    assert (
        f"the range has {len(files)} files"
        in browser.get("/log/export", **query | {"start": "", "end": ""}).words
    )
    page = browser.get("/log/export", **query)
    assert f"{files[1]['bytes']:,} bytes" in page.words
    with capture_logs() as logs:
        connection = HTTPConnection("127.0.0.1", browser.port, timeout=WAIT_SECONDS_MAX)
        cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        body = urlencode({**query, "csrf": page.field("csrf")})
        connection.request("POST", "/log/export/confirm", body, {"Cookie": cookies})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
    expected = written[1].path.read_bytes()
    events = files[1]["bytes"]
    # The head has the time at which it was written.
    assert (len(content), content[-events:]) == (len(expected), expected[-events:])
    assert content.startswith(MAGIC)
    assert answer.headers["Content-Disposition"].startswith(f'attachment; filename="{INSTANCE}-')
    audits = [line for line in logs if line["event"] == "audit"]
    assert {line["action"] for line in audits} == {"export log"}
    assert len(audits) == 2, "the console and the daemon record it"


def test_export_is_for_accounts_that_read_the_whole_log(log: Log) -> None:
    with serving(log, access=ACCOUNTS) as daemon:
        for token, status in (("reader-token", 200), ("limited-token", 403)):
            answer = daemon.ask("GET", f"/v1/instances/{INSTANCE}/export?dry_run=1", token=token)
            assert answer.status == status, token


def test_sound_log_is_verified_while_it_is_served(daemon: ServedLog, browser: Browser) -> None:
    *lines, last = lines_of(daemon)
    assert last == {"kind": "end", "why": "whole"}
    assert [line for line in lines if line["kind"] == "finding" and not line["finding"]["harmless"]] == []
    assert any(line["kind"] == "progress" for line in lines)
    where: dict[str, Any] = {"daemon": address_of(daemon), "instance": INSTANCE}
    assert "/log/verify?" in browser.get("/log", **where).text
    assert "Every byte" not in browser.get("/log/verify", **where).words
    assert "Every byte of the log is sound" in browser.get("/log/verify", **where, run="1").words


def test_damaged_log_is_named_with_what_helps(log: Log, daemon: ServedLog, browser: Browser) -> None:
    assert isinstance(log.disk, SimulatedDisk)
    segment, content = max(log.disk.files().items(), key=lambda item: len(item[1]))
    middle = len(content) // 2
    log.disk.put(segment, content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    findings = [line["finding"] for line in lines_of(daemon) if line["kind"] == "finding"]
    damaged = [finding for finding in findings if not finding["harmless"]]
    assert all(finding["mend"] for finding in each(damaged))
    where: dict[str, Any] = {"daemon": address_of(daemon), "instance": INSTANCE}
    page = browser.get("/log/verify", **where, run="1")
    assert "Findings that are not harmless" in page.words
    assert damaged[0]["message"] in page.words


def test_verification_is_for_administrators(daemon: ServedLog) -> None:
    answer = daemon.ask("POST", f"/v1/instances/{INSTANCE}/verify", {}, token="reader-token")
    assert answer.status == 403
