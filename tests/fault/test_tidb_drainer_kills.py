# SPDX-License-Identifier: Apache-2.0
"""A daemon that merges the Pumps of a TiDB cluster is killed while it receives a transaction."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest

import penstock
from penstock.client import ChangeBatch, Subscriber
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import wait_until
from tests.support.tidb.drainer_capture import last_commit_ts, registered, sample_jobs, sample_payloads
from tests.support.tidb.drainer_pumps import StandInPump
from tools.tidb.cluster import FakeCluster

PAYLOADS = sample_payloads()
END = last_commit_ts(PAYLOADS)
# The rows of `tests/samples/tidb/source.sql`, as TiDB's own client shows them.
TEST_CHANGES = [
    ("insert", {"id": 1, "name": "a"}),
    ("insert", {"id": 2, "name": "b"}),
    ("update_preimage", {"id": 1, "name": "a"}),
    ("update_postimage", {"id": 1, "name": "c"}),
    ("update_preimage", {"id": 2, "name": "b"}),
    ("update_postimage", {"id": 2, "name": "d"}),
    ("delete", {"id": 2, "name": "d"}),
    ("insert", {"id": 2, "name": "c"}),
    ("insert", {"id": 5, "name": "e", "extra": 99}),
    ("update_preimage", {"id": 1, "name": "c", "extra": 42}),
    ("update_postimage", {"id": 1, "name": "zz", "extra": 42}),
]


def _rows(source: str) -> list[tuple[int, tuple[str, dict[str, Any]]]]:
    """Return the changes of a table in a log, each with its commit version."""
    return [
        (row["_commit_version"], (row["_change_type"], _values(row)))
        for batch in penstock.read_binlog(source, tables="shop.test")
        for row in batch.to_arrow().to_pylist()
    ]


def _values(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("_")}


def _received(batch: ChangeBatch) -> list[tuple[int, str]]:
    """Return the changes in a subscriber's batch, as text."""
    return [
        (row["_commit_version"], str((row["_change_type"], _values(row))))
        for row in pyarrow.record_batch(batch).to_pylist()
    ]


@contextmanager
def _running(subscriber: Subscriber, received: list[tuple[int, str]]) -> Iterator[None]:
    """Run a subscriber in a thread until the end of the block."""
    thread = threading.Thread(target=subscriber.run, args=(lambda batch: received.extend(_received(batch)),))
    thread.start()
    try:
        yield
    except AssertionError as problem:
        problem.add_note(f"{len(received)} rows, {subscriber.status()}")
        raise
    finally:
        subscriber.stop()
        thread.join()


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_tidb_drainer.py::test_restarted_drainer_continues_after_its_last_transaction"
)
def test_killed_drainer_loses_and_repeats_nothing(tmp_path: Path) -> None:
    with (
        FakeCluster() as cluster,
        StandInPump(cluster, "first") as first,
        StandInPump(cluster, "second") as second,
    ):
        cluster.store_jobs(sample_jobs())
        first.register()
        second.register()
        instance = {
            "source": f"tidb://{cluster.address}",
            "start": "earliest",
            "tidb": {"roles": ["drainer"], "drainer": {"listen": "127.0.0.1:0", "node_id": "drainer"}},
        }
        with DaemonProcess(tmp_path, {"instances": {"shop": instance}}) as daemon:
            address = f"penstock://127.0.0.1:{daemon.port}/shop"
            subscriber = Subscriber(
                address,
                name="cache",
                tables=["shop.test"],
                begin="earliest",
                shards=1,
                coordination=f"sqlite://{tmp_path}/subscribers.db",
            )
            received: list[tuple[int, str]] = []
            with _running(subscriber, received):
                for index, payload in enumerate(PAYLOADS):
                    pump, other = (first, second) if index % 3 else (second, first)
                    pump.release(payload)
                    other.release_fake(last_commit_ts([payload]))
                    if index in (6, 12):
                        # Part of the transaction is stored, and the rest has not arrived.
                        wait_until(lambda: daemon.status()["position"] is not None)
                        daemon.kill()
                        daemon.start()
                wait_until(lambda: (registered(cluster) or {}).get("maxCommitTS", 0) >= END)
                served = _rows(address)
                wait_until(lambda: len(set(received)) >= len(served), 20.0)
        assert [change for _, change in served] == TEST_CHANGES
        assert _rows(str(tmp_path / "log" / "shop")) == served
        # A subscriber gets each change at least once.
        assert set(received) == {(version, str(change)) for version, change in served}
