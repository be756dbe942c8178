# SPDX-License-Identifier: Apache-2.0
"""Where to start reading a server's log: for an empty log, and on a different server.

A file position is valid on one server only. On a different server, the position is located by GTIDs: a binlog
dump that excludes a GTID set begins with the first transaction outside that set. Without GTIDs the position
is located by time. That is not exact, so a note says which transactions may be repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock._native import GtidSet
from penstock.errors import ConnectionLost, PositionInvalid, ServerBehind
from penstock.gtid_sets import LoggedSet
from penstock.model import Position
from penstock.mysql.connection import Connection
from penstock.mysql.refusal import check_gtid_set, check_position
from penstock.mysql.replica import DUMP_OFFSET_MAX, FIRST_EVENT_OFFSET, DumpStart, open_stream

_EVENT_HEADER_BYTES = 19
_TYPE_AT = 4
_LENGTH_AT = slice(9, 13)
_END_AT = slice(13, 17)
_ROTATE_EVENT = 4
# The events that start a transaction: MySQL's GTID, anonymous and tagged GTID events, and MariaDB's GTID
# event.
_GTID_EVENTS = (33, 34, 42, 162)

# The margin of a search by time: commits of different sessions can be logged slightly out of time order.
_TIME_MARGIN_US = 60_000_000


class LogLookup(Protocol):
    """Looks up positions in one server's log. The positions that it returns have the epoch that it was
    created for.
    """

    def earliest(self) -> Position:
        """Return the first position that the server still has."""

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions in the log before a position."""

    def fingerprint(self, file: str) -> str:
        """Return the fingerprint of a file, as the server sends it now."""

    def find_time(self, time_us: int) -> Position:
        """Return a position before which every commit is older than a time."""

    def close(self) -> None:
        """End the session."""


@dataclass(frozen=True)
class StartAt:
    """Where an empty log starts. At most one field is set; by default, the log starts at the head of the
    server's log.

    `commit_ts` is a commit timestamp of a TiDB cluster, after which the log starts.
    """

    earliest: bool = False
    position: Position | None = None
    gtid_set: str | None = None
    time_us: int | None = None
    commit_ts: int | None = None


@dataclass(frozen=True)
class Beginning:
    """Where capture starts, and the GTIDs of everything before that position. `note` is a warning for readers
    of the log.
    """

    position: Position
    gtid_set: LoggedSet
    note: str | None = None


def begin_empty(connection: Connection, start_at: StartAt, lookup: LogLookup, epoch: int) -> Beginning:
    """Return where an empty log starts. Raises PositionPurged, PositionInvalid."""
    if start_at.gtid_set is not None:
        return begin_after(connection, start_at.gtid_set, lookup, epoch)
    if start_at.position is not None:
        problem = check_position(connection, start_at.position)
        if problem is not None:
            raise problem
        position = Position(epoch, start_at.position.file, max(start_at.position.offset, FIRST_EVENT_OFFSET))
    elif start_at.time_us is not None:
        position = lookup.find_time(start_at.time_us)
    elif start_at.earliest:
        position = lookup.earliest()
    else:
        position = _head_of(connection, epoch)
    return Beginning(position, lookup.gtid_set(position))


def begin_elsewhere(
    connection: Connection, gtid_set: str, time_us: int, lookup: LogLookup, epoch: int
) -> Beginning:
    """Return where a log continues on a different server, in a new epoch.

    `gtid_set` covers everything in the log, `time_us` is the time of its last commit. Raises PositionPurged
    if the server no longer has the next transaction, ServerBehind if the server is missing transactions of
    the log.
    """
    if gtid_set and connection.executed():
        return begin_after(connection, gtid_set, lookup, epoch)
    if not time_us:
        position = _head_of(connection, epoch)
        return Beginning(position, lookup.gtid_set(position))
    position = lookup.find_time(time_us - _TIME_MARGIN_US)
    note = (
        f"epoch {epoch} begins at {position} on {connection.address}, found by time: without GTIDs,"
        " transactions that the log has already may come again"
    )
    return Beginning(position, lookup.gtid_set(position), note)


def begin_after(connection: Connection, gtid_set: str, lookup: LogLookup, epoch: int) -> Beginning:
    """Find the first transaction on a server that does not belong to a GTID set, and return its position.

    If the server commits in a different order, transactions of the set may follow that position; then `note`
    lists them. Raises PositionPurged and ServerBehind.
    """
    problem = check_gtid_set(connection, gtid_set)
    if isinstance(problem, PositionInvalid):
        raise server_behind(connection, gtid_set)
    if problem is not None:
        raise problem
    excluded = GtidSet.parse(gtid_set)
    if excluded.contains(GtidSet.parse(connection.executed().text)):
        # The server may have logged transactions that it does not count as executed yet, so only its log
        # proves that it has no transactions outside the set.
        head = _head_of(connection, epoch)
        logged = lookup.gtid_set(head)
        if excluded.contains(GtidSet.parse(logged)):
            return Beginning(head, logged)
    position = _first_outside(connection, gtid_set, epoch)
    preceding = lookup.gtid_set(position)
    again = excluded.subtract(GtidSet.parse(preceding))
    note = None
    if again:
        note = (
            f"epoch {epoch} begins at {position} on {connection.address}: these come again behind it: {again}"
        )
    return Beginning(position, preceding, note)


def server_behind(connection: Connection, gtid_set: str, position: Position | None = None) -> ServerBehind:
    """Return the error for a server that is missing transactions of a set.

    The list includes transactions that the server has not logged yet.
    """
    missing = connection.executed().missing(gtid_set)
    return ServerBehind(
        f"{connection.address} lacks transactions that the log has: {missing}",
        position=None if position is None else str(position),
        hint="It is asked again until it has them. Where they are lost: penstock position accept INSTANCE"
        " --config penstock.yaml --server HOST:PORT",
        missing=missing,
    )


def _head_of(connection: Connection, epoch: int) -> Position:
    head = connection.head()
    return Position(epoch, head.file, head.offset)


def _first_outside(connection: Connection, gtid_set: str, epoch: int) -> Position:
    """Return where the server's first transaction outside a set starts, according to its own dump."""
    files = {log.file: log.bytes for log in connection.binary_logs()}
    file = ""
    with open_stream(connection.address, DumpStart(gtid_set=gtid_set), bounded=True) as stream:
        for event in _events(stream.event_chunks()):
            if event[_TYPE_AT] == _ROTATE_EVENT:
                event_name = event[_EVENT_HEADER_BYTES + 8 :]
                # The event may have a checksum after the file name, so match the name against the server's
                # list of files.
                file = max(
                    (name for name in files if event_name.startswith(name.encode())), key=len, default=""
                )
            elif event[_TYPE_AT] in _GTID_EVENTS and file:
                if files[file] > DUMP_OFFSET_MAX:
                    # The file is longer than the 32 bits of an event's end position can express, so start at
                    # its first event.
                    return Position(epoch, file, FIRST_EVENT_OFFSET)
                end = int.from_bytes(event[_END_AT], "little")
                return Position(epoch, file, end - int.from_bytes(event[_LENGTH_AT], "little"))
    raise ConnectionLost(
        f"{connection.address}: a dump after {gtid_set!r} holds no transaction, yet the log goes on"
    )


def _events(chunks: Iterator[memoryview]) -> Iterator[bytes]:
    """Yield the events of a dump one by one. Intended for a few events, not for a whole log."""
    buffered = bytearray()
    for chunk in chunks:
        buffered += chunk
        while len(buffered) >= _EVENT_HEADER_BYTES:
            size = int.from_bytes(buffered[_LENGTH_AT], "little")
            if size < _EVENT_HEADER_BYTES or len(buffered) < size:
                break
            yield bytes(buffered[:size])
            del buffered[:size]
