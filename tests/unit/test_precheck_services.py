# SPDX-License-Identifier: Apache-2.0
"""The log retention of a managed server follows the service's setting, not the server's variable."""

from typing import Any

import pytest

from penstock.check.facts import Facts
from penstock.check.precheck import SERVER_CHECKS
from penstock.errors import PrivilegeMissing
from penstock.mysql.connection import MYSQL, ServerIdentity

RDS = {"datadir": "/rdsdbdata/db/"}
AURORA = {"datadir": "/rdsdbdata/db/", "aurora_version": "3.08.0"}
OWN = {"datadir": "/var/lib/mysql/", "binlog_expire_logs_seconds": "2592000"}


class ToldServer:
    """A session on a simulated server that knows only these answers."""

    def __init__(self, variables: dict[str, str], retention: Any, version: str = "8.0.41") -> None:
        # Services leave the server's own variable at its default and ignore it.
        self._variables = {"binlog_expire_logs_seconds": "2592000", **variables}
        self._retention = retention
        self._version = version

    def identity(self) -> ServerIdentity:
        return ServerIdentity(MYSQL, (8, 0, 41), self._version, 1, "uuid", None, "ON")

    def variables(self, *names: str) -> dict[str, str]:
        return {name: value for name, value in self._variables.items() if name in names}

    def query(self, sql: str) -> list[dict[str, Any]]:
        if "rds_configuration" not in sql:
            return []
        if isinstance(self._retention, Exception):
            raise self._retention
        return [{"value": self._retention}]


@pytest.mark.parametrize(
    ("variables", "retention", "severity", "words"),
    [
        (RDS, None, "error", "RDS purges files as soon as"),
        (AURORA, None, "error", "Aurora purges files as soon as"),
        (RDS, "12", "warning", "RDS keeps files for 12 hours"),
        (AURORA, 168, "ok", "Aurora keeps files for 168 hours"),
        (RDS, PrivilegeMissing("denied"), "warning", "may not read"),
        (OWN, AssertionError("there is no such table"), "ok", "kept for 720 hours"),
    ],
)
def test_retention_is_read_from_the_service(
    variables: dict[str, str], retention: Any, severity: str, words: str
) -> None:
    session: Any = ToldServer(variables, retention)
    (finding,) = SERVER_CHECKS["log_expiry"](Facts(session, None))
    assert (finding.severity, words in finding.what) == (severity, True), finding
    if severity == "error":
        assert finding.statement == "CALL mysql.rds_set_configuration('binlog retention hours', 168)"


def test_cloud_sql_names_its_own_setting() -> None:
    session: Any = ToldServer({}, AssertionError("there is no such table"), "8.0.41-google")
    (finding,) = SERVER_CHECKS["log_expiry"](Facts(session, None))
    assert "transactionLogRetentionDays" in finding.what
