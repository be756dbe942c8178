# SPDX-License-Identifier: Apache-2.0
"""Writes a part of a batch into a DuckDB file, in one transaction with the batch's number.

The tables have no keys: rows are replaced by deleting those with the keys of the batch and inserting the new
ones, in two statements for each table.
"""

from typing import TYPE_CHECKING

import pyarrow

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import TableName
from penstock.sinks.duckdb.database import Database, quoted, translate_errors
from penstock.sinks.images import LastImages, puts, refuse_partial, unrepresentable_counts
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.table_sink import Mode
from penstock.sinks.sink import HINT_GONE, BatchMark, Receipt, Writer, applications_of
from penstock.sinks.sql.row_buffer import RowBuffer
from penstock.sinks.sql.rows import WriteCounts

if TYPE_CHECKING:
    from penstock.sinks.duckdb.sink import DuckdbSink


class DuckdbWriter(Writer):
    """One part of one batch."""

    def __init__(self, sink: "DuckdbSink", database: Database, mark: BatchMark, part: int) -> None:
        self._sink = sink
        self._database = database
        self._mark = mark
        self._part = part
        self._counted = WriteCounts()
        self._buffered = RowBuffer(sink.settings.held_bytes, self._write_images, feed=False)
        # The columns of each table that was written.
        self._schemas: dict[Target, pyarrow.Schema] = {}
        database.run("BEGIN")

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            self._counted.add(changes)
            if self._sink.mode is Mode.FEED:
                rows = pyarrow.Table.from_batches([changes.rows])
                self._count_lost(changes.target, rows)
                self._insert(changes.target, rows)
                return
            refuse_partial(changes)
            self._buffered.add(changes)
        if self._buffered.is_full():
            self._write_all()

    def empty(self, target: Target, version: int) -> None:
        if self._sink.mode is Mode.FEED:
            return
        self._buffered.empty(target, version)
        with self.working_on(target.name), self._sink.translate_errors(target):
            self._schema(target)
            self._database.run(f"DELETE FROM {self._database.name_of(target.name)}")

    def finish(self) -> Receipt:
        self._write_all()
        with translate_errors(self._database.path):
            numbers = {
                self._mark.application: self._mark.number,
                applications_of(self._mark.pipeline): self._mark.number,
            }
            self._database.store_numbers(numbers, self._part, self._tables())
            self._database.run("COMMIT")
        self._database.close()
        return self._counted.receipt()

    def abort(self) -> None:
        self._buffered.clear()
        self._database.close()

    def _write_all(self) -> None:
        for target, images in self._buffered.take().items():
            with self.working_on(target.name):
                self._write_images(target, images)

    def _write_images(self, target: Target, images: LastImages) -> None:
        rows = images.rows()
        if rows is None or not rows.num_rows:
            return
        check_keys(images.target, rows)
        self._delete(images.target, rows)
        written = rows.filter(puts(rows))
        self._count_lost(target, written)
        self._insert(target, written)

    def _delete(self, target: Target, rows: pyarrow.Table) -> None:
        schema = self._schema(target)
        key = target.primary_key
        # A zero date in a key is null.
        same = " AND ".join(f"t.{quoted(name)} IS NOT DISTINCT FROM s.{quoted(name)}" for name in key)
        keys = stored_rows(rows, pyarrow.schema([schema.field(name) for name in key]))
        with self._sink.translate_errors(target):
            table = self._database.name_of(target.name)
            self._database.run(f"DELETE FROM {table} AS t USING incoming AS s WHERE {same}", rows=keys)

    def _insert(self, target: Target, rows: pyarrow.Table) -> None:
        if not rows.num_rows:
            return
        stored = stored_rows(rows, self._schema(target))
        names = ", ".join(map(quoted, stored.schema.names))
        with self._sink.translate_errors(target):
            table = self._database.name_of(target.name)
            self._database.run(f"INSERT INTO {table} ({names}) SELECT {names} FROM incoming", rows=stored)

    def _schema(self, target: Target) -> pyarrow.Schema:
        """Return the columns of a target's table."""
        if target not in self._schemas:
            with self._sink.translate_errors(target):
                schema = self._database.columns_of(target.name, target.column_names)
            if schema is None:
                raise OptionInvalid(f"the table {self._sink.location(target)} is gone", hint=HINT_GONE)
            self._schemas[target] = schema
            self._counted.note_columns(target, schema.names)
        return self._schemas[target]

    def _tables(self) -> list[TableName]:
        """Return the tables that were written, each once."""
        return list(dict.fromkeys(target.name for target in self._schemas))

    def _count_lost(self, target: Target, rows: pyarrow.Table) -> None:
        for name, count in unrepresentable_counts(target, rows).items():
            lost = self._counted.unrepresentable
            lost[name] = lost.get(name, 0) + count
