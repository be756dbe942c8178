# SPDX-License-Identifier: Apache-2.0
"""Conditions that Spark pushes down select the rows that SQL's three-valued logic selects, row by row."""

import operator
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark.sql.datasource")

from pyspark.sql import datasource

from penstock.spark.row_conditions import is_applicable, passing

_TEXTS = st.text("aAé_%\\", max_size=3)
_VALUES = {
    "number": st.integers(-128, 127),
    "text": _TEXTS,
    "total": st.decimals(-99, 99, places=2),
    "day": st.dates(date(1582, 10, 4), date(9999, 12, 31)),
    "at": st.datetimes(datetime(1000, 1, 1), datetime(9999, 12, 31)),
}
_SCHEMA = pyarrow.schema(
    {
        "number": pyarrow.int8(),
        "text": pyarrow.string(),
        "total": pyarrow.decimal128(10, 2),
        "day": pyarrow.date32(),
        "at": pyarrow.timestamp("us"),
    }
)
_ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | value for name, value in _VALUES.items()}), max_size=20
)
_COMPARED = {
    datasource.EqualTo: operator.eq,
    datasource.EqualNullSafe: operator.eq,
    datasource.GreaterThan: operator.gt,
    datasource.GreaterThanOrEqual: operator.ge,
    datasource.LessThan: operator.lt,
    datasource.LessThanOrEqual: operator.le,
    datasource.StringStartsWith: str.startswith,
    datasource.StringEndsWith: str.endswith,
    datasource.StringContains: operator.contains,
}


@st.composite
def _conditions(draw: st.DrawFn) -> datasource.Filter:
    name = draw(st.sampled_from(list(_VALUES)))
    kinds = [
        datasource.EqualTo,
        datasource.EqualNullSafe,
        datasource.GreaterThan,
        datasource.GreaterThanOrEqual,
        datasource.LessThan,
        datasource.LessThanOrEqual,
        datasource.In,
        datasource.IsNull,
        datasource.IsNotNull,
    ]
    texts = [datasource.StringStartsWith, datasource.StringEndsWith, datasource.StringContains]
    kind = draw(st.sampled_from(kinds + texts if name == "text" else kinds))
    if kind in (datasource.IsNull, datasource.IsNotNull):
        condition = kind((name,))
    elif kind is datasource.In:
        condition = datasource.In((name,), tuple(draw(st.lists(_VALUES[name], max_size=3))))
    else:
        condition = kind((name,), draw(_VALUES[name]))
    return datasource.Not(condition) if draw(st.booleans()) else condition


def _answer(condition: Any, row: dict[str, Any]) -> bool | None:
    """Evaluate a condition on one row; None means unknown. This is the slow reference."""
    if isinstance(condition, datasource.Not):
        answer = _answer(condition.child, row)
        return None if answer is None else not answer
    value = row[condition.attribute[0]]
    if isinstance(condition, datasource.IsNull | datasource.IsNotNull):
        return (value is None) == isinstance(condition, datasource.IsNull)
    if value is None:
        return False if isinstance(condition, datasource.EqualNullSafe) else None
    if isinstance(condition, datasource.In):
        return value in condition.value
    return bool(_COMPARED[type(condition)](value, condition.value))


@settings(max_examples=60, deadline=None)
@given(_ROWS, st.lists(_conditions(), min_size=1, max_size=3))
def test_rows_where_every_condition_is_true_pass(
    rows: list[dict[str, Any]], conditions: list[datasource.Filter]
) -> None:
    assert all(is_applicable(condition, _SCHEMA) for condition in conditions)
    batch = pyarrow.RecordBatch.from_pylist(rows, _SCHEMA)
    accepted = passing(batch, pickle.loads(pickle.dumps(conditions))).to_pylist()
    assert accepted == [row for row in rows if all(_answer(condition, row) for condition in conditions)]


@pytest.mark.parametrize(
    ("condition", "column_type"),
    [
        (datasource.EqualTo(("c",), 1.5), pyarrow.float64()),
        (datasource.EqualTo(("c",), 300), pyarrow.int8()),
        (datasource.EqualTo(("c",), True), pyarrow.int8()),
        (datasource.EqualTo(("c",), None), pyarrow.int8()),
        (datasource.GreaterThan(("c",), Decimal("1.005")), pyarrow.decimal128(10, 2)),
        (datasource.EqualTo(("c",), datetime(2026, 1, 1)), pyarrow.timestamp("us", "UTC")),
        (datasource.EqualTo(("c",), datetime(2026, 1, 1, tzinfo=UTC)), pyarrow.timestamp("us")),
        (datasource.EqualTo(("c",), datetime(2026, 1, 1)), pyarrow.date32()),
        (datasource.In(("c",), (1, "one")), pyarrow.int8()),
        (datasource.In(("c",), (1, None)), pyarrow.int8()),
        (datasource.StringContains(("c",), "a"), pyarrow.binary()),
        (datasource.Not(datasource.EqualTo(("c",), 1.5)), pyarrow.float64()),
        (datasource.EqualTo(("c", "field"), 1), pyarrow.int8()),
        (datasource.EqualTo(("d",), 1), pyarrow.int8()),
    ],
)
def test_condition_that_arrow_may_judge_differently_is_left_to_spark(
    condition: datasource.Filter, column_type: pyarrow.DataType
) -> None:
    assert not is_applicable(condition, pyarrow.schema({"c": column_type}))


def test_batch_whose_rows_all_pass_is_returned_without_a_copy() -> None:
    batch = pyarrow.record_batch({"c": [1, 2, 3]})
    assert passing(batch, [datasource.GreaterThan(("c",), 0)]) is batch
