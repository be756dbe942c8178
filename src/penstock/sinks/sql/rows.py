# SPDX-License-Identifier: Apache-2.0
"""The code shared by sinks with SQL tables, for dividing, encoding and counting the rows of a part."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes, Target
from penstock.errors import SchemaChanged
from penstock.model import Column
from penstock.sinks.images import puts
from penstock.sinks.sink import Receipt, Writer

# The additional columns of a table that keeps every change.
FEED_COLUMNS = (
    Column("_change_type", "varchar(20)", "ascii", False),
    Column("_commit_version", "bigint", None, False),
    Column("_commit_timestamp", "timestamp(6)", None, False),
    Column("_row", "int", None, False),
)

# The number of rows that are encoded as text at once.
_ROWS_AT_ONCE = 16_384


@dataclass
class WriteCounts:
    """Counts written rows and bytes for the receipt."""

    tables: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    unrepresentable: dict[str, int] = field(default_factory=dict)
    columns_missing: dict[str, list[str]] = field(default_factory=dict)

    def add(self, changes: Changes) -> None:
        """Count changes."""
        name = str(changes.target.name)
        self.tables[name] = self.tables.get(name, 0) + len(changes)
        self.bytes += changes.rows.nbytes

    def count_lost(self, target: Target, column: str, values: int) -> None:
        """Count the values that the target's types cannot represent."""
        if values:
            name = f"{target.name}.{column}"
            self.unrepresentable[name] = self.unrepresentable.get(name, 0) + values

    def note_columns(self, target: Target, existing: Collection[str]) -> None:
        """Note which columns of the rows are missing from a table."""
        if absent := [name for name in target.column_names if name not in existing]:
            self.columns_missing[str(target.name)] = absent

    def receipt(self) -> Receipt:
        """Return the receipt of a writer."""
        return Receipt(
            sum(self.tables.values()),
            self.bytes,
            dict(self.tables),
            unrepresentable=dict(self.unrepresentable),
            columns_missing=dict(self.columns_missing),
        )


def refuse_other_key(target: Target, existing_key: Sequence[str]) -> None:
    """Raise SchemaChanged if a retained primary key does not fit the rows of a target.

    Such a key would treat two rows as one, or it has columns that the rows do not have.
    """
    own = set(target.primary_key)
    if existing_key and not (own and own <= set(existing_key) <= set(target.column_names)):
        raise SchemaChanged(
            f"the key of {target.name} became ({', '.join(target.primary_key)}), and the target's table keeps"
            f" ({', '.join(existing_key)})",
            hint="Set schema_changes: evolve; penstock run --dry-run shows what that does",
        )


def feed_target(target: Target) -> Target:
    """Return the table that keeps every change of a target, without a key."""
    columns = tuple(replace(column, nullable=True) for column in target.columns)
    return replace(target, columns=(*columns, *FEED_COLUMNS), primary_key=(), unique_keys=())


def feed_rows(rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return rows with the columns of `feed_target`, and `_metadata` as the last column."""
    row = pc.struct_field(rows.column("_metadata"), "row")
    return rows.append_column("_row", row)


def split_rows(batch: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """Yield rows in parts, each small enough to be encoded at once."""
    for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
        yield batch.slice(first, _ROWS_AT_ONCE)


def in_one_batch(rows: pyarrow.Table) -> pyarrow.RecordBatch:
    """Return a table's rows as one batch."""
    batches = rows.combine_chunks().to_batches()
    return batches[0] if batches else pyarrow.RecordBatch.from_pylist([], schema=rows.schema)


def runs(batch: pyarrow.RecordBatch) -> Iterator[tuple[bool, pyarrow.RecordBatch]]:
    """Yield runs of consecutive rows that are all written or all deleted, in order."""
    flags = puts(batch).to_numpy(zero_copy_only=False)
    ends = [*(numpy.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    first = 0
    for end in ends:
        if end > first:
            yield bool(flags[first]), batch.slice(first, end - first)
        first = end


def lanes(rows: pyarrow.Table, keys: list[list[str]], count: int) -> list[pyarrow.Table]:
    """Divide rows into lanes of similar size, so that rows in different lanes share no key value. Keeps the
    order of rows.

    A group consists of rows connected by key values. Groups are assigned to lanes by the position of their
    first row, so that rows close together in the target are mostly in one lane.
    """
    if count == 1 or rows.num_rows < count:
        return [rows]
    batch = in_one_batch(rows)
    groups = pyarrow.array(_native.key_groups(batch, keys)).to_numpy()
    sizes = numpy.bincount(groups)
    before = numpy.cumsum(sizes) - sizes
    lane = (before * count // batch.num_rows)[groups]
    # A large group shifts the following groups and may leave lanes empty.
    lane_rows = [rows.filter(pyarrow.array(lane == number)) for number in range(count)]
    return [lane_table for lane_table in lane_rows if lane_table.num_rows]


class SkippingWriter(Writer):
    """Handles a retried part that the target already contains: its rows are counted, not written."""

    def __init__(self) -> None:
        self._counts = WriteCounts()

    def write(self, changes: Changes) -> None:
        self._counts.add(changes)

    def finish(self) -> Receipt:
        return self._counts.receipt()
