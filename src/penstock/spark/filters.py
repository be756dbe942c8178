# SPDX-License-Identifier: Apache-2.0
"""Filters that Spark pushes down, translated into a narrower read. Spark pushes filters from 4.1 on.

Filters on the system columns select a part of the log. Filters on the table's own columns are applied to
decoded rows; see `row_conditions`. A filter is applied completely only if the read omits exactly the rows
that the filter rejects. For every other filter, Spark checks the rows again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from penstock.source.read_settings import ENVELOPE
from penstock.source.reading import CHANGE_TYPES
from penstock.spark.batch import BatchReader
from penstock.spark.narrowing import Narrowing
from penstock.spark.row_conditions import is_applicable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class FilteringBatchReader(BatchReader):
    """A batch reader that accepts filters.

    If spark.sql.python.filterPushdown.enabled is off, Spark rejects a reader that has `pushFilters`. So the
    data source uses this class only if that setting is on.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Apply the filters that select a part of the log or its rows.

        Returns those that Spark must still check.
        """
        envelope = self._settings.mode == ENVELOPE
        self._narrowing, unsure = narrow(filters, envelope=envelope)
        if self._shape is not None and not envelope:
            columns = self._shape.arrow(self._settings.columns)
            self._conditions = tuple(condition for condition in unsure if is_applicable(condition, columns))
        return unsure


def narrow(filters: Sequence[Filter], *, envelope: bool) -> tuple[Narrowing, list[Filter]]:
    """Return the selected part of the log, and the filters that Spark must still check."""
    narrowing, unsure = Narrowing(), []
    for condition in filters:
        values = _values(condition)
        match getattr(condition, "attribute", None):
            case ("_change_type",) if values is not None and all(isinstance(v, str) for v in values):
                narrowing = replace(narrowing, changes=_changes(narrowing.changes, values, envelope))
            case ("_commit_version",):
                narrowing = _versions(narrowing, condition)
                unsure.append(condition)
            case ("_commit_timestamp",):
                narrowing = _times(narrowing, condition)
                unsure.append(condition)
            case ("_metadata", "database") if values is not None:
                narrowing = replace(narrowing, databases=_intersect(narrowing.databases, values))
                unsure.append(condition)
            case ("_metadata", "table") if values is not None:
                narrowing = replace(narrowing, tables=_intersect(narrowing.tables, values))
                unsure.append(condition)
            case ("_metadata", "file") if values is not None:
                narrowing = replace(narrowing, files=_intersect(narrowing.files, values))
                unsure.append(condition)
            case _:
                unsure.append(condition)
    return narrowing, unsure


def _intersect(selected: frozenset[str] | None, values: Sequence[Any]) -> frozenset[str]:
    return frozenset(values) if selected is None else selected & frozenset(values)


def _values(condition: Filter) -> tuple[Any, ...] | None:
    if isinstance(condition, EqualTo | EqualNullSafe):
        return None if condition.value is None else (condition.value,)
    if isinstance(condition, In):
        return tuple(value for value in condition.value if value is not None)
    return None


def _changes(selected: tuple[str, ...] | None, values: Sequence[str], envelope: bool) -> tuple[str, ...]:
    """Return the change types that pass. An envelope has one row for both images of an update."""
    chosen = set(values)
    if envelope:
        chosen -= {"update_preimage", "update_postimage"}
        if "update" in chosen:
            chosen = (chosen - {"update"}) | {"update_preimage", "update_postimage"}
    return tuple(kind for kind in CHANGE_TYPES if kind in chosen and (selected is None or kind in selected))


def _limits(condition: Filter, value: int) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer that pass."""
    match condition:
        case EqualTo() | EqualNullSafe():
            return value, value
        case GreaterThan():
            return value + 1, None
        case GreaterThanOrEqual():
            return value, None
        case LessThan():
            return None, value - 1
        case LessThanOrEqual():
            return None, value
    return None, None


def _max_bound(first: int | None, second: int | None) -> int | None:
    return (
        max(first, second)
        if first is not None and second is not None
        else first
        if second is None
        else second
    )


def _min_bound(first: int | None, second: int | None) -> int | None:
    return (
        min(first, second)
        if first is not None and second is not None
        else first
        if second is None
        else second
    )


def _versions(narrowing: Narrowing, condition: Filter) -> Narrowing:
    value = getattr(condition, "value", None)
    if not isinstance(value, int):
        return narrowing
    low, high = _limits(condition, value)
    return replace(
        narrowing,
        version_min=_max_bound(narrowing.version_min, low),
        version_max=_min_bound(narrowing.version_max, high),
    )


def _times(narrowing: Narrowing, condition: Filter) -> Narrowing:
    value = getattr(condition, "value", None)
    if not isinstance(value, datetime):
        return narrowing
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
    low, high = _limits(condition, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)
    return replace(
        narrowing,
        time_min_us=_max_bound(narrowing.time_min_us, low),
        time_max_us=_min_bound(narrowing.time_max_us, high),
    )
