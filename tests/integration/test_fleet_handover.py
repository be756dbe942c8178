# SPDX-License-Identifier: Apache-2.0
"""Where the log of a member begins or continues after another member has captured the instance."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.capture.run import Capture
from penstock.capture.status import State
from penstock.captures import make_capture
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.lease import Lease
from penstock.errors import SequenceGap
from penstock.fleet.records import lease_path
from penstock.fleet.tenure import CaptureTenure
from penstock.logstore.disk import LocalDisk
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.reader import LogReader
from penstock.model import Position, ServerAddress
from penstock.serve.own_log import OwnSource
from tests.support.capture.captured_log import (
    assert_equal_to_server,
    head_of,
    purge,
    rotate,
    settings_of,
    wait_for_position,
    wait_for_state,
)
from tests.support.capture.replicas import gtids_executed, replica_of
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

_numbers = itertools.count(1)


class Hosts:
    """Hosts with separate logs that take turns capturing one instance, coordinated through a store in
    memory.
    """

    def __init__(self, folder: Path, *servers: Server) -> None:
        self.folder = folder
        self.servers = servers
        self.store = MemoryStore(f"handover-{next(_numbers)}")

    @contextmanager
    def capturing(self, host: str) -> Iterator[tuple[Capture, CaptureTenure]]:
        """Capture on a host inside the block, then hand over."""
        first, *others = self.servers
        settings = settings_of(
            self.folder / host, first.url(), servers=[server.url() for server in others], fail_over_after="1s"
        )
        session = self.store.session()
        lease = Lease.acquire(self.store, session, lease_path("shop"), host)
        assert lease is not None
        tenure = CaptureTenure(self.store, "shop", lease, lambda _: None)
        tenure.start(lambda lease: make_capture("shop", settings, lambda _: None, lease))
        capture = tenure.capture
        assert capture is not None
        try:
            # An empty log begins at the server's end, so nothing may be written before.
            wait_for_state(capture, State.RUNNING)
            yield capture, tenure
        finally:
            tenure.leave("the test hands over", lambda: None)
            assert tenure.wait_left(WAIT_SECONDS_MAX)
            session.close()

    def log(self, host: str) -> LogReader:
        """Return the log of a host."""
        return LogReader.open(self.folder / host / "shop")


def hold(capture: Capture, position: Position) -> None:
    """Make the log of a capture hold the data for a reader at a position."""
    log = capture.log()
    Holds(log.disk, log.layout).put(Hold("reader", position, time.time_ns() // 1000 + 60_000_000))


def read_ranges(source: OwnSource) -> None:
    """Follow a log from its start to its end."""
    position = source.earliest()
    while (next_range := source.range_from(position)) is not None:
        byte_range, end = next_range
        position = Position(byte_range.epoch, byte_range.file, end)


def test_new_log_begins_where_the_last_reader_is_and_an_old_log_continues_at_its_end(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY)")
    hosts = Hosts(tmp_path, server)

    def insert(number: int) -> Position:
        server.sql(f"INSERT INTO {database}.t VALUES ({number})")
        return head_of(server)

    start = head_of(server)
    with hosts.capturing("a") as (capture, _):
        needed = insert(1)
        wait_for_position(capture, needed)
        hold(capture, needed)
        rotate(server)
        wait_for_position(capture, insert(2))
    with hosts.capturing("b") as (capture, tenure):
        handover = tenure.handover()
        assert handover is not None
        assert start <= handover.position <= needed
        assert handover.fingerprint
        wait_for_position(capture, insert(3))
        tenure.record()
        # The reader is not connected, and its hold also protects the log on this host.
        assert [kept.name for kept in Holds(LocalDisk(), capture.log().layout).all()] == ["reader"]
        again = tenure.handover()
        assert again is not None
        assert start <= again.position <= needed
    assert_equal_to_server(tmp_path / "b" / "shop", server, handover.position)
    with hosts.capturing("a") as (capture, _):
        wait_for_position(capture, insert(4))
    assert [epoch.epoch for epoch in hosts.log("a").epochs.epochs] == [0]
    assert_equal_to_server(tmp_path / "a" / "shop", server, start)


def test_capture_without_readers_is_handed_over_at_its_end(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    fresh_database(mysql_server)
    hosts = Hosts(tmp_path, mysql_server)
    with hosts.capturing("a") as (capture, tenure):
        fresh_database(mysql_server)
        head = head_of(mysql_server)
        wait_for_position(capture, head)
    handover = tenure.handover()
    assert handover is not None
    assert handover.position == handover.reached == head


@pytest.mark.deep(
    guard="tests/integration/test_fleet_handover.py::"
    "test_new_log_begins_where_the_last_reader_is_and_an_old_log_continues_at_its_end"
)
def test_old_log_has_a_gap_where_the_server_purged_what_another_host_captured(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server()
    server.sql("CREATE DATABASE d")
    hosts = Hosts(tmp_path, server)
    with hosts.capturing("a") as (capture, _):
        server.sql("CREATE TABLE d.t (a INT PRIMARY KEY)")
        wait_for_position(capture, head_of(server))
    with hosts.capturing("b") as (capture, _tenure):
        server.sql("INSERT INTO d.t VALUES (1)")
        rotate(server)
        server.sql("INSERT INTO d.t VALUES (2)")
        wait_for_position(capture, head_of(server))
    purge(server)
    with hosts.capturing("a") as (capture, _):
        server.sql("INSERT INTO d.t VALUES (3)")
        wait_for_position(capture, head_of(server))
        assert "captured" in (capture.snapshot().note or "")
        source = OwnSource("shop", capture.log())
        with pytest.raises(SequenceGap):
            read_ranges(source)


@pytest.mark.deep(
    guard="tests/integration/test_fleet_handover.py::"
    "test_new_log_begins_where_the_last_reader_is_and_an_old_log_continues_at_its_end"
)
def test_epochs_of_all_hosts_have_the_same_numbers(start_server: StartServer, tmp_path: Path) -> None:
    """Host a captures the first server, b captures its replica after a fail-over, and a continues there."""
    first = start_server()
    second = replica_of(first, start_server)
    hosts = Hosts(tmp_path, first, second)
    with hosts.capturing("a") as (capture, _):
        first.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY)")
        wait_for_position(capture, head_of(first))
    wait_until(lambda: gtids_executed(second) == gtids_executed(first))
    first.stop()
    for host, number in (("b", 1), ("a", 2)):
        with hosts.capturing(host) as (capture, _):
            wait_until(lambda: capture.snapshot().server == str(ServerAddress.parse(second.url())))
            second.sql(f"INSERT INTO d.t VALUES ({number})")
            wait_for_position(capture, head_of(second))
    epochs = {
        host: {epoch.epoch: epoch.server_key for epoch in hosts.log(host).epochs.epochs} for host in "ab"
    }
    assert list(epochs["a"]) == [0, 1]
    assert epochs["b"] == {1: epochs["a"][1]}
