# SPDX-License-Identifier: Apache-2.0
"""Filters that Spark pushes down, turned into less to read.

Only filters on the system columns say anything about the log. A filter is taken over whole only where what is
left out is exactly what it leaves out; of every other one Spark checks the rows again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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

from penstock.commit_versions import commit_version
from penstock.source.reading import CHANGE_TYPES
from penstock.source.source import ByteRange, file_number

_TIME_MAX = (1 << 63) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Narrowing:
    """What filters leave of a read. None leaves everything; bounds of numbers are inclusive. Pickles."""

    changes: tuple[str, ...] | None = None
    version_min: int | None = None
    version_max: int | None = None
    time_min_us: int | None = None
    time_max_us: int | None = None
    databases: frozenset[str] | None = None
    tables: frozenset[str] | None = None
    files: frozenset[str] | None = None

    def keeps(self, byte_range: ByteRange) -> bool:
        """Tell whether a range can hold a transaction that passes."""
        if self.files is not None and byte_range.file not in self.files:
            return False
        number = file_number(byte_range.file)
        first = commit_version(byte_range.epoch, number, byte_range.start)
        if self.version_max is not None and first > self.version_max:
            return False
        if byte_range.stop is None:
            last = commit_version(byte_range.epoch, number + 1, 0)
        else:
            last = commit_version(byte_range.epoch, number, byte_range.stop)
        return self.version_min is None or last >= self.version_min


def narrow(filters: Sequence[Filter], *, envelope: bool) -> tuple[Narrowing, list[Filter]]:
    """Return what the filters leave, and those that Spark must still check."""
    left, unsure = Narrowing(), []
    for one in filters:
        values = _values(one)
        match getattr(one, "attribute", None):
            case ("_change_type",) if values is not None and all(isinstance(v, str) for v in values):
                left = replace(left, changes=_changes(left.changes, values, envelope))
            case ("_commit_version",):
                left = _versions(left, one)
                unsure.append(one)
            case ("_commit_timestamp",):
                left = _times(left, one)
                unsure.append(one)
            case ("_metadata", "database") if values is not None:
                left = replace(left, databases=_both(left.databases, values))
                unsure.append(one)
            case ("_metadata", "table") if values is not None:
                left = replace(left, tables=_both(left.tables, values))
                unsure.append(one)
            case ("_metadata", "file") if values is not None:
                left = replace(left, files=_both(left.files, values))
                unsure.append(one)
            case _:
                unsure.append(one)
    return left, unsure


def _both(known: frozenset[str] | None, values: Sequence[Any]) -> frozenset[str]:
    return frozenset(values) if known is None else known & frozenset(values)


def _values(one: Filter) -> tuple[Any, ...] | None:
    if isinstance(one, EqualTo | EqualNullSafe):
        return None if one.value is None else (one.value,)
    if isinstance(one, In):
        return tuple(value for value in one.value if value is not None)
    return None


def _changes(known: tuple[str, ...] | None, values: Sequence[str], envelope: bool) -> tuple[str, ...]:
    """Return the change types that pass; an envelope has one row for both images of an update."""
    chosen = set(values)
    if envelope:
        chosen -= {"update_preimage", "update_postimage"}
        if "update" in chosen:
            chosen = (chosen - {"update"}) | {"update_preimage", "update_postimage"}
    return tuple(kind for kind in CHANGE_TYPES if kind in chosen and (known is None or kind in known))


def _limits(one: Filter, value: int) -> tuple[int | None, int | None]:
    """Return the least and the greatest whole number that passes."""
    match one:
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


def _most(one: int | None, other: int | None) -> int | None:
    return max(one, other) if one is not None and other is not None else one if other is None else other


def _least(one: int | None, other: int | None) -> int | None:
    return min(one, other) if one is not None and other is not None else one if other is None else other


def _versions(left: Narrowing, one: Filter) -> Narrowing:
    value = getattr(one, "value", None)
    if not isinstance(value, int):
        return left
    low, high = _limits(one, value)
    return replace(left, version_min=_most(left.version_min, low), version_max=_least(left.version_max, high))


def _times(left: Narrowing, one: Filter) -> Narrowing:
    value = getattr(one, "value", None)
    if not isinstance(value, datetime):
        return left
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
    low, high = _limits(one, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)
    return replace(left, time_min_us=_most(left.time_min_us, low), time_max_us=_least(left.time_max_us, high))
