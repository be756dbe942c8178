# SPDX-License-Identifier: Apache-2.0
"""Reads the log of one source after a pipeline's position, and continues as the log grows."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import ServerBehind
from penstock.limits import OFFSET_MAX
from penstock.model import Position, TableName, TablePatterns
from penstock.pipeline.load.watermark import Watermark, take_watermark
from penstock.pipeline.settings import PipelineSource
from penstock.pipeline.verify.source_rows import address_of
from penstock.schema.history import SchemaHistory
from penstock.schema.server_tables import ServerTables
from penstock.source.bounds import Bounds
from penstock.source.kept import KeptSource
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import Batch, LoggedStatement, Schemas, Selection, read_in_order
from penstock.source.source import Source, SourceOptions, open_source, place_of
from penstock.source.spelling import spelling_of

# How long to wait for a copied log to receive what its server has logged.
_KEPT_LOG_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.1


class LogReader:
    """Reads the changes that a source has logged for some of its tables, from an offset of the pipeline to
    the end of the log.

    `position` is the position up to which the log was read. `redefined` maps tables that were emptied or
    redefined to the reason and position, and `first_versions` maps tables to the lowest commit version of
    their changes. Holds the source open until `close`.
    """

    def __init__(
        self, source: PipelineSource, offset: Mapping[str, Any], tables: Mapping[TableName, Target]
    ) -> None:
        self.redefined: dict[TableName, str] = {}
        self.first_versions: dict[TableName, int] = {}
        self._settings = source
        self._tables = dict(tables)
        # The log and the catalogue may describe a type differently, so compare the Arrow types.
        self._types = {
            name: {column.name: column.type for column in table.arrow()} for name, table in tables.items()
        }
        self.position = position_of(offset)
        self._source = open_source(options_at(source, self.position, str(offset.get("server_key") or "")))
        self._gtid_after = str(offset.get("gtid_set") or "") if offset.get("by_set") else None
        self._schemas = _schemas(source, self._source)
        self._selection = TablePatterns([name.sql for name in self._tables])

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def moment(self) -> Position:
        """Return a log position. Rows read from now on contain every transaction before it."""
        watermark = take_watermark(address_of(self._settings), epoch=self._source.head().epoch)
        # Everything in the log of a TiDB cluster was committed, so every later read of the cluster includes
        # it.
        return watermark.position if watermark.commit_ts is None else self._source.head()

    def head(self) -> Position:
        """Return a position after every transaction whose changes may be in the rows read so far.

        Waits for a copied log that is behind its server. Raises ServerBehind if it does not catch up.
        """
        if self._source.live:
            return self._source.head()
        boundary = take_watermark(address_of(self._settings), epoch=self._source.head().epoch)
        deadline = time.monotonic() + _KEPT_LOG_SECONDS_MAX
        while True:
            has_all, head = self._has_all_before(boundary)
            if has_all:
                return head
            if time.monotonic() > deadline:
                raise ServerBehind(
                    f"the log of {self._settings.name} ends before what its server has logged",
                    position=str(head),
                    hint="Is it still written? `penstock status` tells; or name the server as the source",
                )
            time.sleep(_POLL_SECONDS)

    def _has_all_before(self, boundary: Watermark) -> tuple[bool, Position]:
        """Return whether the log has everything before a watermark, and the log's end."""
        if boundary.commit_ts is None:
            head = self._source.head()
            return place_of(head) >= place_of(boundary.position), head
        merged_ts = self._source.merged_ts() if isinstance(self._source, KeptSource) else None
        # Query the end of the log after the timestamp, so that the end covers the timestamp.
        return merged_ts is not None and merged_ts >= boundary.commit_ts, self._source.head()

    def skip(self) -> None:
        """Skip, without reading, to a position. Rows read from now on contain everything before it."""
        self.position = self.moment()

    def read(self, end: Position | None = None) -> Iterator[Changes]:
        """Yield the changes up to a position, by default up to the head, in commit order within each table.

        A table that was redefined or emptied before that position is recorded in `redefined`: its earlier
        rows cannot be derived from the log. Changes under another definition are left out.
        """
        end = self.head() if end is None else end
        if place_of(end) <= place_of(self.position):
            return
        bounds = Bounds(gtid_after=self._gtid_after)
        for byte_range in self._source.split(self.position, end, range_bytes=OFFSET_MAX):
            selection = Selection(self._selection, bounds=bounds)
            for event in read_in_order(self._source, byte_range, selection, self._schemas):
                if isinstance(event, LoggedStatement):
                    for name in self._tables.keys() & (event.tables | event.emptied):
                        self.redefined[name] = f"{event.position}: {event.text[:100]}"
                elif len(event):
                    yield from self._changes(event)
        self.position = end

    def _changes(self, batch: Batch) -> Iterator[Changes]:
        name = TableName.parse(batch.table)
        rows = batch.to_arrow()
        types = {field.name: field.type for field in rows.schema if field.name not in SYSTEM_COLUMNS}
        if types != self._types[name]:
            self.redefined.setdefault(name, f"{batch.position}: rows with other columns")
        else:
            # The log is in commit order, so the first change of a table has the lowest version.
            self.first_versions.setdefault(name, rows.column("_commit_version")[0].as_py())
            yield Changes(self._tables[name], rows, name)


def position_of(offset: Mapping[str, Any]) -> Position:
    """Return the position of an offset from a pipeline's state."""
    return Position(int(offset.get("epoch", 0)), str(offset["file"]), int(offset["offset"]))


def options_at(source: PipelineSource, position: Position, server_key: str) -> SourceOptions:
    """Return the options to open a source in the epoch of an offset."""
    if source.options.is_kept:
        return replace(source.options, epochs=((position.epoch, server_key),) if server_key else ())
    return replace(source.options, epoch=position.epoch, server_key=server_key or None)


def _schemas(source: PipelineSource, opened: Source) -> Schemas | None:
    """Return the source of table definitions that the log does not contain."""
    if source.schemas is not None:
        return SchemaHistory.from_file(Path(source.schemas), spelling=spelling_of(opened))
    if opened.options.is_kept:
        return LoggedTables(opened)
    return SchemaHistory(reread=ServerTables(source.server)) if source.server is not None else None
