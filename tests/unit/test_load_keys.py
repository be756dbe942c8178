# SPDX-License-Identifier: Apache-2.0
"""Key columns as literals: the values between two keys, and the value of a literal."""

from dataclasses import replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from penstock.changes import Target
from penstock.errors import SchemaInvalid
from penstock.model import Column, TableName
from penstock.pipeline.load.chunks import Chunk, after, bound_values, within
from penstock.pipeline.load.keys import KeyColumn, order_of

VALUES: list[tuple[str, str | None, str, Any]] = [
    ("bigint unsigned", None, "18446744073709551615", 18446744073709551615),
    ("int(5) unsigned zerofill", None, "00042", 42),
    ("decimal(10,2)", None, "-1.50", Decimal("-1.50")),
    ("double", None, "1.5e0", 1.5),
    ("date", None, "'2020-02-29'", date(2020, 2, 29)),
    ("date", None, "'0000-00-00'", "0000-00-00"),
    ("datetime(6)", None, "'2020-01-01 01:02:03.000004'", datetime(2020, 1, 1, 1, 2, 3, 4)),
    ("time(1)", None, "'-838:59:59.5'", -timedelta(hours=838, minutes=59, seconds=59, microseconds=500_000)),
    ("varchar(9)", "gbk", "_gbk x'D6D0'", "中"),
    ("varchar(9)", "utf8mb4", "_utf8mb4 x''", ""),
    ("binary(2)", None, "x'00FF'", b"\0\xff"),
    ("char(2)", "binary", "x'00FF'", b"\0\xff"),
    ("enum('a','b')", "latin1", "2", 2),
    ("uuid", None, "'01234567-89ab-4def-8123-456789abcd00'", "01234567-89ab-4def-8123-456789abcd00"),
]
BETWEEN: list[tuple[str, str | None, str, str]] = [
    ("int", None, "-5", "7"),
    ("int", None, "6", "7"),
    ("decimal(10,2)", None, "0.01", "0.03"),
    ("double", None, "-1.5e300", "1e-300"),
    ("date", None, "'2020-01-01'", "'2020-01-02'"),
    ("datetime", None, "'2020-01-01 00:00:00'", "'2020-01-03 00:00:00'"),
    ("time", None, "'-01:00:00'", "'01:00:00'"),
    ("varchar(9)", "utf8mb4", "_utf8mb4 x'61'", "_utf8mb4 x'6162'"),
    ("varchar(9)", "latin1", "_latin1 x'61'", "_latin1 x'7A'"),
    ("varbinary(9)", None, "x'61'", "x'6100'"),
    ("varbinary(9)", None, "x''", "x'FFFF'"),
    ("inet4", None, "'1.2.3.4'", "'1.2.3.200'"),
    ("bit(8)", None, "1", "200"),
]


@pytest.mark.parametrize(("type_text", "charset", "literal", "value"), VALUES)
def test_literal_represents_its_value_exactly(
    type_text: str, charset: str | None, literal: str, value: Any
) -> None:
    actual = KeyColumn(Column("k", type_text, charset)).value(literal)
    assert (actual, type(actual)) == (value, type(value))


@pytest.mark.parametrize(("type_text", "charset", "low", "high"), BETWEEN)
@pytest.mark.parametrize("share", [0.0625, 0.5, 0.9375])
def test_literal_between_two_keys_is_above_the_first_and_not_above_the_last(
    type_text: str, charset: str | None, low: str, high: str, share: float
) -> None:
    column = KeyColumn(Column("k", type_text, charset))
    literal = column.between(low, high, share)
    assert literal is not None
    if column.word == "inet4":
        assert literal.startswith("'1.2.3.")
        return
    # A computed text is in UTF-8, whatever the column's charset.
    middle = (
        KeyColumn(Column("k", type_text, "utf8mb4")).value(literal)
        if column.is_text
        else column.value(literal)
    )
    assert column.value(low) < middle <= column.value(high)


def test_unordered_keys_have_no_condition() -> None:
    assert KeyColumn(Column("k", "int")).between("7", "7", 0.5) is None
    assert KeyColumn(Column("k", "date")).between("'0000-00-00'", "'2020-02-31'", 0.5) is None
    assert (
        KeyColumn(Column("k", "varchar(9)", "utf8mb4")).between("_utf8mb4 x'FF'", "_utf8mb4 x'61'", 0.5)
        is None
    )
    assert not KeyColumn(Column("k", "json")).is_ordered
    assert KeyColumn(Column("k", "enum('a')", "latin1")).literal_of_sent(b"a") is None


def test_bounds_with_a_common_prefix_compare_it_by_equality() -> None:
    names = ["`a`", "`b`"]
    assert within(names, None, None) == ""
    assert within(names, ("1", "2"), ("1", "5")) == "(`a` = 1) AND (`b` >= 2) AND (`b` < 5)"
    assert within(names, ("1", "2"), ("3", "5")) == (
        "(`a` > 1 OR (`a` = 1 AND (`b` >= 2))) AND (`a` < 3 OR (`a` = 3 AND (`b` < 5)))"
    )
    assert after(names, ("1", "2")) == "`a` > 1 OR (`a` = 1 AND (`b` > 2))"


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (("int", None), ("bigint(20) unsigned", None), True),
        (("varchar(20)", "latin1_swedish_ci"), ("char(40)", "latin1_swedish_ci"), True),
        (("varchar(20)", "utf8_general_ci"), ("varchar(20)", "utf8mb3_general_ci"), True),
        (("varchar(20)", "latin1_swedish_ci"), ("varchar(20)", "latin1_bin"), False),
        (("varchar(20)", "utf8mb3_bin"), ("varchar(20)", "utf8mb4_bin"), False),
        (("varchar(20)", "latin1_bin"), ("varbinary(20)", None), False),
        (("varbinary(20)", None), ("mediumblob", None), True),
        (("varbinary(20)", None), ("binary(20)", None), False),
        (("int", None), ("varchar(20)", "latin1_bin"), False),
        (("int", None), ("decimal(10,0)", None), False),
        (("enum('a','b')", "latin1_bin"), ("enum('b','a')", "latin1_bin"), False),
    ],
)
def test_order_of_a_key_column_depends_on_its_collation_and_kind(
    before: tuple[str, str | None], after: tuple[str, str | None], is_same: bool
) -> None:
    assert (order_of(*before) == order_of(*after)) == is_same


def test_chunk_round_trips_through_json() -> None:
    order = "`a` integer, `b` binary(1)"
    chunk = Chunk(TableName("d", "t"), ("a", "b"), ("1", "x'00'"), None, "PRIMARY", 7, 3, order=order)
    assert Chunk.from_json(chunk.to_json()) == chunk
    earlier = {name: value for name, value in chunk.to_json().items() if name != "order"}
    assert Chunk.from_json(earlier) == replace(chunk, order="")
    target = Target(TableName("d", "t"), (Column("a", "int"), Column("b", "binary(1)")))
    assert bound_values(target, chunk) == ({"a": 1, "b": b"\0"}, None)
    with pytest.raises(SchemaInvalid):
        Chunk.from_json({**chunk.to_json(), "low": 1})
