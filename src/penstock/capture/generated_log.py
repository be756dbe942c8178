# SPDX-License-Identifier: Apache-2.0
"""A log whose files Penstock generates: their events are appended to an instance's log as if a server had
sent them.

The files are `stem.000001`, `stem.000002` and so on. Each file ends with a rotation at the first transaction
after 1 GiB.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator

from penstock._native import BlockCutter, tidb_rotation
from penstock.capture.receive import Receiver
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.limits import CAPTURE_CHUNK_BYTES
from penstock.logstore.disk import Buffer
from penstock.logstore.extent import Extent
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position
from penstock.mysql.replica import FIRST_EVENT_OFFSET

# The number of the only epoch of a generated log.
EPOCH = 0
# The server name in rotation and format description events.
SERVER_ID = 1
_ROTATE_CODE = 4

# A file ends at the first transaction after this size, as on a server.
FILE_BYTES_MAX = 1 << 30

# Type and size in an event's header.
EVENT_HEADER = struct.Struct("<4xB4xI6x")


def generated_file(stem: str, number: int) -> str:
    """Return the name of the log file with a number."""
    return f"{stem}.{number:06d}"


def begin_generated_log(
    log: Log, stem: str, server_key: str, flavor: str, version: str, gtid_set: LoggedSet = NO_GTIDS
) -> None:
    """Begin the only epoch of a new log. Raises DiskFailed, LogFull."""
    log.begin_epoch(
        epoch=EPOCH,
        server_key=server_key,
        server_id=SERVER_ID,
        flavor=flavor,
        version=version,
        file=generated_file(stem, 1),
        offset=FIRST_EVENT_OFFSET,
        gtid_set=gtid_set,
    )


class GeneratedLog(ABC):
    """Appends generated events to a log through a receiver. Used by one thread.

    Events are buffered until `flush`, because every append to the log has a cost.
    """

    def __init__(self, log: Log, receiver: Receiver, stem: str, flavor: str) -> None:
        """Continue at the end of the log, or begin its first file. The log's epoch must have begun."""
        self._log = log
        self._receiver = receiver
        self._stem = stem
        self._flavor = flavor
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        visible, epoch = log.visible, log.epoch
        if visible is None:
            gtid_set = NO_GTIDS if epoch is None else epoch.gtid_set
            self._number, self._cutter = 1, self._new_cutter(generated_file(stem, 1), 0, None, gtid_set)
            return
        head = log.head_bytes(EPOCH, visible.file)
        self._number = visible.file_number
        self._cutter = self._new_cutter(visible.file, visible.offset, head, log.gtid_set(visible))
        if _ends_with_rotation(log):
            self._next_file()
        else:
            receiver.resume_file(self._cutter)

    @property
    def offset(self) -> int:
        """Where the next event starts in the file."""
        return self._cutter.offset + self._pending_bytes

    @property
    def position(self) -> Position:
        """Where the next event starts."""
        return Position(EPOCH, generated_file(self._stem, self._number), self.offset)

    def begin_transaction_at(self, time_s: int) -> int:
        """Prepare for the events of a transaction, in a new file if the current file is full; return the
        transaction's offset.

        Raises an error if the log cannot be written.
        """
        if self.offset >= FILE_BYTES_MAX:
            self.flush()
            name = generated_file(self._stem, self._number + 1)
            self._store(tidb_rotation(name, self.offset, server_id=SERVER_ID, time_s=time_s))
            self._next_file()
        if self.offset == 0:
            self._store(self._file_head(time_s))
        return self.offset

    def append(self, events: Buffer) -> None:
        """Add whole events. `flush` stores them; a large amount is stored immediately. Raises any error from
        `flush`.
        """
        self._pending.append(events)
        self._pending_bytes += len(events)
        if self._pending_bytes >= CAPTURE_CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Store the events that were added. Raises an error if the log cannot be written."""
        events, self._pending, self._pending_bytes = self._pending, [], 0
        if events:
            self._store(b"".join(events))

    def _store(self, events: bytes) -> None:
        self._receiver.feed(events, self._cutter)

    @abstractmethod
    def _file_head(self, time_s: int) -> bytes:
        """Return the first bytes of a file: the magic, a format description and any events that must follow
        it.
        """

    def _next_file(self) -> None:
        self._number += 1
        gtid_set = LoggedSet(self._cutter.gtid_set)
        self._cutter = self._new_cutter(generated_file(self._stem, self._number), 0, None, gtid_set)

    def _new_cutter(self, file: str, offset: int, head: bytes | None, gtid_set: LoggedSet) -> BlockCutter:
        return BlockCutter(
            epoch=EPOCH,
            file=file,
            offset=offset,
            flavor=self._flavor,
            live=False,
            gtid_set=gtid_set,
            block_bytes=self._log.settings.block_bytes,
            time_max_us=self._log.time_max_us,
            head=head,
            statements=False,
        )


def _ends_with_rotation(log: LogReader) -> bool:
    """Return whether the last event of a log is a rotation to a file that has not begun."""
    extents = log.extents()
    if not extents:
        return False
    last = extents[-1]
    boundary = max(log.boundary_before(Position(last.epoch, last.file, last.end - 1)), last.start)
    codes = [code for code, _ in scan_events(log, last, boundary, last.end, EVENT_HEADER.size)]
    return codes[-1:] == [_ROTATE_CODE]


def scan_events(
    log: LogReader, extent: Extent, start: int, stop: int, bytes_max: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the type of each event in a range, with at most `bytes_max` bytes of the event."""
    pending, skip = bytearray(), 0
    for view in log.read(extent.epoch, extent.file, start, stop):
        position = 0
        while position < len(view):
            if skip:
                passed = min(skip, len(view) - position)
                skip -= passed
                position += passed
                continue
            needed = EVENT_HEADER.size
            if len(pending) >= needed:
                code, size = EVENT_HEADER.unpack_from(pending)
                needed = min(size, bytes_max)
            taken = view[position : position + needed - len(pending)]
            pending += taken
            position += len(taken)
            if len(pending) < EVENT_HEADER.size:
                continue
            code, size = EVENT_HEADER.unpack_from(pending)
            if len(pending) == min(size, bytes_max):
                yield code, bytes(pending)
                skip = size - len(pending)
                pending.clear()
