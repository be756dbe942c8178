# SPDX-License-Identifier: Apache-2.0
"""The daemon's own log as a source, which is read in the same process, and from memory if possible."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from penstock.capture.kept_schemas import kept_schemas, settled_schemas
from penstock.gtid_sets import LoggedSet
from penstock.logstore.extent import Extent
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.merge_position import MergePosition
from penstock.model import Position, TableName
from penstock.serve.threads import prove_wanted
from penstock.source.kept import EpochKey, KeptSource
from penstock.source.log import noted_range
from penstock.source.source import ByteRange, SourceOptions


class OwnLog:
    """A log that this process writes; see `penstock.source.kept.KeptLog`."""

    def __init__(self, log: ServedLog) -> None:
        self.log = log
        self._schemas = kept_schemas(log)

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key."""
        return [(epoch.epoch, epoch.server_key) for epoch in self.log.epochs.epochs]

    def runs(self) -> list[Extent]:
        """Return the runs of the log, up to the last whole transaction."""
        return self.log.extents()

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a boundary, "" if the source has none."""
        return self.log.gtid_set(position)

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a boundary preceded only by transactions of the set. Raises PositionPurged."""
        return self.log.locate_gtid_set(gtid_set).position

    def locate_time(self, time_us: int) -> Position:
        """Return a boundary before which no commit is at or after the time."""
        return self.log.locate_time(time_us).position

    def merged_ts(self) -> int | None:
        """Return the commit timestamp of a TiDB cluster up to which the log has everything; else None."""
        merged = MergePosition.load(self.log.disk, self.log.folder)
        return None if merged is None else merged.commit_ts

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description. Raises SourceMissing."""
        return self.log.head_bytes(epoch, file)

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the table definitions in force at a position, as JSON. Raises SchemaUnknown."""
        return settled_schemas(self.log, self._schemas, position, name, again=again)

    def boundary_before(self, position: Position) -> int:
        """Return the last indexed transaction boundary at or before a position."""
        return self.log.boundary_before(position)

    def prepared(self, xid: str) -> ByteRange | None:
        """Return the range of an XA transaction that was prepared and had no outcome at the latest survey."""
        return noted_range(self.log, xid)

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on, up to where the log's copy of the file ends.

        `resume_at` is not used, because there is no connection to lose. Raises CancelledError in an abandoned
        search.
        """
        end = max(
            (
                extent.end
                for extent in self.log.extents()
                if (extent.epoch, extent.file) == (start.epoch, start.file)
            ),
            default=stop,
        )
        for buffer in self.log.read(start.epoch, start.file, start.offset, max(stop, end)):
            prove_wanted()
            yield buffer

    def close(self) -> None:
        """Do nothing: capture closes the log."""


class OwnSource(KeptSource):
    """The daemon's own log as a source; see `penstock.source.source.Source`."""

    def __init__(self, instance: str, log: ServedLog) -> None:
        super().__init__(SourceOptions(instance=instance), OwnLog(log))
        self.log = log

    def range_from(self, position: Position) -> tuple[ByteRange, int] | None:
        """Return the range that follows a position in one file, and its current end.

        None if nothing follows yet. The range has no stop, so later bytes belong to it. Raises
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
                byte_range = ByteRange(run.epoch, run.file, begin, None, True)
                return self._with_earlier_gtids(byte_range), run.end
        return None

    def __str__(self) -> str:
        return f"the log of {self.instance}"
