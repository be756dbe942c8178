# SPDX-License-Identifier: Apache-2.0
"""Collects the rows of one transaction from all files or partitions that contain some of them, without
repetitions.

TiCDC delivers at least once. A transaction changes each key only once, so a second row with the same key
repeats the first. This holds even if TiCDC wrote the change as an update once, and as a deleted and an
inserted row the other time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import EventMalformed
from penstock.ticdc.row_changes import Cells, Change, RowChange
from penstock.ticdc.schema_files import TableSchema


@dataclass(frozen=True)
class SinkTransaction:
    """The statements with one commit timestamp, or the rows of one transaction, grouped by table."""

    commit_ts: int
    statements: Sequence[TableSchema]
    rows: Sequence[tuple[TableSchema, Sequence[RowChange]]]


def rows_by_key(schema: TableSchema, rows: Iterable[RowChange]) -> list[RowChange]:
    """Return the rows of a transaction in a table with a primary key: deletes first, and each key once.

    An update that changed the key becomes a delete and an insert. Raises EventMalformed for two different
    rows of one key.
    """
    indexes = [index for index, column in enumerate(schema.columns) if column.is_key]
    before: dict[Cells, Cells] = {}
    after: dict[Cells, Cells] = {}
    commit_ts = 0
    for row in rows:
        commit_ts = row.commit_ts
        for images, cells in ((before, row.before), (after, row.after)):
            if cells is None:
                continue
            key = tuple(cells[index] for index in indexes)
            if images.setdefault(key, cells) != cells:
                raise EventMalformed(
                    f"{schema.database}.{schema.table} has two different rows of one key in a transaction",
                    position=f"commit timestamp {commit_ts}",
                    hint="Report it with the version of TiCDC",
                )
    deleted = [
        RowChange(commit_ts, Change.DELETE, cells, None) for key, cells in before.items() if key not in after
    ]
    written = [
        RowChange(commit_ts, Change.UPDATE if key in before else Change.INSERT, before.get(key), cells)
        for key, cells in after.items()
    ]
    return deleted + written
