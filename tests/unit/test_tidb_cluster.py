# SPDX-License-Identifier: Apache-2.0
"""Penstock's requests to a TiDB cluster, against a stand-in for PD and TiKV in this process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConnectionLost, EventMalformed, ServerChanged, TlsFailed
from penstock.protobuf import Message, encode
from penstock.tidb.channels import ClusterTls
from penstock.tidb.cluster import Cluster, Outcome, TransactionStatus, memcomparable
from penstock.tidb.messages import LOGICAL_BITS, BinlogHead, BinlogKind, encode_binlog
from penstock.tidb.registry import Node, NodeKind, NodeState, Registry
from tools.tidb.cluster import FakeCluster, RecordedTransaction

START_TS = 470_639_218_043_387_904


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(fake: FakeCluster) -> Iterator[Cluster]:
    opened = Cluster(["127.0.0.1:1", fake.address])
    yield opened
    opened.close()


def test_dead_member_of_pd_is_passed_over(cluster: Cluster) -> None:
    assert cluster.cluster_id == 7001


def test_timestamps_increase(cluster: Cluster) -> None:
    first, second = cluster.timestamp(), cluster.timestamp()
    assert 0 < first < second


def test_another_cluster_at_the_same_address_is_refused(fake: FakeCluster) -> None:
    with pytest.raises(ServerChanged, match="cluster 7001, not to 7002"):
        Cluster([fake.address], cluster_id=7002).timestamp()


def test_restarted_pd_is_connected_again(cluster: Cluster, fake: FakeCluster) -> None:
    first = cluster.timestamp()
    fake.stop()
    with pytest.raises(ConnectionLost):
        cluster.timestamp()
    fake.start()
    assert cluster.timestamp() > first


@pytest.mark.deep(guard="tests/unit/test_tidb_cluster.py::test_restarted_pd_is_connected_again")
def test_every_call_to_a_pd_that_stops_ends() -> None:
    # About one in a hundred of these calls never returned while gRPC repeated calls by itself.
    for _ in range(500):
        with FakeCluster() as fake:
            opened = Cluster([fake.address])
            opened.timestamp()
            fake.stop()
            with pytest.raises(ConnectionLost):
                opened.timestamp()
            opened.close()


def test_pd_without_a_leader_is_a_lost_connection(fake: FakeCluster) -> None:
    fake.leaderless = True
    with pytest.raises(ConnectionLost, match="no leader"):
        Cluster([fake.address]).timestamp()


@pytest.mark.parametrize(
    ("recorded", "status"),
    [
        (RecordedTransaction(commit_ts=START_TS + 5), TransactionStatus(Outcome.COMMITTED, START_TS + 5)),
        (RecordedTransaction(rolled_back=True), TransactionStatus(Outcome.ROLLED_BACK)),
        (RecordedTransaction(lock_ttl_ms=3000), TransactionStatus(Outcome.UNDECIDED)),
        (None, TransactionStatus(Outcome.UNDECIDED)),
    ],
)
def test_status_is_what_tikv_recorded_and_asking_changes_nothing(
    cluster: Cluster, fake: FakeCluster, recorded: RecordedTransaction | None, status: TransactionStatus
) -> None:
    if recorded is not None:
        fake.transactions[START_TS] = recorded
    before = dict(fake.transactions)
    assert cluster.transaction_status(START_TS, b"t\x80key") == status
    assert fake.transactions == before
    assert fake.status_requests == [
        {"start_ts": START_TS, "caller_start_ts": 0, "current_ts": 0, "rollback_if_not_exist": 0}
    ]


def test_status_survives_a_split_of_the_region(cluster: Cluster, fake: FakeCluster) -> None:
    fake.transactions[START_TS] = RecordedTransaction(commit_ts=START_TS + 5)
    fake.region_errors = 2
    assert cluster.transaction_status(START_TS, b"k").commit_ts == START_TS + 5


def test_status_without_a_region_is_a_lost_connection(cluster: Cluster, fake: FakeCluster) -> None:
    fake.region_errors = 100
    with pytest.raises(ConnectionLost, match="region 2"):
        cluster.transaction_status(START_TS, b"k")


def test_roll_back_is_final_except_for_a_living_lock(cluster: Cluster, fake: FakeCluster) -> None:
    now = START_TS + (10_000 << LOGICAL_BITS)
    fake.transactions[START_TS + 1] = RecordedTransaction(lock_ttl_ms=60_000)
    fake.transactions[START_TS + 2] = RecordedTransaction(lock_ttl_ms=3_000)
    rolled_back = [cluster.transaction_status(START_TS + n, b"k", roll_back_at=now).outcome for n in range(3)]
    assert rolled_back == [Outcome.ROLLED_BACK, Outcome.UNDECIDED, Outcome.ROLLED_BACK]


def test_missing_certificate_is_named(tmp_path: Path) -> None:
    files = ClusterTls(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    with pytest.raises(TlsFailed, match=r"ca\.pem"):
        Cluster(["127.0.0.1:1"], files).timestamp()


# The comparable form is documented with TiKV's codec: groups of eight bytes and a marker.
@pytest.mark.parametrize(
    ("key", "encoded"),
    [
        (b"", "0000000000000000f7"),
        (b"\x01\x02\x03", "0102030000000000fa"),
        (b"\x01\x02\x03\x04\x05\x06\x07\x08", "0102030405060708ff0000000000000000f7"),
    ],
)
def test_keys_are_encoded_as_pd_orders_them(key: bytes, encoded: str) -> None:
    assert memcomparable(key).hex() == encoded


# --- The registry ---------------------------------------------------------------------------


def test_node_is_registered_in_the_original_form(cluster: Cluster, fake: FakeCluster) -> None:
    registry = Registry(cluster)
    node = Node("host:8250", "host:8250", NodeState.ONLINE, 7, 9, 3, {"load": "12"})
    registry.put(NodeKind.PUMP, node.with_state(NodeState.PAUSED))
    registry.put(NodeKind.PUMP, node)
    assert json.loads(fake.keys["/tidb-binlog/v1/pumps/host:8250"]) == {
        "nodeId": "host:8250",
        "host": "host:8250",
        "state": "online",
        "isAlive": True,
        "score": 3,
        "label": {"labels": {"load": "12"}},
        "maxCommitTS": 7,
        "updateTS": 9,
    }
    assert registry.list(NodeKind.PUMP).nodes == {"host:8250": node}
    assert registry.list(NodeKind.DRAINER).nodes == {}


def test_unreadable_node_is_named_and_does_not_hide_the_others(cluster: Cluster, fake: FakeCluster) -> None:
    fake.keys["/tidb-binlog/v1/drainers/a"] = b'{"nodeId": "a"}'
    fake.keys["/tidb-binlog/v1/drainers/b"] = (
        b'{"nodeId": "b", "host": "b:1", "state": "paused", "label": null}'
    )
    listing = Registry(cluster).list(NodeKind.DRAINER)
    assert listing.nodes == {"b": Node("b", "b:1", NodeState.PAUSED)}
    assert listing.unreadable.keys() == {"a"}


# --- Messages -------------------------------------------------------------------------------


def test_payload_of_the_go_client_is_read() -> None:
    # A fake binlog as Go marshals it.
    payload = bytes.fromhex("08021080808080808080c40618808080808080" + "80c4063800" + "4000")
    head = BinlogHead.decode(payload)
    assert (head.kind, head.is_fake) == (BinlogKind.ROLLBACK, True)
    assert encode_binlog(BinlogKind.ROLLBACK, head.start_ts, head.commit_ts) == payload


@pytest.mark.parametrize(
    "damaged",
    [b"\x08", b"\x0a\x05ab", b"\x0b\x00", b"\x00\x00", b"\xff" * 11, b"\x08\x07", b"\x0a\x00"],
)
def test_damaged_payload_is_refused(damaged: bytes) -> None:
    with pytest.raises(EventMalformed):
        BinlogHead.decode(damaged)


def test_integers_keep_their_sign() -> None:
    message = Message(encode((1, -1), (2, 1 << 63)))
    assert (message.signed(1), message.unsigned(1), message.signed(2)) == (-1, (1 << 64) - 1, -(1 << 63))
