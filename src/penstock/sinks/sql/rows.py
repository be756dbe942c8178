# SPDX-License-Identifier: Apache-2.0
"""What sinks with SQL tables have in common: the rows of a part as they are held, sorted and counted."""

from collections.abc import Iterator, Sequence
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

# The columns of a table that keeps every change, beside the source's own.
FEED_COLUMNS = (
    Column("_change_type", "varchar(20)", "ascii", False),
    Column("_commit_version", "bigint", None, False),
    Column("_commit_timestamp", "timestamp(6)", None, False),
    Column("_row", "int", None, False),
)

# So many rows become text at once.
_ROWS_AT_ONCE = 16_384


@dataclass
class Counted:
    """What came, for the receipt."""

    tables: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    unrepresentable: dict[str, int] = field(default_factory=dict)

    def add(self, changes: Changes) -> None:
        """Count changes."""
        name = str(changes.target.name)
        self.tables[name] = self.tables.get(name, 0) + len(changes)
        self.bytes += changes.rows.nbytes

    def lose(self, target: Target, column: str, values: int) -> None:
        """Count values that the target's types cannot hold."""
        if values:
            name = f"{target.name}.{column}"
            self.unrepresentable[name] = self.unrepresentable.get(name, 0) + values

    def receipt(self) -> Receipt:
        """Return what one writer did."""
        return Receipt(
            sum(self.tables.values()),
            self.bytes,
            dict(self.tables),
            unrepresentable=dict(self.unrepresentable),
        )


def refuse_other_key(target: Target, there: Sequence[str]) -> None:
    """Raise SchemaChanged where a primary key that stays would take two rows of a target for one, or is of
    columns that they lack."""
    own = set(target.primary_key)
    if there and not (own and own <= set(there) <= set(target.column_names)):
        raise SchemaChanged(
            f"the key of {target.name} became ({', '.join(target.primary_key)}), and the target's table keeps"
            f" ({', '.join(there)})",
            hint="Set schema_changes: evolve; penstock run --dry-run shows what that does",
        )


def feed_target(target: Target) -> Target:
    """Return the table that keeps every change of a target: no key, and columns that say when."""
    columns = tuple(replace(column, nullable=True) for column in target.columns)
    return replace(target, columns=(*columns, *FEED_COLUMNS), primary_key=(), unique_keys=())


def feed_rows(rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return rows with the columns of `feed_target`, and `_metadata` behind them."""
    row = pc.struct_field(rows.column("_metadata"), "row")
    return rows.append_column("_row", row)


def bounded(batch: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """Yield rows, as many at a time as may become text at once."""
    for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
        yield batch.slice(first, _ROWS_AT_ONCE)


def in_one_batch(rows: pyarrow.Table) -> pyarrow.RecordBatch:
    """Return a table's rows as one batch."""
    found = rows.combine_chunks().to_batches()
    return found[0] if found else pyarrow.RecordBatch.from_pylist([], schema=rows.schema)


def runs(batch: pyarrow.RecordBatch) -> Iterator[tuple[bool, pyarrow.RecordBatch]]:
    """Yield rows in their order, as long as they are all put, or all taken away."""
    flags = puts(batch).to_numpy(zero_copy_only=False)
    ends = [*(numpy.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    first = 0
    for end in ends:
        if end > first:
            yield bool(flags[first]), batch.slice(first, end - first)
        first = end


def lanes(rows: pyarrow.Table, keys: list[list[str]], count: int) -> list[pyarrow.Table]:
    """Divide rows into about equal lanes that share no value of a key with one another. Keeps their order.

    A group is a run of rows that are joined by values of keys; groups go to lanes by the place of their first
    row, so that rows that lie near one another in the target mostly are in one lane.
    """
    if count == 1 or rows.num_rows < count:
        return [rows]
    batch = in_one_batch(rows)
    groups = pyarrow.array(_native.key_groups(batch, keys)).to_numpy()
    sizes = numpy.bincount(groups)
    before = numpy.cumsum(sizes) - sizes
    lane = (before * count // batch.num_rows)[groups]
    # A large group moves those behind it up, and leaves lanes between empty.
    found = [rows.filter(pyarrow.array(lane == number)) for number in range(count)]
    return [one for one in found if one.num_rows]


class DoneWriter(Writer):
    """A part that is in the target already: what comes again is counted, and no more."""

    def __init__(self) -> None:
        self._counted = Counted()

    def write(self, changes: Changes) -> None:
        self._counted.add(changes)

    def finish(self) -> Receipt:
        return self._counted.receipt()
