# SPDX-License-Identifier: Apache-2.0
"""A drainer in this process, over stand-ins for its cluster and its Pumps, and a sample of transactions."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.logstore.log import Log
from penstock.mysql.start import StartAt
from penstock.tidb.drainer import TidbCapture
from penstock.tidb.messages import BinlogHead
from tests.support.suite.patience import wait_until
from tools.tidb.cluster import FakeCluster
from tools.tidb.drainer import running_capture

SAMPLES = Path(__file__).parents[2] / "samples" / "tidb"


def sample_payloads() -> list[bytes]:
    """Return the matched binlogs of a real Pump, in commit order."""
    return [path.read_bytes() for path in sorted((SAMPLES / "payloads").glob("*.bin"))]


def sample_jobs() -> list[dict[str, Any]]:
    """Return the DDL jobs of the cluster of the sample."""
    jobs: list[dict[str, Any]] = json.loads((SAMPLES / "ddl_jobs.json").read_text())
    return jobs


def last_commit_ts(payloads: list[bytes]) -> int:
    """Return the commit timestamp of the last payload."""
    return BinlogHead.decode(payloads[-1]).commit_ts


class RunningDrainer:
    """A running drainer, and the events that tests wait for."""

    def __init__(self, capture: TidbCapture) -> None:
        self.capture = capture

    @property
    def log(self) -> Log:
        """The log that the drainer writes."""
        return self.capture.log()

    def wait_until(self, reached: Callable[[], Any]) -> None:
        """Wait until a condition holds; add the drainer's status to the failure."""
        try:
            wait_until(reached)
        except AssertionError as problem:
            problem.add_note(str(self.capture.status()))
            raise

    def wait_for_ts(self, cluster: FakeCluster, commit_ts: int) -> None:
        """Wait until everything up to a commit timestamp is durable, according to the registry."""
        self.wait_until(lambda: (registered(cluster) or {}).get("maxCommitTS", 0) >= commit_ts)


def registered(cluster: FakeCluster) -> dict[str, Any] | None:
    """Return the drainer's entry in the registry."""
    entries = [
        json.loads(value)
        for key, value in cluster.keys.items()
        if key.startswith("/tidb-binlog/v1/drainers/")
    ]
    return entries[0] if entries else None


@contextmanager
def running_drainer(
    cluster: FakeCluster, folder: Path, *, start: StartAt | None = None, **drainer: Any
) -> Iterator[RunningDrainer]:
    """Run a drainer with its log in a folder until the end of the block; it starts at the earliest binlog."""
    with running_capture(cluster.address, folder, start=start, **drainer) as capture:
        yield RunningDrainer(capture)
