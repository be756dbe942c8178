# SPDX-License-Identifier: Apache-2.0
"""Selects the rows that a subscriber receives: by shard, by change type, and by a condition."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as compute

from penstock.errors import OptionInvalid
from penstock.limits import SLOTS
from penstock.predicate import Predicate
from penstock.source.sharding import CHANGE_TYPE, POSTIMAGE, PREIMAGE, ShardedRows, preimages_of

SLOT_COLUMN = "_shard_slot"

# A mask of the rows or messages that pass a filter.
Mask = Any


@dataclass(frozen=True)
class ShardSet:
    """A subset of `count` shards. A row belongs to shard `slot % count`."""

    count: int
    of: frozenset[int]
    _has: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.count < 1 or not self.of or not all(0 <= shard < self.count for shard in self.of):
            raise OptionInvalid(
                f"{sorted(self.of)} is not a selection of {self.count} shards",
                hint="Name at least one shard, from 0 up to the count less one",
            )
        has = numpy.isin(numpy.arange(SLOTS + 1) % self.count, list(self.of))
        # Slot -1 belongs to every shard. It indexes the last element.
        has[-1] = True
        object.__setattr__(self, "_has", has)

    def mask(self, slots: numpy.ndarray) -> Any:
        """Return a mask of the slots that belong to one of the shards."""
        return self._has[slots]


@dataclass(frozen=True)
class Decoded:
    """The columns and change types that a filter needs decoded; None means all.

    `left_changes` are the change types to select after decoding; None means all.
    """

    columns: tuple[str, ...] | None
    changes: tuple[str, ...] | None
    left_changes: tuple[str, ...] | None


def decoded_for(
    columns: tuple[str, ...] | None,
    changes: tuple[str, ...] | None,
    *,
    is_sharded: bool,
    where: Predicate | None,
) -> Decoded:
    """Return what must be decoded to filter rows by shard or by a condition."""
    decoded_changes, left_changes = changes, None
    if changes is not None and (PREIMAGE in changes) != (POSTIMAGE in changes):
        # Both images are needed to determine an update's shard, and whether it passes.
        decoded_changes, left_changes = tuple(sorted({*changes, PREIMAGE, POSTIMAGE})), changes
    decoded_columns = columns
    if columns is not None:
        needed = {CHANGE_TYPE, *(where.columns if where is not None else ())}
        if is_sharded:
            # _metadata lists the columns missing in a partial image.
            needed.add("_metadata")
        decoded_columns = tuple(dict.fromkeys([*columns, *sorted(needed)]))
    return Decoded(decoded_columns, decoded_changes, left_changes)


@dataclass(frozen=True)
class RowsFilter:
    """A filter for rows decoded as `decoded_for` specifies. A part that is None does not filter.

    An update passes with both images if either image satisfies `where`. An update that moves a row to another
    shard becomes a delete and an insert, and each is filtered by its own row. For `changes`, both still count
    as an update.
    """

    shards: ShardSet | None = None
    where: Predicate | None = None
    changes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None

    def passing(
        self, arrow: pyarrow.RecordBatch, sharded_rows: ShardedRows | None, preimages: Callable[[], Mask]
    ) -> tuple[pyarrow.RecordBatch, int] | None:
        """Return the rows that pass, and how many of them were moved from another shard; None if no row
        passes.

        If the rows are assigned to shards, they are also passed as `sharded_rows`, and the result has a
        column with the slot of each row. Otherwise `preimages` is called for a mask of the preimages.
        """
        mask = None
        if self.changes is not None:
            mask = compute.is_in(arrow.column(CHANGE_TYPE), pyarrow.array(self.changes)).to_numpy(False)
        if self.shards is not None:
            assert sharded_rows is not None, "rows are assigned to shards before"
            arrow = sharded_rows.rows
            mask = both(mask, self.shards.mask(sharded_rows.slots))
        if self.where is not None:
            befores = preimages() if sharded_rows is None else sharded_rows.preimages
            mask = both(mask, whole_updates(self.where.passes(arrow), befores))
        if mask is not None and not mask.any():
            return None
        moved = 0
        if sharded_rows is not None:
            arrow = arrow.append_column(SLOT_COLUMN, pyarrow.array(sharded_rows.slots))
            moved = len(sharded_rows.moved) if mask is None else int(mask[sharded_rows.moved].sum())
        if mask is not None and not mask.all():
            arrow = arrow.filter(pyarrow.array(mask))
        return self.project(arrow), moved

    def project(self, arrow: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return the rows with only the requested columns and the slot."""
        if self.columns is None:
            return arrow
        shown = {*self.columns, SLOT_COLUMN}
        return arrow.select([name for name in arrow.schema.names if name in shown])


def row_parts(arrow: pyarrow.RecordBatch, rows_max: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows in parts of at most `rows_max` rows, or 2 if `rows_max` is 1. The two images of an
    update stay together.
    """
    befores = None
    if arrow.num_rows > rows_max and CHANGE_TYPE in arrow.schema.names:
        befores = preimages_of(arrow)
    begin = 0
    while begin < arrow.num_rows:
        end = min(begin + rows_max, arrow.num_rows)
        if befores is not None and end < arrow.num_rows and befores[end - 1] and not befores[end]:
            end += -1 if end - begin > 1 else 1
        yield arrow.slice(begin, end - begin)
        begin = end


def both(first: Mask | None, second: Mask) -> Mask:
    """Return a mask of the rows that pass both masks; None passes all rows."""
    return second if first is None else first & second


def whole_updates(mask: Mask, befores: Mask) -> Mask:
    """Return a mask in which both images of an update pass if `mask` passes either image."""
    (updates,) = befores.nonzero()
    if not updates.size:
        return mask
    whole = mask.copy()
    either = mask[updates] | mask[updates + 1]
    whole[updates] = whole[updates + 1] = either
    return whole
