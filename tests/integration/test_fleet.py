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
from tests.support.daemon.scraping import samples
from tests.support.daemon.subscribing import Running
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


class Fleet:
    """Daemons with separate folders and one coordination store. As a context manager, it runs them inside the
    block.
    """

    def __init__(
        self,
        folder: Path,
        server: Server,
        coordination: str,
        members: tuple[str, ...],
        session: str = "2s",
        **more: Any,
    ) -> None:
        self.coordination = coordination
        self.daemons: dict[str, DaemonProcess] = {}
        for name in members:
            (folder / name).mkdir()
            settings = {
                "coordination": coordination,
                "fleet": {"member": name, "zone": f"room-{name}", "session": session},
                "instances": {"shop": {"source": server.url()}},
                **more,
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
        """Return the address of the instance at the given members."""
        hosts = ",".join(f"127.0.0.1:{self.daemons[name].port}" for name in members)
        return f"penstock://{hosts}/shop"

    def status(self, *words: str) -> dict[str, Any]:
        """Return the output of `penstock fleet status --json` with these arguments."""
        done = CliRunner().invoke(make_app(), ["fleet", "status", *words, "--json"])
        assert done.exit_code == 0, done.output
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    def states(self, *members: str) -> dict[str, str]:
        """Return the state of the instance at the given members."""
        return {name: self.daemons[name].status()["state"] for name in members}

    def wait_for_capturer(self, *members: str) -> str:
        """Wait until one of the given members has captured everything up to the server's end, and return its
        name.
        """
        capturers: list[str] = []

        def is_captured() -> bool:
            # A member that captures now may have lost its session by the next check.
            capturers[:] = [name for name, state in self.states(*members).items() if state == "running"]
            return bool(capturers)

        wait_until(is_captured)
        return capturers[0]


def segment_bytes(daemon: DaemonProcess) -> dict[str, bytes]:
    """Return the content of every segment of a daemon's log."""
    files = [path for path in (daemon.folder / "log" / "shop").rglob("*") if path.suffix == ".binlog"]
    assert files, "the log has no segment"
    return {path.name: path.read_bytes() for path in files}


class Orders:
    """A table whose rows a subscriber receives through a fleet. Rows are numbered in insertion order."""

    def __init__(self, server: Server, database: str) -> None:
        self._server = server
        self.table = f"{database}.orders"
        self.inserted = 0
        server.sql(f"CREATE TABLE {self.table} (id INT PRIMARY KEY, customer INT, step INT)")

    def insert(self) -> None:
        """Insert the next row."""
        self.inserted += 1
        self._server.sql(f"INSERT INTO {self.table} VALUES ({self.inserted}, 1, 0)")

    @contextmanager
    def followed(self, url: str, coordination: str) -> Iterator[Running]:
        """Follow the table from its start inside the block. At its end, every row has arrived, in order."""
        subscriber = Subscriber(
            url,
            name="cache",
            tables=[self.table],
            coordination=coordination,
            start="earliest",
            session_seconds=WAIT_SECONDS_MAX,
        )
        with Running(subscriber) as running:
            self.wait_for_newest(running)
            yield running
            self.wait_for_newest(running)
        ids = [row[1] for row in running.rows]
        assert list(dict.fromkeys(ids)) == list(range(1, self.inserted + 1))

    def wait_for_newest(self, running: Running) -> None:
        """Wait until the newest row has arrived."""
        wait_until(lambda: self.inserted in {row[1] for row in running.rows})


@pytest.mark.timing
@pytest.mark.deep(keep=("single",))
@pytest.mark.parametrize("processes", ["single", "per-instance"])
def test_instance_is_captured_by_another_member_when_its_capturer_dies(
    processes: str, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    orders = Orders(mysql_server, fresh_database(mysql_server))
    # The session of a killed daemon is ended long before it would expire.
    fleet = Fleet(
        tmp_path,
        mysql_server,
        f"sqlite://{tmp_path}/coordination.db",
        ("a", "b"),
        "600s",
        processes=processes,
    )
    with fleet.running():
        first = fleet.wait_for_capturer("a", "b")
        second = "b" if first == "a" else "a"
        assert fleet.states(second) == {second: "elsewhere"}
        # Every member names the capturing member, and clients connect to that member.
        with pytest.raises(Refused) as refused:
            fleet.daemons[second].get("/v1/instances/shop/head")
        assert refused.value.status == 421
        orders.insert()
        with orders.followed(fleet.url(second), fleet.coordination):
            fleet.daemons[first].kill()
            orders.insert()
            assert fleet.wait_for_capturer(second) == second
            orders.insert()
        metrics = samples(fleet.daemons[second].get("/metrics").decode())
        held = {labels: value for labels, value in metrics.items() if labels[0] == "penstock_lease_held"}
        assert held == {("penstock_lease_held", "capture", fleet.coordination, "shop"): 1}
        # The store alone and every member report the same.
        for words in (
            ("--coordination", fleet.coordination),
            ("--url", f"http://127.0.0.1:{fleet.daemons[second].port}"),
        ):
            shown = fleet.status(*words)
            assert [row["captured_by"] for row in shown["instances"]] == [second]
            assert [row["member"] for row in shown["members"] if row["state"] == "running"] == [second]


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/integration/test_fleet.py::"
    "test_instance_is_captured_by_another_member_when_its_capturer_dies"
)
@pytest.mark.parametrize(
    ("store", "processes"),
    [("sqlite", "single"), ("zookeeper", "single"), ("sqlite", "per-instance")],
)
def test_frozen_member_that_wakes_up_stores_nothing_and_continues_later(
    store: str,
    processes: str,
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    orders = Orders(mysql_server, fresh_database(mysql_server))
    coordination, members = f"sqlite://{tmp_path}/coordination.db", ("a", "b")
    if store == "zookeeper":
        hosts = request.getfixturevalue("zookeeper").hosts
        coordination, members = f"zookeeper://{hosts}/{tmp_path.name}", ("a", "b", "c")
    fleet = Fleet(tmp_path, mysql_server, coordination, members, processes=processes)
    with fleet.running():
        first = fleet.wait_for_capturer(*members)
        others = tuple(name for name in members if name != first)
        orders.insert()
        with orders.followed(fleet.url(*others), fleet.coordination) as running:
            frozen = fleet.daemons[first]
            # A capture process is not frozen with its daemon, and stops by itself.
            os.kill(frozen.pid, signal.SIGSTOP)
            orders.insert()
            second = fleet.wait_for_capturer(*others)
            orders.insert()
            orders.wait_for_newest(running)
            before = segment_bytes(frozen)
            os.kill(frozen.pid, signal.SIGCONT)
            frozen.wait_for(lambda status: status["state"] == "elsewhere")
            orders.insert()
            head = head_of(mysql_server)
            fleet.daemons[second].wait_for_head(head.file, head.offset)
            assert segment_bytes(frozen) == before
            # The frozen member's log continues at its own end.
            fleet.daemons[second].kill()
            orders.insert()
            fleet.wait_for_capturer(*(name for name in members if name != second))
            orders.insert()


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_fleet_capture_record.py::"
    "test_member_keeps_the_lease_of_a_capture_process_that_dies_until_it_leaves"
)
@pytest.mark.parametrize("listeners", ["single", 2])
def test_capture_process_that_is_killed_goes_on_at_its_member_and_is_handed_over_by_a_drain(
    listeners: str | int, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    orders = Orders(mysql_server, fresh_database(mysql_server))
    coordination = f"sqlite://{tmp_path}/coordination.db"
    fleet = Fleet(
        tmp_path, mysql_server, coordination, ("a", "b"), processes="per-instance", listeners=listeners
    )
    with fleet.running():
        first = fleet.wait_for_capturer("a", "b")
        second = "b" if first == "a" else "a"
        orders.insert()
        with orders.followed(fleet.url(first, second), coordination):
            process = fleet.daemons[first].status()["process"]["pid"]
            os.kill(process, signal.SIGKILL)
            orders.insert()
            fleet.daemons[first].wait_for(
                lambda status: status["state"] == "running" and status["process"]["starts"] >= 2
            )
            assert fleet.states(second) == {second: "elsewhere"}
            drained = CliRunner().invoke(
                make_app(), ["fleet", "drain", first, "--coordination", coordination]
            )
            assert drained.exit_code == 0, drained.output
            orders.insert()
            assert fleet.wait_for_capturer(second) == second
            # Another member answers for an instance that was set aside, or names the member that captures it.
            with pytest.raises(Refused) as refused:
                fleet.daemons[first].post("/v1/instances/shop/resume")
            assert refused.value.status == 421
            orders.insert()
            fleet.daemons[second].kill()
            undrained = CliRunner().invoke(
                make_app(), ["fleet", "undrain", first, "--coordination", coordination]
            )
            assert undrained.exit_code == 0, undrained.output
            orders.insert()
            assert fleet.wait_for_capturer(first) == first
