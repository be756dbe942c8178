# SPDX-License-Identifier: Apache-2.0
"""The set of Pumps in a merge follows the registry. A Pump that may hold transactions is never left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.errors import ConnectionLost, DiskFailed, LogDamaged, TransactionLate
from penstock.logstore.disk import LocalDisk
from penstock.tidb.known_pumps import KnownPumps
from penstock.tidb.membership import DrainerProgress, PumpMembers, Registration
from penstock.tidb.merge import PulledTransaction
from penstock.tidb.pulling import MergeQueue, PumpReader
from penstock.tidb.registry import Node, NodeState, Registry
from tests.support.suite.patience import wait_until
from tests.support.tidb.registered_pumps import MemoryEtcd as Etcd
from tests.support.tidb.registered_pumps import StandInReader

PUMPS = ("first", "second")


class _Merging:
    """A run of a drainer: its merge, its members, and its durable state."""

    def __init__(self, etcd: Etcd, folder: Path, position: int = 0) -> None:
        self.queue = MergeQueue(position, 1 << 20)
        self.known = KnownPumps(LocalDisk(), folder)
        self.readers: dict[str, StandInReader] = {}
        self.durable_ts = position
        self.members_at_open: dict[str, set[str]] = {}
        self.members = PumpMembers(
            Registry(etcd), self.queue, self.known, self._open_reader, lambda: self.durable_ts
        )

    def _open_reader(self, pump: str, address: str) -> PumpReader:
        self.members_at_open[pump] = {name for name in PUMPS if self.queue.reached(name) is not None}
        self.readers[pump] = StandInReader(address)
        return cast(PumpReader, self.readers[pump])

    def send(self, pump: str, commit_ts: int) -> None:
        self.queue.offer(pump, PulledTransaction(commit_ts, commit_ts - 1, b"rows"))

    def take(self) -> list[int]:
        """Take the transactions that are due, and make them durable."""
        taken, self.durable_ts = self.queue.take(1 << 20, 0.0)
        return [transactions[0].commit_ts for transactions in taken]

    def is_stalled_by(self, *texts: str) -> bool:
        stalled = str(self.members.stalled_by())
        return all(text in stalled for text in texts)


@pytest.fixture
def etcd() -> Etcd:
    etcd = Etcd()
    for pump in PUMPS:
        etcd.put(pump)
    return etcd


Gone = Callable[[Etcd], None]
_GONE: list[Gone] = [lambda etcd: etcd.delete("second"), lambda etcd: etcd.damage("second")]


@pytest.mark.parametrize("gone", _GONE, ids=["deleted", "unreadable"])
def test_pump_without_a_readable_entry_holds_back_the_merge_until_it_returns(
    etcd: Etcd, tmp_path: Path, gone: Gone
) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    gone(etcd)
    merging.readers["second"].fail("connection refused")
    for commit_ts in (3, 7):
        merging.send("first", commit_ts)
        merging.members.refresh()
    assert merging.take() == []
    assert merging.is_stalled_by(
        "second", "start it" if "second" not in str(etcd.cluster.keys) else "etcdctl"
    )
    etcd.put("second")
    merging.members.refresh()
    merging.send("second", 5)
    merging.queue.advance("second", 8)
    assert merging.take() == [3, 5, 7]


@pytest.mark.parametrize("gone", _GONE, ids=["deleted", "unreadable"])
def test_pump_without_a_readable_entry_is_still_read_while_it_answers(
    etcd: Etcd, tmp_path: Path, gone: Gone
) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    gone(etcd)
    merging.members.refresh()
    merging.send("first", 3)
    merging.send("second", 2)
    merging.queue.advance("second", 3)
    assert merging.take() == [2, 3]
    assert merging.members.are_sending()
    assert merging.members.stalled_by() == []


def test_pump_that_was_deleted_during_a_restart_holds_back_the_merge(etcd: Etcd, tmp_path: Path) -> None:
    _Merging(etcd, tmp_path).members.refresh()
    etcd.delete("second")
    merging = _Merging(etcd, tmp_path, position=6)
    merging.members.refresh()
    merging.send("first", 9)
    assert merging.take() == []
    assert merging.is_stalled_by("second (not registered)", str(tmp_path))
    etcd.put("second")
    merging.members.refresh()
    merging.send("second", 8)
    assert merging.take() == [8]


def test_unreadable_entry_of_an_unknown_pump_holds_back_the_merge(etcd: Etcd, tmp_path: Path) -> None:
    etcd.damage("third")
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    merging.send("first", 3)
    merging.send("second", 3)
    assert merging.take() == []
    assert merging.is_stalled_by("third", "etcdctl")


def test_operator_gives_up_a_deleted_pump_by_deleting_its_file(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    etcd.delete("second")
    merging.known.path("second").unlink()
    merging.members.refresh()
    merging.send("first", 3)
    assert merging.take() == [3]
    assert _Merging(etcd, tmp_path, 3).known.pumps == ("first",)


def test_operator_gives_up_an_offline_pump_by_deleting_its_file(etcd: Etcd, tmp_path: Path) -> None:
    etcd.put("second", NodeState.OFFLINE, max_commit_ts=5)
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    merging.readers["second"].fail("connection refused")
    merging.send("first", 3)
    assert merging.take() == []
    assert merging.is_stalled_by("second (offline)", "up to 5", str(merging.known.path("second")))
    merging.known.path("second").unlink()
    for _ in range(2):
        merging.members.refresh()
    assert merging.take() == [3]


def test_deleted_file_of_an_online_pump_is_written_again(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    merging.known.path("second").unlink()
    merging.members.refresh()
    assert merging.known.path("second").exists()
    merging.send("first", 3)
    assert merging.take() == []


def test_offline_pump_leaves_only_once_its_last_transactions_are_durable(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    merging.send("second", 5)
    merging.send("first", 9)
    etcd.put("second", NodeState.OFFLINE, max_commit_ts=5)
    merging.members.refresh()
    assert set(merging.queue.positions()) == {"first", "second"}
    assert merging.take() == [5]
    merging.members.refresh()
    assert set(merging.queue.positions()) == {"first"}
    assert merging.take() == [9]
    assert not merging.known.path("second").exists()


def test_pump_found_late_is_asked_again_from_there_after_a_crash(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    etcd.put("third")
    for pump in ("first", "second"):
        merging.send(pump, 7)
    assert merging.take() == [7]
    merging.members.refresh()
    assert merging.queue.reached("third") == 0
    # The drainer is killed before the Pump has sent any binlog.
    merging = _Merging(etcd, tmp_path, position=7)
    merging.members.refresh()
    assert merging.queue.reached("third") == 0
    with pytest.raises(TransactionLate):
        merging.send("third", 5)


def test_pump_found_late_that_has_caught_up_is_resumed_at_the_position(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    etcd.put("third")
    for pump in ("first", "second"):
        merging.send(pump, 7)
    assert merging.take() == [7]
    merging.members.refresh()
    merging.queue.advance("third", 8)
    merging.members.refresh()
    merging = _Merging(etcd, tmp_path, position=7)
    merging.members.refresh()
    assert merging.queue.positions() == {"first": 7, "second": 7, "third": 7}


def test_all_pumps_join_the_merge_before_the_first_is_read(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    assert merging.members_at_open == {pump: set(PUMPS) for pump in PUMPS}


def test_pump_is_not_in_the_merge_before_its_file_is_durable(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise DiskFailed("no")

    merging = _Merging(etcd, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalDisk, "write_atomic", fail)
        with pytest.raises(DiskFailed):
            merging.members.refresh()
    assert merging.readers == {}
    merging.members.refresh()
    assert merging.readers.keys() == {"first", "second"}


def test_damaged_file_of_a_pump_is_named(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    path = merging.known.path("second")
    path.write_bytes(path.read_bytes()[1:])
    with pytest.raises(LogDamaged, match=path.name):
        KnownPumps(LocalDisk(), tmp_path)


def test_pump_that_cannot_be_read_is_named_while_nothing_waits_for_it(etcd: Etcd, tmp_path: Path) -> None:
    merging = _Merging(etcd, tmp_path)
    merging.members.refresh()
    assert merging.members.are_sending()
    merging.readers["second"].fail("connection refused")
    assert merging.is_stalled_by("the Pump second (online) at 0: connection refused")
    assert not merging.members.are_sending()
    merging.readers["second"].silence = 60.0
    assert merging.is_stalled_by("it has sent nothing for 60 s")


# --- The registration -----------------------------------------------------------------------


def _registration(etcd: Etcd, merging: _Merging, fail: Callable[[Exception], None]) -> Registration:
    node = Node("drainer", "drainer:8249", NodeState.ONLINE)
    registration = Registration(Registry(etcd), merging.members, node, lambda: DrainerProgress(0, 0), fail)
    registration.start()
    return registration


@pytest.fixture
def _in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tidb.membership.HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr("penstock.tidb.membership.LISTING_SECONDS", 0.01)


@pytest.mark.usefixtures("_in_haste")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_defect_while_listing_ends_the_merge(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merging = _Merging(etcd, tmp_path)
    registration = _registration(etcd, merging, merging.queue.fail)

    def fail() -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(merging.members, "refresh", fail)
    with pytest.raises(KeyError, match="a defect"):
        merging.queue.take(1, 30.0)
    assert "a defect" in str(registration.problem)
    registration.end(NodeState.PAUSED)


@pytest.mark.usefixtures("_in_haste")
def test_registry_that_does_not_answer_is_named_until_it_does(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merging = _Merging(etcd, tmp_path)
    registration = _registration(etcd, merging, merging.queue.fail)

    def fail(method: str, request: bytes) -> bytes:
        raise ConnectionLost("PD is away")

    with monkeypatch.context() as patch:
        patch.setattr(etcd, "call_etcd", fail)
        wait_until(lambda: registration.problem == "PD is away")
    wait_until(lambda: registration.problem is None)
    registration.end(NodeState.PAUSED)
