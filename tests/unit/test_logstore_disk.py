# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import resource
from pathlib import Path

import pytest

from penstock.errors import DiskFailed, LogLocked, SourceMissing
from penstock.logstore.disk import LocalDisk

DISK = LocalDisk()


def test_appended_bytes_are_read_back_across_buffers_and_reopened_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = DISK.append_open(path)
    file.write([b"abc", memoryview(b"def"), b"", bytearray(b"g")])
    file.sync()
    file.close()
    file = DISK.append_open(path)
    assert file.size == 7
    file.truncate(5)
    file.write([b"x" for _ in range(3000)])
    file.close()
    assert DISK.read(path) == b"abcde" + b"x" * 3000
    assert DISK.read(path, 3, 6) == b"dex"
    assert DISK.read(path, 3000, 9000) == b"x" * 5


def test_write_that_fails_half_way_leaves_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = DISK.append_open(path)
    file.write([b"whole"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(DiskFailed, match="writing"):
            file.write([b"12", b"3456"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.size == 5
    assert path.read_bytes() == b"whole"
    file.write([b"again"])
    assert path.read_bytes() == b"wholeagain"


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file"
    DISK.write_atomic(path, b"one")
    DISK.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert DISK.list(tmp_path) == ["file"]


def test_folders_are_created_with_parents_and_removed_when_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    DISK.make_folder(folder)
    DISK.make_folder(folder)
    DISK.write_atomic(folder / "file", b"")
    DISK.remove_folder(folder)
    assert DISK.exists(folder)
    DISK.remove(folder / "file")
    DISK.remove_folder(folder)
    assert not DISK.exists(folder)
    assert DISK.list(folder) == []
    assert DISK.free_bytes(tmp_path) > 0


def test_missing_file_is_named(tmp_path: Path) -> None:
    for action in (DISK.read, DISK.remove, DISK.size, DISK.open_read, DISK.sync_folder):
        with pytest.raises(SourceMissing, match="gone"):
            action(tmp_path / "gone")


def test_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = DISK.lock(path)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(_try_to_lock, (path,)) == f"process {path.read_text().strip()} writes"
        held.close()
        assert pool.apply(_try_to_lock, (path,)) == "free"


def _try_to_lock(path: Path) -> str:
    try:
        DISK.lock(path).close()
    except LogLocked as problem:
        return problem.message.split(" the log")[0]
    return "free"


def test_lock_works_without_disk_space_for_its_owner_note(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        held = DISK.lock(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(LogLocked, match="process unknown"):
        DISK.lock(path)
    held.close()
    DISK.lock(path).close()
