# SPDX-License-Identifier: Apache-2.0
"""The effects a statement can have on table definitions, and the reading of names and charsets.

Every effect is plain values, so that what a statement says and what it does to the schemas known
here stay apart.
"""

from dataclasses import dataclass, field

from penstock.model import TableName
from penstock.schema.statements.column_types import DeclaredType
from penstock.schema.statements.tokens import Kind, ServerSpelling, TokenCursor


@dataclass(frozen=True)
class ColumnSpelling:
    """A column as a statement declares it; its charset may come from the table."""

    name: str
    declared: DeclaredType
    charset: str | None
    nullable: bool
    key: bool
    unique: bool = False
    """Whether MariaDB makes a unique key over it, which may be a hidden hash."""
    ends_period: bool = False
    """Whether it is the ROW END of a system-versioned table of MariaDB."""


@dataclass(frozen=True)
class Place:
    """Where a column goes: first, after another, or at the end."""

    first: bool = False
    after: str | None = None


@dataclass(frozen=True)
class AddColumn:
    """ADD COLUMN; with `keep` (IF NOT EXISTS) a column that was there before the statement stays as it is."""

    column: ColumnSpelling
    place: Place
    keep: bool = False


@dataclass(frozen=True)
class ChangeColumn:
    """MODIFY and CHANGE; `place` is None where the column stays where it is.

    With `if_exists`, here and in the steps below, nothing happens to a column that was not there before.
    """

    name: str
    column: ColumnSpelling
    place: Place | None
    may_add_hash: bool = False
    """Whether MariaDB may add a hidden column, where a unique key is over a column of this type."""
    if_exists: bool = False


@dataclass(frozen=True)
class RenameColumn:
    name: str
    to: str
    if_exists: bool = False


@dataclass(frozen=True)
class DropColumn:
    name: str
    if_exists: bool = False


@dataclass(frozen=True)
class SetKey:
    """The primary key becomes these columns, none where it is dropped."""

    columns: tuple[str, ...]


@dataclass(frozen=True)
class AddUnique:
    """A unique key of MariaDB, which may be a hidden hash: its columns, each with a prefix length or None."""

    columns: tuple[tuple[str, int | None], ...]
    characters_max: int = 768
    """Longer keys are hidden hashes: InnoDB's have at most 3072 bytes, and a character at most 4."""


@dataclass(frozen=True)
class DropUnique:
    """An index of MariaDB that may be unique is dropped, and a hidden hash with it."""


@dataclass(frozen=True)
class SetVersioning:
    """MariaDB's SYSTEM VERSIONING without columns named for it: two hidden columns come or go."""

    versioned: bool


@dataclass(frozen=True)
class ConvertCharset:
    """Every text column becomes this charset, and so does the table; None is the database's."""

    charset: str | None


@dataclass(frozen=True)
class SetTableCharset:
    """Columns to come get this charset."""

    charset: str


Step = (
    AddColumn
    | ChangeColumn
    | RenameColumn
    | DropColumn
    | SetKey
    | AddUnique
    | DropUnique
    | SetVersioning
    | ConvertCharset
    | SetTableCharset
)


@dataclass(frozen=True)
class CreateTable:
    name: TableName
    columns: tuple[ColumnSpelling, ...]
    key: tuple[str, ...]
    charset: str | None
    keep: bool
    """IF NOT EXISTS: a table that is there stays as it is."""
    steps: tuple[AddUnique | SetVersioning, ...] = ()
    """What may give the table hidden columns."""


@dataclass(frozen=True)
class CreateLike:
    name: TableName
    like: TableName
    keep: bool


@dataclass(frozen=True)
class AlterTable:
    name: TableName
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class RenameTable:
    name: TableName
    to: TableName


@dataclass(frozen=True)
class DropTable:
    name: TableName


@dataclass(frozen=True)
class DropDatabase:
    database: str


@dataclass(frozen=True)
class SetDatabaseCharset:
    """A database is created or altered; None is the server's default."""

    database: str
    charset: str | None
    keep: bool = False
    """IF NOT EXISTS: a database that is there stays as it is."""


@dataclass(frozen=True)
class Unread:
    """The statement may have touched these tables; None is any in the databases that its event lists."""

    tables: frozenset[TableName] | None


Effect = (
    CreateTable
    | CreateLike
    | AlterTable
    | RenameTable
    | DropTable
    | DropDatabase
    | SetDatabaseCharset
    | Unread
)


class NotUnderstood(Exception):
    """The statement goes on in a way that is not known."""


@dataclass
class Statement:
    """One statement while it is read: its tokens, and what names without a database mean.

    `confined` tells that it touches no other tables than those named so far, whatever follows.
    """

    cursor: TokenCursor
    database: str
    spelling: ServerSpelling
    named: set[TableName] = field(default_factory=set)
    confined: bool = False

    def take_name(self) -> str:
        """Take an identifier. Raises NotUnderstood."""
        token = self.cursor.take()
        if token.kind in (Kind.MARK, Kind.STRING):
            raise NotUnderstood
        return token.text

    def take_table(self) -> TableName:
        """Take `table` or `database.table`."""
        if self.cursor.accept("."):
            # ODBC's spelling of a table in the current database.
            first, second = self.database, self.take_name()
        else:
            first = self.take_name()
            second = self.take_name() if self.cursor.accept(".") else ""
        name = TableName(first, second) if second else TableName(self.database, first)
        self.named.add(name)
        return name


# --- Charsets, which every level of definition can name ----------------------------------------


def charset_name(name: str) -> str:
    """Return the charset's name as information_schema prints it."""
    lower = name.lower()
    return "utf8mb3" if lower == "utf8" else lower


def charset_of_collation(collation: str) -> str | None:
    """Return the charset a collation belongs to; None where its name does not tell (uca1400_ai_ci)."""
    lower = collation.lower()
    if lower.startswith("uca1400"):
        return None
    return charset_name(lower.split("_", 1)[0])


def accept_charset(cursor: TokenCursor) -> str | None:
    """Take `[DEFAULT] CHARACTER SET [=] x` or `COLLATE [=] x`; return its charset, None where neither comes.

    A collation that names no charset gives "", as does DEFAULT.
    """
    if cursor.next.upper == "DEFAULT" and cursor.ahead(1).upper in (
        "CHARACTER",
        "CHAR",
        "CHARSET",
        "COLLATE",
    ):
        cursor.take()
    if cursor.accept("CHARACTER", "SET") or cursor.accept("CHAR", "SET") or cursor.accept("CHARSET"):
        cursor.accept("=")
        name = cursor.take().text
        return "" if name.upper() == "DEFAULT" else charset_name(name)
    if cursor.accept("COLLATE"):
        cursor.accept("=")
        return charset_of_collation(cursor.take().text) or ""
    return None
