# SPDX-License-Identifier: Apache-2.0
"""Thirty columns of every common type, inserted 200 rows at a time.

This is the load of imports, backfills and event tables. Rows are copied from a pool of distinct random rows,
because generating thirty random values costs the server more than logging them.
"""

from .workload import DATABASE, NUMBERS, Workload

POOL_ROWS = 10_000
TRANSACTION_ROWS = 200

_COLUMNS = (
    "c01 INT NOT NULL",
    "c02 INT UNSIGNED",
    "c03 BIGINT",
    "c04 TINYINT",
    "c05 SMALLINT",
    "c06 DECIMAL(18,4)",
    "c07 DECIMAL(10,2)",
    "c08 DOUBLE",
    "c09 FLOAT",
    "c10 DATE",
    "c11 DATETIME",
    "c12 DATETIME(6)",
    "c13 TIMESTAMP NULL",
    "c14 TIMESTAMP(3) NULL",
    "c15 TIME",
    "c16 YEAR",
    "c17 CHAR(32) CHARACTER SET latin1",
    "c18 VARCHAR(64)",
    "c19 VARCHAR(255)",
    "c20 VARCHAR(500)",
    "c21 TEXT",
    "c22 BLOB",
    "c23 VARBINARY(32)",
    "c24 ENUM('new','paid','shipped','closed','returned')",
    "c25 SET('a','b','c','d','e','f')",
    "c26 JSON",
    "c27 BIT(16)",
    "c28 BOOL",
    "c29 VARCHAR(40)",
)

#: One expression per column above, in the same order.
_VALUES = (
    "FLOOR(RAND() * 2e9)",
    "FLOOR(RAND() * 4e9)",
    "FLOOR(RAND() * 9e18) - 4000000000000000000",
    "FLOOR(RAND() * 256) - 128",
    "FLOOR(RAND() * 65536) - 32768",
    "RAND() * 1e13",
    "RAND() * 1e7 - 5e6",
    "RAND() * 1e6",
    "RAND() * 1e3",
    "DATE '2000-01-01' + INTERVAL FLOOR(RAND() * 9000) DAY",
    "TIMESTAMP '2000-01-01 00:00:00' + INTERVAL FLOOR(RAND() * 8e8) SECOND",
    "TIMESTAMP '2000-01-01 00:00:00' + INTERVAL FLOOR(RAND() * 8e14) MICROSECOND",
    "TIMESTAMP '2000-01-01 00:00:00' + INTERVAL FLOOR(RAND() * 8e8) SECOND",
    "TIMESTAMP '2000-01-01 00:00:00' + INTERVAL FLOOR(RAND() * 8e14) MICROSECOND",
    "SEC_TO_TIME(FLOOR(RAND() * 86400))",
    "1990 + FLOOR(RAND() * 60)",
    "LEFT(SHA2(RAND(), 224), 32)",
    "CONCAT('user', FLOOR(RAND() * 1e9), '@example.org')",
    "REPEAT(LEFT(SHA2(RAND(), 256), 20), 1 + FLOOR(RAND() * 6))",
    "CONCAT('杭州市西湖区', FLOOR(RAND() * 1e6), '号 ', SHA2(RAND(), 256))",
    "REPEAT(SHA2(RAND(), 512), 1 + FLOOR(RAND() * 3))",
    "UNHEX(REPEAT(SHA2(RAND(), 256), 1 + FLOOR(RAND() * 4)))",
    "UNHEX(SHA2(RAND(), 256))",
    "1 + FLOOR(RAND() * 5)",
    "FLOOR(RAND() * 64)",
    (
        "JSON_OBJECT('id', FLOOR(RAND() * 1e9), "
        "'tags', JSON_ARRAY('x', FLOOR(RAND() * 100), SHA2(RAND(), 224)), "
        "'price', ROUND(RAND() * 1e4, 2), 'nested', JSON_OBJECT('a', RAND(), 'ok', TRUE))"
    ),
    "FLOOR(RAND() * 65536)",
    "RAND() < 0.5",
    "IF(RAND() < 0.3, NULL, LEFT(SHA2(RAND(), 224), 30))",
)

_NAMES = ", ".join(f"c{number:02}" for number in range(1, 30))


def _create(table: str) -> str:
    columns = ",\n  ".join(("id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY", *_COLUMNS))
    return f"CREATE TABLE {DATABASE}.{table} (\n  {columns}\n) ENGINE=InnoDB"


_PROCEDURE = f"""
CREATE PROCEDURE {DATABASE}.wide_fill (IN transactions INT)
BEGIN
  DECLARE done INT DEFAULT 0;
  DECLARE first BIGINT;
  WHILE done < transactions DO
    SET first = 1 + FLOOR(RAND() * {POOL_ROWS - TRANSACTION_ROWS});
    INSERT INTO {DATABASE}.wide ({_NAMES})
      SELECT {_NAMES} FROM {DATABASE}.wide_pool WHERE id >= first AND id < first + {TRANSACTION_ROWS};
    SET done = done + 1;
  END WHILE;
END
"""

WORKLOAD = Workload(
    name="wide",
    tables=("wide",),
    seed=(
        _create("wide_pool"),
        _create("wide"),
        f"INSERT INTO {DATABASE}.wide_pool ({_NAMES}) "
        f"SELECT {', '.join(_VALUES)} FROM {NUMBERS.format(count=POOL_ROWS)}",
        _PROCEDURE,
    ),
    sessions=((), ()),
    fill=("wide_fill", "wide_fill"),
    step=5,
)
