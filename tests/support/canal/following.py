# SPDX-License-Identifier: Apache-2.0
"""Commit rows, and follow them with Canal clients through a daemon."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.store import CoordinationStore, open_store
from penstock.coordinate.subscription_record import Subscriptions
from penstock.model import Position
from tests.support.canal.client import TRANSACTIONEND, CanalClient, describe_entries, entry_of
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

_client_ids = itertools.count(1)
_row_ids = itertools.count(1)


@contextmanager
def followed_database(server: Server, name: str) -> Iterator[None]:
    """Create a database with a table `t` for the block."""
    server.sql(f"CREATE DATABASE {name}; CREATE TABLE {name}.t (id INT PRIMARY KEY, v LONGTEXT)")
    yield
    server.sql(f"DROP DATABASE {name}")


def settings_of(server: Server, **listen: Any) -> dict[str, Any]:
    """Return the settings of a daemon without credentials; new clients start at the head."""
    return {
        "listen": {"canal": "127.0.0.1:0", "canal_start": "latest", **listen},
        "instances": {"shop": {"source": server.url(), "start": str(head_of(server))}},
    }


def write(
    server: Server, daemon: DaemonProcess, count: int, table: str = "canal_p.t", width: int = 10
) -> list[str]:
    """Commit this many single-row transactions; return their ids once the daemon has captured them."""
    ids = list(itertools.islice(_row_ids, count))
    server.sql(";".join(f"INSERT INTO {table} VALUES ({id_}, REPEAT('x', {width}))" for id_ in ids))
    arrived(server, daemon)
    return [str(id_) for id_ in ids]


def arrived(server: Server, daemon: DaemonProcess) -> None:
    """Wait until a daemon has captured every commit of a server."""
    head = head_of(server)
    daemon.wait_for_head(head.file, head.offset)


def connect(daemon: DaemonProcess, client_id: int | None = None) -> CanalClient:
    """Return an authenticated connection, with a new client id by default."""
    number = next(_client_ids) if client_id is None else client_id
    return CanalClient(daemon.ports["canal"], "shop", str(number)).log_in()


def ids_of(entries: list[bytes]) -> list[str]:
    """Return the ids of the rows that entries insert."""
    return [entry[3]["id"] for entry in describe_entries(entries) if entry[0] == "INSERT"]


def drain(client: CanalClient, size: int = 1000) -> list[str]:
    """Receive and acknowledge all available entries, and return the ids of their rows."""
    ids: list[str] = []
    while True:
        batch_id, entries = client.get(size)
        if batch_id == -1:
            return ids
        ids += ids_of(entries)
        client.ack(batch_id)


def checkpoint_of(daemon: DaemonProcess, client: CanalClient) -> Checkpoint:
    """Return the durable checkpoint of a client whose session has ended."""
    until_gone(daemon, client)
    with store_of(daemon) as store:
        checkpoint = stored(store, client)
        assert checkpoint is not None
        return checkpoint


def until_durable(daemon: DaemonProcess, client: CanalClient, acknowledged: list[bytes]) -> None:
    """Wait until a store holds the client's acknowledged position, up to the last whole transaction."""
    headers = [entry.header for entry in map(entry_of, acknowledged) if entry.entryType == TRANSACTIONEND]
    ends = [Position(0, header.logfileName, header.logfileOffset + header.eventLength) for header in headers]
    with store_of(daemon) as store:

        def holds() -> bool:
            checkpoint = stored(store, client)
            return checkpoint is not None and Position.parse(checkpoint.position) >= max(ends)

        if ends:
            wait_until(holds)


@contextmanager
def store_of(daemon: DaemonProcess) -> Iterator[CoordinationStore]:
    """Open the store in which a daemon keeps its clients' cursors, inside the block."""
    url = daemon.settings.get("coordination", f"sqlite:///{daemon.folder}/log/coordination.db")
    store = open_store(url, WAIT_SECONDS_MAX)
    try:
        yield store
    finally:
        store.close()


def stored(store: CoordinationStore, client: CanalClient) -> Checkpoint | None:
    """Return the client's current record in a store."""
    subscription = Subscriptions(store).get("shop", f"canal-{client.client_id}")
    return None if subscription is None else subscription.checkpoints(store).read(0)


def followed(daemon: DaemonProcess) -> list[str]:
    """Return the ids of the connected clients."""
    shown = daemon.get("/v1/subscribers")["subscribers"]
    return [subscriber["subscriber"].removeprefix("canal-") for subscriber in shown if subscriber["requests"]]


def until_gone(daemon: DaemonProcess, client: CanalClient) -> None:
    """Wait until a daemon has noticed that a client has left."""
    wait_until(lambda: client.client_id not in followed(daemon))


def assert_ended(client: CanalClient) -> None:
    """Assert that the daemon closes a connection without sending anything."""
    with pytest.raises((EOFError, ConnectionError)):
        client.receive_bytes()


def assert_refused(client: CanalClient) -> None:
    """Assert that a client is disconnected when its acknowledgement cannot be stored."""

    def go_on() -> None:
        drain(client)
        client.receive_bytes()

    with pytest.raises((EOFError, ConnectionError)):
        go_on()


def without_repeats(ids: list[str], more: list[str]) -> list[str]:
    """Return `ids` followed by the ids of `more` that do not repeat them."""
    begin = ids.index(more[0]) if more and more[0] in ids else len(ids)
    assert ids[begin:] == more[: len(ids) - begin] or ids[begin : begin + len(more)] == more
    return ids[:begin] + more if len(more) > len(ids) - begin else ids
