# SPDX-License-Identifier: Apache-2.0
"""Rows of one batch, cut by shard, without those that a shard has consumed: whole columns, no loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing as npt
import pyarrow

from penstock.source.sharding import CHANGE_TYPE, preimages_of, with_kinds

SLOT_COLUMN = "_shard_slot"
VERSION_COLUMN = "_commit_version"

# A commit version has the base of its epoch from this bit on.
_EPOCH_BIT = 32

_Versions = npt.NDArray[numpy.int64]
_Slots = npt.NDArray[numpy.int16]


@dataclass(frozen=True)
class Cut:
    """Which rows of a shard are still to be delivered, and how its commit versions are numbered.

    Rows below the commit version `floor` of the daemon are dropped. `shift` is added to the base of the epoch
    in the daemon's commit versions; `floors`, the least version for each slot, hold for what comes out.
    """

    floor: int
    shift: int = 0
    floors: _Versions | None = None


def split(
    batch: pyarrow.RecordBatch, shards: int, cuts: Mapping[int, Cut]
) -> list[tuple[int, pyarrow.RecordBatch]]:
    """Return the rows of each shard of `cuts` that has any, in their order, without the slots' column.

    Without a column of slots all rows belong to shard 0. Rows of other shards are dropped. Where a shard has
    consumed one image of an update, as the half of a move between shards of an earlier number, the other one
    comes as the half that it was: the image before as a delete, the one after as an insert.
    """
    versions: _Versions = _values(batch.column(VERSION_COLUMN), numpy.int64)
    slots: _Slots | None = None
    if SLOT_COLUMN in batch.schema.names:
        slots = _values(batch.column(SLOT_COLUMN), numpy.int16)
        batch = batch.select([name for name in batch.schema.names if name != SLOT_COLUMN])
    return [
        (shard, _shifted(rows, cuts[shard].shift))
        for shard, rows in _by_shard(batch, versions, slots, shards, cuts)
        if rows.num_rows
    ]


def _by_shard(
    batch: pyarrow.RecordBatch,
    versions: _Versions,
    slots: _Slots | None,
    shards: int,
    cuts: Mapping[int, Cut],
) -> list[tuple[int, pyarrow.RecordBatch]]:
    of = numpy.zeros(len(versions), numpy.int16) if slots is None else slots % numpy.int16(shards)
    # Commit versions rise in a batch, so the first one speaks for all where it is high enough.
    passed = not len(versions) or all(
        versions[0] >= cut.floor and cut.floors is None for cut in cuts.values()
    )
    if passed and len(of) and (of == of[0]).all():
        return [(int(of[0]), batch)] if int(of[0]) in cuts else []
    found = []
    if not passed:
        for shard, cut in cuts.items():
            fresh = (of == shard) & _fresh(versions, slots, cut)
            told = batch if cut.floors is None else _with_halves(batch, fresh)
            found.append((shard, told.take(pyarrow.array(numpy.flatnonzero(fresh)))))
        return found
    # One pass over the columns for all shards, then slices that cost nothing.
    order = numpy.argsort(of, kind="stable")
    sorted_of = of[order]
    taken = batch.take(pyarrow.array(order))
    for shard in cuts:
        first, end = (int(numpy.searchsorted(sorted_of, shard, side)) for side in ("left", "right"))
        found.append((shard, taken.slice(first, end - first)))
    return found


def _fresh(
    versions: _Versions,
    slots: _Slots | None,
    cut: Cut,
) -> npt.NDArray[numpy.bool_]:
    fresh = versions >= cut.floor
    if cut.floors is not None and slots is not None:
        fresh &= versions + (cut.shift << _EPOCH_BIT) >= cut.floors[slots]
    return fresh


def _with_halves(batch: pyarrow.RecordBatch, fresh: npt.NDArray[numpy.bool_]) -> pyarrow.RecordBatch:
    """Return the rows with images as deletes and inserts where only they are fresh of their updates."""
    if CHANGE_TYPE not in batch.schema.names:
        return batch
    (places,) = preimages_of(batch).nonzero()
    halves = places[fresh[places] != fresh[places + 1]]
    if not halves.size:
        return batch
    before = fresh[halves]
    kinds = ["delete" if is_before else "insert" for is_before in before.tolist()]
    return with_kinds(batch, halves + ~before, kinds)


def _shifted(batch: pyarrow.RecordBatch, shift: int) -> pyarrow.RecordBatch:
    if not shift:
        return batch
    at = batch.schema.get_field_index(VERSION_COLUMN)
    versions = _values(batch.column(at), numpy.int64) + (shift << _EPOCH_BIT)
    columns = [*batch.columns[:at], pyarrow.array(versions), *batch.columns[at + 1 :]]
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)


def _values(column: pyarrow.Array, kind: type[numpy.generic]) -> npt.NDArray[Any]:
    """Return a column's own values: pyarrow's way to numpy loads pandas, which takes a second."""
    width = numpy.dtype(kind).itemsize
    return numpy.frombuffer(column.buffers()[1], kind, len(column), column.offset * width)
