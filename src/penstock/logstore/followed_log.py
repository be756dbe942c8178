# SPDX-License-Identifier: Apache-2.0
"""Serves a log that another process of the same host writes.

The writer reports each change, and `FollowedLog.apply` makes the change visible to the serving process.
Reading needs neither a lock nor the writer, so readers continue while the writer is down.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import LogDamaged, PositionPurged, SourceMissing
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.limits import FOLLOWED_BYTES_MAX
from penstock.logstore.confirmed_log import ConfirmedLog
from penstock.logstore.disk import LocalDisk
from penstock.logstore.holds import share_holds
from penstock.logstore.index import SegmentIndex
from penstock.logstore.log import Log
from penstock.logstore.memory import MemoryTier
from penstock.logstore.reader import LogReader, next_files_version
from penstock.logstore.records import SegmentRecord
from penstock.logstore.schemas import Settling
from penstock.logstore.segment import SegmentReader
from penstock.logstore.tier import Tier
from penstock.model import Position
from penstock.settings.daemon import LogSettings


@dataclass(frozen=True)
class LogReport:
    """The state of a log that has been made visible by its writer, or by a process that follows the log.

    `files` is a number that changes whenever the log's segments or epochs change.
    """

    files: int
    visible: Position | None
    durable: Position | None
    gtid_set: LoggedSet
    time_max_us: int

    @classmethod
    def of(cls, log: "ServedLog") -> "LogReport":
        """Return the report of a log."""
        # A process that follows the files would see unconfirmed data, so the settings allow no such process
        # for a log with confirmation.
        assert not isinstance(log, ConfirmedLog), "a log that is served when durable has no other process"
        visible = log.visible
        gtid_set = NO_GTIDS if visible is None else log.gtid_set(visible)
        durable, time_max_us = log.durable, log.time_max_us
        # Read the version of the files last: an earlier version might not have the segment that contains
        # `visible`.
        return cls(log.files_version, visible, durable, gtid_set, time_max_us)


class FollowedLog(LogReader):
    """A log as last reported by its writer. Only one thread calls `apply`; everything else is thread-safe.

    `settler` resolves doubtful table definitions in the process that writes the log. The newest bytes are
    kept in memory, just as the writer keeps them. Raises LogDamaged, DiskFailed.
    """

    def __init__(self, settings: LogSettings, settler: Settling | None = None) -> None:
        super().__init__(LocalDisk(), settings.folder, settings.block_bytes)
        self.settings = settings
        self.settler = settler
        self.durable: Position | None = None
        self.time_max_us = 0
        if settings.tier is not None:
            self.tier = Tier(settings.tier, self.disk, self.layout, writes=False)
        if settings.mode == "mixed" and settings.memory_bytes:
            self.memory = MemoryTier(settings.memory_bytes)
        share_holds(self.layout)
        # The writer's lock file. If the folder is replaced, the new folder has a different lock file.
        self._lock_there = self._stat_lock()
        # The version of the files, for processes that follow this log.
        self.files_version = next_files_version()
        self._refreshing = threading.RLock()
        self._files: int | None = None
        self._gtids: tuple[Position | None, LoggedSet] = None, NO_GTIDS
        # The newest segment, open for reading.
        self._newest: tuple[SegmentRecord, SegmentReader] | None = None
        self.refresh()

    @property
    def in_place(self) -> bool:
        """Whether the log's folder is still the folder that was opened."""
        return self._lock_there in (None, self._stat_lock())

    def _stat_lock(self) -> tuple[int, int] | None:
        try:
            stat = self.layout.lock.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def apply(self, report: LogReport) -> None:
        """Make visible what the writer has reported. Raises LogDamaged, SourceMissing, DiskFailed."""
        with self._refreshing:
            if report.files != self._files:
                # Another writer may have truncated the end of the log.
                self._close_newest()
                self.refresh()
                self._files, self.files_version = report.files, next_files_version()
            before, visible = self._visible, report.visible
            if visible is not None and (before is None or visible > before):
                self._keep(before, visible)
                self._visible = visible
            self._gtids = visible, report.gtid_set
            self.durable, self.time_max_us = report.durable, report.time_max_us

    def forget_writer(self) -> None:
        """Expect reports from another writer, whose file versions are not comparable to the last writer's."""
        with self._refreshing:
            self._files = None

    def refresh(self) -> Position | None:
        """Load newly written data and return the end of the whole transactions. Raises LogDamaged."""
        # Everything that the writer has reported is in the files, so the visible end never moves backward.
        with self._refreshing:
            before, visible = self._visible, super().refresh()
            if visible is not None and visible != before and self.memory is not None:
                self.memory.clear()
            return visible

    def earliest_on_disk(self) -> Position | None:
        """Return the start of the oldest segment that still exists, even if the last report listed segments
        that were removed since.

        The result stays correct while the holds are locked, because segments are removed under the same lock.
        Raises LogDamaged.
        """
        with self._refreshing:
            stored = SegmentIndex.load(self.disk, self.layout.segments_index)
            # Loading everything would drop the bytes in memory.
            if not stored or not self._index or stored[0].version != self._index[0].version:
                self.refresh()
            return self.earliest()

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return all GTIDs before a transaction boundary; see `LogReader.gtid_set`."""
        reported, gtid_set = self._gtids
        return gtid_set if position == reported else super().gtid_set(position)

    def close(self) -> None:
        """Close the files and free the memory."""
        with self._refreshing:
            self._close_newest()
            if self.memory is not None:
                self.memory.close()

    # --- Inside -----------------------------------------------------------------------------

    def _keep(self, before: Position | None, visible: Position) -> None:
        """Keep the newly visible bytes in memory if there are few, because most readers are at the end of the
        log.
        """
        memory = self.memory
        if memory is None:
            return
        if (
            before is not None
            and (before.epoch, before.file) == (visible.epoch, visible.file)
            and visible.offset - before.offset <= FOLLOWED_BYTES_MAX
        ):
            with suppress(LogDamaged, PositionPurged, SourceMissing):
                data = self._newest_reader(before).read_bytes(before.offset, visible.offset)
                memory.put(
                    data, epoch=visible.epoch, file=visible.file, start=before.offset, end=visible.offset
                )
                return
        # The new bytes are not in memory, so readers read them from the files.
        memory.clear()

    def _newest_reader(self, position: Position) -> SegmentReader:
        """Return the open segment that bytes from a position on are appended to. Raises PositionPurged."""
        record = self._segment_before(position)
        if record is None:
            raise self._purged(position)
        if self._newest is None or self._newest[0].version != record.version:
            self._close_newest()
            self._newest = record, self._open(record)
        return self._newest[1]

    def _close_newest(self) -> None:
        if self._newest is not None:
            self._newest[1].close()
            self._newest = None

    def _open(self, record: SegmentRecord) -> SegmentReader:
        return self._open_current(record, self.refresh)


# Any log that the listeners read, whichever process writes it.
ServedLog = Log | FollowedLog | ConfirmedLog
