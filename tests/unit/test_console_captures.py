# SPDX-License-Identifier: Apache-2.0
"""Restarting a capture that was set aside: the console shows a preview, requires an administrator, and
records the action.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.errors import OptionInvalid
from penstock.logstore.log import Log
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, LogInstance, ServedLog, captured_log, serving

WHY = "set aside: its process ended 8 times <script>"


@pytest.fixture
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


class Capture:
    """A capture that is set aside until it is started."""

    def __init__(self) -> None:
        self.is_set_aside = True

    def start(self, name: str) -> None:
        if not self.is_set_aside:
            raise OptionInvalid(f"{name} is not set aside")
        self.is_set_aside = False


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Let the status of the instance say whether its capture is set aside."""
    capture, status = Capture(), LogInstance.status

    def with_process(instance: LogInstance) -> dict[str, Any]:
        failure = {"state": "stopped", "why": WHY} if capture.is_set_aside else {}
        return {**status(instance), **failure, "process": {"set_aside": capture.is_set_aside}}

    monkeypatch.setattr(LogInstance, "status", with_process)
    return capture


def address_of(daemon: ServedLog) -> dict[str, Any]:
    return {"daemon": f"http://127.0.0.1:{daemon.port()}", "instance": INSTANCE}


def test_a_capture_that_was_set_aside_is_started_after_a_page_about_it(log: Log, capture: Capture) -> None:
    with (
        serving(log, {"token": "a-token"}, resume=capture.start) as daemon,
        console_of(daemon) as browser,
        capture_logs() as logs,
    ):
        browser.post("/login", {"token": "a-token"})
        address = address_of(daemon)
        assert "/instance/resume" in browser.get("/instance", **address).text
        page = browser.get("/instance/resume", **address)
        assert WHY in page.words
        assert "continues where its log ends" in page.words
        fields = {**address, "csrf": page.field("csrf")}
        assert browser.post("/instance/resume/confirm", fields | {"csrf": "x"}).status == 403
        assert capture.is_set_aside
        assert browser.post("/instance/resume/confirm", fields).status == 303
        assert not capture.is_set_aside
        assert "/instance/resume" not in browser.get("/instance", **address).text
        assert "is not set aside" in browser.get("/instance/resume", **address).words
        assert browser.post("/instance/resume/confirm", fields).status == 400
    actions = [entry["action"] for entry in logs if entry["event"] == "audit" and "client" in entry]
    assert actions == ["login", "resume capture"]


def test_a_reader_may_not_start_a_capture(log: Log, capture: Capture) -> None:
    accounts = [{"name": "reader", "token": "reader-token"}]
    with (
        serving(log, {"token": "a-token"}, accounts, resume=capture.start) as daemon,
        console_of(daemon) as browser,
    ):
        browser.post("/login", {"token": "reader-token"})
        address = address_of(daemon)
        shown = browser.get("/instance", **address)
        assert "/instance/resume" not in shown.text
        assert browser.get("/instance/resume", **address).status == 403
        fields = {**address, "csrf": shown.field("csrf")}
        assert browser.post("/instance/resume/confirm", fields).status == 403
    assert capture.is_set_aside
