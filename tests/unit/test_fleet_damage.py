# SPDX-License-Identifier: Apache-2.0
"""Damaged logs and defects of a member: the instance continues on another member, and the member's other work
continues.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.coordinate.store import path_of
from penstock.fleet import copying as copying_module
from penstock.fleet import member as member_module
from penstock.fleet.copying import LogCopy
from penstock.fleet.group import DAEMONS
from penstock.fleet.placement import Host, Placement, Work, place_works
from penstock.fleet.records import DamageRecord
from penstock.fleet.status import fleet_status
from penstock.logstore.disk import LocalDisk
from penstock.logstore.ending import put_aside
from penstock.logstore.log import Log
from penstock.model import Secret
from penstock.source.daemon_address import DaemonAddress
from tests.support.daemon.served_log import INSTANCE, ServedLog, serving
from tests.support.fleet.memory_fleet import MemoryFleet
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import SETTINGS, TIME_S, Captured, check_log, open_log
from tests.support.suite.patience import wait_until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record progress and poll often, because the tests wait for both."""
    monkeypatch.setattr(member_module, "RECORD_SECONDS", 0.05)
    monkeypatch.setattr(member_module, "_LOAD_SECONDS", 0.0)
    monkeypatch.setattr(copying_module, "_POLL_SECONDS", 0.05)


@pytest.fixture
def fleet_of(tmp_path: Path) -> Iterator[Callable[[int], MemoryFleet]]:
    """Return a function that returns a fleet with a number of instances."""
    fleets: list[MemoryFleet] = []

    def start(instances: int) -> MemoryFleet:
        fleets.append(MemoryFleet(tmp_path, instances))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.stop()


def tear(folder: Path) -> None:
    """Write a log, and remove bytes that were durable."""
    with Log.open(folder, SETTINGS, LocalDisk(), clock=lambda: TIME_S) as log:
        Captured(log).run()
    newest = max(folder.rglob("*.binlog"))
    newest.write_bytes(newest.read_bytes()[:-10])


def copy_of(served: ServedLog, folder: Path) -> LogCopy:
    """Return a copy of a served log in a folder of the disk."""
    address = DaemonAddress((("127.0.0.1", served.port()),), INSTANCE, Secret(served.token or ""))
    return LogCopy(
        INSTANCE,
        lambda: Log.open(folder, SETTINGS, LocalDisk(), clock=lambda: TIME_S),
        lambda: address,
        lambda: put_aside(LocalDisk(), folder),
    )


# --- Placement ------------------------------------------------------------------------------


def place(hosts: list[Host], before: Placement, *in_step: str) -> Placement:
    """Place one work, whose log is to have a copy."""
    after = place_works([Work("shop", copies=2)], hosts, before, lambda work: in_step)
    assert place_works([Work("shop", copies=2)], hosts, after, lambda work: in_step) == after
    return after


def test_work_with_a_damaged_log_goes_to_the_copy_and_the_damaged_log_becomes_one() -> None:
    hosts = [Host("a", damaged=frozenset({"shop"})), Host("b"), Host("c")]
    before = Placement({"shop": "a"}, {"shop": ("b",)})
    moved = Placement({"shop": "b"}, {"shop": ("a",)})
    assert place(hosts, before, "b") == moved
    # A copy that is behind is better than none.
    assert place(hosts, before) == moved
    assert place(hosts, Placement({"shop": "a"})).owners["shop"] in ("b", "c")
    drained = [Host("a", damaged=frozenset({"shop"}), drained=True), *hosts[1:]]
    assert place(drained, before).owners == {"shop": "b"}


def test_work_stays_at_a_damaged_log_if_no_other_member_can_do_it() -> None:
    damaged = frozenset({"shop", "other"})
    for hosts in (
        [Host("a", damaged=damaged)],
        [Host("a", damaged=damaged), Host("b", drained=True), Host("c", works=frozenset())],
        [Host("a", damaged=damaged), Host("b", damaged=damaged)],
    ):
        assert place(hosts, Placement({"shop": "a"})).owners == {"shop": "a"}


# --- Members --------------------------------------------------------------------------------


def test_instance_whose_log_is_torn_is_captured_by_another_member(
    fleet_of: Callable[[int], MemoryFleet],
) -> None:
    fleet = fleet_of(2)
    tear(fleet.folder / "a" / "shop-0")
    fleet.start("a")
    path = DAEMONS.damaged + path_of("a")
    wait_until(lambda: "shop-0" in DamageRecord.of("a", fleet.store.get(path)).logs)
    # No other member can capture the instance, so the capture's state shows the reason.
    assert fleet.all_captured("a")
    assert fleet_status(fleet.store)["instances"][0]["state"] == "stopped"
    fleet.start("b")
    wait_until(lambda: fleet.captured("b") == {"shop-0"} and fleet.captured("a") == {"shop-1"})
    (row, other) = fleet_status(fleet.store)["instances"]
    assert [damage["member"] for damage in row["damaged"]] == ["a"]
    assert "durable up to" in row["damaged"][0]["why"]
    assert other["damaged"] == []
    fleet.members["b"].stop()
    wait_until(lambda: fleet.all_captured("a"))


def test_work_is_placed_although_a_record_of_damaged_logs_cannot_be_read(
    fleet_of: Callable[[int], MemoryFleet],
) -> None:
    fleet = fleet_of(2)
    # A later version may write the record in another form.
    fleet.store.put(DAEMONS.damaged + path_of("a"), b'{"format": 99}')
    fleet.start("a")
    wait_until(lambda: fleet.all_captured("a"))
    assert [row["damaged"] for row in fleet_status(fleet.store)["instances"]] == [[], []]


def test_log_whose_folder_was_removed_is_given_to_another_member(
    fleet_of: Callable[[int], MemoryFleet],
) -> None:
    fleet = fleet_of(1)
    fleet.start("a")
    wait_until(lambda: fleet.all_captured("a"))
    capture = fleet.capture_of("a", "shop-0")
    assert capture is not None
    folder = fleet.folder / "a" / "shop-0"
    wait_until(lambda: (folder / "lock").exists() and capture.snapshot().state != "opening")
    shutil.rmtree(folder)
    fleet.start("b")
    wait_until(lambda: fleet.captured("b") == {"shop-0"})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_defect_while_progress_is_recorded_is_reported_and_spares_the_other_work(
    fleet_of: Callable[[int], MemoryFleet],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = fleet_of(2)
    member = fleet.start("a")
    wait_until(lambda: fleet.all_captured("a"))
    first, second = (member.tenures()[name] for name in ("shop-0", "shop-1"))
    recorded: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(second, "record", lambda: recorded.append(1))
    monkeypatch.setattr(first, "record", fail)
    wait_until(lambda: "progress is recorded no more" in capsys.readouterr().out)
    recorded.clear()
    wait_until(lambda: len(recorded) > 2)
    assert member.failure is None
    assert fleet.all_captured("a")
    # Wait for the thread: if it reported its exception later, the next test would fail.
    wait_until(lambda: [thread.name for thread in threading.enumerate()].count("fleet-records") == 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_copy_whose_progress_is_recorded_no_more_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = MemoryFleet(tmp_path, instances=1, copies=2)
    try:
        fleet.start("a")
        wait_until(lambda: fleet.all_captured("a"))
        fleet.start("b")
        wait_until(lambda: fleet.copied("b"))
        broken = fleet.members["b"].copies()["shop-0"]

        def fail() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(broken, "record", fail)
        wait_until(lambda: broken.left)
        wait_until(lambda: fleet.members["b"].copies().get("shop-0") not in (None, broken))
        wait_until(lambda: broken not in fleet.members["b"]._unrecorded)
        wait_until(lambda: [thread.name for thread in threading.enumerate()].count("fleet-records") == 2)
    finally:
        fleet.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_defect_of_the_recording_itself_ends_the_member_by_name(
    fleet_of: Callable[[int], MemoryFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of(1)
    member = fleet.start("a")
    wait_until(lambda: fleet.all_captured("a"))

    def fail() -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(member, "_bytes_per_second", fail)
    wait_until(lambda: member.failure is not None and not fleet.captured("a"))
    assert "a defect ended the recording of progress" in str(member.failure)
    # Wait for the thread: if it reported its exception later, the next test would fail.
    wait_until(lambda: all(thread.name != "fleet-records" for thread in threading.enumerate()))


def test_log_that_another_thread_closes_is_not_taken_for_a_removed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = open_log(SimulatedDisk())

    class ReleasedLock:
        @property
        def in_place(self) -> bool:
            log.close()
            return False

        def close(self) -> None:
            pass

    monkeypatch.setattr(log, "_lock", ReleasedLock())
    assert log.in_place


# --- Copies ---------------------------------------------------------------------------------


def test_damaged_copy_is_put_aside_once_the_log_can_be_copied_again(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    tear(folder)
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        Captured(log).run()
        copy = copy_of(served, folder)
        copy.start()
        try:
            wait_until(lambda: copy.record().position == log.visible)
            wait_until(lambda: copy.record().in_step)
            copied = copy.log()
            assert copied is not None
            check_log(copied, whole=True)
        finally:
            copy.stop()
    assert len(list(tmp_path.glob("shop.aside-*"))) == 1


def test_damaged_copy_stays_while_no_other_log_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    tear(folder)
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        address = DaemonAddress((("127.0.0.1", served.port()),), "other", Secret(served.token or ""))
        copy = LogCopy(
            "other",
            lambda: Log.open(folder, SETTINGS, LocalDisk(), clock=lambda: TIME_S),
            lambda: address,
            lambda: pytest.fail("there is no other log"),
        )
        copy.start()
        try:
            wait_until(lambda: copy.record().why is not None)
            assert not copy.record().in_step
        finally:
            copy.stop()
    assert not list(tmp_path.glob("shop.aside-*"))


def test_copy_whose_folder_was_removed_is_not_in_step_until_it_is_whole_again(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        Captured(log).run()
        copy = copy_of(served, folder)
        copy.start()
        try:
            wait_until(lambda: copy.record().in_step)
            begun = copy.log()
            shutil.rmtree(folder)
            wait_until(lambda: copy.log() is not begun)
            wait_until(lambda: copy.record().in_step)
            copied = copy.log()
            assert copied is not None
            check_log(copied, whole=True)
            assert copied.folder.exists()
        finally:
            copy.stop()
