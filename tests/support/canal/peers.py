# SPDX-License-Identifier: Apache-2.0
"""Third-party Canal clients, unmodified, from their registries, each driven by a small program of this suite.

    python    canal-python, from PyPI, with the old protobuf library that it requires
    java      com.alibaba.otter:canal.client, the official client, from Maven Central
    go        github.com/withlin/canal-go, through the module proxy

They are built once into the cache that the database servers share.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.maven import cached, copy_dependencies, program, run

CLIENTS = Path(__file__).parent / "clients"
PEERS = ("python", "java", "go")

_PYTHON_PACKAGES = ("canal-python==0.4", "protobuf==3.20.3")


@dataclass(frozen=True)
class Peer:
    """A client program that is ready to run: its command and its environment."""

    words: tuple[str, ...]
    environment: dict[str, str]

    def start(
        self, port: int | str, destination: str, user: str, password: str, table_filter: str, *more: str
    ) -> "subprocess.Popen[str]":
        """Start the client. It ends after it has received a row of a table named stop.

        Canal's own client takes the hosts of the ensemble instead of a port, and finds the daemon through the
        ensemble.
        """
        return subprocess.Popen(
            [*self.words, str(port), destination, user, password, table_filter, *more],
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def output_of(process: "subprocess.Popen[str]") -> str:
    """Return the output of a client. Fails if the client ended with an error."""
    try:
        output, errors = process.communicate(timeout=WAIT_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"the client does not end:\n{output[-2000:]}\n{errors[-2000:]}") from None
    assert process.returncode == 0, f"{output[-2000:]}\n{errors[-4000:]}"
    return output


def entries_of(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Return the entries that a client printed."""
    return [json.loads(line) for line in output_of(process).splitlines() if line.startswith("{")]


def peer(name: str) -> Peer:
    """Return a client and build it if it is missing. Raises PartMissing."""
    build, sources = _BUILDS[name]
    content = b"".join((CLIENTS / source).read_bytes() for source in sources)
    folder = cached(f"canal-{name}-{hashlib.sha256(content).hexdigest()[:12]}", build)
    return _READY[name](folder)


def _build_python(folder: Path) -> None:
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "built"]
    run([*words, *_PYTHON_PACKAGES], folder)


def _build_java(folder: Path) -> None:
    compiler = program("javac")
    shutil.copytree(CLIENTS / "java", folder / "java")
    copy_dependencies(folder / "java", folder / "built")
    words = [compiler, "-cp", f"{folder / 'built'}/*", "-d", str(folder / "built"), "Follow.java"]
    run(words, folder / "java")


def _build_go(folder: Path) -> None:
    go = program("go", "/usr/local/go/bin", "/usr/lib/go/bin")
    (folder / "built").mkdir()
    shutil.copytree(CLIENTS / "go", folder / "go")
    run([go, "build", "-o", str(folder / "built" / "follow"), "."], folder / "go")


def _ready_python(folder: Path) -> Peer:
    # The client's generated code predates the protobuf C implementation, which refuses it.
    environment = {"PYTHONPATH": str(folder), "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    return Peer((sys.executable, str(CLIENTS / "follow.py")), environment)


def _ready_java(folder: Path) -> Peer:
    options = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dlogback.statusListenerClass=")
    return Peer(("java", *options, "-cp", f"{folder}/*{os.pathsep}{folder}", "Follow"), {})


def _ready_go(folder: Path) -> Peer:
    return Peer((str(folder / "follow"),), {})


_BUILDS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "python": (_build_python, ("follow.py",)),
    "java": (_build_java, ("java/pom.xml", "java/Follow.java")),
    "go": (_build_go, ("go/go.mod", "go/go.sum", "go/main.go")),
}
_READY = {"python": _ready_python, "java": _ready_java, "go": _ready_go}
