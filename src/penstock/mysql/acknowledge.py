# SPDX-License-Identifier: Apache-2.0
"""Semi-synchronous replication: a commit on the server waits until a replica has it.

The server asks for it by a mark before an event; the answer names how far the replica has the log. Sources:
MySQL's plugin/semisync (ReplSemiSyncMaster, ReplSemiSyncSlave::slaveReply), MariaDB's semisync_master.cc.
"""

import struct

from penstock.mysql.connection import Connection

_REPLY_MAGIC = 0xEF

# MySQL's plugin goes by two names; MariaDB has it built in.
_ENABLED = ("rpl_semi_sync_source_enabled", "rpl_semi_sync_master_enabled")


def ask_for_marks(connection: Connection) -> bool:
    """Tell the server that we will acknowledge; return whether its dump will carry the marks.

    They come wherever the server knows the feature, also while it is off. Set before the dump begins.
    """
    known = bool(connection.variables(*_ENABLED))
    if known:
        connection.query("SET @rpl_semi_sync_replica = 1, @rpl_semi_sync_slave = 1")
    return known


def acknowledgement(file: str, offset: int) -> bytes:
    """Return the packet that says that everything up to an offset of a file is durable here."""
    payload = struct.pack("<BQ", _REPLY_MAGIC, offset) + file.encode()
    # Each answer begins a sequence of its own: its number is 0.
    return struct.pack("<I", len(payload)) + payload
