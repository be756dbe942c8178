# SPDX-License-Identifier: Apache-2.0
"""Read a byte range as batches: the loop that drives the decoder and answers its requests.

A row's schema is taken from the log if the log contains column names (binlog_row_metadata=FULL). Otherwise it
is taken from the schema history, which is updated with every DDL statement in the log.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow

from penstock.changes import SYSTEM_COLUMNS as SYSTEM_COLUMNS
from penstock.changes import StatementOrigin
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
from penstock.schema.proof import PLAIN_STRINGS, columns_of, contradiction_of, with_types_of
from penstock.schema.statements.row_changes import tables_of
from penstock.schema.statements.tokens import ServerSpelling
from penstock.source.bounds import Bounds
from penstock.source.decoding import RangeDecoding
from penstock.source.logged_statement import LoggedStatement as LoggedStatement
from penstock.source.source import FIRST_EVENT_OFFSET, ByteRange, Source, place_of
from penstock.source.unlogged_changes import refuse_change, warn_of_unlogged_rows

CHANGE_TYPES = ("insert", "update_preimage", "update_postimage", "delete")

_HINT_METADATA = (
    "SET GLOBAL binlog_row_metadata = FULL on the server, or give the tables' definitions: schemas,"
    " empty ({}) where each CREATE TABLE is in the log"
)
# Hints for the kernel's errors. The kernel only knows bytes, so it gives no hints.
_HINT_INSPECT = "`penstock inspect FILE --start POSITION` shows the events there"
_HINTS: dict[type[StreamError], str] = {
    SchemaMismatch: "The definition in `schemas` is not the one in force here: give that of this position",
    ChecksumMismatch: "The bytes are damaged: copy the file again, or read from the live server",
    EventMalformed: "The bytes are damaged: copy the file again, or read from the live server",
    ValueMalformed: "The definition in force may differ from the one at hand: see penstock inspect",
}

# The errors seen by a reader that starts inside an event.
_DAMAGE = (ChecksumMismatch, EventMalformed, EventUnknown, FileTruncated, LimitExceeded)
_HINT_START = (
    "No event may start here: `penstock inspect FILE` shows where events start. If one does, the bytes are"
    " damaged: copy the file again, or read from the live server"
)


@dataclass(frozen=True)
class Selection:
    """The requested part of a log. Can be pickled.

    `columns` lists the columns to decode, including system columns; None means all. `changes` lists the row
    kinds of CHANGE_TYPES to emit; None means all. Of `bounds`, only the filters apply; the positions are for
    planning. `shard_columns` contains pairs of a table pattern and the columns that determine a row's shard.
    The first matching pattern applies; tables without a match use the primary key. With `with_keys`, the
    columns that determine the shard are decoded even if `columns` omits them.
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
        """Return the columns that determine the shard of a table's rows, None for the primary key."""
        for pattern, columns in self.shard_columns:
            if TablePatterns(pattern).matches(database, table):
                return columns
        return None


class Schemas(Protocol):
    """Supplies table definitions that the log does not contain: `SchemaHistory` or `LoggedTables`."""

    def needs_reread(self, name: TableName) -> bool:
        """Return whether the known definition of a table is in doubt."""

    def schema(self, database: str, table: str, position: Position | None = None) -> TableSchema | None:
        """Return the schema in force at a position, None if it is unknown."""

    def reread(self, name: TableName, position: Position) -> TableSchema:
        """Get the definition at a position from the server, directly or through a daemon. Raises
        SchemaUnknown.
        """

    def apply(
        self, text: str, database: str, position: Position, session: StatementSession | None = None
    ) -> set[TableName]:
        """Apply a logged statement; return the tables whose definition changed or is in doubt."""


class Batch:
    """Rows of one table, or of the whole log if `table` is "".

    `position` is the end of the last whole transaction when the batch was closed. Reading can continue from
    there. `primary_key` contains the names of the primary key's columns, and `key` the names of the columns
    that determine a row's shard. Either may be (). `columns` are the table's columns as declared when the
    rows were written, () if there is no table. Implements Arrow's C data interface, so Polars, DuckDB and
    pandas read it directly.
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
        """The memory used by the rows."""
        return int(self._native.bytes)

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the rows without copying them."""
        return pyarrow.record_batch(self._native)

    def stream(
        self, shards: tuple[int, Sequence[int]] | None = None, *, grouped: bool = False
    ) -> tuple[memoryview, int] | None:
        """Return the rows as an Arrow stream, and their number. For a few rows, `to_arrow` takes far longer.

        With `shards`, the number of shards and some of them in ascending order, only the rows of these shards
        are returned, with their slots. With `grouped`, the rows of each shard are adjacent. Returns None if
        an update moves a row to another shard, or if images lack columns. Raises OptionInvalid.
        """
        table = f"{self._native.database}.{self._native.table}"
        encoded = self._native.stream(table, self.key, shards, grouped=grouped)
        return None if encoded is None else (memoryview(encoded[0]), encoded[1])

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._native.__arrow_c_array__(requested_schema)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"Batch({self.table!r}, rows={self.rows}, position={str(self.position)!r})"


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

    `emit` is "typed", "envelope", "events", "transactions" or "messages". "messages" also takes `dialect`,
    `message_per_row`, `server_zone_seconds` and `executed` (`_native.Decoder`). `declared` fixes the columns
    of typed batches: a missing column is null and named in `_metadata.absent`, while any other difference
    raises SchemaChanged. Batches end at transaction boundaries unless a single transaction exceeds
    `held_bytes_max`. Every error has its position, and is raised only after the changes of all whole
    transactions before it.
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
    """Yield typed batches like `read_range`, interleaved with the statements on selected tables.

    Each statement is yielded after all rows that precede it in the log and before all rows that follow it.
    """
    return _RangeReader(
        source, byte_range, selection or Selection(), schemas, None, with_statements=True, **options
    ).parts()


class _RangeReader:
    """One pass over one range."""

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
        # The position of the last statement, as a sort key. File numbers and offsets only increase within a
        # range, so a statement with a lower key is a replay.
        self._last_statement_key: tuple[int, int, int] | None = None
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
        yield from self._process(self._decoding.states())

    def parts(self) -> Iterator[Batch | LoggedStatement]:
        try:
            for state in self._decoding.states():
                yield from self._process(iter((state,)))
                statement, self._statement = self._statement, None
                if statement is not None:
                    yield from self._flush_batches()
                    yield statement
        except StreamError as problem:
            self._add_hint(problem)
            raise

    def _flush_batches(self) -> Iterator[Batch]:
        """Yield the whole transactions buffered in batches that are not full."""
        decoder = self._decoding.decoder
        decoder.close_batches()
        while decoder.state == "batch":
            yield self._batch(decoder.take_batch())

    def _process(self, states: Iterator[str]) -> Iterator[Batch]:
        """Yield the batches that are due, and answer the decoder's requests."""
        handlers: dict[str, Callable[[], None]] = {
            "table": self._answer_table,
            "statement": self._follow_statement,
        }
        try:
            for state in states:
                if state == "batch":
                    yield self._batch(self._decoding.take_batch())
                    continue
                try:
                    handlers[state]()
                except PenstockError:
                    # Yield the transactions that were complete before the error.
                    yield from self._flush_whole()
                    raise
        except StreamError as problem:
            self._add_hint(problem)
            raise

    def _add_hint(self, problem: StreamError) -> None:
        """Add a hint to errors of the kernel, which only knows bytes."""
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

    def _flush_whole(self) -> Iterator[Batch]:
        decoder = self._decoding.decoder
        decoder.abandon()
        while decoder.state == "batch":
            yield self._batch(decoder.take_batch())

    def _answer_table(self) -> None:
        """Tell the decoder how to read the rows of a table that was just announced."""
        decoder = self._decoding.decoder
        request = decoder.table_request()
        if not self._selection.tables.matches(request.database, request.table):
            decoder.answer_table(None)
            return
        name = TableName(request.database, request.table)
        from_log = request.complete
        declared_schema: TableSchema | None
        if from_log:
            logged = tuple(Column(*column) for column in request.columns)
            schema = TableSchema(name.database, name.table, logged)
            declared_schema = self._declared_schema(name, schema, request)
        else:
            schema = declared_schema = self._known_schema(name, request)
        self._check_columns(name, schema.columns, request.position)
        primary_key = tuple(request.primary_key or (declared_schema.primary_key if declared_schema else ()))
        shard_columns = self._selection.shardcolumns_of(name.database, name.table)
        self._primary_keys[str(name)] = primary_key
        key = self._keys[str(name)] = primary_key if shard_columns is None else shard_columns
        version = schema_version(schema.columns)
        self._columns[str(name), version] = (declared_schema or schema).columns
        decoder.answer_table(
            columns_of(declared_schema.columns) if declared_schema else self._declared,
            from_log=from_log,
            schema_version=version,
            wanted=self._wanted_columns(name, schema.columns, primary_key, key),
            declared=self._declared,
            primary_key=primary_key,
            shard_columns=shard_columns,
            judged=self._is_judged(name),
        )

    def _wanted_columns(
        self, name: TableName, columns: Sequence[Column], primary_key: Sequence[str], key: Sequence[str]
    ) -> tuple[str, ...] | None:
        """Return the columns of a table to decode, None for all. `key` determines a row's shard."""
        wanted = self._selection.columns
        if wanted is not None and self._selection.with_keys:
            wanted = tuple(dict.fromkeys([*wanted, *key]))
        return wanted

    def _is_judged(self, name: TableName) -> bool:
        """Return whether messages have only the rows of a table that the caller allows."""
        return False

    def _known_schema(self, name: TableName, request: Any) -> TableSchema:
        if self._schemas is None:
            raise SchemaUnknown(
                f"the log does not name the columns of {name}",
                position=str(request.position),
                hint=_HINT_METADATA,
            )
        return self._definition(self._schemas, name, request)

    def _definition(self, schemas: Schemas, name: TableName, request: Any) -> TableSchema:
        """Return the history's definition if it agrees with the table map, else the server's definition.

        Raises SchemaUnknown; SchemaMismatch if the table map contradicts the history's definition and there
        is no other definition.
        """
        position = self._position(request.position)
        schema = None
        if not schemas.needs_reread(name):
            schema = schemas.schema(name.database, name.table, position)
        contradiction = contradiction_of(request, schema) if schema is not None else None
        if schema is not None and contradiction is None:
            return schema
        # Ask the server for the table as of the transaction's start: the server's log cannot be opened inside
        # a transaction.
        transaction_start = self._decoding.decoder.open_transaction()
        try:
            schema = schemas.reread(
                name, position if transaction_start is None else replace(position, offset=transaction_start)
            )
        except SchemaUnknown as unknown:
            if contradiction is None:
                raise
            raise contradiction from unknown
        if (contradiction := contradiction_of(request, schema)) is not None:
            raise contradiction
        return schema

    def _declared_schema(self, name: TableName, logged: TableSchema, request: Any) -> TableSchema | None:
        """Return the definition that supplies declared types which the log does not contain; None if they are
        not needed or not known.

        Declared types are needed for messages, and for MariaDB's UUID, INET4, INET6 and VECTOR, which look
        like byte strings in a table map.
        """
        plain = any(column.type_text.startswith(PLAIN_STRINGS) for column in logged.columns)
        needed = self._in_messages or (plain and self._decoding.decoder.mariadb)
        if not needed or self._schemas is None:
            return None
        try:
            return self._definition(self._schemas, name, request)
        except SchemaUnknown:
            # The table no longer exists, so its bytes are read with the types that the log declares.
            return None
        except SchemaMismatch:
            # The log names every column, so a definition with other columns still supplies the types of
            # matching names.
            position = self._position(request.position)
            known = self._schemas.schema(name.database, name.table, position)
            return None if known is None else with_types_of(logged, known)

    def _check_columns(self, name: TableName, table_columns: Sequence[Column], position: Any) -> None:
        """Raise OptionInvalid if the only requested table lacks a requested column."""
        columns = self._selection.columns
        if columns is None or self._declared is not None or self._selection.tables.single() is None:
            return
        prove_has_columns(name, table_columns, columns, str(position))

    def _follow_statement(self) -> None:
        """Apply a statement to the schema history. Raises if a selected table's rows changed without being
        logged."""
        decoder = self._decoding.decoder
        statement = decoder.take_statement()
        position = self._position(statement.position)
        if not statement.is_skipped:
            refuse_change(statement, self._spelling_of(statement), self._selection.tables, position)
        if not statement.is_change:
            self._report_definition(statement, position)
        # A statement of an unknown kind counts as a change, but may also define tables.
        if self._schemas is not None:
            end = self._position(statement.end_position)
            session = StatementSession.of_event(*statement.session)
            if self._schemas.apply(statement.text, statement.database, end, session):
                decoder.forget_tables()

    def _report_definition(self, statement: Any, position: Position) -> None:
        """Report a definition as the reader requests it: as a statement, as a message, or as a warning."""
        if self._with_statements:
            self._statement = self._selected_statement(statement)
        elif not statement.is_skipped:
            warn_of_unlogged_rows(statement, self._spelling_of(statement), self._selection.tables, position)
        if self._in_messages:
            self._decoding.decoder.answer_statement(self._concerns_selection(statement))

    def _concerns_selection(self, statement: Any) -> bool:
        """Return whether messages include a definition. They do if all tables are selected, or a table that
        the definition names.
        """
        selected = self._selection.tables
        if selected.selects_all:
            return True
        statement_tables = tables_of(statement.text, statement.database, self._spelling_of(statement))
        tables = set(statement_tables.named)
        if statement.table:
            tables.add(TableName(*statement.table))
        named = any(selected.matches(name.database, name.table) for name in tables)
        return named or any(selected.may_match_in(database) for database in statement_tables.databases)

    def _selected_statement(self, statement: Any) -> LoggedStatement | None:
        """Return a statement for the reader, None if it concerns no selected table."""
        if statement.is_skipped or self._is_replayed(statement):
            return None
        statement_tables = tables_of(statement.text, statement.database, self._spelling_of(statement))
        selected = self._selection.tables
        if not (
            any(selected.matches(name.database, name.table) for name in statement_tables.named)
            or any(selected.may_match_in(database) for database in statement_tables.databases)
        ):
            return None
        position = self._position(statement.position)
        return LoggedStatement(
            statement.text,
            statement.database,
            position,
            self._position(statement.end_position),
            statement_tables.named,
            statement_tables.databases,
            statement_tables.emptied,
            self._transaction(statement),
            statement_tables.unlogged,
            StatementSession.of_event(*statement.session).sql_mode,
            statement.commit_ts,
            tuple(statement.definitions),
            StatementOrigin(
                position.file, position.offset, statement.gtid, statement.server_id, statement.commit_us
            ),
            statement_tables.created,
        )

    def _transaction(self, statement: Any) -> Position | None:
        """Return the start of the transaction that contains a statement, None if none is open."""
        start = self._decoding.decoder.open_transaction()
        position = self._position(statement.position)
        return None if start is None else replace(position, offset=start)

    def _is_replayed(self, statement: Any) -> bool:
        """Return whether a statement is replayed because a connection was lost inside its transaction."""
        key = place_of(self._position(statement.position))
        if self._last_statement_key is not None and key <= self._last_statement_key:
            return True
        self._last_statement_key = key
        return False

    def _position(self, text: str) -> Position:
        file, _, offset = text.rpartition(":")
        return Position(self._epoch, file, int(offset))

    def _spelling_of(self, statement: Any) -> ServerSpelling:
        """Return how a statement is spelled, depending on the server that wrote the log and on the
        statement's session.
        """
        session = StatementSession.of_event(*statement.session)
        return ServerSpelling.of_server(self._decoding.decoder.server_version).under(session.sql_mode)


class RangeFollower(_RangeReader):
    """A decoder that follows a growing log within one file; the caller feeds it and decides when to close
    batches.

    Takes the arguments of `read_range`. The caller supplies the bytes, beginning at the range's start. It
    cannot be used after an error. Not thread-safe.
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
        """Whether all bytes fed so far are whole transactions."""
        return self._decoding.at_event_end and self._decoding.decoder.open_transaction() is None

    @property
    def gtid_set(self) -> str:
        """The GTIDs of all transactions seen, plus the GTIDs that the file lists as preceding it."""
        return self._decoding.decoder.gtid_set

    @property
    def commit_time_us(self) -> int:
        """The commit time of the last whole transaction, in microseconds UTC since 1970; 0 before the
        first."""
        return self._decoding.decoder.commit_time_us

    def feed(self, view: memoryview) -> Iterator[Batch]:
        """Feed bytes cut anywhere; yield the batches that are full."""
        yield from self._process(self._decoding.feed(view))
        yield from self._process(self._decoding.rest_of_payload())

    def bytes_to_event_end(self, view: memoryview) -> int:
        """Return how many of the next bytes complete the current event, or fewer if its length is not known
        yet."""
        return self._decoding.bytes_to_event_end(view)

    def close_batches(self) -> Iterator[Batch]:
        """Yield the whole transactions buffered in batches that are not full."""
        yield from self._flush_batches()


def prove_has_columns(
    name: TableName, table_columns: Sequence[Column], columns: Sequence[str], position: str | None = None
) -> None:
    """Raise OptionInvalid if a table lacks one of the columns."""
    known = {column.name for column in table_columns}
    for column in columns:
        if column not in known and column not in SYSTEM_COLUMNS:
            raise OptionInvalid(
                f"{name} has no column {column!r}",
                position=position,
                hint=f"It has {', '.join(sorted(known))}",
            )


def schema_version(columns: Sequence[Column]) -> int:
    """Return a number that identifies a definition: 31 bits of a CRC32 over names, types and charsets.

    The same columns have the same number in every range, file and run, no matter how the log is cut. A
    counter could not guarantee that for tasks that do not communicate.
    """
    text = "\n".join(f"{column.name}\t{column.type_text}\t{column.charset or ''}" for column in columns)
    return zlib.crc32(text.encode()) & 0x7FFFFFFF
