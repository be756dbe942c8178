# SPDX-License-Identifier: Apache-2.0
"""Canal's own server, from its published artifacts, over the server of a corpus.

It has no log of its own: it reads the binlog and holds what it made of it in a ring in memory.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import clients
from bench.compiled import build_java, built, java_words
from bench.corpora.corpus import FILE_NAME, cache_directory
from bench.daemon import cpu_seconds_of
from tools.servers import Server
from tools.servers.ports import free_port

VERSION = "canal.server 1.1.7"

_SOURCES = [
    Path(clients.__file__).parent / "canal_server" / name
    for name in ("pom.xml", "CanalPeer.java", "logback.xml")
]
_USER = "canal"


@dataclass(frozen=True)
class CanalServer:
    """Canal's server, running."""

    port: int
    process: "subprocess.Popen[str]"

    def cpu_seconds(self) -> float:
        """Return how much processor time it has had."""
        return cpu_seconds_of(self.process.pid)


def prepare() -> list[str]:
    """Build it, and return its command. Raises ToolMissing."""
    return java_words(built("canal-server", _SOURCES, build_java("CanalPeer.java")), "CanalPeer")


@contextmanager
def canal_server(server: Server, table_filter: str) -> Iterator[CanalServer]:
    """Run Canal's server inside the block over a server of a corpus, as its destination `bench`."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_log_bin = 0")
        cursor.execute(f"CREATE USER IF NOT EXISTS {_USER}@'%' IDENTIFIED BY '{_USER}'")
        cursor.execute(f"GRANT ALL ON *.* TO {_USER}@'%'")
    port = free_port()
    words = [*prepare(), str(port), str(server.port), FILE_NAME, table_filter]
    # It leaves files where it runs.
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        try:
            assert process.stdout is not None
            told = []
            for line in process.stdout:
                told.append(line)
                if line == "ready\n":
                    break
            else:
                raise AssertionError(f"Canal's server does not start:\n{''.join(told)[-2000:]}")
            yield CanalServer(port, process)
        finally:
            process.kill()
            process.wait()
