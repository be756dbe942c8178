# SPDX-License-Identifier: Apache-2.0
"""Reads tables at one exact log position, for rows that no key identifies.

If rows have a key, it is harmless to read a row slightly later than the watermark: the changes in between are
applied again and lead to the same row. Without a key the row would be duplicated. Such a table is therefore
read from a snapshot whose log position is known exactly. MariaDB reports the position, and TiDB reads as of a
timestamp. On MySQL, the snapshot is opened at a moment without commits, or under a read lock on the table
that is held only until the snapshot is open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.closing import Closing
from penstock.errors import PrivilegeMissing, ServerBusy
from penstock.model import Position, ServerAddress, TableName
from penstock.mysql.committed import tells_commits, wait_until_committed
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.load.watermark import Watermark, now_us, open_snapshot

# How many times to look for a moment without commits before the tables are locked instead.
_QUIET_TRIES = 3
# Writers queue behind a pending lock, so the lock request times out early and is retried.
_LOCK_WAIT_SECONDS = 5
_LOCK_TRIES = 6


@dataclass
class ExactSnapshot(Closing):
    """Tables as of `watermark`, which is exact: they contain every change before it and none after it.

    Read them with `read_rows(snapshot.session, ...)`. A change of these tables is in the snapshot if and only
    if its `_commit_version` is below `floor`.
    """

    session: LoadSession
    watermark: Watermark

    @property
    def floor(self) -> int:
        """The first commit version whose changes are not in the snapshot."""
        return self.watermark.floor

    def close(self) -> None:
        """Close the session, which ends the snapshot."""
        self.session.close()


def open_exact(address: ServerAddress, tables: Sequence[TableName], *, epoch: int = 0) -> ExactSnapshot:
    """Open a snapshot of tables at a log position that is known exactly.

    On a MySQL server with constant commits the tables are locked against writes for a few milliseconds.
    Tables of an engine without transactions are locked until the snapshot is closed. Locking requires the
    privilege LOCK TABLES. Raises PrivilegeMissing without it, ServerBusy if a statement holds a table for
    long, ServerUnsupported if the binlog is off.
    """
    session = open_session(address)
    try:
        if session.tidb:
            return ExactSnapshot(session, open_snapshot(session, epoch))
        if _has_no_snapshots(session, tables):
            _lock(session, tables)
            return ExactSnapshot(session, _at_head(session, epoch))
        watermark = _open_without_lock(session, epoch) or _open_under_lock(address, session, tables, epoch)
        return ExactSnapshot(session, watermark)
    except BaseException:
        session.close()
        raise


def _has_no_snapshots(session: LoadSession, tables: Sequence[TableName]) -> bool:
    """Return whether a table's engine has no transactions."""
    marks = ", ".join(["(%s, %s)"] * len(tables))
    names: list[Any] = [part for name in tables for part in (name.database, name.table)]
    return bool(
        session.query(
            "SELECT t.TABLE_NAME AS name FROM information_schema.TABLES t JOIN information_schema.ENGINES e"
            " ON e.ENGINE = t.ENGINE WHERE COALESCE(e.TRANSACTIONS, 'NO') <> 'YES'"
            f" AND (t.TABLE_SCHEMA, t.TABLE_NAME) IN ({marks})",
            *names,
        )
    )


def _open_without_lock(session: LoadSession, epoch: int) -> Watermark | None:
    """Open a snapshot at a position that the server reports, or at a moment without commits.

    Returns None if neither is possible.
    """
    if session.mariadb:
        watermark = open_snapshot(session, epoch)
        return watermark if watermark.exact else None
    for _ in range(_QUIET_TRIES if tells_commits(session.connection) else 0):
        before = session.connection.head()
        wait_until_committed(session.connection)
        session.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        if session.connection.head() == before:
            return _watermark(session, Position(epoch, before.file, before.offset))
    return None


def _open_under_lock(
    address: ServerAddress, session: LoadSession, tables: Sequence[TableName], epoch: int
) -> Watermark:
    """Open a snapshot while another session blocks writers.

    Once the lock is granted, every transaction that wrote to a table has ended, and no new one can write. All
    earlier changes are therefore before the log's end, and all later changes are after it.
    """
    with open_session(address) as keeper:
        _lock(keeper, tables)
        session.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        return _at_head(keeper, epoch)


def _lock(session: LoadSession, tables: Sequence[TableName]) -> None:
    session.query(f"SET SESSION lock_wait_timeout = {_LOCK_WAIT_SECONDS}")
    names = ", ".join(f"{name.sql} READ" for name in tables)
    for retries_left in reversed(range(_LOCK_TRIES)):
        try:
            session.query(f"LOCK TABLES {names}")
            return
        except PrivilegeMissing as problem:
            databases = ", ".join(sorted({name.database for name in tables}))
            raise PrivilegeMissing(
                f"a table without a key is read under a short lock: {problem.message}",
                hint=f"GRANT LOCK TABLES ON `{databases}`.* TO the account; or give the table a primary key",
            ) from problem
        except ServerBusy:
            if not retries_left:
                raise


def _at_head(session: LoadSession, epoch: int) -> Watermark:
    head = session.connection.head()
    return _watermark(session, Position(epoch, head.file, head.offset))


def _watermark(session: LoadSession, position: Position) -> Watermark:
    return Watermark(position, session.identity.server_id, now_us(session), exact=True)
