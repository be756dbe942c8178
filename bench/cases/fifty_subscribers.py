# SPDX-License-Identifier: Apache-2.0
"""The cost of fifty subscribers at the head, compared to one subscriber: the daemon decodes changes once and
shares them among all subscribers.
"""

import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.corpora.bulk import TRANSACTION_ROWS, WORKLOAD
from bench.corpora.corpus import SERVER_OPTIONS, SIZES, cache_directory, seed
from bench.corpora.workload import DATABASE
from bench.daemon import INSTANCE, Daemon, serving
from bench.followers import are_alike, following, sending_seconds
from bench.result import CaseResult, Line, Options, Target
from tools.servers import Server

TITLE = "Fifty subscribers at the head beside one (CPU of the daemon)"

_SUBSCRIBERS = 50
#: The cost of all subscribers may be at most this many times one subscriber's decoding, plus the sending.
_DECODES = 3
_TABLE = f"{DATABASE}.bulk"
_CALL_TRANSACTIONS = 10
_ROW_BYTES = 60
_PIECE_BYTES = 1 << 18
#: Fifty times more data is sent than logged, so a share of the size is enough load.
_SIZE_SHARE = 8
_CALLS_PER_SECOND = 8.0


@dataclass(frozen=True)
class _Cost:
    """The daemon's cost for the same load, and the bytes sent to each follower."""

    cpu_seconds: float
    bytes_each: int


def run(options: Options) -> CaseResult:
    """Run the same load with no, one and fifty followers, and subtract the cost of the capture."""
    folder = Path(tempfile.mkdtemp(prefix="bench-fifty-", dir=cache_directory()))
    try:
        with Server("mysql", SERVER_OPTIONS | {"innodb-buffer-pool-size": "256M"}) as server:
            with server.connect() as connection:
                seed(connection, WORKLOAD)
            calls = max(
                SIZES[options.size] // _SIZE_SHARE // (_CALL_TRANSACTIONS * TRANSACTION_ROWS * _ROW_BYTES), 2
            )
            with serving(folder, server.port, start="latest") as daemon:
                lines = _lines(server, daemon, calls, options.repeat)
            # In an orderly shutdown the server would wait for the disconnected replica.
            server.kill()
        return CaseResult("fifty_subscribers", TITLE, lines, ratio_title="the bound is")
    finally:
        shutil.rmtree(folder)


def _lines(server: Server, daemon: Daemon, calls: int, repeat: int) -> list[Line]:
    # The first run warms up the daemon, whose log is empty.
    _load(server, daemon, 1)
    _cost(server, daemon, 1, 1)
    rows = calls * _CALL_TRANSACTIONS * TRANSACTION_ROWS
    rounds = [[_cost(server, daemon, calls, count) for count in (0, 1, _SUBSCRIBERS)] for _ in range(repeat)]
    baseline, single, fifty = (
        statistics.median_low(each[index].cpu_seconds for each in rounds) for index in range(3)
    )
    sent = rounds[0][2].bytes_each
    sending = sending_seconds(sent, _SUBSCRIBERS, _PIECE_BYTES)
    # A difference below the resolution of process clocks counts as zero.
    cost_one, cost_fifty = max(single - baseline, 0.01), max(fifty - baseline, 0.01)
    bound = _DECODES * cost_one + sending

    def line(followers: str, seconds: float, target: Target | None = None, note: str = "") -> Line:
        rates = {"CPU s": seconds, "CPU µs per row sent": seconds / rows * 1e6}
        return Line("bulk", followers, rates, bound / seconds if target else None, target, note)

    note = f"{cost_fifty / cost_one:.1f} times one; {sent / 1e6:.1f} MB to each"
    return [
        line("1 subscriber", cost_one),
        line("sending alone, to 50", max(sending, 1e-3)),
        line(f"{_SUBSCRIBERS} subscribers", cost_fifty, Target(1), note),
    ]


def _cost(server: Server, daemon: Daemon, calls: int, count: int) -> _Cost:
    """Return the cost of a load with this many followers."""
    daemon.wait_for(*_head(server))
    if not count:
        return _Cost(_load(server, daemon, calls), 0)
    with following(daemon.ports["http"], INSTANCE, _TABLE, count) as sent:
        used = _load(server, daemon, calls)
    sizes = sent["bytes"]
    assert len(sizes) == count
    assert are_alike(sizes), f"not all were sent the same: {sizes}"
    return _Cost(used, int(statistics.median(sizes)))


def _load(server: Server, daemon: Daemon, calls: int) -> float:
    """Commit rows at a steady rate; return the daemon's CPU seconds until they have been sent."""
    cpu_before = daemon.cpu_seconds()
    due = time.monotonic()
    with server.connect() as connection, connection.cursor() as cursor:
        for _ in range(calls):
            time.sleep(max(0.0, due - time.monotonic()))
            cursor.execute(f"CALL {DATABASE}.bulk_fill({_CALL_TRANSACTIONS})")
            due += 1 / _CALLS_PER_SECOND
    daemon.wait_for(*_head(server))
    time.sleep(0.5)
    return daemon.cpu_seconds() - cpu_before


def _head(server: Server) -> tuple[str, int]:
    row = server.sql("SHOW BINARY LOG STATUS")[0]
    return str(row[0]), int(row[1])
