# SPDX-License-Identifier: Apache-2.0
"""Determines which tables a logged statement empties, drops or adds, and which have to be read again.

A log contains row changes, but not the values that change because of DDL, for example when a column is added
with a default, when a column is converted, or when a table takes the name of another table. The table is then
read again from its source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.changes import Target
from penstock.model import Column, TableName, TableSchema
from penstock.pipeline.column_types import keeps_characters, keeps_column_values, keeps_values
from penstock.pipeline.ghosts import is_cut_over, table_of_ghost
from penstock.schema.statements.effects import (
    AddColumn,
    AlterTable,
    ChangeColumn,
    ConvertCharset,
    CreateLike,
    CreateTable,
    DropColumn,
    DropDatabase,
    DropTable,
    Effect,
    RenameColumn,
    RenameTable,
    SetKey,
    Step,
    Unread,
)
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import Kind, ServerSpelling, TextUnreadable, tokens_of
from penstock.schema.table_definition import Contradiction, TableDefinition, alter_definition
from penstock.source.reading import LoggedStatement

# Words that may give existing rows a value that the log does not contain.
_VALUED = {"GENERATED", "AS", "AUTO_INCREMENT", "SERIAL", "DEFAULT", "NOT", "ON"}
_KEYS = {"PRIMARY", "UNIQUE", "KEY", "INDEX"}
# Words that declare a column with computed values.
_GENERATED = {"GENERATED", "AS"}


@dataclass
class Consequences:
    """The consequences of one statement for tables of the source.

    `emptied` tables lose their rows. `removed` no longer exist. `added` tables exist from now on; those in
    `surely_added` did not exist before. `altered` tables have different columns or keys. Rows of tables in
    `reread` contain values that are not in the log, and rows of tables in `rekeyed` may have different keys.
    In `unlogged` tables, some rows were added or deleted without being logged. In `replaced` tables, all rows
    are different. Each `swapped` table was replaced by a copy; for tables in `copied`, the tool that made the
    copy guarantees that it contains all rows. `dropped` maps tables to the lower-case names of the columns
    that were dropped from them.
    """

    emptied: set[TableName] = field(default_factory=set)
    removed: set[TableName] = field(default_factory=set)
    removed_databases: set[str] = field(default_factory=set)
    added: set[TableName] = field(default_factory=set)
    surely_added: set[TableName] = field(default_factory=set)
    altered: set[TableName] = field(default_factory=set)
    reread: set[TableName] = field(default_factory=set)
    rekeyed: set[TableName] = field(default_factory=set)
    unlogged: set[TableName] = field(default_factory=set)
    replaced: set[TableName] = field(default_factory=set)
    swapped: set[TableName] = field(default_factory=set)
    copied: set[TableName] = field(default_factory=set)
    dropped: dict[TableName, set[str]] = field(default_factory=dict)
    # Whether the statement may change a table's keys.
    alters_keys: bool = False


@dataclass(frozen=True)
class TableBefore:
    """What is known about a table before a statement, and the table as its server defines it now.

    `dropped` contains the lower-case names of columns that were dropped earlier, whose values its target may
    still have.
    """

    columns: Sequence[Column] | None
    dropped: frozenset[str]
    now: Callable[[], Target | None]


def consequences_of(
    statement: LoggedStatement, spelling: ServerSpelling, tables: Mapping[TableName, TableBefore]
) -> Consequences:
    """Return the consequences of a statement. `tables` are the known tables."""
    consequences = Consequences()
    effects = effects_of(statement.text, statement.database, spelling)
    words = _words(statement.text, spelling)
    for effect in effects:
        _apply_effect(consequences, effect, words, tables)
    consequences.copied |= consequences.swapped if is_cut_over(statement.text) else set()
    consequences.alters_keys = not _KEYS.isdisjoint(words) or any(
        isinstance(effect, Unread) for effect in effects
    )
    consequences.emptied |= statement.emptied - {
        effect.name for effect in effects if isinstance(effect, DropTable)
    }
    consequences.unlogged |= statement.unlogged
    return consequences


def _apply_effect(
    consequences: Consequences, effect: Effect, words: list[str], tables: Mapping[TableName, TableBefore]
) -> None:
    match effect:
        case CreateTable(name=name) | CreateLike(name=name):
            consequences.added.add(name)
            if not effect.keep:
                consequences.surely_added.add(name)
        case DropTable(name):
            consequences.removed.add(name)
        case DropDatabase(database):
            consequences.removed_databases.add(database)
        case AlterTable(name, steps):
            consequences.altered.add(name)
            before = tables.get(name, TableBefore(None, frozenset(), lambda: None))
            if alters_values(steps, words, before):
                consequences.reread.add(name)
                if _alters_key(steps, before):
                    consequences.rekeyed.add(name)
            consequences.dropped[name] = _lost_columns(steps)
        case RenameTable(name, to):
            consequences.removed.add(name)
            consequences.removed.discard(to)
            ghost_of = table_of_ghost(name)
            if ghost_of == to:
                consequences.swapped.add(to)
            else:
                consequences.replaced.add(to)
        case Unread(touched):
            consequences.altered |= touched or frozenset()
            consequences.reread |= touched or frozenset()
            consequences.rekeyed |= touched or frozenset()


def columns_after(
    name: TableName, columns: Sequence[Column] | None, text: str, database: str, spelling: ServerSpelling
) -> tuple[Column, ...] | None:
    """Return a table's columns after a statement, None if they cannot be determined."""
    if columns is None:
        return None
    definition = TableDefinition(TableSchema(name.database, name.table, tuple(columns)), "utf8mb4")
    for effect in effects_of(text, database, spelling):
        if isinstance(effect, AlterTable) and effect.name == name:
            try:
                steps = [step for step in effect.steps if not isinstance(step, SetKey)]
                definition = alter_definition(definition, steps, "utf8mb4")
            except Contradiction:
                return None
        elif isinstance(effect, Unread):
            return None
    return definition.schema.columns


def alters_values(steps: Sequence[Step], words: list[str], before: TableBefore) -> bool:
    """Return whether an ALTER TABLE may give existing rows new values other than null.

    Sessions without strict mode convert values that do not fit, and the log does not show the mode.
    """
    known = None if before.columns is None else {column.name.lower(): column for column in before.columns}
    dropped = before.dropped | {step.name.lower() for step in steps if isinstance(step, DropColumn)}
    adds = sum(isinstance(step, AddColumn) for step in steps)
    # Without `explicit_defaults_for_timestamp` a TIMESTAMP column gets a default unless it is declared NULL.
    says_null = words.count("NULL") >= adds
    for step in steps:
        match step:
            case AddColumn(column, _):
                if column.name.lower() in dropped:
                    return True
                if column.key or not column.nullable or _VALUED & set(_without_null(words)):
                    return True
                if column.declared.text.startswith("timestamp") and not says_null:
                    return True
            case ChangeColumn():
                if _GENERATED & set(words) or _changes_values(step, words, known or {}, before):
                    return True
            case ConvertCharset(charset):
                if known is None or not all(
                    column.charset is None or keeps_characters(column.charset, charset)
                    for column in known.values()
                ):
                    return True
            case RenameColumn() | SetKey():
                return True
    return False


def _changes_values(
    step: ChangeColumn, words: list[str], known: Mapping[str, Column], before: TableBefore
) -> bool:
    """Return whether MODIFY or CHANGE may change a column's values or its name."""
    column = step.column
    old = known.get(step.name.lower())
    if old is None or column.name.lower() != step.name.lower():
        return True
    if old.nullable and (
        not column.nullable or (column.declared.text.startswith("timestamp") and "NULL" not in words)
    ):
        return True
    if old.charset is not None and not column.charset:
        # The column takes the charset of its table, which only the server knows.
        now = before.now()
        charset = (
            next((candidate.charset for candidate in now.columns if candidate.name == old.name), None)
            if now
            else None
        )
    else:
        charset = column.charset
    if old.charset is not None and not keeps_characters(old.charset, charset):
        return True
    return not keeps_values(old.type_text, column.declared.text)


def _alters_key(steps: Sequence[Step], before: TableBefore) -> bool:
    """Return whether an ALTER TABLE may change the keys of rows."""
    if any(isinstance(step, SetKey | ConvertCharset) for step in steps):
        return True
    now = before.now()
    changed = {step.column.name.lower() for step in steps if isinstance(step, AddColumn | ChangeColumn)}
    changed |= {step.to.lower() for step in steps if isinstance(step, RenameColumn)}
    # Without a primary key, a mirror finds rows by a unique key.
    return now is None or not changed.isdisjoint(name.lower() for name in now.row_key)


def _lost_columns(steps: Sequence[Step]) -> set[str]:
    """Return the lower-case names of columns that an ALTER TABLE drops, renames or replaces."""
    dropped = {step.name.lower() for step in steps if isinstance(step, DropColumn)}
    renamed = {step.name.lower() for step in steps if isinstance(step, RenameColumn | ChangeColumn)}
    kept = {step.column.name.lower() for step in steps if isinstance(step, ChangeColumn)}
    kept |= {step.to.lower() for step in steps if isinstance(step, RenameColumn)}
    return dropped | (renamed - kept)


def keeps_rows(before: Sequence[Column], after: Sequence[Column]) -> bool:
    """Return whether a copy of a table has the same columns, each of which keeps every value."""
    return [column.name for column in before] == [column.name for column in after] and all(
        map(keeps_column_values, before, after)
    )


def _words(text: str, spelling: ServerSpelling) -> list[str]:
    try:
        return [
            token.upper or ("" if token.kind is not Kind.MARK else token.text)
            for token in tokens_of(text, spelling)
        ]
    except TextUnreadable:
        return []


def _without_null(words: list[str]) -> list[str]:
    """Return the words without DEFAULT NULL, which gives existing rows no value."""
    kept: list[str] = []
    index = 0
    while index < len(words):
        if words[index] == "DEFAULT" and words[index + 1 : index + 2] == ["NULL"]:
            index += 2
            continue
        kept.append(words[index])
        index += 1
    return kept
