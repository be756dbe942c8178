# SPDX-License-Identifier: Apache-2.0
"""Writes one part of a batch to a MySQL, MariaDB or TiDB target; the commit also stores the batch number.

For a table with a key, only the last image of each key is written. After a batch, no two source rows share a
unique value, so an existing target row that conflicts with a written row is outdated and can be replaced.
Deletes are executed first, followed by statements that replace every conflicting row, in any key order.
Writing such rows is idempotent, so several connections may commit them before the part is complete. Rows of
tables without a key, and rows of feeds, are written only once, in the commit that also stores the batch
number.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.errors import ValueMalformed
from penstock.model import TableName
from penstock.sinks.images import LastImages, puts
from penstock.sinks.mysql.connection import DUPLICATE, Session, refusal_of
from penstock.sinks.mysql.drainer_marks import drainer_mark_statement
from penstock.sinks.mysql.log import logged_statements
from penstock.sinks.mysql.odd import (
    LENIENT,
    STRICT,
    DividedRows,
    divide_rows,
    refuse_other_changes,
    without_broken_texts,
)
from penstock.sinks.mysql.statements import (
    columns_written,
    delete_equal_statements,
    delete_statements,
    insert_statements,
    replace_statements,
)
from penstock.sinks.mysql.tables import Layout, layout_of
from penstock.sinks.mysql.transaction import Transaction, claim_statement, mark_statement
from penstock.sinks.sink import HINT_GONE, BatchMark, Receipt
from penstock.sinks.sql.rows import in_one_batch, lanes, runs, split_rows
from penstock.sinks.sql.sql_sink import SqlWriter, table_missing

# With fewer rows, another connection is not worth its cost.
_ROWS_PER_LANE = 500


@dataclass(frozen=True)
class WriterOptions:
    """Options for writing a part.

    `statement_bytes` limits the size of one statement, `held_bytes` the size of the rows buffered before a
    write. Rows with a key are written over `connections` sessions in parallel. With `whole`, nothing is
    committed before the part is complete. With `feed`, every change becomes a row. With `truncate`, a table
    is emptied immediately, outside of the transaction. `drainer_channel` is the Drainer channel whose mark
    every transaction contains.
    """

    positions: TableName
    statement_bytes: int = 1 << 20
    held_bytes: int = 64 << 20
    connections: int = 1
    whole: bool = False
    feed: bool = False
    truncate: bool = False
    commit_log: TableName | None = None
    drainer_channel: int | None = None


class MysqlWriter(SqlWriter):
    """Writes one part of one batch."""

    def __init__(
        self, connect: Callable[[], Session], options: WriterOptions, mark: BatchMark, part: int
    ) -> None:
        whole = options.whole or options.commit_log is not None
        super().__init__(options.held_bytes, feed=options.feed)
        self._connect = connect
        self._options = options
        self._mark = mark
        self._part = part
        self._main = Transaction(connect, whole=whole)
        self._lanes = 1 if whole else options.connections
        self._side_transactions: list[Transaction] = []
        # Whether a row to be inserted already existed.
        self._insert_failed = False
        self._layouts: dict[TableName, Layout] = {}

    def empty(self, target: Target, version: int) -> None:
        if not self._options.feed:
            with self.working_on(target.name):
                self._empty(target, version)

    def _empty(self, target: Target, version: int) -> None:
        self._buffered.empty(target, version)
        name = target.name.sql.encode()
        keyed = bool(target.row_key)
        if self._options.truncate and self._main.repeatable:
            self._commit(self._main)
            self._main.execute(b"TRUNCATE TABLE ", name, idempotent=True)
        elif keyed and self._lanes > 1:
            # Other connections must not wait for the locks of this DELETE, so commit it separately if
            # necessary.
            transaction = self._main if self._main.repeatable else self._open_side_transactions(1)[0]
            transaction.execute(b"DELETE FROM ", name, idempotent=True)
            self._commit(transaction)
        else:
            self._main.execute(b"DELETE FROM ", name, idempotent=keyed)

    def finish(self) -> Receipt:
        self._write_all()
        self._mark_for_drainer(self._main, self._part)
        if self._main.execute(
            claim_statement(self._options.positions, self._mark, self._part), idempotent=True
        ):
            self._main.commit_part()
        else:
            self._main.undo()
        self._close()
        return self._counted.receipt()

    def abort(self) -> None:
        self._buffered.clear()
        self._close()

    def _close(self) -> None:
        for transaction in (self._main, *self._side_transactions):
            transaction.close()

    # --- Writing ----------------------------------------------------------------------------

    def _write_held(self, target: Target, images: LastImages) -> None:
        rows = images.rows()
        if rows is None or not rows.num_rows:
            return
        key = images.target.primary_key
        self._log_commit(images.target, rows)
        layout = self._layout(target)
        if not key:
            self._write_in_order(target, in_one_batch(rows), layout)
            return
        rows = rows.sort_by([(name, "ascending") for name in key])
        count = min(self._lanes, 1 + rows.num_rows // _ROWS_PER_LANE)
        if count == 1 and self._lanes == 1:
            self._write_images(self._main, target, key, rows, layout)
            return
        keys = [
            list(key),
            *(
                list(unique_key)
                for unique_key in layout.unique_keys
                if set(unique_key) <= set(target.column_names)
            ),
        ]
        self._run_in_parallel(
            [
                lambda lane=lane, share=share: self._write_lane(lane, target, key, share, layout)  # type: ignore[misc]
                for lane, share in enumerate(lanes(rows, keys, count))
            ]
        )

    def _log_commit(self, target: Target, rows: pyarrow.Table) -> None:
        """Write rows to the commit log, if there is one. All tables share it."""
        log = self._options.commit_log
        if log is None:
            return
        batch = in_one_batch(rows)
        with self.working_on(None):
            for statement in logged_statements(
                log, self._mark, self._part, target, batch, self._options.statement_bytes
            ):
                self._main.execute(*statement)

    def _open_side_transactions(self, count: int) -> list[Transaction]:
        """Return at least `count` additional connections."""
        while len(self._side_transactions) < count:
            self._side_transactions.append(Transaction(self._connect, whole=False))
        return self._side_transactions

    def _run_in_parallel(self, jobs: list[Callable[[], None]]) -> None:
        self._open_side_transactions(len(jobs))
        with ThreadPoolExecutor(len(jobs), "penstock-mysql") as pool:
            for future in [pool.submit(job) for job in jobs]:
                future.result()

    def _write_lane(
        self, lane: int, target: Target, key: tuple[str, ...], rows: pyarrow.Table, layout: Layout
    ) -> None:
        """Write rows on a separate connection, and commit them with a mark of their owner."""
        transaction = self._side_transactions[lane]
        self._write_images(transaction, target, key, rows, layout)
        self._commit(transaction)

    def _commit(self, transaction: Transaction) -> None:
        """Commit before the part is complete. Each commit marks its owner in the position table."""
        lane = self._side_transactions.index(transaction) if transaction in self._side_transactions else 0
        # Part numbers start at 0, so negative numbers are unused.
        mark_part = -1 - self._part * self._options.connections - lane
        self._mark_for_drainer(transaction, mark_part)
        transaction.commit(mark_statement(self._options.positions, self._mark, self._part, mark_part))

    def _mark_for_drainer(self, transaction: Transaction, mark_id: int) -> None:
        channel = self._options.drainer_channel
        if channel is not None:
            transaction.execute(drainer_mark_statement(channel, mark_id), idempotent=True)

    def _write_images(
        self,
        transaction: Transaction,
        target: Target,
        key: tuple[str, ...],
        rows: pyarrow.Table,
        layout: Layout,
    ) -> None:
        """Delete the removed keys, then write the other rows."""
        bytes_max = self._options.statement_bytes
        is_put = puts(rows)
        deleted = in_one_batch(rows.filter(pc.invert(is_put)))
        self._run(transaction, delete_statements(deleted, target, key, bytes_max))
        written = in_one_batch(rows.filter(is_put))
        if set(key) not in map(set, layout.unique_keys):
            # Without a unique index no row conflicts, so the old image is deleted explicitly.
            self._run(transaction, delete_statements(written, target, key, bytes_max))
        divided_rows = divide_rows(written, target)
        is_new = pc.equal(divided_rows.plain.column("_change_type"), "insert")
        self._insert(transaction, divided_rows.plain.filter(is_new), target, layout)
        self._write_divided(
            transaction,
            replace(divided_rows, plain=divided_rows.plain.filter(pc.invert(is_new))),
            target,
            lambda share: replace_statements(share, target, layout, bytes_max),
            idempotent=True,
        )

    def _insert(
        self, transaction: Transaction, rows: pyarrow.RecordBatch, target: Target, layout: Layout
    ) -> None:
        """Insert rows that are new in the source; if one already exists, write them like other rows.

        Inserting costs the target much less. A row can exist already only after a retry, or if a full load
        was ahead of the log.
        """
        bytes_max = self._options.statement_bytes
        columns = columns_written(target, layout)
        for share in split_rows(rows):
            if not self._insert_failed:
                try:
                    self._run(transaction, insert_statements(share, target, columns, bytes_max))
                    continue
                except ValueMalformed as problem:
                    if refusal_of(problem) != DUPLICATE:
                        raise
                    self._insert_failed = True
            self._run(transaction, replace_statements(share, target, layout, bytes_max))

    def _write_divided(
        self,
        transaction: Transaction,
        rows: DividedRows,
        target: Target,
        make_statements: Callable[[pyarrow.RecordBatch], Iterable[tuple[bytes, ...]]],
        *,
        idempotent: bool,
    ) -> None:
        """Write rows with the statements that `make_statements` returns. Rows with odd values are written
        separately.
        """
        self._run(transaction, make_statements(rows.plain), idempotent=idempotent)
        self._run_leniently(transaction, make_statements(rows.unnamed), idempotent=idempotent)
        for index in range(rows.broken.num_rows):
            row = rows.broken.slice(index, 1)
            try:
                self._run(transaction, make_statements(row), idempotent=idempotent)
            except ValueMalformed:
                row = without_broken_texts(row, target, self._counted)
                self._run_leniently(transaction, make_statements(row), idempotent=idempotent)

    def _run(
        self, transaction: Transaction, statements: Iterable[tuple[bytes, ...]], *, idempotent: bool = True
    ) -> None:
        for statement in statements:
            transaction.execute(*statement, idempotent=idempotent)
            if transaction.large:
                self._commit(transaction)

    def _run_leniently(
        self, transaction: Transaction, statements: Iterable[tuple[bytes, ...]], *, idempotent: bool
    ) -> None:
        for statement in statements:
            transaction.execute(LENIENT, idempotent=True)
            transaction.execute(*statement, idempotent=idempotent)
            refuse_other_changes(transaction.session)
            transaction.execute(STRICT, idempotent=True)

    def _write_in_order(self, target: Target, rows: pyarrow.RecordBatch, layout: Layout) -> None:
        """Write rows of a table without a key. Each delete removes only one of several equal rows."""
        columns = columns_written(target, layout)

        def make_statements(share: pyarrow.RecordBatch) -> Iterable[tuple[bytes, ...]]:
            return insert_statements(share, target, columns, self._options.statement_bytes)

        if self._options.feed:
            self._write_divided(
                self._main, divide_rows(rows, target), target, make_statements, idempotent=False
            )
            return
        for is_put, share in runs(rows):
            if is_put:
                self._write_divided(
                    self._main, divide_rows(share, target), target, make_statements, idempotent=False
                )
            else:
                for delete in delete_equal_statements(
                    share, target, columns, self._main.session.dialect.mariadb
                ):
                    self._main.execute(delete)

    def _layout(self, target: Target) -> Layout:
        layout = self._layouts.get(target.name)
        if layout is None or not set(target.column_names) <= set(layout.columns):
            layout = self._main.query(lambda session: layout_of(session, target.name))
            if layout is None:
                raise table_missing(target, HINT_GONE)
            self._layouts[target.name] = layout
            self._counted.note_columns(target, layout.columns)
        return layout
