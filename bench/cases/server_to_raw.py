# SPDX-License-Identifier: Apache-2.0
"""Copy a binlog file from a live server, unchanged, compared with the server's own tool and with a bare
socket.
"""

from bench.corpora.corpus import corpus
from bench.corpora.serve import serve
from bench.peers.peer import Job, Outcome, measure_all, peer
from bench.result import CaseResult, Line, Options, Target

TITLE = "Live server to raw bytes in a file, client on one core (by the clock)"

_PEERS = ("penstock", "mysqlbinlog_raw", "server_rate")


def run(options: Options) -> CaseResult:
    """Measure every receiver on every workload, with ratios by the clock: the server limits the rate too."""
    lines: list[Line] = []
    versions: dict[str, str] = {}
    for workload in options.workloads:
        binlog = corpus(workload, options.size)
        with serve(binlog) as server:
            job = Job(binlog, server.port)
            outcomes = measure_all([(name, "receive_raw", job) for name in _PEERS], options.repeat)
        versions |= {peer(outcome.peer).TITLE: outcome.version for outcome in outcomes}
        lines += [_line(outcome, outcomes[0]) for outcome in outcomes]
    return CaseResult("server_to_raw", TITLE, lines, versions)


def _line(outcome: Outcome, penstock_outcome: Outcome) -> Line:
    target = {
        "mysqlbinlog_raw": Target(2.5, aim=outcome.workload != "narrow"),
        "server_rate": Target(1, aim=True),
    }.get(outcome.peer)
    ratio = penstock_outcome.megabytes_per_second_wall / outcome.megabytes_per_second_wall
    rates = {
        "MB/s": outcome.megabytes_per_second_wall,
        "rows/s": outcome.rows_per_second_wall,
        "MB per CPU second": outcome.megabytes_per_second,
    }
    return Line(
        outcome.workload, peer(outcome.peer).TITLE, rates, ratio if target else None, target, outcome.note
    )
