# SPDX-License-Identifier: Apache-2.0
"""From a byte range to batches: the loop that drives the decoder and answers what it asks.

The schema of a row comes from the log itself where it names its columns (binlog_row_metadata=FULL), else from
the schema history, which the statements in the log move on.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow
import structlog

from penstock.capture.ddl.tokens import ServerSpelling
from penstock.changes import SYSTEM_COLUMNS as SYSTEM_COLUMNS
from penstock.errors import (
    ChecksumMismatch,
    EventMalformed,
    EventUnknown,
    FileTruncated,
    LimitExceeded,
    OptionInvalid,
    PenstockError,
    SchemaMismatch,
    SchemaUnknown,
    StreamError,
    ValueMalformed,
)
from penstock.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX, TRANSACTION_HELD_BYTES_MAX
from penstock.model import Column, Position, StatementSession, TableName, TablePatterns, TableSchema
from penstock.source.bounds import Bounds
from penstock.source.decoding import RangeDecoding
from penstock.source.proof import PLAIN_STRINGS, columns_of, contradiction_of, with_types_of
from penstock.source.source import FIRST_EVENT_OFFSET, ByteRange, Source, place_of
from penstock.source.statement import tables_of
from penstock.source.unlogged_changes import refuse_change, warn_of_unlogged_rows

CHANGE_TYPES = ("insert", "update_preimage", "update_postimage", "delete")

_HINT_METADATA = (
    "SET GLOBAL binlog_row_metadata = FULL on the server, or give the tables' definitions: schemas,"
    " empty ({}) where each CREATE TABLE is in the log"
)
# The way out where the kernel, which knows bytes alone, names none.
_HINT_INSPECT = "`penstock inspect FILE --start POSITION` shows the events there"
_HINTS: dict[type[StreamError], str] = {
    SchemaMismatch: "The definition in `schemas` is not the one in force here: give that of this position",
    ChecksumMismatch: "The bytes are damaged: copy the file again, or read from the live server",
    EventMalformed: "The bytes are damaged: copy the file again, or read from the live server",
    ValueMalformed: "The definition in force may differ from the one at hand: see penstock inspect",
}

# What bytes look like where a reader starts inside an event.
_DAMAGE = (ChecksumMismatch, EventMalformed, EventUnknown, FileTruncated, LimitExceeded)
_HINT_START = (
    "No event may start here: `penstock inspect FILE` shows where events start. If one does, the bytes are"
    " damaged: copy the file again, or read from the live server"
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Selection:
    """What of a log is wanted. Pickles.

    `columns` are names to decode, system columns among them; None means all. `changes` are the kinds of
    row to emit, of CHANGE_TYPES; None means all. Of `bounds`, the filters hold here; its positions are for
    planning. `shard_columns` are (table pattern, columns that tell a row's shard), the first that fits;
    without one it is the primary key. With `with_keys` they are decoded even where `columns` leaves them out.
    """

    tables: TablePatterns = field(default_factory=TablePatterns)
    columns: tuple[str, ...] | None = None
    changes: tuple[str, ...] | None = None
    bounds: Bounds = field(default_factory=Bounds)
    shard_columns: tuple[tuple[str, tuple[str, ...]], ...] = ()
    with_keys: bool = False

    def __post_init__(self) -> None:
        for kind in self.changes or ():
            if kind not in CHANGE_TYPES:
                raise OptionInvalid(
                    f"change type {kind!r} is unknown", hint=f"Use some of {', '.join(CHANGE_TYPES)}"
                )

    def shardcolumns_of(self, database: str, table: str) -> tuple[str, ...] | None:
        """Return the columns that tell the shard of a table's rows, None for the primary key."""
        for pattern, columns in self.shard_columns:
            if TablePatterns(pattern).matches(database, table):
                return columns
        return None


class Schemas(Protocol):
    """Who tells a table's definition where the log does not: `SchemaHistory`, or `LoggedTables`."""

    def needs_reread(self, name: TableName) -> bool:
        """Tell whether what is known of a table is in doubt."""

    def schema(self, database: str, table: str, position: Position | None = None) -> TableSchema | None:
        """Return the schema in force at a position, None where none is known."""

    def reread(self, name: TableName, position: Position) -> TableSchema:
        """Ask elsewhere for the definition at a position. Raises SchemaUnknown."""

    def apply(
        self, text: str, database: str, position: Position, session: StatementSession | None = None
    ) -> set[TableName]:
        """Take a logged statement into account; return the tables whose definition moved or is in doubt."""


class Batch:
    """Rows of one table, or of the whole log where `table` is "".

    `position` is the end of the last whole transaction when the batch was closed: reading from there goes on
    after it. `primary_key` names its columns, `key` those that tell a row's shard; both may be (). `columns`
    are the table's, as declared where the rows were written; () of what is no table. Takes part in Arrow's C
    data interface, so Polars, DuckDB and pandas read it as it is.
    """

    __slots__ = ("_native", "columns", "key", "position", "primary_key", "rows", "schema_version", "table")

    def __init__(self, native: Any, epoch: int) -> None:
        self._native = native
        self.table = str(TableName(native.database, native.table)) if native.table else ""
        self.schema_version: int = native.schema_version
        self.rows: int = native.rows
        self.position = Position(epoch, *native.position)
        self.key: tuple[str, ...] = ()
        self.primary_key: tuple[str, ...] = ()
        self.columns: tuple[Column, ...] = ()

    @property
    def bytes(self) -> int:
        """How much memory the rows take."""
        return int(self._native.bytes)

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the rows, without copying them."""
        return pyarrow.record_batch(self._native)

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._native.__arrow_c_array__(requested_schema)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"Batch({self.table!r}, rows={self.rows}, position={str(self.position)!r})"


@dataclass(frozen=True)
class LoggedStatement:
    """A statement in the log that defines, renames, drops or empties selected tables.

    `position` is where it stands and `end` where it ends; `tables` all that it names, `databases` those that
    it drops, `emptied` the tables that lose their rows by it, `unlogged` those of which rows come or go
    without being logged. `transaction` is where the transaction starts that it is part of, None where it is
    one by itself. `sql_mode` has the session's SQL modes that change how the text is read. Pickles.
    """

    text: str
    database: str
    position: Position
    end: Position
    tables: frozenset[TableName]
    databases: frozenset[str]
    emptied: frozenset[TableName]
    transaction: Position | None = None
    unlogged: frozenset[TableName] = frozenset()
    sql_mode: frozenset[str] = frozenset()

    @property
    def emptied_to(self) -> int:
        """The commit version up to which rows of emptied tables are gone.

        CREATE TABLE ... SELECT is logged inside the transaction of its rows, which have the version of the
        transaction's start and stay.
        """
        if self.transaction is None:
            return self.position.commit_version
        return self.transaction.commit_version - 1


def read_range(
    source: Source,
    byte_range: ByteRange,
    selection: Selection | None = None,
    schemas: Schemas | None = None,
    *,
    emit: str = "typed",
    declared: Sequence[Column] | None = None,
    batch_rows_max: int = BATCH_ROWS_MAX,
    batch_bytes_max: int = BATCH_BYTES_MAX,
    held_bytes_max: int = TRANSACTION_HELD_BYTES_MAX,
    **options: Any,
) -> Iterator[Batch]:
    """Yield the changes of the transactions that start in a range, in commit order within each table.

    `emit` is "typed", "envelope", "events", "transactions" or "messages"; the last takes `dialect`,
    `message_per_row`, `server_zone_seconds` and `executed` besides (`_native.Decoder`). `declared` fixes the
    columns of typed batches: a column a row lacks is null and named in `_metadata.absent`, any other
    difference raises SchemaChanged.
    Batches end at transaction boundaries unless one transaction alone passes `held_bytes_max`. Every error
    has its position, and comes after all whole transactions before it.
    """
    return _RangeReader(
        source,
        byte_range,
        selection or Selection(),
        schemas,
        declared,
        emit=emit,
        batch_rows_max=batch_rows_max,
        batch_bytes_max=batch_bytes_max,
        held_bytes_max=held_bytes_max,
        **options,
    ).batches()


def read_in_order(
    source: Source,
    byte_range: ByteRange,
    selection: Selection | None = None,
    schemas: Schemas | None = None,
    **options: Any,
) -> Iterator[Batch | LoggedStatement]:
    """Yield typed batches as `read_range` does, and the statements on selected tables between them.

    A statement comes after all rows before it and before all behind it.
    """
    return _RangeReader(
        source, byte_range, selection or Selection(), schemas, None, with_statements=True, **options
    ).parts()


class _RangeReader:
    """One run over one range."""

    def __init__(
        self,
        source: Source,
        byte_range: ByteRange,
        selection: Selection,
        schemas: Schemas | None,
        declared: Sequence[Column] | None,
        with_statements: bool = False,
        **options: Any,
    ) -> None:
        self._with_statements = with_statements
        self._statement: LoggedStatement | None = None
        # Where the last statement was: file numbers and offsets only rise within a range.
        self._told_to: tuple[int, int, int] | None = None
        self._columns: dict[tuple[str, int], tuple[Column, ...]] = {}
        self._selection = selection
        self._schemas = schemas
        self._declared = columns_of(declared) if declared is not None else None
        self._epoch = byte_range.epoch
        self._start = byte_range.position
        self._in_messages = options.get("emit") == "messages"
        self._keys: dict[str, tuple[str, ...]] = {}
        self._primary_keys: dict[str, tuple[str, ...]] = {}
        bounds = selection.bounds
        self._decoding = RangeDecoding(
            source,
            byte_range,
            gtid_after=bounds.gtid_after,
            gtid_until=bounds.gtid_until,
            time_from_us=bounds.time_from_us,
            time_until_us=bounds.time_until_us,
            changes=selection.changes,
            **options,
        )

    def batches(self) -> Iterator[Batch]:
        yield from self._answered(self._decoding.states())

    def parts(self) -> Iterator[Batch | LoggedStatement]:
        try:
            for state in self._decoding.states():
                yield from self._answered(iter((state,)))
                statement, self._statement = self._statement, None
                if statement is not None:
                    yield from self._closed()
                    yield statement
        except StreamError as problem:
            self._add_hint(problem)
            raise

    def _closed(self) -> Iterator[Batch]:
        """Yield what whole transactions have left in batches that are not full."""
        decoder = self._decoding.decoder
        decoder.close_batches()
        while decoder.state == "batch":
            yield self._batch(decoder.take_batch())

    def _answered(self, states: Iterator[str]) -> Iterator[Batch]:
        """Yield the batches that come, and answer what the decoder asks."""
        due: dict[str, Callable[[], None]] = {
            "table": self._answer_table,
            "statement": self._follow_statement,
        }
        try:
            for state in states:
                if state == "batch":
                    yield self._batch(self._decoding.take_batch())
                    continue
                try:
                    due[state]()
                except PenstockError:
                    # What was whole before the error comes before it.
                    yield from self._whole_so_far()
                    raise
        except StreamError as problem:
            self._add_hint(problem)
            raise

    def _add_hint(self, problem: StreamError) -> None:
        """Say what helps, where the decoder, which knows bytes alone, does not."""
        start = f"{self._start.file}:{self._start.offset}"
        is_chosen = self._start.offset > FIRST_EVENT_OFFSET
        if is_chosen and isinstance(problem, _DAMAGE) and problem.position == start:
            problem.hint = _HINT_START
        problem.hint = problem.hint or _HINTS.get(type(problem), _HINT_INSPECT)

    def _batch(self, native: Any) -> Batch:
        batch = Batch(native, self._epoch)
        batch.key = self._keys.get(batch.table, ())
        batch.primary_key = self._primary_keys.get(batch.table, ())
        batch.columns = self._columns.get((batch.table, batch.schema_version), ())
        return batch

    def _whole_so_far(self) -> Iterator[Batch]:
        decoder = self._decoding.decoder
        decoder.abandon()
        while decoder.state == "batch":
            yield self._batch(decoder.take_batch())

    def _answer_table(self) -> None:
        """Say how the rows of a table that was just announced are to be read."""
        decoder = self._decoding.decoder
        request = decoder.table_request()
        if not self._selection.tables.matches(request.database, request.table):
            decoder.answer_table(None)
            return
        name = TableName(request.database, request.table)
        from_log = request.complete
        told: TableSchema | None
        if from_log:
            logged = tuple(Column(*one) for one in request.columns)
            schema = TableSchema(name.database, name.table, logged)
            told = self._told_schema(name, schema, request)
        else:
            schema = told = self._known_schema(name, request)
        self._check_columns(name, schema.columns, request.position)
        primary_key = tuple(request.primary_key or (told.primary_key if told else ()))
        shard_columns = self._selection.shardcolumns_of(name.database, name.table)
        self._primary_keys[str(name)] = primary_key
        key = self._keys[str(name)] = primary_key if shard_columns is None else shard_columns
        wanted = self._selection.columns
        if wanted is not None and self._selection.with_keys:
            wanted = tuple(dict.fromkeys([*wanted, *key]))
        version = schema_version(schema.columns)
        self._columns[str(name), version] = (told or schema).columns
        decoder.answer_table(
            columns_of(told.columns) if told else self._declared,
            from_log=from_log,
            schema_version=version,
            wanted=wanted,
            declared=self._declared,
            primary_key=primary_key,
            shard_columns=shard_columns,
        )

    def _known_schema(self, name: TableName, request: Any) -> TableSchema:
        if self._schemas is None:
            raise SchemaUnknown(
                f"the log does not name the columns of {name}",
                position=str(request.position),
                hint=_HINT_METADATA,
            )
        return self._definition(self._schemas, name, request)

    def _definition(self, schemas: Schemas, name: TableName, request: Any) -> TableSchema:
        """Return what the history knows and the table map proves, else what the server tells.

        Raises SchemaUnknown; SchemaMismatch where the table map contradicts it and no other is known.
        """
        place = self._position(request.position)
        schema = None
        if not schemas.needs_reread(name):
            schema = schemas.schema(name.database, name.table, place)
        contradiction = contradiction_of(request, schema) if schema is not None else None
        if schema is not None and contradiction is None:
            return schema
        # A server is asked as of the transaction's start: its log cannot be opened in the middle of one.
        opened = self._decoding.decoder.open_transaction()
        try:
            schema = schemas.reread(name, place if opened is None else replace(place, offset=opened))
        except SchemaUnknown as unknown:
            if contradiction is None:
                raise
            raise contradiction from unknown
        if (contradiction := contradiction_of(request, schema)) is not None:
            raise contradiction
        return schema

    def _told_schema(self, name: TableName, logged: TableSchema, request: Any) -> TableSchema | None:
        """Return the definition that tells what the log does not, None where none is needed or known.

        A table map shows MariaDB's UUID, INET4, INET6 and VECTOR as strings of bytes; and messages carry
        types as they were declared.
        """
        plain = any(column.type_text.startswith(PLAIN_STRINGS) for column in logged.columns)
        needed = self._in_messages or (plain and self._decoding.decoder.mariadb)
        if not needed or self._schemas is None:
            return None
        try:
            return self._definition(self._schemas, name, request)
        except SchemaUnknown:
            # The table is gone by now: its bytes are read as the bytes that the log says they are.
            return None
        except SchemaMismatch:
            # The log names every column, so a definition of other columns still tells those of its names.
            place = self._position(request.position)
            known = self._schemas.schema(name.database, name.table, place)
            return None if known is None else with_types_of(logged, known)

    def _check_columns(self, name: TableName, columns: Sequence[Column], position: Any) -> None:
        """Raise OptionInvalid where the one table asked for lacks a column that is asked for."""
        wanted = self._selection.columns
        if wanted is None or self._declared is not None or self._selection.tables.single() is None:
            return
        known = {column.name for column in columns}
        for column in wanted:
            if column not in known and column not in SYSTEM_COLUMNS:
                raise OptionInvalid(
                    f"{name} has no column {column!r}",
                    position=str(position),
                    hint=f"It has {', '.join(sorted(known))}",
                )

    def _follow_statement(self) -> None:
        """Move the schema history on, and stop where a selected table's rows changed without being logged."""
        decoder = self._decoding.decoder
        statement = decoder.take_statement()
        position = self._position(statement.position)
        if not statement.is_skipped:
            refuse_change(statement, self._spelling_of(statement), self._selection.tables, position)
        if not statement.is_change:
            self._report_definition(statement, position)
        # A statement of an unknown kind counts as a change, and may define tables as well.
        if self._schemas is not None:
            end = self._position(statement.end_position)
            session = StatementSession.of_event(*statement.session)
            if self._schemas.apply(statement.text, statement.database, end, session):
                decoder.forget_tables()

    def _report_definition(self, statement: Any, position: Position) -> None:
        """Hand a definition on as the reader wants it: as a statement, as a message, or as a warning."""
        if self._with_statements:
            self._statement = self._told_of(statement)
        elif not statement.is_skipped:
            warn_of_unlogged_rows(statement, self._spelling_of(statement), self._selection.tables, position)
        if self._in_messages:
            self._decoding.decoder.answer_statement(self._is_told(statement))

    def _is_told(self, statement: Any) -> bool:
        """Tell whether a definition belongs in messages: where every table is selected, or one it names."""
        selected = self._selection.tables
        if selected.selects_all:
            return True
        found = tables_of(statement.text, statement.database, self._spelling_of(statement))
        tables = set(found.named)
        if statement.table:
            tables.add(TableName(*statement.table))
        named = any(selected.matches(name.database, name.table) for name in tables)
        return named or any(selected.may_match_in(database) for database in found.databases)

    def _told_of(self, statement: Any) -> LoggedStatement | None:
        """Return a statement as readers get it, None where it concerns no selected table."""
        if statement.is_skipped or self._was_told(statement):
            return None
        found = tables_of(statement.text, statement.database, self._spelling_of(statement))
        selected = self._selection.tables
        if not (
            any(selected.matches(name.database, name.table) for name in found.named)
            or any(selected.may_match_in(database) for database in found.databases)
        ):
            return None
        return LoggedStatement(
            statement.text,
            statement.database,
            self._position(statement.position),
            self._position(statement.end_position),
            found.named,
            found.databases,
            found.emptied,
            self._transaction(statement),
            found.unlogged,
            StatementSession.of_event(*statement.session).sql_mode,
        )

    def _transaction(self, statement: Any) -> Position | None:
        """Return where the open transaction starts that a statement is part of, None where none is open."""
        start = self._decoding.decoder.open_transaction()
        position = self._position(statement.position)
        return None if start is None else replace(position, offset=start)

    def _was_told(self, statement: Any) -> bool:
        """Tell whether a statement comes again because a connection was lost inside its transaction."""
        place = place_of(self._position(statement.position))
        if self._told_to is not None and place <= self._told_to:
            return True
        self._told_to = place
        return False

    def _position(self, place: str) -> Position:
        file, _, offset = place.rpartition(":")
        return Position(self._epoch, file, int(offset))

    def _spelling_of(self, statement: Any) -> ServerSpelling:
        """Return how the server that wrote the log, and the statement's session, spell statements."""
        session = StatementSession.of_event(*statement.session)
        return ServerSpelling.of_server(self._decoding.decoder.server_version).under(session.sql_mode)


class RangeFollower(_RangeReader):
    """A decoder that stays: the log is fed to it as it grows, within one file, and its batches are closed
    wherever the caller wants.

    Takes what `read_range` takes; the bytes come from the caller, from the range's start on. After an error
    it is of no more use. For one thread at a time.
    """

    def __init__(
        self,
        source: Source,
        byte_range: ByteRange,
        selection: Selection | None = None,
        schemas: Schemas | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source, byte_range, selection or Selection(), schemas, None, **options)

    @property
    def position(self) -> Position:
        """The end of the last whole transaction."""
        return Position(self._epoch, *self._decoding.decoder.position)

    @property
    def at_boundary(self) -> bool:
        """Whether everything fed so far is whole transactions."""
        return self._decoding.at_event_end and self._decoding.decoder.open_transaction() is None

    @property
    def gtid_set(self) -> str:
        """The GTIDs of every transaction seen, and what a file that was begun lists as before it."""
        return self._decoding.decoder.gtid_set

    @property
    def commit_time_us(self) -> int:
        """When the last whole transaction was committed, microseconds UTC since 1970; 0 before the first."""
        return self._decoding.decoder.commit_time_us

    def feed(self, view: memoryview) -> Iterator[Batch]:
        """Take bytes of any cut; yield the batches that are full."""
        yield from self._answered(self._decoding.feed(view))
        yield from self._answered(self._decoding.rest_of_payload())

    def bytes_to_event_end(self, view: memoryview) -> int:
        """Return how many of the next bytes end the event that they begin with or go on with; it may be less
        where its length is not known yet."""
        return self._decoding.bytes_to_event_end(view)

    def close_batches(self) -> Iterator[Batch]:
        """Yield what whole transactions have left in batches that are not full."""
        yield from self._closed()


def schema_version(columns: Sequence[Column]) -> int:
    """Return the number that stands for a definition: 31 bits of a CRC32 over names, types and charsets.

    The same columns have the same number in every range, file and run, however the log is cut, which a count
    could not promise to tasks that know nothing of each other.
    """
    text = "\n".join(f"{one.name}\t{one.type_text}\t{one.charset or ''}" for one in columns)
    return zlib.crc32(text.encode()) & 0x7FFFFFFF
