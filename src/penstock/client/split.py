# SPDX-License-Identifier: Apache-2.0
"""Splits the rows of a batch by shard, and drops rows that a shard has already consumed. All operations work
on whole columns, without loops.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy
import numpy.typing as npt
import pyarrow

from penstock.commit_versions import are_positional
from penstock.model import Position
from penstock.source.rows_filter import SLOT_COLUMN
from penstock.source.sharding import CHANGE_TYPE, preimages_of, with_kinds

VERSION_COLUMN = "_commit_version"

# With more runs of adjacent rows than this per shard, gathering the rows of each shard costs less.
_RUNS_PER_SHARD_MAX = 2

_VERSION_MAX = numpy.iinfo(numpy.int64).max

# The epoch base starts at this bit of a commit version.
_EPOCH_BIT = 32

_Versions = npt.NDArray[numpy.int64]
_Slots = npt.NDArray[numpy.int16]


@dataclass(frozen=True)
class Cut:
    """Determines which rows of a shard remain to be delivered, and how their commit versions are numbered.

    Rows whose commit version at the daemon is below `floor` are dropped. `shift` is added to the epoch base
    of the daemon's commit versions. `floors` contains the lowest version to deliver for each slot, after
    `shift` is applied.
    """

    floor: int
    shift: int = 0
    floors: _Versions | None = None

    @classmethod
    def at(cls, position: Position, shift: int) -> Self:
        """Return the cut of a shard that has consumed the rows before a position of the daemon.

        A TiDB cluster's commit versions are the same in every daemon's log, so they do not tell which rows
        precede a position in one of the logs. The cut for such a cluster excludes nothing: reading begins at
        the lowest position of all shards, and rows after it that this shard has already consumed are
        delivered again.
        """
        return cls(position.commit_version, shift) if are_positional(position.file) else cls(0)


def split(
    batch: pyarrow.RecordBatch, shards: int, cuts: Mapping[int, Cut], *, in_runs: bool = False
) -> list[tuple[int, pyarrow.RecordBatch]]:
    """Return the rows of each shard in `cuts` that has rows, in order and without the slot column.

    Without a slot column, all rows belong to shard 0. Rows of other shards are dropped. Before a resize, an
    update may have moved a row between shards, so that a shard has consumed only one of the update's images.
    The other image is then delivered alone: a preimage as a delete, a postimage as an insert.

    With `in_runs`, the rows of a shard may come in several parts, in order: a few adjacent rows are cut out
    of the batch faster than they are gathered.
    """
    versions: _Versions = _values(batch.column(VERSION_COLUMN), numpy.int64)
    slots: _Slots | None = None
    names = batch.schema.names
    if SLOT_COLUMN in names:
        slots = _values(batch.column(SLOT_COLUMN), numpy.int16)
        batch = batch.select([index for index, name in enumerate(names) if name != SLOT_COLUMN])
    return [
        (shard, _shifted(rows, cuts[shard].shift))
        for shard, rows in _by_shard(batch, versions, slots, shards, cuts, in_runs=in_runs)
        if rows.num_rows
    ]


def _by_shard(
    batch: pyarrow.RecordBatch,
    versions: _Versions,
    slots: _Slots | None,
    shards: int,
    cuts: Mapping[int, Cut],
    *,
    in_runs: bool,
) -> list[tuple[int, pyarrow.RecordBatch]]:
    shard_of_row = numpy.zeros(len(versions), numpy.int16) if slots is None else slots % numpy.int16(shards)
    lowest = versions.min(initial=_VERSION_MAX)
    passed = all(lowest >= cut.floor and cut.floors is None for cut in cuts.values())
    if passed and len(shard_of_row) and (shard_of_row == shard_of_row[0]).all():
        return [(int(shard_of_row[0]), batch)] if int(shard_of_row[0]) in cuts else []
    parts = []
    if not passed:
        for shard, cut in cuts.items():
            fresh = (shard_of_row == shard) & _fresh(versions, slots, cut)
            changed = batch if cut.floors is None else _with_halves(batch, fresh)
            parts.append((shard, changed.take(pyarrow.array(numpy.flatnonzero(fresh)))))
        return parts
    if in_runs:
        starts = numpy.flatnonzero(shard_of_row[1:] != shard_of_row[:-1]) + 1
        if len(starts) < _RUNS_PER_SHARD_MAX * len(cuts):
            return _runs(batch, shard_of_row, [0, *starts.tolist()], cuts)
    order = numpy.argsort(shard_of_row, kind="stable")
    numbers = numpy.fromiter(cuts, numpy.int64, len(cuts))
    bounds = numpy.searchsorted(shard_of_row[order], numpy.stack([numbers, numbers + 1])).tolist()
    ordered: pyarrow.RecordBatch | None = None
    for shard, first, end in zip(cuts, *bounds, strict=True):
        if first == end:
            continue
        if order[end - 1] - order[first] == end - 1 - first:
            # The rows of a short batch are mostly adjacent already, and copying the rows would cost much
            # more.
            parts.append((shard, batch.slice(order[first], end - first)))
            continue
        # One pass over the columns serves all shards; slicing then costs almost nothing.
        ordered = batch.take(pyarrow.array(order)) if ordered is None else ordered
        parts.append((shard, ordered.slice(first, end - first)))
    return parts


def _runs(
    batch: pyarrow.RecordBatch, shard_of_row: _Slots, starts: list[int], cuts: Mapping[int, Cut]
) -> list[tuple[int, pyarrow.RecordBatch]]:
    """Return each run of adjacent rows of one shard, given where the runs start."""
    ends = [*starts[1:], len(shard_of_row)]
    return [
        (shard, batch.slice(start, end - start))
        for shard, start, end in zip(shard_of_row[starts].tolist(), starts, ends, strict=True)
        if shard in cuts
    ]


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
    """Return the rows. An update of which only one image is new becomes a delete or an insert."""
    if CHANGE_TYPE not in batch.schema.names:
        return batch
    (updates,) = preimages_of(batch).nonzero()
    halves = updates[fresh[updates] != fresh[updates + 1]]
    if not halves.size:
        return batch
    before = fresh[halves]
    kinds = ["delete" if is_before else "insert" for is_before in before.tolist()]
    return with_kinds(batch, halves + ~before, kinds)


def _shifted(batch: pyarrow.RecordBatch, shift: int) -> pyarrow.RecordBatch:
    if not shift:
        return batch
    column_index = batch.schema.get_field_index(VERSION_COLUMN)
    versions = _values(batch.column(column_index), numpy.int64) + (shift << _EPOCH_BIT)
    columns = [*batch.columns[:column_index], pyarrow.array(versions), *batch.columns[column_index + 1 :]]
    return pyarrow.RecordBatch.from_arrays(columns, schema=batch.schema)


def _values(column: pyarrow.Array, kind: type[numpy.generic]) -> npt.NDArray[Any]:
    """Return a column's values. pyarrow's own conversion would import pandas, which takes a second."""
    width = numpy.dtype(kind).itemsize
    return numpy.frombuffer(column.buffers()[1], kind, len(column), column.offset * width)
