# SPDX-License-Identifier: Apache-2.0
"""A schema history that starts with the tables of a live server."""

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
    """Read every selected table from a live server; the definitions apply from `position` on.

    Without a position they apply from the beginning, as long as the table maps agree. With a position and
    ServerTables they are the definitions at that position, otherwise the current ones.
    """
    history = SchemaHistory(read_defaults(connection), reread)
    if position is None or reread is None or callable(reread):
        history.seed(read_tables(connection, patterns), position)
    else:
        history.seed(reread.tables_at(position, patterns), position)
    return history
