# SPDX-License-Identifier: Apache-2.0
"""The web console beside a daemon: its process, and the settings that it runs with."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import console
from penstock.cli.shared import console_process
from penstock.cli.shared.console_process import running_beside
from penstock.console.app import ConsoleSettings
from penstock.errors import OptionInvalid
from penstock.retry import Backoff
from penstock.settings.daemon import load_settings
from tests.support.suite.patience import wait_until

INSTANCES = "instances: {shop: {source: mysql://repl@db1}}\n"


def write_settings(folder: Path, text: str) -> Path:
    file = folder / "penstock.yaml"
    file.write_text(INSTANCES + text)
    return file


def test_console_is_started_again_when_it_ends_and_stopped_with_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_process, "_BACKOFF", Backoff(first=0.001, longest=0.001))
    starts = tmp_path / "starts"
    program = f"import os, signal; open({str(starts)!r}, 'a').write(f'{{os.getpid()}}\\n'); signal.pause()"

    def started() -> list[int]:
        return [int(line) for line in starts.read_text().split()] if starts.exists() else []

    with running_beside([sys.executable, "-I", "-S", "-c", program]):
        wait_until(lambda: len(started()) == 1)
        os.kill(started()[0], signal.SIGKILL)
        wait_until(lambda: len(started()) == 2)
        assert os.getpgid(started()[1]) != os.getpgid(0), "Ctrl-C in a terminal is meant for the daemon"
    with pytest.raises(ProcessLookupError):
        os.kill(started()[1], 0)


def test_console_that_cannot_be_started_does_not_stop_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_process, "_BACKOFF", Backoff(first=0.001, longest=0.001))
    ends: list[Any] = []
    monkeypatch.setattr(console_process._log, "error", lambda event, **values: ends.append(values["status"]))
    with running_beside([str(tmp_path / "nothing")]):
        wait_until(lambda: len(ends) >= 2)
    assert "No such file" in str(ends[0])


class _Server:
    """Stands in for the server that `penstock console` starts: records its settings and ends at once."""

    settings: ConsoleSettings

    def __init__(self, settings: ConsoleSettings) -> None:
        type(self).settings = settings

    def serve_until_stopped(self) -> None:
        return

    def stop(self) -> None:
        raise AssertionError("nothing runs")


def test_section_of_the_settings_is_used_and_an_option_replaces_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.console.serving.ConsoleServer", _Server)
    pipeline = tmp_path / "orders.yaml"
    pipeline.write_text(f"name: orders\nstate: sqlite:///{tmp_path}/state.db\n")
    store = f"sqlite:///{tmp_path}/other.db"
    file = write_settings(
        tmp_path,
        f"console: {{listen: '127.0.0.1:7999', pipelines: ['{pipeline}', '{store}'],"
        " daemons: ['http://db2:7070'], base_path: /penstock, hosts: [console.example.com]}\n",
    )
    console.run(config=file)
    settings = _Server.settings
    assert [url for address in settings.daemons for url in address.base_urls] == [
        "http://127.0.0.1:7070",
        "http://db2:7070",
    ]
    assert settings.stores == (f"sqlite:///{tmp_path}/state.db", store)
    assert settings.pipeline_files == (pipeline,)
    assert (settings.host, settings.port, settings.base_path) == ("127.0.0.1", 7999, "/penstock")
    assert settings.hosts == ("console.example.com",)
    console.run(config=file, listen="127.0.0.1:7998", base_path="", pipelines=[store])
    assert (_Server.settings.port, _Server.settings.base_path) == (7998, "")
    assert (_Server.settings.stores, _Server.settings.pipeline_files) == ((store,), ())


def test_daemon_without_a_console_section_has_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.console.serving.ConsoleServer", _Server)
    console.run(config=write_settings(tmp_path, ""))
    assert (_Server.settings.host, _Server.settings.port, _Server.settings.stores) == ("127.0.0.1", 7080, ())


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ("console: {base_path: penstock}", "write it as /penstock"),
        ("console: {listen: '127.0.0.1:x'}", "is no host:port"),
        ("listen: {http: '127.0.0.1:0'}\nconsole: {}", "set listen.http"),
    ],
    ids=["base-path", "listen", "unknown-port"],
)
def test_console_that_cannot_work_is_refused(tmp_path: Path, section: str, why: str) -> None:
    with pytest.raises(OptionInvalid, match=why):
        load_settings(write_settings(tmp_path, section))
