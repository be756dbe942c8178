# SPDX-License-Identifier: Apache-2.0
"""The findings of a precheck, and the facts that its checks examine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.model import TablePatterns
from penstock.mysql.connection import MARIADB, Connection, ServerIdentity

Severity = Literal["ok", "warning", "error"]

# Since 8.0, MySQL can keep a setting across restarts with SET PERSIST.
_PERSIST_SINCE = (8, 0, 0)

_VARIABLES = (
    "aurora_version",
    "binlog_checksum",
    "binlog_encryption",
    "binlog_expire_logs_auto_purge",
    "binlog_expire_logs_seconds",
    "binlog_format",
    "binlog_row_image",
    "binlog_row_metadata",
    "binlog_row_value_options",
    "datadir",
    "encrypt_binlog",
    "expire_logs_days",
    "gtid_mode",
    "gtid_slave_pos",
    "innodb_native_foreign_keys",
    "log_bin",
    "log_replica_updates",
    "log_slave_updates",
    "mysql56_temporal_format",
    "server_id",
    "sync_binlog",
)

# The data directory of Amazon RDS and Aurora servers.
_RDS_FOLDER = "/rdsdbdata/"
# The suffix in the version of Cloud SQL servers: 8.0.41-google.
_CLOUD_SQL_MARK = "-google"


@dataclass(frozen=True)
class Finding:
    """A finding about a server.

    `statement` fixes the problem, and is None if no statement can. A `statement` that starts with `[mysqld]`
    is a line for the server's option file, because no SQL statement can set that option.
    """

    name: str
    severity: Severity
    what: str
    statement: str | None = None


class Facts:
    """The facts about a server that the checks examine. Each fact is queried only once."""

    def __init__(self, connection: Connection, patterns: TablePatterns | None) -> None:
        self.connection = connection
        self.patterns = patterns or TablePatterns()
        self.identity: ServerIdentity = connection.identity()
        self.variables = connection.variables(*_VARIABLES)
        self.grants = [str(next(iter(row.values()))) for row in connection.query("SHOW GRANTS")]

    @property
    def mariadb(self) -> bool:
        """Whether the server is MariaDB."""
        return self.identity.flavor == MARIADB

    @property
    def service(self) -> Literal["RDS", "Aurora", "Cloud SQL"] | None:
        """The hosting service that runs the server and purges its files by its own rules; None if unknown."""
        if "aurora_version" in self.variables:
            return "Aurora"
        if self.variables.get("datadir", "").startswith(_RDS_FOLDER):
            return "RDS"
        return "Cloud SQL" if _CLOUD_SQL_MARK in self.identity.version_text else None

    @property
    def logs(self) -> bool:
        """Whether the binlog is on."""
        return self.variables.get("log_bin", "OFF") != "OFF"

    def is_set(self, name: str, value: str) -> bool:
        """Return whether a variable exists and has a value, ignoring case."""
        return self.variables.get(name, "").upper() == value.upper()

    def setting(self, name: str, value: str) -> str:
        """Return the statement that sets a variable, permanently if the server supports that."""
        persists = not self.mariadb and self.identity.version >= _PERSIST_SINCE
        return f"SET {'PERSIST' if persists else 'GLOBAL'} {name} = {value}"

    def may(self, *privileges: str) -> bool:
        """Return whether the account has at least one of these privileges globally, on all databases and
        tables.
        """
        sufficient = {*privileges, "ALL PRIVILEGES"}
        for grant in self.grants:
            privilege_list, _, target = grant.removeprefix("GRANT ").partition(" ON ")
            if target.startswith("*.* ") and sufficient & {
                word.strip() for word in privilege_list.split(",")
            }:
                return True
        return False

    def account(self) -> str:
        """Return the account's name as SQL."""
        user, _, host = str(
            self.connection.query("SELECT CURRENT_USER() AS account")[0]["account"]
        ).rpartition("@")
        return f"'{user}'@'{host}'"


Check = Callable[[Facts], Iterator[Finding]]
