# SPDX-License-Identifier: Apache-2.0
"""Evolve a target when its source's columns change, and convert older rows to the new columns."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.changes import Target
from penstock.engine.fitting import TargetFitting
from penstock.engine.standstill import asks_again, no_progress
from penstock.engine.task_plan import OF_CHUNK, OF_MOVE, OF_STATEMENT, OF_TARGET, Surprise
from penstock.errors import SchemaChanged
from penstock.model import Column, Position, TableName
from penstock.pipeline.column_types import common_column, keeps_values
from penstock.pipeline.conforming import columns_reread, conform_changes, key_is_reread
from penstock.pipeline.evolution import accepts_rows, evolve_target
from penstock.pipeline.record import BatchRecord, RangeWork
from penstock.sinks.sink import Evolution
from penstock.source.reading import LoggedStatement
from penstock.source.source import ByteRange
from tests.support.pipeline.changes_made import changes_of, insert, target_of
from tests.support.pipeline.local_runs import notes_pipeline

ORDERS = target_of({"id": "int", "v": "int", "x": "int"})
DEFINITIONS = {
    "added": {"id": "int", "v": "int", "x": "int", "n": "varchar(20)"},
    "dropped": {"id": "int", "v": "int"},
    "widened": {"id": "int", "v": "bigint", "x": "int"},
    "narrowed": {"id": "int", "v": "smallint", "x": "int"},
    "converted": {"id": "int", "v": "varchar(20)", "x": "int"},
    "renamed": {"id": "int", "w": "int", "x": "int"},
    "as_mariadb_writes_it": {"id": "int(11)", "v": "int(11)", "x": "int(11)"},
    "moved": {"id": "int", "x": "int", "v": "int"},
}


@pytest.mark.parametrize("first", DEFINITIONS)
@pytest.mark.parametrize("second", DEFINITIONS)
@pytest.mark.parametrize("policy", [Evolution.EVOLVE, Evolution.ADD_ONLY, Evolution.IGNORE])
def test_feed_target_accepts_rows_of_every_definition_after_the_first_of_each(
    first: str, second: str, policy: Evolution
) -> None:
    definitions = [ORDERS, target_of(DEFINITIONS[first]), target_of(DEFINITIONS[second])]
    prepared = ORDERS
    for definition in definitions:
        prepared = evolve_target(prepared, definition, policy, keeps_state=False)
    assert all(accepts_rows(prepared, definition, policy) for definition in definitions)


def test_feed_target_keeps_columns_that_the_source_drops() -> None:
    grown = evolve_target(ORDERS, target_of(DEFINITIONS["dropped"]), Evolution.EVOLVE, keeps_state=False)
    assert grown.column_names == ("id", "v", "x")
    mirror = evolve_target(ORDERS, target_of(DEFINITIONS["dropped"]), Evolution.EVOLVE, keeps_state=True)
    assert mirror.column_names == ("id", "v")


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [(Evolution.EVOLVE, "applied"), (Evolution.IGNORE, "ignored"), (Evolution.STOP, "refused")],
)
def test_change_of_columns_counts_once_by_its_outcome(
    policy: Evolution, outcome: str, tmp_path: Path
) -> None:
    sink = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}}).make_sink()
    fitting = TargetFitting(sink, policy)
    prepared = fitting.prepare(None, ORDERS, again=False)
    prepared = fitting.prepare(prepared, ORDERS, again=False)
    assert not fitting.changes, "a new target is no change"
    added = target_of(DEFINITIONS["added"])
    with nullcontext() if policy is not Evolution.STOP else pytest.raises(SchemaChanged):
        prepared = fitting.prepare(prepared, added, again=False)
    assert fitting.changes == {outcome: 1}
    if policy is not Evolution.STOP:
        # Every statement prepares all targets again, so an unchanged target must not be counted as changed.
        fitting.prepare(prepared, added, again=False)
        assert fitting.changes == {outcome: 1}


def test_policy_without_changes_stops_a_feed() -> None:
    other = target_of(DEFINITIONS["added"])
    assert not accepts_rows(ORDERS, other, Evolution.STOP)
    with pytest.raises(SchemaChanged, match=r"columns of shop\.orders changed"):
        evolve_target(ORDERS, other, Evolution.STOP, keeps_state=False)
    longer = target_of({"id": "int(11)", "v": "int", "x": "int"})
    assert accepts_rows(ORDERS, longer, Evolution.STOP)


@pytest.mark.parametrize(
    ("left", "right", "common"),
    [
        ("int", "bigint", "bigint"),
        ("int", "int(11)", "int"),
        ("int", "int unsigned", "bigint"),
        ("bigint", "bigint unsigned", "decimal(20,0)"),
        ("int", "decimal(10,2)", "decimal(12,2)"),
        ("decimal(10,2)", "decimal(10,4)", "decimal(12,4)"),
        ("float", "double", "double"),
        ("int", "double", "double"),
        ("bigint", "double", "longtext"),
        ("varchar(20)", "varchar(30)", "varchar(30)"),
        ("varchar(20)", "int", "longtext"),
        ("varchar(20)", "varbinary(20)", "longblob"),
        ("enum('a','b')", "enum('b','c')", "longtext"),
        ("enum('A')", "enum('a')", "longtext"),
        ("datetime", "datetime(3)", "datetime(3)"),
        ("datetime(6)", "datetime(3)", "datetime(6)"),
        ("datetime", "timestamp", "longtext"),
        ("vector(3)", "vector(5)", "vector(5)"),
        ("decimal(65,0)", "decimal(40,30)", "longtext"),
    ],
)
def test_common_type_holds_both_types_and_is_stable(left: str, right: str, common: str) -> None:
    columns = [_column(left), _column(right)]
    for known, met in itertools.permutations(columns):
        joined = common_column(known, met)
        assert keeps_values(joined.type_text, common)
        assert common_column(joined, known) == joined
        assert common_column(joined, met) == joined


def _column(type_text: str) -> Column:
    return target_of({"c": type_text}, ()).columns[0]


def test_texts_of_two_character_sets_are_combined_in_one_that_holds_both() -> None:
    ascii_column, latin = Column("c", "varchar(9)", "ascii"), Column("c", "varchar(5)", "latin1")
    assert common_column(ascii_column, latin) == Column("c", "longtext", "utf8mb4")
    assert common_column(Column("c", "varchar(5)", "ascii"), latin) == latin


@pytest.mark.parametrize(
    ("type_text", "value", "shown"),
    [
        ("int", 7, "7"),
        ("decimal(6,2)", "1.50", "1.50"),
        ("datetime", "2026-01-02 03:04:05", "2026-01-02 03:04:05"),
        ("date", "2026-01-02", "2026-01-02"),
    ],
)
def test_older_rows_are_converted_to_the_text_shown_by_the_server(
    type_text: str, value: Any, shown: str
) -> None:
    import pyarrow

    older = target_of({"id": "int", "v": type_text})
    prepared = target_of({"id": "int", "v": "longtext"})
    prepared = Target(prepared.name, (prepared.columns[0], Column("v", "longtext", "utf8mb4")), ("id",))
    kind = older.arrow().field("v").type
    typed = pyarrow.array([value]).cast(kind)[0].as_py()
    rows = conform_changes(changes_of(older, insert(1, id=1, v=typed)), prepared).rows
    assert rows.column("v").to_pylist() == [shown]


def test_batch_that_requests_the_same_change_again_stops_by_name_and_position() -> None:
    work = RangeWork("shop", ByteRange(0, "b.000001", 154, 900, aligned=True))
    record = BatchRecord(7, {}, {}, (work,), (), 1)
    target = Surprise(OF_TARGET, 0, 1, "shop", (str(ORDERS.name), ORDERS))
    assert asks_again([target], [target])
    assert not asks_again([target], [])
    assert not asks_again([target, Surprise(OF_MOVE, 0, 2, "shop", ORDERS.name)], [target])
    chunk = Surprise(OF_CHUNK, 0, 1, "shop", (TableName("shop", "orders"), SchemaChanged("altered")))
    assert not asks_again([chunk], [chunk]), "a table that is altered while it is read is counted elsewhere"
    error = no_progress(record, target)
    assert "batch 7 makes no progress" in str(error)
    assert "shop.orders (id int, v int, x int)" in str(error)
    assert error.position == "b.000001:154"
    position = Position(0, "b.000001", 300)
    statement = LoggedStatement(
        "ALTER TABLE t ADD a INT",
        "shop",
        position,
        position,
        frozenset(),
        frozenset(),
        frozenset(),
        None,
        frozenset(),
    )
    error = no_progress(record, Surprise(OF_STATEMENT, 0, 1, "shop", statement))
    assert error.position == str(position)
    assert "penstock pipelines reset" in str(error)


def test_older_rows_wait_for_the_reread_of_a_column_that_may_refuse_their_values() -> None:
    older = target_of({"id": "int", "v": "varchar(20)", "w": "varchar(20)", "n": "varchar(20)"})
    now = target_of({"id": "int", "v": "varchar(2)", "w": "varchar(30)", "n": "int"})
    rows = changes_of(older, insert(1, id=1, v="long", w="long", n="x"))
    with pytest.raises(SchemaChanged, match="column n of"):
        conform_changes(rows, now)
    reread = columns_reread(rows, now, now)
    assert reread == {"v", "n"}
    fitted = conform_changes(rows, now, reread).rows
    assert [fitted.column(name).to_pylist() for name in ("v", "w", "n")] == [[None], ["long"], [None]]
    assert not columns_reread(rows, now, None), "without a server no table is read again"
    # If several tables share a target, another table's type does not require a reload of this table.
    assert not columns_reread(rows, now, older)


@pytest.mark.parametrize(
    ("logged", "type_text", "value"),
    [
        ("year", "year(4)", 2155),
        ("tinyint", "tinyint(1)", -1),
        ("smallint unsigned", "smallint(4) unsigned zerofill", 7),
        ("decimal(10,2)", "decimal(10,2) unsigned", Decimal("7.50")),
        ("decimal(65,30)", "decimal(65,30) unsigned zerofill", "7.50"),
        ("float", "float unsigned", 1.5),
        ("float", "float(7,3)", -1.5),
        ("double", "double(12,4) unsigned zerofill", 1.5),
        ("geometry", "point", None),
        ("geometry", "geometrycollection", None),
        ("vector", "vector(2)", None),
    ],
)
def test_older_rows_keep_values_of_a_type_of_which_the_log_tells_less(
    logged: str, type_text: str, value: Any
) -> None:
    older = target_of({"id": "int", "v": logged})
    now = target_of({"id": "int", "v": type_text, "n": "int"})
    rows = changes_of(older, insert(1, id=1, v=value))
    assert not columns_reread(rows, now, now)
    assert conform_changes(rows, now).rows.column("v").to_pylist() == rows.rows.column("v").to_pylist()


@pytest.mark.parametrize(
    ("kind", "value"),
    [("decimal(10,2)", Decimal("-7.50")), ("decimal(65,30)", "-7.50"), ("double", -0.5)],
)
def test_older_rows_with_negative_numbers_wait_for_the_reread_of_a_column_that_lost_its_sign(
    kind: str, value: Any
) -> None:
    older = target_of({"id": "int", "v": kind})
    now = target_of({"id": "int", "v": f"{kind} unsigned", "n": "int"})
    rows = changes_of(older, insert(1, id=1, v=value), insert(2, id=2, v=None))
    assert columns_reread(rows, now, now) == {"v"}
    assert not columns_reread(changes_of(older, insert(2, id=2, v=None)), now, now)


def test_rows_without_a_column_of_the_key_are_left_to_the_reread_of_a_table_that_has_it_by_now() -> None:
    older, now = target_of({"id": "int", "v": "int"}), replace(ORDERS, primary_key=("id", "x"))
    assert key_is_reread(older, now, now)
    assert not key_is_reread(older, now, None), "without a server no table is read again"
    assert not key_is_reread(older, now, ORDERS), "of a target of several tables it may be another one's key"
    assert not key_is_reread(ORDERS, now, now)
