# SPDX-License-Identifier: Apache-2.0
"""Translates the server's error numbers into Penstock errors, in one table.

The numbers are those of the MySQL "Server Error Message Reference" and MariaDB's "Error Codes"; 2000 to 2999
belong to the client library. Texts differ by version and language, so they are never examined.
"""

import ssl
from collections.abc import Mapping

import pymysql.err

from penstock.errors import (
    AnswerTimedOut,
    AuthenticationFailed,
    ConnectionLost,
    DumpReplaced,
    PenstockError,
    PositionPurged,
    PrivilegeMissing,
    ServerBusy,
    ServerUnsupported,
    TlsFailed,
)

SYNTAX_ERROR = 1064
UNKNOWN_VARIABLE = 1193
UNKNOWN_TABLE = 1109
NO_SUCH_TABLE = 1146
UNKNOWN_COLUMN = 1054
DUMP_REFUSED = 1236
NO_BINARY_LOGGING = 1381

# A statement that is spelled differently in another version or family fails with one of these.
SPELLED_OTHERWISE = frozenset((SYNTAX_ERROR, UNKNOWN_VARIABLE, UNKNOWN_TABLE, NO_SUCH_TABLE, UNKNOWN_COLUMN))

_HINT_ACCOUNT = "Check the user, its host part and the password (option, URL, PENSTOCK_PASSWORD)"
HINT_GRANT = "`penstock check` prints the GRANT statement that is missing"
_HINT_GC = "Keep old versions for longer: SET GLOBAL tidb_gc_life_time = '24h'"
_HINT_BINLOG = "Start the server with --log-bin --server-id=1"

# The error and the hint for each number.
Classes = Mapping[int, tuple[type[PenstockError], str | None]]

_CLASSES: Classes = {
    1045: (AuthenticationFailed, _HINT_ACCOUNT),  # access denied for user
    1698: (AuthenticationFailed, _HINT_ACCOUNT),  # access denied, socket or no-password plugin
    1130: (AuthenticationFailed, _HINT_ACCOUNT),  # host is not allowed to connect
    1129: (AuthenticationFailed, "Run FLUSH HOSTS on the server, it blocks this host"),
    1251: (AuthenticationFailed, "Give the account caching_sha2_password or mysql_native_password"),
    2059: (AuthenticationFailed, "Give the account caching_sha2_password or mysql_native_password"),
    2061: (AuthenticationFailed, _HINT_ACCOUNT),  # the client's plugin reports a failure
    1820: (
        AuthenticationFailed,
        "Change the account's password first: ALTER USER ... IDENTIFIED BY",
    ),
    1862: (AuthenticationFailed, "The account's password has expired: ALTER USER ... IDENTIFIED BY"),
    3118: (AuthenticationFailed, "The account is locked: ALTER USER ... ACCOUNT UNLOCK"),
    4151: (AuthenticationFailed, "The account is locked: ALTER USER ... ACCOUNT UNLOCK"),  # MariaDB
    1044: (PrivilegeMissing, HINT_GRANT),
    1142: (PrivilegeMissing, HINT_GRANT),
    1143: (PrivilegeMissing, HINT_GRANT),
    1227: (PrivilegeMissing, HINT_GRANT),
    1370: (PrivilegeMissing, HINT_GRANT),
    1040: (ServerBusy, None),  # too many connections
    1203: (ServerBusy, None),  # max_user_connections
    1205: (ServerBusy, None),  # lock wait timeout
    1213: (ServerBusy, None),  # deadlock
    1226: (ServerBusy, None),  # a resource of the account is used up
    2002: (ConnectionLost, None),
    2003: (ConnectionLost, None),
    2006: (ConnectionLost, None),
    2013: (ConnectionLost, None),
    2014: (ConnectionLost, None),  # packets out of order: the connection is unusable
    2055: (ConnectionLost, None),
    1053: (ConnectionLost, None),  # server shutdown in progress
    1152: (ConnectionLost, None),  # aborted connection
    1158: (ConnectionLost, None),
    1159: (ConnectionLost, None),
    1160: (ConnectionLost, None),
    1161: (ConnectionLost, None),
    1317: (ConnectionLost, None),  # query execution was interrupted
    1927: (ConnectionLost, None),  # MariaDB: connection was killed
    3169: (ConnectionLost, None),  # MySQL: session was killed
    4031: (ConnectionLost, None),  # MySQL: disconnected for inactivity
    # MariaDB since 10.4: another dump uses this server id.
    4052: (DumpReplaced, "Leave server_id out for a random one, or give each replica its own"),
    2026: (TlsFailed, "Set ssl_mode: the server and the TLS settings do not agree"),
    3159: (TlsFailed, "The server takes encrypted connections only: set ssl_mode=required"),
    # TiDB: PD or TiKV timed out or is busy, or a region has no leader.
    **dict.fromkeys((9001, 9002, 9003, 9005), (ServerBusy, None)),
    # TiDB: the versions of the requested time were garbage-collected.
    8055: (PositionPurged, _HINT_GC),
    9006: (PositionPurged, _HINT_GC),
    NO_BINARY_LOGGING: (ServerUnsupported, _HINT_BINLOG),
}


def error_of(
    number: int, message: str, *, position: str | None = None, of_target: Classes | None = None
) -> PenstockError:
    """Return the error for a number sent by the server. An unlisted number is ServerUnsupported.

    `of_target` overrides the errors that have a different meaning or hint when a target's server sends them.
    """
    unlisted = ServerUnsupported, None
    kind, hint = (of_target or {}).get(number) or _CLASSES.get(number, unlisted)
    return kind(f"{message} (server error {number})", position=position, hint=hint)


def translate_error(
    problem: pymysql.err.Error, server: str, *, of_target: Classes | None = None
) -> PenstockError:
    """Translate a PyMySQL error into a Penstock error, as `error_of` does. `server` names the server without
    a password."""
    number, message = _number_and_text(problem)
    cause = getattr(problem, "original_exception", None)
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return TlsFailed(
            f"{server}: TLS could not be set up: {cause.reason or cause}",
            hint="Check ssl_mode and ssl_ca: does that authority sign for the server's name?",
        )
    if isinstance(cause or problem.__context__, TimeoutError):
        return AnswerTimedOut(f"{server} does not answer: {message}")
    if number == 0:
        return ConnectionLost(f"{server}: {message or 'the connection is closed'}")
    return error_of(number, f"{server}: {message}", of_target=of_target)


def number_of(problem: pymysql.err.Error) -> int:
    """Return the server's error number, 0 if there is none."""
    return _number_and_text(problem)[0]


def _number_and_text(problem: pymysql.err.Error) -> tuple[int, str]:
    match problem.args:
        case (int(number), message, *_):
            return number, str(message)
        case (message, *_):
            return 0, str(message)
    return 0, ""
