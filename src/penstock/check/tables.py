# SPDX-License-Identifier: Apache-2.0
"""Checks of tables: missing keys, engines that lose changes, changes and columns that are not logged."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from penstock.check.facts import Check, Facts, Finding
from penstock.model import TableName, TablePatterns
from penstock.narrowed_patterns import nearest_table
from penstock.schema.foreign_keys import read_cascades
from penstock.schema.reader import SYSTEM_DATABASES

_MARKS = ", ".join(["%s"] * len(SYSTEM_DATABASES))

_TABLES = f"""
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, ENGINE AS engine
FROM information_schema.TABLES
WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED') AND TABLE_SCHEMA NOT IN ({_MARKS})
ORDER BY TABLE_SCHEMA, TABLE_NAME"""

# An index identifies rows if it is unique and all of its columns are NOT NULL.
_IDENTIFYING = f"""
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, INDEX_NAME AS name, MAX(NULLABLE) AS nullable
FROM information_schema.STATISTICS
WHERE NON_UNIQUE = 0 AND TABLE_SCHEMA NOT IN ({_MARKS})
GROUP BY TABLE_SCHEMA, TABLE_NAME, INDEX_NAME"""

_OLD_TEMPORAL = f"""
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, COLUMN_NAME AS name
FROM information_schema.COLUMNS
WHERE COLUMN_TYPE LIKE '%%mariadb-5.3%%' AND TABLE_SCHEMA NOT IN ({_MARKS})
ORDER BY TABLE_SCHEMA, TABLE_NAME, ORDINAL_POSITION"""

# Generated columns have an expression, except the period columns of a system-versioned table.
_GENERATED = f"""
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, COLUMN_NAME AS name
FROM information_schema.COLUMNS
WHERE IS_GENERATED = 'ALWAYS' AND GENERATION_EXPRESSION NOT IN ('ROW START', 'ROW END')
    AND TABLE_SCHEMA NOT IN ({_MARKS})
ORDER BY TABLE_SCHEMA, TABLE_NAME, ORDINAL_POSITION"""
# This behaviour was observed on MariaDB 11.8.9. MariaDB 10.11.19 logs changes of generated columns.
_GENERATED_UNLOGGED_SINCE = (11, 8, 9)

_ENGINES = {
    "MEMORY": "is emptied when the server restarts, which the log shows as a statement without rows",
    "BLACKHOLE": "keeps nothing, and updates and deletes on it log no rows",
    "FEDERATED": "shows another server's table: changes made over there are not logged here",
    "CONNECT": "shows outside data: changes made over there are not logged here",
    "SPIDER": "shows other servers' tables: changes made over there are not logged here",
    "MRG_MYISAM": "joins other tables: their changes are logged under their own names",
    "CSV": "is not transactional, and its file can be edited outside: such changes are not logged",
    "MYISAM": "is not transactional: changes of a statement that fails stay",
    "ARIA": "is not transactional: changes of a statement that fails stay",
    "ARCHIVE": "is not transactional: changes of a statement that fails stay",
}


def _selected(facts: Facts, sql: str) -> list[tuple[TableName, dict[str, Any]]]:
    """Return the rows that belong to selected tables."""
    rows = facts.connection.query(sql, SYSTEM_DATABASES)
    named_rows = [(TableName(str(row["database"]), str(row["table"])), row) for row in rows]
    return [(name, row) for name, row in named_rows if facts.patterns.matches(name.database, name.table)]


def _columns_by_table(facts: Facts, sql: str) -> dict[TableName, list[str]]:
    """Return the columns that a query selects, grouped by selected table."""
    tables = defaultdict(list)
    for name, row in _selected(facts, sql):
        tables[name].append(str(row["name"]))
    return tables


def _foreign_keys(facts: Facts) -> Iterator[Finding]:
    """Report foreign keys whose cascading actions are not logged."""
    if facts.is_set("innodb_native_foreign_keys", "OFF"):
        yield Finding("foreign_keys", "ok", "the server logs what foreign keys change")
        return
    cascades = read_cascades(facts.connection, facts.patterns)
    for cascade in cascades:
        yield Finding("foreign_keys", "error", cascade.description, cascade.statement)
    if cascades and "innodb_native_foreign_keys" in facts.variables:
        yield Finding(
            "foreign_keys",
            "error",
            "innodb_native_foreign_keys is ON: InnoDB changes child rows without logging them",
            "[mysqld] innodb_native_foreign_keys = OFF",
        )


def _patterns(facts: Facts) -> Iterator[Finding]:
    """Report patterns that match no table. Otherwise a mistyped name would look like a table without
    problems.
    """
    if not facts.patterns.include:
        return
    rows = facts.connection.query(_TABLES, SYSTEM_DATABASES)
    names = [TableName(str(row["database"]), str(row["table"])) for row in rows]
    for pattern in facts.patterns.include:
        selected = TablePatterns([pattern])
        if not any(selected.matches(name.database, name.table) for name in names):
            what = f"no table that this account sees matches {pattern}. {nearest_table(pattern, names)}"
            yield Finding("tables", "warning", what)


def _keys(facts: Facts) -> Iterator[Finding]:
    identified = {name for name, row in _selected(facts, _IDENTIFYING) if row["nullable"] != "YES"}
    for name, _ in _selected(facts, _TABLES):
        if name not in identified:
            yield Finding(
                "keys",
                "warning",
                f"{name} has no primary key and no unique key without nulls: equal rows cannot be told apart",
                f"ALTER TABLE {name.sql} ADD COLUMN row_key BIGINT UNSIGNED"
                " NOT NULL AUTO_INCREMENT PRIMARY KEY",
            )


def _engines(facts: Facts) -> Iterator[Finding]:
    for name, row in _selected(facts, _TABLES):
        why = _ENGINES.get(str(row["engine"]).upper())
        if why is not None:
            fix = f"ALTER TABLE {name.sql} ENGINE = InnoDB"
            yield Finding("storage_engines", "warning", f"{name} ({row['engine']}) {why}", fix)


def _temporal_format(facts: Facts) -> Iterator[Finding]:
    """Report old-format temporal columns with fractions.

    The table map omits their precision, without which the log alone cannot be decoded.
    """
    if facts.is_set("mysql56_temporal_format", "OFF"):
        yield Finding(
            "temporal_format",
            "error",
            "mysql56_temporal_format is OFF: new TIME, DATETIME and TIMESTAMP columns hide their precision",
            facts.setting("mysql56_temporal_format", "ON"),
        )
    for name, columns in _columns_by_table(facts, _OLD_TEMPORAL).items():
        yield Finding(
            "temporal_format",
            "warning",
            f"{name} keeps times in the old format, without their precision in the log: {', '.join(columns)}",
            f"ALTER TABLE {name.sql} FORCE",
        )


def _generated_columns(facts: Facts) -> Iterator[Finding]:
    """Report generated columns that are missing from the row images of updates and deletes, whatever
    binlog_row_image is.
    """
    if not facts.mariadb or facts.identity.version < _GENERATED_UNLOGGED_SINCE:
        return
    for name, columns in _columns_by_table(facts, _GENERATED).items():
        yield Finding(
            "generated_columns",
            "warning",
            f"{name}: this server logs generated columns of inserted rows only, and a mirror refuses rows"
            f" that lack them. Remove them with a map step (drop): {', '.join(columns)}",
        )


TABLE_CHECKS: dict[str, Check] = {
    "tables": _patterns,
    "foreign_keys": _foreign_keys,
    "keys": _keys,
    "storage_engines": _engines,
    "temporal_format": _temporal_format,
    "generated_columns": _generated_columns,
}
