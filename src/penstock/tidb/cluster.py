# SPDX-License-Identifier: Apache-2.0
"""A TiDB cluster: the members of its PD, its timestamps, and what TiKV recorded about a transaction."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import grpc

from penstock.errors import ConnectionLost, EventMalformed, PenstockError, ServerChanged, TransientError
from penstock.protobuf import Message, encode
from penstock.retry import Backoff, Retry
from penstock.tidb.channels import ClusterTls, call, open_channel, translate_rpc_error, without_scheme
from penstock.tidb.messages import (
    CHECK_TXN_STATUS,
    GET_MEMBERS,
    GET_REGION,
    GET_STORE,
    SCAN,
    TSO,
    Members,
    Region,
    check_txn_status_request,
    pd_error,
    pd_header,
    scan_request,
    timestamp_of,
)

_CALL_SECONDS = 5.0
_REGION_TRIES = 5
_REGION_BACKOFF = Backoff(first=0.05, longest=0.4)

_KEY_GROUP_BYTES = 8


class Outcome(StrEnum):
    """What TiKV recorded about a transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    # The cluster has a lock of the transaction, or no trace of it. Such a transaction may still commit.
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class TransactionStatus:
    """The outcome of a transaction. `commit_ts` is 0 unless the transaction was committed."""

    outcome: Outcome
    commit_ts: int = 0


UNDECIDED = TransactionStatus(Outcome.UNDECIDED)


class Cluster:
    """Connections to PD and TiKV. Thread-safe; runs one call at a time.

    A failed call forgets the leader, so that the next call asks every member of PD again.
    """

    def __init__(self, members: Sequence[str], tls: ClusterTls | None = None, cluster_id: int = 0) -> None:
        """`members` are host:port. With a `cluster_id`, another cluster is refused."""
        self._members = tuple(members)
        self._tls = tls
        self._lock = threading.RLock()
        self._channels: dict[str, grpc.Channel] = {}
        self._leader: str | None = None
        self._cluster_id = cluster_id

    @property
    def cluster_id(self) -> int:
        """The cluster's id, queried on first use. Raises ConnectionLost, ServerChanged."""
        with self._lock:
            if not self._cluster_id:
                self._find_leader()
            return self._cluster_id

    def timestamp(self) -> int:
        """Return a new timestamp of the cluster. Raises ConnectionLost, ServerChanged, AccessDenied."""
        with self._lock:
            leader = self._find_leader()
            request = encode(pd_header(self._cluster_id), (2, 1))
            try:
                responses = self._channel(leader).stream_stream(TSO)(iter([request]), timeout=_CALL_SECONDS)
                response = Message(next(responses))
                responses.cancel()
            except StopIteration as problem:
                raise self._lost(f"{leader}: PD sent no timestamp") from problem
            except grpc.RpcError as problem:
                self._forget(leader)
                raise translate_rpc_error(problem, leader, TSO) from problem
            self._check(leader, response)
            return timestamp_of(response)

    def call_etcd(self, method: str, request: bytes) -> bytes:
        """Call a method of PD's etcd. Raises ConnectionLost, ServerChanged, AccessDenied."""
        with self._lock:
            leader = self._find_leader()
            try:
                return call(self._channel(leader), leader, method, request, _CALL_SECONDS)
            except PenstockError:
                self._forget(leader)
                raise

    def transaction_status(
        self, start_ts: int, primary_key: bytes, *, roll_back_at: int = 0
    ) -> TransactionStatus:
        """Return what TiKV recorded about a transaction.

        By default, nothing changes in the cluster. With `roll_back_at`, a current timestamp, an undecided
        transaction is rolled back, unless it holds a lock that has not expired by then: this writes to the
        cluster, and the transaction can never commit. Raises ConnectionLost, ServerChanged, AccessDenied.
        """
        with self._lock:
            return _region_retry().run(lambda: self._check_status(start_ts, primary_key, roll_back_at))

    def scan(
        self, start: bytes, end: bytes, limit: int, *, newest: bool = False
    ) -> list[tuple[bytes, bytes]]:
        """Return up to `limit` keys in [start, end) with their present values, in ascending order.

        With `newest`, the result has the last keys in descending order, all from the last region of the
        range. Raises ConnectionLost, ServerChanged, AccessDenied.
        """
        pairs: list[tuple[bytes, bytes]] = []
        with self._lock:
            version = self.timestamp()
            while True:
                pairs_of_region, following = _region_retry().run(
                    partial(self._scan_region, start, end, limit - len(pairs), version, newest)
                )
                pairs += pairs_of_region
                if newest or len(pairs) >= limit or following is None or following >= end:
                    return pairs
                start = following

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for address in list(self._channels):
                self._forget(address)

    # --- PD ---------------------------------------------------------------------------------

    def _find_leader(self) -> str:
        if self._leader is not None:
            return self._leader
        problem: PenstockError = ConnectionLost("no member of PD is known")
        for member in self._members:
            try:
                response = call(self._channel(member), member, GET_MEMBERS, b"", _CALL_SECONDS)
                members = Members.decode(response)
            except PenstockError as failure:
                problem = failure
                self._forget(member)
                continue
            if self._cluster_id and members.cluster_id != self._cluster_id:
                raise ServerChanged(
                    f"{member} belongs to the cluster {members.cluster_id}, not to {self._cluster_id}",
                    hint="Correct source, or use another log folder for another cluster",
                )
            if not members.leader_urls:
                problem = self._lost(f"{member}: PD has no leader now")
                continue
            self._cluster_id = members.cluster_id
            self._leader = without_scheme(members.leader_urls[0])
            return self._leader
        raise problem

    def _locate(self, key: bytes) -> tuple[Region, str]:
        """Return the region of a key, and the address of the store that leads it."""
        leader = self._find_leader()
        request = encode(pd_header(self._cluster_id), (2, memcomparable(key)))
        region = Region.of(self._ask(leader, GET_REGION, request))
        if region is None:
            raise ConnectionLost(f"{leader}: PD knows no leader of a region now")
        request = encode(pd_header(self._cluster_id), (2, region.store_id))
        address = self._ask(leader, GET_STORE, request).message(2).text(2)
        if not address:
            raise ConnectionLost(f"{leader}: PD knows no address of the store {region.store_id}")
        return region, address

    def _check_status(self, start_ts: int, primary_key: bytes, roll_back_at: int) -> TransactionStatus:
        region, address = self._locate(primary_key)
        request = check_txn_status_request(region, primary_key, start_ts, roll_back_at, bool(roll_back_at))
        response = Message(self._call_store(address, CHECK_TXN_STATUS, request))
        if response.has(1):
            raise ConnectionLost(f"{address}: the region {region.id} was split, moved, or has another leader")
        return _status_of(response, address)

    def _scan_region(
        self, start: bytes, end: bytes, limit: int, version: int, newest: bool
    ) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Scan one region; return the pairs, and where the next region starts, None after the last."""
        region, address = self._locate(end if newest else start)
        request = scan_request(region, start, end, limit, version, reverse=newest)
        response = Message(self._call_store(address, SCAN, request))
        if response.has(1):
            raise ConnectionLost(f"{address}: the region {region.id} was split, moved, or has another leader")
        pairs = response.messages(2)
        # A key that is locked by a transaction is returned as an error, and is read again.
        if response.has(3) or any(pair.has(1) for pair in pairs):
            raise ConnectionLost(f"{address}: TiKV could not read a key, which may be locked")
        following = decode_memcomparable(region.end_key) if region.end_key else None
        return [(pair.content(2), pair.content(3)) for pair in pairs], following

    def _ask(self, leader: str, method: str, request: bytes) -> Message:
        response = Message(self.call_etcd(method, request))
        self._check(leader, response)
        return response

    def _check(self, leader: str, response: Message) -> None:
        """Raise ConnectionLost if PD answered with an error, for example because its leader changed."""
        error = pd_error(response)
        if error:
            self._forget(leader)
            raise ConnectionLost(f"{leader}: PD answered: {error}")

    def _lost(self, text: str) -> ConnectionLost:
        self._leader = None
        return ConnectionLost(text)

    # --- Channels ---------------------------------------------------------------------------

    def _call_store(self, address: str, method: str, request: bytes) -> bytes:
        try:
            return call(self._channel(address), address, method, request, _CALL_SECONDS)
        except TransientError:
            self._forget(address)
            raise

    def _channel(self, address: str) -> grpc.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._tls)
        return channel

    def _forget(self, address: str) -> None:
        """Close a connection, so that the next call opens a new one."""
        if address == self._leader:
            self._leader = None
        channel = self._channels.pop(address, None)
        if channel is not None:
            channel.close()


def _region_retry() -> Retry:
    return Retry(
        "a region of TiKV is looked up again",
        backoff=_REGION_BACKOFF,
        tries=_REGION_TRIES,
        quiet_seconds=_REGION_BACKOFF.longest,
    )


def _status_of(response: Message, address: str) -> TransactionStatus:
    if response.has(2):
        error = response.message(2)
        # TiKV does not know the transaction (txn_not_found), or has a lock of it. The transaction may still
        # commit.
        if error.has(8) or error.has(1):
            return UNDECIDED
        raise ConnectionLost(f"{address}: TiKV answered: {error.text(2) or error.text(3) or 'a key error'}")
    if response.unsigned(4):
        return TransactionStatus(Outcome.COMMITTED, response.unsigned(4))
    if response.unsigned(3):
        return UNDECIDED
    return TransactionStatus(Outcome.ROLLED_BACK)


def memcomparable(key: bytes) -> bytes:
    """Encode a key in the form by which PD orders regions: groups of 8 bytes, each followed by 255 minus its
    padding.
    """
    groups = bytearray()
    for at in range(0, len(key) + 1, _KEY_GROUP_BYTES):
        group = key[at : at + _KEY_GROUP_BYTES]
        padding = _KEY_GROUP_BYTES - len(group)
        groups += group + bytes(padding) + bytes([0xFF - padding])
    return bytes(groups)


def decode_memcomparable(key: bytes) -> bytes:
    """Decode a key that `memcomparable` encoded. Raises EventMalformed."""
    decoded = bytearray()
    for at in range(0, len(key), _KEY_GROUP_BYTES + 1):
        group = key[at : at + _KEY_GROUP_BYTES + 1]
        padding = 0xFF - group[-1]
        if len(group) <= _KEY_GROUP_BYTES or padding > _KEY_GROUP_BYTES:
            break
        decoded += group[: _KEY_GROUP_BYTES - padding]
        if padding:
            return bytes(decoded)
    raise EventMalformed(f"the key {key.hex()} of a region is not encoded as PD does it")
