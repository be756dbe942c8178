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

    A column that an image in part lacks (`_metadata.absent`) is taken from the other image of its update.
    Raises OptionInvalid, ServerUnsupported where no image has it.
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
            other = place + 1 if preimages[place] else place - 1
            is_pair = preimages[place] or (place > 0 and preimages[other])
            if not is_pair or name in (lacking[other] or ()):
                raise ServerUnsupported(
                    f"a row image of {table} lacks the shard column {name}, so nothing tells the row's shard",
                    hint="Set binlog_row_image=FULL on the source, or shard by the primary key",
                )
            source[place] = other
        at = rows.schema.get_field_index(name)
        filled = rows.column(at).take(pyarrow.array(source))
        rows = rows.set_column(at, rows.schema.field(at), filled)
    return rows


def sharded(rows: pyarrow.RecordBatch, slots: Slots, preimages: Mask, count: int) -> ShardedRows:
    """Return rows as `count` shards get them; `slots` are of each row's own values.

    An update that stays in its shard has the slot of the image after it. One that moves its row to another
    shard becomes the delete of the row before it and the insert of the one after it, each with its own slot.
    """
    (places,) = preimages.nonzero()
    if not places.size:
        return ShardedRows(rows, slots, preimages, places)
    moves = slots[places] % count != slots[places + 1] % count
    stays, moved = places[~moves], places[moves]
    slots = slots.copy()
    slots[stays] = slots[stays + 1]
    if moved.size:
        preimages = preimages.copy()
        preimages[moved] = False
        rows = _with_moves(rows, moved)
    return ShardedRows(rows, slots, preimages, moved + 1)


def _with_moves(rows: pyarrow.RecordBatch, moved: npt.NDArray[Any]) -> pyarrow.RecordBatch:
    at = rows.schema.get_field_index(CHANGE_TYPE)
    changed = numpy.zeros(rows.num_rows, numpy.bool_)
    changed[moved] = changed[moved + 1] = True
    kinds = pyarrow.array(["delete", "insert"] * len(moved), rows.schema.field(at).type)
    kinds = compute.replace_with_mask(rows.column(at), pyarrow.array(changed), kinds)
    return rows.set_column(at, rows.schema.field(at), kinds)


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
