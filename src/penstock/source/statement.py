# SPDX-License-Identifier: Apache-2.0
"""Which tables a logged statement changes without logging their rows.

sqlglot is imported where it is needed: a log in row format never needs it, and its import costs more than
decoding a small file.
"""

import logging
from typing import Any

from penstock.capture.ddl.effects import (
    AlterTable,
    CreateLike,
    CreateTable,
    DropDatabase,
    DropTable,
    NotUnderstood,
    RenameTable,
    Statement,
    Unread,
)
from penstock.capture.ddl.statement import effects_of, skip_to_verb
from penstock.capture.ddl.tokens import ServerSpelling, TextUnreadable, TokenCursor, read_tokens
from penstock.model import TableName

_BEFORE_INSERT_TARGET = ("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE", "INTO")
_BEFORE_ALTERED = ("ONLINE", "OFFLINE", "IGNORE")
_ROUTINE_VERBS = ("SELECT", "DO", "CALL")


def changed_tables(text: str, database: str) -> set[TableName] | None:
    """Return the tables whose rows a logged change may have changed; None where that cannot be told.

    An INSERT changes its target; of any other statement every table counts, so nothing is missed. A SELECT,
    DO or CALL is logged for what its routines change, which the text does not name.
    """
    if (target := _insert_target(text, database)) is not None:
        return {target}
    if _runs_routines(text):
        return None
    from sqlglot import expressions

    statement = _parse(text)
    return statement and (_names(list(statement.find_all(expressions.Table)), database) or None)


def named_by(text: str, database: str) -> tuple[set[TableName], set[str]]:
    """Return the tables that a statement defines or empties, and the databases it drops."""
    tables: set[TableName] = set()
    databases: set[str] = set()
    for effect in effects_of(text, database, ServerSpelling()):
        match effect:
            case DropDatabase(dropped):
                databases.add(dropped)
            case Unread(unread):
                tables |= unread or frozenset()
            case RenameTable(name, to):
                tables |= {name, to}
            case (
                CreateTable(name=name) | CreateLike(name=name) | AlterTable(name=name) | DropTable(name=name)
            ):
                tables.add(name)
    return tables | emptied_tables(text, database), databases


def emptied_tables(text: str, database: str) -> set[TableName]:
    """Return the tables that a TRUNCATE or DROP TABLE empties."""
    try:
        cursor = _cursor(text)
        if cursor.accept("TRUNCATE"):
            cursor.accept("TABLE")
            return {Statement(cursor, database, ServerSpelling()).take_table()}
    except (TextUnreadable, NotUnderstood):
        return set()
    if cursor.next.upper != "DROP":
        return set()
    effects = effects_of(text, database, ServerSpelling())
    return {effect.name for effect in effects if isinstance(effect, DropTable)}


def altered_table(text: str, database: str) -> TableName | None:
    """Return the table that an ALTER TABLE names, whatever it does to it; None for any other statement."""
    try:
        cursor = _cursor(text)
        if not cursor.accept("ALTER"):
            return None
        while any(cursor.accept(word) for word in _BEFORE_ALTERED):
            continue
        if not cursor.accept("TABLE"):
            return None
        if cursor.accept("IF"):
            cursor.accept("EXISTS")
        return Statement(cursor, database, ServerSpelling()).take_table()
    except (TextUnreadable, NotUnderstood):
        return None


def _cursor(text: str) -> TokenCursor:
    """Return a cursor at a statement's verb. Raises TextUnreadable."""
    cursor = TokenCursor(read_tokens(text, ServerSpelling()))
    skip_to_verb(cursor)
    return cursor


def _runs_routines(text: str) -> bool:
    try:
        return _cursor(text).next.upper in _ROUTINE_VERBS
    except TextUnreadable:
        return True


def _insert_target(text: str, database: str) -> TableName | None:
    """Return the table that an INSERT or REPLACE names, None for any other statement."""
    try:
        cursor = _cursor(text)
        if not (cursor.accept("INSERT") or cursor.accept("REPLACE")):
            return None
        while any(cursor.accept(word) for word in _BEFORE_INSERT_TARGET):
            continue
        return Statement(cursor, database, ServerSpelling()).take_table()
    except (TextUnreadable, NotUnderstood):
        return None


def _parse(text: str) -> Any:
    import sqlglot
    from sqlglot.errors import SqlglotError

    # Statements sqlglot passes on unread are reported by its logger; here they are an answer, not a problem.
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        return sqlglot.parse_one(text, dialect="mysql")
    except SqlglotError:
        return None


def _names(tables: list[Any], database: str) -> set[TableName]:
    from sqlglot import expressions

    named = [table for table in tables if isinstance(table, expressions.Table) and table.name]
    return {TableName(table.db or database, table.name) for table in named}
