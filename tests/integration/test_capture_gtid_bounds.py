# SPDX-License-Identifier: Apache-2.0
import pytest

from penstock import read_binlog
from penstock.errors import PositionInvalid, PositionPurged
from penstock.model import ServerAddress
from penstock.mysql.connection import connect
from penstock.mysql.refusal import check_gtid_set
from penstock.mysql.start import begin_after
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from tests.support.capture.captured_log import purge
from tests.support.suite.fixture_types import StartServer


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_dump_may_start_exactly_where_the_oldest_file_begins(flavor: str, start_server: StartServer) -> None:
    server = start_server(flavor)
    with connect(ServerAddress.parse(server.url("root"))) as connection:
        before = connection.executed().text
        server.sql("CREATE DATABASE d; FLUSH BINARY LOGS")
        executed, oldest = connection.executed().text, purge(server)
        assert [log.file for log in connection.binary_logs()] == [oldest]
        assert check_gtid_set(connection, executed) is None
        assert isinstance(check_gtid_set(connection, before), PositionPurged)
        server.sql("CREATE DATABASE e")
        assert check_gtid_set(connection, connection.executed().text) is None


def test_mariadb_server_with_other_transactions_under_the_same_numbers_is_detected(
    start_server: StartServer,
) -> None:
    server = start_server("mariadb")
    with connect(ServerAddress.parse(server.url("root"))) as connection:
        server_id = connection.identity().server_id
        other_id = server_id + 1
        # This simulates a failover to a replica that had not received the other server's last transaction.
        server.sql(f"RESET MASTER; SET GLOBAL gtid_binlog_state = '0-{other_id}-99'")
        server.sql("CREATE DATABASE d; CREATE DATABASE e")
        assert connection.executed().text == f"0-{other_id}-99,0-{server_id}-101"
        lost = f"0-{other_id}-100"
        assert connection.executed().missing(lost) == lost
        assert isinstance(check_gtid_set(connection, lost), PositionInvalid)
        assert check_gtid_set(connection, f"0-{other_id}-99") is None
        assert check_gtid_set(connection, f"0-{server_id}-100") is None


def test_restored_mariadb_server_knows_the_transactions_of_its_backup(start_server: StartServer) -> None:
    server = start_server("mariadb")
    with connect(ServerAddress.parse(server.url("root"))) as connection:
        other_id = connection.identity().server_id + 1
        server.sql(f"RESET MASTER; SET GLOBAL gtid_slave_pos = '0-{other_id}-99'")
        assert connection.executed(), "what it has from its backup counts, though its log is empty"
        server.sql("CREATE DATABASE d")
        assert check_gtid_set(connection, f"0-{other_id}-99") is None
        assert isinstance(check_gtid_set(connection, f"0-{other_id}-100"), PositionInvalid)
        # The transactions between this transaction and the backup are in no log of the server.
        assert isinstance(check_gtid_set(connection, f"0-{other_id}-90"), PositionPurged)


def test_mariadb_transaction_with_a_lower_number_behind_the_position_is_not_passed_over(
    start_server: StartServer,
) -> None:
    """This happens with gtid_strict_mode=OFF after a failover, or with two primaries in one domain."""
    server = start_server("mariadb")
    address = ServerAddress.parse(server.url("root"))
    server.sql("RESET MASTER; CREATE DATABASE d; CREATE TABLE d.t (a INT)")
    with connect(address) as connection:
        server_id = connection.identity().server_id
        server.sql(
            f"INSERT INTO d.t VALUES (1); SET server_id = {server_id + 1}, gtid_seq_no = 1;"
            f" INSERT INTO d.t VALUES (2); SET server_id = {server_id}"
        )
        position = f"0-{server_id}-3"
        assert connection.executed().text == f"{position},0-{server_id + 1}-1"
        lookup = ServerSource(SourceOptions(address=address))
        beginning = begin_after(connection, position, lookup, 0)
        lookup.close()
    assert beginning.gtid_set == position, "it begins before the transaction, not at the end of the log"
    rows = read_binlog(server.url("root"), start=position, tables="d.t")
    assert [row for batch in rows for row in batch.to_arrow()["a"].to_pylist()] == [2]
