# SPDX-License-Identifier: Apache-2.0
"""Assigns rows to shards: an update that moves a row between shards becomes a delete and an insert."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as compute

from penstock._native import shard_slots
from penstock.errors import ServerUnsupported

CHANGE_TYPE = "_change_type"
PREIMAGE, POSTIMAGE = "update_preimage", "update_postimage"

Mask = npt.NDArray[numpy.bool_]
Slots = npt.NDArray[numpy.int16]


@dataclass(frozen=True)
class ShardedRows:
    """Rows, each with the slot that determines its shard.

    `preimages` marks preimages whose postimage follows in the same shard. `moved` contains the indexes of the
    rows that insert a moved row. The matching delete precedes each of these inserts.
    """

    rows: pyarrow.RecordBatch
    slots: Slots
    preimages: Mask
    moved: npt.NDArray[Any]


def slots_of(rows: pyarrow.RecordBatch, columns: Sequence[str], table: str, preimages: Mask) -> Slots:
    """Return the slot of each row, computed from its own values of `columns`.

    A column missing in a postimage (`_metadata.absent`) is unchanged and is taken from the preimage. The
    reverse is not possible, because the postimage may have another value. Raises OptionInvalid, and
    ServerUnsupported if an image is missing the column in any other case.
    """
    filled = fill_absent(rows, columns, table, preimages)
    keys = [name for name in filled.schema.names if name in columns]
    if keys and len(keys) == len(columns):
        # Passing a column to the kernel costs more than the slots of a few rows. Keep the order of the table.
        filled = filled.select(keys)
    slots: Slots = pyarrow.array(shard_slots(filled, list(columns), table)).to_numpy()
    return slots


def fill_absent(
    rows: pyarrow.RecordBatch, columns: Sequence[str], table: str, preimages: Mask
) -> pyarrow.RecordBatch:
    """Return the rows, with each value of `columns` that is missing in a postimage taken from the preimage.

    Raises ServerUnsupported if an image is missing one of the columns in any other case.
    """
    if "_metadata" not in rows.schema.names:
        return rows
    # The struct itself is never null, so read its field directly. A compute function would release the
    # interpreter lock and then wait to get it back.
    absent = rows.column("_metadata").field("absent")
    if absent.null_count == len(absent):
        return rows
    absent_names = absent.to_pylist()
    for name in columns:
        source = numpy.arange(rows.num_rows)
        for row in (row for row, names in enumerate(absent_names) if names and name in names):
            preimage = row - 1
            if row == 0 or not preimages[preimage] or name in (absent_names[preimage] or ()):
                raise ServerUnsupported(
                    f"a row image of {table} lacks the shard column {name}, so nothing tells the row's shard",
                    hint="Set binlog_row_image=FULL on the source, or shard by the primary key",
                )
            source[row] = preimage
        column_index = rows.schema.get_field_index(name)
        filled = rows.column(column_index).take(pyarrow.array(source))
        rows = rows.set_column(column_index, rows.schema.field(column_index), filled)
    return rows


def sharded(rows: pyarrow.RecordBatch, slots: Slots, preimages: Mask, count: int) -> ShardedRows:
    """Assign rows to `count` shards; `slots` are computed from each row's own values.

    Each row keeps the slot of its own values, so that, even after the number of shards has changed, it is
    known which image of an update was consumed. An update that moves its row to another shard becomes a
    delete of the preimage and an insert of the postimage.
    """
    (updates,) = preimages.nonzero()
    if not updates.size:
        return ShardedRows(rows, slots, preimages, updates)
    moves = slots[updates] % count != slots[updates + 1] % count
    moved = updates[moves]
    if moved.size:
        preimages = preimages.copy()
        preimages[moved] = False
        rows = with_kinds(
            rows, numpy.repeat(moved, 2) + [0, 1] * len(moved), ["delete", "insert"] * len(moved)
        )
    return ShardedRows(rows, slots, preimages, moved + 1)


def with_kinds(rows: pyarrow.RecordBatch, indexes: npt.NDArray[Any], kinds: list[str]) -> pyarrow.RecordBatch:
    """Return the rows with new change types at `indexes`, which are in ascending order."""
    column_index = rows.schema.get_field_index(CHANGE_TYPE)
    changed = numpy.zeros(rows.num_rows, numpy.bool_)
    changed[indexes] = True
    change_types = pyarrow.array(kinds, rows.schema.field(column_index).type)
    column = compute.replace_with_mask(rows.column(column_index), pyarrow.array(changed), change_types)
    return rows.set_column(column_index, rows.schema.field(column_index), column)


def preimages_of(rows: pyarrow.RecordBatch) -> Mask:
    """Return a mask of the preimages whose postimage follows."""
    kinds = rows.column(CHANGE_TYPE)
    # No other change type is as long as `update_preimage` or `update_postimage`, and comparing lengths is
    # cheap.
    offsets = numpy.frombuffer(kinds.buffers()[1], numpy.int32)
    lengths: npt.NDArray[numpy.int32] = numpy.diff(offsets[kinds.offset : kinds.offset + len(kinds) + 1])
    preimages: Mask = lengths == len(PREIMAGE)
    preimages[:-1] &= lengths[1:] == len(POSTIMAGE)
    preimages[-1:] = False
    return preimages
