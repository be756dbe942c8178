# SPDX-License-Identifier: Apache-2.0
"""Row images omit trailing zeros of BINARY and trailing spaces of CHAR."""

from tests.support.binlog.decoding import decode_file, run_logged, select
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


def test_binary_values_are_padded_and_char_values_are_as_selected(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, b BINARY(4), c CHAR(4), d CHAR(4) CHARACTER SET binary,"
        " v VARBINARY(4), l BINARY(255))",
        "INSERT INTO t VALUES (1, 'a', 'a', 'a', 'a', 'a'), (2, x'0000', '  ', x'0000', x'0000', ''),"
        " (3, x'61000000', 'a  ', x'61000000', x'61000000', x'00'), (4, '', '', '', '', REPEAT('z', 255)),"
        " (5, x'00000001', ' a', x'00000001', x'00000001', x'0001')",
        database=database,
    )
    actual_rows = [row[1:] for row in decode_file(path).values(f"{database}.t")]
    assert actual_rows == select(server, f"{database}.t")
    assert actual_rows[0][1:4] == (b"a\0\0\0", "a", b"a\0\0\0")
    assert actual_rows[1][1:5] == (b"\0\0\0\0", "", b"\0\0\0\0", b"\0\0")
    assert all(len(row[5]) == 255 for row in actual_rows)
