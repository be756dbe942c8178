# SPDX-License-Identifier: Apache-2.0
"""The reason why a server refuses to send its log.

Error number 1236 covers a purged file, a position after the end, a second replica with the same name and
more. Only the message text differs, so the server is queried for the actual cause.
"""

from typing import TYPE_CHECKING

from penstock._native import GtidSet
from penstock.errors import (
    DumpReplaced,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    PrivilegeMissing,
    StreamError,
)
from penstock.gtid_sets import mariadb_gtids
from penstock.model import Position
from penstock.mysql.connection import MARIADB, MYSQL, Connection, connect
from penstock.mysql.server_errors import DUMP_REFUSED, error_of

if TYPE_CHECKING:
    from penstock.mysql.replica import ReplicaName, ReplicaStream

_HINT_PURGED = (
    "Take a new snapshot, or start at the oldest position: `penstock check` lists the server's files"
)
# With gtid_mode=ON, MySQL does not send a file that holds a transaction without a GTID.
_HINT_ANONYMOUS = (
    "If the log reaches back to before GTIDs were on: SET GLOBAL gtid_mode = ON_PERMISSIVE while it is read,"
    " or read the files"
)
_HINT_ELSEWHERE = "Is this the server the position was taken from? Has it been reset or restored?"


def refusal_of(stream: "ReplicaStream", number: int, message: str) -> PenstockError:
    """Return the error for a stream that the server ended with an error packet."""
    if number != DUMP_REFUSED:
        return error_of(number, f"{stream.address}: {message}", position=str(stream.start))
    try:
        with connect(stream.address) as connection:
            cause = _find_cause(connection, stream)
            identity = connection.identity()
    except PenstockError as unanswered:
        return unanswered
    return cause or StreamError(
        f"{stream.address} does not send its log: {message} (server error {number})",
        position=str(stream.start),
        hint=_HINT_ANONYMOUS
        if identity.flavor == MYSQL and identity.gtid_mode == "ON"
        else "`penstock check` looks for settings that hide changes",
    )


def _find_cause(connection: Connection, stream: "ReplicaStream") -> PenstockError | None:
    if _has_duplicate(connection, stream.name):
        return DumpReplaced(
            f"another replica connected to {stream.address} with server id {stream.name.server_id}",
            position=str(stream.start),
            hint="Leave server_id out for a random one, or give each replica its own",
        )
    if stream.delivered:
        # The stream has moved past its start, so the start is not the cause.
        return None
    if stream.start.position is not None:
        return check_position(connection, stream.start.position)
    return check_gtid_set(connection, stream.start.gtid_set or "")


def _has_duplicate(connection: Connection, name: "ReplicaName") -> bool:
    """Return whether another replica is registered with this replica's server id."""
    try:
        replicas = connection.replicas()
    except PrivilegeMissing:
        # MariaDB requires REPLICATION MASTER ADMIN, which a replica need not have. Since 10.4 it reports a
        # replica with the same id by a separate error number, so no case is missed.
        return False
    return any(int(row["server_id"]) == name.server_id and row.get("host") != name.host for row in replicas)


def check_position(connection: Connection, position: Position) -> PenstockError | None:
    """Return why a dump cannot start at a file position, None if there is no reason."""
    files = {log.file: log.bytes for log in connection.binary_logs()}
    size = files.get(position.file)
    if size is not None:
        if position.offset <= size:
            return None
        return PositionInvalid(
            f"{position.file} on {connection.address} ends at {size}",
            position=str(position),
            hint=_HINT_ELSEWHERE,
        )
    oldest = next(iter(files))
    if position.file_number < Position(0, oldest, 0).file_number:
        return PositionPurged(
            f"{connection.address} has purged {position.file}, its oldest file is {oldest}",
            position=str(position),
            hint=_HINT_PURGED,
        )
    return PositionInvalid(
        f"{connection.address} has no file {position.file}", position=str(position), hint=_HINT_ELSEWHERE
    )


def file_replaced(log: str, position: Position, expected: str, actual: str) -> PositionInvalid:
    """Return the error for a file whose name belongs to a different file now, with both fingerprints."""
    return PositionInvalid(
        f"{position.file} on {log} was begun at {actual}, and the file of the position at {expected} (seconds"
        " since 1970, and the server's id)",
        position=str(position),
        hint="Was the server reset or restored, or is it another node? It may have given the same GTIDs to"
        " other transactions: read the tables again, or go on by hand (penstock position set) and compare"
        " (penstock verify)",
    )


def check_gtid_set(connection: Connection, gtid_set: str) -> PenstockError | None:
    """Return why a dump cannot start after a GTID set, None if there is no reason."""
    if connection.identity().flavor == MARIADB:
        purged, ahead = _mariadb_gtid_bounds(connection, gtid_set)
    else:
        row = connection.query(
            "SELECT GTID_SUBSET(@@global.gtid_purged, %s) AS kept,"
            " GTID_SUBSET(%s, @@global.gtid_executed) AS known",
            (gtid_set, gtid_set),
        )[0]
        purged, ahead = not row["kept"], not row["known"]
    if purged:
        return PositionPurged(
            f"{connection.address} has purged transactions that come after {gtid_set!r}", hint=_HINT_PURGED
        )
    if ahead:
        return PositionInvalid(
            f"{gtid_set!r} holds transactions that {connection.address} does not know", hint=_HINT_ELSEWHERE
        )
    return None


def _mariadb_gtid_bounds(connection: Connection, gtid_set: str) -> tuple[bool, bool]:
    """Return whether a position is before the oldest file, and whether it is after the newest."""
    oldest = connection.binary_logs()[0].file
    # A file starts with its format description and the list of GTIDs before it.
    events = connection.query("SHOW BINLOG EVENTS IN %s LIMIT 4", (oldest,))
    listed = next((str(event["Info"]) for event in events if event["Event_type"] == "Gtid_list"), "")
    before = ",".join("-".join(map(str, gtid)) for gtid in mariadb_gtids(listed))
    purged = not GtidSet.parse(gtid_set).contains(GtidSet.parse(before))
    executed = connection.executed()
    return purged or executed.unlogged(gtid_set), not executed.contains(gtid_set)
