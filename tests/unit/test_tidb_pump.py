# SPDX-License-Identifier: Apache-2.0
"""A Pump over gRPC and HTTP, in a cluster simulated by a stand-in in this process."""

import contextlib
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.errors import OptionInvalid
from penstock.limits import PUMP_SWITCH_SECONDS_MAX
from penstock.logstore.disk import LocalDisk
from penstock.logstore.epochs import seal_json
from penstock.settings.daemon import LogSettings
from penstock.settings.tidb_pump import PumpSettings
from penstock.telemetry.readings import Readings
from penstock.tidb import node_port, pump_service
from penstock.tidb import pump as pump_module
from penstock.tidb import resolver as resolver_module
from penstock.tidb.decisions import Decisions
from penstock.tidb.pump import Pump
from penstock.tidb.pump_readings import read_pump
from penstock.tidb.registry import NodeState
from tests.support.suite.patience import wait_until
from tests.support.tidb.binlogs import commit, matched, prewrite, rollback
from tests.support.tidb.pump_client import PumpClient
from tests.support.tidb.running_pump import (  # noqa: F401
    Start,
    ask,
    pump_cluster,
    pump_start,
    refusal,
    running_pump,
)
from tools.tidb.cluster import FakeCluster, RecordedTransaction

PUMPS = "/tidb-binlog/v1/pumps/"
DRAINERS = "/tidb-binlog/v1/drainers/"


# --- Writing and pulling --------------------------------------------------------------------


def test_transactions_are_pulled_as_they_commit(start: Start) -> None:
    client = start().client
    client.write(prewrite(1))
    client.write(prewrite(3, bytes(5 << 20)))
    client.write(commit(3, 5))
    client.write(commit(1, 7))
    assert client.pull_some(2) == [matched(3, 5, bytes(5 << 20)), matched(1, 7)]
    assert client.pull_some(1, after_ts=5) == [matched(1, 7)]


def test_writers_do_not_wait_for_the_interpreter(start: Start) -> None:
    sys.setswitchinterval(0.005)
    start()
    assert sys.getswitchinterval() == pytest.approx(PUMP_SWITCH_SECONDS_MAX)


def test_waiting_drainer_gets_the_next_transaction(start: Start) -> None:
    client = start().client
    client.write(prewrite(1))
    pulling = client.pull()
    client.write(commit(1, 7))
    assert next(pulling) == matched(1, 7)
    client.write(prewrite(9))
    client.write(commit(9, 11))
    assert matched(9, 11) in pulling


def test_compressed_pull_returns_the_same(start: Start) -> None:
    client = start(compress=True).client
    client.write(prewrite(1, bytes(100_000)))
    client.write(commit(1, 7))
    assert client.pull_some(1) == [matched(1, 7, bytes(100_000))]


def test_impossible_socket_ends_the_pump_with_its_reason(tmp_path: Path, cluster: FakeCluster) -> None:
    (tmp_path / "file").touch()
    with running_pump(tmp_path, cluster, socket=str(tmp_path / "file" / "pump.sock")) as begun:
        wait_until(lambda: begun.pump.join(0))
        assert "the port cannot be served" in str(begun.pump.status()["problem"])


def test_concurrent_writers_share_syncs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = start()
    syncs = []
    sync = begun.pump._store.log.sync

    def count_sync() -> None:
        syncs.append(1)
        sync()

    monkeypatch.setattr(begun.pump._store.log, "sync", count_sync)
    writes = [begun.client.write_later(prewrite(start_ts)) for start_ts in range(1, 121, 2)]
    assert [write.result() for write in writes] == [b""] * 60
    writes = [begun.client.write_later(commit(start_ts, start_ts + 500)) for start_ts in range(1, 121, 2)]
    assert [write.result() for write in writes] == [b""] * 60
    assert len(begun.client.pull_some(60)) == 60
    assert 2 <= len(syncs) < 100


def test_writers_of_a_pump_whose_disk_hangs_are_sent_to_another(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = start()
    monkeypatch.setattr(pump_service, "PUMP_WAITING_BYTES_MAX", 10_000)
    hanging, sync = threading.Event(), begun.pump._store.log.sync

    def hang() -> None:
        assert hanging.wait(60)
        sync()

    monkeypatch.setattr(begun.pump._store.log, "sync", hang)
    # A payload of any size is accepted while no other payload waits.
    waiting = begun.client.write_later(prewrite(1, bytes(20_000)))
    assert begun.pump._service is not None
    wait_until(lambda: begun.pump._service._waiting_bytes)
    code, text = refusal(lambda: begun.client.write(prewrite(3)))
    assert (code, "wait for the disk" in text) == ("UNAVAILABLE", True)
    hanging.set()
    assert waiting.result() == b""
    begun.client.write(prewrite(3))


def test_calls_that_have_not_arrived_whole_take_bounded_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = start()
    port = begun.pump._port
    begun.client.write(prewrite(1, bytes(4 << 20)))
    monkeypatch.setattr(node_port, "TIDB_UNFINISHED_BYTES_MAX", 1 << 20)
    code, _ = refusal(lambda: begun.client.write(prewrite(3, bytes(4 << 20))))
    assert code == "UNAVAILABLE"
    wait_until(lambda: port._unfinished_bytes == 0)

    def is_accepted() -> bool:
        # The client connects again.
        with contextlib.suppress(grpc.RpcError):
            begun.client.write(commit(1, 7))
            return True
        return False

    wait_until(is_accepted)
    assert begun.client.pull_some(1) == [matched(1, 7, bytes(4 << 20))]


def test_write_whose_sender_gave_up_counts_until_it_is_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = start()
    monkeypatch.setattr(pump_service, "PUMP_WAITING_BYTES_MAX", 10_000)
    commit_of_group, service = begun.pump._commit, begun.pump._service
    assert commit_of_group is not None
    assert service is not None
    submit, submitted = commit_of_group.submit, []

    def note(writes: Any) -> None:
        submitted.extend(writes)
        submit(writes)

    monkeypatch.setattr(commit_of_group, "submit", note)
    hanging, sync = threading.Event(), begun.pump._store.log.sync

    def hang() -> None:
        assert hanging.wait(60)
        sync()

    monkeypatch.setattr(begun.pump._store.log, "sync", hang)
    waiting = begun.client.write_later(prewrite(1, bytes(20_000)))
    wait_until(lambda: submitted)
    waiting.cancel()
    wait_until(lambda: submitted[0].is_abandoned)
    try:
        assert service._waiting_bytes > 20_000
    finally:
        hanging.set()
    wait_until(lambda: service._waiting_bytes == 0)


def test_waiting_write_whose_sender_gave_up_is_not_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = start()
    commit_of_group = begun.pump._commit
    assert commit_of_group is not None
    hanging, hung, submitted = threading.Event(), threading.Event(), []
    submit, sync = commit_of_group.submit, begun.pump._store.log.sync

    def note(writes: Any) -> None:
        submitted.extend(writes)
        submit(writes)

    def hang() -> None:
        hung.set()
        assert hanging.wait(60)
        sync()

    monkeypatch.setattr(commit_of_group, "submit", note)
    monkeypatch.setattr(begun.pump._store.log, "sync", hang)
    first = begun.client.write_later(prewrite(1))
    assert hung.wait(30)
    abandoned = begun.client.write_later(prewrite(3))
    wait_until(lambda: len(submitted) == 2)
    abandoned.cancel()
    wait_until(lambda: submitted[1].is_abandoned)
    hanging.set()
    assert first.result() == b""
    begun.client.write(prewrite(5))
    open_prewrites = begun.pump._store.matching.open_prewrites()
    assert [prewrite.start_ts for prewrite in open_prewrites] == [1, 5]


def test_unforeseen_failure_of_the_deciding_thread_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = start()
    failures = [KeyError("a defect")]
    waiting = Decisions.waiting

    def fail_first(self: Decisions) -> Any:
        if failures:
            raise failures.pop()
        return waiting(self)

    monkeypatch.setattr(Decisions, "waiting", fail_first)
    begun.client.write(prewrite(1))
    Decisions(LocalDisk(), tmp_path / "shop.pump").put(1, 5)
    assert begun.client.pull_some(1) == [matched(1, 5)]
    assert not failures


def test_unforeseen_failure_of_the_storing_thread_refuses_its_batch_and_opens_the_store_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = start()
    begun.client.write(prewrite(1))

    def fail(writes: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(begun.pump._store, "write", fail)
    code, text = refusal(lambda: begun.client.write(prewrite(3)))
    assert (code, "MemoryError" in text) == ("UNAVAILABLE", True)
    wait_until(lambda: begun.pump._open_store() is not None)
    begun.client.write(commit(1, 7))
    assert begun.client.pull_some(1) == [matched(1, 7)]


@pytest.mark.parametrize(
    ("payload", "code", "reason"),
    [
        (b"\xff\xff", "INVALID_ARGUMENT", "malformed payload"),
        (commit(9, 11), "FAILED_PRECONDITION", "commit without prewrite"),
        (prewrite(1, b"other"), "FAILED_PRECONDITION", "two prewrites of one start timestamp"),
        (commit(1, 1), "FAILED_PRECONDITION", "timestamp goes backwards"),
    ],
)
def test_bad_payload_is_not_acknowledged_and_counted(
    start: Start, payload: bytes, code: str, reason: str
) -> None:
    begun = start()
    begun.client.write(prewrite(1))
    assert refusal(lambda: begun.client.write(payload))[0] == code
    assert begun.pump.status()["refused"] == {reason: 1}


def test_wrong_cluster_is_refused_in_the_words_of_the_original(start: Start) -> None:
    begun = start()
    with PumpClient(begun.pump.address, cluster_id=7002) as other:
        assert refusal(lambda: other.write(b"")) == ("UNKNOWN", "cluster ID are mismatch, 7002 vs 7001")
        # A Drainer must stop here; the original Drainer stops at any refusal.
        assert refusal(lambda: other.pull_some(1))[0] == "FAILED_PRECONDITION"
    assert begun.pump.status()["refused"] == {"wrong cluster id": 2}


def test_probe_and_unknown_rollback_are_accepted(start: Start) -> None:
    begun = start()
    begun.client.write(b"")
    begun.client.write(rollback(9))
    assert begun.pump.status()["stored"] == 0


def test_garbage_closes_only_its_own_connection(start: Start) -> None:
    begun = start()
    host, _, port = begun.pump.address.rpartition(":")
    for garbage in (
        b"\x00" * 100,
        b"PRI * HTTP/1.1\r\n\r\n",
        b"GET " + b"x" * 200_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(30)
            connection.sendall(garbage)
            try:
                while connection.recv(65536):
                    pass
            except ConnectionResetError:
                pass
    begun.client.write(prewrite(1))


def test_unix_socket_is_the_same_pump(start: Start, tmp_path: Path) -> None:
    begun = start(socket=str(tmp_path / "pump.sock"))
    with PumpClient(f"unix:{tmp_path}/pump.sock") as local:
        local.write(prewrite(1))
    begun.client.write(commit(1, 7))
    assert begun.client.pull_some(1) == [matched(1, 7)]


def test_taken_port_is_reported_at_once(start: Start, tmp_path: Path, cluster: FakeCluster) -> None:
    begun = start()
    with pytest.raises(OptionInvalid, match="cannot be listened on"):
        Pump(
            "other",
            [cluster.address],
            PumpSettings(listen=begun.pump.address),
            LogSettings(folder=tmp_path / "o"),
        )


# --- Outcomes that do not arrive ------------------------------------------------------------


def test_lost_commit_is_found_in_tikv(start: Start) -> None:
    begun = start()
    begun.cluster.transactions[1] = RecordedTransaction(commit_ts=7)
    begun.cluster.transactions[3] = RecordedTransaction(rolled_back=True)
    begun.client.write(prewrite(1))
    begun.client.write(prewrite(3))
    assert begun.client.pull_some(1) == [matched(1, 7)]
    wait_until(lambda: begun.pump.status()["open"] == 0)


def test_undecided_transaction_holds_everything_after_it_and_is_named(start: Start) -> None:
    begun = start()
    begun.cluster.transactions[1] = RecordedTransaction(lock_ttl_ms=3000)
    before = dict(begun.cluster.transactions)
    begun.client.write(prewrite(1))
    begun.client.write(prewrite(3))
    begun.client.write(commit(3, 5))
    wait_until(lambda: len(begun.cluster.status_requests) > 5)
    assert begun.pump.status()["stalled_by"]["start_ts"] == 1
    assert "the transaction 1 has no outcome" in begun.pump.status()["problem"]
    assert (begun.pump.status()["released_ts"], begun.cluster.transactions) == (0, before)
    assert not any(
        request["current_ts"] or request["rollback_if_not_exist"] for request in begun.cluster.status_requests
    )
    begun.cluster.transactions[1] = RecordedTransaction(commit_ts=9)
    assert begun.client.pull_some(2) == [matched(3, 5), matched(1, 9)]


def test_operator_decides_a_transaction_that_tikv_does_not_know(start: Start, tmp_path: Path) -> None:
    begun = start()
    for start_ts in (1, 3):
        begun.client.write(prewrite(start_ts))
    decisions = Decisions(LocalDisk(), tmp_path / "shop.pump")
    decisions.put(3, 0)
    path = decisions.put(1, 5)
    assert begun.client.pull_some(1) == [matched(1, 5)]
    wait_until(lambda: not path.exists())
    record = json.loads((path.parent / "carried-out/1.json").read_text())
    assert (record["commit_ts"], record["time"] > 0) == (5, True)


def test_decision_waits_for_its_prewrite(start: Start, tmp_path: Path) -> None:
    begun = start()
    path = Decisions(LocalDisk(), tmp_path / "shop.pump").put(9, 11)
    wait_until(lambda: begun.pump.status()["decisions"] == {"9": "waits for its prewrite"})
    # A decision about another transaction shows that a pass of the resolver is over.
    begun.client.write(prewrite(1))
    Decisions(LocalDisk(), tmp_path / "shop.pump").put(1, 5)
    assert begun.client.pull_some(1) == [matched(1, 5)]
    assert path.exists()
    begun.client.write(prewrite(9))
    assert begun.client.pull_some(1, after_ts=5) == [matched(9, 11)]


@pytest.mark.parametrize("commit_ts", [7, 5, 6, 0])
def test_impossible_decision_is_refused_once_and_stays_as_a_record(
    start: Start, tmp_path: Path, commit_ts: int
) -> None:
    begun = start()
    for payload in (prewrite(1), commit(1, 7), prewrite(6)):
        begun.client.write(payload)
    # Both decisions are refused: to roll back a committed transaction, and to commit before the last release.
    start_ts = 6 if commit_ts else 1
    path = Decisions(LocalDisk(), tmp_path / "shop.pump").put(start_ts, commit_ts)
    wait_until(lambda: not path.exists())
    wait_until(lambda: "refused: the transaction" in str(begun.pump.status()["decisions"].get(str(start_ts))))
    assert "why" in json.loads((path.parent / f"refused/{start_ts}.json").read_text())
    assert begun.pump.status()["open"] == 1
    begun.client.write(commit(6, 9))
    assert begun.client.pull_some(2) == [matched(1, 7), matched(6, 9)]


def test_decision_that_was_recorded_before_a_kill_is_not_carried_out_again(tmp_path: Path) -> None:
    decisions = Decisions(LocalDisk(), tmp_path)
    path = decisions.put(1, 5)
    left = path.read_bytes()
    decisions.close(1, 5, None)
    path.write_bytes(left)
    assert list(decisions.waiting()) == []
    assert not path.exists()


def test_transaction_is_decided_only_once(start: Start, tmp_path: Path) -> None:
    begun = start()
    begun.client.write(prewrite(1))
    folder = tmp_path / "shop.pump"
    path = Decisions(LocalDisk(), folder).put(1, 5)
    assert begun.client.pull_some(1) == [matched(1, 5)]
    wait_until(lambda: not path.exists())
    for commit_ts in (0, 5, 9):
        for dry_run in (True, False):
            with pytest.raises(OptionInvalid, match="decided before: it committed at 5"):
                begun.pump.decide(1, commit_ts, dry_run=dry_run)
    # Another process may write its file at the moment at which an earlier decision is carried out.
    LocalDisk().write_atomic(path, seal_json({"commit_ts": 0}))
    wait_until(lambda: not path.exists())
    assert "it committed at 5" in json.loads((folder / "decisions/refused/1.json").read_text())["why"]
    assert json.loads((folder / "decisions/carried-out/1.json").read_text())["commit_ts"] == 5


def test_decide_after_rolls_back_in_the_cluster(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = start(decide_after="10m")
    begun.client.write(prewrite(1))
    wait_until(lambda: len(begun.cluster.status_requests) > 3)
    assert begun.cluster.transactions == {}
    now = resolver_module.time.monotonic()
    assert begun.pump._deciding is not None
    monkeypatch.setattr(begun.pump._deciding.resolver, "_clock", lambda: now + 700)
    wait_until(lambda: begun.pump.status()["open"] == 0)
    assert begun.cluster.transactions[1].rolled_back


# --- States ---------------------------------------------------------------------------------


def test_idle_pump_advances_by_fakes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump_module, "_FAKE_SECONDS", 0.02)
    begun = start()
    payload = next(begun.client.pull())
    assert payload.startswith(b"\x08\x02")
    wait_until(lambda: begun.node["maxCommitTS"] > 0)


def test_node_tells_its_load(start: Start) -> None:
    node = start().node
    assert (node["nodeId"], node["isAlive"], sorted(node["label"]["labels"])) == (
        "pump-1",
        True,
        ["backlog", "free_bytes", "writes_per_second"],
    )
    assert 0 < node["score"] <= 100
    assert node["updateTS"] > 0


def test_binlogctl_pauses_and_resumes_a_pump(start: Start) -> None:
    begun = start()
    begun.client.write(prewrite(1))
    assert ask(begun.pump.address, "PUT", "/state/other/pause")[1]["code"] == 2
    assert ask(begun.pump.address, "PUT", "/state/pump-1/stop")[1]["code"] == 1
    assert ask(begun.pump.address, "PUT", "/state/pump-1/pause")[1]["code"] == 200
    begun.wait_for(NodeState.PAUSED)
    assert ask(begun.pump.address, "PUT", "/state/pump-1/pause")[1]["code"] == 3
    assert refusal(lambda: begun.client.write(prewrite(3))) == ("UNAVAILABLE", "no online: pausing")
    begun.client.write(commit(1, 7))
    assert begun.client.pull_some(1) == [matched(1, 7)]
    begun.cluster.keys[PUMPS + "pump-1"] = json.dumps(begun.node | {"state": "online"}).encode()
    begun.wait_for(NodeState.ONLINE)
    begun.client.write(prewrite(3))


def test_status_is_that_of_the_original(start: Start) -> None:
    begun = start()
    status, answer = ask(begun.pump.address, "GET", "/status")
    assert (status, answer["status"]["pump-1"]["state"], answer["ErrMsg"]) == (200, "online", "")
    assert answer["penstock"]["node_id"] == "pump-1"
    assert ask(begun.pump.address, "GET", "/nothing")[0] == 404


def test_metrics_tell_what_a_pump_refused_and_what_holds_it_back(start: Start) -> None:
    begun = start()
    begun.client.write(prewrite(1))
    refusal(lambda: begun.client.write(commit(9, 11)))
    wait_until(lambda: "stalled_by" in begun.pump.status())
    readings = Readings()
    read_pump(begun.pump, readings)
    shop = ("penstock_instance", "shop")
    assert readings.values("penstock_pump_stored_total") == {(shop,): 1}
    assert readings.values("penstock_pump_open_transactions") == {(shop,): 1}
    assert readings.values("penstock_pump_refused_total") == {
        (shop, ("reason", "commit without prewrite")): 1
    }
    assert readings.values("penstock_pump_state")[shop, ("state", "online")] == 1
    assert (shop,) in readings.values("penstock_pump_stalled_seconds")
