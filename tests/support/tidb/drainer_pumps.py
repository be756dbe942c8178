# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for Pumps, for tests only: they serve PullBinlogs from memory, as the original Pump does."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from penstock.tidb.messages import (
    PULL_BINLOGS,
    BinlogHead,
    BinlogKind,
    encode_binlog,
    pull_binlogs_response,
    read_pull_binlogs_request,
)
from penstock.tidb.registry import Node, NodeKind, NodeState
from tools.tidb.cluster import FakeCluster


class StandInPump:
    """A Pump of a cluster at a separate port. Register it with `register`, and close it at the end."""

    def __init__(self, cluster: FakeCluster, name: str) -> None:
        self.name = name
        # The timestamps from which Drainers opened streams.
        self.pulled_after: list[int] = []
        self._cluster = cluster
        self._binlogs: list[tuple[int, bytes]] = []
        # Binlogs up to this commit timestamp are not kept.
        self.purged_ts = 0
        self._changed = threading.Condition()
        self._closed = False
        self._server: grpc.Server | None = None
        self.port = 0
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to serve, at the same port as before."""
        self._closed = False
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_PumpHandlers(self),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Cut every connection."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        server, self._server = self._server, None
        if server is not None:
            server.stop(None).wait()

    def register(self, state: NodeState = NodeState.ONLINE) -> None:
        """Write the node into the registry, with everything released so far."""
        with self._changed:
            last = self._binlogs[-1][0] if self._binlogs else 0
        node = Node(self.name, f"127.0.0.1:{self.port}", state, max_commit_ts=last)
        key = f"/tidb-binlog/v1/{NodeKind.PUMP}/{self.name}"
        self._cluster.keys[key] = json.dumps(node.to_values()).encode()

    def release(self, *payloads: bytes) -> None:
        """Release matched binlogs, in commit order."""
        with self._changed:
            self._binlogs += [(BinlogHead.decode(payload).commit_ts, payload) for payload in payloads]
            self._changed.notify_all()

    def release_fake(self, commit_ts: int | None = None) -> None:
        """Send a fake binlog: no transaction up to a timestamp follows it. The default is the current
        time.
        """
        commit_ts = commit_ts or self._cluster.next_timestamp()
        self.release(encode_binlog(BinlogKind.ROLLBACK, commit_ts, commit_ts))

    def pull(self, request: bytes, context: Any) -> Iterator[bytes]:
        """Answer PullBinlogs."""
        cluster_id, after = read_pull_binlogs_request(request)
        assert cluster_id == self._cluster.cluster_id
        self.pulled_after.append(after)
        if after < self.purged_ts:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, f"all up to {self.purged_ts} was purged")
        context.add_callback(self._wake)
        sent = 0
        while True:
            with self._changed:
                while not self._closed and context.is_active() and len(self._binlogs) <= sent:
                    self._changed.wait()
                if self._closed or not context.is_active():
                    return
                following, sent = self._binlogs[sent:], len(self._binlogs)
            for commit_ts, payload in following:
                if commit_ts > after:
                    yield pull_binlogs_response(commit_ts, payload)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _PumpHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, pump: StandInPump) -> None:
        self._pump = pump

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method != PULL_BINLOGS:
            return None
        return grpc.unary_stream_rpc_method_handler(self._pump.pull)
