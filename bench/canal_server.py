# SPDX-License-Identifier: Apache-2.0
"""Canal's own server, from its published artifacts, connected to the server that serves a corpus.

It has no persistent log: it reads the binlog and keeps the decoded events in a ring buffer in memory.
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
    """A running server of Canal."""

    port: int
    process: "subprocess.Popen[str]"

    def cpu_seconds(self) -> float:
        """Return the processor time that the server has used."""
        return cpu_seconds_of(self.process.pid)


def prepare() -> list[str]:
    """Build the server, and return its command. Raises ToolMissing."""
    return java_words(built("canal-server", _SOURCES, build_java("CanalPeer.java")), "CanalPeer")


@contextmanager
def canal_server(server: Server, table_filter: str, file: str = FILE_NAME) -> Iterator[CanalServer]:
    """Run Canal's server inside the block. Its destination `bench` starts at a file of a database server."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_log_bin = 0")
        cursor.execute(f"CREATE USER IF NOT EXISTS {_USER}@'%' IDENTIFIED BY '{_USER}'")
        cursor.execute(f"GRANT ALL ON *.* TO {_USER}@'%'")
    port = free_port()
    words = [*prepare(), str(port), str(server.port), file, table_filter]
    # Canal's server leaves files in its working directory.
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        try:
            assert process.stdout is not None
            output_lines = []
            for line in process.stdout:
                output_lines.append(line)
                if line == "ready\n":
                    break
            else:
                raise AssertionError(f"Canal's server does not start:\n{''.join(output_lines)[-2000:]}")
            yield CanalServer(port, process)
        finally:
            process.kill()
            process.wait()
