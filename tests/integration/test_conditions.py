# SPDX-License-Identifier: Apache-2.0
"""Random conditions select the same rows in a subscription's `where`, in the step `filter`, and in MySQL."""

import random
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from penstock.pipeline.steps import filter as filter_step
from penstock.predicate import Predicate
from tests.support.pipeline.changes_made import changes_of, insert, target_of
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers.server import Server

ROWS = 40
CONDITIONS = 240
# A collation that orders by code points and does not pad is equivalent to an exact comparison.
TYPES = {
    "id": "int",
    "small": "tinyint",
    "wide": "bigint unsigned",
    "price": "decimal(12,3)",
    "rate": "double",
    "name": "varchar(20)",
    "raw": "varbinary(8)",
    "day": "date",
    "at": "datetime(3)",
    "span": "time(3)",
}
VALUES: dict[str, list[Any]] = {
    "small": [-128, -1, 0, 1, 2, 127],
    "wide": [Decimal(0), Decimal(1), Decimal(2**63), Decimal(2**64 - 1)],
    "price": [Decimal("-1.500"), Decimal("0.000"), Decimal("19.990"), Decimal("20.000"), Decimal("2.001")],
    "rate": [-0.0, 0.0, 0.1, 1.5, 2.0, 1e300],
    "name": ["", "a", "A", "a%b", "a_b", "a\\b", "é", "É", "zebra", " a "],
    "raw": [b"", b"A", b"\x00\xff", b"a"],
    "day": [date(1970, 1, 1), date(2026, 1, 1), date(2026, 12, 31)],
    "at": [datetime(2026, 1, 1), datetime(2026, 1, 1, 10, 0, 0, 5000), datetime(1999, 12, 31, 23, 59, 59)],
    "span": [timedelta(hours=-1), timedelta(0), timedelta(hours=10, milliseconds=7), timedelta(hours=800)],
}
CONSTANTS = {
    "small": ["0", "1", "-1", "1.5", "'2'", "' 1 '", "1e0", "300", "TRUE"],
    # No negative numbers: in a list with fractions, MySQL converts -1 to the largest value of an unsigned
    # column.
    "wide": ["0", "9223372036854775808", "18446744073709551615", "18446744073709551616", "0.5"],
    "price": ["19.99", "20", "2.0009", "-1.5", "2.001", "'20'"],
    "rate": ["0", "0.1", "1.5", "1e300", "'1.5'", "2"],
    "name": ["''", "'a'", "'A'", "'é'", "'a%b'", "'a\\\\b'", '"zebra"', "' a '"],
    "raw": ["X'41'", "'a'", "X'00FF'", "''"],
    "day": ["'2026-01-01'", "DATE '2026-12-31'", "'2026-01-01 00:00:01'"],
    "at": ["'2026-01-01'", "'2026-01-01 10:00:00.005'", "TIMESTAMP '1999-12-31 23:59:59'"],
    "span": ["'10:00:00.007'", "'-01:00:00'", "'00:00'"],
}
PATTERNS = ["'a%'", "'a_b'", "'a\\\\_b'", "'%'", "''", "'_'", "'a|%b' ESCAPE '|'", "'%B'"]
COMPARISONS = ["=", "<>", "!=", "<", "<=", ">", ">=", "<=>"]
ALIKE = [
    ("small", "wide"),
    ("small", "price"),
    ("price", "rate"),
    ("small", "rate"),
    ("day", "at"),
    ("wide", "price"),
]


def simple_condition(dice: random.Random) -> str:
    """Return a comparison of a column, written so that it needs no parentheses around it."""
    column = dice.choice(list(CONSTANTS))
    low, high, other = (dice.choice([*CONSTANTS[column], "NULL"]) for _ in range(3))
    left, right = dice.choice(ALIKE)
    spelled = dice.choice([column, column.upper(), f"`{column}`"])
    forms = [
        f"{spelled} {dice.choice(COMPARISONS)} {low}",
        f"{low} {dice.choice(COMPARISONS)} {spelled}",
        f"{spelled} IS {dice.choice(['', 'NOT '])}NULL",
        f"{spelled} {dice.choice(['', 'NOT '])}IN ({low}, {high}, {other})",
        f"{spelled} {dice.choice(['', 'NOT '])}BETWEEN {low} AND {high}",
        f"{left} {dice.choice(COMPARISONS)} {right}",
        f"name {dice.choice(['', 'NOT '])}LIKE {dice.choice(PATTERNS)}",
        f"{dice.choice(['LOWER', 'UPPER'])}(name) = {dice.choice(CONSTANTS['name'])}",
        dice.choice(["small", "price", "rate", "wide", "TRUE", "FALSE", "NULL"]),
    ]
    return dice.choice(forms)


def condition(dice: random.Random, depth: int) -> str:
    if depth == 0:
        return f"({simple_condition(dice)})"
    inner = condition(dice, depth - 1)
    match dice.choice(["not", "is", "join", "join"]):
        case "not":
            return f"(NOT {inner})"
        case "is":
            return f"({inner} IS {dice.choice(['TRUE', 'FALSE', 'NOT TRUE', 'NULL'])})"
        case _:
            return f"({inner} {dice.choice(['AND', 'OR', 'XOR'])} {condition(dice, depth - 1)})"


def test_random_conditions_select_the_rows_that_the_server_selects(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    dice = random.Random(20261123)
    rows = [
        {"id": number} | {name: dice.choice([*values, None]) for name, values in VALUES.items()}
        for number in range(ROWS)
    ]
    database = fresh_database(mysql_server)
    columns = ", ".join(f"{name} {kind}" for name, kind in TYPES.items())
    mysql_server.sql(f"CREATE TABLE {database}.t ({columns}) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin")
    places = ", ".join(["%s"] * len(TYPES))
    with mysql_server.connect(autocommit=True) as session, session.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO {database}.t VALUES ({places})", [[row[name] for name in TYPES] for row in rows]
        )
    target = target_of(TYPES)
    changes = changes_of(target, *(insert(number + 1, **row) for number, row in enumerate(rows)))
    conditions = [condition(dice, dice.randrange(4)) for _ in range(CONDITIONS)]
    expected: list[set[int]] = [set() for _ in conditions]
    for first in range(0, CONDITIONS, 50):
        group = conditions[first : first + 50]
        selected = ", ".join(f"{text} IS TRUE" for text in group)
        for number, *passes in mysql_server.sql(f"SELECT id, {selected} FROM {database}.t"):
            for place, is_true in enumerate(passes, first):
                if is_true:
                    expected[place].add(number)
    wrong = []
    ids = changes.rows.column("id").to_pylist()
    for text, wanted in zip(conditions, expected, strict=True):
        passes = Predicate.compile(text).passes(changes.rows)
        where = {number for number, one in zip(ids, passes, strict=True) if one}
        step = filter_step.make(filter_step.Settings(where=text))
        assert step.target(target) is target
        (filtered,) = step.apply(changes)
        if not (where == set(filtered.rows.column("id").to_pylist()) == wanted):
            wrong.append((text, sorted(where ^ wanted)))
    assert not wrong, wrong[:5]
    assert sum(0 < len(numbers) < ROWS for numbers in expected) > CONDITIONS // 3
