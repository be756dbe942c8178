# SPDX-License-Identifier: Apache-2.0
"""The row changes that a logged statement makes without logging the rows."""

import time

import pytest

from penstock.model import TableName, TablePatterns
from penstock.schema.statements.row_changes import change_of, tables_of
from penstock.schema.statements.tokens import ServerSpelling

# Reading the long texts token by token takes five times as long.
CPU_SECONDS_MAX = 3
MARIADB = ServerSpelling(True, (11, 8, 0))
MYSQL = ServerSpelling(False, (9, 7, 0))


def _names(*texts: str) -> set[TableName]:
    return {TableName.parse(text) for text in texts}


@pytest.mark.parametrize("spelling", [MYSQL, MARIADB], ids=["mysql", "mariadb"])
@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("INSERT INTO orders VALUES (1)", ["shop.orders"]),
        ("INSERT INTO orders (id) SELECT id FROM items", ["shop.orders"]),
        ("insert low_priority ignore orders(id) VALUE (NOW(6)), (UUID())", ["shop.orders"]),
        ("INSERT INTO crm.orders PARTITION (p0) (a, b) VALUES (1, 2) AS new(a, b)", ["crm.orders"]),
        ("INSERT INTO orders SET id = 1 ON DUPLICATE KEY UPDATE n = VALUES(n) + (1)", ["shop.orders"]),
        ("INSERT INTO orders VALUES ('it''s \\' f(1)', \"g(2)\", CAST(1 AS CHAR(10)))", ["shop.orders"]),
        ("REPLACE INTO `od``d`.`or ders` SET id = 1", ["`od``d`.`or ders`"]),
        ("UPDATE orders SET total = 1", ["shop.orders"]),
        ("UPDATE LOW_PRIORITY orders AS o SET total = (SELECT MAX(n) FROM items)", ["shop.orders"]),
        ("UPDATE orders JOIN crm.customers USING (id) SET total = 1", ["shop.orders", "crm.customers"]),
        ("UPDATE (a, b) LEFT JOIN (SELECT id FROM c) d ON a.id IN (1, d.id), e SET n = 1", [*"abe"]),
        ("WITH c (n) AS (SELECT COUNT(*) FROM items) UPDATE orders JOIN c SET n = c.n", ["orders", "c"]),
        ("DELETE FROM crm.customers WHERE id IN (SELECT id FROM orders)", ["crm.customers"]),
        ("DELETE QUICK FROM orders AS o WHERE o.id = 1 ORDER BY id LIMIT 1", ["shop.orders"]),
        (
            "DELETE o, crm.customers.* FROM orders AS o JOIN items i JOIN crm.customers",
            ["orders", "crm.customers"],
        ),
        ("DELETE FROM o USING orders o JOIN items WHERE o.id = items.id", ["shop.orders"]),
        ("DELETE x FROM orders o JOIN items", ["orders", "items", "x"]),
        ("/* from the shop */ UPDATE orders SET note = 'DELETE FROM items'", ["shop.orders"]),
        ("/*!50000 INSERT INTO orders VALUES (1) */", ["shop.orders"]),
        ("SET STATEMENT max_statement_time=1 FOR INSERT INTO orders VALUES (1)", ["shop.orders"]),
        ("SET STATEMENT a=1, b='FOR' FOR UPDATE orders SET n = 1", ["shop.orders"]),
        ("ANALYZE FORMAT=JSON UPDATE orders SET total = 1", ["shop.orders"]),
        ("ANALYZE DELETE FROM orders", ["shop.orders"]),
        (
            "LOAD DATA INFILE '...' INTO TABLE `orders` FIELDS TERMINATED BY '\\t' (`a`, @b) SET c = @b",
            ["orders"],
        ),
        ("LOAD XML LOCAL INFILE 'f' IGNORE INTO TABLE crm.orders ROWS IDENTIFIED BY '<r>'", ["crm.orders"]),
        ("CREATE TABLE copy AS SELECT * FROM orders", ["shop.copy"]),
        ("CREATE OR REPLACE TABLE copy (id INT, KEY k (id)) IGNORE (SELECT 1)", ["shop.copy"]),
        ("CREATE TABLE IF NOT EXISTS copy TABLE orders", ["shop.copy"]),
    ],
)
def test_change_names_the_tables_it_changes(spelling: ServerSpelling, text: str, tables: list[str]) -> None:
    change = change_of(text, "shop", spelling)
    assert change is not None
    assert (change.tables, change.unknown) == (
        _names(*(name if "." in name else f"shop.{name}" for name in tables)),
        "",
    )


@pytest.mark.parametrize(
    ("text", "reason", "tables"),
    [
        ("SELECT `shop`.`restock`(7)", "routines", []),
        ("SELECT restock(id) FROM orders", "routines", []),
        ("DO restock(7)", "routines", []),
        ("CALL restock()", "routines", []),
        ("WITH a AS (SELECT 1) SELECT f() FROM a", "routines", []),
        ("INSERT INTO orders VALUES (restock(7))", "calls restock()", ["shop.orders"]),
        ("INSERT INTO orders VALUES (crm.uuid())", "calls uuid()", ["shop.orders"]),
        (
            "UPDATE orders JOIN (SELECT restock(1) AS n) x SET orders.n = x.n",
            "calls restock()",
            ["shop.orders"],
        ),
        ("WITH c (n) AS (SELECT c(1)) DELETE FROM orders", "calls c()", ["shop.orders"]),
        ("DELETE FROM orders WHERE `restock` (id) = 1", "calls restock()", ["shop.orders"]),
        ("INSERT INTO orders VALUES (1), (2), ('a'), (f(1))", "calls f()", ["shop.orders"]),
        ("INSERT INTO orders VALUES (1), ('a, (''', f(1), ')')", "calls f()", ["shop.orders"]),
        (
            "INSERT INTO orders VALUES (1), (0x1F, NULL) ON DUPLICATE KEY UPDATE a = f(1)",
            "calls f()",
            ["shop.orders"],
        ),
        (
            "WITH a AS (SELECT (1) IN (1, (2), (3))), f (n) AS (SELECT 1) DELETE FROM t WHERE f(1)",
            "calls f()",
            ["shop.t"],
        ),
        ("CREATE TABLE copy AS SELECT restock(1)", "calls restock()", ["shop.copy"]),
        ("LOAD DATA INFILE 'f' INTO TABLE orders (a) SET b = restock(a)", "calls restock()", ["shop.orders"]),
        ("INSERT INTO orders VALUES ('open", "cannot be read", ["shop.orders"]),
        ("UPDATE ((", "cannot be read", []),
        ("LOAD DATA", "cannot be read", []),
        ("SET STATEMENT a=1 INSERT INTO orders VALUES (1)", "cannot be read", []),
        ("DELETE FROM a, b", "cannot be read", ["shop.a", "shop.b"]),
    ],
)
def test_change_says_why_it_may_change_other_tables(text: str, reason: str, tables: list[str]) -> None:
    change = change_of(text, "shop", MARIADB)
    assert change is not None
    assert reason in change.unknown
    assert change.tables == _names(*tables)


@pytest.mark.parametrize(
    ("text", "accessed", "doubt"),
    [
        # A trigger or view in another database.
        ("INSERT INTO crm.t VALUES (1)", ["crm", "shop"], "the database shop"),
        ("UPDATE crm.v SET n = 1", ["shop"], "the database shop"),
        ("INSERT INTO crm.t SELECT * FROM SHOP.orders", ["crm", "shop"], ""),
        ("INSERT INTO crm.t SELECT * FROM orders", ["crm", "shop"], ""),
        ("INSERT INTO crm.t VALUES (1)", ["crm", "log"], ""),
        ("INSERT INTO crm.t VALUES (1)", ["crm"], ""),
        ("INSERT INTO crm.t VALUES (1)", None, ""),
        # An empty list means foreign keys, or more accessed databases than are logged.
        ("UPDATE crm.t SET n = 1", [], "foreign keys"),
        ("DELETE FROM crm.t", [], "foreign keys"),
        ("REPLACE INTO crm.t VALUES (1)", [], "foreign keys"),
        ("INSERT INTO crm.t VALUES (1) ON DUPLICATE KEY UPDATE id = 2", [], "foreign keys"),
        ("LOAD DATA INFILE '...' REPLACE INTO TABLE crm.t (a)", [], "foreign keys"),
        ("INSERT INTO crm.t VALUES (1)", [], ""),
        # A routine can change only the databases that were accessed.
        ("SELECT `crm`.`f`(1)", ["crm"], ""),
        ("SELECT `crm`.`f`(1)", ["shop"], "routines"),
        ("SELECT `crm`.`f`(1)", [], "routines"),
        ("SELECT `crm`.`f`(1)", None, "routines"),
        ("INSERT INTO crm.t VALUES (f(1))", None, "calls f()"),
        ("INSERT INTO crm.t VALUES (f(1))", ["crm"], ""),
    ],
)
def test_accessed_databases_reveal_changes_of_a_statement(
    text: str, accessed: list[str] | None, doubt: str
) -> None:
    change = change_of(text, "shop", MYSQL)
    assert change is not None
    assert doubt in (reason := change.doubt(accessed, TablePatterns("shop.orders")))
    assert bool(reason) == bool(doubt)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/* nothing */",
        "ANALYZE TABLE orders",
        "ALTER TABLE orders ADD n INT DEFAULT (f(1))",
        "CREATE TABLE orders (id INT, `select` INT, n INT CHECK (n IN (1, 2))) PARTITION BY LIST (id)"
        " (PARTITION p0 VALUES IN (1))",
        "CREATE TEMPORARY TABLE copy AS SELECT 1",
        "CREATE VIEW v AS SELECT f(1)",
        "CREATE TABLE orders (id INT /* open",
        "TRUNCATE orders",
        "SET PASSWORD FOR u = 'x'",
    ],
)
def test_definition_changes_no_rows(text: str) -> None:
    assert change_of(text, "shop", MARIADB) is None


def test_comments_of_the_other_server_are_not_read() -> None:
    text = "/*M!100100 INSERT INTO orders VALUES (1) */"
    assert change_of(text, "shop", MYSQL) is None
    change = change_of(text, "shop", MARIADB)
    assert change is not None
    assert change.tables == _names("shop.orders")
    hidden = "/*!99999 ALTER TABLE items ADD n INT */ INSERT INTO orders VALUES (1)"
    change = change_of(hidden, "shop", MYSQL)
    assert change is not None
    assert change.tables == _names("shop.orders")


@pytest.mark.parametrize(
    ("version", "spelling"),
    [
        ("9.7.4-2", ServerSpelling(False, (9, 7, 4))),
        ("10.11.19-MariaDB-log", ServerSpelling(True, (10, 11, 19))),
        ("", ServerSpelling()),
        (None, ServerSpelling()),
    ],
)
def test_comment_version_follows_the_version_in_the_log(
    version: str | None, spelling: ServerSpelling
) -> None:
    assert ServerSpelling.of_server(version) == spelling


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("TRUNCATE TABLE orders", ["shop.orders"]),
        ("truncate crm.customers", ["crm.customers"]),
        ("/* nightly */ TRUNCATE orders", ["shop.orders"]),
        ("-- nightly\nTRUNCATE TABLE orders", ["shop.orders"]),
        ("TRUNCATE TABLE orders WAIT 5", ["shop.orders"]),
        ("/*M!100300 TRUNCATE orders NOWAIT */", ["shop.orders"]),
        ("/*!40000 DROP TABLE orders */", ["shop.orders"]),
        ("DROP TABLE IF EXISTS orders, crm.customers", ["shop.orders", "crm.customers"]),
        ("SET STATEMENT max_statement_time=1 FOR TRUNCATE orders", ["shop.orders"]),
        ("CREATE OR REPLACE TABLE orders SELECT 1", ["shop.orders"]),
        ("CREATE OR REPLACE TEMPORARY TABLE orders (id INT)", []),
        ("CREATE TABLE orders (id INT)", []),
        ("DROP VIEW orders", []),
        ("DROP DATABASE shop", []),
        ("ALTER TABLE orders ADD COLUMN note TEXT", []),
    ],
)
def test_truncate_drop_and_replace_empty_their_tables(text: str, tables: list[str]) -> None:
    assert tables_of(text, "shop", MARIADB).emptied == _names(*tables)


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("CREATE TABLE orders (id INT)", ["shop.orders"]),
        ("CREATE TABLE orders LIKE crm.orders", ["shop.orders"]),
        ("CREATE TABLE crm.orders (id INT) START TRANSACTION", ["crm.orders"]),
        ("CREATE TABLE orders SELECT 1", []),
        ("CREATE TABLE IF NOT EXISTS orders (id INT)", []),
        ("CREATE TABLE IF NOT EXISTS orders LIKE crm.orders", []),
        ("CREATE TEMPORARY TABLE orders (id INT)", []),
        ("ALTER TABLE orders ADD COLUMN note TEXT", []),
    ],
)
def test_create_table_creates_unless_the_table_may_exist(text: str, tables: list[str]) -> None:
    assert tables_of(text, "shop", MARIADB).created == _names(*tables)


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO orders VALUES (1)" + ", (-1.5e3, 'it''s', x'00', NULL)" * 300_000,
        "INSERT INTO orders VALUES ('" + "x" * 20_000_000 + "')",
        "INSERT INTO orders VALUES (1)" + ", ('a', '" * 30_000,
    ],
    ids=["rows", "long text", "open"],
)
def test_long_insert_is_read_in_linear_time(text: str) -> None:
    started = time.process_time()
    change = change_of(text, "shop", MYSQL)
    assert change is not None
    assert change.tables == _names("shop.orders")
    assert time.process_time() - started < CPU_SECONDS_MAX


def test_backslashes_are_read_as_the_sql_mode_says() -> None:
    plain = MYSQL.under(frozenset({"NO_BACKSLASH_ESCAPES"}))
    text = "UPDATE orders SET note = 'c:\\' WHERE f(1) -- '"
    assert change_of(text, "shop", MYSQL) != change_of(text, "shop", plain)
    change = change_of(text, "shop", plain)
    assert change is not None
    assert change.unknown == "it calls f(), which can change any"
    # Each '\' is a complete string here, so f() is outside the strings.
    listed = change_of("INSERT INTO orders VALUES ('\\'), (f('\\'))", "shop", plain)
    assert listed is not None
    assert "f()" in listed.unknown
    assert tables_of(
        'DROP TABLE "o\\", items -- "', "shop", plain.under(frozenset({"ANSI_QUOTES"}))
    ).emptied == {
        TableName("shop", "o\\"),
        TableName("shop", "items"),
    }
