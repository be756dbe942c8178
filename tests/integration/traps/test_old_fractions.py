# SPDX-License-Identifier: Apache-2.0
"""MariaDB with mysql56_temporal_format=OFF logs fractional seconds without their number of digits."""

from datetime import timedelta

import pytest

from penstock.errors import SchemaUnknown
from tests.support.binlog.decoding import decode_file, run_logged, select
from tests.support.suite.fixture_types import FreshDatabase, StartServer

COLUMNS = [
    ("id", "int", None, False),
    ("t0", "time", None, True),
    ("t3", "time(3)", None, True),
    ("t6", "time(6)", None, True),
    ("d1", "datetime(1)", None, True),
    ("d6", "datetime(6)", None, True),
    ("s2", "timestamp(2)", None, True),
]


def test_old_fractions_need_the_definition_and_are_exact_with_it(
    start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server("mariadb")
    database = fresh_database(server)
    columns = ", ".join(f"{name} {kind}" for name, kind, _, _ in COLUMNS[1:])
    server.sql("SET GLOBAL mysql56_temporal_format = OFF")
    path = run_logged(
        server,
        f"CREATE TABLE t (id INT PRIMARY KEY, {columns.replace('timestamp(2)', 'timestamp(2) NULL')})",
        "SET time_zone = '+00:00'",
        "INSERT INTO t VALUES"
        " (1, '-838:59:59', '-00:00:00.001', '838:59:59.999999', '1000-01-01 00:00:00.1',"
        " '9999-12-31 23:59:59.999999', '2026-01-02 03:04:05.67'),"
        " (2, '12:00:00', '00:00:00.000', '-00:00:01.5', '2026-06-30 23:59:59.9',"
        " '2000-02-29 01:02:03.000004',"
        " '1970-01-01 00:00:01.00'), (3, NULL, NULL, NULL, NULL, NULL, NULL)",
        database=database,
    )
    table = f"{database}.t"
    actual_rows = decode_file(path, schemas={table: COLUMNS}).values(table)
    naive = [
        tuple(value.replace(tzinfo=None) if hasattr(value, "tzinfo") else value for value in row[1:])
        for row in actual_rows
    ]
    assert naive == server.sql(f"SET time_zone = '+00:00'; SELECT * FROM {table} ORDER BY id")
    assert naive[0][2] == -timedelta(milliseconds=1)
    with pytest.raises(SchemaUnknown, match="fractional digits") as raised:
        decode_file(path)
    assert raised.value.position is not None
    assert select(server, table)
