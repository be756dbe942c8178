# SPDX-License-Identifier: Apache-2.0
"""Read a binlog file with Spark: all columns, a few columns, or only some rows. Spark's Parquet scan of the
same rows is measured beside it.
"""

from importlib import metadata
from typing import Any

from bench.corpora.corpus import check_rows, corpus
from bench.result import CaseResult, Line, Options, Target
from bench.spark_process import spark

TITLE = "Scans of a binlog file by Spark, local[2], warm, into the noop sink (rates by the clock)"

_WORKLOAD, _TABLE = "wide", "bench.wide"
_THREE = ["id", "c03", "_change_type"]
_KEYS = "id BETWEEN 1000 AND 1999"
_READS: dict[str, dict[str, Any]] = {
    "all columns": {},
    "three columns by the option": {"options": {"columns": ",".join(_THREE)}},
    "three columns by select": {"select": _THREE},
    "rows of a range of keys": {"where": _KEYS},
    "rows of a range of keys, not pushed down": {"where": _KEYS, "pushed": False},
}
_TRIGGERS = 10
_THREE_COLUMNS = "three columns by the option"
_KERNEL_ALONE = f"{_THREE_COLUMNS}, kernel alone"


def run(options: Options) -> CaseResult:
    """Measure every scan in one session, in turn. Rates count the file's rows, whether they pass or not."""
    binlog = corpus(_WORKLOAD, options.size)
    order = {
        "verb": "scans_to_noop",
        "master": "local[2]",
        "options": {"tables": _TABLE, "minPartitions": "2"},
        "path": str(binlog.path),
        "reads": _READS,
        "kernel": ["all columns", _THREE_COLUMNS],
        "triggers": _TRIGGERS,
        "repeat": options.repeat,
    }
    outcome = spark(order)
    assert outcome.scans is not None, "the scans were measured"
    for name, (_, rows) in outcome.scans.items():
        if "where" not in _READS.get(name, {}):
            check_rows(f"Spark, {name}", rows, binlog.images, binlog)
    rates = {name: binlog.images / seconds for name, (seconds, _) in outcome.scans.items()}
    everything, three = rates["all columns"], rates[_THREE_COLUMNS]
    ratios = {
        "parquet": (
            everything / rates["parquet"],
            Target(0.8),
            "all columns, of Spark's Parquet scan of them",
        ),
        "stream": (rates["stream"] / everything, Target(0.8), f"{_TRIGGERS} triggers, of all columns"),
        "parquet stream": (
            rates["parquet stream"] / rates["parquet"],
            None,
            f"{_TRIGGERS} triggers, of Spark's Parquet scan",
        ),
        _THREE_COLUMNS: (three / everything, Target(1.5), "of all columns"),
        _KERNEL_ALONE: (three / rates[_KERNEL_ALONE], Target(0.6), "three columns in Spark, of this"),
    }
    lines = []
    for name, rate in rates.items():
        ratio, target, note = ratios.get(name, (rate / everything, None, "of all columns"))
        lines.append(Line(_WORKLOAD, name, {"rows/s": rate}, ratio, target, note))
    return CaseResult("files_to_spark_scans", TITLE, lines, {"pyspark": metadata.version("pyspark")}, "ratio")
