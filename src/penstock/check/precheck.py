# SPDX-License-Identifier: Apache-2.0
"""Checks of a server's settings for anything that would break capture or hide changes.

Every check has a stable name and reports at least once, so the report shows what was checked. Source: the
manuals' "Binary Logging Options and Variables" of MySQL and MariaDB.
"""

from collections.abc import Iterator

from penstock.check.facts import Check, Facts, Finding
from penstock.check.tables import TABLE_CHECKS
from penstock.errors import PrivilegeMissing, ServerUnsupported
from penstock.model import Position, TablePatterns
from penstock.mysql.connection import Connection

# Binlog files must be kept for at least this long, so that a reader that stopped can resume a day later.
EXPIRY_SECONDS_MIN = 24 * 3600
EXPIRY_SECONDS_ADVISED = 7 * 24 * 3600


def precheck(connection: Connection, patterns: TablePatterns | None = None) -> list[Finding]:
    """Return all findings about a server and the selected tables (all tables without patterns).

    Requires no privilege: a check that fails for a missing privilege becomes a finding.
    """
    facts = Facts(connection, patterns)
    findings: list[Finding] = []
    for name, check in {**SERVER_CHECKS, **TABLE_CHECKS}.items():
        try:
            check_findings = list(check(facts))
        except PrivilegeMissing as problem:
            check_findings = [Finding(name, "warning", f"cannot be checked: {problem.message}")]
        findings += check_findings or [Finding(name, "ok", "nothing found")]
    return findings


def _binary_log(facts: Facts) -> Iterator[Finding]:
    if facts.logs:
        yield Finding("binary_log", "ok", "the binary log is on")
    else:
        yield Finding(
            "binary_log",
            "error",
            "the binary log is off: no change is recorded",
            "[mysqld] log_bin = mysql-bin",
        )


def _server_id(facts: Facts) -> Iterator[Finding]:
    if facts.is_set("server_id", "0"):
        yield Finding(
            "server_id",
            "error",
            "server_id is 0: the server serves no replica",
            facts.setting("server_id", "1"),
        )
    else:
        yield Finding("server_id", "ok", f"server_id is {facts.variables.get('server_id')}")


def _format(facts: Facts) -> Iterator[Finding]:
    value = facts.variables.get("binlog_format", "ROW")
    if value.upper() == "ROW":
        yield Finding(
            "binlog_format",
            "ok",
            "binlog_format is ROW; if a session sets another format, the stream stops with an error",
        )
        return
    yield Finding(
        "binlog_format",
        "error",
        f"binlog_format is {value}: changes are logged as statements, without their rows."
        " Sessions that are open keep it until they reconnect",
        facts.setting("binlog_format", "ROW"),
    )


def _row_image(facts: Facts) -> Iterator[Finding]:
    value = facts.variables.get("binlog_row_image", "FULL")
    if value.upper() == "FULL":
        yield Finding("row_image", "ok", "binlog_row_image is FULL")
        return
    yield Finding(
        "row_image",
        "warning",
        f"binlog_row_image is {value}: rows lack columns, which are then marked absent",
        facts.setting("binlog_row_image", "FULL"),
    )


def _row_metadata(facts: Facts) -> Iterator[Finding]:
    value = facts.variables.get("binlog_row_metadata")
    if value is None:
        yield Finding(
            "row_metadata",
            "warning",
            "this server cannot log column names: schemas come from information_schema and the logged DDL",
        )
    elif value.upper() == "FULL":
        yield Finding("row_metadata", "ok", "binlog_row_metadata is FULL: the log names its columns")
    else:
        missing = "columns, signs or character sets" if value.upper() == "NO_LOG" else "columns"
        yield Finding(
            "row_metadata",
            "warning",
            f"binlog_row_metadata is {value}: the log names no {missing}, so definitions must be followed",
            facts.setting("binlog_row_metadata", "FULL"),
        )


def _row_value_options(facts: Facts) -> Iterator[Finding]:
    if not facts.is_set("binlog_row_value_options", "PARTIAL_JSON"):
        yield Finding("row_value_options", "ok", "JSON values are logged whole")
        return
    has_full_images = facts.is_set("binlog_row_image", "FULL")
    yield Finding(
        "row_value_options",
        "warning" if has_full_images else "error",
        "binlog_row_value_options is PARTIAL_JSON: updates log differences of JSON values, "
        + (
            "which are applied to the before image"
            if has_full_images
            else "and the before image may lack the value"
        ),
        facts.setting("binlog_row_value_options", "''"),
    )


def _checksum(facts: Facts) -> Iterator[Finding]:
    if facts.is_set("binlog_checksum", "NONE"):
        yield Finding(
            "checksum",
            "warning",
            "binlog_checksum is NONE: damage on disk or in transit goes unnoticed",
            facts.setting("binlog_checksum", "CRC32"),
        )
    else:
        yield Finding("checksum", "ok", "events carry checksums")


def _privileges(facts: Facts) -> Iterator[Finding]:
    monitor = "BINLOG MONITOR" if facts.mariadb else "REPLICATION CLIENT"
    needed = {
        "REPLICATION SLAVE": (("REPLICATION SLAVE", "REPLICATION REPLICA"), "the log is not sent"),
        monitor: (
            ("REPLICATION CLIENT", "BINLOG MONITOR", "SUPER"),
            "positions and files cannot be asked for",
        ),
    }
    missing = False
    for privilege, (sufficient, consequence) in needed.items():
        if not facts.may(*sufficient):
            missing = True
            yield Finding(
                "privileges",
                "error",
                f"{privilege} is missing: {consequence}",
                f"GRANT {privilege} ON *.* TO {facts.account()}",
            )
    if not facts.may("SELECT"):
        missing = True
        names_logged = facts.is_set("binlog_row_metadata", "FULL")
        yield Finding(
            "privileges",
            "warning" if names_logged else "error",
            "SELECT is not granted on everything: the schema of other tables cannot be read",
            f"GRANT SELECT ON *.* TO {facts.account()}",
        )
    if not missing:
        yield Finding("privileges", "ok", f"REPLICATION SLAVE, {monitor} and SELECT are granted")


def _retention_of_service(facts: Facts) -> Finding:
    """Return how long a hosting service keeps binlog files, regardless of the server's variables.

    Source: the procedure mysql.rds_set_configuration in Amazon's guides of RDS and Aurora, and the setting
    transactionLogRetentionDays in Google's guide of Cloud SQL.
    """
    advised = EXPIRY_SECONDS_ADVISED // 3600
    fix = f"CALL mysql.rds_set_configuration('binlog retention hours', {advised})"
    if facts.service == "Cloud SQL":
        message = (
            "Cloud SQL keeps files for its own point-in-time recovery: look at transactionLogRetentionDays"
        )
        return Finding("log_expiry", "ok", message)
    query = "SELECT value FROM mysql.rds_configuration WHERE name = 'binlog retention hours'"
    try:
        rows = facts.connection.query(query)
    except PrivilegeMissing:
        message = f"{facts.service} purges files by 'binlog retention hours', which this account may not read"
        return Finding("log_expiry", "warning", message, "CALL mysql.rds_show_configuration")
    value = rows[0]["value"] if rows else None
    if value is None:
        message = f"{facts.service} purges files as soon as it needs them no more: any stop may lose changes"
        return Finding("log_expiry", "error", message, fix)
    hours = int(float(value))
    if hours * 3600 < EXPIRY_SECONDS_MIN:
        message = f"{facts.service} keeps files for {hours} hours: a longer stop loses changes"
        return Finding("log_expiry", "warning", message, fix)
    return Finding("log_expiry", "ok", f"{facts.service} keeps files for {hours} hours")


def _expiry(facts: Facts) -> Iterator[Finding]:
    if facts.service is not None:
        yield _retention_of_service(facts)
        return
    seconds = int(float(facts.variables.get("binlog_expire_logs_seconds", "0")))
    seconds = seconds or int(float(facts.variables.get("expire_logs_days", "0")) * 86400)
    if seconds == 0 or facts.is_set("binlog_expire_logs_auto_purge", "OFF"):
        yield Finding("log_expiry", "ok", "files are kept until they are purged by hand")
    elif seconds < EXPIRY_SECONDS_MIN:
        by_seconds = "binlog_expire_logs_seconds" in facts.variables
        fix = (
            facts.setting("binlog_expire_logs_seconds", str(EXPIRY_SECONDS_ADVISED))
            if by_seconds
            else facts.setting("expire_logs_days", str(EXPIRY_SECONDS_ADVISED // 86400))
        )
        yield Finding(
            "log_expiry",
            "warning",
            f"files are purged after {seconds} seconds: a longer stop loses changes",
            fix,
        )
    else:
        yield Finding("log_expiry", "ok", f"files are kept for {seconds // 3600} hours")


def _oldest_log(facts: Facts) -> Iterator[Finding]:
    if not facts.logs:
        return
    logs = facts.connection.binary_logs()
    size = sum(log.bytes for log in logs)
    oldest = logs[0].file
    purged = (
        f"changes before {oldest} are purged" if Position(0, oldest, 4).file_number > 1 else "none is purged"
    )
    yield Finding("oldest_log", "ok", f"binlog files: {len(logs)}, of {size} bytes; {purged}")


def _encryption(facts: Facts) -> Iterator[Finding]:
    for name in ("binlog_encryption", "encrypt_binlog"):
        if facts.is_set(name, "ON"):
            yield Finding(
                "log_encryption",
                "warning",
                f"{name} is ON: the files cannot be read without the server; what the server sends is clear",
                "[mysqld] encrypt_binlog = OFF" if facts.mariadb else facts.setting(name, "OFF"),
            )


def _gtid_mode(facts: Facts) -> Iterator[Finding]:
    mode = facts.identity.gtid_mode
    if mode == "ON":
        yield Finding("gtid_mode", "ok", "transactions carry GTIDs")
        return
    stages = ("OFF_PERMISSIVE", "ON_PERMISSIVE", "ON")
    remaining_stages = stages[stages.index(mode) + 1 :] if mode in stages else stages
    statements = [facts.setting("enforce_gtid_consistency", "ON")]
    statements += [facts.setting("gtid_mode", stage) for stage in remaining_stages]
    yield Finding(
        "gtid_mode",
        "warning",
        f"gtid_mode is {mode}: positions are file and offset only, and end with this server",
        "; ".join(statements),
    )


def _sync_binlog(facts: Facts) -> Iterator[Finding]:
    value = facts.variables.get("sync_binlog", "1")
    if value == "1":
        yield Finding("sync_binlog", "ok", "commits are on disk before they are sent")
        return
    yield Finding(
        "sync_binlog",
        "warning",
        f"sync_binlog is {value}: a power failure may take changes from the server that were already read",
        facts.setting("sync_binlog", "1"),
    )


def _filters(facts: Facts) -> Iterator[Finding]:
    if not facts.logs:
        return
    status = facts.connection.log_status()
    for column, option in (("Binlog_Do_DB", "binlog_do_db"), ("Binlog_Ignore_DB", "binlog_ignore_db")):
        if status.get(column):
            yield Finding(
                "log_filters",
                "error",
                f"{option} is {status[column]}: changes of other databases, or of these, are not logged",
                f"[mysqld] remove {option}",
            )


def _replica_updates(facts: Facts) -> Iterator[Finding]:
    logged = any(facts.is_set(name, "ON") for name in ("log_replica_updates", "log_slave_updates"))
    if logged:
        yield Finding("replica_updates", "ok", "changes that arrive by replication are logged")
        return
    if _is_replica(facts):
        yield Finding(
            "replica_updates",
            "error",
            "the server is a replica and does not log what it replicates",
            "[mysqld] log_slave_updates = ON",
        )
    else:
        yield Finding("replica_updates", "ok", "the server is not a replica")


def _is_replica(facts: Facts) -> bool:
    if not facts.mariadb:
        return bool(facts.connection.query_first(["SHOW REPLICA STATUS", "SHOW SLAVE STATUS"]))
    try:
        return bool(facts.connection.query("SHOW ALL SLAVES STATUS"))
    except PrivilegeMissing:
        # SHOW ALL SLAVES STATUS requires SLAVE MONITOR. The GTIDs replicated so far and the number of running
        # replicas are visible to every account.
        running = facts.connection.query("SHOW GLOBAL STATUS LIKE 'Slaves_running'")
        return bool(facts.variables.get("gtid_slave_pos")) or any(int(row["Value"]) for row in running)


def _hidden_sessions(facts: Facts) -> Iterator[Finding]:
    yield Finding(
        "session_switches",
        "ok",
        "a session with the privilege can hide its changes by sql_log_bin = 0; no server setting shows it",
    )


def _xa(facts: Facts) -> Iterator[Finding]:
    rows = facts.connection.query("SHOW GLOBAL STATUS LIKE 'Com_xa_prepare'")
    if rows and int(rows[0]["Value"]):
        yield Finding(
            "xa",
            "warning",
            f"XA transactions are used ({rows[0]['Value']} prepared since the start): their changes appear at"
            " XA COMMIT, and one that is left prepared holds its rows back",
            "XA RECOVER",
        )


def _version(facts: Facts) -> Iterator[Finding]:
    oldest = (10, 0) if facts.mariadb else (5, 6)
    if facts.identity.version < oldest:
        raise ServerUnsupported(f"{facts.connection.address} runs {facts.identity.version_text}")
    yield Finding("version", "ok", f"{facts.identity.flavor} {facts.identity.version_text}")


SERVER_CHECKS: dict[str, Check] = {
    "version": _version,
    "binary_log": _binary_log,
    "server_id": _server_id,
    "binlog_format": _format,
    "row_image": _row_image,
    "row_metadata": _row_metadata,
    "row_value_options": _row_value_options,
    "checksum": _checksum,
    "privileges": _privileges,
    "log_expiry": _expiry,
    "oldest_log": _oldest_log,
    "log_encryption": _encryption,
    "gtid_mode": _gtid_mode,
    "sync_binlog": _sync_binlog,
    "log_filters": _filters,
    "replica_updates": _replica_updates,
    "session_switches": _hidden_sessions,
    "xa": _xa,
}
