# SPDX-License-Identifier: Apache-2.0
"""The merged log: binlog files that Penstock generates, appended to an instance's log like a server's own.

The files are `tidb-binlog.000001`, `tidb-binlog.000002` and so on. Each ends with a rotation at the first
transaction after 1 GiB. All of it is a function of the transactions and their positions, so a restarted
drainer continues exactly at the log's end.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from penstock._native import BlockCutter, TidbTranscoder, tidb_file_head, tidb_rotation
from penstock.capture.receive import Receiver
from penstock.errors import LogDamaged
from penstock.gtid_sets import NO_GTIDS
from penstock.logstore.disk import Buffer
from penstock.logstore.log import Log
from penstock.logstore.reader import LogExtent, LogReader
from penstock.model import Position
from penstock.mysql.replica import FIRST_EVENT_OFFSET
from penstock.tidb.messages import BinlogKind, encode_binlog, physical_us

EPOCH = 0
SERVER_ID = 1
FLAVOR = "mysql"
VERSION = "8.0.36-TiDB"

# A file ends at the first transaction after this size, as a server's own do.
FILE_BYTES_MAX = 1 << 30

# Type and size in an event's header, and the commit and start timestamps in the event of a commit.
_HEADER = struct.Struct("<4xB4xI6x")
_COMMIT = struct.Struct("<QQQq")
_ANONYMOUS_GTID_CODE, _ROTATE_CODE = 34, 4


def _commit_code() -> int:
    """Return the type of the event of a commit, from a transaction that the kernel writes."""
    transcoder = TidbTranscoder(cluster_id=0, server_id=SERVER_ID)
    payload = encode_binlog(BinlogKind.COMMIT, 1, 1)
    events = b"".join(transcoder.transaction([payload], FIRST_EVENT_OFFSET))
    _, first_size = _HEADER.unpack_from(events)
    code: int = _HEADER.unpack_from(events, first_size)[0]
    return code


_COMMIT_CODE = _commit_code()


def file_name(number: int) -> str:
    """Return the name of the log's file of a number."""
    return f"tidb-binlog.{number:06d}"


def begin_merged_log(log: Log, server_key: str) -> None:
    """Begin the one epoch of a new log that Penstock writes itself. Raises DiskFailed, LogFull."""
    log.begin_epoch(
        epoch=EPOCH,
        server_key=server_key,
        server_id=SERVER_ID,
        flavor=FLAVOR,
        version=VERSION,
        file=file_name(1),
        offset=FIRST_EVENT_OFFSET,
        gtid_set=NO_GTIDS,
    )


def server_key_of(source: int | str) -> str:
    """Return the key under which epochs record a cluster by its id, or the output of TiCDC by its URL."""
    return f"tidb:{source}"


class MergedLog:
    """Appends generated events to a log through a receiver. One thread uses it."""

    def __init__(self, log: Log, receiver: Receiver) -> None:
        """Continue at the end of the log, or begin its first file. The log's epoch has begun."""
        self._log = log
        self._receiver = receiver
        visible = log.visible
        if visible is None:
            self._number, self._cutter = 1, self._new_cutter(file_name(1), 0, None)
            return
        head = log.head_bytes(EPOCH, visible.file)
        self._number = visible.file_number
        self._cutter = self._new_cutter(visible.file, visible.offset, head)
        if end_of_merged_log(log).is_rotated:
            self._next_file()
        else:
            receiver.resume_file(self._cutter)

    @property
    def offset(self) -> int:
        """Where the next event starts in the file."""
        return self._cutter.offset

    @property
    def position(self) -> Position:
        """Where the next event starts."""
        return Position(EPOCH, file_name(self._number), self._cutter.offset)

    def begin_transaction(self, commit_ts: int) -> int:
        """Prepare for the events of a transaction, in a new file if the last is full; return its offset.

        Raises the errors of the log.
        """
        time_s = physical_us(commit_ts) // 1_000_000
        if self._cutter.offset >= FILE_BYTES_MAX:
            name = file_name(self._number + 1)
            self.append(tidb_rotation(name, self._cutter.offset, server_id=SERVER_ID, time_s=time_s))
            self._next_file()
        if self._cutter.offset == 0:
            self.append(tidb_file_head(server_id=SERVER_ID, time_s=time_s))
        return self._cutter.offset

    def append(self, events: Buffer) -> None:
        """Append whole events. Raises the errors of the log."""
        self._receiver.feed(events, self._cutter)

    def _next_file(self) -> None:
        self._number += 1
        self._cutter = self._new_cutter(file_name(self._number), 0, None)

    def _new_cutter(self, file: str, offset: int, head: bytes | None) -> BlockCutter:
        return BlockCutter(
            epoch=EPOCH,
            file=file,
            offset=offset,
            flavor=FLAVOR,
            live=False,
            block_bytes=self._log.settings.block_bytes,
            time_max_us=self._log.time_max_us,
            head=head,
        )


@dataclass(frozen=True)
class MergedEnd:
    """The end of a merged log: its last transaction, and whether its last file has ended."""

    commit_ts: int = 0
    start_ts: int = 0
    is_rotated: bool = False


def end_of_merged_log(log: LogReader) -> MergedEnd:
    """Return the last transaction of a log. Reads its last blocks only.

    Raises LogDamaged, also for a transaction without a commit timestamp: the drainer would log it again.
    """
    last_code: int | None = None
    has_transaction = False
    for extent in reversed(log.extents()):
        stop = extent.end
        while stop > extent.start:
            boundary = log.boundary_before(Position(extent.epoch, extent.file, stop - 1))
            start = max(boundary, extent.start)
            commit: tuple[int, int] | None = None
            code = 0
            for code, event in _scan(log, extent, start, stop):
                has_transaction |= code == _ANONYMOUS_GTID_CODE
                if code == _COMMIT_CODE:
                    commit_ts, start_ts, _, _ = _COMMIT.unpack_from(event, _HEADER.size)
                    commit = commit_ts, start_ts
            last_code = code if last_code is None else last_code
            if commit is not None:
                return MergedEnd(*commit, is_rotated=last_code == _ROTATE_CODE)
            if has_transaction:
                raise LogDamaged(
                    f"the last transaction of {extent.file} has no commit timestamp",
                    position=str(Position(extent.epoch, extent.file, start)),
                    hint="Begin a new log: move the folder of this one away, and read the tables again",
                )
            stop = start
    return MergedEnd(is_rotated=last_code == _ROTATE_CODE)


def _scan(log: LogReader, extent: LogExtent, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the type of each event in a range, with its first bytes."""
    pending, skip = bytearray(), 0
    wanted = _HEADER.size + _COMMIT.size
    for view in log.read(extent.epoch, extent.file, start, stop):
        position = 0
        while position < len(view):
            if skip:
                passed = min(skip, len(view) - position)
                skip -= passed
                position += passed
                continue
            needed = _HEADER.size
            if len(pending) >= needed:
                code, size = _HEADER.unpack_from(pending)
                needed = min(size, wanted)
            taken = view[position : position + needed - len(pending)]
            pending += taken
            position += len(taken)
            if len(pending) < _HEADER.size:
                continue
            code, size = _HEADER.unpack_from(pending)
            if len(pending) == min(size, wanted):
                yield code, bytes(pending)
                skip = size - len(pending)
                pending.clear()
