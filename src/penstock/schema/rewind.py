# SPDX-License-Identifier: Apache-2.0
"""What a table was at an earlier position, told from what it is now and the statements in between.

A server knows its tables as they are, a log is read as they were. Where a statement in between cannot
be taken back (a dropped column, a changed type), nothing is returned: a schema is never assumed.
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
    Step,
    Unread,
)
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition


@dataclass(frozen=True)
class LoggedStatement:
    """A statement from the log: where its event ends, the session's database, its text, its session."""

    position: Position
    database: str
    text: str
    session: StatementSession = field(default_factory=StatementSession)
    _effects: dict[ServerSpelling, list[Effect]] = field(default_factory=dict, repr=False, compare=False)

    def effects(self, spelling: ServerSpelling) -> list[Effect]:
        """Return what the statement does to definitions; it is read once, however many tables ask."""
        if spelling not in self._effects:
            self._effects[spelling] = effects_of(
                self.text, self.database, spelling.under(self.session.sql_mode)
            )
        return self._effects[spelling]


class CannotRewind(Exception):
    """A statement in between hides what was before it."""

    def __init__(self, statement: LoggedStatement) -> None:
        super().__init__(statement)
        self.statement = statement


def definition_before(
    name: TableName,
    statements: Iterable[LoggedStatement],
    read_now: Callable[[TableName], TableDefinition | None],
    spelling: ServerSpelling,
) -> TableDefinition | None:
    """Return the definition a table had before the statements were run, None where the server lost it.

    `read_now` is asked for the name the table has after all of them. Raises CannotRewind.
    """
    current = name
    altered: list[tuple[tuple[Step, ...], LoggedStatement]] = []
    for statement in statements:
        for effect in statement.effects(spelling):
            if isinstance(effect, RenameTable) and effect.name == current:
                current = effect.to
            elif isinstance(effect, AlterTable) and effect.name == current:
                altered.append((effect.steps, statement))
            elif _ends(effect, current, statement.session):
                raise CannotRewind(statement)
    definition = read_now(current)
    if definition is None:
        return None
    for steps, statement in reversed(altered):
        definition = _unaltered(definition, steps, statement)
    return definition.renamed(name, definition.schema.version)


def _ends(effect: Effect, name: TableName, session: StatementSession) -> bool:
    """Tell whether the table of this name is another one, or unknown, after the effect."""
    match effect:
        case CreateTable(name=made, keep=keep) | CreateLike(name=made, keep=keep):
            return made == name and not keep
        case DropTable(name=dropped):
            return dropped == name
        case RenameTable(to=to):
            return to == name
        case DropDatabase(database=database):
            return database == name.database
        case Unread(tables=tables):
            return name in tables if tables is not None else session.may_change(name.database)
    return False


def _unaltered(
    definition: TableDefinition, steps: tuple[Step, ...], statement: LoggedStatement
) -> TableDefinition:
    """Return the definition before one ALTER TABLE. Raises CannotRewind.

    The steps of a statement name columns as they were before all of it, new columns apart. So keys are
    undone first, then columns are taken out by their new names, and all names are given back at once: two
    columns may have swapped theirs.
    """
    renames = [step for step in steps if isinstance(step, RenameColumn)]
    if any(step.if_exists for step in renames):
        raise CannotRewind(statement)
    keys = [step for step in steps if isinstance(step, SetKey)]
    others = [step for step in steps if not isinstance(step, RenameColumn | SetKey)]
    for step in [*reversed(keys), *reversed(others)]:
        definition = _undone(definition, step, statement)
    before = {step.to.lower(): step.name for step in renames}
    schema = definition.schema
    if len(before) != len(renames) or not before.keys() <= {one.name.lower() for one in schema.columns}:
        raise CannotRewind(statement)
    columns = tuple(replace(one, name=before.get(one.name.lower(), one.name)) for one in schema.columns)
    if len({one.name.lower() for one in columns}) != len(columns):
        raise CannotRewind(statement)
    key = tuple(before.get(one.lower(), one) for one in schema.primary_key)
    return replace(definition, schema=replace(schema, columns=columns, primary_key=key))


def _undone(definition: TableDefinition, step: Step, statement: LoggedStatement) -> TableDefinition:
    """Return the definition without a step of ALTER TABLE. Raises CannotRewind."""
    schema = definition.schema
    match step:
        case AddColumn(column=column, keep=False):
            kept = tuple(one for one in schema.columns if one.name.lower() != column.name.lower())
            if len(kept) != len(schema.columns) - 1 or not kept:
                raise CannotRewind(statement)
            return replace(definition, schema=replace(schema, columns=kept))
        case SetKey():
            # Which key there was before is not told. Rows decode without one; its columns may have been null.
            columns = tuple(
                replace(one, nullable=True) if one.name in schema.primary_key else one
                for one in schema.columns
            )
            return replace(definition, schema=replace(schema, columns=columns, primary_key=()))
        case SetTableCharset():
            return replace(definition, charset=None)
        case AddUnique() if not definition.hidden_columns:
            return definition
        case ConvertCharset() if not any(one.charset for one in schema.columns):
            return replace(definition, charset=None)
    raise CannotRewind(statement)


def renames(statement: LoggedStatement, spelling: ServerSpelling) -> Iterator[tuple[TableName, TableName]]:
    """Yield the old and the new name of each table that a statement renames."""
    for effect in statement.effects(spelling):
        if isinstance(effect, RenameTable):
            yield effect.name, effect.to


def concerning(
    statements: Sequence[LoggedStatement], spelling: ServerSpelling
) -> Callable[[TableName], Sequence[LoggedStatement]]:
    """Return what tells the statements that may concern a table: of all tables none has to look at all."""
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
            # Those about its other names count as well.
            return statements
        return [statements[number] for number in sorted(naming_none | naming.get(name, set()))]

    return of_table


def names_after(
    name: TableName, statements: Iterable[LoggedStatement], spelling: ServerSpelling
) -> set[TableName]:
    """Return every name that a table had from before the statements on."""
    names = {name}
    for statement in statements:
        names |= {new for old, new in renames(statement, spelling) if old in names}
    return names


def touches(statement: LoggedStatement, names: set[TableName], spelling: ServerSpelling) -> bool:
    """Tell whether a statement may have changed one of these tables."""
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
