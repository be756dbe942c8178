# SPDX-License-Identifier: Apache-2.0
"""Passwords in statements are hidden from users, but no other text is."""

import pytest

from penstock.schema.statements.secrets import without_secrets


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("CREATE USER 'a'@'b' IDENTIFIED BY 'hunter2'", "CREATE USER 'a'@'b' IDENTIFIED BY '***'"),
        ("create user a identified by password '*AB'", "create user a identified by password '***'"),
        (
            "CREATE USER a IDENTIFIED VIA ed25519 USING 'h' OR unix_socket",
            "CREATE USER a IDENTIFIED VIA ed25519 USING '***' OR unix_socket",
        ),
        (
            "ALTER USER a IDENTIFIED WITH x AS '$A$005$\x01\\'', 'c'@'d' IDENTIFIED BY 'e'",
            "ALTER USER a IDENTIFIED WITH x AS '***', 'c'@'d' IDENTIFIED BY '***'",
        ),
        (
            "ALTER USER a IDENTIFIED WITH x AS 0x2442 REQUIRE NONE",
            "ALTER USER a IDENTIFIED WITH x AS '***' REQUIRE NONE",
        ),
        (
            "GRANT ALL ON *.* TO 'a'@'%' /* x */ IDENTIFIED BY \"p''w\"",
            "GRANT ALL ON *.* TO 'a'@'%' /* x */ IDENTIFIED BY '***'",
        ),
        ("CREATE USER a /*!80000 IDENTIFIED BY 'p' */", "CREATE USER a /*!80000 IDENTIFIED BY '***' */"),
        ("SET PASSWORD FOR 'a'@'b' = 'p'", "SET PASSWORD FOR 'a'@'b' = '***'"),
        ("SET PASSWORD FOR a@b=PASSWORD('p')", "SET PASSWORD FOR a@b=PASSWORD('***')"),
        (
            "CREATE OR REPLACE SERVER s FOREIGN DATA WRAPPER mysql OPTIONS (USER 'a', PASSWORD 'p')",
            "CREATE OR REPLACE SERVER s FOREIGN DATA WRAPPER mysql OPTIONS (USER 'a', PASSWORD '***')",
        ),
        (
            "CHANGE MASTER TO MASTER_USER='a', MASTER_PASSWORD='p'",
            "CHANGE MASTER TO MASTER_USER='a', MASTER_PASSWORD='***'",
        ),
        (
            "CHANGE REPLICATION SOURCE TO SOURCE_PASSWORD = 'p'",
            "CHANGE REPLICATION SOURCE TO SOURCE_PASSWORD = '***'",
        ),
        (
            "CREATE TABLE t (a INT) ENGINE=FEDERATED CONNECTION='mysql://u:p@h/d/t'",
            "CREATE TABLE t (a INT) ENGINE=FEDERATED CONNECTION='***'",
        ),
        (
            'CREATE TABLE t (a INT) ENGINE=SPIDER COMMENT=\'user "u", password "p"\'',
            "CREATE TABLE t (a INT) ENGINE=SPIDER COMMENT='***'",
        ),
        (
            "CREATE TABLE t (a INT) PARTITION BY KEY () (PARTITION p COMMENT=\"password'p'\" ENGINE=SPIDER)",
            "CREATE TABLE t (a INT) PARTITION BY KEY () (PARTITION p COMMENT='***' ENGINE=SPIDER)",
        ),
        (
            "ALTER TABLE t ENGINE=CONNECT OPTION_LIST='Host=h,Password=p', CONNECTION = 'mysql://u:p@h'",
            "ALTER TABLE t ENGINE=CONNECT OPTION_LIST='***', CONNECTION = '***'",
        ),
        ('CREATE TABLE t (a INT) REMOTE_PASSWORD="p"', "CREATE TABLE t (a INT) REMOTE_PASSWORD='***'"),
        ("UPDATE u SET h = PASSWORD('p'), n = 'name'", "UPDATE u SET h = PASSWORD('***'), n = 'name'"),
        ("CREATE USER a IDENTIFIED BY 'open", "(a statement that may hold a password, and cannot be read)"),
    ],
)
def test_password_is_hidden(statement: str, shown: str) -> None:
    assert without_secrets(statement) == shown


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE people (password VARCHAR(9) DEFAULT 'x', connection VARCHAR(9) DEFAULT 'y')",
        "INSERT INTO t (password) VALUES ('p')",
        "CREATE TABLE t (a VARCHAR(9) COMMENT 'it''s')",
        "CREATE TABLE t (a VARCHAR(9) COMMENT 'hash of the password')",
        "UPDATE t SET password = 'p'",
        "",
    ],
)
def test_other_statements_stay_as_they_are(statement: str) -> None:
    assert without_secrets(statement) == statement
