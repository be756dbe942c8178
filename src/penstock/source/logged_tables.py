# SPDX-License-Identifier: Apache-2.0
"""Looks up table definitions at any position of a kept log.

A reader therefore needs no separate schema history, wherever in the log it starts.
"""

import time
from collections.abc import Callable, Sequence

from penstock.errors import OptionInvalid, SchemaPending, SchemaUnknown
from penstock.limits import DEFINITION_PENDING_SECONDS_MAX
from penstock.model import Position, StatementSession, TableName, TableSchema
from penstock.narrowed_patterns import nearest_table
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import ServerSpelling
from penstock.source.source import Source

_HINT = "Give the tables' definitions: schemas; or set binlog_row_metadata=FULL on the server"


# The pause between two requests to a log that is being captured.
_PAUSE_SECONDS = 0.1


class LoggedTables:
    """The table definitions of a kept log, for reading a range: passed to `read_range` as its schemas.

    Definitions are cached until the next statement. Not thread-safe.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[TableName, TableSchema | None] = {}

    def needs_reread(self, name: TableName) -> bool:
        """Return False: for tables in doubt, `schema` waits or raises."""
        return False

    def schema(self, database: str, table: str, position: Position | None = None) -> TableSchema | None:
        """Return the schema in force at a position, None if the log does not know it."""
        assert position is not None, "a log is asked of a place"
        name = TableName(database, table)
        if name not in self._known:
            self._known[name] = self._ask(name, position)
        return self._known[name]

    def _ask(self, name: TableName, position: Position, *, again: bool = False) -> TableSchema | None:
        """Return the log's definition of a table. A definition that is in doubt is never returned.

        Raises SchemaUnknown, and SchemaPending while the definition is being read.
        """
        deadline = time.monotonic() + DEFINITION_PENDING_SECONDS_MAX
        while True:
            try:
                history = self._source.schema_history(position, name, again=again)
            except SchemaUnknown:
                # The log was captured without table definitions.
                return None
            doubt = None if history is None else history.doubt(name)
            if history is None or doubt is None:
                return None if history is None else history.schema(name.database, name.table)
            command = self._command(name, doubt.since or position)
            since = f"since {doubt.since}: {doubt.reason}" if doubt.since else "since before the log"
            if doubt.refusal is not None:
                raise SchemaUnknown(
                    f"the definition of {name} is in doubt {since}. It cannot be read: {doubt.refusal}",
                    position=str(position),
                    hint=f"Give it by hand: {command}",
                )
            if time.monotonic() >= deadline:
                raise SchemaPending(
                    f"the definition of {name} is still being read from the server, in doubt {since}",
                    position=str(position),
                    hint=f"Does the daemon capture this log? See penstock status; or give it: {command}",
                )
            time.sleep(_PAUSE_SECONDS)

    def _command(self, name: TableName, since: Position) -> str:
        return f"penstock schema set {name} {self._source.options.log_option} --at {since} --ddl FILE"

    def reread(self, name: TableName, position: Position) -> TableSchema:
        """Make the daemon that captures the log read the table again. Raises SchemaUnknown."""
        known = self._known.pop(name, None)
        schema = self._ask(name, position, again=True)
        if schema is None or schema == known:
            raise SchemaUnknown(
                f"the log does not know the definition of {name} here",
                position=str(position),
                hint=f"{_HINT}; or: {self._command(name, position)}",
            )
        self._known[name] = schema
        return schema

    def apply(
        self, text: str, database: str, position: Position, session: StatementSession | None = None
    ) -> set[TableName]:
        """Forget table definitions that a statement may have changed; the log has the new definitions from
        the statement's position on.
        """
        spelling = ServerSpelling().under((session or StatementSession()).sql_mode)
        if not effects_of(text, database, spelling):
            return set()
        forgotten = set(self._known)
        self._known.clear()
        return forgotten


# An error about an unknown table lists up to this many known tables.
_TABLES_LISTED_MAX = 10


def prove_table_known(
    source: Source, table: TableName, may_read: Callable[[str, str], bool] = lambda database, name: True
) -> None:
    """Raise OptionInvalid if a table is not among the definitions at the end of a log.

    The error's hint does not reveal tables that `may_read` refuses. If the log has no definitions, no error
    is raised.
    """
    try:
        history = source.schema_history(source.head())
    except SchemaUnknown:
        return
    if history is None or history.doubt(table) or history.schema(table.database, table.table):
        return
    names = history.names()
    if names:
        readable = [name for name in names if may_read(name.database, name.table)]
        raise OptionInvalid(f"the log knows no table {table}", hint=_hint_of(table, readable))


def _hint_of(table: TableName, known: Sequence[TableName]) -> str:
    """Return the table that was probably meant, or the known tables, those of the same database first."""
    if (near := nearest_table(str(table), known, "")) or not known:
        return near or "No table of the log is readable to this account"
    names = sorted(known, key=lambda name: (name.database != table.database, str(name)))
    listed = ", ".join(map(str, names[:_TABLES_LISTED_MAX]))
    more = len(names) - _TABLES_LISTED_MAX
    return f"It knows {listed}" + (f", and {more} more" if more > 0 else "")
