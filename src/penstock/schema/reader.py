# SPDX-License-Identifier: Apache-2.0
"""Reads table definitions from a live server's information_schema.

A row image has all columns that information_schema.COLUMNS lists, in its order, including invisible and
virtual generated columns; observed on MySQL 9.7, MariaDB 10.11 and 11.8. A row image does not contain the
hidden columns that MySQL creates for functional indexes. In MariaDB, hidden columns follow the last listed
column: row_start and row_end of a system-versioned table that does not declare them, and one DB_ROW_HASH_n
for each unique index that is too long for a key.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.model import Column, TableName, TablePatterns, TableSchema
from penstock.mysql.connection import MARIADB, Connection, ServerIdentity
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.effects import charset_name, charset_of_collation
from penstock.schema.statements.tokens import UTF8MB3, ServerSpelling
from penstock.schema.table_definition import TableDefinition, hidden_columns

SYSTEM_DATABASES = ("information_schema", "mysql", "performance_schema", "sys")

_TABLES = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, TABLE_TYPE AS kind, TABLE_COLLATION AS collation
FROM information_schema.TABLES
WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED', 'SEQUENCE') AND {which}"""
_COLUMNS = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, COLUMN_NAME AS name, COLUMN_TYPE AS type_text,
       CHARACTER_SET_NAME AS charset, IS_NULLABLE AS nullable, EXTRA AS extra, COLUMN_KEY AS in_key
FROM information_schema.COLUMNS WHERE {which}
ORDER BY TABLE_SCHEMA, TABLE_NAME, ORDINAL_POSITION"""
_KEYS = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, COLUMN_NAME AS name
FROM information_schema.KEY_COLUMN_USAGE WHERE CONSTRAINT_NAME = 'PRIMARY' AND {which}
ORDER BY TABLE_SCHEMA, TABLE_NAME, ORDINAL_POSITION"""
_HASHED = """
SELECT s.TABLE_SCHEMA AS `database`, s.TABLE_NAME AS `table`, COUNT(DISTINCT s.INDEX_NAME) AS hidden
FROM information_schema.STATISTICS s JOIN information_schema.TABLES t USING (TABLE_SCHEMA, TABLE_NAME)
WHERE s.INDEX_TYPE = 'HASH' AND s.NON_UNIQUE = 0 AND t.ENGINE NOT IN ('MEMORY', 'NDBCLUSTER') AND {which}
GROUP BY s.TABLE_SCHEMA, s.TABLE_NAME"""
_UNIQUE = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, COLUMN_NAME AS name
FROM information_schema.STATISTICS WHERE NON_UNIQUE = 0 AND INDEX_NAME <> 'PRIMARY' AND {which}"""
# The value of MariaDB's old_mode under which `utf8` means `utf8mb3`. In all versions that have this value, it
# is set by default.
_UTF8_MODE, _UTF8_MODE_SINCE = "UTF8_IS_UTF8MB3", (10, 6, 1)
_VERSIONED = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`
FROM information_schema.COLUMNS WHERE GENERATION_EXPRESSION = 'ROW START' AND {which}"""


def read_defaults(connection: Connection) -> ServerDefaults:
    """Read the server's defaults, which apply wherever a statement does not set them."""
    identity = connection.identity()
    variables = connection.variables("character_set_server", "lower_case_table_names", "old_mode")
    rows = connection.query(
        "SELECT SCHEMA_NAME AS name, DEFAULT_CHARACTER_SET_NAME AS charset FROM information_schema.SCHEMATA"
    )
    return ServerDefaults(
        ServerSpelling(identity.flavor == MARIADB, identity.version, utf8=_utf8(identity, variables)),
        charset_name(variables["character_set_server"]) if "character_set_server" in variables else None,
        {str(row["name"]): charset_name(str(row["charset"])) for row in rows},
        variables.get("lower_case_table_names", "0") != "0",
    )


def _utf8(identity: ServerIdentity, variables: Mapping[str, str]) -> str:
    """Return the charset that statements mean by `utf8`. A session may set another `old_mode`, which is not
    logged.
    """
    knows_mode = identity.flavor == MARIADB and identity.version >= _UTF8_MODE_SINCE
    return "utf8mb4" if knows_mode and _UTF8_MODE not in variables.get("old_mode", _UTF8_MODE) else UTF8MB3


def read_tables(connection: Connection, patterns: TablePatterns | None = None) -> list[TableDefinition]:
    """Read every selected table except those of system databases, in one pass over information_schema."""
    return [
        definition
        for definition in _read(connection, *condition_on(patterns))
        if patterns is None or patterns.matches(definition.schema.database, definition.schema.table)
    ]


def condition_on(patterns: TablePatterns | None) -> tuple[str, tuple[str, ...]]:
    """Return a condition on information_schema that every selected table meets, and its arguments.

    The condition names the table if only a single one can be selected: on a server with many thousand tables,
    reading all of them takes seconds. `{prefix}` stands before each column.
    """
    marks = ", ".join(["%s"] * len(SYSTEM_DATABASES))
    condition, arguments = f"{{prefix}}TABLE_SCHEMA NOT IN ({marks})", SYSTEM_DATABASES
    only = None if patterns is None else patterns.single()
    if only is None:
        return condition, arguments
    named = f"{condition} AND {{prefix}}TABLE_SCHEMA = %s AND {{prefix}}TABLE_NAME = %s"
    return named, (*arguments, only.database, only.table)


def read_table(connection: Connection, name: TableName) -> TableDefinition | None:
    """Read one table; None if the server has no table with this name."""
    definitions = _read(
        connection, "{prefix}TABLE_SCHEMA = %s AND {prefix}TABLE_NAME = %s", (name.database, name.table)
    )
    exact = [definition for definition in definitions if definition.schema.name == name]
    # information_schema compares names without case. A name that differs only in case denotes this table only
    # if the server ignores case in table names.
    if (
        exact
        or not definitions
        or connection.variables("lower_case_table_names").get("lower_case_table_names") == "0"
    ):
        return exact[0] if exact else None
    return definitions[0]


def _read(connection: Connection, condition: str, args: Iterable[Any]) -> list[TableDefinition]:
    """Read tables until no table was dropped or replaced between its columns and its key."""
    arguments = tuple(args)
    definitions, doubtful = _read_once(connection, condition, arguments)
    while doubtful:
        # If a table has no primary key, servers mark a unique key without nulls as the primary key, in every
        # read. Such tables are the same when they alone are read again.
        marks = ", ".join(["%s"] * len(doubtful))
        named = f"{condition} AND {{prefix}}TABLE_NAME IN ({marks})"
        again, _ = _read_once(connection, named, (*arguments, *(name.table for name in doubtful)))
        if all(again.get(name) == definitions[name] for name in doubtful):
            break
        definitions, doubtful = _read_once(connection, condition, arguments)
    return list(definitions.values())


def _read_once(
    connection: Connection, condition: str, arguments: tuple[Any, ...]
) -> tuple[dict[TableName, TableDefinition], set[TableName]]:
    """Return the tables by name, and the tables whose key columns are not those of their key."""

    def query(sql: str, prefix: str = "") -> list[dict[str, Any]]:
        return connection.query(sql.format(which=condition.format(prefix=prefix)), arguments)

    tables = {_name(row): row for row in query(_TABLES)}
    columns = defaultdict(list)
    key_columns = defaultdict(set)
    for row in query(_COLUMNS):
        columns[_name(row)].append(_column(row))
        if row["in_key"] == "PRI":
            key_columns[_name(row)].add(str(row["name"]))
    keys = defaultdict(list)
    for row in query(_KEYS):
        keys[_name(row)].append(str(row["name"]))
    hidden: dict[TableName, list[Column]] = {}
    unique: dict[TableName, set[str]] = defaultdict(set)
    if connection.identity().flavor == MARIADB:
        for row in query(_UNIQUE):
            unique[_name(row)].add(str(row["name"]).lower())
        explicit = {_name(row) for row in query(_VERSIONED)}
        implicit = {name for name, row in tables.items() if row["kind"] == "SYSTEM VERSIONED"} - explicit
        hashed = {_name(row): int(row["hidden"]) for row in query(_HASHED, "s.")}
        hidden = {
            name: hidden_columns(versioned=name in implicit, hashes=hashed.get(name, 0))
            for name in implicit | hashed.keys()
        }
    definitions = {
        name: TableDefinition(
            TableSchema(
                name.database, name.table, tuple(columns[name] + hidden.get(name, [])), tuple(keys[name])
            ),
            charset_of_collation(str(row["collation"])) if row["collation"] else None,
            len(hidden.get(name, [])),
            frozenset(unique[name]),
        )
        for name, row in tables.items()
        # Skip a table that was dropped between two of the queries: it has no columns.
        if columns[name]
    }
    return definitions, {name for name in definitions if key_columns[name] != set(keys[name])}


def _name(row: dict[str, Any]) -> TableName:
    return TableName(str(row["database"]), str(row["table"]))


def _column(row: dict[str, Any]) -> Column:
    charset = row["charset"]
    return Column(
        str(row["name"]),
        str(row["type_text"]),
        charset_name(str(charset)) if charset else None,
        row["nullable"] == "YES",
        "INVISIBLE" not in str(row["extra"]).upper(),
    )
