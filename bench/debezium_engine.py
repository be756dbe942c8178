# SPDX-License-Identifier: Apache-2.0
"""Debezium's embedded engine for MySQL, in its published form, writing each change as a line of JSON."""

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench import clients
from bench.compiled import build_java, built, java_words
from bench.corpora.corpus import FILE_NAME, cache_directory
from tools.servers import Server

VERSION = "debezium-embedded 3.6.1.Final"

_SOURCES = [Path(clients.__file__).parent / "debezium" / name for name in ("pom.xml", "DebeziumLines.java")]
_USER = "debezium"
_RUN_SECONDS_MAX = 900.0


@dataclass(frozen=True)
class EngineRun:
    """The engine's output. The time is measured from its first change, so that the start of the JVM does not
    count.
    """

    changes: int
    seconds: float
    bytes: int


def prepare() -> list[str]:
    """Build the engine, and return its command. Raises ToolMissing."""
    return java_words(
        built("debezium", _SOURCES, build_java("DebeziumLines.java")), "DebeziumLines", "-Xmx2g"
    )


def run_engine(server: Server, table: str, changes: int) -> EngineRun:
    """Run the engine for this many changes of a table, from the beginning of the server's binlog."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION sql_log_bin = 0")
        cursor.execute(f"CREATE USER IF NOT EXISTS {_USER}@'%' IDENTIFIED BY '{_USER}'")
        cursor.execute(f"GRANT ALL ON *.* TO {_USER}@'%'")
    with tempfile.TemporaryDirectory(dir=cache_directory()) as folder:
        words = [*prepare(), str(server.port), FILE_NAME, table, str(changes), folder]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_RUN_SECONDS_MAX, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        seen, seconds = done.stdout.split()
        written = (Path(folder) / "changes.json").stat().st_size
    return EngineRun(int(seen), float(seconds), written)
