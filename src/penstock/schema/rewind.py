# SPDX-License-Identifier: Apache-2.0
"""The definition of a table at an earlier position, derived from its current definition.

A server only provides the current definitions, but the rows that are read come from an earlier position of
the log. The effects of the statements between this position and the present are therefore undone one by one.
If a statement cannot be undone (a dropped column, a changed type), no definition is returned: a schema is
never assumed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from penstock.model import Position, StatementSession, TableName
from penstock.schema.statements.effects import (
    AddColumn,
    AddUnique,
    AlterTable,
    ConvertCharset,
    CreateLike,
    CreateTable,
    DropDatabase,
    DropTable,
    Effect,
    RenameColumn,
    RenameTable,
    SetKey,
    SetTableCharset,
    SetVisibility,
    Step,
    Unread,
)
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition


@dataclass(frozen=True)
class LoggedStatement:
    """A statement from the log, with its session and database. `position` is the end of the statement's
    event.
    """

    position: Position
    database: str
    text: str
    session: StatementSession = field(default_factory=StatementSession)
    _effects: dict[ServerSpelling, list[Effect]] = field(default_factory=dict, repr=False, compare=False)

    def effects(self, spelling: ServerSpelling) -> list[Effect]:
        """Return the statement's effects on table definitions. The statement is parsed once, and the effects
        are cached for all tables.
        """
        if spelling not in self._effects:
            self._effects[spelling] = effects_of(
                self.text, self.database, spelling.under(self.session.sql_mode)
            )
        return self._effects[spelling]


class CannotRewind(Exception):
    """A statement cannot be undone, so the definition before the statement is unknown."""

    def __init__(self, statement: LoggedStatement) -> None:
        super().__init__(statement)
        self.statement = statement


def definition_before(
    name: TableName,
    statements: Iterable[LoggedStatement],
    read_now: Callable[[TableName], TableDefinition | None],
    spelling: ServerSpelling,
) -> TableDefinition | None:
    """Return the definition a table had before the statements ran, None if the server has lost the table.

    `read_now` is called with the name that the table has after all statements. Raises CannotRewind.
    """
    current_name = name
    alterations: list[tuple[tuple[Step, ...], LoggedStatement]] = []
    for statement in statements:
        for effect in statement.effects(spelling):
            if isinstance(effect, RenameTable) and effect.name == current_name:
                current_name = effect.to
            elif isinstance(effect, AlterTable) and effect.name == current_name:
                alterations.append((effect.steps, statement))
            elif _ends(effect, current_name, statement.session):
                raise CannotRewind(statement)
    definition = read_now(current_name)
    if definition is None:
        return None
    for steps, statement in reversed(alterations):
        definition = _undo_alter(definition, steps, statement)
    return definition.renamed(name, definition.schema.version)


def _ends(effect: Effect, name: TableName, session: StatementSession) -> bool:
    """Return whether this name belongs to another table or to an unknown table after the effect."""
    match effect:
        case CreateTable(name=created_name, keep=keep) | CreateLike(name=created_name, keep=keep):
            return created_name == name and not keep
        case DropTable(name=dropped):
            return dropped == name
        case RenameTable(to=to):
            return to == name
        case DropDatabase(database=database):
            return database == name.database
        case Unread(tables=tables):
            return name in tables if tables is not None else session.may_change(name.database)
    return False


def _undo_alter(
    definition: TableDefinition, steps: tuple[Step, ...], statement: LoggedStatement
) -> TableDefinition:
    """Return the definition before one ALTER TABLE. Raises CannotRewind.

    The steps of a statement use the column names from before the statement, except for new columns. So keys
    are undone first, then columns are removed by their new names, and finally all columns are renamed back at
    once, because two columns may have swapped names.
    """
    renames = [step for step in steps if isinstance(step, RenameColumn)]
    if any(step.if_exists for step in renames):
        raise CannotRewind(statement)
    keys = [step for step in steps if isinstance(step, SetKey)]
    other_steps = [step for step in steps if not isinstance(step, RenameColumn | SetKey)]
    for step in [*reversed(keys), *reversed(other_steps)]:
        definition = _undo_step(definition, step, statement)
    before = {step.to.lower(): step.name for step in renames}
    schema = definition.schema
    if len(before) != len(renames) or not before.keys() <= {column.name.lower() for column in schema.columns}:
        raise CannotRewind(statement)
    columns = tuple(
        replace(column, name=before.get(column.name.lower(), column.name)) for column in schema.columns
    )
    if len({column.name.lower() for column in columns}) != len(columns):
        raise CannotRewind(statement)
    key = tuple(before.get(name.lower(), name) for name in schema.primary_key)
    return replace(definition, schema=replace(schema, columns=columns, primary_key=key))


def _undo_step(definition: TableDefinition, step: Step, statement: LoggedStatement) -> TableDefinition:
    """Return the definition as it was before one step of an ALTER TABLE. Raises CannotRewind."""
    schema = definition.schema
    match step:
        case AddColumn(column=column, keep=False):
            columns = tuple(
                existing for existing in schema.columns if existing.name.lower() != column.name.lower()
            )
            if len(columns) != len(schema.columns) - 1 or not columns:
                raise CannotRewind(statement)
            return replace(definition, schema=replace(schema, columns=columns))
        case SetKey():
            # The log does not show the previous key, and rows can be decoded without a key. The key's columns
            # may have been nullable.
            columns = tuple(
                replace(column, nullable=True) if column.name in schema.primary_key else column
                for column in schema.columns
            )
            return replace(definition, schema=replace(schema, columns=columns, primary_key=()))
        case SetVisibility():
            # The log does not show the previous visibility, and the column may have another name here.
            columns = tuple(replace(column, visible=None) for column in schema.columns)
            return replace(definition, schema=replace(schema, columns=columns))
        case SetTableCharset():
            return replace(definition, charset=None)
        case AddUnique() if not definition.hidden_columns:
            return definition
        case ConvertCharset() if not any(column.charset for column in schema.columns):
            return replace(definition, charset=None)
    raise CannotRewind(statement)


def renames(statement: LoggedStatement, spelling: ServerSpelling) -> Iterator[tuple[TableName, TableName]]:
    """Yield the old and the new name of each table that a statement renames."""
    for effect in statement.effects(spelling):
        if isinstance(effect, RenameTable):
            yield effect.name, effect.to


def statements_by_table(
    statements: Sequence[LoggedStatement], spelling: ServerSpelling
) -> Callable[[TableName], Sequence[LoggedStatement]]:
    """Return a function that selects the statements that may concern a table.

    With many tables, this avoids searching all statements for each of them.
    """
    naming: dict[TableName, set[int]] = {}
    renamed: set[TableName] = set()
    naming_none: set[int] = set()
    for number, statement in enumerate(statements):
        for effect in statement.effects(spelling):
            match effect:
                case RenameTable(name=name, to=to):
                    renamed |= {name, to}
                case DropDatabase() | Unread(tables=None):
                    naming_none.add(number)
                case Unread(tables=frozenset() as names):
                    for name in names:
                        naming.setdefault(name, set()).add(number)
                case (
                    CreateTable(name=name)
                    | CreateLike(name=name)
                    | AlterTable(name=name)
                    | DropTable(name=name)
                ):
                    naming.setdefault(name, set()).add(number)

    def of_table(name: TableName) -> Sequence[LoggedStatement]:
        if name in renamed:
            # Statements about the table's other names count too.
            return statements
        return [statements[number] for number in sorted(naming_none | naming.get(name, set()))]

    return of_table


def names_after(
    name: TableName, statements: Iterable[LoggedStatement], spelling: ServerSpelling
) -> set[TableName]:
    """Return every name that a table has had since before the statements."""
    names = {name}
    for statement in statements:
        names |= {new for old, new in renames(statement, spelling) if old in names}
    return names


def touches(statement: LoggedStatement, names: set[TableName], spelling: ServerSpelling) -> bool:
    """Return whether a statement may have changed one of these tables."""
    for effect in statement.effects(spelling):
        match effect:
            case (
                CreateTable(name=name) | CreateLike(name=name) | AlterTable(name=name) | DropTable(name=name)
            ):
                if name in names:
                    return True
            case RenameTable(name=name, to=to):
                if names & {name, to}:
                    return True
            case DropDatabase(database=database):
                if any(name.database == database for name in names):
                    return True
            case Unread(tables=tables):
                if tables is None and any(statement.session.may_change(name.database) for name in names):
                    return True
                if tables is not None and names & tables:
                    return True
    return False
