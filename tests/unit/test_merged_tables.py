# SPDX-License-Identifier: Apache-2.0
"""Assign the rows of a merged target to its source tables."""

from typing import Any

import pyarrow
import pytest

from penstock.changes import Target
from penstock.model import Column, TableName
from penstock.pipeline.settings import StepSettings, pipeline_of_values
from penstock.pipeline.step import ShardValue
from penstock.pipeline.verify.merges import (
    in_shard,
    may_have_other_rows,
    may_share_rows,
    shard_of,
    targets_of_table,
)

ROUTE = {"tables": "shop.orders_*", "to": "shop.orders", "shard_column": "part"}


def steps_of(*steps: dict[str, Any]) -> tuple[StepSettings, ...]:
    source = {"url": "mysql://root@127.0.0.1", "name": "here", "tables": ["shop.*"]}
    return pipeline_of_values({"name": "one", "source": source, "sink": "stdout", "steps": list(steps)}).steps


def table(name: str) -> Target:
    columns = (Column("id", "int", None, False), Column("note", "varchar(20)", "utf8mb4", True))
    return Target(TableName("shop", name), columns, ("id",))


def shard(name: str, *steps: dict[str, Any]) -> ShardValue | None:
    found = steps_of(*steps)
    return shard_of([one.make() for one in found], found, table(name), "here")


def test_shard_column_identifies_the_rows_of_each_table() -> None:
    assert shard("orders_1", {"route": ROUTE}) == ShardValue("part", "here.shop.orders_1")
    by_group = {"route": ROUTE | {"shard_value": "{1}", "shard_type": "int"}, "filter": "id > 0"}
    assert shard("orders_12", *({verb: told} for verb, told in by_group.items())) == ShardValue("part", "12")
    assert shard("customers", {"route": ROUTE}) is None


@pytest.mark.parametrize(
    "steps",
    [
        [{"route": ROUTE | {"shard_value": "{note}"}}],
        [{"route": ROUTE}, {"mask": {"columns": {"part": "hash"}}}],
        [{"route": ROUTE}, {"map": {"rename": {"part": "shard"}}}],
        [{"route": ROUTE}, {"map": {"drop": ["part"], "key": ["id"]}}],
        [{"route": {"tables": "shop.orders_*", "to": "shop.orders"}}],
    ],
    ids=["by a row's value", "masked", "renamed", "dropped", "none"],
)
def test_shard_column_without_a_single_value_identifies_no_shard(steps: list[dict[str, Any]]) -> None:
    assert shard("orders_1", *steps) is None


def test_tables_share_rows_unless_their_shards_differ() -> None:
    one, other = ShardValue("part", "a"), ShardValue("part", "b")
    assert not may_share_rows(one, other)
    assert may_share_rows(one, ShardValue("part", "A"))
    assert may_share_rows(one, ShardValue("kind", "b"))
    assert may_share_rows(one, None)


def test_rows_of_a_shard_are_selected_by_values_of_any_type() -> None:
    numbers = pyarrow.record_batch({"part": pyarrow.array([1, 2, None], pyarrow.int32())})
    assert in_shard(numbers, ShardValue("part", "2")).tolist() == [False, True, False]


def test_route_template_selects_the_known_tables_that_it_matches() -> None:
    chain = [one.make() for one in steps_of({"route": {"to": "shop.of_{note}"}})]
    known = [TableName("shop", "of_a"), TableName("shop", "other"), TableName("shop", "of_b")]
    assert [str(one.name) for one in targets_of_table(chain, table("orders"), known)] == [
        "shop.of_a",
        "shop.of_b",
    ]
    chain = [one.make() for one in steps_of({"route": {"to": "shop.all"}})]
    assert [str(one.name) for one in targets_of_table(chain, table("orders"), [])] == ["shop.all"]


@pytest.mark.parametrize(
    ("steps", "others"),
    [
        ([], False),
        ([{"route": {"to": "all.{table}"}}], False),
        ([{"route": {"to": "all.orders"}}], True),
        ([{"shard": {"of": 2, "keep": 0, "columns": ["id"]}}], True),
        ([{"only": ["insert"]}], True),
        ([{"soft_delete": {}}], True),
    ],
)
def test_target_may_hold_foreign_rows_if_tables_shards_or_earlier_rows_share_it(
    steps: list[dict[str, Any]], others: bool
) -> None:
    tables = {name: table(name) for name in ("a", "b")}
    chain = [one.make() for one in steps_of(*steps)]
    assert may_have_other_rows(chain, tables, "a") == others
    is_kept = "only" in str(steps) or "soft_delete" in str(steps)
    assert may_have_other_rows(chain, tables, "a", first=True) == (others and not is_kept)
