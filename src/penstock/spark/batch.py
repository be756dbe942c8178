# SPDX-License-Identifier: Apache-2.0
"""`spark.read.format("penstock")`: byte ranges are planned on the driver and decoded on the executors."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.errors import OptionInvalid
from penstock.model import TablePatterns
from penstock.source.bounds import Bound, Bounds, locate
from penstock.source.offsets import EARLIEST, LATEST
from penstock.source.read_settings import TYPED, ReadSettings
from penstock.source.source import Source, open_source, shown_tables
from penstock.source.tracking import TrackedSchemas
from penstock.spark.narrowing import Narrowing
from penstock.spark.options import bound_of
from penstock.spark.partition import Decoding, EmptyPartition, NarrowedTables, RangePartition, read_partition
from penstock.spark.schema import TableShape


def batch_bounds(source: Source, settings: ReadSettings) -> Bounds:
    """Return the bounds of a batch read, by default from the earliest position to the current head."""
    if settings.start == LATEST:
        raise OptionInvalid(
            "startingOffsets latest leaves a batch read nothing to read",
            hint="Use earliest, a position, a GTID set, or startingTimestamp",
        )
    if settings.end == EARLIEST:
        raise OptionInvalid(
            "endingOffsets earliest leaves nothing to read", hint="Use latest, or leave it out"
        )
    bounds = locate(source, bound_of(settings.start), bound_of(settings.end))
    if settings.is_live and bounds.end is None:
        # The plan is made once, so that every task agrees on the end of the log.
        bounds = replace(bounds, end=source.head())
    return bounds


class BatchReader(DataSourceReader):
    """Plans on the driver, and reads on executors. Can be pickled with all of its state."""

    def __init__(self, settings: ReadSettings, shape: TableShape | None) -> None:
        self._settings = settings
        self._shape = shape
        self._narrowing = Narrowing()
        self._conditions: tuple[Any, ...] = ()

    def partitions(self) -> Sequence[InputPartition]:
        """Split the selected part of the log into byte ranges, based on a listing only."""
        settings, narrowing = self._settings, self._narrowing
        with closing(open_source(settings.source)) as source:
            bounds = batch_bounds(source, settings)
            if narrowing.time_min_us is not None and bounds.start is None:
                bounds = replace(
                    bounds, start=locate(source, Bound(time_us=narrowing.time_min_us), None).start
                )
            ranges = source.split(bounds.start, bounds.end, settings.ranges_min, settings.range_bytes)
            tracked = TrackedSchemas.open(settings, ranges[0].position if ranges else None)
            if tracked is not None:
                tracked.advance(source, ranges)
            decoding = self._decoding(bounds, shown_tables(source, settings.tables))
        planned: list[InputPartition] = [
            RangePartition(
                settings.source, byte_range, decoding, tracked.at(byte_range.position) if tracked else None
            )
            for byte_range in ranges
            if narrowing.keeps(byte_range)
        ]
        # For an empty plan, Spark would create a task with its own kind of partition.
        return planned or [EmptyPartition()]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Decode one range."""
        return read_partition(partition)

    def _decoding(self, bounds: Bounds, tables: TablePatterns) -> Decoding:
        settings, narrowing = self._settings, self._narrowing
        low, high = bounds.time_from_us, bounds.time_until_us
        if narrowing.time_min_us is not None:
            low = narrowing.time_min_us if low is None else max(low, narrowing.time_min_us)
        if narrowing.time_max_us is not None:
            high = narrowing.time_max_us + 1 if high is None else min(high, narrowing.time_max_us + 1)
        if narrowing.databases is not None or narrowing.tables is not None:
            tables = NarrowedTables(tables, narrowing.databases, narrowing.tables)
        return Decoding(
            mode=settings.mode,
            tables=tables,
            columns=settings.columns,
            declared=self._shape.columns if self._shape is not None and settings.mode == TYPED else None,
            changes=narrowing.changes,
            bounds=replace(bounds, time_from_us=low, time_until_us=high),
            conditions=self._conditions,
        )
