# SPDX-License-Identifier: Apache-2.0
"""The drainer with simulated Pumps and a simulated cluster, and the transactions of a real cluster."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import penstock
from penstock.capture.status import State
from penstock.logstore.merge_position import POSITION_FILE
from penstock.logstore.reader import LogReader
from penstock.mysql.start import StartAt
from penstock.tidb.drainer import LATE_FILE
from penstock.tidb.merged_log import end_of_merged_log
from penstock.tidb.messages import NOTIFY, BinlogHead
from penstock.tidb.registry import NodeState
from tests.support.tidb.drainer_capture import (
    last_commit_ts,
    registered,
    running_drainer,
    sample_jobs,
    sample_payloads,
)
from tests.support.tidb.drainer_pumps import StandInPump
from tools.tidb.cluster import FakeCluster

PAYLOADS = sample_payloads()
END = last_commit_ts(PAYLOADS)


@pytest.fixture(autouse=True)
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the drainer report its progress immediately, for tests that wait for it."""
    monkeypatch.setattr("penstock.tidb.drainer._DURABLE_SECONDS", 0.0)
    monkeypatch.setattr("penstock.tidb.membership.HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr("penstock.tidb.membership.LISTING_SECONDS", 0.05)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        cluster.store_jobs(sample_jobs())
        yield cluster


def _changes(folder: Path) -> list[tuple[Any, ...]]:
    rows = []
    for batch in penstock.read_binlog(folder, tables="shop.*"):
        for row in batch.to_arrow().to_pylist():
            values = {name: value for name, value in row.items() if not name.startswith("_")}
            rows.append((row["_commit_version"], row["_change_type"], str(batch.table), str(values)))
    return sorted(rows, key=lambda row: row[0])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The changes of the sample, merged from a single Pump."""
    folder = tmp_path_factory.mktemp("expected") / "log"
    with FakeCluster() as cluster:
        cluster.store_jobs(sample_jobs())
        return _merged_by_one_pump(cluster, folder)


def _merged_by_one_pump(cluster: FakeCluster, folder: Path) -> list[tuple[Any, ...]]:
    with StandInPump(cluster, "only") as pump:
        pump.release(*PAYLOADS)
        pump.release_fake(END + 1)
        pump.register()
        with running_drainer(cluster, folder) as drainer:
            drainer.wait_for_ts(cluster, END)
    return _changes(folder)


def test_transactions_of_several_pumps_are_one_log(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    assert expected
    with StandInPump(cluster, "first") as first, StandInPump(cluster, "second") as second:
        first.release(*PAYLOADS[::2])
        second.release(*PAYLOADS[1::2])
        for pump in (first, second):
            pump.release_fake(END + 1)
            pump.register()
        with running_drainer(cluster, tmp_path / "two") as drainer:
            drainer.wait_for_ts(cluster, END)
    assert _changes(tmp_path / "two") == expected
    commits = {BinlogHead.decode(payload).commit_ts for payload in PAYLOADS}
    assert {row[0] for row in expected} <= commits, "the commit version is the commit timestamp"


def test_restarted_drainer_continues_after_its_last_transaction(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    with StandInPump(cluster, "first") as pump:
        pump.register()
        with running_drainer(cluster, tmp_path / "two") as drainer:
            pump.release(*PAYLOADS[:9])
            drainer.wait_for_ts(cluster, last_commit_ts(PAYLOADS[:9]))
        pump.release(*PAYLOADS[9:])
        with running_drainer(cluster, tmp_path / "two") as drainer:
            drainer.wait_for_ts(cluster, END)
        assert pump.pulled_after == [0, last_commit_ts(PAYLOADS[:9])]
    assert _changes(tmp_path / "two") == expected


def test_position_is_found_in_the_log_itself(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path / "log"
    with StandInPump(cluster, "first") as pump:
        pump.register()
        for start in range(0, len(PAYLOADS), 7):
            following = PAYLOADS[start : start + 7]
            pump.release(*following)
            with running_drainer(cluster, folder) as drainer:
                drainer.wait_for_ts(cluster, last_commit_ts(following))
            # A killed drainer has not saved its last position.
            (folder / POSITION_FILE).unlink()
            log = LogReader.open(folder)
            assert end_of_merged_log(log).commit_ts <= last_commit_ts(following)
            assert end_of_merged_log(log).commit_ts >= last_commit_ts(following[:-1])
    assert _changes(folder) == expected


def test_log_starts_after_a_commit_timestamp(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    middle = expected[len(expected) // 2][0]
    with StandInPump(cluster, "only") as pump:
        pump.release(*PAYLOADS)
        pump.release_fake(END + 1)
        pump.register()
        with running_drainer(cluster, tmp_path / "log", start=StartAt(commit_ts=middle)) as drainer:
            drainer.wait_for_ts(cluster, END)
    assert _changes(tmp_path / "log") == [row for row in expected if row[0] > middle]


def test_start_after_the_present_of_the_cluster_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    start = StartAt(commit_ts=cluster.next_timestamp() << 1)
    with running_drainer(cluster, tmp_path / "log", start=start) as drainer:
        drainer.wait_until(lambda: "later than" in str(drainer.capture.status()))
        assert drainer.log.epoch is None, "nothing is recorded of the wrong start"


def test_files_rotate_between_transactions_and_across_restarts(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.capture.generated_log.FILE_BYTES_MAX", 900)
    folder = tmp_path / "log"
    with StandInPump(cluster, "first") as pump:
        pump.register()
        for start in range(0, len(PAYLOADS), 4):
            following = PAYLOADS[start : start + 4]
            pump.release(*following)
            with running_drainer(cluster, folder) as drainer:
                drainer.wait_for_ts(cluster, last_commit_ts(following))
    files = [extent.file for extent in LogReader.open(folder).extents()]
    assert files == [f"tidb-binlog.{number:06d}" for number in range(1, len(files) + 1)]
    assert len(files) > 3
    assert _changes(folder) == expected


def test_lost_connection_is_resumed_where_the_stream_ended(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    with StandInPump(cluster, "first") as pump:
        pump.register()
        with running_drainer(cluster, tmp_path / "two") as drainer:
            for start in range(0, len(PAYLOADS), 5):
                following = PAYLOADS[start : start + 5]
                pump.release(*following)
                drainer.wait_for_ts(cluster, last_commit_ts(following))
                pump.stop()
                pump.start()
    assert _changes(tmp_path / "two") == expected


def test_pump_that_notifies_is_in_the_merge_before_the_answer(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    with StandInPump(cluster, "first") as first, StandInPump(cluster, "second") as second:
        first.register()
        with running_drainer(cluster, tmp_path / "two") as drainer:
            first.release(*PAYLOADS[:6])
            joined_at = last_commit_ts(PAYLOADS[:6])
            drainer.wait_for_ts(cluster, joined_at)
            second.register(NodeState.PAUSED)
            with grpc.insecure_channel(_drainer_address(cluster)) as channel:
                channel.unary_unary(NOTIFY)(b"", timeout=10.0)
            first.release(*PAYLOADS[7:])
            first.release_fake(END + 1)
            drainer.wait_until(lambda: drainer.capture.status()["lag_seconds"] != 0.0)
            assert int((registered(cluster) or {})["maxCommitTS"]) == joined_at, "the second may send more"
            second.release(PAYLOADS[6])
            second.release_fake(END + 1)
            drainer.wait_for_ts(cluster, END)
    assert _changes(tmp_path / "two") == expected


def test_pump_leaves_once_it_is_offline_and_everything_of_it_was_read(
    cluster: FakeCluster, tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    with StandInPump(cluster, "first") as first, StandInPump(cluster, "second") as second:
        second.release(*PAYLOADS[:5])
        second.register(NodeState.OFFLINE)
        first.register()
        with running_drainer(cluster, tmp_path / "two") as drainer:
            first.release(*PAYLOADS[5:])
            drainer.wait_for_ts(cluster, END)
            drainer.wait_until(lambda: set(json.loads(_get(cluster, "status"))["PumpPos"]) == {"first"})
            assert json.loads(_get(cluster, "status"))["LastTS"] == END
    assert _changes(tmp_path / "two") == expected


def test_paused_pump_holds_back_the_merge_and_is_named(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tidb.drainer._STALL_SECONDS", 0.0)
    with StandInPump(cluster, "first") as first, StandInPump(cluster, "second") as second:
        first.register()
        second.stop()
        second.register(NodeState.PAUSED)
        with running_drainer(cluster, tmp_path / "log") as drainer:
            first.release(*PAYLOADS)
            drainer.wait_until(lambda: "Pump second (paused)" in str(drainer.capture.status()["why"]))
            assert drainer.log.visible is None
            second.start()
            second.release_fake(END + 1)
            drainer.wait_for_ts(cluster, END)
            drainer.wait_until(lambda: drainer.capture.status()["why"] is None)


def test_instance_has_caught_up_only_while_every_pump_sends(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tidb.drainer._STALL_SECONDS", 0.0)
    with StandInPump(cluster, "first") as pump:
        pump.register()
        with running_drainer(cluster, tmp_path / "log") as drainer:

            def has_caught_up() -> bool:
                return drainer.capture.progress.caught_up

            pump.release(*PAYLOADS)
            drainer.wait_for_ts(cluster, END)
            assert not has_caught_up(), "the Pump may have much that is later"
            pump.release_fake()
            drainer.wait_until(has_caught_up)
            pump.stop()
            drainer.wait_until(lambda: not has_caught_up())
            drainer.wait_until(lambda: "the Pump first (online)" in str(drainer.capture.status()["why"]))
            pump.start()
            drainer.wait_until(lambda: len(pump.pulled_after) == 2)
            pump.release_fake()
            drainer.wait_until(has_caught_up)


def test_late_transaction_stops_every_later_run_until_its_record_is_deleted(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "log"
    with StandInPump(cluster, "first") as pump:
        pump.register()
        with running_drainer(cluster, folder) as drainer:
            pump.release(*PAYLOADS[:6])
            pump.release_fake(END)
            drainer.wait_for_ts(cluster, END)
            pump.release(PAYLOADS[6])
            drainer.wait_until(lambda: drainer.capture.status()["state"] is State.STOPPED)
    pulls = len(pump.pulled_after)
    with StandInPump(cluster, "first") as pump:
        pump.register()
        with running_drainer(cluster, folder) as drainer:
            drainer.wait_until(lambda: drainer.capture.status()["state"] in (State.STOPPED, State.RUNNING))
            error = drainer.capture.status()["error"]
            assert error["kind"] == "TransactionLate"
            assert error["position"] == str(last_commit_ts(PAYLOADS[:7]))
            assert str(folder / LATE_FILE) in error["hint"]
        (folder / LATE_FILE).unlink()
        with running_drainer(cluster, folder) as drainer:
            drainer.wait_until(lambda: pump.pulled_after)
    assert pulls == 1


def test_pump_that_purged_what_the_log_needs_is_not_asked_again(cluster: FakeCluster, tmp_path: Path) -> None:
    with StandInPump(cluster, "first") as pump:
        pump.purged_ts = END
        pump.register()
        with running_drainer(cluster, tmp_path / "log") as drainer:
            drainer.wait_until(lambda: drainer.capture.status()["state"] is State.STOPPED)
            assert drainer.capture.status()["error"]["kind"] == "PositionPurged"
        assert len(pump.pulled_after) == 1


def test_binlogctl_closes_the_drainer(cluster: FakeCluster, tmp_path: Path) -> None:
    with StandInPump(cluster, "first") as pump:
        pump.release(*PAYLOADS)
        pump.register()
        with running_drainer(cluster, tmp_path / "log") as drainer:
            drainer.wait_for_ts(cluster, END)
            assert json.loads(_get(cluster, "commit_ts"))["data"] == {"ts": END}
            assert json.loads(_put(cluster, "state/another/close"))["code"] == 2
            assert json.loads(_put(cluster, "state/drainer/close"))["code"] == 200
            drainer.wait_until(lambda: (registered(cluster) or {})["state"] == "offline")
            drainer.wait_until(lambda: drainer.capture.status()["state"] is State.STOPPED)


def test_log_of_another_cluster_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    _merged_by_one_pump(cluster, tmp_path / "log")
    cluster.cluster_id += 1
    with running_drainer(cluster, tmp_path / "log") as drainer:
        drainer.wait_until(lambda: drainer.capture.status()["error"] is not None)
        assert drainer.capture.status()["error"]["kind"] == "ServerChanged"


def _drainer_address(cluster: FakeCluster) -> str:
    node = registered(cluster)
    assert node is not None
    return str(node["host"])


def _get(cluster: FakeCluster, path: str, method: str = "GET") -> bytes:
    request = urllib.request.Request(f"http://{_drainer_address(cluster)}/{path}", method=method)
    with urllib.request.urlopen(request, timeout=10.0) as response:
        content: bytes = response.read()
        return content


def _put(cluster: FakeCluster, path: str) -> bytes:
    return _get(cluster, path, "PUT")
