# SPDX-License-Identifier: Apache-2.0
"""Rows as the shards of one number get them: an update that moves a row is a delete and an insert."""

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
    """Rows with the slot that decides their shard.

    `preimages` tells which rows are the image before an update whose other image follows, in the same shard.
    `moved` are the rows that are the inserts of moves; the delete stands before each.
    """

    rows: pyarrow.RecordBatch
    slots: Slots
    preimages: Mask
    moved: npt.NDArray[Any]


def slots_of(rows: pyarrow.RecordBatch, columns: Sequence[str], table: str, preimages: Mask) -> Slots:
    """Return the slot of each row by its own values of `columns`.

    A column that an image after an update lacks (`_metadata.absent`) has stayed, and is taken from the image
    before it; never the other way round, for the image after may hold another value than the row had.
    Raises OptionInvalid, ServerUnsupported where an image lacks it otherwise.
    """
    filled = _filled_up(rows, columns, table, preimages)
    slots: Slots = pyarrow.array(shard_slots(filled, list(columns), table)).to_numpy()
    return slots


def _filled_up(
    rows: pyarrow.RecordBatch, columns: Sequence[str], table: str, preimages: Mask
) -> pyarrow.RecordBatch:
    if "_metadata" not in rows.schema.names:
        return rows
    absent = compute.struct_field(rows.column("_metadata"), "absent")
    if absent.null_count == len(absent):
        return rows
    lacking = absent.to_pylist()
    for name in columns:
        source = numpy.arange(rows.num_rows)
        for place in (place for place, names in enumerate(lacking) if names and name in names):
            before = place - 1
            if place == 0 or not preimages[before] or name in (lacking[before] or ()):
                raise ServerUnsupported(
                    f"a row image of {table} lacks the shard column {name}, so nothing tells the row's shard",
                    hint="Set binlog_row_image=FULL on the source, or shard by the primary key",
                )
            source[place] = before
        at = rows.schema.get_field_index(name)
        filled = rows.column(at).take(pyarrow.array(source))
        rows = rows.set_column(at, rows.schema.field(at), filled)
    return rows


def sharded(rows: pyarrow.RecordBatch, slots: Slots, preimages: Mask, count: int) -> ShardedRows:
    """Return rows as `count` shards get them; `slots` are of each row's own values.

    Each row keeps the slot of its own values: after a change of the number of shards these tell which image
    of an update was consumed. An update that moves its row to another shard becomes the delete of the row
    before it and the insert of the one after it.
    """
    (places,) = preimages.nonzero()
    if not places.size:
        return ShardedRows(rows, slots, preimages, places)
    moves = slots[places] % count != slots[places + 1] % count
    moved = places[moves]
    if moved.size:
        preimages = preimages.copy()
        preimages[moved] = False
        rows = with_kinds(
            rows, numpy.repeat(moved, 2) + [0, 1] * len(moved), ["delete", "insert"] * len(moved)
        )
    return ShardedRows(rows, slots, preimages, moved + 1)


def with_kinds(rows: pyarrow.RecordBatch, places: npt.NDArray[Any], kinds: list[str]) -> pyarrow.RecordBatch:
    """Return rows of which those at `places`, in rising order, are of these kinds of change."""
    at = rows.schema.get_field_index(CHANGE_TYPE)
    changed = numpy.zeros(rows.num_rows, numpy.bool_)
    changed[places] = True
    of_type = pyarrow.array(kinds, rows.schema.field(at).type)
    column = compute.replace_with_mask(rows.column(at), pyarrow.array(changed), of_type)
    return rows.set_column(at, rows.schema.field(at), column)


def preimages_of(rows: pyarrow.RecordBatch) -> Mask:
    """Tell of each row whether it is the image before an update, whose other image follows it."""
    kinds = rows.column(CHANGE_TYPE)
    # No other kinds are as long as these two, and to look at lengths alone costs next to nothing.
    offsets = numpy.frombuffer(kinds.buffers()[1], numpy.int32)
    lengths: npt.NDArray[numpy.int32] = numpy.diff(offsets[kinds.offset : kinds.offset + len(kinds) + 1])
    preimages: Mask = lengths == len(PREIMAGE)
    preimages[:-1] &= lengths[1:] == len(POSTIMAGE)
    preimages[-1:] = False
    return preimages
