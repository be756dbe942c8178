# SPDX-License-Identifier: Apache-2.0
"""A daemon whose readers are served by several processes: each reader gets every change, whichever process
dies.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Subscriber
from tests.support.daemon.listener_processes import descriptors_of, processes_of, wait_for_listener_processes
from tests.support.daemon.process import DaemonProcess
from tests.support.daemon.subscribing import Running
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

TOKENS = {"reader": "r" * 32, "operator": "o" * 32}


def subscribers_of(daemon: DaemonProcess) -> set[str]:
    """Return the names of the subscribers that a daemon lists."""
    listed = daemon.get("/v1/subscribers")["subscribers"]
    return {subscriber["subscriber"].partition("/")[0] for subscriber in listed}


@contextmanager
def following(daemon: DaemonProcess, table: str, folder: Path, count: int) -> Iterator[list[Running]]:
    """Let some subscribers follow a table from its start inside the block."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Running(
                    Subscriber(
                        f"penstock://127.0.0.1:{daemon.port}/shop",
                        name=f"cache-{number}",
                        tables=[table],
                        coordination=f"sqlite://{folder}/coordination.db",
                        start="earliest",
                        session_seconds=WAIT_SECONDS_MAX,
                        token=TOKENS["reader"],
                    )
                )
            )
            for number in range(count)
        ]


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_listener_shares.py::"
    "test_connection_passed_to_another_process_has_its_number_and_its_bytes"
)
@pytest.mark.parametrize("captures", ["single", "per-instance"])
def test_followers_are_shared_among_listener_processes_and_outlive_each(
    captures: str, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    table = f"{fresh_database(mysql_server)}.orders"
    settings: dict[str, Any] = {
        "processes": captures,
        "listeners": 2,
        "access": [
            {"name": "reader", "token": TOKENS["reader"]},
            {"name": "operator", "token": TOKENS["operator"], "admin": True},
        ],
        "instances": {"shop": {"source": mysql_server.url()}},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        daemon.token = TOKENS["operator"]
        daemon.wait_for(lambda status: status["state"] == "running")
        wait_for_listener_processes(daemon, 2)
        mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, customer INT, step INT)")
        mysql_server.sql(f"INSERT INTO {table} VALUES (1, 1, 0)")
        inserted = 1

        def wait_for_newest(followers: list[Running]) -> None:
            for follower in followers:
                wait_until(lambda follower=follower: inserted in {row[1] for row in follower.rows})

        with following(daemon, table, tmp_path, 4) as followers:
            wait_for_newest(followers)
            processes = processes_of(daemon, "listener_process")
            assert len(processes) == 2
            # Each process has some of the followers' connections.
            assert all(descriptors_of(process) > 0 for process in processes)
            # The daemon knows the followers of all processes.
            wait_until(
                lambda: (
                    {
                        row["subscriber"].partition("/")[0]
                        for row in daemon.get("/v1/subscribers")["subscribers"]
                    }
                    == {f"cache-{number}" for number in range(4)}
                )
            )
            for process in processes:
                os.kill(process, signal.SIGKILL)
                inserted += 1
                mysql_server.sql(f"INSERT INTO {table} VALUES ({inserted}, 1, 0)")
                wait_for_newest(followers)
            wait_for_listener_processes(daemon, 2)
            for follower in followers:
                ids = [row[1] for row in follower.rows]
                assert list(dict.fromkeys(ids)) == list(range(1, inserted + 1))
            # The daemon writes the holds of all followers, whichever processes they are connected to.
            names = {f"penstock.consumer.cache-{number}" for number in range(4)}
            wait_until(
                lambda: names <= {hold["reader"] for hold in daemon.get("/v1/instances/shop/holds")["holds"]}
            )
        assert daemon.terminate() == 0
