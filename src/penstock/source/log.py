# SPDX-License-Identifier: Apache-2.0
"""A log folder as a source: the files of the server it was captured from, out of segments.

Nothing is written and no lock is needed, so a folder may be read while a daemon writes it. Places are found
through the log's indexes; data is read only behind the last block of the segment that is still open.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from penstock.capture.schema_history import SchemaHistory
from penstock.errors import PositionInvalid, PositionPurged, SourceMissing
from penstock.gtid_sets import LoggedSet
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.prepared import PreparedFile
from penstock.logstore.reader import LogExtent, LogReader
from penstock.logstore.schemas import SchemaLog
from penstock.logstore.tier import Tier
from penstock.model import Position, TableName
from penstock.source.kept import EpochKey, KeptRun, KeptSource
from penstock.source.source import ByteRange, SourceOptions
from penstock.source.url_disk import ROOT, UrlDisk

_Answer = TypeVar("_Answer")


class LogSource(KeptSource):
    """The log in one folder of this host, or below a URL; see `penstock.source.source.Source`."""

    def __init__(self, options: SourceOptions) -> None:
        self._folder = options.paths[0]
        super().__init__(options, FolderLog.at(self._folder))

    def __str__(self) -> str:
        return f"the log in {self._folder}"


def noted_range(log: LogReader, xid: str) -> ByteRange | None:
    """Return where an XA transaction lies that a log notes as prepared."""
    prepared = PreparedFile.load(log.disk, log.layout)
    noted = prepared.find(xid) if prepared is not None else None
    return None if noted is None else ByteRange(noted.epoch, noted.file, noted.start, noted.end, aligned=True)


class FolderLog:
    """A log's folder, read and never written; see `penstock.source.kept.KeptLog`.

    It is looked at again for every plan, and where what was asked is not there as of the last look. `tier` is
    the store to which segments were moved, where it is known.
    """

    def __init__(self, folder: Path, disk: Disk, tier: Tier | None = None) -> None:
        self._folder = folder
        self._disk = disk
        self._tier = tier
        self._schemas = SchemaLog(folder, SchemaHistory.from_json, disk)
        self._reader: LogReader | None = None

    @classmethod
    def at(cls, location: str) -> "FolderLog":
        """Return the log at a path or a URL. Neither is looked at yet."""
        if "://" in location:
            return cls(ROOT, UrlDisk(location))
        return cls(Path(location), LocalDisk())

    def close(self) -> None:
        """Forget what was seen; nothing is held open."""
        self._reader = None

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key. Raises SourceMissing where there is no log."""
        return [(one.epoch, one.server_key) for one in self._looked_at().epochs.epochs]

    def runs(self) -> list[KeptRun]:
        """Return what the log holds, up to the last whole transaction."""
        reader = self._looked_at(again=True)
        return [KeptRun(one.epoch, one.file, one.start, one.end) for one in reader.extents()]

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction before a boundary, "" where the source has none."""
        return self._ask(lambda reader: reader.gtid_set(position))

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a boundary with nothing but the set before it. Raises PositionPurged."""
        return self._looked_at(again=True).locate_gtid_set(gtid_set).position

    def locate_time(self, time_us: int) -> Position:
        """Return a boundary before which nothing was committed at or after the time."""
        return self._looked_at(again=True).locate_time(time_us).position

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description. Raises SourceMissing."""
        return self._ask(lambda reader: reader.head_bytes(epoch, file))

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the definitions in force at a position, as JSON. Raises SchemaUnknown."""
        return self._schemas.in_force(position, name)

    def boundary_before(self, position: Position) -> int:
        """Return the last transaction boundary at or before a position that the index has."""
        return self._ask(lambda reader: reader.boundary_before(position))

    def prepared(self, xid: str) -> ByteRange | None:
        """Return where an XA transaction was prepared that had no outcome when the log was surveyed last."""
        return noted_range(self._looked_at(), xid)

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on, to the end of the log's part of the file.

        No connection can be lost here, so `resume_at` is not asked. Raises PositionPurged where the log
        begins behind the position, PositionInvalid where it ends before it.
        """

        def find(reader: LogReader) -> tuple[LogReader, LogExtent]:
            found = [one for one in reader.extents() if (one.epoch, one.file) == (start.epoch, start.file)]
            for one in found:
                if one.start <= start.offset <= one.end and stop <= one.end:
                    return reader, one
            raise PositionInvalid(
                f"the log in {self._folder} does not have these bytes, up to {stop}", position=str(start)
            )

        reader, extent = self._ask(find)
        yield from reader.read(extent.epoch, extent.file, start.offset, extent.end)

    def _ask(self, question: Callable[[LogReader], _Answer]) -> _Answer:
        """Ask as of the last look, and once more as of now: the log grew, or was trimmed, since."""
        try:
            return question(self._looked_at())
        except (PositionInvalid, PositionPurged, SourceMissing):
            return question(self._looked_at(again=True))

    def _looked_at(self, *, again: bool = False) -> LogReader:
        if self._reader is None:
            self._reader = LogReader.open(self._folder, self._disk)
            self._reader.tier = self._tier
        elif again:
            self._reader.refresh()
        return self._reader
