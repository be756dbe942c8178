# SPDX-License-Identifier: Apache-2.0
"""Merge the backlog of two Pumps and decode it to Arrow, and measure the memory while one of them is
unreachable.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.captured import wait_until
from bench.corpora.corpus import SIZES, CountsDiffer, cache_directory
from bench.corpora.tidb_payloads import Transaction, table_job, transactions
from bench.drainer_process import Drained, DrainerProcess
from bench.result import CaseResult, Line, Options, Target
from penstock.limits import DRAINER_BUFFER_BYTES_DEFAULT
from penstock.settings.daemon import LogSettings
from penstock.settings.tidb_pump import PumpSettings
from penstock.tidb.pump import Pump
from penstock.tidb.pump_store import PumpStore, Write
from penstock.tidb.registry import NodeState
from tools.tidb.cluster import FakeCluster

TITLE = "Two Pumps to Arrow, one core (rates per second of CPU of the Drainer)"

_ROWS_PER_SECOND = 300_000
_BATCH = 256
#: Number of rows per transaction, and the share of the data in such transactions.
_SHAPES = {"1,000 rows": (1000, 1.0), "10 rows": (10, 0.2)}
#: Maximum growth of the Drainer process's memory since its start, while transactions wait.
_RESIDENT_MAX = 4 * DRAINER_BUFFER_BYTES_DEFAULT


def run(options: Options) -> CaseResult:
    """Fill two Pumps, and drain them, once for each shape of transactions; then with one Pump away."""
    folder = Path(tempfile.mkdtemp(prefix="bench-pumps-", dir=cache_directory()))
    lines = []
    try:
        for shape, (rows, part) in _SHAPES.items():
            with _backlog(folder / shape, int(SIZES[options.size] * part), rows) as backlog:
                drained = [backlog.drain(f"log-{number}") for number in range(options.repeat)]
                lines += _rates(shape, drained)
                if rows == max(rows for rows, _ in _SHAPES.values()):
                    lines.append(_memory(shape, backlog.drain("log-away", is_away=True)))
    finally:
        shutil.rmtree(folder)
    return CaseResult("pumps_to_arrow", TITLE, lines, ratio_title="against the target")


class _Backlog:
    """Two Pumps of a cluster, and the transactions that they have released."""

    def __init__(self, folder: Path, cluster: FakeCluster, rows: int, last_ts: int) -> None:
        self._folder = folder
        self._cluster = cluster
        self._rows = rows
        self._last_ts = last_ts

    def drain(self, log: str, *, is_away: bool = False) -> Drained:
        """Merge everything into a new log; with `is_away`, one Pump starts once the merge waits for it."""
        with ExitStack() as stack:
            stack.enter_context(self._pump(0))
            with ExitStack() as second:
                second.enter_context(self._pump(1))
                if not is_away:
                    stack.push(second.pop_all())
            drainer = DrainerProcess(self._cluster.address, self._folder / log, self._last_ts)
            stack.callback(drainer.kill)
            if is_away:
                drainer.wait_until_stalled()
                stack.enter_context(self._pump(1))
            drained = drainer.result()
        if drained.rows != self._rows:
            raise CountsDiffer(f"{drained.rows} rows were merged, and the Pumps have {self._rows}")
        return drained

    @contextmanager
    def _pump(self, number: int) -> Iterator[None]:
        settings = PumpSettings(listen="127.0.0.1:0", node_id=f"pump-{number}")
        log = LogSettings(folder=self._folder / f"pump-{number}")
        pump = Pump(f"shop{number}", [self._cluster.address], settings, log)
        pump.start()
        try:
            wait_until(lambda: pump.state is NodeState.ONLINE)
            yield
        finally:
            pump.stop()
            assert pump.join(60.0), "the Pump does not end"


@contextmanager
def _backlog(folder: Path, bytes_min: int, rows_each: int) -> Iterator[_Backlog]:
    """Give the first Pump three of every four transactions, so that it has more data than a Drainer
    buffers.
    """
    with FakeCluster() as cluster:
        cluster.store_jobs([table_job()])
        stores = [
            PumpStore(folder / name, LogSettings(folder=folder / name), cluster.cluster_id)
            for name in ("pump-0", "pump-1")
        ]
        batches: list[list[Transaction]] = [[], []]
        count, last_ts = 0, 0
        for count, transaction in enumerate(transactions(bytes_min, rows_each), 1):
            number = int(count % 4 == 0)
            batches[number].append(transaction)
            last_ts = transaction.commit_ts
            if len(batches[number]) == _BATCH:
                _store(stores[number], batches[number])
        for store, batch in zip(stores, batches, strict=True):
            _store(store, batch)
            store.close()
        yield _Backlog(folder, cluster, count * rows_each, last_ts)


def _store(store: PumpStore, batch: list[Transaction]) -> None:
    for payloads in ([each.prewrite for each in batch], [each.commit for each in batch]):
        writes = [Write(payload) for payload in payloads]
        store.write(writes)
        assert not any(write.problem for write in writes), "the store accepts them"
    batch.clear()


def _rates(shape: str, runs: list[Drained]) -> list[Line]:
    merge, decode = (
        statistics.median(getattr(run, name) for run in runs) for name in ("merge_cpu", "decode_cpu")
    )
    rows = runs[0].rows
    lines = []
    for subject, seconds in {"merge": merge, "decode": decode, "both": merge + decode}.items():
        is_target = subject == "both"
        rates = {"rows/s": rows / seconds, "CPU s per 1 M rows": seconds / rows * 1e6}
        ratio = rows / seconds / _ROWS_PER_SECOND if is_target else None
        lines.append(Line(shape, subject, rates, ratio, Target(1) if is_target else None))
    return lines


def _memory(shape: str, drained: Drained) -> Line:
    growth = drained.resident_max - drained.resident_before
    rates = {
        "MB before": drained.resident_before / 1e6,
        "MB waiting": drained.resident_stalled / 1e6,
        "MB at most": drained.resident_max / 1e6,
    }
    note = f"at most {_RESIDENT_MAX >> 20} MiB more than before"
    return Line(shape, "one Pump away", rates, _RESIDENT_MAX / growth, Target(1), note)
