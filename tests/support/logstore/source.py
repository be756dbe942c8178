# SPDX-License-Identifier: Apache-2.0
"""Real binlog files as the source of a capture, and the invariants of every log captured from them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from penstock._native import BlockCutter, CutCounts
from penstock.logstore.disk import Disk
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.records import TIERED, BlockRecord, block_records
from penstock.logstore.recovery import segment_record
from penstock.model import Position
from penstock.settings.daemon import LogSettings
from tests.support.logstore.disk import SimulatedDisk

LOGS = Path(__file__).parents[3] / "native/kernel/tests/logs"
FOLDER = Path("/log")
BLOCK_BYTES = 400
SETTINGS = LogSettings().model_copy(
    update={"segment_bytes": 1500, "block_bytes": BLOCK_BYTES, "fsync": "never", "memory_bytes": 0}
)
# 2023-11-21 11:00:00 UTC, in the past on every machine that runs the tests.
TIME_S = 1700564400.0


@dataclass(frozen=True)
class SourceFile:
    """One binlog file of one epoch."""

    epoch: int
    flavor: str
    name: str
    content: bytes
    gtid_set: str
    time_max_us: int

    def cutter(
        self,
        offset: int = 0,
        gtid_set: str | None = None,
        time_max_us: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        head: bytes | None = None,
        counts: CutCounts | None = None,
    ) -> BlockCutter:
        """Return a cutter that starts at an offset of the file."""
        first = 4 + int.from_bytes(self.content[13:17], "little")
        return BlockCutter(
            epoch=self.epoch,
            file=self.name,
            offset=offset,
            flavor=self.flavor,
            live=False,
            gtid_set=self.gtid_set if gtid_set is None else gtid_set,
            block_bytes=block_bytes,
            time_max_us=self.time_max_us if time_max_us is None else time_max_us,
            head=(head or self.content[:first]) if offset else None,
            counts=counts,
        )


@cache
def server_files() -> tuple[SourceFile, ...]:
    """Return the files of a MySQL server, then those of a MariaDB server that replaced it."""
    families = [
        (0, "mysql", "mysql-bin", [f"mysql-9.7-{number}" for number in (1, 2, 3)]),
        (1, "mariadb", "mariadb-bin", [f"mariadb-11.8-{number}" for number in (1, 2)]),
    ]
    files: list[SourceFile] = []
    time_max_us = 0
    for epoch, flavor, stem, names in families:
        gtid_set = ""
        for number, name in enumerate(names, 1):
            content = (LOGS / f"{name}.binlog").read_bytes()
            file = SourceFile(epoch, flavor, f"{stem}.{number:06d}", content, gtid_set, time_max_us)
            files.append(file)
            cutter = file.cutter()
            feed_whole(cutter, content)
            gtid_set, time_max_us = cutter.gtid_set, cutter.time_max_us
    return tuple(files)


@cache
def boundaries() -> dict[Position, str]:
    """Return every transaction boundary of the source, with the GTID set before it."""
    sets: dict[Position, str] = {}
    for file in server_files():
        cutter = file.cutter()
        at = 0
        while at < len(file.content):
            size = 4 if at == 0 else int.from_bytes(file.content[at + 9 : at + 13], "little")
            taken = cutter.feed(file.content[at : at + size])
            assert taken == size
            if cutter.state == "file":
                cutter.take_file()
            at += size
            if not cutter.in_transaction and at > 4:
                sets[Position(file.epoch, file.name, at)] = cutter.gtid_set
    return sets


def feed_whole(cutter: BlockCutter, content: bytes) -> None:
    """Feed a file to a cutter, which keeps its output."""
    at = 0
    while at < len(content):
        at += cutter.feed(content[at:])
        if cutter.state == "file":
            cutter.take_file()


@dataclass
class Captured:
    """Captures the source into a log in pieces, starting at the current end of the log.

    `each` is called after every piece, and may change the log. `synced` is the position up to which the log
    has reported that it is durable.
    """

    log: Log
    piece_bytes: int = 700
    each: Callable[["Captured", int], None] = lambda captured, count: None
    synced: Position | None = None
    count: int = 0

    def run(self) -> None:
        """Append all bytes that are missing from the log."""
        for file in self._left():
            self._append_file(file)

    def sync(self) -> None:
        """Sync, and record the durable position."""
        self.synced = self.log.sync()

    def _left(self) -> Iterator[SourceFile]:
        for file in server_files():
            head = self._head()
            if head is None or (file.epoch, file.name) >= (head.epoch, head.file):
                yield file

    def _head(self) -> Position | None:
        epoch, visible = self.log.epoch, self.log.visible
        if epoch is None:
            return None
        return visible if visible is not None and visible.epoch == epoch.epoch else epoch.position

    def _append_file(self, file: SourceFile) -> None:
        log, head = self.log, self._head()
        if head is None or head.epoch < file.epoch:
            log.begin_epoch(
                epoch=file.epoch,
                server_key=f"{file.flavor}:{file.epoch}",
                server_id=7,
                flavor=file.flavor,
                version="test",
                file=file.name,
                offset=4,
                gtid_set="",
            )
        at = head.offset if head is not None and (head.epoch, head.file) == (file.epoch, file.name) else 0
        if at <= 4:
            cutter, at = file.cutter(), 0
        else:
            position = Position(file.epoch, file.name, at)
            cutter = file.cutter(at, log.gtid_set(position), log.time_max_us)
            self._begin(cutter)
        while at < len(file.content):
            taken = 0
            size = self.piece_bytes
            while not taken and cutter.state == "input":
                taken = cutter.feed(file.content[at : at + size])
                size *= 2
            at += taken
            if cutter.state == "file":
                cutter.take_file()
                self._begin(cutter)
            self._append(cutter)

    def _begin(self, cutter: BlockCutter) -> None:
        flavor = "mariadb" if cutter.file.startswith("mariadb") else "mysql"
        epoch = 1 if flavor == "mariadb" else 0
        self.log.begin_file(
            cutter.file,
            cutter.offset,
            cutter.format_description,
            cutter.gtid_set,
            epoch=epoch,
            server_id=7,
            flavor=flavor,
        )

    def _append(self, cutter: BlockCutter) -> None:
        if cutter.gathered:
            start, end, boundary = cutter.data_start, cutter.data_end, cutter.boundary
            self.log.append(
                cutter.take_data(),
                start,
                end,
                boundary,
                cutter.take_records(),
                time_max_us=cutter.time_max_us,
                gtid_set=cutter.gtid_set,
            )
            self.count += 1
            self.each(self, self.count)


def open_log(disk: Disk, clock: Callable[[], float] = lambda: TIME_S) -> Log:
    """Open the log of the tests on a disk."""
    return Log.open(FOLDER, SETTINGS, disk, clock=clock)


@cache
def _recorded_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        Captured(log).run()
    return disk


def recorded_disk() -> SimulatedDisk:
    """Return a separate disk with a closed log of two epochs and a dozen segments."""
    return _recorded_disk().copy()


# --- What must hold ---------------------------------------------------------------------------


def check_log(log: LogReader, *, whole: bool = False) -> None:
    """Assert that the log is a contiguous copy of the source up to a transaction boundary, and that its
    indexes are valid.
    """
    extents, visible = log.extents(), log.visible
    if visible is None:
        assert not extents
        assert not whole
        return
    assert boundaries()[visible] == log.gtid_set(visible)
    files = [(file.epoch, file.name) for file in server_files()]
    content = {(file.epoch, file.name): file.content for file in server_files()}
    assert [(extent.epoch, extent.file) for extent in extents] == [
        file for file in files if (extents[0].epoch, extents[0].file) <= file <= (visible.epoch, visible.file)
    ]
    for this_extent in extents:
        source = content[this_extent.epoch, this_extent.file]
        assert (
            b"".join(log.read(this_extent.epoch, this_extent.file, this_extent.start, this_extent.end))
            == source[this_extent.start : this_extent.end]
        )
        first = 4 + int.from_bytes(source[13:17], "little")
        assert log.head_bytes(this_extent.epoch, this_extent.file) == source[:first]
        assert this_extent is extents[0] or this_extent.start == first
        assert this_extent.last == visible or this_extent.end == len(source)
    if whole:
        assert (visible.file, visible.offset) == (server_files()[-1].name, len(server_files()[-1].content))
    check_indexes(log)


def check_indexes(log: LogReader) -> None:
    """Assert that both indexes agree with the data."""
    files = {(file.epoch, file.name): file for file in server_files()}
    time_max_us = None
    for record in log.segments:
        with log.open_blocks(record) as (reader, blocks):
            file = files[reader.head.epoch, reader.head.file]
            assert reader.head.gtid_set == boundaries().get(reader.head.position, file.gtid_set)
            stored = blocks.records().tobytes()
            assert blocks.indexed_end == blocks.end or record.source_end == 0
            before = file.time_max_us if time_max_us is None else time_max_us
            # This cutter closes no block by itself.
            cutter = file.cutter(record.base, reader.head.gtid_set, time_max_us, block_bytes=1 << 30)
            position = record.base
            for index in range(len(blocks)):
                stop = blocks.record(index).source_end
                assert cutter.feed(file.content[position:stop]) == stop - position
                cutter.close_block()
                position = stop
            rebuilt = cutter.take_records()
            # Without the removed segments before it, the first segment cannot know the latest commit time.
            if time_max_us is not None or record.base == len(reader.head.file_head):
                assert_same_blocks(rebuilt, stored, record.base)
            if record.source_end and record.state != TIERED and time_max_us is not None:
                assert segment_record(log.disk, reader.segment, BLOCK_BYTES, before) == record
            time_max_us = cutter.time_max_us


def assert_same_blocks(rebuilt: bytes, stored: bytes, base: int) -> None:
    """Assert that the records are equal, but allow a different or unknown start of each GTID run."""
    assert len(rebuilt) == len(stored)
    for first, other in zip(block_records(rebuilt), block_records(stored), strict=True):
        left, right = BlockRecord.of(first), BlockRecord.of(other)
        assert replace(left, sequence_start=0) == replace(right, sequence_start=0)
        if left.sequence_start and right.sequence_start:
            assert max(right.sequence_start, base) >= left.sequence_start
