# SPDX-License-Identifier: Apache-2.0
"""The Pumps and Drainers of a TiDB cluster, as they are registered in PD's etcd.

A node is a JSON object below `/tidb-binlog/v1/pumps/` or `/tidb-binlog/v1/drainers/`. It has no lease: a node
that died stays registered as it was, and only its `update_ts` stops advancing. TiDB's pump client, the
original Pump and Drainer, and binlogctl read and write the same objects.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, Self

import structlog

from penstock.errors import EventMalformed, VersionConflict
from penstock.tidb.messages import (
    ETCD_RANGE,
    ETCD_TXN,
    etcd_key_request,
    etcd_key_values,
    etcd_prefix_request,
    etcd_put_request,
    etcd_replace_request,
    etcd_revision,
    etcd_txn_succeeded,
)

_log = structlog.get_logger(__name__)

_ROOT = "/tidb-binlog/v1"


class NodeKind(StrEnum):
    """The role of a node. The value is the name of its folder in the registry."""

    PUMP = "pumps"
    DRAINER = "drainers"


class NodeState(StrEnum):
    """The state of a node. A Pump that is not online accepts no prewrites, and a Drainer that is not online
    drains nothing.
    """

    ONLINE = "online"
    PAUSING = "pausing"
    PAUSED = "paused"
    CLOSING = "closing"
    OFFLINE = "offline"


@dataclass(frozen=True)
class Node:
    """A registered node. `host` is host:port of both its gRPC and its HTTP service.

    Up to the commit timestamp `max_commit_ts`, a Pump has released everything, or a Drainer has stored
    everything. `update_ts` is the cluster's time when the entry was last written.
    """

    node_id: str
    host: str
    state: NodeState
    max_commit_ts: int = 0
    update_ts: int = 0
    score: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def with_state(self, state: NodeState) -> Self:
        """Return this node in another state."""
        return replace(self, state=state)

    def to_values(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "nodeId": self.node_id,
            "host": self.host,
            "state": str(self.state),
            "isAlive": self.state is NodeState.ONLINE,
            "score": self.score,
            "label": {"labels": dict(self.labels)} if self.labels else None,
            "maxCommitTS": self.max_commit_ts,
            "updateTS": self.update_ts,
        }

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Read the JSON object. Raises EventMalformed if it is not a node."""
        try:
            values = json.loads(content)
            return cls(
                str(values["nodeId"]),
                str(values["host"]),
                NodeState(values["state"]),
                int(values.get("maxCommitTS") or 0),
                int(values.get("updateTS") or 0),
                int(values.get("score") or 0),
                dict((values.get("label") or {}).get("labels") or {}),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise EventMalformed(
                f"a node in the registry is {content[:200]!r}, which is neither a Pump nor a Drainer",
                hint="Correct or delete it with etcdctl",
            ) from problem


@dataclass(frozen=True)
class Listing:
    """The registered nodes of one kind, by id. `unreadable` maps the ids of the remaining entries to the
    problem of each.
    """

    nodes: Mapping[str, Node]
    unreadable: Mapping[str, str]


class Etcd(Protocol):
    """The part of `Cluster` that a registry uses."""

    def call_etcd(self, method: str, request: bytes) -> bytes:
        """Call a method of PD's etcd."""


class Registry:
    """Reads and writes the nodes of one cluster in its registry. Thread-safe. Every method raises
    ConnectionLost and AccessDenied.
    """

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    def list(self, kind: NodeKind) -> Listing:
        """Return all registered nodes of a kind. An unreadable entry may be any node, in any state."""
        nodes, unreadable = {}, {}
        folder = f"{_ROOT}/{kind}/"
        response = self._etcd.call_etcd(ETCD_RANGE, etcd_prefix_request(folder))
        for key, content in etcd_key_values(response):
            try:
                node = Node.parse(content)
            except EventMalformed as problem:
                unreadable[key.removeprefix(folder)] = str(problem)
                continue
            nodes[node.node_id] = node
        return Listing(nodes, unreadable)

    def node(self, kind: NodeKind, node_id: str) -> tuple[Node | None, int]:
        """Return one node and its revision for `replace`; None if it is missing or unreadable."""
        response = self._etcd.call_etcd(ETCD_RANGE, etcd_key_request(f"{_ROOT}/{kind}/{node_id}"))
        node = None
        for key, content in etcd_key_values(response):
            try:
                node = Node.parse(content)
            except EventMalformed as problem:
                _log.error("a registered node cannot be read", key=key, why=str(problem))
        return node, etcd_revision(response)

    def replace(self, kind: NodeKind, node: Node, revision: int) -> bool:
        """Replace a node unless it was changed since a revision. Returns whether it was replaced."""
        content = json.dumps(node.to_values()).encode()
        request = etcd_replace_request(f"{_ROOT}/{kind}/{node.node_id}", content, revision)
        return etcd_txn_succeeded(self._etcd.call_etcd(ETCD_TXN, request))

    def put(self, kind: NodeKind, node: Node) -> None:
        """Register a node, or replace it. Raises VersionConflict if others create and delete it
        concurrently.
        """
        content = json.dumps(node.to_values()).encode()
        key = f"{_ROOT}/{kind}/{node.node_id}"
        for exists in (True, False, True):
            request = etcd_put_request(key, content, exists=exists)
            if etcd_txn_succeeded(self._etcd.call_etcd(ETCD_TXN, request)):
                return
        raise VersionConflict(f"the node {node.node_id} is created and deleted by others in turn")
