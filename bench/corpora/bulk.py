# SPDX-License-Identifier: Apache-2.0
"""Rows of 60 bytes, inserted 500 at a time: a bulk load, the case in which change feeds are fastest."""

from .workload import DATABASE, NUMBERS, Workload

POOL_ROWS = 10_000
TRANSACTION_ROWS = 500

_COLUMNS = "user_id, amount, state, note"

_CREATE = """
CREATE TABLE {database}.{table} (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  user_id INT NOT NULL,
  amount DECIMAL(12,2) NOT NULL,
  state TINYINT NOT NULL,
  note VARCHAR(40) NOT NULL
) ENGINE=InnoDB
"""

_PROCEDURE = f"""
CREATE PROCEDURE {DATABASE}.bulk_fill (IN transactions INT)
BEGIN
  DECLARE done INT DEFAULT 0;
  DECLARE first BIGINT;
  WHILE done < transactions DO
    SET first = 1 + FLOOR(RAND() * {POOL_ROWS - TRANSACTION_ROWS});
    INSERT INTO {DATABASE}.bulk ({_COLUMNS})
      SELECT {_COLUMNS} FROM {DATABASE}.bulk_pool WHERE id >= first AND id < first + {TRANSACTION_ROWS};
    SET done = done + 1;
  END WHILE;
END
"""

WORKLOAD = Workload(
    name="bulk",
    tables=("bulk",),
    seed=(
        _CREATE.format(database=DATABASE, table="bulk_pool"),
        _CREATE.format(database=DATABASE, table="bulk"),
        f"INSERT INTO {DATABASE}.bulk_pool ({_COLUMNS}) SELECT FLOOR(RAND() * 1e9), RAND() * 1e6,"
        f" FLOOR(RAND() * 5), LEFT(SHA2(RAND(), 224), 30) FROM {NUMBERS.format(count=POOL_ROWS)}",
        _PROCEDURE,
    ),
    sessions=((), ()),
    fill=("bulk_fill", "bulk_fill"),
    step=5,
)
