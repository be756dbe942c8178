# SPDX-License-Identifier: Apache-2.0
"""The last image of each key: what a target that keeps state needs of a batch, and no more.

A row is an event of its own key: one that is put there (PUTS) or one that is taken away (TAKES). An update
that moves a row from one key to another is the taking of the one and the putting of the other, so the last
event of each key tells what becomes of it, whatever came before.
"""

from collections import Counter
from collections.abc import Sequence

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.changes import PUTS, Changes, Origin, Target
from penstock.errors import ServerUnsupported

# Where a key cannot be represented in its column, what it was stands here, under the column's name.
_UNREPRESENTABLE = "unrepresentable"
# Gathered rows are reduced once so many bytes came since the last time, or as many as were left then.
_BYTES_BETWEEN_REDUCTIONS = 48 << 20


def last_images(target: Target, parts: Sequence[Changes]) -> pyarrow.Table:
    """Return the last event of each primary key: columns as in `Changes.rows`, at most one row a key.

    The last by commit version; at one version rows of a load come before changes of the log, and all others
    as they stand in `parts`. Types of change stay as they were, so an `update_preimage` without its postimage
    is the end of its key. Of a target without a primary key every row is given back, in commit order.
    """
    rows = pyarrow.Table.from_batches([part.rows for part in parts])
    order = _commit_order(rows, parts)
    if not target.primary_key:
        return rows if order is None else rows.take(pyarrow.array(order))
    if order is None:
        kept = last_of_each(key_columns(rows, target.primary_key), numpy.arange(rows.num_rows))
    else:
        rank = numpy.empty(len(order), numpy.int64)
        rank[order] = numpy.arange(len(order))
        kept = order[last_of_each(key_columns(rows, target.primary_key), rank)]
    if len(kept) == rows.num_rows:
        return rows
    # A mask keeps the batches apart, where taking by number would join texts of more than 2 GiB.
    mask = numpy.zeros(rows.num_rows, numpy.bool_)
    mask[kept] = True
    return rows.filter(pyarrow.array(mask))


def key_columns(rows: pyarrow.Table, key: Sequence[str]) -> list[pyarrow.ChunkedArray]:
    """Return columns which agree for two rows exactly where their keys do, also where a key's value cannot be
    held by its column's type."""
    columns = []
    for name in key:
        column = rows.column(name)
        if pyarrow.types.is_floating(column.type):
            # The two zeros are one key.
            column = pc.add(column, pyarrow.scalar(0, column.type))
        columns.append(column)
        if column.null_count:
            columns.append(unrepresentable_text(rows, name))
    return columns


def unrepresentable_text(rows: pyarrow.Table | pyarrow.RecordBatch, name: str) -> pyarrow.ChunkedArray:
    """Return the text of a column's values that its type cannot hold, null for all others."""
    texts = pc.struct_field(rows.column("_metadata"), _UNREPRESENTABLE)
    return pc.map_lookup(texts, name, "first")


def last_of_each(columns: Sequence[pyarrow.ChunkedArray], rank: numpy.ndarray) -> numpy.ndarray:
    """Return, ascending, the highest rank among the rows of each key. `columns` have one value a row."""
    names = [str(number) for number in range(len(columns))]
    table = pyarrow.table([*columns, pyarrow.array(rank)], names=[*names, "rank"])
    found = table.group_by(names, use_threads=False).aggregate([("rank", "max")])
    return numpy.sort(found.column("rank_max").to_numpy())


def separated(changes: Changes, places: numpy.ndarray) -> Changes:
    """Return changes in which an update between two places is a delete and an insert. `places` are of rows.

    The images of an update stand side by side, and have the same version and number.
    """
    rows = changes.rows
    if rows.num_rows < 2:
        return changes
    kinds = rows.column("_change_type")
    versions = rows.column("_commit_version").to_numpy()
    numbers = pc.struct_field(rows.column("_metadata"), "row").to_numpy(zero_copy_only=False)
    moved = numpy.zeros(rows.num_rows, numpy.bool_)
    moved[:-1] = (
        pc.equal(kinds, "update_preimage").to_numpy(zero_copy_only=False)[:-1]
        & pc.equal(kinds, "update_postimage").to_numpy(zero_copy_only=False)[1:]
        & (versions[:-1] == versions[1:])
        & (numbers[:-1] == numbers[1:])
        & (places[:-1] != places[1:])
    )
    count = int(moved.sum())
    if not count:
        return changes
    moved[1:] |= moved[:-1]
    told = pc.replace_with_mask(kinds, pyarrow.array(moved), pyarrow.array(["delete", "insert"] * count))
    at = rows.schema.get_field_index("_change_type")
    return changes.with_rows(rows.set_column(at, rows.schema.field(at), told))


def puts(rows: pyarrow.Table | pyarrow.RecordBatch) -> pyarrow.ChunkedArray:
    """Tell of each row whether it is put there; else it is taken away."""
    return pc.is_in(rows.column("_change_type"), value_set=pyarrow.array(PUTS))


def with_metadata(rows: pyarrow.RecordBatch, names: Sequence[str]) -> pyarrow.RecordBatch:
    """Return rows whose `_metadata` has only these of its fields."""
    place = rows.schema.get_field_index("_metadata")
    whole = rows.column(place)
    fields = [whole.type.field(name) for name in names]
    # Rows always have their metadata, so that a field is null just where it is in the whole.
    kept = pyarrow.StructArray.from_arrays([pc.struct_field(whole, name) for name in names], fields=fields)
    return rows.set_column(place, rows.schema.field(place).with_type(kept.type), kept)


class LastImages:
    """Gathers changes of one table, and holds about twice the last images of their keys, not all of them.

    They are reduced to those once `bytes_between` came since the last time.
    """

    def __init__(self, target: Target, bytes_between: int = _BYTES_BETWEEN_REDUCTIONS) -> None:
        self.target = target
        self._bytes_between = bytes_between
        # The version at which the table was emptied, None where it was not.
        self.emptied: int | None = None
        self._parts: list[Changes] = []
        self._bytes_reduced = 0
        # The memory of what is held.
        self.bytes = 0

    def add(self, changes: Changes) -> None:
        """Take changes that have the columns of those before."""
        if self.emptied is not None:
            behind = pc.greater(changes.rows.column("_commit_version"), self.emptied)
            changes = changes.with_rows(changes.rows.filter(behind))
        if not len(changes):
            return
        self._parts.append(changes)
        self.bytes += changes.rows.nbytes
        bound = max(self._bytes_reduced, self._bytes_between)
        if self.target.primary_key and self.bytes - self._bytes_reduced >= bound:
            self._reduce()

    def empty(self, version: int) -> None:
        """Forget what came so far: the table was emptied at a version. Rows of a load that was read before
        are let go when they come."""
        self.emptied = version
        self._parts, self._bytes_reduced, self.bytes = [], 0, 0

    def rows(self) -> pyarrow.Table | None:
        """Return what is left, as `last_images` does; None where nothing came."""
        return last_images(self.target, self._parts) if self._parts else None

    def followed(self) -> "LastImages":
        """Return an empty one for what follows."""
        next_one = LastImages(self.target, self._bytes_between)
        next_one.emptied = self.emptied
        return next_one

    def _reduce(self) -> None:
        # Rows of both origins are kept apart, as their order at one version depends on it.
        of_each = {
            origin: [part for part in self._parts if part.origin is origin]
            for origin in Origin
            if any(part.origin is origin for part in self._parts)
        }
        first = self._parts[0]
        self._parts = [
            Changes(self.target, batch, first.source, origin)
            for origin, parts in of_each.items()
            for batch in last_images(self.target, parts).combine_chunks().to_batches()
        ]
        self.bytes = self._bytes_reduced = sum(part.rows.nbytes for part in self._parts)


def _commit_order(rows: pyarrow.Table, parts: Sequence[Changes]) -> numpy.ndarray | None:
    """Return the rows' numbers in commit order, None where they stand in it."""
    versions = rows.column("_commit_version").to_numpy()
    logged = numpy.repeat(
        numpy.array([part.origin is Origin.LOG for part in parts], numpy.int8), [len(part) for part in parts]
    )
    stepped = numpy.diff(versions)
    if not (stepped < 0).any() and not ((stepped == 0) & (numpy.diff(logged) < 0)).any():
        return None
    return numpy.lexsort((logged, versions))


def refuse_partial(changes: Changes) -> None:
    """Raise ServerUnsupported where row images lack columns: null must not stand for them."""
    absent = pc.struct_field(changes.rows.column("_metadata"), "absent")
    if absent.null_count < len(absent):
        raise ServerUnsupported(
            f"row images of {changes.source} lack columns, and the target would lose their values",
            hint="Set binlog_row_image=FULL on the source",
        )


def unrepresentable_counts(
    target: Target, rows: pyarrow.Table, chosen: pyarrow.ChunkedArray | None = None
) -> Counter[str]:
    """Count the values that a target's columns cannot hold, by "table.column", in all or chosen rows."""
    found: Counter[str] = Counter()
    texts = pc.struct_field(rows.column("_metadata"), "unrepresentable")
    if texts.null_count == len(texts):
        return found
    if chosen is not None:
        rows, texts = rows.filter(chosen), texts.filter(chosen)
    for name in target.column_names:
        if rows.column(name).null_count:
            count = pc.count(pc.map_lookup(texts, name, "first")).as_py()
            if count:
                found[f"{target.name}.{name}"] = count
    return found
