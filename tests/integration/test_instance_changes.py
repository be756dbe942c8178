# SPDX-License-Identifier: Apache-2.0
"""Instances that are added, changed and removed while a daemon runs."""

import itertools
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from penstock import read_binlog
from penstock.cli.app import make_app
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess, Refused
from tests.support.daemon.subscribing import Orders, Running
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server
from tools.servers.template import REPLICATION_PASSWORD


def reload(daemon: DaemonProcess, instances: dict[str, Any], **sections: Any) -> str:
    """Change the settings file, make the daemon reload it, and return what the daemon logs about the
    reload.
    """
    begins = len(daemon.said())
    settings = yaml.safe_load(daemon.config.read_text())
    daemon.config.write_text(yaml.safe_dump({**settings, "instances": instances, **sections}))
    os.kill(daemon.pid, signal.SIGHUP)
    wait_until(lambda: "settings" in daemon.said()[begins:] and daemon.said().endswith("\n"))
    return daemon.said()[begins:]


# Secrets are not stored in plain text.
ENVIRONMENT = {"REPLICA_PASSWORD": REPLICATION_PASSWORD}


def section_of(server: Server) -> dict[str, Any]:
    """Return the settings of an instance that captures a server."""
    return {
        "source": server.url().replace(f":{REPLICATION_PASSWORD}", ""),
        "password_env": "REPLICA_PASSWORD",
    }


def put(daemon: DaemonProcess, instance: str, **body: Any) -> int:
    """Set an instance over HTTP, and return its version."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{daemon.port}/v1/instances/{instance}", json.dumps(body).encode(), method="PUT"
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as answer:
        return int(json.load(answer)["version"])


def names(daemon: DaemonProcess) -> list[str]:
    """Return the names of the daemon's instances."""
    return [instance["instance"] for instance in daemon.get("/v1/instances")["instances"]]


@pytest.mark.deep(keep=("single",))
@pytest.mark.parametrize("processes", ["single", "per-instance"])
def test_settings_that_are_read_again_disturb_no_other_instance(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path, processes: str
) -> None:
    source = section_of(mariadb_server)
    coordination = f"sqlite://{tmp_path}/coordination.db"
    settings = {
        "coordination": coordination,
        "instances": {"shop": source, "users": source},
        "processes": processes,
    }
    with DaemonProcess(tmp_path, settings, ENVIRONMENT) as daemon:
        # An instance that starts later would begin after the first row.
        for name in ("shop", "users"):
            daemon.wait_for(lambda status: status["state"] == "running", name)
        orders = Orders(mariadb_server, fresh_database(mariadb_server), daemon, tmp_path)
        with Running(orders.subscriber()) as running:
            running.wait_owning(1)
            orders.insert(1)
            running.wait_for(1)
            connects = daemon.status()["connects"]
            assert "settings are applied" in reload(
                daemon, {"shop": source, "users": {**source, "tables": "a.b"}}
            )
            assert put(daemon, "audit", settings=source) == 1
            wait_until(lambda: names(daemon) == ["shop", "users", "audit"])
            for name in ("users", "audit"):
                daemon.wait_for(lambda status: status["state"] == "running", name)
            assert daemon.status("users")["tables"] == ["a.b"]
            orders.insert(2)
            head = head_of(mariadb_server)
            daemon.wait_for_head(head.file, head.offset, "audit")
            for problem in ({"instances": {}}, {"instances": {"shop": source}, "processes": 2}):
                assert "new settings are not applied" in reload(daemon, **problem)
            with pytest.raises(urllib.error.HTTPError, match="400"):
                put(daemon, "more", settings={"source": mariadb_server.url()})
            assert names(daemon) == ["shop", "users", "audit"]
            daemon.fetch("/v1/instances/audit", method="DELETE")
            wait_until(lambda: names(daemon) == ["shop", "users"])
            with pytest.raises(Refused, match="no instance 'audit'"):
                daemon.get("/v1/instances/audit/head")
            assert (tmp_path / "log" / "audit").is_dir(), "the log stays"
            orders.insert(3)
            running.wait_for(3)
        assert [row[1] for row in running.rows] == [1, 2, 3]
        assert daemon.status()["connects"] == connects
        assert daemon.terminate() == 0


@pytest.mark.deep(
    guard="tests/integration/test_instance_changes.py::"
    "test_settings_that_are_read_again_disturb_no_other_instance"
)
@pytest.mark.timing
def test_instance_of_the_store_is_captured_by_one_member_of_a_fleet(
    mariadb_server: Server, tmp_path: Path
) -> None:
    coordination = f"sqlite://{tmp_path}/coordination.db"
    source = section_of(mariadb_server)
    daemons = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        fleet = {"member": name, "session": "2s"}
        settings = {"coordination": coordination, "fleet": fleet, "instances": {"shop": source}}
        daemons.append(DaemonProcess(tmp_path / name, settings, ENVIRONMENT))

    def states(instance: str) -> list[str]:
        return sorted(daemon.status(instance)["state"] for daemon in daemons)

    def apply(section: dict[str, Any]) -> None:
        text = yaml.safe_dump({"instance": "users", "settings": section})
        done = CliRunner().invoke(make_app(), ["apply", "--coordination", coordination], input=text)
        assert done.exit_code == 0, done.output

    with daemons[0], daemons[1]:
        wait_until(lambda: states("shop") == ["elsewhere", "running"])
        connects = sum(
            daemon.status()["connects"] for daemon in daemons if daemon.status()["state"] == "running"
        )
        apply(source)
        wait_until(lambda: all("users" in names(daemon) for daemon in daemons))
        wait_until(lambda: states("users") == ["elsewhere", "running"])
        apply({**source, "tables": ["a.b"]})
        wait_until(lambda: all(daemon.status("users")["tables"] == ["a.b"] for daemon in daemons))
        wait_until(lambda: states("users") == ["elsewhere", "running"])
        # The API of any member stores the instance for all members.
        daemons[1].fetch("/v1/instances/users", method="DELETE")
        wait_until(lambda: [names(daemon) for daemon in daemons] == [["shop"], ["shop"]])
        assert states("shop") == ["elsewhere", "running"]
        assert connects == sum(
            daemon.status()["connects"] for daemon in daemons if daemon.status()["state"] == "running"
        )


@pytest.mark.deep(guard="tests/unit/test_settings_changes.py::test_merge_is_added_and_removed")
@pytest.mark.parametrize("processes", ["single", "per-instance"])
def test_merge_is_added_and_removed_while_its_members_are_captured(
    start_server: StartServer, tmp_path: Path, processes: str
) -> None:
    members, servers = {}, []
    for number in (1, 2):
        server = start_server("mariadb")
        server.sql(f"SET GLOBAL binlog_row_metadata = FULL; SET GLOBAL gtid_domain_id = {number}")
        server.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY)")
        members[f"db{number}"] = {"source": server.url(), "start": "earliest"}
        servers.append(server)
    merge = {"merge": ["db1", "db2"], "start": "earliest"}

    def insert(first: int) -> None:
        for number, server in enumerate(servers):
            server.sql(f"INSERT INTO shop.orders VALUES ({first + number})")

    def ids(instance: str) -> list[int]:
        batches = read_binlog(str(tmp_path / "log" / instance), tables="shop.orders")
        return sorted(id_ for batch in batches for id_ in batch.to_arrow()["id"].to_pylist())

    def connects() -> int:
        return sum(int(daemon.status(name)["connects"]) for name in members)

    def wait_for_merge(count: int) -> None:
        daemon.wait_for(lambda status: status["position"] is not None)
        wait_until(lambda: len(ids("shop")) >= count)
        assert ids("shop") == list(range(1, count + 1))

    with DaemonProcess(tmp_path, {"instances": members, "processes": processes}) as daemon:
        for name in members:
            daemon.wait_for(lambda status: status["state"] == "running", name)
        before = connects()
        insert(1)
        assert "settings are applied" in reload(daemon, {"shop": merge, **members})
        wait_for_merge(2)
        assert processes != "single" or connects() == before, "the members go on"
        changed = {**members["db2"], "tables": ["shop.*"]}
        for refused in ({**members, "db2": changed}, {"db1": members["db1"]}):
            said = reload(daemon, {"shop": merge, **refused})
            assert "new settings are not applied" in said
            assert "db2" in said
        insert(3)
        wait_for_merge(4)
        # Several changes at once: the last one counts, and each log is opened once.
        for instances in (members, {"shop": merge, **members}, {**members, "db2": changed}):
            change_file(daemon, instances)
        wait_until(lambda: names(daemon) == ["db1", "db2"] and daemon.status("db2")["tables"] == ["shop.*"])
        insert(5)
        with_merge = (alone := {**members, "db2": changed}) | {"shop": merge}
        # The daemon is killed while it applies a change.
        for instances, seconds in zip(
            itertools.cycle((with_merge, alone)), (0.0, 0.05, 0.02, 0.1, 0.01), strict=False
        ):
            daemon.settings = {**daemon.settings, "instances": instances}
            change_file(daemon, instances)
            threading.Event().wait(seconds)
            daemon.kill()
            daemon.start()
        wait_for_merge(6)
        assert "settings are applied" in reload(daemon, alone)
        assert sorted(names(daemon)) == ["db1", "db2"]
        insert(7)
        assert "settings are applied" in reload(daemon, with_merge)
        wait_for_merge(8)
        for name in members:
            daemon.wait_for(lambda status: status["state"] == "running", name)
            wait_until(lambda name=name: len(ids(name)) == 4)  # type: ignore[misc]
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.said()


def change_file(daemon: DaemonProcess, instances: dict[str, Any]) -> None:
    """Write instances into a daemon's file and make the daemon read it, without waiting."""
    settings = {**yaml.safe_load(daemon.config.read_text()), "instances": instances}
    daemon.config.write_text(yaml.safe_dump(settings))
    os.kill(daemon.pid, signal.SIGHUP)
