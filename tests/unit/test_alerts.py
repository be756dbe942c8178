# SPDX-License-Identifier: Apache-2.0
import asyncio
import errno
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from starlette.requests import Request
from structlog.testing import capture_logs

from penstock.capture.alerts import conditions
from penstock.capture.run import Capture, CaptureParts
from penstock.capture.server_log import ServerLog
from penstock.capture.status import State
from penstock.errors import ConnectionLost, OptionInvalid
from penstock.logstore.holds import BrokenHold, Hold
from penstock.logstore.log import Log
from penstock.mysql.start import StartAt
from penstock.serve.access import Account
from penstock.serve.http import alerts as alert_routes
from penstock.serve.served import Arrivals, Served
from penstock.serve.telemetry import Alerting, Telemetry
from penstock.settings.alerts import AlertSettings
from penstock.settings.daemon import InstanceSettings, LogSettings, Settings
from penstock.telemetry.alerts import Alert, Alerts
from penstock.telemetry.channel import Channel
from tests.support.daemon.served_log import captured_log, serving
from tests.support.logstore.kept_log import penstock
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

LAG = Alert("lag", "shop", 'the log is 700 s "behind"', "Run: penstock status")
NOW_US = 1_700_000_000_000_000


class Webhook:
    """A webhook that records requests and sends the configured response."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.answer: tuple[int, bytes] = (200, b"ok")
        self.url = ""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    receiver = Webhook()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, content = receiver.answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as server, in_thread(server):
        receiver.url = f"http://127.0.0.1:{server.server_port}/secret-path"
        yield receiver


@contextmanager
def in_thread(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(WAIT_SECONDS_MAX)


def channel_of(webhook: Webhook, **settings: Any) -> Channel:
    return Channel(AlertSettings.model_validate({"webhook": webhook.url, **settings}))


def notifications(*alerts: Alert) -> list[Any]:
    book = Alerts()
    book.update(alerts, NOW_US)
    return book.pending()


def test_alert_is_reported_once_when_it_begins_and_once_when_it_ends() -> None:
    book = Alerts()
    book.update([LAG], NOW_US)
    (begun,) = book.pending()
    assert not begun.resolved
    # An alert that was not delivered stays pending.
    assert book.pending() == [begun]
    book.delivered(begun)
    book.update([Alert("lag", "shop", "the log is 800 s behind")], NOW_US + 1)
    assert book.pending() == []
    assert book.firing()[0].since_us == NOW_US
    book.update([], NOW_US + 2)
    (ended,) = book.pending()
    assert ended.resolved
    assert ended.alert == begun.alert
    book.delivered(ended)
    assert book.pending() == []


def test_refused_notification_waits_longer_each_time_and_the_others_do_not() -> None:
    book = Alerts()
    book.update([LAG, Alert("disk", "shop", "8 bytes are free")], NOW_US)
    disk, lag = book.due(NOW_US)
    book.refused(disk, NOW_US)
    assert book.due(NOW_US + 1) == [lag]
    # The text of an alert changes while the alert lasts.
    later_us = NOW_US + 10_000_000
    book.update([LAG, Alert("disk", "shop", "7 bytes are free")], later_us)
    disk, _ = book.due(later_us)
    assert disk.alert.summary == "7 bytes are free"
    book.refused(disk, later_us)
    assert book.due(later_us + 19_999_999) == [lag]
    assert len(book.due(later_us + 20_000_000)) == 2


def test_alert_that_ends_before_it_was_delivered_is_not_reported() -> None:
    book = Alerts()
    book.update([LAG], NOW_US)
    book.update([], NOW_US + 1)
    assert book.pending() == []


@pytest.mark.parametrize(
    ("format", "text_of"),
    [
        ("slack", lambda body: body["text"]),
        ("dingtalk", lambda body: body["text"]["content"]),
        ("wecom", lambda body: body["text"]["content"]),
        ("feishu", lambda body: body["content"]["text"]),
    ],
)
def test_each_format_carries_the_message(
    webhook: Webhook, format: str, text_of: Callable[[Any], str]
) -> None:
    (notification,) = notifications(LAG)
    channel_of(webhook, format=format).send(notification)
    assert text_of(webhook.bodies[0]) == notification.text()
    assert 'the log is 700 s "behind"' in notification.text()


def test_json_and_bodies_of_ones_own_carry_the_alert(webhook: Webhook) -> None:
    (notification,) = notifications(LAG)
    channel_of(webhook).send(notification)
    channel_of(webhook, body='{"room": 7, "say": {text}}').send(notification)
    assert webhook.bodies[0]["status"] == "firing"
    assert webhook.bodies[0]["since_us"] == NOW_US
    assert webhook.bodies[1] == {"room": 7, "say": notification.text()}


@pytest.mark.parametrize(
    ("format", "answer"),
    [
        ("json", (500, b"down")),
        ("json", (302, b"")),
        ("dingtalk", (200, b'{"errcode": 310000, "errmsg": "keywords not in content"}')),
        ("wecom", (200, b'{"errcode": 93000, "errmsg": "invalid webhook url"}')),
        ("feishu", (200, b'{"code": 19024}')),
    ],
    ids=["error", "redirect", "dingtalk", "wecom", "feishu"],
)
def test_refused_alert_is_an_error_without_the_secret(
    webhook: Webhook, format: str, answer: tuple[int, bytes]
) -> None:
    webhook.answer = answer
    with pytest.raises(OptionInvalid) as refused:
        channel_of(webhook, format=format).send(notifications(LAG)[0])
    assert "penstock alerts test" in str(refused.value)
    assert "secret-path" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "content"),
    [
        ({"format": "dingtalk"}, b'{"errcode": 0, "errmsg": "ok"}'),
        ({"format": "feishu"}, b'{"code": 0, "StatusCode": 0}'),
        ({"format": "slack"}, b"ok"),
        ({}, b'{"code": 200, "message": "success"}'),
        ({"body": '{"say": {text}}'}, b'{"code": "ok", "errcode": 200}'),
    ],
    ids=["dingtalk", "feishu", "slack", "json", "body"],
)
def test_accepting_answer_of_a_receiver_is_no_error(
    webhook: Webhook, settings: dict[str, str], content: bytes
) -> None:
    webhook.answer = (200, content)
    channel_of(webhook, **settings).send(notifications(LAG)[0])
    assert len(webhook.bodies) == 1


def test_silent_webhook_is_a_lost_connection_without_the_secret() -> None:
    settings = AlertSettings.model_validate({"webhook": "http://127.0.0.1:1/secret-path"})
    with pytest.raises(ConnectionLost) as lost:
        Channel(settings).send(notifications(LAG)[0])
    assert "secret-path" not in str(lost.value)
    assert "secret-path" not in repr(settings)


class MailServer(socketserver.StreamRequestHandler):
    """A mail server that accepts every mail and requires a password."""

    received: list[str]

    def handle(self) -> None:
        self.wfile.write(b"220 ready\r\n")
        lines: list[str] | None = None
        for raw in self.rfile:
            line = raw.decode().rstrip("\r\n")
            if lines is not None:
                if line == ".":
                    self.received.append("\n".join(lines))
                    lines = None
                    self.wfile.write(b"250 taken\r\n")
                else:
                    lines.append(line)
            elif line.upper() == "DATA":
                lines = []
                self.wfile.write(b"354 go on\r\n")
            elif line.upper() == "QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            elif line.upper().startswith("EHLO"):
                self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
            else:
                self.wfile.write(b"250 ok\r\n")


@contextmanager
def mail_server() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the settings of a mail server and the mail that it gets."""
    received: list[str] = []
    handler = type("Receiving", (MailServer,), {"received": received})
    with socketserver.TCPServer(("127.0.0.1", 0), handler) as server, in_thread(server):
        mail = {"server": f"smtp://127.0.0.1:{server.server_address[1]}", "sender": "p@h"}
        yield {**mail, "to": ["a@h", "b@h"]}, received


def test_mail_carries_the_message_and_no_further_header() -> None:
    with mail_server() as (mail, received):
        channel = Channel(AlertSettings.model_validate({"mail": mail}))
        hostile = Alert("lag", "shop\nBcc: thief@h", "the log is behind")
        channel.send(notifications(hostile)[0])
    (message,) = received
    head, _, body = message.partition("\n\n")
    assert "To: a@h, b@h" in head
    assert "\nBcc" not in head
    assert "the log is behind" in body


def test_password_that_cannot_be_sent_is_an_error_without_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("pässword")
    with mail_server() as (mail, received):
        settings = {**mail, "user": "p", "password_file": str(file)}
        channel = Channel(AlertSettings.model_validate({"mail": settings}))
        with pytest.raises(OptionInvalid, match="outside ASCII") as refused:
            channel.send(notifications(LAG)[0])
        assert "pässword" not in str(refused.value)
        file.unlink()
        with pytest.raises(OptionInvalid, match="cannot be read"):
            channel.send(notifications(LAG)[0])
    assert received == []


@pytest.mark.parametrize(
    ("alerts", "problem"),
    [
        ({}, "set webhook or mail"),
        ({"webhook": "ftp://h"}, "must be a URL"),
        ({"webhook": "http://h", "body": '{"text": 1}'}, "{text}"),
        ({"webhook": "http://h", "body": '{"text": {text}'}, "no JSON"),
        ({"mail": {"server": "http://h", "sender": "a@h", "to": ["b@h"]}}, "smtp://"),
        ({"mail": {"server": "smtp://h", "sender": "a@h\nBcc: c@h", "to": ["b@h"]}}, "no address"),
    ],
)
def test_wrong_settings_are_refused_by_name(alerts: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + problem.replace("{", r"\{").replace("}", r"\}")):
        AlertSettings.model_validate(alerts)


class StateOfCapture:
    """A capture that never connects, in a state that the test chooses."""

    def __init__(self, log: Log) -> None:
        settings = InstanceSettings(source="mysql://nobody@127.0.0.1:1")
        parts = CaptureParts(open_log=lambda: log, open_lookup=_no_lookup, arrived=lambda name: None)
        self.capture = Capture("shop", settings, LogSettings(), StartAt(), parts)
        self.capture._log = log
        self.capture._set_state(State.RUNNING)

    def alerts(self, **settings: Any) -> set[str]:
        chosen = AlertSettings.model_validate({"webhook": "http://h", "disk": None, **settings})
        return {alert.name for alert in conditions(self.capture, chosen)}


def _no_lookup(*arguments: Any) -> Any:
    raise AssertionError("nothing is looked up")


def test_each_condition_begins_and_ends() -> None:
    with captured_log() as log:
        state = StateOfCapture(log)
        capture = state.capture
        assert state.alerts() == set()
        capture._set_state(State.WAITING, "no answer")
        assert state.alerts(after=3600) == set()
        assert state.alerts(after=0) == {"not running"}
        capture._set_state(State.STOPPED, "the log is damaged")
        assert state.alerts() == {"stopped"}
        capture._set_state(State.RUNNING)
        capture.progress.heard_at, capture.progress.time_us = 1.0, NOW_US
        assert state.alerts() == {"lag"}
        assert state.alerts(lag=None) == set()
        assert state.alerts(lag=None, disk=1 << 60) == {"disk"}
        capture.server_log = ServerLog(9, 100, 1000, "mysql-bin.000005", 1, 200, 800, 0.0)
        assert state.alerts(lag=None) == {"purge near"}
        assert state.alerts(lag=None, kept=0.1) == set()
        capture.server_log = ServerLog(9, 100, 1000, "mysql-bin.000005", 1, None, 800, 0.0)
        assert state.alerts(lag=None) == {"purged"}
        # A position of another server's log cannot be compared.
        capture.server_log = ServerLog(9, 100, 1000, "mysql-bin.000005", 1, None, None, 0.0)
        assert state.alerts(lag=None) == set()
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(
                log, "broken_holds", (BrokenHold(Hold("cache", log.visible), "too much follows it"),)
            )
            assert state.alerts(lag=None) == {"hold broken"}
        with pytest.MonkeyPatch.context() as doubted:
            doubted.setattr(log, "settler", SimpleNamespace(listed=lambda: [{"table": "shop.orders"}]))
            assert state.alerts(lag=None) == {"tables in doubt"}
        assert state.alerts(lag=None) == set()


def test_daemon_reports_alerts_and_repeats_a_failed_delivery(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.serve.telemetry._ALERT_SECONDS", 0.01)
    monkeypatch.setattr("penstock.telemetry.alerts._REFUSED_US", 1)
    monkeypatch.setattr("penstock.telemetry.alerts._REFUSED_US_MAX", 1)
    current = [LAG]
    webhook.answer = (500, b"down")
    with captured_log() as log, serving(log) as daemon:
        alerting = Alerting(lambda: list(current), channel_of(webhook, format="slack"))
        telemetry = Telemetry(daemon.served, daemon.ports, alerting=alerting)

        async def report() -> None:
            running = asyncio.create_task(telemetry.run())
            await asyncio.to_thread(wait_until, lambda: len(webhook.bodies) >= 2)
            webhook.answer = (200, b"ok")
            await asyncio.to_thread(wait_until, lambda: telemetry._alerts.pending() == [])
            current.clear()
            await asyncio.to_thread(wait_until, lambda: "resolved" in webhook.bodies[-1]["text"])
            running.cancel()
            await asyncio.wait({running})

        asyncio.run(report())
    texts = [body["text"].partition(":")[0] for body in webhook.bodies]
    assert set(texts[:-1]) == {"Penstock alert"}
    assert texts[-1] == "Penstock resolved"


def test_refused_notification_does_not_hold_up_the_next_one(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.serve.telemetry._ALERT_SECONDS", 0.01)
    channel = channel_of(webhook)
    post = Channel.send

    def refuse_disk(self: Channel, notification: Any) -> None:
        if notification.alert.name == "disk":
            raise OptionInvalid("the text is too long")
        post(self, notification)

    monkeypatch.setattr(Channel, "send", refuse_disk)
    current = [Alert("disk", "shop", "8 bytes are free"), LAG]
    with captured_log() as log, serving(log) as daemon:
        telemetry = Telemetry(daemon.served, daemon.ports, alerting=Alerting(lambda: current, channel))

        async def report() -> None:
            running = asyncio.create_task(telemetry.run())
            await asyncio.to_thread(wait_until, lambda: webhook.bodies)
            running.cancel()
            await asyncio.wait({running})

        asyncio.run(report())
    assert [body["name"] for body in webhook.bodies] == ["lag"]


def test_failed_check_of_the_conditions_is_logged_and_the_next_one_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.serve.telemetry._ALERT_SECONDS", 0.01)
    checks: list[str] = []

    def out_of_files() -> list[Alert]:
        checks.append("failed")
        raise OSError(errno.EMFILE, "too many open files")

    with captured_log() as log, serving(log) as daemon:
        channel = Channel(AlertSettings.model_validate({"webhook": "http://127.0.0.1:1/secret-path"}))
        telemetry = Telemetry(daemon.served, daemon.ports, alerting=Alerting(out_of_files, channel))

        async def report() -> None:
            running = asyncio.create_task(telemetry.run())
            await asyncio.to_thread(wait_until, lambda: len(checks) >= 2 or running.done())
            running.cancel()
            await asyncio.wait({running})

        with capture_logs() as logged:
            asyncio.run(report())
    assert len(checks) >= 2
    assert {(line["log_level"], line["error"]) for line in logged} == {("error", "OSError")}


@pytest.mark.parametrize(
    ("account", "channel", "shown"),
    [
        (Account("reader"), "ops@h", True),
        (Account("reader"), None, None),
        (Account("scraper", metrics=True), "ops@h", "ops@h"),
        (Account("root", admin=True), "ops@h", "ops@h"),
    ],
)
def test_address_of_alerts_is_shown_to_those_who_watch_the_daemon(
    account: Account, channel: str | None, shown: str | bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.serve.http.alerts.account_of", lambda request: account)
    mail = {"mail": {"server": "smtp://mail.example", "sender": "p@h", "to": [channel]}}
    kept = None if channel is None else Channel(AlertSettings.model_validate(mail))
    of_pipeline = Alert("target differs", "orders", "3 rows", is_pipeline=True)
    route = alert_routes.routes(Served({}, Arrivals()), lambda: [LAG, of_pipeline], kept)[0]
    answer = json.loads(asyncio.run(route.endpoint(Request({"type": "http"}))).body)
    assert answer["channel"] == shown
    seen = [alert["name"] for alert in answer["alerts"]]
    assert seen == (["lag", "target differs"] if account.may_read_metrics() else ["lag"])


def test_command_line_lists_alerts_and_tests_the_channel(webhook: Webhook, tmp_path: Path) -> None:
    config = tmp_path / "penstock.yaml"
    settings = {
        "instances": {"shop": {"source": "mysql://nobody@127.0.0.1:1"}},
        "alerts": {"webhook": webhook.url, "format": "slack"},
    }
    config.write_text(yaml.safe_dump(settings))
    tested = penstock("alerts", "test", "--config", str(config))
    assert tested.code == 0, tested.err
    assert [body["text"].split(":")[0] for body in webhook.bodies] == ["Penstock alert", "Penstock resolved"]
    with captured_log() as log, serving(log) as daemon:
        listed = penstock("alerts", "list", "--url", f"http://127.0.0.1:{daemon.port()}")
        assert listed.code == 0, listed.err
        assert "sends no alerts" in listed.err
    del settings["alerts"]
    config.write_text(yaml.safe_dump(settings))
    assert penstock("alerts", "test", "--config", str(config)).code == 2
    assert Settings.model_validate(settings).alerts is None
