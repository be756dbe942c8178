# SPDX-License-Identifier: Apache-2.0
"""Columns that a target does not have: when they stop the table with an error, and how often the target is
queried.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from penstock.changes import Target
from penstock.engine.dropped_columns import ColumnCheck, refuse_dropped
from penstock.errors import SchemaChanged
from penstock.model import TableName
from penstock.sinks.sink import Evolution, Receipt, Sink
from tests.support.pipeline.changes_made import target_of

ORDERS = target_of({"id": "int", "a": "int", "b": "int"}, ["id"], name="shop.orders")
ITEMS = target_of({"id": "int", "a": "int"}, ["id"], name="shop.items")
PREPARED = {target.name: target for target in (ORDERS, ITEMS)}


class TargetTables:
    """The tables of a target, and the columns that were dropped from them in the target."""

    def __init__(self, **dropped: list[str]) -> None:
        self.dropped = {TableName("shop", table): columns for table, columns in dropped.items()}
        self.asked: list[list[str]] = []

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        self.asked.append([target.name.table for target in targets])
        return {target.name: self.dropped[target.name] for target in targets if target.name in self.dropped}


def check_of(tables: TargetTables, policy: Evolution = Evolution.EVOLVE) -> ColumnCheck:
    return ColumnCheck(cast(Sink, tables), policy)


def receipt(**left_out: list[str]) -> Receipt:
    missing: Any = {f"shop.{table}": columns for table, columns in left_out.items() if columns}
    return Receipt(tables={f"shop.{table}": 1 for table in left_out}, columns_missing=missing)


def test_start_of_a_run_checks_every_target_once() -> None:
    tables = TargetTables(orders=["a", "b"])
    check = check_of(tables)
    (problem,) = check.find(PREPARED, PREPARED)
    assert problem.target == ORDERS.name
    assert "no column a, b" in str(problem.error)
    assert tables.asked == [["orders", "items"]]
    assert not check.is_due


def test_column_that_the_source_has_dropped_is_no_error() -> None:
    check = check_of(TargetTables(orders=["b"]), Evolution.ADD_ONLY)
    now = target_of({"id": "int", "a": "int"}, ["id"], name="shop.orders")
    assert check.find(PREPARED, PREPARED | {ORDERS.name: now}) == []


def test_target_that_ignores_new_columns_is_never_asked() -> None:
    tables = TargetTables(orders=["a"])
    check = check_of(tables, Evolution.IGNORE)
    assert check.find(PREPARED, PREPARED) == []
    refuse_dropped(cast(Sink, tables), Evolution.IGNORE, ORDERS, ITEMS)
    assert tables.asked == []


def test_target_is_asked_again_only_if_writers_leave_out_other_columns() -> None:
    tables = TargetTables()
    check = check_of(tables)
    check.find(PREPARED, PREPARED)
    check.note([receipt(orders=[], items=[])])
    assert not check.is_due
    # A retried batch may be older than its table.
    check.note([receipt(orders=["b"], items=[])])
    assert check.is_due
    assert check.find(PREPARED, PREPARED) == []
    check.note([receipt(orders=["b"])])
    assert not check.is_due
    tables.dropped[ORDERS.name] = ["a", "b"]
    check.note([receipt(orders=["a", "b"])])
    (problem,) = check.find(PREPARED, PREPARED)
    assert problem.target == ORDERS.name
    assert tables.asked == [["orders", "items"], ["orders"], ["orders"]]


def test_only_columns_that_stay_as_they_are_must_exist_before_an_alteration() -> None:
    sink = cast(Sink, TargetTables(orders=["a"]))
    fewer = target_of({"id": "int", "b": "int"}, ["id"], name="shop.orders")
    wider = target_of({"id": "int", "a": "bigint", "b": "int"}, ["id"], name="shop.orders")
    more = target_of({"id": "int", "a": "int", "b": "int", "c": "int"}, ["id"], name="shop.orders")
    refuse_dropped(sink, Evolution.EVOLVE, ORDERS, fewer)
    refuse_dropped(sink, Evolution.EVOLVE, ORDERS, wider)
    with pytest.raises(SchemaChanged, match="no column a,"):
        refuse_dropped(sink, Evolution.EVOLVE, ORDERS, more)
