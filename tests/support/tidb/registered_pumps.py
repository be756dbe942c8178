# SPDX-License-Identifier: Apache-2.0
"""A registry of Pumps in memory, and a reader that receives nothing, for tests of the members of a merge."""

import json

from penstock.tidb.messages import ETCD_RANGE
from penstock.tidb.registry import Node, NodeState
from tools.tidb.cluster import FakeCluster

_PUMPS = "/tidb-binlog/v1/pumps/"


class MemoryEtcd:
    """The registry of a cluster, accessed without a connection."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()

    def call_etcd(self, method: str, request: bytes) -> bytes:
        """Answer as PD's etcd does."""
        answer = self.cluster.range if method == ETCD_RANGE else self.cluster.put
        return answer(request)

    def put(self, name: str, state: NodeState = NodeState.ONLINE, max_commit_ts: int = 0) -> None:
        """Register a Pump."""
        node = Node(name, f"{name}:8250", state, max_commit_ts)
        self.cluster.keys[_PUMPS + name] = json.dumps(node.to_values()).encode()

    def damage(self, name: str) -> None:
        """Make a Pump's entry unreadable."""
        self.cluster.keys[_PUMPS + name] = b"{"

    def delete(self, name: str) -> None:
        """Delete a Pump's entry."""
        self.cluster.keys.pop(_PUMPS + name, None)


class StandInReader:
    """Replaces a reader of a Pump. Tests put binlogs into the merge themselves."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.problem: str | None = None
        self.silence: float | None = None

    def start(self) -> None:
        """Begin to send."""
        self.silence = 0.0

    def stop(self) -> None:
        """End."""
        self.silence = None

    def silent_seconds(self) -> float | None:
        """Return the time since the Pump last sent data."""
        return self.silence

    def fail(self, problem: str) -> None:
        """Lose the connection."""
        self.problem, self.silence = problem, None
