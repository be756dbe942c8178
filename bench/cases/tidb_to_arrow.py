# SPDX-License-Identifier: Apache-2.0
"""Transcode TiDB's payloads to a binlog, and decode that to Arrow, on one core."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.corpora.corpus import SIZES
from bench.corpora.tidb_payloads import ROWS_EACH, SCHEMA_VERSION, table_info, transactions
from bench.result import CaseResult, Line, Options, Target
from penstock import read_binlog
from penstock._native import TidbTranscoder, tidb_file_head

TITLE = "Payloads of TiDB to Arrow, one core (rates per second of CPU)"

_ROWS_PER_SECOND = 300_000
_FILE = "tidb-binlog.000001"


def run(options: Options) -> CaseResult:
    """Measure transcoding and decoding, and both in sequence."""
    received = [each.matched for each in transactions(SIZES[options.size])]
    rows = len(received) * ROWS_EACH
    with TemporaryDirectory() as folder:
        path = Path(folder, _FILE)
        transcoding = min(_seconds(lambda: _transcode(received, path)) for _ in range(options.repeat))
        decoding = min(_seconds(lambda: _decode(path, rows)) for _ in range(options.repeat))
    rates = {"transcode": transcoding, "decode": decoding, "both": transcoding + decoding}
    lines = [
        Line(
            "orders",
            subject,
            {"rows/s": rows / seconds, "payload MB/s": sum(map(len, received)) / 1e6 / seconds},
            ratio=rows / seconds / _ROWS_PER_SECOND if subject == "both" else None,
            target=Target(1) if subject == "both" else None,
            note=f"against {_ROWS_PER_SECOND:,} rows/s" if subject == "both" else "",
        )
        for subject, seconds in rates.items()
    ]
    return CaseResult("tidb_to_arrow", TITLE, lines, {})


def _seconds(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _transcode(received: list[bytes], path: Path) -> None:
    transcoder = TidbTranscoder(cluster_id=1, server_id=1)
    transcoder.define("shop", json.dumps(table_info()).encode(), SCHEMA_VERSION, 0)
    with path.open("wb") as file:
        file.write(tidb_file_head(server_id=1, time_s=0))
        for payload in received:
            for piece in transcoder.transaction([payload], file.tell()):
                file.write(piece)


def _decode(path: Path, rows: int) -> None:
    decoded = sum(len(batch) for batch in read_binlog(path))
    assert decoded == rows, f"{decoded} of {rows} rows"
