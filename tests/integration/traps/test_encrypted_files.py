# SPDX-License-Identifier: Apache-2.0
"""Files encrypted at rest: MySQL changes the magic, and MariaDB writes an event. The replication stream is
not encrypted.
"""

from pathlib import Path

import pytest

import penstock
from penstock.errors import LogEncrypted
from tests.support.binlog.decoding import decode, run_logged
from tests.support.binlog.events import MAGIC, START_ENCRYPTION, events, first_event_end
from tests.support.capture.captured_log import capturing, head_of, settings_of, wait_for_position
from tests.support.logstore.kept_log import penstock as cli
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server


@pytest.mark.parametrize("flavor", ["mariadb", "mariadb11"])
def test_encrypted_mariadb_files_are_refused_by_name_and_their_stream_is_read(
    flavor: str, start_server: StartServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("1;" + "a7" * 16 + "\n")
    server = start_server(
        flavor,
        encrypt_binlog=True,
        plugin_load_add="file_key_management",
        file_key_management_filename=str(keys),
    )
    path = run_logged(
        server,
        "CREATE DATABASE d",
        "CREATE TABLE d.t (id INT PRIMARY KEY)",
        "INSERT INTO d.t VALUES (1), (2)",
    )
    data = path.read_bytes()
    assert data.startswith(MAGIC)
    end = first_event_end(data)
    (start,) = (event for event in events(data[: end + 40]) if event.code == START_ENCRYPTION)
    assert start.offset == end
    with pytest.raises(LogEncrypted) as raised:
        decode(data, path.name)
    assert raised.value.position == f"{path.name}:{end}"
    assert "mysql://" in str(raised.value.hint)
    with pytest.raises(LogEncrypted):
        list(penstock.read_binlog([str(path)], "d.t"))
    with capturing(settings_of(tmp_path / "log", server.url(), start=f"{path.name}:4")) as capture:
        wait_for_position(capture, head_of(server))
    # At the end of a capture and during a verification, Penstock reads the log's bytes as a file.
    folder = tmp_path / "log" / "shop"
    done = cli("log", "verify", str(folder))
    assert done.code == 0, done
    kept = penstock.read_binlog(str(folder), "d.t")
    assert [row["id"] for batch in kept for row in batch.to_arrow().to_pylist()] == [1, 2]
    live = penstock.read_binlog(server.url(), "d.t", start=f"{path.name}:4")
    assert [row["id"] for batch in live for row in batch.to_arrow().to_pylist()] == [1, 2]


def test_encrypted_mysql_files_are_detected_by_their_magic(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    path = run_logged(
        mysql_server, "CREATE TABLE t (id INT PRIMARY KEY)", database=fresh_database(mysql_server)
    )
    with pytest.raises(LogEncrypted) as raised:
        decode(b"\xfdbin" + path.read_bytes()[len(MAGIC) :], path.name)
    assert "binlog_encryption" in str(raised.value.hint)
