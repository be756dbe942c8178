# SPDX-License-Identifier: Apache-2.0
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from penstock.errors import ChecksumMismatch, EventMalformed, FileTruncated
from penstock.logstore.cold import FRAME_BYTES_MAX, SeekableFile, compress_segment, make_cold
from penstock.logstore.disk import LocalDisk, ReadFile
from penstock.logstore.log import Log
from penstock.logstore.records import CLOSED, COLD
from tests.conftest import ROOT
from tests.support.logstore.disk import Loss, PowerLost, SimulatedDisk
from tests.support.logstore.source import Captured, check_log, open_log
from tests.support.suite.patience import WAIT_SECONDS_MAX

LOGS = ROOT / "native/kernel/tests/logs"
HEAD_BYTES = 150


class CountingFile:
    """Wraps a real file and counts the bytes read from it."""

    def __init__(self, file: ReadFile) -> None:
        self._file = file
        self.bytes_read = 0

    @property
    def size(self) -> int:
        return self._file.size

    def read(self, start: int, stop: int) -> bytes:
        piece = self._file.read(start, stop)
        self.bytes_read += len(piece)
        return piece

    def close(self) -> None:
        self._file.close()


@pytest.fixture(scope="module")
def segment() -> bytes:
    """A megabyte of repeated real events."""
    numbers = random.Random(3)
    events = b"".join(path.read_bytes()[4:] for path in sorted(LOGS.glob("mysql-9.7-*.binlog")))
    out = bytearray(b"\xfebin")
    while len(out) < 1 << 20:
        out += events
        out += numbers.randbytes(200)
    return bytes(out)


@pytest.fixture(scope="module")
def cuts(segment: bytes) -> list[int]:
    """Uneven offsets, like the ends of blocks."""
    numbers = random.Random(4)
    return sorted(
        {HEAD_BYTES, *(numbers.randrange(HEAD_BYTES, len(segment)) for _ in range(40)), len(segment)}
    )


@pytest.fixture
def cold(tmp_path: Path, segment: bytes, cuts: list[int]) -> Path:
    plain, cold = tmp_path / "1.binlog", tmp_path / "1.binlog.zst"
    plain.write_bytes(segment)
    compress_segment(LocalDisk(), plain, cold, cuts)
    return cold


@pytest.fixture
def opened(cold: Path) -> Iterator[tuple[SeekableFile, CountingFile]]:
    counting = CountingFile(LocalDisk().open_read(cold))
    with SeekableFile(counting, cold.name) as file:
        yield file, counting


def test_zstd_tool_restores_the_plain_segment(cold: Path, segment: bytes) -> None:
    tool = shutil.which("zstd")
    if tool is not None:
        done = subprocess.run(
            [tool, "-d", "-c", cold], capture_output=True, timeout=WAIT_SECONDS_MAX, check=True
        )
        assert done.stdout == segment
        subprocess.run([tool, "-t", "-q", cold], timeout=WAIT_SECONDS_MAX, check=True)
    reader = zstandard.ZstdDecompressor().stream_reader(cold.read_bytes(), read_across_frames=True)
    assert reader.read(len(segment) + 1) == segment


def test_seek_table_has_the_published_layout(cold: Path, segment: bytes, cuts: list[int]) -> None:
    raw = cold.read_bytes()
    frames, descriptor, magic = struct.unpack("<IBI", raw[-9:])
    assert (frames, descriptor, magic) == (len(cuts), 0, 0x8F92EAB1)
    table_bytes = 8 * frames + 9
    assert struct.unpack_from("<II", raw, len(raw) - table_bytes - 8) == (0x184D2A5E, table_bytes)
    stored = begin = 0
    for index, stop in enumerate(cuts):
        compressed, plain = struct.unpack_from("<II", raw, len(raw) - table_bytes + 8 * index)
        frame = zstandard.ZstdDecompressor().decompress(raw[stored : stored + compressed])
        assert frame == segment[begin:stop]
        assert plain == stop - begin
        parameters = zstandard.get_frame_parameters(raw[stored : stored + compressed])
        assert parameters.has_checksum
        stored, begin = stored + compressed, stop
    assert stored == len(raw) - table_bytes - 8


def test_head_has_its_own_frame(opened: tuple[SeekableFile, CountingFile], segment: bytes) -> None:
    file, counting = opened
    table_bytes = counting.bytes_read
    assert file.read(0, HEAD_BYTES) == segment[:HEAD_BYTES]
    assert file.frames_read == 1
    assert counting.bytes_read - table_bytes < 2 * HEAD_BYTES


def test_any_range_equals_that_of_the_plain_segment(
    opened: tuple[SeekableFile, CountingFile], segment: bytes, cuts: list[int]
) -> None:
    file, _ = opened
    numbers = random.Random(9)
    assert file.size == len(segment)
    for _ in range(300):
        start = numbers.choice([numbers.randrange(len(segment)), *numbers.sample(cuts, 2)])
        stop = start + numbers.choice([0, 1, 100, 70_000, 300_000])
        assert file.read(start, stop) == segment[start:stop]
    assert file.read(len(segment) - 5, len(segment) + 99) == segment[-5:]
    assert file.read(len(segment) + 1, len(segment) + 9) == b""
    assert b"".join(file.pieces()) == segment


def test_only_the_frames_of_a_range_are_decompressed(
    opened: tuple[SeekableFile, CountingFile], cuts: list[int]
) -> None:
    file, counting = opened
    before = counting.bytes_read
    file.read(cuts[10], cuts[12])
    assert file.frames_read == 2
    frames = file.frames[11:13]
    assert counting.bytes_read - before == sum(frame.stored_stop - frame.stored_start for frame in frames)
    file.read(cuts[10] + 1, cuts[12] - 1)
    assert file.frames_read == 2, "what was just decompressed is kept"


def test_many_threads_read_one_file(opened: tuple[SeekableFile, CountingFile], segment: bytes) -> None:
    file, _ = opened
    equal: list[bool] = []

    def read(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(100):
            start = numbers.randrange(len(segment))
            equal.append(file.read(start, start + 3000) == segment[start : start + 3000])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS_MAX)
        assert not thread.is_alive()
    assert equal == [True] * 400


def test_block_with_a_huge_event_becomes_frames_of_bounded_size(tmp_path: Path) -> None:
    plain, cold = tmp_path / "1.binlog", tmp_path / "1.binlog.zst"
    content = bytes(FRAME_BYTES_MAX * 2 + 5)
    plain.write_bytes(content)
    stored = compress_segment(LocalDisk(), plain, cold, [100])
    assert stored == cold.stat().st_size
    with SeekableFile(LocalDisk().open_read(cold), cold.name) as file:
        sizes = [frame.stop - frame.start for frame in file.frames]
        assert max(sizes) <= FRAME_BYTES_MAX
        assert sum(sizes) == len(content)


def test_bit_flipped_anywhere_is_detected(cold: Path, segment: bytes) -> None:
    raw = cold.read_bytes()
    numbers = random.Random(11)
    positions: list[str | None] = []
    for _ in range(60):
        damaged = bytearray(raw)
        log_position = numbers.randrange(len(raw))
        damaged[log_position] ^= 1 << numbers.randrange(8)
        cold.write_bytes(damaged)
        try:
            with SeekableFile(LocalDisk().open_read(cold), cold.name) as file:
                # Some bits of a zstd frame have no meaning; a flip of these must leave the bytes correct.
                assert file.read(0, len(segment)) == segment
        except (ChecksumMismatch, EventMalformed, FileTruncated) as error:
            positions.append(error.position)
    assert len(positions) > 50
    assert all(position is not None and position.startswith(cold.name) for position in positions)


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_truncated_file_is_refused(cold: Path, kept: int) -> None:
    cold.write_bytes(cold.read_bytes()[:kept])
    with pytest.raises(EventMalformed) as refused:
        SeekableFile(LocalDisk().open_read(cold), cold.name)
    assert "zstd -t" in str(refused.value)


def test_file_without_a_seek_table_is_refused(cold: Path, segment: bytes) -> None:
    cold.write_bytes(zstandard.ZstdCompressor().compress(segment))
    with pytest.raises(EventMalformed):
        SeekableFile(LocalDisk().open_read(cold), cold.name)


def test_file_gets_its_name_only_when_it_is_complete(tmp_path: Path, segment: bytes) -> None:
    class Watched(LocalDisk):
        """The real disk, which checks the existing files before each rename."""

        def rename(self, old: Path, new: Path) -> None:
            assert not new.exists()
            with SeekableFile(self.open_read(old), old.name) as file:
                assert file.read(0, file.size) == segment
            super().rename(old, new)

    plain, cold = tmp_path / "1.binlog", tmp_path / "1.binlog.zst"
    plain.write_bytes(segment)
    cold.with_name(cold.name + ".tmp").write_bytes(b"what a crash left behind" * 100_000)
    compress_segment(Watched(), plain, cold, [HEAD_BYTES])
    assert plain.read_bytes() == segment
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.binlog", "1.binlog.zst"]


# --- In a log -----------------------------------------------------------------------------------


def captured() -> SimulatedDisk:
    """A disk with a log of a dozen segments."""
    disk = SimulatedDisk()
    with open_log(disk) as log:
        Captured(log).run()
    return disk


def freeze(disk: SimulatedDisk, log: Log) -> None:
    """Compress every closed segment."""
    for segment in list(log.segments):
        if segment.state == CLOSED:
            make_cold(disk, log.layout, log, segment)


def test_log_of_cold_segments_reads_the_same() -> None:
    disk = captured()
    with open_log(disk) as log:
        freeze(disk, log)
        states = [segment.state for segment in log.segments]
        assert states[:-1] == [COLD] * (len(states) - 1)
        check_log(log, whole=True)
        for record in log.segments:
            with log.open_blocks(record) as (_, blocks):
                assert not blocks.rebuilt
    with open_log(disk) as log:
        check_log(log, whole=True)
        assert [segment.state for segment in log.segments][:-1] == states[:-1]


def test_each_block_of_a_cold_segment_is_one_frame(tmp_path: Path) -> None:
    disk = captured()
    with open_log(disk) as log:
        first = log.segments[0]
        with log.open_blocks(first) as (_, blocks):
            ends = [record["source_end"] - first.base + first.head_bytes for record in blocks.records()]
        freeze(disk, log)
        path = log.layout.segment(first.hour, first.version, cold=True)
        with SeekableFile(disk.open_read(path), path.name) as file:
            assert [frame.stop for frame in file.frames] == [first.head_bytes, *ends]


def test_positions_are_located_in_cold_segments() -> None:
    disk = captured()
    with open_log(disk) as log:
        asked = list(log.segments)
        before = [log.locate_time(segment.time_first_us).position for segment in asked]
        sets = [log.segment_head(segment).gtid_set for segment in asked]
        located = [log.locate_gtid_set(gtid_set).position for gtid_set in sets[1:]]
        freeze(disk, log)
    with open_log(disk) as log:
        assert [log.locate_time(segment.time_first_us).position for segment in asked] == before
        assert [log.locate_gtid_set(gtid_set).position for gtid_set in sets[1:]] == located


def test_power_lost_at_any_step_of_compressing_loses_nothing() -> None:
    disk = captured()
    whole = disk.copy()
    with open_log(whole) as log:
        first_step = len(whole.steps)
        make_cold(whole, log.layout, log, log.segments[0])
        steps = len(whole.steps) - first_step
    assert steps > 8
    for stop in range(steps):
        stopped = disk.copy()
        log = open_log(stopped)
        stopped.stop_at = len(stopped.steps) + stop
        with pytest.raises(PowerLost):
            make_cold(stopped, log.layout, log, log.segments[0])
        for loss in Loss:
            recovered = stopped.after_power_failure(loss, seed=stop)
            with open_log(recovered) as after:
                check_log(after, whole=True)
                freeze(recovered, after)
                check_log(after, whole=True)
            names = [path.name for path in recovered.files()]
            assert not [name for name in names if name.endswith(".tmp")]
            assert len([name for name in names if ".binlog" in name]) == len(after.segments)
