# SPDX-License-Identifier: Apache-2.0
"""mysql-binlog-connector-java: the reader under Debezium and Maxwell; a program counts its rows."""

import re
from pathlib import Path

from bench import clients
from bench.compiled import build_java, built, java_words
from bench.rows_of_reader import read_rows

from .peer import Job, Tally

TITLE = "mysql-binlog-connector-java"
_SOURCES = [Path(clients.__file__).parent / "connector" / name for name in ("pom.xml", "ConnectorDrain.java")]


def version() -> str:
    """Return the version that is built."""
    version_match = re.search(
        r"connector-java</artifactId>\s*<version>(.*)</version>", _SOURCES[0].read_text()
    )
    assert version_match is not None, "pom.xml names it"
    return version_match.group(1)


def _command() -> list[str]:
    folder = built("mysql-binlog-connector", _SOURCES, build_java("ConnectorDrain.java"))
    return java_words(folder, "ConnectorDrain")


def prepare() -> None:
    """Build the program."""
    _command()


def decode_stream(job: Job) -> Tally:
    """Decode every row, or as many as `job.seconds_max` allows."""
    return read_rows(_command(), job)
