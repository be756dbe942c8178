# SPDX-License-Identifier: Apache-2.0
"""Table definitions from a live server, as they were at a position of its log.

The log from the position to its head is read once, event headers and statements only, and what was
read is kept; so many tables, and later positions, cost no second reading.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from penstock._native import Decoder
from penstock.errors import SchemaUnknown, ServerBusy, TransientError
from penstock.model import Position, ServerAddress, StatementSession, TableName, TablePatterns
from penstock.mysql.connection import READING_SECONDS_MAX, Connection, connect
from penstock.mysql.replica import DumpStart, ReplicaStream, open_stream
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
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition

_HINT = (
    "Give a schema file; from SET GLOBAL binlog_row_metadata = FULL on, the log names its columns by itself"
)

# A session that is lost is opened again after each of these.
_PAUSES_SECONDS = (0.1, 0.5, 2.0)

# A table that statements change again each time it is read is given up after this many readings.
_READINGS_MAX = 5

_Answer = TypeVar("_Answer")


class ServerTables:
    """Answers what a table was at a position. Not for several processes; safe for several threads."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._defaults: ServerDefaults | None = None
        self._statements: list[LoggedStatement] = []
        self._from: Position | None = None
        self._read_to: Position | None = None

    def defaults(self) -> ServerDefaults:
        """Return what the server's statements leave out, asked once."""
        if self._defaults is None:
            self._defaults = self._asked(read_defaults)
        return self._defaults

    def read_at(self, name: TableName, position: Position) -> TableDefinition | None:
        """Return a table's definition at a position; None where the server has it no more.

        Raises SchemaUnknown where a statement since then hides what was before it, ServerBusy where
        statements change the table again each time it is read.
        """
        spelling = self.defaults().spelling

        def read(connection: Connection) -> TableDefinition | None:
            for _ in range(_READINGS_MAX):
                later = self._later(position)
                definition = _rewound(name, position, later, connection, spelling)
                names = names_after(name, later, spelling)
                # A statement that came in while the table was read may or may not be in what was read.
                late = self._later(position)[len(later) :]
                if not any(touches(statement, names, spelling) for statement in late):
                    return definition
            raise ServerBusy(f"{name} is changed again each time it is read", hint="Try again in a moment")

        with self._lock:
            return self._asked(read)

    def tables_at(self, position: Position, patterns: TablePatterns | None = None) -> list[TableDefinition]:
        """Return every selected table that was there at a position and can be told.

        A table that cannot be told is left out, so that it is unknown by name when its rows arrive.
        """
        spelling = self.defaults().spelling

        def read(connection: Connection) -> list[TableDefinition]:
            before = len(self._later(position))
            now = {definition.schema.name: definition for definition in read_tables(connection)}
            later = self._later(position)
            return list(_all_rewound(now, later, later[before:], spelling, patterns))

        with self._lock:
            return self._asked(read)

    def _asked(self, question: Callable[[Connection], _Answer]) -> _Answer:
        """Ask over a session of its own, and again over another where it is lost, a few times."""
        for pause in (*_PAUSES_SECONDS, None):
            try:
                with connect(self.address, READING_SECONDS_MAX) as connection:
                    return question(connection)
            except TransientError:
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _later(self, position: Position) -> list[LoggedStatement]:
        """Return the defining statements after a position, up to the head of the log now."""
        self._read_statements(position)
        return [statement for statement in self._statements if statement.position > position]

    def _read_statements(self, position: Position) -> None:
        """Know the defining statements from the position, or an earlier one, to the head of the log."""
        if self._from is None or self._read_to is None or not self._from <= position < self._read_to:
            # What lies between an earlier question's end and a later position is of no use to anybody, and
            # the server may have purged it.
            self._statements, self._from, self._read_to = [], position, position
        spelling = self.defaults().spelling
        start = DumpStart(position=self._read_to)
        with open_stream(self.address, start, bounded=True) as stream:
            for statement, end in _statements(stream, self._read_to):
                self._read_to = end
                # After a lost connection a transaction comes again.
                known = self._statements and statement and statement.position <= self._statements[-1].position
                if statement and not known and statement.effects(spelling):
                    self._statements.append(statement)


def _rewound(
    name: TableName,
    position: Position,
    later: list[LoggedStatement],
    connection: Connection,
    spelling: ServerSpelling,
) -> TableDefinition | None:
    try:
        return definition_before(name, later, lambda now: read_table(connection, now), spelling)
    except CannotRewind as problem:
        hiding = problem.statement
        raise SchemaUnknown(
            f"the columns of {name} cannot be told, since they were changed at {hiding.position}:"
            f" {hiding.text[:200]}",
            position=str(position),
            hint=_HINT,
        ) from problem


def _all_rewound(
    now: dict[TableName, TableDefinition],
    later: list[LoggedStatement],
    late: list[LoggedStatement],
    spelling: ServerSpelling,
    patterns: TablePatterns | None,
) -> Iterator[TableDefinition]:
    # Another name now may be a selected one then, so all tables are read and the selection comes last.
    names = set(now)
    for statement in later:
        names |= {name for renamed in renames(statement, spelling) for name in renamed}
    for name in sorted(names):
        if patterns is not None and not patterns.matches(name.database, name.table):
            continue
        try:
            definition = definition_before(name, later, now.get, spelling)
        except CannotRewind:
            continue
        # What a statement touched while the tables were read may or may not be in what was read.
        if any(touches(statement, names_after(name, later, spelling), spelling) for statement in late):
            continue
        if definition is not None:
            yield definition


def _statements(stream: ReplicaStream, start: Position) -> Iterator[tuple[LoggedStatement | None, Position]]:
    """Yield each statement with the end of the last whole transaction, and at last that end with None."""
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
    carried = bytearray()
    for chunk in stream.event_chunks():
        carried += chunk
        while True:
            del carried[: decoder.feed(carried)]
            if decoder.state == "statement":
                taken = decoder.take_statement()
                if taken.is_skipped:
                    continue
                file, _, offset = taken.end_position.rpartition(":")
                position = Position(start.epoch, file, int(offset))
                session = StatementSession.of_event(*taken.session)
                yield LoggedStatement(position, taken.database, taken.text, session), _end(decoder, start)
            elif decoder.state == "table":
                # No row is wanted, so none is decoded.
                decoder.answer_table(None)
            else:
                break
    yield None, _end(decoder, start)


def _end(decoder: Decoder, start: Position) -> Position:
    file, offset = decoder.position
    return Position(start.epoch, file, offset)
