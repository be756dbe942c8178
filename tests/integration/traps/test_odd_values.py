# SPDX-License-Identifier: Apache-2.0
"""Values that other readers get wrong: old row events, wide SETs, YEAR 0000, geometry, floats, charsets."""

import struct

import pytest

from tests.support.binlog.decoding import decode_file, run_logged, select
from tests.support.binlog.events import WRITE_ROWS_V1, codes
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")


def test_rows_events_of_version_one_are_read(
    start_server: StartServer, mariadb_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mariadb_server)
    path = run_logged(
        mariadb_server,
        "CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(20))",
        "INSERT INTO t VALUES (1, 'one')",
        "UPDATE t SET text = 'two'",
        "DELETE FROM t",
        database=database,
    )
    assert WRITE_ROWS_V1 in codes(path.read_bytes())
    wanted = [
        ("insert", 1, "one"),
        ("update_preimage", 1, "one"),
        ("update_postimage", 1, "two"),
        ("delete", 1, "two"),
    ]
    assert decode_file(path).values(f"{database}.t") == wanted


def test_sets_and_enums_wider_than_one_byte_are_right(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    members = [f"m{number}" for number in range(64)]
    values = [f"e{number}" for number in range(300)]
    path = run_logged(
        server,
        f"CREATE TABLE t (id INT PRIMARY KEY, s SET({str(members)[1:-1]}), n SET({str(members[:9])[1:-1]}),"
        f" e ENUM({str(values)[1:-1]}))",
        "INSERT INTO t VALUES (1, 'm0,m8,m63', 'm8', 'e299'), (2, '', 'm0,m8', 'e255'),"
        " (3, 'm9,m31,m32', '', 'e0')",
        f"INSERT INTO t VALUES (4, '{','.join(members)}', NULL, 'e256')",
        database=database,
    )
    actual_rows = [row[1:] for row in decode_file(path).values(f"{database}.t")]
    assert actual_rows == select(server, f"{database}.t")


def test_years_and_floats_equal_the_servers(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, y YEAR, f FLOAT, d DOUBLE)",
        "INSERT INTO t VALUES (1, 0, 0.1, 0.1), (2, 1901, 3.4028234e38, 1.7976931348623157e308),"
        " (3, 2155, 1e-45, 5e-324), (4, 2000, -0e0, 16777217)",
        database=database,
    )
    rows = decode_file(path).rows(f"{database}.t")
    assert [row["y"] for row in rows] == [0, 1901, 2155, 2000]
    doubles = [value for (value,) in server.sql(f"SELECT d FROM {database}.t ORDER BY id")]
    assert [row["d"] for row in rows] == doubles
    singles = [struct.unpack("<f", struct.pack("<f", value))[0] for value in (0.1, 3.4028234e38, 1e-45, 0.0)]
    assert [row["f"] for row in rows] == singles


def test_geometries_equal_the_servers_bytes(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    shapes = [
        "POINT(1 2)",
        "LINESTRING(0 0,1 1,2 2)",
        "POLYGON((0 0,0 4,4 4,0 0))",
        "GEOMETRYCOLLECTION(POINT(1 1))",
    ]
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, g GEOMETRY, p POINT)",
        *(
            f"INSERT INTO t VALUES ({number}, ST_GeomFromText('{shape}', {number * 4326 % 8652}), NULL)"
            for number, shape in enumerate(shapes)
        ),
        "INSERT INTO t VALUES (9, NULL, ST_GeomFromText('POINT(-1 1e300)'))",
        database=database,
    )
    actual_rows = [row[1:] for row in decode_file(path).values(f"{database}.t")]
    assert actual_rows == select(server, f"{database}.t")


@pytest.mark.parametrize(
    "charset", ["euckr", "ujis", "eucjpms", "big5", "latin1", "cp866", "tis620", "cp932", "gbk"]
)
def test_texts_decode_as_the_server_converts_them(
    charset: str, server: Server, fresh_database: FreshDatabase
) -> None:
    """Test every single byte, and the pairs where other codecs differ most."""
    database = fresh_database(server)
    singles = [bytes([byte]) for byte in range(1, 256)]
    pairs = [bytes([lead, trail]) for lead in range(0x81, 0xFF, 5) for trail in range(0x41, 0xFF, 7)]
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, text VARCHAR(10) CHARACTER SET {charset})")
    rows = ", ".join(f"({number}, x'{text.hex()}')" for number, text in enumerate(singles + pairs))
    path = run_logged(server, "SET sql_mode = ''", f"INSERT IGNORE INTO t VALUES {rows}", database=database)
    actual_rows = {row["id"]: row["text"] for row in decode_file(path).rows(f"{database}.t")}
    # If a byte has no character, the server's conversion prints a question mark, and the decoded value is
    # null.
    wanted = dict(server.sql(f"SELECT id, CONVERT(text USING utf8mb4) FROM {database}.t"))
    differing = {key for key in wanted if actual_rows[key] is not None and actual_rows[key] != wanted[key]}
    assert not differing
    assert sum(text is not None for text in actual_rows.values()) > len(actual_rows) // 2
