# SPDX-License-Identifier: Apache-2.0
"""Foreign keys whose actions change rows of other tables without being logged.

Where innodb_native_foreign_keys is OFF (since MySQL 9.6), MySQL runs the actions in its SQL layer and logs
the changes. In earlier versions, and in every MariaDB, InnoDB changes the child rows itself, and these
changes do not appear in the log.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from penstock.model import TableName, TablePatterns, quote_name
from penstock.mysql.connection import Connection
from penstock.schema.reader import SYSTEM_DATABASES

# MariaDB hides REFERENTIAL_CONSTRAINTS from accounts with only the SELECT privilege, so the rules are read
# from SHOW CREATE TABLE.
_FOREIGN_KEYS = """
SELECT TABLE_SCHEMA AS `database`, TABLE_NAME AS `table`, CONSTRAINT_NAME AS name, COLUMN_NAME AS column_name,
       REFERENCED_TABLE_SCHEMA AS parent_database, REFERENCED_TABLE_NAME AS parent_table,
       REFERENCED_COLUMN_NAME AS parent_column
FROM information_schema.KEY_COLUMN_USAGE
WHERE REFERENCED_TABLE_NAME IS NOT NULL AND TABLE_SCHEMA NOT IN ({marks})
ORDER BY TABLE_SCHEMA, TABLE_NAME, CONSTRAINT_NAME, ORDINAL_POSITION"""

# A line of SHOW CREATE TABLE: FOREIGN KEY (`a`) REFERENCES `p` (`b`) ON DELETE CASCADE ON UPDATE SET NULL
_RULES = re.compile(r"FOREIGN KEY \((.*?)\) REFERENCES .*?\)((?: ON (?:DELETE|UPDATE) [A-Z ]+)*),?\Z")
_CHANGES_CHILDREN = re.compile(r"CASCADE|SET NULL|SET DEFAULT")


@dataclass(frozen=True)
class Cascade:
    """A foreign key whose actions change rows of `child` when rows of `parent` change.

    `rule` contains the actions as SHOW CREATE TABLE prints them.
    """

    child: TableName
    name: str
    columns: tuple[str, ...]
    parent: TableName
    parent_columns: tuple[str, ...]
    rule: str

    @property
    def description(self) -> str:
        """Describe the problem for a user."""
        return (
            f"{self.child}: foreign key {self.name} ({self.rule}) changes rows that the server does not log"
        )

    @property
    def statement(self) -> str:
        """The statement that keeps the constraint and drops its actions."""
        return (
            f"ALTER TABLE {self.child.sql} DROP FOREIGN KEY {quote_name(self.name)};"
            f" ALTER TABLE {self.child.sql} ADD CONSTRAINT {quote_name(self.name)}"
            f" FOREIGN KEY ({_quoted(self.columns)})"
            f" REFERENCES {self.parent.sql} ({_quoted(self.parent_columns)})"
        )


def read_cascades(connection: Connection, patterns: TablePatterns) -> list[Cascade]:
    """Return those foreign keys of the selected tables whose referential actions change rows without logging
    them.

    The list is empty if the server logs the actions.
    """
    if (
        connection.variables("innodb_native_foreign_keys").get("innodb_native_foreign_keys", "").upper()
        == "OFF"
    ):
        return []
    keys: dict[tuple[TableName, str], list[dict[str, Any]]] = defaultdict(list)
    marks = ", ".join(["%s"] * len(SYSTEM_DATABASES))
    for row in connection.query(_FOREIGN_KEYS.format(marks=marks), SYSTEM_DATABASES):
        name = TableName(str(row["database"]), str(row["table"]))
        if patterns.matches(name.database, name.table):
            keys[name, str(row["name"])].append(row)
    rules = {name: _rules(connection, name) for name in sorted({name for name, _ in keys})}
    cascades = []
    for (name, key), rows in keys.items():
        columns = tuple(str(row["column_name"]) for row in rows)
        rule = rules[name].get(_quoted(columns), "")
        if _CHANGES_CHILDREN.search(rule):
            parent = TableName(str(rows[0]["parent_database"]), str(rows[0]["parent_table"]))
            parent_columns = tuple(str(row["parent_column"]) for row in rows)
            cascades.append(Cascade(name, key, columns, parent, parent_columns, rule))
    return cascades


def _rules(connection: Connection, name: TableName) -> dict[str, str]:
    """Return the rules of a table's foreign keys by their columns."""
    row = connection.query(f"SHOW CREATE TABLE {name.sql}")[0]
    lines = str(row["Create Table"]).splitlines()
    return {match.group(1): match.group(2).strip() for match in map(_RULES.search, lines) if match}


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(map(quote_name, names))
