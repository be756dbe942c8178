# SPDX-License-Identifier: Apache-2.0
"""Finds the rows of a table whose key is in a given set of keys. The lookup is exact, and vectorized per
column.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as pc

# Integers within a range of this size are looked up in an array.
_DENSE_NUMBERS_MAX = 1 << 24

_Columns = Sequence[pyarrow.ChunkedArray]


class KeyIndex:
    """Distinct keys, each with a number. Null equals null."""

    def __init__(self, keys: pyarrow.Table) -> None:
        """Build the index from rows of keys, with columns in the table's types. The number of a key is that
        of its last row.
        """
        self.count = keys.num_rows
        self._parts = [_Part(column) for column in keys.columns]
        # For each further column: the sorted distinct pairs of the preceding columns' code and this column's
        # code.
        self._pairs: list[numpy.ndarray] = []
        codes = self._parts[0].find(keys.column(0))
        for part, column in zip(self._parts[1:], keys.columns[1:], strict=True):
            pairs = codes * part.count + part.find(column)
            distinct_pairs = _distinct(pairs)
            self._pairs.append(distinct_pairs)
            codes = numpy.searchsorted(distinct_pairs, pairs)
        # Maps the code of a key to its number in `keys`. Of repeated codes, the last assignment remains.
        self._numbers = numpy.empty(self.count, numpy.int64)
        self._numbers[codes] = numpy.arange(self.count)

    def find(self, columns: _Columns) -> numpy.ndarray:
        """Return the number of each row's key, -1 for keys that are not in the index."""
        codes = self._parts[0].find(columns[0])
        for part, pairs, column in zip(self._parts[1:], self._pairs, columns[1:], strict=True):
            own = part.find(column)
            pair_codes = codes * part.count + own
            pair_codes[(codes < 0) | (own < 0)] = -1
            codes = _position_in(pairs, pair_codes)
        numbers = numpy.full(len(codes), -1, numpy.int64)
        hit = codes >= 0
        numbers[hit] = self._numbers[codes[hit]]
        return numbers

    def may_have(self, bounds: Sequence[tuple[Any, Any, bool] | None]) -> bool:
        """Return whether any row in a file with these bounds may have one of the keys.

        `bounds` contains, for each key column, the minimum, the maximum and whether there are nulls; or None
        for a column whose bounds are unknown.
        """
        return self.count > 0 and all(
            bound is None or part.overlaps(*bound) for part, bound in zip(self._parts, bounds, strict=True)
        )


class _Part:
    """The distinct values of one column of the keys, sorted."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        self._type = column.type
        self._has_null = column.null_count > 0
        values = plain(column).drop_null()
        self._whole: numpy.ndarray | None = None
        self._dense: numpy.ndarray | None = None
        if pyarrow.types.is_int64(values.type):
            self._whole = _distinct(values.to_numpy())
            self._dense = _dense(self._whole)
            self._values = pyarrow.array(self._whole)
        else:
            distinct = pc.unique(values)
            self._values = distinct.take(pc.sort_indices(distinct))
        # Null has the code after those of the values.
        self.count = len(self._values) + 1

    def find(self, column: pyarrow.ChunkedArray) -> numpy.ndarray:
        """Return the code of each value, -1 for values that no key has."""
        values = plain(column)
        if self._whole is None:
            indexes = pc.fill_null(pc.index_in(values, value_set=self._values, skip_nulls=True), -1)
            codes: numpy.ndarray = indexes.to_numpy().astype(numpy.int64)
        else:
            whole = values.fill_null(0).to_numpy() if values.null_count else values.to_numpy()
            codes = self._position_in(whole)
        if column.null_count:
            codes[column.is_null().to_numpy()] = self.count - 1 if self._has_null else -1
        return codes

    def _position_in(self, whole: numpy.ndarray) -> numpy.ndarray:
        if self._dense is None:
            return _position_in(self._whole, whole)
        assert self._whole is not None
        offset = whole - self._whole[0]
        inside = (whole >= self._whole[0]) & (whole <= self._whole[-1])
        codes = numpy.full(len(whole), -1, numpy.int64)
        codes[inside] = self._dense[offset[inside]]
        return codes

    def overlaps(self, low: Any, high: Any, nulls: bool) -> bool:
        """Return whether a value, or null, is within bounds. True if the bounds are unknown."""
        if nulls and self._has_null:
            return True
        if low is None or high is None:
            return True
        low, high = (plain(pyarrow.chunked_array([[bound]], self._type))[0].as_py() for bound in (low, high))
        first, end = 0, len(self._values)
        while first < end:
            middle = (first + end) // 2
            if self._values[middle].as_py() < low:
                first = middle + 1
            else:
                end = middle
        return bool(first < len(self._values) and self._values[first].as_py() <= high)


def plain(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a column in the form in which keys are compared: integers, and a single zero for floats."""
    types = pyarrow.types
    if types.is_date32(column.type):
        column = column.cast(pyarrow.int32())
    if types.is_integer(column.type) or types.is_timestamp(column.type) or types.is_duration(column.type):
        return column.cast(pyarrow.int64())
    if types.is_floating(column.type):
        return pc.add(column, pyarrow.scalar(0, column.type))
    return column


def _distinct(values: numpy.ndarray) -> numpy.ndarray:
    """Return the distinct values, sorted. Most are distinct, so sorting is cheaper than hashing."""
    ordered = numpy.sort(values)
    return ordered[numpy.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


def _dense(sorted_values: numpy.ndarray) -> numpy.ndarray | None:
    """Return an array with the code of each value, starting at the lowest value; None if the array would be
    too large.
    """
    if not len(sorted_values):
        return None
    size = int(sorted_values[-1]) - int(sorted_values[0]) + 1
    if size > min(_DENSE_NUMBERS_MAX, 64 * len(sorted_values) + 1024):
        return None
    codes = numpy.full(size, -1, numpy.int32)
    codes[sorted_values - sorted_values[0]] = numpy.arange(len(sorted_values))
    return codes


def _position_in(sorted_values: numpy.ndarray | None, wanted: numpy.ndarray) -> numpy.ndarray:
    """Return the index of each wanted value in sorted values, -1 if it is missing."""
    assert sorted_values is not None
    if not len(sorted_values):
        return numpy.full(len(wanted), -1, numpy.int64)
    indexes = numpy.searchsorted(sorted_values, wanted)
    indexes[indexes == len(sorted_values)] = 0
    indexes[sorted_values[indexes] != wanted] = -1
    return indexes
