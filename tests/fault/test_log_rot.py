# SPDX-License-Identifier: Apache-2.0
"""After a byte on disk has changed, damaged data is rejected with an error that names its position, damaged
indexes are rebuilt, and no wrong byte is returned.
"""

import itertools
import os
from functools import cache
from pathlib import Path

import pytest

from penstock.errors import FileTruncated, LogDamaged, LogLocked, StreamError
from penstock.logstore.disk import LocalDisk
from penstock.logstore.extent import Extent
from penstock.logstore.log import Log
from penstock.model import Position
from tests.support.logstore.disk import Loss, PowerLost, SimulatedDisk
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

LONG = bool(os.environ.get("PENSTOCK_LONG"))
# The long run changes every byte, in parts that each finish in time. The everyday run changes a sample.
STRIDE = 8 if LONG else 211
PARTS = range(STRIDE if LONG else 1)
IN_USE_FLAG_AT = 4 + 17


@cache
def closed_log() -> SimulatedDisk:
    """Return the disk of a cleanly closed log."""
    disk = SimulatedDisk()
    log = open_log(disk)
    Captured(log).run()
    log.close()
    return disk


@cache
def killed_log() -> SimulatedDisk:
    """Return the disk of a log whose process was killed, after a sync in the middle of the last segment."""
    disk = SimulatedDisk()

    def kill(captured: Captured, number: int) -> None:
        captured.sync()
        if number == 27:
            raise PowerLost

    with pytest.raises(PowerLost):
        Captured(open_log(disk), each=kill).run()
    return disk.after_power_failure(Loss.KEEP)


def flipped(disk: SimulatedDisk, path: Path, at: int) -> SimulatedDisk:
    """Return the disk with one bit of one file changed."""
    disk_copy = disk.copy()
    content = bytearray(disk_copy.files()[path])
    content[at] ^= 1 << at % 8
    disk_copy.put(path, bytes(content))
    return disk_copy


def flips(disk: SimulatedDisk, suffix: str, part: int) -> list[tuple[Path, int]]:
    """Return the bytes to change in the files with a suffix."""
    places = [
        (path, at)
        for path, content in disk.files().items()
        if path.name.endswith(suffix)
        for at in range(len(content))
    ]
    return places[part::STRIDE]


def read_proved(log: Log, extent: Extent) -> bytes:
    """Return an extent's bytes, verified as a decoder verifies them."""
    head = log.head_bytes(extent.epoch, extent.file)
    file = next(
        server_file
        for server_file in server_files()
        if (server_file.epoch, server_file.name) == (extent.epoch, extent.file)
    )
    content = b"".join(log.read(extent.epoch, extent.file, extent.start, extent.end))
    cutter = file.cutter(extent.start, "", 0, head=head)
    taken = cutter.feed(content)
    if taken < len(content):
        position = Position(extent.epoch, extent.file, extent.start + taken)
        raise FileTruncated("the last event is longer than what there is", position=str(position))
    return content


def check_nothing_wrong(log: Log) -> int:
    """Assert that every byte that is not refused is correct; return the number of refusals."""
    refusals = []
    content = {(server_file.epoch, server_file.name): server_file.content for server_file in server_files()}
    for extent in log.extents():
        source = content[extent.epoch, extent.file]
        try:
            assert read_proved(log, extent) == source[extent.start : extent.end]
            head = bytearray(log.head_bytes(extent.epoch, extent.file))
            # A server changes the in-use flag without computing a new checksum, so no checksum covers the
            # flag.
            head[IN_USE_FLAG_AT] = source[IN_USE_FLAG_AT]
            assert head == source[: len(head)]
            assert log.gtid_set(extent.last) == boundaries()[extent.last]
        except StreamError as problem:
            refusals.append(problem.position)
    assert all(refusals), "each says where"
    return len(refusals)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("disk", [closed_log, killed_log])
def test_changed_byte_of_a_segment_is_refused_or_truncated(disk, part: int) -> None:  # type: ignore[no-untyped-def]
    whole = disk()
    noted = open_log(whole.copy()).visible
    refusals = []
    for path, at in each(flips(whole, ".binlog", part)):
        rotten = flipped(whole, path, at)
        try:
            log = open_log(rotten)
        except LogDamaged as problem:
            refusals.append((path.name in problem.message, problem.position))
            continue
        cut_off = log.visible != noted
        refused = check_nothing_wrong(log)
        harmless = at == IN_USE_FLAG_AT
        assert refused or cut_off or harmless, f"{path.name} {at}"
        assert disk is killed_log or not cut_off, "nothing of a closed log is cut off"
    assert all(names_it and position for names_it, position in refusals)


@pytest.mark.parametrize("disk", [closed_log, killed_log])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("suffix", [".index", "position.json"])
def test_changed_byte_outside_the_segments_changes_nothing(disk, suffix: str, part: int) -> None:  # type: ignore[no-untyped-def]
    whole = disk()
    visible = open_log(whole.copy()).visible
    for path, at in each(flips(whole, suffix, part)):
        log = open_log(flipped(whole, path, at))
        assert log.visible == visible
        check_log(log)
        log.close()


def test_changed_byte_of_the_lock_file_changes_nothing(tmp_path: Path) -> None:
    # The simulated disk keeps no lock file, so this log is on a real disk.
    disk = LocalDisk()
    for path, content in each(closed_log().files().items()):
        copy = tmp_path / path.relative_to(FOLDER)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)
    with Log.open(tmp_path, SETTINGS, disk, clock=lambda: TIME_S) as log:
        visible = log.visible
    lock = tmp_path / "lock"
    content = lock.read_bytes()
    assert content == f"{os.getpid()}\n".encode()
    for at, bit in each(itertools.product(range(len(content)), range(8))):
        changed = bytearray(content)
        changed[at] ^= 1 << bit
        lock.write_bytes(changed)
        with Log.open(tmp_path, SETTINGS, disk, clock=lambda: TIME_S) as log:
            assert log.visible == visible
            check_log(log)
            with pytest.raises(LogLocked, match=f"process {os.getpid()} writes"):
                Log.open(tmp_path, SETTINGS, disk)


@pytest.mark.parametrize("part", PARTS)
def test_changed_byte_of_the_epochs_is_refused(part: int) -> None:
    files = closed_log().files()
    places = flips(closed_log(), "epochs.json", part)
    for path, at in each((path, at) for path, at in places if not files[path][at : at + 1].isspace()):
        with pytest.raises(LogDamaged, match=r"epochs\.json"):
            open_log(flipped(closed_log(), path, at))
