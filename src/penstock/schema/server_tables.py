# SPDX-License-Identifier: Apache-2.0
"""Table definitions from a live server, as of an earlier position of its log.

The log is read once, from the position to its head, and only event headers and statements are read. The
statements are cached, so further tables and later positions need no second read.
"""

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from penstock._native import Decoder
from penstock.errors import SchemaUnknown, ServerBusy
from penstock.model import Position, ServerAddress, StatementSession, TableName, TablePatterns
from penstock.mysql.connection import READING_SECONDS_MAX, Connection, connect
from penstock.mysql.replica import DumpStart, ReplicaStream, open_stream
from penstock.retry import Backoff, Retry
from penstock.schema.reader import read_defaults, read_table, read_tables
from penstock.schema.rewind import (
    CannotRewind,
    LoggedStatement,
    definition_before,
    names_after,
    renames,
    touches,
)
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.secrets import without_secrets
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition

_HINT = (
    "Give a schema file; from SET GLOBAL binlog_row_metadata = FULL on, the log names its columns by itself"
)

# The pauses between all tries add up to about 2.5 seconds.
_TRIES_MAX = 6
_BACKOFF = Backoff(longest=2.0)

# Give up on a table if statements changed it during each of this many reads.
_READINGS_MAX = 5

_Answer = TypeVar("_Answer")


class ServerTables:
    """Reads table definitions as of a log position from the server. Safe for several threads, but not for
    several processes.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._defaults: ServerDefaults | None = None
        self._statements: list[LoggedStatement] = []
        self._from: Position | None = None
        self._read_to: Position | None = None

    def defaults(self) -> ServerDefaults:
        """Return the server's defaults, read once."""
        if self._defaults is None:
            self._defaults = self._query_with_retry(read_defaults)
        return self._defaults

    def read_at(self, name: TableName, position: Position) -> TableDefinition | None:
        """Return a table's definition at a position; None if the server no longer has the table.

        Raises SchemaUnknown if a later statement cannot be undone, ServerBusy if statements change the table
        during every read.
        """
        spelling = self.defaults().spelling

        def read(connection: Connection) -> TableDefinition | None:
            for _ in range(_READINGS_MAX):
                statements = self._statements_after(position)
                definition = _definition_at(name, position, statements, connection, spelling)
                names = names_after(name, statements, spelling)
                # A statement that arrived during the read may or may not be reflected in the definition.
                late = self._statements_after(position)[len(statements) :]
                if not any(touches(statement, names, spelling) for statement in late):
                    return definition
            raise ServerBusy(f"{name} is changed again each time it is read", hint="Try again in a moment")

        with self._lock:
            return self._query_with_retry(read)

    def tables_at(self, position: Position, patterns: TablePatterns | None = None) -> list[TableDefinition]:
        """Return every selected table that existed at a position and can be determined.

        A table that cannot be determined is omitted, so that it is reported by name when its rows arrive.
        """
        spelling = self.defaults().spelling

        def read(connection: Connection) -> list[TableDefinition]:
            before = len(self._statements_after(position))
            current = {definition.schema.name: definition for definition in read_tables(connection)}
            statements = self._statements_after(position)
            return list(_definitions_at(current, statements, statements[before:], spelling, patterns))

        with self._lock:
            return self._query_with_retry(read)

    def _query_with_retry(self, query: Callable[[Connection], _Answer]) -> _Answer:
        """Run a query over its own session; retry a few times over a new session if it is lost."""

        def run_query() -> _Answer:
            with connect(self.address, READING_SECONDS_MAX) as connection:
                return query(connection)

        return Retry("reading definitions again", backoff=_BACKOFF, tries=_TRIES_MAX).run(run_query)

    def _statements_after(self, position: Position) -> list[LoggedStatement]:
        """Return the statements after a position that change table definitions, up to the current head of the
        log.
        """
        self._read_statements(position)
        return [statement for statement in self._statements if statement.position > position]

    def _read_statements(self, position: Position) -> None:
        """Cache the statements that change table definitions, from this position or an earlier one to the
        head of the log.
        """
        if self._from is None or self._read_to is None or not self._from <= position < self._read_to:
            # Drop the range between the previous read and a later position: no caller needs it, and the
            # server may have purged it.
            self._statements, self._from, self._read_to = [], position, position
        spelling = self.defaults().spelling
        start = DumpStart(position=self._read_to)
        with open_stream(self.address, start, bounded=True) as stream:
            for statement, end in _statements(stream, self._read_to):
                self._read_to = end
                # After a lost connection, a transaction may be delivered again, but its statements are cached
                # once.
                repeated = (
                    self._statements and statement and statement.position <= self._statements[-1].position
                )
                if statement and not repeated and statement.effects(spelling):
                    self._statements.append(statement)


def _definition_at(
    name: TableName,
    position: Position,
    statements: list[LoggedStatement],
    connection: Connection,
    spelling: ServerSpelling,
) -> TableDefinition | None:
    try:
        return definition_before(
            name, statements, lambda current_name: read_table(connection, current_name), spelling
        )
    except CannotRewind as problem:
        blocking = problem.statement
        raise SchemaUnknown(
            f"the columns of {name} are unknown, because they were changed at {blocking.position}:"
            f" {without_secrets(blocking.text)[:200]}",
            position=str(position),
            hint=_HINT,
        ) from problem


def _definitions_at(
    current: dict[TableName, TableDefinition],
    statements: list[LoggedStatement],
    late: list[LoggedStatement],
    spelling: ServerSpelling,
    patterns: TablePatterns | None,
) -> Iterator[TableDefinition]:
    # A selected table may have another name now, so all tables are read and the selection is applied last.
    names = set(current)
    for statement in statements:
        names |= {name for renamed in renames(statement, spelling) for name in renamed}
    for name in sorted(names):
        if patterns is not None and not patterns.matches(name.database, name.table):
            continue
        try:
            definition = definition_before(name, statements, current.get, spelling)
        except CannotRewind:
            continue
        # A statement that touched a table during the read may or may not be reflected in its definition.
        if any(touches(statement, names_after(name, statements, spelling), spelling) for statement in late):
            continue
        if definition is not None:
            yield definition


def _statements(stream: ReplicaStream, start: Position) -> Iterator[tuple[LoggedStatement | None, Position]]:
    """Yield each statement with the end of the last complete transaction, and at the end of the log None with
    the end of its last transaction.
    """
    opened = stream.start.position
    assert opened is not None, "the stream begins at a position"
    decoder = Decoder(
        instance="",
        epoch=start.epoch,
        file=start.file,
        offset=opened.offset,
        live=True,
        start=(start.file_number, start.offset),
    )
    buffered = bytearray()
    for chunk in stream.event_chunks():
        buffered += chunk
        while True:
            del buffered[: decoder.feed(buffered)]
            if decoder.state == "statement":
                logged = decoder.take_statement()
                if logged.is_skipped:
                    continue
                file, _, offset = logged.end_position.rpartition(":")
                position = Position(start.epoch, file, int(offset))
                session = StatementSession.of_event(*logged.session)
                yield LoggedStatement(position, logged.database, logged.text, session), _end(decoder, start)
            elif decoder.state == "table":
                # No rows are needed, so none are decoded.
                decoder.answer_table(None)
            else:
                break
    yield None, _end(decoder, start)


def _end(decoder: Decoder, start: Position) -> Position:
    file, offset = decoder.position
    return Position(start.epoch, file, offset)
