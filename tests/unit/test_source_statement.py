# SPDX-License-Identifier: Apache-2.0
"""Which tables a logged statement changes."""

import pytest

from penstock.model import TableName
from penstock.source.statement import changed_tables, emptied_tables


def _names(*texts: str) -> set[TableName]:
    return {TableName.parse(text) for text in texts}


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("INSERT INTO orders VALUES (1)", ["shop.orders"]),
        ("INSERT INTO orders (id) SELECT id FROM items", ["shop.orders"]),
        ("REPLACE INTO `od``d`.`or ders` SET id = 1", ["`od``d`.`or ders`"]),
        ("UPDATE orders SET total = 1", ["shop.orders"]),
        ("UPDATE orders JOIN crm.customers USING (id) SET total = 1", ["shop.orders", "crm.customers"]),
        ("DELETE FROM crm.customers WHERE id IN (SELECT id FROM orders)", ["crm.customers", "shop.orders"]),
        ("/* from the shop */ UPDATE orders SET note = 'DELETE FROM items'", ["shop.orders"]),
        ("SET STATEMENT max_statement_time=1 FOR INSERT INTO orders VALUES (1)", ["shop.orders"]),
    ],
)
def test_a_change_names_its_tables(text: str, tables: list[str]) -> None:
    assert changed_tables(text, "shop") == _names(*tables)


@pytest.mark.parametrize(
    "text",
    [
        "LOAD DATA",
        "UPDATE ((",
        "CALL restock()",
        "",
        "SELECT `shop`.`restock`(7)",
        "SELECT restock(id) FROM orders",
        "DO restock(7)",
        "/*M!100100 INSERT INTO orders VALUES (1) */",
        "ANALYZE FORMAT=JSON UPDATE orders SET total = 1",
    ],
)
def test_a_change_that_cannot_be_told_may_be_of_any_table(text: str) -> None:
    assert changed_tables(text, "shop") is None


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("TRUNCATE TABLE orders", ["shop.orders"]),
        ("truncate crm.customers", ["crm.customers"]),
        ("/* nightly */ TRUNCATE orders", ["shop.orders"]),
        ("/*!40000 DROP TABLE orders */", ["shop.orders"]),
        ("DROP TABLE IF EXISTS orders, crm.customers", ["shop.orders", "crm.customers"]),
        ("SET STATEMENT max_statement_time=1 FOR TRUNCATE orders", ["shop.orders"]),
        ("DROP VIEW orders", []),
        ("DROP DATABASE shop", []),
        ("ALTER TABLE orders ADD COLUMN note TEXT", []),
    ],
)
def test_truncate_and_drop_empty_their_tables(text: str, tables: list[str]) -> None:
    assert emptied_tables(text, "shop") == _names(*tables)
