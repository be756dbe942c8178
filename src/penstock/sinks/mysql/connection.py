# SPDX-License-Identifier: Apache-2.0
"""A session on a target with MySQL's protocol: a PyMySQL connection with translated errors.

Statements that write rows are built by the kernel in binary form, and PyMySQL sends them without parsing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pymysql
from pymysql.constants import COMMAND

from penstock._native import ResultSet
from penstock.closing import Closing
from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    DiskFailed,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    TlsFailed,
    ValueMalformed,
)
from penstock.model import ServerAddress
from penstock.mysql.dial import dial
from penstock.mysql.result_batches import read_batches
from penstock.mysql.server_errors import NO_SUCH_TABLE, Classes, number_of, translate_error

# A statement that adds a column to a large table, or waits for a lock, may take long.
STATEMENT_SECONDS_MAX = 3600.0

_READ_BYTES = 1 << 20
_VERSION = re.compile(r"\d+(?:\.\d+)*")

DUPLICATE = 1062
NO_SUCH_DATABASE = 1049

_HINT_ACCOUNT = "Check user, password and host of the sink in the pipeline's file"
_HINT_GRANT = "Grant the sink's account SELECT, INSERT, UPDATE, DELETE, CREATE and ALTER on the target tables"
_HINT_COLUMNS = "Compare the target's columns: penstock run --dry-run FILE prints what would be changed"
_HINT_VALUE = "The target's column is narrower than the source's: widen it, or leave the column out by a step"
_HINT_REFUSED = (
    "A constraint or trigger of the target's table is in the way: drop it there, or filter such rows"
)
_HINT_DISK = "Make room on the target's disk"

# Error numbers that only a target needs, in addition to those for every server.
_OF_TARGET: Classes = {
    1044: (PrivilegeMissing, _HINT_GRANT),
    1045: (AuthenticationFailed, _HINT_ACCOUNT),
    NO_SUCH_DATABASE: (SchemaChanged, _HINT_COLUMNS),
    1054: (SchemaChanged, _HINT_COLUMNS),  # no such column
    1129: (AuthenticationFailed, _HINT_ACCOUNT),
    1130: (AuthenticationFailed, _HINT_ACCOUNT),
    1136: (SchemaChanged, _HINT_COLUMNS),  # The number of columns does not match.
    1142: (PrivilegeMissing, _HINT_GRANT),
    1143: (PrivilegeMissing, _HINT_GRANT),
    NO_SUCH_TABLE: (SchemaChanged, _HINT_COLUMNS),
    1206: (ServerBusy, None),  # the lock table is full
    1227: (PrivilegeMissing, _HINT_GRANT),
    1290: (ServerBusy, None),  # The server is read-only, for example during a failover.
    1836: (ServerBusy, None),
    1370: (PrivilegeMissing, _HINT_GRANT),
    1698: (AuthenticationFailed, _HINT_ACCOUNT),
    2061: (AuthenticationFailed, _HINT_ACCOUNT),
    2026: (TlsFailed, "Set ssl_mode in the sink's url: the server and the TLS settings do not agree"),
    3159: (
        TlsFailed,
        "The server takes encrypted connections only: add ?ssl_mode=required to the sink's url",
    ),
    **dict.fromkeys(
        (1048, 1138), (ValueMalformed, "The target's column is NOT NULL where the source's value is null")
    ),
    DUPLICATE: (ValueMalformed, "The target has a unique key that the source does not have: drop it there"),
    1264: (ValueMalformed, _HINT_VALUE),
    1265: (ValueMalformed, _HINT_VALUE),
    1292: (ValueMalformed, _HINT_VALUE),
    1366: (ValueMalformed, _HINT_VALUE),
    1406: (ValueMalformed, _HINT_VALUE),
    # Text that is not a JSON document.
    3140: (ValueMalformed, _HINT_VALUE),
    1364: (
        ValueMalformed,
        "The target has a column without a default that the source does not have: give it one",
    ),
    # Foreign keys, checks, views with a check option, and signals of triggers.
    **dict.fromkeys((1216, 1217, 1369, 1451, 1452, 1644, 3819, 4025), (ValueMalformed, _HINT_REFUSED)),
    # TiDB has garbage-collected the row versions that this transaction reads. A new transaction reads a newer
    # snapshot.
    **dict.fromkeys((8055, 9006), (ServerBusy, None)),
    # No space for a file, for a table, or for a temporary file.
    **dict.fromkeys((3, 1021, 1114), (DiskFailed, _HINT_DISK)),
}


@dataclass(frozen=True)
class Dialect:
    """The SQL dialect of a server: its family, and the leading numbers of its version."""

    mariadb: bool
    version: tuple[int, ...]


def dialect_of(version_text: str) -> Dialect:
    """Return the dialect of a server from its version text, such as 5.5.5-10.11.6-MariaDB-log."""
    mariadb = "mariadb" in version_text.lower()
    # Some MariaDB versions add a prefix that old clients take for a MySQL version.
    plain = version_text.removeprefix("5.5.5-") if mariadb else version_text
    match = _VERSION.match(plain)
    return Dialect(mariadb, tuple(int(part) for part in match[0].split(".")) if match else ())


class Session(Closing):
    """A session with the server, used by one thread at a time. As a context manager, it closes itself."""

    def __init__(self, address: ServerAddress, connection: "pymysql.connections.Connection[Any]") -> None:
        self.address = address
        self.dialect = dialect_of(str(connection.get_server_info()))
        self._connection = connection

    def close(self) -> None:
        """End the session. The server rolls back an open transaction. May be called twice."""
        if self._connection.open:
            self._connection.close()

    def execute(self, *pieces: bytes) -> int:
        """Run a statement, passed in pieces, and return the number of affected rows."""
        try:
            self._connection._execute_command(COMMAND.COM_QUERY, b"".join(pieces))
            self._connection._affected_rows = self._connection._read_query_result(unbuffered=False)
            return int(self._connection._affected_rows)
        except pymysql.err.Error as problem:
            raise self._translate(problem) from problem

    def run(self, sql: str, args: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Run a statement and return all its rows; [] if it has no result."""
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(sql, args)
                return list(cursor.fetchall())
        except pymysql.err.Error as problem:
            raise self._translate(problem) from problem

    def batches(self, sql: str, result: ResultSet) -> Iterator[Any]:
        """Run a query and yield the batches that the kernel decodes from its rows.

        A caller that stops early has to close the session. Raises ValueMalformed for values that contradict
        their declared types.
        """
        try:
            self._connection._execute_command(COMMAND.COM_QUERY, sql.encode())
        except pymysql.err.Error as problem:
            raise self._translate(problem) from problem
        yield from read_batches(result, _READ_BYTES, self._receive)
        if result.server_error is not None:
            number, message = result.server_error
            raise self._translate(pymysql.err.OperationalError(number, message))

    def _receive(self, into: memoryview) -> int:
        try:
            count: int = self._connection._rfile.readinto1(into)
        except OSError as problem:
            raise ConnectionLost(f"{self.address}: {problem}") from problem
        if not count:
            raise ConnectionLost(f"{self.address}: the connection is closed")
        return count

    def literal(self, value: Any) -> str:
        """Return a value as an SQL literal."""
        return str(self._connection.literal(value))

    def commit(self) -> None:
        """Commit the transaction."""
        self.execute(b"COMMIT")

    def rollback(self) -> None:
        """Roll back the open transaction."""
        self.execute(b"ROLLBACK")

    def _translate(self, problem: pymysql.err.Error) -> PenstockError:
        return translate_error(problem, str(self.address), of_target=_OF_TARGET)


def connect(address: ServerAddress, *statements: str) -> Session:
    """Open a session without autocommit, and run statements that configure it.

    The session uses UTC and strict mode, and accepts zero dates. Raises AuthenticationFailed, TlsFailed,
    ConnectionLost, ServerBusy, PrivilegeMissing, OptionInvalid.
    """
    try:
        connection = dial(
            address,
            autocommit=False,
            read_seconds=STATEMENT_SECONDS_MAX,
            write_seconds=STATEMENT_SECONDS_MAX,
            conv=_CONVERSIONS,
        )
    except pymysql.err.Error as problem:
        raise translate_error(problem, str(address), of_target=_OF_TARGET) from problem
    session = Session(address, connection)
    try:
        session.run(f"SET SESSION time_zone='+00:00', SESSION sql_mode='{SQL_MODE}'")
        for statement in statements:
            session.run(statement)
    except PenstockError:
        session.close()
        raise
    return session


# Values stay in the text form that the server sends, and callers convert them.
_CONVERSIONS: dict[Any, Any] = dict(pymysql.converters.encoders)
# Use strict mode, so that no value is changed silently, but allow the dates that a source may contain.
SQL_MODE = "STRICT_ALL_TABLES,ALLOW_INVALID_DATES,NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION"


def refusal_of(error: PenstockError) -> int:
    """Return the server's error number for an error of a session, 0 if there is none."""
    problem = error.__cause__
    return number_of(problem) if isinstance(problem, pymysql.err.Error) else 0
