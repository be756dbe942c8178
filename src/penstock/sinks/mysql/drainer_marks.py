# SPDX-License-Identifier: Apache-2.0
"""Adds the marks of TiDB-Binlog's Drainer to transactions, so that a Drainer does not send them back.

A Drainer with `loopback-control` skips every transaction of its source that writes a mark with the Drainer's
own `channel-id` (docs.pingcap.com, "Bidirectional Replication Between TiDB Clusters").
"""

from penstock.model import TableName
from penstock.settings.tidb import DRAINER_MARK_TABLE
from penstock.sinks.mysql.connection import Session
from penstock.sinks.mysql.tables import create_database, layout_of

_TABLE = TableName.parse(DRAINER_MARK_TABLE)


def create_drainer_marks(session: Session) -> None:
    """Create the table of marks, as a Drainer does, if it does not exist."""
    if layout_of(session, _TABLE) is not None:
        return
    for statement in create_database(session, _TABLE.database):
        session.run(statement)
    session.run(
        f"CREATE TABLE IF NOT EXISTS {_TABLE.sql} (id BIGINT NOT NULL, channel_id BIGINT NOT NULL DEFAULT 0,"
        " val BIGINT DEFAULT 0, channel_info VARCHAR(64), PRIMARY KEY (id, channel_id))"
    )


def drainer_mark_statement(channel: int, mark_id: int) -> bytes:
    """Return the statement that marks a transaction. Concurrent transactions need different ids."""
    return (
        f"INSERT INTO {_TABLE.sql} (id, channel_id, val, channel_info)"
        f" VALUES ({mark_id}, {channel}, 1, 'penstock') ON DUPLICATE KEY UPDATE val = val + 1"
    ).encode()
