# SPDX-License-Identifier: Apache-2.0
"""MariaDB's COMPRESSED columns are compressed in the row image too."""

from collections.abc import Callable

import pytest

from tests.support.binlog.decoding import decode_file, run_logged, select
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


@pytest.mark.parametrize("flavor", ["mariadb", "mariadb11"])
def test_compressed_columns_are_decompressed(
    flavor: str, server_of: Callable[[str], Server], fresh_database: FreshDatabase
) -> None:
    server = server_of(flavor)
    database = fresh_database(server)
    texts = ["''", "'x'", "NULL", "REPEAT('é', 50)", "REPEAT('ab', 130)", "REPEAT('long ', 13000)"]
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(10000) COMPRESSED, t LONGTEXT COMPRESSED,"
        " vb VARBINARY(10000) COMPRESSED, b LONGBLOB COMPRESSED, latin TEXT COMPRESSED CHARACTER SET latin1)",
        *(
            f"INSERT INTO t VALUES ({number}, LEFT({text}, 9999), {text}, LEFT({text}, 4000), {text}, {text})"
            for number, text in enumerate(texts)
        ),
        "INSERT INTO t SELECT 99, NULL, REPEAT('m', 16000000), NULL, NULL, NULL",
        "UPDATE t SET v = CONCAT(v, '!'), vb = RANDOM_BYTES(300) WHERE id < 50",
        database=database,
    )
    decoded = decode_file(path)
    actual_rows = [row[1:] for row in decoded.values(f"{database}.t") if row[0] == "update_postimage"]
    assert actual_rows == select(server, f"{database}.t WHERE id < 50")
    (large,) = (row for row in decoded.values(f"{database}.t") if row[1] == 99)
    assert large[3] == "m" * 16_000_000
