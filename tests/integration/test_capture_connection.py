# SPDX-License-Identifier: Apache-2.0
import contextlib
from dataclasses import replace

import pytest

from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PrivilegeMissing,
    ServerBusy,
    ServerUnsupported,
    TlsFailed,
)
from penstock.model import ServerAddress, Tls
from penstock.mysql.connection import LogHead, connect
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


def test_server_identifies_itself(server: Server) -> None:
    with connect(ServerAddress.parse(server.url())) as connection:
        identity = connection.identity()
    assert identity.flavor == server.family
    assert identity.server_id == server.port
    assert identity.gtid_mode == "ON"
    assert ".".join(map(str, identity.version)) in server.version
    assert (identity.server_uuid is None) == (server.family == "mariadb")
    assert identity.key.startswith(server.family)


def test_head_and_executed_gtids_move_with_each_commit(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    with connect(ServerAddress.parse(server.url())) as connection:
        before, executed_before = connection.head(), connection.executed()
        server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY)")
        after, executed = connection.head(), connection.executed()
        logs = connection.binary_logs()
    assert (after.file, after.offset) > (before.file, before.offset)
    assert executed_before.missing(executed.text)
    assert executed.contains(executed_before.text)
    assert "\n" not in executed.text
    assert [log.file for log in logs] == [path.name for path in server.binlog_files()]
    assert isinstance(after, LogHead)
    assert not any(log.encrypted for log in logs)


def test_socket_file_serves_as_well_as_tcp(server: Server) -> None:
    over_socket = ServerAddress(user="root", unix_socket=str(server.socket))
    with connect(over_socket) as local, connect(ServerAddress.parse(server.url())) as other:
        assert local.identity() == other.identity()


def test_wrong_password_is_refused_by_name(server: Server) -> None:
    address = ServerAddress.parse(server.url(), password="not the password")
    with pytest.raises(AuthenticationFailed) as refused:
        connect(address)
    assert "not the password" not in str(refused.value)


def test_closed_port_is_reported_as_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost):
        connect(ServerAddress(port=1))


def test_missing_privilege_is_named(server: Server) -> None:
    server.sql("DROP USER IF EXISTS poor; CREATE USER poor IDENTIFIED BY 'x-1-Y-2'")
    privilege = "BINLOG MONITOR" if server.family == "mariadb" else "REPLICATION CLIENT"
    with (
        connect(ServerAddress.parse(server.url("poor"), password="x-1-Y-2")) as connection,
        pytest.raises(PrivilegeMissing) as refused,
    ):
        connection.head()
    assert privilege in refused.value.message
    server.sql(f"GRANT {privilege} ON *.* TO poor")
    with connect(ServerAddress.parse(server.url("poor"), password="x-1-Y-2")) as connection:
        assert connection.head().file == server.binlog_files()[-1].name


def test_server_without_free_connections_is_busy(start_server: StartServer) -> None:
    server = start_server("mariadb", max_connections=10, extra_max_connections=1)
    address = ServerAddress.parse(server.url())
    with contextlib.ExitStack() as held:

        def is_let_in() -> bool:
            try:
                held.enter_context(connect(address))
            except ServerBusy:
                # The server counts an ended session until it has cleaned the session up.
                return False
            return True

        # The server accepts one connection beyond max_connections, for an administrator.
        for _ in range(10):
            wait_until(is_let_in)
        with pytest.raises(ServerBusy):
            held.enter_context(connect(address))


def test_server_without_a_binlog_is_reported(start_server: StartServer) -> None:
    server = start_server("mariadb", **{"skip-log-bin": None})
    with connect(ServerAddress.parse(server.url())) as connection:
        with pytest.raises(ServerUnsupported):
            connection.head()
        with pytest.raises(ServerUnsupported):
            connection.binary_logs()


@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
def test_tls_is_verified_as_its_mode_requires(start_server: StartServer, flavor: str) -> None:
    server = start_server(flavor, tls=True)
    address = ServerAddress.parse(server.url())
    ca = str(server.tls_authority)

    def cipher(tls: Tls, host: str = "127.0.0.1") -> str:
        with connect(replace(address, tls=tls, host=host)) as connection:
            return str(connection.query("SHOW SESSION STATUS LIKE 'Ssl_cipher'")[0]["Value"])

    assert cipher(Tls("disabled")) == ""
    for mode in ("preferred", "required"):
        assert cipher(Tls(mode)) != ""
    for mode in ("verify_ca", "verify_identity"):
        assert cipher(Tls(mode, ca)) != ""
        with pytest.raises(TlsFailed):
            cipher(Tls(mode))
    # Another spelling of the same address, which is not in the certificate.
    assert cipher(Tls("verify_ca", ca), host="127.1") != ""
    with pytest.raises(TlsFailed):
        cipher(Tls("verify_identity", ca), host="127.1")
    with pytest.raises(OptionInvalid):
        cipher(Tls("verify_ca", ca + ".missing"))


def test_server_that_requires_tls_refuses_plain_connections(start_server: StartServer) -> None:
    server = start_server("mysql", tls=True, require_secure_transport=True)
    with pytest.raises(TlsFailed, match="ssl_mode"):
        connect(replace(ServerAddress.parse(server.url()), tls=Tls("disabled")))


def test_socket_outlives_the_session_that_opened_it(server: Server) -> None:
    connection = connect(ServerAddress.parse(server.url()))
    stream, read_ahead = connection.release_socket()
    connection.close()
    del connection
    try:
        assert read_ahead == b""
        stream.settimeout(WAIT_SECONDS_MAX)
        # COM_PING answered by OK shows that the session is still alive on the server.
        stream.sendall(b"\x01\x00\x00\x00\x0e")
        assert stream.recv(5)[4] == 0
    finally:
        stream.close()
