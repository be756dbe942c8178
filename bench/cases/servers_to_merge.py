# SPDX-License-Identifier: Apache-2.0
"""Merge the logs of two instances into one, compared with capturing both servers."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyarrow import compute

from bench.captured import capture_of, end_of, wait_until
from bench.corpora.corpus import Corpus, cache_directory, check_rows, corpus
from bench.corpora.serve import serve
from bench.result import CaseResult, Line, Options
from penstock import read_binlog
from penstock.capture.run import Capture
from penstock.errors import ServerBusy
from penstock.model import Position
from penstock.settings.daemon import Settings

TITLE = "Two instances, and the merge of their logs (rates per second of CPU)"

_MERGE = "shop"
_END_SECONDS_MAX = 120.0
#: Each server has the file of one load. Transactions are small in the first pair, large in the second.
_PAIRS = (("narrow", "tpcc"), ("wide", "bulk"))


@dataclass(frozen=True)
class _Cost:
    seconds: float
    seconds_cpu: float


def run(options: Options) -> CaseResult:
    """Capture each pair of servers, and then merge their logs."""
    lines = []
    for names in _PAIRS:
        corpora = [corpus(name, options.size) for name in names]
        rows = sum(binlog.rows for binlog in corpora)
        runs = [_measure(corpora) for _ in range(options.repeat)]
        plain, merge = (
            min((costs[number] for costs in runs), key=lambda cost: cost.seconds_cpu) for number in (0, 1)
        )
        for subject, cost in {"two plain instances": plain, "their merge": merge}.items():
            rates = {
                "rows/s": rows / cost.seconds_cpu,
                "CPU s per 1 M rows": cost.seconds_cpu / rows * 1e6,
                "rows/s by the clock": rows / cost.seconds,
            }
            ratio = plain.seconds_cpu / merge.seconds_cpu if cost is merge else None
            lines.append(Line(" + ".join(names), subject, rates, ratio))
    return CaseResult("servers_to_merge", TITLE, lines, ratio_title="of a plain instance's rate")


def _measure(corpora: list[Corpus]) -> tuple[_Cost, _Cost]:
    folder = Path(tempfile.mkdtemp(prefix="bench-merge-", dir=cache_directory()))
    try:
        with ExitStack() as stack:
            ports = {binlog.name: stack.enter_context(serve(binlog)).port for binlog in corpora}
            settings = _settings(folder, ports)
            members = {name: capture_of(settings, name) for name in ports}
            ends = [end_of(binlog) for binlog in corpora]
            with _cost() as plain:
                for capture in members.values():
                    stack.enter_context(_running(capture))
                for capture, end in zip(members.values(), ends, strict=True):
                    wait_until(lambda capture=capture, end=end: _has_reached(capture, end))  # type: ignore[misc]
            merge = capture_of(settings, _MERGE, members)
            with _cost() as merging:
                stack.enter_context(_running(merge))
                wait_until(lambda: merge.progress.caught_up)
        check_rows(
            "the merge", _rows(settings.log_of(_MERGE).folder), sum(b.rows for b in corpora), corpora[0]
        )
        return plain[0], merging[0]
    finally:
        shutil.rmtree(folder)


@contextmanager
def _cost() -> Iterator[list[_Cost]]:
    """Yield a list to which the block's cost is added at its end."""
    costs: list[_Cost] = []
    clock, cpu = time.monotonic(), time.process_time()
    yield costs
    costs.append(_Cost(time.monotonic() - clock, time.process_time() - cpu))


def _settings(folder: Path, ports: dict[str, int]) -> Settings:
    sources = {name: f"mysql://root@127.0.0.1:{port}?ssl_mode=disabled" for name, port in ports.items()}
    instances = {name: {"source": source, "start": "earliest"} for name, source in sources.items()}
    merge = {"merge": list(ports), "start": "earliest"}
    return Settings.model_validate(
        {
            "listen": {"http": "127.0.0.1:0"},
            "log": {"folder": folder, "fsync": "seconds", "fsync_seconds": "1s"},
            "instances": {**instances, _MERGE: merge},
        }
    )


@contextmanager
def _running(capture: Capture) -> Iterator[None]:
    capture.start()
    try:
        yield
    finally:
        capture.stop()
        assert capture.join(_END_SECONDS_MAX), "the capture does not end"


def _has_reached(capture: Capture, end: Position) -> bool:
    try:
        visible = capture.log().visible
    except ServerBusy:
        return False
    return visible is not None and visible >= end


def _rows(folder: Path) -> int:
    """Return the number of changes in a log; an update counts as one."""
    kinds = (batch.to_arrow().column("_change_type") for batch in read_binlog(folder))
    return sum(compute.sum(compute.not_equal(each, "update_preimage")).as_py() for each in kinds)
