# SPDX-License-Identifier: Apache-2.0
"""Definitions in doubt, read from the server in a thread of their own: receiving bytes never waits for them.

    a statement puts a table in doubt ─▶ its definition now ─▶ received up to there ─▶ taken back ─▶ kept

The server tells its tables as they are. What it tells is taken back, statement by statement, to the position
of the doubt; the statements in between are those of the log itself, once it was received up to where the
server stood after the reading. A table is read only when the log has the place of its doubt and the server
shows what stands there. One that a statement touched while it was read is read again. Where a statement
cannot be taken back, the table is refused by name, and its readers stop.
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

# More tables than this are read in one pass over information_schema.
_ASKED_ONE_BY_ONE_MAX = 50

# A table that statements change again each time it is read is refused after this many readings.
_READINGS_MAX = 5

# Readers may ask for this many definitions at a time, of which each costs the server a question.
_QUESTIONS_MAX = 10_000

# How the status calls a table whose definition is still sought.
_BEING_READ = "being read"

# The status lists no more tables than this.
_LISTED_MAX = 100


@dataclass(frozen=True)
class Question:
    """A table whose definition is sought, and since where it is in doubt; no name is every table."""

    name: TableName | None
    since: Position


class DefinitionSettler:
    """Settles the doubts of one log, for as long as one server is captured.

    `begins` is where the capture goes on: the log was received up to there. The server answers for that epoch
    alone; a doubt of an earlier one is refused. `before` is the thread of the settler before this one: it
    ends first, so that a server which does not answer has one session. `close` ends the thread and its
    session without waiting: an answer that is under way changes nothing any more.
    """

    def __init__(
        self,
        kept: SchemaLog[SchemaHistory],
        address: ServerAddress,
        server_key: str,
        spelling: ServerSpelling,
        begins: Position,
        before: threading.Thread | None = None,
    ) -> None:
        self._kept = kept
        self._address = address
        self._server_key = server_key
        self._spelling = spelling
        self._changed = threading.Condition()
        self._closed = False
        self._retired = False
        self._has_read = threading.Event()
        # Held while something is kept, so that nothing is after the end.
        self._keeping = threading.Lock()
        self._epoch = begins.epoch
        self._received = begins
        self._readings: dict[Question, int] = {}
        # The newest answers, in order: what is in doubt still after its answer is not asked about again.
        self._answered: dict[Question, None] = {}
        # Names that tables have now, found out while their definitions were taken back.
        self._renamed: set[TableName] = set()
        self._refused: dict[Question, Doubt] = {}
        self._failure: str | None = None
        self._listed: list[dict[str, Any]] = []
        self._connection: Connection | None = None
        self._before = before
        self._thread = threading.Thread(target=self._run, name=f"definitions-{address.host}", daemon=True)

    # --- For the capture, which never waits -----------------------------------------------------

    def start(self) -> None:
        """Begin with what is in doubt already."""
        self.note_doubts()
        self._thread.start()

    def wait_until_read(self, seconds: float) -> None:
        """Wait until the server's tables were read for the first time, or the time is up.

        What changes before that may hide a definition, so the first bytes of a new log wait a moment.
        """
        self._has_read.wait(seconds)

    def note_doubts(self) -> None:
        """Take up the doubts that the last statement left."""
        unsurveyed, doubts = self._kept.with_newest(lambda history: (history.unsurveyed, history.doubts()))
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
        """Note up to where the log was received, and its statements applied."""
        with self._changed:
            self._received = position
            self._changed.notify_all()

    def close(self) -> None:
        """End."""
        with self._keeping, self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._connection is not None:
                self._connection.interrupt()

    def retire(self) -> threading.Thread:
        """Let another settler take over, to which goes what is given by hand; return this one's thread."""
        with self._keeping:
            self._retired = True
        return self._thread

    def listed(self) -> list[dict[str, Any]]:
        """Return the tables in doubt as the status shows them, the first of them where they are many."""
        return self._listed

    # --- For readers ----------------------------------------------------------------------------

    def wait(self, name: TableName, since: Position, seconds: float, *, again: bool = False) -> None:
        """Wait until a table's doubt was settled or refused, or the time is up.

        With `again` a definition is sought that is not in doubt, since the log contradicts it there.
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
        """Keep a definition that an operator gives, from a position on.

        Raises SchemaUnknown, SchemaInvalid, ServerBusy.
        """
        told = TableDefinition.from_json(definition).renamed(name, 1)
        with self._keeping:
            if self._retired:
                raise ServerBusy("another session of the capture begins", hint="Give the definition again")
            self._kept.settle(since, [definition_line(told.to_json())])
            if self._closed:
                self._kept.close()
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
                self._changed.wait_for(lambda: self._closed or bool(self._ready()))
                if self._closed:
                    return
                questions = self._ready()
            failures += 1
            pause = RECONNECT.pause(failures)
            try:
                left = self._attempt(questions)
            except PenstockError as problem:
                left = True
                if not self._closed:
                    self._note_failure(problem.message)
                    _log.warning(
                        "definitions cannot be read yet", why=str(problem), after_seconds=round(pause, 3)
                    )
            if not left:
                failures = 0
                continue
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause):
                    return

    def _attempt(self, questions: list[Question]) -> bool:
        """Settle what can be; return whether some must be read again. Raises nothing but PenstockError."""
        try:
            left = self._settle(questions)
            self._failure = None
            self.note_doubts()
        except PenstockError:
            raise
        except Exception as defect:
            # Readers wait for this thread, so it goes on; its locals, which hold statements, are not shown.
            _log.error("a defect in reading definitions", traceback=format_exc())
            raise PenstockError(
                f"a defect: {type(defect).__name__}", hint="The daemon's log has the traceback"
            ) from defect
        return left

    def _ready(self) -> list[Question]:
        """Return the questions whose place was received: what the server shows is at or behind it."""
        return [question for question in self._readings if self._has_received(question.since)]

    def _note_failure(self, failure: str) -> None:
        """Let the status say why nothing is read."""
        with self._changed:
            self._failure = failure
            self._listed = [
                {**listed, "why": failure} if listed["state"] == _BEING_READ else listed
                for listed in self._listed
            ]

    def _settle(self, questions: list[Question]) -> bool:
        """Read the tables asked about, and keep what can be told; return whether some must be read again."""
        try:
            reading = self._read(questions)
        finally:
            self._has_read.set()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_received(reading.after))
            if self._closed:
                return False
        left = False
        for question in questions:
            try:
                settled = self._answer(question, reading)
            except SchemaUnknown:
                # The log begins later by now, so nobody reads there.
                settled = True
            with self._changed:
                if settled or self._closed:
                    self._note_answered(question)
                elif question in self._readings:
                    left = True
                    self._readings[question] += 1
                self._changed.notify_all()
        return left

    def _has_received(self, position: Position) -> bool:
        return self._received >= position

    def _read(self, questions: list[Question]) -> "_Reading":
        """Ask the server for the tables as they are now, and where its log stood before and after."""
        with connect(self._address, READING_SECONDS_MAX) as connection, self._interruptible(connection):
            if connection.identity().key != self._server_key:
                raise ServerChanged(f"{self._address} is another server now")
            before = _head(connection, self._epoch)
            wait_until_defined(connection)
            names = {question.name for question in questions} | self._renamed
            tables: dict[TableName, TableDefinition] = {}
            whole = None in names or len(names) > _ASKED_ONE_BY_ONE_MAX
            if whole:
                tables = {definition.schema.name: definition for definition in read_tables(connection)}
            else:
                for name in names:
                    definition = read_table(connection, name) if name is not None else None
                    if name is not None and definition is not None:
                        tables[name] = definition
            asked = None if whole else {name for name in names if name is not None}
            return _Reading(before, _head(connection, self._epoch), tables, asked)

    @contextmanager
    def _interruptible(self, connection: Connection) -> Iterator[None]:
        """Let `close` end a session for the block. Raises ConnectionLost where it was called before."""
        with self._changed:
            if self._closed:
                raise ConnectionLost(f"{self._address}: the capture that asks has ended")
            self._connection = connection
        try:
            yield
        finally:
            with self._changed:
                self._connection = None

    def _answer(self, question: Question, reading: "_Reading") -> bool:
        """Keep what can be told of a question; return whether that settles it."""
        if self._is_half_kept(question):
            self._keep(question.since, [])
            return True
        statements = self._statements(question.since, reading)
        if question.name is None:
            # Without the statements nothing can be told; readers then ask table by table, and are refused.
            return statements is None or self._survey(question.since, reading, statements)
        known = self._kept.at(question.since)
        doubt = known.doubt(question.name)
        try:
            definition = self._definition(question.name, reading, statements)
        except _NotYet:
            if self._readings.get(question, 0) < _READINGS_MAX:
                return False
            definition = "statements change it again each time it is read"
        if isinstance(definition, str):
            _log.warning("a table's definition is unknown", table=str(question.name), why=definition)
            if doubt is not None:
                self._keep(question.since, [refusal_line(question.name, definition)])
                with self._changed:
                    self._refused[question] = replace(doubt, refusal=definition)
        elif doubt is not None or _decodes_otherwise(known.schema(*_parts(question.name)), definition.schema):
            self._keep(question.since, [definition_line(definition.to_json())])
        return True

    def _is_half_kept(self, question: Question) -> bool:
        """Tell whether a crash left an answer where it holds from, and the doubt in later snapshots."""

        def doubt(history: SchemaHistory) -> Doubt | None:
            return history.unsurveyed if question.name is None else history.doubt(question.name)

        newest = self._kept.with_newest(doubt)
        return (
            newest is not None
            and newest.since == question.since
            and doubt(self._kept.at(question.since)) is None
        )

    def _statements(self, since: Position, reading: "_Reading") -> list[LoggedStatement] | None:
        """Return what was run from a position up to the reading, None where not all of it is known."""
        if since.epoch != self._epoch:
            return None
        logged = self._kept.statements(since, reading.after)
        if logged is None:
            return None
        return [
            LoggedStatement(position, line["database"], line["text"], StatementSession.from_json(line))
            for position, line in logged
        ]

    def _definition(
        self, name: TableName, reading: "_Reading", statements: Sequence[LoggedStatement] | None
    ) -> TableDefinition | str:
        """Return what a table was before the statements, or why that cannot be told. Raises _NotYet."""
        if statements is None:
            return "statements since then are not in the log"
        names = names_after(name, statements, self._spelling)
        if reading.asked is not None and not names <= reading.asked:
            self._renamed |= names
            raise _NotYet
        late = [statement for statement in statements if statement.position > reading.before]
        if any(touches(statement, names, self._spelling) for statement in late):
            raise _NotYet
        try:
            definition = definition_before(name, statements, reading.tables.get, self._spelling)
        except CannotRewind as problem:
            hiding = problem.statement
            words = opening_words(hiding.text)
            return f"it was changed at {hiding.position} in a way that cannot be taken back: {words}"
        return definition or "the server no longer has the table"

    def _keep(self, since: Position, lines: Sequence[dict[str, Any]]) -> None:
        with self._keeping:
            if not self._closed:
                self._kept.settle(since, lines, received=self._received)

    def _survey(self, since: Position, reading: "_Reading", statements: list[LoggedStatement]) -> bool:
        """Keep every table of the server as it was at a position; what cannot be told is left in doubt."""
        names = set(reading.tables)
        for statement in statements:
            names |= {name for renamed in renames(statement, self._spelling) for name in renamed}
        lines, of_table = [], statements_by_table(statements, self._spelling)
        for name in sorted(names):
            if self._closed:
                return False
            try:
                definition = self._definition(name, reading, of_table(name))
            except _NotYet:
                lines.append(doubt_line(name, "it was changed while the tables of the server were read"))
                continue
            if isinstance(definition, TableDefinition):
                lines.append(definition_line(definition.to_json()))
            elif name in reading.tables and not _is_created(name, of_table(name), self._spelling):
                lines += [
                    doubt_line(name, "the server's tables were read later"),
                    refusal_line(name, definition),
                ]
        self._keep(since, [*lines, SURVEYED])
        return True


@dataclass(frozen=True)
class _Reading:
    """The tables of a server at a moment between two places of its log; `asked` is None for all of them."""

    before: Position
    after: Position
    tables: dict[TableName, TableDefinition]
    asked: set[TableName] | None


class _NotYet(Exception):
    """What was read does not tell: a statement touched the table meanwhile, or it has another name now."""


def _head(connection: Connection, epoch: int) -> Position:
    head = connection.head()
    return Position(epoch, head.file, head.offset)


def _parts(name: TableName) -> tuple[str, str]:
    return name.database, name.table


def _decodes_otherwise(known: TableSchema | None, told: TableSchema) -> bool:
    """Tell whether rows decode otherwise by a definition that was told.

    Taking statements back loses keys and what may be null, so neither contradicts what is known.
    """
    columns = [
        None if schema is None else [(one.name, one.type_text, one.charset) for one in schema.columns]
        for schema in (known, told)
    ]
    return columns[0] != columns[1]


def _is_created(name: TableName, statements: Iterable[LoggedStatement], spelling: ServerSpelling) -> bool:
    """Tell whether a table came into being by one of the statements."""
    return any(
        isinstance(effect, CreateTable | CreateLike) and effect.name == name
        for statement in statements
        for effect in statement.effects(spelling)
    )


def _listed(name: TableName | None, doubt: Doubt, failure: str | None) -> dict[str, Any]:
    """Return a table in doubt for the status: why, since where, and what an operator can do."""
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
