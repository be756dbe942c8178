# SPDX-License-Identifier: Apache-2.0
"""The log of a merge: the members' transactions, each after an event that records its origin.

    origin (db1, mysql-bin.000003:1542) │ GTID ... XID │ origin (db2, ...) │ GTID ... XID │

The events are those of the members, with other positions and checksums. The origin is an ignorable event, so
every reader skips it. It contains the member's position after the transaction. After a crash, the merged log
itself therefore shows how far each member's log has been read.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock._native import EventMover
from penstock.capture.generated_log import (
    EVENT_HEADER,
    SERVER_ID,
    GeneratedLog,
    begin_generated_log,
    scan_events,
)
from penstock.capture.receive import Receiver
from penstock.errors import EventUnsupported, LogDamaged, PenstockError
from penstock.gtid_sets import LoggedSet
from penstock.logstore.disk import Buffer
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position

STEM = "merged-binlog"
STATE_FILE = "merge.json"

# The type of an event that readers may skip (MySQL's IGNORABLE_LOG_EVENT), and its flag.
_ORIGIN_CODE, _IGNORABLE_FLAG = 28, 0x80
_HEADER = struct.Struct("<IBIIIH")
# The signature of an origin event, followed by the member's epoch and offset, and the lengths of the member's
# name and of the file name.
_ORIGIN = struct.Struct("<8sIQBH")
_MAGIC = b"psmerge1"
_ORIGIN_BYTES_MAX = 1024
_GTID_CODES = frozenset((33, 34, 42, 162))


@dataclass
class MergeState:
    """The positions of all members in a log. They are durable once the log reaches `log_end`.

    `sources` maps the source of a GTID (the server's UUID and tag, or MariaDB's domain) to the member that
    logs the source's transactions.
    """

    log_end: Position | None
    positions: dict[str, Position]
    sources: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, log: LogReader) -> "MergeState | None":
        """Return the recorded state of a log, updated from the log's end; None for a new log.

        Raises LogDamaged.
        """
        path = log.folder / STATE_FILE
        values = unseal_json(log.disk.read(path)) if log.disk.exists(path) else {}
        if not values:
            if log.epoch is None:
                return None
            raise _damaged(f"{path} is missing or damaged, which says what the log has of each member")
        end = values["log_end"]
        state = cls(
            None if end is None else Position.parse(end),
            {member: Position.parse(position) for member, position in values["positions"].items()},
            values["sources"],
        )
        state.positions.update(_origins_after(log, state.log_end))
        return state

    def write(self, log: Log) -> None:
        """Record the state durably. Everything up to `log_end` is durable. Raises LogFull, DiskFailed."""
        values = {
            "log_end": None if self.log_end is None else str(self.log_end),
            "positions": {member: str(position) for member, position in self.positions.items()},
            "sources": self.sources,
        }
        log.disk.write_atomic(log.folder / STATE_FILE, seal_json(values))


def begin_joined_log(log: Log, server_key: str, flavor: str, gtid_set: LoggedSet) -> None:
    """Begin the only epoch of a new log. Raises DiskFailed, LogFull."""
    begin_generated_log(log, STEM, server_key, flavor, "merge", gtid_set)


class JoinedLog(GeneratedLog):
    """Appends the transactions of members to a log. Used by one thread."""

    def __init__(self, log: Log, receiver: Receiver, flavor: str) -> None:
        """Continue at the end of the log, or begin its first file. The log's epoch must have begun
        already.
        """
        self._head = b""
        super().__init__(log, receiver, STEM, flavor)

    def add(self, origin: bytes, events: Iterable[Buffer], mover: EventMover, time_us: int) -> None:
        """Add a transaction, whose events may be in pieces of any size.

        It is stored at once if it is long, otherwise by `flush`. Propagates errors from appending to the log
        and from `EventMover.move_events`.
        """
        if mover.is_mariadb != (self._flavor == "mariadb"):
            raise EventUnsupported(
                f"the merge is of {self._flavor}, and the member has a server of the other kind now",
                hint="Merge servers of one kind: MySQL or MariaDB",
            )
        # The transaction may begin a new file of the log.
        self._head = mover.head
        self.begin_transaction_at(_header_time(time_us))
        pending, before = self._pending, len(self._pending)
        try:
            self._add_events(origin, events, mover, time_us)
        except PenstockError:
            # Earlier transactions are complete. If part of this transaction is stored, the next run drops it.
            del self._pending[before if self._pending is pending else 0 :]
            self._pending_bytes = sum(map(len, self._pending))
            raise

    def _add_events(self, origin: bytes, events: Iterable[Buffer], mover: EventMover, time_us: int) -> None:
        self.append(_event(origin, _header_time(time_us), self.offset))
        partial = bytearray()
        for piece in events:
            if partial:
                partial += piece
                if len(partial) < _first_event_bytes(partial):
                    continue
            content = partial or piece
            moved = mover.move_events(content, self.offset)
            self.append(moved)
            partial = bytearray(memoryview(content)[len(moved) :])
        if partial:
            raise _damaged("a transaction of a member ends inside an event")

    def _file_head(self, time_s: int) -> bytes:
        return self._head


def encode_origin(member: str, position: Position) -> bytes:
    """Return the body of an origin event: the transaction's member, and where the transaction ends in the
    member's log.
    """
    name, file = member.encode(), position.file.encode()
    head = _ORIGIN.pack(_MAGIC, position.epoch, position.offset, len(name), len(file))
    return head + name + file


def _decode_origin(event: bytes) -> tuple[str, Position] | None:
    """Return the member and its position; None for an ignorable event of another kind."""
    body = event[_HEADER.size : -4]
    if len(body) < _ORIGIN.size or not body.startswith(_MAGIC):
        return None
    _, epoch, offset, name_bytes, file_bytes = _ORIGIN.unpack_from(body)
    names = body[_ORIGIN.size :]
    file = names[name_bytes : name_bytes + file_bytes].decode()
    return names[:name_bytes].decode(), Position(epoch, file, offset)


def _header_time(time_us: int) -> int:
    """Return a time in seconds, limited to the 32 bits of an event header."""
    return min(time_us // 1_000_000, 0xFFFFFFFF)


def _event(body: bytes, time_s: int, offset: int) -> bytes:
    size = _HEADER.size + len(body) + 4
    end = (offset + size) & 0xFFFFFFFF
    event = _HEADER.pack(time_s, _ORIGIN_CODE, SERVER_ID, size, end, _IGNORABLE_FLAG) + body
    return event + zlib.crc32(event).to_bytes(4, "little")


def _first_event_bytes(content: Buffer) -> int:
    """Return the length of the first event, or of an event header while the header is incomplete."""
    size: int = (
        EVENT_HEADER.unpack_from(content)[1] if len(content) >= EVENT_HEADER.size else EVENT_HEADER.size
    )
    return size


def _origins_after(log: LogReader, position: Position | None) -> Mapping[str, Position]:
    """Return the last position of each member among the transactions after a position of a log."""
    visible = log.visible
    if position is not None and (visible is None or visible < position):
        raise _damaged(f"the log ends at {visible}, before {position}, which was durable")
    origins: dict[str, Position] = {}
    pending: tuple[str, Position] | None = None
    for code, event in _events_after(log, position):
        if code == _ORIGIN_CODE:
            pending = _decode_origin(event)
        elif code in _GTID_CODES:
            # Without an origin before its GTID, the member of a transaction is unknown.
            if pending is None:
                raise _damaged("a transaction of the log does not name its member")
            # The transaction follows its origin. A crash may have left an origin without a transaction.
            origins[pending[0]] = pending[1]
            pending = None
    return origins


def _events_after(log: LogReader, position: Position | None) -> Iterator[tuple[int, bytes]]:
    for extent in log.extents():
        start = extent.start
        if position is not None:
            if extent.last <= position:
                continue
            start = max(start, position.offset) if extent.file == position.file else start
        yield from scan_events(log, extent, start, extent.end, _ORIGIN_BYTES_MAX)


def _damaged(message: str) -> LogDamaged:
    return LogDamaged(message, hint="Begin a new log: move its folder away, and read the tables again")
