# SPDX-License-Identifier: Apache-2.0
"""The Redis sink on a Redis server: keys, values, and error responses."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import redis

from penstock.changes import Origin, Target
from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PrivilegeMissing,
    ServerBusy,
    ServerUnsupported,
    TlsFailed,
)
from penstock.model import Secret
from penstock.sinks.redis import connection as redis_connection
from penstock.sinks.sink import Delivery, Evolution, Sink, Spread, make_sink, settings_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.support.sinks.writing import MARK, write
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.own_servers import started
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.redis import Redis
from tools.servers import certificate
from tools.servers.server import free_port

ORDERS = target_of({"id": "int", "name": "varchar(20)", "plan": "json"})


@pytest.fixture(scope="module")
def server(missing_part: MissingPart) -> Iterator[Redis]:
    """A server for this file."""
    with started(Redis(), "redis-server", missing_part) as server:
        yield server


@pytest.fixture
def client(server: Redis) -> Iterator[Any]:
    """A client of an empty server."""
    client = redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=WAIT_SECONDS_MAX)
    client.flushall()
    yield client
    client.close()


def sink_of(server: Redis, **more: Any) -> Sink:
    return make_sink("redis", settings_of("redis")(url=server.url, **more))


def everything(client: Any) -> dict[str, Any]:
    kinds = {"string": client.get, "hash": client.hgetall, "list": lambda key: client.lrange(key, 0, -1)}
    return {key: kinds[client.type(key)](key) for key in sorted(client.keys("*"))}


def test_values_follow_rows_and_their_keys(server: Redis, client: Any) -> None:
    sink = sink_of(server)
    assert (sink.spread, sink.keeps_state, sink.delivery) == (Spread.TABLES, True, Delivery.IDEMPOTENT)
    write(sink, changes_of(ORDERS, insert(5, id=1, name="ä\r\n"), insert(5, 1, id=2), insert(5, 2, id=3)))
    batch = changes_of(
        ORDERS,
        update(6, {"id": 1, "name": "ä\r\n"}, {"id": 1, "name": "b", "plan": '{"a": 1}'}),
        delete(7, id=2),
        update(8, {"id": 3}, {"id": 4}),
        # One statement swaps two rows.
        update(9, {"id": 1, "name": "b"}, {"id": 9, "name": "b"}),
        update(9, {"id": 4}, {"id": 1, "name": "was 4"}, 1),
    )
    for _ in range(2):
        receipt = write(sink, batch)
    assert receipt.rows == 9
    assert {key: json.loads(value) for key, value in everything(client).items()} == {
        "shop:orders:1": {"id": 1, "name": "was 4", "plan": None},
        "shop:orders:9": {"id": 9, "name": "b", "plan": None},
    }


def test_hash_has_a_field_for_each_value_and_none_for_null(server: Redis, client: Any) -> None:
    sink = sink_of(server, write="hash", expire="1h")
    write(sink, changes_of(ORDERS, insert(5, id=1, name="a", plan="{}"), insert(5, 1, id=2, plan="[]")))
    write(sink, changes_of(ORDERS, update(6, {"id": 1, "name": "a", "plan": "{}"}, {"id": 1, "name": ""})))
    assert everything(client) == {
        "shop:orders:1": {"id": "1", "name": ""},
        "shop:orders:2": {"id": "2", "plan": "[]"},
    }
    assert 3_500_000 < client.pttl("shop:orders:1") <= 3_600_000


def test_keys_and_values_are_rendered_by_templates(server: Redis, client: Any) -> None:
    sink = sink_of(
        server, key="user:{name}", value="{id}/{plan.level}", expire=timedelta(days=1).total_seconds()
    )
    assert not sink.keeps_state
    write(
        sink,
        changes_of(
            ORDERS,
            insert(5, id=1, name="ann", plan='{"level": "gold"}'),
            insert(5, 1, id=2, name="bob", plan='{"level": 3}'),
            # A row without a name has no key.
            insert(5, 2, id=3),
        ),
    )
    assert everything(client) == {"user:ann": "1/gold", "user:bob": "2/3"}
    renamed = {"id": 1, "name": "eve", "plan": '{"level": "gold"}'}
    write(sink, changes_of(ORDERS, update(6, renamed | {"name": "ann"}, renamed)))
    assert everything(client) == {"user:bob": "2/3", "user:eve": "1/gold"}
    with pytest.raises(OptionInvalid, match="nmae"):
        sink_of(server, key="user:{nmae}").prepare(ORDERS, Evolution.EVOLVE)


def test_cache_deletes_exactly_the_changed_keys(server: Redis, client: Any) -> None:
    sink = sink_of(server, write="invalidate", key="user:{name}")
    for name in ("ann", "bob", "eve", "tom"):
        client.set(f"user:{name}", "cached")
    write(
        sink,
        changes_of(ORDERS, update(6, {"id": 1, "name": "ann"}, {"id": 1, "name": "eve"})),
        changes_of(ORDERS, insert(6, id=4, name="tom"), origin=Origin.LOAD),
    )
    assert sorted(everything(client)) == ["user:bob", "user:tom"]


def test_list_has_every_change_in_order(server: Redis, client: Any) -> None:
    sink = sink_of(server, write="list")
    assert (sink.keeps_state, sink.delivery) == (False, Delivery.AT_LEAST_ONCE)
    changes = changes_of(
        ORDERS, insert(5, id=1), update(6, {"id": 1}, {"id": 1, "name": "a"}), delete(7, id=1, name="a")
    )
    write(sink, changes)
    actual = [json.loads(text) for text in everything(client)["shop:orders"]]
    assert [(text["change"], text["commit_version"], text["row"]["name"]) for text in actual] == [
        ("insert", 5, None),
        ("update_postimage", 6, "a"),
        ("delete", 7, "a"),
    ]
    write(
        sink_of(server, write="list", key="last", value="{_change_type}", length_max=2, push="left"), changes
    )
    assert client.lrange("last", 0, -1) == ["delete", "update_postimage"]


@pytest.mark.parametrize(
    "more", [{"write": "list"}, {"key": "o:{id}"}, {"write": "invalidate", "key": "{name}"}]
)
def test_partial_image_is_refused(server: Redis, client: Any, more: dict[str, Any]) -> None:
    images = [
        Made("update_preimage", 5, {"id": 1}, absent=("name", "plan")),
        Made("update_postimage", 5, {"name": "b"}, absent=("id", "plan")),
    ]
    with pytest.raises(ServerUnsupported, match="lack columns"):
        write(sink_of(server, **more), changes_of(ORDERS, images))
    assert everything(client) == {}


def test_deleted_rows_may_stay_until_they_expire(server: Redis, client: Any) -> None:
    sink = sink_of(server, deletes="keep", value="{name}")
    write(sink, changes_of(ORDERS, insert(5, id=1, name="a")))
    write(sink, changes_of(ORDERS, delete(6, id=1, name="a")))
    assert everything(client) == {"shop:orders:1": "a"}


def test_truncation_deletes_only_the_keys_of_its_table(server: Redis, client: Any) -> None:
    client.set("shop:orders_old:1", "other")
    sink = sink_of(server)
    writer = sink.open(MARK, 0)
    writer.write(changes_of(ORDERS, *(insert(5, number, id=number) for number in range(3000))))
    writer.empty(ORDERS, 6)
    writer.write(changes_of(ORDERS, insert(7, id=5)))
    writer.finish()
    assert sorted(everything(client)) == ["shop:orders:5", "shop:orders_old:1"]
    with pytest.raises(OptionInvalid, match="every other key"):
        sink_of(server, key="{name}").open(MARK, 0).empty(ORDERS, 8)


def test_many_commands_are_pipelined(server: Redis, client: Any) -> None:
    # Several times the number of commands in flight.
    rows = 25_000
    target = target_of({"id": "int", "name": "text"})
    long = changes_of(
        target, *(insert(5, number, id=number, name="x" * (number % 50)) for number in range(rows))
    )
    huge = changes_of(target, insert(6, id=rows, name="y" * 20_000_000))
    receipt = write(sink_of(server, value="{name}"), long, huge)
    assert receipt.bytes > 20_000_000
    assert client.dbsize() == rows + 1
    assert client.get(f"shop:orders:{rows - 1}") == "x" * ((rows - 1) % 50)
    assert client.strlen(f"shop:orders:{rows}") == 20_000_000


def test_refused_command_names_its_key(server: Redis, client: Any) -> None:
    client.rpush("shop:orders:7", "a list")
    many = changes_of(ORDERS, *(insert(5, number, id=number, name="a") for number in range(100)))
    with pytest.raises(OptionInvalid, match="WRONGTYPE") as failed:
        write(sink_of(server, write="hash"), many)
    assert failed.value.position == "key 'shop:orders:7'"


def test_server_out_of_memory_is_retryable(client: Any, server: Redis) -> None:
    client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(ServerBusy, match="OOM"):
            write(sink_of(server), changes_of(ORDERS, insert(5, id=1)))
    finally:
        client.config_set("maxmemory", "0")


def test_accounts_have_restricted_rights(server: Redis, client: Any) -> None:
    client.acl_setuser(
        "loader", enabled=True, passwords=["+secret"], keys=["shop:*"], commands=["+set", "+unlink"]
    )
    url = f"redis://loader:secret@127.0.0.1:{server.port}/0"
    settings = settings_of("redis")(url=url)
    assert "secret" not in repr(settings)
    assert settings.password == Secret("secret")
    write(make_sink("redis", settings), changes_of(ORDERS, insert(5, id=1)))
    with pytest.raises(PrivilegeMissing) as refused:
        write(
            make_sink("redis", settings_of("redis")(url=url, write="list")),
            changes_of(ORDERS, insert(5, id=1)),
        )
    assert "secret" not in str(refused.value)
    with pytest.raises(AuthenticationFailed):
        make_sink("redis", settings_of("redis")(url=url.replace("secret", "wrong"))).check()
    with pytest.raises(ConnectionLost):
        make_sink("redis", settings_of("redis")(url="redis://127.0.0.1:1/0")).check()
    with pytest.raises(OptionInvalid):
        make_sink("redis", settings_of("redis")(url="http://127.0.0.1:1/0")).check()


def test_dead_server_is_reported(server: Redis) -> None:
    with Redis() as another:
        pipeline = redis_connection.connect(settings_of("redis")(url=another.url), None)
        another.kill()
        pings = pyarrow.array(["*1\r\n$4\r\nPING\r\n"] * 50_000)
        with pytest.raises(ConnectionLost):
            pipeline.send(pings, pings)


def test_cluster_node_is_refused_before_the_start(server: Redis, client: Any) -> None:
    assert sink_of(server).check() == []
    # The bus port of the nodes is configured, because the default (10,000 higher) may not exist.
    with Redis("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        [finding] = sink_of(node).check()
        assert finding.fatal
        assert "cluster" in finding.what


def test_encrypted_connection_verifies_its_authority(server: Redis, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    certificate.make(folder)
    settings = settings_of("redis")
    with Redis(tls=folder) as encrypted:
        url = f"rediss://127.0.0.1:{encrypted.tls_port}/0"
        write(
            make_sink("redis", settings(url=url, ca=folder / "authority.pem")),
            changes_of(ORDERS, insert(5, id=1)),
        )
        with pytest.raises(TlsFailed):
            make_sink("redis", settings(url=url)).check()


def test_keyless_table_needs_a_template(server: Redis) -> None:
    keyless: Target = target_of({"id": "int"}, ())
    with pytest.raises(OptionInvalid, match="no primary key"):
        sink_of(server).prepare(keyless, Evolution.EVOLVE)
    sink_of(server, key="{id}").prepare(keyless, Evolution.EVOLVE)
