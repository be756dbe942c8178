# SPDX-License-Identifier: Apache-2.0
"""What statements in a log mean for a pipeline's tables: emptied, gone, come, or to be read again.

A log shows rows that change, not those that a definition changes: a column added with a default, a column
converted, a table that takes another's name. Such a table is read again from its source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.capture.ddl.effects import (
    AddColumn,
    AlterTable,
    ChangeColumn,
    CreateLike,
    CreateTable,
    DropDatabase,
    DropTable,
    Effect,
    RenameColumn,
    RenameTable,
    SetKey,
    Step,
    Unread,
)
from penstock.capture.ddl.statement import effects_of
from penstock.capture.ddl.tokens import Kind, ServerSpelling, TextUnreadable, tokens_of
from penstock.capture.table_definition import Contradiction, TableDefinition, altered
from penstock.model import Column, TableName, TableSchema
from penstock.pipeline.column_types import keeps_values
from penstock.pipeline.ghosts import table_of_ghost
from penstock.source.reading import LoggedStatement

# What gives rows that are there a value that their log does not show.
_VALUED = {"GENERATED", "AS", "AUTO_INCREMENT", "SERIAL", "DEFAULT", "NOT", "ON"}


@dataclass
class Consequences:
    """What follows from one statement, in tables of the source.

    `emptied` lose their rows. `gone` are no longer there, `come` are there anew, `made` of them for certain
    as they were not there before. `altered` have other columns
    or keys; the rows of those in `reread` have values that the log does not show, those of `unlogged` came or
    went in part without being logged, and those of `replaced` are others altogether. `swapped` took the place
    of their ghost's copy.
    """

    emptied: set[TableName] = field(default_factory=set)
    gone: set[TableName] = field(default_factory=set)
    gone_databases: set[str] = field(default_factory=set)
    come: set[TableName] = field(default_factory=set)
    made: set[TableName] = field(default_factory=set)
    altered: set[TableName] = field(default_factory=set)
    reread: set[TableName] = field(default_factory=set)
    unlogged: set[TableName] = field(default_factory=set)
    replaced: set[TableName] = field(default_factory=set)
    swapped: set[TableName] = field(default_factory=set)


def consequences_of(
    statement: LoggedStatement, spelling: ServerSpelling, columns: Mapping[TableName, Sequence[Column]]
) -> Consequences:
    """Return what follows from a statement; `columns` are those that tables had before it, where known."""
    found = Consequences()
    effects = effects_of(statement.text, statement.database, spelling)
    words = _words(statement.text, spelling)
    for effect in effects:
        _take(found, effect, words, columns)
    found.emptied |= statement.emptied - {effect.name for effect in effects if isinstance(effect, DropTable)}
    found.unlogged |= statement.unlogged
    return found


def _take(
    found: Consequences, effect: Effect, words: list[str], columns: Mapping[TableName, Sequence[Column]]
) -> None:
    match effect:
        case CreateTable(name=name) | CreateLike(name=name):
            found.come.add(name)
            if not effect.keep:
                found.made.add(name)
        case DropTable(name):
            found.gone.add(name)
        case DropDatabase(database):
            found.gone_databases.add(database)
        case AlterTable(name, steps):
            found.altered.add(name)
            if alters_values(steps, words, columns.get(name)):
                found.reread.add(name)
        case RenameTable(name, to):
            found.gone.add(name)
            found.gone.discard(to)
            ghost_of = table_of_ghost(name)
            if ghost_of == to:
                found.swapped.add(to)
            else:
                found.replaced.add(to)
        case Unread(tables):
            found.altered |= tables or frozenset()
            found.reread |= tables or frozenset()


def columns_after(
    name: TableName, columns: Sequence[Column] | None, text: str, database: str, spelling: ServerSpelling
) -> tuple[Column, ...] | None:
    """Return a table's columns after a statement, None where that cannot be told."""
    if columns is None:
        return None
    definition = TableDefinition(TableSchema(name.database, name.table, tuple(columns)), "utf8mb4")
    for effect in effects_of(text, database, spelling):
        if isinstance(effect, AlterTable) and effect.name == name:
            try:
                steps = [step for step in effect.steps if not isinstance(step, SetKey)]
                definition = altered(definition, steps, "utf8mb4")
            except Contradiction:
                return None
        elif isinstance(effect, Unread):
            return None
    return definition.schema.columns


def alters_values(steps: Sequence[Step], words: list[str], before: Sequence[Column] | None) -> bool:
    """Tell whether an ALTER TABLE gives rows that are there values other than null, or other ones."""
    known = {column.name.lower(): column for column in before or ()}
    for step in steps:
        match step:
            case AddColumn(column, _):
                if column.key or not column.nullable or _VALUED & set(_without_null(words)):
                    return True
            case ChangeColumn(name, column, _):
                old = known.get(name.lower())
                if old is None or column.name.lower() != name.lower():
                    return True
                if not keeps_values(old.type_text, column.declared.text):
                    return True
            case RenameColumn() | SetKey():
                return True
    return False


def _words(text: str, spelling: ServerSpelling) -> list[str]:
    try:
        return [
            token.upper or ("" if token.kind is not Kind.MARK else token.text)
            for token in tokens_of(text, spelling)
        ]
    except TextUnreadable:
        return []


def _without_null(words: list[str]) -> list[str]:
    """Return the words without DEFAULT NULL and ON UPDATE clauses of charsets, which give no value."""
    kept: list[str] = []
    at = 0
    while at < len(words):
        if words[at] == "DEFAULT" and words[at + 1 : at + 2] == ["NULL"]:
            at += 2
            continue
        kept.append(words[at])
        at += 1
    return kept
