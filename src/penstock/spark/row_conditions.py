# SPDX-License-Identifier: Apache-2.0
"""Conditions on a table's own columns, applied to decoded rows before they are passed to Spark's JVM.

Spark applies all filters again, so leaving a condition out affects only the speed. Conditions on types that
Arrow and Spark might compare differently are left to Spark: floating point (Spark orders NaN last), binary,
TIME, and timestamps without a matching time zone.
"""

from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow
from pyarrow import compute, types
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

_COMPARISONS: dict[type[Filter], Any] = {
    EqualTo: compute.equal,
    EqualNullSafe: compute.equal,
    GreaterThan: compute.greater,
    GreaterThanOrEqual: compute.greater_equal,
    LessThan: compute.less,
    LessThanOrEqual: compute.less_equal,
}
_TEXT_SEARCHES: dict[type[Filter], Any] = {
    StringStartsWith: compute.starts_with,
    StringEndsWith: compute.ends_with,
    StringContains: compute.match_substring,
}


def is_applicable(condition: Any, columns: pyarrow.Schema) -> bool:
    """Return whether a condition on these columns can be applied to decoded rows."""
    if isinstance(condition, Not):
        return is_applicable(condition.child, columns)
    path: tuple[str, ...] = getattr(condition, "attribute", ())
    if len(path) != 1 or path[0] not in columns.names:
        return False
    column_type: pyarrow.DataType = columns.field(path[0]).type
    match condition:
        case IsNull() | IsNotNull():
            return True
        case In(value=values):
            return all(_scalar(value, column_type) is not None for value in values)
        case StringStartsWith() | StringEndsWith() | StringContains():
            return bool(types.is_string(column_type))
    return type(condition) in _COMPARISONS and _scalar(condition.value, column_type) is not None


def passing(batch: pyarrow.RecordBatch, conditions: Sequence[Filter]) -> pyarrow.RecordBatch:
    """Return the rows for which every condition is true; the batch itself if those are all its rows."""
    mask = None
    for condition in conditions:
        holds = _holds(condition, batch)
        mask = holds if mask is None else compute.and_kleene(mask, holds)
    if mask is None or mask.true_count == batch.num_rows:
        return batch
    return batch.filter(mask)


def _holds(condition: Any, batch: pyarrow.RecordBatch) -> Any:
    """Return for each row true, false, or null if the result is unknown in SQL."""
    if isinstance(condition, Not):
        return compute.invert(_holds(condition.child, batch))
    column = batch.column(condition.attribute[0])
    match condition:
        case IsNull():
            return column.is_null()
        case IsNotNull():
            return column.is_valid()
        case In(value=values):
            listed = compute.is_in(column, pyarrow.array(values, column.type))
            # In SQL, whether null is in a list is unknown. Arrow says that it is not.
            return compute.if_else(column.is_valid(), listed, None)
        case StringStartsWith(value=text) | StringEndsWith(value=text) | StringContains(value=text):
            return _TEXT_SEARCHES[type(condition)](column, text)
    holds = _COMPARISONS[type(condition)](column, _scalar(condition.value, column.type))
    return compute.fill_null(holds, False) if isinstance(condition, EqualNullSafe) else holds


def _scalar(value: Any, column_type: pyarrow.DataType) -> pyarrow.Scalar | None:
    """Return a literal in the type of a column; None if the literal is not exact in that type, or would
    compare differently.
    """
    if not _is_comparable(value, column_type):
        return None
    try:
        return pyarrow.scalar(value, column_type)
    except (pyarrow.ArrowInvalid, OverflowError):
        return None


def _is_comparable(value: Any, column_type: pyarrow.DataType) -> bool:
    """Return whether Arrow and Spark compare a literal and a column of this type alike."""
    if types.is_boolean(column_type):
        return isinstance(value, bool)
    if types.is_integer(column_type):
        return isinstance(value, int) and not isinstance(value, bool)
    if types.is_string(column_type):
        return isinstance(value, str)
    if types.is_decimal(column_type):
        return isinstance(value, Decimal) and value.is_finite()
    if types.is_date32(column_type):
        return isinstance(value, date) and not isinstance(value, datetime)
    if types.is_timestamp(column_type):
        return isinstance(value, datetime) and (value.tzinfo is None) == (column_type.tz is None)
    return False
