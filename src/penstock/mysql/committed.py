# SPDX-License-Identifier: Apache-2.0
"""Waits until every transaction in a server's log is visible to readers.

A server writes a transaction to its log before readers can see it: the sync of the log and semi-synchronous
replicas come in between. With GTIDs, MySQL lists the transactions that are being committed.
"""

import time

from penstock.errors import ServerBusy
from penstock.mysql.connection import MARIADB, Connection

# How long a logged transaction may take to be committed. The log's sync and semi-synchronous replicas delay
# the commit.
_COMMIT_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.01
# How long to wait if the server does not use GTIDs and therefore does not list the transactions that are
# being committed. Syncing a commit to disk takes far less than this.
_SETTLE_SECONDS = 1.0
# The variable of MySQL's plugin, under the new and the old name of the plugin. In MariaDB the feature is
# built in.
_WAIT_POINTS = ("rpl_semi_sync_source_wait_point", "rpl_semi_sync_master_wait_point")
_TIMEOUTS = ("rpl_semi_sync_source_timeout", "rpl_semi_sync_master_timeout")


def tells_commits(connection: Connection) -> bool:
    """Return whether the server lists the transactions that are being committed: MySQL with GTIDs does."""
    identity = connection.identity()
    return identity.flavor != MARIADB and identity.gtid_mode.upper() == "ON"


def wait_until_committed(connection: Connection) -> None:
    """Wait until readers see every transaction that is in the log now. Raises ServerBusy."""
    if tells_commits(connection):
        _wait_for_owned(connection)
        return
    time.sleep(_SETTLE_SECONDS)
    if _wait_for_replicas(connection):
        time.sleep(_SETTLE_SECONDS)


def wait_until_defined(connection: Connection) -> None:
    """Wait until information_schema reflects every statement in the log. Raises ServerBusy.

    MariaDB logs a statement while it holds the metadata lock of its tables, and information_schema waits for
    that lock. MySQL reads its data dictionary as of the last commit. Observed on MySQL 9.7 and MariaDB 11.8.
    """
    if connection.identity().flavor != MARIADB:
        wait_until_committed(connection)


def _wait_for_owned(connection: Connection) -> None:
    """Wait until every transaction that is being committed now has been committed."""
    pending = _owned(connection)
    deadline = time.monotonic() + _COMMIT_SECONDS_MAX
    while pending:
        if time.monotonic() > deadline:
            raise _uncommitted(connection, ", ".join(sorted(pending))[:200])
        time.sleep(_POLL_SECONDS)
        pending &= _owned(connection)


def _wait_for_replicas(connection: Connection) -> bool:
    """Wait while transactions wait for a semi-synchronous replica. Return whether any transaction waited.

    With the wait point AFTER_SYNC, such a transaction is in the log, and readers see it once a replica has
    confirmed it or the server's timeout has passed (MySQL's manual, Semisynchronous Replication). If new
    transactions keep arriving, those that were waiting at first have ended by the timeout.
    """
    settings = connection.variables(*_WAIT_POINTS, *_TIMEOUTS)
    if not any(settings.get(name, "").upper() == "AFTER_SYNC" for name in _WAIT_POINTS):
        return False
    seconds = max(int(settings.get(name, 0)) for name in _TIMEOUTS) / 1000
    deadline = time.monotonic() + min(seconds, _COMMIT_SECONDS_MAX)
    has_waited = False
    while (sessions := _waiting_for_replicas(connection)) and time.monotonic() < deadline:
        has_waited = True
        time.sleep(_POLL_SECONDS)
    if sessions and seconds > _COMMIT_SECONDS_MAX:
        raise _uncommitted(connection, f"those of {sessions} sessions")
    return has_waited


def _waiting_for_replicas(connection: Connection) -> int:
    """Return how many sessions wait for a semi-synchronous replica, 0 while the feature is off."""
    rows = connection.query("SHOW GLOBAL STATUS LIKE 'Rpl\\_semi\\_sync\\_%\\_wait\\_sessions'")
    return sum(int(row["Value"]) for row in rows)


def _uncommitted(connection: Connection, transactions: str) -> ServerBusy:
    return ServerBusy(
        f"{connection.address}: transactions stand in the log that are not committed: {transactions}",
        hint="SHOW PROCESSLIST tells whether the server waits for a semi-synchronous replica",
    )


def _owned(connection: Connection) -> set[str]:
    """Return the transactions that are being committed, each with its thread."""
    text = str(connection.query("SELECT @@GLOBAL.gtid_owned AS owned")[0]["owned"] or "")
    owned, server = set(), ""
    for part in text.replace("\n", "").replace(",", ":").split(":"):
        if "-" in part:
            server = part
        elif part:
            owned.add(f"{server}:{part}")
    return owned
