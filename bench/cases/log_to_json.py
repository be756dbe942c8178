# SPDX-License-Identifier: Apache-2.0
"""Write a file's changes as JSON in each dialect on one core, compared with a Python reader that uses
`json`.
"""

from bench.corpora.corpus import Corpus, corpus
from bench.corpora.serve import serve
from bench.peers.peer import Job, Outcome, can_run, measure_all, peer
from bench.result import CaseResult, Line, Options, Target

TITLE = "Changes as JSON, one core (rates per second of CPU)"

_DIALECTS = ("encode_debezium", "encode_maxwell", "encode_canal_flat")
_PEER = "python_mysql_replication"
_TARGET = Target(5)
#: Readers that decode rows and write nothing.
_READERS = ("go_mysql", "mysql_binlog_connector_java")


def run(options: Options) -> CaseResult:
    """Measure every dialect on every workload. The targets are multiples of the peer's rate."""
    lines: list[Line] = []
    versions: dict[str, str] = {}
    for workload in options.workloads:
        outcomes = _measure(corpus(workload, options.size), options)
        versions |= {peer(outcome.peer).TITLE: outcome.version for outcome in outcomes}
        lines += _lines(outcomes)
    missing = {peer(name).TITLE: why for name in _READERS if (why := can_run(name))}
    return CaseResult("log_to_json", TITLE, lines, versions | missing, ratio_title="faster than Python's")


def _measure(binlog: Corpus, options: Options) -> list[Outcome]:
    with serve(binlog) as server:
        orders = [("penstock", verb, Job(binlog, server.port)) for verb in _DIALECTS]
        # The whole file takes many minutes, so the peer processes a part of it.
        orders.append((_PEER, "encode_json", Job(binlog, server.port, options.seconds_max)))
        orders += [
            (name, "decode_stream", Job(binlog, server.port)) for name in _READERS if not can_run(name)
        ]
        return measure_all(orders, options.repeat)


def _lines(outcomes: list[Outcome]) -> list[Line]:
    peer_rate = next(outcome for outcome in outcomes if outcome.peer == _PEER).rows_per_second
    lines = []
    for outcome in outcomes:
        is_penstock = outcome.peer == "penstock"
        title = peer(outcome.peer).TITLE
        lines.append(
            Line(
                outcome.workload,
                f"{title}, {outcome.verb.removeprefix('encode_').replace('decode_stream', 'rows only')}",
                {"rows/s": outcome.rows_per_second, "binlog MB/s": outcome.megabytes_per_second},
                ratio=outcome.rows_per_second / peer_rate if is_penstock else None,
                target=_TARGET if is_penstock else None,
                note=outcome.note,
            )
        )
    return lines
