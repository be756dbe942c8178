# SPDX-License-Identifier: Apache-2.0
"""Waiting until a server shows readers everything that its log has.

A server writes a transaction to its log before readers can see it: the sync of the log and semi-synchronous
replicas come in between. With GTIDs, MySQL lists the transactions that are being committed.
"""

import time

from penstock.errors import ServerBusy
from penstock.mysql.connection import MARIADB, Connection

# The longest wait for a logged transaction to be committed: the log's sync and semi-synchronous replicas.
_COMMIT_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.01
# Without GTIDs, the server does not list the transactions that are being committed. A sync takes far less
# than this.
_SETTLE_SECONDS = 1.0


def tells_commits(connection: Connection) -> bool:
    """Return whether the server lists the transactions that are being committed: MySQL with GTIDs does."""
    identity = connection.identity()
    return identity.flavor != MARIADB and identity.gtid_mode.upper() == "ON"


def wait_until_committed(connection: Connection) -> None:
    """Wait until readers see every transaction that is in the log now. Raises ServerBusy."""
    if tells_commits(connection):
        _wait_for_owned(connection)
    else:
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
            raise ServerBusy(
                f"{connection.address}: transactions stand in the log that are not committed: "
                f"{', '.join(sorted(pending))[:200]}",
                hint="SHOW PROCESSLIST tells whether the server waits for a semi-synchronous replica",
            )
        time.sleep(_POLL_SECONDS)
        pending &= _owned(connection)


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
