# SPDX-License-Identifier: Apache-2.0
"""Narrow rows, one per transaction: 40 % updates, 30 % inserts, 30 % deletes over four tables.

This is the load of a busy key-value service, and the worst case for costs per event: five events per row.
Deletes remove the oldest row and inserts add a new row, so the tables keep their size.
"""

from .workload import DATABASE, NUMBERS, Workload

TABLE_ROWS = 50_000

_TABLE = """
CREATE TABLE {table} (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  k INT NOT NULL,
  c CHAR(120) NOT NULL,
  pad CHAR(60) NOT NULL,
  KEY by_k (k)
) ENGINE=InnoDB
"""

_SEED = (
    "INSERT INTO {table} (k, c, pad) "
    "SELECT FLOOR(RAND() * 1e5), LEFT(SHA2(RAND(), 512), 120), LEFT(SHA2(RAND(), 256), 60) FROM "
    + NUMBERS.format(count=TABLE_ROWS)
)

_CHANGE = """
    SET live = @oldest_{n} + FLOOR(RAND() * (@newest_{n} - @oldest_{n}));
    IF choice < 0.2 THEN
      UPDATE {table} SET k = k + 1 WHERE id = live;
    ELSEIF choice < 0.4 THEN
      UPDATE {table} SET c = LEFT(SHA2(RAND(), 512), 120) WHERE id = live;
    ELSEIF choice < 0.7 THEN
      INSERT INTO {table} (k, c, pad)
        VALUES (FLOOR(RAND() * 1e5), LEFT(SHA2(RAND(), 512), 120), LEFT(SHA2(RAND(), 256), 60));
      SET @newest_{n} = LAST_INSERT_ID();
    ELSE
      DELETE FROM {table} WHERE id = @oldest_{n};
      SET @oldest_{n} = @oldest_{n} + 1;
    END IF;
"""

_PROCEDURE = """
CREATE PROCEDURE {database}.narrow_fill_{session} (IN transactions INT)
BEGIN
  DECLARE done INT DEFAULT 0;
  DECLARE live BIGINT;
  DECLARE choice DOUBLE;
  WHILE done < transactions DO
    SET choice = RAND();
    IF done % 2 = 0 THEN {first} ELSE {second} END IF;
    SET done = done + 1;
  END WHILE;
END
"""


def _table(number: int) -> str:
    return f"{DATABASE}.narrow{number}"


def _procedure(session: int) -> str:
    first, second = (_CHANGE.format(n=number, table=_table(number)) for number in _numbers(session))
    return _PROCEDURE.format(database=DATABASE, session=session, first=first, second=second)


def _numbers(session: int) -> tuple[int, int]:
    return 2 * session + 1, 2 * session + 2


def _open(session: int) -> tuple[str, ...]:
    return tuple(
        f"SELECT MIN(id), MAX(id) INTO @oldest_{number}, @newest_{number} FROM {_table(number)}"
        for number in _numbers(session)
    )


WORKLOAD = Workload(
    name="narrow",
    tables=tuple(f"narrow{number}" for number in range(1, 5)),
    seed=(
        *(_TABLE.format(table=_table(number)) for number in range(1, 5)),
        *(_SEED.format(table=_table(number)) for number in range(1, 5)),
        *(_procedure(session) for session in range(2)),
    ),
    sessions=(_open(0), _open(1)),
    fill=("narrow_fill_0", "narrow_fill_1"),
    step=2_000,
)
