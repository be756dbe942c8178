# SPDX-License-Identifier: Apache-2.0
"""A log folder as a source: the files of the captured server, read from segments.

Nothing is written and no lock is taken, so a folder can be read while a daemon writes it. Lookups use the
log's indexes. Only the part of the open segment after its last block is scanned.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PositionInvalid, PositionPurged, SourceMissing
from penstock.gtid_sets import LoggedSet
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.extent import Extent
from penstock.logstore.merge_position import MergePosition
from penstock.logstore.prepared import PreparedFile
from penstock.logstore.reader import LogReader
from penstock.logstore.schemas import SchemaLog
from penstock.logstore.tier import Tier
from penstock.model import Position, TableName
from penstock.schema.history import SchemaHistory
from penstock.source.kept import EpochKey, KeptSource
from penstock.source.source import ByteRange, SourceOptions
from penstock.source.url_disk import ROOT, UrlDisk

_Answer = TypeVar("_Answer")


class LogSource(KeptSource):
    """The log in a local folder or below a URL; see `penstock.source.source.Source`."""

    def __init__(self, options: SourceOptions) -> None:
        self._folder = options.paths[0]
        super().__init__(options, FolderLog.at(self._folder))

    def __str__(self) -> str:
        return f"the log in {self._folder}"


def noted_range(log: LogReader, xid: str) -> ByteRange | None:
    """Return the range of an XA transaction that the log recorded as prepared."""
    prepared = PreparedFile.load(log.disk, log.layout)
    transaction = prepared.find(xid) if prepared is not None else None
    return (
        None
        if transaction is None
        else ByteRange(transaction.epoch, transaction.file, transaction.start, transaction.end, aligned=True)
    )


class FolderLog:
    """A log in a folder, opened read-only; see `penstock.source.kept.KeptLog`.

    It is refreshed for every plan, and whenever a request fails. `tier` is the storage that holds segments
    moved off the disk, if it is known.
    """

    def __init__(self, folder: Path, disk: Disk, tier: Tier | None = None) -> None:
        self._folder = folder
        self._disk = disk
        self._tier = tier
        self._schemas = SchemaLog(folder, SchemaHistory.from_json, disk)
        self._reader: LogReader | None = None

    @classmethod
    def at(cls, location: str) -> "FolderLog":
        """Return the log at a path or a URL. Nothing is accessed yet."""
        if "://" in location:
            return cls(ROOT, UrlDisk(location))
        return cls(Path(location), LocalDisk())

    def close(self) -> None:
        """Drop the cached state. No file is held open."""
        self._reader = None

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key. Raises SourceMissing if there is no log."""
        return [(epoch.epoch, epoch.server_key) for epoch in self._open_reader().epochs.epochs]

    def runs(self) -> list[Extent]:
        """Return the runs of the log, up to the last whole transaction."""
        reader = self._open_reader(refresh=True)
        return reader.extents()

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a boundary, "" if the source has none."""
        return self._ask(lambda reader: reader.gtid_set(position))

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a boundary preceded only by transactions of the set. Raises PositionPurged."""
        return self._open_reader(refresh=True).locate_gtid_set(gtid_set).position

    def locate_time(self, time_us: int) -> Position:
        """Return a boundary before which no commit is at or after the time."""
        return self._open_reader(refresh=True).locate_time(time_us).position

    def merged_ts(self) -> int | None:
        """Return the commit timestamp up to which the log has everything from a TiDB cluster; None for other
        sources.
        """
        merged = MergePosition.load(self._disk, self._folder)
        return None if merged is None else merged.commit_ts

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description. Raises SourceMissing."""
        return self._ask(lambda reader: reader.head_bytes(epoch, file))

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the table definitions in force at a position, as JSON. Raises SchemaUnknown."""
        return self._schemas.in_force(position, name)

    def boundary_before(self, position: Position) -> int:
        """Return the last indexed transaction boundary at or before a position."""
        return self._ask(lambda reader: reader.boundary_before(position))

    def prepared(self, xid: str) -> ByteRange | None:
        """Return the range of an XA transaction that was prepared and had no outcome at the latest survey."""
        return noted_range(self._open_reader(), xid)

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on, up to where the log's copy of the file ends.

        `resume_at` is not used, because there is no connection to lose. Raises PositionPurged if the log
        begins after the position, PositionInvalid if the log ends before the position.
        """

        def find(reader: LogReader) -> tuple[LogReader, Extent]:
            extents = [
                extent
                for extent in reader.extents()
                if (extent.epoch, extent.file) == (start.epoch, start.file)
            ]
            for extent in extents:
                if extent.start <= start.offset <= extent.end and stop <= extent.end:
                    return reader, extent
            raise PositionInvalid(
                f"the log in {self._folder} does not have these bytes, up to {stop}", position=str(start)
            )

        reader, extent = self._ask(find)
        yield from reader.read(extent.epoch, extent.file, start.offset, extent.end)

    def _ask(self, lookup: Callable[[LogReader], _Answer]) -> _Answer:
        """Run a lookup. If it fails, refresh the log and run the lookup again, because the log may have grown
        or been trimmed.
        """
        try:
            return lookup(self._open_reader())
        except (PositionInvalid, PositionPurged, SourceMissing):
            return lookup(self._open_reader(refresh=True))

    def _open_reader(self, *, refresh: bool = False) -> LogReader:
        if self._reader is None:
            self._reader = LogReader.open(self._folder, self._disk)
            self._reader.tier = self._tier
        elif refresh:
            self._reader.refresh()
        return self._reader
