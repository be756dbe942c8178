# SPDX-License-Identifier: Apache-2.0
"""A session that reads table values unaltered: no charset conversion, UTC, and no other setting that changes
a value.

The kernel then receives values as the server stores them, in the same form as from the log.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from penstock._native import ResultSet
from penstock.changes import Target
from penstock.closing import Closing
from penstock.errors import (
    AnswerTimedOut,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    SchemaChanged,
    ServerUnsupported,
)
from penstock.limits import LOAD_READ_BYTES, LOAD_SILENCE_SECONDS_MAX, SILENCE_SECONDS_MAX
from penstock.model import ServerAddress
from penstock.mysql.connection import MARIADB, READING_SECONDS_MAX, Connection, ServerIdentity, connect
from penstock.mysql.result_batches import AnswerReader
from penstock.mysql.server_errors import NO_SUCH_TABLE, UNKNOWN_COLUMN, error_of

# How long the server keeps a result open for a slow reader, such as one with a rate limit or a slow target.
_WRITE_TIMEOUT_SECONDS = 24 * 3600

_SETTINGS = (
    "character_set_results = NULL",
    "time_zone = '+00:00'",
    # Zero dates can be compared, CHAR is returned without padding, and double quotes mean strings.
    "sql_mode = 'ALLOW_INVALID_DATES'",
    f"net_write_timeout = {_WRITE_TIMEOUT_SECONDS}",
)
# A server-side limit on statement time would end every large chunk.
_UNBOUNDED = {True: "SET SESSION max_statement_time = 0", False: "SET SESSION max_execution_time = 0"}


class LoadSession(Closing):
    """A session that reads tables. Used by one thread at a time. As a context manager, it closes itself."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # Whether `begin` opened a transaction that was not ended.
        self.in_transaction = False

    def close(self) -> None:
        """End the session, its transaction and its locks."""
        self.connection.close()

    @property
    def identity(self) -> ServerIdentity:
        """The identity of the server."""
        return self.connection.identity()

    @property
    def mariadb(self) -> bool:
        """Whether the server is MariaDB."""
        return self.identity.flavor == MARIADB

    @property
    def tidb(self) -> bool:
        """Whether the server belongs to a TiDB cluster."""
        return self.identity.is_tidb

    def begin(self) -> None:
        """Open a transaction, which `roll_back` ends."""
        self.query("START TRANSACTION")
        self.in_transaction = True

    def roll_back(self) -> None:
        """End the transaction that `begin` opened, if there is one."""
        if self.in_transaction:
            self.query("ROLLBACK")
            self.in_transaction = False

    def query(self, sql: str, *args: Any) -> list[dict[str, Any]]:
        """Run a statement with few result rows. Text must be ASCII or UTF-8."""
        return self.connection.query(sql, args or None)

    def batches(self, sql: str | bytes, result: ResultSet) -> Iterator[Any]:
        """Run a query and yield the batches of its rows. Memory is bounded by one batch and one row.

        A caller that stops early has to close the session. Raises ConnectionLost, ServerBusy, SchemaChanged
        if the table's columns have changed, StreamError for values that contradict their declared types.
        """
        yield from self.next_answer(self._reader_of(self.connection.send_query(sql)), result)

    def send(self, queries: Sequence[str]) -> AnswerReader:
        """Send short queries ahead of reading their answers; see `Connection.send_queries`."""
        return self._reader_of(self.connection.send_queries(queries))

    def next_answer(self, answers: AnswerReader, result: ResultSet) -> Iterator[Any]:
        """Yield the batches of the next answer to the queries of `send`, as `batches` does."""
        yield from answers.batches(result)
        if (refused := result.server_error) is not None:
            raise _refusal(*refused, str(self.connection.address))

    def _reader_of(self, stream: socket.socket) -> AnswerReader:
        stream.settimeout(SILENCE_SECONDS_MAX)
        return AnswerReader(LOAD_READ_BYTES, partial(self._receive, stream))

    def _receive(self, stream: socket.socket, into: memoryview) -> int:
        """Receive rows.

        A silent server may be searching for the first row or waiting for a lock. If it answers other
        connections, wait for up to LOAD_SILENCE_SECONDS_MAX.
        """
        server, silent_since = self.connection.address, time.monotonic()
        while True:
            try:
                count = stream.recv_into(into)
            except TimeoutError as problem:
                if time.monotonic() - silent_since < LOAD_SILENCE_SECONDS_MAX and _answers(server):
                    continue
                raise AnswerTimedOut(f"{server} does not answer while rows are read") from problem
            except OSError as problem:
                raise ConnectionLost(
                    f"{server}: the connection was lost while rows were read: {problem}"
                ) from problem
            if count == 0:
                raise ConnectionLost(f"{server} closed the connection while rows were read")
            return count


def _answers(address: ServerAddress) -> bool:
    """Return whether a server answers a new connection, even if it refuses the connection."""
    try:
        connect(address).close()
    except ConnectionLost:
        return False
    except PenstockError:
        return True
    return True


def open_session(address: ServerAddress) -> LoadSession:
    """Open a session for reads. Raises AuthenticationFailed, TlsFailed, ConnectionLost, ServerBusy."""
    connection = connect(address, READING_SECONDS_MAX)
    try:
        connection.query(f"SET SESSION {', '.join(_SETTINGS)}")
        connection.query("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.query_first([_UNBOUNDED[connection.identity().flavor == MARIADB], "DO 0"])
    except BaseException:
        connection.close()
        raise
    return LoadSession(connection)


def check_condition(session: LoadSession, target: Target, where: str) -> None:
    """Have the server parse a condition on a table without reading rows. Raises OptionInvalid."""
    try:
        session.query(f"SELECT 1 FROM {target.name.sql} WHERE ({where}) LIMIT 0")
    except (SchemaChanged, ServerUnsupported, OptionInvalid) as problem:
        raise OptionInvalid(
            f"the condition for {target.name}, {where}, is refused: {problem.message}",
            hint=f"It is in the server's SQL; {target.name} has {', '.join(target.column_names)}",
        ) from problem


def _refusal(number: int, message: str, server: str) -> PenstockError:
    if number in (UNKNOWN_COLUMN, NO_SUCH_TABLE):
        return SchemaChanged(
            f"{server}: {message} (server error {number})",
            hint="The table was altered since its load was planned. Run: penstock resnapshot",
        )
    return error_of(number, f"{server}: {message}")
