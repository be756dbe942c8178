# SPDX-License-Identifier: Apache-2.0
"""Writes one part of a batch to PostgreSQL, in one transaction that also stores the batch number.

Rows that are new in the source are copied into the target table. Other rows are copied into a temporary
table, from which one statement merges them into the target table. After a batch, no two source rows share a
unique value. A target row that conflicts with a written row is therefore outdated and is deleted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Target
from penstock.errors import (
    ConnectionLost,
    PenstockError,
    ServerBusy,
    ServerUnsupported,
    TransientError,
    ValueMalformed,
)
from penstock.model import TableName
from penstock.retry import Backoff, Retry
from penstock.sinks.images import LastImages, puts
from penstock.sinks.postgres.connection import COPY_REFUSED, DUPLICATE, Session, sqlstate_of
from penstock.sinks.postgres.tables import Layout, layout_of, names_sql, quoted, table_sql
from penstock.sinks.sink import HINT_GONE, BatchMark, Receipt
from penstock.sinks.sql.rows import in_one_batch, runs, split_rows
from penstock.sinks.sql.sql_sink import SqlWriter, table_missing

# About 0.8 seconds of pauses in all.
_TRIES_MAX = 5
_BACKOFF = Backoff(first=0.05)
# If at least this many rows are staged, ANALYZE is run, so that the planner knows their number.
_ROWS_ANALYZED = 1000
# The number of rows that are encoded at once, of the many that a COPY sends.
_ROWS_ENCODED = 1024
_STAGE = "pg_temp.penstock_stage"
_SAVEPOINT = "penstock_copy"


@dataclass(frozen=True)
class WriterOptions:
    """Options for writing a part; see the sink's settings. A `truncate` runs inside the transaction."""

    positions: TableName
    held_bytes: int = 64 << 20
    feed: bool = False
    truncate: bool = False


class PostgresWriter(SqlWriter):
    """Writes one part of one batch."""

    def __init__(
        self, connect: Callable[[], Session], options: WriterOptions, mark: BatchMark, part: int
    ) -> None:
        super().__init__(options.held_bytes, feed=options.feed)
        self._connect = connect
        self._options = options
        self._mark = mark
        self._part = part
        self._session = connect()
        # The jobs of the open transaction, for a replay if the server ends it; None if they are too large to
        # keep.
        self._replay_log: list[Callable[[], None]] | None = []
        self._replay_bytes = 0
        self._claimed = False
        # Whether copying rows that are new in the source into their table has failed.
        self._copy_failed = False
        self._layouts: dict[TableName, Layout] = {}

    def empty(self, target: Target, version: int) -> None:
        if self._options.feed:
            return
        self._buffered.empty(target, version)
        verb = "TRUNCATE" if self._options.truncate else "DELETE FROM"
        with self.working_on(target.name):
            self._run_job(lambda: self._run(f"{verb} {table_sql(target.name)}"), 0)

    def finish(self) -> Receipt:
        self._write_all()
        self._run_job(self._store_number, 0)
        if self._claimed:
            self._session.commit()
        self._session.close()
        return self._counted.receipt()

    def abort(self) -> None:
        self._buffered.clear()
        self._session.close()

    # --- The transaction --------------------------------------------------------------------

    def _run_job(self, job: Callable[[], None], size: int) -> None:
        """Run a job in the transaction, and replay the whole transaction if the server ended it."""
        self._replay_bytes += size
        if self._replay_bytes > 2 * self._options.held_bytes:
            # The transaction is too large to keep. A failure now fails the attempt, and the batch is retried.
            self._replay_log = None
        if self._replay_log is None:
            job()
            return
        retry = Retry("repeating a transaction", backoff=_BACKOFF, tries=_TRIES_MAX)
        while True:
            try:
                if retry.failures:
                    self._session.close()
                    self._session = self._connect()
                    self._replay(self._replay_log)
                job()
                break
            except (ServerBusy, ConnectionLost) as problem:
                retry.wait(problem)
        self._replay_log.append(job)

    @staticmethod
    def _replay(jobs: Sequence[Callable[[], None]]) -> None:
        for job in jobs:
            try:
                job()
            except TransientError:
                raise
            except PenstockError as problem:
                # This job is being replayed, so its error must not be blamed on the table being written.
                raise ServerBusy(
                    f"what was written before the server ended its transaction is refused now: {problem}",
                    hint="The batch is tried again",
                ) from problem

    def _run(self, sql: str) -> None:
        self._session.run(sql)

    def _store_number(self) -> None:
        # If this process was considered dead, another process may have received the same part. One of the two
        # processes waits at this statement for the other, and then does not commit.
        stored = self._session.run(
            f"INSERT INTO {table_sql(self._options.positions)} AS p (application, part, number)"
            " VALUES (%s, %s, %s) ON CONFLICT (application, part) DO UPDATE SET number = EXCLUDED.number,"
            " written = now() WHERE p.number < EXCLUDED.number RETURNING number",
            (self._mark.application, self._part, self._mark.number),
        )
        self._claimed = bool(stored)

    # --- Writing ----------------------------------------------------------------------------

    def _write_held(self, target: Target, images: LastImages) -> None:
        rows = images.rows()
        if rows is None or not rows.num_rows:
            return
        key = images.target.primary_key
        layout = self._layout(target)
        columns = [
            name for name in target.column_names if name in layout.columns and name not in layout.generated
        ]
        if self._options.feed:
            batch = in_one_batch(rows)
            self._count_lost(target, batch, columns)
            self._run_job(lambda: self._copy(table_sql(target.name), batch, columns), rows.nbytes)
        elif not key:
            batch = in_one_batch(rows)
            self._count_lost(target, batch, columns)
            self._run_job(lambda: self._write_in_order(target, batch, columns), rows.nbytes)
        else:
            is_put = puts(rows)
            deleted = in_one_batch(rows.filter(pc.invert(is_put)))
            written = in_one_batch(rows.filter(is_put))
            self._count_lost(target, written, columns)
            self._run_job(
                lambda: self._merge_images(target, key, deleted, written, columns, layout), rows.nbytes
            )

    def _count_lost(self, target: Target, batch: pyarrow.RecordBatch, columns: Sequence[str]) -> None:
        texts = pc.struct_field(batch.column("_metadata"), "unrepresentable")
        for name in columns:
            kind = batch.schema.field(name).type
            column = batch.column(name)
            if texts.null_count < len(texts):
                is_lost = pc.is_valid(pc.map_lookup(texts, name, "first"))
                self._counted.count_lost(target, name, pc.sum(is_lost).as_py() or 0)
            if pyarrow.types.is_string(kind):
                has_zero_byte = pc.fill_null(pc.match_substring(column, "\0"), False)
                self._counted.count_lost(target, name, pc.sum(has_zero_byte).as_py() or 0)

    def _merge_images(
        self,
        target: Target,
        key: tuple[str, ...],
        deleted: pyarrow.RecordBatch,
        written: pyarrow.RecordBatch,
        columns: list[str],
        layout: Layout,
    ) -> None:
        table = table_sql(target.name)
        if deleted.num_rows:
            with_stage = self._stage(table, deleted, key)
            self._session.run(f"DELETE FROM {table} t USING {with_stage} s WHERE {_same(key)}")
        single = key in layout.keys.values()
        if single and not self._copy_failed:
            is_new = pc.equal(written.column("_change_type"), "insert")
            self._merge_written(target, key, written.filter(pc.invert(is_new)), columns, layout)
            written = self._copy_new(table, written.filter(is_new), columns)
        self._merge_written(target, key, written, columns, layout)

    def _copy_new(self, table: str, rows: pyarrow.RecordBatch, columns: Sequence[str]) -> pyarrow.RecordBatch:
        """Write inserted rows by COPY, and return the rows that the table does not accept.

        Copying costs the target much less than merging. A row can exist already only after a retry, if a full
        load was ahead of the log, or if the same batch deletes and inserts a key.
        """
        copied = 0
        for share in split_rows(rows):
            self._session.run(f"SAVEPOINT {_SAVEPOINT}")
            try:
                self._copy(table, share, columns)
            except (ValueMalformed, ServerUnsupported) as problem:
                if sqlstate_of(problem) not in (DUPLICATE, COPY_REFUSED):
                    raise
                self._session.run(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
                self._copy_failed = True
                break
            self._session.run(f"RELEASE SAVEPOINT {_SAVEPOINT}")
            copied += share.num_rows
        return rows.slice(copied)

    def _merge_written(
        self,
        target: Target,
        key: tuple[str, ...],
        written: pyarrow.RecordBatch,
        columns: list[str],
        layout: Layout,
    ) -> None:
        """Write rows, replacing all rows that share a unique value with them."""
        if not written.num_rows:
            return
        table = table_sql(target.name)
        stage = self._stage(table, written, columns)
        single = key in layout.keys.values()
        for unique_key in layout.keys.values():
            if unique_key != key and set(unique_key) <= set(columns):
                # Rows with the same primary key are updated below.
                differs = f" AND ({_named('t', key)}) IS DISTINCT FROM ({_named('s', key)})" if single else ""
                self._session.run(f"DELETE FROM {table} t USING {stage} s WHERE {_same(unique_key)}{differs}")
        names = names_sql(columns)
        insert = f"INSERT INTO {table} ({names}) SELECT {names} FROM {stage}"
        if single:
            other_columns = [name for name in columns if name not in key]
            updates = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in other_columns)
            action = f"DO UPDATE SET {updates}" if updates else "DO NOTHING"
            self._session.run(f"{insert} ON CONFLICT ({names_sql(key)}) {action}")
        else:
            self._session.run(f"DELETE FROM {table} t USING {stage} s WHERE {_same(key)}")
            self._session.run(insert)

    def _write_in_order(self, target: Target, rows: pyarrow.RecordBatch, columns: list[str]) -> None:
        """Write rows of a table without a key. Each delete removes only one of several equal rows."""
        table = table_sql(target.name)
        for is_put, run_rows in runs(rows):
            if is_put:
                self._copy(table, run_rows, columns)
                continue
            stage = self._stage(table, run_rows, columns)
            existing, staged = (
                f"ROW({_named('t', columns)})::text",
                f"ROW({_named('s', columns)})::text",
            )
            self._session.run(
                f"DELETE FROM {table} WHERE ctid = ANY (ARRAY(SELECT m.place FROM ("
                f"SELECT t.ctid AS place, g.count, row_number() OVER (PARTITION BY g.row_text) AS number"
                f" FROM {table} t JOIN (SELECT {staged} AS row_text, count(*) FROM {stage} s GROUP BY 1) g"
                f" ON {existing} = g.row_text) m WHERE m.number <= m.count))"
            )

    def _stage(self, table: str, rows: pyarrow.RecordBatch, columns: Sequence[str]) -> str:
        """Return a temporary table with rows, which exists until the next call or the transaction's end."""
        self._session.run(f"DROP TABLE IF EXISTS {_STAGE}")
        self._session.run(
            "CREATE TEMPORARY TABLE penstock_stage ON COMMIT DROP AS"
            f" SELECT {names_sql(columns)} FROM {table} WITH NO DATA"
        )
        self._copy(_STAGE, rows, columns)
        if rows.num_rows >= _ROWS_ANALYZED:
            self._session.run(f"ANALYZE {_STAGE}")
        return _STAGE

    def _copy(self, table: str, rows: pyarrow.RecordBatch, columns: Sequence[str]) -> None:
        self._session.copy_in(f"COPY {table} ({names_sql(columns)}) FROM STDIN", _pieces(rows, columns))

    def _layout(self, target: Target) -> Layout:
        layout = self._layouts.get(target.name)
        if layout is None or not set(target.column_names) <= set(layout.columns):
            layout = layout_of(self._session, target.name)
            if layout is None:
                raise table_missing(target, HINT_GONE)
            self._layouts[target.name] = layout
            self._counted.note_columns(target, layout.columns)
        return layout


def _pieces(rows: pyarrow.RecordBatch, columns: Sequence[str]) -> Iterator[bytes]:
    """Yield rows as text for COPY. The server inserts a piece while the next ones are encoded."""
    for first in range(0, rows.num_rows, _ROWS_ENCODED):
        pieces, _ = _native.copy_text(rows.slice(first, _ROWS_ENCODED), columns)
        for _, text in pieces:
            yield text


def _same(key: Sequence[str]) -> str:
    return " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in key)


def _named(table: str, columns: Sequence[str]) -> str:
    return ", ".join(f"{table}.{quoted(name)}" for name in columns)
