# SPDX-License-Identifier: Apache-2.0
import pytest

from penstock.capture.connection import connect
from penstock.capture.refusal import check_gtid_set
from penstock.errors import PositionPurged
from penstock.model import ServerAddress
from tests.fixture_types import StartServer


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_dump_may_start_exactly_where_the_oldest_file_begins(flavor: str, start_server: StartServer) -> None:
    server = start_server(flavor)
    with connect(ServerAddress.parse(server.url("root"))) as connection:
        before = connection.executed().text
        server.sql("CREATE DATABASE d; FLUSH BINARY LOGS")
        head, executed = connection.head(), connection.executed().text
        server.sql(f"PURGE BINARY LOGS TO '{head.file}'")
        assert [log.file for log in connection.binary_logs()] == [head.file]
        assert check_gtid_set(connection, executed) is None
        assert isinstance(check_gtid_set(connection, before), PositionPurged)
        server.sql("CREATE DATABASE e")
        assert check_gtid_set(connection, connection.executed().text) is None
