# SPDX-License-Identifier: Apache-2.0
"""mysql_common: the protocol crate of the common Rust clients; a small program counts the decoded rows."""

import re
import subprocess
from pathlib import Path

from bench import clients
from bench.compiled import built, run, tool

from .peer import Job, Tally

TITLE = "mysql_common"
_SOURCES = [
    Path(clients.__file__).parent / "mysql_common" / name for name in ("Cargo.toml", "Cargo.lock", "main.rs")
]


def version() -> str:
    """Return the version that is built."""
    version_match = re.search(r'name = "mysql_common"\nversion = "(\S+)"', _SOURCES[1].read_text())
    assert version_match is not None, "Cargo.lock names it"
    return version_match.group(1)


def _program() -> str:
    def build(folder: Path) -> None:
        cargo = tool("cargo", "cargo", str(Path.home() / ".cargo/bin"))
        run([cargo, "build", "--release", "--locked", "--quiet"], folder)

    return str(built("mysql-common", _SOURCES, build) / "target/release/drain")


def prepare() -> None:
    """Build the program."""
    _program()


def decode_file(job: Job) -> Tally:
    """Decode every column of every row of the file."""
    printed = subprocess.run(
        [_program(), str(job.corpus.path)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    kinds = dict(zip(("insert", "update", "delete"), map(int, printed[:3]), strict=True))
    return Tally(sum(kinds.values()), job.corpus.bytes, kinds, note=f"{printed[3]} values")
