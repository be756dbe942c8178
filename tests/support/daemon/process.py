# SPDX-License-Identifier: Apache-2.0
"""A real daemon in its own process, and an HTTP client that shares none of its code."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.support.daemon.forking import ForkedProcess
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers.errors import ServerFailed
from tools.servers.ports import free_port

ROOT = Path(__file__).resolve().parents[3]

# The command line, in its own interpreter.
PENSTOCK = (sys.executable, "-c", "from penstock.cli.app import main; main()")


class Refused(Exception):
    """The daemon answered with a problem document."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(status, problem)
        self.status = status
        self.problem = problem


class DaemonProcess:
    """Runs `penstock serve` with settings in a folder. As a context manager, it runs inside the block.

    `settings` is the content of penstock.yaml without listen.http. The HTTP port is chosen here and does not
    change on a restart; neither does the port of any other listener configured with port 0 (`ports` lists all
    ports by name). The log is in `folder`/log unless the settings name another folder. With an `environment`,
    which may be empty, the daemon starts in a new interpreter, as is necessary for tests that measure its
    total memory. Otherwise it is forked, which is cheaper: it then shares about 50 MiB of memory with the
    process that it is forked from.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.port = free_port()
        self.ports: dict[str, int] = {}
        self.output = folder / "daemon.output"
        self.token: str | None = None
        self._environment = environment
        self._process: ForkedProcess | subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def config(self) -> Path:
        """The settings file."""
        return self.folder / "penstock.yaml"

    @property
    def pid(self) -> int:
        """The process id of the running daemon."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start the daemon and return once it answers on its port.

        Raises ServerFailed if the daemon fails or does not answer in time. The tests restart servers of other
        products once if they do not answer in time, but never Penstock itself.
        """
        self._write_config()
        words = ["serve", str(self.config)]
        with self.output.open("ab") as output:
            begins = output.tell()
            if self._environment is None:
                self._process = ForkedProcess(words, ROOT, os.environ, self.output)
            else:
                self._process = subprocess.Popen(
                    [*PENSTOCK, *words],
                    cwd=ROOT,
                    env=os.environ | self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < deadline and self._process.poll() is None:
            for line in self.said(begins).splitlines(keepends=True):
                if " serving " in line and "address=" in line and line.endswith("\n"):
                    matches = re.findall(r"(address|canal|ptubes|ptubes_monitor)=\S+:(\d+)", line)
                    self.ports = {name: int(port) for name, port in matches}
                    self.port = self.ports["http"] = self.ports.pop("address")
                    return self
            time.sleep(0.02)
        status = self._process.poll()
        ending = f"did not answer in {WAIT_SECONDS_MAX:g} s" if status is None else f"ended with {status}"
        self.kill()
        raise ServerFailed(f"the daemon {ending} when it was started:\n{self.said()}")

    def _write_config(self) -> None:
        settings = {"log": {"folder": str(self.folder / "log")}, **self.settings}
        listen = {"http": f"127.0.0.1:{self.port}", **settings.get("listen", {})}
        for name, address in listen.items():
            if str(address).endswith(":0"):
                if name not in self.ports:
                    self.ports[name] = free_port()
                listen[name] = f"127.0.0.1:{self.ports[name]}"
        self.config.write_text(yaml.safe_dump({**settings, "listen": listen}))

    def said(self, begins: int = 0) -> str:
        """Return the daemon's standard error output."""
        with self.output.open("rb") as output:
            output.seek(begins)
            return output.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the process like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """Stop the process in order, and return its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(WAIT_SECONDS_MAX)
        self._process = None
        return status

    def resident_bytes(self) -> int:
        """Return the resident memory of the daemon's process, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def cpu_seconds(self) -> float:
        """Return the processor time that the daemon has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    # --- Asking -----------------------------------------------------------------------------

    def get(self, path: str, headers: dict[str, str] | None = None, **query: Any) -> Any:
        """Return the response of a GET request: JSON, or bytes. Raises Refused."""
        content, kind = self.fetch(path, headers, **query)
        return json.loads(content) if kind.startswith("application/json") else content

    def post(self, path: str, **query: Any) -> Any:
        """Return the response of a POST request. Raises Refused."""
        return json.loads(self.fetch(path, method="POST", **query)[0])

    def fetch(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET", **query: Any
    ) -> tuple[bytes, str]:
        """Return the body and content type of a response. Raises Refused."""
        text = urllib.parse.urlencode({name: value for name, value in query.items() if value is not None})
        headers = dict(headers or {})
        if self.token is not None:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        url = f"http://127.0.0.1:{self.port}{path}?{text}"
        request = urllib.request.Request(url, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as answer:
                return answer.read(), answer.headers["Content-Type"] or ""
        except urllib.error.HTTPError as problem:
            raise Refused(problem.code, json.loads(problem.read())) from problem

    def status(self, instance: str = "shop") -> dict[str, Any]:
        """Return the status of an instance."""
        instance_status: dict[str, Any] = self.get(f"/v1/instances/{instance}/status")
        return instance_status

    def wait_for(
        self,
        condition: Callable[[dict[str, Any]], bool],
        instance: str = "shop",
        seconds: float = WAIT_SECONDS_MAX,
    ) -> dict[str, Any]:
        """Wait until the status of an instance satisfies a condition, and return the status."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status(instance)
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"after {seconds:g} s: {status}\n{self.said()[-4000:]}"
            time.sleep(0.05)

    def wait_for_head(self, file: str, offset: int, instance: str = "shop") -> dict[str, Any]:
        """Wait until the log holds all bytes up to a server position, and keep waiting while the log
        grows.
        """
        before: str | None = None

        def holds(status: dict[str, Any]) -> bool:
            here = str(status["position"] or "").rpartition("/")[2]
            name, _, end = here.rpartition(":")
            return (name, int(end or 0)) >= (file, offset)

        def holds_or_moves(status: dict[str, Any]) -> bool:
            return holds(status) or status["position"] != before

        while True:
            status = self.wait_for(holds_or_moves, instance)
            if holds(status):
                return status
            before = status["position"]
