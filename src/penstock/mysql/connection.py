# SPDX-License-Identifier: Apache-2.0
"""One session on a server: handshake, TLS and authentication through PyMySQL, then plain statements.

Old and new spellings of a statement are tried in the order the family and version suggest; only the
error number decides whether the other spelling is tried, so an unheard-of version number works too.
"""

import contextlib
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import pymysql
import pymysql.constants.COMMAND
import pymysql.cursors

from penstock.errors import AuthenticationFailed, PrivilegeMissing, ServerUnsupported
from penstock.gtid_sets import NO_GTIDS, ExecutedSet, LoggedSet, mariadb_gtids
from penstock.model import ServerAddress
from penstock.mysql.dial import CONNECT_SECONDS_MAX, dial
from penstock.mysql.server_errors import HINT_GRANT, SPELLED_OTHERWISE, number_of, translate

MYSQL = "mysql"
MARIADB = "mariadb"

# Bounds the wait for one answer. A server that takes longer hangs, and another one may have taken over.
ANSWER_SECONDS_MAX = 10.0
# Reading the columns of a hundred thousand tables takes minutes on a cold server, and so does a load's query.
READING_SECONDS_MAX = 600.0

# MySQL 8.2 brought SHOW BINARY LOG STATUS, 8.0.22 SHOW REPLICAS; MariaDB 10.5 SHOW REPLICA HOSTS.
_BINARY_LOG_STATUS_SINCE = (8, 2, 0)
_SHOW_REPLICAS_SINCE = (8, 0, 22)


@dataclass(frozen=True)
class ServerIdentity:
    """Who answers: what must stay the same for a position to keep its meaning.

    `version` is the leading numbers of the server's version, for choosing a first spelling only.
    `server_uuid` is MySQL's; `gtid_domain` MariaDB's `gtid_domain_id`. `gtid_mode` is MySQL's
    setting; MariaDB always writes GTIDs, so it is ON there.
    """

    flavor: str
    version: tuple[int, ...]
    version_text: str
    server_id: int
    server_uuid: str | None
    gtid_domain: int | None
    gtid_mode: str

    @property
    def key(self) -> str:
        """Text that is equal for one server's restarts and differs between servers."""
        if self.flavor == MARIADB:
            return f"mariadb:{self.gtid_domain}-{self.server_id}"
        return f"mysql:{self.server_uuid or self.server_id}"


@dataclass(frozen=True)
class LogHead:
    """The end of the binlog: where the next event will be written."""

    file: str
    offset: int


@dataclass(frozen=True)
class LogFile:
    """A binlog file as the server lists it. `encrypted` means at rest; the stream is clear."""

    file: str
    bytes: int
    encrypted: bool


class Connection:
    """A session. Not for several threads at once; a context manager that closes.

    Errors are those of `penstock.errors`, chosen by the server's error number.
    """

    def __init__(self, address: ServerAddress, session: "pymysql.connections.Connection[Any]") -> None:
        self.address = address
        self._session: pymysql.connections.Connection[Any] | None = session
        self._identity: ServerIdentity | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session. Closing twice is harmless."""
        session, self._session = self._session, None
        if session is not None and session.open:
            session.close()

    def interrupt(self) -> None:
        """Wake whoever waits for an answer, from another thread: it is told that the connection is lost."""
        session = self._session
        stream = session._sock if session is not None else None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def query(self, sql: str, args: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Run one statement and return its rows as dicts, all in memory; [] where it has none."""
        return self.query_first([sql], args)

    def query_first(
        self, spellings: Sequence[str], args: Sequence[Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run the first spelling this server understands: the next is tried only on SPELLED_OTHERWISE."""
        assert self._session is not None, "the connection is closed"
        for left, sql in enumerate(spellings, start=1 - len(spellings)):
            try:
                with self._session.cursor(pymysql.cursors.DictCursor) as cursor:
                    cursor.execute(sql, args)
                    return list(cursor.fetchall())
            except pymysql.err.Error as problem:
                if left == 0 or number_of(problem) not in SPELLED_OTHERWISE:
                    raise translate(problem, str(self.address)) from problem
        raise AssertionError("no spelling was given")

    def variables(self, *names: str) -> dict[str, str]:
        """Return the global variables that exist among these, by lower-case name."""
        marks = ", ".join(["%s"] * len(names))
        rows = self.query(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({marks})", names)
        return {str(row["Variable_name"]).lower(): str(row["Value"]) for row in rows}

    def identity(self) -> ServerIdentity:
        """Return who answers; asked once a connection. The family is told by its own variables."""
        if self._identity is None:
            found = self.variables(
                "version", "server_id", "server_uuid", "gtid_domain_id", "gtid_mode", "version_comment"
            )
            flavor = MARIADB if "gtid_domain_id" in found else MYSQL
            self._identity = ServerIdentity(
                flavor=flavor,
                version=_version_numbers(found.get("version", "")),
                version_text=found.get("version", ""),
                server_id=int(found.get("server_id", "0")),
                server_uuid=found.get("server_uuid") if flavor == MYSQL else None,
                gtid_domain=int(found["gtid_domain_id"]) if flavor == MARIADB else None,
                gtid_mode="ON" if flavor == MARIADB else found.get("gtid_mode", "OFF"),
            )
        return self._identity

    def head(self) -> LogHead:
        """Return the end of the binlog. Raises ServerUnsupported where the binlog is off.

        The Executed_Gtid_Set beside it is left out: it may miss transactions before this position, which
        MySQL counts only once they are committed.
        """
        row = self.log_status()
        return LogHead(str(row["File"]), int(row["Position"]))

    def executed(self) -> ExecutedSet:
        """Return the GTIDs that the server reports as executed; empty where it has no GTIDs."""
        if self.identity().flavor != MARIADB:
            return ExecutedSet(self._gtid_variable("gtid_executed"))
        ends: dict[tuple[int, int], int] = {}
        for domain, server, number in mariadb_gtids(self._gtid_variable("gtid_binlog_state")):
            ends[domain, server] = max(number, ends.get((domain, server), 0))
        applied = frozenset(mariadb_gtids(self._gtid_variable("gtid_slave_pos")))
        return ExecutedSet(self._gtid_variable("gtid_binlog_pos"), ends, applied)

    def purged(self) -> LoggedSet:
        """Return the GTIDs that came before the server's oldest file and may be listed in none.

        MySQL: what was purged, and what a restored or cloned server was told to have. MariaDB's files list
        them.
        """
        if self.identity().flavor == MARIADB:
            return NO_GTIDS
        return LoggedSet(self._gtid_variable("gtid_purged"))

    def _gtid_variable(self, name: str) -> str:
        """Return a variable that is a GTID set, "" on a server that has none of the name."""
        if not self.variables(name):
            return ""
        # SHOW VARIABLES cuts long values off.
        row = self.query(f"SELECT @@global.{name} AS gtid_set")[0]
        return str(row["gtid_set"] or "").replace("\n", "")

    def log_status(self) -> dict[str, Any]:
        """Return the row of SHOW BINARY LOG STATUS. Raises ServerUnsupported where the binlog is off."""
        identity = self.identity()
        spellings = ["SHOW MASTER STATUS", "SHOW BINARY LOG STATUS"]
        if identity.flavor == MYSQL and identity.version >= _BINARY_LOG_STATUS_SINCE:
            spellings.reverse()
        rows = self.query_first(spellings)
        if not rows:
            raise ServerUnsupported(
                f"{self.address}: the binary log is off", hint="Start the server with --log-bin --server-id=1"
            )
        return rows[0]

    def binary_logs(self) -> list[LogFile]:
        """Return the binlog files the server still has, oldest first."""
        rows = self.query("SHOW BINARY LOGS")
        return [
            LogFile(
                str(row["Log_name"]), int(row["File_size"]), str(row.get("Encrypted", "No")).lower() == "yes"
            )
            for row in rows
        ]

    def replicas(self) -> list[dict[str, Any]]:
        """Return the registered replicas: rows with server_id, host and, on MySQL, replica_uuid."""
        identity = self.identity()
        spellings = ["SHOW SLAVE HOSTS", "SHOW REPLICAS"]
        if identity.flavor == MYSQL and identity.version >= _SHOW_REPLICAS_SINCE:
            spellings.reverse()
        rows = self.query_first(spellings)
        return [
            {name.lower().replace("slave", "replica"): value for name, value in row.items()} for row in rows
        ]

    def send_query(self, sql: str) -> socket.socket:
        """Send a query and lend the socket, on which its answer comes as raw packets.

        Who reads the answer to its end leaves the session as it was; who does not has to close it.
        """
        assert self._session is not None, "the connection is closed"
        try:
            self._session._execute_command(pymysql.constants.COMMAND.COM_QUERY, sql.encode())
        except pymysql.err.Error as problem:
            raise translate(problem, str(self.address)) from problem
        assert self._session._sock is not None, "the connection is lost"
        stream: socket.socket = self._session._sock
        return stream

    def command(self, code: int, payload: bytes) -> None:
        """Send one protocol command that is answered by OK or by an error."""
        assert self._session is not None, "the connection is closed"
        try:
            self._session._execute_command(code, payload)
            self._session._read_ok_packet()
        except pymysql.err.Error as problem:
            error = translate(problem, str(self.address))
            if isinstance(error, AuthenticationFailed):
                # The account is in already: for a command, the same number means that it may not.
                raise PrivilegeMissing(error.message, hint=HINT_GRANT) from problem
            raise error from problem

    def release_socket(self) -> tuple[socket.socket, bytes]:
        """Hand the socket over and forget the session.

        Returns it with any bytes PyMySQL has read ahead, so that none is lost: the server may
        speak out of turn, to say that it shuts down. The caller closes the socket.
        """
        session, self._session = self._session, None
        assert session is not None, "the connection is closed"
        assert session._sock is not None, "the connection is lost"
        stream, reader = session._sock, session._rfile
        read_ahead = _buffered(stream, reader)
        # PyMySQL closes what it still holds when it is collected, so it must hold nothing.
        session._sock = session._rfile = None
        session._closed = True
        reader.detach()
        return stream, read_ahead


def _buffered(stream: socket.socket, reader: Any) -> bytes:
    """Return what the reader holds, without waiting for more."""
    stream.settimeout(0)
    try:
        waiting = reader.peek(1)
        return bytes(reader.read(len(waiting))) if waiting else b""
    except (ssl.SSLWantReadError, BlockingIOError):
        return b""


def connect(address: ServerAddress, answer_seconds: float = ANSWER_SECONDS_MAX) -> Connection:
    """Open a session whose answers are each waited for up to `answer_seconds`, then AnswerTimedOut is raised.

    Raises AuthenticationFailed, TlsFailed, ConnectionLost, ServerBusy, OptionInvalid.
    """
    try:
        session = dial(
            address, autocommit=True, read_seconds=answer_seconds, write_seconds=CONNECT_SECONDS_MAX
        )
    except pymysql.err.Error as problem:
        raise translate(problem, str(address)) from problem
    return Connection(address, session)


def _version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading dotted numbers: "10.11.19-MariaDB-log" is (10, 11, 19)."""
    numbers = []
    for part in text.split("-", 1)[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
