# SPDX-License-Identifier: Apache-2.0
"""The processor time of the console's two pages that list all instances and all pipelines: `python -m
bench.console_pages`.

500 instances, whose daemons answer at once, and 2,000 pipelines in a SQLite state store. Both pages must take
less than 300 ms at p95. With `--zookeeper`, the pipelines are in a ZooKeeper server that the benchmark
starts; with `--store URL`, the pipelines of another store are shown. The first request also compiles the
templates, so it is printed separately.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request

from penstock.console import pages
from penstock.console.comparisons import Comparisons
from penstock.console.fleet import Answers, Fleet
from penstock.console.pipeline_files import PipelineFiles
from penstock.console.pipeline_states import PipelineStates
from penstock.console.rendering import Renderer
from penstock.console.streams import Streams
from penstock.console.visit import Visit
from penstock.coordinate.store import open_store
from penstock.model import TableName
from penstock.pipeline.state import Checkpoint, PipelineState, TableLoad
from penstock.serve.masking import Masking
from tools.zookeeper import ZooKeeper

_INSTANCES, _PIPELINES, _POINTS = 500, 2000, 48
_URL = "http://127.0.0.1:7070"


class _AnsweringFleet:
    """One daemon with all instances, and with samples of the last hour."""

    urls: Sequence[str] = (_URL,)

    def ask_all(self, call: str) -> Answers:
        """Answer `status`, `alerts` and `charts`."""
        names = [f"instance-{number:03d}" for number in range(_INSTANCES)]
        status = {"state": "running", "lag_seconds": 0.4, "lag_bytes": 1000, "rows_per_second": 100.0}
        status |= {"server": "db:3306", "position": "mysql-bin.000007:88231", "log_bytes": 1 << 30}
        status |= {"subscribers": 3, "tables_in_doubt": [], "broken_holds": []}
        samples = [float(number % 7) for number in range(_POINTS)]
        series = {"lag_seconds": samples, "rows_per_second": samples}
        answer: dict[str, Any] = {"alerts": [], "seconds": 3600, "until_us": time.time_ns() // 1000}
        if call == "status":
            answer["instances"] = [{"instance": name, **status} for name in names]
        else:
            answer["instances"] = dict.fromkeys(names, series)
        return Answers({_URL: answer}, {})


def write_pipelines(url: str) -> None:
    """Write the records of pipelines with five tables each, of which some load, wait or have failed."""
    with closing(open_store(url)) as store:
        for number in range(_PIPELINES):
            state = PipelineState(store, f"pipeline-{number:04d}")
            offsets = {"shop": {"epoch": 1, "file": "mysql-bin.000007", "offset": 1234 + number}}
            load = TableLoad(10, 10 if number % 7 else 3, 1000)
            loads = {f"shop/shop.table_{table}": load for table in range(5)}
            state.write_first(Checkpoint("generation", number, offsets, loads, planned=True))
            state.show({"state": "stopped" if number % 9 else "failed", "rejected": number % 3, "chunks": 10})
            state.put_large("tables", {"tables": {key: {"gone": False} for key in loads}, "targets": []})
            if number % 20 == 0:
                state.request_resnapshot("shop", TableName("shop", "table_1"))


def measure(url: str, path: str, times: int) -> list[float]:
    """Return the processor time of a page in milliseconds, for each of several requests."""
    states = PipelineStates([url])
    measured = []
    for _ in range(times):
        request = Request({"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []})
        visit = Visit(
            request=request,
            renderer=Renderer(""),
            fleet=cast(Fleet, _AnsweringFleet()),
            states=states,
            files=PipelineFiles((), states),
            comparisons=Comparisons(()),
            streams=Streams(),
            identity="",
            forgery_token="",
            account="",
            is_admin=True,
            sees_pipelines=True,
            masking=Masking(),
            unknown_daemons=(),
            base_path="",
        )
        begun = time.process_time()
        pages.PAGES[path](visit)
        measured.append(1000 * (time.process_time() - begun))
    return measured


def main() -> None:
    """Print the processor time of each page."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--store", help="a store that has pipelines")
    arguments.add_argument("--zookeeper", action="store_true", help="write the pipelines to a ZooKeeper")
    arguments.add_argument("--times", type=int, default=41)
    options = arguments.parse_args()
    with ExitStack() as stack:
        url = options.store
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = f"sqlite:///{Path(folder) / 'state.db'}"
            if options.zookeeper:
                url = f"zookeeper://{stack.enter_context(ZooKeeper()).hosts}/penstock"
            write_pipelines(url)
        for path in ("/", "/pipelines"):
            first, *times = measure(url, path, options.times)
            times.sort()
            p50, p95 = times[len(times) // 2], times[int(len(times) * 0.95)]
            print(f"{path:<12} p50 {p50:.0f} ms  p95 {p95:.0f} ms  first {first:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
