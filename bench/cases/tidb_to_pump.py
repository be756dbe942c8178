# SPDX-License-Identifier: Apache-2.0
"""Write with TiDB's own pump client to a Pump, which stores every write on disk before it acknowledges the
write.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from bench.captured import wait_until
from bench.corpora.corpus import cache_directory
from bench.daemon import serving
from bench.result import CaseResult, Line, Options, Target
from tools.servers.errors import PartMissing
from tools.servers.ports import free_port
from tools.tidb.peers import PeerCluster

TITLE = "TiDB's pump client to a Pump, each write synced before it is acknowledged"

_WRITERS = 32
_PAYLOAD_BYTES = 200
_WRITES_PER_SECOND, _AIM_PER_SECOND = 2_000, 7_400
_P99_MS = 50.0
_SYNCS, _SYNC_BYTES = 100, 8192
_WRITES = {"tiny": 1_280, "small": 12_800, "100MB": 64_000, "1GB": 640_000}


def run(options: Options) -> CaseResult:
    """Run all writers concurrently. Each transaction is a prewrite, then its commit or rollback."""
    folder = Path(tempfile.mkdtemp(prefix="bench-pump-", dir=cache_directory()))
    writers = f"{_WRITERS} writers"
    try:
        runs = [_measure(folder / str(number), _WRITES[options.size]) for number in range(options.repeat)]
    except PartMissing as problem:
        return CaseResult("tidb_to_pump", TITLE, [Line(writers, "not measured", {}, note=str(problem))])
    finally:
        shutil.rmtree(folder)
    rates = sorted(runs, key=lambda rates: rates["writes/s"])[len(runs) // 2]
    lines = [
        Line(writers, "rate", rates, rates["writes/s"] / _WRITES_PER_SECOND, Target(1)),
        Line(writers, "rate", rates, rates["writes/s"] / _AIM_PER_SECOND, Target(1, aim=True)),
        Line(writers, "p99", rates, _P99_MS / rates["p99 ms"], Target(1)),
    ]
    return CaseResult("tidb_to_pump", TITLE, lines, ratio_title="against the target")


def _measure(folder: Path, writes: int) -> dict[str, float]:
    with PeerCluster(folder / "cluster") as cluster:
        pump = {"listen": f"127.0.0.1:{free_port()}", "node_id": "pump"}
        tidb = {"roles": ["pump"], "pump": pump}
        with serving(folder, f"tidb://{cluster.address}", tidb=tidb) as daemon:
            wait_until(lambda: "the Pump is online" in (folder / "daemon.output").read_text())
            words = ("-writers", str(_WRITERS), "-bytes", str(_PAYLOAD_BYTES))
            # The first writes open connections and files.
            cluster.write(*words, "-transactions", "2")
            sync_ms = _sync_ms(folder / "syncs")
            before = daemon.cpu_seconds()
            _, measured = cluster.write(*words, "-transactions", str(writes // _WRITERS // 2))
            seconds = daemon.cpu_seconds() - before
    count = measured["writes"]
    return {
        "writes/s": count / measured["seconds"],
        "p50 ms": measured["p50_ms"],
        "p99 ms": measured["p99_ms"],
        "CPU s per 1,000": seconds / count * 1000,
        "a sync alone, p50 ms": sync_ms,
    }


def _sync_ms(path: Path) -> float:
    """Return the median duration of a sync after a few kilobytes were appended to a file."""
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            file.write(bytes(_SYNC_BYTES))
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000
