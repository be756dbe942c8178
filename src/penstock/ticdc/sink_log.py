# SPDX-License-Identifier: Apache-2.0
"""Writes transactions from TiCDC to a kept log, as a binlog that every reader can read."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from penstock._native import RowEventWriter
from penstock.capture.generated_log import SERVER_ID
from penstock.errors import PenstockError
from penstock.ticdc.row_changes import Change, RowChange, key_of
from penstock.ticdc.schema_files import TableSchema
from penstock.ticdc.transactions import SinkTransaction
from penstock.tidb.merged_log import MergedEnd, MergedLog

# TiCDC does not report the cluster's id.
_CLUSTER_ID = 0


class SinkLog:
    """Appends transactions to a log, each one completely or not at all. Used by one thread."""

    def __init__(self, merged: MergedLog) -> None:
        self._merged = merged
        self._writer = RowEventWriter(cluster_id=_CLUSTER_ID, server_id=SERVER_ID)
        self._tables: dict[TableSchema, int] = {}

    def append(self, transaction: SinkTransaction, statements_logged: int = 0) -> None:
        """Append a transaction, without statements that were logged before.

        Propagates errors from the log, and raises ValueMalformed and SchemaInvalid with the name of the
        table.
        """
        commit_ts = transaction.commit_ts
        for index, schema in enumerate(transaction.statements):
            if index >= statements_logged:
                offset = self._merged.begin_transaction(commit_ts)
                # TiCDC does not report the start timestamp, so the statements of a commit timestamp are
                # numbered from 1. Rows have the commit timestamp itself.
                write = partial(self._writer.statement, start_ts=commit_ts + 1 + index)
                self._merged.append(write(commit_ts, offset, schema.database, schema.query))
                self._merged.flush()
        if transaction.rows:
            self._writer.begin(commit_ts, self._merged.begin_transaction(commit_ts))
            for schema, rows in transaction.rows:
                self._add(schema, rows)
            self._merged.append(self._writer.commit())
            self._merged.flush()

    def append_new(self, transaction: SinkTransaction, end: MergedEnd) -> None:
        """A log may end at the commit timestamp of a transaction but have only a part of it. Append the
        missing part. Propagates errors from `append`.

        Rows may have the same commit timestamp as a statement, because the timestamps that TiDB computes for
        async commit and one-phase commit are not unique. Rows are logged after statements, so a log that ends
        with rows has everything with their commit timestamp.
        """
        if transaction.commit_ts != end.commit_ts:
            self.append(transaction)
        elif statements_logged := end.start_ts - end.commit_ts:
            self.append(transaction, statements_logged)

    def _add(self, schema: TableSchema, rows: Sequence[RowChange]) -> None:
        try:
            table = self._table_of(schema)
            for change, group in groupby(rows, key=attrgetter("change")):
                images = [(row.before or (), row.after or ()) for row in group]
                if change is Change.INSERT:
                    self._writer.insert(table, [after for _, after in images])
                elif change is Change.UPDATE:
                    self._writer.update(table, images)
                else:
                    self._writer.delete(table, [before for before, _ in images])
        except PenstockError as problem:
            problem.position = f"{schema.database}.{schema.table}, version {schema.version}"
            raise

    def _table_of(self, schema: TableSchema) -> int:
        table = self._tables.get(schema)
        if table is None:
            columns = [
                (column.name, column.type_text, column.charset, column.is_nullable)
                for column in schema.columns
            ]
            table = self._writer.define(schema.database, schema.table, columns, key_of(schema.columns))
            self._tables[schema] = table
        return table
