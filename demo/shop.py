# SPDX-License-Identifier: Apache-2.0
"""The source: a shop's database of three tables, and the program that writes to it.

    python -m demo.shop PORT SECONDS

The writer is a process of its own. It writes from its start on; SECONDS are counted from SIGUSR1.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pymysql
from pymysql.constants import ER

DATABASE = "shop"
# Each table with the columns of its primary key.
TABLES = {"orders": ("id",), "order_items": ("order_id", "line"), "payments": ("id",)}

SCHEMA = (
    f"CREATE DATABASE {DATABASE} CHARACTER SET utf8mb4",
    f"""CREATE TABLE {DATABASE}.orders (
        id INT UNSIGNED AUTO_INCREMENT PRIMARY KEY,
        customer VARCHAR(60) NOT NULL,
        status ENUM('new', 'paid', 'shipped') NOT NULL,
        total DECIMAL(12, 2) NOT NULL,
        discount DECIMAL(5, 4),
        weight_kg DOUBLE,
        preferences JSON,
        placed_at DATETIME(6) NOT NULL,
        changed_at TIMESTAMP(6) NULL
    )""",
    f"""CREATE TABLE {DATABASE}.order_items (
        order_id INT UNSIGNED,
        line TINYINT UNSIGNED,
        sku CHAR(10) CHARACTER SET latin1 NOT NULL,
        quantity SMALLINT NOT NULL,
        price DECIMAL(10, 2) NOT NULL,
        note TEXT,
        PRIMARY KEY (order_id, line)
    )""",
    f"""CREATE TABLE {DATABASE}.payments (
        id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY,
        order_id INT UNSIGNED NOT NULL,
        method SET('card', 'voucher', 'cash') NOT NULL,
        amount DECIMAL(12, 2) NOT NULL,
        due DATE,
        token VARBINARY(16),
        KEY (order_id)
    )""",
)
# No default: the binlog would not show how the server fills it into the rows that are there already.
ADD_COLUMN = f"ALTER TABLE {DATABASE}.orders ADD COLUMN coupon VARCHAR(20) AFTER status"

TRANSACTIONS_PER_SECOND_MAX = 600
# Before the column is added, and with it: so few that a slow machine does them in the time, enough for every
# kind of change.
TRANSACTIONS_MIN = 200
# Counted down from here, for MySQL goes on with AUTO_INCREMENT above the highest key it has seen.
RENUMBERED_BELOW = 2_000_000_000

_CUSTOMERS = ("Zoë Müller", "李小龍", "Ada O'Brien", "Łukasz Żak", "नेहा", "Jörg 🚲", "محمد علي")
_NOTES = (None, "gift wrap 🎁", "fragile\tkeep upright", 'ring twice;\n"no" leaflets', "")


class Shop:
    """A shop's business, one transaction of several statements at a time."""

    def __init__(self, connection: Any, seed: int = 1) -> None:
        self.has_coupons = False
        self._connection = connection
        self._cursor = connection.cursor()
        self._random = random.Random(seed)
        self._orders: list[int] = []
        self._renumbered = 0

    def trade(self) -> None:
        """Do one thing that shops do."""
        kinds = (self._place, self._pay, self._ship, self._cancel, self._renumber)
        kind = self._random.choices(kinds, (45, 25, 15, 10, 5))[0] if self._orders else self._place
        self._connection.begin()
        kind()
        self._connection.commit()

    def add_column(self) -> None:
        """Give orders a further column, used from now on."""
        self._cursor.execute(ADD_COLUMN)
        self.has_coupons = True

    def _place(self) -> None:
        prices = [self._amount(1, 99_999) for _ in range(self._random.randint(1, 4))]
        total, now = sum(prices, Decimal(0)), datetime.now(UTC)
        order = {
            "customer": self._random.choice(_CUSTOMERS),
            "status": "new",
            "total": total,
            "discount": self._random.choice((None, Decimal("0.0250"), Decimal("-0.1"))),
            "weight_kg": self._random.choice((None, self._random.uniform(0, 40), 0.1)),
            "preferences": self._random.choice((None, '{"leaflets": false, "door": [4, null, "links"]}')),
            "placed_at": now,
            "changed_at": now,
        }
        if self.has_coupons:
            order["coupon"] = self._random.choice((None, "", "HERBST-ÄÖÜ", "SPRING"))
        number = self._insert("orders", [order])
        self._orders.append(number)
        self._insert("order_items", [self._item(number, line, price) for line, price in enumerate(prices, 1)])

    def _amount(self, cents_min: int, cents_max: int) -> Decimal:
        return Decimal(self._random.randint(cents_min, cents_max)).scaleb(-2)

    def _item(self, order: int, line: int, price: Decimal) -> dict[str, Any]:
        return {
            "order_id": order,
            "line": line,
            "sku": f"Ä-{self._random.randint(0, 9_999_999):07d}",
            "quantity": self._random.randint(-2, 30),
            "price": price,
            "note": self._random.choice(_NOTES),
        }

    def _pay(self) -> None:
        order = self._random.choice(self._orders)
        payment = {
            "order_id": order,
            "method": self._random.choice(("card", "voucher", "card,voucher", "")),
            "amount": self._amount(-9_999_999, 9_999_999),
            "due": (datetime.now(UTC) + timedelta(days=self._random.randint(0, 60))).date(),
            "token": self._random.choice((None, self._random.randbytes(16))),
        }
        self._insert("payments", [payment])
        changes = "status = 'paid', changed_at = %s" + (", coupon = 'THANKS'" if self.has_coupons else "")
        self._update("orders", f"{changes} WHERE id = %s", datetime.now(UTC), order)

    def _ship(self) -> None:
        order = self._random.choice(self._orders)
        now = datetime.now(UTC)
        self._update("orders", "status = 'shipped', changed_at = %s WHERE id = %s", now, order)
        self._update("order_items", "quantity = quantity + 1, note = NULL WHERE order_id = %s", order)
        self._update("payments", "amount = amount + 0.01 WHERE order_id = %s", order)

    def _cancel(self) -> None:
        order = self._orders.pop(self._random.randrange(len(self._orders)))
        for table, key in (("payments", "order_id"), ("order_items", "order_id"), ("orders", "id")):
            self._cursor.execute(f"DELETE FROM {DATABASE}.{table} WHERE {key} = %s", (order,))

    def _renumber(self) -> None:
        """Change primary keys: to a target that is a delete of one row and an insert of another."""
        self._renumbered += 1
        place = self._random.randrange(len(self._orders))
        order = self._orders[place]
        number = self._orders[place] = RENUMBERED_BELOW - self._renumbered
        for table, key in (("orders", "id"), ("order_items", "order_id"), ("payments", "order_id")):
            self._update(table, f"{key} = %s WHERE {key} = %s", number, order)

    def _insert(self, table: str, rows: list[dict[str, Any]]) -> int:
        """Insert rows in one statement; return the number the server gave the first."""
        names, one = ", ".join(rows[0]), f"({', '.join(['%s'] * len(rows[0]))})"
        statement = f"INSERT INTO {DATABASE}.{table} ({names}) VALUES {', '.join([one] * len(rows))}"
        self._cursor.execute(statement, [value for row in rows for value in row.values()])
        number: int = self._cursor.lastrowid
        return number

    def _update(self, table: str, rest: str, *values: Any) -> None:
        self._cursor.execute(f"UPDATE {DATABASE}.{table} SET {rest}", values)


def create(sql: Callable[[str], Any]) -> None:
    """Create the database and its tables."""
    for statement in SCHEMA:
        sql(statement)


def log_end(connection: Any) -> tuple[str, int]:
    """Return the file and the offset where the server's binlog ends now.

    The statement was renamed in MySQL 8.2, and MariaDB kept the old one.
    """
    with connection.cursor() as cursor:
        try:
            cursor.execute("SHOW MASTER STATUS")
        except pymysql.err.ProgrammingError as error:
            if error.args[0] != ER.PARSE_ERROR:
                raise
            cursor.execute("SHOW BINARY LOG STATUS")
        file, offset = cursor.fetchone()[:2]
    return file, offset


def main(port: int, seconds: float) -> None:
    """Trade until SIGUSR1 and for so long after it, at a pace that leaves a small machine time to follow.

    The column is added half way. A machine that stood still goes on for longer, until there are transactions
    enough of both halves.
    """
    counted = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: counted.set())
    with pymysql.connect(host="127.0.0.1", port=port, user="root", ssl_disabled=True) as connection:
        shop = Shop(connection)
        first = began = time.monotonic()
        transactions, with_coupons = 0, 0
        while (now := time.monotonic()) < began + seconds or with_coupons < TRANSACTIONS_MIN:
            if not counted.is_set():
                began = now
            if not shop.has_coupons and now > began + seconds / 2 and transactions >= TRANSACTIONS_MIN:
                shop.add_column()
            shop.trade()
            transactions += 1
            with_coupons += shop.has_coupons
            time.sleep(max(0.0, first + transactions / TRANSACTIONS_PER_SECOND_MAX - now))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
