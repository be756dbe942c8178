# SPDX-License-Identifier: Apache-2.0
"""mysql-event-stream's C++ core alone, driven by `mysql_event_stream_native.c`, compiled on first use."""

import hashlib
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import mysql_event_stream

from bench.corpora.corpus import cache_directory

from .peer import Job, PeerFailed, Tally

TITLE = "mysql-event-stream, C++ core"
_SOURCE = Path(__file__).with_suffix(".c")
_LIBRARY = Path(mysql_event_stream.__file__).with_name("libmes.so")


def version() -> str:
    """Return the version of the package."""
    return metadata.version("mysql-event-stream")


def _driver() -> Path:
    """Return the compiled driver; compile it first if its source has changed."""
    name = f"mysql-event-stream-driver-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]}"
    built = cache_directory() / name
    if not built.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            raise PeerFailed("peer mysql_event_stream_native needs a C compiler: install gcc")
        part = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-o", str(part), str(_SOURCE), "-ldl"], check=True)
        part.rename(built)
    return built


def prepare() -> None:
    """Compile the driver."""
    _driver()


def decode_file(job: Job) -> Tally:
    """Decode the whole file and touch every column of every row."""
    argv = [str(_driver()), str(_LIBRARY), str(job.corpus.path)]
    printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    kinds = dict(zip(("insert", "update", "delete"), map(int, printed[:3]), strict=True))
    return Tally(sum(kinds.values()), job.corpus.bytes, kinds, note=f"checksum {printed[3]}")
