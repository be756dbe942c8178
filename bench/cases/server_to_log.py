# SPDX-License-Identifier: Apache-2.0
"""Capture a live server into the log, compared with the server's own tool on the same disk and with a bare
socket.
"""

from bench.corpora.corpus import corpus
from bench.corpora.serve import serve
from bench.peers.peer import Job, Outcome, measure_all, peer
from bench.result import CaseResult, Line, Options, Target

TITLE = "Live server into the log on the disk, client on one core (by the clock)"

_COPIES = 4
#: The log's targets, by workload and peer: twice the tool's rate for small transactions, and three quarters
#: of the socket's rate for large events.
_TARGETS = {("narrow", "mysqlbinlog_raw"): Target(2), ("wide", "server_rate"): Target(0.75)}


def run(options: Options) -> CaseResult:
    """Measure the log, with one and with four copies, and its peers, on every workload."""
    lines: list[Line] = []
    versions: dict[str, str] = {}
    for workload in options.workloads:
        binlog = corpus(workload, options.size)
        with serve(binlog) as server:
            single_job = Job(binlog, server.port, on_disk=True)
            four = Job(binlog, server.port, on_disk=True, copies=_COPIES)
            orders = [
                ("penstock", "capture_log", single_job),
                ("mysqlbinlog_raw", "receive_raw", single_job),
                ("server_rate", "receive_raw", single_job),
                ("penstock", "capture_log", four),
            ]
            outcomes = measure_all(orders, options.repeat)
        versions |= {peer(outcome.peer).TITLE: outcome.version for outcome in outcomes}
        lines += [_line(outcome, outcomes[0]) for outcome in outcomes[:-1]]
        lines.append(_line(outcomes[-1], outcomes[0], f"{_COPIES} instances of one server at once"))
    return CaseResult("server_to_log", TITLE, lines, versions)


def _line(outcome: Outcome, penstock_outcome: Outcome, note: str = "") -> Line:
    target = _TARGETS.get((outcome.workload, outcome.peer))
    ratio = None
    if outcome.peer != penstock_outcome.peer:
        ratio = penstock_outcome.megabytes_per_second_wall / outcome.megabytes_per_second_wall
    rates = {
        "MB/s": outcome.megabytes_per_second_wall,
        "rows/s": outcome.rows_per_second_wall,
        "CPU s per GB": outcome.seconds_cpu / (outcome.bytes / 1e9),
    }
    return Line(outcome.workload, peer(outcome.peer).TITLE, rates, ratio, target, note or outcome.note)
