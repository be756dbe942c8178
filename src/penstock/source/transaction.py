# SPDX-License-Identifier: Apache-2.0
"""One transaction of a kept log: its position, and its changes row by row."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from penstock.errors import PositionInvalid, SourceMissing
from penstock.logstore.reader import LogReader
from penstock.model import Position, TablePatterns
from penstock.schema.statements.secrets import without_secrets
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import LoggedStatement, Selection, read_in_order
from penstock.source.row_history import RowChange, TableStatement, changes_of_rows
from penstock.source.source import ByteRange, Source
from penstock.source.walk import TransactionWalk

# Rows are converted one by one, so batches are small.
_BATCH_ROWS_MAX = 1000


@dataclass(frozen=True)
class FoundTransaction:
    """A transaction in the log, from `start` up to `end`. `time_us` is the commit time in microseconds UTC
    since 1970.

    `tables` are the names of the tables with logged rows. `statement` is the text, without passwords, of a
    transaction that consists of a single statement, such as a definition.
    """

    start: Position
    end: Position
    gtid: str | None
    server_id: int
    thread_id: int | None
    time_us: int
    commit_version: int
    rows: int
    tables: str
    statement: str | None


@dataclass(frozen=True)
class TableChange:
    """A changed row of a table, with the table's declared columns. `row` is the index of the change in its
    transaction.
    """

    table: str
    row: int
    change: RowChange
    columns: tuple[str, ...]


def find_by_gtid(log: LogReader, source: Source, gtid: str) -> FoundTransaction:
    """Return the transaction with a GTID.

    Raises SourceMissing if the log does not have it, PositionPurged if the transaction precedes the log,
    OptionInvalid for an invalid GTID.
    """
    start = log.locate_gtid(gtid).position
    for extent in log.extents():
        if extent.last <= start:
            continue
        # The transaction begins after the boundary in the same file, or in a later file.
        begin = start.offset if extent.first <= start else extent.start
        byte_range = ByteRange(extent.epoch, extent.file, begin, extent.end, aligned=True)
        for transaction in _transactions(source, byte_range):
            if transaction.gtid == gtid:
                return transaction
    raise SourceMissing(f"the log has no transaction {gtid}", hint="penstock status shows its GTID set")


def find_at(log: LogReader, source: Source, position: Position) -> FoundTransaction:
    """Return the transaction that contains a position or begins there.

    Raises PositionInvalid if the position is at the end of the log or between transactions, and
    PositionPurged if it precedes the log.
    """
    begin = log.boundary_before(position)
    byte_range = ByteRange(position.epoch, position.file, begin, position.offset + 1, aligned=True)
    for transaction in _transactions(source, byte_range):
        if transaction.start <= position < transaction.end:
            return transaction
    raise PositionInvalid(
        "no transaction is here", position=str(position), hint="Name the position of one of its events"
    )


def prove_boundary(log: LogReader, source: Source, position: Position) -> None:
    """Raise PositionInvalid unless a transaction begins or ends at a position, PositionPurged if the log
    begins later.
    """
    boundary = log.boundary_before(position)
    edges = {edge for extent in log.extents() for edge in (extent.first, extent.last)}
    if boundary == position.offset or position in edges:
        return
    # The range includes a transaction that begins exactly at the position. Events before the first
    # transaction of a file belong to no transaction.
    byte_range = ByteRange(position.epoch, position.file, boundary, position.offset + 1, aligned=True)
    for transaction in _transactions(source, byte_range):
        if position in (transaction.start, transaction.end):
            return
        if transaction.start < position < transaction.end:
            raise PositionInvalid(
                "no transaction begins or ends here",
                position=str(position),
                hint=f"The one around it begins at {transaction.start} and ends at {transaction.end}",
            )
    raise PositionInvalid(
        "no transaction begins or ends here",
        position=str(position),
        hint="Name the start or the end of a transaction, as the history of a row shows them",
    )


def changes_of(
    source: Source, transaction: FoundTransaction, tables: TablePatterns
) -> Iterator[TableChange | TableStatement]:
    """Yield the changes and statements of a transaction, in commit order within each table.

    Propagates errors from reading the log.
    """
    start = transaction.start
    byte_range = ByteRange(start.epoch, start.file, start.offset, start.offset + 1, aligned=True)
    selection = Selection(tables)
    for part in read_in_order(
        source, byte_range, selection, LoggedTables(source), batch_rows_max=_BATCH_ROWS_MAX
    ):
        if isinstance(part, LoggedStatement):
            yield TableStatement(part.position, part.text, bool(part.emptied))
            continue
        rows = part.to_arrow()
        numbers = [metadata["row"] for metadata in rows.column("_metadata").to_pylist()]
        columns = tuple(column.name for column in part.columns)
        for row, change in changes_of_rows(rows, range(rows.num_rows), part.position.epoch):
            yield TableChange(part.table, numbers[row], change, columns)


def _transactions(source: Source, byte_range: ByteRange) -> Iterator[FoundTransaction]:
    for batch in TransactionWalk(source, byte_range):
        for row in batch.to_pylist():
            yield _transaction_of(row, byte_range.epoch)


def _transaction_of(row: dict[str, Any], epoch: int) -> FoundTransaction:
    start = Position(epoch, row["file"], row["offset"])
    committed: datetime = row["commit_timestamp"]
    return FoundTransaction(
        start,
        replace(start, offset=row["end_offset"]),
        row["gtid"],
        row["server_id"],
        row["thread_id"],
        int(committed.timestamp() * 1_000_000),
        row["commit_version"],
        row["rows"],
        row["tables"],
        without_secrets(row["statement"]) if row["statement"] else None,
    )
