# SPDX-License-Identifier: Apache-2.0
"""A session that reads tables as they are: no charset conversion, UTC, nothing that alters a value.

Values then reach the kernel as the server stores them, and so are those of the log.
"""

import socket
import time
from collections.abc import Iterator
from typing import Any, Self

from penstock._native import ResultSet
from penstock.changes import Target
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
from penstock.mysql.server_errors import NO_SUCH_TABLE, UNKNOWN_COLUMN, error_of

# A reader that takes its time (a rate, a slow target) holds the server back so long before it gives up.
_WRITE_TIMEOUT_SECONDS = 24 * 3600

_SETTINGS = (
    "character_set_results = NULL",
    "time_zone = '+00:00'",
    # Zero dates compare as they are, CHAR comes without its padding, and quotes mean strings.
    "sql_mode = 'ALLOW_INVALID_DATES'",
    f"net_write_timeout = {_WRITE_TIMEOUT_SECONDS}",
)
# A server that ends long statements would end every large chunk.
_UNBOUNDED = {True: "SET SESSION max_statement_time = 0", False: "SET SESSION max_execution_time = 0"}


class LoadSession:
    """A session for reads. Not for several threads at once; a context manager that closes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session, and with it its transaction and locks."""
        self.connection.close()

    @property
    def identity(self) -> ServerIdentity:
        """Who answers."""
        return self.connection.identity()

    @property
    def mariadb(self) -> bool:
        """Whether the server is a MariaDB."""
        return self.identity.flavor == MARIADB

    def query(self, sql: str, *args: Any) -> list[dict[str, Any]]:
        """Run a statement whose rows are few; texts have to be those of ASCII or UTF-8."""
        return self.connection.query(sql, args or None)

    def batches(self, sql: str, result: ResultSet) -> Iterator[Any]:
        """Run a query and yield the batches of its rows; memory is bounded by one batch and one row.

        A caller that stops early has to close the session. Raises ConnectionLost, ServerBusy, SchemaChanged
        where the table has other columns by now, StreamError for values that contradict their declared
        types.
        """
        stream = self.connection.send_query(sql)
        stream.settimeout(SILENCE_SECONDS_MAX)
        buffer = memoryview(bytearray(LOAD_READ_BYTES))
        start = filled = 0
        while True:
            start += result.feed(buffer[start:filled])
            match result.state:
                case "batch":
                    yield result.take_batch()
                    continue
                case "done":
                    break
            if start == filled:
                start = filled = 0
            elif filled == len(buffer):
                left = bytes(buffer[start:filled])
                if start == 0:
                    # A packet that does not fit. It has at most 16 MiB, so this ends.
                    buffer = memoryview(bytearray(2 * len(buffer)))
                buffer[: len(left)] = left
                start, filled = 0, len(left)
            filled += self._receive(stream, buffer[filled:])
        if (refused := result.server_error) is not None:
            raise _refusal(*refused, str(self.connection.address))

    def _receive(self, stream: socket.socket, into: memoryview) -> int:
        """Receive rows. A silent server may be finding the first row, or wait for a lock, for up to
        LOAD_SILENCE_SECONDS_MAX, as long as it answers others."""
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
    """Tell whether a server answers a new connection, if only by a refusal."""
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
    """Have the server read a condition on a table's rows, without looking at any. Raises OptionInvalid."""
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
