# SPDX-License-Identifier: Apache-2.0
"""Canal's own Java client, unmodified, finds the daemon in ZooKeeper and follows a fail-over."""

import json
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.canal.peers import peer
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import wait_until
from tools.servers import Server
from tools.zookeeper import ZooKeeper


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_canal_cluster.py::test_destination_is_shown_where_it_is_served_and_follows_it"
)
@pytest.mark.parametrize("listeners", ["single", 2])
def test_java_cluster_client_finds_the_running_daemon_and_follows_a_fail_over(
    listeners: str | int,
    mysql_server: Server,
    zookeeper: ZooKeeper,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    for table in ("orders", "stop"):
        mysql_server.sql(f"CREATE TABLE {database}.{table} (id INT PRIMARY KEY)")
    # Canal's layout is at the root of what the client considers its ensemble.
    top = f"{zookeeper.hosts}/{tmp_path.name}"
    daemons: dict[str, DaemonProcess] = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        settings = {
            "coordination": f"zookeeper://{zookeeper.hosts}/{tmp_path.name}-penstock",
            "listen": {"canal": "127.0.0.1:0", "canal_cluster": f"zookeeper://{top}"},
            "fleet": {"member": name, "session": "2s"},
            "listeners": listeners,
            "log": {"copies": 2, "folder": str(tmp_path / name / "log")},
            "instances": {"shop": {"source": mysql_server.url(), "start": str(head_of(mysql_server))}},
        }
        daemons[name] = DaemonProcess(tmp_path / name, settings)
    with ExitStack() as stack:
        for daemon in daemons.values():
            stack.enter_context(daemon)
        wait_until(lambda: "running" in {daemon.status()["state"] for daemon in daemons.values()})
        first = next(name for name, daemon in daemons.items() if daemon.status()["state"] == "running")
        mysql_server.sql(f"INSERT INTO {database}.orders VALUES (1)")
        client = peer("java").start(top, "shop", "", "", f"{database}\\..*")
        stack.callback(client.kill)
        lines: list[str] = []
        output = client.stdout
        assert output is not None
        reading = threading.Thread(target=lambda: lines.extend(output), daemon=True)
        reading.start()

        def received() -> set[str]:
            return {
                row["after"]["id"]["value"]
                for line in tuple(lines)
                if line.startswith("{")
                for row in json.loads(line)["rows"]
                if json.loads(line)["table"] == "orders"
            }

        wait_until(lambda: received() == {"1"})
        wait_until(lambda: all(row["copies"] for row in daemons[first].get("/v1/fleet")["instances"]))
        daemons[first].kill()
        mysql_server.sql(f"INSERT INTO {database}.orders VALUES (2)")
        wait_until(lambda: received() == {"1", "2"})
        mysql_server.sql(f"INSERT INTO {database}.stop VALUES (1)")
        reading.join()
        assert client.wait() == 0
