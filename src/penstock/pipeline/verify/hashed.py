# SPDX-License-Identifier: Apache-2.0
"""Represents each row by two hashes, one of its key and one of the whole row, so that millions of rows fit in
memory.

The sums of the hashes do not depend on the order of the rows. If the sums of source and target are equal, no
further comparison is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy
import numpy.typing as npt
import pyarrow

from penstock import _native

Hashes = npt.NDArray[numpy.uint64]

NONE: Hashes = numpy.zeros(0, numpy.uint64)


def hashes(rows: pyarrow.RecordBatch, columns: Sequence[str]) -> Hashes:
    """Return a hash of each row over some of its columns. Raises OptionInvalid."""
    row_hashes: Hashes = pyarrow.array(_native.row_hashes(rows, list(columns))).to_numpy(zero_copy_only=False)
    return row_hashes


def is_among(values: Hashes, ascending: Hashes) -> npt.NDArray[numpy.bool_]:
    """For each value, return whether it is among the values of `ascending`."""
    if not len(ascending):
        return numpy.zeros(len(values), numpy.bool_)
    indexes = numpy.searchsorted(ascending, values)
    indexes[indexes == len(ascending)] = 0
    matches: npt.NDArray[numpy.bool_] = ascending[indexes] == values
    return matches


@dataclass(frozen=True)
class HashedRows:
    """The rows of one side of a comparison, with two hashes per row, in no particular order. Can be
    pickled.
    """

    keys: Hashes
    rows: Hashes

    def __len__(self) -> int:
        return len(self.keys)

    def same_sums(self, other: Self) -> bool:
        """Return whether both sides have the same number of rows and the same hash sums."""
        return len(self) == len(other) and all(
            own_hashes.sum() == other_hashes.sum()
            and numpy.bitwise_xor.reduce(own_hashes) == numpy.bitwise_xor.reduce(other_hashes)
            for own_hashes, other_hashes in ((self.keys, other.keys), (self.rows, other.rows))
        )

    def differing(self, other: Self) -> Hashes:
        """Return, ascending, the keys whose rows differ between the two sides in value or in number."""
        if self.same_sums(other):
            return NONE
        keys = numpy.concatenate([self.keys, other.keys])
        rows = numpy.concatenate([self.rows, other.rows])
        count = numpy.ones(len(keys), numpy.int64)
        count[len(self) :] = -1
        order = numpy.lexsort((rows, keys))
        keys, rows, count = keys[order], rows[order], count[order]
        starts = numpy.flatnonzero(
            numpy.concatenate([[True], (numpy.diff(keys) != 0) | (numpy.diff(rows) != 0)])
        )
        uneven = numpy.add.reduceat(count, starts) != 0
        differing_keys: Hashes = numpy.unique(keys[starts[uneven]])
        return differing_keys


class HashCollector:
    """Collects hashes of rows batch by batch."""

    def __init__(self, key: Sequence[str], columns: Sequence[str]) -> None:
        self._key, self._columns = list(key), list(columns)
        self._keys: list[Hashes] = []
        self._rows: list[Hashes] = []
        self.count = 0

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Add rows. Without a key, the hash of the whole row is the key."""
        self.count += rows.num_rows
        hashed = hashes(rows, self._columns)
        self._rows.append(hashed)
        self._keys.append(hashes(rows, self._key) if self._key else hashed)

    def done(self) -> HashedRows:
        """Return the hashes of all rows added."""
        return HashedRows(concatenate_hashes(self._keys), concatenate_hashes(self._rows))


def concatenate_hashes(parts: Sequence[Hashes]) -> Hashes:
    """Concatenate arrays of hashes."""
    return numpy.concatenate(parts) if parts else NONE
