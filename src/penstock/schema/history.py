# SPDX-License-Identifier: Apache-2.0
"""The history of table schemas: which schema each table had at each position.

The history is seeded from a live server or a file, and updated by the statements in the log. If a statement
cannot be parsed or contradicts the known schema, its tables are marked as in doubt. They are read again from
the server when their next row arrives, and the kernel checks the new definition against the table map. A
schema is therefore known, read again, or reported as missing by table name. It is never assumed.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Union

from penstock.errors import SchemaInvalid, SchemaUnknown
from penstock.model import Position, StatementSession, TableName, TableSchema
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.effects import (
    AlterTable,
    CreateLike,
    CreateTable,
    DropDatabase,
    DropTable,
    Effect,
    RenameTable,
    SetDatabaseCharset,
    Unread,
)
from penstock.schema.statements.statement import effects_of, effects_of_tokens, opening_words
from penstock.schema.statements.tokens import UTF8MB3, Kind, ServerSpelling, TextUnreadable, Token, tokens_of
from penstock.schema.table_definition import (
    Contradiction,
    TableDefinition,
    alter_definition,
    create_definition,
)

if TYPE_CHECKING:
    from penstock.schema.server_tables import ServerTables

FORMAT = 1


@dataclass(frozen=True)
class Doubt:
    """Why a table's definition is in doubt, and from which position on.

    `since` is None if the doubt is older than the history. `refusal` is the reason why the definition cannot
    be determined at all. It is None as long as the definition can still be read from a server.
    """

    since: Position | None
    reason: str
    refusal: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        since = str(self.since) if self.since else None
        return {"since": since, "reason": self.reason, "refusal": self.refusal}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read the output of `to_json`. Raises KeyError, TypeError, PositionInvalid."""
        since = Position.parse(value["since"]) if value["since"] else None
        return cls(since, value["reason"], value["refusal"])


# A table definition and the position from which it applies, None for the beginning. A dropped table has no
# definition.
_Entry = tuple[Position | None, TableDefinition | None]
# Returns the server's current definition of a table. ServerTables also returns the definition at an earlier
# position.
RereadTable = Union[Callable[[TableName], TableDefinition | None], "ServerTables"]


class SchemaHistory:
    """The schemas of one instance's tables over time. Not safe for concurrent use.

    `reread` asks the live server for a definition that is missing or in doubt. It is either a `ServerTables`,
    which returns the definition at a position, or a function, which returns the current definition. The
    current definition is correct only if no statement follows the position. Without `reread`, a table whose
    definition is missing or in doubt raises SchemaUnknown.
    """

    def __init__(self, defaults: ServerDefaults | None = None, reread: RereadTable | None = None) -> None:
        self._configured_defaults = defaults
        self._reread = reread
        self._entries: dict[TableName, list[_Entry]] = {}
        self._doubts: dict[TableName, Doubt] = {}
        # Set when a new log begins, until the server's tables at the log's first position have been read.
        self._unsurveyed: Doubt | None = None

    @cached_property
    def _defaults(self) -> ServerDefaults:
        """The configured defaults, otherwise those of the server, read on first use."""
        if self._configured_defaults is not None:
            return self._configured_defaults
        if self._reread is None or callable(self._reread):
            return ServerDefaults(ServerSpelling(), None, {}, False)
        return self._reread.defaults()

    @cached_property
    def _database_charsets(self) -> dict[str, str]:
        return {self._fold(name): charset for name, charset in self._defaults.database_charsets.items()}

    # --- Seeding -------------------------------------------------------------------------------

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        reread: RereadTable | None = None,
        spelling: ServerSpelling | None = None,
    ) -> Self:
        """Read a schema file: JSON (a list of table schemas, or a saved history), or .sql with CREATE TABLE.

        `spelling` is the SQL spelling of the log's server; a saved history and `reread` have their own
        spelling. Raises SchemaInvalid.
        """
        defaults = None if spelling is None or reread else ServerDefaults(spelling, None, {}, False)
        path = Path(path)
        text = _text_of(path)
        if path.suffix == ".sql":
            history = cls(defaults, reread)
            history._seed_from_sql(text, str(path))
            return history
        try:
            value = json.loads(text)
        except ValueError as problem:
            raise SchemaInvalid(f"schema file {path} is not JSON: {problem}") from problem
        if isinstance(value, list):
            history = cls(defaults, reread)
            history.seed((TableDefinition(TableSchema.from_json(table), None) for table in value), None)
            return history
        return cls.from_json(value, reread)

    def seed(self, definitions: Iterable[TableDefinition], position: Position | None) -> None:
        """Add table definitions that apply from a position on."""
        for definition in definitions:
            self._record(definition.schema.name, definition, position)

    def _seed_from_sql(self, text: str, path: str, database: str = "") -> None:
        """Apply the statements of a file; `database` is the database of tables that are named without one, up
        to the first USE.
        """
        spelling = self._defaults.spelling
        try:
            tokens = tokens_of(text, spelling)
        except TextUnreadable as problem:
            raise SchemaInvalid(f"schema file {path}: a quote or a comment is open at its end") from problem
        current = database
        for statement in _statements(tokens):
            if statement[0].upper == "USE" and len(statement) == 2:
                current = statement[1].text
            elif statement[0].upper in ("CREATE", "ALTER", "DROP", "RENAME"):
                for effect in effects_of_tokens(statement, current, spelling):
                    self._seed_effect(effect, path)

    def _seed_effect(self, effect: Effect, path: str) -> None:
        source = f"schema file {path}"
        if isinstance(effect, Unread):
            names = ", ".join(str(name) for name in effect.tables or ())
            raise SchemaInvalid(f"{source}: a statement about {names or 'tables'} is not understood")
        database = effect.name.database if isinstance(effect, CreateTable) else "-"
        if not database:
            raise SchemaInvalid(
                f"{source}: a CREATE TABLE names no database", hint="Put a USE statement before it"
            )
        self._apply_effect(effect, None, StatementSession(), source)
        if self._doubts:
            raise SchemaInvalid(
                f"{source}: the statements about {min(self._doubts)} contradict each other,"
                " or leave a character set out",
                hint="Give each CREATE TABLE as SHOW CREATE TABLE prints it",
            )

    @classmethod
    def awaiting_survey(cls, defaults: ServerDefaults, position: Position) -> Self:
        """Return a history whose tables are still to be read from the server, as of a position."""
        history = cls(defaults)
        history._unsurveyed = Doubt(position, "the tables of the server are being read")
        return history

    def define(self, name: TableName, path: Path) -> TableDefinition:
        """Return a schema file's definition of one table, parsed with the spelling of this history's server.

        Raises SchemaInvalid if the file cannot be read or does not define the table.
        """
        if path.suffix == ".sql":
            return self.define_by_sql(name, _text_of(path), str(path))
        return SchemaHistory.from_file(path)._defined(name, str(path))

    def define_by_sql(self, name: TableName, text: str, source: str) -> TableDefinition:
        """Return the definition that statements give a table; `source` names them in errors.

        Raises SchemaInvalid for statements that are not understood, or that do not define the table.
        """
        history = SchemaHistory(self._defaults)
        history._seed_from_sql(text, source, name.database)
        return history._defined(name, source)

    def _defined(self, name: TableName, source: str) -> TableDefinition:
        definition = self._newest(self._key(name))
        if definition is None:
            raise SchemaInvalid(
                f"schema file {source} does not define {name}", hint="Give its CREATE TABLE, or its JSON form"
            )
        return definition

    # --- Reading definitions -------------------------------------------------------------------

    def schema(self, database: str, table: str, position: Position | None = None) -> TableSchema | None:
        """Return the schema in force at a position, by default the newest; None if no schema is known."""
        for since, definition in reversed(self._entries.get(self._key(TableName(database, table)), [])):
            if since is None or position is None or since <= position:
                return definition.schema if definition else None
        return None

    def versions(self, name: TableName) -> list[tuple[Position | None, TableSchema | None]]:
        """Return the definitions of a table, each with the position from which it applies; None means that
        the table was dropped.
        """
        entries = self._entries.get(self._key(name), [])
        return [(since, None if entry is None else entry.schema) for since, entry in entries]

    def needs_reread(self, name: TableName) -> bool:
        """Return whether the newest definition is in doubt."""
        return self.doubt(name) is not None

    def doubt(self, name: TableName) -> Doubt | None:
        """Return why a table's newest definition is in doubt, None if it is not."""
        key = self._key(name)
        return self._doubts.get(key) or (self._unsurveyed if key not in self._entries else None)

    @property
    def unsurveyed(self) -> Doubt | None:
        """The position since which only tables named in statements are known; None once all tables have been
        read.
        """
        return self._unsurveyed

    def doubts(self) -> dict[TableName, Doubt]:
        """Return every table whose newest definition is in doubt."""
        return dict(self._doubts)

    def reread(self, name: TableName, position: Position) -> TableSchema:
        """Ask the server for a table's definition, and use it from `position` on. Raises SchemaUnknown."""
        if self._reread is None:
            raise SchemaUnknown(
                f"the schema of {name} is not known",
                position=str(position),
                hint="Give a schema file, or set binlog_row_metadata=FULL so that the log names its columns",
            )
        definition = self._reread(name) if callable(self._reread) else self._reread.read_at(name, position)
        if definition is None:
            raise SchemaUnknown(
                f"the server has no table {name}, so its columns at this position are unknown",
                position=str(position),
                hint="Give a schema file, or set binlog_row_metadata=FULL so that the log names its columns",
            )
        self._doubts.pop(self._key(name), None)
        self._record(name, definition, position)
        schema = self.schema(name.database, name.table, position)
        assert schema is not None, "a definition was just recorded"
        return schema

    @property
    def spelling(self) -> ServerSpelling:
        """The SQL spelling of the server that the definitions come from."""
        return self._defaults.spelling

    @property
    def mariadb(self) -> bool:
        """Whether the definitions use MariaDB's spelling."""
        return self.spelling.mariadb

    def names(self) -> list[TableName]:
        """Return every table that has a definition now or is in doubt."""
        return sorted(
            name for name in self._entries.keys() | self._doubts.keys() if self._newest(name) is not None
        )

    # --- Applying changes ----------------------------------------------------------------------

    def defines(self, text: str, database: str, session: StatementSession) -> bool:
        """Return whether a logged statement can change a table definition."""
        return bool(effects_of(text, database, self._defaults.spelling.under(session.sql_mode)))

    def take(self, definition: dict[str, Any], position: Position) -> None:
        """Add a table definition that was read elsewhere, from a position on. Raises SchemaInvalid."""
        table = TableDefinition.from_json(definition)
        self._doubts.pop(self._key(table.schema.name), None)
        self._record(table.schema.name, table, position)

    def refuse(self, name: TableName, why: str) -> None:
        """Record that the definition of a table in doubt cannot be determined."""
        key = self._key(name)
        doubt = self._doubts.get(key) or self._unsurveyed or Doubt(None, "")
        self._doubts[key] = replace(doubt, refusal=why)

    def suspect(self, name: TableName, position: Position, reason: str) -> None:
        """Mark a table as in doubt from a position on."""
        self._doubts[self._key(name)] = Doubt(position, reason)

    def date_doubts(self, position: Position) -> None:
        """Move every doubt that is older than a position, or has no position, to that position."""

        def dated(doubt: Doubt) -> Doubt:
            return replace(doubt, since=position) if doubt.since is None or doubt.since < position else doubt

        self._doubts = {key: dated(doubt) for key, doubt in self._doubts.items()}
        self._unsurveyed = self._unsurveyed and dated(self._unsurveyed)

    def survey(self) -> None:
        """Record that every table of the server has been read or refused."""
        self._unsurveyed = None

    def apply(
        self, text: str, database: str, position: Position, session: StatementSession | None = None
    ) -> set[TableName]:
        """Apply a logged statement; return the tables whose definition changed or is in doubt.

        `database` is the session's current database. Never raises: a statement that cannot be parsed puts its
        tables in doubt.
        """
        changed_tables: set[TableName] = set()
        session = session or StatementSession()
        for effect in effects_of(text, database, self._defaults.spelling.under(session.sql_mode)):
            changed_tables |= self._apply_effect(effect, position, session, text)
        return changed_tables

    def _apply_effect(
        self, effect: Effect, position: Position | None, session: StatementSession, text: str
    ) -> set[TableName]:
        doubt = Doubt(position, opening_words(text))
        match effect:
            case CreateTable(name=name, keep=keep):
                charset = self._charset(name.database, session)
                return self._create(name, keep, doubt, lambda: create_definition(effect, charset))
            case CreateLike(name=name, like=like, keep=keep):
                return self._create(name, keep, doubt, lambda: self._definition_of(like))
            case AlterTable(name=name, steps=steps):
                charset = self._charset(name.database, session)
                return self._define(
                    name, doubt, lambda: alter_definition(self._definition_of(name), steps, charset)
                )
            case RenameTable(name=name, to=to):
                return self._rename(name, to, doubt)
            case DropTable(name=name):
                return self._drop([name], position)
            case DropDatabase(database=database):
                self._database_charsets.pop(self._fold(database), None)
                folded = self._fold(database)
                return self._drop([name for name in self._entries if name.database == folded], position)
            case SetDatabaseCharset(database=database, keep=True) if self._knows_database(database):
                return set()
            case SetDatabaseCharset(database=database, charset=charset):
                chosen = charset or session.charset or self._defaults.charset
                if chosen is not None:
                    self._database_charsets[self._fold(database)] = chosen
                return set()
            case Unread(tables=tables):
                doubtful = {self._key(name) for name in tables or ()}
                if tables is None:
                    doubtful = self._tables_of(session)
                self._doubts |= dict.fromkeys(doubtful, doubt)
                return doubtful

    def _tables_of(self, session: StatementSession) -> set[TableName]:
        """Return the known tables that a statement may change, without dropped tables."""
        databases = {self._fold(name) for name in session.databases or ()}
        return {
            name
            for name in self._entries
            if self._newest(name) is not None and (not databases or name.database in databases)
        }

    def _create(
        self,
        name: TableName,
        keep: bool,
        doubt: Doubt,
        define: Callable[[], TableDefinition],
    ) -> set[TableName]:
        if keep and (self.schema(name.database, name.table) is not None or self._key(name) in self._doubts):
            return set()
        seen = self._key(name) in self._entries
        moved = self._define(name, doubt, define)
        if keep and not seen and (self._reread is not None or self._unsurveyed is not None):
            # A table without history is in doubt, because it may have existed before with another definition.
            self._doubts[self._key(name)] = doubt
        return moved

    def _define(self, name: TableName, doubt: Doubt, define: Callable[[], TableDefinition]) -> set[TableName]:
        key = self._key(name)
        try:
            definition = define()
        except Contradiction:
            self._doubts[key] = doubt
            return {key}
        self._doubts.pop(key, None)
        return {key} if self._record(name, definition, doubt.since) else set()

    def _rename(self, name: TableName, to: TableName, doubt: Doubt) -> set[TableName]:
        key, target = self._key(name), self._key(to)
        in_doubt = key in self._doubts
        newest = self._newest(key)
        self._drop([name], doubt.since)
        self._doubts.pop(target, None)
        if newest is None or in_doubt:
            self._doubts[target] = doubt
        if newest is not None:
            self._record(to, newest, doubt.since)
        return {key, target}

    def _drop(self, names: Iterable[TableName], position: Position | None) -> set[TableName]:
        dropped = set()
        for name in names:
            key = self._key(name)
            self._doubts.pop(key, None)
            if self._newest(key) is not None:
                self._entries[key].append((position, None))
            dropped.add(key)
        return dropped

    # --- Entries -------------------------------------------------------------------------------

    def _record(self, name: TableName, definition: TableDefinition, position: Position | None) -> bool:
        """Append a definition unless it equals the newest; return whether it was appended."""
        key = self._key(name)
        entries = self._entries.setdefault(key, [])
        newest = self._newest(key)
        if (
            newest is not None
            and newest.schema.same_definition(definition.schema)
            and newest.charset == definition.charset
            and newest.unique_columns == definition.unique_columns
        ):
            return False
        version = (
            max(
                (earlier.schema.version for _, earlier in entries if earlier is not None),
                default=0,
            )
            + 1
        )
        entries.append((position, definition.renamed(name, version)))
        return True

    def _newest(self, key: TableName) -> TableDefinition | None:
        entries = self._entries.get(key)
        return entries[-1][1] if entries else None

    def _definition_of(self, name: TableName) -> TableDefinition:
        """Return the newest definition. Raises Contradiction if it is unknown or in doubt."""
        key = self._key(name)
        definition = self._newest(key)
        if definition is None or key in self._doubts:
            raise Contradiction(f"{name} is not known")
        return definition

    def _charset(self, database: str, session: StatementSession) -> str | None:
        """Return a database's charset.

        If the creation of a database is not in the log, the session's default is used, which is most likely
        correct.
        """
        charset = self._database_charsets.get(self._fold(database))
        return charset or session.charset or self._defaults.charset

    def _knows_database(self, database: str) -> bool:
        folded = self._fold(database)
        return folded in self._database_charsets or any(
            name.database == folded and self._newest(name) is not None for name in self._entries
        )

    def _fold(self, name: str) -> str:
        return name.lower() if self._defaults.folds_names else name

    def _key(self, name: TableName) -> TableName:
        return TableName(self._fold(name.database), self._fold(name.table))

    # --- Saving and loading --------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the whole history as plain JSON values."""
        defaults = self._defaults
        return {
            "format": FORMAT,
            "mariadb": defaults.spelling.mariadb,
            "version": list(defaults.spelling.version),
            **({"utf8": defaults.spelling.utf8} if defaults.spelling.utf8 != UTF8MB3 else {}),
            "charset": defaults.charset,
            "folds_names": defaults.folds_names,
            "databases": self._database_charsets,
            **({"unsurveyed": self._unsurveyed.to_json()} if self._unsurveyed else {}),
            "tables": [
                {
                    "name": str(key),
                    "in_doubt": key in self._doubts,
                    **({"doubt": self._doubts[key].to_json()} if key in self._doubts else {}),
                    "definitions": [
                        [str(since) if since else None, definition.to_json() if definition else None]
                        for since, definition in self._entries.get(key, [])
                    ],
                }
                for key in sorted(self._entries.keys() | self._doubts.keys())
            ],
        }

    def in_force(self, position: Position | None = None, name: TableName | None = None) -> dict[str, Any]:
        """Return the JSON form of the table definitions in force at a position, by default the newest.

        With a name, the JSON has only the definition of that table.
        """
        value = self.to_json()
        if name is not None:
            value["tables"] = [table for table in value["tables"] if table["name"] == str(self._key(name))]
        for table in value["tables"]:
            upto = [
                entry
                for entry in table["definitions"]
                if entry[0] is None or position is None or Position.parse(entry[0]) <= position
            ]
            table["definitions"] = [entry for entry in upto[-1:] if entry[1] is not None]
        value["tables"] = [table for table in value["tables"] if table["definitions"] or table["in_doubt"]]
        return value

    @classmethod
    def from_json(cls, value: Any, reread: RereadTable | None = None) -> Self:
        """Read the output of `to_json`. Raises SchemaInvalid."""
        try:
            if value["format"] != FORMAT:
                raise SchemaInvalid(
                    f"the schema history has format {value['format']}, this program reads {FORMAT}"
                )
            version, utf8 = tuple(map(int, value["version"])), str(value.get("utf8", UTF8MB3))
            spelling = ServerSpelling(bool(value["mariadb"]), version, utf8=utf8)
            defaults = ServerDefaults(
                spelling, value["charset"], value["databases"], bool(value["folds_names"])
            )
            history = cls(defaults, reread)
            for table in value["tables"]:
                key = TableName.parse(table["name"])
                history._entries[key] = [
                    (
                        Position.parse(since) if since else None,
                        TableDefinition.from_json(definition) if definition else None,
                    )
                    for since, definition in table["definitions"]
                ]
                if table["in_doubt"]:
                    # Version 0.1 stored no reason.
                    doubt = table.get("doubt")
                    history._doubts[key] = Doubt.from_json(doubt) if doubt else Doubt(None, "")
            if "unsurveyed" in value:
                history._unsurveyed = Doubt.from_json(value["unsurveyed"])
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise SchemaInvalid(f"this is no schema history: {problem!r}") from problem
        return history

    def save(self, path: str | Path) -> None:
        """Replace a file atomically with the history: it always holds either the old or the new version."""
        path = Path(path)
        new_file = path.with_name(path.name + ".new")
        with open(new_file, "w", encoding="utf-8") as file:
            json.dump(self.to_json(), file, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        new_file.replace(path)

    @classmethod
    def load(cls, path: str | Path, reread: RereadTable | None = None) -> Self:
        """Read a file written by `save`. Raises SchemaInvalid."""
        return cls.from_file(path, reread=reread)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise SchemaInvalid(f"schema file {path} cannot be read: {problem}") from problem


def _statements(tokens: list[Token]) -> Iterable[list[Token]]:
    """Split a script at its semicolons."""
    statement: list[Token] = []
    for token in tokens:
        if token.kind is Kind.MARK and token.text == ";":
            if statement:
                yield statement
            statement = []
        else:
            statement.append(token)
    if statement:
        yield statement
