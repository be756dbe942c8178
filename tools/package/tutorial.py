# SPDX-License-Identifier: Apache-2.0
"""The tutorial, followed word by word: the snippets of docs/start.md, typed into terminals.

Its folder and ports are replaced, because they may be in use. The commands that install the package are left
out: the caller has installed it, and PATH has its programs.
"""

import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, Self

from tools.package.built import ROOT, PackageInvalid
from tools.servers import install
from tools.servers.child import end, spawn
from tools.servers.ports import free_port, is_free

PAGE = ROOT / "docs" / "start.md"
SNIPPET = re.compile(r"^```(console|sql|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
# Spark starts in one of the steps.
STEP_SECONDS_MAX = 300.0
_FOLDER, _SERVER_PORT, _DAEMON_PORT = "/tmp/penstock-start", "3399", "7070"


def follow(folder: Path, environment: Mapping[str, str]) -> str:
    """Type the snippets into terminals; return their output. Raises PackageInvalid, PartMissing."""
    install("mariadb")
    home, server_port, daemon_port = folder / "penstock-start", free_port(), free_port()
    snippets = _snippets({_FOLDER: str(home), _SERVER_PORT: str(server_port), _DAEMON_PORT: str(daemon_port)})
    demo, server, client, reading, daemon, asking, stopped = snippets["console"]
    url = f"--url http://127.0.0.1:{daemon_port}"
    with Terminal(folder, environment) as reader:
        reader.type(demo.splitlines()[-1])
        with Program(folder / "server.log", server, environment, server_port) as running:
            reader.type(f"{client.strip()} <<'END'\n{snippets['sql'][0]}END\n")
            reader.type(reading)
            listening = daemon.replace("log:", f"listen: {{http: 127.0.0.1:{daemon_port}}}\nlog:", 1)
            with Program(folder / "daemon.log", listening, environment, daemon_port) as capturing:
                # A reader of the page continues only after the daemon has started, so wait for the daemon's
                # rows.
                rows = f"penstock inspect {home}/log/shop --rows --tables shop.orders"
                reader.type(f"until {rows} 2>&1 | grep ' delete '; do sleep 0.2; done")
                reader.type(asking.replace("penstock status", f"penstock status {url}"))
                reader.type("python - <<'END'\n" + "\n".join(snippets["python"]) + "END\n")
                capturing.stop(signal.SIGINT)
            reader.type(stopped)
            running.stop(signal.SIGQUIT)
    return reader.printed()


def _snippets(replaced: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the snippets of each language, console snippets as scripts."""
    snippets: dict[str, list[str]] = {"console": [], "sql": [], "python": []}
    for language, text in SNIPPET.findall(PAGE.read_text()):
        for words, replacement in replaced.items():
            text = text.replace(words, replacement)
        snippets[language].append(re.sub(r"^\$ ", "", text, flags=re.MULTILINE))
    return snippets


class Program:
    """A running script whose last command runs until it is stopped."""

    def __init__(self, output: Path, script: str, environment: Mapping[str, str], port: int) -> None:
        *before, last = re.split(r"(?<!\\)\n(?=\S)", script.strip())
        script = "\n".join([*before, f"exec {last}"])
        variables = [f"{name}={value}" for name, value in environment.items()]
        self.output = output
        self._process = spawn(["env", "-i", *variables, "bash", "-e", "-c", script], output)
        deadline = time.monotonic() + START_SECONDS_MAX
        while is_free(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._refuse("does not listen")
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process, STOP_SECONDS_MAX)

    def stop(self, number: signal.Signals) -> None:
        """Send the signal that the page names, and wait for the end. Raises PackageInvalid if there is an
        error.
        """
        self._process.send_signal(number)
        try:
            status = self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._refuse(f"goes on after {number.name}")
        if status != 0:
            self._refuse(f"ends with {status}")

    def _refuse(self, what: str) -> NoReturn:
        end(self._process, STOP_SECONDS_MAX)
        printed = self.output.read_text(errors="replace")
        raise PackageInvalid(f"a program of docs/start.md {what}\n{printed[-4000:]}")


class Terminal:
    """A shell that ends at the first command that fails."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._output = folder / "terminal.log"
        variables = [f"{name}={value}" for name, value in environment.items()]
        words = ["env", "-i", "-C", str(folder), *variables, "bash", "-e", "-o", "pipefail"]
        self._process = spawn(words, self._output, stdin=subprocess.PIPE)
        self._typed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process, STOP_SECONDS_MAX)

    def type(self, script: str) -> None:
        """Run commands. Raises PackageInvalid with the output if one of them fails or hangs."""
        self._typed += 1
        mark = f"step {self._typed} of the page has ended"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{script}\necho {mark}\n".encode())
        self._process.stdin.flush()
        deadline = time.monotonic() + STEP_SECONDS_MAX
        while mark not in self.printed():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PackageInvalid(f"a snippet of docs/start.md fails:\n{script}\n{self.printed()[-4000:]}")
            time.sleep(0.05)

    def printed(self) -> str:
        """Return everything that was printed."""
        return self._output.read_text(errors="replace")
