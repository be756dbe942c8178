# SPDX-License-Identifier: Apache-2.0
"""Canal clients of a daemon with listener processes get the same entries as from a single process."""

import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.canal.client import CanalClient, Refused
from tests.support.canal.following import (
    arrived,
    connect,
    drain,
    followed,
    followed_database,
    ids_of,
    settings_of,
    until_durable,
    without_repeats,
    write,
)
from tests.support.canal.peers import entries_of, peer
from tests.support.daemon.listener_processes import (
    descriptors_of,
    process_serving,
    processes_of,
    wait_for_listener_processes,
)
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import PartMissing, Server, certificate

COUNT = 4


@pytest.fixture(scope="module")
def server(server_of: Callable[[str], Server]) -> Iterator[Server]:
    """The shared MySQL server, with a table for the whole module."""
    actual = server_of("mysql")
    with followed_database(actual, "canal_l"):
        yield actual


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[DaemonProcess]:
    """A daemon with two listener processes, whose log has caught up with the server."""
    settings = {"listeners": 2, **settings_of(server, canal_start="earliest")}
    with DaemonProcess(tmp_path_factory.mktemp("listeners"), settings) as running:
        server.sql("INSERT INTO canal_l.t VALUES (0, '')")
        arrived(server, running)
        wait_for_listener_processes(running, 2)
        yield running


def reconnected(daemon: DaemonProcess, client_id: int) -> CanalClient:
    """Return a new connection as `subscribed` does, retrying while a process is ending."""
    clients: list[CanalClient] = []

    def connects() -> bool:
        # The daemon may still hand the connection to the process that is ending.
        with suppress(EOFError, ConnectionError):
            clients.append(subscribed(daemon, client_id))
        return bool(clients)

    wait_until(connects)
    return clients[0]


def subscribed(daemon: DaemonProcess, client_id: int) -> CanalClient:
    """Return a new connection of a client, which follows the table of this module."""
    return connect(daemon, client_id).subscribe("canal_l\\.t")


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_canal_moves.py::"
    "test_client_that_reaches_another_process_goes_on_at_its_last_acknowledged_entry"
)
def test_client_goes_on_at_the_next_entry_whichever_process_its_connection_reaches(
    daemon: DaemonProcess, server: Server
) -> None:
    with subscribed(daemon, 1) as client:
        drain(client)
    ids = write(server, daemon, 40, "canal_l.t")
    received: list[str] = []
    last = 0
    while True:
        with ExitStack() as stack:
            # The process with the fewest connections receives the next one.
            while process_serving(daemon, (client := stack.enter_context(connect(daemon, 1))).socket) == last:
                pass
            last = process_serving(daemon, client.socket)
            number, entries = client.subscribe("canal_l\\.t").get(size=1)
            if number == -1:
                break
            client.ack(number)
            acknowledged = ids_of(entries)
            # A batch that is not acknowledged is sent again.
            client.get(size=1)
        # Acknowledged entries are not repeated, even if the next connection follows at once.
        received += acknowledged
    assert received == ids


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_canal_moves.py::"
    "test_client_that_reaches_another_process_goes_on_at_its_last_acknowledged_entry"
)
def test_killed_listener_process_costs_its_canal_clients_a_reconnection(
    daemon: DaemonProcess, server: Server
) -> None:
    clients = {number: subscribed(daemon, number) for number in range(10, 10 + COUNT)}
    for client in clients.values():
        drain(client)
    wait_until(lambda: set(followed(daemon)) == {str(number) for number in clients})
    sessions = f'penstock_listener_sessions{{protocol="canal"}} {float(COUNT)}'
    assert sessions in daemon.get("/metrics").decode()
    received: dict[int, list[str]] = {number: [] for number in clients}
    ids: list[str] = []
    # How many clients keep their connection at each kill. The second process may have taken over all clients
    # that lost their connection.
    survivors: list[int] = []
    for process in processes_of(daemon, "listener_process"):
        ids += write(server, daemon, 20, "canal_l.t")
        acknowledged = {}
        for number, client in clients.items():
            batch_id, entries = client.get(size=1)
            client.ack(batch_id)
            acknowledged[number] = ids_of(entries)
            received[number] = without_repeats(received[number], acknowledged[number])
            until_durable(daemon, client, entries)
            # Leave two entries unacknowledged when the process dies.
            client.get(size=2)
        os.kill(process, signal.SIGKILL)
        survivors.append(0)
        for number, client in clients.items():
            try:
                client.rollback()
                rest = drain(client)
                survivors[-1] += 1
            except (EOFError, ConnectionError):
                client.close()
                client = clients[number] = reconnected(daemon, number)
                rest = drain(client)
                # Entries that were acknowledged, and stored, are not repeated.
                assert rest[0] not in acknowledged[number][:-1]
            received[number] = without_repeats(received[number], rest)
        wait_for_listener_processes(daemon, 2)
    assert 0 < survivors[0] < COUNT
    for number, client in clients.items():
        assert received[number] == ids
        client.close()


@pytest.mark.deep(
    guard="tests/unit/test_canal_moves.py::"
    "test_client_that_reaches_another_process_goes_on_at_its_last_acknowledged_entry"
)
@pytest.mark.parametrize("name", ["java", "go"])
def test_unmodified_client_follows_through_a_listener_process(
    name: str, daemon: DaemonProcess, server: Server, missing_part: MissingPart
) -> None:
    try:
        client = peer(name)
    except PartMissing as problem:
        missing_part(f"{name} client of Canal", str(problem))
    database = f"canal_l_{name}"
    server.sql(f"CREATE DATABASE {database}; CREATE TABLE {database}.t (id INT PRIMARY KEY)")
    server.sql(f"CREATE TABLE {database}.stop (a INT)")
    # The clients share one client id, so each client starts over.
    with CanalClient(daemon.ports["canal"], "shop") as before:
        before.log_in().unsubscribe()
    running = client.start(daemon.ports["canal"], "shop", "", "", f"{database}\\..*")
    server.sql(f"INSERT INTO {database}.t VALUES (1), (2); INSERT INTO {database}.t VALUES (3)")
    server.sql(f"INSERT INTO {database}.stop VALUES (1)")
    rows = [
        row["after"]["id"]["value"]
        for entry in entries_of(running)
        if entry["table"] == "t"
        for row in entry["rows"]
    ]
    assert rows == ["1", "2", "3"]
    server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/unit/test_canal_moves.py::"
    "test_client_that_reaches_another_process_goes_on_at_its_last_acknowledged_entry"
)
def test_listener_process_completes_the_tls_handshake_of_a_canal_client(
    server: Server, tmp_path: Path
) -> None:
    certificate.make(tmp_path / "tls")
    names = certificate.server_options(tmp_path / "tls")
    tls = {"cert": names["ssl-cert"], "key": names["ssl-key"]}
    settings = settings_of(server, canal_start="earliest", tls=tls, token="t" * 32)
    settings |= {"listeners": 2, "access": [{"name": "cache", "user": "cache", "password": "secret"}]}
    context = ssl.create_default_context(cafile=names["ssl-ca"])
    context.check_hostname = False
    with DaemonProcess(tmp_path, settings) as daemon:
        server.sql("INSERT INTO canal_l.t VALUES (-1, '')")
        raw = socket.create_connection(("127.0.0.1", daemon.ports["canal"]), WAIT_SECONDS_MAX)
        with CanalClient(0, over=context.wrap_socket(raw)) as client:
            with pytest.raises(Refused):
                client.log_in("cache", "wrong")
            client.log_in("cache", "secret").subscribe("canal_l\\.t")
            wait_until(lambda: ids_of(client.get(timeout=100)[1]) == ["-1"])
            assert any(descriptors_of(pid) for pid in processes_of(daemon, "listener_process"))
