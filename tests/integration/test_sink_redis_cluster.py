# SPDX-License-Identifier: Apache-2.0
"""The Redis sink on a Redis Cluster: the masters of keys, and slots that move while they are written."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cluster import ClusterNode

from penstock.errors import AuthenticationFailed, PrivilegeMissing, ServerBusy, ServerUnsupported, TlsFailed
from penstock.sinks.redis.commands import split_commands
from penstock.sinks.sink import Delivery, Sink, make_sink, settings_of
from tests.conftest import ROOT
from tests.support.pipeline.changes_made import changes_of, delete, insert, update
from tests.support.programs.write_keys import ORDERS, ROWS, batch
from tests.support.sinks.writing import MARK, write
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.own_servers import started
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.redis import ClusterNode as Node
from tools.redis import Redis, RedisCluster
from tools.servers import certificate

# The slot of every key with the tag {orders}.
TAGGED_SLOT = 105


@pytest.fixture(scope="module")
def cluster(missing_part: MissingPart) -> Iterator[RedisCluster]:
    """A cluster for this file."""
    with started(RedisCluster(), "redis-server", missing_part) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: RedisCluster) -> Iterator[Any]:
    """A client of an empty cluster."""
    nodes = [ClusterNode("127.0.0.1", node.port) for node in cluster.nodes]
    client = redis.RedisCluster(startup_nodes=nodes, decode_responses=True, socket_timeout=WAIT_SECONDS_MAX)
    client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
    yield client
    client.close()


def sink_of(url: str, **more: Any) -> Sink:
    return make_sink("redis", settings_of("redis")(url=url, cluster=True, **more))


def names(client: Any, pattern: str = "*") -> dict[str, str]:
    keys = sorted(client.scan_iter(pattern))
    return {key: json.loads(client.get(key))["name"] for key in keys}


def other_than(cluster: RedisCluster, owner: Node) -> Node:
    return next(node for node in cluster.nodes if node is not owner)


def test_adjacent_commands_are_separated() -> None:
    single = [b"*2\r\n$3\r\nGET\r\n$2\r\n\r\n\r\n", b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$3\r\nDEL\r\n$0\r\n\r\n"]
    assert split_commands(b"".join(single)) == single


def test_cluster_of_one_master_has_every_key() -> None:
    with Node() as node:
        node.command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: "cluster_state:ok" in node.command("CLUSTER", "INFO"))
        # The sink's first address does not answer.
        sink = sink_of(f"redis://127.0.0.1:1,127.0.0.1:{node.port}")
        assert sink.check() == []
        writer = sink.open(MARK, 0)
        writer.write(changes_of(ORDERS, insert(5, id=1, name="a"), insert(5, 1, id=2, name="b")))
        writer.empty(ORDERS, 6)
        writer.write(changes_of(ORDERS, insert(7, id=3, name="c")))
        writer.finish()
        sink.close()
        assert node.command("KEYS", "*") == ["shop:orders:3"]
        # A master without slots serves no keys.
        node.command("CLUSTER", "DELSLOTSRANGE", 0, 16383)
        with pytest.raises(ServerBusy, match=r"CLUSTERDOWN|no master"):
            write(sink, changes_of(ORDERS, insert(8, id=4)))


def test_server_without_a_cluster_is_reported() -> None:
    with Redis() as server, pytest.raises(ServerUnsupported, match="cluster support disabled"):
        sink_of(server.url).check()


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis_cluster.py::test_cluster_of_one_master_has_every_key"
)
def test_keys_are_on_the_masters_of_their_slots(cluster: RedisCluster, client: Any) -> None:
    sink = sink_of(f"redis://127.0.0.1:{cluster.nodes[2].port}/0")
    assert sink.delivery is Delivery.IDEMPOTENT
    rows = 30_000
    receipt = write(sink, changes_of(ORDERS, *(insert(5, i, id=i, name=f"ä{i}") for i in range(rows))))
    write(
        sink,
        changes_of(
            ORDERS,
            update(6, {"id": 1, "name": "ä1"}, {"id": 1, "name": "b"}),
            update(6, {"id": 2, "name": "ä2"}, {"id": rows, "name": "c"}, 1),
            delete(7, id=3, name="ä3"),
        ),
    )
    assert receipt.bytes > rows * 20
    sizes = [node.command("DBSIZE") for node in cluster.nodes]
    assert sum(sizes) == rows - 1
    assert min(sizes) > rows // 4
    assert json.loads(client.get(f"shop:orders:{rows}")) == {"id": rows, "name": "c"}
    assert json.loads(client.get("shop:orders:1")) == {"id": 1, "name": "b"}
    assert client.get("shop:orders:2") is None


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis_cluster.py::test_cluster_of_one_master_has_every_key"
)
@pytest.mark.parametrize("moves_keys", [False, True])
def test_commands_follow_a_slot_that_moves(cluster: RedisCluster, client: Any, moves_keys: bool) -> None:
    sink = sink_of(cluster.url, key="{{orders}}:{id}", expire="1h", write="hash")
    source = cluster.owner(TAGGED_SLOT)
    target = other_than(cluster, source)
    write(sink, changes_of(ORDERS, *(insert(5, i, id=i, name="a") for i in range(100))))
    cluster.begin_move(TAGGED_SLOT, target)
    if moves_keys:
        cluster.move_keys(TAGGED_SLOT, target, 50)
    # Rows that the old master has, rows that it no longer has, new rows, and several changes of a row.
    changed = [update(6, {"id": i, "name": "a"}, {"id": i, "name": "b"}, i) for i in range(80)]
    new = [insert(7, i, id=i, name="new") for i in range(100, 200)]
    for _ in range(2):
        write(sink, changes_of(ORDERS, *changed, *new), changes_of(ORDERS, delete(8, id=150, name="new")))
    while cluster.move_keys(TAGGED_SLOT, target, 100):
        pass
    cluster.end_move(TAGGED_SLOT, target)
    # The sink still has a connection that knows the old master.
    write(
        sink,
        changes_of(ORDERS, *(update(9, {"id": i, "name": "b"}, {"id": i, "name": "c"}, i) for i in (1, 2))),
    )
    sink.close()
    stored = {key: client.hget(key, "name") for key in client.scan_iter("{orders}:*")}
    wanted = {i: "b" if i < 80 else "a" for i in range(100)} | dict.fromkeys(range(100, 200), "new")
    wanted |= {1: "c", 2: "c"}
    del wanted[150]
    assert stored == {f"{{orders}}:{i}": name for i, name in wanted.items()}
    assert 3_000_000 < client.pttl("{orders}:199") <= 3_600_000


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis_cluster.py::test_cluster_of_one_master_has_every_key"
)
def test_list_keeps_the_order_of_changes_while_its_slot_moves(cluster: RedisCluster, client: Any) -> None:
    sink = sink_of(cluster.url, write="list", key="{{orders}}", value="{id}", length_max=5000)
    target = other_than(cluster, cluster.owner(TAGGED_SLOT))
    pieces = [
        changes_of(ORDERS, *(insert(5, i, id=i) for i in range(k, k + 500))) for k in range(0, 3000, 500)
    ]
    writer = sink.open(MARK, 0)
    for number, piece in enumerate(pieces):
        if number == 2:
            cluster.begin_move(TAGGED_SLOT, target)
        if number == 3:
            cluster.move_keys(TAGGED_SLOT, target, 10)
        if number == 4:
            cluster.end_move(TAGGED_SLOT, target)
        writer.write(piece)
    writer.finish()
    assert client.lrange("{orders}", 0, -1) == [str(i) for i in range(3000)]


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis_cluster.py::test_cluster_of_one_master_has_every_key"
)
def test_last_change_wins_while_slots_move_back_and_forth(cluster: RedisCluster, client: Any) -> None:
    sink = sink_of(cluster.url, key="{{orders}}:{id}")
    has_written = threading.Event()

    def move() -> None:
        while not has_written.is_set():
            target = other_than(cluster, cluster.owner(TAGGED_SLOT))
            cluster.begin_move(TAGGED_SLOT, target)
            while cluster.move_keys(TAGGED_SLOT, target, 20):
                pass
            cluster.end_move(TAGGED_SLOT, target)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for version in range(1, 40):
            name = str(version)
            rows = [insert(version, i, id=i, name=name) for i in range(200)]
            writer = sink.open(MARK, 0)
            try:
                writer.write(changes_of(ORDERS, *rows))
                writer.finish()
            except ServerBusy:
                writer.abort()
    finally:
        has_written.set()
        mover.join()
    write(sink, changes_of(ORDERS, *(insert(40, i, id=i, name="last") for i in range(0, 200, 2))))
    sink.close()
    stored = names(client, "{orders}:*")
    assert {stored[f"{{orders}}:{i}"] for i in range(0, 200, 2)} == {"last"}
    assert len(stored) == 200


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis_cluster.py::test_cluster_of_one_master_has_every_key"
)
def test_truncation_deletes_the_keys_of_all_masters(cluster: RedisCluster, client: Any) -> None:
    client.set("shop:other:1", json.dumps({"name": "other"}))
    sink = sink_of(cluster.url)
    write(sink, changes_of(ORDERS, *(insert(5, i, id=i, name="a") for i in range(3000))))
    target = other_than(cluster, cluster.owner(TAGGED_SLOT))
    cluster.begin_move(TAGGED_SLOT, target)
    with pytest.raises(ServerBusy, match="being moved"):
        sink.open(MARK, 0).empty(ORDERS, 6)
    assert len(names(client)) == 3001
    while cluster.move_keys(TAGGED_SLOT, target, 100):
        pass
    cluster.end_move(TAGGED_SLOT, target)
    writer = sink.open(MARK, 0)
    writer.empty(ORDERS, 6)
    writer.finish()
    assert names(client) == {"shop:other:1": "other"}


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis.py::test_encrypted_connection_verifies_its_authority"
)
def test_encrypted_cluster_is_written_on_all_masters(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    certificate.make(folder)
    with RedisCluster(tls=folder) as encrypted:
        sink = sink_of(encrypted.url, ca=folder / "authority.pem")
        assert sink.check() == []
        write(sink, changes_of(ORDERS, *(insert(5, i, id=i, name="a") for i in range(300))))
        # Redirections name the TLS port as well.
        target = other_than(encrypted, encrypted.owner(TAGGED_SLOT))
        encrypted.begin_move(TAGGED_SLOT, target)
        tagged = sink_of(encrypted.url, ca=folder / "authority.pem", key="{{orders}}:{id}")
        write(tagged, changes_of(ORDERS, *(insert(6, i, id=i, name="b") for i in range(10))))
        sizes = [node.command("DBSIZE") for node in encrypted.nodes]
        assert sum(sizes) == 310
        assert min(sizes) > 50
        assert target.command("CLUSTER", "COUNTKEYSINSLOT", TAGGED_SLOT) == 10
        for made in (sink, tagged):
            made.close()
        with pytest.raises(TlsFailed):
            sink_of(encrypted.url).check()


@pytest.mark.deep(guard="tests/integration/test_sink_redis.py::test_accounts_have_restricted_rights")
def test_accounts_need_the_rights_of_the_guide(cluster: RedisCluster, client: Any) -> None:
    rules = ["on", ">secret", "~shop:*", "+set", "+unlink", "+cluster|slots", "+asking"]
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", "loader", *rules)
        node.command("ACL", "SETUSER", "blind", "on", ">secret", "~*", "+set")
    url = cluster.url.removeprefix("redis://")
    sink = sink_of(f"redis://loader:secret@{url}")
    assert sink.check() == []
    write(sink, changes_of(ORDERS, *(insert(5, i, id=i, name="a") for i in range(20))))
    sink.close()
    assert len(names(client)) == 20
    with pytest.raises(AuthenticationFailed) as refused:
        sink_of(f"redis://loader:wrong-word@{url}").check()
    assert "wrong-word" not in str(refused.value)
    with pytest.raises(PrivilegeMissing):
        sink_of(f"redis://blind:secret@{url}").check()


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis_cluster.py::test_cluster_of_one_master_has_every_key"
)
def test_killed_writer_leaves_every_row_once_its_batch_is_retried(cluster: RedisCluster, client: Any) -> None:
    sink = sink_of(cluster.url)
    words = [
        sys.executable,
        "-m",
        "tests.support.programs.write_keys",
        sink.kind,
        sink.settings.model_dump_json(),
    ]  # type: ignore[attr-defined]
    with subprocess.Popen(words, cwd=ROOT) as writer:
        wait_until(lambda: sum(node.command("DBSIZE") for node in cluster.nodes) > ROWS // 10)
        writer.kill()
    write(sink, *batch())
    sink.close()
    assert sum(node.command("DBSIZE") for node in cluster.nodes) == ROWS
    assert set(client.mget_nonatomic([f"shop:orders:{i}" for i in range(ROWS)])) == {
        json.dumps({"id": i, "name": "a"}, separators=(",", ":")) for i in range(ROWS)
    }


@pytest.mark.deep(guard="tests/integration/test_sink_redis.py::test_cluster_node_is_refused_before_the_start")
def test_node_of_a_cluster_names_the_setting(cluster: RedisCluster) -> None:
    node = cluster.nodes[0]
    [finding] = make_sink("redis", settings_of("redis")(url=node.url)).check()
    assert "cluster: true" in finding.mend
