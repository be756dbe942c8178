# SPDX-License-Identifier: Apache-2.0
"""The possible effects of a statement on table definitions, and the parsing of names and charsets.

Effects are plain values, so that parsing a statement and applying it to schemas are separate.
"""

from dataclasses import dataclass, field

from penstock.model import TableName
from penstock.schema.statements.column_types import DeclaredType
from penstock.schema.statements.tokens import UTF8MB3, Kind, ServerSpelling, TokenCursor


@dataclass(frozen=True)
class ColumnSpelling:
    """A column as a statement declares it. The column's charset may come from its table."""

    name: str
    declared: DeclaredType
    charset: str | None
    nullable: bool
    key: bool
    unique: bool = False
    """Whether MariaDB adds a unique key over the column, which may use a hidden hash."""
    ends_period: bool = False
    """Whether the column is the ROW END of a system-versioned table of MariaDB."""
    visible: bool = True


@dataclass(frozen=True)
class Placement:
    """Where a statement places a column: first, after another column, or at the end."""

    first: bool = False
    after: str | None = None


@dataclass(frozen=True)
class AddColumn:
    """Add a column: first, after another column, or at the end."""

    column: ColumnSpelling
    placement: Placement
    keep: bool = False


@dataclass(frozen=True)
class ChangeColumn:
    """MODIFY and CHANGE.

    `placement` is None if the column stays where it is. With `if_exists`, here and in the following steps,
    the step is ignored for a column that did not exist before.
    """

    name: str
    column: ColumnSpelling
    placement: Placement | None
    may_add_hash: bool = False
    """Whether MariaDB may add a hidden column if there is a unique key over a column of this type."""
    if_exists: bool = False


@dataclass(frozen=True)
class SetVisibility:
    """MySQL's ALTER COLUMN ... SET VISIBLE or INVISIBLE."""

    name: str
    visible: bool


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
    """Set the columns of the primary key, or drop it if there are no columns.

    With `if_none` (IF [NOT] EXISTS), a table keeps the primary key that it has, and MariaDB reports a note.
    """

    columns: tuple[str, ...]
    if_none: bool = False


@dataclass(frozen=True)
class AddUnique:
    """A unique key of MariaDB, which may use a hidden hash. `columns` contains the key's columns with their
    prefix lengths; a length of None means the whole column.
    """

    columns: tuple[tuple[str, int | None], ...]
    characters_max: int = 768
    """Longer keys use a hidden hash: an InnoDB key has at most 3072 bytes, and a character at most 4."""
    if_none: bool = False
    """IF NOT EXISTS: an index of this name stays as it is."""


@dataclass(frozen=True)
class DropUnique:
    """Drop an index of MariaDB. If the index is unique and uses a hidden hash, the hash is dropped too."""


@dataclass(frozen=True)
class SetVersioning:
    """MariaDB's SYSTEM VERSIONING without declared period columns: add or remove two hidden columns."""

    versioned: bool


@dataclass(frozen=True)
class ConvertCharset:
    """Convert every text column and the table to this charset, None for the database's charset."""

    charset: str | None


@dataclass(frozen=True)
class SetTableCharset:
    """Set the charset of columns added later."""

    charset: str


Step = (
    AddColumn
    | ChangeColumn
    | SetVisibility
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
    """IF NOT EXISTS: an existing table stays unchanged."""
    steps: tuple[AddUnique | SetVersioning, ...] = ()
    """The steps that may give the table hidden columns."""


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
    """Create or alter a database. A charset of None is the server's default."""

    database: str
    charset: str | None
    keep: bool = False
    """IF NOT EXISTS: an existing database stays unchanged."""


@dataclass(frozen=True)
class Unread:
    """A statement that was not parsed and may have changed these tables. None means any table of the event's
    databases.
    """

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
    """A statement continues in a way that the parser does not know."""


@dataclass
class Statement:
    """A statement that is being parsed: its tokens, and the current database for names without a database.

    `confined` is true if the rest of the statement cannot affect tables other than those named so far.
    `replaces` is true if it has OR REPLACE.
    """

    cursor: TokenCursor
    database: str
    spelling: ServerSpelling
    named: set[TableName] = field(default_factory=set)
    confined: bool = False
    replaces: bool = False

    def take_name(self) -> str:
        """Parse an identifier. Raises NotUnderstood."""
        token = self.cursor.take()
        if token.kind in (Kind.MARK, Kind.STRING):
            raise NotUnderstood
        return token.text

    def take_table(self) -> TableName:
        """Parse `table` or `database.table`."""
        if self.cursor.accept("."):
            # A leading dot is ODBC's spelling for a table of the current database.
            first, second = self.database, self.take_name()
        else:
            first = self.take_name()
            second = self.take_name() if self.cursor.accept(".") else ""
        name = TableName(first, second) if second else TableName(self.database, first)
        self.named.add(name)
        return name


# --- Charsets, which every level of definition can name ----------------------------------------


def charset_name(name: str, utf8: str = UTF8MB3) -> str:
    """Return the charset's name as information_schema prints it; `utf8` is the charset that the name utf8
    stands for.
    """
    lower = name.lower()
    return utf8 if lower == "utf8" else lower


def charset_of_collation(collation: str, utf8: str = UTF8MB3) -> str | None:
    """Return a collation's charset, None if the name does not contain it (uca1400_ai_ci)."""
    lower = collation.lower()
    if lower.startswith("uca1400"):
        return None
    return charset_name(lower.split("_", 1)[0], utf8)


def accept_charset(cursor: TokenCursor, spelling: ServerSpelling) -> str | None:
    """Parse `[DEFAULT] CHARACTER SET [=] x` or `COLLATE [=] x`; return the charset, None without either.

    A collation whose name does not contain the charset returns "", as does DEFAULT.
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
        return "" if name.upper() == "DEFAULT" else charset_name(name, spelling.utf8)
    if cursor.accept("COLLATE"):
        cursor.accept("=")
        name = cursor.take().text
        return "" if name.upper() == "DEFAULT" else charset_of_collation(name, spelling.utf8) or ""
    return None
