# SPDX-License-Identifier: Apache-2.0
"""Table definitions from a kept log: what was in force is asked of the log, position by position.

So a reader needs no history of its own, wherever in the log it begins.
"""

from penstock.capture.ddl.statement import effects_of
from penstock.capture.ddl.tokens import ServerSpelling
from penstock.errors import SchemaUnknown
from penstock.model import Position, StatementSession, TableName, TableSchema
from penstock.source.source import Source

_HINT = "Give the tables' definitions: schemas; or set binlog_row_metadata=FULL on the server"


class LoggedTables:
    """The definitions that a kept log has, as a range is read; what `read_range` takes for schemas.

    An answer holds until the next statement. Not for several threads at once.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[TableName, TableSchema | None] = {}

    def needs_reread(self, name: TableName) -> bool:
        """Nothing is in doubt here: where the log is, `schema` has no answer."""
        return False

    def schema(self, database: str, table: str, position: Position | None = None) -> TableSchema | None:
        """Return the schema in force at a position, None where the log does not know it."""
        assert position is not None, "a log is asked of a place"
        name = TableName(database, table)
        if name not in self._known:
            self._known[name] = self._ask(name, position)
        return self._known[name]

    def _ask(self, name: TableName, position: Position) -> TableSchema | None:
        try:
            history = self._source.schema_history(position, name)
        except SchemaUnknown:
            # A log that was captured without definitions.
            return None
        if history is None or history.needs_reread(name):
            return None
        return history.schema(name.database, name.table)

    def reread(self, name: TableName, position: Position) -> TableSchema:
        """Raise SchemaUnknown: there is nobody else to ask."""
        raise SchemaUnknown(
            f"the log does not know the definition of {name} here", position=str(position), hint=_HINT
        )

    def apply(
        self, text: str, database: str, position: Position, session: StatementSession | None = None
    ) -> set[TableName]:
        """Forget what a statement may have changed; the log itself has it from its position on."""
        if not effects_of(text, database, ServerSpelling()):
            return set()
        forgotten = set(self._known)
        self._known.clear()
        return forgotten
