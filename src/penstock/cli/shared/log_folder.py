# SPDX-License-Identifier: Apache-2.0
"""Which log a verb is about: a folder, or an instance of a settings file; and what its segments hold."""

import os
import pwd
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow
import typer

from penstock._native import GtidSet
from penstock.errors import LogLocked, OptionInvalid, SourceMissing
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.index import BLOCK_BYTES_DEFAULT, SegmentIndex, scan
from penstock.logstore.layout import Layout, is_log_folder
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.records import TIERED, SegmentRecord, block_records
from penstock.logstore.segment import SegmentHead
from penstock.logstore.tier import Tier, TieredNote, note_path
from penstock.model import Position
from penstock.settings.daemon import InstanceSettings, LogSettings, load_settings
from penstock.source.bounds import Bound, parse_bound
from penstock.source.kept import KeptSource
from penstock.source.log import FolderLog
from penstock.source.source import ByteRange, Source, SourceOptions
from penstock.source.walk import TransactionWalk

STATES = ("open", "closed", "cold", "tiered")

_TIME_OF_DAY = re.compile(r"(\d{1,2})(:\d{2}(?::\d{2}(?:\.\d{1,6})?)?)Z?")

# How a command line names a log.
Named = Annotated[
    str | None,
    typer.Argument(metavar="LOG", help="The log's folder, or with --config the name of an instance."),
]
Config = Annotated[
    Path | None, typer.Option(help="The daemon's settings file, which locates the instance's log.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of text.")]

# Tells of a batch of transactions (see `TransactionWalk`) which ones are wanted: an array of booleans.
Wanted = Callable[[pyarrow.RecordBatch], npt.ArrayLike]


@dataclass(frozen=True)
class LogFolder:
    """A log that was named. Settings are there where it was named by them."""

    folder: Path
    instance: str | None = None
    settings: LogSettings | None = None
    instance_settings: InstanceSettings | None = None

    @classmethod
    def find(cls, log: str | None, config: Path | None) -> "LogFolder":
        """Return the log that a command line means. Raises OptionInvalid."""
        if config is None:
            if log is None:
                raise OptionInvalid(
                    "no log is named", hint="Name its folder, or --config penstock.yaml and an instance"
                )
            return cls(Path(log))
        settings = load_settings(config)
        names = sorted(settings.instances)
        if log is None and len(names) == 1:
            log = names[0]
        if log not in settings.instances:
            what = "no instance is named" if log is None else f"{config} has no instance {log!r}"
            raise OptionInvalid(what, hint=f"Its instances are: {', '.join(names)}")
        chosen = settings.log_of(log)
        return cls(chosen.folder, log, chosen, settings.instances[log])

    @property
    def name(self) -> str:
        """What people call the log."""
        return self.instance or str(self.folder)

    def tier(self, disk: Disk) -> Tier | None:
        """Return the store to which segments are moved, where settings name one. Raises DependencyMissing."""
        if self.settings is None or self.settings.tier is None:
            return None
        return Tier(self.settings.tier, disk, Layout(self.folder))

    @property
    def block_bytes(self) -> int:
        """How large blocks are that are made again."""
        return self.settings.block_bytes if self.settings is not None else BLOCK_BYTES_DEFAULT

    def source(self) -> Source:
        """Return the log as a source, for reading its transactions."""
        options = SourceOptions(paths=(str(self.folder),), instance=self.name)
        disk = LocalDisk()
        return KeptSource(options, FolderLog(self.folder, disk, self.tier(disk)))

    def check(self) -> None:
        """Raise SourceMissing where there is no log."""
        if not is_log_folder(self.folder):
            inside = [path.name for path in sorted(self.folder.glob("*")) if is_log_folder(path)]
            raise SourceMissing(
                f"there is no log in {self.folder}",
                hint=f"There is one in each of: {', '.join(str(self.folder / name) for name in inside)}"
                if inside
                else f"Check: ls {self.folder}",
            )

    def open(self, disk: Disk | None = None) -> LogReader:
        """Open the log for reading; no lock is needed. Raises SourceMissing, LogDamaged."""
        self.check()
        reader = LogReader.open(self.folder, disk or LocalDisk())
        reader.tier = self.tier(reader.disk)
        return reader

    def open_for_writing(self) -> Log:
        """Open the log as its daemon does: nobody else writes it, and what a crash left is put right.

        Raises LogLocked, which says how to go on, and what `Log.open` raises.
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
    """Return every segment with its totals, rising.

    A reader takes the newest one to be open. Where L1 says that it was closed, it is as L1 says; else its
    totals are taken from its blocks and what follows them.
    """
    noted = SegmentIndex.load(reader.disk, reader.layout.segments_index) or SegmentIndex([])
    found = []
    for record in reader.segments:
        known = noted.get(record.version)
        if record.source_end == 0 and known is not None and known.source_end == end_of(reader, record):
            record = known
        found.append(record if record.source_end else _counted(reader, record))
    return found


def _counted(reader: LogReader, record: SegmentRecord) -> SegmentRecord:
    with reader.open_blocks(record) as (segment, blocks):
        tail = scan(segment, blocks.indexed_end, blocks.end, time_max_us=record.time_max_us)
        found = block_records(blocks.records().tobytes() + tail.records)
    times = found["time_us"][found["time_us"] > 0]
    return replace(
        record,
        time_first_us=int(times[0]) if len(times) else 0,
        time_max_us=int(found["time_max_us"].max()) if len(found) else record.time_max_us,
        transactions=int(found["transactions"].sum(dtype="u8")),
        changes=int(found["changes"].sum(dtype="u8")),
        server_id=int(found["server_id"][-1]) if len(found) else 0,
    )


def head_of(reader: LogReader, record: SegmentRecord) -> SegmentHead:
    """Return what a segment says of itself; of one in a store from the folder's note of it."""
    if record.state != TIERED:
        return reader.segment_head(record)
    note = TieredNote.load(reader.disk, note_path(reader.layout, record))
    return SegmentHead.parse(note.head, record.epoch)


def end_of(reader: LogReader, record: SegmentRecord) -> int:
    """Return the source offset up to which a segment may be read."""
    visible = reader.visible
    if record.source_end:
        return record.source_end
    here = visible is not None and (visible.epoch, visible.file_number) == (record.epoch, record.file_number)
    return visible.offset if here and visible is not None else record.base


def parse_time(text: str, now: datetime | None = None) -> int:
    """Read a time: ISO 8601, or a time of day, which is the last one that was; without a zone it is UTC.

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
    """Tell whether a text is a time of day, which `parse_time` takes."""
    return _TIME_OF_DAY.fullmatch(text.strip()) is not None


def _time_of(bound: Bound, text: str) -> int:
    if bound.time_us is None:
        raise OptionInvalid(f"{text!r} is no time", hint="Write 14:05:00 or 2026-11-21T14:05:00Z")
    return bound.time_us


def user_name() -> str:
    """Return who runs this: the account, and who became it where that is told."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        # A container may run under a number that no file names.
        name = str(os.getuid())
    behind = os.environ.get("SUDO_USER")
    return f"{behind} as {name}" if behind and behind != name else name


def moment(time_us: int | None) -> datetime | None:
    """Return microseconds since 1970 as a time in UTC, None for 0."""
    if not time_us:
        return None
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)


def first_from(reader: LogReader, source: Source, start: Position, wanted: Wanted) -> Position:
    """Return where the first wanted transaction from `start` on begins, else where the log's piece ends.

    `start` is a transaction boundary. An index points at blocks; this is for an answer to the byte.
    """
    piece = next(one for one in reversed(reader.extents()) if one.first <= start <= one.last)
    if start == piece.last:
        return start
    return (
        first_in(source, ByteRange(start.epoch, start.file, start.offset, piece.end, True), wanted)
        or piece.last
    )


def first_in(source: Source, byte_range: ByteRange, wanted: Wanted) -> Position | None:
    """Return where the first transaction of a range that is wanted begins, None where none is."""
    for batch in TransactionWalk(source, byte_range):
        found = np.flatnonzero(wanted(batch))
        if len(found):
            file, offset = (batch[name][int(found[0])].as_py() for name in ("file", "offset"))
            return Position(byte_range.epoch, file, offset)
    return None


def commit_times(batch: pyarrow.RecordBatch) -> npt.NDArray[np.int64]:
    """Return when each transaction of a batch was committed, microseconds UTC since 1970.

    The column's own buffer: pyarrow's way to numpy, and to scalars, loads pandas, which takes a second.
    """
    column = batch["commit_timestamp"]
    return np.frombuffer(column.buffers()[1], np.int64, len(column), column.offset * 8)


def committed_from(time_us: int) -> Wanted:
    """Want what was committed at or after a time."""
    return lambda batch: commit_times(batch) >= time_us


def outside(gtid_set: str) -> Wanted:
    """Want what is not in a GTID set."""
    known = GtidSet.parse(gtid_set)
    return lambda batch: [
        bool(gtid) and not known.contains(GtidSet.parse(gtid)) for gtid in batch["gtid"].to_pylist()
    ]


def is_gtid(gtid: str) -> Wanted:
    """Want one transaction."""
    return lambda batch: [one == gtid for one in batch["gtid"].to_pylist()]
