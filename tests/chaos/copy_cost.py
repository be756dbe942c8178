# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of serving a copy of a log: `python -m tests.chaos.copy_cost MEGABYTES`.

One daemon captures the log, then a second daemon copies it. Both sync at intervals. The CPU time that both
daemons use until the copy has caught up is divided by the bytes copied.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import structlog

from bench.daemon import cpu_seconds_of
from penstock.coordinate.store import open_store
from penstock.fleet.status import fleet_status
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import wait_until
from tools.servers import Server

_TRANSACTION_BYTES = 1 << 20
# The timeout is longer than for a single event, because a large log is copied.
_COPY_SECONDS_MAX = 400.0


def measure(folder: Path, megabytes: int) -> str:
    """Return the figures of one copy as a line."""
    with ExitStack() as stack:
        enter = stack.enter_context
        server = enter(Server("mysql"))
        server.sql("CREATE DATABASE shop; CREATE TABLE shop.t (id INT PRIMARY KEY, note LONGTEXT)")
        daemons = {}
        for name in "ab":
            (folder / name).mkdir()
            settings = {
                "coordination": f"sqlite://{folder}/fleet.db",
                "fleet": {"member": name},
                "log": {"copies": 2, "folder": str(folder / name / "log"), "fsync": "seconds"},
                "instances": {"shop": {"source": server.url()}},
            }
            daemons[name] = DaemonProcess(folder / name, settings)
        serving, copying = daemons["a"], daemons["b"]
        enter(serving)
        for number in range(megabytes):
            note = f"REPEAT(SHA2({number}, 256), {_TRANSACTION_BYTES // 64})"
            server.sql(f"INSERT INTO shop.t VALUES ({number}, {note})")
        head = head_of(server)
        serving.wait_for_head(head.file, head.offset)
        served_before, began = cpu_seconds_of(serving.pid), time.monotonic()
        enter(copying)
        copied_before = cpu_seconds_of(copying.pid)

        end = str(serving.status()["position"])
        # Query the store in this process, because a query to a daemon would add milliseconds to the measured
        # CPU time.
        store = enter(closing(open_store(f"sqlite://{folder}/fleet.db")))

        def is_in_step() -> bool:
            (row,) = fleet_status(store)["instances"]
            return [copy["position"] for copy in row["copies"]] == [end]

        wait_until(is_in_step, _COPY_SECONDS_MAX)
        seconds = time.monotonic() - began
        gigabytes = serving.status()["log_bytes"] / 1e9
        served = (cpu_seconds_of(serving.pid) - served_before) / gigabytes
        copied = (cpu_seconds_of(copying.pid) - copied_before) / gigabytes
        return (
            f"{gigabytes:.2f} GB in at most {seconds:.1f} s; CPU seconds per GB:"
            f" {served:.2f} to serve, {copied:.2f} to copy"
        )


def main(words: Sequence[str]) -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.copy_cost", description=__doc__)
    parser.add_argument("megabytes", type=int)
    options = parser.parse_args(words)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory(prefix="copy-cost-") as folder:
        print(measure(Path(folder), options.megabytes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
