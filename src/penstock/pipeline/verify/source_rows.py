# SPDX-License-Identifier: Apache-2.0
"""Which rows of a source are read for a comparison, and how they are cut into ranges."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

# Types of a key that every kind of target orders as the source does.
_ORDERED = ("tinyint", "smallint", "mediumint", "int", "bigint", "date", "datetime", "timestamp")

Bound = Mapping[str, Any] | None


@dataclass(frozen=True)
class SourceTable:
    """A table of one source, as it is declared there. Pickles."""

    source: PipelineSource
    table: Target

    @property
    def key(self) -> tuple[str, str]:
        """What it is known by: the source's name, and the table's."""
        return self.source.name, str(self.table.name)


@dataclass(frozen=True)
class SourceChunk:
    """Rows of a source table, from `low` (inclusive) to `high` (exclusive) of its primary key, None for all.

    `watermark` is a place in the log of which the rows hold everything before. `where` is the condition of
    the full load: rows that it leaves out come into the target only once they change. Pickles.
    """

    table: SourceTable
    chunk: Chunk
    watermark: Watermark
    low: Bound = None
    high: Bound = None
    where: str | None = None

    def rows(self, *, loaded: bool) -> Iterator[Changes]:
        """Yield the rows as they are now; those that a full load takes, or all."""
        source = self.table.source
        yield from read_chunk(
            address_of(source),
            self.table.table,
            self.chunk,
            instance=source.name,
            watermark=self.watermark,
            where=self.where if loaded else None,
        )

    def held(self, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return those of the table's rows whose key is in the range."""
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
    """Cut a table into chunks of about `rows` rows; `in_ranges` gives them bounds that a target knows too.

    A table whose key a target may order in another way is cut for reading alone.
    """
    planned = plan_chunks(address_of(table.source), table.table, rows=rows)
    if not in_ranges or len(planned) == 1 or not all(is_range(table.table, one) for one in planned):
        return [SourceChunk(table, one, watermark, where=where) for one in planned]
    return [SourceChunk(table, one, watermark, *bound_values(table.table, one), where) for one in planned]


def is_range(table: Target, chunk: Chunk) -> bool:
    """Tell whether a chunk is a range of the primary key that any target finds."""
    words = [table.column(name).type_text.lower().split("(")[0].split()[0] for name in chunk.key]
    return bool(chunk.key) and chunk.key == table.primary_key and all(word in _ORDERED for word in words)


def address_of(source: PipelineSource) -> ServerAddress:
    """Return the server whose tables are read. Raises OptionInvalid where only a log is known."""
    if source.server is None:
        raise OptionInvalid(
            f"the source {source.name} is a log: its tables cannot be read",
            hint="Name the server beside it: source: {server: mysql://user@host}",
        )
    return source.server


def _before(rows: pyarrow.RecordBatch, bound: Mapping[str, Any]) -> npt.NDArray[numpy.bool_]:
    """Tell of each row whether its key is before a bound."""
    less = numpy.zeros(rows.num_rows, numpy.bool_)
    equal = numpy.ones(rows.num_rows, numpy.bool_)
    for name, value in bound.items():
        column = rows.column(name)
        limit = pyarrow.scalar(value, column.type)
        less |= equal & _true(pc.less(column, limit))
        equal &= _true(pc.equal(column, limit))
    return less


def _true(found: pyarrow.Array) -> npt.NDArray[numpy.bool_]:
    values: npt.NDArray[numpy.bool_] = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return values
