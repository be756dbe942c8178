# SPDX-License-Identifier: Apache-2.0
"""Small logs that contain every kind of event and most column types, used as input for damage tests."""

import shutil
from pathlib import Path

from tests.support.binlog.decoding import run_logged
from tools.servers import Server

_COLUMNS = {
    "a": "TINYINT", "b": "SMALLINT UNSIGNED", "c": "MEDIUMINT", "d": "INT UNSIGNED", "e": "BIGINT",
    "f": "FLOAT", "g": "DOUBLE", "h": "DECIMAL(20,5)", "i": "DECIMAL(65,30)", "j": "BIT(5)", "k": "BIT(64)",
    "l": "YEAR", "m": "DATE", "n": "TIME(3)", "o": "DATETIME(6)", "p": "TIMESTAMP(1) NULL",
    "q": "CHAR(5) CHARACTER SET latin1", "r": "VARCHAR(300)", "s": "TEXT CHARACTER SET gbk", "t": "BINARY(4)",
    "u": "VARBINARY(20)", "v": "LONGBLOB",
    "w": "ENUM('x','y','z')", "x": "SET('one','two','three')", "y": "JSON", "z": "GEOMETRY",
}  # fmt: skip
_VALUES = (
    "-1", "65535", "-8388608", "7", "-9e18", "1.5", "-2.25e300", "123456789.12345", "-1234.5", "b'10101'",
    "-1 & -1", "2026", "'2026-01-02'", "'-100:59:59.123'", "'2026-01-02 03:04:05.678901'",
    "'2026-01-02 03:04:05.6'", "'abc'",
    "REPEAT('text ', 20)", "'中文'", "x'0102'", "x'00ff'", "REPEAT('b', 300)", "'y'", "'one,three'",
    """'{"a": [1, 2.5, "x", null, true, {"b": -1}], "long": 12345678901}'""", "ST_GeomFromText('POINT(1 2)')",
)  # fmt: skip


def write_logs(server: Server, folder: Path) -> list[Path]:
    """Write the server's logs into a folder and return them."""
    name = "fuzzed"
    server.sql(f"DROP DATABASE IF EXISTS {name}")
    server.sql(f"CREATE DATABASE {name}")
    written = [run_logged(server, *statements, database=name) for statements in _sessions(server)]
    server.sql(f"DROP DATABASE {name}")
    return [Path(shutil.copy(path, folder / path.name)) for path in written]


def _sessions(server: Server) -> list[tuple[str, ...]]:
    columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
    wide = (
        f"CREATE TABLE wide (id INT PRIMARY KEY, {columns})",
        f"INSERT INTO wide VALUES (1, {', '.join(_VALUES)})",
        "INSERT INTO wide (id) VALUES (2)",
        "UPDATE wide SET r = 'changed', e = NULL",
        "DELETE FROM wide",
        "DROP TABLE wide",
    )
    narrow = (
        "CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(50))",
        "CREATE TABLE u (id INT PRIMARY KEY, number INT)",
        "INSERT INTO t VALUES (1, 'one'), (2, NULL), (3, 'three')",
        "BEGIN",
        "INSERT INTO u VALUES (1, 1)",
        "UPDATE t JOIN u ON t.id = u.id SET t.text = 'joined', u.number = 5",
        "COMMIT",
        "XA START 'x'",
        "INSERT INTO u VALUES (9, 9)",
        "XA END 'x'",
        "XA PREPARE 'x'",
        "XA COMMIT 'x'",
        "DELETE FROM t",
        "DROP TABLE t, u",
    )
    minimal = ("SET SESSION binlog_row_image = MINIMAL", *narrow)
    return [wide, narrow, minimal, *(_mysql(wide) if server.family == "mysql" else _mariadb(wide))]


def _mysql(wide: tuple[str, ...]) -> list[tuple[str, ...]]:
    packed = ("SET SESSION binlog_transaction_compression = ON", *wide)
    partial = (
        "SET SESSION binlog_row_value_options = PARTIAL_JSON",
        "CREATE TABLE j (id INT PRIMARY KEY, d JSON, e JSON)",
        """INSERT INTO j VALUES (1, '{"a": [1, 2, 3], "b": {"c": "text text text text"}, "n": 1}', '[]')""",
        "UPDATE j SET d = JSON_SET(d, '$.b.c', 'x', '$.a[3]', 4)",
        "UPDATE j SET d = JSON_REMOVE(d, '$.a[0]')",
        "UPDATE j SET d = JSON_REPLACE(d, '$.n', 2)",
        "DROP TABLE j",
    )
    tagged = (
        "SET gtid_next = 'AUTOMATIC:tag'",
        "CREATE TABLE g (id INT PRIMARY KEY)",
        "INSERT INTO g VALUES (1)",
        "DROP TABLE g",
        "SET gtid_next = 'AUTOMATIC'",
    )
    return [packed, partial, tagged]


def _mariadb(wide: tuple[str, ...]) -> list[tuple[str, ...]]:
    packed = (
        "SET GLOBAL log_bin_compress_min_len = 10, GLOBAL log_bin_compress = ON",
        "SET @@session.gtid_domain_id = 3",
        *wide,
        "CREATE TABLE c (id INT PRIMARY KEY, text TEXT COMPRESSED, bytes VARBINARY(500) COMPRESSED)",
        "INSERT INTO c VALUES (1, REPEAT('a', 400), REPEAT('b', 400)), (2, '', 'x')",
        "DROP TABLE c",
        "SET GLOBAL log_bin_compress = OFF, GLOBAL log_bin_compress_min_len = 256",
    )
    own = (
        "CREATE TABLE o (id INT PRIMARY KEY, u UUID, i INET6, f INET4)",
        "INSERT INTO o VALUES (1, '123e4567-e89b-12d3-a456-426614174000', '::1', '127.0.0.1')",
        "UPDATE o SET u = NULL",
        "DROP TABLE o",
    )
    return [packed, own]
