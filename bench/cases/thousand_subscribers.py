# SPDX-License-Identifier: Apache-2.0
"""The daemon's CPU time for a thousand subscribers at 200 rows a second each, and for 256 shards."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.corpora.bulk import POOL_ROWS, WORKLOAD
from bench.corpora.corpus import SERVER_OPTIONS, cache_directory, seed
from bench.corpora.workload import DATABASE
from bench.daemon import INSTANCE, Daemon, serving
from bench.followers import following
from bench.result import CaseResult, Line, Options, Target
from tools.servers import Server

TITLE = "A thousand subscribers at the head, 200 rows a second to each (CPU of the daemon)"

_TABLE = f"{DATABASE}.bulk"
_ROWS_PER_SECOND = 200
_SECONDS_MAX = 15.0
_SECONDS_OF_REHEARSAL = 1.0
_SETTLING_SECONDS = 1.0
_COLUMNS = "user_id, amount, state, note"


@dataclass(frozen=True)
class _Load:
    """Followers of a table, in this many shards, and the rows of each transaction."""

    title: str
    followers: int
    shards: int
    transaction_rows: int

    @property
    def rows_per_second(self) -> int:
        """The rows per second that the server must commit so that each follower gets its share."""
        return _ROWS_PER_SECOND * self.shards


_LOADS = (
    _Load("1,000 subscribers of all rows, one row per transaction", 1000, 1, 1),
    _Load("1,000 subscribers of all rows, ten rows per transaction", 1000, 1, 10),
    _Load("256 subscribers of a shard each, 256 rows per transaction", 256, 256, 256),
)


def run(options: Options) -> CaseResult:
    """Measure each load, and subtract the daemon's cost for the same load without followers."""
    seconds = _SECONDS_OF_REHEARSAL if options.size == "tiny" else min(options.seconds_max, _SECONDS_MAX)
    folder = Path(tempfile.mkdtemp(prefix="bench-thousand-", dir=cache_directory()))
    try:
        with Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "256M"}) as server:
            with server.connect() as connection:
                seed(connection, WORKLOAD)
            with serving(folder, server.port, start="latest") as daemon:
                # The first run warms up the daemon, whose log is empty.
                _used(server, daemon, _LOADS[0], _SECONDS_OF_REHEARSAL)
                lines = [_line(server, daemon, load, seconds, options.repeat) for load in _LOADS]
            # In an orderly shutdown the server would wait for the disconnected replica.
            server.kill()
        return CaseResult("thousand_subscribers", TITLE, lines, ratio_title="the bound of one core is")
    finally:
        shutil.rmtree(folder)


def _line(server: Server, daemon: Daemon, load: _Load, seconds: float, repeat: int) -> Line:
    shares = [_round(server, daemon, load, seconds) for _ in range(repeat)]
    alone, followed, sent = (statistics.median(column) for column in zip(*shares, strict=True))
    # A difference below the resolution of process clocks counts as zero.
    core = max(followed - alone, 0.01)
    rates = {
        "cores": core,
        "rows/s to each": load.rows_per_second / load.shards,
        "MB/s sent": sent / 1e6,
        "CPU µs per row sent": core * 1e6 / (load.followers * _ROWS_PER_SECOND),
    }
    return Line("bulk", load.title, rates, 1 / core, Target(1), f"the capture alone: {alone:.2f} cores")


def _round(server: Server, daemon: Daemon, load: _Load, seconds: float) -> tuple[float, float, float]:
    """Return the cores that the daemon uses without and with followers, and the bytes sent in a second."""
    alone = _used(server, daemon, load, seconds)
    with following(daemon.ports["http"], INSTANCE, _TABLE, load.followers, load.shards) as sent:
        followed = _used(server, daemon, load, seconds)
    sizes: Sequence[int] = sent["bytes"]
    assert len(sizes) == load.followers
    return alone, followed, sum(sizes) / seconds


def _used(server: Server, daemon: Daemon, load: _Load, seconds: float) -> float:
    """Commit rows at the load's rate; return the cores that the daemon used for them."""
    transactions = round(load.rows_per_second / load.transaction_rows * seconds)
    cpu_before, begun = daemon.cpu_seconds(), time.monotonic()
    with server.connect(autocommit=True) as connection, connection.cursor() as cursor:
        for number in range(transactions):
            time.sleep(max(0.0, begun + number * seconds / transactions - time.monotonic()))
            _insert(cursor, number, load.transaction_rows)
    daemon.wait_for(*_head(server))
    # Wait until the followers' last pieces have been sent.
    time.sleep(_SETTLING_SECONDS)
    return (daemon.cpu_seconds() - cpu_before) / seconds


def _insert(cursor: Any, number: int, rows: int) -> None:
    first = 1 + number * rows % (POOL_ROWS - rows)
    cursor.execute(
        f"INSERT INTO {_TABLE} ({_COLUMNS}) SELECT {_COLUMNS} FROM {_TABLE}_pool WHERE id >= %s AND id < %s",
        (first, first + rows),
    )


def _head(server: Server) -> tuple[str, int]:
    row = server.sql("SHOW BINARY LOG STATUS")[0]
    return str(row[0]), int(row[1])
