# SPDX-License-Identifier: Apache-2.0
"""A server with gtid_mode=ON stops in the middle of a stream if a file has anonymous transactions."""

import pytest

import penstock
from penstock.errors import StreamError
from tests.support.binlog.decoding import decode_file
from tests.support.suite.fixture_types import StartServer


def test_files_from_before_gtids_are_read_and_their_stream_is_refused_by_name(
    start_server: StartServer,
) -> None:
    server = start_server("mysql", gtid_mode="OFF", enforce_gtid_consistency="ON")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY); INSERT INTO d.t VALUES (1)")
    old = server.binlog_files()[-1]
    for mode in ("OFF_PERMISSIVE", "ON_PERMISSIVE", "ON"):
        server.sql(f"SET GLOBAL gtid_mode = {mode}")
    server.sql("INSERT INTO d.t VALUES (2)")
    assert decode_file(old).values("d.t") == [("insert", 1)]
    from_files = penstock.read_binlog([str(path) for path in server.binlog_files()], "d.t")
    assert [row["id"] for batch in from_files for row in batch.to_arrow().to_pylist()] == [1, 2]
    with pytest.raises(StreamError, match=r"(?i)anonymous") as raised:
        list(penstock.read_binlog(server.url(), "d.t", start=f"{old.name}:4"))
    assert raised.value.hint is not None
    assert "ON_PERMISSIVE" in raised.value.hint
    server.sql("SET GLOBAL gtid_mode = ON_PERMISSIVE")
    live = penstock.read_binlog(server.url(), "d.t", start=f"{old.name}:4")
    assert [row["id"] for batch in live for row in batch.to_arrow().to_pylist()] == [1, 2]
