# SPDX-License-Identifier: Apache-2.0
"""Read a binlog file with Spark into the `noop` sink, with one task at a time and with two."""

import os
from dataclasses import replace
from importlib import metadata

from bench.corpora.corpus import Corpus, check_rows, corpus
from bench.result import CaseResult, Line, Options, Target
from bench.spark_process import SparkOutcome, spark

TITLE = "Binlog file to Spark's noop sink (rates by the clock)"

#: The workload, and its table with the most rows.
_WORKLOAD, _TABLE = "wide", "bench.wide"
_ROWS_PER_SECOND_TARGET = 1_000_000
# The columns that are read, of thirty-four: ten, or all except `_metadata`.
_SYSTEM = ("_change_type", "_commit_version", "_commit_timestamp")
_TEN = ("id", "c01", "c03", "c06", "c11", "c17", "c18", *_SYSTEM)
_OWN = ("id", *(f"c{number:02}" for number in range(1, 30)), *_SYSTEM)
_OVERLAP = "one task uses two cores: JVM and worker overlap"


def run(options: Options) -> CaseResult:
    """Measure `local[2]`, `local[1]`, and `local[1]` with a single core for the JVM and its Python worker.

    Even with a single task, the JVM and the worker run in parallel on two cores, so the line for a single
    core shows how much a second core contributes. Except for the line of the first read, every session has
    already read the file once.
    """
    binlog = corpus(_WORKLOAD, options.size)
    two = _median(binlog, "local[2]", options)
    rate = binlog.rows / two.seconds
    lines = [
        Line(_WORKLOAD, "local[2]", _rates(binlog, two)),
        Line(
            _WORKLOAD,
            "local[2], a session's first read",
            _rates(binlog, _first(two)),
            _first(two).seconds / two.seconds,
            note="the JVM compiles meanwhile",
        ),
        *_lines_of_one_task(binlog, two, options),
        Line(
            _WORKLOAD,
            "the rate to reach",
            {"rows/s": _ROWS_PER_SECOND_TARGET},
            rate / _ROWS_PER_SECOND_TARGET,
            Target(1),
        ),
    ]
    return CaseResult(
        "files_to_spark_noop", TITLE, lines, {"pyspark": metadata.version("pyspark")}, "local[2] is"
    )


def _lines_of_one_task(binlog: Corpus, two: SparkOutcome, options: Options) -> list[Line]:
    """Measure one task on two cores and on a single core.

    A rehearsal only measures the last line, on two cores, because the JVM takes half a minute to start on a
    single core.
    """
    rehearsed = options.size == "tiny"
    core = None if rehearsed else {max(os.sched_getaffinity(0))}
    ten = _median(binlog, "local[1]", options, core, _TEN)
    lines = [Line(_WORKLOAD, "same, ten of the columns", _rates(binlog, ten), ten.seconds / two.seconds)]
    if rehearsed:
        return lines
    one_core = _median(binlog, "local[1]", options)
    confined = _median(binlog, "local[1]", options, core)
    plain = _median(binlog, "local[1]", options, core, _OWN)
    return [
        Line(
            _WORKLOAD,
            "local[1]",
            _rates(binlog, one_core),
            one_core.seconds / two.seconds,
            Target(1.7),
            _OVERLAP,
        ),
        Line(_WORKLOAD, "local[1] on one core", _rates(binlog, confined), confined.seconds / two.seconds),
        Line(_WORKLOAD, "same, without _metadata", _rates(binlog, plain), plain.seconds / two.seconds),
        *lines,
    ]


def _median(
    binlog: Corpus,
    master: str,
    options: Options,
    cores: set[int] | None = None,
    columns: tuple[str, ...] | None = None,
) -> SparkOutcome:
    chosen = {} if columns is None else {"columns": ",".join(columns)}
    order = {
        "verb": "files_to_noop",
        "master": master,
        # A file of 100 MB would be a single range, and a single task.
        "options": {"tables": _TABLE, "minPartitions": "2", **chosen},
        "path": str(binlog.path),
        "warm_path": str(corpus(_WORKLOAD, "tiny").path),
    }
    outcomes = sorted(
        (spark(order, cores) for _ in range(options.repeat)), key=lambda outcome: outcome.seconds
    )
    for outcome in outcomes:
        check_rows(f"Spark on {master}", outcome.rows, binlog.rows_by_table[_TABLE], binlog)
    return outcomes[(len(outcomes) - 1) // 2]


def _first(outcome: SparkOutcome) -> SparkOutcome:
    """Return the session's first read of the same file."""
    assert outcome.first is not None, "the file was read twice"
    seconds, seconds_cpu = outcome.first
    return replace(outcome, seconds=seconds, seconds_cpu=seconds_cpu)


def _rates(binlog: Corpus, outcome: SparkOutcome) -> dict[str, float]:
    return {
        "rows/s": outcome.rows / outcome.seconds,
        "MB/s": binlog.bytes / outcome.seconds / 1e6,
        "rows per CPU second": outcome.rows / outcome.seconds_cpu,
        "seconds": outcome.seconds,
    }
