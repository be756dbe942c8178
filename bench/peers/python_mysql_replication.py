# SPDX-License-Identifier: Apache-2.0
"""python-mysql-replication (package `mysql-replication`): a replica in pure Python, over loopback."""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.row_event import DeleteRowsEvent, RowsEvent, UpdateRowsEvent, WriteRowsEvent

from bench.corpora.corpus import FILE_NAME
from bench.corpora.workload import DATABASE

from .peer import Job, Tally

TITLE = "python-mysql-replication"
_KINDS = {WriteRowsEvent: "insert", UpdateRowsEvent: "update", DeleteRowsEvent: "delete"}


def version() -> str:
    """Return the version of the package."""
    return metadata.version("mysql-replication")


def decode_stream(job: Job) -> Tally:
    """Read rows for at most `job.seconds_max` seconds.

    Undecodable text, which the wide table contains, is ignored.
    """
    return _follow(job, lambda event: None)


def encode_json(job: Job) -> Tally:
    """Decode each row and write it as one JSON object, as a program without a fixed message format would."""
    written = 0

    def write(event: RowsEvent) -> None:
        nonlocal written
        head = {"op": _KINDS[type(event)], "db": event.schema, "table": event.table, "ts": event.timestamp}
        for row in event.rows:
            images = {name: _plain(image) for name, image in row.items()}
            written += len(json.dumps({**head, **images}, default=str))

    tally = _follow(job, write)
    return replace(tally, note=f"{written / 1e6:,.0f} MB of JSON, {tally.note or 'the whole file'}")


def _plain(value: Any) -> Any:
    """Return a value that `json` accepts: the reader returns names in JSON columns as bytes."""
    if isinstance(value, dict):
        return {
            key.decode() if isinstance(key, bytes) else key: _plain(inner) for key, inner in value.items()
        }
    return [_plain(member) for member in value] if isinstance(value, list) else value


def _follow(job: Job, use: Callable[[RowsEvent], None]) -> Tally:
    stream = BinLogStreamReader(
        connection_settings={"host": "127.0.0.1", "port": job.port, "user": "root", "passwd": ""},
        server_id=4292,
        log_file=FILE_NAME,
        log_pos=4,
        resume_stream=True,
        only_events=list(_KINDS),
        only_schemas=[DATABASE],
        ignore_decode_errors=True,
        enable_logging=False,
    )
    kinds: Counter[str] = Counter(dict.fromkeys(_KINDS.values(), 0))
    deadline = time.monotonic() + (job.seconds_max or float("inf"))
    complete = True
    try:
        for event in stream:
            kinds[_KINDS[type(event)]] += len(event.rows)
            use(event)
            if time.monotonic() > deadline:
                complete = False
                break
        read = job.corpus.bytes if complete else stream.log_pos
    finally:
        stream.close()
    note = "" if complete else f"first {job.seconds_max:.0f} s"
    return Tally(kinds.total(), read, dict(kinds), complete, note)
