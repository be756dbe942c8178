# SPDX-License-Identifier: Apache-2.0
"""A fleet of real daemons without shared files: hosts die and freeze, and readers miss nothing."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.client import Subscriber
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess, Refused
from tests.support.daemon.subscribing import Running
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


class Fleet:
    """Daemons with folders of their own and one coordination store; as a context manager they run inside."""

    def __init__(self, folder: Path, server: Server, coordination: str, members: tuple[str, ...]) -> None:
        self.coordination = coordination
        self.daemons: dict[str, DaemonProcess] = {}
        for name in members:
            (folder / name).mkdir()
            settings = {
                "coordination": coordination,
                "fleet": {"member": name, "zone": f"room-{name}", "session": "2s"},
                "instances": {"shop": {"source": server.url()}},
            }
            self.daemons[name] = DaemonProcess(folder / name, settings)

    @contextmanager
    def running(self) -> Iterator["Fleet"]:
        """Run all members inside the block."""
        with ExitStack() as stack:
            for daemon in self.daemons.values():
                stack.enter_context(daemon)
            yield self

    def url(self, *members: str) -> str:
        """Return the address of the instance at some members."""
        hosts = ",".join(f"127.0.0.1:{self.daemons[name].port}" for name in members)
        return f"penstock://{hosts}/shop"

    def status(self, *words: str) -> dict[str, Any]:
        """Return the output of `penstock fleet status --json` about the fleet that words name."""
        done = CliRunner().invoke(make_app("fleet"), ["fleet", "status", *words, "--json"])
        assert done.exit_code == 0, done.output
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    def states(self, *members: str) -> dict[str, str]:
        """Return the state of the instance at some members."""
        return {name: self.daemons[name].status()["state"] for name in members}

    def wait_for_capturer(self, *members: str) -> str:
        """Wait until one of some members captures up to the server, and return its name."""
        wait_until(lambda: "running" in self.states(*members).values())
        return next(name for name, state in self.states(*members).items() if state == "running")


def segment_bytes(daemon: DaemonProcess) -> dict[str, bytes]:
    """Return the content of every segment of a daemon's log."""
    files = [path for path in (daemon.folder / "log" / "shop").rglob("*") if path.suffix == ".binlog"]
    assert files, "the log has no segment"
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.timing
@pytest.mark.parametrize("store", ["sqlite", "zookeeper"])
def test_instance_is_captured_by_another_member_when_its_capturer_freezes_or_dies(
    store: str,
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if store == "sqlite":
        coordination, members = f"sqlite://{tmp_path}/coordination.db", ("a", "b")
    else:
        hosts = request.getfixturevalue("zookeeper").hosts
        coordination, members = f"zookeeper://{hosts}/{tmp_path.name}", ("a", "b", "c")
    server, database = mysql_server, fresh_database(mysql_server)
    server.sql(f"CREATE TABLE {database}.orders (id INT PRIMARY KEY, customer INT, step INT)")
    next_id = 0

    def insert() -> None:
        nonlocal next_id
        next_id += 1
        server.sql(f"INSERT INTO {database}.orders VALUES ({next_id}, 1, 0)")

    fleet = Fleet(tmp_path, server, coordination, members)
    with fleet.running():
        first = fleet.wait_for_capturer(*members)
        others = tuple(name for name in members if name != first)
        assert fleet.states(*others) == dict.fromkeys(others, "elsewhere")
        # Any member names the capturing one, and clients follow it there.
        with pytest.raises(Refused) as refused:
            wait_until(lambda: fleet.daemons[others[0]].get("/v1/instances/shop/head") is None)
        assert refused.value.status == 421
        insert()
        subscriber = Subscriber(
            fleet.url(*others),
            name="cache",
            tables=[f"{database}.orders"],
            coordination=fleet.coordination,
            start="earliest",
            session_seconds=WAIT_SECONDS_MAX,
        )
        with Running(subscriber) as running:
            wait_until(lambda: next_id in {row[1] for row in running.rows})

            frozen = fleet.daemons[first]
            os.kill(frozen.pid, signal.SIGSTOP)
            insert()
            second = fleet.wait_for_capturer(*others)
            insert()
            wait_until(lambda: next_id in {row[1] for row in running.rows})
            before = segment_bytes(frozen)
            os.kill(frozen.pid, signal.SIGCONT)
            frozen.wait_for(lambda status: status["state"] == "elsewhere")
            insert()
            head = head_of(server)
            fleet.daemons[second].wait_for_head(head.file, head.offset)
            assert segment_bytes(frozen) == before

            fleet.daemons[second].kill()
            insert()
            left = tuple(name for name in members if name != second)
            third = fleet.wait_for_capturer(*left)
            insert()
            wait_until(lambda: next_id in {row[1] for row in running.rows})
            ids = [row[1] for row in running.rows]
            assert list(dict.fromkeys(ids)) == list(range(1, next_id + 1))
        # The store alone and every member say the same.
        url = f"http://127.0.0.1:{fleet.daemons[left[0]].port}"
        for words in (("--coordination", fleet.coordination), ("--url", url)):
            shown = fleet.status(*words)
            assert [row["captured_by"] for row in shown["instances"]] == [third]
            running_members = {row["member"] for row in shown["members"] if row["state"] == "running"}
            assert running_members == set(left)
