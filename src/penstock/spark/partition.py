# SPDX-License-Identifier: Apache-2.0
"""One Spark task: a byte range, and everything that an executor needs to decode it."""

import functools
import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from penstock.limits import SPARK_BATCH_BYTES_MAX
from penstock.model import Column, TablePatterns
from penstock.source.bounds import Bounds
from penstock.source.read_settings import ENVELOPE
from penstock.source.reading import Selection, read_range
from penstock.source.source import ByteRange, SourceOptions, open_source
from penstock.source.tracking import known_schemas

# Arrow writes the bitmaps of a slice without copying if the slice starts at a byte boundary of the bitmaps.
_ROWS_ALIGNED = 8


class NarrowedTables(TablePatterns):
    """Table patterns that are narrowed further by filters on `_metadata`. `databases` or `tables` of None do
    not narrow. Can be pickled.
    """

    def __init__(
        self, patterns: TablePatterns, databases: frozenset[str] | None, tables: frozenset[str] | None
    ) -> None:
        super().__init__(list(patterns.include) or None, list(patterns.exclude) or None)
        self.databases = databases
        self.tables = tables

    def matches(self, database: str, table: str) -> bool:
        """Return whether rows of the table can pass."""
        if self.databases is not None and database not in self.databases:
            return False
        if self.tables is not None and table not in self.tables:
            return False
        return super().matches(database, table)


@dataclass(frozen=True)
class Decoding:
    """The decoding parameters shared by every range of one read. Can be pickled.

    `columns`, `declared` and `conditions` apply to typed rows only. `changes` is a subset of CHANGE_TYPES,
    None for all. `conditions` contains Spark's filters for `row_conditions`; a row must satisfy all of them.
    """

    mode: str
    tables: TablePatterns
    columns: tuple[str, ...] | None = None
    declared: tuple[Column, ...] | None = None
    changes: tuple[str, ...] | None = None
    bounds: Bounds = field(default_factory=Bounds)
    conditions: tuple[Any, ...] = ()


class RangePartition(InputPartition):
    """A byte range of a source. `history` is the schema history in force at the range's start, as JSON
    values.
    """

    def __init__(
        self,
        source: SourceOptions,
        byte_range: ByteRange,
        decoding: Decoding,
        history: dict[str, Any] | None = None,
    ) -> None:
        self.source = source
        self.byte_range = byte_range
        self.decoding = decoding
        self.history = history

    def __repr__(self) -> str:
        return f"RangePartition({self.source.instance}, {self.byte_range})"


class EmptyPartition(InputPartition):
    """A partition without data, for the task that Spark runs for an empty plan."""

    def __init__(self) -> None:
        super().__init__(None)


def read_partition(partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of one task. Raises errors of the module `penstock.errors`, with their position."""
    if not isinstance(partition, RangePartition):
        return
    if TaskContext.get() is not None:
        _spare_loaded_modules()
    decoding = partition.decoding
    with closing(open_source(partition.source)) as source:
        schemas = known_schemas(source.options, partition.history)
        selection = Selection(decoding.tables, decoding.columns, decoding.changes, decoding.bounds)
        for batch in read_range(
            source,
            partition.byte_range,
            selection,
            schemas,
            emit=decoding.mode,
            declared=None if decoding.mode == ENVELOPE else decoding.declared,
            batch_bytes_max=SPARK_BATCH_BYTES_MAX,
        ):
            rows = _passing(batch.to_arrow(), decoding.conditions)
            if rows.num_rows:
                yield from pieces(rows)


def _passing(rows: pyarrow.RecordBatch, conditions: tuple[Any, ...]) -> pyarrow.RecordBatch:
    if not conditions:
        return rows
    # PySpark 4.0 has no filters.
    from penstock.spark.row_conditions import passing

    return passing(rows, conditions)


@functools.cache
def _spare_loaded_modules() -> None:
    """Exclude the objects loaded so far from garbage collection, once per worker.

    Spark's worker collects garbage after each task and traverses the objects of every loaded module: about 36
    ms, as much as decoding 40,000 wide rows. Reference counting still frees unused objects.
    """
    gc.freeze()


def pieces(batch: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a batch in slices of about SPARK_BATCH_BYTES_MAX, without copying.

    A batch closes at the end of a transaction, so only a large transaction makes a batch that is large enough
    to slice.
    """
    piece_count = batch.nbytes // SPARK_BATCH_BYTES_MAX
    if piece_count <= 1:
        yield batch
        return
    rows = max(batch.num_rows // piece_count // _ROWS_ALIGNED, 1) * _ROWS_ALIGNED
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)
