# SPDX-License-Identifier: Apache-2.0
"""The daemon's own log as a source: the same process, so bytes come from memory while they are there."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from penstock.capture.kept_schemas import kept_schemas, settled_schemas
from penstock.gtid_sets import LoggedSet
from penstock.logstore.log import Log
from penstock.model import Position, TableName
from penstock.source.kept import EpochKey, KeptRun, KeptSource
from penstock.source.log import noted_range
from penstock.source.source import ByteRange, SourceOptions


class OwnLog:
    """A log that this process writes; see `penstock.source.kept.KeptLog`."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._schemas = kept_schemas(log)

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key."""
        return [(one.epoch, one.server_key) for one in self.log.epochs.epochs]

    def runs(self) -> list[KeptRun]:
        """Return what the log holds, up to the last whole transaction."""
        return [KeptRun(one.epoch, one.file, one.start, one.end) for one in self.log.extents()]

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction before a boundary, "" where the source has none."""
        return self.log.gtid_set(position)

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a boundary with nothing but the set before it. Raises PositionPurged."""
        return self.log.locate_gtid_set(gtid_set).position

    def locate_time(self, time_us: int) -> Position:
        """Return a boundary before which nothing was committed at or after the time."""
        return self.log.locate_time(time_us).position

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description. Raises SourceMissing."""
        return self.log.head_bytes(epoch, file)

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the definitions in force at a position, as JSON. Raises SchemaUnknown."""
        return settled_schemas(self.log, self._schemas, position, name, again=again)

    def boundary_before(self, position: Position) -> int:
        """Return the last transaction boundary at or before a position that the index has."""
        return self.log.boundary_before(position)

    def prepared(self, xid: str) -> ByteRange | None:
        """Return where an XA transaction was prepared that had no outcome when the log was surveyed last."""
        return noted_range(self.log, xid)

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on, to the end of the log's part of the file.

        No connection can be lost here, so `resume_at` is not asked.
        """
        end = max(
            (one.end for one in self.log.extents() if (one.epoch, one.file) == (start.epoch, start.file)),
            default=stop,
        )
        yield from self.log.read(start.epoch, start.file, start.offset, max(stop, end))

    def close(self) -> None:
        """The log is the capture's to close."""


class OwnSource(KeptSource):
    """The daemon's own log as a source; see `penstock.source.source.Source`."""

    def __init__(self, instance: str, log: Log) -> None:
        super().__init__(SourceOptions(instance=instance), OwnLog(log))
        self.log = log

    def range_from(self, position: Position) -> tuple[ByteRange, int] | None:
        """Return the range that follows a position in one file, and how far the log goes in it now.

        None where nothing follows yet. The range has no stop: what it grows by belongs to it. Raises
        PositionPurged, PositionInvalid and SequenceGap.
        """
        runs = self._from(self._runs(), position)
        for before, run in itertools.pairwise([None, *runs]):
            assert run is not None, "only the first has nothing before it"
            if before is not None:
                self._check_joined(before, run)
            holds = (run.epoch, run.file) == (position.epoch, position.file)
            begin = max(position.offset, run.start) if holds else run.start
            if begin < run.end:
                repeated = self._repeated(run.epoch)
                return ByteRange(run.epoch, run.file, begin, None, True, repeated), run.end
        return None

    def __str__(self) -> str:
        return f"the log of {self.instance}"
