# SPDX-License-Identifier: Apache-2.0
"""The tables that a logged statement names, and the rows that it changes without logging them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from penstock.model import TableName, TablePatterns
from penstock.schema.statements.effects import (
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
from penstock.schema.statements.server_functions import GRAMMAR_BEFORE_PARENTHESIS, SERVER_FUNCTIONS
from penstock.schema.statements.statement import effects_of, skip_to_verb
from penstock.schema.statements.table_references import take_deleted_tables, take_updated_tables
from penstock.schema.statements.tokens import (
    Kind,
    ServerSpelling,
    TextUnreadable,
    Token,
    TokenCursor,
    read_tokens,
)

_BEFORE_INSERT_TARGET = ("LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE", "INTO")
_BEFORE_CREATED = (("OR", "REPLACE"), ("TABLE",), ("IF", "NOT", "EXISTS"))
# MariaDB's ANALYZE executes the statement after it, unless one of these words follows.
_ANALYZE_TABLE = ("TABLE", "TABLES", "LOCAL", "NO_WRITE_TO_BINLOG")
_NO_TOKEN = Token(Kind.MARK, "")


@dataclass(frozen=True)
class RowChange:
    """A change of rows that was logged as a statement.

    `tables` are the tables that the text names as changed. `unknown` is the reason why other tables may have
    changed too, and "" if nothing in the text suggests it. `databases` are the databases that the text may
    refer to, in lower case. `may_cascade` is true if the statement can change or delete rows that a foreign
    key refers to.
    """

    tables: frozenset[TableName]
    unknown: str = ""
    databases: frozenset[str] = frozenset()
    may_cascade: bool = False

    def doubt(self, accessed: Sequence[str] | None, selected: TablePatterns) -> str:
        """Return why selected tables that the text does not name may have changed; "" if there is no reason
        to assume this.

        `accessed` are the databases listed in the event, None if the log does not say. MySQL logs the
        databases that were read or changed, also through views, triggers and functions, but none if there are
        more than 16 or a foreign key refers to one of the tables. A trigger or view within the databases that
        the text names cannot be detected.
        """
        if self.unknown and (not accessed or any(map(selected.may_match_in, accessed))):
            return self.unknown
        if accessed is not None and not accessed and self.may_cascade:
            return "foreign keys may refer to its tables"
        hidden = [
            name
            for name in accessed or ()
            if name.lower() not in self.databases and selected.may_match_in(name)
        ]
        if hidden:
            return f"it accessed the database {hidden[0]} through a view, trigger or function"
        return ""


def change_of(text: str, database: str, spelling: ServerSpelling) -> RowChange | None:
    """Return what a statement changes without logging rows; None if, as far as is known, it changes none.

    `database` is the session's current database. CREATE TABLE ... SELECT counts as a change of its table: in
    row format it is logged without the SELECT. Tables that are only read do not count. Never raises.
    """
    statement = Statement(TokenCursor(read_tokens(text, spelling)), database, spelling)
    cursor = statement.cursor
    try:
        verb, queries_at = _take_verb(cursor)
        if verb in ("SELECT", "DO", "CALL", "VALUES"):
            return RowChange(frozenset(), "it was logged for the routines that it calls")
        if verb not in _TABLE_READERS:
            return None
        tables = _TABLE_READERS[verb](statement)
        if tables is None:
            return None
    except (TextUnreadable, NotUnderstood):
        return RowChange(frozenset(statement.named), "its text cannot be read to its end")
    # Up to the current token, INSERT and similar statements contain only names.
    start = 0 if verb in ("UPDATE", "DELETE") else cursor.taken
    # Literals do not matter, but the query positions of a WITH are counted in tokens including literals.
    tokens = read_tokens(text, spelling, without_literals=not queries_at)
    remainder = _Remainder.read(tokens, start, queries_at)
    databases = {name.database.lower() for name in tables} | remainder.qualifiers
    if remainder.has_query:
        databases.add(database.lower())
    may_cascade = verb in ("UPDATE", "DELETE") or remainder.may_replace
    return RowChange(frozenset(tables), remainder.unknown, frozenset(databases), may_cascade)


def _take_verb(cursor: TokenCursor) -> tuple[str, set[int]]:
    """Take a statement's verb and everything before it.

    Return the verb in capitals, and the indexes of the tokens that name the queries of a WITH.
    """
    if not skip_to_verb(cursor):
        raise NotUnderstood
    if cursor.next.upper == "ANALYZE" and cursor.ahead(1).upper not in _ANALYZE_TABLE:
        cursor.take()
        if cursor.accept("FORMAT"):
            cursor.accept("=")
            cursor.take()
    queries_at: set[int] = set()
    if cursor.accept("WITH"):
        cursor.accept("RECURSIVE")
        while True:
            queries_at.add(cursor.taken)
            cursor.take()
            cursor.within_parentheses()
            if not cursor.accept("AS") or cursor.within_parentheses() is None:
                raise NotUnderstood
            if not cursor.accept(","):
                break
        skip_to_verb(cursor)
    return cursor.take().upper, queries_at


def _take_inserted_table(statement: Statement) -> set[TableName]:
    cursor = statement.cursor
    while cursor.accept_any(*_BEFORE_INSERT_TARGET):
        continue
    table = statement.take_table()
    if cursor.accept("PARTITION"):
        cursor.within_parentheses()
    cursor.within_parentheses()
    return {table}


def _take_loaded_table(statement: Statement) -> set[TableName]:
    cursor = statement.cursor
    while not cursor.accept("INTO", "TABLE"):
        if cursor.ended:
            raise NotUnderstood
        cursor.take()
    return {statement.take_table()}


def _take_created_table(statement: Statement) -> set[TableName] | None:
    """Return the table of a CREATE TABLE ... SELECT, None for any other CREATE."""
    cursor = statement.cursor
    for words in _BEFORE_CREATED:
        if not cursor.accept(*words) and words == ("TABLE",):
            return None
    try:
        table = statement.take_table()
        while not cursor.ended:
            if cursor.next.upper in ("SELECT", "VALUES", "TABLE"):
                return {table}
            if cursor.next.upper == "(" and cursor.ahead(1).upper in (
                "SELECT",
                "WITH",
                "VALUES",
                "TABLE",
                "(",
            ):
                return {table}
            if cursor.within_parentheses() is None:
                cursor.take()
    except (TextUnreadable, NotUnderstood):
        # The DDL parser handles this statement.
        pass
    return None


# For each verb, the function that reads the tables that the statement changes. It returns None if the
# statement only defines a table.
_TABLE_READERS: dict[str, Callable[[Statement], set[TableName] | None]] = {
    "INSERT": _take_inserted_table,
    "REPLACE": _take_inserted_table,
    "UPDATE": take_updated_tables,
    "DELETE": take_deleted_tables,
    "LOAD": _take_loaded_table,
    "CREATE": _take_created_table,
}


@dataclass
class _Remainder:
    """What the rest of the tokens reveals about a statement, apart from the changed tables."""

    unknown: str = ""
    qualifiers: set[str] = field(default_factory=set)
    """The words before a dot, in lower case."""
    has_query: bool = False
    may_replace: bool = False

    @classmethod
    def read(cls, tokens: Iterable[Token], start: int, queries_at: set[int]) -> "_Remainder":
        """Read all tokens. Only tokens from `start` on, except query names, can be function calls."""
        remainder = cls()
        before = last = _NO_TOKEN
        try:
            for index, token in enumerate(tokens):
                if token.upper == "(":
                    if index > start and index - 1 not in queries_at and _may_be_routine(before, last):
                        remainder.unknown = f"it calls {last.text}(), which can change any"
                elif token.upper == ".":
                    remainder.qualifiers.add(last.text.lower())
                remainder.has_query |= token.upper in ("SELECT", "TABLE")
                remainder.may_replace |= token.upper in ("REPLACE", "DUPLICATE")
                before, last = last, token
        except TextUnreadable:
            remainder.unknown = "its text cannot be read to its end"
        return remainder


def _may_be_routine(before: Token, name: Token) -> bool:
    """Return whether a token before a parenthesis can name a stored or loadable function."""
    if name.kind in (Kind.MARK, Kind.STRING) or before.upper == "AS":
        return False
    upper = name.text.upper()
    return before.upper == "." or not (upper in SERVER_FUNCTIONS or upper in GRAMMAR_BEFORE_PARENTHESIS)


@dataclass(frozen=True)
class StatementTables:
    """The tables that a definition statement names.

    `named` contains all tables that it defines, renames, drops, alters or empties, and `databases` contains
    the databases that it drops. Tables in `emptied` lose all rows. Tables in `unlogged` gain or lose some
    rows. The log does not contain these row changes. Tables in `created` did not exist before, and have no
    rows.
    """

    named: frozenset[TableName]
    databases: frozenset[str]
    emptied: frozenset[TableName]
    unlogged: frozenset[TableName]
    created: frozenset[TableName] = frozenset()


def tables_of(text: str, database: str, spelling: ServerSpelling) -> StatementTables:
    """Return the tables that a statement defines, alters or empties, as far as it can be parsed.

    Never raises.
    """
    named: set[TableName] = set()
    databases: set[str] = set()
    emptied: set[TableName] = set()
    created: set[TableName] = set()
    for effect in effects_of(text, database, spelling):
        match effect:
            case DropDatabase(dropped):
                databases.add(dropped)
            case Unread(unread):
                named |= unread or frozenset()
            case RenameTable(name, to):
                named |= {name, to}
            case DropTable(name):
                emptied.add(name)
            case CreateTable(name=name, keep=keep) | CreateLike(name=name, keep=keep):
                named.add(name)
                created |= set() if keep else {name}
            case AlterTable(name=name):
                named.add(name)
    statement = Statement(TokenCursor(read_tokens(text, spelling)), database, spelling)
    unlogged: set[TableName] = set()
    try:
        emptied |= _take_emptied_table(statement)
        unlogged |= _take_unlogged_tables(statement)
    except (TextUnreadable, NotUnderstood):
        # The definitions of the named tables are in doubt, and so are their rows.
        unlogged |= statement.named
    named |= statement.named | emptied
    return StatementTables(
        frozenset(named), frozenset(databases), frozenset(emptied), frozenset(unlogged), frozenset(created)
    )


def _take_emptied_table(statement: Statement) -> set[TableName]:
    """Return the table that a TRUNCATE or CREATE OR REPLACE TABLE empties; otherwise stop at the verb."""
    cursor = statement.cursor
    if not skip_to_verb(cursor):
        return set()
    if cursor.accept("TRUNCATE"):
        cursor.accept("TABLE")
        return {statement.take_table()}
    return {statement.take_table()} if cursor.accept("CREATE", "OR", "REPLACE", "TABLE") else set()


def _take_unlogged_tables(statement: Statement) -> set[TableName]:
    """Return the tables whose rows an ALTER TABLE moves, drops or imports; none for other statements."""
    cursor = statement.cursor
    if not cursor.accept("ALTER"):
        return set()
    cursor.accept_any("ONLINE", "OFFLINE")
    ignores = cursor.accept("IGNORE")
    if not cursor.accept("TABLE"):
        return set()
    cursor.accept("IF", "EXISTS")
    table = statement.take_table()
    if cursor.accept("WAIT"):
        cursor.take()
    cursor.accept("NOWAIT")
    # ALTER IGNORE drops rows that violate a new key, and changes values that do not fit.
    tables = {table} if ignores else set()
    for part in cursor.parts():
        moved_tables = _take_moved_tables(part, statement)
        if moved_tables is not None:
            tables |= {table, *moved_tables}
    return tables


def _take_moved_tables(part: TokenCursor, statement: Statement) -> set[TableName] | None:
    """Return the other tables of an ALTER TABLE clause that moves rows; None if it moves none."""
    if part.next.upper in ("DROP", "TRUNCATE") and part.ahead(1).upper == "PARTITION":
        return set()
    if part.next.upper in ("DISCARD", "IMPORT") and part.has("TABLESPACE"):
        return set()
    inner = replace(statement, cursor=part)
    if part.accept("EXCHANGE", "PARTITION") or part.accept("CONVERT", "PARTITION"):
        inner.take_name()
        if not (part.accept("WITH", "TABLE") or part.accept("TO", "TABLE")):
            raise NotUnderstood
        return {inner.take_table()}
    if part.accept("CONVERT", "TABLE"):
        return {inner.take_table()}
    return None
