# SPDX-License-Identifier: Apache-2.0
"""Semi-synchronous replication: a commit on the server waits until a replica has stored it.

The server requests an acknowledgement by a mark before an event. The reply names the log position that the
replica has stored. Sources: MySQL's plugin/semisync (ReplSemiSyncMaster, ReplSemiSyncSlave::slaveReply),
MariaDB's semisync_master.cc.
"""

import struct

from penstock.mysql.connection import Connection

_REPLY_MAGIC = 0xEF

# The variable of MySQL's plugin, under the new and the old name of the plugin. In MariaDB the feature is
# built in.
_ENABLED = ("rpl_semi_sync_source_enabled", "rpl_semi_sync_master_enabled")


def ask_for_marks(connection: Connection) -> bool:
    """Tell the server that this replica acknowledges commits; return whether the server's dump will contain
    marks that request acknowledgements.

    A server that supports the feature sends the marks even if the feature is off. Call this before the dump
    starts.
    """
    supported = bool(connection.variables(*_ENABLED))
    if supported:
        connection.query("SET @rpl_semi_sync_replica = 1, @rpl_semi_sync_slave = 1")
    return supported


def acknowledgement(file: str, offset: int) -> bytes:
    """Return the packet that reports everything up to an offset of a file as durable."""
    payload = struct.pack("<BQ", _REPLY_MAGIC, offset) + file.encode()
    # Each reply starts a new packet sequence, so its number is 0.
    return struct.pack("<I", len(payload)) + payload
