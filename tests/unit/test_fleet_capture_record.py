# SPDX-License-Identifier: Apache-2.0
"""A member's capture record, when the member's log is older than the state on which all members agreed."""

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.capture.lease import Handover
from penstock.captures import make_capture
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.lease import Holder, Lease
from penstock.coordinate.store import ABSENT
from penstock.errors import PenstockError
from penstock.fleet.records import CaptureRecord, capture_path, lease_path
from penstock.fleet.tenure import CaptureTenure, FencedRecord
from penstock.gtid_sets import LoggedSet
from penstock.logstore.disk import LocalDisk
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.processes.lease import PermittedLease
from penstock.processes.leased import LeasedCapture
from penstock.processes.supervisor import Supervisor
from penstock.retry import Backoff
from penstock.settings.daemon import Settings
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

_numbers = itertools.count(1)

OLD_EPOCH, OLD_FILE = 3, "mysql-bin.000003"


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """A store in memory."""
    store = MemoryStore(f"capture-record-{next(_numbers)}")
    yield store
    store.close()


def lease_of(store: MemoryStore) -> Lease:
    """Return the lease to capture the instance."""
    lease = Lease.acquire(store, store.session(), lease_path("shop"), "b")
    assert lease is not None
    return lease


def has_log(tenure: CaptureTenure) -> bool:
    """Return whether the capture has opened its log."""
    try:
        return tenure.capture is not None and tenure.capture.log().epoch is not None
    except PenstockError:
        return False


def settings_in(folder: Path) -> Settings:
    """Return settings with an instance whose server does not answer."""
    return Settings.model_validate(
        {"log": {"folder": str(folder)}, "instances": {"shop": {"source": "mysql://u@127.0.0.1:1"}}}
    )


def write_old_log(settings: Settings) -> None:
    """Write the log of a member that has captured before."""
    log_settings = settings.log_of("shop")
    with Log.open(log_settings.folder, log_settings, instance="shop") as log:
        log.begin_epoch(
            epoch=OLD_EPOCH,
            server_key="S1",
            server_id=1,
            flavor="mysql",
            version="8.0.36",
            file=OLD_FILE,
            offset=157,
            gtid_set=LoggedSet(""),
        )


def started_tenure(store: MemoryStore, settings: Settings) -> CaptureTenure:
    """Start to capture."""
    tenure = CaptureTenure(store, "shop", lease_of(store), lambda _: None)
    tenure.start(lambda permit: make_capture("shop", settings, lambda _: None, permit))
    return tenure


@pytest.mark.parametrize(
    ("epoch", "file", "server_key"),
    [
        pytest.param(5, "mysql-bin.000009", "S1", id="later epoch"),
        pytest.param(OLD_EPOCH, "mysql-bin.000009", "S1", id="later position of the epoch"),
        pytest.param(OLD_EPOCH, OLD_FILE, "S2", id="another server's epoch of the number"),
    ],
)
def test_older_log_of_a_member_replaces_nothing_while_its_server_is_away(
    store: MemoryStore, tmp_path: Path, epoch: int, file: str, server_key: str
) -> None:
    settings = settings_in(tmp_path)
    write_old_log(settings)
    agreed = Handover(
        Position(epoch, file, 157), server_key, LoggedSet(""), 0, "", Position(epoch, file, 4000)
    )
    store.put(capture_path("shop"), CaptureRecord(1, agreed).encode(), ABSENT)
    tenure = started_tenure(store, settings)
    wait_until(lambda: has_log(tenure))
    tenure.record()
    assert tenure.handover() == agreed
    tenure.leave("the test ends it", lambda: None)
    wait_until(lambda: tenure.left)
    recorded = CaptureRecord.of("shop", store.get(capture_path("shop")))
    assert recorded is not None
    assert recorded.handover == agreed


def test_progress_that_was_read_before_an_epoch_was_agreed_on_is_not_written(store: MemoryStore) -> None:
    record = FencedRecord(store, "shop", lease_of(store))
    before = record.record
    position = Position(1, "mysql-bin.000001", 4)
    agreed = replace(before, handover=Handover(position, "S1", LoggedSet(""), 0, "", position))
    record.write(agreed)
    record.write(replace(before, state="running"), base=before)
    assert CaptureRecord.of("shop", store.get(capture_path("shop"))) == agreed
    record.write(replace(agreed, state="running"), base=agreed)
    assert record.record.state == "running"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_capture_whose_end_cannot_be_recorded_for_a_defect_ends_and_gives_its_lease_back(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenure = started_tenure(store, settings_in(tmp_path))
    capture = tenure.capture
    assert capture is not None

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(capture, "snapshot", fail)
    tenure.leave("the test ends it", lambda: None)
    try:
        wait_until(lambda: tenure.left)
        assert store.get(lease_path("shop")) is None
        # Wait for the thread: if it reported its exception later, the next test would fail.
        wait_until(lambda: all(thread.name != "leave-shop" for thread in threading.enumerate()))
    finally:
        capture.stop()


@pytest.mark.parametrize(
    ("last_member", "expected"),
    [
        pytest.param("a", {"moved": 300, "new": 700}, id="another member captured last"),
        pytest.param("b", {"moved": 900, "removed": 200}, id="this member captured last"),
    ],
)
def test_log_has_the_holds_of_the_member_that_captured_last(
    store: MemoryStore, tmp_path: Path, last_member: str, expected: dict[str, int]
) -> None:
    settings = settings_in(tmp_path)
    write_old_log(settings)
    holds = Holds(LocalDisk(), Layout(settings.log_of("shop").folder))
    for name, offset in (("removed", 200), ("moved", 900)):
        holds.put(Hold(name, Position(OLD_EPOCH, OLD_FILE, offset)))
    position = Position(OLD_EPOCH, OLD_FILE, 1000)
    record = CaptureRecord(
        1,
        Handover(position, "S1", LoggedSet(""), 0, "", position),
        (Hold("moved", replace(position, offset=300)), Hold("new", replace(position, offset=700))),
        member=last_member,
    )
    store.put(capture_path("shop"), record.encode(), ABSENT)
    tenure = started_tenure(store, settings)
    wait_until(lambda: has_log(tenure))
    assert {hold.name: hold.position.offset for hold in holds.all()} == expected
    tenure.leave("the test ends it", lambda: None)
    wait_until(lambda: tenure.left)


def test_store_that_does_not_answer_delays_no_end_of_a_capture(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    write_old_log(settings)
    tenure = started_tenure(store, settings)
    wait_until(lambda: has_log(tenure))
    capture = tenure.capture
    assert capture is not None
    answering, asked, put = threading.Event(), threading.Event(), store.put

    def put_late(path: str, value: bytes, version: int | None = None) -> int:
        asked.set()
        answering.wait()
        return put(path, value, version)

    monkeypatch.setattr(store, "put", put_late)
    tenure.leave("the test ends it", lambda: None)
    try:
        assert asked.wait(WAIT_SECONDS_MAX)
        assert capture.join(WAIT_SECONDS_MAX)
        assert not tenure.left
    finally:
        answering.set()
    wait_until(lambda: tenure.left)


def test_member_keeps_the_lease_of_a_capture_process_that_dies_until_it_leaves(
    store: MemoryStore, tmp_path: Path
) -> None:
    settings = settings_in(tmp_path)
    write_old_log(settings)
    position = Position(OLD_EPOCH, OLD_FILE, 1000)
    recorded = Hold("cache", position)
    store.put(capture_path("shop"), CaptureRecord(1, holds=(recorded,), member="a").encode(), ABSENT)
    supervisor = Supervisor(settings, [], lambda _: None, backoff=Backoff(first=0.0, longest=0.0))
    tenure = CaptureTenure(store, "shop", lease_of(store), lambda _: None)
    tenure.start(lambda tenure: LeasedCapture(supervisor, "shop", tenure))
    instance = supervisor.instances["shop"]

    def has_reported(starts: int) -> bool:
        # The capture has opened its log, and its server does not answer.
        status = instance.status()
        return status["process"]["starts"] == starts and status["state"] in ("connecting", "waiting")

    try:
        wait_until(lambda: has_reported(1))
        holds = Holds(LocalDisk(), Layout(settings.log_of("shop").folder))
        assert holds.all() == [recorded]
        holds.remove("cache")
        assert instance.pid is not None
        os.kill(instance.pid, signal.SIGKILL)
        wait_until(lambda: instance.pid is not None and has_reported(2))
        assert [process_exit.reason for process_exit in instance.exits] == ["SIGKILL"]
        # The holds of the last host are adopted only once, because this reader has since released its hold.
        assert holds.all() == []
        holder = Holder.of(store.get(lease_path("shop")))
        assert holder is not None
        assert (holder.token, tenure.is_lost) == (tenure.token, False)
        tenure.record()
        stored = CaptureRecord.of("shop", store.get(capture_path("shop")))
        assert stored is not None
        assert (stored.token, stored.handover is not None) == (tenure.token, True)
        # The process continues to write into files that were unlinked.
        shutil.rmtree(settings.log_of("shop").folder)
        tenure.record()
        assert tenure.damage is not None
        assert "was removed" in tenure.damage
    finally:
        process = instance.pid
        tenure.leave("the test ends it", lambda: None)
        assert tenure.wait_left(WAIT_SECONDS_MAX)
    assert process is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert store.get(lease_path("shop")) is None
    assert supervisor.instances == {}


def test_capture_process_stores_only_until_the_time_that_the_daemon_has_confirmed() -> None:
    lease = PermittedLease("shop", time.monotonic() + WAIT_SECONDS_MAX, lambda call: None)
    assert lease.pause_reason() is None
    lease.permit(time.monotonic())
    assert lease.pause_reason() == "the daemon has not confirmed the lease to capture shop in time"
    lease.permit(float("-inf"))
    assert lease.pause_reason() == "the coordination store does not confirm the lease to capture shop"


def test_store_that_is_away_or_a_lost_lease_permits_no_capture_process(store: MemoryStore) -> None:
    lease = lease_of(store)
    tenure = CaptureTenure(store, "shop", lease, lambda _: None)
    assert tenure.permitted_until > time.monotonic()
    store.away(True)
    assert tenure.permitted_until == float("-inf")
    store.away(False)
    assert tenure.permitted_until > time.monotonic()
    lease.release()
    assert tenure.permitted_until == float("-inf")
