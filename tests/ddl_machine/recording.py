# SPDX-License-Identifier: Apache-2.0
"""Runs random statements with row changes in between, and records the server's table definitions after each
statement.
"""

import codecs
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pymysql

from penstock.model import Position, ServerAddress, TableName, TablePatterns, quote_name
from penstock.mysql.connection import Connection, connect
from penstock.schema.reader import read_defaults, read_tables
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.table_definition import TableDefinition
from tests.ddl_machine.grammar import ColumnFacts, Grammar, TableFacts
from tests.ddl_machine.vocabulary import value
from tools.servers import Server

Image = tuple[str, dict[str, Any]]

_COLUMNS = """
SELECT TABLE_SCHEMA, TABLE_NAME, COLUMN_NAME, COLUMN_TYPE, CHARACTER_SET_NAME, EXTRA
FROM information_schema.COLUMNS JOIN information_schema.TABLES USING (TABLE_SCHEMA, TABLE_NAME)
WHERE TABLE_SCHEMA IN %s AND TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED')
ORDER BY 1, 2, ORDINAL_POSITION"""
_SQL_MODES = (
    "",
    "",
    "ANSI_QUOTES",
    "NO_BACKSLASH_ESCAPES",
    "STRICT_TRANS_TABLES",
    "PIPES_AS_CONCAT,ANSI_QUOTES",
)
_SETTINGS_EVERY = 40
_CODEC = "utf-8-lossy"


def _lossy_codec(name: str) -> codecs.CodecInfo | None:
    """Decode a surrogate from the server as U+FFFD. The client library does not accept a codec's error
    mode.
    """
    if name != _CODEC.replace("-", "_"):
        return None
    utf8 = codecs.lookup("utf-8")
    return codecs.CodecInfo(
        utf8.encode, lambda data, errors="strict": utf8.decode(data, "replace"), name=_CODEC
    )


codecs.register(_lossy_codec)


@dataclass(frozen=True)
class RowChange:
    """The rows changed by one row statement, or by CREATE TABLE ... SELECT. `images` are in log order."""

    start: Position
    end: Position
    table: TableName
    images: tuple[Image, ...]
    facts: TableFacts
    statement: str


@dataclass
class Recording:
    """The recording of one run: the definitions after each statement, the row changes, and the statements
    sent.
    """

    defaults: ServerDefaults
    start: Position
    databases: tuple[str, ...]
    end: Position
    snapshots: list[tuple[Position, dict[TableName, TableDefinition]]] = field(default_factory=list)
    statements: list[tuple[Position, str]] = field(default_factory=list)
    changes: list[RowChange] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def definitions_after(self, statement_end: Position) -> dict[TableName, TableDefinition]:
        """Return the definitions right after a logged statement."""
        at = bisect_left(self.snapshots, statement_end, key=lambda snapshot: snapshot[0])
        return self.snapshots[at][1]

    def definitions_at(self, position: Position) -> dict[TableName, TableDefinition]:
        """Return the definitions in force where a transaction starts."""
        at = bisect_right(self.snapshots, position, key=lambda snapshot: snapshot[0])
        return self.snapshots[at - 1][1] if at else {}


class Run:
    """One session on a server, from a seed."""

    def __init__(self, server: Server, seed: str, databases: tuple[str, ...]) -> None:
        self.server = server
        self.chance = random.Random(seed)
        self.databases = databases
        self.grammar = Grammar(self.chance, server.family == "mariadb", databases)
        self._patterns = TablePatterns([f"{quote_name(database)}.*" for database in databases])

    def record(self, statements: int) -> Recording:
        """Send statements until the requested number of them was logged, and record the run."""
        self.server.sql("FLUSH BINARY LOGS")
        address = ServerAddress.parse(self.server.url("root"))
        with connect(address) as observer, self.server.connect(database=self.databases[0]) as session:
            start = self._head(session)
            recording = Recording(read_defaults(observer), start, self.databases, start)
            session.encoding = _CODEC
            self._execute(session, "SET time_zone = '+00:00', sql_mode = ''")
            while recording.counts["logged"] < statements:
                sent = recording.counts["sent"]
                if sent % _SETTINGS_EVERY == 0:
                    self._change_settings(session)
                self._step(session, observer, recording)
            recording.end = self._head(session)
        return recording

    def _step(self, session: Any, observer: Connection, recording: Recording) -> None:
        start = self._head(session)
        text = self.grammar.statement()
        recording.counts["sent"] += 1
        refused = not self._execute(session, text)
        recording.counts["refused"] += refused
        end = self._head(session)
        # A failed statement is logged if part of it took effect.
        if end == start:
            return
        recording.counts["logged"] += 1
        recording.statements.append((start, text))
        before = recording.snapshots[-1][1] if recording.snapshots else {}
        definitions = {
            read_table.schema.name: read_table for read_table in read_tables(observer, self._patterns)
        }
        recording.snapshots.append((end, definitions))
        self.grammar.tables = self._facts(session)
        changed = [name for name, definition in definitions.items() if before.get(name) != definition]
        if "SELECT" in text and changed:
            for facts in self._named(changed):
                rows = self._select(session, facts)
                images = tuple(("insert", row) for row in rows)
                name = TableName(facts.database, facts.name)
                self._note(recording, RowChange(start, end, name, images, facts, text))
        chosen = self._named(changed)
        if self.grammar.tables:
            chosen.append(self.chance.choice(self.grammar.tables))
        for facts in chosen[:3]:
            self._change_rows(session, facts, recording)

    def _named(self, names: list[TableName]) -> list[TableFacts]:
        return [table for table in self.grammar.tables if TableName(table.database, table.name) in names]

    def _note(self, recording: Recording, change: RowChange) -> None:
        if change.images:
            recording.changes.append(change)
            recording.counts["rows"] += len(change.images)

    # --- Rows --------------------------------------------------------------------------------------

    def _change_rows(self, session: Any, facts: TableFacts, recording: Recording) -> None:
        name = f"{quote_name(facts.database)}.{quote_name(facts.name)}"
        before = self._select(session, facts)
        if before and self.chance.random() < 0.6:
            self._change(session, facts, recording, before, f"DELETE FROM {name}")
            before = self._select(session, facts)
        written = [column for column in facts.columns if column.is_writable and self.chance.random() < 0.9]
        values = [
            (column, value(self.chance, column.type_text, column.charset, self.grammar.mariadb))
            for column in written
        ]
        pairs = [(quote_name(column.name), text if self.chance.random() < 0.93 else "NULL")
                 for column, text in values if text is not None]  # fmt: skip
        if before and pairs:
            settings = ", ".join(f"{column} = {text}" for column, text in pairs)
            self._change(session, facts, recording, before, f"UPDATE {name} SET {settings}")
        elif not before:
            columns, texts = (", ".join(part) for part in zip(*pairs, strict=True)) if pairs else ("", "")
            self._change(
                session, facts, recording, before, f"INSERT INTO {name} ({columns}) VALUES ({texts})"
            )

    def _change(
        self, session: Any, facts: TableFacts, recording: Recording, before: list[dict[str, Any]], text: str
    ) -> None:
        start = self._head(session)
        if not self._execute(session, text):
            recording.counts["row statements refused"] += 1
            return
        end = self._head(session)
        if end == start:
            return
        after = self._select(session, facts)
        kinds = {"INSERT": ("insert",), "DELETE": ("delete",)}
        images: list[Image] = []
        if text.startswith("UPDATE"):
            for old, new in zip(before, after, strict=True):
                images += [("update_preimage", old), ("update_postimage", new)]
        else:
            [kind] = kinds[text[:6]]
            images = [(kind, row) for row in (after if kind == "insert" else before)]
        name = TableName(facts.database, facts.name)
        self._note(recording, RowChange(start, end, name, tuple(images), facts, text))

    def _select(self, session: Any, facts: TableFacts) -> list[dict[str, Any]]:
        compared = [column for column in facts.columns if column.is_comparable]
        columns = ", ".join(_selected(column) for column in compared) or "1"
        with session.cursor() as cursor:
            try:
                cursor.execute(f"SELECT {columns} FROM {quote_name(facts.database)}.{quote_name(facts.name)}")
            except pymysql.err.MySQLError:
                # A discarded tablespace has no rows.
                return []
            names = [column.name for column in compared]
            return [dict(zip(names, row, strict=False)) for row in cursor.fetchall()]

    # --- The session -------------------------------------------------------------------------------

    def _execute(self, session: Any, text: str) -> bool:
        with session.cursor() as cursor:
            try:
                cursor.execute(text)
            except (pymysql.err.MySQLError, UnicodeError):
                return False
        return True

    def _change_settings(self, session: Any) -> None:
        modes = self.chance.choice(_SQL_MODES)
        self.grammar.ansi_quotes = "ANSI_QUOTES" in modes
        self.grammar.escapes = "NO_BACKSLASH_ESCAPES" not in modes
        explicit = self.chance.choice(("ON", "OFF"))
        self._execute(session, f"SET sql_mode = '{modes}'")
        self._execute(session, f"SET explicit_defaults_for_timestamp = {explicit}")
        self._execute(session, f"SET collation_server = {self.chance.choice(('latin1_bin', 'utf8mb4_bin'))}")

    def _head(self, session: Any) -> Position:
        text = "SHOW MASTER STATUS" if self.grammar.mariadb else "SHOW BINARY LOG STATUS"
        with session.cursor() as cursor:
            cursor.execute(text)
            row = cursor.fetchone()
        return Position(0, row[0], row[1])

    def _is_comparable(self, kind: str, charset: str | None, extra: str) -> bool:
        """Return whether a server's client shows the same values as the log.

        MariaDB does not compute every virtual column that it logs. Both servers garble ENUM and SET members
        that they convert to or from charsets with two bytes per character.
        """
        is_virtual = self.grammar.mariadb and "VIRTUAL" in extra
        return not is_virtual and not (kind.startswith(("enum", "set")) and charset in ("ucs2", "utf16"))

    def _facts(self, session: Any) -> list[TableFacts]:
        tables: dict[tuple[str, str], list[ColumnFacts]] = {}
        versioned = set()
        with session.cursor() as cursor:
            cursor.execute(_COLUMNS, (self.databases,))
            for database, table, column, kind, charset, extra in cursor.fetchall():
                if isinstance(kind, bytes):
                    kind = kind.decode()
                is_row_part = "STORED GENERATED" in extra and kind == "timestamp(6)"
                is_writable = "GENERATED" not in extra.replace("DEFAULT_GENERATED", "")
                if is_row_part:
                    versioned.add((database, table))
                facts = ColumnFacts(
                    column, kind, charset, is_writable, self._is_comparable(kind, charset, extra)
                )
                tables.setdefault((database, table), []).append(facts)
            cursor.execute(
                "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA IN %s"
                " AND TABLE_TYPE = 'SYSTEM VERSIONED'",
                (self.databases,),
            )
            versioned |= set(cursor.fetchall())
        return [TableFacts(*name, tuple(columns), name in versioned) for name, columns in tables.items()]


def _selected(column: ColumnFacts) -> str:
    """Return the expression that selects a column. The client library mistakes the bytes of a VECTOR for
    text.
    """
    name = quote_name(column.name)
    return f"CAST({name} AS BINARY)" if column.type_text.startswith("vector") else name
