# SPDX-License-Identifier: Apache-2.0
"""Rows as two numbers each, a hash of the key and one of the row: so that millions are held and compared.

Two sides with the same rows have the same sums of them, whatever the order: that is all that is looked at
where nothing differs.
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
    """Return a hash of each row by the values of some of its columns. Raises OptionInvalid."""
    found: Hashes = pyarrow.array(_native.row_hashes(rows, list(columns))).to_numpy(zero_copy_only=False)
    return found


def is_among(values: Hashes, ascending: Hashes) -> npt.NDArray[numpy.bool_]:
    """Tell of each value whether it is among ascending ones."""
    if not len(ascending):
        return numpy.zeros(len(values), numpy.bool_)
    places = numpy.searchsorted(ascending, values)
    places[places == len(ascending)] = 0
    found: npt.NDArray[numpy.bool_] = ascending[places] == values
    return found


@dataclass(frozen=True)
class HashedRows:
    """The rows of one side of a comparison: two hashes of each, in no order. Pickles."""

    keys: Hashes
    rows: Hashes

    def __len__(self) -> int:
        return len(self.keys)

    def same_sums(self, other: Self) -> bool:
        """Tell whether both sides have as many rows, with the same sums of their hashes."""
        return len(self) == len(other) and all(
            one.sum() == two.sum() and numpy.bitwise_xor.reduce(one) == numpy.bitwise_xor.reduce(two)
            for one, two in ((self.keys, other.keys), (self.rows, other.rows))
        )

    def differing(self, other: Self) -> Hashes:
        """Return, ascending, the keys of which the two sides do not have the same rows, as often as they have
        them."""
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
        found: Hashes = numpy.unique(keys[starts[uneven]])
        return found


class Gathered:
    """Hashes of rows as they come."""

    def __init__(self, key: Sequence[str], columns: Sequence[str]) -> None:
        self._key, self._columns = list(key), list(columns)
        self._keys: list[Hashes] = []
        self._rows: list[Hashes] = []
        self.count = 0

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Take rows. Without a key a row is its own."""
        self.count += rows.num_rows
        hashed = hashes(rows, self._columns)
        self._rows.append(hashed)
        self._keys.append(hashes(rows, self._key) if self._key else hashed)

    def done(self) -> HashedRows:
        """Return all that came."""
        return HashedRows(joined(self._keys), joined(self._rows))


def joined(parts: Sequence[Hashes]) -> Hashes:
    """Return arrays of hashes as one."""
    return numpy.concatenate(parts) if parts else NONE
