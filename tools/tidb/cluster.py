# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a TiDB cluster: PD with its etcd, and the transactions that TiKV recorded.

It answers the calls that Penstock makes, from memory. The programs of `tools/tidb_peers` test the answers of
a real cluster.
"""

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from penstock.protobuf import Message, encode
from penstock.tidb.cluster import memcomparable
from penstock.tidb.messages import (
    CHECK_TXN_STATUS,
    ETCD_RANGE,
    ETCD_TXN,
    GET_MEMBERS,
    GET_REGION,
    GET_STORE,
    LOGICAL_BITS,
    NOTIFY,
    SCAN,
    TSO,
)

_THREADS = 8


@dataclass
class RecordedTransaction:
    """TiKV's record of a transaction: a commit, a rollback, a lock, or no record at all."""

    commit_ts: int = 0
    rolled_back: bool = False
    lock_ttl_ms: int = 0


@dataclass
class FakeCluster:
    """The state of a TiDB cluster, and its server, which runs inside a `with` block. `calls` contains the
    method of every call.
    """

    cluster_id: int = 7001
    transactions: dict[int, RecordedTransaction] = field(default_factory=dict)
    # The values of other keys in TiKV.
    values: dict[bytes, bytes] = field(default_factory=dict)
    # How many of the next calls of CheckTxnStatus find no region, as during a split.
    region_errors: int = 0
    # Whether PD has no leader.
    leaderless: bool = False
    # Whether the server also answers Notify, as a Drainer does.
    notified: bool = False
    keys: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    status_requests: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._last_ts = 0
        self._server: grpc.Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """host:port of PD and TiKV."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to serve, at the same port as before."""
        self._server = grpc.server(ThreadPoolExecutor(_THREADS), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        """Cut every connection."""
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def next_timestamp(self) -> int:
        """Return a timestamp above all earlier ones, at the current time."""
        with self._lock:
            self._last_ts = max(self._last_ts + 1, int(time.time() * 1000) << LOGICAL_BITS)
            return self._last_ts

    # --- The answers ------------------------------------------------------------------------

    def members(self, request: bytes) -> bytes:
        """Answer GetMembers."""
        member = encode((1, "pd"), (2, 1), (4, f"http://{self.address}"))
        leader = b"" if self.leaderless else encode((3, member), (4, member))
        return encode(self._header(), (2, member)) + leader

    def timestamps(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answer a stream of TSO requests."""
        for _ in requests:
            timestamp = self.next_timestamp()
            logical = timestamp & ((1 << LOGICAL_BITS) - 1)
            parts = encode((1, timestamp >> LOGICAL_BITS), (2, logical))
            yield encode(self._header(), (2, 1), (3, parts))

    def region(self, request: bytes) -> bytes:
        """Answer GetRegion with the only region."""
        peer = encode((1, 3), (2, 1))
        region = encode((1, 2), (4, encode((1, 1), (2, 1))), (5, peer))
        return encode(self._header(), (2, region), (3, peer))

    def store(self, request: bytes) -> bytes:
        """Answer GetStore with this server."""
        return encode(self._header(), (2, encode((1, 1), (2, self.address))))

    def transaction_status(self, request: bytes) -> bytes:
        """Answer CheckTxnStatus as TiKV does."""
        fields = Message(request)
        numbers = {
            "start_ts": fields.unsigned(3),
            "caller_start_ts": fields.unsigned(4),
            "current_ts": fields.unsigned(5),
            "rollback_if_not_exist": fields.unsigned(6),
        }
        self.status_requests.append(numbers)
        if self.region_errors:
            self.region_errors -= 1
            return encode((1, encode((1, "epoch not match"))))
        start_ts = numbers["start_ts"]
        transaction = self.transactions.get(start_ts)
        if transaction is None:
            if not numbers["rollback_if_not_exist"]:
                return encode((2, encode((8, encode((1, start_ts))))))
            self.transactions[start_ts] = RecordedTransaction(rolled_back=True)
            return encode((5, 2))
        expires = (start_ts >> LOGICAL_BITS) + transaction.lock_ttl_ms
        if transaction.lock_ttl_ms and numbers["current_ts"] >> LOGICAL_BITS > expires:
            transaction.rolled_back, transaction.lock_ttl_ms = True, 0
            return encode((5, 1))
        return encode((3, transaction.lock_ttl_ms), (4, transaction.commit_ts))

    def scan(self, request: bytes) -> bytes:
        """Answer KvScan over `values`."""
        fields = Message(request)
        start, end, newest = fields.content(2), fields.content(7), bool(fields.unsigned(6))
        first, last = (end, start) if newest else (start, end)
        keys = sorted((key for key in self.values if first <= key < last), reverse=newest)
        return encode(*((2, encode((2, key), (3, self.values[key]))) for key in keys[: fields.unsigned(3)]))

    def range(self, request: bytes) -> bytes:
        """Answer etcd's Range. A key's revision is the hash of its value."""
        fields = Message(request)
        start, end = fields.text(1), fields.text(2)
        pairs = [
            (2, encode((1, key), (3, _revision(value)), (5, value)))
            for key, value in self.keys.items()
            if key == start or start <= key < end
        ]
        return encode(*pairs)

    def store_jobs(self, jobs: list[dict[str, Any]]) -> None:
        """Store finished DDL jobs where TiDB stores them in TiKV."""
        prefix = b"m" + memcomparable(b"DDLJobHistory") + ord("h").to_bytes(8, "big")
        for job in jobs:
            self.values[prefix + memcomparable(job["id"].to_bytes(8, "big"))] = json.dumps(job).encode()

    def put(self, request: bytes) -> bytes:
        """Answer etcd's Txn: a put after a comparison of the revision."""
        fields = Message(request)
        compare, put = fields.message(1), fields.message(2).message(2)
        with self._lock:
            revision = _revision(self.keys.get(compare.text(3)))
            wanted = compare.unsigned(6)
            if not (revision > wanted if compare.unsigned(1) else revision == wanted):
                return b""
            self.keys[put.text(1)] = put.content(2)
        return encode((2, 1))

    def _header(self) -> tuple[int, bytes]:
        return 1, encode((1, self.cluster_id))


def _revision(value: bytes | None) -> int:
    return 0 if value is None else 1 + zlib.crc32(value)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._answers: dict[str, Callable[[bytes], bytes]] = {
            GET_MEMBERS: cluster.members,
            GET_REGION: cluster.region,
            GET_STORE: cluster.store,
            CHECK_TXN_STATUS: cluster.transaction_status,
            SCAN: cluster.scan,
            ETCD_RANGE: cluster.range,
            ETCD_TXN: cluster.put,
        }

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        self._cluster.calls.append(method)
        if method == TSO:
            return grpc.stream_stream_rpc_method_handler(self._cluster.timestamps)
        answer = self._answers.get(method)
        if method == NOTIFY and self._cluster.notified:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
        if answer is None:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: answer(request))
