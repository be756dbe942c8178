# SPDX-License-Identifier: Apache-2.0
"""Determines the log position for a read, without a lock and without a write.

A server logs a transaction before readers can see it. The end of the log alone is therefore no safe
watermark: a row could be read in its old state and later be considered newer than its change.
`take_watermark` asks MariaDB for the position of a snapshot. On MySQL it takes the log's end, and waits until
every transaction before it is visible. A TiDB cluster is read as of a timestamp, which is exact for any
number of sessions.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.errors import PositionInvalid
from penstock.model import Position, ServerAddress
from penstock.mysql.committed import wait_until_committed
from penstock.pipeline.load.session import LoadSession, open_session

# The file name shown for rows that were read from a TiDB cluster. It sorts before all files of the cluster's
# log.
_CLUSTER_FILE = "tidb-binlog.000000"
# The logical part of a TiDB timestamp. The other bits are milliseconds.
_TIDB_LOGICAL_BITS = 18


@dataclass(frozen=True)
class Watermark:
    """A log position whose transactions are all visible to later reads. Can be pickled.

    Reads begun after it was taken contain every transaction before it. `exact` means that they contain no
    later transaction. `server_id` and `time_us` (since 1970) are the server's own. `commit_ts` is the commit
    timestamp at which a TiDB cluster was read.
    """

    position: Position
    server_id: int
    time_us: int
    exact: bool = False
    commit_ts: int | None = None

    @property
    def floor(self) -> int:
        """The first commit version whose changes the reads need not contain."""
        return self.position.commit_version if self.commit_ts is None else self.commit_ts + 1

    @property
    def version(self) -> int:
        """The `_commit_version` of rows that were read: not below that of any earlier transaction, and below
        that of every later one.
        """
        return self.floor - 1

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "epoch": self.position.epoch,
            "file": self.position.file,
            "offset": self.position.offset,
            "server_id": self.server_id,
            "time_us": self.time_us,
            "exact": self.exact,
            **({} if self.commit_ts is None else {"commit_ts": self.commit_ts}),
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
                commit_ts = value.get("commit_ts")
                return cls(Position(epoch, file, offset), server_id, time_us, exact, commit_ts)
        raise PositionInvalid("a watermark has epoch, file, offset, server_id, time_us and exact")


def take_watermark(address: ServerAddress, *, epoch: int = 0) -> Watermark:
    """Return a log position before which every transaction is visible once this call returns.

    Raises ServerUnsupported if the binlog is off, ServerBusy if a transaction does not get committed.
    """
    with open_session(address) as session:
        return watermark_of(session, epoch)


def watermark_of(session: LoadSession, epoch: int = 0, commit_ts: int | None = None) -> Watermark:
    """Return a watermark like `take_watermark`, over an open session without a transaction.

    A TiDB cluster is read as of `commit_ts`, by default now.
    """
    if session.tidb:
        return _cluster_watermark(session, commit_ts or _cluster_timestamp(session), epoch)
    if session.mariadb:
        watermark = open_snapshot(session, epoch)
        session.query("ROLLBACK")
        if watermark.exact:
            return replace(watermark, exact=False)
    head = session.connection.head()
    wait_until_committed(session.connection)
    position = Position(epoch, head.file, head.offset)
    return Watermark(position, session.identity.server_id, now_us(session))


def _cluster_watermark(session: LoadSession, commit_ts: int, epoch: int) -> Watermark:
    """Return the watermark for reading a TiDB cluster as of a timestamp.

    The watermark's position does not exist in any log, because reads leave no trace in a log.
    """
    position = Position(epoch, _CLUSTER_FILE, 0)
    time_us = (commit_ts >> _TIDB_LOGICAL_BITS) * 1000
    return Watermark(position, session.identity.server_id, time_us, exact=True, commit_ts=commit_ts)


def read_as_of(session: LoadSession, watermark: Watermark) -> None:
    """Make a session read a TiDB cluster as of a watermark. Sessions of other servers are unchanged.

    Raises PositionPurged if the cluster's garbage collection has removed the row versions from that time.
    """
    if watermark.commit_ts is not None:
        session.query(f"SET @@tidb_snapshot = '{watermark.commit_ts}'")


def _cluster_timestamp(session: LoadSession) -> int:
    """Get a new timestamp from a TiDB cluster. No transaction commits with this timestamp."""
    session.query("BEGIN")
    commit_ts = int(session.query("SELECT @@tidb_current_ts AS ts")[0]["ts"])
    session.query("ROLLBACK")
    return commit_ts


def now_us(session: LoadSession) -> int:
    """Return the server's time in microseconds since 1970."""
    return int(
        session.query("SELECT CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED) AS now_us")[0]["now_us"]
    )


def open_snapshot(session: LoadSession, epoch: int = 0) -> Watermark:
    """Open a snapshot in the session and return its log position.

    On MariaDB the position is exact, otherwise it is at or before the snapshot. The session's queries read
    the snapshot until the transaction ends.
    """
    if session.tidb:
        watermark = watermark_of(session, epoch)
        read_as_of(session, watermark)
        return watermark
    if not session.mariadb:
        watermark = watermark_of(session, epoch)
        session.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        return watermark
    head = session.connection.head()
    session.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    # MariaDB stores the position with the snapshot, even during concurrent commits.
    rows = session.query("SHOW STATUS LIKE 'Binlog_snapshot_%'")
    status = {str(row["Variable_name"]).lower(): str(row["Value"]) for row in rows}
    file, offset = (
        status.get("binlog_snapshot_file", "none"),
        int(status.get("binlog_snapshot_position", "0")),
    )
    exact = file not in ("", "none")
    log_position = (file, offset) if exact else (head.file, head.offset)
    return Watermark(Position(epoch, *log_position), session.identity.server_id, now_us(session), exact)
