# SPDX-License-Identifier: Apache-2.0
"""A table is cut by its key into chunks of about equal size, which together contain each row once, whatever
the keys are.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from penstock.model import ServerAddress, TablePatterns
from penstock.mysql.connection import Connection
from penstock.pipeline.load.chunks import Chunk, bound_values, plan_chunks
from penstock.pipeline.load.reader import read_rows
from penstock.pipeline.load.session import open_session
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import watermark_of
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

ROWS = 6_000
WISH = 500


class Keys(NamedTuple):
    """The columns and the index of a key, and SQL that computes the key of row n."""

    columns: str
    key: str
    values: str
    flavors: Sequence[str] = ("mysql", "mariadb", "mariadb11")


CASES = {
    "dense": Keys("k BIGINT", "PRIMARY KEY (k)", "n"),
    "sparse": Keys("k BIGINT UNSIGNED", "PRIMARY KEY (k)", "CAST(n AS UNSIGNED) * 3000000000000000"),
    "negative": Keys("k INT", "PRIMARY KEY (k)", "n - 3000"),
    "skewed": Keys("k BIGINT", "PRIMARY KEY (k)", "IF(n < 5900, n, n * n * 100000000000)"),
    "clustered": Keys("k BIGINT", "PRIMARY KEY (k)", "n MOD 2000 + (n DIV 2000) * 1000000000000000"),
    "decimal": Keys("k DECIMAL(20,4)", "PRIMARY KEY (k)", "n * 1.2345"),
    "double": Keys("k DOUBLE", "PRIMARY KEY (k)", "(n - 3000) * 1.1e100"),
    "string": Keys("k VARCHAR(30)", "PRIMARY KEY (k)", "CONCAT('user_', LPAD(n * 7919 MOD 1000003, 8, '0'))"),
    "mixed letters": Keys(
        "k VARCHAR(40)", "PRIMARY KEY (k)", "CONCAT(IF(n MOD 2, 'Ä', 'b'), LEFT(SHA2(n, 256), 32))"
    ),
    "binary string": Keys(
        "k VARCHAR(40) COLLATE utf8mb4_bin",
        "PRIMARY KEY (k)",
        "CONCAT(IF(n MOD 2, 'A', 'a'), LEFT(SHA2(n, 256), 32))",
    ),
    "gbk": Keys("k VARCHAR(30) CHARACTER SET gbk", "PRIMARY KEY (k)", "CONCAT('中', n)"),
    "uuid text": Keys(
        "k CHAR(36) CHARACTER SET ascii", "PRIMARY KEY (k)", "INSERT(LEFT(SHA2(n, 256), 32), 9, 0, '-')"
    ),
    "uuid bytes": Keys("k BINARY(16)", "PRIMARY KEY (k)", "UNHEX(LEFT(SHA2(n, 256), 32))"),
    "uuid": Keys(
        "k UUID",
        "PRIMARY KEY (k)",
        "CONCAT(LEFT(SHA2(n, 256), 8), '-0000-4000-8000-', RIGHT(SHA2(n, 256), 12))",
        ("mariadb", "mariadb11"),
    ),
    "address": Keys(
        "k INET6", "PRIMARY KEY (k)", "INET6_NTOA(UNHEX(LEFT(SHA2(n, 256), 32)))", ("mariadb", "mariadb11")
    ),
    "date and number": Keys("d DATE, k INT", "PRIMARY KEY (d, k)", "'2020-01-01' + INTERVAL n MOD 3 DAY, n"),
    "moment": Keys("k DATETIME(6)", "PRIMARY KEY (k)", "'2020-01-01' + INTERVAL n * 977 SECOND"),
    "one tenant": Keys("t INT, k BIGINT", "PRIMARY KEY (t, k)", "IF(n < 100, n, 7), n"),
    "three": Keys(
        "a SMALLINT, b VARCHAR(10), c INT",
        "PRIMARY KEY (a, b, c)",
        "n MOD 2, ELT(n MOD 3 + 1, 'x', 'y', 'z'), n",
    ),
    "unique": Keys("k INT NOT NULL, u INT", "UNIQUE KEY (u), UNIQUE KEY k_key (k)", "n * 3, n"),
    "enum": Keys("e ENUM('c','b','a'), k INT", "PRIMARY KEY (e, k)", "n MOD 3 + 1, n"),
    "bits": Keys("k BIT(40)", "PRIMARY KEY (k)", "n * 100000000"),
    "zero dates": Keys("d DATE, k INT", "PRIMARY KEY (d, k)", "IF(n MOD 4, '0000-00-00', '2020-02-31'), n"),
}
# Both MariaDB versions plan chunks in the same way, so only the most different keys are tested on the older
# one.
OF_OLDER = ("dense", "string", "uuid", "date and number", "three")
PAIRS = [
    (flavor, name)
    for name, case in CASES.items()
    for flavor in case.flavors
    if flavor != "mariadb" or name in OF_OLDER
]


def fill(server: Server, database: str, case: Keys, rows: int = ROWS) -> None:
    """Write a table whose row n has the case's key and the number n."""
    with server.connect(database=database) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES'")
        cursor.execute(f"CREATE TABLE t ({case.columns}, n INT, {case.key}) CHARACTER SET utf8mb4")
        counted = f"SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}"
        numbers = f"(WITH RECURSIVE s(n) AS ({counted}) SELECT n FROM s)"
        for name in ("cte_max_recursion_depth", "max_recursive_iterations"):
            cursor.execute("SHOW VARIABLES LIKE %s", (name,))
            if cursor.fetchall():
                cursor.execute(f"SET {name} = {rows}")
        cursor.execute(f"INSERT INTO t SELECT {case.values}, n FROM {numbers} AS numbers")
        cursor.execute("ANALYZE TABLE t")
        cursor.fetchall()


def numbers_of(address: ServerAddress, chunks: Sequence[Chunk]) -> list[list[int]]:
    """Return the row numbers of each chunk."""
    (target,) = targets_of(address, TablePatterns(str(chunks[0].table)))
    with open_session(address) as session:
        watermark = watermark_of(session)
        return [
            [
                number
                for changes in read_rows(session, target, chunk, watermark, instance="test", columns=["n"])
                for number in changes.rows.column("n").to_pylist()
            ]
            for chunk in chunks
        ]


@pytest.mark.parametrize(("flavor", "name"), PAIRS)
def test_chunks_hold_each_row_once_and_are_about_equal_in_size(
    server_of: Callable[[str], Server],
    fresh_database: FreshDatabase,
    monkeypatch: pytest.MonkeyPatch,
    flavor: str,
    name: str,
) -> None:
    server, case = server_of(flavor), CASES[name]
    database = fresh_database(server)
    fill(server, database, case)
    address = ServerAddress.parse(server.url())
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    asked = counted(monkeypatch)
    chunks = plan_chunks(address, target, rows=WISH)
    assert asked() < 50 + 10 * len(chunks)
    assert chunks[0].low is None
    assert chunks[-1].high is None
    assert all(chunk.high == other.low for chunk, other in itertools.pairwise(chunks))
    actual = numbers_of(address, chunks)
    assert sorted(itertools.chain(*actual)) == list(range(1, ROWS + 1))
    sizes = [len(numbers) for numbers in actual]
    assert max(sizes) <= WISH * 2
    assert len(chunks) <= ROWS / WISH * 2
    for chunk, numbers in zip(chunks, actual, strict=True):
        low, high = bound_values(target, chunk)
        assert (low is None, high is None) == (chunk.low is None, chunk.high is None)
        assert Chunk.from_json(chunk.to_json()) == chunk
        assert numbers


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the statements of sessions."""
    count = 0
    query = Connection.query_first

    def counting(self: Connection, *args: object) -> object:
        nonlocal count
        count += 1
        return query(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "query_first", counting)
    return lambda: count


def test_rows_before_the_first_and_after_the_last_key_are_in_a_chunk(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    fill(mysql_server, database, CASES["negative"])
    address = ServerAddress.parse(mysql_server.url())
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    chunks = plan_chunks(address, target, rows=WISH)
    mysql_server.sql(f"INSERT INTO {database}.t VALUES (-100000, -1), (100000, -2)")
    numbers = numbers_of(address, chunks)
    assert -1 in numbers[0]
    assert -2 in numbers[-1]


def test_plan_tolerates_wrong_statistics(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    options = "STATS_PERSISTENT=1, STATS_AUTO_RECALC=0"
    server.sql(f"CREATE TABLE {database}.t (k INT PRIMARY KEY, n INT) {options}")
    server.sql(f"ANALYZE TABLE {database}.t")
    rows = ", ".join(f"({n}, {n})" for n in range(1, ROWS + 1))
    server.sql(f"INSERT INTO {database}.t VALUES {rows}")
    address = ServerAddress.parse(server.url())
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    numbers = numbers_of(address, plan_chunks(address, target, rows=WISH))
    assert sorted(itertools.chain(*numbers)) == list(range(1, ROWS + 1))
    assert max(map(len, numbers)) <= WISH * 4


@pytest.mark.parametrize("rows", [0, 3])
def test_small_and_keyless_tables_are_one_chunk(
    server: Server, fresh_database: FreshDatabase, rows: int
) -> None:
    database = fresh_database(server)
    address = ServerAddress.parse(server.url())
    unseen = {"mysql": "INVISIBLE", "mariadb11": "IGNORED"}.get(server.flavor, "COMMENT 'seen'")
    definitions = {
        "keyed": "k INT PRIMARY KEY, n INT",
        "keyless": "n INT",
        "nullable": "k INT, n INT, UNIQUE KEY (k)",
        "front": "k VARCHAR(20) NOT NULL, n INT, UNIQUE KEY (k(5))",
        "unseen": f"k INT NOT NULL, n INT NOT NULL, UNIQUE KEY z (k), UNIQUE KEY a (n) {unseen}",
    }
    for name, definition in definitions.items():
        server.sql(f"CREATE TABLE {database}.{name} ({definition})")
        for n in range(rows):
            values = f"{n}" if name == "keyless" else f"{n}, {n}"
            server.sql(f"INSERT INTO {database}.{name} VALUES ({values})")
        (target,) = targets_of(address, TablePatterns(f"{database}.{name}"))
        (chunk,) = plan_chunks(address, target, rows=WISH)
        hidden = ("n",) if "seen" in unseen else ("k",)
        assert chunk.key == {"keyed": ("k",), "unseen": hidden}.get(name, ())
        assert numbers_of(address, [chunk]) == [list(range(rows))]


def test_targets_have_their_keys(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(
        f"CREATE TABLE {database}.a (x INT, y INT, z VARCHAR(30), w INT, PRIMARY KEY (y, x),"
        " UNIQUE KEY one (z), UNIQUE KEY two (w, z), UNIQUE KEY front (z(5)), KEY plain (w))"
    )
    server.sql(f"CREATE TABLE {database}.`b c` (x INT)")
    server.sql(f"CREATE VIEW {database}.v AS SELECT 1 AS x")
    if server.flavor != "mysql":
        server.sql(f"CREATE SEQUENCE {database}.s")
    targets = targets_of(ServerAddress.parse(server.url()), TablePatterns(f"{database}.*"))
    assert [target.name.table for target in targets] == ["a", "b c"]
    assert targets[0].primary_key == ("y", "x")
    assert targets[0].unique_keys == (("z",), ("w", "z"))
    assert targets[0].mariadb == (server.flavor != "mysql")
    assert (targets[1].primary_key, targets[1].unique_keys) == ((), ())


def test_random_composite_keys_are_cut_without_a_gap(
    mariadb_server: Server, fresh_database: FreshDatabase
) -> None:
    chance = random.Random(7)
    database = fresh_database(mariadb_server)
    address = ServerAddress.parse(mariadb_server.url())
    for round_number in range(3):
        table = f"t{round_number}"
        mariadb_server.sql(
            f"CREATE TABLE {database}.{table} (a VARCHAR(8), b INT, c VARBINARY(4), n INT,"
            " PRIMARY KEY (a, b, c))"
        )
        letters = "aAbBäzZ09 _-%'"
        keys = {
            (
                "".join(chance.choices(letters, k=chance.randint(0, 3))),
                chance.randint(-3, 3),
                chance.randbytes(1),
            )
            for _ in range(200)
        }
        with mariadb_server.connect(database=database) as connection, connection.cursor() as cursor:
            cursor.executemany(f"INSERT IGNORE INTO {table} VALUES (%s, %s, %s, 0)", sorted(keys))
            connection.commit()
            cursor.execute("SET @n = 0")
            cursor.execute(f"UPDATE {table} SET n = (@n := @n + 1)")
            rows = int(cursor.rowcount)
            connection.commit()
        (target,) = targets_of(address, TablePatterns(f"{database}.{table}"))
        numbers = numbers_of(address, plan_chunks(address, target, rows=chance.choice([1, 7, 50])))
        assert sorted(itertools.chain(*numbers)) == list(range(1, rows + 1))
