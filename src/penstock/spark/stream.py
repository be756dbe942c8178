# SPDX-License-Identifier: Apache-2.0
"""`spark.readStream.format("penstock")`: a stream whose batches contain complete transactions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow
import structlog
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from penstock.errors import OptionInvalid
from penstock.source.bounds import Bound
from penstock.source.kept_stream_log import KeptStreamLog
from penstock.source.offsets import Offset
from penstock.source.read_settings import TYPED, ReadSettings
from penstock.source.source import place_of, shown_tables
from penstock.source.stream_log import StreamLog
from penstock.source.tracking import TrackedSchemas
from penstock.spark.partition import Decoding, EmptyPartition, RangePartition, read_partition
from penstock.spark.schema import TableShape

_log = structlog.get_logger(__name__)


class StreamReader(DataSourceStreamReader):
    """Plans offsets on the driver, and decodes on executors.

    A batch ends at a transaction boundary. If it is planned again, it covers the same transactions. Only the
    settings are pickled; sessions stay on the driver. How Spark asks for the end of a batch depends on its
    version: see `admission` and `self_paced`.
    """

    def __init__(self, settings: ReadSettings, shape: TableShape | None) -> None:
        if settings.end is not None:
            raise OptionInvalid(
                "endingOffsets and endingTimestamp are for batch reads",
                hint="End a stream with .trigger(availableNow=True)",
            )
        self._settings = settings
        self._shape = shape
        self._log: StreamLog | None = None
        self._tracked: TrackedSchemas | None = None
        self._first: dict[str, Any] | None = None
        self._target: Offset | None = None
        self._seen: Offset | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_log": None, "_tracked": None}

    @property
    def _driver_log(self) -> StreamLog:
        kind = KeptStreamLog if self._settings.source.is_kept else StreamLog
        self._log = self._log or kind(self._settings)
        return self._log

    def initialOffset(self) -> dict[str, Any]:
        """Return where a stream without a checkpoint starts; see `StreamLog.first`.

        Spark asks more than once before the first batch, while the end of a busy server's log advances. The
        first answer is cached.
        """
        self._first = self._first or self._driver_log.first().to_json()
        return self._first

    def end_of_batch(self, start: dict[str, Any], *, takes_all: bool) -> dict[str, Any]:
        """Return the end of the batch that begins at `start`: the head, reduced by the limits.

        Returns `start` itself if there is nothing new. Propagates errors from `StreamLog.resume`.
        """
        log = self._driver_log
        begin = Offset.from_json(start)
        resumed = log.resume(begin)
        head = log.head_behind(resumed)
        self._seen = head
        if self._target is not None:
            if not log.has(self._target, resumed):
                # A different server answers. Its positions cannot be compared with the target, so choose a
                # new target.
                self._target = log.target()
                _log.warning("the run now ends at another server's log", target=str(self._target))
            head = log.up_to(head, self._target, resumed)
        moved = resumed.position.epoch != begin.position.epoch
        if place_of(head.position) <= place_of(resumed.position):
            return resumed.to_json() if moved else start
        return (log.unlimited if takes_all else log.limited)(resumed, head).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split a batch into byte ranges, based on a listing only."""
        source, ranges, bounds = self._driver_log.plan(Offset.from_json(start), Offset.from_json(end))
        if isinstance(self._settings.start, Bound):
            bounds = replace(bounds, time_from_us=self._settings.start.time_us)
        if self._tracked is None and ranges:
            self._tracked = TrackedSchemas.open(self._settings, ranges[0].position)
        if self._tracked is not None:
            self._tracked.advance(source, ranges)
        decoding = Decoding(
            mode=self._settings.mode,
            tables=shown_tables(source, self._settings.tables),
            columns=self._settings.columns,
            declared=self._shape.columns
            if self._shape is not None and self._settings.mode == TYPED
            else None,
            bounds=bounds,
        )
        planned: list[InputPartition] = [
            RangePartition(
                source.options,
                byte_range,
                decoding,
                self._tracked.at(byte_range.position) if self._tracked else None,
            )
            for byte_range in ranges
        ]
        return planned or [EmptyPartition()]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Decode one range. Runs on executors, without the driver's state."""
        return read_partition(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: no state is kept per batch."""

    def stop(self) -> None:
        """End the driver's sessions."""
        if self._log is not None:
            self._log.close()
            self._log = None
