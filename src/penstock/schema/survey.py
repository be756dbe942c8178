# SPDX-License-Identifier: Apache-2.0
"""A schema history that begins with what a live server says of its tables."""

from penstock.model import Position, TablePatterns
from penstock.mysql.connection import Connection
from penstock.schema.history import RereadTable, SchemaHistory
from penstock.schema.reader import read_defaults, read_tables


def survey(
    connection: Connection,
    patterns: TablePatterns | None = None,
    *,
    position: Position | None = None,
    reread: RereadTable | None = None,
) -> SchemaHistory:
    """Read every selected table from a live server; the definitions hold from `position` on.

    Without a position they hold from the beginning, as far as the table maps agree. With a position and
    ServerTables they are those of that position, else those of now.
    """
    history = SchemaHistory(read_defaults(connection), reread)
    if position is None or reread is None or callable(reread):
        history.seed(read_tables(connection, patterns), position)
    else:
        history.seed(reread.tables_at(position, patterns), position)
    return history
