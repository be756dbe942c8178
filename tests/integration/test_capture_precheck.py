# SPDX-License-Identifier: Apache-2.0
"""Provoke each finding on a real server, run its statement, and assert that the finding is gone."""

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.check.facts import Finding
from penstock.check.precheck import SERVER_CHECKS, precheck
from penstock.check.tables import TABLE_CHECKS
from penstock.model import ServerAddress, TablePatterns
from penstock.mysql.connection import connect
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server


def checked(server: Server, tables: str | None = None, user: str = "repl", **options: Any) -> list[Finding]:
    with connect(ServerAddress.parse(server.url(user), **options)) as connection:
        return precheck(connection, TablePatterns(tables))


def severe(findings: list[Finding], name: str | None = None) -> list[Finding]:
    return [finding for finding in findings if finding.severity != "ok" and name in (None, finding.name)]


def apply_fix(server: Server, finding: Finding) -> None:
    assert finding.statement is not None
    for statement in finding.statement.split("; "):
        server.sql(statement)


def test_well_configured_server_passes_the_check(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb", "mariadb11"):
        server = start_server(flavor, sync_binlog=1)
        findings = checked(server)
        assert severe(findings) == []
        assert {finding.name for finding in findings} == set(SERVER_CHECKS) | set(TABLE_CHECKS)


WRONG_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "binlog_format": ("error", {"binlog_format": "MIXED"}),
    "row_image": ("warning", {"binlog_row_image": "MINIMAL"}),
    "row_metadata": ("warning", {"binlog_row_metadata": "MINIMAL"}),
    "checksum": ("warning", {"binlog_checksum": "NONE"}),
    "log_expiry": ("warning", {"binlog_expire_logs_seconds": 3600}),
    "sync_binlog": ("warning", {"sync_binlog": 100}),
}
WRONG_SETTINGS_MYSQL: dict[str, tuple[str, dict[str, Any]]] = {
    "row_value_options": ("warning", {"binlog_row_value_options": "PARTIAL_JSON"}),
    "gtid_mode": ("warning", {"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"}),
}


@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
def test_wrong_settings_are_reported_with_their_fix(start_server: StartServer, flavor: str) -> None:
    wrong = WRONG_SETTINGS | (WRONG_SETTINGS_MYSQL if flavor == "mysql" else {})
    options = {name: value for _, setting in wrong.values() for name, value in setting.items()}
    server = start_server(flavor, **options)
    findings = {finding.name: finding for finding in severe(checked(server))}
    assert {name: finding.severity for name, finding in findings.items()} == {
        name: "error" if name == "row_value_options" else severity for name, (severity, _) in wrong.items()
    }
    for finding in findings.values():
        apply_fix(server, finding)
    assert severe(checked(server)) == []


def test_partial_json_beside_whole_images_is_a_warning(start_server: StartServer) -> None:
    server = start_server("mysql", binlog_row_value_options="PARTIAL_JSON", sync_binlog=1)
    (finding,) = severe(checked(server))
    assert (finding.name, finding.severity) == ("row_value_options", "warning")


def test_settings_without_a_fixing_statement_name_their_option(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        server = start_server(flavor, **{"skip-log-bin": None})
        (off,) = severe(checked(server), "binary_log")
        assert off.severity == "error"
        assert str(off.statement).startswith("[mysqld] log_bin")
        server.close()
        server = start_server(flavor, binlog_do_db="only_this")
        assert [finding.severity for finding in severe(checked(server), "log_filters")] == ["error"]
        server.close()


def test_server_without_an_id_is_reported_with_its_fix(start_server: StartServer) -> None:
    # MariaDB changes the server id 0 to 1 by itself.
    server = start_server("mysql", server_id=0)
    (anonymous,) = severe(checked(server), "server_id")
    apply_fix(server, anonymous)
    assert severe(checked(server), "server_id") == []


def test_encrypted_files_are_a_warning(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("1;" + "a7" * 16 + "\n")
    options = {"plugin_load_add": "file_key_management", "file_key_management_filename": str(keys)}
    server = start_server("mariadb", encrypt_binlog=True, **options)
    (finding,) = severe(checked(server), "log_encryption")
    assert finding.severity == "warning"


def test_missing_privileges_are_reported_and_granted(server: Server) -> None:
    server.sql("DROP USER IF EXISTS pauper; CREATE USER pauper IDENTIFIED BY 'x-1-Y-2'")
    missing = severe(checked(server, user="pauper", password="x-1-Y-2"), "privileges")
    assert [finding.severity for finding in missing] == ["error", "error", "warning"]
    for finding in missing:
        apply_fix(server, finding)
    assert severe(checked(server, user="pauper", password="x-1-Y-2"), "privileges") == []


def test_replica_that_does_not_log_replicated_changes_is_reported(start_server: StartServer) -> None:
    source = start_server("mariadb")
    replica = start_server("mariadb", log_slave_updates=False)
    assert severe(checked(replica), "replica_updates") == []
    replica.sql(f"CHANGE MASTER TO master_host='127.0.0.1', master_port={source.port}, master_user='repl'")
    (finding,) = severe(checked(replica, user="root"), "replica_updates")
    assert finding.severity == "error"


def test_unlogged_cascades_are_reported_with_their_fix(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(
        f"CREATE TABLE {database}.parent (a INT, b INT, PRIMARY KEY (a, b));"
        f"CREATE TABLE {database}.child (id INT PRIMARY KEY, a INT, b INT, CONSTRAINT `odd fk`"
        f" FOREIGN KEY (a, b) REFERENCES {database}.parent (a, b) ON DELETE CASCADE ON UPDATE SET NULL);"
        f"CREATE TABLE {database}.calm (id INT PRIMARY KEY, a INT, b INT,"
        f" FOREIGN KEY (a, b) REFERENCES {database}.parent (a, b))"
    )
    findings = severe(checked(server, f"{database}.*"), "foreign_keys")
    if server.family == "mysql":
        # MySQL 9.7 executes foreign keys in a way that logs their changes.
        assert findings == []
        return
    (finding,) = findings
    assert f"{database}.child" in finding.what
    apply_fix(server, finding)
    assert severe(checked(server, f"{database}.*"), "foreign_keys") == []


def test_native_foreign_keys_of_mysql_are_reported(start_server: StartServer) -> None:
    server = start_server("mysql", innodb_native_foreign_keys=True)
    server.sql(
        "CREATE DATABASE d; CREATE TABLE d.p (a INT PRIMARY KEY); CREATE TABLE d.c (a INT PRIMARY KEY,"
        " FOREIGN KEY (a) REFERENCES d.p (a) ON DELETE CASCADE)"
    )
    key, setting = severe(checked(server), "foreign_keys")
    assert "[mysqld] innodb_native_foreign_keys" in str(setting.statement)
    apply_fix(server, key)
    assert severe(checked(server), "foreign_keys") == []


def test_keyless_tables_are_reported_with_their_fix(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(
        f"CREATE TABLE {database}.bare (a INT); CREATE TABLE {database}.nullable (a INT UNIQUE);"
        f"CREATE TABLE {database}.strict (a INT NOT NULL UNIQUE);"
        f"CREATE TABLE {database}.`k d` (a INT PRIMARY KEY)"
    )
    findings = severe(checked(server, f"{database}.*"), "keys")
    assert [finding.what.split(" ")[0] for finding in findings] == [
        f"{database}.bare",
        f"{database}.nullable",
    ]
    for finding in findings:
        apply_fix(server, finding)
    assert severe(checked(server, f"{database}.*"), "keys") == []


def test_generated_columns_that_the_log_lacks_are_a_warning(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, a INT, b INT AS (a + 1) STORED)")
    server.sql(f"INSERT INTO {database}.t (id, a) VALUES (1, 1); UPDATE {database}.t SET a = 2")
    batches = penstock.read_binlog([str(path) for path in server.binlog_files()], tables=f"{database}.t")
    absent = [row["_metadata"]["absent"] for batch in batches for row in batch.to_arrow().to_pylist()]
    findings = severe(checked(server, f"{database}.*"), "generated_columns")
    assert absent == [None, *([["b"], ["b"]] if findings else [None, None])]
    assert all(f"{database}.t: " in finding.what and ": b" in finding.what for finding in findings)


def test_nontransactional_engines_are_reported_with_their_fix(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    for engine in ("MEMORY", "MyISAM", "InnoDB"):
        server.sql(f"CREATE TABLE {database}.t_{engine} (a INT PRIMARY KEY) ENGINE = {engine}")
    findings = severe(checked(server, f"{database}.*"), "storage_engines")
    assert [finding.what.split(" ")[0] for finding in findings] == [
        f"{database}.t_MEMORY",
        f"{database}.t_MyISAM",
    ]
    for finding in findings:
        apply_fix(server, finding)
    assert severe(checked(server, f"{database}.*"), "storage_engines") == []


def test_old_time_formats_are_reported_with_their_fix(start_server: StartServer) -> None:
    server = start_server("mariadb", mysql56_temporal_format=False)
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY, b DATETIME(3), c TIME(6))")
    setting, table = severe(checked(server), "temporal_format")
    assert "d.t" in table.what
    assert "b, c" in table.what
    apply_fix(server, setting)
    apply_fix(server, table)
    assert severe(checked(server), "temporal_format") == []


def test_prepared_transactions_are_reported(server: Server) -> None:
    server.sql("XA START 'x'; XA END 'x'; XA PREPARE 'x'; XA ROLLBACK 'x'")
    assert [finding.severity for finding in severe(checked(server), "xa")] == ["warning"]


def test_patterns_narrow_the_checked_tables(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.one (a INT); CREATE TABLE {database}.two (a INT)")
    assert len(severe(checked(server, f"{database}.one"), "keys")) == 1
