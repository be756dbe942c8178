# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a chunk, and returns them as if the log contained an insert of each row."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow
import structlog

from penstock._native import ResultSet
from penstock.changes import Changes, Origin, Target
from penstock.errors import AnswerTimedOut, OptionInvalid, PositionPurged, ServerChanged, TransientError
from penstock.limits import (
    LOAD_BATCH_BYTES_MAX,
    LOAD_BATCH_ROWS_MAX,
    RECONNECT_TRIES_MAX,
)
from penstock.model import Column, ServerAddress, quote_name
from penstock.mysql.result_batches import AnswerReader
from penstock.pipeline.load.chunks import Chunk, after, hold_order
from penstock.pipeline.load.exact import open_exact
from penstock.pipeline.load.keys import KeyColumn
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.load.watermark import Watermark, read_as_of, watermark_of
from penstock.retry import Retry

_log = structlog.get_logger(__name__)

# A server prints a FLOAT with six digits, and a DOUBLE with the number of digits in its declaration.
_ROUNDED = re.compile(r"\s*(float|(double|real)\b.*\()", re.IGNORECASE)


def read_chunk(
    address: ServerAddress,
    target: Target,
    chunk: Chunk,
    *,
    instance: str,
    watermark: Watermark | None = None,
    epoch: int = 0,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    rate: float | None = None,
    exact: bool = False,
    on_watermark: Callable[[Watermark], None] | None = None,
    tries_max: int = RECONNECT_TRIES_MAX,
    sessions: SessionPool | None = None,
) -> Iterator[Changes]:
    """Yield the rows of a chunk as inserts, in bounded batches in key order.

    `target` is the table itself, as returned by `targets_of`. Rows have `watermark.version` as
    `_commit_version`, the watermark's file and offset in `_metadata`, and the row's number in the chunk.
    Without a watermark, one is taken just before the read. `columns` selects the columns of the rows and of
    their target. `where` is a condition in the server's SQL. `rate` is in rows per second.

    `exact` reads a table without a key as it was at one log position (see `open_exact`), ignores `watermark`,
    and already includes the table's changes below `watermark.floor`. `on_watermark` is called before the
    first row.

    A lost connection is reopened, up to `tries_max` times without progress, and the read resumes after the
    last row yielded. Raises ConnectionLost if the key does not identify that row. Raises ServerChanged for a
    server other than the watermark's, SchemaChanged for changed columns and for a key that orders rows
    differently than when the chunk was planned, and PrivilegeMissing. `sessions` may provide the sessions.
    """
    open_or_take = open_session if sessions is None else sessions.session
    take_watermark = watermark_of if sessions is None else sessions.watermark
    reading = ChunkReading(target, chunk, instance, columns, where)
    throttle = _throttle(rate)
    if exact:
        yield from _throttled(_exact_changes(address, target, reading, epoch, on_watermark), throttle)
        return
    retry = Retry("reading a chunk again", tries=tries_max - 1)
    is_given, planned_ts = watermark is not None, chunk.commit_ts
    while True:
        handed_out = reading.rows
        try:
            with open_or_take(address) as session:
                if watermark is None:
                    watermark = take_watermark(session, epoch, planned_ts)
                _check_server(session, watermark)
                read_as_of(session, watermark)
                hold_order(session, chunk)
                if on_watermark is not None and not reading.rows:
                    on_watermark(watermark)
                yield from _throttled(reading.changes(session, watermark), throttle)
                return
        except PositionPurged as problem:
            # TiDB has garbage-collected the row versions of the planned time. Each row is also exact at any
            # later time.
            is_stuck = planned_ts is None and reading.rows == handed_out
            if is_given or is_stuck or not reading.can_resume:
                raise
            _log.warning("a chunk is read as of now", table=str(target.name), why=problem.message)
            planned_ts = watermark = None
        except TransientError as problem:
            if reading.rows > handed_out:
                retry.succeeded()
            # Do not retry a server that hangs, because each retry would wait for the whole timeout.
            if isinstance(problem, AnswerTimedOut) or not reading.can_resume:
                raise
            retry.wait(problem, table=str(target.name))


def _exact_changes(
    address: ServerAddress,
    target: Target,
    reading: "ChunkReading",
    epoch: int,
    on_watermark: Callable[[Watermark], None] | None,
) -> Iterator[Changes]:
    """Yield the rows of a table as they were at one log position."""
    with open_exact(address, [target.name], epoch=epoch) as snapshot:
        if on_watermark is not None:
            on_watermark(snapshot.watermark)
        yield from reading.changes(snapshot.session, snapshot.watermark)


def read_rows(
    session: LoadSession,
    target: Target,
    chunk: Chunk,
    watermark: Watermark,
    *,
    instance: str,
    columns: Sequence[str] | None = None,
    where: str | None = None,
) -> Iterator[Changes]:
    """Yield the rows of a chunk over an open session, within its transaction if one is open.

    Unlike `read_chunk`, it raises an error for a lost connection.
    """
    yield from ChunkReading(target, chunk, instance, columns, where).changes(session, watermark)


class ChunkReading:
    """The progress of reading a chunk."""

    def __init__(
        self,
        target: Target,
        chunk: Chunk,
        instance: str,
        columns: Sequence[str] | None,
        where: str | None,
    ) -> None:
        self.rows = 0
        self._chunk = chunk
        self._instance = instance
        self._where = where
        self._source = target.name
        self._keys = [KeyColumn(target.column(name)) for name in chunk.key]
        self.target = _select_columns(target, columns)
        # The key is always read, so that the read can resume. Columns not selected are dropped per batch.
        shown = {column.name for column in self.target.columns}
        self._read = tuple(
            candidate
            for candidate in target.columns
            if candidate.name in shown or candidate.name in chunk.key
        )
        self._last: tuple[str, ...] | None = None

    @property
    def can_resume(self) -> bool:
        """Whether the last yielded row is known, so that no row is yielded twice."""
        return self.rows == 0 or self._last is not None

    def changes(
        self, session: LoadSession, watermark: Watermark, answers: AnswerReader | None = None
    ) -> Iterator[Changes]:
        """Yield the rows that were not yielded yet.

        Their query is run now, unless it has been sent before: then its answer is the next one of `answers`.
        """
        result = ResultSet(
            [(column.name, column.type_text, column.charset, column.nullable) for column in self._read],
            mariadb=self.target.mariadb,
            instance=self._instance,
            database=self._source.database,
            table=self._source.table,
            file=watermark.position.file,
            offset=watermark.position.offset,
            commit_version=watermark.version,
            timestamp_us=watermark.time_us,
            server_id=watermark.server_id,
            row_first=self.rows,
            key=list(self._chunk.key),
            batch_rows_max=LOAD_BATCH_ROWS_MAX,
            batch_bytes_max=LOAD_BATCH_BYTES_MAX,
        )
        if answers is None:
            batches = session.batches(self.sql(), result)
        else:
            batches = session.next_answer(answers, result)
        for batch in batches:
            rows = pyarrow.record_batch(batch)
            self.rows += rows.num_rows
            self._remember_key(result.key_last)
            if len(self._read) != len(self.target.columns):
                rows = rows.select([*self.target.column_names, *rows.schema.names[len(self._read) :]])
            yield Changes(self.target, rows, self._source, Origin.LOAD)

    def _remember_key(self, sent: list[bytes | None]) -> None:
        """Remember the last row's key if it can be written as literals."""
        literals = [
            None if value is None else key.literal_of_sent(value)
            for key, value in zip(self._keys, sent, strict=False)
        ]
        known_literals = [literal for literal in literals if literal is not None]
        self._last = tuple(known_literals) if self._keys and len(known_literals) == len(self._keys) else None

    def sql(self) -> str:
        """Return the query for the rows that were not yielded yet."""
        chunk = self._chunk
        names = [quote_name(name) for name in chunk.key]
        conditions = [chunk.condition] if chunk.condition else []
        if self._last is not None:
            conditions.append(after(names, self._last))
        if self._where:
            conditions.append(self._where)
        where = f" WHERE {' AND '.join(f'({part})' for part in conditions)}" if conditions else ""
        index = f" FORCE INDEX ({quote_name(chunk.index)})" if chunk.index else ""
        order = f" ORDER BY {', '.join(names)}" if names else ""
        selected = ", ".join(column_expression(column) for column in self._read)
        return f"SELECT {selected} FROM {self._source.sql}{index}{where}{order}"


def _check_server(session: LoadSession, watermark: Watermark) -> None:
    """Raise ServerChanged if the server is not the one whose log the watermark refers to."""
    current = session.identity.server_id
    if current != watermark.server_id:
        raise ServerChanged(
            f"{session.connection.address}: server {current} answers where server {watermark.server_id} did",
            position=str(watermark.position),
            hint="Rows of one server do not join the log of another. Run: penstock check",
        )


def column_expression(column: Column) -> str:
    """Return the SQL by which a column is read with all of its digits."""
    name = quote_name(column.name)
    return f"{name} * 1e0" if _ROUNDED.match(column.type_text) else name


def _select_columns(target: Target, columns: Sequence[str] | None) -> Target:
    if columns is None:
        return target
    unknown = set(columns) - set(target.column_names)
    if unknown:
        raise OptionInvalid(f"{target.name} has no column {', '.join(sorted(unknown))}")
    return replace(target, columns=tuple(column for column in target.columns if column.name in columns))


def _throttled(batches: Iterator[Changes], throttle: Callable[[int], None]) -> Iterator[Changes]:
    for changes in batches:
        yield changes
        throttle(len(changes))


def _throttle(rate: float | None) -> Any:
    """Return a function that sleeps after each batch to stay within `rate` rows per second."""
    started, passed = time.monotonic(), 0

    def wait(rows: int) -> None:
        nonlocal passed
        if rate is None:
            return
        passed += rows
        time.sleep(max(0.0, started + passed / rate - time.monotonic()))

    return wait
