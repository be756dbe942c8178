# SPDX-License-Identifier: Apache-2.0
"""Tables as they were at one exact place of the log, for rows that no key tells apart.

Where rows have a key, a row that is read a moment later than its watermark says does no harm: its change
comes once more and wins. Without a key it would be there twice. So such a table is read from a snapshot
whose place is known: MariaDB tells it; on MySQL a moment without a commit is found, or made by a read lock
on the table that is held only until the snapshot stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from penstock.errors import PrivilegeMissing, ServerBusy
from penstock.model import Position, ServerAddress, TableName
from penstock.mysql.committed import tells_commits, wait_until_committed
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.load.watermark import Watermark, now_us, open_snapshot

# So often a moment without a commit is looked for before a table is locked.
_QUIET_TRIES = 3
# Writers of a table wait behind a lock that waits, so it gives up early, and is asked for again.
_LOCK_WAIT_SECONDS = 5
_LOCK_TRIES = 6


@dataclass
class ExactSnapshot:
    """Tables at `watermark`, which is exact for them: every change before it is in, none behind it.

    Read them with `read_rows(snapshot.session, ...)`. A context manager that closes. Changes of these tables
    with a `_commit_version` of at least `floor` come after what is read, all others are in it.
    """

    session: LoadSession
    watermark: Watermark

    @property
    def floor(self) -> int:
        """The version from which on changes of the log are news."""
        return self.watermark.position.commit_version

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()


def open_exact(address: ServerAddress, tables: Sequence[TableName], *, epoch: int = 0) -> ExactSnapshot:
    """Open a snapshot of tables of which the place in the log is known exactly.

    On a server that is never quiet MySQL's tables are locked against writes for some milliseconds, and
    those of an engine without transactions until the snapshot is closed; that takes the privilege LOCK
    TABLES. Raises PrivilegeMissing without it, ServerBusy where a statement holds a table for long,
    ServerUnsupported where the binlog is off.
    """
    session = open_session(address)
    try:
        if _has_no_snapshots(session, tables):
            _lock(session, tables)
            return ExactSnapshot(session, _at_head(session, epoch))
        watermark = _quiet(session, epoch) or _locked(address, session, tables, epoch)
        return ExactSnapshot(session, watermark)
    except BaseException:
        session.close()
        raise


def _has_no_snapshots(session: LoadSession, tables: Sequence[TableName]) -> bool:
    """Tell whether a table's engine has no transactions."""
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


def _quiet(session: LoadSession, epoch: int) -> Watermark | None:
    """Open a snapshot at a moment that the server tells, or at which nothing was committed; None without
    one."""
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


def _locked(
    address: ServerAddress, session: LoadSession, tables: Sequence[TableName], epoch: int
) -> Watermark:
    """Open a snapshot while another session keeps writers away.

    Once the lock is there, every transaction that wrote to a table has ended, and none can begin to write:
    all that was changed lies before the log's end, and all that will be behind it.
    """
    with open_session(address) as keeper:
        _lock(keeper, tables)
        session.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        return _at_head(keeper, epoch)


def _lock(session: LoadSession, tables: Sequence[TableName]) -> None:
    session.query(f"SET SESSION lock_wait_timeout = {_LOCK_WAIT_SECONDS}")
    names = ", ".join(f"{name.sql} READ" for name in tables)
    for left in reversed(range(_LOCK_TRIES)):
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
            if not left:
                raise


def _at_head(session: LoadSession, epoch: int) -> Watermark:
    head = session.connection.head()
    return _watermark(session, Position(epoch, head.file, head.offset))


def _watermark(session: LoadSession, position: Position) -> Watermark:
    return Watermark(position, session.identity.server_id, now_us(session), exact=True)
