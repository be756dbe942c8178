# SPDX-License-Identifier: Apache-2.0
"""The page of costs, computed from the benchmarks' results: what a billion changes cost on each path, and
which targets are missed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.document.markdown import document, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"

Rates = dict[str, float]


@dataclass(frozen=True)
class Route:
    """A path that changes take, with the lines of the case that measured it and the meaning of their rates.

    `cpu_seconds` is the CPU time per change, None if the run did not measure it. `log_bytes` and `written`
    are bytes read from the log and bytes written, per change. They are None if the case does not measure
    them.
    """

    title: str
    case: str
    subject: str
    cpu_seconds: Callable[[Rates], float | None]
    log_bytes: Callable[[Rates], float] | None = None
    written: Callable[[Rates], float] | None = None
    sent: Callable[[Rates], float] | None = None


def _log_bytes(rates: Rates) -> float:
    return rates["MB/s"] * 1e6 / rates["rows/s"]


def _binlog_bytes(rates: Rates) -> float:
    return rates["binlog MB/s"] * 1e6 / rates["rows/s"]


def _cpu_of_decoder(rates: Rates) -> float:
    return 1 / rates["rows/s"]


def _cpu_of_spark(rates: Rates) -> float:
    return 1 / rates["rows per CPU second"]


def _zero(_rates: Rates) -> float:
    return 0.0


def _cpu_of(title: str) -> Callable[[Rates], float | None]:
    """Return a function that converts a rate in microseconds to CPU seconds."""
    return lambda rates: rates[title] / 1e6 if title in rates else None


def _target(title: str, case: str, subject: str) -> tuple[Route, Route]:
    """Return the routes of decoded rows to a target: the cost in Penstock, and the cost in the target's
    server.
    """
    return (
        Route(f"decoded rows → {title}: Penstock", case, subject, _cpu_of("µs of client CPU per row"), _zero),
        Route(
            f"decoded rows → {title}: its server", case, subject, _cpu_of("µs of server CPU per row"), _zero
        ),
    )


ROUTES = (
    Route(
        "live server → durable log",
        "server_to_log",
        "Penstock",
        lambda rates: rates["CPU s per GB"] * _log_bytes(rates) / 1e9,
        _log_bytes,
        written=_log_bytes,
        sent=lambda rates: 0,
    ),
    Route("binlog file → Arrow", "files_to_arrow", "Penstock", _cpu_of_decoder, _log_bytes, lambda rates: 0),
    Route(
        "binlog file → Spark, all columns",
        "files_to_spark_noop",
        "local[2]",
        _cpu_of_spark,
        _log_bytes,
        lambda rates: 0,
    ),
    Route(
        "binlog file → Debezium's JSON", "log_to_json", "Penstock, debezium", _cpu_of_decoder, _binlog_bytes
    ),
    Route("binlog file → Maxwell's JSON", "log_to_json", "Penstock, maxwell", _cpu_of_decoder, _binlog_bytes),
    Route(
        "log → subscriber: the daemon",
        "log_to_subscriber",
        "subscriber",
        lambda rates: 1 / rates["rows/s of daemon CPU"],
        _binlog_bytes,
        written=lambda rates: 0,
    ),
    Route(
        "log → subscriber: the client",
        "log_to_subscriber",
        "subscriber",
        lambda rates: 1 / rates["rows/s of client CPU"],
        lambda rates: 0,
        written=lambda rates: 0,
    ),
    Route(
        "log → client of Canal: the daemon",
        "log_to_canal",
        "Penstock to the least client, C",
        lambda rates: 1 / rates["rows/s of its CPU"],
        written=_zero,
        sent=lambda rates: rates["MB/s sent"] * 1e6 / rates["rows/s"],
    ),
    Route(
        "log → a thousand subscribers, for each of them: the daemon",
        "thousand_subscribers",
        "1,000 subscribers of all rows, ten rows per transaction",
        _cpu_of("CPU µs per row sent"),
        written=_zero,
    ),
    *_target("MySQL", "rows_to_databases", "mysql: Penstock, connections: 2"),
    *_target("PostgreSQL", "rows_to_databases", "postgres: Penstock"),
    *_target("ClickHouse", "rows_to_stores", "clickhouse: Penstock"),
    *_target("Elasticsearch", "rows_to_stores", "elasticsearch: Penstock"),
    *_target("MongoDB", "rows_to_stores", "mongodb: Penstock"),
    *_target("Kafka", "rows_to_stores", "kafka: Penstock"),
    Route(
        "updates → mirror in Delta or Iceberg",
        "changes_to_lake",
        "Penstock",
        _cpu_of("µs of CPU per row"),
        _zero,
        written=lambda rates: rates["bytes written per row"],
    ),
)


@dataclass(frozen=True)
class Measurement:
    """The newest result of a case."""

    page: str
    commit: str
    lines: list[dict[str, Any]]


def page() -> str:
    """Return the page."""
    measured = measurements(RESULTS)
    head = (
        "What 1,000,000,000 row changes cost, by path and by shape of the rows: CPU seconds of all\n"
        "processes on the path except the server, and bytes in GB (10⁹), without the log's index, which has\n"
        "0.2 % of its bytes. An update counts as one change. Each line comes from the newest run of its\n"
        "benchmark, which names the machine and the command. An empty cell was not measured."
    )
    columns = ("path", "rows", "CPU seconds", "log received or read", "written", "sent", "measured in")
    return document(
        "What a billion changes cost",
        "bench/results",
        head,
        table(columns, rows(measured)),
        _SHAPES,
        *_targets(measured),
        _LIMITS,
    )


def _targets(measured: dict[str, Measurement]) -> Iterator[str]:
    lines = [line for measurement in measured.values() for line in measurement.lines if line.get("target")]
    promised = [line for line in lines if not line["target"]["aim"]]
    missed = list(missed_targets(measured))
    yield (
        "## Targets that are missed\n\n"
        f"The benchmarks state {len(promised)} targets. The newest run of each benchmark met\n"
        f"{len(promised) - len(missed)} of them, and missed these. 0.9 in the column `reached` is nine\n"
        "tenths of the target."
    )
    yield table(("benchmark", "rows", "line", "reached", "note", "measured in"), missed)


def missed_targets(measured: dict[str, Measurement]) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each target that the newest run of its benchmark missed."""
    for case, measurement in sorted(measured.items()):
        for line in measurement.lines:
            target = line.get("target")
            if not target or target["aim"] or line["ratio"] >= target["ratio"]:
                continue
            yield (
                f"`{case}`",
                line["workload"],
                line["subject"],
                f"{line['ratio'] / target['ratio']:.2f}",
                line["note"],
                _link(measurement),
            )


def _link(measurement: Measurement) -> str:
    return f"[{measurement.commit}](../../bench/results/{measurement.page})"


_SHAPES = (
    "`narrow`: single-row transactions. `wide`: 30 columns, 200 rows per transaction. `tpcc`: about 18 rows\n"
    "over nine tables per transaction. `bulk`: rows of 60 bytes, 500 per transaction. `purchases`: new rows\n"
    "of ten columns.\n"
    "[The benchmarks](../../bench/README.md) describe them."
)


_LIMITS = (
    "## What limits the head of a log\n"
    "\n"
    "**From a commit to a callback.** `python -m bench commit_to_callback --size tiny --repeat 1\n"
    "--seconds-max 5` shows the time of each stage from one trace. On two cores of an Intel Xeon, which\n"
    "ran the server, its clients and other work too, four runs of the code of commit 46c2f09c reached p50\n"
    "3.0 to 4.2 ms and p99 7.6 to 15 ms at 2,000 transactions/s into four shards (targets: 2.5 and 10). A\n"
    "statement with its commit took 0.4 ms (p50) and 1.8 ms (p99). In the slowest run, the median\n"
    "transaction was received 0.4 ms after its commit, visible after 0.6, decoded after 1.6, sent after\n"
    "2.1, received by the client after 2.8, and in the callback after 4.2. A view's next piece waits up to\n"
    "1 ms. The capture and the event loop share one interpreter, and take turns at each call that releases\n"
    "it; so do the threads of a subscriber. The daemon and the subscriber use 0.5 ms of CPU time per\n"
    "transaction, half of both cores.\n"
    "\n"
    "Commit e1855a6c has less work for each piece: the daemon encodes a short piece in the event loop\n"
    "also after a long one, before by pyarrow in another thread, and a subscriber keeps the schemas that\n"
    "it has read. No quiet run of it is recorded here. Of two interleaved pairs with commit 6139d0c0,\n"
    "beside other work, the one with the lower load (12) gave 152 µs of CPU time per transaction in the\n"
    "daemon (before: 301), 98 in the subscriber (156), 0.7 ms from decoding to sending (1.7), and a p50\n"
    "of 4.3 ms (6.2). In the other, the machine stalled for up to 0.2 s. At load 16 to 19, runs of one\n"
    "commit differed more than the commits. With 300 in place of 2,000 transactions/s, eight pairs (load\n"
    "14 to 20) gave medians of 492 µs in the subscriber (before: 584), and no difference in the daemon\n"
    "beyond that of its runs (803 and 759), whose pieces are never long there. What is left for a piece\n"
    "is mostly Python's, apart from the encoding: for 8 rows, the schema and the rows take 60 µs, and\n"
    "ordering them by shard 55, which the daemon leaves out for fewer than 5 rows.\n"
    "\n"
    "**From a commit to Redis.** `python -m bench commit_to_redis --size tiny --repeat 1 --seconds-max 6`\n"
    "on the same kind of machine, three runs at commit 27251426: p50 3.5, 4.0 and 5.2 ms, p99 11 to 35 ms\n"
    "at 1,000 transactions/s (target: p50 3). Without the stream of the newest bytes, which begins with a\n"
    "request for `bytes?follow=`, runs in between reached p50 4.5, 5.4 and 6.2 ms. The pipeline read the\n"
    "median transaction's batch after 1.9 to 2.8 ms, mostly because the batch before was still running,\n"
    "and took 1.6 to 2.4 ms more to decode and write it. At 150 transactions/s beside other work (load 10\n"
    "to 20), five interleaved pairs gave 1.9 ms of CPU time for a transaction, both at commit 6139d0c0\n"
    "and at e6be12f9, which renders keys and values without Arrow's functions.\n"
    "\n"
    "**From the server into the log.** `python -m bench server_to_log --size 1GB --repeat 3 --seconds-max\n"
    "5` at commit 46c2f09c: 0.84 (narrow), 0.67 (wide) and 1.06 (tpcc) of the server's own sending rate,\n"
    "with 1.44, 0.75 and 0.92 CPU seconds per GB (targets: 0.8, and 1.2, 1.0, 1.2). With `--repeat 2` at\n"
    "commit 6139d0c0, also on two cores of an Intel Xeon: 0.81, 0.74 and 0.98, with 1.89, 0.91 and 1.03.\n"
    "One thread receives, checks and appends. Wide rows arrive faster than one core can copy them out of\n"
    "the socket and into the page cache. Narrow rows cost the parsing of an event and its checksum for\n"
    "every 200 bytes. Of the CPU time of that thread, sampled with `perf record -e cpu-clock` in captures\n"
    "of 1 GB at commit 6139d0c0 beside other work, which makes the appends smaller, the share of each part:\n"
    "\n"
    "| | narrow | wide |\n"
    "| --- | --- | --- |\n"
    "| copying into the page cache | 13% | 18% |\n"
    "| copying out of the socket | 8% | 13% |\n"
    "| the rest of the operating system | 21% | 30% |\n"
    "| checksums | 10% | 7% |\n"
    "| parsing events and counting rows | 28% | 9% |\n"
    "| copying events into buffers for readers | 7% | 9% |\n"
    "| Python and NumPy, a part for each append | 12% | 13% |\n"
    "\n"
    "**From a file into Arrow.** `python -m bench files_to_arrow --size 1GB --repeat 1 --seconds-max 2` at\n"
    "commit 6139d0c0 on two cores of an Intel Xeon: one core decodes 381 (narrow), 677 (wide) and 528 MB\n"
    "(tpcc) per CPU second, 0.65, 0.45 and 0.65 of the server's sending rate (target: 1). On an AMD EPYC at\n"
    "commit 2ba1442 it was 1.69, 0.71 and 1.14. The server sends about as fast on both, while most decoders\n"
    "of the benchmark take about twice the CPU time on the Xeon. Since then, `_native` runs 73.5 million\n"
    "instead of 90.8 million instructions for the 10,000 wide rows of `--size tiny`, without those of the\n"
    "C library (`valgrind --tool=callgrind python` with a loop over `read_binlog`). Of the instructions of\n"
    "`Decoder.feed` with those functions, 35% write the text of a JSON document in each row, 51% read and\n"
    "append the other 29 values, 5% build system columns, and 5% are checksums, for which the emulated\n"
    "processor lacks the widest instructions. A wide row takes 8,480 instructions (10,390 before). To\n"
    "decode as fast as the server sends on the Xeon, it may take about 4,700 at the same speed.\n"
    "\n"
    "## What limits a pipeline\n\n"
    "**Many small tables.** A full load counts the rows of 50 tables by one statement, and sends up to\n"
    "32 queries before it reads the first answer. The tables of a task share the waits for the disk, and so\n"
    "do the log entries of all Delta tables of a batch. `python -m bench many_tables_to_files --size 1GB\n"
    "--repeat 1`, 5,000 tables of 10 rows on two otherwise idle cores of an Intel Xeon, gave at commit\n"
    "6139d0c0:\n\n"
    "| | seconds | target | CPU seconds, with the start |\n| --- | --- | --- | --- |\n"
    "| load into `files` | 12.8 | 10 | 14.4 |\n"
    "| a change of every table, `files` | 9.9 | 10 | 18.5 |\n"
    "| a change of 50 tables, `files` | 0.5 | 2 | 5.5 |\n"
    "| load into Delta; `write_deltalake` alone: 12.0 | 24.1 | 18.1 | 30.3 |\n"
    "| a change of every table, Delta | 31.0 | 10 | 54.5 |\n"
    "| a change of 50 tables, Delta | 0.9 | 2 | 19.6 |\n\n"
    "Since then, Penstock writes the first entry of a Delta table's log itself, and a start reads and\n"
    "writes less. 1,000 tables (`--size 100MB`) took these CPU seconds, with the start, in two\n"
    "interleaved runs of both commits beside other work (load 5 to 16):\n\n"
    "| | 6139d0c0 | cc98cf6f |\n| --- | --- | --- |\n"
    "| load into `files` | 4.8, 5.4 | 3.8, 4.6 |\n"
    "| a change of every table, `files` | 4.5, 4.1 | 3.1, 2.8 |\n"
    "| a change of 50 tables, `files` | 2.5, 2.4 | 1.3, 1.8 |\n"
    "| load into Delta; `write_deltalake` alone: 3.9, 4.0 | 8.5, 7.2 | 4.5, 4.8 |\n"
    "| a change of every table, Delta | 10.8, 13.7 | 10.2, 10.6 |\n"
    "| a change of 50 tables, Delta | 4.5, 4.9 | 3.8, 4.7 |\n\n"
    "The elapsed times of 5,000 tables were not measured again. On that loaded machine, `deltalake` took\n"
    "2.2 to 2.5 ms of CPU time to create a table, and Penstock's own entry takes 0.2 to 0.3 ms. A change\n"
    "of a Delta table costs about 6 ms beyond the start, of which reading and rewriting its file takes\n"
    "1.3 to 1.5, and the commit by `deltalake` 1.5 to 2.2. The start opens every table, in 0.9 to 1.5 ms.\n"
    "So a change of all 5,000 tables misses its target by what `deltalake` and Parquet need for each\n"
    "table, whatever few rows it has. To encode a file of a feed takes 1.1 to 1.7 ms.\n\n"
    "`python -m bench many_tables_to_delta --size 1GB --repeat 1`, 300 tables at 2,000 transactions/s on\n"
    "Spark with two cores, gave at commit 6139d0c0 batches of 4.1 s (p50) and 6.1 s (p99; target: 3).\n\n"
    "**Memory.** A task of a mirror or history uses twice `batch.bytes`, but at least 32 MiB and at most\n"
    "256 MiB or `memory_bytes`, for the rows that it writes and for their copies. A mirror buffers half of\n"
    "that, a history a quarter; further rows are spilled to files. Encoding files is not part of the bound:\n"
    "`tests/unit/test_sink_memory.py` needed 38 MB of Arrow's memory with a bound of 4 MiB. A task that\n"
    "decodes gathers a quarter, in batches of an eighth; its copies are not part of the bound either. The\n"
    "backlog of `python -m bench memory_of_pipeline --size 1GB --repeat 1`, 100 million changes of narrow\n"
    "rows in 29 batches of 64 MiB on Spark with two cores, needed 1.29 GB for all Python processes at\n"
    "commit 6139d0c0, on two cores of an Intel Xeon (target: 1.2), and one transaction of 2.7 GB needed\n"
    "1.11 GB. Since then, a worker returns unused memory after each task: the same backlog, without the\n"
    "other loads of the benchmark, needed 1.12 GB at commit 73cb8b4f, 0.20 GB for the driver, and at most\n"
    "0.60 GB for one worker. What is left grows with `batch.bytes`, not with the backlog.\n"
    "Freed buffers of 1 MiB and more return to the system at once (glibc). Each Spark worker needs this\n"
    "memory for itself; with `--local` all tasks share one process."
)


def measurements(folder: Path) -> dict[str, Measurement]:
    """Return the newest measurement of each case; a run of full size is preferred."""
    newest: dict[str, tuple[bool, str, Measurement]] = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        rank = run["options"]["size"] == "1GB", run["finished_at"]
        for case in run["cases"]:
            measurement = Measurement(path.with_suffix(".md").name, run["machine"]["commit"], case["lines"])
            if case["case"] not in newest or newest[case["case"]][:2] < rank:
                newest[case["case"]] = (*rank, measurement)
    return {case: measurement for case, (_, _, measurement) in newest.items()}


def rows(measured: dict[str, Measurement]) -> Iterator[tuple[str, ...]]:
    """Yield the table's lines, one per path and shape of rows."""
    for route in ROUTES:
        measurement = measured.get(route.case)
        if measurement is None:
            continue
        shapes: set[str] = set()
        for line in measurement.lines:
            # The first line of each shape in a case is for one copy and all columns.
            if line["subject"] != route.subject or line["workload"] in shapes:
                continue
            shapes.add(line["workload"])
            rates = line["rates"]
            link = _link(measurement)
            yield (
                route.title,
                line["workload"],
                _seconds(route.cpu_seconds(rates)),
                *(_gigabytes(bytes_of, rates) for bytes_of in (route.log_bytes, route.written, route.sent)),
                link,
            )


def _seconds(of_change: float | None) -> str:
    return "" if of_change is None else f"{of_change * 1e9:,.0f}"


def _gigabytes(bytes_of: Callable[[Rates], float] | None, rates: Rates) -> str:
    return "" if bytes_of is None else f"{bytes_of(rates):,.0f}"
