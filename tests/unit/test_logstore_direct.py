# SPDX-License-Identifier: Apache-2.0
"""Large pieces of a log are written past the page cache, and give the same files."""

import itertools
import mmap
import random
import resource
from pathlib import Path

import pytest

from penstock.errors import DiskFailed
from penstock.limits import DIRECT_BYTES_MIN, DISK_BLOCK_BYTES, MIB
from penstock.logstore import direct
from penstock.logstore.direct import DirectWriter
from penstock.logstore.disk import LocalDisk
from penstock.logstore.log import Log
from tests.support.logstore.large_pieces import FILE, SETTINGS, START, begin, pieces


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all direct writes; 0 for each that was refused."""
    sizes: list[int] = []
    write = DirectWriter.write

    def write_and_note(self: DirectWriter, blocks: memoryview, offset: int) -> int:
        sizes.append(write(self, blocks, offset))
        return sizes[-1]

    monkeypatch.setattr(DirectWriter, "write", write_and_note)
    # Other work on this machine may make any write slow.
    monkeypatch.setattr(direct, "DIRECT_BYTES_PER_SECOND_MIN", 0)
    return sizes


def memory_for(offset: int, content: bytes, *, misaligned_bytes: int = 0) -> memoryview:
    """Return the content in memory that is aligned like an offset of a file."""
    start = (offset + misaligned_bytes) % DISK_BLOCK_BYTES
    memory = memoryview(mmap.mmap(-1, start + len(content)))
    memory[start:] = content
    return memory[start:]


def test_direct_and_cached_writes_of_any_size_give_the_same_file(tmp_path: Path, written: list[int]) -> None:
    chance = random.Random(3)
    source = chance.randbytes(MIB + 7) * 4
    expected = b""
    with LocalDisk().append_open(tmp_path / "file") as file:  # type: ignore[attr-defined]
        for number in range(24):
            if chance.random() < 0.6:
                size = DIRECT_BYTES_MIN + chance.randrange(MIB)
            else:
                size = chance.choice([1, 300, DISK_BLOCK_BYTES, 70_000])
            start = chance.randrange(len(source) - size)
            content = source[start : start + size]
            file.write([memory_for(file.size, content, misaligned_bytes=number % 5 == 4)])
            expected += content
            if number == 11:
                # The next write continues inside a block that was written directly.
                file.truncate(len(expected) - 5000)
                expected = expected[:-5000]
            assert LocalDisk().read(tmp_path / "file", len(expected) - 1) == expected[-1:]
        file.sync()
        assert file.size == len(expected)
    assert (tmp_path / "file").read_bytes() == expected
    assert sum(size > 0 for size in written) > 5
    assert 0 in written, "misaligned memory is written through the page cache"


def test_direct_write_that_fails_half_way_leaves_no_bytes(tmp_path: Path, written: list[int]) -> None:
    path = tmp_path / "file"
    content = bytes(range(256)) * (2 * MIB // 256)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LocalDisk().append_open(path) as file:  # type: ignore[attr-defined]
        file.write([b"whole"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
        try:
            with pytest.raises(DiskFailed, match="writing"):
                file.write([memory_for(5, content)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_bytes() == b"whole"
        file.write([memory_for(5, content)])
    assert path.read_bytes() == b"whole" + content
    assert written[-1] > MIB


def test_slow_disk_gets_the_next_pieces_through_the_page_cache(
    tmp_path: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "DIRECT_BYTES_PER_SECOND_MIN", 1 << 60)
    monkeypatch.setattr(direct, "DIRECT_PAUSE_BYTES", 2 * MIB)
    content = bytes(DIRECT_BYTES_MIN)
    with LocalDisk().append_open(tmp_path / "file") as file:  # type: ignore[attr-defined]
        for _ in range(4):
            file.write([memory_for(file.size, content)])
    assert written == [MIB, MIB]


def test_captured_bytes_are_aligned_for_direct_writes(tmp_path: Path, written: list[int]) -> None:
    content = b""
    with Log.open(tmp_path / "log", SETTINGS) as log:
        receiver, cutter = begin(log)
        for piece in itertools.islice(pieces(), 16):
            assert receiver.feed(piece, cutter) == len(piece)
            content += piece
        assert b"".join(log.read(0, FILE, START, START + len(content))) == content
    # The first pieces of each segment may be misaligned.
    assert sum(written) > len(content) // 2
