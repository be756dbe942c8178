# SPDX-License-Identifier: Apache-2.0
"""Waiting until readers of a server see what its log has.

A server writes a transaction to its log before it shows it to readers: the sync of the log, and
semi-synchronous replicas, come in between. With GTIDs MySQL tells which transactions are on their way.
"""

import time

from penstock.errors import ServerBusy
from penstock.mysql.connection import MARIADB, Connection

# So long a transaction that is in the log may take to be committed: its sync, and semi-synchronous replicas.
_COMMIT_SECONDS_MAX = 60.0
_ASK_AGAIN_SECONDS = 0.01
# Without GTIDs nobody tells what is on its way to be committed; a sync of the log takes far less.
_SETTLE_SECONDS = 1.0


def tells_commits(connection: Connection) -> bool:
    """Tell whether the server shows which transactions are on their way: MySQL with GTIDs does."""
    identity = connection.identity()
    return identity.flavor != MARIADB and identity.gtid_mode.upper() == "ON"


def wait_until_committed(connection: Connection) -> None:
    """Wait until readers see every transaction that stands in the log now. Raises ServerBusy."""
    if tells_commits(connection):
        _wait_for_owned(connection)
    else:
        time.sleep(_SETTLE_SECONDS)


def wait_until_defined(connection: Connection) -> None:
    """Wait until information_schema shows what every statement in the log has made. Raises ServerBusy.

    MariaDB logs a statement under the metadata lock of its tables, for which information_schema waits; MySQL
    reads its data dictionary as of the last commit. Found on MySQL 9.7 and MariaDB 11.8.
    """
    if connection.identity().flavor != MARIADB:
        wait_until_committed(connection)


def _wait_for_owned(connection: Connection) -> None:
    """Wait until every transaction that is being committed now is."""
    waiting = _owned(connection)
    deadline = time.monotonic() + _COMMIT_SECONDS_MAX
    while waiting:
        if time.monotonic() > deadline:
            raise ServerBusy(
                f"{connection.address}: transactions stand in the log that are not committed: "
                f"{', '.join(sorted(waiting))[:200]}",
                hint="SHOW PROCESSLIST tells whether the server waits for a semi-synchronous replica",
            )
        time.sleep(_ASK_AGAIN_SECONDS)
        waiting &= _owned(connection)


def _owned(connection: Connection) -> set[str]:
    """Return the transactions that are on their way through the commit, each with its thread."""
    text = str(connection.query("SELECT @@GLOBAL.gtid_owned AS owned")[0]["owned"] or "")
    found, server = set(), ""
    for part in text.replace("\n", "").replace(",", ":").split(":"):
        if "-" in part:
            server = part
        elif part:
            found.add(f"{server}:{part}")
    return found
