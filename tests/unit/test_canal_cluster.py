# SPDX-License-Identifier: Apache-2.0
"""Canal's layout in ZooKeeper names the daemon that serves a destination, and no other."""

import itertools
import json
from collections.abc import Callable, Iterator

import pytest

from penstock.coordinate.backends.memory import MemoryStore
from penstock.serve.canal.cluster import CanalCluster, running_path
from penstock.settings.listen import ListenSettings
from tests.support.suite.patience import wait_until

_numbers = itertools.count(1)

Show = Callable[[str, set[str]], tuple[CanalCluster, MemoryStore]]


@pytest.fixture
def name() -> str:
    """The name of an ensemble."""
    return f"canal-cluster-{next(_numbers)}"


@pytest.fixture
def layout(name: str) -> Iterator[MemoryStore]:
    """The ensemble as clients read it."""
    store = MemoryStore(name)
    yield store
    store.close()


@pytest.fixture
def show(layout: MemoryStore, name: str) -> Iterator[Show]:
    """Return a function that lists a daemon in the ensemble, with the destinations that it serves; the set
    may change.
    """
    shown: list[CanalCluster] = []

    def start(address: str, served: set[str]) -> tuple[CanalCluster, MemoryStore]:
        store = MemoryStore(name)
        cluster = CanalCluster(lambda: store, address, ["shop", "users"], served.__contains__, 10.0)
        shown.append(cluster)
        cluster.start()
        return cluster, store

    yield start
    for cluster in shown:
        cluster.stop()


def running(layout: MemoryStore, destination: str) -> dict[str, object] | None:
    """Return what a client reads of a destination."""
    record = layout.get(running_path(destination))
    return None if record is None else dict(json.loads(record.value))


def test_destination_is_shown_where_it_is_served_and_follows_it(layout: MemoryStore, show: Show) -> None:
    first_serves, second_serves = {"shop"}, {"users"}
    show("10.0.0.1:11111", first_serves)
    show("10.0.0.2:11111", second_serves)
    wait_until(lambda: running(layout, "shop") == {"active": True, "address": "10.0.0.1:11111"})
    wait_until(lambda: running(layout, "users") == {"active": True, "address": "10.0.0.2:11111"})
    for path in ("/otter/canal/cluster", "/otter/canal/destinations/shop/cluster"):
        assert list(layout.list(path)) == ["10.0.0.1:11111", "10.0.0.2:11111"]
    # The second daemon starts to serve the destination before the first has removed its node, so the second
    # daemon waits.
    second_serves.add("shop")
    first_serves.remove("shop")
    wait_until(lambda: running(layout, "shop") == {"active": True, "address": "10.0.0.2:11111"})


def test_nodes_of_a_daemon_end_with_its_session_and_return_with_the_next(
    layout: MemoryStore, show: Show
) -> None:
    served = {"shop"}
    cluster, store = show("10.0.0.1:11111", served)
    wait_until(lambda: running(layout, "shop"))
    before = layout.get(running_path("shop"))
    store.lose(store._sessions[-1])
    wait_until(lambda: layout.get(running_path("shop")) not in (None, before))
    cluster.stop()
    assert running(layout, "shop") is None
    assert not layout.list("/otter/canal/cluster")


def test_nodes_that_somebody_deletes_return(layout: MemoryStore, name: str) -> None:
    store = MemoryStore(name)
    cluster = CanalCluster(
        lambda: store, "10.0.0.1:11111", ["shop"], {"shop"}.__contains__, 10.0, show_again_seconds=0
    )
    cluster.start()
    try:
        wait_until(lambda: running(layout, "shop"))
        layout.delete(running_path("shop"))
        layout.delete("/otter/canal/cluster/10.0.0.1:11111")
        wait_until(lambda: running(layout, "shop"))
        wait_until(lambda: layout.list("/otter/canal/cluster"))
    finally:
        cluster.stop()


def test_cluster_clients_are_sent_to_a_port_that_others_can_reach() -> None:
    settings = ListenSettings(
        canal="0.0.0.0:11111", canal_cluster="zookeeper://zk1:2181", canal_address="host:1", insecure=True
    )
    assert settings.canal_client_address(11111) == "host:1"
    named = settings.model_copy(update={"canal_address": None})
    assert named.canal_client_address(11111).partition(":")[0] not in ("0.0.0.0", "")
    for wrong, why in (
        ({"canal": None}, "set canal"),
        ({"canal_cluster": "sqlite:///store.db"}, "write zookeeper"),
        ({"canal_cluster": "zookeeper://user:password@zk1:2181"}, "leave out user and password"),
    ):
        with pytest.raises(ValueError, match=why):
            ListenSettings(**{"canal": "127.0.0.1:1", "canal_cluster": "zookeeper://zk1:2181", **wrong})
