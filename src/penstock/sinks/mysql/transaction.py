# SPDX-License-Identifier: Apache-2.0
"""Runs a transaction on a target, and retries it after a deadlock or a lost connection.

The batch number is stored in the position table, in the same commit as the rows. If the server's reply to a
commit was lost, the retry finds the batch number in this table.
"""

from collections.abc import Callable
from typing import TypeVar

from penstock.errors import ConnectionLost, LeaseLost, PenstockError, ServerBusy, TransientError
from penstock.model import TableName
from penstock.mysql.server_errors import NO_SUCH_TABLE
from penstock.retry import Backoff, Retry
from penstock.sinks.mysql.connection import NO_SUCH_DATABASE, Session, refusal_of
from penstock.sinks.mysql.tables import create_database, layout_of
from penstock.sinks.sink import BatchMark, applications_of

_Answer = TypeVar("_Answer")

# About 1.5 seconds of pauses in all.
TRIES_MAX = 6
_BACKOFF = Backoff(first=0.05)
# The bytes of a transaction that are kept for a replay. Above this, idempotent rows are committed early.
_REPLAY_BYTES_MAX = 32 << 20


class Transaction:
    """Executes statements in transactions on one session.

    `connect` opens the session, and reopens it if the connection is lost. With `whole`, nothing is committed
    before the part is complete.
    """

    def __init__(self, connect: Callable[[], Session], *, whole: bool) -> None:
        self._connect = connect
        self._whole = whole
        self.session = connect()
        self._replay_log: list[tuple[bytes, ...]] | None = []
        self._replay_bytes = 0
        # Whether everything written so far is idempotent.
        self._is_idempotent = not whole

    def close(self) -> None:
        """End the session. Uncommitted statements are rolled back."""
        self.session.close()

    def execute(self, *pieces: bytes, idempotent: bool = False) -> int:
        """Run a statement, and replay the open transaction if the server ended it.

        `idempotent` means that writing the statement twice has the same result. Returns the number of
        affected rows.
        """
        touched = self._with_attempts(lambda: self.session.execute(*pieces))
        self._is_idempotent = self._is_idempotent and idempotent
        if self._replay_log is not None:
            self._replay_log.append(pieces)
            self._replay_bytes += sum(map(len, pieces))
            if self._replay_bytes > _REPLAY_BYTES_MAX and not self._is_idempotent:
                # The transaction is too large to keep. A failure now fails the attempt, and the batch is
                # retried.
                self._replay_log, self._replay_bytes = None, 0
        return touched

    @property
    def large(self) -> bool:
        """Whether it is time to commit the idempotent statements."""
        return self._is_idempotent and self._replay_bytes > _REPLAY_BYTES_MAX

    @property
    def repeatable(self) -> bool:
        """Whether everything written so far may be committed at any time."""
        return self._is_idempotent

    def commit(self, mark: bytes) -> None:
        """Commit idempotent statements with a mark. Raises LeaseLost if the mark affects no row."""
        assert self._is_idempotent, "these rows are committed with the batch's number"
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
        """Commit the part. Raises ConnectionLost if the outcome is unknown."""
        self.session.commit()
        self._forget()

    def undo(self) -> None:
        """Roll back everything that is not committed."""
        self.session.rollback()
        self._forget()

    def _forget(self) -> None:
        self._replay_log, self._replay_bytes, self._is_idempotent = [], 0, not self._whole

    def query(self, question: Callable[[Session], _Answer]) -> _Answer:
        """Return the answer to a query. If the session is lost, query again on a new session."""
        return self._with_attempts(lambda: question(self.session))

    def _with_attempts(self, step: Callable[[], _Answer]) -> _Answer:
        retry = Retry("repeating a transaction", backoff=_BACKOFF, tries=TRIES_MAX)
        while True:
            try:
                if retry.failures:
                    self._replay()
                return step()
            except (ServerBusy, ConnectionLost) as problem:
                if self._replay_log is None:
                    raise
                retry.wait(problem, target=str(self.session.address))

    def _replay(self) -> None:
        """Replay the kept statements, on the same session if it still answers."""
        try:
            self.session.rollback()
        except TransientError:
            self.session.close()
            self.session = self._connect()
        for pieces in self._replay_log or ():
            try:
                self.session.execute(*pieces)
            except TransientError:
                raise
            except PenstockError as problem:
                # This statement is being replayed, so its error must not be blamed on the table being
                # written.
                raise ServerBusy(
                    f"a statement that ran before the server ended its transaction is refused now: {problem}",
                    hint="The batch is tried again",
                ) from problem


def mark_statement(positions: TableName, mark: BatchMark, part: int, mark_part: int) -> bytes:
    """Return the statement that marks a transaction's owner in a separate row.

    If the part has already been written, the statement affects no row, and the part must not be written again
    over later rows. The statement also locks the part's record, so that no other process can complete the
    part before this transaction ends.
    """
    application = _text(mark.application)
    return (
        f"REPLACE INTO {positions.sql} (application, part, number)"
        f" SELECT {application}, {mark_part}, {mark.number} FROM {positions.sql} AS held"
        f" WHERE held.application = {application} AND held.part = {part} AND held.number < {mark.number}"
        " LOCK IN SHARE MODE"
    ).encode()


def claim_statement(positions: TableName, mark: BatchMark, part: int) -> bytes:
    """Return the statement that stores the batch number of a part; it affects no row if the number is already
    stored.

    If this process was considered dead, another process may have received the same part. One of the two
    processes waits at this statement for the other, and then rolls back.
    """
    return (
        f"INSERT INTO {positions.sql} (application, part, number)"
        f" VALUES ({_text(mark.application)}, {part}, {mark.number})"
        " ON DUPLICATE KEY UPDATE number = IF(number < VALUES(number), VALUES(number), number)"
    ).encode()


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def has_numbers(session: Session, positions: TableName, pipeline: str) -> bool:
    """Return whether the target has numbers of a pipeline's batches."""
    prefix = applications_of(pipeline)
    try:
        query = f"SELECT 1 FROM {positions.sql} WHERE LEFT(application, %s) = %s LIMIT 1"
        return bool(session.run(query, (len(prefix), prefix)))
    except PenstockError as error:
        if refusal_of(error) in (NO_SUCH_TABLE, NO_SUCH_DATABASE):
            return False
        raise


def last_number(session: Session, positions: TableName, mark: BatchMark) -> int | None:
    """Return the number of the last batch that wrote any part to the target, None if there is none."""
    try:
        query = f"SELECT MAX(number) FROM {positions.sql} WHERE application = %s AND part >= 0"
        ((number,),) = session.run(query, (mark.application,))
    except PenstockError as error:
        if refusal_of(error) in (NO_SUCH_TABLE, NO_SUCH_DATABASE):
            return None
        raise
    return None if number is None else int(number)


def stored_number(session: Session, positions: TableName, mark: BatchMark, part: int) -> int | None:
    """Return the number of the last batch written to a part. If there is none, insert the part's row and
    return None.
    """
    try:
        rows = session.run(
            f"SELECT number FROM {positions.sql} WHERE application = %s AND part = %s",
            (mark.application, part),
        )
        # End this snapshot. Otherwise, the part's own transaction would read from it.
        session.rollback()
    except PenstockError as error:
        if refusal_of(error) in (NO_SUCH_TABLE, NO_SUCH_DATABASE):
            return None
        raise
    if rows:
        return int(rows[0][0])
    # Insert the row now, because an existing row can be locked and a missing row cannot.
    session.run(
        f"INSERT IGNORE INTO {positions.sql} (application, part, number) VALUES (%s, %s, -1)",
        (mark.application, part),
    )
    session.commit()
    return None


def create_position_table(session: Session, positions: TableName) -> None:
    """Create the position table if it does not exist."""
    if layout_of(session, positions) is not None:
        return
    for statement in create_database(session, positions.database):
        session.run(statement)
    session.run(
        f"CREATE TABLE IF NOT EXISTS {positions.sql} (application VARCHAR(255) CHARACTER SET utf8mb4"
        " COLLATE utf8mb4_bin NOT NULL, part INT NOT NULL, number BIGINT NOT NULL,"
        " written TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6),"
        " PRIMARY KEY (application, part))"
    )
