# SPDX-License-Identifier: Apache-2.0
"""What statements in a log mean for a pipeline's tables: emptied, gone, come, or to be read again.

A log shows rows that change, not those that a definition changes: a column added with a default, a column
converted, a table that takes another's name. Such a table is read again from its source.
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

# What gives rows that are there a value that their log does not show.
_VALUED = {"GENERATED", "AS", "AUTO_INCREMENT", "SERIAL", "DEFAULT", "NOT", "ON"}
_KEYS = {"PRIMARY", "UNIQUE", "KEY", "INDEX"}
# What declares a column whose values are computed.
_GENERATED = {"GENERATED", "AS"}


@dataclass
class Consequences:
    """What follows from one statement, in tables of the source.

    `emptied` lose their rows. `gone` are no longer there, `come` are there anew, `made` of them for certain
    as they were not there before. `altered` have other columns
    or keys; the rows of those in `reread` have values that the log does not show, those of `rekeyed` among
    them maybe in their keys. Rows of `unlogged` came or went in part without being logged, and those of
    `replaced` are others altogether. A copy took the place of `swapped`; in those of `copied` among them the
    tool that made it says that it has all rows. `dropped` are columns that tables lost, in lower case.
    """

    emptied: set[TableName] = field(default_factory=set)
    gone: set[TableName] = field(default_factory=set)
    gone_databases: set[str] = field(default_factory=set)
    come: set[TableName] = field(default_factory=set)
    made: set[TableName] = field(default_factory=set)
    altered: set[TableName] = field(default_factory=set)
    reread: set[TableName] = field(default_factory=set)
    rekeyed: set[TableName] = field(default_factory=set)
    unlogged: set[TableName] = field(default_factory=set)
    replaced: set[TableName] = field(default_factory=set)
    swapped: set[TableName] = field(default_factory=set)
    copied: set[TableName] = field(default_factory=set)
    dropped: dict[TableName, set[str]] = field(default_factory=dict)
    # Whether it may give a table other keys.
    alters_keys: bool = False


@dataclass(frozen=True)
class TableBefore:
    """A table as it was before a statement, as far as that is known, and as its server has it now.

    `dropped` are columns that it lost, in lower case: its target may still have their values.
    """

    columns: Sequence[Column] | None
    dropped: frozenset[str]
    now: Callable[[], Target | None]


def consequences_of(
    statement: LoggedStatement, spelling: ServerSpelling, tables: Mapping[TableName, TableBefore]
) -> Consequences:
    """Return what follows from a statement; `tables` are those that are known."""
    found = Consequences()
    effects = effects_of(statement.text, statement.database, spelling)
    words = _words(statement.text, spelling)
    for effect in effects:
        _take(found, effect, words, tables)
    found.copied |= found.swapped if is_cut_over(statement.text) else set()
    found.alters_keys = not _KEYS.isdisjoint(words) or any(isinstance(effect, Unread) for effect in effects)
    found.emptied |= statement.emptied - {effect.name for effect in effects if isinstance(effect, DropTable)}
    found.unlogged |= statement.unlogged
    return found


def _take(
    found: Consequences, effect: Effect, words: list[str], tables: Mapping[TableName, TableBefore]
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
            before = tables.get(name, TableBefore(None, frozenset(), lambda: None))
            if alters_values(steps, words, before):
                found.reread.add(name)
                if _alters_key(steps, before):
                    found.rekeyed.add(name)
            found.dropped[name] = _left(steps)
        case RenameTable(name, to):
            found.gone.add(name)
            found.gone.discard(to)
            ghost_of = table_of_ghost(name)
            if ghost_of == to:
                found.swapped.add(to)
            else:
                found.replaced.add(to)
        case Unread(touched):
            found.altered |= touched or frozenset()
            found.reread |= touched or frozenset()
            found.rekeyed |= touched or frozenset()


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
                definition = alter_definition(definition, steps, "utf8mb4")
            except Contradiction:
                return None
        elif isinstance(effect, Unread):
            return None
    return definition.schema.columns


def alters_values(steps: Sequence[Step], words: list[str], before: TableBefore) -> bool:
    """Tell whether an ALTER TABLE may give rows that are there values other than null, or other ones.

    Sessions that are not strict convert what does not fit, and the log does not show which sessions are.
    """
    known = None if before.columns is None else {column.name.lower(): column for column in before.columns}
    dropped = before.dropped | {step.name.lower() for step in steps if isinstance(step, DropColumn)}
    adds = sum(isinstance(step, AddColumn) for step in steps)
    # Without `explicit_defaults_for_timestamp` a TIMESTAMP that does not say NULL has a default of its own.
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
    """Tell whether MODIFY or CHANGE may give a column's rows other values, or another name."""
    column = step.column
    old = known.get(step.name.lower())
    if old is None or column.name.lower() != step.name.lower():
        return True
    if old.nullable and (
        not column.nullable or (column.declared.text.startswith("timestamp") and "NULL" not in words)
    ):
        return True
    if old.charset is not None and not column.charset:
        # It takes the charset of its table, which the server tells.
        now = before.now()
        charset = next((one.charset for one in now.columns if one.name == old.name), None) if now else None
    else:
        charset = column.charset
    if old.charset is not None and not keeps_characters(old.charset, charset):
        return True
    return not keeps_values(old.type_text, column.declared.text)


def _alters_key(steps: Sequence[Step], before: TableBefore) -> bool:
    """Tell whether an ALTER TABLE may give rows other keys."""
    if any(isinstance(step, SetKey | ConvertCharset) for step in steps):
        return True
    now = before.now()
    changed = {step.column.name.lower() for step in steps if isinstance(step, AddColumn | ChangeColumn)}
    changed |= {step.to.lower() for step in steps if isinstance(step, RenameColumn)}
    return now is None or not changed.isdisjoint(name.lower() for name in now.primary_key)


def _left(steps: Sequence[Step]) -> set[str]:
    """Return the names, in lower case, under which a table has no column after an ALTER TABLE, or another
    one."""
    dropped = {step.name.lower() for step in steps if isinstance(step, DropColumn)}
    renamed = {step.name.lower() for step in steps if isinstance(step, RenameColumn | ChangeColumn)}
    kept = {step.column.name.lower() for step in steps if isinstance(step, ChangeColumn)}
    kept |= {step.to.lower() for step in steps if isinstance(step, RenameColumn)}
    return dropped | (renamed - kept)


def same_rows(before: Sequence[Column], after: Sequence[Column]) -> bool:
    """Tell whether a copy of a table has the same columns, and each of them keeps every value."""
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
