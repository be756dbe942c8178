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
    "--seconds-max 5` shows the time of each stage from one trace. Five runs of the code of commit\n"
    "73cb8b4f, on two otherwise idle cores of an Intel Xeon, which ran the server and its clients too,\n"
    "reached p50 2.43, 2.68, 3.21, 3.28 and 3.36 ms and p99 5.8 to 9.9 ms at 2,000 transactions/s into\n"
    "four shards (targets: 2.5 and 10). The last three ran ten minutes later, when the same machine was\n"
    "slower: the server's own commits, too, took longer. In the first two, a statement with its commit\n"
    "took 0.4 ms (p50) and 1.4 ms (p99). In the second, the median transaction was received 0.33 ms after\n"
    "its commit, visible in the log after 0.47, seen by a follower after 1.21, decoded after 1.45, sent\n"
    "after 1.89, received by the client after 2.03, and in the callback after 2.68. A view's next piece\n"
    "waits up to 1 ms; 0.6 ms instead gave the same p50 (3.13, 3.14 beside 3.21, 3.28) and a longer p99.\n"
    "The capture and the event loop share one interpreter, and take turns at each call that releases it;\n"
    "so do the threads of a subscriber. A transaction takes 190 µs of CPU time in the subscriber and 270\n"
    "in the daemon, and most of that is Python's: for 8 rows, their schema and encoding take 60 µs, and\n"
    "ordering them by shard 55, which the daemon leaves out for fewer than 5 rows.\n"
    "\n"
    "**From a commit to Redis.** `python -m bench commit_to_redis --size tiny --repeat 1 --seconds-max 6`\n"
    "at the same commit and on the same machine, two runs: p50 3.62 and 3.68 ms, p99 7.7 ms in the\n"
    "second, at 1,000 transactions/s (targets: 3 and 50). The median transaction was visible in the log\n"
    "after 0.34 ms, read by the pipeline after 2.06, mostly because the batch before was still running,\n"
    "and seen by a reader of Redis after 3.68. So two batches follow each other within that time, each of\n"
    "which takes about 1.7 ms of Python in some 40 steps. A transaction takes 766 µs of CPU time in the\n"
    "pipeline and 310 in the daemon.\n"
    "\n"
    "**From the server into the log.** `python -m bench server_to_log --size 1GB` on two cores of an\n"
    "Intel Xeon: the share of the server's own sending rate, and CPU seconds per GB (targets: 0.8 of the\n"
    "rate; 1.2, 1.0 and 1.2 seconds):\n"
    "\n"
    "| commit, runs | narrow | wide | tpcc |\n"
    "| --- | --- | --- | --- |\n"
    "| 46c2f09c, 3 | 0.84, 1.44 s | 0.67, 0.75 s | 1.06, 0.92 s |\n"
    "| 6139d0c0, 2 | 0.81, 1.89 s | 0.74, 0.91 s | 0.98, 1.03 s |\n"
    "| 73cb8b4f, 1 | 0.93, 1.41 s | 0.65, 0.75 s | 0.91, 1.00 s |\n"
    "\n"
    "A file that was not used while tuning (`--seed 4711 --workload narrow`) gave 1.06 and 1.13 s at\n"
    "commit 73cb8b4f. The figures of one commit vary with what else the host of this virtual machine\n"
    "does.\n"
    "\n"
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
    "**From a file into Arrow.** `python -m bench files_to_arrow --size 1GB --repeat 1 --seconds-max 1`\n"
    "at commit 73cb8b4f on two cores of an Intel Xeon: one core decodes 730 (narrow), 937 (wide) and 840\n"
    "MB (tpcc) per CPU second, 1.12, 0.54 and 0.74 of the server's sending rate (target: 1). On an AMD\n"
    "EPYC at commit 2ba1442 it was 1.69, 0.71 and 1.14. The server sends as fast on both, while most\n"
    "decoders of the benchmark take about twice the CPU time on the Xeon. `_native` runs 73.5 million\n"
    "instructions for the 10,000 wide rows of `--size tiny`, without those of the C library (`valgrind\n"
    "--tool=callgrind python` with a loop over `read_binlog`); it was 90.8 million at 6139d0c0. Of the\n"
    "instructions of `Decoder.feed` with those functions, 35% write the text of a JSON document in each\n"
    "row, 51% read and\n"
    "append the other 29 values, 5% build system columns, and 5% are checksums, for which the emulated\n"
    "processor lacks the widest instructions. A wide row takes 8,480 instructions (10,390 before). To\n"
    "decode as fast as the server sends on the Xeon, it may take about 4,700 at the same speed.\n"
    "\n"
    "## What limits a pipeline\n\n"
    "**Many small tables.** A full load counts the rows of 50 tables by one statement, and sends up to\n"
    "32 queries before it reads the first answer. The tables of a task share the waits for the disk, and\n"
    "so do the log entries of all Delta tables of a batch. Penstock writes the first entry of a Delta\n"
    "table's log itself. `python -m bench many_tables_to_files --size 1GB --repeat 1`, 5,000 tables of 10\n"
    "rows on two otherwise idle cores of an Intel Xeon, gave:\n"
    "\n"
    "| seconds; with the start: CPU seconds | target | 6139d0c0 | 73cb8b4f |\n"
    "| --- | --- | --- | --- |\n"
    "| load into `files` | 10 | 12.8; 14.4 | 12.3; 13.6 |\n"
    "| a change of every table, `files` | 10 | 9.9; 18.5 | 5.7; 9.9 |\n"
    "| a change of 50 tables, `files` | 2 | 0.5; 5.5 | 0.2; 2.9 |\n"
    "| load into Delta | 1.5 times `write_deltalake` | 24.1; 30.3 | 16.6; 16.1 |\n"
    "| `write_deltalake` alone | | 12.0; 12.2 | 15.1; 16.0 |\n"
    "| a change of every table, Delta | 10 | 31.0; 54.5 | 21.5; 38.5 |\n"
    "| a change of 50 tables, Delta | 2 | 0.9; 19.6 | 0.9; 14.8 |\n"
    "\n"
    "A change of a Delta table takes 4.7 ms of CPU time beyond the start. Measured one by one beside\n"
    "other work, reading and rewriting its file takes 1.3 to 1.5 ms of it, and the commit by `deltalake`\n"
    "1.5 to 2.2, whatever few rows it has. These two alone need 7 of the target's 10 seconds on two\n"
    "cores. To encode a file of a feed took 1.1 to 1.7 ms.\n"
    "\n"
    "`python -m bench many_tables_to_delta --size 1GB --repeat 1`, 300 tables at 2,000 transactions/s on\n"
    "Spark with two cores, which the server and its writers use too: batches of 3.7 s (p50) and 4.8 s\n"
    "(p99; target: 3) at commit 73cb8b4f, 4.1 and 6.1 s at 6139d0c0.\n"
    "\n"
    "**Databases.** `python -m bench rows_to_databases --size 100MB --repeat 1` at commit 73cb8b4f:\n"
    "PostgreSQL takes new rows at 0.65 of the rate of COPY (target: 0.6; 0.47 at 6139d0c0, when a piece\n"
    "was encoded before the server got any of it). MySQL takes them at 0.38 of the rate of `LOAD DATA`\n"
    "over one connection, and at 0.70 over two: its server spends 13 to 14 µs of CPU time per row on\n"
    "INSERT statements and 6 µs on `LOAD DATA`, while Penstock spends 2.6.\n"
    "\n"
    "**Canal's Java client** reads 83,000 single-row transactions per second (target: 200,000), and uses\n"
    "1.3 cores for that; the least client, in C, reads 249,000 from the same daemon.\n"
    "\n"
    "**A mirror in Delta** is rewritten by one thread. It takes as much CPU time per row as the merge of\n"
    "`deltalake`, which uses both cores.\n"
    "\n"
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
