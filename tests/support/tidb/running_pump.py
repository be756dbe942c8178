# SPDX-License-Identifier: Apache-2.0
"""A Pump in this process, in a simulated cluster, and a client of the Pump."""

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.retry import Backoff
from penstock.settings.daemon import LogSettings
from penstock.settings.tidb_pump import PumpSettings
from penstock.tidb import deciding
from penstock.tidb import pump as pump_module
from penstock.tidb import resolver as resolver_module
from penstock.tidb.pump import Pump
from penstock.tidb.registry import Node, NodeKind, NodeState
from tests.support.suite.patience import wait_until
from tests.support.tidb.pump_client import PumpClient
from tools.tidb.cluster import FakeCluster


@pytest.fixture(name="cluster")
def pump_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A cluster for Pumps. The Pumps' intervals are short, because the tests wait for them."""
    for name in ("_TICK_SECONDS", "_HEARTBEAT_SECONDS", "_HOLD_SECONDS"):
        monkeypatch.setattr(pump_module, name, 0.02)
    monkeypatch.setattr(deciding, "_RESOLVE_SECONDS", 0.02)
    monkeypatch.setattr(resolver_module, "_ASK_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(resolver_module, "_ASK_AGAIN", Backoff(0.02, 0.02))
    monkeypatch.setattr(resolver_module, "_STALLED_SECONDS", 0.0)
    with FakeCluster() as fake:
        yield fake


class RunningPump:
    """A running Pump, its cluster, and a client."""

    def __init__(self, pump: Pump, cluster: FakeCluster) -> None:
        self.pump = pump
        self.cluster = cluster
        self.client = PumpClient(pump.address)

    @property
    def node(self) -> dict[str, Any]:
        """The registered node."""
        node: dict[str, Any] = json.loads(self.cluster.keys[f"/tidb-binlog/v1/pumps/{self.pump.node_id}"])
        return node

    def wait_for(self, state: NodeState) -> None:
        """Wait until the Pump is in a state, and its registration says so."""
        wait_until(lambda: self.pump.state is state and self.node["state"] == state)


Start = Callable[..., RunningPump]


@contextmanager
def running_pump(folder: Path, cluster: FakeCluster, **settings: Any) -> Iterator[RunningPump]:
    """Run a Pump with its log in a folder until the end of the block."""
    options = {"listen": "127.0.0.1:0", "node_id": "pump-1", **settings}
    log = LogSettings(folder=folder / "shop.pump")
    pump = Pump("shop", [cluster.address], PumpSettings.model_validate(options), log)
    pump.start()
    try:
        with PumpClient(pump.address):
            yield RunningPump(pump, cluster)
    finally:
        pump.stop()
        assert pump.join(30)


@pytest.fixture(name="start")
def pump_start(tmp_path: Path, cluster: FakeCluster) -> Iterator[Start]:
    """Return a function that starts a Pump and waits until it is online."""
    with ExitStack() as stack:

        def begin(**settings: Any) -> RunningPump:
            begun = stack.enter_context(running_pump(tmp_path, cluster, **settings))
            begun.wait_for(NodeState.ONLINE)
            return begun

        yield begin


def register_drainer(
    cluster: FakeCluster, state: NodeState = NodeState.PAUSED, max_commit_ts: int = 0
) -> None:
    """Register the Drainer `d`, at the cluster's own address."""
    node = Node("d", cluster.address, state, max_commit_ts=max_commit_ts)
    cluster.keys[f"/tidb-binlog/v1/{NodeKind.DRAINER}/d"] = json.dumps(node.to_values()).encode()


def ask(address: str, method: str, path: str) -> tuple[int, Any]:
    """Call an address over HTTP; return the status and the JSON object."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """Return the code and the text of the error of a refused call."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code().name, raised.value.details()
