# SPDX-License-Identifier: Apache-2.0
"""A session on a server. PyMySQL performs the handshake, TLS and authentication.

The server's family and version determine whether the old or the new spelling of a statement is tried first.
Whether the other spelling is then tried depends only on the error number, so unknown versions work too.
"""

import contextlib
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pymysql
import pymysql.constants.COMMAND
import pymysql.cursors

from penstock.closing import Closing
from penstock.errors import AuthenticationFailed, PrivilegeMissing, ServerUnsupported
from penstock.gtid_sets import NO_GTIDS, ExecutedSet, LoggedSet, mariadb_gtids
from penstock.model import ServerAddress
from penstock.mysql.dial import CONNECT_SECONDS_MAX, dial
from penstock.mysql.server_errors import HINT_GRANT, SPELLED_OTHERWISE, number_of, translate_error

MYSQL = "mysql"
MARIADB = "mariadb"

# Limits the wait for one response. A server that takes longer is considered hung, and another server may have
# taken over.
ANSWER_SECONDS_MAX = 10.0
# The limit for long queries. On a cold server, reading the columns of 100,000 tables takes minutes, and so
# does the query of a full load.
READING_SECONDS_MAX = 600.0

# A longer payload is continued in the next packet.
_PACKET_BYTES_MAX = 0xFFFFFF

# MySQL 8.2 added SHOW BINARY LOG STATUS, MySQL 8.0.22 SHOW REPLICAS, MariaDB 10.5 SHOW REPLICA HOSTS.
_BINARY_LOG_STATUS_SINCE = (8, 2, 0)
_SHOW_REPLICAS_SINCE = (8, 0, 22)


@dataclass(frozen=True)
class ServerIdentity:
    """The identity of a server: everything that must stay the same for a position to remain valid.

    `version` contains the leading numbers of the server's version; use it only to choose which spelling to
    try first. `server_uuid` is MySQL's. `gtid_domain` is MariaDB's `gtid_domain_id`. `gtid_mode` is MySQL's
    setting. It is ON for MariaDB, which always writes GTIDs.
    """

    flavor: str
    version: tuple[int, ...]
    version_text: str
    server_id: int
    server_uuid: str | None
    gtid_domain: int | None
    gtid_mode: str

    @property
    def is_tidb(self) -> bool:
        """Whether the server is a TiDB server, which speaks MySQL's protocol."""
        return "-TiDB-" in self.version_text

    @property
    def key(self) -> str:
        """Text that stays equal across restarts of a server and differs between servers."""
        if self.flavor == MARIADB:
            return f"mariadb:{self.gtid_domain}-{self.server_id}"
        return f"mysql:{self.server_uuid or self.server_id}"


@dataclass(frozen=True)
class LogHead:
    """The end of the binlog, where the next event will be written."""

    file: str
    offset: int


@dataclass(frozen=True)
class LogFile:
    """A binlog file as listed by the server. `encrypted` refers to the file on disk; the stream is not
    encrypted.
    """

    file: str
    bytes: int
    encrypted: bool


class Connection(Closing):
    """A session with a server. Not safe for concurrent use. As a context manager, it closes itself.

    Raises errors of the module `penstock.errors`, chosen by the server's error number.
    """

    def __init__(self, address: ServerAddress, session: "pymysql.connections.Connection[Any]") -> None:
        self.address = address
        self._session: pymysql.connections.Connection[Any] | None = session
        self._identity: ServerIdentity | None = None

    def close(self) -> None:
        """End the session. Idempotent."""
        session, self._session = self._session, None
        if session is not None and session.open:
            session.close()

    def interrupt(self) -> None:
        """Wake a thread that waits for a response; call this from another thread. The waiting thread gets
        ConnectionLost.
        """
        session = self._session
        stream = session._sock if session is not None else None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def query(self, sql: str, args: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Run one statement and return its rows as dicts, all in memory; [] if it returns no rows."""
        return self.query_first([sql], args)

    def query_first(
        self, spellings: Sequence[str], args: Sequence[Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run the first spelling that the server supports; try the next only on SPELLED_OTHERWISE."""
        assert self._session is not None, "the connection is closed"
        for alternatives_left, sql in enumerate(spellings, start=1 - len(spellings)):
            try:
                with self._session.cursor(pymysql.cursors.DictCursor) as cursor:
                    cursor.execute(sql, args)
                    return list(cursor.fetchall())
            except pymysql.err.Error as problem:
                if alternatives_left == 0 or number_of(problem) not in SPELLED_OTHERWISE:
                    raise translate_error(problem, str(self.address)) from problem
        raise AssertionError("no spelling was given")

    def variables(self, *names: str) -> dict[str, str]:
        """Return the values of the given global variables by lower-case name, without variables that do not
        exist.
        """
        marks = ", ".join(["%s"] * len(names))
        rows = self.query(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({marks})", names)
        return {str(row["Variable_name"]).lower(): str(row["Value"]) for row in rows}

    def identity(self) -> ServerIdentity:
        """Return the server's identity, read once per connection. The variables show the family."""
        if self._identity is None:
            variables = self.variables(
                "version", "server_id", "server_uuid", "gtid_domain_id", "gtid_mode", "version_comment"
            )
            flavor = MARIADB if "gtid_domain_id" in variables else MYSQL
            self._identity = ServerIdentity(
                flavor=flavor,
                version=_version_numbers(variables.get("version", "")),
                version_text=variables.get("version", ""),
                server_id=int(variables.get("server_id", "0")),
                server_uuid=variables.get("server_uuid") if flavor == MYSQL else None,
                gtid_domain=int(variables["gtid_domain_id"]) if flavor == MARIADB else None,
                gtid_mode="ON" if flavor == MARIADB else variables.get("gtid_mode", "OFF"),
            )
        return self._identity

    def head(self) -> LogHead:
        """Return the end of the binlog. Raises ServerUnsupported if the binlog is off.

        The Executed_Gtid_Set of the same row is not used: MySQL counts transactions only once they are
        committed, so some before this position may be missing from it.
        """
        row = self.log_status()
        return LogHead(str(row["File"]), int(row["Position"]))

    def executed(self) -> ExecutedSet:
        """Return the GTIDs that the server reports as executed; empty if it has no GTIDs."""
        if self.identity().flavor != MARIADB:
            return ExecutedSet(self._gtid_variable("gtid_executed"))
        ends: dict[tuple[int, int], int] = {}
        state = self._gtid_variable("gtid_binlog_state")
        for domain, server, number in mariadb_gtids(state):
            ends[domain, server] = max(number, ends.get((domain, server), 0))
        applied = frozenset(mariadb_gtids(self._gtid_variable("gtid_slave_pos")))
        return ExecutedSet(state, ends, applied)

    def purged(self) -> LoggedSet:
        """Return the GTIDs that precede the server's oldest file and that are not necessarily listed in any
        file.

        On MySQL, these are the purged transactions and those set on a restored or cloned server. On MariaDB,
        the files list them.
        """
        if self.identity().flavor == MARIADB:
            return NO_GTIDS
        return LoggedSet(self._gtid_variable("gtid_purged"))

    def _gtid_variable(self, name: str) -> str:
        """Return a variable that holds a GTID set, "" if the server does not have the variable."""
        if not self.variables(name):
            return ""
        # SHOW VARIABLES truncates long values.
        row = self.query(f"SELECT @@global.{name} AS gtid_set")[0]
        return str(row["gtid_set"] or "").replace("\n", "")

    def log_status(self) -> dict[str, Any]:
        """Return the row of SHOW BINARY LOG STATUS. Raises ServerUnsupported if the binlog is off."""
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
        """Return the binlog files that the server still has, oldest first."""
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

    def send_query(self, sql: str | bytes) -> socket.socket:
        """Send a query and return the socket, which delivers the response as raw packets.

        A caller that reads the whole response can keep using the session. Otherwise the caller must close the
        session.
        """
        assert self._session is not None, "the connection is closed"
        try:
            text = sql.encode() if isinstance(sql, str) else sql
            self._session._execute_command(pymysql.constants.COMMAND.COM_QUERY, text)
        except pymysql.err.Error as problem:
            raise translate_error(problem, str(self.address)) from problem
        assert self._session._sock is not None, "the connection is lost"
        stream: socket.socket = self._session._sock
        return stream

    def send_queries(self, texts: Sequence[str]) -> socket.socket:
        """Send short queries at once and return the socket, which delivers the responses in order.

        The server runs a query after it has sent the response to the query before, even if that one failed.
        All queries together must be shorter than what the network buffers, because the server does not read
        a query while it waits for its client to read a response. As for `send_query`, a caller that does not
        read all responses must close the session.
        """
        assert self._session is not None, "the connection is closed"
        packets = []
        for text in texts:
            payload = bytes([pymysql.constants.COMMAND.COM_QUERY]) + text.encode()
            assert len(payload) < _PACKET_BYTES_MAX, "a short query is one packet"
            # Each command starts a new sequence of packets, with number 0.
            packets.append(len(payload).to_bytes(3, "little") + b"\0" + payload)
        try:
            self._session._write_bytes(b"".join(packets))
        except pymysql.err.Error as problem:
            raise translate_error(problem, str(self.address)) from problem
        assert self._session._sock is not None, "the connection is lost"
        stream: socket.socket = self._session._sock
        return stream

    def command(self, code: int, payload: bytes) -> None:
        """Send one protocol command, to which the server responds with OK or an error."""
        assert self._session is not None, "the connection is closed"
        try:
            self._session._execute_command(code, payload)
            self._session._read_ok_packet()
        except pymysql.err.Error as problem:
            error = translate_error(problem, str(self.address))
            if isinstance(error, AuthenticationFailed):
                # The account has already logged in, so for a command this error number means a missing
                # privilege.
                raise PrivilegeMissing(error.message, hint=HINT_GRANT) from problem
            raise error from problem

    def release_socket(self) -> tuple[socket.socket, bytes]:
        """Detach the socket from the session and return it.

        Also returns bytes that PyMySQL has already read, so that none are lost: the server may send
        unrequested packets, for example when it shuts down. The caller closes the socket.
        """
        session, self._session = self._session, None
        assert session is not None, "the connection is closed"
        assert session._sock is not None, "the connection is lost"
        stream, reader = session._sock, session._rfile
        read_ahead = _buffered(stream, reader)
        # Detach the socket, because a garbage-collected PyMySQL session closes the socket that it holds.
        session._sock = session._rfile = None
        session._closed = True
        reader.detach()
        return stream, read_ahead


def _buffered(stream: socket.socket, reader: Any) -> bytes:
    """Return the reader's buffered bytes, without waiting for more."""
    stream.settimeout(0)
    try:
        buffered = reader.peek(1)
        return bytes(reader.read(len(buffered))) if buffered else b""
    except (ssl.SSLWantReadError, BlockingIOError):
        return b""


def connect(address: ServerAddress, answer_seconds: float = ANSWER_SECONDS_MAX) -> Connection:
    """Open a session. A response that takes longer than `answer_seconds` raises AnswerTimedOut.

    Raises AuthenticationFailed, TlsFailed, ConnectionLost, ServerBusy, OptionInvalid.
    """
    try:
        session = dial(
            address, autocommit=True, read_seconds=answer_seconds, write_seconds=CONNECT_SECONDS_MAX
        )
    except pymysql.err.Error as problem:
        raise translate_error(problem, str(address)) from problem
    return Connection(address, session)


def _version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading dotted numbers: (10, 11, 19) for "10.11.19-MariaDB-log"."""
    numbers = []
    for part in text.split("-", 1)[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
