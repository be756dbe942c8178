# SPDX-License-Identifier: Apache-2.0
"""Resolves table definitions that are in doubt: a separate thread reads them from the server while capture
continues.

    a statement puts a table in doubt ─▶ read the current definition ─▶ wait until its position is received
─▶ rewind ─▶ store

A server knows only its current tables. The definition read from the server is therefore newer than the
statement that put the table in doubt. Once the log has been received up to the position of the read, the
effects of the statements after the doubtful statement are undone to obtain the definition at its position. A
table is read only after the log has been received up to the doubtful statement and the server shows the
effects of its log up to there. If a statement changes the table during the read, the table is read again. If
a statement cannot be undone, the table is rejected by name and its readers stop.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from traceback import format_exc
from typing import Any

import structlog

from penstock.errors import ConnectionLost, PenstockError, SchemaUnknown, ServerBusy, ServerChanged
from penstock.logstore.schemas import SURVEYED, SchemaLog, definition_line, doubt_line, refusal_line
from penstock.model import Position, ServerAddress, StatementSession, TableName, TableSchema
from penstock.mysql.committed import wait_until_defined
from penstock.mysql.connection import READING_SECONDS_MAX, Connection, connect
from penstock.retry import RECONNECT
from penstock.schema.history import Doubt, SchemaHistory
from penstock.schema.reader import read_table, read_tables
from penstock.schema.rewind import (
    CannotRewind,
    LoggedStatement,
    definition_before,
    names_after,
    renames,
    statements_by_table,
    touches,
)
from penstock.schema.statements.effects import CreateLike, CreateTable
from penstock.schema.statements.statement import opening_words
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition

_log = structlog.get_logger(__name__)

# Above this number, tables are read in one pass over information_schema.
_ASKED_ONE_BY_ONE_MAX = 50

# A table that statements change during each of this many reads is refused.
_READINGS_MAX = 5

# The maximum number of table definitions that readers can have requested at a time. Each costs a query on the
# server.
_QUESTIONS_MAX = 10_000

# The status of a table whose definition is still being determined.
_BEING_READ = "being read"

# The maximum number of tables that the status lists.
_LISTED_MAX = 100


@dataclass(frozen=True)
class Question:
    """A table whose definition is in doubt, and the position since which it has been in doubt. A `name` of
    None means every table.
    """

    name: TableName | None
    since: Position


class DefinitionSettler:
    """Resolves doubtful table definitions of one log while one server is captured.

    `begins` is where capture resumes; the log has been received up to that position. The server knows
    definitions of its own epoch only, so doubts from earlier epochs are rejected. `before` is the previous
    settler's thread. It must end first, so that at most one session is open with a server that does not
    answer. `close` ends the thread and its session without waiting. An answer that arrives after `close` has
    no effect.
    """

    def __init__(
        self,
        schema_log: SchemaLog[SchemaHistory],
        address: ServerAddress,
        server_key: str,
        spelling: ServerSpelling,
        begins: Position,
        before: threading.Thread | None = None,
    ) -> None:
        self._schema_log = schema_log
        self._address = address
        self._server_key = server_key
        self._spelling = spelling
        self._changed = threading.Condition()
        self._closed = False
        self._retired = False
        self._has_read = threading.Event()
        # The lock is held while table definitions are stored, so that nothing is stored after `close`.
        self._store_lock = threading.Lock()
        self._epoch = begins.epoch
        self._received = begins
        self._readings: dict[Question, int] = {}
        # Whether the thread is waiting until the log reaches a position. An operator may answer the thread's
        # questions during the wait.
        self._awaits_position = False
        # The newest answered questions, in order. If a table is still in doubt after its question was
        # answered, the question is not asked again.
        self._answered: dict[Question, None] = {}
        # Current names of renamed tables, discovered while statements were undone.
        self._renamed: set[TableName] = set()
        self._refused: dict[Question, Doubt] = {}
        self._failure: str | None = None
        self._listed: list[dict[str, Any]] = []
        self._connection: Connection | None = None
        self._before = before
        self._thread = threading.Thread(target=self._run, name=f"definitions-{address.host}", daemon=True)

    # --- For the capture, which never waits -----------------------------------------------------

    def start(self) -> None:
        """Start with the tables that are already in doubt."""
        self.note_doubts()
        self._thread.start()

    def wait_until_read(self, seconds: float) -> None:
        """Wait until the server's tables have been read for the first time, or until the timeout.

        If a DDL statement runs before this read, the earlier definition may no longer be available. Capture
        therefore waits briefly before it requests the first bytes of a new log.
        """
        self._has_read.wait(seconds)

    def note_doubts(self) -> None:
        """Add the doubts that the last statement caused."""
        unsurveyed, doubts = self._schema_log.with_newest(
            lambda history: (history.unsurveyed, history.doubts())
        )
        with self._changed:
            if unsurveyed is not None and unsurveyed.since is not None:
                self._add(Question(None, unsurveyed.since))
            for name, doubt in doubts.items():
                if doubt.refusal is None and doubt.since is not None:
                    self._add(Question(name, doubt.since))
            self._changed.notify_all()
            listed: dict[tuple[TableName | None, Position | None], Doubt] = {
                (question.name, question.since): doubt for question, doubt in self._refused.items()
            }
            listed |= {(name, doubt.since): doubt for name, doubt in doubts.items()}
            self._listed = [
                _listed(name, doubt, self._failure)
                for (name, _), doubt in islice(listed.items(), _LISTED_MAX)
            ]

    def received(self, position: Position) -> None:
        """Record the position up to which the log has been received and its statements applied."""
        with self._changed:
            self._received = position
            # Waking the thread for each transaction would make it compete with readers for the interpreter
            # lock.
            if self._readings or self._awaits_position:
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread and its session."""
        with self._store_lock, self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.interrupt()

    def retire(self) -> threading.Thread:
        """Let another settler take over table definitions set by an operator; return this settler's
        thread.
        """
        with self._store_lock:
            self._retired = True
        return self._thread

    def listed(self) -> list[dict[str, Any]]:
        """Return the tables in doubt for the status, limited to the first _LISTED_MAX tables."""
        return self._listed

    # --- For readers ----------------------------------------------------------------------------

    def wait(self, name: TableName, since: Position, seconds: float, *, again: bool = False) -> None:
        """Wait until a table's doubt has been settled or refused, or until the timeout.

        With `again`, read a definition even if it is not in doubt, because the log contradicts it at that
        position.
        """
        question = Question(name, since)
        with self._changed:
            if len(self._readings) < _QUESTIONS_MAX:
                self._add(question)
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or (question not in self._readings and not self._surveys(since)), seconds
            )

    def give(self, name: TableName, since: Position, definition: dict[str, Any]) -> None:
        """Store a table definition that an operator set, valid from a position on.

        Raises SchemaUnknown, SchemaInvalid, ServerBusy.
        """
        table = TableDefinition.from_json(definition).renamed(name, 1)
        with self._store_lock:
            if self._retired:
                raise ServerBusy("another session of the capture begins", hint="Give the definition again")
            self._schema_log.settle(since, [definition_line(table.to_json())])
            if self._closed:
                self._schema_log.close()
        _log.info("a definition was given by hand", table=str(name), at=str(since))
        with self._changed:
            question = Question(name, since)
            self._readings.pop(question, None)
            self._refused.pop(question, None)
            self._changed.notify_all()
        self.note_doubts()

    def _surveys(self, since: Position) -> bool:
        return any(question.name is None and question.since <= since for question in self._readings)

    # --- The thread -----------------------------------------------------------------------------

    def _add(self, question: Question) -> None:
        if question not in self._answered and question.since.epoch <= self._epoch:
            self._readings.setdefault(question, 0)

    def _note_answered(self, question: Question) -> None:
        self._readings.pop(question, None)
        self._answered[question] = None
        if len(self._answered) > _QUESTIONS_MAX:
            del self._answered[next(iter(self._answered))]

    def _run(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.join()
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._ready_questions()))
                if self._closed:
                    return
                questions = self._ready_questions()
            failures += 1
            pause = RECONNECT.pause(failures)
            try:
                unfinished = self._attempt(questions)
            except PenstockError as problem:
                unfinished = True
                if not self._closed:
                    self._note_failure(problem.message)
                    _log.warning(
                        "definitions cannot be read yet", why=str(problem), after_seconds=round(pause, 3)
                    )
            if not unfinished:
                failures = 0
                continue
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause):
                    return

    def _attempt(self, questions: list[Question]) -> bool:
        """Settle as many questions as possible; return whether some must be read again.

        Raises only PenstockError.
        """
        try:
            unfinished = self._settle(questions)
            self._failure = None
            self.note_doubts()
        except PenstockError:
            raise
        except Exception as defect:
            # Readers wait for this thread, so it must continue. The traceback omits local variables, which
            # hold statements.
            _log.error("a defect in reading definitions", traceback=format_exc())
            raise PenstockError(
                f"a defect: {type(defect).__name__}", hint="The daemon's log has the traceback"
            ) from defect
        return unfinished

    def _ready_questions(self) -> list[Question]:
        """Return the questions whose position has been received, so that the server is at or past the
        position.
        """
        return [question for question in self._readings if self._has_received(question.since)]

    def _note_failure(self, failure: str) -> None:
        """Show in the status why definitions cannot be read."""
        with self._changed:
            self._failure = failure
            self._listed = [
                {**listed, "why": failure} if listed["state"] == _BEING_READ else listed
                for listed in self._listed
            ]

    def _settle(self, questions: list[Question]) -> bool:
        """Read the requested tables and store their definitions; return whether to read some again."""
        try:
            snapshot = self._read(questions)
        finally:
            self._has_read.set()
        with self._changed:
            self._awaits_position = True
            self._changed.wait_for(lambda: self._closed or self._has_received(snapshot.after))
            self._awaits_position = False
            if self._closed:
                return False
        unfinished = False
        for question in questions:
            try:
                settled = self._answer(question, snapshot)
            except SchemaUnknown:
                # The log now starts after the position, so no reader needs the definition.
                settled = True
            with self._changed:
                if settled or self._closed:
                    self._note_answered(question)
                elif question in self._readings:
                    unfinished = True
                    self._readings[question] += 1
                self._changed.notify_all()
        return unfinished

    def _has_received(self, position: Position) -> bool:
        return self._received >= position

    def _read(self, questions: list[Question]) -> "_TableSnapshot":
        """Read the server's current tables, and its log position before and after the read."""
        with connect(self._address, READING_SECONDS_MAX) as connection, self._interruptible(connection):
            if connection.identity().key != self._server_key:
                raise ServerChanged(f"{self._address} is another server now")
            before = _head(connection, self._epoch)
            wait_until_defined(connection)
            names = {question.name for question in questions} | self._renamed
            tables: dict[TableName, TableDefinition] = {}
            reads_all = None in names or len(names) > _ASKED_ONE_BY_ONE_MAX
            if reads_all:
                tables = {definition.schema.name: definition for definition in read_tables(connection)}
            else:
                for name in names:
                    definition = read_table(connection, name) if name is not None else None
                    if name is not None and definition is not None:
                        tables[name] = definition
            requested = None if reads_all else {name for name in names if name is not None}
            return _TableSnapshot(before, _head(connection, self._epoch), tables, requested)

    @contextmanager
    def _interruptible(self, connection: Connection) -> Iterator[None]:
        """Let `close` end a session during the block. Raises ConnectionLost if `close` has already been
        called.
        """
        with self._changed:
            if self._closed:
                raise ConnectionLost(f"{self._address}: the capture that asks has ended")
            self._connection = connection
        try:
            yield
        finally:
            with self._changed:
                self._connection = None

    def _answer(self, question: Question, snapshot: "_TableSnapshot") -> bool:
        """Store the answer to a question if it is known; return whether that settles the question."""
        if self._is_partly_stored(question):
            self._store(question.since, [])
            return True
        statements = self._statements(question.since, snapshot)
        if question.name is None:
            # Without the statements, no table can be determined. Readers then ask for individual tables, and
            # are refused.
            return statements is None or self._survey(question.since, snapshot, statements)
        history = self._schema_log.at(question.since)
        doubt = history.doubt(question.name)
        try:
            definition = self._definition(question.name, snapshot, statements)
        except _NotYet:
            if self._readings.get(question, 0) < _READINGS_MAX:
                return False
            definition = "statements change it again each time it is read"
        if isinstance(definition, str):
            _log.warning("a table's definition is unknown", table=str(question.name), why=definition)
            if doubt is not None:
                self._store(question.since, [refusal_line(question.name, definition)])
                with self._changed:
                    self._refused[question] = replace(doubt, refusal=definition)
        elif doubt is not None or _decodes_differently(
            history.schema(*_parts(question.name)), definition.schema
        ):
            self._store(question.since, [definition_line(definition.to_json())])
        return True

    def _is_partly_stored(self, question: Question) -> bool:
        """Return whether a crash interrupted the storing of an answer: the answer is stored, but later
        snapshots still contain the doubt.
        """

        def doubt(history: SchemaHistory) -> Doubt | None:
            return history.unsurveyed if question.name is None else history.doubt(question.name)

        newest = self._schema_log.with_newest(doubt)
        return (
            newest is not None
            and newest.since == question.since
            and doubt(self._schema_log.at(question.since)) is None
        )

    def _statements(self, since: Position, snapshot: "_TableSnapshot") -> list[LoggedStatement] | None:
        """Return the statements between a position and the read, None if some are not in the log."""
        if since.epoch != self._epoch:
            return None
        logged = self._schema_log.statements(since, snapshot.after)
        if logged is None:
            return None
        return [
            LoggedStatement(position, line["database"], line["text"], StatementSession.from_json(line))
            for position, line in logged
        ]

    def _definition(
        self, name: TableName, snapshot: "_TableSnapshot", statements: Sequence[LoggedStatement] | None
    ) -> TableDefinition | str:
        """Return a table's definition as it was before the statements, or why it is unknown. Raises
        _NotYet.
        """
        if statements is None:
            return "statements since then are not in the log"
        names = names_after(name, statements, self._spelling)
        if snapshot.requested is not None and not names <= snapshot.requested:
            self._renamed |= names
            raise _NotYet
        late = [statement for statement in statements if statement.position > snapshot.before]
        if any(touches(statement, names, self._spelling) for statement in late):
            raise _NotYet
        try:
            definition = definition_before(name, statements, snapshot.tables.get, self._spelling)
        except CannotRewind as problem:
            blocking = problem.statement
            opening = opening_words(blocking.text)
            return f"it was changed at {blocking.position} in a way that cannot be taken back: {opening}"
        return definition or "the server no longer has the table"

    def _store(self, since: Position, lines: Sequence[dict[str, Any]]) -> None:
        with self._store_lock:
            if not self._closed:
                self._schema_log.settle(since, lines, received=self._received)

    def _survey(self, since: Position, snapshot: "_TableSnapshot", statements: list[LoggedStatement]) -> bool:
        """Store every table of the server as of a position. Undetermined tables stay in doubt."""
        names = set(snapshot.tables)
        for statement in statements:
            names |= {name for renamed in renames(statement, self._spelling) for name in renamed}
        lines, of_table = [], statements_by_table(statements, self._spelling)
        for name in sorted(names):
            if self._closed:
                return False
            try:
                definition = self._definition(name, snapshot, of_table(name))
            except _NotYet:
                lines.append(doubt_line(name, "it was changed while the tables of the server were read"))
                continue
            if isinstance(definition, TableDefinition):
                lines.append(definition_line(definition.to_json()))
            elif name in snapshot.tables and not _is_created(name, of_table(name), self._spelling):
                lines += [
                    doubt_line(name, "the server's tables were read later"),
                    refusal_line(name, definition),
                ]
        self._store(since, [*lines, SURVEYED])
        return True


@dataclass(frozen=True)
class _TableSnapshot:
    """A server's tables, read between two positions of its log. `requested` is None for all tables."""

    before: Position
    after: Position
    tables: dict[TableName, TableDefinition]
    requested: set[TableName] | None


class _NotYet(Exception):
    """The read was inconclusive: a statement touched the table during the read, or the table has another name
    now.
    """


def _head(connection: Connection, epoch: int) -> Position:
    head = connection.head()
    return Position(epoch, head.file, head.offset)


def _parts(name: TableName) -> tuple[str, str]:
    return name.database, name.table


def _decodes_differently(stored: TableSchema | None, current: TableSchema) -> bool:
    """Return whether rows decode differently with a definition that was just read.

    Undoing statements loses keys and nullability, so neither counts as a contradiction.
    """
    columns = [
        None
        if schema is None
        else [(column.name, column.type_text, column.charset) for column in schema.columns]
        for schema in (stored, current)
    ]
    return columns[0] != columns[1]


def _is_created(name: TableName, statements: Iterable[LoggedStatement], spelling: ServerSpelling) -> bool:
    """Return whether one of the statements created the table."""
    return any(
        isinstance(effect, CreateTable | CreateLike) and effect.name == name
        for statement in statements
        for effect in statement.effects(spelling)
    )


def _listed(name: TableName | None, doubt: Doubt, failure: str | None) -> dict[str, Any]:
    """Return a table in doubt for the status: the reason, the position, and a command for the operator."""
    since = str(doubt.since) if doubt.since else None
    return {
        "table": str(name),
        "since": since,
        "reason": doubt.reason,
        "state": "stopped" if doubt.refusal is not None else _BEING_READ,
        "why": doubt.refusal or failure,
        "command": f"penstock schema set {name} --url penstock://HOST:7070/INSTANCE"
        f" --at {since or 'POSITION'} --ddl FILE",
    }
