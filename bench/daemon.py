# SPDX-License-Identifier: Apache-2.0
"""A daemon in a separate process, connected to the server that serves a corpus, and started as a user would
start it.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.corpora.corpus import Corpus

INSTANCE = "bench"

_PENSTOCK = (sys.executable, "-c", "from penstock.cli.app import main; main()")
_ROOT = Path(__file__).parents[1]
_START_SECONDS_MAX = 120.0
_CAPTURE_SECONDS_MAX = 600.0
_WAITS = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)
_LISTENERS = re.compile(r"(address|canal|ptubes|ptubes_monitor)=\S+:(\d+)")


@dataclass(frozen=True)
class Daemon:
    """A running daemon. `ports` maps the names of its listeners to ports."""

    ports: dict[str, int]
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        """The instance's URL for subscribers."""
        return f"penstock://127.0.0.1:{self.ports['http']}/{INSTANCE}"

    def ask(self, call: str) -> Any:
        """Return the daemon's response to a call on the instance."""
        url = f"http://127.0.0.1:{self.ports['http']}/v1/instances/{INSTANCE}/{call}"
        with urllib.request.urlopen(url, timeout=_START_SECONDS_MAX) as answer:
            return json.load(answer)

    def wait_until_running(self) -> None:
        """Wait until the capture has chosen its start. A log that starts with `latest` contains only what is
        committed from then on.
        """
        deadline = time.monotonic() + _START_SECONDS_MAX
        while (state := self.ask("status")["state"]) != "running":
            assert time.monotonic() < deadline, f"the capture does not start: it is {state}"
            time.sleep(0.05)

    def wait_for(self, file: str, offset: int) -> None:
        """Wait until the daemon's log has reached a position of the server."""
        deadline = time.monotonic() + _CAPTURE_SECONDS_MAX
        while True:
            here = str(self.ask("status")["position"] or "").rpartition("/")[2]
            name, _, end = here.rpartition(":")
            if (name, int(end or 0)) >= (file, offset):
                return
            assert time.monotonic() < deadline, (
                f"the daemon does not come to {file}:{offset}, it is at {here}"
            )
            time.sleep(0.05)

    def cpu_seconds(self) -> float:
        """Return the processor time that the daemon has used."""
        return cpu_seconds_of(self.process.pid)

    def wakes(self) -> int:
        """Return how often the daemon's threads have been woken."""
        statuses = Path(f"/proc/{self.process.pid}/task").glob("*/status")
        return sum(int(_WAITS.findall(status.read_text())[0]) for status in statuses)


def cpu_seconds_of(process: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(
    folder: Path, source: int | str, *, start: str = "earliest", marks: Path | None = None, **instance: Any
) -> Iterator[Daemon]:
    """Run a daemon inside the block. It captures the server on a port of this host, or another source.

    The daemon has a listener for every protocol, and writes its output to `folder`/daemon.output. With
    `marks`, the file `marks` contains the times of the daemon's stages afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, output = folder / "penstock.yaml", folder / "daemon.output"
    if isinstance(source, int):
        source = f"mysql://root@127.0.0.1:{source}?ssl_mode=disabled"
    listeners = dict.fromkeys(("http", "canal", "ptubes"), "127.0.0.1:0")
    settings = {
        "listen": listeners,
        "log": {"folder": str(folder / "log")},
        "instances": {INSTANCE: {"source": source, "start": start, **instance}},
    }
    config.write_text(yaml.safe_dump(settings))
    with output.open("wb") as said:
        program = _PENSTOCK if marks is None else (sys.executable, "-m", "bench.stages", str(marks))
        process = subprocess.Popen([*program, "serve", str(config)], stdout=said, stderr=said, cwd=_ROOT)
    try:
        daemon = Daemon(_ports(process, output), folder, process)
        if start == "latest":
            daemon.wait_until_running()
        yield daemon
    finally:
        process.terminate()
        process.wait(_START_SECONDS_MAX)


@contextmanager
def serving_corpus(folder: Path, port: int, binlog: Corpus, **instance: Any) -> Iterator[Daemon]:
    """Inside the block, run a daemon whose log contains a complete corpus.

    `instance` are settings of the daemon's instance.
    """
    with serving(folder, port, **instance) as daemon:
        daemon.wait_for(binlog.path.name, binlog.bytes)
        yield daemon


def _ports(process: "subprocess.Popen[bytes]", output: Path) -> dict[str, int]:
    deadline = time.monotonic() + _START_SECONDS_MAX
    while process.poll() is None and time.monotonic() < deadline:
        for line in output.read_text(errors="replace").splitlines(keepends=True):
            # A line that is still being written may be incomplete.
            if " serving " in line and line.endswith("\n"):
                ports_by_name = {name: int(port) for name, port in _LISTENERS.findall(line)}
                return {"http": ports_by_name.pop("address"), **ports_by_name}
        time.sleep(0.02)
    raise AssertionError(f"the daemon does not start:\n{output.read_text(errors='replace')[-4000:]}")
