# SPDX-License-Identifier: Apache-2.0
"""Ptubes clients of a daemon with listener processes continue at their positions, whichever process dies."""

import json
import os
import signal
import urllib.request
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon.listener_processes import descriptors_of, processes_of, wait_for_listener_processes
from tests.support.ptubes.client import LATEST, PtubesClient, normal
from tests.support.ptubes.shop import INSERT, Shop, make_shop, of_kind, start_daemon
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import wait_until
from tools.servers import Server


def sessions(shop: Shop) -> list[Any]:
    """Return the sessions that the monitor shows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{shop.monitor}/v1/clientSessionInfo") as answer:
        shown: list[Any] = json.load(answer)
        return shown


def ids_of(client: PtubesClient) -> list[str]:
    """Return the ids of the rows that a client received."""
    return [event.rowData.afterColumns["id"].value for event in of_kind(client.events.get(0, []), INSERT)]


def fetch_row(client: PtubesClient, number: int) -> None:
    """Fetch until a client has received a row."""
    client.fetch_until(lambda client: str(number) in ids_of(client))


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_listener_shares.py::test_ptubes_clients_of_every_process_are_known_to_all"
)
def test_ptubes_clients_are_shared_among_listener_processes_and_outlive_each(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        daemon = start_daemon(mysql_server, tmp_path, listeners=2)
        stack.callback(daemon.kill)
        wait_for_listener_processes(daemon, 2)
        shop = make_shop(mysql_server, daemon, fresh_database(mysql_server))
        received: dict[str, list[str]] = {}
        checkpoints: dict[str, Any] = {}

        def connected(task: str) -> PtubesClient:
            """Connect a client, even while a process is ending."""
            clients: list[PtubesClient] = []

            def subscribes() -> bool:
                client = shop.client(task=task)
                with suppress(HTTPException, ConnectionError):
                    if client.subscribe(checkpoints.get(task, LATEST)) == "success":
                        clients.append(client)
                return bool(clients)

            wait_until(subscribes)
            return clients[0]

        clients = {task: connected(task) for task in ("a", "b", "c", "d")}
        processes = processes_of(daemon, "listener_process")
        assert all(descriptors_of(process) > 0 for process in processes)
        # Each process and the monitor list the clients of all processes.
        wait_until(lambda: {session["writerTaskName"] for session in sessions(shop)} == set("abcd"))
        for task, client in clients.items():
            wait_until(lambda client=client: client.server_info()["writerTaskList"] == list("abcd"))
            assert client.server_info()["loadFactor"] == len(clients), task
        number = 0
        for process in processes:
            number += 1
            shop.sql(f"INSERT INTO orders VALUES ({number}, 'before', 1)")
            shop.caught_up()
            for task, client in clients.items():
                fetch_row(client, number)
                checkpoints[task] = normal(client.events[0][-1].header.checkpoint)
            os.kill(process, signal.SIGKILL)
            number += 1
            shop.sql(f"INSERT INTO orders VALUES ({number}, 'after', 1)")
            wait_for_listener_processes(daemon, 2)
            shop.caught_up()
            for task, client in clients.items():
                try:
                    fetch_row(client, number)
                except (HTTPException, ConnectionError):
                    received[task] = received.get(task, []) + ids_of(client)
                    client = clients[task] = connected(task)
                    fetch_row(client, number)
        for task, client in clients.items():
            assert received.get(task, []) + ids_of(client) == ["1", "2", "3", "4"]
            client.close()
        names = {f"penstock.consumer.ptubes-{task}" for task in clients}
        wait_until(
            lambda: names <= {hold["reader"] for hold in daemon.get("/v1/instances/shop/holds")["holds"]}
        )
        assert daemon.terminate() == 0
