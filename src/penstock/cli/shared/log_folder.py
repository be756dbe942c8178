# SPDX-License-Identifier: Apache-2.0
"""Selects a log, by its folder or by an instance in a settings file, and reads the contents of its
segments.
"""

import os
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow

from penstock.errors import LogLocked, OptionInvalid, SourceMissing
from penstock.gtid_sets import LoggedSet, OutsideSet
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.index import BLOCK_BYTES_DEFAULT, SegmentIndex, scan
from penstock.logstore.layout import Layout, is_log_folder
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.records import TIERED, SegmentRecord, block_records
from penstock.logstore.segment import SegmentHead
from penstock.logstore.tier import Tier, TieredNote, note_path
from penstock.model import Position, ServerAddress
from penstock.settings.daemon import InstanceSettings, LogSettings, load_settings
from penstock.source.bounds import Bound, parse_bound
from penstock.source.kept import KeptSource
from penstock.source.log import FolderLog
from penstock.source.source import ByteRange, Source, SourceOptions
from penstock.source.walk import TransactionWalk

_TIME_OF_DAY = re.compile(r"(\d{1,2})(:\d{2}(?::\d{2}(?:\.\d{1,6})?)?)Z?")

# A condition that takes a batch of transactions (see `TransactionWalk`) and returns an array of booleans.
Condition = Callable[[pyarrow.RecordBatch], npt.ArrayLike]


@dataclass(frozen=True)
class LogFolder:
    """The folder of the log that a command line selects. `settings` and `instance_settings` are None unless
    the settings file selected the log.
    """

    folder: Path
    instance: str | None = None
    settings: LogSettings | None = None
    instance_settings: InstanceSettings | None = None

    @classmethod
    def find(cls, log: str | None, config: Path | None) -> "LogFolder":
        """Return the log that the command line selects. Raises OptionInvalid."""
        if config is None:
            if log is None:
                raise OptionInvalid(
                    "no log is named", hint="Name its folder, or --config penstock.yaml and an instance"
                )
            return cls(Path(log))
        settings = load_settings(config, with_secrets=False)
        names = sorted(settings.instances)
        if log is None and len(names) == 1:
            log = names[0]
        if log not in settings.instances:
            problem = "no instance is named" if log is None else f"{config} has no instance {log!r}"
            raise OptionInvalid(problem, hint=f"Its instances are: {', '.join(names)}")
        log_settings = settings.log_of(log)
        return cls(log_settings.folder, log, log_settings, settings.instances[log])

    @property
    def name(self) -> str:
        """The log's name for users."""
        return self.instance or str(self.folder)

    def tier(self, disk: Disk) -> Tier | None:
        """Return the store for tiered segments, if the settings have one. Raises DependencyMissing."""
        if self.settings is None or self.settings.tier is None:
            return None
        return Tier(self.settings.tier, disk, Layout(self.folder))

    def servers(self) -> list[ServerAddress]:
        """Return the servers that the settings name. Raises OptionInvalid for an unreadable password."""
        if self.instance_settings is None:
            return []
        try:
            return self.instance_settings.addresses()
        except ValueError as problem:
            raise OptionInvalid(
                f"the servers of {self.name} cannot be asked: {problem}",
                hint="Make the password of the instance available to this command",
            ) from problem

    @property
    def block_bytes(self) -> int:
        """The block size for rebuilt indexes."""
        return self.settings.block_bytes if self.settings is not None else BLOCK_BYTES_DEFAULT

    def source(self) -> Source:
        """Return the log as a source, for reading its transactions."""
        options = SourceOptions(paths=(str(self.folder),), instance=self.name)
        disk = LocalDisk()
        return KeptSource(options, FolderLog(self.folder, disk, self.tier(disk)))

    def check(self) -> None:
        """Raise SourceMissing if there is no log."""
        if not is_log_folder(self.folder):
            inside = [path.name for path in sorted(self.folder.glob("*")) if is_log_folder(path)]
            raise SourceMissing(
                f"there is no log in {self.folder}",
                hint=f"There is one in each of: {', '.join(str(self.folder / name) for name in inside)}"
                if inside
                else f"Check: ls {self.folder}",
            )

    def open(self, disk: Disk | None = None) -> LogReader:
        """Open the log for reading, without a lock. Raises SourceMissing, LogDamaged."""
        self.check()
        reader = LogReader.open(self.folder, disk or LocalDisk())
        reader.tier = self.tier(reader.disk)
        return reader

    def open_for_writing(self) -> Log:
        """Open the log for writing, as its daemon does: exclusively, and after recovery from a crash.

        Raises LogLocked with a hint on how to continue, and any error from `Log.open`.
        """
        self.check()
        settings = (self.settings or LogSettings()).model_copy(update={"mode": "file", "fsync": "never"})
        try:
            return Log.open(self.folder, settings, instance=self.instance or "")
        except LogLocked as problem:
            raise LogLocked(
                problem.message,
                hint="Stop the daemon (kill -TERM that process), run this again, then: penstock serve",
            ) from problem


def segments_of(reader: LogReader) -> list[SegmentRecord]:
    """Return every segment with its totals, in ascending order.

    A reader treats the newest segment as open. If the L1 index records the segment as closed, use that
    record. Otherwise compute the totals from the segment's blocks and the events after them.
    """
    index = SegmentIndex.load(reader.disk, reader.layout.segments_index) or SegmentIndex([])
    records = []
    for record in reader.segments:
        indexed = index.get(record.version)
        if record.source_end == 0 and indexed is not None and indexed.source_end == end_of(reader, record):
            record = indexed
        records.append(record if record.source_end else _counted(reader, record))
    return records


def _counted(reader: LogReader, record: SegmentRecord) -> SegmentRecord:
    with reader.open_blocks(record) as (segment, blocks):
        tail = scan(segment, blocks.indexed_end, blocks.end, time_max_us=record.time_max_us)
        block_totals = block_records(blocks.records().tobytes() + tail.records)
    times = block_totals["time_us"][block_totals["time_us"] > 0]
    return replace(
        record,
        time_first_us=int(times[0]) if len(times) else 0,
        time_max_us=int(block_totals["time_max_us"].max()) if len(block_totals) else record.time_max_us,
        transactions=int(block_totals["transactions"].sum(dtype="u8")),
        changes=int(block_totals["changes"].sum(dtype="u8")),
        server_id=int(block_totals["server_id"][-1]) if len(block_totals) else 0,
    )


def head_of(reader: LogReader, record: SegmentRecord) -> SegmentHead:
    """Return a segment's head. The head of a tiered segment is in the note that remains in the log's
    folder.
    """
    if record.state != TIERED:
        return reader.segment_head(record)
    note = TieredNote.load(reader.disk, note_path(reader.layout, record))
    return SegmentHead.parse(note.head, record.epoch)


def end_of(reader: LogReader, record: SegmentRecord) -> int:
    """Return the source offset up to which the segment can be read."""
    visible = reader.visible
    if record.source_end:
        return record.source_end
    here = visible is not None and (visible.epoch, visible.file_number) == (record.epoch, record.file_number)
    return visible.offset if here and visible is not None else record.base


def parse_time(text: str, now: datetime | None = None) -> int:
    """Parse a time: ISO 8601, or a time of day, which refers to its most recent occurrence. The default zone
    is UTC.

    Returns microseconds since 1970. Raises OptionInvalid.
    """
    match = _TIME_OF_DAY.fullmatch(text.strip())
    if match is not None:
        now = now or datetime.now(UTC)
        try:
            today = datetime.fromisoformat(f"{now:%Y-%m-%d}T{match[1]:0>2}{match[2]}+00:00")
        except ValueError as problem:
            raise OptionInvalid(f"{text!r} is no time of day", hint="Write 14:05:00") from problem
        return _time_of(parse_bound(today if today <= now else today - timedelta(days=1)), text)
    return _time_of(parse_bound(text), text)


def is_time_of_day(text: str) -> bool:
    """Return whether a text is a time of day, as accepted by `parse_time`."""
    return _TIME_OF_DAY.fullmatch(text.strip()) is not None


def _time_of(bound: Bound, text: str) -> int:
    if bound.time_us is None:
        raise OptionInvalid(f"{text!r} is no time", hint="Write 14:05:00 or 2026-11-21T14:05:00Z")
    return bound.time_us


def user_name() -> str:
    """Return the current user: the account, and the user who switched to this account with sudo."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        # In a container, the user id may have no name. Use the number instead.
        name = str(os.getuid())
    sudo_user = os.environ.get("SUDO_USER")
    return f"{sudo_user} as {name}" if sudo_user and sudo_user != name else name


def moment(time_us: int | None) -> datetime | None:
    """Return microseconds since 1970 as a time in UTC, None for 0."""
    if not time_us:
        return None
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)


def first_from(reader: LogReader, source: Source, start: Position, condition: Condition) -> Position:
    """Search for a matching transaction from `start` on, and return where it begins. If none matches, return
    the end of the contiguous run of the log that contains `start`.

    `start` is a transaction boundary. The index locates blocks; this search is exact to the byte.
    """
    extent = next(extent for extent in reversed(reader.extents()) if extent.first <= start <= extent.last)
    if start == extent.last:
        return start
    return (
        first_in(source, ByteRange(start.epoch, start.file, start.offset, extent.end, True), condition)
        or extent.last
    )


def first_in(source: Source, byte_range: ByteRange, condition: Condition) -> Position | None:
    """Return where the first matching transaction of a range begins, None if there is none."""
    for batch in TransactionWalk(source, byte_range):
        matches = np.flatnonzero(condition(batch))
        if len(matches):
            file, offset = (batch[name][int(matches[0])].as_py() for name in ("file", "offset"))
            return Position(byte_range.epoch, file, offset)
    return None


def commit_times(batch: pyarrow.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the commit time of each transaction in a batch, in microseconds UTC since 1970.

    Uses the column's own buffer: pyarrow's conversion to numpy or scalars imports pandas, which takes a
    second.
    """
    column = batch["commit_timestamp"]
    return np.frombuffer(column.buffers()[1], np.int64, len(column), column.offset * 8)


def committed_from(time_us: int) -> Condition:
    """Match transactions committed at or after a time."""
    return lambda batch: commit_times(batch) >= time_us


def outside(gtid_set: str, before: LoggedSet) -> Condition:
    """Match transactions outside a GTID set. `before` is the set of transactions that precede the matched
    ones in the log.
    """
    is_outside = OutsideSet(gtid_set, before)
    return lambda batch: [is_outside(gtid) for gtid in batch["gtid"].to_pylist()]


def is_gtid(gtid: str) -> Condition:
    """Match the transaction with this GTID."""
    return lambda batch: [transaction == gtid for transaction in batch["gtid"].to_pylist()]
