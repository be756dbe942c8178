# SPDX-License-Identifier: Apache-2.0
"""mysql-event-stream through its Python API: feed the file's bytes, get an event object per row."""

import time
from importlib import metadata

from mysql_event_stream import CdcEngine, EventType

from .peer import Job, Tally

TITLE = "mysql-event-stream, Python API"
CHUNK_BYTES = 1 << 16
_MAGIC_BYTES = 4


def version() -> str:
    """Return the version of the package."""
    return metadata.version("mysql-event-stream")


def decode_file(job: Job) -> Tally:
    """Decode the file, or as much of it as `job.seconds_max` seconds allow."""
    counts = dict.fromkeys(EventType, 0)
    deadline = time.monotonic() + (job.seconds_max or float("inf"))
    fed = _MAGIC_BYTES
    complete = True
    with CdcEngine() as engine, open(job.corpus.path, "rb") as file:
        file.seek(_MAGIC_BYTES)
        while chunk := file.read(CHUNK_BYTES):
            while chunk:
                consumed = engine.feed(chunk)
                while event := engine.next_event():
                    counts[event.type] += 1
                fed += consumed
                chunk = chunk[consumed:]
            if time.monotonic() > deadline:
                complete = False
                break
    kinds = {kind.name.lower(): count for kind, count in counts.items()}
    note = "" if complete else f"first {job.seconds_max:.0f} s"
    return Tally(sum(kinds.values()), fed, kinds, complete, note)
