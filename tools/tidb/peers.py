# SPDX-License-Identifier: Apache-2.0
"""TiDB's own programs: its servers over a small cluster, and its pump client, built from `tools/tidb_peers`.

The first build takes several minutes of processor time, and its result is kept in the cache that the database
servers share. If the module proxy does not serve a required module, PartMissing is raised and names the
module.

    python -m tools.tidb.peers

builds them before the tests, each of which has a time limit.
"""

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pymysql

from tools.maven import cached, program, run
from tools.servers.errors import PartMissing
from tools.servers.ports import free_port

SOURCES = Path(__file__).resolve().parents[1] / "tidb_peers"
PROGRAMS = ("cluster", "tidb", "writer")

# The time limit ends a writer that hangs; otherwise the writer ends by itself.
_WRITE_SECONDS_MAX = 120.0

# The modules of 2023 use names of Go's runtime that newer linkers refuse by default.
_LINKER_FLAGS = "-checklinkname=0 -s -w"


def programs() -> Path:
    """Return the folder of the programs, built if missing. Raises PartMissing."""
    paths = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
    return cached(f"tidb-peers-{digest}", _build)


def _build(folder: Path) -> None:
    go = program("go", "/usr/local/go/bin", "/usr/lib/go/bin")
    (folder / "built").mkdir()
    shutil.copytree(SOURCES, folder / "sources")
    # Build the programs one after the other, so that each build has the whole time limit.
    for name in PROGRAMS:
        words = [go, "build", "-p", "1", "-ldflags", _LINKER_FLAGS, "-o", str(folder / "built"), f"./{name}"]
        run(words, folder / "sources")


@dataclass
class TidbServer:
    """A TiDB server in its own process."""

    process: "subprocess.Popen[str]"
    port: int
    status_port: int

    def connect(self, database: str | None = None) -> "pymysql.Connection[Any]":
        """Return a connection."""
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database=database,
            autocommit=False,
            ssl_disabled=True,
        )

    def kill(self) -> None:
        """Kill the process like a crash."""
        self.process.kill()
        self.process.wait()


@dataclass
class PeerCluster:
    """PD, TiKV and TiDB servers in separate processes, which run inside a `with` block."""

    folder: Path
    servers: list[TidbServer] = field(default_factory=list)

    def __enter__(self) -> Self:
        pd_port, peer_port, kv_port = free_port(), free_port(), free_port()
        self.address = f"127.0.0.1:{pd_port}"
        words = ["-pd", self.address, "-peer", f"127.0.0.1:{peer_port}", "-kv", f"127.0.0.1:{kv_port}"]
        self._storage = self._start("cluster", words)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.kill()
        self._storage.kill()
        self._storage.wait()

    def start_server(self, strategy: str = "range") -> TidbServer:
        """Start a TiDB server and return once it accepts connections. It needs a Pump."""
        port, status_port = free_port(), free_port()
        words = ["-pd", self.address, "-port", str(port), "-status", str(status_port), "-strategy", strategy]
        server = TidbServer(self._start("tidb", words), port, status_port)
        self.servers.append(server)
        return server

    def write(self, *words: str) -> tuple[list[tuple[int, int]], dict[str, float]]:
        """Run the pump client alone; return the start and commit timestamps, and the client's
        measurements.
        """
        done = subprocess.run(
            [programs() / "writer", "-pd", self.address, *words],
            capture_output=True,
            text=True,
            timeout=_WRITE_SECONDS_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return written(done.stdout)

    def start_writing(self, *words: str) -> "subprocess.Popen[str]":
        """Start the pump client alone; `written` reads its output."""
        command = [programs() / "writer", "-pd", self.address, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _start(self, name: str, words: Sequence[str]) -> "subprocess.Popen[str]":
        folder = self.folder / f"{name}-{len(self.servers)}"
        folder.mkdir(parents=True)
        log = (folder / "output").open("w")
        process = subprocess.Popen(
            [programs() / name, "-folder", str(folder), *words],
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdout is not None
        is_ready = any(line == "ready\n" for line in process.stdout)
        assert is_ready, f"{name} did not start: {(folder / 'output').read_text()[-4000:]}"
        # A program that logs to a full pipe stops at its next line.
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
        return process


def written(output: str) -> tuple[list[tuple[int, int]], dict[str, float]]:
    """Return the transactions and measurements that the writer printed."""
    # The client's log lines are mixed into the output.
    objects = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    transactions = [(each["start_ts"], each["commit_ts"]) for each in objects if "start_ts" in each]
    return transactions, objects[-1]


if __name__ == "__main__":
    try:
        print(f"TiDB's programs: {programs()}")
    except PartMissing as missing:
        # Each test that needs the programs reports that they are missing, and decides whether that is a
        # failure.
        print(f"TiDB's programs are missing: {missing}")
