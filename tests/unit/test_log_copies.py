# SPDX-License-Identifier: Apache-2.0
"""A copy of a log follows it over HTTP, byte for byte, and never continues another history."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock._native import BlockCutter
from penstock.capture.receive import Receiver
from penstock.errors import ServerBusy
from penstock.fleet.copied_metadata import CopiedMetadata
from penstock.fleet.copying import LogCopy
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.ending import put_aside
from penstock.logstore.generations import Generation, GenerationFiles
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.log import Log
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, Secret
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.source.daemon_address import DaemonAddress
from tests.support.daemon.served_log import INSTANCE, ServedLog, serving
from tests.support.logstore.disk import Loss, SimulatedDisk
from tests.support.logstore.source import SETTINGS, TIME_S, Captured, check_log, open_log
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until


class Enough(Exception):
    """Raised once a capture has appended enough bytes for a test."""


def capture_pieces(log: Log, count: int) -> None:
    """Append this many pieces of the source."""

    def stop(captured: Captured, appended: int) -> None:
        if appended == count:
            raise Enough

    with pytest.raises(Enough):
        Captured(log, each=stop).run()


def open_copy(folder: Path, disk: Disk) -> Log:
    """Open a copy with small segments."""
    return Log.open(folder, SETTINGS, disk, clock=lambda: TIME_S)


@contextmanager
def copying(served: ServedLog, folder: Path = Path("/copy"), disk: Disk | None = None) -> Iterator[LogCopy]:
    """Copy a served log inside the block."""
    disk = disk or SimulatedDisk()
    address = DaemonAddress((("127.0.0.1", served.port()),), INSTANCE, Secret(served.token or ""))
    copy = LogCopy(
        INSTANCE, lambda: open_copy(folder, disk), lambda: address, lambda: put_aside(disk, folder)
    )
    copy.start()
    try:
        yield copy
    finally:
        copy.stop()


def wait_for_end(copy: LogCopy, log: Log) -> Log:
    """Wait until a copy contains a whole log, and return the copy."""
    wait_until(lambda: log.visible is not None and copy.record().position == log.visible)
    copied = copy.log()
    assert copied is not None
    return copied


def test_copy_follows_a_log_over_files_and_epochs_byte_for_byte() -> None:
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        capture_pieces(log, 3)
        with copying(served) as copy:
            wait_for_end(copy, log)
            Captured(log, each=lambda captured, count: served.served.arrivals.arrived(INSTANCE)).run()
            served.served.arrivals.arrived(INSTANCE)
            copied = wait_for_end(copy, log)
            check_log(copied, whole=True)
            assert copied.epochs == log.epochs
            wait_until(lambda: copy.record().in_step and not copy.record().behind_bytes)


class FailingDisk(SimulatedDisk):
    """A disk that keeps a copy of the state in which a power failure before one of its steps would leave
    it.
    """

    def __init__(self, fails_at: int, loss: Loss) -> None:
        super().__init__()
        self._fails_at = fails_at
        self._loss = loss
        self.left: SimulatedDisk | None = None

    def step(self, what: str) -> None:
        super().step(what)
        if len(self.steps) == self._fails_at:
            self.left = self.after_power_failure(self._loss, self._fails_at)


@pytest.mark.parametrize("loss", [Loss.DROP, Loss.GARBLE])
def test_copy_whose_host_loses_power_is_complete_in_the_end(loss: Loss) -> None:
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        Captured(log).run()
        disks = [FailingDisk(fails_at, loss) for fails_at in (1, 12, 33, 70)]
        with ExitStack() as copies:
            for disk in disks:
                wait_for_end(copies.enter_context(copying(served, disk=disk)), log)
        for disk in disks:
            assert disk.left is not None
            with copying(served, disk=disk.left) as copy:
                check_log(wait_for_end(copy, log), whole=True)


def test_definitions_and_holds_are_copied_before_the_bytes_that_need_them() -> None:
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        capture_pieces(log, 3)
        end = log.visible
        assert end is not None
        definitions = SchemaLog(log.folder, SchemaHistory.from_json, log.disk)
        defaults = ServerDefaults(ServerSpelling(version=(9, 7, 0)), "utf8mb4", {}, folds_names=False)
        definitions.seed(SchemaHistory.awaiting_survey(defaults, end), end)
        holds = Holds(log.disk, log.layout)
        holds.put(Hold("reader", end, time.time_ns() // 1000 + 60_000_000, "cache"))
        with copying(served) as copy:
            copied = wait_for_end(copy, log)
            files = GenerationFiles(copied.disk, copied.layout)
            assert files.list() == GenerationFiles(log.disk, log.layout).list()
            assert Holds(copied.disk, copied.layout).all() == holds.all()


def test_definitions_of_a_log_that_was_empty_are_copied_before_its_first_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host that continues the log would otherwise not know the tables of these bytes."""
    refreshed = threading.Event()
    listed_before: list[list[Generation]] = []

    def refresh(metadata: CopiedMetadata) -> None:
        refresh_original(metadata)
        refreshed.set()

    def resume_file(receiver: Receiver, cutter: BlockCutter) -> None:
        copied = copy.log()
        assert copied is not None
        listed_before.append(GenerationFiles(copied.disk, copied.layout).list())
        resume_original(receiver, cutter)

    refresh_original, resume_original = CopiedMetadata.refresh, Receiver.resume_file
    monkeypatch.setattr(CopiedMetadata, "refresh", refresh)
    monkeypatch.setattr(Receiver, "resume_file", resume_file)
    with open_log(SimulatedDisk()) as log, serving(log) as served, copying(served) as copy:
        assert refreshed.wait(WAIT_SECONDS_MAX)
        defaults = ServerDefaults(ServerSpelling(version=(9, 7, 0)), "utf8mb4", {}, folds_names=False)
        start = Position(0, "mysql-bin.000001", 4)
        definitions = SchemaLog(log.folder, SchemaHistory.from_json, log.disk)
        definitions.seed(SchemaHistory.awaiting_survey(defaults, start), start)
        capture_pieces(log, 3)
        served.served.arrivals.arrived(INSTANCE)
        wait_for_end(copy, log)
        assert listed_before[0] == GenerationFiles(log.disk, log.layout).list() != []


def test_copy_with_bytes_of_another_history_is_set_aside_and_begins_again(tmp_path: Path) -> None:
    """When another server took over, this host had received more of the first server's log than any other
    host.
    """
    folder = tmp_path / "shop"
    with open_copy(folder, LocalDisk()) as longer:
        capture_pieces(longer, 8)
        end = longer.visible
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        capture_pieces(log, 4)
        assert log.visible is not None
        assert end is not None
        assert log.visible < end
        first = log.epochs.epochs[0]
        with copying(served, folder, LocalDisk()) as copy:
            # While the other log may still reach the copy's end, the copy waits.
            wait_until(lambda: "reached" in (copy.record().why or ""))
            assert copy.record().position == end
            log.adopt_epoch(
                replace(first, epoch=1, server_key="mariadb:1", flavor="mariadb", file="mariadb-bin.000001")
            )
            Captured(log).run()
            served.served.arrivals.arrived(INSTANCE)
            copied = wait_for_end(copy, log)
            assert copied.extents() == log.extents()
        (aside,) = tmp_path.glob("shop.aside-*")
        with open_copy(aside, LocalDisk()) as kept:
            assert kept.visible == end


def test_copy_ahead_of_the_log_waits_and_continues_at_its_own_end() -> None:
    disk = SimulatedDisk()
    with open_copy(Path("/copy"), disk) as ahead:
        capture_pieces(ahead, 6)
        end = ahead.visible
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        capture_pieces(log, 3)
        with copying(served, disk=disk) as copy:
            wait_until(lambda: "reached" in (copy.record().why or ""))
            assert copy.record().position == end
            Captured(log).run()
            check_log(wait_for_end(copy, log), whole=True)


def test_copy_that_has_little_left_to_receive_is_in_step_only_after_it_had_everything() -> None:
    disk = SimulatedDisk()
    with open_copy(Path("/copy"), disk) as begun:
        capture_pieces(begun, 3)
    # The disk has space, but less than the configured free space.
    disk.room = SETTINGS.free_bytes_min // 2
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        Captured(log).run()
        address = DaemonAddress((("127.0.0.1", served.port()),), INSTANCE)
        copy = LogCopy(
            INSTANCE,
            lambda: open_copy(Path("/copy"), disk),
            lambda: address,
            lambda: pytest.fail("it is whole"),
        )
        copy.start()
        try:
            wait_until(lambda: "free" in (copy.record().why or ""))
            assert copy.record().position is not None
            assert not copy.record().in_step
            disk.room = None
            wait_until(lambda: copy.record().in_step)
            check_log(wait_for_end(copy, log), whole=True)
        finally:
            copy.stop()


def test_account_limited_to_tables_copies_nothing() -> None:
    access = [{"name": "cache", "token": "narrow-token-0001", "tables": ["shop.orders"]}]
    with open_log(SimulatedDisk()) as log, serving(log, {"token": "wide-token-00001"}, access) as served:
        Captured(log).run()
        for call in ("listing", "metadata", "definitions?version=1"):
            answer = served.ask("GET", f"/v1/instances/{INSTANCE}/copy/{call}", token="narrow-token-0001")
            assert (answer.status, answer.json["type"]) == (403, "AccessDenied")


def test_member_of_an_earlier_version_can_read_a_listing() -> None:
    """Members of version 0.1 refuse extents with other fields, and members are upgraded one after another."""
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        Captured(log).run()
        extents = served.ask("GET", f"/v1/instances/{INSTANCE}/copy/listing").json["extents"]
        assert extents
        assert {frozenset(extent) for extent in extents} == {frozenset(("epoch", "file", "start", "end"))}


def test_upkeep_of_a_copy_that_has_ended_changes_nothing_in_its_folder() -> None:
    """The capture that continues the log may have opened it already."""
    with open_log(SimulatedDisk()) as log, serving(log) as served:
        Captured(log).run()
        disk = SimulatedDisk()
        with copying(served, disk=disk) as copy:
            copied = wait_for_end(copy, log)
        before = disk.files()
        first = copied.segments[0]
        with pytest.raises(ServerBusy, match="closed"):
            copied.drop({first.version})
        with pytest.raises(ServerBusy, match="closed"):
            copied.replace(first)
        assert disk.files() == before
