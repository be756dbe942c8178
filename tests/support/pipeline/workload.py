# SPDX-License-Identifier: Apache-2.0
"""A busy writer on a real server for tests of pipelines; the same seed repeats the same actions.

    workload = Workload(server, "shop", seed=7)
    workload.create()
    workload.run(300)                 # run 300 actions in this thread
    with workload.busy():             # or run actions in another thread while the block runs
        ...
    workload.counts                   # how often each action was run

Each action is one that applications run and that is difficult to follow: swapped keys, unique keys that rows
exchange, changed primary keys, emptied tables, full and partial rollbacks, prepared (XA) transactions,
transactions of many rows, and on request columns that are added, dropped, renamed and widened.
"""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pymysql

from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server

# Another connection won a conflict, or the server went away. The action is over and was atomic.
_PASSING = {1205, 1213, 1020, 1317, 2003, 2006, 2013}
# Another row has the value already, or a parallel writer has taken the row.
_REFUSED = {1022, 1062, 1586}

TABLES = {
    "accounts": """
        id INT PRIMARY KEY, owner VARCHAR(40) NOT NULL, balance DECIMAL(14,2) NOT NULL DEFAULT 0,
        note TEXT, touched TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)""",
    "seats": """
        id INT PRIMARY KEY, seat INT NOT NULL, label VARCHAR(20), price INT,
        UNIQUE KEY seat (seat), UNIQUE KEY label (label)""",
    "order_lines": """
        code VARCHAR(20) NOT NULL, line SMALLINT UNSIGNED NOT NULL, count BIGINT UNSIGNED,
        rate DOUBLE, share FLOAT, due DATE, moment DATETIME(3), spent TIME(6), made YEAR,
        state ENUM('new', 'paid', 'sent', 'back'), marks SET('a', 'b', 'c'), flags BIT(12),
        body VARBINARY(200), plan JSON, latin VARCHAR(30) CHARACTER SET latin1,
        PRIMARY KEY (code, line)""",
    "tokens": "token BINARY(16) PRIMARY KEY, kind TINYINT NOT NULL, used DATETIME",
}
KEYS = {"accounts": ("id",), "seats": ("id",), "order_lines": ("code", "line"), "tokens": ("token",)}
# A table without any key, and a table whose columns change; both exist only on request.
KEYLESS = {"visits": "page VARCHAR(30), seconds INT, seen DATETIME(6)"}
CHANGING = {"shapes": "id INT PRIMARY KEY, c0 VARCHAR(30)"}

_WORDS = (
    "canal",
    "sluice",
    "weir",
    "Über",
    "naïve",
    "水",
    "🚰",
    "tail ",
    "O'Neil",
    "a\\b",
    "",
    "TAB\t",
    "NULL",
)


class Workload:
    """One writer of one database; the same `seed` repeats the same actions.

    `keyless` adds a table without a key, and `ddl` adds a table whose columns change. Without `truncates`,
    `xa` or `rollbacks`, the writer runs no actions of that kind. `rows` is the approximate number of rows in
    a table, and `big_rows` is the number of rows that a large transaction changes. An instance is used by one
    thread. Several instances may write to the same tables.
    """

    def __init__(
        self,
        server: Server,
        database: str,
        *,
        seed: int = 1,
        rows: int = 200,
        big_rows: int = 2000,
        keyless: bool = False,
        ddl: bool = False,
        truncates: bool = True,
        xa: bool = True,
        rollbacks: bool = True,
    ) -> None:
        self.server = server
        self.database = database
        self.counts: Counter[str] = Counter()
        self.definitions = dict(TABLES) | (KEYLESS if keyless else {}) | (CHANGING if ddl else {})
        self._seed = seed
        self._random = random.Random(seed)
        self._rows = rows
        self._big_rows = big_rows
        self._connection: Any = None
        self._next_column = 1
        self._added: list[str] = []
        self._actions = self._weighted(keyless, ddl, truncates, xa, rollbacks)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the workload's tables, without the database."""
        return tuple(self.definitions)

    def keys(self, table: str) -> tuple[str, ...]:
        """The columns of a table's primary key; () if it has none."""
        return KEYS.get(table, () if table in KEYLESS else ("id",))

    def create(self, *, filled: bool = True) -> None:
        """Create the tables in the existing database and insert the first rows."""
        for name, columns in self.definitions.items():
            self._sql(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) CHARACTER SET utf8mb4")
        if filled:
            for name in self.definitions:
                self._insert(name, self._rows // 2)

    def run(self, actions: int) -> Counter[str]:
        """Run this many actions, and return how often each was run."""
        for _ in range(actions):
            self.step()
        self.close()
        return self.counts

    def step(self) -> str:
        """Run one action and return its name; count conflicts and restarts separately."""
        names, weights = list(self._actions), [weight for _, weight in self._actions.values()]
        name = self._random.choices(names, weights)[0]
        try:
            self._actions[name][0]()
        except (
            pymysql.err.OperationalError,
            pymysql.err.InterfaceError,
            pymysql.err.IntegrityError,
        ) as error:
            code = error.args[0] if error.args else 0
            if code not in _PASSING | _REFUSED and not isinstance(error, pymysql.err.InterfaceError):
                raise
            self.close()
            name = f"{name} spoiled"
        self.counts[name] += 1
        return name

    @contextlib.contextmanager
    def busy(self, pause_seconds: float = 0.0) -> Iterator[None]:
        """Write in a thread inside the block; raise the writer's error at the end of the block."""
        stop = threading.Event()
        failed: list[BaseException] = []

        def write() -> None:
            try:
                while not stop.is_set():
                    self.step()
                    stop.wait(pause_seconds)
            # An error of any type is raised again at the end of the block.
            except BaseException as error:  # noqa: BLE001
                failed.append(error)
            finally:
                self.close()

        thread = threading.Thread(target=write, name=f"workload-{self._seed}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""
        if self._connection is not None:
            with contextlib.suppress(pymysql.err.Error):
                self._connection.close()
            self._connection = None

    def _weighted(
        self, keyless: bool, ddl: bool, truncates: bool, xa: bool, rollbacks: bool
    ) -> dict[str, tuple[Callable[[], None], float]]:
        """Return each action and its relative frequency."""
        actions: dict[str, tuple[Callable[[], None], float]] = {
            "insert": (lambda: self._insert(self._any_table(), self._random.randint(1, 6)), 20),
            "update": (self._update, 20),
            "update many": (self._update_many, 4),
            "delete": (self._delete, 10),
            "insert again": (self._insert_again, 5),
            "replace": (self._replace, 6),
            "insert or update": (self._upsert, 6),
            "several tables": (self._several_tables, 6),
            "swap keys": (self._swap_keys, 5),
            "shuffle unique keys": (self._shuffle_unique, 6),
            "move a primary key": (self._move_key, 6),
            "key by case": (self._key_by_case, 3),
            "large transaction": (self._large, 0.7),
        }
        if truncates:
            actions["truncate"] = (self._truncate, 0.5)
        if xa:
            actions["prepared"] = (self._prepared, 3)
        if rollbacks:
            actions["rollback"] = (self._rollback, 3)
            actions["savepoint"] = (self._savepoint, 4)
        if keyless:
            actions["keyless"] = (self._keyless, 6)
        if ddl:
            actions["columns"] = (self._columns, 1)
        return actions

    # --- the connection -------------------------------------------------------------------------

    def _sql(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = self._connect()
        with self._connection.cursor() as cursor:
            cursor.execute(statement, arguments or None)
            return list(cursor.fetchall())

    def _connect(self) -> Any:
        # A restarting server answers after a while.
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            try:
                connection = self.server.connect(database=self.database)
                with connection.cursor() as cursor:
                    cursor.execute("SET SESSION innodb_lock_wait_timeout = 5, sql_mode = ''")
                return connection
            except pymysql.err.OperationalError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    @contextlib.contextmanager
    def _transaction(self, end: str = "COMMIT") -> Iterator[None]:
        self._sql("BEGIN")
        try:
            yield
        except BaseException:
            self.close()
            raise
        self._sql(end)

    # --- values -----------------------------------------------------------------------------------

    def _any_table(self) -> str:
        return self._random.choice(list(TABLES))

    def _text(self, length: int) -> str:
        chosen = self._random
        return " ".join(chosen.choice(_WORDS) for _ in range(chosen.randint(0, 4)))[:length]

    def _maybe(self, value: Any) -> Any:
        return None if self._random.random() < 0.15 else value

    def _moment(self, digits: int) -> str:
        chosen = self._random
        day = f"{chosen.randint(1971, 2037)}-{chosen.randint(1, 12):02}-{chosen.randint(1, 28):02}"
        clock = f"{chosen.randint(0, 23):02}:{chosen.randint(0, 59):02}:{chosen.randint(0, 59):02}"
        return f"{day} {clock}" + (f".{chosen.randint(0, 10**digits - 1):0{digits}}" if digits else "")

    def _row(self, table: str) -> dict[str, Any]:
        """Return a random row with values in the client's form; a `BIT` is a number."""
        chosen = self._random
        if table == "accounts":
            return {
                "id": chosen.randint(1, self._rows * 3),
                "owner": self._text(40),
                "balance": f"{chosen.randint(-(10**9), 10**9)}.{chosen.randint(0, 99):02}",
                "note": self._maybe(self._text(200)),
            }
        if table == "seats":
            number = chosen.randint(1, self._rows * 3)
            label = self._maybe(f"label {chosen.randint(1, self._rows * 3)}")
            seat = chosen.randint(1, self._rows * 3)
            return {"id": number, "seat": seat, "label": label, "price": self._maybe(chosen.randint(0, 999))}
        if table == "order_lines":
            return self._line()
        if table == "tokens":
            token = chosen.randint(1, self._rows * 3).to_bytes(4) * 4
            return {"token": token, "kind": chosen.randint(-128, 127), "used": self._maybe(self._moment(0))}
        if table == "visits":
            seconds = self._maybe(chosen.randint(0, 5))
            return {"page": self._text(30), "seconds": seconds, "seen": self._maybe(self._moment(6))}
        row = {"id": chosen.randint(1, self._rows * 3)}
        return row | {column: self._maybe(str(chosen.randint(0, 99))) for column in ("c0", *self._added)}

    def _line(self) -> dict[str, Any]:
        chosen = self._random
        sign = chosen.choice(("", "-"))
        spent = f"{sign}{chosen.randint(0, 838)}:{chosen.randint(0, 59):02}:07.{chosen.randint(0, 999999):06}"
        values = {
            "count": chosen.choice((0, 2**64 - 1, chosen.randint(0, 2**63))),
            "rate": chosen.uniform(-1e9, 1e9),
            "share": chosen.randint(-1000, 1000) / 8,
            "due": self._moment(0)[:10],
            "moment": self._moment(3),
            "spent": spent if not spent.endswith("838:59:59.999999") else "00:00:00",
            "made": chosen.choice((0, 1901, 2026, 2155)),
            "state": chosen.choice(("new", "paid", "sent", "back")),
            "marks": chosen.choice(("", "a", "b,c", "a,b,c")),
            "flags": chosen.randint(0, 4095),
            "body": chosen.randbytes(chosen.randint(0, 60)),
            "plan": f'{{"n": {chosen.randint(0, 9)}, "t": ["x", null, {chosen.randint(0, 99)}.5]}}',
            "latin": chosen.choice(("plain", "Zürich", "façade", "")),
        }
        key = {"code": f"code {chosen.randint(1, 40)}", "line": chosen.randint(1, 20)}
        return key | {name: self._maybe(value) for name, value in values.items()}

    # --- actions ----------------------------------------------------------------------------------

    def _write(self, verb: str, table: str, row: dict[str, Any], tail: str = "") -> None:
        names = ", ".join(f"`{name}`" for name in row)
        places = ", ".join(["%s"] * len(row))
        self._sql(f"{verb} INTO {table} ({names}) VALUES ({places}) {tail}", *row.values())

    def _insert(self, table: str, count: int) -> None:
        with self._transaction():
            for _ in range(count):
                self._write("INSERT IGNORE", table, self._row(table))

    def _some_key(self, table: str) -> tuple[Any, ...] | None:
        """Return the key of an existing row, or None if there is none."""
        names = ", ".join(f"`{name}`" for name in self.keys(table))
        actual_rows = self._sql(f"SELECT {names} FROM {table} ORDER BY {names} LIMIT {self._rows}")
        return self._random.choice(actual_rows) if actual_rows else None

    def _where(self, table: str) -> str:
        return " AND ".join(f"`{name}` = %s" for name in self.keys(table))

    def _update(self) -> None:
        table = self._any_table()
        key = self._some_key(table)
        if key is None:
            return
        row = {name: value for name, value in self._row(table).items() if name not in self.keys(table)}
        column = self._random.choice(list(row))
        self._sql(f"UPDATE IGNORE {table} SET `{column}` = %s WHERE {self._where(table)}", row[column], *key)

    def _update_many(self) -> None:
        low = self._random.randint(0, self._rows * 3)
        self._sql(
            "UPDATE accounts SET balance = balance + 1, note = CONCAT('batch ', id)"
            f" WHERE id BETWEEN {low} AND {low + self._random.randint(1, 60)}"
        )

    def _delete(self) -> None:
        table = self._any_table()
        key = self._some_key(table)
        if key is not None:
            self._sql(f"DELETE FROM {table} WHERE {self._where(table)}", *key)

    def _insert_again(self) -> None:
        """Delete a row and insert another row of the same key in one transaction."""
        table = self._any_table()
        key = self._some_key(table)
        if key is None:
            return
        row = self._row(table) | dict(zip(self.keys(table), key, strict=True))
        with self._transaction():
            self._sql(f"DELETE FROM {table} WHERE {self._where(table)}", *key)
            self._write("INSERT IGNORE", table, row)

    def _replace(self) -> None:
        table = self._any_table()
        self._write("REPLACE", table, self._row(table))

    def _upsert(self) -> None:
        row = self._row("seats")
        self._write("INSERT", "seats", row, "ON DUPLICATE KEY UPDATE price = VALUES(price)")

    def _several_tables(self) -> None:
        with self._transaction():
            for table in self._random.sample(list(TABLES), 3):
                self._write("REPLACE", table, self._row(table))
                key = self._some_key(table)
                if key is not None and self._random.random() < 0.5:
                    self._sql(f"DELETE FROM {table} WHERE {self._where(table)}", *key)

    def _two_seats(self) -> list[tuple[Any, ...]]:
        actual_rows = self._sql("SELECT id, seat, label FROM seats ORDER BY id LIMIT 200 FOR UPDATE")
        return self._random.sample(actual_rows, min(len(actual_rows), self._random.randint(2, 5)))

    def _swap_keys(self) -> None:
        """Swap the primary keys of two rows, through an unused key."""
        with self._transaction():
            seats = self._two_seats()
            if len(seats) < 2:
                return
            (first, *_), (other, *_) = seats[:2]
            for new, old in ((-1, first), (first, other), (other, -1)):
                self._sql("UPDATE seats SET id = %s WHERE id = %s", new, old)

    def _shuffle_unique(self) -> None:
        """Rotate the unique values of several rows without changing their primary keys."""
        with self._transaction():
            seats = self._two_seats()
            self._sql("UPDATE seats SET seat = -seat WHERE seat < 0")
            for number, *_ in seats:
                self._sql("UPDATE seats SET seat = -%s - 1, label = NULL WHERE id = %s", number, number)
            for (number, *_), (_, seat, label) in zip(seats, [*seats[1:], *seats[:1]], strict=True):
                self._sql("UPDATE seats SET seat = %s, label = %s WHERE id = %s", seat, label, number)

    def _move_key(self) -> None:
        if self._random.random() < 0.5:
            low = self._random.randint(1, self._rows * 3)
            # Update in an order in which the new keys do not collide with the old ones.
            self._sql(f"UPDATE accounts SET id = id + 7 WHERE id >= {low} ORDER BY id DESC LIMIT 5")
            return
        key = self._some_key("order_lines")
        if key is not None:
            line = self._random.randint(1, 60)
            self._sql("UPDATE order_lines SET line = %s WHERE code = %s AND line = %s", line, *key)

    def _key_by_case(self) -> None:
        """Change only the case of a key, which stays the same key to the server but has other bytes in the
        log.
        """
        key = self._some_key("order_lines")
        if key is not None:
            code = self._random.choice((key[0].upper(), key[0].lower(), key[0].title()))
            self._sql("UPDATE order_lines SET code = %s WHERE code = %s AND line = %s", code, *key)

    def _rollback(self) -> None:
        with self._transaction("ROLLBACK"):
            self._sql("DELETE FROM accounts LIMIT 20")
            self._write("REPLACE", "order_lines", self._row("order_lines"))

    def _savepoint(self) -> None:
        with self._transaction():
            self._write("REPLACE", "accounts", self._row("accounts"))
            self._sql("SAVEPOINT here")
            self._sql("UPDATE accounts SET owner = 'undone' LIMIT 30")
            self._write("REPLACE", "seats", self._row("seats"))
            self._sql("ROLLBACK TO SAVEPOINT here")
            self._write("REPLACE", "tokens", self._row("tokens"))

    def _prepared(self) -> None:
        name = f"'{self._seed}-{self.counts['prepared']}-{self._random.randint(0, 10**9)}'"
        end = "COMMIT" if self._random.random() < 0.7 else "ROLLBACK"
        self._sql(f"XA START {name}")
        try:
            self._write("REPLACE", "accounts", self._row("accounts"))
            self._sql("UPDATE seats SET price = 5 ORDER BY id LIMIT 3")
            self._sql(f"XA END {name}")
            self._sql(f"XA PREPARE {name}")
            self._sql(f"XA {end} {name}")
        except BaseException:
            self.close()
            raise

    def _large(self) -> None:
        """Insert many rows in one transaction and delete most of them, so that the table does not grow."""
        with self._transaction():
            first = self._rows * 10
            for low in range(first, first + self._big_rows, 500):
                rows = ", ".join(f"({number}, 'large', {number})" for number in range(low, low + 500))
                self._sql(f"REPLACE INTO accounts (id, owner, balance) VALUES {rows}")
            self._sql(f"UPDATE accounts SET balance = balance * 2 WHERE id >= {first}")
            self._sql(f"DELETE FROM accounts WHERE id >= {first + self._rows // 2}")

    def _truncate(self) -> None:
        table = self._any_table()
        self._sql(f"TRUNCATE TABLE {table}")
        self._insert(table, self._rows // 4)

    def _keyless(self) -> None:
        self._write("INSERT", "visits", self._row("visits"))
        match self._random.randint(0, 3):
            case 0:
                self._sql("UPDATE visits SET seconds = seconds + 1 ORDER BY seen LIMIT 2")
            case 1:
                self._sql("DELETE FROM visits ORDER BY seen DESC LIMIT 1")

    def _columns(self) -> None:
        """Add, drop, rename or widen a column, inserting rows before and after."""
        self._insert("shapes", 3)
        choices = ["add"] if not self._added else ["add", "drop", "rename", "widen"]
        kind = self._random.choice(choices)
        if kind == "add":
            name = f"c{self._next_column}"
            self._next_column += 1
            self._sql(f"ALTER TABLE shapes ADD COLUMN {name} SMALLINT")
            self._added.append(name)
        else:
            name = self._random.choice(self._added)
            if kind == "drop":
                self._sql(f"ALTER TABLE shapes DROP COLUMN {name}")
                self._added.remove(name)
            elif kind == "rename":
                new, self._next_column = f"c{self._next_column}", self._next_column + 1
                (described,) = self._sql(f"SHOW COLUMNS FROM shapes LIKE '{name}'")
                self._sql(f"ALTER TABLE shapes CHANGE COLUMN {name} {new} {described[1]}")
                self._added[self._added.index(name)] = new
            else:
                self._sql(f"ALTER TABLE shapes MODIFY COLUMN {name} BIGINT")
        self._insert("shapes", 3)
