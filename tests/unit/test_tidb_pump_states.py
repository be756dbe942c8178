# SPDX-License-Identifier: Apache-2.0
"""How a Pump joins and leaves its cluster, and the conditions that it waits for."""

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConnectionLost
from penstock.settings.daemon import LogSettings
from penstock.tidb import pump as pump_module
from penstock.tidb.messages import NOTIFY, BinlogHead
from penstock.tidb.pump_log import PumpLog
from penstock.tidb.registry import Listing, NodeKind, NodeState
from tests.support.suite.patience import wait_until
from tests.support.tidb.binlogs import commit, matched, prewrite
from tests.support.tidb.running_pump import (  # noqa: F401
    Start,
    ask,
    pump_cluster,
    pump_start,
    refusal,
    register_drainer,
    running_pump,
)
from tools.tidb.cluster import FakeCluster

PUMPS = "/tidb-binlog/v1/pumps/"
DRAINERS = "/tidb-binlog/v1/drainers/"


def test_closing_pump_waits_for_drainers_and_goes_on_sending_fakes(start: Start) -> None:
    begun = start()
    register_drainer(begun.cluster, max_commit_ts=5)
    ask(begun.pump.address, "PUT", "/state/pump-1/close")
    wait_until(lambda: "the Drainer d has everything up to 5 only" in str(begun.pump.status()["problem"]))
    assert begun.pump.state is NodeState.CLOSING
    # The original Drainer stores a fake's timestamp only if later fakes follow.
    pulling = begun.client.pull()
    fakes = [BinlogHead.decode(next(pulling)).commit_ts for _ in range(3)]
    register_drainer(begun.cluster, max_commit_ts=fakes[1])
    begun.wait_for(NodeState.OFFLINE)


def test_closing_of_a_pump_can_be_revoked_in_the_registry(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = start()
    register_drainer(begun.cluster, max_commit_ts=5)
    ask(begun.pump.address, "PUT", "/state/pump-1/close")
    wait_until(lambda: "the Drainer d has" in str(begun.pump.status()["problem"]))
    registered, revoked = begun.pump._registry.node, threading.Event()

    def revoke(*arguments: Any) -> Any:
        node, revision = registered(*arguments)
        if not revoked.is_set():
            assert node is not None
            node = dataclasses.replace(node, state=NodeState.ONLINE)
            revoked.set()
        return node, revision

    monkeypatch.setattr(begun.pump._registry, "node", revoke)
    wait_until(revoked.is_set)
    begun.wait_for(NodeState.ONLINE)
    begun.client.write(prewrite(1))


def test_closing_pump_survives_an_absent_registry(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = start()
    list_nodes, failures = begun.pump._registry.list, [ConnectionLost("PD is away")] * 3

    def fail_first(kind: NodeKind) -> Listing:
        if failures:
            raise failures.pop()
        return list_nodes(kind)

    monkeypatch.setattr(begun.pump._registry, "list", fail_first)
    ask(begun.pump.address, "PUT", "/state/pump-1/close")
    begun.wait_for(NodeState.OFFLINE)
    assert not failures


def test_new_pump_is_online_only_after_every_drainer_knows_it(
    tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump_module, "_NOTIFY_TRIES", 1)
    register_drainer(cluster, NodeState.ONLINE)
    with running_pump(tmp_path, cluster) as begun:
        wait_until(lambda: "d (" in str(begun.pump.status()["problem"]))
        assert "binlogctl" in begun.pump.status()["problem"]
        assert begun.node["state"] == "paused"
        assert refusal(lambda: begun.client.write(prewrite(1))) == ("UNAVAILABLE", "no online: paused")
        cluster.notified = True
        begun.wait_for(NodeState.ONLINE)
    assert cluster.calls.count(NOTIFY) >= 2
    # The Drainer knows the Pump now, so a restart does not wait for the Drainer.
    cluster.notified = False
    with running_pump(tmp_path, cluster) as begun:
        begun.wait_for(NodeState.ONLINE)


def test_stopped_pump_is_paused_and_starts_again_with_everything(
    tmp_path: Path, cluster: FakeCluster
) -> None:
    with running_pump(tmp_path, cluster) as begun:
        begun.wait_for(NodeState.ONLINE)
        begun.client.write(prewrite(1))
    assert json.loads(cluster.keys[PUMPS + "pump-1"])["state"] == "paused"
    with running_pump(tmp_path, cluster) as begun:
        begun.wait_for(NodeState.ONLINE)
        begun.client.write(commit(1, 7))
        assert begun.client.pull_some(1) == [matched(1, 7)]


def test_pump_waits_for_the_log_of_one_that_is_ending(tmp_path: Path, cluster: FakeCluster) -> None:
    log = PumpLog(tmp_path / "shop.pump", LogSettings(), 7001)
    with running_pump(tmp_path, cluster) as begun:
        wait_until(lambda: "writes the log" in str(begun.pump.status()["problem"]))
        log.close()
        begun.wait_for(NodeState.ONLINE)


def test_stop_ends_the_calls_of_drainers_at_once(tmp_path: Path, cluster: FakeCluster) -> None:
    with running_pump(tmp_path, cluster) as begun:
        begun.wait_for(NodeState.ONLINE)
        begun.client.write(prewrite(1))
        begun.client.write(commit(1, 7))
        pulling = begun.client.pull()
        assert next(pulling) == matched(1, 7)
        begun.pump.stop()
        assert refusal(lambda: list(pulling)) == ("UNAVAILABLE", "the Pump is ending")


def test_pump_survives_an_absent_cluster(start: Start) -> None:
    begun = start()
    begun.cluster.stop()
    wait_until(lambda: begun.pump.status()["problem"])
    begun.client.write(prewrite(1))
    begun.client.write(commit(1, 7))
    assert begun.client.pull_some(1) == [matched(1, 7)]
    begun.cluster.start()
    wait_until(lambda: begun.pump.status()["problem"] is None)


def test_log_is_held_for_drainers(start: Start, tmp_path: Path) -> None:
    begun = start()
    begun.client.write(prewrite(1))
    begun.client.write(commit(1, 7))
    register_drainer(begun.cluster, max_commit_ts=5)
    hold = tmp_path / "shop.pump/holds/penstock.pump.json"
    (entry,) = begun.pump._store.index.after(5, 1)
    assert entry.location is not None
    position = str(begun.pump._store.log.position_of(entry.location))
    wait_until(lambda: hold.exists() and json.loads(hold.read_text())["position"] == position)


def test_closing_pump_waits_for_drainers_to_store_its_last_commit(start: Start) -> None:
    begun = start()
    begun.client.write(prewrite(1))
    register_drainer(begun.cluster, max_commit_ts=5)
    ask(begun.pump.address, "PUT", "/state/pump-1/close")
    wait_until(lambda: "the transaction 1 has no outcome" in str(begun.pump.status()["problem"]))
    # The transaction commits after the Pump has begun to close, so its commit timestamp is later than the
    # timestamp of the first fake binlog.
    commit_ts = begun.cluster.next_timestamp()
    begun.client.write(commit(1, commit_ts))
    register_drainer(begun.cluster, max_commit_ts=commit_ts - 1)
    wait_until(lambda: f"everything up to {commit_ts - 1} only" in str(begun.pump.status()["problem"]))
    last_ts = begun.pump._last_ts
    assert last_ts is not None
    assert last_ts >= commit_ts
    register_drainer(begun.cluster, max_commit_ts=last_ts)
    begun.wait_for(NodeState.OFFLINE)
    # A Drainer need not read the following fake, which only says that nothing is left.
    assert begun.node["maxCommitTS"] == last_ts


def test_unreadable_drainer_is_waited_for(tmp_path: Path, cluster: FakeCluster) -> None:
    cluster.keys[DRAINERS + "d"] = b"{"
    with running_pump(tmp_path, cluster) as begun:
        wait_until(lambda: "d (a node in the registry" in str(begun.pump.status()["problem"]))
        del cluster.keys[DRAINERS + "d"]
        begun.wait_for(NodeState.ONLINE)
        cluster.keys[DRAINERS + "d"] = b"{"
        ask(begun.pump.address, "PUT", "/state/pump-1/close")
        wait_until(lambda: "the Drainer d may still need binlogs" in str(begun.pump.status()["problem"]))
        del cluster.keys[DRAINERS + "d"]
        begun.wait_for(NodeState.OFFLINE)
