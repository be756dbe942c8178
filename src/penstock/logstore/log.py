# SPDX-License-Identifier: Apache-2.0
"""The durable log of one instance: one writer, many readers, group commit.

Capture appends the server's events. They are visible to readers once written, and durable once synced:
after every append ("block"), every N seconds by a background thread ("seconds"), or only on request and at
the end of a segment ("never").
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import structlog

from penstock.closing import Closing
from penstock.errors import (
    DiskFailed,
    LogFull,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    ServerBusy,
    SourceMissing,
)
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.limits import LOG_SYNC_BYTES_MAX, POSITION_NOTED_BYTES, POSITION_NOTED_SECONDS
from penstock.logstore.disk import Buffer, Disk, LocalDisk
from penstock.logstore.epochs import EpochFile, EpochRecord
from penstock.logstore.index import SegmentIndex
from penstock.logstore.log_status import LogStatus
from penstock.logstore.memory import MemoryTier
from penstock.logstore.position_file import CapturePosition
from penstock.logstore.reader import LogReader, next_files_version
from penstock.logstore.records import OPEN, SegmentRecord
from penstock.logstore.recovery import recover
from penstock.logstore.schemas import Settler
from penstock.logstore.segment import SegmentReader, index_header
from penstock.logstore.tail import OpenFile, Tail, until
from penstock.logstore.tier import Tier
from penstock.model import Position
from penstock.settings.daemon import LogSettings

_log = structlog.get_logger(__name__)


class Log(LogReader, Closing):
    """The log in a folder, opened for writing by one process. Create it with `open`.

    Only one thread may call `begin_file` and `append`. All other methods are thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        settings: LogSettings,
        disk: Disk,
        instance: str,
        clock: Callable[[], float],
        accept_loss: bool,
    ) -> None:
        super().__init__(disk, folder, settings.block_bytes)
        self.instance = instance or folder.name
        self.settings = settings
        self._clock = clock
        if settings.mode == "memory":
            raise OptionInvalid(
                "a log in a folder keeps files", hint="Set log.mode to mixed, or to file for no memory tier"
            )
        if settings.tier is not None:
            self.tier = Tier(settings.tier, disk, self.layout, writes=True)
        # The capture that tracks the log's table definitions sets the settler.
        self.settler: Settler | None = None
        if settings.mode == "mixed" and settings.memory_bytes:
            self.memory = MemoryTier(settings.memory_bytes)
        disk.make_folder(folder)
        self._lock = disk.lock(self.layout.lock)
        # Changing the writer requires `_writing`. Syncing or closing it also requires `_syncing`.
        self._writing = threading.RLock()
        self._syncing = threading.RLock()
        self._indexing = threading.Lock()
        self._end = Tail(disk, self.layout, settings, clock)
        self.sync_seconds = self._end.sync_seconds
        self._gtid_set = NO_GTIDS
        self._durable: Position | None = None
        self._saved: tuple[Position | None, float] = (None, 0.0)
        self._unsaved_bytes = self._unsynced = 0
        self._retried: tuple[int, int] | None = None
        self._failure: PenstockError | None = None
        self.on_durable: Callable[[], None] = lambda: None  # Called by the syncing thread. Must not block.
        self._closed, self._sync_due = threading.Event(), threading.Event()
        self._sync_thread: threading.Thread | None = None
        # A number that changes whenever segments or epochs change, for readers in other processes.
        self.files_version = next_files_version()
        try:
            self._recover(accept_loss)
        except BaseException:
            self._end.abandon()
            self._lock.close()
            raise

    @classmethod
    def open(  # type: ignore[override]
        cls,
        folder: Path,
        settings: LogSettings | None = None,
        disk: Disk | None = None,
        *,
        instance: str = "",
        clock: Callable[[], float] = time.time,
        accept_loss: bool = False,
    ) -> Self:
        """Open a log for writing, create it if it is missing, and recover it after a crash.

        `clock` returns seconds since 1970. With `accept_loss`, lost durable bytes are read from the server
        again. Raises LogLocked, LogTorn, LogDamaged, LogFull, DiskFailed.
        """
        log = cls(folder, settings or LogSettings(), disk or LocalDisk(), instance, clock, accept_loss)
        if log.settings.fsync == "seconds":
            log._sync_thread = threading.Thread(
                target=log._sync_periodically, name=f"sync-{log.instance}", daemon=True
            )
            log._sync_thread.start()
        return log

    # --- State ------------------------------------------------------------------------------

    @property
    def durable(self) -> Position | None:
        """The end of the last whole transaction that survives a power failure; None before the first such
        transaction.
        """
        return self._durable

    @property
    def in_place(self) -> bool:
        """Whether the log's folder is still the folder that was opened; unknown for a closed log."""
        # Another thread may release the lock at the same time. The lock is then not in place, but the log is
        # closed as well.
        return self._lock.in_place or self._closed.is_set()

    @property
    def time_max_us(self) -> int:
        """The latest commit time in the log, in microseconds UTC since 1970; 0 if the log is empty."""
        return self._end.time_max_us

    def status(self) -> LogStatus:
        """Return the state of the log. Does not wait for a sync."""
        with self._changed:
            segments, visible, durable = self._index, self._visible, self._durable
            epoch, writer = self._epochs.latest, self._end.writer
        open_segment = [] if writer is None else [writer.record()]
        records = [segment for segment in segments if segment.state != OPEN] + open_segment
        return LogStatus(
            epoch=None if epoch is None else epoch.epoch,
            segments=len(records),
            bytes=sum(segment.stored_bytes for segment in records),
            earliest=self.earliest(),
            visible=visible,
            durable=durable,
            time_first_us=next((record.time_first_us for record in records if record.time_first_us), 0),
            transactions=sum(segment.transactions for segment in records),
            changes=sum(segment.changes for segment in records),
        )

    def visible_end(self) -> tuple[Position | None, LoggedSet]:
        """Return the end that readers see now, and all GTIDs before it."""
        with self._changed:
            return self._visible, self._gtid_set

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return all GTIDs before a transaction boundary; see `LogReader.gtid_set`."""
        with self._changed:
            if position == self._visible:
                return self._gtid_set
        return super().gtid_set(position)

    def wait_visible(self, after: Position | None, timeout: float | None = None) -> Position | None:
        """Wait up to `timeout` seconds for whole transactions after a position; return the visible end.

        If `after` is None, waits for the first transaction. After a timeout or a close, the returned end may
        be earlier.
        """

        def passed() -> bool:
            visible = self._visible
            advanced = visible is not None and (after is None or visible > after)
            return advanced or self._closed.is_set() or self._failure is not None

        with self._changed:
            self._changed.wait_for(passed, timeout)
            return self._visible

    def full_because(self) -> str | None:
        """Return why capture should stop receiving, None while there is space.

        Raises DiskFailed, also for a failed background sync.
        """
        self._check()
        free = self.disk.free_bytes(self.folder)
        if free >= self.settings.free_bytes_min:
            return None
        return f"{free} bytes are free below {self.folder}, {self.settings.free_bytes_min} are to stay free"

    # --- Writing ----------------------------------------------------------------------------

    def begin_epoch(
        self,
        *,
        epoch: int,
        server_key: str,
        server_id: int,
        flavor: str,
        version: str,
        file: str,
        offset: int,
        gtid_set: LoggedSet,
        lost: LoggedSet = NO_GTIDS,
    ) -> EpochRecord:
        """Record durably that the following bytes come from another server. Repeating the call is harmless.

        Raises PositionInvalid for an epoch that does not follow the latest epoch, LogFull, DiskFailed.
        """
        source = (server_key, server_id, flavor, version)
        time_us = int(self._clock() * 1_000_000)
        return self.adopt_epoch(EpochRecord(epoch, *source, file, offset, gtid_set, time_us, True, lost))

    def adopt_epoch(self, record: EpochRecord) -> EpochRecord:
        """Record an epoch exactly as the copied log has it; see `begin_epoch`."""
        with self._writing:
            self._check()
            latest = self._epochs.latest
            if latest is not None and (latest.epoch, latest.server_key) == (record.epoch, record.server_key):
                return latest
            if record.epoch <= (-1 if latest is None else latest.epoch):
                raise PositionInvalid(
                    f"epoch {record.epoch} does not follow the log's {latest.epoch if latest else 'none'}",
                    position=str(record.position),
                    hint="Begin a new log: move the folder of this one away",
                )
            # Make the old epoch durable first, because its server can no longer be asked to resend lost
            # bytes.
            self._finish_segment()
            self._change_epochs(self._epochs.add(record))
            return record

    def complete_epoch(self, epoch: int, gtid_set: LoggedSet) -> None:
        """Add transactions from an epoch's server log to the GTID set before the epoch. Raises LogFull,
        DiskFailed.
        """
        with self._writing:
            self._check()
            self._change_epochs(self._epochs.complete(epoch, gtid_set))
            with self._changed:
                self._gtid_set = self._with_epoch(self._visible, self._gtid_set)

    def begin_file(
        self,
        file: str,
        offset: int,
        format_description: bytes,
        gtid_set: LoggedSet,
        *,
        epoch: int,
        server_id: int,
        flavor: str,
    ) -> None:
        """Announce that the next bytes belong to a source file, starting at a transaction boundary.

        If the log ends at that position, the open segment continues. An unfinished transaction is dropped,
        because the server sends it again. Any other position starts a new segment with the first bytes.
        `gtid_set` is the set before the position. Raises PositionInvalid for a position that the log has
        passed, SequenceGap for a position that skips bytes inside a transaction, or any error from `append`.
        """
        position = Position(epoch, file, offset)
        with self._writing:
            self._check()
            self._check_position(position)
            tail = self._end
            tail.check_position(position)
            goes_on = tail.goes_on_at(position)
            if tail.file is not None and tail.file.unfinished:
                self._drop_unfinished()
            if not goes_on:
                self._close_segment()
            head = bytes(format_description)
            tail.file = OpenFile(epoch, file, head, server_id, flavor, offset, offset, gtid_set)
            self._retried = None

    def append(
        self,
        data: Buffer,
        start: int,
        end: int,
        boundary: int,
        records: bytes = b"",
        *,
        time_max_us: int = 0,
        gtid_set: LoggedSet = NO_GTIDS,
    ) -> None:
        """Append whole events [start, end) of the current file, and the records of the blocks that were
        closed since the last append.

        `boundary` is the offset after the last whole transaction, `gtid_set` the set before it, and
        `time_max_us` the latest commit time. The memory tier keeps the buffer, so it must not change
        afterwards. After LogFull, free space and repeat the same call: bytes already stored are skipped.
        Raises LogFull, SequenceGap for bytes that do not follow, and DiskFailed; then reopen the log.
        """
        with self._writing:
            self._check()
            view = memoryview(data).cast("B")
            open_file = self._end.file_following(start, end, view.nbytes, self._retried)
            view = view[open_file.end - start :]
            try:
                cut = self._end.cut_at(boundary)
                if cut is not None:
                    piece, view = view[: cut - open_file.end], view[cut - open_file.end :]
                    first = until(records, cut)
                    self._store(open_file, piece, first, cut, gtid_set, 0)
                    self._close_segment()
                    records = records[len(first) :]
                self._store(open_file, view, records, boundary, gtid_set, time_max_us)
            except LogFull:
                self._retried = start, end
                raise
            except DiskFailed as problem:
                self._fail(problem)
                raise
            self._retried = None
        if self.settings.fsync == "block":
            self.sync()
        self._unsynced += view.nbytes
        if self._unsynced >= LOG_SYNC_BYTES_MAX:
            self._unsynced = 0
            self._sync_due.set()

    def sync(self) -> Position | None:
        """Make the visible transactions durable and return their end. After DiskFailed, reopen the log."""
        with self._syncing:
            self._check()
            with self._changed:
                writer, target, gtid_set = self._end.writer, self._visible, self._gtid_set
            if target == self._durable:
                return target
            try:
                if writer is not None:
                    self._end.sync(writer)
            except DiskFailed as problem:
                self._fail(problem)
                raise
            self._publish_durable(target)
            self._save_position(target, gtid_set)
            return target

    def close(self) -> None:
        """Make everything durable, close the segment and release the lock. Raises DiskFailed, LogFull."""
        with self._writing:
            if self._closed.is_set():
                return
            try:
                if self._failure is None:
                    self._finish_segment()
            finally:
                self._release()
        if self._sync_thread is not None:
            self._sync_thread.join()

    def abandon(self) -> None:
        """Release the lock and leave the files as they are, without disk access; recovery completes them."""
        with self._writing:
            if not self._closed.is_set():
                self._release()
        if self._sync_thread is not None:
            self._sync_thread.join()

    # --- What retention, compression and tiering change -------------------------------------

    def replace(self, segment: SegmentRecord) -> None:
        """Replace the L1 record that has the same version, durably. Raises LogFull, DiskFailed."""
        self._change_index(lambda index: index.put(segment))

    def drop(self, versions: set[int]) -> None:
        """Remove segments from L1, durably. Readers are no longer sent to them."""
        self._change_index(
            lambda index: SegmentIndex([record for record in index if record.version not in versions])
        )
        for version in versions:
            self._heads.pop(version, None)

    # --- Inside: segments -------------------------------------------------------------------

    def _store(
        self,
        file: OpenFile,
        piece: memoryview,
        records: bytes,
        boundary: int,
        gtid_set: LoggedSet,
        time_max_us: int,
    ) -> None:
        """Write events and publish the transactions that they complete."""
        tail = self._end
        if tail.writer is None:
            if not piece.nbytes:
                return
            self._begin_segment()
        start = file.end
        tail.write(piece, records)
        if self.memory is not None and piece.nbytes:
            self.memory.put(piece, epoch=file.epoch, file=file.file, start=start, end=file.end)
        with self._changed:
            self._unsaved_bytes += piece.nbytes
            tail.time_max_us = max(tail.time_max_us, time_max_us)
            if boundary > file.boundary:
                file.boundary, file.gtid_set = boundary, gtid_set
                self._visible, self._gtid_set = file.position(boundary), gtid_set
                self._changed.notify_all()

    def _begin_segment(self) -> None:
        writer = self._end.begin_segment()
        with self._changed:
            self._heads[writer.segment.version] = writer.head
        self._try_change_index(lambda index: index.put(writer.record()))

    def _finish_segment(self) -> None:
        """Close the open segment after its last whole transaction."""
        open_file = self._end.file
        if open_file is not None and open_file.unfinished:
            self._drop_unfinished()
        self._close_segment()

    def _close_segment(self) -> None:
        """Close the open segment: complete index, all data durable, L1 and the saved position up to date."""
        with self._syncing:
            writer = self._end.writer
            if writer is None:
                return
            version = writer.segment.version
            try:
                record = self._end.end_segment()
            except DiskFailed as problem:
                self._fail(problem)
                raise
            if record is None:
                self._heads.pop(version, None)
                self._try_change_index(lambda index: index.drop(version))
                return
            closed = record
            target, gtid_set = self._visible, self._gtid_set
            self._publish_durable(target)
            self._try_change_index(lambda index: index.put(closed))
            self._save_position(target, gtid_set, at_once=True)

    def _drop_unfinished(self) -> None:
        """Cut off the unfinished transaction."""
        with self._syncing:
            self._end.drop_unfinished()
            if self.memory is not None:
                self.memory.clear()

    def _change_epochs(self, epochs: EpochFile) -> None:
        epochs.write(self.disk, self.layout)
        with self._changed:
            self._epochs = epochs
        self.files_version = next_files_version()

    def _publish_durable(self, position: Position | None) -> None:
        with self._changed:
            self._durable = position
            self._changed.notify_all()
        self.on_durable()

    # --- Inside: recovery and syncing -------------------------------------------------------

    def _recover(self, accept_loss: bool) -> None:
        self._epochs = EpochFile.load(self.disk, self.layout)
        recovered = recover(self.disk, self.layout, self.settings.block_bytes, accept_loss=accept_loss)
        # Release the writer first, so that a later failure cannot prevent its release.
        self._end.resume(recovered.writer, recovered.gtid_set, recovered.time_max_us)
        self._index = recovered.index
        self._visible = self._durable = recovered.position
        self._gtid_set = self._with_epoch(recovered.position, LoggedSet(recovered.gtid_set))
        if recovered.writer is not None:
            self._heads[recovered.writer.segment.version] = recovered.writer.head
        if recovered.position is not None:
            self._save_position(recovered.position, self._gtid_set, at_once=True)

    def _keep_blocks(self, reader: SegmentReader, records: bytes) -> None:
        """Replace a damaged index file by a rebuilt one. The index of the open segment is left alone."""
        writer = self._end.writer
        if writer is not None and writer.segment.version == reader.segment.version:
            return
        try:
            self.disk.write_atomic(reader.segment.index_path, index_header(reader.head).encode() + records)
        except (LogFull, SourceMissing) as problem:
            # There is no space to write the index, or the segment was removed. This reader uses the index in
            # memory.
            _log.warning(
                "an index could not be kept", path=str(reader.segment.index_path), reason=str(problem)
            )

    def _check_position(self, position: Position) -> None:
        """Raise PositionInvalid if the log is already past a position, or if the position's epoch has not
        begun.
        """
        if self._epochs.get(position.epoch) is None:
            raise PositionInvalid(
                f"epoch {position.epoch} has not begun", position=str(position), hint="Begin the epoch first"
            )
        if self._visible is not None and position < self._visible:
            raise PositionInvalid(
                f"the log is already past this position, and ends at {self._visible}",
                position=str(position),
                hint="Go on where the log ends",
            )

    def _try_change_index(self, change: Callable[[SegmentIndex], SegmentIndex]) -> None:
        """Change L1, tolerating a full disk: opening the log rebuilds L1 from the segments."""
        try:
            self._change_index(change)
        except LogFull as problem:
            _log.warning("the segment index is not up to date", folder=str(self.folder), reason=str(problem))

    def _change_index(self, change: Callable[[SegmentIndex], SegmentIndex]) -> None:
        with self._indexing:
            if self._closed.is_set():
                # This log is closed, and another writer may have opened it.
                raise ServerBusy(f"the log in {self.folder} was closed")
            with self._changed:
                self._index = change(self._index)
            try:
                self._index.write(self.disk, self.layout.segments_index)
            finally:
                self.files_version = next_files_version()

    def _save_position(
        self, position: Position | None, gtid_set: LoggedSet, *, at_once: bool = False
    ) -> None:
        """Save the durable position, but no more often than necessary."""
        saved, saved_at = self._saved
        if position is None or position == saved:
            return
        clock = time.monotonic()
        due = clock - saved_at >= POSITION_NOTED_SECONDS or self._unsaved_bytes >= POSITION_NOTED_BYTES
        if not (at_once or due):
            return
        try:
            CapturePosition(position, gtid_set, int(self._clock() * 1_000_000)).write(self.disk, self.layout)
        except LogFull as problem:
            # An older saved position is also correct. Recovery then reads more of the tail.
            _log.warning("the durable position is not noted", position=str(position), reason=str(problem))
            return
        with self._changed:
            self._unsaved_bytes = 0
        self._saved = position, clock

    def _sync_periodically(self) -> None:
        """Sync appended data periodically until the log is closed. Runs in its own thread."""
        while not self._closed.is_set() and self._failure is None:
            self._sync_due.wait(self.settings.fsync_seconds)
            self._sync_due.clear()
            with self._syncing:
                # The log may have been closed while this thread waited for the lock.
                if self._closed.is_set():
                    return
                try:
                    self.sync()
                except PenstockError as problem:
                    _log.error("the log is no longer durable", folder=str(self.folder), reason=str(problem))

    def _fail(self, problem: PenstockError) -> None:
        with self._changed:
            self._failure = self._failure or problem
            self._changed.notify_all()

    def _check(self) -> None:
        """Raise the error of an earlier failed write or sync, because the state on disk has been unknown
        since that error.
        """
        assert not self._closed.is_set(), "the log was closed"
        if self._failure is not None:
            raise DiskFailed(
                f"the log in {self.folder} failed before: {self._failure.message}",
                position=self._failure.position,
                hint="Reopen the log, which reads its tail again",
            ) from self._failure

    def _release(self) -> None:
        with self._syncing:
            self._closed.set()
            self._sync_due.set()
            with self._changed:
                self._changed.notify_all()
            try:
                self._end.abandon()
                if self.memory is not None:
                    self.memory.close()
            finally:
                self._lock.close()
