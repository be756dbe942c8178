# SPDX-License-Identifier: Apache-2.0
"""A table's definition, and what one ALTER TABLE makes of it.

A definition is more than the schema that decodes rows: columns to come take the table's charset, and
MariaDB keeps hidden columns behind the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.capture.ddl.column_types import TypeUnknown, can_hold
from penstock.capture.ddl.effects import (
    AddColumn,
    ChangeColumn,
    ColumnSpelling,
    ConvertCharset,
    CreateTable,
    DropColumn,
    Place,
    RenameColumn,
    SetKey,
    SetTableCharset,
    Step,
)
from penstock.capture.ddl.tables import may_need_hash
from penstock.errors import SchemaInvalid
from penstock.model import Column, TableName, TableSchema


class Contradiction(Exception):
    """A statement does not fit the definition at hand, so the definition is not the server's."""


@dataclass(frozen=True)
class TableDefinition:
    """A schema, the charset new columns take, and how many hidden columns close the row image."""

    schema: TableSchema
    charset: str | None
    hidden_columns: int = 0

    def renamed(self, name: TableName, version: int) -> Self:
        """Return the same definition under a name and version."""
        schema = replace(self.schema, database=name.database, table=name.table, version=version)
        return replace(self, schema=schema)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "schema": self.schema.to_json(),
            "charset": self.charset,
            "hidden_columns": self.hidden_columns,
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` wrote. Raises SchemaInvalid."""
        match value:
            case {"schema": schema, "charset": str() | None as charset, "hidden_columns": int(hidden)}:
                return cls(TableSchema.from_json(schema), charset, hidden)
        raise SchemaInvalid("a table definition needs schema, charset and hidden_columns")


def created(effect: CreateTable, database_charset: str | None) -> TableDefinition:
    """Return what CREATE TABLE defines. Raises Contradiction where a charset cannot be told."""
    charset = effect.charset or database_charset
    columns = [_column(spelling, charset) for spelling in effect.columns]
    draft = _Draft(columns, (), charset)
    draft.set_key(SetKey(effect.key))
    name = effect.name
    return TableDefinition(TableSchema(name.database, name.table, tuple(draft.columns), draft.key), charset)


def altered(
    definition: TableDefinition, steps: Sequence[Step], database_charset: str | None
) -> TableDefinition:
    """Return the definition after the steps of one ALTER TABLE. Raises Contradiction."""
    draft = _Draft(
        list(definition.schema.columns), definition.schema.primary_key, definition.charset, database_charset
    )
    adds_last = any(isinstance(step, AddColumn) and step.place == Place() for step in steps)
    if definition.hidden_columns and adds_last:
        raise Contradiction("the place of a column beside hidden ones is the server's choice")
    if definition.hidden_columns and any(isinstance(step, _MAY_HIDE) for step in steps):
        raise Contradiction("a hidden column may go with the column or the type that needed it")
    # Steps name columns as they were before the statement, so two columns may trade names; a key may name a
    # column that the same statement adds further on.
    drops = [step for step in steps if isinstance(step, DropColumn)]
    renames = [step for step in steps if isinstance(step, RenameColumn)]
    others = [step for step in steps if not isinstance(step, DropColumn | RenameColumn)]
    for drop in drops:
        draft.drop(drop)
    draft.rename(renames)
    # New columns take the charset that the table has after the statement, wherever it names it.
    for step in others:
        draft.set_charset(step)
    for step in sorted(others, key=_turn):
        draft.take(step)
    if not draft.columns:
        raise Contradiction("no column is left")
    schema = replace(definition.schema, columns=tuple(draft.columns), primary_key=draft.key)
    return replace(definition, schema=schema, charset=draft.charset)


def _column(spelling: ColumnSpelling, table_charset: str | None) -> Column:
    try:
        type_text, charset = spelling.declared.resolved(spelling.charset or table_charset)
    except TypeUnknown as problem:
        raise Contradiction(f"the charset of column {spelling.name} cannot be told") from problem
    return Column(spelling.name, type_text, charset, spelling.nullable)


# Charsets that members are converted from without becoming others; those of two bytes a character are not.
_EXTEND_ASCII = (
    "ascii",
    "latin1",
    "latin2",
    "utf8mb3",
    "utf8mb4",
    "cp1250",
    "cp1251",
    "gbk",
    "gb18030",
    "big5",
)
# Steps with which a hidden column of MariaDB may come or go.
_MAY_HIDE = ChangeColumn | ConvertCharset | DropColumn


def _turn(step: Step) -> int:
    """Return a step's turn: new and changed columns are converted too, and a key may name any column."""
    return {ConvertCharset: 1, SetKey: 2}.get(type(step), 0)


class _Draft:
    """Columns and key while steps are taken. Column names ignore case."""

    def __init__(
        self,
        columns: list[Column],
        key: tuple[str, ...],
        charset: str | None,
        database_charset: str | None = None,
    ) -> None:
        self.columns = columns
        self.key = key
        self.charset = charset
        self._database_charset = database_charset

    def take(self, step: Step) -> None:
        actions: dict[type[Any], Callable[[Any], None]] = {
            AddColumn: self.add,
            ChangeColumn: self.change,
            SetKey: self.set_key,
            ConvertCharset: self.convert,
            SetTableCharset: self.set_charset,
        }
        actions[type(step)](step)

    def add(self, step: AddColumn) -> None:
        column = _column(step.column, self.charset)
        self._refuse(column.name)
        self._insert(column, step.place)

    def change(self, step: ChangeColumn) -> None:
        at = self._find(step.name)
        column = _column(step.column, self.charset)
        old = self.columns.pop(at)
        self._refuse(column.name)
        if step.may_add_hash and not may_need_hash(old.type_text):
            raise Contradiction("a unique key over the column may get a hidden column")
        if old.name in self.key:
            column = replace(column, nullable=False)
        self.key = tuple(column.name if name == old.name else name for name in self.key)
        if step.place is None:
            self.columns.insert(at, column)
        else:
            self._insert(column, step.place)

    def rename(self, steps: Sequence[RenameColumn]) -> None:
        new = {self.columns[self._find(step.name)].name: step.to for step in steps}
        self.columns = [replace(one, name=new.get(one.name, one.name)) for one in self.columns]
        if len(new) != len(steps) or len({one.name.lower() for one in self.columns}) != len(self.columns):
            raise Contradiction("two columns would have one name")
        self.key = tuple(new.get(name, name) for name in self.key)

    def drop(self, step: DropColumn) -> None:
        dropped = self.columns.pop(self._find(step.name)).name
        self.key = tuple(name for name in self.key if name != dropped)

    def set_key(self, step: SetKey) -> None:
        places = [self._find(name) for name in step.columns]
        for at in places:
            self.columns[at] = replace(self.columns[at], nullable=False)
        self.key = tuple(self.columns[at].name for at in places)

    def set_charset(self, step: Step) -> None:
        """Take the charset that a step gives the table, if it gives one."""
        if isinstance(step, SetTableCharset | ConvertCharset):
            self.charset = step.charset or self._database_charset

    def convert(self, step: ConvertCharset) -> None:
        charset = step.charset or self._database_charset
        if charset is None or charset == "binary":
            raise Contradiction("the charset to convert to changes types or cannot be told")
        for at, column in enumerate(self.columns):
            if column.type_text.startswith(("enum", "set")) and not (
                column.charset in _EXTEND_ASCII and can_hold(charset, column.type_text)
            ):
                raise Contradiction("the server may convert the members to others")
            if column.charset in (None, "binary", charset):
                continue
            if "text" in column.type_text:
                raise Contradiction("the server widens a TEXT column where the new charset needs it")
            self.columns[at] = replace(column, charset=charset)

    def _insert(self, column: Column, place: Place) -> None:
        if place.first:
            self.columns.insert(0, column)
        elif place.after is not None:
            self.columns.insert(self._find(place.after) + 1, column)
        else:
            self.columns.append(column)

    def _find(self, name: str) -> int:
        for at, column in enumerate(self.columns):
            if column.name.lower() == name.lower():
                return at
        raise Contradiction(f"there is no column {name}")

    def _refuse(self, name: str) -> None:
        if any(column.name.lower() == name.lower() for column in self.columns):
            raise Contradiction(f"there is a column {name} already")
