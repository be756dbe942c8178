# SPDX-License-Identifier: Apache-2.0
"""The tables that an UPDATE or DELETE changes, read from its table references.

Source: the manuals of MySQL and MariaDB, "JOIN Clause", "UPDATE Statement", "DELETE Statement".
"""

from dataclasses import dataclass

from penstock.model import TableName
from penstock.schema.statements.effects import NotUnderstood, Statement
from penstock.schema.statements.tokens import Kind, TokenCursor, words_of

_OPTIONS = ("LOW_PRIORITY", "QUICK", "IGNORE", "HISTORY")
_QUERY_STARTS = ("SELECT", "WITH", "VALUES", "TABLE")
_BEFORE_TABLE = (",", "JOIN", "STRAIGHT_JOIN")
# Words that can follow a table and are not its alias.
_NO_ALIASES = words_of(
    """CROSS FOR FORCE IGNORE INNER JOIN LEFT LIMIT NATURAL ON ORDER PARTITION RETURNING RIGHT SET
    STRAIGHT_JOIN USE USING WHERE"""
)


@dataclass(frozen=True)
class _Reference:
    """A table in a list of table references; `alias` is its name in the statement."""

    table: TableName
    alias: str


def take_updated_tables(statement: Statement) -> set[TableName]:
    """Parse an UPDATE up to its SET; return the tables it names, all of which it can change.

    Tables of subqueries are only read. Raises NotUnderstood, TextUnreadable.
    """
    while statement.cursor.accept_any(*_OPTIONS):
        continue
    references = _take_references(statement, ("SET",))
    if not statement.cursor.accept("SET"):
        raise NotUnderstood
    return {reference.table for reference in references}


def take_deleted_tables(statement: Statement) -> set[TableName]:
    """Parse a DELETE up to its WHERE; return the tables it deletes from.

    Raises NotUnderstood, TextUnreadable.
    """
    cursor = statement.cursor
    while cursor.accept_any(*_OPTIONS):
        continue
    ends = ("WHERE", "ORDER", "LIMIT", "RETURNING")
    if not cursor.accept("FROM"):
        targets = _take_targets(statement)
        if not cursor.accept("FROM"):
            raise NotUnderstood
        return _resolve(targets, _take_references(statement, ends))
    targets = _take_targets(statement)
    if cursor.accept("USING"):
        return _resolve(targets, _take_references(statement, ends))
    if len(targets) > 1:
        raise NotUnderstood
    return set(targets)


def _take_targets(statement: Statement) -> list[TableName]:
    """Parse `table [.*], table [.*] ...`."""
    targets = []
    while True:
        first, second = statement.take_name(), ""
        if statement.cursor.accept(".") and not statement.cursor.accept("*"):
            second = statement.take_name()
            statement.cursor.accept(".", "*")
        targets.append(TableName(first, second) if second else TableName(statement.database, first))
        statement.named.add(targets[-1])
        if not statement.cursor.accept(","):
            return targets


def _resolve(targets: list[TableName], references: list[_Reference]) -> set[TableName]:
    """Return the tables that targets refer to, by name or alias; all tables if a target matches none."""
    tables: set[TableName] = set()
    for target in targets:
        matching = {
            reference.table
            for reference in references
            if reference.table == target or reference.alias.upper() == target.table.upper()
        }
        if not matching:
            return {reference.table for reference in references} | set(targets)
        tables |= matching
    return tables


def _take_references(statement: Statement, ends: tuple[str, ...]) -> list[_Reference]:
    """Parse table references up to one of these keywords, or to the end of the statement."""
    cursor = statement.cursor
    references: list[_Reference] = []
    is_table_due = True
    while not cursor.ended and cursor.next.upper not in ends:
        if is_table_due:
            if cursor.accept("{", "OJ") or cursor.accept("LATERAL"):
                continue
            if cursor.next.upper == "(" and cursor.ahead(1).upper not in _QUERY_STARTS:
                cursor.take()
                continue
            if cursor.next.upper == "(":
                cursor.within_parentheses()
            elif cursor.next.upper == "JSON_TABLE" and cursor.ahead(1).upper == "(":
                cursor.take()
                cursor.within_parentheses()
            else:
                table = statement.take_table()
                references.append(_Reference(table, _take_alias(cursor) or table.table))
            is_table_due = False
        elif cursor.accept_any(*_BEFORE_TABLE):
            is_table_due = True
        elif cursor.within_parentheses() is None:
            cursor.take()
    return references


def _take_alias(cursor: TokenCursor) -> str:
    """Parse `[PARTITION (...)] [[AS] alias]`; return the alias, "" if there is none."""
    if cursor.accept("PARTITION"):
        cursor.within_parentheses()
    is_alias = cursor.accept("AS") or (
        cursor.next.kind in (Kind.WORD, Kind.NAME, Kind.DOUBLE) and cursor.next.upper not in _NO_ALIASES
    )
    return cursor.take().text if is_alias else ""
