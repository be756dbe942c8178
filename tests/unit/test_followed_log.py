# SPDX-License-Identifier: Apache-2.0
"""A log that another process writes: after each report, a reader sees exactly the writer's log."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from penstock.errors import CapturedElsewhere, PositionInvalid, PositionPurged
from penstock.logstore.cold import make_cold
from penstock.logstore.disk import LocalDisk, SharedLock
from penstock.logstore.followed_log import FollowedLog, LogReport
from penstock.logstore.holds import Hold, Holds, share_holds
from penstock.logstore.log import Log
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.model import Position
from penstock.processes.instance import ProcessInstance
from penstock.settings.daemon import InstanceSettings, LogSettings
from tests.support.logstore.source import SETTINGS, Captured, boundaries, server_files
from tests.support.suite.patience import WAIT_SECONDS_MAX


@pytest.fixture
def settings(tmp_path: Path) -> LogSettings:
    """Settings of a small log with a memory tier."""
    return SETTINGS.model_copy(update={"folder": tmp_path / "shop", "memory_bytes": 1 << 20})


@pytest.fixture
def written(settings: LogSettings) -> Iterator[Log]:
    """The log, open for writing."""
    with Log.open(settings.folder, settings.model_copy(update={"mode": "file"})) as log:
        yield log


def content_of(log: Log | FollowedLog) -> dict[tuple[int, str], bytes]:
    """Return the bytes of each source file."""
    return {
        (extent.epoch, extent.file): b"".join(log.read(extent.epoch, extent.file, extent.start, extent.end))
        for extent in log.extents()
    }


@pytest.mark.parametrize("reports_each", [1, 7])
def test_reports_show_the_log_as_it_is_written(
    settings: LogSettings, written: Log, reports_each: int
) -> None:
    followed = FollowedLog(settings)
    assert followed.visible is None
    seen: list[Position | None] = []

    def report(captured: Captured, count: int) -> None:
        if count % reports_each:
            return
        followed.apply(LogReport.of(captured.log))
        seen.append(followed.visible)
        assert followed.visible == captured.log.visible
        assert followed.extents() == captured.log.extents()
        assert followed.earliest() == captured.log.earliest()
        if followed.visible is not None:
            assert followed.gtid_set(followed.visible) == boundaries()[followed.visible]

    Captured(written, each=report).run()
    followed.apply(LogReport.of(written))
    assert content_of(followed) == content_of(written)
    assert {file.name for file in server_files()} == {name for _, name in content_of(followed)}
    assert followed.epochs.epochs == written.epochs.epochs
    followed.close()


def test_log_that_is_captured_elsewhere_keeps_no_file_and_no_memory(
    settings: LogSettings, written: Log
) -> None:
    instance = ProcessInstance("shop", InstanceSettings(source="mysql://u@127.0.0.1:1"), settings)

    class Seen(Exception):
        """Raised once the capture has made enough progress."""

    def report(captured: Captured, count: int) -> None:
        instance.report(LogReport.of(captured.log))
        if instance.memory is not None and instance.memory.bytes_held:
            raise Seen

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with pytest.raises(Seen):
        Captured(written, each=report).run()
    followed, before = instance.log(), open_files()
    instance.leave(CapturedElsewhere("shop is captured by member b"))
    assert open_files() == before - 1
    # Readers continue to read from the disk.
    assert followed.memory is not None
    assert followed.memory.bytes_held == 0
    assert any(content_of(followed).values())


def test_newest_bytes_are_read_from_memory(settings: LogSettings, written: Log) -> None:
    followed = FollowedLog(settings)
    assert followed.memory is not None
    held = 0

    def report(captured: Captured, count: int) -> None:
        nonlocal held
        before = followed.visible
        followed.apply(LogReport.of(captured.log))
        after = followed.visible
        if before is None or after is None or (before.epoch, before.file) != (after.epoch, after.file):
            return
        if after > before and followed.memory is not None:
            views = followed.memory.read(before.epoch, before.file, before.offset, after.offset)
            expected = b"".join(captured.log.read(before.epoch, before.file, before.offset, after.offset))
            # At the start of a segment the bytes are in two files, and are read from both.
            held += bool(views)
            assert b"".join(views or [expected]) == expected

    Captured(written, each=report).run()
    assert held > 5
    followed.close()


def test_visible_end_is_not_passed_before_it_is_reported(settings: LogSettings, written: Log) -> None:
    captured = Captured(written)
    captured.run()
    report = LogReport.of(written)
    followed = FollowedLog(settings)
    end = followed.visible
    assert end == report.visible
    assert end is not None
    # A late report has no effect.
    followed.apply(replace(report, visible=replace(end, offset=4)))
    assert followed.visible == end
    with pytest.raises(PositionInvalid):
        list(followed.read(end.epoch, end.file, end.offset, end.offset + 1))
    followed.close()


def test_report_made_while_the_writer_begins_segments_has_them(
    settings: LogSettings, written: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = FollowedLog(settings)
    followed.apply(LogReport.of(written))
    visible = Log.visible.fget
    assert visible is not None

    def visible_after_all_was_written(log: Log) -> Position | None:
        monkeypatch.undo()
        Captured(log).run()
        return visible(log)

    monkeypatch.setattr(Log, "visible", property(visible_after_all_was_written))
    followed.apply(LogReport.of(written))
    assert followed.visible == written.visible is not None
    assert content_of(followed) == content_of(written)
    followed.close()


def test_segments_compressed_or_removed_since_the_last_report_are_looked_up_again(
    settings: LogSettings, written: Log
) -> None:
    Captured(written).run()
    followed = FollowedLog(settings)
    followed.apply(LogReport.of(written))
    removed, compressed = written.segments[0], written.segments[1]
    key = compressed.epoch, written.file_of(compressed)
    expected = b"".join(written.read(*key, compressed.base, compressed.source_end))
    make_cold(LocalDisk(), written.layout, written, compressed)
    written.drop({removed.version})
    LocalDisk().remove(written.layout.segment(removed.hour, removed.version))
    # The report about the compressed and the removed segment has not arrived yet.
    assert b"".join(followed.read(*key, compressed.base, compressed.source_end)) == expected
    with pytest.raises(PositionPurged):
        list(followed.read(removed.epoch, written.file_of(removed), removed.base, removed.source_end))
    assert followed.earliest() == written.earliest()
    followed.close()


def test_hold_on_a_segment_that_left_before_it_was_reported_is_refused(
    settings: LogSettings, written: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    Captured(written).run()
    followed = FollowedLog(settings)
    followed.apply(LogReport.of(written))
    holds = Holds(LocalDisk(), written.layout)
    retention = Retention(LocalDisk(), written.layout, RetentionPolicy(bytes_max=1))
    first, newest, locate = followed.earliest(), written.segments[-1], followed.locate_position
    assert first is not None

    def locate_then_lose(position: Position) -> object:
        located = locate(position)
        retention.run(written)
        return located

    monkeypatch.setattr(followed, "locate_position", locate_then_lose)
    with pytest.raises(PositionPurged):
        holds.put(Hold("late", first), log=followed)
    assert holds.all() == []
    assert written.earliest() == followed.earliest() != first
    kept = Hold("kept", Position(newest.epoch, written.file_of(newest), newest.base))
    holds.put(kept, log=followed)
    assert holds.all() == [kept]
    followed.close()


def _hold_lock(path: Path, locked: Event, release: Event) -> None:
    with SharedLock(path):
        locked.set()
        release.wait(WAIT_SECONDS_MAX)


def test_holds_are_not_changed_while_another_process_reads_them(settings: LogSettings, written: Log) -> None:
    share_holds(written.layout)
    context = multiprocessing.get_context("fork")
    locked, release = context.Event(), context.Event()
    path = settings.folder / "holds.lock"
    process = context.Process(target=_hold_lock, args=(path, locked, release))
    process.start()
    assert locked.wait(WAIT_SECONDS_MAX)
    holds, is_set = Holds(LocalDisk(), written.layout), threading.Event()

    def put() -> None:
        holds.put(Hold("cache", Position(0, "mysql-bin.000001", 4)))
        is_set.set()

    putting = threading.Thread(target=put)
    putting.start()
    try:
        assert not is_set.wait(0.2)
        assert holds.all() == []
    finally:
        release.set()
        process.join(WAIT_SECONDS_MAX)
    assert is_set.wait(WAIT_SECONDS_MAX)
    putting.join()
    with holds.unchanged(), holds.unchanged():
        assert [hold.name for hold in holds.all()] == ["cache"]
