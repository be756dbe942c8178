# SPDX-License-Identifier: Apache-2.0
"""A transaction on a target that is tried again where the server ended it: deadlocks, lost connections.

The number of the batch stands in the position table, in the commit of the rows; so whoever comes again after
a commit whose answer was lost finds it there.
"""

from collections.abc import Callable
from typing import TypeVar

from penstock.errors import ConnectionLost, LeaseLost, PenstockError, ServerBusy, TransientError
from penstock.model import TableName
from penstock.retry import Backoff, Retry
from penstock.sinks.mysql.connection import NO_SUCH_DATABASE, NO_SUCH_TABLE, Session, number_of
from penstock.sinks.mysql.tables import layout_of, make_database
from penstock.sinks.sink import BatchMark, applications_of

_Found = TypeVar("_Found")

# About 1.5 seconds of pauses in all.
TRIES_MAX = 6
_BACKOFF = Backoff(first=0.05)
# So much of a transaction is kept, to be sent again; above it what may be written twice is committed.
_KEPT_BYTES_MAX = 32 << 20


class Transaction:
    """Statements on one session. `connect` opens it, and opens another where it is lost.

    With `whole` nothing is committed before the part is.
    """

    def __init__(self, connect: Callable[[], Session], *, whole: bool) -> None:
        self._connect = connect
        self._whole = whole
        self.session = connect()
        self._kept: list[tuple[bytes, ...]] | None = []
        self._kept_bytes = 0
        # Whether all that was written so far may be written again.
        self._again = not whole

    def close(self) -> None:
        """End the session; what is not committed is undone."""
        self.session.close()

    def execute(self, *pieces: bytes, again: bool = False) -> int:
        """Run a statement in the open transaction, and all of that again where the server ended it.

        `again` tells that the statement may be written twice with the same outcome. Returns how many rows it
        touched.
        """
        touched = self._with_attempts(lambda: self.session.execute(*pieces))
        self._again = self._again and again
        if self._kept is not None:
            self._kept.append(pieces)
            self._kept_bytes += sum(map(len, pieces))
            if self._kept_bytes > _KEPT_BYTES_MAX and not self._again:
                # Too much to keep: a failure now ends the attempt, and the batch comes again.
                self._kept, self._kept_bytes = None, 0
        return touched

    @property
    def large(self) -> bool:
        """Whether it is time to commit what may be written again."""
        return self._again and self._kept_bytes > _KEPT_BYTES_MAX

    @property
    def repeatable(self) -> bool:
        """Whether all that was written so far may be committed at any time."""
        return self._again

    def commit(self, mark: bytes) -> None:
        """Commit what may be written again, with a mark. Raises LeaseLost where the mark touches no row."""
        assert self._again, "these rows are committed with the batch's number"
        self._with_attempts(lambda: self._commit_marked(mark))
        self._forget()

    def _commit_marked(self, mark: bytes) -> None:
        if not self.session.execute(mark):
            self.session.rollback()
            raise LeaseLost(
                f"{self.session.address}: another process has written this part of the batch meanwhile"
            )
        self.session.commit()

    def commit_part(self) -> None:
        """Commit what may not. Raises ConnectionLost where it may have done so."""
        self.session.commit()
        self._forget()

    def undo(self) -> None:
        """Undo what is not committed."""
        self.session.rollback()
        self._forget()

    def _forget(self) -> None:
        self._kept, self._kept_bytes, self._again = [], 0, not self._whole

    def asked(self, question: Callable[[Session], _Found]) -> _Found:
        """Return what a session answers, on another one where this one is lost."""
        return self._with_attempts(lambda: question(self.session))

    def _with_attempts(self, step: Callable[[], _Found]) -> _Found:
        retry = Retry("repeating a transaction", backoff=_BACKOFF, tries=TRIES_MAX)
        while True:
            try:
                if retry.failures:
                    self._replay()
                return step()
            except (ServerBusy, ConnectionLost) as problem:
                if self._kept is None:
                    raise
                retry.wait(problem, target=str(self.session.address))

    def _replay(self) -> None:
        """Run what was kept again, on the same session where it still answers."""
        try:
            self.session.rollback()
        except TransientError:
            self.session.close()
            self.session = self._connect()
        for pieces in self._kept or ():
            try:
                self.session.execute(*pieces)
            except TransientError:
                raise
            except PenstockError as problem:
                # It ran before, and is of another table than the one that is written now.
                raise ServerBusy(
                    f"a statement that ran before the server ended its transaction is refused now: {problem}",
                    hint="The batch is tried again",
                ) from problem


def mark_statement(positions: TableName, mark: BatchMark, part: int, place: int) -> bytes:
    """Return the statement that tells, at a place, whose a transaction is; it touches no row once the part is
    written: what comes later then must not be overwritten.

    Until the transaction's end nobody else can say that the part is written.
    """
    application = _text(mark.application)
    return (
        f"REPLACE INTO {positions.sql} (application, part, number)"
        f" SELECT {application}, {place}, {mark.number} FROM {positions.sql} AS held"
        f" WHERE held.application = {application} AND held.part = {part} AND held.number < {mark.number}"
        " LOCK IN SHARE MODE"
    ).encode()


def claim_statement(positions: TableName, mark: BatchMark, part: int) -> bytes:
    """Return the statement that stores which batch a part has; it touches no row where the part has it.

    Another process may have been given the part since, while this one was thought dead: one of them waits
    here for the other, and then undoes what it did.
    """
    return (
        f"INSERT INTO {positions.sql} (application, part, number)"
        f" VALUES ({_text(mark.application)}, {part}, {mark.number})"
        " ON DUPLICATE KEY UPDATE number = IF(number < VALUES(number), VALUES(number), number)"
    ).encode()


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def are_remembered(session: Session, positions: TableName, pipeline: str) -> bool:
    """Tell whether the target has numbers of a pipeline's batches."""
    begin = applications_of(pipeline)
    try:
        query = f"SELECT 1 FROM {positions.sql} WHERE LEFT(application, %s) = %s LIMIT 1"
        return bool(session.run(query, (len(begin), begin)))
    except PenstockError as error:
        if number_of(error) in (NO_SUCH_TABLE, NO_SUCH_DATABASE):
            return False
        raise


def has_number(session: Session, positions: TableName, mark: BatchMark) -> bool:
    """Return whether the target has a part of a batch, or of a later one."""
    try:
        query = f"SELECT 1 FROM {positions.sql} WHERE application = %s AND part >= 0 AND number >= %s LIMIT 1"
        return bool(session.run(query, (mark.application, mark.number)))
    except PenstockError as error:
        if number_of(error) in (NO_SUCH_TABLE, NO_SUCH_DATABASE):
            return False
        raise


def number_stored(session: Session, positions: TableName, mark: BatchMark, part: int) -> int | None:
    """Return the number of the last batch of which the target has a part, None for none, and make a place."""
    try:
        found = session.run(
            f"SELECT number FROM {positions.sql} WHERE application = %s AND part = %s",
            (mark.application, part),
        )
        # Its snapshot must not be what the part's own transaction reads.
        session.rollback()
    except PenstockError as error:
        if number_of(error) in (NO_SUCH_TABLE, NO_SUCH_DATABASE):
            return None
        raise
    if found:
        return int(found[0][0])
    # A row that is there can be held, which one that is not cannot.
    session.run(
        f"INSERT IGNORE INTO {positions.sql} (application, part, number) VALUES (%s, %s, -1)",
        (mark.application, part),
    )
    session.commit()
    return None


def make_positions(session: Session, positions: TableName) -> None:
    """Make the position table, where there is none."""
    if layout_of(session, positions) is not None:
        return
    for statement in make_database(session, positions.database):
        session.run(statement)
    session.run(
        f"CREATE TABLE IF NOT EXISTS {positions.sql} (application VARCHAR(255) CHARACTER SET utf8mb4"
        " COLLATE utf8mb4_bin NOT NULL, part INT NOT NULL, number BIGINT NOT NULL,"
        " written TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6),"
        " PRIMARY KEY (application, part))"
    )
