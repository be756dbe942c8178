# SPDX-License-Identifier: Apache-2.0
"""The web console in a thread of this process, and a browser without JavaScript."""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
import structlog

from penstock.console.app import ConsoleSettings
from penstock.console.fleet import Answers, Fleet
from penstock.console.serving import ConsoleServer
from penstock.source.daemon_address import DaemonAddress
from penstock.telemetry.recent_events import RECENT_EVENTS
from tests.support.daemon.served_log import ServedLog
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

# An address at which no test starts a daemon.
ANYWHERE = DaemonAddress.parse("penstock://127.0.0.1:1/all")


@dataclass(frozen=True)
class Page:
    """A response of the console."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def words(self) -> str:
        """Return the text as a reader sees it, with single blanks."""
        parser = _Text()
        parser.feed(self.text)
        return re.sub(r"\s+", " ", " ".join(parser.pieces))

    @property
    def problem(self) -> str:
        """Return the text of the problems that the page shows, without the hidden notice of a stale page."""
        found = re.findall(r'<p class="notice bad" role="alert">(.*?)</p>', self.text, re.DOTALL)
        return " ".join(Page(self.status, {}, text).words for text in found)

    def field(self, name: str) -> str:
        """Return the value of a hidden field of a form."""
        match = re.search(rf'name="{name}" value="([^"]*)"', self.text)
        assert match is not None, f"the page has no field {name}"
        return match[1]


class _Text(HTMLParser):
    """Collects the text of a page, and the names of its elements and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)


@dataclass
class Browser:
    """A browser that keeps cookies and runs no JavaScript."""

    port: int
    base_path: str = ""
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, headers: Mapping[str, str] | None = None, **query: str) -> Page:
        """Open a page."""
        return self._ask("GET", f"{path}{'?' if query else ''}{urlencode(query)}", None, headers or {})

    def post(self, path: str, fields: Mapping[str, str], headers: Mapping[str, str] | None = None) -> Page:
        """Send a form."""
        return self._ask("POST", path, urlencode(fields), headers or {})

    def follow(self, page: Page) -> Page:
        """Open the page that a redirect points to."""
        parts = urlsplit(page.headers["location"])
        return self._ask("GET", f"{parts.path.removeprefix(self.base_path)}?{parts.query}", None, {})

    def _ask(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> Page:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS_MAX)
        sent = dict(headers)
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        try:
            connection.request(method, f"{self.base_path}{path}", body, sent)
            answer = connection.getresponse()
            for cookie in answer.headers.get_all("set-cookie", []):
                name, _, value = cookie.partition(";")[0].partition("=")
                self.cookies[name] = value
            return Page(
                answer.status,
                {name.lower(): value for name, value in answer.headers.items()},
                answer.read().decode(),
            )
        finally:
            connection.close()


def masked_for_visitors(monkeypatch: pytest.MonkeyPatch, masked: Any, **rights: Any) -> None:
    """Make every daemon report that visitors are administrators with these masks and these additional
    rights.
    """
    everything: dict[str, Any] = {
        "instances": ["*"],
        "subscriptions": ["*"],
        "tables": [],
        "exclude_tables": [],
    }
    account = {"account": "support", "admin": True, **everything, "masked": masked, **rights}

    def ask_all(fleet: Fleet, call: str) -> Answers:
        answer = account if call == "account" else {"instances": [], "alerts": [], "events": []}
        return Answers(dict.fromkeys(fleet.urls, answer), {})

    monkeypatch.setattr(Fleet, "ask_all", ask_all)


@contextmanager
def recorded_events() -> Iterator[None]:
    """Record the log lines of this process inside the block, as the command line does."""
    before = structlog.get_config()
    structlog.configure(processors=[structlog.processors.add_log_level, RECENT_EVENTS.record, _drop])
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(logger: Any, method: str, line: Any) -> Any:
    raise structlog.DropEvent


@contextmanager
def console_of(
    *daemons: ServedLog | DaemonAddress,
    stores: tuple[str, ...] = (),
    base_path: str = "",
    hosts: tuple[str, ...] = (),
    pipeline_files: tuple[Path, ...] = (),
    command: tuple[str, ...] = (),
) -> Iterator[Browser]:
    """Serve a console of daemons inside the block, and open a browser."""
    addresses = tuple(
        daemon
        if isinstance(daemon, DaemonAddress)
        else DaemonAddress.parse(f"penstock://127.0.0.1:{daemon.port()}/all")
        for daemon in daemons
    )
    settings = ConsoleSettings(
        addresses,
        stores,
        port=0,
        base_path=base_path,
        hosts=hosts,
        pipeline_files=pipeline_files,
        command=command,
    )
    server = ConsoleServer(settings)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Browser(server.port, base_path)
    finally:
        server.stop()
        thread.join(WAIT_SECONDS_MAX)
        assert not thread.is_alive()
