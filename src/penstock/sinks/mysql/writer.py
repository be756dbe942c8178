# SPDX-License-Identifier: Apache-2.0
"""Writes one part of a batch into a MySQL, MariaDB or TiDB target, and its number in the same commit.

Of a table with a key only the last image of each key is written. At the end of a batch no two rows of the
source share a value of a unique key, so a row that is put takes away nothing but what is out of date: takings
first, then puts that replace whatever is in their way; the order of keys among themselves does not matter. To
write such rows again changes nothing, so several connections may commit them before the part is done. Rows of
tables without a key, and feeds, are written once, in the commit that also stores the batch's number.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Target
from penstock.errors import SchemaChanged, ValueMalformed
from penstock.model import TableName
from penstock.sinks.images import LastImages, puts, refuse_partial
from penstock.sinks.mysql.connection import DUPLICATE, Session, number_of
from penstock.sinks.mysql.log import logged_statements
from penstock.sinks.mysql.odd import (
    LENIENT,
    STRICT,
    Divided,
    divided,
    refuse_other_changes,
    without_broken_texts,
)
from penstock.sinks.mysql.statements import (
    columns_written,
    insert_statements,
    put_statements,
    take_equal_statements,
    take_statements,
)
from penstock.sinks.mysql.tables import Layout, layout_of
from penstock.sinks.mysql.transaction import Transaction, claim_statement, mark_statement
from penstock.sinks.sink import HINT_GONE, BatchMark, Receipt, Writer
from penstock.sinks.sql.held_rows import HeldRows
from penstock.sinks.sql.rows import Counted, bounded, in_one_batch, lanes, runs

# Fewer rows are not worth another connection.
_ROWS_PER_LANE = 500


@dataclass(frozen=True)
class Manner:
    """How a part is written.

    `statement_bytes` bounds one statement, `held_bytes` the rows that are held before they are written;
    `connections` write rows with a key side by side. With `whole` nothing is committed before the part is.
    With `feed` every change is a row. With `truncate` a table is emptied at once, outside of the transaction.
    """

    positions: TableName
    statement_bytes: int = 1 << 20
    held_bytes: int = 64 << 20
    connections: int = 1
    whole: bool = False
    feed: bool = False
    truncate: bool = False
    commit_log: TableName | None = None


class MysqlWriter(Writer):
    """One part of one batch."""

    def __init__(self, connect: Callable[[], Session], manner: Manner, mark: BatchMark, part: int) -> None:
        whole = manner.whole or manner.commit_log is not None
        self._connect = connect
        self._manner = manner
        self._mark = mark
        self._part = part
        self._main = Transaction(connect, whole=whole)
        self._lanes = 1 if whole else manner.connections
        self._side: list[Transaction] = []
        self._held = HeldRows(manner.held_bytes, self._write_held, feed=manner.feed)
        # Whether a row was there that was to be added.
        self._met = False
        self._layouts: dict[TableName, Layout] = {}
        self._counted = Counted()

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            refuse_partial(changes)
            self._counted.add(changes)
            self._held.add(changes)
        if self._held.is_full():
            self._write_all()

    def empty(self, target: Target, version: int) -> None:
        if not self._manner.feed:
            with self.working_on(target.name):
                self._empty(target, version)

    def _empty(self, target: Target, version: int) -> None:
        self._held.empty(target, version)
        name = target.name.sql.encode()
        keyed = bool(target.row_key)
        if self._manner.truncate and self._main.repeatable:
            self._commit(self._main)
            self._main.execute(b"TRUNCATE TABLE ", name, again=True)
        elif keyed and self._lanes > 1:
            # Other connections must not wait for its locks, also where this one may not commit yet.
            transaction = self._main if self._main.repeatable else self._sides(1)[0]
            transaction.execute(b"DELETE FROM ", name, again=True)
            self._commit(transaction)
        else:
            self._main.execute(b"DELETE FROM ", name, again=keyed)

    def finish(self) -> Receipt:
        self._write_all()
        if self._main.execute(claim_statement(self._manner.positions, self._mark, self._part), again=True):
            self._main.commit_part()
        else:
            self._main.undo()
        self._close()
        return self._counted.receipt()

    def abort(self) -> None:
        self._held.clear()
        self._close()

    def _close(self) -> None:
        for one in (self._main, *self._side):
            one.close()

    # --- Writing ----------------------------------------------------------------------------

    def _write_all(self) -> None:
        for target, images in self._held.take().items():
            with self.working_on(target.name):
                self._write_held(target, images)

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
            self._put_images(self._main, target, key, rows, layout)
            return
        keys = [list(key), *(list(one) for one in layout.unique_keys if set(one) <= set(target.column_names))]
        self._side_by_side(
            [
                lambda lane=lane, some=some: self._put_lane(lane, target, key, some, layout)  # type: ignore[misc]
                for lane, some in enumerate(lanes(rows, keys, count))
            ]
        )

    def _log_commit(self, target: Target, rows: pyarrow.Table) -> None:
        """Write rows into the commit log, where there is one, which all tables share."""
        log = self._manner.commit_log
        if log is None:
            return
        batch = in_one_batch(rows)
        with self.working_on(None):
            for statement in logged_statements(
                log, self._mark, self._part, target, batch, self._manner.statement_bytes
            ):
                self._main.execute(*statement)

    def _sides(self, count: int) -> list[Transaction]:
        """Return the other connections, at least so many."""
        while len(self._side) < count:
            self._side.append(Transaction(self._connect, whole=False))
        return self._side

    def _side_by_side(self, jobs: list[Callable[[], None]]) -> None:
        self._sides(len(jobs))
        with ThreadPoolExecutor(len(jobs), "penstock-mysql") as pool:
            for done in [pool.submit(job) for job in jobs]:
                done.result()

    def _put_lane(
        self, lane: int, target: Target, key: tuple[str, ...], rows: pyarrow.Table, layout: Layout
    ) -> None:
        """Write rows on a connection of their own, and commit them, with a mark of whose they are."""
        transaction = self._side[lane]
        self._put_images(transaction, target, key, rows, layout)
        self._commit(transaction)

    def _commit(self, transaction: Transaction) -> None:
        """Commit before the part is done. Each commit writes the position table, so it is known as ours."""
        lane = self._side.index(transaction) if transaction in self._side else 0
        # Parts count from 0, so these are nobody's.
        place = -1 - self._part * self._manner.connections - lane
        transaction.commit(mark_statement(self._manner.positions, self._mark, self._part, place))

    def _put_images(
        self,
        transaction: Transaction,
        target: Target,
        key: tuple[str, ...],
        rows: pyarrow.Table,
        layout: Layout,
    ) -> None:
        """Take away the keys that are gone, then put the others in place."""
        bytes_max = self._manner.statement_bytes
        is_put = puts(rows)
        gone = in_one_batch(rows.filter(pc.invert(is_put)))
        self._run(transaction, take_statements(gone, target, key, bytes_max))
        there = in_one_batch(rows.filter(is_put))
        if set(key) not in map(set, layout.unique_keys):
            # Nothing there would stand in the way of a row, so its old image is taken away by name.
            self._run(transaction, take_statements(there, target, key, bytes_max))
        found = divided(there, target)
        new = pc.equal(found.plain.column("_change_type"), "insert")
        self._insert(transaction, found.plain.filter(new), target, layout)
        self._put(
            transaction,
            replace(found, plain=found.plain.filter(pc.invert(new))),
            target,
            lambda some: put_statements(some, target, layout, bytes_max),
            again=True,
        )

    def _insert(
        self, transaction: Transaction, rows: pyarrow.RecordBatch, target: Target, layout: Layout
    ) -> None:
        """Add rows that are new in the source; where one is there already, they are put like others.

        To add them costs the target a good deal less, and they are there only where a batch comes again, or
        where a full load was ahead of the log.
        """
        bytes_max = self._manner.statement_bytes
        columns = columns_written(target, layout)
        for some in bounded(rows):
            if not self._met:
                try:
                    self._run(transaction, insert_statements(some, target, columns, bytes_max))
                    continue
                except ValueMalformed as problem:
                    if number_of(problem) != DUPLICATE:
                        raise
                    self._met = True
            self._run(transaction, put_statements(some, target, layout, bytes_max))

    def _put(
        self,
        transaction: Transaction,
        found: Divided,
        target: Target,
        spelled: Callable[[pyarrow.RecordBatch], Iterable[tuple[bytes, ...]]],
        *,
        again: bool,
    ) -> None:
        """Write rows by the statements that `spelled` makes of them; those with odd values on their own."""
        self._run(transaction, spelled(found.plain), again=again)
        self._run_leniently(transaction, spelled(found.unnamed), again=again)
        for place in range(found.broken.num_rows):
            row = found.broken.slice(place, 1)
            try:
                self._run(transaction, spelled(row), again=again)
            except ValueMalformed:
                row = without_broken_texts(row, target, self._counted)
                self._run_leniently(transaction, spelled(row), again=again)

    def _run(
        self, transaction: Transaction, statements: Iterable[tuple[bytes, ...]], *, again: bool = True
    ) -> None:
        for statement in statements:
            transaction.execute(*statement, again=again)
            if transaction.large:
                self._commit(transaction)

    def _run_leniently(
        self, transaction: Transaction, statements: Iterable[tuple[bytes, ...]], *, again: bool
    ) -> None:
        for statement in statements:
            transaction.execute(LENIENT, again=True)
            transaction.execute(*statement, again=again)
            refuse_other_changes(transaction.session)
            transaction.execute(STRICT, again=True)

    def _write_in_order(self, target: Target, rows: pyarrow.RecordBatch, layout: Layout) -> None:
        """Write rows of a table without a key: one that goes takes one that is equal with it."""
        columns = columns_written(target, layout)

        def spelled(some: pyarrow.RecordBatch) -> Iterable[tuple[bytes, ...]]:
            return insert_statements(some, target, columns, self._manner.statement_bytes)

        if self._manner.feed:
            self._put(self._main, divided(rows, target), target, spelled, again=False)
            return
        for is_put, some in runs(rows):
            if is_put:
                self._put(self._main, divided(some, target), target, spelled, again=False)
            else:
                for take in take_equal_statements(some, target, columns, self._main.session.dialect.mariadb):
                    self._main.execute(take)

    def _layout(self, target: Target) -> Layout:
        layout = self._layouts.get(target.name)
        if layout is None or not set(target.column_names) <= set(layout.columns):
            layout = self._main.asked(lambda session: layout_of(session, target.name))
            if layout is None:
                raise SchemaChanged(
                    f"the target has no table {target.name}",
                    hint=HINT_GONE,
                )
            self._layouts[target.name] = layout
        return layout
