# SPDX-License-Identifier: Apache-2.0
"""The effects of a logged statement on table definitions.

Every statement is in one of three groups. Either it is listed as changing no definition, or it is parsed, or
it is `Unread`. After an `Unread` statement, the definitions of all tables that it may have changed are read
again from the server. These are the tables named in the statement, or, if it may have changed other tables
too, all tables of the databases listed in its event. The parser never guesses and never raises.

Source: the manuals' "Data Definition Statements" of MySQL and MariaDB.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from penstock.limits import STATEMENT_TOKENS_MAX
from penstock.model import TableName
from penstock.schema.statements.column_types import TypeUnknown
from penstock.schema.statements.effects import (
    AlterTable,
    CreateLike,
    CreateTable,
    DropDatabase,
    DropTable,
    DropUnique,
    Effect,
    NotUnderstood,
    RenameTable,
    SetDatabaseCharset,
    SetKey,
    Statement,
    Step,
    Unread,
    accept_charset,
)
from penstock.schema.statements.tables import alter_table, create_table, unique_key
from penstock.schema.statements.tokens import (
    Kind,
    ServerSpelling,
    TextUnreadable,
    Token,
    TokenCursor,
    read_tokens,
    words_of,
)

# Statements that can be logged as text and do not define tables.
_DEFINE_NOTHING = words_of(
    """ANALYZE BEGIN BINLOG CACHE CALL CHANGE CHECK CHECKSUM CLONE COMMIT DEALLOCATE DELETE DESC DESCRIBE DO
    END EXECUTE EXPLAIN FLUSH GRANT HANDLER HELP INSERT INSTALL KILL LOAD LOCK OPTIMIZE PREPARE PURGE RELEASE
    REPAIR REPLACE RESET RESIGNAL RESTART REVOKE ROLLBACK SAVEPOINT SELECT SET SHOW SHUTDOWN SIGNAL START STOP
    TRUNCATE UNINSTALL UNLOCK UPDATE USE VALUES WITH XA"""
)
_OBJECTS_WITHOUT_ROWS = words_of(
    """CATALOG EVENT FUNCTION INSTANCE LIBRARY LOGFILE PACKAGE PROCEDURE RESOURCE ROLE SERVER SPATIAL
    TABLESPACE TRIGGER UNDO USER VIEW"""
)
# Words that can come between CREATE, ALTER or DROP and the kind of object. A view is logged as CREATE
# ALGORITHM=... DEFINER=... SQL SECURITY DEFINER VIEW, whatever the client sent.
_BEFORE_KIND = words_of(
    """ONLINE OFFLINE IGNORE AGGREGATE FULLTEXT VECTOR PUBLIC SQL SECURITY INVOKER DEFINER JSON
    RELATIONAL DUALITY MATERIALIZED"""
)

_OPENING_WORDS = re.compile(r"(?:\s|/\*.*?\*/)*((?:[a-z_]\w*(?:\s+|$)){1,3})", re.IGNORECASE | re.DOTALL)

_SETS_SQL_MODE = re.compile(r".{0,200}?\bSET\s+STATEMENT\s.*?\bSQL_MODE\b", re.IGNORECASE | re.DOTALL)
# Characters whose meaning depends on the SQL mode, and the mode.
_DEPENDS_ON_SQL_MODE = {'"': "ANSI_QUOTES", "\\": "NO_BACKSLASH_ESCAPES"}

_NAME_ANOTHER_TABLE = (("RENAME",), ("CONVERT", "TABLE"), ("TO", "TABLE"))


def effects_of(text: str, database: str, spelling: ServerSpelling) -> list[Effect]:
    """Return a statement's effects on table definitions, in order; [] if it has none. Never raises.

    `database` is the session's current database, for names without one.
    """
    if _SETS_SQL_MODE.match(text) and not _DEPENDS_ON_SQL_MODE.keys().isdisjoint(text):
        return _effects_in_any_mode(text, database, spelling)
    return effects_of_tokens(read_tokens(text, spelling), database, spelling)


def _effects_in_any_mode(text: str, database: str, spelling: ServerSpelling) -> list[Effect]:
    """Return the effects of a statement whose SQL mode is unknown.

    `SET STATEMENT sql_mode=... FOR` runs its statement in a mode that differs from the one in which its text
    was parsed, and the event records only the mode in which it ran. The text is read in every mode in which
    the server accepts it. If the effects differ between modes, every table that is named in any of them
    becomes `Unread`.
    """
    modes = [spelling.sql_mode]
    for character, flag in _DEPENDS_ON_SQL_MODE.items():
        if character in text:
            modes += [mode ^ {flag} for mode in modes]
    readings: list[list[Effect]] = []
    for mode in modes:
        read_as = spelling.under(mode)
        try:
            tokens = list(islice(read_tokens(text, read_as), STATEMENT_TOKENS_MAX + 1))
        except TextUnreadable:
            # A quote or comment is still open at the end, so the server would have rejected this
            # interpretation.
            continue
        if not _has_stray_backslash(tokens):
            readings.append(effects_of_tokens(tokens, database, read_as))
    if readings and all(effects == readings[0] for effects in readings):
        return readings[0]
    named = [_tables_of(effect) for effects in readings for effect in effects]
    known = [tables for tables in named if tables is not None]
    return [Unread(frozenset().union(*known) if known and len(known) == len(named) else None)]


def _has_stray_backslash(tokens: Sequence[Token]) -> bool:
    """Return whether a backslash is outside of quotes, where servers accept only the `\\N` of NULL."""
    following = (*tokens[1:], Token(Kind.MARK, ""))
    return any(
        token.kind is Kind.MARK and token.text == "\\" and after.upper != "N"
        for token, after in zip(tokens, following, strict=True)
    )


def _tables_of(effect: Effect) -> frozenset[TableName] | None:
    """Return the tables that an effect changes, None if it may change tables that it does not name."""
    match effect:
        case RenameTable(name=name, to=to):
            return frozenset((name, to))
        case CreateTable(name=name) | CreateLike(name=name) | AlterTable(name=name) | DropTable(name=name):
            return frozenset((name,))
        case Unread(tables=tables):
            return tables
    return None


def opening_words(text: str) -> str:
    """Return up to three words from the start of a statement.

    Literals are left out because they may be passwords.
    """
    match = _OPENING_WORDS.match(text)
    return " ".join(match.group(1).split()) if match else "a statement"


def effects_of_tokens(tokens: Iterable[Token], database: str, spelling: ServerSpelling) -> list[Effect]:
    """Return the effects of a statement, given its tokens."""
    cursor = TokenCursor(tokens)
    statement = Statement(cursor, database, spelling)
    try:
        return _statement(statement) if skip_to_verb(cursor) else [Unread(None)]
    except (TextUnreadable, NotUnderstood, TypeUnknown):
        return [Unread(frozenset(statement.named) if statement.confined and statement.named else None)]


def skip_to_verb(cursor: TokenCursor) -> bool:
    """Skip parentheses and `SET STATEMENT variable = value, ... FOR` before a statement's verb.

    MariaDB logs the SET STATEMENT together with its statement. Returns False if no FOR follows.
    """
    while True:
        if cursor.accept("("):
            continue
        if not cursor.accept("SET", "STATEMENT"):
            return True
        while not cursor.accept("FOR"):
            if cursor.ended:
                return False
            if cursor.within_parentheses() is None:
                cursor.take()


def _statement(statement: Statement) -> list[Effect]:
    cursor = statement.cursor
    if cursor.ended:
        return []
    verb = cursor.take().upper
    if verb in _DEFINE_NOTHING:
        return []
    readers: dict[str, Callable[[Statement, str], list[Effect]]] = {
        "CREATE": _create,
        "ALTER": _alter,
        "DROP": _drop,
        "RENAME": _rename,
    }
    if verb not in readers:
        raise NotUnderstood
    temporary = _skip_to_kind(statement)
    kind = cursor.take().upper
    if kind == "UNIQUE" and cursor.accept("INDEX"):
        kind = "UNIQUE INDEX"
    if kind in _OBJECTS_WITHOUT_ROWS:
        return []
    if temporary:
        # Ignore a temporary table, because the log has no rows of it.
        return []
    return readers[verb](statement, kind)


def _skip_to_kind(statement: Statement) -> bool:
    """Skip the words before the kind of object; return whether TEMPORARY was one of them."""
    cursor, temporary = statement.cursor, False
    while True:
        if cursor.accept("TEMPORARY"):
            temporary = True
        elif cursor.accept("OR", "REPLACE"):
            statement.replaces = True
        elif cursor.accept("DEFINER", "=") or cursor.accept("ALGORITHM", "="):
            _take_account(cursor)
        elif cursor.next.upper in _BEFORE_KIND:
            cursor.take()
        else:
            return temporary


def _take_account(cursor: TokenCursor) -> None:
    """Parse `user`, `user@host` or `CURRENT_USER()`."""
    cursor.take()
    if cursor.accept("@"):
        cursor.take()
    cursor.within_parentheses()


def _create(statement: Statement, kind: str) -> list[Effect]:
    cursor = statement.cursor
    keep = cursor.accept("IF", "NOT", "EXISTS")
    if kind in ("DATABASE", "SCHEMA"):
        database = statement.take_name()
        return [SetDatabaseCharset(database, _charset_option(cursor, statement.spelling), keep)]
    if kind in ("INDEX", "UNIQUE INDEX"):
        return _index(statement, unique=kind == "UNIQUE INDEX", if_none=keep)
    statement.confined = kind in ("TABLE", "SEQUENCE")
    if kind == "TABLE":
        return [create_table(statement, keep)]
    if kind == "SEQUENCE":
        statement.take_table()
    raise NotUnderstood


def _alter(statement: Statement, kind: str) -> list[Effect]:
    cursor = statement.cursor
    if kind in ("DATABASE", "SCHEMA"):
        database = statement.database
        if cursor.next.upper not in (
            "CHARACTER",
            "CHAR",
            "CHARSET",
            "COLLATE",
            "DEFAULT",
            "ENCRYPTION",
            "READ",
        ):
            database = statement.take_name()
        charset = _charset_option(cursor, statement.spelling)
        return [SetDatabaseCharset(database, charset)] if charset else []
    if kind == "SEQUENCE":
        return []
    if kind != "TABLE":
        raise NotUnderstood
    cursor.accept("IF", "EXISTS")
    # RENAME TO, and MariaDB's CONVERT TABLE and CONVERT PARTITION ... TO TABLE, name a second table.
    statement.confined = not any(cursor.has(*words) for words in _NAME_ANOTHER_TABLE)
    return alter_table(statement)


def _drop(statement: Statement, kind: str) -> list[Effect]:
    cursor = statement.cursor
    cursor.accept("IF", "EXISTS")
    if kind in ("DATABASE", "SCHEMA"):
        return [DropDatabase(statement.take_name())]
    if kind == "INDEX":
        return _index(statement, drops=True)
    if kind not in ("TABLE", "TABLES", "SEQUENCE"):
        raise NotUnderstood
    names = [statement.take_table()]
    while cursor.accept(","):
        names.append(statement.take_table())
    return [DropTable(name) for name in names]


def _rename(statement: Statement, kind: str) -> list[Effect]:
    if kind not in ("TABLE", "TABLES"):
        raise NotUnderstood
    cursor = statement.cursor
    cursor.accept("IF", "EXISTS")
    effects: list[Effect] = []
    while True:
        name = statement.take_table()
        if cursor.accept("WAIT"):
            cursor.take()
        cursor.accept("NOWAIT")
        if not cursor.accept("TO"):
            raise NotUnderstood
        effects.append(RenameTable(name, statement.take_table()))
        if not cursor.accept(","):
            return effects


def _index(
    statement: Statement, *, drops: bool = False, unique: bool = False, if_none: bool = False
) -> list[Effect]:
    """Parse CREATE INDEX and DROP INDEX, which can change only MariaDB's hidden columns."""
    cursor = statement.cursor
    index = cursor.take()
    while not cursor.ended and not cursor.accept("ON"):
        cursor.take()
    statement.confined = True
    name = statement.take_table()
    if index.text.upper() == "PRIMARY":
        return [AlterTable(name, (SetKey(()),))]
    steps: list[Step] = []
    if statement.spelling.mariadb and (drops or statement.replaces):
        steps.append(DropUnique())
    if statement.spelling.mariadb and unique:
        while not cursor.ended and cursor.next.upper != "(":
            cursor.take()
        steps.append(unique_key(cursor, if_none=if_none))
    return [AlterTable(name, tuple(steps))] if steps else []


def _charset_option(cursor: TokenCursor, spelling: ServerSpelling) -> str | None:
    last_charset = None
    while not cursor.ended:
        charset = accept_charset(cursor, spelling)
        if charset is None:
            cursor.take()
        else:
            last_charset = charset or last_charset
    return last_charset
