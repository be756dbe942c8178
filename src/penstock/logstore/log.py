# SPDX-License-Identifier: Apache-2.0
"""The durable log of one instance: one writer, many readers, and a group commit.

Capture appends what the server sent. It is visible to readers once it is written, and durable once it is
synced: after every append ("block"), by a thread of the log every so many seconds ("seconds"), or where
somebody asks and where a segment ends ("never").
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from penstock.errors import (
    DiskFailed,
    LogFull,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    SourceMissing,
)
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.limits import LOG_SYNC_BYTES_MAX, POSITION_NOTED_BYTES, POSITION_NOTED_SECONDS
from penstock.logstore.disk import Buffer, Disk, LocalDisk
from penstock.logstore.epochs import EpochFile, EpochRecord
from penstock.logstore.index import SegmentIndex
from penstock.logstore.log_status import LogStatus
from penstock.logstore.memory import MemoryMode, MemoryTier
from penstock.logstore.position_file import CapturePosition
from penstock.logstore.reader import LogReader
from penstock.logstore.records import OPEN, SegmentRecord
from penstock.logstore.recovery import recover
from penstock.logstore.schemas import Settler
from penstock.logstore.segment import SegmentReader, index_header
from penstock.logstore.tail import OpenFile, Tail, until
from penstock.logstore.tier import Tier
from penstock.model import Position
from penstock.settings import LogSettings

_log = structlog.get_logger(__name__)


class Log(LogReader):
    """The log in a folder, for the one process that writes it; `open` makes it, the context manager closes.

    `begin_file` and `append` belong to one thread; every other method may be called by any.
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
        # Set by the capture that follows the log's definitions.
        self.settler: Settler | None = None
        if settings.mode == "mixed" and settings.memory_bytes:
            self.memory = MemoryTier(settings.memory_bytes, MemoryMode.MIXED)
        disk.make_folder(folder)
        self._lock = disk.lock(self.layout.lock)
        # Whoever changes the writer holds `_writing`; whoever syncs or closes it holds `_syncing` as well.
        self._writing = threading.RLock()
        self._syncing = threading.RLock()
        self._indexing = threading.Lock()
        self._end = Tail(disk, self.layout, settings, clock)
        self._gtid_set = NO_GTIDS
        self._durable: Position | None = None
        self._noted: tuple[Position | None, float] = (None, 0.0)
        self._unnoted_bytes = 0
        self._retried: tuple[int, int] | None = None
        self._failure: PenstockError | None = None
        self._closed = threading.Event()
        self._sync_thread: threading.Thread | None = None
        self._sync_due = threading.Event()
        self._unsynced = 0
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
        """Open a log for writing, make it where there is none, and put right what a crash left.

        `clock` tells seconds since 1970. With `accept_loss` durable bytes that are gone are read from the
        server again. Raises LogLocked, LogTorn, LogDamaged, LogFull, DiskFailed.
        """
        log = cls(folder, settings or LogSettings(), disk or LocalDisk(), instance, clock, accept_loss)
        if log.settings.fsync == "seconds":
            log._sync_thread = threading.Thread(
                target=log._sync_often, name=f"sync-{log.instance}", daemon=True
            )
            log._sync_thread.start()
        return log

    # --- Where it stands --------------------------------------------------------------------

    @property
    def epoch(self) -> EpochRecord | None:
        """The latest epoch, None in a new log."""
        return self._epochs.latest

    @property
    def durable(self) -> Position | None:
        """The last whole transaction that outlasts a power failure ends here; None before the first."""
        return self._durable

    @property
    def time_max_us(self) -> int:
        """The latest commit time of the log, microseconds UTC since 1970; 0 in an empty one."""
        return self._end.time_max_us

    def status(self) -> LogStatus:
        """Return how the log stands. Never waits for the disk to sync."""
        with self._changed:
            segments, visible, durable = self._index, self._visible, self._durable
            epoch, writer = self._epochs.latest, self._end.writer
        records = [one for one in segments if one.state != OPEN]
        if writer is not None:
            records.append(writer.record())
        return LogStatus(
            epoch=None if epoch is None else epoch.epoch,
            segments=len(records),
            bytes=sum(one.stored_bytes for one in records),
            earliest=self.earliest(),
            visible=visible,
            durable=durable,
            transactions=sum(one.transactions for one in records),
            changes=sum(one.changes for one in records),
        )

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return every GTID before a transaction boundary; see `LogReader.gtid_set`."""
        with self._changed:
            if position == self._visible:
                return self._gtid_set
        return super().gtid_set(position)

    def wait_visible(self, after: Position | None, timeout: float | None = None) -> Position | None:
        """Wait up to `timeout` seconds for whole transactions behind a position; return how far they go.

        None for `after` waits for the first. The answer may lie at or before it: then the time ran out, or
        the log was closed.
        """
        return self._wait(lambda: self._visible, after, timeout)

    def wait_durable(self, after: Position | None, timeout: float | None = None) -> Position | None:
        """The same for what is durable. Raises what a sync in the background has failed with."""
        reached = self._wait(lambda: self._durable, after, timeout)
        self._check()
        return reached

    def _wait(
        self, reached: Callable[[], Position | None], after: Position | None, timeout: float | None
    ) -> Position | None:
        def passed() -> bool:
            now = reached()
            behind = now is not None and (after is None or now > after)
            return behind or self._closed.is_set() or self._failure is not None

        with self._changed:
            self._changed.wait_for(passed, timeout)
            return reached()

    def full_because(self) -> str | None:
        """Return why nothing more should be received now, None while there is room.

        Raises DiskFailed, also for what a sync in the background has failed with.
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
    ) -> EpochRecord:
        """Note, durably, that the bytes from here on are another server's. An epoch may be begun twice.

        Raises PositionInvalid for an epoch that does not follow the latest, LogFull, DiskFailed."""
        with self._writing:
            self._check()
            latest = self._epochs.latest
            if latest is not None and latest.epoch == epoch and latest.server_key == server_key:
                return latest
            if epoch <= (-1 if latest is None else latest.epoch):
                raise PositionInvalid(
                    f"epoch {epoch} does not follow the log's epoch {latest.epoch if latest else 'none'}",
                    position=str(Position(epoch, file, offset)),
                    hint="Begin a new log: move the folder of this one away",
                )
            # Durable before the epoch is: what is lost of the server before could never be asked for again.
            self._finish_segment()
            record = EpochRecord(
                epoch, server_key, server_id, flavor, version, file, offset, gtid_set, self._now_us(), True
            )
            self._change_epochs(self._epochs.add(record))
            return record

    def complete_epoch(self, epoch: int, gtid_set: LoggedSet) -> None:
        """Add, durably, transactions to the set of what came before an epoch: `gtid_set` is from its server's
        log. Raises LogFull, DiskFailed."""
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
        """Say that the next bytes are those of a source file from an offset, a transaction boundary, on.

        Where the log ends there, it goes on in the same segment. A transaction that was not finished is
        dropped: the server sends it again. Anything else begins a new segment, with the first bytes.
        `gtid_set` is what came before. Raises PositionInvalid for a place that the log has passed,
        SequenceGap for bytes that are left out inside a transaction, and what `append` raises.
        """
        place = Position(epoch, file, offset)
        with self._writing:
            self._check()
            self._check_place(place)
            tail = self._end
            tail.check_place(place)
            goes_on = tail.goes_on_at(place)
            if tail.file is not None and tail.file.unfinished:
                self._drop_unfinished()
            if not goes_on:
                self._close_segment()
            tail.file = OpenFile(
                epoch, file, bytes(format_description), server_id, flavor, offset, offset, gtid_set
            )
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
        """Add whole events [start, end) of the file that was begun, and the records of blocks closed since.

        `boundary` is the offset behind the last whole transaction, `gtid_set` what came before that, and
        `time_max_us` the latest commit time. The buffer must not change afterwards: the memory tier keeps
        it. After LogFull make room and append the same again: what was kept is passed over. Raises
        LogFull, SequenceGap for bytes that do not follow, DiskFailed, after which the log must be opened
        anew.
        """
        with self._writing:
            self._check()
            view = memoryview(data).cast("B")
            now = self._end.following(start, end, view.nbytes, self._retried)
            view = view[now.end - start :]
            try:
                cut = self._end.cut_at(boundary)
                if cut is not None:
                    piece, view = view[: cut - now.end], view[cut - now.end :]
                    first = until(records, cut)
                    self._store(now, piece, first, cut, gtid_set, 0)
                    self._close_segment()
                    records = records[len(first) :]
                self._store(now, view, records, boundary, gtid_set, time_max_us)
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
        """Make durable what is visible, and return how far. Raises DiskFailed; then open the log again."""
        with self._syncing:
            self._check()
            with self._changed:
                writer, target, gtid_set = self._end.writer, self._visible, self._gtid_set
            if target == self._durable:
                return target
            try:
                if writer is not None:
                    writer.sync()
            except DiskFailed as problem:
                # What a failed sync has lost is not known before the files are read again.
                self._fail(problem)
                raise
            with self._changed:
                self._durable = target
                self._changed.notify_all()
            self._note(target, gtid_set)
            return target

    def close(self) -> None:
        """Make everything durable, end the segment, and give up the lock. Raises DiskFailed, LogFull."""
        with self._writing:
            if self._closed.is_set():
                return
            try:
                if self._failure is None:
                    self._finish_segment()
            finally:
                self._let_go()
        if self._sync_thread is not None:
            self._sync_thread.join()

    def abandon(self) -> None:
        """Give up the lock and the files as they are; opening the log puts right what was not finished.

        It asks nothing of the disk, and does nothing to a log that is closed.
        """
        with self._writing:
            if not self._closed.is_set():
                self._let_go()
        if self._sync_thread is not None:
            self._sync_thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- What retention, compression and tiering change -------------------------------------

    def replace(self, segment: SegmentRecord) -> None:
        """Replace the L1 record of a version, durably. Raises LogFull, DiskFailed."""
        self._change_index(lambda index: index.put(segment))

    def drop(self, versions: set[int]) -> None:
        """Leave segments out of L1, durably; no reader is sent to them from here on."""

        def without(index: SegmentIndex) -> SegmentIndex:
            return SegmentIndex([one for one in index if one.version not in versions])

        self._change_index(without)
        for version in versions:
            self._heads.pop(version, None)

    # --- Inside: segments -------------------------------------------------------------------

    def _store(
        self,
        now: OpenFile,
        piece: memoryview,
        records: bytes,
        boundary: int,
        gtid_set: LoggedSet,
        time_max_us: int,
    ) -> None:
        """Write events, and make known to readers what they complete."""
        tail = self._end
        if tail.writer is None:
            if not piece.nbytes:
                return
            self._begin_segment()
        start = now.end
        tail.write(piece, records)
        if self.memory is not None and piece.nbytes:
            self.memory.put(
                piece, epoch=now.epoch, file=now.file, start=start, end=now.end, boundary=boundary
            )
        with self._changed:
            self._unnoted_bytes += piece.nbytes
            tail.time_max_us = max(tail.time_max_us, time_max_us)
            if boundary > now.boundary:
                now.boundary, now.gtid_set = boundary, gtid_set
                self._visible, self._gtid_set = now.position(boundary), gtid_set
                self._changed.notify_all()

    def _begin_segment(self) -> None:
        writer = self._end.begin_segment()
        with self._changed:
            self._heads[writer.segment.version] = writer.head
        self._note_index(lambda index: index.put(writer.record()))

    def _finish_segment(self) -> None:
        """End the open segment behind its last whole transaction."""
        now = self._end.file
        if now is not None and now.unfinished:
            self._drop_unfinished()
        self._close_segment()

    def _close_segment(self) -> None:
        """End the open segment: index whole, everything durable, L1 and the noted position up to date."""
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
                self._note_index(lambda index: index.drop(version))
                return
            closed = record
            with self._changed:
                self._durable = target = self._visible
                gtid_set = self._gtid_set
                self._changed.notify_all()
            self._note_index(lambda index: index.put(closed))
            self._note(target, gtid_set, at_once=True)

    def _drop_unfinished(self) -> None:
        """Cut off the transaction that was not finished."""
        with self._syncing:
            self._end.drop_unfinished()
            now = self._end.file
            if self.memory is not None and now is not None:
                self.memory.cut(now.position(now.boundary))

    def _change_epochs(self, epochs: EpochFile) -> None:
        epochs.write(self.disk, self.layout)
        with self._changed:
            self._epochs = epochs

    # --- Inside: the rest -------------------------------------------------------------------

    def _recover(self, accept_loss: bool) -> None:
        self._epochs = EpochFile.load(self.disk, self.layout)
        found = recover(self.disk, self.layout, self.settings.block_bytes, accept_loss=accept_loss)
        # First of all, so that whatever fails from here on lets the writer go.
        self._end.resume(found.writer, found.gtid_set, found.time_max_us)
        self._index = found.index
        self._visible = self._durable = found.position
        self._gtid_set = self._with_epoch(found.position, LoggedSet(found.gtid_set))
        if found.writer is not None:
            self._heads[found.writer.segment.version] = found.writer.head
        if found.position is not None:
            if self.memory is not None:
                self.memory.show(found.position)
            self._note(found.position, self._gtid_set, at_once=True)

    def _keep_blocks(self, reader: SegmentReader, records: bytes) -> None:
        """Put an index that was made again in place of the wrong one. An open segment's grows on as it is."""
        writer = self._end.writer
        if writer is not None and writer.segment.version == reader.segment.version:
            return
        try:
            self.disk.write_atomic(reader.segment.index_path, index_header(reader.head).encode() + records)
        except (LogFull, SourceMissing) as problem:
            # There is no room, or the segment has left: the index in memory serves this reader.
            _log.warning(
                "an index could not be kept", path=str(reader.segment.index_path), reason=str(problem)
            )

    def _check_place(self, place: Position) -> None:
        """Raise PositionInvalid where the log has passed a place, or its epoch has not begun."""
        if self._epochs.get(place.epoch) is None:
            raise PositionInvalid(
                f"epoch {place.epoch} has not begun", position=str(place), hint="Begin the epoch first"
            )
        if self._visible is not None and place < self._visible:
            raise PositionInvalid(
                f"the log has passed this place and goes to {self._visible}",
                position=str(place),
                hint="Go on where the log ends",
            )

    def _note_index(self, change: Callable[[SegmentIndex], SegmentIndex]) -> None:
        """Change L1 where it may fail for want of room: opening the log makes it again from the segments."""
        try:
            self._change_index(change)
        except LogFull as problem:
            _log.warning("the segment index is not up to date", folder=str(self.folder), reason=str(problem))

    def _change_index(self, change: Callable[[SegmentIndex], SegmentIndex]) -> None:
        with self._indexing:
            with self._changed:
                self._index = change(self._index)
            self._index.write(self.disk, self.layout.segments_index)

    def _note(self, position: Position | None, gtid_set: LoggedSet, *, at_once: bool = False) -> None:
        """Note how far the log is durable, not more often than need be."""
        noted, noted_at = self._noted
        if position is None or position == noted:
            return
        clock = time.monotonic()
        due = clock - noted_at >= POSITION_NOTED_SECONDS or self._unnoted_bytes >= POSITION_NOTED_BYTES
        if not (at_once or due):
            return
        try:
            CapturePosition(position, gtid_set, self._now_us()).write(self.disk, self.layout)
        except LogFull as problem:
            # An older note is right as well: recovery reads more of the tail.
            _log.warning("the durable position is not noted", position=str(position), reason=str(problem))
            return
        with self._changed:
            self._unnoted_bytes = 0
        self._noted = position, clock

    def _sync_often(self) -> None:
        """Sync what was appended, again and again, until the log is closed; in a thread of its own."""
        while not self._closed.is_set() and self._failure is None:
            self._sync_due.wait(self.settings.fsync_seconds)
            self._sync_due.clear()
            with self._syncing:
                # It may have been closed while this waited for its turn.
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
        """Raise what an earlier write or sync has failed with: what is on the disk is not known since."""
        assert not self._closed.is_set(), "the log was closed"
        if self._failure is not None:
            raise DiskFailed(
                f"the log in {self.folder} failed before: {self._failure.message}",
                position=self._failure.position,
                hint="Open the log anew, which reads its tail again",
            ) from self._failure

    def _let_go(self) -> None:
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

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)
