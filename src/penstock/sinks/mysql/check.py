# SPDX-License-Identifier: Apache-2.0
"""Checks whether a MySQL or MariaDB server can be a target."""

from penstock.model import ServerAddress, is_loopback
from penstock.sinks.mysql.connection import Session
from penstock.sinks.sink import Finding


def encryption_findings(address: ServerAddress) -> list[Finding]:
    """Return a finding if the identity of a remote server is not verified."""
    local = address.unix_socket is not None or is_loopback(address.host)
    if local or address.tls.mode != "preferred":
        return []
    return [
        Finding(
            str(address),
            "ssl_mode is preferred: encrypted where the server offers it, and no proof of which one answers",
            fatal=False,
            mend="Add ?ssl_mode=verify_identity to the URL, and ssl_ca where the authority is your own",
        )
    ]


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
