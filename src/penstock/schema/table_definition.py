# SPDX-License-Identifier: Apache-2.0
"""A table's definition, and how ALTER TABLE changes it.

A definition contains more than the schema needed to decode rows: new columns get the table's charset, and
MariaDB adds hidden columns after the last column.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.errors import SchemaInvalid
from penstock.model import Column, TableName, TableSchema
from penstock.schema.statements.column_types import TypeUnknown, convert_type
from penstock.schema.statements.effects import (
    AddColumn,
    AddUnique,
    ChangeColumn,
    ColumnSpelling,
    ConvertCharset,
    CreateTable,
    DropColumn,
    DropUnique,
    Placement,
    RenameColumn,
    SetKey,
    SetTableCharset,
    SetVersioning,
    SetVisibility,
    Step,
)
from penstock.schema.statements.tables import adds_hash, is_long, may_need_hash


class Contradiction(Exception):
    """A statement does not fit the known definition, so the known definition differs from the server's."""


@dataclass(frozen=True)
class TableDefinition:
    """A schema, the charset of new columns, and the number of hidden columns at the end of the row image.

    `unique_columns` contains, in lower case, all columns of MariaDB's unique keys, and possibly other
    columns. It is None if these columns are unknown.
    """

    schema: TableSchema
    charset: str | None
    hidden_columns: int = 0
    unique_columns: frozenset[str] | None = None

    def renamed(self, name: TableName, version: int) -> Self:
        """Return the same definition with another name and version."""
        schema = replace(self.schema, database=name.database, table=name.table, version=version)
        return replace(self, schema=schema)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "schema": self.schema.to_json(),
            "charset": self.charset,
            "hidden_columns": self.hidden_columns,
            "unique_columns": None if self.unique_columns is None else sorted(self.unique_columns),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read the output of `to_json`. Raises SchemaInvalid."""
        match value:
            case {"schema": schema, "charset": str() | None as charset, "hidden_columns": int(hidden)}:
                # Earlier versions did not write `unique_columns`.
                unique = value.get("unique_columns")
                unique_columns = None if unique is None else frozenset(map(str, unique))
                return cls(TableSchema.from_json(schema), charset, hidden, unique_columns)
        raise SchemaInvalid("a table definition needs schema, charset and hidden_columns")


def create_definition(effect: CreateTable, database_charset: str | None) -> TableDefinition:
    """Return the definition of a CREATE TABLE. Raises Contradiction if a charset is unknown."""
    charset = effect.charset or database_charset
    columns = [_column(spelling, charset) for spelling in effect.columns]
    draft = _Draft(columns, (), charset, unique_columns=frozenset())
    draft.set_key(SetKey(effect.key))
    for step in sorted(effect.steps, key=_order_of):
        draft.apply(step)
    name = effect.name
    schema = TableSchema(name.database, name.table, tuple(draft.columns), draft.key)
    return TableDefinition(schema, charset, draft.hidden_columns, draft.unique_columns)


def alter_definition(
    definition: TableDefinition, steps: Sequence[Step], database_charset: str | None
) -> TableDefinition:
    """Return the definition after all steps of one ALTER TABLE. Raises Contradiction."""
    draft = _Draft(
        list(definition.schema.columns),
        definition.schema.primary_key,
        definition.charset,
        database_charset,
        definition.hidden_columns,
        definition.unique_columns,
    )
    keys = [step for step in steps if isinstance(step, SetKey)]
    if any(step.if_none for step in keys) and not all(step.columns for step in keys):
        raise Contradiction("whether the key is added depends on when the server drops the other one")
    steps = [step for step in steps if draft.applies(step)]
    if any(isinstance(step, ConvertCharset) for step in steps) and any(map(_declares_large, steps)):
        raise Contradiction(
            "the server computes the size of a TEXT or BLOB that it converts as it is declared"
        )
    if draft.hashes and any(draft.may_drop_hash(step) for step in steps):
        raise Contradiction("a hidden column may go with the column or the type that needed it")
    # Steps use the column names from before the statement, so two columns may swap names. A key may name a
    # column that the same statement adds later.
    drops = [step for step in steps if isinstance(step, DropColumn)]
    added = {step.column.name.lower() for step in steps if isinstance(step, AddColumn)}
    if any(step.name.lower() in added for step in drops) and definition.schema.primary_key:
        raise Contradiction("MariaDB keeps a key over a column that another one of its name replaces")
    renames = [step for step in steps if isinstance(step, RenameColumn)]
    if added & set(map(_name_given_up, steps)) & {name.lower() for name in definition.schema.primary_key}:
        raise Contradiction(
            "servers move a key to the new column of its name if that comes first in the table"
        )
    other_steps = [step for step in steps if not isinstance(step, DropColumn | RenameColumn)]
    for drop in drops:
        draft.drop(drop)
    draft.rename(renames)
    # New columns get the charset that the table has after the statement, no matter where in the statement it
    # is set.
    for step in other_steps:
        draft.set_charset(step)
    for step in sorted(other_steps, key=_order_of):
        draft.apply(step)
    if not draft.columns:
        raise Contradiction("no column is left")
    schema = replace(definition.schema, columns=tuple(draft.columns), primary_key=draft.key)
    return TableDefinition(schema, draft.charset, draft.hidden_columns, draft.unique_columns)


def _column(spelling: ColumnSpelling, table_charset: str | None) -> Column:
    try:
        declared = spelling.declared
        type_text, charset = declared.resolve(spelling.charset or declared.charset or table_charset)
    except TypeUnknown as problem:
        raise Contradiction(f"the charset of column {spelling.name} is unknown") from problem
    return Column(spelling.name, type_text, charset, spelling.nullable, spelling.visible)


# Converting ENUM and SET members from these charsets keeps them unchanged. Two-byte charsets such as ucs2 do
# not.
_EXTEND_ASCII = {"ascii", "latin1", "latin2", "utf8mb3", "utf8mb4", "cp1250", "cp1251", "gbk", "gb18030"}
# How MariaDB names the hidden column of a unique key that needs a hash.
HASH_COLUMN = "DB_ROW_HASH_"
_PERIOD = tuple(Column(name, "timestamp(6)", None, False) for name in ("row_start", "row_end"))


def hidden_columns(*, versioned: bool, hashes: int) -> list[Column]:
    """Return the hidden columns that MariaDB appends to a table, named and typed as in its table map."""
    return [*(_PERIOD if versioned else ()), *(hash_column(number) for number in range(1, hashes + 1))]


def hash_column(number: int) -> Column:
    """Return the hidden column in which MariaDB stores the hash of a unique key: the nth of the keys that
    need one.
    """
    return Column(f"{HASH_COLUMN}{number}", "bigint(20) unsigned")


def _order_of(step: Step) -> int:
    """Return the order in which a step applies.

    A key is dropped first, so that its columns may become nullable. Charset conversions follow the changes of
    columns, because they apply to new and changed columns too. Keys come next, because they may name any
    column. Hidden columns come last.
    """
    if isinstance(step, SetKey) and not step.columns:
        return -1
    return {ConvertCharset: 1, SetKey: 2, AddUnique: 2, DropUnique: 2, SetVersioning: 3}.get(type(step), 0)


def _name_given_up(step: Step) -> str | None:
    """Return the lower-case name that a column loses if this step renames it, None if the step renames no
    column.
    """
    match step:
        case RenameColumn(name=name):
            return name.lower()
        case ChangeColumn(name=name, column=column) if name.lower() != column.name.lower():
            return name.lower()
    return None


def _declares_large(step: Step) -> bool:
    """Return whether a step declares a TEXT or BLOB."""
    return isinstance(step, AddColumn | ChangeColumn) and step.column.declared.text.endswith(("text", "blob"))


class _Draft:
    """The columns and keys of a definition while steps are applied. Column names ignore case."""

    def __init__(
        self,
        columns: list[Column],
        key: tuple[str, ...],
        charset: str | None,
        database_charset: str | None = None,
        hidden_columns: int = 0,
        unique_columns: frozenset[str] | None = None,
    ) -> None:
        self.columns = columns
        self.key = key
        self.charset = charset
        self.hidden_columns = hidden_columns
        self.unique_columns = unique_columns
        self._database_charset = database_charset

    def applies(self, step: Step) -> bool:
        """Return whether IF EXISTS or IF NOT EXISTS allows a step, judged by the current columns."""
        match step:
            case AddColumn(keep=True, column=column):
                return not self._has(column.name)
            case (
                ChangeColumn(name=name, if_exists=True)
                | DropColumn(name=name, if_exists=True)
                | RenameColumn(name=name, if_exists=True)
            ):
                return self._has(name)
            case SetKey(if_none=True):
                return not self.key
        return True

    @property
    def hashes(self) -> int:
        """The number of hidden hashes of MariaDB's unique keys, which follow all other columns."""
        hidden = self.columns[len(self.columns) - self.hidden_columns :]
        return len(hidden) - (len(_PERIOD) if tuple(hidden[: len(_PERIOD)]) == _PERIOD else 0)

    def may_drop_hash(self, step: Step) -> bool:
        """Return whether a step may remove the hidden hash of a unique key.

        A wrong answer is noticed: the table map of the next row then has a different number of columns.
        """
        match step:
            case ChangeColumn(name=name) | DropColumn(name=name):
                return self._may_be_unique(name)
            case ConvertCharset():
                return any(
                    is_long(column.type_text) and self._may_be_unique(column.name) for column in self.columns
                )
        return isinstance(step, DropUnique)

    def apply(self, step: Step) -> None:
        actions: dict[type[Any], Callable[[Any], None]] = {
            AddColumn: self.add,
            ChangeColumn: self.change,
            SetVisibility: self.set_visibility,
            SetKey: self.set_key,
            ConvertCharset: self.convert,
            SetTableCharset: self.set_charset,
            AddUnique: self.add_unique,
            DropUnique: lambda _: None,
            SetVersioning: self.set_versioning,
        }
        actions[type(step)](step)

    def add(self, step: AddColumn) -> None:
        column = _column(step.column, self.charset)
        self._refuse(column.name)
        self._insert(column, step.placement)

    def change(self, step: ChangeColumn) -> None:
        at = self._find(step.name)
        column = _column(step.column, self.charset)
        old_column = self.columns.pop(at)
        self._refuse(column.name)
        if (
            step.may_add_hash
            and not may_need_hash(old_column.type_text)
            and self._may_be_unique(old_column.name)
        ):
            raise Contradiction("a unique key over the column may get a hidden column")
        self._rename_unique({old_column.name: column.name})
        if old_column.name in self.key:
            column = replace(column, nullable=False)
        self.key = tuple(column.name if name == old_column.name else name for name in self.key)
        if step.placement is None:
            self.columns.insert(at, column)
        else:
            self._insert(column, step.placement)

    def set_visibility(self, step: SetVisibility) -> None:
        at = self._find(step.name)
        self.columns[at] = replace(self.columns[at], visible=step.visible)

    def rename(self, steps: Sequence[RenameColumn]) -> None:
        new = {self.columns[self._find(step.name)].name: step.to for step in steps}
        self.columns = [replace(column, name=new.get(column.name, column.name)) for column in self.columns]
        if len(new) != len(steps) or len({column.name.lower() for column in self.columns}) != len(
            self.columns
        ):
            raise Contradiction("two columns would have one name")
        self.key = tuple(new.get(name, name) for name in self.key)
        self._rename_unique(new)

    def drop(self, step: DropColumn) -> None:
        dropped = self.columns.pop(self._find(step.name)).name
        self.key = tuple(name for name in self.key if name != dropped)

    def set_key(self, step: SetKey) -> None:
        indexes = [self._find(name) for name in step.columns]
        for at in indexes:
            self.columns[at] = replace(self.columns[at], nullable=False)
        self.key = tuple(self.columns[at].name for at in indexes)
        if self.key and tuple(self.columns[-len(_PERIOD) :]) == _PERIOD:
            self.key = (*self.key, _PERIOD[-1].name)

    def add_unique(self, step: AddUnique) -> None:
        types = [self.columns[self._find(name)].type_text for name, _ in step.columns]
        needs_hash = adds_hash(types, [prefix for _, prefix in step.columns], step.characters_max)
        if needs_hash is None or (needs_hash and step.if_none):
            raise Contradiction("a unique key may get a hidden column")
        if needs_hash:
            self.columns.append(hash_column(self.hashes + 1))
            self.hidden_columns += 1
        if self.unique_columns is not None:
            self.unique_columns |= {name.lower() for name, _ in step.columns}

    def set_versioning(self, step: SetVersioning) -> None:
        """Add or remove row_start and row_end after the last column."""
        if step.versioned and not self.hidden_columns:
            self.columns += _PERIOD
            self.hidden_columns = len(_PERIOD)
            # The server appends the end column of the period to the primary key.
            self.key = (*self.key, _PERIOD[-1].name) if self.key else ()
        elif not step.versioned and tuple(self.columns[-self.hidden_columns :]) == _PERIOD:
            del self.columns[-self.hidden_columns :]
            self.hidden_columns = 0
            self.key = tuple(name for name in self.key if name != _PERIOD[-1].name)
        else:
            raise Contradiction("the place of the columns of a period is the server's choice")

    def set_charset(self, step: Step) -> None:
        """Set the table's charset if the step has one."""
        if isinstance(step, SetTableCharset | ConvertCharset):
            self.charset = step.charset or self._database_charset

    def convert(self, step: ConvertCharset) -> None:
        charset = step.charset or self._database_charset
        if charset is None or charset == "binary":
            raise Contradiction("the charset to convert to changes types or is unknown")
        for at, column in enumerate(self.columns):
            if column.type_text.startswith(("enum", "set")) and not (
                {column.charset, charset} <= _EXTEND_ASCII and column.type_text.isascii()
            ):
                raise Contradiction("the server may convert the members to others")
            if column.charset in (None, "binary", charset):
                continue
            try:
                type_text = convert_type(column.type_text, column.charset, charset)
            except TypeUnknown as problem:
                raise Contradiction(f"the type of {column.name} is unknown") from problem
            self.columns[at] = replace(column, type_text=type_text, charset=charset)

    def _insert(self, column: Column, placement: Placement) -> None:
        if placement.first:
            self.columns.insert(0, column)
        elif placement.after is not None:
            self.columns.insert(self._find(placement.after) + 1, column)
        else:
            # Insert the column before the hidden columns, which the server writes after all others.
            self.columns.insert(len(self.columns) - self.hidden_columns, column)

    def _find(self, name: str) -> int:
        for at, column in enumerate(self.columns):
            if column.name.lower() == name.lower():
                return at
        raise Contradiction(f"there is no column {name}")

    def _may_be_unique(self, name: str) -> bool:
        return self.unique_columns is None or name.lower() in self.unique_columns

    def _rename_unique(self, new: dict[str, str]) -> None:
        if self.unique_columns is not None:
            lower = {name.lower(): to.lower() for name, to in new.items()}
            self.unique_columns = frozenset(lower.get(name, name) for name in self.unique_columns)

    def _has(self, name: str) -> bool:
        return any(column.name.lower() == name.lower() for column in self.columns)

    def _refuse(self, name: str) -> None:
        if self._has(name):
            raise Contradiction(f"there is a column {name} already")
