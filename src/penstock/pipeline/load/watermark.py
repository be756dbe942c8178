# SPDX-License-Identifier: Apache-2.0
"""Where the log stands when rows are read, without a lock and without a write.

A server writes a transaction to its log before it shows it to readers. So the end of the log alone is no
place of which it could be said that whatever is read from now on holds everything before it: a row could be
read as it was, and later be taken for newer than its change. So `take_watermark` asks MariaDB for the place
of a snapshot; of MySQL it takes the log's end, and waits until all that stands before it is to be seen.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.errors import PositionInvalid
from penstock.model import Position, ServerAddress
from penstock.mysql.committed import wait_until_committed
from penstock.pipeline.load.session import LoadSession, open_session


@dataclass(frozen=True)
class Watermark:
    """A place in the log: what is read after it was taken holds every transaction before it. Pickles.

    `exact` tells that it holds nothing else either. `server_id` and `time_us` (since 1970) are the server's
    own.
    """

    position: Position
    server_id: int
    time_us: int
    exact: bool = False

    @property
    def version(self) -> int:
        """What rows carry as `_commit_version`: above all transactions before, below all from here on."""
        return self.position.commit_version - 1

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "epoch": self.position.epoch,
            "file": self.position.file,
            "offset": self.position.offset,
            "server_id": self.server_id,
            "time_us": self.time_us,
            "exact": self.exact,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` wrote. Raises PositionInvalid."""
        match value:
            case {
                "epoch": int(epoch),
                "file": str(file),
                "offset": int(offset),
                "server_id": int(server_id),
                "time_us": int(time_us),
                "exact": bool(exact),
            }:
                return cls(Position(epoch, file, offset), server_id, time_us, exact)
        raise PositionInvalid("a watermark has epoch, file, offset, server_id, time_us and exact")


def take_watermark(address: ServerAddress, *, epoch: int = 0) -> Watermark:
    """Return a place in the log of which readers see everything before it, from the return of this call on.

    Raises ServerUnsupported where the binlog is off, ServerBusy where a transaction does not get committed.
    """
    with open_session(address) as session:
        return watermark_of(session, epoch)


def watermark_of(session: LoadSession, epoch: int = 0) -> Watermark:
    """The same over a session at hand, which has no transaction open."""
    if session.mariadb:
        watermark = open_snapshot(session, epoch)
        session.query("ROLLBACK")
        if watermark.exact:
            return replace(watermark, exact=False)
    head = session.connection.head()
    wait_until_committed(session.connection)
    position = Position(epoch, head.file, head.offset)
    return Watermark(position, session.identity.server_id, now_us(session))


def now_us(session: LoadSession) -> int:
    """Return the server's time in microseconds since 1970."""
    return int(
        session.query("SELECT CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED) AS now_us")[0]["now_us"]
    )


def open_snapshot(session: LoadSession, epoch: int = 0) -> Watermark:
    """Open a snapshot in the session and return where the log stood: exactly there on MariaDB, else at or
    before it. The session's queries read it until its transaction ends."""
    if not session.mariadb:
        watermark = watermark_of(session, epoch)
        session.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        return watermark
    head = session.connection.head()
    session.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    # MariaDB keeps the place with the snapshot, also while something is being committed.
    rows = session.query("SHOW STATUS LIKE 'Binlog_snapshot_%'")
    found = {str(row["Variable_name"]).lower(): str(row["Value"]) for row in rows}
    file, offset = found.get("binlog_snapshot_file", "none"), int(found.get("binlog_snapshot_position", "0"))
    exact = file not in ("", "none")
    place = (file, offset) if exact else (head.file, head.offset)
    return Watermark(Position(epoch, *place), session.identity.server_id, now_us(session), exact)
