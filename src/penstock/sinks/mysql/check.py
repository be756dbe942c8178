# SPDX-License-Identifier: Apache-2.0
"""Checks whether a MySQL or MariaDB server can be a target."""

from penstock.sinks.mysql.connection import Session
from penstock.sinks.sink import Finding


def findings(session: Session, statement_bytes: int) -> list[Finding]:
    """Return the problems of a server. Changes nothing."""
    names = ("max_allowed_packet", "super_read_only", "read_only", "binlog_format", "log_bin")
    rows = session.run(
        f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({', '.join(['%s'] * len(names))})", names
    )
    variables = {str(name).lower(): str(value).upper() for name, value in rows}
    where = str(session.address)
    problems = []
    # A statement may exceed its limit by one row, and a row may be long itself.
    if int(variables["max_allowed_packet"]) < 2 * statement_bytes:
        problems.append(
            Finding(
                where,
                f"max_allowed_packet is {variables['max_allowed_packet']}, a statement {statement_bytes}",
                mend=f"SET GLOBAL max_allowed_packet = {4 * statement_bytes}; or set statement_bytes lower",
            )
        )
    if "ON" in (variables.get("super_read_only"), variables.get("read_only")):
        problems.append(
            Finding(
                where,
                "the server is read-only",
                fatal=variables.get("super_read_only") == "ON",
                mend="SET GLOBAL read_only = OFF",
            )
        )
    if variables.get("log_bin") == "ON" and variables.get("binlog_format") == "STATEMENT":
        problems.append(
            Finding(
                where,
                "binlog_format is STATEMENT, under which rows are not written at READ COMMITTED",
                mend="SET GLOBAL binlog_format = ROW",
            )
        )
    return problems
