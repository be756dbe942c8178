# SPDX-License-Identifier: Apache-2.0
"""Logs with copies on several members: hosts die with their disks, and copies continue the log."""

import itertools
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from penstock.capture.kept_schemas import kept_schemas
from penstock.capture.run import Capture
from penstock.capture.status import State
from penstock.client import Subscriber
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.lease import Lease
from penstock.daemon import make_capture
from penstock.fleet.copying import LogCopy
from penstock.fleet.records import lease_path
from penstock.fleet.tenure import CaptureTenure
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position
from penstock.settings.daemon import LogSettings
from penstock.source.daemon_address import DaemonAddress
from tests.support.capture.captured_log import (
    assert_equal_to_server,
    head_of,
    rotate,
    settings_of,
    wait_for_position,
    wait_for_state,
)
from tests.support.daemon.process import DaemonProcess
from tests.support.daemon.served_log import INSTANCE, serving
from tests.support.daemon.subscribing import Running
from tests.support.fleet.copies import assert_equal_logs
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


@contextmanager
def capturing(store: MemoryStore, folder: Path, server: Server, host: str) -> Iterator[Capture]:
    """Capture on a host inside the block, under the lease of the instance."""
    settings = settings_of(folder / host, server.url())
    session = store.session()
    lease = Lease.acquire(store, session, lease_path("shop"), host)
    assert lease is not None
    tenure = CaptureTenure(store, "shop", lease, lambda _: None)
    tenure.start(lambda lease: make_capture("shop", settings, lambda _: None, lease))
    capture = tenure.capture
    assert capture is not None
    try:
        wait_for_state(capture, State.RUNNING)
        yield capture
    finally:
        tenure.leave("the test hands over", lambda: None)
        assert tenure.wait_left(WAIT_SECONDS_MAX)
        session.close()


def test_member_with_a_copy_continues_the_log_at_the_byte_where_the_copy_ended(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(server)
    store, start = MemoryStore(f"copies-{tmp_path.name}"), head_of(server)
    folder = tmp_path / "b" / "shop"
    with capturing(store, tmp_path, server, "a") as capture, serving(capture.log()) as served:
        address = DaemonAddress((("127.0.0.1", served.port()),), INSTANCE)
        copy = LogCopy(
            "shop",
            lambda: Log.open(folder, LogSettings()),
            lambda: address,
            lambda: pytest.fail("it is whole"),
        )
        copy.start()
        server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b VARCHAR(20))")
        server.sql(f"INSERT INTO {database}.t VALUES (1, 'one')")
        rotate(server)
        server.sql(f"INSERT INTO {database}.t VALUES (2, 'two')")
        wait_for_position(capture, head_of(server))
        captured = capture.log().visible
        wait_until(lambda: copy.record().position == captured)
        copy.stop()
        # Data written now is lost with the first host.
        server.sql(f"ALTER TABLE {database}.t ADD c INT; INSERT INTO {database}.t VALUES (3, 'three', 3)")
        wait_for_position(capture, head_of(server))
        epochs = capture.log().epochs
    shutil.rmtree(tmp_path / "a")
    with capturing(store, tmp_path, server, "b") as capture:
        server.sql(f"INSERT INTO {database}.t VALUES (4, 'four', 4)")
        wait_for_position(capture, head_of(server))
        log = capture.log()
        assert log.epochs == epochs
        definitions = kept_schemas(log)
        schemas = [definitions.at(position).schema(database, "t") for position in (captured, log.visible)]
        assert [schema and len(schema.columns) for schema in schemas] == [2, 3]
    assert_equal_to_server(folder, server, start)


class CopiedFleet:
    """Daemons without shared files. Two of them have the log of the instance."""

    def __init__(
        self, folder: Path, server: Server, coordination: str, members: str, serve: str = "written"
    ) -> None:
        self.server = server
        self.coordination = coordination
        self.daemons: dict[str, DaemonProcess] = {}
        for name in members:
            settings = {
                "coordination": coordination,
                "fleet": {"member": name, "zone": f"room-{name}", "session": "2s"},
                "log": {
                    "copies": 2,
                    "folder": str(folder / name / "log"),
                    "segment_bytes": "1MiB",
                    "serve": serve,
                    "fsync_seconds": "50ms",
                },
                "instances": {"shop": {"source": server.url()}},
            }
            (folder / name).mkdir()
            self.daemons[name] = DaemonProcess(folder / name, settings)

    @property
    def url(self) -> str:
        """The address of the instance at all members."""
        hosts = ",".join(f"127.0.0.1:{daemon.port}" for daemon in self.daemons.values())
        return f"penstock://{hosts}/shop"

    def holders(self, asked: str) -> tuple[str | None, list[str]]:
        """Return the capturing member and the members with a copy in step, as one member reports them."""
        (row,) = self.daemons[asked].get("/v1/fleet")["instances"]
        return row["captured_by"], [copy["member"] for copy in row["copies"] if copy["state"] == "in step"]

    def wait_for_copy(self, asked: str) -> tuple[str, str]:
        """Wait until one member captures and another member has a copy in step; return both."""
        wait_until(lambda: all(self.holders(asked)))
        captured_by, copies = self.holders(asked)
        assert captured_by is not None
        return captured_by, copies[0]

    def log(self, name: str) -> LogReader:
        """Return the log of a member."""
        return LogReader.open(self.daemons[name].folder / "log" / "shop")


class BusyWriter:
    """Inserts numbered rows in a thread, as fast as the server accepts them."""

    def __init__(self, server: Server, table: str) -> None:
        self.inserted = 0
        self._server = server
        self._table = table
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "BusyWriter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count(1, 10):
            if self._stopping.is_set():
                return
            rows = ", ".join(f"({number + step}, 1, 0, REPEAT('x', 500))" for step in range(10))
            self._server.sql(f"INSERT INTO {self._table} VALUES {rows}")
            self.inserted = number + 9


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/integration/test_fleet_copies.py::"
    "test_member_with_a_copy_continues_the_log_at_the_byte_where_the_copy_ended"
)
def test_hosts_killed_with_their_disks_under_a_busy_writer_lose_no_byte_and_no_order(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    hosts = request.getfixturevalue("zookeeper").hosts
    database = fresh_database(mysql_server)
    table = f"{database}.orders"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, customer INT, step INT, note VARCHAR(500))")
    start = head_of(mysql_server)
    fleet = CopiedFleet(tmp_path, mysql_server, f"zookeeper://{hosts}/{tmp_path.name}", "abc")
    subscriber = Subscriber(
        fleet.url,
        name="cache",
        tables=[table],
        coordination=fleet.coordination,
        start="earliest",
        session_seconds=WAIT_SECONDS_MAX,
    )
    with ExitStack() as stack:
        for daemon in fleet.daemons.values():
            stack.enter_context(daemon)
        fleet.wait_for_copy("a")
        with Running(subscriber) as running, BusyWriter(mysql_server, table) as writer:
            for _ in range(3):
                first, second = fleet.wait_for_copy(next(iter(fleet.daemons)))
                wait_until(lambda: len(running.rows) > 100)
                seen = len(running.rows)
                dead = fleet.daemons[first]
                dead.kill()
                shutil.rmtree(dead.folder / "log")
                wait_until(lambda second=second: fleet.holders(second)[0] == second)
                wait_until(lambda seen=seen: len(running.rows) > seen + 100)
                dead.start()
            writer.__exit__()
            wait_until(lambda: writer.inserted in {row[1] for row in running.rows})
        ids = [row[1] for row in running.rows]
        assert list(dict.fromkeys(ids)) == list(range(1, writer.inserted + 1))
        head = head_of(mysql_server)
        first, second = fleet.wait_for_copy("a")
        fleet.daemons[first].wait_for_head(head.file, head.offset)
        wait_until(lambda: assert_equal_logs(fleet.log(first), fleet.log(second)) > 0)
        wait_until(lambda: fleet.log(first).visible == fleet.log(second).visible)
        assert [epoch.epoch for epoch in fleet.log(first).epochs.epochs] == [0]
        for name in (first, second):
            assert_equal_to_server(fleet.daemons[name].folder / "log" / "shop", mysql_server, start)


@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/unit/test_durable_serving.py::"
    "test_capturer_killed_with_its_folder_takes_no_byte_that_a_reader_saw"
)
def test_reader_of_a_durable_log_saw_only_what_the_copy_has_when_the_capturer_dies(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    table = f"{fresh_database(mysql_server)}.orders"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, customer INT, step INT, note VARCHAR(500))")
    coordination = f"sqlite://{tmp_path}/fleet.db"
    fleet = CopiedFleet(tmp_path, mysql_server, coordination, "ab", serve="durable")

    def readable(name: str) -> Position:
        text = fleet.daemons[name].get("/v1/instances/shop/status").get("readable")
        return Position(0, "mysql-bin.000001", 4) if text is None else Position.parse(text)

    with ExitStack() as stack:
        for daemon in fleet.daemons.values():
            stack.enter_context(daemon)
        first, second = fleet.wait_for_copy("a")
        with BusyWriter(mysql_server, table) as writer:
            for _ in range(2):
                start, enough = readable(first), writer.inserted + 300
                wait_until(lambda enough=enough: writer.inserted > enough)
                wait_until(lambda first=first, start=start: readable(first) > start)
                seen = readable(first)
                dead = fleet.daemons[first]
                dead.kill()
                shutil.rmtree(dead.folder / "log")
                kept = fleet.log(second).visible
                assert kept is not None
                assert kept >= seen
                wait_until(lambda second=second: fleet.holders(second)[0] == second)
                # At once the member serves the data that readers have already seen, even without another
                # copy.
                wait_until(lambda second=second, start=start: readable(second) >= start)
                dead.start()
                # Readers continue once there are two copies again.
                wait_until(lambda second=second, seen=seen: readable(second) > seen)
                first, second = fleet.wait_for_copy(second)
