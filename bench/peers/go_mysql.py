# SPDX-License-Identifier: Apache-2.0
"""go-mysql: the common replica library in Go, over loopback; a small program counts the decoded rows."""

import re
from pathlib import Path

from bench import clients
from bench.compiled import built, run, tool
from bench.rows_of_reader import read_rows

from .peer import Job, Tally

TITLE = "go-mysql"
_SOURCES = [Path(clients.__file__).parent / "go" / name for name in ("go.mod", "go.sum", "main.go")]


def version() -> str:
    """Return the version that is built."""
    version_match = re.search(r"go-mysql-org/go-mysql (v\S+)", _SOURCES[0].read_text())
    assert version_match is not None, "go.mod names it"
    return version_match.group(1)


def _program() -> str:
    def build(folder: Path) -> None:
        run([tool("go", "golang-go", "/usr/local/go/bin"), "build", "-o", "drain", "."], folder)

    return str(built("go-mysql", _SOURCES, build) / "drain")


def prepare() -> None:
    """Build the program."""
    _program()


def decode_stream(job: Job) -> Tally:
    """Decode every row, or as many as `job.seconds_max` allows."""
    return read_rows([_program()], job)
