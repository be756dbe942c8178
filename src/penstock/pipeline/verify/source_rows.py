# SPDX-License-Identifier: Apache-2.0
"""Determines which source rows a comparison reads, and divides them into ranges."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import ServerAddress
from penstock.pipeline.load.chunks import Chunk, bound_values, plan_chunks
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.watermark import Watermark
from penstock.pipeline.settings import PipelineSource

# Key types that every kind of target orders like the source.
_ORDERED = ("tinyint", "smallint", "mediumint", "int", "bigint", "date", "datetime", "timestamp")

Bound = Mapping[str, Any] | None


@dataclass(frozen=True)
class SourceTable:
    """A table of one source, as the source declares it. Can be pickled."""

    source: PipelineSource
    table: Target

    @property
    def key(self) -> tuple[str, str]:
        """The table's key: the names of its source and of the table."""
        return self.source.name, str(self.table.name)


@dataclass(frozen=True)
class SourceChunk:
    """Rows of a source table whose primary keys are in a range, from `low` (inclusive) to `high` (exclusive).
    Can be pickled.

    A bound of None is open. `watermark` is a log position before which every change is contained in the rows.
    `where` is the condition of the full load. Rows that do not satisfy it reach the target only when they
    change.
    """

    table: SourceTable
    chunk: Chunk
    watermark: Watermark
    low: Bound = None
    high: Bound = None
    where: str | None = None

    def rows(self, *, loaded: bool) -> Iterator[Changes]:
        """Yield the current rows: those that a full load reads, or all."""
        source, chunk = self.table.source, self.chunk
        watermark: Watermark | None = self.watermark
        if self.watermark.commit_ts is not None:
            # If there is a watermark or a planned time, a TiDB cluster is read as of that time.
            chunk, watermark = replace(chunk, commit_ts=None), None
        yield from read_chunk(
            address_of(source),
            self.table.table,
            chunk,
            instance=source.name,
            watermark=watermark,
            where=self.where if loaded else None,
        )

    def rows_in_range(self, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return the rows of the table whose key is in the range."""
        if self.low is None and self.high is None:
            return rows
        inside = numpy.ones(rows.num_rows, numpy.bool_)
        if self.low is not None:
            inside &= ~_before(rows, self.low)
        if self.high is not None:
            inside &= _before(rows, self.high)
        return rows.filter(pyarrow.array(inside))


def chunks_of(
    table: SourceTable, watermark: Watermark, rows: int, where: str | None, *, in_ranges: bool
) -> list[SourceChunk]:
    """Divide a table into chunks of about `rows` rows."""
    planned = plan_chunks(address_of(table.source), table.table, rows=rows)
    if not in_ranges or len(planned) == 1 or not all(is_range(table.table, chunk) for chunk in planned):
        return [SourceChunk(table, chunk, watermark, where=where) for chunk in planned]
    return [
        SourceChunk(table, chunk, watermark, *bound_values(table.table, chunk), where) for chunk in planned
    ]


def is_range(table: Target, chunk: Chunk) -> bool:
    """Return whether a chunk is a range of primary key values, and any target can select that range."""
    words = [table.column(name).type_text.lower().split("(")[0].split()[0] for name in chunk.key]
    return bool(chunk.key) and chunk.key == table.primary_key and all(word in _ORDERED for word in words)


def address_of(source: PipelineSource) -> ServerAddress:
    """Return the server whose tables are read. Raises OptionInvalid if only a log is known."""
    if source.server is None:
        raise OptionInvalid(
            f"the source {source.name} is a log: its tables cannot be read",
            hint="Name the server beside it: source: {server: mysql://user@host}",
        )
    return source.server


def _before(rows: pyarrow.RecordBatch, bound: Mapping[str, Any]) -> npt.NDArray[numpy.bool_]:
    """Return a mask of the rows whose key is before a bound."""
    less = numpy.zeros(rows.num_rows, numpy.bool_)
    equal = numpy.ones(rows.num_rows, numpy.bool_)
    for name, value in bound.items():
        column = rows.column(name)
        limit = pyarrow.scalar(value, column.type)
        less |= equal & _true(pc.less(column, limit))
        equal &= _true(pc.equal(column, limit))
    return less


def _true(condition: pyarrow.Array) -> npt.NDArray[numpy.bool_]:
    values: npt.NDArray[numpy.bool_] = pc.fill_null(condition, False).to_numpy(zero_copy_only=False)
    return values
