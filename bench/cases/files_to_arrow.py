# SPDX-License-Identifier: Apache-2.0
"""Decode a binlog file to Arrow on one core, compared with every other available decoder."""

from bench.corpora.corpus import Corpus, corpus
from bench.corpora.serve import serve
from bench.peers.peer import Job, Outcome, can_run, measure_all, peer
from bench.result import CaseResult, Line, Options, Target

TITLE = "Binlog file to Arrow, one core (rates per second of CPU)"

#: Peers in other languages, which are built if their tools are available.
_READERS = ("go_mysql", "mysql_binlog_connector_java")
_FILE_READERS = ("mysql_common",)

#: The targets for Penstock, by peer. The Python peers decode only a part of the file, because
#: they would need many minutes for all of it.
_TARGETS = {
    "mysqlbinlog_verbose": Target(8),
    "mysql_event_stream_native": Target(2),
    "mysql_event_stream_python": Target(10),
    "python_mysql_replication": Target(100),
    "server_rate": Target(1, aim=True),
    **dict.fromkeys((*_READERS, *_FILE_READERS), Target(1, aim=True)),
}


def run(options: Options) -> CaseResult:
    """Measure every decoder on every workload."""
    lines: list[Line] = []
    versions: dict[str, str] = {}
    for workload in options.workloads:
        outcomes = _measure(corpus(workload, options.size), options)
        versions |= {peer(outcome.peer).TITLE: outcome.version for outcome in outcomes}
        lines += _lines(outcomes)
    return CaseResult("files_to_arrow", TITLE, lines, versions)


def _measure(binlog: Corpus, options: Options) -> list[Outcome]:
    with serve(binlog) as server:
        job = Job(binlog, server.port)
        slice_of = Job(binlog, server.port, options.seconds_max)
        orders = [
            ("penstock", "decode_file", job),
            ("mysqlbinlog_verbose", "decode_file", job),
            ("mysql_event_stream_native", "decode_file", job),
            ("mysql_event_stream_python", "decode_file", slice_of),
            ("python_mysql_replication", "decode_stream", slice_of),
            ("server_rate", "receive_raw", job),
        ]
        orders += [(name, "decode_stream", job) for name in _READERS if not can_run(name)]
        orders += [(name, "decode_file", job) for name in _FILE_READERS if not can_run(name)]
        return measure_all(orders, options.repeat)


def _lines(outcomes: list[Outcome]) -> list[Line]:
    penstock_rate = outcomes[0].rows_per_second
    lines = []
    for outcome in outcomes:
        # The server's rate is measured by the clock, the rates of the other readers by the work of one core.
        by_clock = outcome.peer == "server_rate"
        rows = outcome.rows_per_second_wall if by_clock else outcome.rows_per_second
        megabytes = outcome.megabytes_per_second_wall if by_clock else outcome.megabytes_per_second
        target = _TARGETS.get(outcome.peer)
        lines.append(
            Line(
                outcome.workload,
                peer(outcome.peer).TITLE,
                {"rows/s": rows, "MB/s": megabytes, "s by the clock": outcome.seconds_wall},
                ratio=penstock_rate / rows if target else None,
                target=target,
                note="by the clock" if by_clock else outcome.note,
            )
        )
    return lines
