# SPDX-License-Identifier: Apache-2.0
"""The tables of a server, with their columns and keys."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import ServerAddress, TableName, TablePatterns
from penstock.mysql.connection import MARIADB, READING_SECONDS_MAX, Connection, connect
from penstock.schema.reader import SYSTEM_DATABASES, condition_on, read_tables
from penstock.schema.table_definition import TableDefinition

# Index parts over a column prefix or an expression do not make whole values unique.
_UNIQUE = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, INDEX_NAME AS name, COLUMN_NAME AS `column`,
       SUB_PART AS front
FROM information_schema.STATISTICS
WHERE NON_UNIQUE = 0 AND INDEX_NAME <> 'PRIMARY' AND {which}
ORDER BY TABLE_SCHEMA, TABLE_NAME, INDEX_NAME, SEQ_IN_INDEX"""
_TABLES = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table` FROM information_schema.TABLES
WHERE TABLE_TYPE NOT IN ('VIEW', 'SYSTEM VIEW', 'SEQUENCE') AND TABLE_SCHEMA NOT IN ({marks})"""
_SEQUENCE, _VERSIONED = "SEQUENCE", "SYSTEM VERSIONED"
_KINDS = f"""
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, TABLE_TYPE AS kind FROM information_schema.TABLES
WHERE TABLE_TYPE IN ('{_SEQUENCE}', '{_VERSIONED}') AND {{which}}"""


def targets_of(address: ServerAddress, patterns: TablePatterns | None = None) -> list[Target]:
    """Return every selected table of a server with columns, primary key and unique keys, by name.

    Excludes views, MariaDB's sequences, the server's own databases, and the hidden columns that MariaDB puts
    after the last column. Runs two or three statements for any number of tables. Propagates errors from
    `connect`, and raises OptionInvalid if a selected table is system-versioned.
    """
    with connect(address, READING_SECONDS_MAX) as connection:
        return read_targets(connection, patterns)


def table_names(address: ServerAddress) -> list[TableName]:
    """Return the names of all tables of a server, except views and the server's own databases.

    Propagates errors from `connect`.
    """
    marks = ", ".join(["%s"] * len(SYSTEM_DATABASES))
    with connect(address) as connection:
        return sorted(_name(row) for row in connection.query(_TABLES.format(marks=marks), SYSTEM_DATABASES))


def read_targets(connection: Connection, patterns: TablePatterns | None = None) -> list[Target]:
    """Return the tables like `targets_of`, over an open connection."""
    mariadb = connection.identity().flavor == MARIADB
    condition, arguments = condition_on(patterns)
    which = condition.format(prefix="")
    kinds = (
        {_name(row): row["kind"] for row in connection.query(_KINDS.format(which=which), arguments)}
        if mariadb
        else {}
    )
    _refuse_versioned([name for name, kind in kinds.items() if kind == _VERSIONED], patterns)
    unique = _unique_keys(connection.query(_UNIQUE.format(which=which), arguments))
    targets = [
        _target(definition, unique.get(definition.schema.name, ()), mariadb)
        for definition in read_tables(connection, patterns)
        if kinds.get(definition.schema.name) != _SEQUENCE
    ]
    return sorted(targets, key=lambda target: target.name)


def _refuse_versioned(versioned: Sequence[TableName], patterns: TablePatterns | None) -> None:
    """Raise OptionInvalid if a selected table has system versioning.

    Its log has rows of the history in addition to the current ones: an UPDATE inserts the row as it was, and
    a DELETE only sets the end of the row's period. In a target, rows that the source no longer shows would
    look current.
    """
    selected = sorted(
        name for name in versioned if patterns is None or patterns.matches(name.database, name.table)
    )
    if not selected:
        return
    raise OptionInvalid(
        f"{selected[0]} is system-versioned: its log has rows of its history, which a target would show as"
        " rows of the table",
        hint=f"Add {', '.join(map(str, selected))} to the source's exclude, or drop the versioning:"
        f" ALTER TABLE {selected[0].sql} DROP SYSTEM VERSIONING",
    )


def _target(definition: TableDefinition, unique: tuple[tuple[str, ...], ...], mariadb: bool) -> Target:
    schema = definition.schema
    shown = len(schema.columns) - definition.hidden_columns
    return Target(schema.name, schema.columns[:shown], schema.primary_key, unique, mariadb)


def _unique_keys(parts: Sequence[dict[str, Any]]) -> dict[TableName, tuple[tuple[str, ...], ...]]:
    """Return the unique keys of tables, from the parts of their indexes."""
    indexes: dict[tuple[TableName, str], list[dict[str, Any]]] = defaultdict(list)
    for row in parts:
        indexes[_name(row), str(row["name"])].append(row)
    keys: dict[TableName, list[tuple[str, ...]]] = defaultdict(list)
    for (name, _), parts in indexes.items():
        if all(part["column"] is not None and part["front"] is None for part in parts):
            keys[name].append(tuple(str(part["column"]) for part in parts))
    return {name: tuple(table_keys) for name, table_keys in keys.items()}


def _name(row: dict[str, Any]) -> TableName:
    return TableName(str(row["database"]), str(row["table"]))
