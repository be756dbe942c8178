# SPDX-License-Identifier: Apache-2.0
"""Reduces a batch to the last image of each key, which is all that a stateful target needs.

A row image either writes its key (PUTS) or removes it (TAKES). An update that changes a row's key removes the
old key and writes the new one. The final state of a key therefore depends only on its last image, not on
earlier images.
"""

from collections import Counter
from collections.abc import Sequence

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as pc

from penstock.changes import PUTS, Changes, Origin, Target
from penstock.errors import ServerUnsupported

# The metadata field with the texts of unrepresentable values, by column name.
_UNREPRESENTABLE = "unrepresentable"
# Buffered rows are reduced once this many bytes were added since the last reduction, or, if that reduction
# left more than this, once the buffer has doubled.
_BYTES_BETWEEN_REDUCTIONS = 48 << 20
# Up to this number of rows, numbering the keys takes less time than grouping by them.
_FEW_ROWS_MAX = 1024


def last_images(target: Target, parts: Sequence[Changes]) -> pyarrow.Table:
    """Return the last event of each primary key: columns as in `Changes.rows`, at most one row per key.

    Rows are ordered by commit version. Rows with the same version are ordered by origin (rows of a load
    before changes of the log), and then by their order in `parts`. Change types are kept, so an
    `update_preimage` without its postimage removes its key. For a target without a primary key, all rows are
    returned in commit order.
    """
    rows = pyarrow.Table.from_batches([part.rows for part in parts])
    if rows.num_rows < 2:
        return rows
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
    # Filter by a mask, which keeps the batches separate. `take` would concatenate them, which fails for more
    # than 2 GiB of text.
    mask = numpy.zeros(rows.num_rows, numpy.bool_)
    mask[kept] = True
    return rows.filter(pyarrow.array(mask))


def key_columns(rows: pyarrow.Table, key: Sequence[str]) -> list[pyarrow.ChunkedArray]:
    """Return columns whose values are equal for two rows if and only if the rows have the same key.

    This also holds for key values that the column's type cannot represent.
    """
    columns = []
    for name in key:
        column = rows.column(name)
        if pyarrow.types.is_floating(column.type):
            # Positive and negative zero are the same key.
            column = pc.add(column, pyarrow.scalar(0, column.type))
        columns.append(column)
        if column.null_count:
            columns.append(unrepresentable_text(rows, name))
    return columns


def unrepresentable_text(rows: pyarrow.Table | pyarrow.RecordBatch, name: str) -> pyarrow.ChunkedArray:
    """Return the texts of a column's values that its type cannot represent, null for other values."""
    texts = pc.struct_field(rows.column("_metadata"), _UNREPRESENTABLE)
    return pc.map_lookup(texts, name, "first")


def last_of_each(columns: Sequence[pyarrow.ChunkedArray], rank: numpy.ndarray) -> numpy.ndarray:
    """Return the highest rank of each key's rows, in ascending order.

    `columns` have one value per row.
    """
    if len(rank) <= _FEW_ROWS_MAX and (codes := _codes(columns)) is not None:
        last = numpy.zeros(codes.max(initial=-1) + 1, numpy.int64)
        numpy.maximum.at(last, codes, rank)
        return numpy.sort(last)
    names = [str(number) for number in range(len(columns))]
    table = pyarrow.table([*columns, pyarrow.array(rank)], names=[*names, "rank"])
    ranks = table.group_by(names, use_threads=False).aggregate([("rank", "max")])
    return numpy.sort(ranks.column("rank_max").to_numpy())


def _codes(columns: Sequence[pyarrow.ChunkedArray]) -> npt.NDArray[numpy.int32] | None:
    """Return numbers from 0 that are equal for equal values of a column of texts or integers; else None."""
    kind = columns[0].type
    is_plain = pyarrow.types.is_string(kind) or pyarrow.types.is_integer(kind)
    if len(columns) > 1 or not is_plain or columns[0].num_chunks != 1:
        return None
    codes: npt.NDArray[numpy.int32] = (
        columns[0].chunk(0).dictionary_encode(null_encoding="encode").indices.to_numpy()
    )
    return codes


def split_moved_updates(changes: Changes, locations: numpy.ndarray) -> Changes:
    """Split each update that moves a row to another location into a delete and an insert.

    `locations` has the location of each row. The images of an update are adjacent, with the same version and
    number.
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
        & (locations[:-1] != locations[1:])
    )
    count = int(moved.sum())
    if not count:
        return changes
    moved[1:] |= moved[:-1]
    split_kinds = pc.replace_with_mask(
        kinds, pyarrow.array(moved), pyarrow.array(["delete", "insert"] * count)
    )
    index = rows.schema.get_field_index("_change_type")
    return changes.with_rows(rows.set_column(index, rows.schema.field(index), split_kinds))


def puts(rows: pyarrow.Table | pyarrow.RecordBatch) -> pyarrow.ChunkedArray:
    """Return a mask of the rows that are written. The other rows are removed."""
    return pc.is_in(rows.column("_change_type"), value_set=pyarrow.array(PUTS))


def with_metadata(rows: pyarrow.RecordBatch, names: Sequence[str]) -> pyarrow.RecordBatch:
    """Return rows whose `_metadata` has only the named fields."""
    index = rows.schema.get_field_index("_metadata")
    metadata = rows.column(index)
    fields = [metadata.type.field(name) for name in names]
    # The `_metadata` struct itself is never null, so its fields can be copied with only their own nulls.
    kept = pyarrow.StructArray.from_arrays([pc.struct_field(metadata, name) for name in names], fields=fields)
    return rows.set_column(index, rows.schema.field(index).with_type(kept.type), kept)


class LastImages:
    """Buffers changes of one table, using about twice the memory of the last image of each key.

    The buffer is reduced to the last images after every `bytes_between` new bytes.
    """

    def __init__(self, target: Target, bytes_between: int = _BYTES_BETWEEN_REDUCTIONS) -> None:
        self.target = target
        self._bytes_between = bytes_between
        # The version at which the table was emptied, None if it was not.
        self.emptied: int | None = None
        self._parts: list[Changes] = []
        self._bytes_reduced = 0
        # The memory used, in bytes.
        self.bytes = 0

    def add(self, changes: Changes) -> None:
        """Add changes that have the same columns as the previous changes."""
        if self.emptied is not None:
            later = pc.greater(changes.rows.column("_commit_version"), self.emptied)
            changes = changes.with_rows(changes.rows.filter(later))
        if not len(changes):
            return
        self._parts.append(changes)
        self.bytes += changes.rows.nbytes
        bound = max(self._bytes_reduced, self._bytes_between)
        if self.target.primary_key and self.bytes - self._bytes_reduced >= bound:
            self._reduce()

    def empty(self, version: int) -> None:
        """Discard all changes so far, because the table was emptied.

        `version` is the version at which it was emptied. Rows of an earlier load that arrive later are
        dropped.
        """
        self.emptied = version
        self._parts, self._bytes_reduced, self.bytes = [], 0, 0

    def rows(self) -> pyarrow.Table | None:
        """Return the buffered rows, like `last_images`; None if there are none."""
        return last_images(self.target, self._parts) if self._parts else None

    def followed(self) -> "LastImages":
        """Return an empty buffer for the changes that follow."""
        successor = LastImages(self.target, self._bytes_between)
        successor.emptied = self.emptied
        return successor

    def _reduce(self) -> None:
        # Reduce each origin separately, because the order at equal versions depends on it.
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
    """Return the row indexes in commit order, None if the rows are already in order."""
    versions = rows.column("_commit_version").to_numpy()
    logged = numpy.repeat(
        numpy.array([part.origin is Origin.LOG for part in parts], numpy.int8), [len(part) for part in parts]
    )
    stepped = numpy.diff(versions)
    if not (stepped < 0).any() and not ((stepped == 0) & (numpy.diff(logged) < 0)).any():
        return None
    return numpy.lexsort((logged, versions))


def absent_lists(rows: pyarrow.RecordBatch) -> pyarrow.Array:
    """Return the lists of columns that the images of rows lack, null for complete images."""
    metadata = rows.column("_metadata")
    # A field ignores nulls of the whole struct.
    return pc.struct_field(metadata, "absent") if metadata.null_count else metadata.field("absent")


def refuse_partial(changes: Changes) -> None:
    """Raise ServerUnsupported if row images are missing columns, because null would be a wrong value for
    these columns.
    """
    absent = absent_lists(changes.rows)
    if absent.null_count < len(absent):
        raise ServerUnsupported(
            f"row images of {changes.source} lack columns, and the target would lose their values",
            hint="Set binlog_row_image=FULL on the source",
        )


def unrepresentable_counts(
    target: Target, rows: pyarrow.Table, chosen: pyarrow.ChunkedArray | None = None
) -> Counter[str]:
    """Count the values that a target's columns cannot represent, by "table.column".

    Counts all rows, or only the selected rows.
    """
    counts: Counter[str] = Counter()
    texts = pc.struct_field(rows.column("_metadata"), "unrepresentable")
    if texts.null_count == len(texts):
        return counts
    if chosen is not None:
        rows, texts = rows.filter(chosen), texts.filter(chosen)
    for name in target.column_names:
        if rows.column(name).null_count:
            count = pc.count(pc.map_lookup(texts, name, "first")).as_py()
            if count:
                counts[f"{target.name}.{name}"] = count
    return counts
