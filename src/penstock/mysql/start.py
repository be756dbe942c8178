# SPDX-License-Identifier: Apache-2.0
"""Where reading a server's log begins: in an empty log, and on another server than before.

A file position means something on one server only. On another one the place is found by GTIDs: the new
server itself says which is its first transaction outside a set. Without GTIDs it is found by time, which is
not exact, so what may come again is said.
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
# Each begins a transaction: MySQL's GTID, anonymous and tagged GTID events, MariaDB's.
_GTID_EVENTS = (33, 34, 42, 162)

# Commits of different sessions are logged a little out of the order of their times.
_TIME_MARGIN_US = 60_000_000


class Places(Protocol):
    """Where things lie in one server's log. Positions carry the epoch that it was made for."""

    def earliest(self) -> Position:
        """Return the first position the server still has."""

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction that the log holds before a position."""

    def fingerprint(self, file: str) -> str:
        """Return the fingerprint of a file, as the server sends it now."""

    def find_time(self, time_us: int) -> Position:
        """Return a position before which nothing was committed at or after a time."""

    def close(self) -> None:
        """End the session."""


@dataclass(frozen=True)
class StartAt:
    """Where an empty log is to begin: one of the fields, else the head of the server's log."""

    earliest: bool = False
    position: Position | None = None
    gtid_set: str | None = None
    time_us: int | None = None


@dataclass(frozen=True)
class Beginning:
    """Where capture begins, and the GTIDs of all that lies before. `note` says what a reader must know."""

    position: Position
    gtid_set: LoggedSet
    note: str | None = None


def begin_empty(connection: Connection, wanted: StartAt, places: Places, epoch: int) -> Beginning:
    """Return where an empty log begins. Raises PositionPurged, PositionInvalid."""
    if wanted.gtid_set is not None:
        return begin_after(connection, wanted.gtid_set, places, epoch)
    if wanted.position is not None:
        problem = check_position(connection, wanted.position)
        if problem is not None:
            raise problem
        position = Position(epoch, wanted.position.file, max(wanted.position.offset, FIRST_EVENT_OFFSET))
    elif wanted.time_us is not None:
        position = places.find_time(wanted.time_us)
    elif wanted.earliest:
        position = places.earliest()
    else:
        position = _head_of(connection, epoch)
    return Beginning(position, places.gtid_set(position))


def begin_elsewhere(
    connection: Connection, gtid_set: str, time_us: int, places: Places, epoch: int
) -> Beginning:
    """Return where to go on with a log on another server, in a new epoch.

    `gtid_set` is that of everything in the log, `time_us` the time of its last commit. Raises PositionPurged
    where the server no longer has what comes next, and ServerBehind where it lacks what the log has.
    """
    if gtid_set and connection.executed():
        return begin_after(connection, gtid_set, places, epoch)
    if not time_us:
        position = _head_of(connection, epoch)
        return Beginning(position, places.gtid_set(position))
    position = places.find_time(time_us - _TIME_MARGIN_US)
    note = (
        f"epoch {epoch} begins at {position} on {connection.address}, found by time: without GTIDs,"
        " transactions that the log has already may come again"
    )
    return Beginning(position, places.gtid_set(position), note)


def begin_after(connection: Connection, gtid_set: str, places: Places, epoch: int) -> Beginning:
    """Return the first transaction on a server that is not in a set.

    What follows it may hold transactions of the set, where the server commits in another order: `note` says
    which. Raises PositionPurged and ServerBehind.
    """
    problem = check_gtid_set(connection, gtid_set)
    if isinstance(problem, PositionInvalid):
        raise server_behind(connection, gtid_set)
    if problem is not None:
        raise problem
    known = GtidSet.parse(gtid_set)
    if known.contains(GtidSet.parse(connection.executed().text)):
        # The server may have logged more than it counts, so only its log proves that nothing is left.
        head = _head_of(connection, epoch)
        logged = places.gtid_set(head)
        if known.contains(GtidSet.parse(logged)):
            return Beginning(head, logged)
    position = _first_outside(connection, gtid_set, epoch)
    before = places.gtid_set(position)
    again = known.subtract(GtidSet.parse(before))
    note = None
    if again:
        note = (
            f"epoch {epoch} begins at {position} on {connection.address}: these come again behind it: {again}"
        )
    return Beginning(position, before, note)


def server_behind(connection: Connection, gtid_set: str, position: Position | None = None) -> ServerBehind:
    """Return the error for a server that lacks transactions of a set; what it still has to log is among
    them."""
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
    """Return where the server's first transaction outside a set begins, as its own dump shows it."""
    files = {log.file: log.bytes for log in connection.binary_logs()}
    file = ""
    with open_stream(connection.address, DumpStart(gtid_set=gtid_set), bounded=True) as stream:
        for event in _events(stream.event_chunks()):
            if event[_TYPE_AT] == _ROTATE_EVENT:
                named = event[_EVENT_HEADER_BYTES + 8 :]
                # The name may be followed by a checksum, so it is looked up among the server's own.
                file = max((one for one in files if named.startswith(one.encode())), key=len, default="")
            elif event[_TYPE_AT] in _GTID_EVENTS and file:
                if files[file] > DUMP_OFFSET_MAX:
                    # An event says where it ends in 32 bits, which is too little here.
                    return Position(epoch, file, FIRST_EVENT_OFFSET)
                end = int.from_bytes(event[_END_AT], "little")
                return Position(epoch, file, end - int.from_bytes(event[_LENGTH_AT], "little"))
    raise ConnectionLost(
        f"{connection.address}: a dump after {gtid_set!r} holds no transaction, yet the log goes on"
    )


def _events(chunks: Iterator[memoryview]) -> Iterator[bytes]:
    """Yield the events of a dump one by one. For a few events, not for a log."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= _EVENT_HEADER_BYTES:
            size = int.from_bytes(held[_LENGTH_AT], "little")
            if size < _EVENT_HEADER_BYTES or len(held) < size:
                break
            yield bytes(held[:size])
            del held[:size]
