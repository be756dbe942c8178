# SPDX-License-Identifier: Apache-2.0
"""The definitions that are kept with a log, made to follow its capture."""

from functools import partial

from penstock.capture.connection import Connection
from penstock.capture.schema_history import SchemaHistory
from penstock.capture.server_tables import ServerTables
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position


def follow_schemas(log: Log, connection: Connection, position: Position) -> SchemaLog[SchemaHistory]:
    """Return what follows the statements of a log from the position on where capture goes on.

    Where that is not where the log ends (a new log, another server, a gap), the server tells its definitions
    as of there. Raises SchemaInvalid for kept files that cannot be read, and what the connection raises.
    """
    tables = ServerTables(connection.address)
    kept = SchemaLog(
        log.folder, partial(SchemaHistory.from_json, reread=tables), log.disk, earliest=log.earliest
    )
    newest = kept.position
    if newest is not None and position == log.visible and newest.epoch != position.epoch:
        # Those of another server that never sent a byte, so that the log has nothing of its epoch.
        kept.cut(position)
    if kept.position is None or position != log.visible:
        kept.seed(SchemaHistory.from_server(connection, position=position, reread=tables), position)
    return kept


def kept_schemas(log: LogReader) -> SchemaLog[SchemaHistory]:
    """Return the definitions kept with a log, to be read."""
    return SchemaLog(log.folder, SchemaHistory.from_json, log.disk)
