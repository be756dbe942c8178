# SPDX-License-Identifier: Apache-2.0
"""Maintenance runs (upkeep) on a log that has defects."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LogDamaged, LogFull, SourceMissing
from penstock.logstore.epochs import stored_segments
from penstock.logstore.log import Log
from penstock.logstore.records import CLOSED, COLD, TIERED
from penstock.logstore.upkeep import Upkeep
from penstock.settings.daemon import LogSettings, RetentionSettings
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import FOLDER, SETTINGS, Captured, check_log, open_log


def settings(**changes: Any) -> LogSettings:
    keeps = RetentionSettings(age=None, bytes=changes.pop("bytes", None))
    return SETTINGS.model_copy(update={"retention": keeps, **changes})


def captured() -> tuple[SimulatedDisk, Log]:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        Captured(log).run()
    return disk, open_log(disk)


def test_segment_that_cannot_be_compressed_is_skipped_by_later_passes() -> None:
    disk, log = captured()
    before = list(log.segments)
    lost = log.layout.segment(before[1].hour, before[1].version)
    disk.remove(lost)
    upkeep = Upkeep(disk, log.layout, settings(cold_after=0))
    upkeep.run(log)
    with pytest.raises(SourceMissing, match=lost.name):
        upkeep.run(log)
    for _ in range(3):
        upkeep.run(log)
    assert [segment.state for segment in log.segments][:6] == [COLD, CLOSED, COLD, COLD, COLD, CLOSED]


def test_failure_in_a_pass_blocks_no_other_work(tmp_path: Path) -> None:
    disk, log = captured()
    first = log.segments[0]
    disk.make_folder(FOLDER / "expired")
    disk.put(FOLDER / "expired" / f"{first.version - 1:019d}.tiered", b"{}")
    upkeep = Upkeep(disk, log.layout, settings(cold_after=0, tier=f"file://{tmp_path}/store"))
    with pytest.raises(LogDamaged, match=r"\.tiered"):
        upkeep.run(log)
    assert log.segments[0].state == TIERED


def test_log_without_room_to_open_is_freed() -> None:
    disk, log = captured()
    log.close()
    newest = log.segments[len(log.segments) - 1]
    disk.remove(stored_segments(disk, log.layout)[-1].index_path)
    disk.room = disk.used
    with pytest.raises(LogFull):
        open_log(disk)
    Upkeep(disk, log.layout, settings(bytes=4000)).make_room()
    with open_log(disk) as again:
        assert again.segments[len(again.segments) - 1].version == newest.version
        assert len(again.segments) < len(log.segments)
        check_log(again, whole=True)
