# SPDX-License-Identifier: Apache-2.0
"""Members of a fleet in one process, over a store in memory: leases, fencing, and requests between
members.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.capture.lease import Handover
from penstock.capture.run import Capture
from penstock.capture.status import State
from penstock.coordinate.backends.memory import MemorySession, MemoryStore
from penstock.coordinate.lease import Lease
from penstock.coordinate.session_guard import SessionGuard
from penstock.coordinate.store import CoordinationStore, path_of
from penstock.daemon import _Fleet
from penstock.errors import (
    CapturedElsewhere,
    CoordinationLost,
    LeaseLost,
    OptionInvalid,
    SchemaInvalid,
    SourceMissing,
)
from penstock.fleet.copy_tenure import CopyTenure
from penstock.fleet.copying import LogCopy
from penstock.fleet.draining import drain, held_by, undrain
from penstock.fleet.group import DAEMONS, Begin, BeginCopy
from penstock.fleet.instance import Directory, FleetInstance
from penstock.fleet.member import FleetMember, Membership
from penstock.fleet.placement import Work
from penstock.fleet.records import (
    CaptureRecord,
    CopyRecord,
    MemberRecord,
    PlacementRecord,
    capture_path,
    copy_path,
    lease_path,
    members_in_step,
)
from penstock.fleet.status import fleet_status
from penstock.fleet.tenure import CaptureTenure, FencedRecord
from penstock.fleet.wanted import WantedInstance, want_instance
from penstock.gtid_sets import LoggedSet
from penstock.logstore.disk import LocalDisk
from penstock.logstore.ending import put_aside
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.processes.supervisor import Supervisor
from penstock.serve.ports import Ports
from penstock.serve.served import Arrivals
from penstock.settings.changes import InstanceChange
from penstock.settings.daemon import Settings
from tests.support.fleet.memory_fleet import MemoryFleet
from tests.support.suite.patience import wait_until

_numbers = itertools.count(1)

BEGINNING = Handover(
    Position(0, "mysql-bin.000003", 157),
    "mysql:server",
    LoggedSet("3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5"),
    1_700_000_000_000_000,
    "1:1",
    Position(0, "mysql-bin.000003", 900),
)


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


@contextmanager
def held_lease() -> Iterator[tuple[MemoryStore, MemorySession, Lease]]:
    """Hold the lease of an instance inside the block."""
    store = MemoryStore(f"fleet-{next(_numbers)}")
    session = store.session()
    lease = Lease.acquire(store, session, lease_path("shop"), "a")
    assert lease is not None
    try:
        yield store, session, lease
    finally:
        store.close()


def test_members_share_the_instances_and_take_over_those_of_a_member_that_leaves(
    fleet_of: Callable[[int], MemoryFleet],
) -> None:
    fleet = fleet_of(6)
    for name in ("a", "b", "c"):
        fleet.start(name)
    wait_until(lambda: fleet.all_captured("a", "b", "c"))
    wait_until(lambda: [len(fleet.captured(name)) for name in "abc"] == [2, 2, 2])
    shown = fleet_status(fleet.store)
    assert {row["captured_by"] for row in shown["instances"]} == {"a", "b", "c"}
    assert [member["placed"] for member in shown["members"]] == [2, 2, 2]
    kept = fleet.captured("b")
    fleet.members["a"].stop()
    wait_until(lambda: fleet.all_captured("b", "c"))
    assert kept <= fleet.captured("b")
    assert not fleet.captured("b") & fleet.captured("c")


def test_drained_member_captures_nothing_until_it_is_undrained(
    fleet_of: Callable[[int], MemoryFleet],
) -> None:
    fleet = fleet_of(2)
    fleet.start("a")
    wait_until(lambda: fleet.all_captured("a"))
    with pytest.raises(OptionInvalid, match="nobody would do"):
        drain(fleet.store, "a")
    with pytest.raises(SourceMissing):
        drain(fleet.store, "nobody")
    fleet.start("b")
    wait_until(lambda: held_by(fleet.store, "b"))
    drain(fleet.store, "a")
    wait_until(lambda: fleet.all_captured("b"))
    assert held_by(fleet.store, "a") == []
    assert [row["state"] for row in fleet_status(fleet.store)["members"]] == ["drained", "running"]
    undrain(fleet.store, "a")
    wait_until(lambda: fleet.captured("a") and fleet.all_captured("a", "b"))
    with pytest.raises(SourceMissing):
        undrain(fleet.store, "a")


def test_drained_member_captures_until_a_copy_is_in_step(tmp_path: Path) -> None:
    fleet = MemoryFleet(tmp_path, instances=2, copies=2)
    fleet.works["shop-1"] = Work("shop-1")
    try:
        fleet.start("a")
        wait_until(lambda: fleet.all_captured("a"))
        fleet.start("b")
        # This member copies nothing, because the daemons of the test do not listen.
        wait_until(lambda: fleet.copied("b") == {"shop-0"})
        drain(fleet.store, "a")
        wait_until(lambda: fleet.captured("b") == {"shop-1"})
        assert fleet.captured("a") == {"shop-0"}
        assert fleet_status(fleet.store)["members"][0]["state"] == "draining"
        drain(fleet.store, "a", at_once=True)
        wait_until(lambda: fleet.all_captured("b"))
        wait_until(lambda: held_by(fleet.store, "a") == [])
        assert fleet_status(fleet.store)["members"][0]["state"] == "drained"
    finally:
        fleet.stop()


def test_member_with_the_copy_captures_when_the_capturer_leaves(tmp_path: Path) -> None:
    fleet = MemoryFleet(tmp_path, instances=1, copies=2)
    try:
        for name in ("a", "b", "c"):
            fleet.start(name)
        wait_until(lambda: fleet.all_captured("a", "b", "c") and any(map(fleet.copied, "abc")))
        (first,) = (name for name in "abc" if fleet.captured(name))
        (second,) = (name for name in "abc" if fleet.copied(name))
        (third,) = {"a", "b", "c"} - {first, second}
        (row,) = fleet_status(fleet.store)["instances"]
        assert (row["captured_by"], [copy["member"] for copy in row["copies"]]) == (first, [second])
        fleet.members[first].stop()
        wait_until(lambda: fleet.captured(second))
        # The stopped member may return, so no other member begins a copy yet.
        (row,) = fleet_status(fleet.store)["instances"]
        assert [(copy["member"], copy["state"]) for copy in row["copies"]] == [(first, "away")]
        # The copy has released its log to the capture.
        capture = fleet.capture_of(second, "shop-0")
        assert capture is not None
        wait_until(lambda: capture.snapshot().state is State.WAITING)
        assert not fleet.copied(second)
        assert capture.log().folder == tmp_path / second / "shop-0"
        fleet.start(first)
        wait_until(lambda: fleet.copied(first))
        assert not fleet.copied(third)
    finally:
        fleet.stop()


def test_member_whose_session_ends_gives_up_its_captures_and_joins_again(
    fleet_of: Callable[[int], MemoryFleet],
) -> None:
    fleet = fleet_of(1)
    fleet.start("a")
    wait_until(lambda: fleet.all_captured("a"))
    capture = fleet.capture_of("a", "shop-0")
    assert capture is not None
    store = fleet.stores["a"]
    store.lose(store._sessions[-1])
    wait_until(lambda: capture.snapshot().state is State.CLOSED)
    wait_until(lambda: fleet.capture_of("a", "shop-0") not in (None, capture))


def test_second_member_of_a_name_is_refused(fleet_of: Callable[[int], MemoryFleet], tmp_path: Path) -> None:
    fleet = fleet_of(1)
    session = fleet.store.session()
    session.put_ephemeral(DAEMONS.members + path_of("a"), MemberRecord("a", "a:1", "1").encode())
    store = MemoryStore(fleet.name)
    failures: list[bool] = []
    member = FleetMember(
        lambda: store,
        DAEMONS,
        Membership("a", "a:2", "1", "", 1.0, 0.1, {}),
        lambda store, instance, lease: pytest.fail("nothing is placed"),
    )
    member.start(failed=lambda: failures.append(True))
    wait_until(lambda: failures)
    assert isinstance(member.failure, OptionInvalid)
    member.stop()


@contextmanager
def placed_member(
    store: MemoryStore, begin: Begin, begin_copy: BeginCopy | None = None
) -> Iterator[FleetMember]:
    """Run member `a`; the test acts as leader and places `shop-0`, or only its copy, on the member."""
    leading = MemoryStore(store._name)
    assert Lease.acquire(leading, leading.session(), DAEMONS.leader, "leader") is not None
    placed = PlacementRecord(1, ("shop-0",)) if begin_copy is None else PlacementRecord(1)
    store.put(DAEMONS.placements + path_of("a"), placed.encode())
    works = {name: Work(name) for name in ("shop-0", "shop-1")}
    membership = Membership("a", "a:7070", "1", "", 1.0, 10.0, works)
    member = FleetMember(lambda: store, DAEMONS, membership, begin, begin_copy)
    member.start(failed=lambda: None)
    try:
        yield member
    finally:
        member.stop()
        leading.close()


def test_lease_whose_answer_was_lost_is_released_once_the_work_is_placed_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, observer = MemoryStore("fleet-lost-answer"), MemoryStore("fleet-lost-answer")
    put_of = store.put_of
    lost: list[str] = []

    def put_and_lose_the_answer(session: MemorySession, path: str, value: bytes) -> int:
        created = put_of(session, path, value)
        if path == lease_path("shop-0") and not lost:
            lost.append(path)
            observer.put(DAEMONS.placements + path_of("a"), PlacementRecord(1).encode())
            raise CoordinationLost("the answer was lost")
        return created

    monkeypatch.setattr(store, "put_of", put_and_lose_the_answer)
    with placed_member(store, lambda store, name, lease: pytest.fail("it is placed elsewhere")) as member:
        wait_until(lambda: lost and observer.get(lease_path("shop-0")) is None)
        assert member.failure is None
    observer.close()


def test_work_that_cannot_be_begun_is_not_tried_again_at_once() -> None:
    store, observer = MemoryStore("fleet-refused"), MemoryStore("fleet-refused")
    begun: list[str] = []

    def refuse(store: CoordinationStore, name: str, lease: Lease) -> CaptureTenure:
        begun.append(name)
        raise SchemaInvalid(f"the record of {name} cannot be read")

    with placed_member(store, refuse) as member:
        wait_until(lambda: begun)
        for _ in range(3):
            # The member wakes up and reads its placement.
            observer.put(DAEMONS.placements + path_of("a"), PlacementRecord(1, ("shop-0",)).encode())
        observer.put(DAEMONS.placements + path_of("a"), PlacementRecord(1, ("shop-0", "shop-1")).encode())
        wait_until(lambda: "shop-1" in begun)
        assert begun == ["shop-0", "shop-1"]
        assert member.failure is None
    observer.close()


@pytest.mark.parametrize("processes", ["single", "per-instance"])
def test_work_of_an_instance_that_is_being_removed_ends_no_member(tmp_path: Path, processes: str) -> None:
    section = {"source": "mysql://u@127.0.0.1:1"}
    sections = {
        "coordination": f"sqlite://{tmp_path}/fleet.db",
        "listen": {"http": "127.0.0.1:0"},
        "log": {"folder": str(tmp_path / "log")},
        "fleet": {"member": "a"},
        "processes": processes,
    }
    before, after = (
        Settings.model_validate({**sections, "instances": instances})
        for instances in ({"shop-0": section, "shop-1": section}, {"shop-1": section})
    )
    ports, arrivals = Ports.take(before.listen), Arrivals()
    supervisor = Supervisor(before, [], arrivals.arrived)
    with closing(ports), closing(MemoryStore("fleet-removal")) as store:
        part = _Fleet(before, ports, arrivals, supervisor, arrivals.arrived, SessionGuard())
        lease = Lease.acquire(store, store.session(), lease_path("shop-0"), "a")
        assert lease is not None
        # The member's thread begins the work of the earlier placement before it learns of the change.
        supervisor.change(after)
        if processes == "single":
            part.change(after, InstanceChange.between(before, after))
        with pytest.raises(SourceMissing, match="shop-0 is being removed"):
            part._begin(store, "shop-0", lease)
        if processes == "single":
            with pytest.raises(SourceMissing, match="shop-0 is being removed"):
                part._begin_copy(store, "shop-0")


def test_copy_that_is_not_begun_ends_no_member() -> None:
    with closing(MemoryStore("fleet-no-copy")) as store:
        begun: list[str] = []

        def refuse(store: CoordinationStore, name: str) -> CopyTenure:
            begun.append(name)
            raise SourceMissing(f"instance {name} is being removed")

        with placed_member(
            MemoryStore("fleet-no-copy"), lambda *words: pytest.fail("nothing is to be captured"), refuse
        ) as member:
            placed = PlacementRecord(1, (), ("shop-1",))
            store.put(DAEMONS.placements + path_of("a"), placed.encode())
            wait_until(lambda: begun)
            store.put(DAEMONS.placements + path_of("a"), replace(placed, copies=("shop-0",)).encode())
            wait_until(lambda: "shop-0" in begun)
            assert member.failure is None


def test_placement_of_a_later_version_ends_no_member(capsys: pytest.CaptureFixture[str]) -> None:
    store, observer = MemoryStore("fleet-later"), MemoryStore("fleet-later")
    begun: list[str] = []

    def begin(store: CoordinationStore, name: str, lease: Lease) -> CaptureTenure:
        begun.append(name)
        return CaptureTenure(store, name, lease, lambda _: None)

    with placed_member(store, begin) as member:
        wait_until(lambda: "shop-0" in member.tenures())
        observer.put(DAEMONS.placements + path_of("a"), b'{"format": 99}')
        wait_until(lambda: "later version" in capsys.readouterr().out or member.failure is not None)
        assert member.failure is None
        assert "shop-0" in member.tenures()
        observer.put(DAEMONS.placements + path_of("a"), PlacementRecord(1, ("shop-1",)).encode())
        wait_until(lambda: set(member.tenures()) == {"shop-1"})
    observer.close()


def test_capture_pauses_while_the_store_is_away_and_ends_with_the_session() -> None:
    with held_lease() as (store, session, lease):
        tenure = CaptureTenure(store, "shop", lease, lambda _: None)
        assert tenure.pause_reason() is None
        store.away(True)
        assert "does not confirm" in (tenure.pause_reason() or "")
        with pytest.raises(CoordinationLost):
            tenure.begin_epoch(BEGINNING)
        store.away(False)
        assert tenure.pause_reason() is None
        store.lose(session)
        with pytest.raises(LeaseLost):
            tenure.pause_reason()


def test_earlier_holder_can_neither_record_nor_begin_an_epoch() -> None:
    with held_lease() as (store, _session, lease):
        earlier = CaptureTenure(store, "shop", lease, lambda _: None)
        earlier.begin_epoch(BEGINNING)
        # The store has ended the session, but the holder is a frozen process and has not noticed.
        store.delete(lease_path("shop"))
        other = Lease.acquire(store, store.session(), lease_path("shop"), "b")
        assert other is not None
        assert other.token > lease.token
        later = CaptureTenure(store, "shop", other, lambda _: None)
        assert later.handover() == BEGINNING
        with pytest.raises(LeaseLost):
            earlier.begin_epoch(
                Handover(Position(1, "b.000001", 4), "other", LoggedSet(""), 0, "", BEGINNING.reached)
            )
        assert earlier.is_lost
        stored = CaptureRecord.of("shop", store.get(capture_path("shop")))
        assert stored is not None
        assert stored.handover == BEGINNING
        with pytest.raises(LeaseLost):
            CaptureTenure(store, "shop", lease, lambda _: None)


def test_write_whose_answer_was_lost_is_repeated() -> None:
    with held_lease() as (store, _, lease):
        record = FencedRecord(store, "shop", lease)
        present = store.get(capture_path("shop"))
        assert present is not None
        store.put(capture_path("shop"), present.value)
        record.write(CaptureRecord(lease.token, BEGINNING))
        stored = CaptureRecord.of("shop", store.get(capture_path("shop")))
        assert stored is not None
        assert stored.handover == BEGINNING


def test_record_of_a_later_version_is_refused_by_name() -> None:
    with held_lease() as (store, _, lease):
        store.put(capture_path("shop"), json.dumps({"format": 2, "token": 0}).encode())
        with pytest.raises(SchemaInvalid, match="later version"):
            CaptureTenure(store, "shop", lease, lambda _: None)


def test_instance_captured_elsewhere_names_the_member_and_its_address() -> None:
    with held_lease() as (store, session, _):
        session.put_ephemeral(DAEMONS.members + path_of("a"), MemberRecord("a", "a:7070", "1").encode())
        directory = Directory(lambda: MemoryStore(store._name), "b")
        directory.start()
        instance = FleetInstance("shop", _no_capture, directory, [], [])

        def address() -> str | None:
            with pytest.raises(CapturedElsewhere) as elsewhere:
                instance.log()
            return elsewhere.value.address

        wait_until(lambda: address() == "a:7070")
        assert instance.status()["state"] == "elsewhere"
        store.lose(session)
        wait_until(lambda: address() is None)
        directory.stop()


def _no_capture() -> Capture | None:
    return None


def test_copy_replaces_the_record_of_an_earlier_one_and_deletes_its_own_before_the_next(
    tmp_path: Path,
) -> None:
    with closing(MemoryStore(f"fleet-{next(_numbers)}")) as store:
        path = copy_path("shop", "daemon-1")
        members = {"daemon-1": MemberRecord("daemon-1", "a:7070", "1", created=7)}
        # The record that a killed member leaves behind.
        in_step = CopyRecord(Position(0, "mysql-bin.000003", 900), 0, in_step=True, registration=7)
        store.put(path, in_step.encode())
        assert members_in_step(store, members, "shop") == ["daemon-1"]
        aside = partial(put_aside, LocalDisk(), tmp_path / "shop")
        copy = LogCopy("shop", lambda: Log.open(tmp_path / "shop"), lambda: None, aside)
        tenure = CopyTenure(store, "shop", "daemon-1", copy, lambda: 7)
        assert members_in_step(store, members, "shop") == []
        assert store.get(path) is not None
        at_end: list[object] = []
        tenure.leave("its member ends", lambda: at_end.append(store.get(path)))
        assert tenure.wait_left(10.0)
        wait_until(lambda: bool(at_end))
        assert at_end == [None], "the next copy writes the same record"


def test_copy_recorded_before_its_member_registered_again_does_not_count() -> None:
    with closing(MemoryStore(f"fleet-{next(_numbers)}")) as store:
        position = Position(0, "mysql-bin.000003", 900)
        store.put(copy_path("shop", "b"), CopyRecord(None, 0, in_step=True, registration=8).encode())
        # Neither the log nor the copy on `b` has any bytes yet.
        running = {
            name: MemberRecord(name, f"{name}:7070", "1", created=created)
            for name, created in (("a", 9), ("b", 8))
        }
        for registration, counted in ((7, ["b"]), (9, ["a", "b"]), (None, ["a", "b"])):
            record = CopyRecord(position, 0, in_step=True, registration=registration)
            store.put(copy_path("shop", "a"), record.encode())
            assert members_in_step(store, running, "shop") == counted
        assert members_in_step(store, {}, "shop") == []


def test_change_of_instances_keeps_the_others_and_is_not_a_return_of_the_member(
    fleet_of: Callable[[int], MemoryFleet],
) -> None:
    fleet = fleet_of(2)
    member = fleet.start("a")
    wait_until(lambda: fleet.all_captured("a"))
    wait_until(lambda: member.registration is not None)
    registration = member.registration
    kept, changed = (fleet.capture_of("a", name) for name in ("shop-0", "shop-1"))
    member.change({name: Work(name) for name in ("shop-0", "shop-1")}, ["shop-1"])
    wait_until(lambda: fleet.capture_of("a", "shop-1") not in (None, changed))
    member.change({"shop-0": Work("shop-0")}, [])
    wait_until(lambda: fleet.captured("a") == {"shop-0"})
    wait_until(lambda: member.registration != registration)
    assert fleet.capture_of("a", "shop-0") is kept
    want_instance(fleet.store, WantedInstance("shop-1", None))
    (row,) = fleet_status(fleet.store)["instances"]
    assert (row["instance"], row["captured_by"]) == ("shop-0", "a")
    joins = fleet.store.get(DAEMONS.joins)
    assert joins is not None
    assert len(json.loads(joins.value)["members"]["a"]) == 1
