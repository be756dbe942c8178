# SPDX-License-Identifier: Apache-2.0
"""Creates PyMySQL sessions, for sources and targets alike."""

import ssl
from typing import Any

import pymysql

from penstock.model import ServerAddress

# Limits each wait while connecting: TCP, the greeting, TLS, and each step of the login.
CONNECT_SECONDS_MAX = 10.0


class _Session(pymysql.connections.Connection):  # type: ignore[misc]
    """A PyMySQL session that loads no certificate authorities unless it verifies certificates.

    Loading them would take as long as the rest of the connection.
    """

    def _create_ssl_ctx(self, sslp: Any) -> ssl.SSLContext:
        if sslp:
            context_of_options: ssl.SSLContext = super()._create_ssl_ctx(sslp)
            return context_of_options
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context


def dial(
    address: ServerAddress, *, autocommit: bool, read_seconds: float, write_seconds: float, **more: Any
) -> pymysql.connections.Connection:
    """Open a PyMySQL session on a server, over TLS if the address requests it.

    `read_seconds` and `write_seconds` limit each wait for the server. While connecting, no wait exceeds
    CONNECT_SECONDS_MAX, because a hung server still accepts connections. `more` are further PyMySQL
    arguments. Raises PyMySQL's exceptions, which the caller translates.
    """
    greeting_seconds = min(CONNECT_SECONDS_MAX, read_seconds)
    session = _Session(
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
    # PyMySQL uses one timeout for the login and for queries, and reads it before each wait. From here on it
    # applies to queries.
    session._read_timeout = read_seconds
    return session
