# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock._native import GtidSet
from penstock.errors import (
    DiskFailed,
    LogDamaged,
    LogFull,
    LogLocked,
    LogTorn,
    OptionInvalid,
    PositionInvalid,
    PositionPurged,
    SequenceGap,
    SourceMissing,
)
from penstock.logstore.epochs import stored_segments
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.model import Position
from penstock.settings.daemon import LogSettings
from tests.support.logstore.disk import Loss, SimulatedDisk
from tests.support.logstore.source import (
    FOLDER,
    SETTINGS,
    TIME_S,
    Captured,
    boundaries,
    check_log,
    open_log,
    server_files,
)
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers.packages import install


def settings(**changes: Any) -> LogSettings:
    return SETTINGS.model_copy(update=changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shop"


@pytest.fixture
def log(folder: Path) -> Iterator[Log]:
    with Log.open(folder, SETTINGS) as opened:
        yield opened


# --- Written and read -------------------------------------------------------------------------


def test_log_returns_captured_bytes_and_continues_after_a_restart(folder: Path) -> None:
    for piece_bytes in (150, 700, 5000):
        with Log.open(folder, SETTINGS) as log:
            captured = Captured(log, piece_bytes)
            if piece_bytes == 150:
                captured.each = lambda captured, number: captured.log.close() if number == 40 else None
                with pytest.raises(AssertionError, match="closed"):
                    captured.run()
            else:
                captured.run()
                check_log(log, whole=True)
        with Log.open(folder, SETTINGS) as log:
            check_log(log, whole=piece_bytes > 150)
            assert log.durable == log.visible


def test_every_segment_is_a_binlog_file_that_the_servers_own_tool_reads(log: Log) -> None:
    Captured(log).run()
    log.sync()
    assert len(log.segments) > 6
    tool = {0: install("mysql").argv("mysqlbinlog"), 1: install("mariadb").argv("mariadb-binlog")}
    for record in log.segments:
        with log.open_segment(record) as reader:
            path = reader.segment.path
        ran = subprocess.run(
            [*tool[record.epoch], "--verify-binlog-checksum", str(path)], capture_output=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert f"Rotate to {reader.head.file}  pos: {record.base}".encode() in ran.stdout


def test_ranges_are_read_from_any_byte_to_any_byte(log: Log) -> None:
    Captured(log).run()
    file = server_files()[1]
    end = len(file.content)
    for start in each(range(127, end, 97)):
        for stop in (start, start + 1, start + 500, end):
            stop = min(stop, end)
            assert b"".join(log.read(0, file.name, start, stop)) == file.content[start:stop]


def test_missing_positions_are_refused_by_name(log: Log) -> None:
    with pytest.raises(SourceMissing, match="empty"):
        log.head()
    Captured(log).run()
    last = server_files()[-1]
    with pytest.raises(PositionInvalid, match="the log ends at"):
        list(log.read(1, last.name, 400, len(last.content) + 1))
    with pytest.raises(PositionPurged, match="begins with"):
        list(log.read(0, "mysql-bin.000001", 4, 200))
    with pytest.raises(SequenceGap, match="does not have"):
        list(log.read(0, "mysql-bin.000003", len(server_files()[2].content), 100_000))
    with pytest.raises(SourceMissing, match="nothing of"):
        log.head_bytes(0, "mysql-bin.000009")
    with pytest.raises(PositionInvalid, match="is mysql-bin"):
        list(log.read(0, "binlog.000002", 127, 200))


def test_gtid_set_before_every_boundary_is_known(log: Log) -> None:
    Captured(log).run()
    for position, gtid_set in boundaries().items():
        if position >= log.extents()[0].first:
            assert log.gtid_set(position) == gtid_set, position
    first = log.epochs.epochs[1].position
    assert log.gtid_set(first) == ""


def test_times_and_sets_are_located(log: Log) -> None:
    Captured(log).run()
    for position, gtid_set in boundaries().items():
        if position.epoch == 0 and position >= log.extents()[0].first:
            # A GTID set describes every position from the end of its last transaction to the start of the
            # next one.
            located = boundaries()[log.locate_gtid_set(gtid_set).position]
            assert GtidSet.parse(gtid_set).contains(GtidSet.parse(located))
            assert log.locate_position(position).position >= position
    assert log.locate_time(0).position == log.extents()[0].first


# --- Concurrent access ------------------------------------------------------------------------


def test_second_writer_is_refused_and_readers_see_written_bytes(folder: Path) -> None:
    with Log.open(folder, SETTINGS) as log:
        with pytest.raises(LogLocked, match="writes the log"):
            Log.open(folder, SETTINGS)
        reader: LogReader | None = None

        def look(captured: Captured, number: int) -> None:
            nonlocal reader
            if reader is None:
                reader = LogReader.open(folder)
            assert reader.refresh() == captured.log.visible
            check_log(reader)

        Captured(log, 400, each=look).run()
        assert reader is not None
        check_log(reader, whole=True)
    with Log.open(folder, SETTINGS):
        assert reader.refresh() == reader.visible


def test_reader_of_a_missing_log_is_refused(folder: Path) -> None:
    with pytest.raises(SourceMissing, match="no log"):
        LogReader.open(folder)


def test_readers_wait_for_visible_and_durable_bytes(folder: Path) -> None:
    with Log.open(folder, settings(fsync="seconds", fsync_seconds=0.02)) as log:
        seen: list[Position] = []

        def follow() -> None:
            after = None
            while after is None or after.epoch == 0:
                after = log.wait_visible(after, WAIT_SECONDS_MAX)
                assert after is not None
                seen.append(after)

        thread = threading.Thread(target=follow)
        thread.start()
        Captured(log).run()
        thread.join(WAIT_SECONDS_MAX)
        assert seen == sorted(set(seen))
        assert seen[-1].epoch == 1
        visible = log.head()
        wait_until(lambda: log.durable == visible)
        assert log.wait_visible(visible, 0.01) == visible


def test_each_append_is_durable_if_configured() -> None:
    disk = SimulatedDisk()
    log = Log.open(FOLDER, settings(fsync="block"), disk)

    def check(captured: Captured, number: int) -> None:
        assert captured.log.durable == captured.log.visible

    Captured(log, each=check).run()
    assert log.visible is not None


def test_without_syncs_only_ended_segments_are_durable() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    Captured(log).run()
    visible, durable = log.head(), log.durable
    assert durable is not None
    assert durable < visible
    assert log.sync() == visible == log.durable


def test_memory_tier_serves_recent_bytes(folder: Path) -> None:
    with Log.open(folder, settings(memory_bytes=4000)) as log:
        Captured(log).run()
        assert log.memory is not None
        assert 0 < log.memory.bytes_held <= 4000
        check_log(log, whole=True)


# --- Segments ---------------------------------------------------------------------------------


def test_new_hour_starts_a_new_segment_in_its_folder() -> None:
    disk, hours = SimulatedDisk(), iter(range(10_000))
    log = open_log(disk, lambda: TIME_S + 3600 * next(hours) / 40)
    Captured(log, 100).run()
    check_log(log, whole=True)
    folders = {record.hour for record in log.segments}
    assert len(folders) > 2
    assert folders == set(log.layout.hours(disk))


def test_lost_connection_drops_the_unfinished_transaction(log: Log) -> None:
    def reconnect(captured: Captured, number: int) -> None:
        visible = captured.log.visible
        if number % 5 == 0 and visible is not None:
            raise ConnectionError

    captured = Captured(log, 150, each=reconnect)
    tries = 0
    while True:
        try:
            captured.run()
            break
        except ConnectionError:
            tries += 1
            check_log(log)
    assert tries > 10
    check_log(log, whole=True)


def test_bytes_that_do_not_continue_the_log_are_refused(log: Log) -> None:
    file = server_files()[0]

    def put_at(offset: int, epoch: int = 0) -> None:
        log.begin_file(
            file.name,
            offset,
            file.content[4:127],
            "",
            epoch=epoch,
            server_id=7,
            flavor="mysql",
        )

    with pytest.raises(PositionInvalid, match="has not begun"):
        put_at(127)
    Captured(log, 5000).run()
    with pytest.raises(PositionInvalid, match="already past"):
        put_at(127)
    with pytest.raises(SequenceGap, match="do not follow"):
        log.append(b"x" * 100, 4, 104, 104)
    with pytest.raises(PositionInvalid, match="follow"):
        log.begin_epoch(
            epoch=1,
            server_key="another",
            server_id=1,
            flavor="mysql",
            version="9",
            file="a.000001",
            offset=4,
            gtid_set="",
        )


def test_gap_between_transactions_is_reported_to_readers() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    captured = Captured(log, each=lambda captured, number: captured.log.sync() if number < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        captured.run()
    file = server_files()[0]
    visible = log.head()
    after = min(position for position in boundaries() if position.offset > visible.offset + 300)
    gtid_set = boundaries()[after]
    for log_position, before in ((visible, boundaries()[visible]), (after, gtid_set)):
        log.begin_file(
            file.name, log_position.offset, file.content[4:127], before, epoch=0, server_id=7, flavor="mysql"
        )
    cutter = file.cutter(after.offset, gtid_set)
    cutter.feed(file.content[after.offset :])
    log.append(cutter.take_data(), after.offset, len(file.content), cutter.boundary, gtid_set=cutter.gtid_set)
    extents = log.extents()
    assert [(extent.start, extent.end) for extent in extents] == [
        (127, visible.offset),
        (after.offset, len(file.content)),
    ]
    with pytest.raises(SequenceGap):
        list(log.read(0, file.name, 127, len(file.content)))
    log.close()
    again = open_log(disk)
    assert again.extents() == extents


def test_retention_removes_the_oldest_segments_and_reports_where_the_log_starts(log: Log) -> None:
    Captured(log).run()
    before = len(log.segments)
    Retention(log.disk, log.layout, RetentionPolicy(age_seconds=None, bytes_max=12_000)).run(log)
    assert 3 < len(log.segments) < before
    check_log(log, whole=True)
    with pytest.raises(PositionPurged, match="the log begins with"):
        list(log.read(0, "mysql-bin.000001", 127, 200))


# --- Disk failures --------------------------------------------------------------------------


def test_full_disk_pauses_the_capture_and_loses_nothing() -> None:
    disk = SimulatedDisk(room=2500)
    log = open_log(disk)
    full = 0

    def patient(step: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*arguments: Any, **named: Any) -> Any:
            nonlocal full
            while True:
                try:
                    return step(*arguments, **named)
                except LogFull:
                    full += 1
                    check_log(log)
                    assert disk.room is not None
                    disk.room += 60

        return tried

    log.append = patient(log.append)  # type: ignore[method-assign]
    log.begin_file = patient(log.begin_file)  # type: ignore[method-assign]
    log.begin_epoch = patient(log.begin_epoch)  # type: ignore[method-assign]
    Captured(log).run()
    assert full > 50
    check_log(log, whole=True)
    disk.room = None
    log.close()
    check_log(open_log(disk), whole=True)


def test_space_that_must_stay_free_is_not_used(folder: Path) -> None:
    with Log.open(folder, settings(free_bytes_min=1 << 60)) as log:
        assert str(1 << 60) in str(log.full_because())
    with Log.open(folder, settings(free_bytes_min=0)) as log:
        assert log.full_because() is None


def test_log_opens_without_room_for_its_segment_index() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        Captured(log).run()
    disk.remove(log.layout.segments_index)
    disk.room = disk.used
    with open_log(disk) as again:
        check_log(again, whole=True)
        assert not disk.exists(log.layout.segments_index)
        disk.room = None


@pytest.mark.parametrize("lost", ["segment", "epochs"])
def test_log_that_cannot_be_opened_leaves_no_open_file(folder: Path, lost: str) -> None:
    with Log.open(folder, SETTINGS) as log:
        Captured(log).run()
    if lost == "segment":
        stored_segments(log.disk, log.layout)[-1].path.unlink()
    else:
        log.layout.epochs.write_bytes(b"{}")
    for _ in range(3):
        with pytest.raises((LogTorn, LogDamaged)):
            Log.open(folder, SETTINGS)
    assert opened_below(folder) == []


def opened_below(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open, despite concurrent opens and closes."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in paths if path.startswith(str(folder))]


def test_after_a_failed_sync_nothing_more_is_durable() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)

    def fail(captured: Captured, number: int) -> None:
        disk.failing_syncs = number == 3
        captured.log.sync()

    with pytest.raises(DiskFailed, match="syncing"):
        Captured(log, each=fail).run()
    disk.failing_syncs = False
    with pytest.raises(DiskFailed, match="failed before"):
        log.sync()
    with pytest.raises(DiskFailed, match="Reopen the log"):
        Captured(log).run()
    with pytest.raises(DiskFailed):
        log.full_because()
    log.close()
    # The operating system believes that the bytes are on the disk; the reopened log verifies that.
    again = open_log(disk)
    assert again.durable == log.visible
    recovered = open_log(disk.after_power_failure(Loss.DROP))
    assert recovered.visible == again.durable
    check_log(recovered)


def test_segment_that_cannot_be_made_durable_ends_the_writing() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)

    def fail(captured: Captured, number: int) -> None:
        disk.failing_syncs = True

    with pytest.raises(DiskFailed, match="syncing"):
        Captured(log, each=fail).run()
    disk.failing_syncs = False
    with pytest.raises(DiskFailed, match="failed before"):
        Captured(log).run()
    log.close()
    log = open_log(disk.after_kill())
    Captured(log).run()
    check_log(log, whole=True)


def test_failed_background_sync_stops_the_writer() -> None:
    disk = SimulatedDisk()
    log = Log.open(FOLDER, settings(fsync="seconds", fsync_seconds=0.01), disk)

    def fail(captured: Captured, number: int) -> None:
        disk.failing_syncs = True
        if number > 1:
            # This piece is appended while syncs fail, so the background sync has work to do.
            wait_until(lambda: disk.failed_syncs)

    with pytest.raises(DiskFailed, match="failed before"):
        Captured(log, each=fail).run()
    log.close()


def test_missing_durable_bytes_stop_the_log_until_the_loss_is_accepted() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    Captured(log).run()
    log.close()
    path = max(path for path in disk.files() if path.suffix == ".binlog")
    disk.put(path, disk.files()[path][:-10])
    with pytest.raises(LogTorn, match="durable up to 1/mariadb-bin") as torn:
        open_log(disk)
    assert torn.value.position is not None
    assert "accept_loss" in str(torn.value)
    log = Log.open(FOLDER, SETTINGS, disk, accept_loss=True)
    check_log(log)
    Captured(log).run()
    check_log(log, whole=True)


def test_segment_without_its_file_is_reported() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    Captured(log).run()
    log.close()
    paths = [path for path in disk.files() if path.suffix == ".binlog"]
    newest = max(paths)
    disk.remove(newest)
    with pytest.raises(LogTorn):
        open_log(disk)


def test_segment_under_another_name_is_refused() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    Captured(log).run()
    log.close()
    oldest = min(path for path in disk.files() if path.suffix == ".binlog")
    disk.rename(oldest, oldest.with_name(f"{int(oldest.stem) - 1:019d}.binlog"))
    with pytest.raises(LogDamaged, match="its name says otherwise"):
        open_log(disk)


def test_missing_indexes_are_rebuilt() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    Captured(log).run()
    log.close()
    for path in disk.files():
        if path.suffix == ".index":
            disk.remove(path)
    log = open_log(disk)
    check_log(log, whole=True)
    assert disk.exists(log.layout.segments_index)
    with log.open_blocks(log.segments[2]) as (_, blocks):
        assert not blocks.rebuilt, "it was kept when it was made the first time"


def test_memory_only_log_is_not_opened_in_a_folder(folder: Path) -> None:
    with pytest.raises(OptionInvalid, match="keeps files"):
        Log.open(folder, settings(mode="memory"))
