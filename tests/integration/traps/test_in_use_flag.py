# SPDX-License-Identifier: Apache-2.0
"""The in-use flag changes without an update of the checksum. Files that are still open, or were left by a
crash, can be read nevertheless.
"""

from pathlib import Path

import pytest

import penstock
from penstock.errors import ChecksumMismatch
from tests.support.binlog.decoding import decode, decode_file
from tests.support.binlog.events import FLAG_IN_USE, events
from tests.support.suite.fixture_types import StartServer

HEADER_FLAGS = 4 + 17


@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
def test_files_in_use_and_files_of_a_crash_are_read(flavor: str, start_server: StartServer) -> None:
    server = start_server(flavor, sync_binlog=1)
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY); INSERT INTO d.t VALUES (1), (2)")
    path = server.binlog_files()[-1]
    assert in_use(path)
    assert decode_file(path).values("d.t") == [("insert", 1), ("insert", 2)]
    server.kill()
    assert in_use(path)
    server.start()
    # MySQL clears the flag during recovery; MariaDB never clears it.
    assert in_use(path) == (server.family == "mariadb")
    assert decode_file(path).values("d.t") == [("insert", 1), ("insert", 2)]
    read = penstock.read_binlog([str(path)], "d.t")
    assert [row["id"] for batch in read for row in batch.to_arrow().to_pylist()] == [1, 2]
    damaged = bytearray(path.read_bytes())
    damaged[HEADER_FLAGS] ^= 0x40
    with pytest.raises(ChecksumMismatch):
        decode(bytes(damaged), path.name)


def in_use(path: Path) -> bool:
    return bool(next(events(path.read_bytes())).flags & FLAG_IN_USE)
