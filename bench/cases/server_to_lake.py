# SPDX-License-Identifier: Apache-2.0
"""Process a live server's backlog with `penstock run`, into a Delta mirror and a feed of Parquet files.

For comparison, Debezium's embedded engine reads the same changes and writes them as lines of JSON.
"""

import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import debezium_engine
from bench.compiled import ToolMissing
from bench.corpora.corpus import Corpus, CountsDiffer, cache_directory, check_rows, corpus
from bench.corpora.serve import serve
from bench.lake_counts import Held, of_delta, of_feed
from bench.pipeline_process import run_until_caught_up
from bench.result import CaseResult, Line, Options, Target
from tools.servers import Server

TITLE = "A live server's backlog through a pipeline on Spark, local[2] (by the clock)"

_WORKLOAD = "purchases"
_TABLE = "bench.purchases"
_ENGINE = "Debezium's engine, JSON lines"
#: The target of a sink in changes per second, and as a multiple of the engine's rate.
_TARGETS = {"delta mirror": 150_000.0, "parquet feed": 300_000.0}
_TIMES_ENGINE = 5.0
_BATCH_BYTES = 256 << 20
#: The first batch is not counted.
_BATCHES_MIN = 3
#: The part of a large file that the engine reads.
_ENGINE_ROWS_MAX = 1_000_000


@dataclass(frozen=True)
class _Ran:
    """One run, timed from the end of its first batch (which includes the start of Spark and its workers) to
    the end of its last batch.

    `share` is the fraction of all changes that were processed in that time.
    """

    seconds: float
    share: float
    seconds_whole: float
    batches: int
    resident: Mapping[str, int]
    held: Held

    @property
    def seconds_of_all(self) -> float:
        """The duration for all changes, extrapolated from this run."""
        return self.seconds / self.share


def run(options: Options) -> CaseResult:
    """Run both pipelines and the engine on the same file."""
    binlog = corpus(_WORKLOAD, options.size)
    versions = {name: metadata.version(name) for name in ("pyspark", "deltalake", "pyarrow")}
    lines = []
    with serve(binlog) as server:
        engine = None
        try:
            debezium_engine.prepare()
            versions[_ENGINE] = debezium_engine.VERSION
            engine = debezium_engine.run_engine(server, _TABLE, min(binlog.rows, _ENGINE_ROWS_MAX))
        except ToolMissing as problem:
            versions[_ENGINE] = str(problem)
        rate_of_engine = engine.changes / engine.seconds if engine is not None else None
        held = set()
        for name, sink, look in (
            ("parquet feed", {"files": {}}, _feed),
            ("delta mirror", {"delta": {"mode": "mirror"}}, _mirror),
        ):
            ran = [_run_pipeline(server, sink, binlog, look) for _ in range(options.repeat)]
            held |= {pipeline_run.held for pipeline_run in ran}
            lines += _lines(name, binlog, ran, rate_of_engine)
        if len(held) != 1:
            raise CountsDiffer(f"feed and mirror of {binlog.path} hold {held}")
    if engine is not None:
        rates = {
            "changes/s": engine.changes / engine.seconds,
            "MB/s": _share(binlog, engine.changes, engine.seconds),
        }
        lines.append(
            Line(_WORKLOAD, _ENGINE, rates, note=f"first {engine.changes:,} changes, start not counted")
        )
    return CaseResult("server_to_lake", TITLE, lines, versions, ratio_title="of the target")


def _lines(name: str, binlog: Corpus, ran: list[_Ran], rate_of_engine: float | None) -> list[Line]:
    middle = statistics.median_low(pipeline_run.seconds_of_all for pipeline_run in ran)
    chosen = next(pipeline_run for pipeline_run in ran if pipeline_run.seconds_of_all == middle)
    rate = binlog.rows / chosen.seconds_of_all
    rates = {
        "changes/s": rate,
        "rows/s": binlog.images / chosen.seconds_of_all,
        "MB/s": binlog.bytes / chosen.seconds_of_all / 1e6,
        "seconds with start": chosen.seconds_whole,
        **{f"MB of {kind} at most": size / 1e6 for kind, size in chosen.resident.items()},
    }
    target = _TARGETS[name]
    note = f"{chosen.batches} batches, the first not counted; target {target:,.0f}/s"
    lines = [Line(_WORKLOAD, name, rates, rate / target, Target(1), note)]
    if rate_of_engine is not None:
        note = f"{rate / rate_of_engine:.1f} times {_ENGINE}; target {_TIMES_ENGINE:g}"
        times = rate / rate_of_engine / _TIMES_ENGINE
        lines.append(
            Line(_WORKLOAD, f"{name}, against the engine", {"changes/s": rate}, times, Target(1), note)
        )
    return lines


def _share(binlog: Corpus, changes: int, seconds: float) -> float:
    return binlog.bytes * changes / binlog.rows / seconds / 1e6


def _run_pipeline(
    server: Server, sink: dict[str, Any], binlog: Corpus, look: Callable[[Path, Corpus], Held]
) -> _Ran:
    folder = Path(tempfile.mkdtemp(prefix="bench-lake-", dir=cache_directory()))
    try:
        kind, words = next(iter(sink.items()))
        lake = folder / "lake"
        settings = {
            "name": "bench",
            "source": {"url": server.url("repl"), "tables": [_TABLE], "start": "earliest"},
            "load": {"mode": "none"},
            "sink": {kind: {**words, "path": str(lake)}},
            "batch": {"bytes": max(4096, min(_BATCH_BYTES, binlog.bytes // _BATCHES_MIN))},
        }
        done = run_until_caught_up(settings, folder)
        rows = [batch.rows for batch in done.batches]
        return _Ran(
            done.batches[-1].ended - done.batches[0].ended,
            sum(rows[1:]) / sum(rows),
            done.seconds,
            len(rows),
            done.resident,
            look(lake, binlog),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _feed(lake: Path, binlog: Corpus) -> Held:
    """Return the feed's remaining rows, after verifying that all of its changes are present."""
    files = sorted(str(path) for path in lake.rglob("*.parquet") if not _is_hidden(path.relative_to(lake)))
    images, held = of_feed(files, "id", "amount")
    check_rows("the feed", images, binlog.images, binlog)
    return held


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(("_", ".")) for part in path.parts)


def _mirror(lake: Path, binlog: Corpus) -> Held:
    return of_delta(lake.joinpath(*_TABLE.split(".")), "amount")
