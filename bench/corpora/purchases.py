# SPDX-License-Identifier: Apache-2.0
"""One table of ten columns, changed 50 rows at a time: half updates, 3 in 10 inserts, 2 in 10 deletes."""

from .workload import DATABASE, NUMBERS, Workload

POOL_ROWS = 20_000
SEED_ROWS = 200_000

COLUMNS = "customer_id, quantity, state, status, currency, note, sku, ordered_at, amount"

_CREATE = """
CREATE TABLE {database}.{table} (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  customer_id BIGINT NOT NULL,
  quantity INT NOT NULL,
  state INT NOT NULL,
  status VARCHAR(16) NOT NULL,
  currency CHAR(3) NOT NULL,
  note VARCHAR(80) NOT NULL,
  sku VARCHAR(24) NOT NULL,
  ordered_at TIMESTAMP NOT NULL,
  amount DECIMAL(18,4) NOT NULL
) ENGINE=InnoDB
"""

VALUES = (
    "FLOOR(RAND() * 1e6), FLOOR(RAND() * 100), FLOOR(RAND() * 9), ELT(1 + FLOOR(RAND() * 4), 'new', 'paid',"
    " 'shipped', 'closed'), 'EUR', LEFT(SHA2(RAND(), 256), 40), LEFT(SHA2(RAND(), 224), 12),"
    " '2026-01-01' + INTERVAL FLOOR(RAND() * 2e7) SECOND, RAND() * 1e6"
)

# Rows are selected by number: the oldest rows are deleted, a range in the middle is updated.
_PROCEDURE = f"""
CREATE PROCEDURE {DATABASE}.purchases_fill (IN transactions INT)
BEGIN
  DECLARE done INT DEFAULT 0;
  DECLARE first BIGINT;
  DECLARE oldest BIGINT;
  DECLARE newest BIGINT;
  WHILE done < transactions DO
    SELECT MIN(id), MAX(id) INTO oldest, newest FROM {DATABASE}.purchases;
    SET first = 1 + FLOOR(RAND() * {POOL_ROWS - 15});
    START TRANSACTION;
    INSERT INTO {DATABASE}.purchases ({COLUMNS})
      SELECT {COLUMNS} FROM {DATABASE}.purchases_pool WHERE id >= first AND id < first + 15;
    SET first = oldest + 1000 + FLOOR(RAND() * (newest - oldest - 2000));
    UPDATE {DATABASE}.purchases SET state = state + 1, status = 'changed', amount = amount + 1
      WHERE id >= first AND id < first + 25;
    DELETE FROM {DATABASE}.purchases WHERE id >= oldest AND id < oldest + 10;
    COMMIT;
    SET done = done + 1;
  END WHILE;
END
"""

WORKLOAD = Workload(
    name="purchases",
    tables=("purchases",),
    seed=(
        _CREATE.format(database=DATABASE, table="purchases_pool"),
        _CREATE.format(database=DATABASE, table="purchases"),
        f"INSERT INTO {DATABASE}.purchases_pool ({COLUMNS}) SELECT {VALUES} FROM"
        f" {NUMBERS.format(count=POOL_ROWS)}",
        f"INSERT INTO {DATABASE}.purchases ({COLUMNS}) SELECT {VALUES} FROM"
        f" {NUMBERS.format(count=SEED_ROWS)}",
        _PROCEDURE,
    ),
    sessions=((),),
    fill=("purchases_fill",),
    step=20,
)
