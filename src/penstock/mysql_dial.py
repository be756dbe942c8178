# SPDX-License-Identifier: Apache-2.0
"""How PyMySQL is asked for a session, on a source and on a target alike."""

import ssl
from typing import Any

import pymysql

from penstock.model import ServerAddress

# Bounds each wait of a connection that is being made: TCP, the greeting, TLS, and each step of the login.
CONNECT_SECONDS_MAX = 10.0


class _Dialled(pymysql.connections.Connection):  # type: ignore[misc]
    """PyMySQL's session. Where no certificate is looked at, it loads no authorities: each time they would
    take as long as all the rest of a connection.
    """

    def _create_ssl_ctx(self, sslp: Any) -> ssl.SSLContext:
        if sslp:
            found: ssl.SSLContext = super()._create_ssl_ctx(sslp)
            return found
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context


def dial(
    address: ServerAddress, *, autocommit: bool, read_seconds: float, write_seconds: float, **more: Any
) -> pymysql.connections.Connection:
    """Return PyMySQL's own session on a server, by TLS where the address says so.

    `read_seconds` and `write_seconds` bound one wait for the server. Until the session is there no wait lasts
    longer than CONNECT_SECONDS_MAX: a server that hangs still accepts connections. `more` are PyMySQL's
    further arguments. Raises what PyMySQL does, which the caller tells in its own errors.
    """
    greeting_seconds = min(CONNECT_SECONDS_MAX, read_seconds)
    session = _Dialled(
        host=address.host,
        port=address.port,
        unix_socket=address.unix_socket,
        user=address.user,
        password=address.password.reveal().encode(),
        charset="utf8mb4",
        autocommit=autocommit,
        connect_timeout=greeting_seconds,
        read_timeout=greeting_seconds,
        write_timeout=write_seconds,
        program_name="penstock",
        **address.tls.session_arguments(local=address.unix_socket is not None),
        **more,
    )
    # PyMySQL has one timeout for the login and for queries, and reads it before each wait.
    session._read_timeout = read_seconds
    return session
